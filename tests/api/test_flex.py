"""`foci.flex_attention` against torch's eager one, its captured tensors, and what its caches hold."""

import functools
import inspect
import random
import warnings

import pytest
import torch
from drawn import rand
from torch.nn.attention import flex_attention as theirs

import foci
from foci import execution, trace_functions
from foci.ir import eager

BACKENDS = ("reference", "blocked")


def qkv(batch=2, heads=4, kv_heads=4, sq=9, skv=12, dtype=torch.float64):
    shapes = ((batch, heads, sq, 8), (batch, kv_heads, skv, 8), (batch, kv_heads, skv, 6))
    return tuple(rand(*shape, seed=n, dtype=dtype).requires_grad_() for n, shape in enumerate(shapes))


def torch_flex(*args, **kwargs):
    """Forward only: on the CPU torch has no backward."""
    torch.compiler.reset()  # torch compiles it, and torch 2.15 fails where a function's float is another one the second time
    args = [a.detach() for a in args]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # eager flex_attention warns that it is eager
        return theirs.flex_attention(*args, **kwargs)


def formula(q, k, v, score_mod=None, dense=None, scale=None):
    """Output and logsumexp by torch's own functions, differentiable."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        function = score_mod
        for dims in ((0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None), (0, 0, None, None, None)):
            function = torch.vmap(function, in_dims=dims)
        scores = function(scores, *(torch.arange(n) for n in scores.shape))
    if dense is not None:
        scores = scores.masked_fill(~dense, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def check(score_mod=None, *, captures=(), tensors=None, backend="blocked", mask=None, **kwargs):
    """Outputs, logsumexp and gradients, captured tensors included, as torch's."""
    q, k, v = tensors or qkv()
    leaves = (q, k, v, *(c for c in captures if c.requires_grad))
    with foci.use(backend):
        out, lse = foci.flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, return_lse=True, **kwargs)
        by_torch = torch_flex(q, k, v, score_mod=score_mod, block_mask=mask, return_lse=True, **kwargs)
        want, want_lse = formula(q, k, v, score_mod, scale=kwargs.get("scale"))
        for result in (by_torch, (want, want_lse)):
            torch.testing.assert_close(out, result[0])
            torch.testing.assert_close(lse, result[1].to(lse.dtype))
        weights = rand(*out.shape, seed=9), rand(*lse.shape, seed=10)
        got = torch.autograd.grad((out, lse), leaves, weights, allow_unused=True)
    expected = torch.autograd.grad((want, want_lse), leaves, weights, allow_unused=True)
    for a, b, leaf in zip(got, expected, leaves, strict=True):
        torch.testing.assert_close(torch.zeros_like(leaf) if a is None else a, torch.zeros_like(leaf) if b is None else b)


