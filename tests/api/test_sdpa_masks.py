"""`foci.scaled_dot_product_attention` with masks and biases, against torch's math path, forward and backward."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from by_formula import BACKENDS, check, gradients, math_path, use
from drawn import rand
from torch.nn.attention import bias as torch_bias

import foci


def bool_mask(*shape):
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[..., :1] = True
    return mask


MASK_SHAPES = [
    (7,),
    (1,),
    (5, 7),
    (5, 1),
    (1, 7),
    (3, 5, 7),
    (3, 1, 7),
    (1, 5, 7),
    (2, 3, 5, 7),
    (2, 1, 1, 7),
    (1, 3, 5, 7),
    (2, 1, 5, 1),
    (1, 1, 1, 1),
]


# SDPA-03, SDPA-04
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["bool", "float", "grad"])
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks(shape, kind, backend):
    mask = bool_mask(*shape) if kind == "bool" else rand(*shape, seed=5)
    if kind == "grad":
        mask.requires_grad_()
    check(rand(2, 3, 5, 8), rand(2, 3, 7, 8, seed=1), rand(2, 3, 7, 8, seed=2), mask, backend=backend)


# SDPA-03, SDPA-04
@pytest.mark.parametrize("kind", ["bool", "float", "grad"])
@pytest.mark.parametrize(
    "lead, shape",
    [((), (5, 7)), ((), (7,)), ((3,), (3, 5, 7)), ((3,), (1, 5, 7)), ((3,), (5, 7)), ((2, 2, 3), (2, 2, 3, 5, 7)), ((2, 2, 3), (2, 1, 1, 5, 7)),
     ((2, 2, 3), (2, 3, 5, 7)), ((2, 2, 3), (3, 1, 7)), ((2, 4, 3), (4, 1, 5, 7))],
    ids=str,
)  # fmt: skip
def test_masks_of_other_ranks(lead, shape, kind):
    mask = bool_mask(*shape) if kind == "bool" else rand(*shape, seed=5).requires_grad_(kind == "grad")
    check(rand(*lead, 5, 8), rand(*lead, 7, 8, seed=1), rand(*lead, 7, 8, seed=2), mask)


# SDPA-03
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: rand(7).expand(2, 3, 5, 7),
        lambda: rand(2, 1, 1, 7).expand(2, 3, 5, 7),
        lambda: bool_mask(1, 1, 5, 7).expand(2, 3, 5, 7),
        lambda: rand(2, 3, 7, 5).mT,
        lambda: rand(2, 3, 10, 14)[:, :, ::2, ::2],
        lambda: rand(5, 7, 3, 2).permute(3, 2, 0, 1),
        lambda: bool_mask(7, 5).T,
        lambda: rand(2, 3, 5, 20)[..., 3:10],
    ],
)
def test_strided_and_expanded_masks(make, backend):
    check(rand(2, 3, 5, 8), rand(2, 3, 7, 8, seed=1), rand(2, 3, 7, 8, seed=2), make(), backend=backend)


# SDPA-03
@pytest.mark.parametrize("length", [1, 3, 8, 15, 17, 131])
def test_mask_of_any_length(length):
    check(rand(2, 2, 9, 8), rand(2, 2, length, 8, seed=1), rand(2, 2, length, 8, seed=2), rand(9, length).requires_grad_())


# SDPA-04
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(7,), (5, 7), (3, 1, 7), (2, 3, 5, 7), (2, 1, 1, 1)], ids=str)
def test_only_the_mask_requires_grad(shape, backend):
    q, k, v = rand(2, 3, 5, 8), rand(2, 3, 7, 8, seed=1), rand(2, 3, 7, 8, seed=2)
    mask = rand(*shape, seed=5).requires_grad_()
    with use(backend):
        _, (grad,) = gradients(lambda m: foci.scaled_dot_product_attention(q, k, v, m), [mask])
        _, (again,) = gradients(lambda m: foci.scaled_dot_product_attention(q, k, v, m), [mask])
    _, (wanted,) = gradients(lambda m: math_path(q, k, v, m), [mask])
    torch.testing.assert_close(grad, wanted, atol=1e-10, rtol=1e-10)
    assert torch.equal(grad, again)


# SDPA-04
def test_expanded_mask_that_requires_grad():
    q, k, v = rand(2, 3, 5, 8), rand(2, 3, 7, 8, seed=1), rand(2, 3, 7, 8, seed=2)
    bias = rand(3, 1, 7).requires_grad_()
    _, grads = gradients(lambda b: foci.scaled_dot_product_attention(q, k, v, b.expand(2, 3, 5, 7)), [bias])
    _, wanted = gradients(lambda b: math_path(q, k, v, b.expand(2, 3, 5, 7)), [bias])
    torch.testing.assert_close(grads, wanted)


LENGTHS = [(4, 4), (4, 9), (9, 4)]


# SDPA-05
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("corner", ["upper_left", "lower_right"])
def test_causal_values(corner, lengths, backend):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of NaN; here such rows are zero
        theirs = getattr(torch_bias, f"causal_{corner}")(*lengths)
    ours = getattr(foci, f"causal_{corner}")(*lengths)
    q, k, v = rand(2, 3, lengths[0], 8), rand(2, 3, lengths[1], 8, seed=1), rand(2, 3, lengths[1], 8, seed=2)
    dense = torch.ones(lengths, dtype=torch.bool).tril(0 if corner == "upper_left" else lengths[1] - lengths[0])
    assert torch.equal(ours.to_tensor(), dense)
    for mask in (ours, theirs):
        check(q, k, v, mask, backend=backend, expected=lambda *args: math_path(*args[:3], attn_mask=dense))
        with use(backend):
            torch.testing.assert_close(foci.attention(q, k, v, mask=mask), math_path(q, k, v, dense))
    torch.testing.assert_close(
        foci.scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0], ours), math_path(q[0, 0], k[0, 0], v[0, 0], dense)
    )


# SDPA-05
def test_causal_values_never_become_matrices():
    q = torch.randn(1, 1, 4, 8)
    k = torch.randn(1, 1, 4096, 8)
    for mask in (foci.causal_lower_right(4, 4096), torch_bias.causal_lower_right(4, 4096)):
        with foci.observe() as log:
            foci.scaled_dot_product_attention(q, k, k, mask)
        assert log.calls[0].problem.variant.captures == ()
    assert foci.causal_upper_left(2**30, 2**30).seq_len_q == 2**30


# SDPA-11
def test_grouped_heads_with_a_mask():
    check(rand(2, 6, 5, 8), rand(2, 3, 7, 8, seed=1), rand(2, 3, 7, 8, seed=2), rand(2, 6, 5, 7).requires_grad_(), enable_gqa=True)


# SDPA-06
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_without_keys(kind, backend):
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[1] = mask[4] = False
    attn_mask = mask if kind == "bool" else torch.zeros(5, 7).double().masked_fill(~mask, -torch.inf).requires_grad_()
    q, k, v = (t.requires_grad_() for t in (rand(2, 3, 5, 8), rand(2, 3, 7, 8), rand(2, 3, 7, 8)))
    with use(backend):
        out = foci.scaled_dot_product_attention(q, k, v, attn_mask)
        _, aux = foci.attention(
            q,
            k,
            v,
            mask=attn_mask if kind == "bool" else None,
            bias=None if kind == "bool" else attn_mask,
            return_aux=foci.AuxRequest(lse=True, weights=True),
        )
        out.backward(rand(*out.shape))
    assert not out[:, :, [1, 4]].any()
    assert not aux.weights[:, :, [1, 4]].any()
    assert bool((aux.lse[:, :, [1, 4]] == -torch.inf).all())
    assert not q.grad[:, :, [1, 4]].any()
    for grad in (q.grad, k.grad, v.grad, *([attn_mask.grad] if kind == "float" else [])):
        assert bool(grad.isfinite().all())
    keep = mask.any(1)
    torch.testing.assert_close(out[:, :, keep], math_path(q, k, v, mask)[:, :, keep])


# SDPA-06
@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_masked(backend):
    q, k, v = (t.requires_grad_() for t in (rand(2, 3, 5, 8), rand(2, 3, 7, 8), rand(2, 3, 7, 8)))
    with use(backend):
        out = foci.scaled_dot_product_attention(q, k, v, torch.zeros(5, 7, dtype=torch.bool))
        out.backward(rand(*out.shape))
    assert not out.any() and not q.grad.any() and not k.grad.any() and not v.grad.any()


# SDPA-17
def test_autocast_with_a_mask():
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    mask = torch.randn(16, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, wanted = foci.scaled_dot_product_attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(out, wanted, atol=3e-2, rtol=3e-2)
    out.float().sum().backward()
    assert mask.grad.dtype == torch.float32


# SDPA-03
def test_a_mask_of_no_dims():
    q, k, v = (rand(2, 3, 5, 8, seed=n) for n in range(3))
    check(q, k, v, rand(1)[0].requires_grad_())
