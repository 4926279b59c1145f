"""torch.compile and torch.export."""

import functools
import io

import drawn
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

import foci
from compiled import check_variety, compare, several

rand = functools.partial(drawn.rand, dtype=torch.float32)
EVERYTHING = foci.AuxRequest(lse=True, row_max=True, column_sums=True, weights=True)
KEYS = torch.arange(20) // 5
DOCUMENT = foci.masks.document(KEYS)
BLOCKS = foci.create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 20, device="cpu", BLOCK_SIZE=8)
FULL_BLOCKS = foci.create_block_mask(lambda b, h, i, j: j >= 0, None, None, 16, 20, device="cpu", BLOCK_SIZE=8)
TORCH_BLOCKS = torch_create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 20, device="cpu", BLOCK_SIZE=8)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with foci.use("blocked", "reference"):
        yield


def qkv(sq=16, skv=20, batch=2):
    return tuple(rand(batch, 4, n, 8, seed=s).requires_grad_() for s, n in enumerate((sq, skv, skv)))


def same(got, want, **tolerance):
    torch.testing.assert_close(got, want, **(tolerance or {"atol": 2e-5, "rtol": 2e-5}))


SLOPES = rand(4).requires_grad_()
BIAS = rand(4, 16, 20).requires_grad_()
SINK = rand(4).requires_grad_()


def with_use(q, k, v):
    with foci.use("reference"):
        return foci.attention(q, k, v)


def two_functions(q, k, v):
    first = foci.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 2)
    return first + foci.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s.tanh(), block_mask=BLOCKS)


CALLS = {
    "plain": (lambda q, k, v: foci.attention(q, k, v), ()),
    "sdpa causal": (lambda q, k, v: foci.scaled_dot_product_attention(q, k, v, is_causal=True), ()),
    "sdpa of three dims": (lambda q, k, v: foci.scaled_dot_product_attention(q[0], k[0], v[0]), ()),
    "sdpa float mask": (lambda q, k, v, m: foci.scaled_dot_product_attention(q, k, v, m), (BIAS,)),
    "sdpa bool mask": (lambda q, k, v, m: foci.scaled_dot_product_attention(q, k, v, m), (BIAS.detach() > 0,)),
    "causal value": (lambda q, k, v: foci.scaled_dot_product_attention(q, k, v, foci.causal_lower_right(q.shape[2], k.shape[2])), ()),
    "composed": (
        lambda q, k, v: foci.attention(q, k, v, mask=foci.masks.causal() & foci.masks.window(5), score=foci.scores.softcap(3.0)),
        (),
    ),
    "alibi": (lambda q, k, v: foci.attention(q, k, v, score=foci.scores.alibi(4)), ()),
    "bias": (lambda q, k, v, t: foci.attention(q, k, v, bias=t), (BIAS,)),
    "captured argument": (lambda q, k, v, s: foci.flex_attention(q, k, v, score_mod=lambda x, b, h, i, j: x + s[h] * (i - j)), (SLOPES,)),
    "captured global": (lambda q, k, v: foci.flex_attention(q, k, v, score_mod=lambda x, b, h, i, j: x + SLOPES[h] * (i - j)), ()),
    "captured int": (
        lambda q, k, v, n: foci.flex_attention(q, k, v, score_mod=lambda x, b, h, i, j: torch.where(i - j < n, x, -torch.inf)),
        (7,),
    ),
    "captured integers of 8 bits": (
        lambda q, k, v, t: foci.attention(q, k, v, mask=lambda b, h, i, j: t[i] - t[j] * 3 + 300 < 90),
        ((torch.arange(20) * 41).to(torch.uint8),),
    ),
    "captured length": (lambda q, k, v: foci.attention(q, k, v, score=lambda x, b, h, i, j: x * (i / q.shape[2])), ()),
    "lengths of the language": (lambda q, k, v: foci.attention(q, k, v, mask=lambda b, h, i, j: j < foci.kv_len() - 3), ()),
    "block mask": (lambda q, k, v: foci.flex_attention(q, k, v, block_mask=BLOCKS), ()),
    "block mask argument": (lambda q, k, v, m: foci.flex_attention(q, k, v, block_mask=m), (BLOCKS,)),
    "torch block mask": (lambda q, k, v, m: foci.flex_attention(q, k, v, block_mask=m), (TORCH_BLOCKS,)),
    "block mask and a score of -inf": (
        lambda q, k, v: foci.flex_attention(
            q, k, v, score_mod=lambda x, b, h, i, j: torch.where(i >= j, x, -torch.inf), block_mask=FULL_BLOCKS
        ),
        (),
    ),
    "two functions": (two_functions, ()),
    "lse": (lambda q, k, v: foci.flex_attention(q, k, v, return_lse=True), ()),
    "auxiliary outputs": (lambda q, k, v: tuple(foci.attention(q, k, v, return_aux=EVERYTHING)[1]), ()),
    "sink": (lambda q, k, v, s: foci.attention(q, k, v, sink=s), (SINK,)),
    "grouped heads": (lambda q, k, v: foci.attention(q, k[:, :2], v[:, :2]), ()),
    "use": (with_use, ()),
    "scale": (lambda q, k, v, s: foci.attention(q, k, v, scale=s), (0.3,)),
    "mask made outside": (lambda q, k, v: foci.attention(q, k, v, mask=DOCUMENT), ()),
    "mask argument": (lambda q, k, v, m: foci.attention(q, k, v, mask=m), (DOCUMENT,)),
    "row reduction": (lambda q, k, v, t: foci.attention(q, k, v, score=lambda x, b, h, i, j: x + t[h].sum(-1)[i]), (BIAS,)),
}