SCORES = {
    "identity": lambda s, b, h, q, kv: s,
    "times two": lambda s, b, h, q, kv: s * 2,
    "squared": lambda s, b, h, q, kv: s * s,
    "sin": lambda s, b, h, q, kv: torch.sin(s),
    "cos": lambda s, b, h, q, kv: s.cos(),
    "tan": lambda s, b, h, q, kv: torch.tan(s * 0.1),
    "tanh": lambda s, b, h, q, kv: 20 * torch.tanh(s / 20),
    "silu": lambda s, b, h, q, kv: torch.nn.functional.silu(s),
    "gelu": lambda s, b, h, q, kv: torch.nn.functional.gelu(s),
    "sigmoid": lambda s, b, h, q, kv: torch.sigmoid(s),
    "where": lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf")),
    "where finite": lambda s, b, h, q, kv: torch.where(s > 0, s, s * 0.1),
    "floor division": lambda s, b, h, q, kv: torch.where(q // 4 == kv // 4, s, s - 1.5),
    "remainder": lambda s, b, h, q, kv: s + (q - kv) % 3,
    "relative": lambda s, b, h, q, kv: s + (q - kv),
    "boolean logic": lambda s, b, h, q, kv: torch.where((q > kv) & ~(h == 1) | (b == 0), s, s * 0.5),
    "logical": lambda s, b, h, q, kv: torch.where(torch.logical_and(q > 2, torch.logical_not(kv > 3)), s, s + 1),
    "clamp": lambda s, b, h, q, kv: s.clamp(-0.5, 0.7),
    "clamp of positions": lambda s, b, h, q, kv: s + torch.clamp(q - kv, min=-2, max=2),
    "min": lambda s, b, h, q, kv: torch.minimum(s, 0.3 + 0 * s),
    "max": lambda s, b, h, q, kv: torch.maximum(s, -s * 0.5),
    "abs": lambda s, b, h, q, kv: s.abs() - (q - kv).abs(),
    "exp": lambda s, b, h, q, kv: torch.exp(s * 0.2),
    "log": lambda s, b, h, q, kv: torch.log(s * s + 1),
    "sqrt": lambda s, b, h, q, kv: torch.sqrt(s * s + 0.5),
    "rsqrt": lambda s, b, h, q, kv: torch.rsqrt(s * s + 0.5),
    "pow": lambda s, b, h, q, kv: s**3 + (s * s + 1) ** 0.7,
    "casts": lambda s, b, h, q, kv: s + (q - kv).to(torch.float32) * 0.1 + (q > kv).to(s.dtype) + kv.float(),
    "by head": lambda s, b, h, q, kv: s * (h + 1) - b,
    "constant": lambda s, b, h, q, kv: torch.zeros_like(s) + 0 * s,
    "alibi": lambda s, b, h, q, kv: s + torch.exp2(-((h + 1) * 8.0 / 4)) * (kv - q),
}  # fmt: skip


# FLEX-01, FLEX-02, FLEX-04, FLEX-08, FLEX-11
@pytest.mark.parametrize("name", SCORES)
def test_score_functions(name):
    for backend in BACKENDS:
        check(SCORES[name], backend=backend)


def captured(*shape, seed=20, grad=True, dtype=torch.float64):
    return rand(*shape, seed=seed).to(dtype).requires_grad_(grad)


def indices(high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


HEADS, BATCH_HEAD, MATRIX, FULL = captured(4), captured(2, 4), captured(9, 12), captured(2, 4, 9, 12)
RELATIVE, NUMBER, IDS, OFFSETS = captured(9 + 12), captured(), indices(3, 2, 12), indices(4, 9)
HALF = captured(4, grad=False, dtype=torch.float16)
BYTES, FLAGS, KEYS = indices(4, 9).to(torch.uint8), indices(2, 9, 12).bool(), captured(12, 3)
CAPTURES = {
    "heads": (lambda s, b, h, q, kv: s + HEADS[h], (HEADS,)),
    "batch and head": (lambda s, b, h, q, kv: s * BATCH_HEAD[b, h], (BATCH_HEAD,)),
    "chained": (lambda s, b, h, q, kv: s * BATCH_HEAD[b][h], (BATCH_HEAD,)),
    "matrix": (lambda s, b, h, q, kv: s + MATRIX[q, kv], (MATRIX,)),
    "all four": (lambda s, b, h, q, kv: s + FULL[b, h, q, kv], (FULL,)),
    "relative": (lambda s, b, h, q, kv: s + RELATIVE[q - kv + 12], (RELATIVE,)),
    "scalar": (lambda s, b, h, q, kv: s * NUMBER, (NUMBER,)),
    "offset of offset": (lambda s, b, h, q, kv: s + HEADS[OFFSETS[q]], (HEADS,)),
    "bytes": (lambda s, b, h, q, kv: s * BYTES[q].to(torch.int32), ()),
    "flags": (lambda s, b, h, q, kv: torch.where(FLAGS[q, kv], s, s * 0.5), ()),
    "ids": (lambda s, b, h, q, kv: torch.where(IDS[b, kv] == IDS[b, q], s, s - 1), ()),
    "twice": (lambda s, b, h, q, kv: s * HEADS[h] + HEADS[(h + 1) % 4] ** 2, (HEADS,)),
    "half": (lambda s, b, h, q, kv: s + HALF[h], ()),
    "through a function": (lambda s, b, h, q, kv: s + (HEADS.exp() * 2)[h], (HEADS,)),
    "product with the score": (lambda s, b, h, q, kv: (s * MATRIX[q, kv]).sin() * HEADS[h], (MATRIX, HEADS)),
}  # fmt: skip


# FLEX-03, FLEX-04
@pytest.mark.parametrize("name", CAPTURES)
def test_captured_tensors(name):
    function, captures = CAPTURES[name]
    for backend in BACKENDS:
        check(function, captures=captures, backend=backend)


ROWS = {
    "sum": (lambda s, b, h, q, kv: s + KEYS[kv].sum(-1), lambda: KEYS.sum(-1)),
    "dot": (lambda s, b, h, q, kv: s + torch.dot(KEYS[q], KEYS[kv]), lambda: (KEYS @ KEYS.T)[:9]),
    "max": (lambda s, b, h, q, kv: s + KEYS[kv].amax(-1), lambda: KEYS.amax(-1)),
    "mean of squares": (lambda s, b, h, q, kv: s + (KEYS[kv] * KEYS[kv]).mean(), lambda: (KEYS * KEYS).mean(-1)),
    "product": (lambda s, b, h, q, kv: s + (KEYS[q] @ KEYS[kv]), lambda: (KEYS @ KEYS.T)[:9]),
    "any": (
        lambda s, b, h, q, kv: s + (IDS[b] == kv).any().to(s.dtype),
        lambda: (IDS[:, :, None] == torch.arange(12)).any(1)[:, None, None].double(),
    ),
}


# FLEX-03
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ROWS)
def test_row_reductions(name, backend):
    function, bias = ROWS[name]
    q, k, v = qkv()
    leaves = (q, k, v, KEYS)
    with foci.use(backend):
        out = foci.flex_attention(q, k, v, score_mod=function)
        grads = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
    want = (q @ k.mT / 8**0.5 + bias()).softmax(-1) @ v
    torch.testing.assert_close(out, want)
    for got, expected in zip(grads, torch.autograd.grad(want.square().sum(), leaves, allow_unused=True), strict=True):
        torch.testing.assert_close(got, expected)


# FLEX-01
@pytest.mark.parametrize("name", ["flex_attention", "create_block_mask", "create_mask", "and_masks", "or_masks"])
def test_signatures_are_torchs(name):
    ours, torchs = (inspect.signature(getattr(module, name)).parameters for module in (foci, theirs))
    for parameter in torchs:
        assert ours[parameter].kind == torchs[parameter].kind and ours[parameter].default == torchs[parameter].default, parameter


# FLEX-04
def test_gradcheck():
    q, k, v = (rand(1, 2, n, 3, seed=n).requires_grad_() for n in (3, 4, 4))
    table, bias = captured(2), captured(3, 4)

    def attend(q, k, v, table, bias):
        return foci.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: (s * table[h]).tanh() + bias[i, j] * s, return_lse=True)

    for backend in BACKENDS:
        with foci.use(backend):
            assert torch.autograd.gradcheck(attend, (q, k, v, table, bias))


