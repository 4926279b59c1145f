"""`foci.scaled_dot_product_attention` against torch's math path, forward and backward."""

import os
import warnings

import pytest
import torch
import torch.nn.functional as F
from by_formula import BACKENDS, check, gradients, math_path, use
from drawn import rand
from torch.nn.attention import bias as torch_bias

import foci
from foci.backends.cpu import build

SHAPES = [
    ((5, 8), (7, 8), (7, 6)),
    ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)),
    ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
    ((1, 2, 1, 2, 3, 4), (1, 2, 1, 2, 5, 4), (1, 2, 1, 2, 5, 4)),
    # leading dims broadcast
    ((2, 1, 5, 8), (1, 3, 7, 8), (2, 3, 7, 4)),
    ((2, 3, 5, 8), (7, 8), (3, 7, 8)),
    ((5, 8), (2, 3, 7, 8), (3, 7, 8)),
    ((3, 5, 8), (1, 7, 8), (2, 3, 7, 8)),
    ((2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 8)),
    ((2, 1, 3, 5, 8), (4, 1, 7, 8), (1, 1, 1, 7, 8)),
    ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    ((2, 4, 5, 8), (4, 2, 8), (4, 2, 8)),
    ((2, 4, 5, 8), (2, 1, 7, 8), (2, 4, 7, 8)),
]


# SDPA-01, SDPA-02
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_dims_and_broadcasting(shapes, backend):
    check(*(rand(*s, seed=n) for n, s in enumerate(shapes)), backend=backend)


# SDPA-01, SDPA-05
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 5), (5, 9), (9, 5), (1, 6), (6, 1), (300, 260)], ids=str)
def test_lengths_and_causal(lengths, is_causal, dtype):
    q, kv = lengths
    check(
        rand(1, 2, q, 8, dtype=dtype), rand(1, 2, kv, 8, dtype=dtype, seed=1), rand(1, 2, kv, 8, dtype=dtype, seed=2), is_causal=is_causal
    )


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
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (6, 3), (4, 4)], ids=str)
@pytest.mark.parametrize("dims", [3, 4, 5])
def test_grouped_heads(dims, heads, backend):
    lead = {3: (), 4: (2,), 5: (2, 2)}[dims]
    check(
        rand(*lead, heads[0], 5, 8), rand(*lead, heads[1], 7, 8, seed=1), rand(*lead, heads[1], 7, 4, seed=2), backend=backend, is_causal=True, enable_gqa=True,
    )  # fmt: skip


# SDPA-11
def test_grouped_heads_differ_for_key_and_value():
    check(rand(2, 6, 5, 8), rand(2, 3, 7, 8, seed=1), rand(2, 2, 7, 8, seed=2), enable_gqa=True)
    check(rand(2, 6, 5, 8), rand(2, 1, 7, 8, seed=1), rand(2, 6, 7, 8, seed=2), enable_gqa=True)


# SDPA-11
def test_grouped_heads_with_a_mask():
    check(rand(2, 6, 5, 8), rand(2, 3, 7, 8, seed=1), rand(2, 3, 7, 8, seed=2), rand(2, 6, 5, 7).requires_grad_(), enable_gqa=True)


# SDPA-07
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [None, 1.0, 0.3, -0.7, 1e-8, 1e4, -1e4, 0.0, 2])
def test_scale(scale, backend):
    check(rand(1, 2, 5, 8), rand(1, 2, 7, 8, seed=1), rand(1, 2, 7, 8, seed=2), backend=backend, scale=scale)


# SDPA-10
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("widths", [(1, 1), (3, 5), (7, 1), (1, 9), (33, 64), (129, 17), (512, 257)], ids=str)
def test_head_dims(widths, backend):
    check(rand(1, 2, 5, widths[0]), rand(1, 2, 7, widths[0], seed=1), rand(1, 2, 7, widths[1], seed=2), backend=backend)


def packed():
    return rand(2, 6, 3, 4, 8).unbind(2)


