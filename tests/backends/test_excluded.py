"""What excluded positions hold never contributes: NaN and infinities in their keys, values, queries and gradients, on any backend, forward
and in derivatives of every order. The reference is written out by hand, in float64."""

import itertools
import os

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import foci
from foci.backends import excluded
from foci.backends.cpu import build

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ("cpu", "blocked", "reference", *(("triton",) if _INTERPRETED else ()))
ON_GPU = [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ("blocked", "triton", "hopper")]
DTYPES = [torch.float32, torch.bfloat16]


def half_of(backend, device="cpu"):
    """Triton's interpreter has no products of bfloat16."""
    return torch.float16 if (backend, device) == ("triton", "cpu") else torch.bfloat16


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


def check(backend, device, keep, mask, dtype, bad, *, width=24, heads=(2, 2), places=PLACES, has_lse=True, **options):
    """Every result of attention whose excluded positions hold `bad`, one place after another, against the formula."""
    length = keep.shape[0]
    for place, (name, at) in places.items():
        if bad == torch.inf and name in ("key", "query"):
            continue  # an infinite score is -inf or NaN by the sign of its partner
        shapes = {"query": heads[0], "key": heads[1], "value": heads[1], "grad_out": heads[0]}
        named = {n: torch.randn(1, h, length, width).to(dtype) for n, h in shapes.items()}
        named[name][:, :, at, 5] = bad
        leaves = [named[n].to(device).requires_grad_() for n in ("query", "key", "value")]
        if has_lse:
            out, aux = attention(backend, leaves, mask=mask, return_aux=foci.AuxRequest(lse=True), **options)
        else:
            out = attention(backend, leaves, mask=mask, **options)
        grads = torch.autograd.grad(out, leaves, named["grad_out"].to(device))
        repeated = [named[n].repeat_interleave(heads[0] // heads[1], 1) if n != "query" else named[n] for n in ("query", "key", "value")]
        expected = list(by_hand(repeated, keep, named["grad_out"]))
        expected[3:] = [t.unflatten(1, (heads[1], -1)).sum(2) for t in expected[3:]]
        try:
            compare(
                [t.cpu() for t in (out, aux.lse if has_lse else expected[1], *grads)], expected, 5e-6 if dtype is torch.float32 else 3e-2
            )
        except AssertionError as error:
            raise AssertionError(f"{place}: {error}") from error


# SDPA-06, FLEX-05
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_excluded_positions_contribute_nothing(backend, mask, dtype, bad):
    torch.manual_seed(0)
    keep = MASKS[mask]
    dtype = dtype if dtype is torch.float32 else half_of(backend)
    check(backend, "cpu", keep, lambda b, h, q, k: keep[q, k], dtype, bad)


# SDPA-06
@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float32), ("cpu", torch.bfloat16), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_torch_kernels_leave_excluded_positions_out(device, dtype, bad):
    """The backend aten, whose one mask is the causal one."""
    torch.manual_seed(0)
    check("aten", device, MASKS["causal"], foci.masks.causal(), dtype, bad, width=32, has_lse=False)


# (mask as foci takes it, attended positions) by length: what GPU kernels tell apart
FORMS = {
    "causal": lambda n, device: (foci.masks.causal(), torch.ones(n, n, dtype=torch.bool).tril()),
    "window": lambda n, device: (foci.masks.window(20), (torch.arange(n)[:, None] - torch.arange(n) <= 20).tril()),
    "documents": lambda n, device: (
        (lambda ids: lambda b, h, q, k: ids[q] == ids[k])((torch.arange(n) // 37).to(device)),
        torch.arange(n)[:, None] // 37 == torch.arange(n) // 37,
    ),
    "padding": lambda n, device: (lambda b, h, q, k: k < 90, (torch.arange(n) < 90).expand(n, n)),
    "blocks": lambda n, device: (
        create_block_mask(lambda b, h, q, k: q >= k, 1, 1, n, n, device=device),
        torch.ones(n, n, dtype=torch.bool).tril(),
    ),
    "nothing in some rows": lambda n, device: (
        lambda b, h, q, k: (k < 90) & ((q < 40) | (q > 50)),
        (torch.arange(n) < 90) & ((torch.arange(n)[:, None] < 40) | (torch.arange(n)[:, None] > 50)),
    ),
}
SEVERAL = {**PLACES, "a value of a later tile": ("value", 290), "a key of a later tile": ("key", 290), "a late query": ("query", 230)}


# SDPA-06, FLEX-05
@pytest.mark.parametrize(("device", "backend"), ON_GPU)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_every_kernel_leaves_excluded_positions_out(device, backend, form, width, bad):
    torch.manual_seed(0)
    mask, keep = FORMS[form](300, device)
    check(backend, device, keep, mask, torch.bfloat16, bad, width=width, heads=(2, 1), places=SEVERAL)


# SDPA-06, FLEX-05
@pytest.mark.parametrize(("device", "backend"), ON_GPU)
@pytest.mark.parametrize("score", ["alibi", "softcap", "-inf"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_scores_leave_excluded_positions_out(device, backend, score, bad):
    """Scores without an effect under the formula: slopes of 0, a cap so high that nothing is capped, and -inf instead of a mask."""
    torch.manual_seed(0)
    keep = MASKS["documents"]
    bias = torch.where(keep, 0.0, -torch.inf).to(device)
    allowed = keep.to(device)
    slopes = torch.zeros(2, device=device)
    places = PLACES
    if score == "-inf":
        mask, function = None, lambda s, b, h, q, k: s + bias[q, k]
        # -inf added to a NaN score is NaN, which excludes nothing
        places = {place: at for place, at in PLACES.items() if at[0] in ("value", "grad_out")}
    else:
        mask = lambda b, h, q, k: allowed[q, k]
        function = (lambda s, b, h, q, k: s + slopes[h] * (k - q)) if score == "alibi" else foci.scores.softcap(1e4)
    check(backend, device, keep, mask, torch.bfloat16, bad, width=64, places=places, score=function)


# SDPA-06
@pytest.mark.parametrize(("device", "backend"), [("cpu", name) for name in BACKENDS] + ON_GPU)
@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_decoding_leaves_unused_slots_out(device, backend, rows, bad):
    """A cache whose later slots hold anything: split-KV kernels."""
    torch.manual_seed(0)
    length, used = (300, 130) if device == "cpu" else (4096, 1500)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    query, key, value = (torch.randn(2, h, n, 64).to(dtype) for h, n in ((8, rows), (2, length), (2, length)))
    value[:, :, used:, 3] = bad
    if bad is torch.nan:
        key[:, :, used:, 3] = bad
    with torch.no_grad():
        out = attention(backend, [t.to(device) for t in (query, key, value)], mask=lambda b, h, q, k: k < used)
    clean = [t[:, :, :used].repeat_interleave(4, 1) for t in (key, value)]
    expected = by_hand((query, *clean), torch.ones(rows, used, dtype=torch.bool), torch.zeros_like(query))[0]
    torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance(dtype), rtol=tolerance(dtype))


# JAG-01
@pytest.mark.parametrize(("device", "backend"), [("cpu", name) for name in BACKENDS] + ON_GPU)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_packed_sequences_leave_excluded_positions_out(device, backend, bad):
    torch.manual_seed(0)
    width, offsets = (24, [0, 37, 50]) if device == "cpu" else (64, [0, 300, 301, 470])
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    at = torch.tensor(offsets, dtype=torch.int32, device=device)
    for name, place in (("value", 30), ("key", 30), ("grad_out", 20), ("query", 20)):
        if bad == torch.inf and name in ("key", "query"):
            continue
        named = {n: torch.randn(offsets[-1], 2, width).to(dtype) for n in ("query", "key", "value", "grad_out")}
        named[name][place, :, 5] = bad
        leaves = [named[n].to(device).requires_grad_() for n in ("query", "key", "value")]
        longest = max(b - a for a, b in itertools.pairwise(offsets))
        if backend == "cpu" and build.obstacle() is not None:
            pytest.skip(str(build.obstacle()))
        with foci.use(backend):
            out = foci.varlen_attn(*leaves, at, at, longest, longest, window_size=(-1, 0))
        grads = torch.autograd.grad(out, leaves, named["grad_out"].to(device))
        for start, stop in itertools.pairwise(offsets):
            parts = [t[start:stop].movedim(0, 1)[None] for t in named.values()]
            keep = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
            expected = by_hand(parts[:3], keep, parts[3])
            actual = [t[start:stop].movedim(0, 1)[None].cpu() for t in (out, *grads)]
            for a, b in zip(actual, (expected[0], *expected[2:]), strict=True):
                a, finite = a.double(), b.isfinite()
                assert torch.equal(a.isfinite(), finite), name
                torch.testing.assert_close(a[finite], b[finite], atol=tolerance(dtype), rtol=tolerance(dtype))


# SDPA-03
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_learned", [False, True])
def test_a_score_of_minus_infinity_excludes_too(backend, dtype, is_learned):
    """As in a float mask, whose own gradient is 0 there."""
    torch.manual_seed(0)
    dtype = dtype if dtype is torch.float32 else half_of(backend)
    tolerance = 5e-6 if dtype is torch.float32 else 3e-2
    keep = MASKS["documents"]
    bias = torch.where(keep, 0.0, -torch.inf).to(dtype).requires_grad_(is_learned)
    named = {n: torch.randn(1, 2, LENGTH, 24).to(dtype) for n in ("query", "key", "value", "grad_out")}
    named["value"][:, :, 100, 5] = torch.nan
    named["grad_out"][:, :, 10, 3] = torch.inf
    leaves = [named[n].clone().requires_grad_() for n in ("query", "key", "value")]
    out, aux = attention(backend, leaves, bias=bias, return_aux=foci.AuxRequest(lse=True))
    grads = torch.autograd.grad(out, [*leaves, *([bias] if is_learned else [])], named["grad_out"])
    expected = by_hand([t.detach() for t in leaves], keep, named["grad_out"])
    compare((out, aux.lse, *grads[:3]), expected, tolerance)
    if is_learned:
        query, key, value, grad_out = (t.double() for t in named.values())
        weights = torch.where(keep, query @ key.mT * 24**-0.5, -torch.inf).softmax(-1)
        through = weights * (grad_out @ value.mT - (expected[0] * grad_out).sum(-1, keepdim=True))
        finite, exact = through.isfinite().all(1)[0], torch.where(keep, through.sum(1)[0], 0.0)
        assert torch.equal(grads[3][~keep], torch.zeros_like(grads[3][~keep]))
        torch.testing.assert_close(grads[3].double()[keep & finite], exact[keep & finite], atol=2 * tolerance, rtol=tolerance)
        assert not grads[3][keep & ~finite].isfinite().any()


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


# SDPA-06
@pytest.mark.parametrize(("device", "backend"), [*(("cpu", name) for name in BACKENDS), *ON_GPU])
def test_dropout_draws_the_same_where_results_are_computed_again(device, backend):
    """Rows that an excluded NaN has reached keep the weights that their first computation kept."""
    dtype = half_of(backend, device)
    query, key, value, grad_out = (torch.randn(1, 2, LENGTH, 24, device=device).to(dtype) for _ in range(4))
    used = torch.tensor(90, device=device)

    def run(bad):
        dirty_key, dirty_value = key.clone(), value.clone()
        dirty_key[:, :, 100], dirty_value[:, :, 120] = bad, bad
        leaves = [t.requires_grad_() for t in (query.clone(), dirty_key, dirty_value)]
        torch.manual_seed(3)
        out = attention(backend, leaves, mask=lambda b, h, q_idx, kv_idx: kv_idx < used, dropout_p=0.4)
        return out, *torch.autograd.grad(out, leaves, grad_out)

    for clean, dirty in zip(run(0.0), run(torch.nan), strict=True):
        torch.testing.assert_close(dirty, clean, atol=2e-2, rtol=2e-2)