# FLEX-01
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("maker", ["torch", "foci"])
@pytest.mark.parametrize("sizes", [(9, 12, 4), (260, 300, 128), (128, 128, 128)], ids=str)
def test_block_masks(sizes, maker, backend):
    sq, skv, block = sizes
    document = torch.arange(max(sq, skv)) // 5
    function = lambda b, h, q, kv: (q >= kv) & (document[q] == document[kv])
    mask = theirs.create_block_mask(function, None, None, sq, skv, device="cpu", BLOCK_SIZE=block)
    ours = mask if maker == "torch" else foci.create_block_mask(function, None, None, sq, skv, device="cpu", BLOCK_SIZE=block)
    q, k, v = qkv(sq=sq, skv=skv)
    with foci.use(backend):
        out, lse = foci.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 0.5, block_mask=ours, return_lse=True)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    want, want_lse = torch_flex(q, k, v, score_mod=lambda s, b, h, i, j: s * 0.5, block_mask=mask, return_lse=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse.to(lse.dtype))
    dense = foci.create_mask(function, None, None, sq, skv, device="cpu")
    plain, _ = formula(q, k, v, lambda s, b, h, i, j: s * 0.5, dense)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(grads, torch.autograd.grad(plain.square().sum(), (q, k, v)))


def test_blocks_decide_without_their_function():
    counts, which = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    mask = foci.BlockMask.from_kv_blocks(counts, which, BLOCK_SIZE=8)
    q, k, v = qkv(sq=16, skv=16)
    dense = torch.tensor([[0, 1], [1, 0]]).repeat_interleave(8, 0).repeat_interleave(8, 1).bool()
    for backend in BACKENDS:
        with foci.use(backend):
            out = foci.flex_attention(q, k, v, block_mask=mask)
        torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense))