STRIDES = {
    "last stride not 1": lambda: tuple(rand(2, 4, 8, 6, seed=n).mT for n in range(3)),
    "packed": lambda: tuple(t.transpose(1, 2) for t in packed()),
    "every second": lambda: tuple(rand(2, 4, 12, 16, seed=n)[:, :, ::2, ::2] for n in range(3)),
    "zero strides on key and value": lambda: (
        rand(2, 4, 6, 8),
        rand(1, 1, 6, 8, seed=1).expand(2, 4, 6, 8),
        rand(2, 1, 1, 8, seed=2).expand(2, 4, 6, 8),
    ),
    "storage offsets": lambda: tuple(rand(3, 5, 7, 9, seed=n)[1:, 1:, 1:, 1:] for n in range(3)),
    "odd strides of singletons": lambda: tuple(torch.as_strided(rand(48, seed=n), (1, 1, 6, 8), (5, 3, 8, 1)) for n in range(3)),
    "[B, S, H, D]": lambda: tuple(rand(2, 6, 4, 8, seed=n).transpose(1, 2) for n in range(3)),
    "flipped": lambda: tuple(rand(2, 4, 6, 8, seed=n).flip(-2) for n in range(3)),
}


# SDPA-12
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", STRIDES)
def test_strides(name, backend):
    tensors = STRIDES[name]()
    with use(backend):
        check(*tensors, backend=backend)
        check(*tensors, backend=backend, is_causal=True)
        # the very views, not detached copies of them
        torch.testing.assert_close(foci.scaled_dot_product_attention(*tensors), math_path(*tensors))


# SDPA-12
def test_gradient_of_a_packed_projection():
    x = rand(2, 6, 96).requires_grad_()

    def attend(function):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in x.chunk(3, dim=-1))
        return torch.autograd.grad(function(q, k, v, is_causal=True).square().sum(), x)

    torch.testing.assert_close(attend(foci.scaled_dot_product_attention), attend(math_path))


# SDPA-13
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "sizes",
    [(0, 2, 3, 4, 8, 8), (2, 0, 3, 4, 8, 8), (2, 2, 0, 4, 8, 8), (2, 2, 3, 0, 8, 8), (0, 0, 0, 0, 8, 8), (2, 2, 3, 4, 8, 0)],
    ids=str,
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_sizes(sizes, is_causal, backend):
    b, h, sq, skv, d, dv = sizes
    q, k, v = (t.requires_grad_() for t in (rand(b, h, sq, d), rand(b, h, skv, d), rand(b, h, skv, dv)))
    with use(backend):
        out = foci.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        _, aux = foci.attention(q, k, v, return_aux=foci.AuxRequest(lse=True, row_max=True, column_sums=True))
    assert out.shape == (b, h, sq, dv)
    assert not out.any()
    assert aux.lse.shape == (b, h, sq) and aux.row_max.shape == (b, h, sq) and aux.column_sums.shape == (b, h, skv)
    if skv == 0:
        assert bool((aux.lse == -torch.inf).all())
    out.sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad.shape == tensor.shape
        assert not tensor.grad.any()


# SDPA-06
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_without_keys(kind, backend):
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[1] = mask[4] = False
    given = mask if kind == "bool" else torch.zeros(5, 7).double().masked_fill(~mask, -torch.inf).requires_grad_()
    q, k, v = (t.requires_grad_() for t in (rand(2, 3, 5, 8), rand(2, 3, 7, 8), rand(2, 3, 7, 8)))
    with use(backend):
        out = foci.scaled_dot_product_attention(q, k, v, given)
        _, aux = foci.attention(
            q,
            k,
            v,
            mask=given if kind == "bool" else None,
            bias=None if kind == "bool" else given,
            return_aux=foci.AuxRequest(lse=True, weights=True),
        )
        out.backward(rand(*out.shape))
    assert not out[:, :, [1, 4]].any()
    assert not aux.weights[:, :, [1, 4]].any()
    assert bool((aux.lse[:, :, [1, 4]] == -torch.inf).all())
    assert not q.grad[:, :, [1, 4]].any()
    for grad in (q.grad, k.grad, v.grad, *([given.grad] if kind == "float" else [])):
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


