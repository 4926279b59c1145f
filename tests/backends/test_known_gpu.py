"""Known calls on a GPU: the numbers of new ones, on every stream, in and around CUDA graphs, whatever hooks hand back."""

import functools
from collections import OrderedDict

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import foci
from foci import call_cache, execution, masks, scores
from foci.backends.hopper.kernel_rates import Pair, Rates

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("triton", reason="Triton is not installed")

OFFSETS = (0, 56, 56, 256)


@pytest.fixture(params=["triton", "hopper"])
def backend(request, monkeypatch):
    if request.param == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9.0")
    monkeypatch.setattr(call_cache, "_calls", type(call_cache._calls)())
    return request.param


def inputs(*, packed=False, wanted=(True, True, True), dtype=torch.bfloat16):
    shape = (256, 4, 64) if packed else (2, 256, 4, 64)
    tensors = [torch.randn(shape, device="cuda", dtype=dtype) for _ in wanted]
    return [(t if packed else t.transpose(1, 2)).requires_grad_(on) for t, on in zip(tensors, wanted, strict=True)]


def packed_call(**options):
    offsets = torch.tensor(OFFSETS, device="cuda")
    return lambda q, k, v: foci.varlen_attn(q, k, v, offsets, offsets, 200, 200, **options)


def calls():
    slopes = torch.rand(4, device="cuda")
    keep = torch.rand(2, 1, 256, 256, device="cuda") > 0.3
    return {
        "plain": foci.attention,
        "causal": lambda q, k, v: foci.attention(q, k, v, mask=masks.causal()),
        "alibi": lambda q, k, v: foci.attention(q, k, v, mask=masks.causal(), score=scores.alibi(slopes)),
        "tensor mask": lambda q, k, v: foci.attention(q, k, v, mask=keep),
        "dropout": lambda q, k, v: foci.attention(q, k, v, dropout_p=0.2),
        "packed": packed_call(),
        "packed causal": packed_call(window_size=(-1, 0)),
        "packed dropout": packed_call(dropout_p=0.2),
    }


NAMES = ("plain", "causal", "alibi", "tensor mask", "dropout", "packed", "packed causal", "packed dropout")


def passes(backend, call, tensors, cotangent, seed=0):
    torch.manual_seed(seed)
    with foci.use(backend):
        out = call(*tensors)
    wanted = [t for t in tensors if t.requires_grad]
    return [out, *(torch.autograd.grad(out, wanted, cotangent) if wanted else ())]


