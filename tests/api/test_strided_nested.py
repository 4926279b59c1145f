"""NestedTensors of strided layout, torch's older kind."""

# JAG-01

import pytest
import torch
import torch.nn.functional as F

import foci

LENGTHS = (3, 1, 6)
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def parts(lengths=LENGTHS, *, heads=2, dim=8, seed=0, dtype=torch.float64):
    """[S, H, D] for each sequence."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, heads, dim, generator=generator, dtype=dtype).requires_grad_() for n in lengths]


def nested(sequences):
    return torch.nested.as_nested_tensor(sequences, layout=torch.strided).transpose(1, 2)


def formula(q, k, v, mask=None):
    """One sequence by hand: [S, H, D] each."""
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[: len(q), : len(k)], -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()
CALLS = {
    "attention": (lambda q, k, v: foci.attention(q, k, v), None),
    "causal": (lambda q, k, v: foci.attention(q, k, v, mask=foci.masks.causal()), CAUSAL),
    "sdpa": (lambda q, k, v: foci.scaled_dot_product_attention(q, k, v), None),
    "sdpa, causal": (lambda q, k, v: foci.scaled_dot_product_attention(q, k, v, is_causal=True), CAUSAL),
    "flex": (lambda q, k, v: foci.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf)), CAUSAL),
    "lse": (lambda q, k, v: foci.attention(q, k, v, return_aux=foci.AuxRequest(lse=True))[0], None),
}


@pytest.mark.parametrize(("call", "mask"), CALLS.values(), ids=CALLS)
def test_results_and_gradients_by_hand(call, mask):
    q, k, v = parts(), parts(seed=1), parts(seed=2)
    out = call(nested(q), nested(k), nested(v))
    assert out.is_nested
    assert out.layout is torch.strided
    expected = [formula(*one, mask) for one in zip(q, k, v, strict=True)]
    for actual, wanted in zip(out.unbind(), expected, strict=True):
        torch.testing.assert_close(actual, wanted.transpose(0, 1))
    actual = torch.autograd.grad(sum(part.sin().sum() for part in out.unbind()), (*q, *k, *v))
    wanted = torch.autograd.grad(sum(part.sin().sum() for part in expected), (*q, *k, *v))
    torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("is_causal", [False, True])
def test_as_torch_gives_it(is_causal):
    q, k = nested(parts()), nested(parts(seed=1))
    with torch.no_grad():
        theirs = [F.scaled_dot_product_attention(*[t[None] for t in one], is_causal=is_causal)[0]
                  for one in zip(q.unbind(), k.unbind(), k.unbind(), strict=True)]  # fmt: skip
        actual = foci.scaled_dot_product_attention(q, k, k, is_causal=is_causal)
    assert actual.dim() == 4
    for ours, wanted in zip(actual.unbind(), theirs, strict=True):
        torch.testing.assert_close(ours, wanted)


def test_other_lengths_of_keys_and_no_heads():
    q, k = parts(), parts((2, 5, 4), seed=1)
    out = foci.attention(nested(q), nested(k), nested(k))
    for actual, one, other in zip(out.unbind(), q, k, strict=True):
        torch.testing.assert_close(actual, formula(one, other, other).transpose(0, 1))
    flat = torch.nested.as_nested_tensor([p[:, 0] for p in q], layout=torch.strided)
    for actual, one in zip(foci.attention(flat, flat, flat).unbind(), q, strict=True):
        torch.testing.assert_close(actual, formula(*[one[:, :1]] * 3)[:, 0])


def test_auxiliary_outputs_are_strided_too():
    q = nested(parts())
    _, aux = foci.attention(q, q, q, return_aux=foci.AuxRequest(lse=True, row_max=True, column_sums=True))
    for tensor in (aux.lse, aux.row_max, aux.column_sums):
        assert tensor.layout is torch.strided
        assert [tuple(part.shape) for part in tensor.unbind()] == [(2, n) for n in LENGTHS]


def test_a_sink():
    q, sink = nested(parts()), torch.tensor([0.3, -1.0], dtype=torch.float64, requires_grad=True)
    out = foci.attention(q, q, q, sink=sink)
    for actual, part in zip(out.unbind(), parts(), strict=True):
        scores = torch.einsum("ihd,jhd->hij", part, part) * 8**-0.5
        weights = torch.cat([scores, sink[:, None, None].expand(2, len(part), 1)], -1).softmax(-1)[..., :-1]
        torch.testing.assert_close(actual, weights @ part.transpose(0, 1))
    (gradient,) = torch.autograd.grad(sum(part.sum() for part in out.unbind()), sink)
    assert bool(gradient.isfinite().all() and (gradient != 0).all())


def test_under_patch():
    q = nested([p.detach().float() for p in parts()])
    with foci.patch(), foci.observe() as log:
        out = F.scaled_dot_product_attention(q, q, q)
    assert len(log.calls) == 1
    for actual, part in zip(out.unbind(), q.unbind(), strict=True):
        torch.testing.assert_close(actual, F.scaled_dot_product_attention(*[part[None]] * 3)[0])


def test_explained():
    q = nested(parts())
    assert foci.explain(q, q, q).backend is not None


def test_ragged_in_another_dimension_is_refused():
    heads = torch.nested.as_nested_tensor([torch.zeros(n, 4, 8) for n in (2, 3)], layout=torch.strided)
    with pytest.raises(
        ValueError, match=r"query must be ragged in the length alone, .* got float32\[2, 4, 8\] on cpu, float32\[3, 4, 8\] on cpu"
    ):
        foci.attention(heads, heads, heads)
    deep = torch.nested.as_nested_tensor([torch.zeros(2, n, 4, 8) for n in (2, 3)], layout=torch.strided)
    with pytest.raises(ValueError, match="key must be .* got 5 dimensions, batch size 2"):
        foci.attention(nested(parts()), deep, deep)