# FLEX-06
@pytest.mark.parametrize("maker", [theirs.BlockMask, foci.BlockMask])
@pytest.mark.parametrize("full", [False, True])
def test_a_negative_entry_of_a_list_names_no_block(maker, full):
    """Lists padded with -1, within the counts or behind them, mean what they mean in torch's `to_dense`."""
    counts = torch.tensor([[[3, 2, 1, 0]]], dtype=torch.int32)
    which = torch.tensor([[[[0, -1, 2, -1], [-1, 1, -1, -1], [-1, 3, 0, -1], [-1, -1, -1, -1]]]], dtype=torch.int32)
    nothing = torch.zeros_like(counts), torch.zeros_like(which)
    lists = (*nothing, counts, which) if full else (counts, which, *nothing)
    mask = maker.from_kv_blocks(*lists, BLOCK_SIZE=16)
    dense = torch.zeros(4, 4, dtype=torch.bool)
    dense[0, 0] = dense[0, 2] = dense[1, 1] = True
    assert torch.equal(theirs.BlockMask.from_kv_blocks(counts, which, BLOCK_SIZE=16).to_dense()[0, 0].bool(), dense)
    ours = foci.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16)
    assert torch.equal(ours.to_dense()[0, 0].bool(), dense)
    assert ours.q_num_blocks is not None
    assert torch.equal((ours.full_q_num_blocks if full else ours.q_num_blocks)[0, 0], dense.sum(0).int())
    q, k, v = qkv(sq=64, skv=64)
    wide = dense.repeat_interleave(16, 0).repeat_interleave(16, 1)
    want = formula(q, k, v, None, wide)[0].nan_to_num(0.0)  # rows with nothing to attend to
    for backend in BACKENDS:
        with foci.use(backend):
            torch.testing.assert_close(foci.flex_attention(q, k, v, block_mask=mask), want)


# FLEX-08
def test_auxiliary_outputs():
    q, k, v = qkv()
    out, aux = foci.flex_attention(q, k, v, return_aux=theirs.AuxRequest(lse=True, max_scores=True))
    want, want_lse = formula(q, k, v)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(aux.lse, want_lse)
    torch.testing.assert_close(aux.max_scores, (q @ k.mT / 8**0.5).amax(-1), check_stride=False)
    _, none = foci.flex_attention(q, k, v, return_aux=theirs.AuxRequest())
    assert none.lse is None and none.max_scores is None


# FLEX-07
@pytest.mark.parametrize("kwargs", [{"scale": 0.3}, {"enable_gqa": True}, {"kernel_options": {"BLOCK_M": 64}}], ids=str)
def test_arguments(kwargs):
    tensors = qkv(heads=4, kv_heads=2) if "enable_gqa" in kwargs else qkv()
    for backend in BACKENDS:
        check(SCORES["by head"], tensors=tensors, backend=backend, **kwargs)


# FLEX-07
def test_key_and_value_of_one_batch_entry():
    q, (_, k, v) = qkv()[0], qkv(batch=1)
    leaves = (q, k, v)
    out, want = foci.flex_attention(*leaves, score_mod=SCORES["by head"]), formula(q, k, v, SCORES["by head"])[0]
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), leaves), torch.autograd.grad(want.sin().sum(), leaves))


# FLEX-07
def test_a_query_of_one_batch_entry():
    q, (_, k, v) = qkv(batch=1)[0], qkv()
    leaves = (q, k, v)
    out, want = (f(q.expand(2, -1, -1, -1) if f is formula else q, k, v, SCORES["by head"]) for f in (foci.flex_attention, formula))
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), leaves), torch.autograd.grad(want[0].sin().sum(), leaves))