# SDPA-14
@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_values(backend):
    q = torch.full((1, 1, 8, 64), 133120.0, dtype=torch.bfloat16, requires_grad=True)
    v = torch.randn(1, 1, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    with use(backend):
        out = foci.scaled_dot_product_attention(q, q, v)
        out.float().sum().backward()
    assert bool(out.isfinite().all()) and bool(v.grad.isfinite().all())
    torch.testing.assert_close(out.float(), v.detach().float().mean(2, keepdim=True).expand_as(out), atol=2e-2, rtol=2e-2)


# SDPA-09, SDPA-20
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype, backend):
    exact = [rand(2, 4, n, 16, seed=n) for n in (33, 40, 40)]
    q, k, v = (t.to(dtype).requires_grad_() for t in exact)
    floor = torch.finfo(dtype).eps
    with use(backend):
        out = foci.scaled_dot_product_attention(q, k, v, is_causal=True)
        _, aux = foci.attention(q, k, v, return_aux=foci.AuxRequest(lse=True))
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert out.dtype == dtype and aux.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    plain = math_path(*inputs, is_causal=True)
    plain_grads = torch.autograd.grad(plain, inputs, torch.ones_like(plain))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    truth = math_path(*wide, is_causal=True)
    truth_grads = torch.autograd.grad(truth, wide, torch.ones_like(truth))
    half = dtype in (torch.float16, torch.bfloat16)
    factors = (1.1, 2.5, 4, 4) if half else (10, 10, 10, 10)
    for factor, got, formula, true in zip(factors, (out, *grads), (plain, *plain_grads), (truth, *truth_grads), strict=True):
        assert got.dtype == dtype
        allowed = factor * (formula.double() - true).abs().max() + 4 * floor * true.abs().max()
        assert (got.double() - true).abs().max() <= allowed


# SDPA-09
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float16, torch.float16),
        (torch.float32, torch.float32, torch.float64),
        (torch.bfloat16, torch.float16, torch.bfloat16),
    ],
    ids=str,
)
def test_mixed_dtypes_are_refused(dtypes):
    tensors = [torch.randn(1, 2, 4, 8).to(d) for d in dtypes]
    names = ".*".join(f"{n} {str(d).removeprefix('torch.')}" for n, d in zip(("query", "key", "value"), dtypes, strict=True))
    with pytest.raises(ValueError, match=f"one dtype; got {names}"):
        foci.scaled_dot_product_attention(*tensors)