# One value is as good as none: the second makes a symbol of it, the third shows what became of that.
NUMBERS = {"captured int": [(7,), (4,), (9,)], "scale": [(0.3,), (0.5,), (1.5,)]}


# SDPA-21, FLEX-01, FLEX-09, FLEX-13
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CALLS)
def test_one_graph(name, backend):
    function, more = CALLS[name]
    arguments = NUMBERS.get(name) or [more] * 3
    calls = [(*qkv(batch=batch), *other) for batch, other in zip((2, 3, 5), arguments, strict=True)]  # masks fix the other lengths
    compare(function, calls, fullgraph=True, backend=backend)


# SDPA-21
def test_inductor():
    def layer(x, w, slopes):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (x @ w).chunk(3, -1))
        out = foci.attention(q, k, v, mask=foci.masks.causal(), score=lambda s, b, h, i, j: s + slopes[h] * (i - j))
        return out.transpose(1, 2).flatten(2).relu() * 2

    weight = rand(32, 96) / 32**0.5  # scores near 1: of larger ones the softmax makes much of the rounding of x @ w
    calls = [(rand(2, n, 32).requires_grad_(), weight.requires_grad_(), SLOPES) for n in (16, 24, 31)]
    compare(layer, calls, fullgraph=True, backend="inductor")


