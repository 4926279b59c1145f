"""What excluded positions hold never contributes: NaN and infinities in their keys, values, queries and gradients. Three backends hold
all of it, derivatives of every order included; the others what docs/masks-and-scores.md says. The reference is written out by hand, in float64."""

import os

import pytest
import torch

import foci
from foci.backends import excluded
from foci.backends.cpu import build

BACKENDS = ("cpu", "blocked", "reference")


def attention(backend, tensors, **arguments):
    if backend == "cpu" and build.obstacle() is not None:
        pytest.skip(str(build.obstacle()))
    with foci.use(backend):
        return foci.attention(*tensors, **arguments)


def weighted(weights, attended, values):
    """Sums over attended positions alone, [.., q, k] and [.., k, d] to [.., q, d]."""
    products = weights[..., None] * values[..., None, :, :]
    return torch.where(attended[..., None], products, 0.0).sum(-2)


def by_hand(tensors, attended, grad_out):
    """out, lse and the gradients of query, key and value, where excluded positions are left out of every sum."""
    query, key, value, grad_out = (t.double() for t in (*tensors, grad_out))
    scale = query.shape[-1] ** -0.5
    scores = torch.where(attended, scale * (query @ key.mT), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(attended, (scores - lse[..., None]).exp(), 0.0)
    out = weighted(weights, attended, value)
    delta = torch.where(attended.any(-1), (out * grad_out).sum(-1), 0.0)
    grad = torch.where(attended, weights * (grad_out @ value.mT - delta[..., None]), 0.0)
    turned = attended.mT
    grads = scale * weighted(grad, attended, key), scale * weighted(grad.mT, turned, query), weighted(weights.mT, turned, grad_out)
    return out, lse, *grads


def compare(actual, expected, tolerance):
    for name, a, b in zip(("out", "lse", "query", "key", "value"), actual, expected, strict=True):
        a, b = a.double(), b.double()
        finite = b.isfinite() | (b == -torch.inf if name == "lse" else torch.zeros_like(b, dtype=torch.bool))
        assert torch.equal(a.isfinite() | (a == -torch.inf if name == "lse" else False), finite), name
        torch.testing.assert_close(a[finite], b[finite], atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


# Rows 40 to 50 attend to nothing; keys 90 on are padding, and so on: what each kind of mask excludes.
LENGTH = 150
AT = torch.arange(LENGTH)
MASKS = {
    "causal": AT[:, None] >= AT,
    "padding": (AT < 90).expand(LENGTH, LENGTH),
    "documents": AT[:, None] // 37 == AT // 37,
    "window": (AT[:, None] - AT).abs() < 20,
    "nothing in some rows": (AT < 90) & ((AT[:, None] < 40) | (AT[:, None] > 50)),
}
# what holds it: (tensor, position), each of which some mask excludes for some rows or all
PLACES = {
    "a value": ("value", 100), "a key": ("key", 100), "an early value": ("value", 3), "an early key": ("key", 3), "a query": ("query", 45),
    "a gradient": ("grad_out", 45), "a late gradient": ("grad_out", 140),
}  # fmt: skip


# SDPA-06, FLEX-05
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_excluded_positions_contribute_nothing(backend, mask, dtype, bad):
    torch.manual_seed(0)
    keep = MASKS[mask]
    for place, (name, at) in PLACES.items():
        if bad == torch.inf and name in ("key", "query"):
            continue  # an infinite score is -inf or NaN by the sign of its partner
        named = {n: torch.randn(1, 2, LENGTH, 24).to(dtype) for n in ("query", "key", "value", "grad_out")}
        named[name][:, :, at, 5] = bad
        leaves = [named[n].clone().requires_grad_() for n in ("query", "key", "value")]
        out, aux = attention(backend, leaves, mask=lambda b, h, q, k: keep[q, k], return_aux=foci.AuxRequest(lse=True))
        grads = torch.autograd.grad(out, leaves, named["grad_out"])
        expected = by_hand([t.detach() for t in leaves], keep, named["grad_out"])
        try:
            compare((out, aux.lse, *grads), expected, 5e-6 if dtype is torch.float32 else 3e-2)
        except AssertionError as error:
            raise AssertionError(f"{place}: {error}") from error


# SDPA-03
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_score_of_minus_infinity_excludes_too(backend, dtype):
    """As in a float mask."""
    torch.manual_seed(0)
    keep = MASKS["documents"]
    bias = torch.where(keep, 0.0, -torch.inf).to(dtype)
    named = {n: torch.randn(1, 2, LENGTH, 24).to(dtype) for n in ("query", "key", "value", "grad_out")}
    named["value"][:, :, 100, 5] = torch.nan
    named["grad_out"][:, :, 10, 3] = torch.inf
    leaves = [named[n].clone().requires_grad_() for n in ("query", "key", "value")]
    out, aux = attention(backend, leaves, bias=bias, return_aux=foci.AuxRequest(lse=True))
    grads = torch.autograd.grad(out, leaves, named["grad_out"])
    expected = by_hand([t.detach() for t in leaves], keep, named["grad_out"])
    compare((out, aux.lse, *grads), expected, 5e-6 if dtype is torch.float32 else 3e-2)


# Derivatives beyond the first, and forward mode, which every backend leaves to one composite of differentiable functions

SHAPES = {"one tile": (1, 2, 37, 8), "many tiles": (1, 2, 300, 8)}
KEPT = {
    "causal": lambda length: torch.ones(length, length, dtype=torch.bool).tril(),
    "padding": lambda length: (torch.arange(length) < length - 9).expand(length, length).clone(),
    "nothing in some rows": lambda length: (torch.arange(length)[:, None] % 5 > 0) & (torch.arange(length) < length - 9),
}


def by_formula(query, key, value, keep):
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~keep, -torch.inf)
    weights = torch.where(keep.any(-1, keepdim=True), scores, 0.0).softmax(-1)
    return torch.where(keep, weights, 0.0) @ value


def second_derivatives(function, tensors, directions):
    """Gradients of a sum over first gradients."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum((g * d).sum() for g, d in zip(first, directions, strict=True)), leaves)


# SDPA-06
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_derivatives_of_every_order_leave_excluded_positions_out(backend, shape, kept, bad):
    """Keys and values that nobody attends to, and queries that attend to nothing, hold NaN; the formula is given zeros there."""
    torch.manual_seed(0)
    keep = KEPT[kept](SHAPES[shape][2])
    clean = [torch.randn(SHAPES[shape]) * 0.5 for _ in range(3)]
    directions = [torch.randn(SHAPES[shape]) * 0.5 for _ in range(3)]
    unread = ~keep.any(-2)
    dirty = [t.clone() for t in clean]
    clean[2][:, :, unread] = 0
    dirty[2][:, :, unread, 3] = bad
    if bad is torch.nan:
        clean[1][:, :, unread] = clean[0][:, :, ~keep.any(-1)] = 0
        dirty[1][:, :, unread, 3] = dirty[0][:, :, ~keep.any(-1), 3] = bad
    mask = foci.Mask(lambda b, h, q, k: keep[q, k])

    def fused(*tensors):
        return attention(backend, tensors, mask=mask)

    def formula(*tensors):
        return by_formula(*tensors, keep)

    exact = [t.double() for t in clean], [t.double() for t in directions]
    expected = torch.func.jvp(formula, *map(tuple, exact))[1]
    for name, tangent in (
        ("jvp", torch.func.jvp(fused, tuple(dirty), tuple(directions))[1]),
        ("vmap", torch.func.vmap(lambda *d: torch.func.jvp(fused, tuple(dirty), d)[1])(*(d[None] for d in directions))[0]),
    ):
        torch.testing.assert_close(tangent.double(), expected, atol=5e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    actual = second_derivatives(fused, dirty, directions)
    for name, a, b in zip(("query", "key", "value"), actual, second_derivatives(formula, *exact), strict=True):
        torch.testing.assert_close(a.double(), b, atol=5e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


def test_products_of_the_formula_have_the_right_derivatives():
    """By finite differences, to the second order, forward and reverse."""
    attended = torch.rand(2, 5, 6) < 0.5
    query, key, weights = (torch.randn(2, *shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 4), (6, 4), (5, 6)))
    for function, inputs in ((excluded.scores, (query, key)), (excluded.weighted_values, (weights, key))):
        both = lambda *tensors, function=function: function(*tensors, attended)
        assert torch.autograd.gradcheck(both, inputs, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(both, inputs, check_fwd_over_rev=True)


# What every backend holds; slots of pages that no row uses are in tests/api/test_paged.py ---------

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EVERYWHERE = [
    *(("cpu", name) for name in ("reference", "aten", "blocked", "cpu", *(("triton",) if _INTERPRETED else ()))),
    *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ("reference", "aten", "blocked", "triton", "hopper")),
]
everywhere = pytest.mark.parametrize(("device", "backend"), EVERYWHERE)
HALF = {"aten": torch.bfloat16, "hopper": torch.bfloat16}  # on a GPU, where they take nothing else


def dtype_on(device, backend):
    return HALF.get(backend, torch.float32) if device == "cuda" else torch.float32


def tolerance(dtype):
    return 3e-2 if dtype is torch.bfloat16 else 2e-5


# SDPA-06
@everywhere
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_no_excluded_key_reaches_a_result(device, backend, bad):
    dtype = dtype_on(device, backend)
    query, key, value = (torch.randn(1, 2, LENGTH, 32).to(dtype) for _ in range(3))
    key[:, :, 120:, 5] = bad
    keep = MASKS["causal"]
    out = attention(backend, [t.to(device) for t in (query, key, value)], mask=foci.masks.causal())
    zeros = torch.zeros_like(query)
    expected = by_hand((query, key.nan_to_num(0, 0, 0), value), keep, zeros)[0]
    rows = slice(0, 120)
    torch.testing.assert_close(out[:, :, rows].cpu().double(), expected[:, :, rows], atol=tolerance(dtype), rtol=0)


def within(tensor, device):
    """The tensor as a view of memory that is NaN all around it."""
    around = torch.full([n + 16 for n in tensor.shape], torch.nan, dtype=tensor.dtype, device=device)
    view = around[tuple(slice(8, 8 + n) for n in tensor.shape)]
    return view.copy_(tensor)


# SDPA-06
@everywhere
@pytest.mark.parametrize("length", [1, 37, 150])
@pytest.mark.parametrize("causal", [False, True])
def test_what_lies_beyond_a_tensor_is_not_read(device, backend, length, causal):
    dtype = dtype_on(device, backend)
    tensors = [torch.randn(1, 2, length, 24 if device == "cpu" else 64).to(dtype) for _ in range(4)]
    leaves = [within(t, device).requires_grad_() for t in tensors[:3]]
    out = attention(backend, leaves, mask=foci.masks.causal() if causal else None)
    grads = torch.autograd.grad(out, leaves, within(tensors[3], device))
    keep = (torch.arange(length)[:, None] >= torch.arange(length)) | (not causal)
    expected = by_hand(tensors[:3], keep, tensors[3])
    for actual, exact in zip((out, *grads), (expected[0], *expected[2:]), strict=True):
        torch.testing.assert_close(actual.cpu().double(), exact, atol=tolerance(dtype), rtol=tolerance(dtype))


# JAG-01
@pytest.mark.parametrize(("device", "backend"), [each for each in EVERYWHERE if "aten" not in getattr(each, "values", each)])
def test_tokens_of_no_sequence_are_not_read(device, backend):
    """Tokens before the first sequence, after the last, and cache slots that a sequence does not use."""
    dtype = dtype_on(device, backend)
    width = 24 if device == "cpu" else 64
    tensors = [torch.randn(60, 2, width).to(dtype) for _ in range(4)]
    offsets, used = [3, 10, 10, 43, 50], [7, 0, 20, 1]
    for n, tensor in enumerate(tensors):
        tensor[:3] = tensor[50:] = torch.nan
        for start, stop, length in zip(offsets[:-1], offsets[1:], used, strict=True):
            if n in (1, 2):
                tensor[start + length : stop] = torch.nan
    leaves = [t.to(device).requires_grad_() for t in tensors[:3]]
    at = torch.tensor(offsets, dtype=torch.int32, device=device)
    if backend == "cpu" and build.obstacle() is not None:
        pytest.skip(str(build.obstacle()))
    with foci.use(backend):
        out = foci.varlen_attn(*leaves, at, at, 33, 33, seqused_k=torch.tensor(used, dtype=torch.int32, device=device))
    grads = torch.autograd.grad(out, leaves, tensors[3].to(device))
    expected = [torch.zeros(60, 2, width, dtype=torch.float64) for _ in range(4)]
    for start, stop, length in zip(offsets[:-1], offsets[1:], used, strict=True):
        spans = (slice(start, stop), slice(start, start + length), slice(start, start + length), slice(start, stop))
        parts = [t[span].movedim(0, 1)[None] for t, span in zip(tensors, spans, strict=True)]
        by_sequence = by_hand(parts[:3], torch.ones(stop - start, length, dtype=torch.bool), parts[3])
        for destination, span, part in zip(expected, (spans[0], spans[0], *spans[1:3]), (by_sequence[0], *by_sequence[2:]), strict=True):
            destination[span] = part[0].movedim(0, 1)
    for actual, exact in zip((out, *grads), expected, strict=True):
        torch.testing.assert_close(actual.cpu().double(), exact, atol=tolerance(dtype), rtol=tolerance(dtype))