# FLEX-06
@pytest.mark.parametrize("backend", [*BACKENDS, "cpu"])
def test_a_block_mask_serves_many_calls_and_leaves_rows_without_keys(backend):
    sq, skv, dtype = 40, 48, torch.float32 if backend == "cpu" else torch.float64
    mask = foci.create_block_mask(lambda b, h, q, kv: (q >= kv) & (q % 5 != 2) & (q < 24), None, None, sq, skv, device="cpu", BLOCK_SIZE=8)
    some = mask.to_dense().any(-1)[0, 0].repeat_interleave(8) & (torch.arange(sq) % 5 != 2)
    assert 0 < int(some.sum()) < 24
    lists = [t.clone() for t in (mask.kv_num_blocks, mask.kv_indices)]
    dense = foci.create_mask(mask.mask_mod, None, None, sq, skv, device="cpu") & some[:, None]
    for seed in (0, 5):
        tensors = (rand(2, 4, n, 8, seed=seed + i, dtype=dtype).requires_grad_() for i, n in enumerate((sq, skv, skv)))
        q, k, v = tensors
        with foci.use(backend):
            out, lse = foci.flex_attention(q, k, v, block_mask=mask, return_lse=True)
            grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert not out[:, :, ~some].any()
        assert bool((lse[:, :, ~some] == -torch.inf).all())
        assert not grads[0][:, :, ~some].any()
        rows = q[:, :, some]
        want, want_lse = formula(rows, k, v, dense=dense[0, 0, some])
        torch.testing.assert_close(out[:, :, some], want)
        torch.testing.assert_close(lse[:, :, some], want_lse)
        torch.testing.assert_close(grads, torch.autograd.grad(want.square().sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(lists, (mask.kv_num_blocks, mask.kv_indices), strict=True))


# FLEX-08
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_logsumexp_is_computed_where_it_is_asked_for(dtype):
    q, k, v = (t.detach() for t in qkv(dtype=dtype))
    with foci.observe() as log:
        foci.flex_attention(q, k, v)
        _, lse = foci.flex_attention(q, k, v, return_lse=True)
        _, aux = foci.flex_attention(q, k, v, return_aux=theirs.AuxRequest(lse=True))
    assert lse.dtype == aux.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(lse.double(), formula(q.double(), k.double(), v.double())[1], atol=0.05, rtol=0.01)
    asked = [call.problem.formula.outputs for call in log.calls]
    assert [(o.lse, o.row_max, o.column_sums, o.weights) for o in asked] == [
        (False,) * 4,
        (True, False, False, False),
        (True, False, False, False),
    ]


def test_hidden_captures():
    class Bias:
        def __init__(self, table):
            self.table = table

        def __call__(self, s, b, h, q, kv):
            return s + self.table[h]

    def explicit(table, s, b, h, q, kv):
        return s + table[h]

    module = torch.nn.Module()
    module.table = torch.nn.Parameter(HEADS.detach().clone())
    holder = {"nested": [Bias(HEADS)]}
    want = foci.flex_attention(*qkv(), score_mod=CAPTURES["heads"][0])
    for function in (
        Bias(HEADS), functools.partial(explicit, HEADS), Bias(HEADS).__call__, lambda s, b, h, q, kv: holder["nested"][0](s, b, h, q, kv),
        lambda s, b, h, q, kv: s + module.table[h],
    ):  # fmt: skip
        torch.testing.assert_close(foci.flex_attention(*qkv(), score_mod=function), want)
    out = foci.flex_attention(*qkv(), score_mod=lambda s, b, h, q, kv: s + module.table[h])
    out.sum().backward()
    assert module.table.grad is not None


# FLEX-09
@pytest.mark.parametrize("backend", BACKENDS)
def test_changed_closures_are_never_stale(backend):
    q, k, v = qkv()
    state = {"factor": 1.0, "branch": False, "table": HEADS, "window": 3}

    def score(s, b, h, i, j):
        s = s * state["factor"] + state["table"][h]
        return torch.where((i - j).abs() < state["window"], s.tanh() if state["branch"] else s, s - 4)

    changes = [
        {},
        {"factor": 2.0},
        {"branch": True},
        {"table": HEADS.detach() * 3},
        {"window": 6},
        {"factor": 0.5, "branch": False},
        {"window": 1},
    ]
    with foci.use(backend):
        for change in changes:
            state.update(change)
            torch.testing.assert_close(foci.flex_attention(q, k, v, score_mod=score), torch_flex(q, k, v, score_mod=score))
        for factor in (1, 2, 3, 0.5, -1.0):
            again = lambda s, b, h, i, j: s * factor
            torch.testing.assert_close(foci.flex_attention(q, k, v, score_mod=again), torch_flex(q, k, v, score_mod=again))
        table = captured(4, grad=False)
        fixed = lambda s, b, h, i, j: s + table[h]
        before = foci.flex_attention(q, k, v, score_mod=fixed)
        table += h_offsets()
        assert not torch.allclose(foci.flex_attention(q, k, v, score_mod=fixed), before + 1e-3)
        torch.testing.assert_close(foci.flex_attention(q, k, v, score_mod=fixed), torch_flex(q, k, v, score_mod=fixed))


def h_offsets():
    return torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)