def recompiled(function, batches, *, backend="aot_eager", **options):
    """How often calls after the first compiled anew."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, backend=counter, **options)
    first = 0
    check_variety(batches)
    for args in batches:
        same(compiled(*args), function(*args))
        first = first or counter.frame_count
    return counter.frame_count - first


DYNAMIC = {
    "plain": lambda q, k, v: foci.attention(q, k, v),
    "causal": lambda q, k, v: foci.scaled_dot_product_attention(q, k, v, is_causal=True),
    "function": lambda q, k, v: foci.attention(q, k, v, score=lambda s, b, h, i, j: s + SLOPES[h] * (i - j), mask=foci.masks.window(3)),
    "length": lambda q, k, v: foci.attention(q, k, v, score=lambda s, b, h, i, j: s * (i / q.shape[2])),
    "offset": lambda q, k, v: foci.attention(q, k, v, mask=lambda b, h, i, j: j <= i + (k.shape[2] - q.shape[2])),
}


# FLEX-13
@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_lengths_compile_once(name):
    lengths = [(16, 20), (17, 31), (5, 64), (40, 40), (130, 257)]
    assert recompiled(DYNAMIC[name], [qkv(*n) for n in lengths], dynamic=True) == 0


# FLEX-13
def test_dynamic_lengths_backward_and_inductor():
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(DYNAMIC["function"], fullgraph=True, backend=counter, dynamic=True)
    frames = []
    for q_len, kv_len in several((16, 20), (33, 50), (40, 70)):
        args = qkv(q_len, kv_len)
        got, want = (torch.autograd.grad(f(*args).square().sum(), args) for f in (compiled, DYNAMIC["function"]))
        same(got, want, atol=2e-4, rtol=2e-4)
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1


# FLEX-09
def test_changed_closures_are_seen():
    def attend(q, k, v, window, factor):
        return foci.attention(q, k, v, mask=lambda b, h, i, j: i - j < window, score=lambda s, b, h, i, j: s * factor)

    args = qkv()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for window, factor in several((3, 1.0), (5, 2.0), (9, -0.5), (3, 0.25)):
        same(compiled(*args, window, factor), attend(*args, window, factor))


NUMBERED = {
    "window": lambda n: {"mask": foci.masks.window(n)},
    "window, lower right": lambda n: {"mask": foci.masks.window(n, 1, align="lower_right")},
    "dilated window": lambda n: {"mask": foci.masks.dilated_window(n, n + 1, dilation=2)},
    "global window": lambda n: {"mask": foci.masks.global_window(n, 2, n)},
    "block diffusion": lambda n: {"mask": foci.masks.block_diffusion(8, block=n)},
    "prefix": lambda n: {"mask": foci.masks.prefix_lm(n)},
    "softcap": lambda n: {"score": foci.scores.softcap(n / 4)},
    "temperature": lambda n: {"score": foci.scores.temperature(n / 4)},
    "composed": lambda n: {"mask": foci.masks.window(n) | foci.masks.prefix_lm(n), "score": foci.scores.softcap(n / 4)},
}


# FLEX-09, FLEX-13
@pytest.mark.parametrize("name", NUMBERED)
def test_numbers_of_named_masks_and_scores_may_change(name):
    def attend(q, k, v, number):
        return foci.attention(q, k, v, **NUMBERED[name](number))

    q, k, v = qkv(16, 16)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for number in several(2, 3, 5, 7):
        same(compiled(q, k, v, number), attend(q, k, v, number))


# FLEX-06, FLEX-13
@pytest.mark.parametrize("create", [foci.create_block_mask, torch_create_block_mask])
def test_block_masks_of_other_sizes(create):
    compiled = torch.compile(lambda q, k, v, m: foci.flex_attention(q, k, v, block_mask=m), fullgraph=True, backend="aot_eager")
    for q_len, kv_len, block in several((16, 20, 8), (24, 40, 8), (33, 21, 16), (40, 40, (8, 32))):
        q, k, v = qkv(q_len, kv_len)
        mask = create(lambda b, h, i, j: i >= j, None, None, q_len, kv_len, device="cpu", BLOCK_SIZE=block)
        same(compiled(q, k, v, mask), foci.attention(q, k, v, mask=foci.masks.causal()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dropout(backend):
    function = lambda q, k, v: foci.attention(q, k, v, dropout_p=0.5)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for q_len, kv_len in several((16, 20), (21, 33), (24, 40)):
        q, k, v = qkv(q_len, kv_len)
        torch.manual_seed(0)
        got = compiled(q, k, v)
        again = compiled(q, k, v)
        torch.manual_seed(0)
        want = function(q, k, v)
        same(got, want)
        assert not torch.equal(got, again)
        same(torch.autograd.grad(got.sum(), (q, k, v)), torch.autograd.grad(want.sum(), (q, k, v)))


# SDPA-15
def test_switches():
    q, k, v = qkv()

    def ran(function):
        with foci.observe() as log:
            function(q, k, v)
        return [call.backend for call in log.calls]

    def inside(q, k, v):
        with foci.use("reference"):
            first = foci.attention(q, k, v)
        with sdpa_kernel(SDPBackend.MATH):
            second = foci.scaled_dot_product_attention(q, k, v, scale=0.5)
        with foci.use("blocked"):
            return foci.attention(first, second, second)

    # one length: it asks which backends run
    compiled = torch.compile(inside, fullgraph=True, backend="aot_eager")
    assert ran(compiled) == ["reference", "reference", "blocked"]
    outside = torch.compile(lambda q, k, v: foci.attention(q, k, v), fullgraph=True, backend="aot_eager")
    for name in ("blocked", "reference", "blocked"):
        with foci.use(name):
            assert ran(outside) == [name]


def nested_call(x, offsets):
    q = torch.nested.nested_tensor_from_jagged(x, offsets=offsets).transpose(1, 2)
    return foci.attention(q, q, q, mask=foci.masks.causal(), score=foci.scores.alibi(4)).transpose(1, 2).values()


# JAG-01
def test_jagged():
    totals = [(0, 3, 3, 12), (0, 5, 9, 14), (0, 1, 8, 17)]
    calls = [(rand(ends[-1], 4, 8).requires_grad_(), torch.tensor(ends)) for ends in totals]
    compare(nested_call, calls, fullgraph=True, backend="aot_eager")
    compare(
        lambda x, cu, most: foci.varlen_attn(x, x, x, cu, cu, most, most, window_size=(-1, 0)),
        [(x, cu, most) for (x, cu), most in zip(calls, (9, 10, 11), strict=True)], fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    x, offsets = calls[0]
    q = torch.nested.nested_tensor_from_jagged(x, offsets=offsets).transpose(1, 2)
    compiled = torch.compile(lambda q: foci.scaled_dot_product_attention(q, q, q, is_causal=True), fullgraph=True, backend="aot_eager")
    out, want = compiled(q), foci.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert out.is_nested and out.shape[2] == q.shape[2]
    same(out.values(), want.values())
    same(torch.autograd.grad(out.values().square().sum(), x), torch.autograd.grad(want.values().square().sum(), x))


# SDPA-17
def test_autocast():
    compiled = torch.compile(lambda q, k, v: foci.scaled_dot_product_attention(q, k, v), fullgraph=True, backend="aot_eager")
    for q_len, kv_len in several((16, 20), (21, 33), (24, 40)):
        q, k, v = qkv(q_len, kv_len)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, want = compiled(q, k, v), foci.scaled_dot_product_attention(q, k, v)
        assert out.dtype == torch.bfloat16
        same(out, want, atol=1e-2, rtol=1e-2)


def test_an_inverted_mask():
    mask = foci.masks.window(3)
    # Dynamo has no word for ~ of an object (torch 2.13): its method is traced.
    compiled = torch.compile(
        lambda q, k, v: foci.attention(q, k, v, mask=mask.__invert__() | foci.masks.causal()), fullgraph=True, backend="aot_eager"
    )
    for q_len, kv_len in several((16, 20), (21, 33), (24, 40)):
        q, k, v = qkv(q_len, kv_len)
        same(compiled(q, k, v), foci.attention(q, k, v, mask=~mask | foci.masks.causal()))


class Learned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(rand(4))

    def forward(self, q, k, v):
        return foci.attention(q, k, v, mask=foci.masks.causal(), score=lambda s, b, h, i, j: s + self.slopes[h] * (i - j))


class Plain(torch.nn.Module):
    def forward(self, q, k, v):
        return foci.scaled_dot_product_attention(q, k, v, is_causal=True)


# SDPA-21
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("module", [Learned, Plain])
def test_export(module, strict):
    model, args = module(), tuple(t.detach() for t in qkv())
    q_len, kv_len = torch.export.Dim("q_len"), torch.export.Dim("kv_len")
    program = torch.export.export(model, args, dynamic_shapes={"q": {2: q_len}, "k": {2: kv_len}, "v": {2: kv_len}}, strict=strict)
    assert any("foci.attention" in str(node.target) for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    for lengths in ((16, 20), (9, 33), (21, 40)):
        args = tuple(t.detach() for t in qkv(*lengths))
        same(program.module()(*args), model(*args))
        same(loaded.module()(*args), model(*args))