# SDPA-16
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strict", [False, True])
def test_repeatable_gradients(strict, backend):
    q, k, v = (torch.randn(2, 4, 65, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(4, 1, 65, requires_grad=True)

    def run():
        with use(backend):
            out = foci.scaled_dot_product_attention(q, k, v, bias)
            return out, *torch.autograd.grad(out, (q, k, v, bias), torch.ones_like(out))

    torch.use_deterministic_algorithms(strict)
    try:
        first, second = run(), run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Autocast ----------------------------------------------------------------------------------------------------------


# SDPA-17
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", dtype=dtype):
        out, wanted = foci.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v)
        wide = foci.scaled_dot_product_attention(q.double(), k.double(), v.double())
        mixed = foci.scaled_dot_product_attention(q, k.bfloat16(), v.half())
    assert out.dtype == wanted.dtype == mixed.dtype == dtype and wide.dtype == torch.float64
    torch.testing.assert_close(out, wanted, atol=2e-2, rtol=2e-2)
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32
    with torch.autocast("cpu", enabled=False):
        assert foci.scaled_dot_product_attention(q, k, v).dtype == torch.float32


# SDPA-17
def test_autocast_with_a_mask():
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    mask = torch.randn(16, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, wanted = foci.scaled_dot_product_attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(out, wanted, atol=3e-2, rtol=3e-2)
    out.float().sum().backward()
    assert mask.grad.dtype == torch.float32


# Sizes, state ------------------------------------------------------------------------------------------------------


# SDPA-13
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_batch_entries_and_heads(backend):
    q, k, v = (torch.randn(65537, 1, 2, 2, requires_grad=True) for _ in range(3))
    with use(backend):
        out = foci.scaled_dot_product_attention(q, k, v)
        out.sum().backward()
    torch.testing.assert_close(out, math_path(q, k, v))
    q, k, v = (torch.randn(1, 65540, 1, 2) for _ in range(3))
    with use(backend):
        torch.testing.assert_close(foci.scaled_dot_product_attention(q, k, v), v)


OPTIONS = {
    "bool mask": lambda s, t: {"attn_mask": torch.ones(s[3], s[4], dtype=torch.bool)},
    "float mask": lambda s, t: {"attn_mask": t(s[0], s[1], s[3], s[4])},
    "dropout": lambda s, t: {"dropout_p": 0.4},
}


# SDPA-13
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(0, 4, 2, 3, 4), (2, 0, 0, 3, 4), (2, 4, 2, 0, 4), (2, 4, 2, 3, 0)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_empty_sizes_with_masks_and_grouped_heads(name, sizes, backend):
    b, q_heads, kv_heads, sq, skv = sizes
    learned = [torch.randn(*shape, requires_grad=True) for shape in ((b, q_heads, sq, 8), (b, kv_heads, skv, 8), (b, kv_heads, skv, 6))]

    def leaf(*shape):
        learned.append(torch.randn(*shape, requires_grad=True))
        return learned[-1]

    options = OPTIONS[name](sizes, leaf)
    with use(backend):
        out = foci.scaled_dot_product_attention(*learned[:3], **options, enable_gqa=True)
    assert out.shape == (b, q_heads, sq, 6)
    assert not out.any()
    for tensor, gradient in zip(learned, torch.autograd.grad(out.sum(), learned, materialize_grads=True)):
        assert gradient.shape == tensor.shape
        assert not gradient.any()


# SDPA-13
@pytest.mark.parametrize(
    "backend", ["reference", "blocked", "cpu", "aten", *(["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]
)
@pytest.mark.parametrize("far", ["batch", "heads", "rows"])
def test_tensors_over_more_than_two_to_the_31_elements(far, backend):
    """Of which few are used, so that the others take no memory."""
    if backend == "cpu" and build.obstacle() is not None:
        pytest.skip(str(build.obstacle()))
    sizes, most = (2, 2, 20, 16), 2**31
    strides = {"batch": (most, 320, 16, 1), "heads": (320, most, 16, 1), "rows": (320, 640, most // 19 + 16, 1)}[far]
    whole = torch.empty(most + 10000, dtype=torch.float16)
    views = [whole.as_strided(sizes, strides, 1280 * n) for n in range(3)]
    assert sum((size - 1) * stride for size, stride in zip(sizes, strides)) > most
    near = [torch.randn(sizes).half().requires_grad_() for _ in views]
    for view, tensor in zip(views, near):
        view.copy_(tensor.detach())
    found = []
    with foci.use(backend):
        for given in (near, [view.requires_grad_() for view in views]):
            out = foci.scaled_dot_product_attention(*given, is_causal=True)
            found.append((out, *torch.autograd.grad(out.float().square().sum(), given)))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_memory_layout_of_the_result():
    q = torch.randn(2, 4, 6, 8)
    rows = torch.randn(2, 6, 4, 8).transpose(1, 2)
    for backend in BACKENDS:
        with use(backend):
            assert foci.scaled_dot_product_attention(q, q, q).is_contiguous()
            assert foci.scaled_dot_product_attention(rows, q, q).transpose(1, 2).is_contiguous()


def test_inputs_are_left_alone():
    tensors = [torch.randn(1, 2, 16, 8) for _ in range(3)]
    mask = torch.randn(16, 16)
    copies = [t.clone() for t in (*tensors, mask)]
    for backend in BACKENDS:
        with use(backend):
            foci.scaled_dot_product_attention(*tensors, mask)
    assert all(torch.equal(a, b) for a, b in zip((*tensors, mask), copies, strict=True))


OPPOSITE = {
    "query": lambda f, q, k, v, m: foci.attention(f(q), k, v),
    "key": lambda f, q, k, v, m: foci.attention(q, f(k), v),
    "value": lambda f, q, k, v, m: foci.attention(q, k, f(v)),
    "bias": lambda f, q, k, v, m: foci.attention(q, k, v, bias=f(m)),
    "made in a function": lambda f, q, k, v, m: foci.attention(q, k, v, score=lambda s, b, h, i, j: s + f(m)[i, j]),
    "gradient": lambda f, q, k, v, m: torch.autograd.grad(foci.attention(q, k, v), (q, k, v), f(m[0, 0].expand(1, 2, 5, 5)))[0],
    "packed": lambda f, q, k, v, m: foci.varlen_attn(f(q[0]), k[0], v[0], torch.tensor([0, 2]), None, 2, 2),
}


@pytest.mark.parametrize("name", OPPOSITE)
def test_views_that_stand_for_their_opposite(name):
    q, k, v = (rand(1, 2, 5, 5, dtype=torch.float32, seed=n).requires_grad_() for n in range(3))
    bias = rand(5, 5, dtype=torch.float32)
    for _ in range(2):  # the second call is known
        found = OPPOSITE[name](torch._neg_view, q, k, v, bias)
        torch.testing.assert_close(found, OPPOSITE[name](torch.neg, q, k, v, bias))


# SDPA-03
def test_a_mask_of_no_dims():
    q, k, v = (rand(2, 3, 5, 8, seed=n) for n in range(3))
    check(q, k, v, rand(1)[0].requires_grad_())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    with mode():
        out = foci.scaled_dot_product_attention(q, q, q)
    assert not out.requires_grad
    torch.testing.assert_close(out, math_path(q, q, q).detach())


def test_ordinary_use_warns_of_nothing():
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        foci.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


# SDPA-20
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend):
    q, k, v = (rand(1, 2, n, 3, seed=n).requires_grad_() for n in (3, 4, 4))
    bias = rand(2, 1, 4).requires_grad_()
    with use(backend):
        assert torch.autograd.gradcheck(lambda *t: foci.scaled_dot_product_attention(*t), (q, k, v, bias))
        assert torch.autograd.gradcheck(lambda *t: foci.scaled_dot_product_attention(*t, is_causal=True), (q, k, v))


# SDPA-01
@pytest.mark.parametrize("entry", ["sdpa", "attention", "flex", "varlen", "nested", "compiled"])
def test_no_head_dim_gives_equal_weights(entry):
    """Products of no numbers are 0, as in torch: a score function and a mask see zeros, gradients of query and key are empty."""
    q, k = torch.zeros(2, 4, 5, 0, requires_grad=True), torch.zeros(2, 4, 5, 0, requires_grad=True)
    v = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    means = torch.cumsum(v, 2) / torch.arange(1, 6)[:, None]  # of the keys up to the query
    causal, offsets = foci.masks.causal(), torch.tensor([0, 5, 10])
    packed = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
    nested = [torch.nested.nested_tensor_from_jagged(t, offsets, min_seqlen=5, max_seqlen=5).transpose(1, 2) for t in packed]
    found = {
        "sdpa": lambda: foci.scaled_dot_product_attention(q, k, v, is_causal=True),
        "attention": lambda: foci.attention(q, k, v, mask=causal),
        "flex": lambda: foci.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf)),
        "varlen": lambda: foci.varlen_attn(*packed, offsets, offsets, 5, 5, mask=causal).view(2, 5, 4, 8).transpose(1, 2),
        "nested": lambda: torch.stack(foci.attention(*nested, mask=causal).unbind()),
        # one length: the head dim is what is special here
        "compiled": lambda: torch.compile(lambda *t: foci.attention(*t, mask=causal), fullgraph=True, backend="aot_eager")(q, k, v),
    }[entry]()
    torch.testing.assert_close(found, means)
    gradients = torch.autograd.grad(found.sin().sum(), (q, k, v))
    assert [tuple(g.shape) for g in gradients[:2]] == [(2, 4, 5, 0)] * 2
    torch.testing.assert_close(gradients[2], torch.autograd.grad(means.sin().sum(), v)[0])
    with torch.no_grad():  # torch 2.12 gives zeros here, other releases what stands below
        torch.testing.assert_close(foci.scaled_dot_product_attention(q, k, v), v.mean(2, keepdim=True).expand_as(v))