def same(actual, sought):
    for got, want in zip(actual, sought, strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got.float(), want.float(), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("asked", ["column_sums", "weights"])
def test_a_backward_of_out_alone_is_not_that_of_column_sums_or_weights(backend, asked):
    tensors = inputs()
    for is_used in (False, False, True, False, True):
        gradients = []
        for name in (backend, "reference"):
            with foci.use(name):
                out, aux = foci.attention(*tensors, return_aux=foci.AuxRequest(**{asked: True}))
            loss = out.float().square().sum() + (getattr(aux, asked).float().square().sum() if is_used else 0.0)
            gradients.append(torch.autograd.grad(loss, tensors))
        same(*gradients)


@pytest.mark.parametrize("wanted", [(True, True, True), (False, False, False), (False, True, True)], ids=["all", "none", "key and value"])
@pytest.mark.parametrize("name", NAMES)
def test_known_calls_give_the_numbers_of_the_formula(backend, name, wanted):
    call = calls()[name]
    for turn in range(4):
        tensors = inputs(packed="packed" in name, wanted=wanted)
        cotangent = torch.randn_like(tensors[0])
        same(passes(backend, call, tensors, cotangent, turn), passes("reference", call, tensors, cotangent, turn))


class Dispatched(TorchDispatchMode):
    """Calls go through the operators, as compiled code's do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_calls_through_the_dispatcher(backend, name):
    for turn in range(5):
        tensors, call = inputs(packed="packed" in name), calls()[name]
        if name == "packed causal":
            tokens = 256 - 16 * (turn // 2)  # what was noted of one number of tokens is known for any
            offsets = torch.tensor((0, 56, 56, tokens), device="cuda")
            tensors = [t.detach()[:tokens].requires_grad_() for t in tensors]
            call = functools.partial(lambda at, q, k, v: foci.varlen_attn(q, k, v, at, at, 200, 200, window_size=(-1, 0)), offsets)
        cotangent = torch.randn_like(tensors[0])
        with Dispatched():
            actual = passes(backend, call, tensors, cotangent, turn)
        same(actual, passes("reference", call, tensors, cotangent, turn))


def test_on_several_streams_at_once(backend):
    call = packed_call(window_size=(-1, 0))
    tensors = [inputs(packed=True) for _ in range(3)]
    cotangent = torch.randn_like(tensors[0][0])
    sought = [passes("reference", call, t, cotangent) for t in tensors]
    torch.cuda.synchronize()
    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(2))]
    for _ in range(5):
        runs = []
        for stream, operands in zip(streams, tensors, strict=True):
            with torch.cuda.stream(stream):
                runs.append(passes(backend, call, operands, cotangent))
        torch.cuda.synchronize()
        for one, want in zip(runs, sought, strict=True):
            same(one, want)


def test_captured_after_it_was_known(backend):
    q, k, v = inputs(wanted=(False, False, False))
    call = calls()["causal"]
    with foci.use(backend):
        for _ in range(3):
            call(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(q, k, v)
        for _ in range(3):
            for t in (q, k, v):
                t.normal_()
            same([call(q, k, v)], passes("reference", call, (q, k, v), None))
            graph.replay()
            same([out], passes("reference", call, (q, k, v), None))


def test_tensors_that_were_kept_on_the_host(backend):
    tensors, call = inputs(), calls()["causal"]
    cotangent = torch.randn_like(tensors[0])
    sought = passes("reference", call, tensors, cotangent)
    for hooked in (False, True, False, True):
        if hooked:
            with torch.autograd.graph.save_on_cpu():
                same(passes(backend, call, tensors, cotangent), sought)
        else:
            same(passes(backend, call, tensors, cotangent), sought)


def test_under_autocast(backend):
    tensors = inputs(wanted=(False, False, False), dtype=torch.float32)
    half = [t.bfloat16() for t in tensors]
    sought = passes("reference", foci.attention, half, None)
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            same(passes(backend, foci.attention, tensors, None), sought)
            same(passes(backend, foci.attention, half, None), sought)


MOVED = pytest.mark.parametrize("options", [{}, {"window_size": (-1, 0)}, {"window_size": (9, 9)}, {"dropout_p": 0.2}], ids=str)
SEPARATE = pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])


@SEPARATE
@MOVED
def test_other_offsets_and_tokens(backend, options, separate):
    of_other_tokens(backend, options, separate, heads=4, dim=64, sequences=5, longest=200)


@SEPARATE
@MOVED
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_other_offsets_and_tokens_by_hoppers_own_backward(options, separate, dim, monkeypatch):
    """Few tokens first, then several times as many, and fewer again: what lies in sums and lists grows and shrinks with them."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9.0")
    kernel = pytest.importorskip("foci.backends.hopper.kernel")
    for module, name in ((execution, "_plans"), (call_cache, "_calls")):
        monkeypatch.setattr(module, name, OrderedDict())
    monkeypatch.setattr(kernel, "estimate_rates", lambda problem: Rates(Pair(1, 0), Pair(1, 0), 1.0))
    ours = of_other_tokens("hopper", options, separate, heads=8, dim=dim, sequences=12, longest=500)
    assert type(ours.backward_pass).__name__ == "HopperBackward"