def caches():
    return {
        "kernels": execution.cache_sizes()["kernels"],
        "variants": trace_functions._variant.cache_info().currsize,
        "canonical": trace_functions._canonical.cache_info().currsize,
        "eager": eager._compiled.cache_info().misses,
    }


# FLEX-10
def test_a_thousand_lengths():
    draw = random.Random(0)

    def call():
        sq, skv, batch, window, factor = draw.randint(1, 90), draw.randint(1, 90), draw.randint(1, 3), draw.randint(1, 50), draw.random()
        q, k = torch.randn(batch, 2, sq, 4), torch.randn(batch, 2, skv, 4)
        table = torch.randn(2)
        foci.flex_attention(
            q, k, k, score_mod=lambda s, b, h, i, j: s * factor + table[h] * (i - j), block_mask=lambda b, h, i, j: i - j < window + skv
        )

    with foci.use("blocked"):
        for _ in range(200):
            call()
        before, decisions = caches(), execution.cache_sizes()["decisions"]
        for _ in range(800):
            call()
    assert caches() == before
    # one for each combination of powers of two, few of which 200 calls may have missed
    assert execution.cache_sizes()["decisions"] <= decisions + 60


# FLEX-11
def test_dropout():
    q, k, v = qkv()
    runs = []
    for backend in BACKENDS:
        with foci.use(backend):
            torch.manual_seed(4)
            out = foci.attention(q, k, v, score=SCORES["tanh"], mask=lambda b, h, i, j: i >= j - 3, dropout_p=0.3)
            runs.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    torch.testing.assert_close(runs[0], runs[1], atol=1e-9, rtol=1e-9)


# FLEX-07
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_types(dtype):
    exact = qkv(sq=33, skv=40)
    tensors = [t.detach().to(dtype) for t in exact]
    want = torch_flex(*[t.double() for t in tensors], score_mod=SCORES["alibi"])
    with foci.use("blocked"):
        out = foci.flex_attention(*tensors, score_mod=SCORES["alibi"])
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, atol=4 * torch.finfo(dtype).eps, rtol=2 * torch.finfo(dtype).eps)


# FLEX-03
@pytest.mark.parametrize("backend", ["reference", "blocked", "cpu"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str)
def test_captured_integers(dtype, backend):
    q = torch.randn(1, 2, 6, 8)
    table = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 0, 0, 1, 1, 0]]).to(dtype)
    at = table.to(torch.int64)
    with foci.use(backend):
        out = foci.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + table[h, i] - 2 * table[h, j] * (table[h, j] == 1))
    want = (q @ q.mT / 8**0.5 + at[:, :, None] - 2 * at[:, None]).softmax(-1) @ q
    torch.testing.assert_close(out, want)


# FLEX-03
@pytest.mark.parametrize("backend", ["reference", "blocked", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_captured_floats(dtype, backend):
    q = torch.randn(1, 2, 6, 8)
    table = torch.randn(2, 6).to(dtype).requires_grad_()
    with foci.use(backend):
        out = foci.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + table[h, j])
        (grad,) = torch.autograd.grad(out.square().sum(), table)
    leaf = table.detach().float().requires_grad_()
    want = (q @ q.mT / 8**0.5 + leaf[:, None]).softmax(-1) @ q
    (want_grad,) = torch.autograd.grad(want.square().sum(), leaf)
    torch.testing.assert_close(out, want)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad.float(), want_grad.to(dtype).float(), atol=2e-2 if dtype.itemsize == 2 else 1e-4, rtol=2e-2)