def of_other_tokens(backend, options, separate, *, heads, dim, sequences, longest):
    """Check calls of other tokens; return the kernel that all of them share."""
    generator = torch.Generator().manual_seed(0)
    calls = []
    for turn in range(6):
        most = longest // (4, 1, 2)[turn % 3]
        lengths = [torch.randint(0, most, (sequences,), generator=generator) for _ in range(2)]
        lengths[1][lengths[1] < 8] = 0  # many queries of one dropped key: its gradient is nothing but rounding
        lengths = lengths if separate else lengths[:1] * 2
        ends = [torch.tensor([0, *n.tolist()], device="cuda").cumsum(0) for n in lengths]
        offsets = ends if separate else ends[:1] * 2
        counts = [int(n.sum()) + 3 * (turn % 3) for n in lengths]  # some rows belong to no sequence
        counts = (counts[0], *counts[1:] * 2)
        q, k, v = (torch.randn(n, heads, dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in counts)
        cotangent = torch.randn_like(q)
        call = lambda q, k, v, offsets=offsets: foci.varlen_attn(q, k, v, *offsets, longest, longest, **options)
        calls.append((call, (q, k, v), cotangent, turn))
        same(passes(backend, *calls[-1]), passes("reference", *calls[-1]))
    chosen = [known.outline.chosen for known in call_cache._calls.values()]
    (ours,) = [each.kernel for each in chosen if each.decision.plan.backend == backend]
    for one in calls:  # and again, of offsets known from before
        same(passes(backend, *one), passes("reference", *one))
    return ours


def test_offsets_and_masks_that_change_in_place(backend):
    offsets = torch.tensor([0, 56, 256], device="cuda")
    ids = torch.arange(256, device="cuda") // 50
    for turn in range(4):
        q, k, v = inputs(packed=True)
        call = lambda q, k, v: foci.varlen_attn(q, k, v, offsets, offsets, 256, 256)
        cotangent = torch.randn_like(q)
        same(passes(backend, call, (q, k, v), cotangent), passes("reference", call, (q, k, v), cotangent))
        q, k, v = inputs()
        call = lambda q, k, v: foci.attention(q, k, v, mask=lambda b, h, i, j: ids[i] == ids[j])
        cotangent = torch.randn_like(q)
        same(passes(backend, call, (q, k, v), cotangent), passes("reference", call, (q, k, v), cotangent))
        if turn == 1:
            offsets[1] = 80
            ids += torch.arange(256, device="cuda") % 2


def test_results_are_the_same_bits_when_known(backend):
    tensors, call = inputs(), calls()["alibi"]
    cotangent = torch.randn_like(tensors[0])
    first = passes(backend, call, tensors, cotangent)
    for _ in range(3):
        for got, want in zip(passes(backend, call, tensors, cotangent), first, strict=True):
            assert torch.equal(got, want)


def test_nothing_is_kept_alive(backend):
    call = calls()["packed"]

    def memory():
        tensors = inputs(packed=True)
        passes(backend, call, tensors, torch.randn_like(tensors[0]))
        del tensors
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    usage = [memory() for _ in range(6)]
    assert usage[2] == usage[5]


def test_captured_by_inductor(backend):
    def model(q, k, v):
        return foci.attention(q * 1.5, k, v, mask=masks.causal()).cos()

    with foci.use(backend):
        # one length: a CUDA graph has one
        compiled = torch.compile(model, mode="reduce-overhead")
        for _ in range(4):
            tensors = inputs()
            cotangent = torch.randn_like(tensors[0])
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(*tensors)
            results = [out.clone(), *torch.autograd.grad(out, tensors, cotangent)]
            want = model(*tensors)
            same(results, [want, *torch.autograd.grad(want, tensors, cotangent)])


def paged(turn, *, dtype=torch.int32, max_kv=None):
    """A decode over pages in disorder, of lengths of its own in each turn."""
    generator = torch.Generator().manual_seed(turn)
    lengths = torch.randint(1, 512, (3,), generator=generator).to("cuda", dtype)
    table = torch.randperm(96, generator=generator).view(3, 32).to("cuda", dtype)
    query = torch.randn(3, 8, 1, 64, generator=generator).to("cuda", torch.bfloat16)
    pools = [torch.randn(96, 2, 16, 64, generator=generator).to("cuda", torch.bfloat16) for _ in range(2)]
    return query, *pools, table, lengths


@pytest.mark.parametrize("way", ["eager", "dispatched", "graph"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["plain", "mask by lengths"])
def test_known_paged_calls_read_their_own_pages(monkeypatch, name, dtype, way):
    monkeypatch.setattr(call_cache, "_calls", type(call_cache._calls)())
    mask = None if name == "plain" else masks.causal_lower_right() & foci.Mask(lambda b, h, q, k: k >= foci.kv_len() - 90)
    for turn in range(4):
        arguments = paged(turn, dtype=dtype)
        with foci.use("reference"):
            sought = foci.paged_attention(*arguments, mask=mask)
        with foci.use("triton"), Dispatched() if way == "dispatched" else torch.no_grad():
            if way == "graph":
                foci.paged_attention(*paged(turn, dtype=dtype), mask=mask)
                still, graph = [torch.empty_like(t).copy_(t) for t in paged(9, dtype=dtype)], torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    actual = foci.paged_attention(*still, mask=mask)
                for into, t in zip(still, arguments, strict=True):
                    into.copy_(t)
                graph.replay()
            else:
                actual = foci.paged_attention(*arguments, mask=mask)
        same([actual], [sought])
