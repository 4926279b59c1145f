"""Calls known from before: the same launches as new ones, with nothing prepared anew."""

import contextlib
import sys
import weakref

import pytest
import torch
from kernel_stand_ins import (
    DOCUMENTS,
    OFFSETS,
    SLOPES,
    USED,
    Function,
    addressed,
    flat,
    flatten,
    is_address,
    leaves,
    packed_call,
    replace_hopper_kernels,
)

import foci
from foci import call_cache, masks, planner, scores, weak_cache
from foci.backends.gpu import captured_grad, tile_tables
from foci.backends.hopper.kernel_rates import Pair, Rates
from foci.operator import compiled_call
from foci.operator.op_schema import flatten as flatten_call
from foci.prepare import Extras, prepare
from foci.problem import Outputs, Target

KNOWN = {
    "plain": lambda q, k, v: foci.attention(q, k, v),
    "causal": lambda q, k, v: foci.attention(q, k, v, mask=masks.causal()),
    "alibi": lambda q, k, v: foci.attention(q, k, v, mask=masks.causal(), score=scores.alibi(SLOPES)),
    "document": lambda q, k, v: foci.attention(q, k, v, mask=lambda b, h, i, j, ids=DOCUMENTS: ids[i] == ids[j]),
    "tensor mask": lambda q, k, v: foci.attention(q, k, v, mask=KEEP),
    "scale": lambda q, k, v: foci.attention(q, k, v, scale=0.1),
    "dropout": lambda q, k, v: foci.attention(q, k, v, dropout_p=0.1),
    "lse": lambda q, k, v: foci.attention(q, k, v, return_aux=foci.AuxRequest(lse=True, row_max=True)),
    "sdpa": lambda q, k, v: foci.scaled_dot_product_attention(q, k, v, is_causal=True),
    "packed": lambda q, k, v: packed_call(q, k, v, OFFSETS),
    "packed causal": lambda q, k, v: packed_call(q, k, v, OFFSETS, window_size=(-1, 0)),
    "packed lengths": lambda q, k, v: packed_call(q, k, v, OFFSETS, seqused_k=USED),
    "packed dropout": lambda q, k, v: packed_call(q, k, v, OFFSETS, dropout_p=0.1),
    "packed lse": lambda q, k, v: packed_call(q, k, v, OFFSETS, return_aux=foci.AuxRequest(lse=True)),
}

KEEP = torch.rand(2, 1, 1, 256) > 0.5


def run_both_ways(call, inputs):
    """Results and gradients of a call, with every tensor that it was given."""
    out = call(*inputs)
    results = [out] if isinstance(out, torch.Tensor) else [t for part in out for t in (part if isinstance(part, tuple) else (part,))]
    results = [t for t in results if t is not None]
    wanted = [t for t in inputs if t.requires_grad]
    cotangents = [torch.zeros_like(t) for t in results if t.requires_grad]
    gradients = torch.autograd.grad([t for t in results if t.requires_grad], wanted, cotangents) if wanted else ()
    return [*inputs, *results, *cotangents, *gradients]


def lies(tensors):
    return [(t.shape, t.stride(), t.dtype) for t in tensors]


@pytest.mark.parametrize("wanted", [(True, True, True), (False, False, False), (False, True, False)], ids=["all", "none", "key"])
@pytest.mark.parametrize("name", KNOWN)
def test_a_known_call_launches_what_a_new_one_does(logs, calls, name, wanted):
    worked_out, launched = logs
    inputs = [leaves(packed="packed" in name, wanted=wanted) for _ in range(3)]
    first = run_both_ways(KNOWN[name], inputs[0])
    assert not any(is_known for _, is_known in calls)
    tables = ("classify_tiles", "list_tiles", "assign_tasks", "place_sequences")
    sought = [entry for entry in worked_out if entry[0] not in tables]
    worked_out.clear()
    for again in inputs[1:]:
        calls.clear()
        launched.clear()
        kept = run_both_ways(KNOWN[name], again)
        assert calls == [("launch_forward", True), ("launch_backward", True)][: 1 + any(wanted)]
        assert not worked_out
        assert lies(kept) == lies(first)
        assert [entry[:2] for entry in launched] == [entry[:2] for entry in sought]
        for before, after in zip(addressed(sought, first), addressed(launched, kept), strict=True):
            differing = [a for a, b in zip(flatten(before[2]), flatten(after[2]), strict=True) if a != b]
            # what the caller never sees has addresses of its own: the logsumexp, the rows' statistics, the flags of NaN, the seed
            assert all(map(is_address, differing)), (before, after)
            assert len(differing) <= 5


def test_what_a_known_call_reads_is_looked_at_again(logs, calls):
    worked_out, launched = logs
    ids, offsets = DOCUMENTS.clone(), OFFSETS.clone()
    mask = foci.Mask(lambda b, h, i, j: ids[i] == ids[j])
    ways = (
        (lambda: foci.attention(*leaves(), mask=mask).sum().backward(), ids, False),
        (lambda: packed_call(*leaves(packed=True), offsets).sum().backward(), offsets, True),
    )
    for way, read, is_known in ways:
        way()
        way()
        worked_out.clear()
        calls.clear()
        way()
        assert [was_known for _, was_known in calls] == [True, True]
        assert not worked_out
        read[1] += 1
        launched.clear()
        way()
        assert [was_known for _, was_known in calls] == [True, True, is_known, is_known]
        assert worked_out or "place_sequences" in [name for name, *_ in launched]


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_packed_calls_whose_mask_reads_tensors(logs, calls, backend, monkeypatch):
    if backend == "hopper":
        hopper_functions(monkeypatch, *logs)
    with foci.use(backend):
        for ids in (DOCUMENTS, DOCUMENTS, DOCUMENTS.clone()):
            moved_call((256, 256), {"mask": lambda b, h, i, j, ids=ids: ids[i] == ids[j]}, separate=False)
    assert logs[0]


MOVED = {
    "all": {},
    "causal": {"window_size": (-1, 0)},
    "window": {"window_size": (7, 7)},
    "heads apart": {"score": lambda s, b, h, i, j, slopes=SLOPES: s + slopes[h], "mask": lambda b, h, i, j: i - j < 3 + h},
    "lengths": {"seqused_k": True},
    "dropout": {"dropout_p": 0.1},
    "lse": {"return_aux": foci.AuxRequest(lse=True)},
}


def moved_call(tokens, options, *, separate, wanted=(True, True, True)):
    """A packed call of so many queries and keys, with offsets of its own."""
    offsets = [torch.tensor([0, n // 3, n - 5]) for n in tokens]
    offsets = offsets if separate else offsets[:1] * 2
    if "seqused_k" in options:
        options = {**options, "seqused_k": torch.tensor([3, 4])}
    q, k, v = (torch.zeros(n, 4, 64, dtype=torch.bfloat16).requires_grad_(on) for n, on in zip((tokens[0], tokens[1], tokens[1]), wanted))
    kept = run_both_ways(lambda q, k, v: foci.varlen_attn(q, k, v, *offsets, 220, 220, **options), (q, k, v))
    return [*kept, *offsets]


def hopper_functions(monkeypatch, worked_out, launched):
    """Stand-ins for the kernels of the backend hopper, for which calls are planned."""
    replace_hopper_kernels(monkeypatch, lambda function: Function(function, worked_out, launched))
    target = Target("cuda", 90, frozenset({"triton", "triton-3.6"}))
    monkeypatch.setitem(planner._targets, torch.device("cpu"), target)


@pytest.mark.parametrize("backend", ["triton", "hopper", "hopper, its own backward"])
@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("name", MOVED)
def test_other_sequences_and_tokens_take_the_known_pass(logs, calls, storages, name, separate, backend, monkeypatch):
    """What is launched for them is what a pass worked out for them alone would launch, but for addresses."""
    worked_out, launched = logs
    backend, *direction = backend.split(", ")
    if backend == "hopper":
        hopper_functions(monkeypatch, *logs)
    if direction:
        if name in ("window", "heads apart"):
            pytest.skip("a backward that makes tables is worked out for each")
        training = pytest.importorskip("foci.backends.hopper.kernel")
        monkeypatch.setattr(training, "estimate_rates", lambda problem: Rates(Pair(1, 0), Pair(1, 0), 1.0))
    first, other = ((200, 300), (333, 171)) if separate else ((200, 200), (333, 333))
    with foci.use(backend):
        moved_call(first, MOVED[name], separate=separate)
        worked_out.clear()
        launched.clear()
        calls.clear()
        moved_call(other, MOVED[name], separate=separate)
        assert calls == [("launch_forward", True), ("launch_backward", True)]
        assert not worked_out
        launches = [*launched]
        call_cache._calls.clear()
        monkeypatch.setattr(weak_cache, "_derived", weak_cache.make_store())
        launched.clear()
        moved_call(other, MOVED[name], separate=separate)
    # by name and numbers: tables are made at other times, as they are needed
    anew = [entry for entry in worked_out if entry.is_launch] + launched
    assert sorted(map(storages.masked, anew), key=str) == sorted(map(storages.masked, launches), key=str)


@pytest.mark.parametrize("tokens", [(256, 1100), (1100, 256)])
def test_programs_are_as_many_as_the_tokens_at_hand_ask_for(logs, calls, tokens, monkeypatch):
    """Persistent ones, as many as there are tasks, or as the card has room for."""
    hopper_functions(monkeypatch, *logs)
    monkeypatch.setattr(sys.modules["foci.backends.hopper.forward_pass"], "count_sms", lambda device: 20)
    programs = []
    with foci.use("hopper"):
        for count in tokens:
            logs[1].clear()
            offsets = torch.arange(7) * (count // 6)
            q, k, v = (torch.zeros(count, 4, 64, dtype=torch.bfloat16) for _ in range(3))
            foci.varlen_attn(q, k, v, offsets, offsets, 220, 220)
            programs += [grid[0] for name, grid, _ in logs[1] if name == "attention_forward"]
    assert calls == [("launch_forward", False), ("launch_forward", True)]
    assert programs == [{256: 32, 1100: 40}[count] for count in tokens]


class Storages:
    """Where tensors were asked for their addresses: numbers that lie there are addresses."""

    def __init__(self):
        self.ranges = set()

    def data_ptr(self, tensor):
        start = torch._C.TensorBase.data_ptr(tensor)
        self.ranges.add((start, start + max(tensor.nbytes, 1)))
        return start

    def masked(self, value):
        """What was launched, with a word in place of each address."""
        value = flat(value)
        if isinstance(value, tuple):
            return tuple(map(self.masked, value))
        if isinstance(value, (int, float, str)):
            lies = isinstance(value, int) and any(start <= value < end for start, end in self.ranges)
            return "address" if lies else value
        return getattr(value, "value", type(value).__name__)  # of a constant, or of a function that was generated


@pytest.fixture
def storages(monkeypatch):
    instance = Storages()
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: instance.data_ptr(tensor), raising=False)
    return instance


def test_known_gradients_are_for_tensors_that_lie_as_they_did(logs, calls):
    def backward(hooks, cotangent=None):
        with hooks:
            out = foci.attention(*leaves())
        out.backward(torch.zeros_like(out) if cotangent is None else cotangent)
        last = calls[-1]
        assert last[0] == "launch_backward"
        return last[1]

    none, copies = contextlib.nullcontext(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.contiguous())
    backward(none)
    assert backward(none)
    assert not backward(copies)
    wide = torch.zeros(2, 4, 256, 64, dtype=torch.bfloat16)
    assert not backward(none, wide)
    loose = torch.zeros(2 * 4 * 256 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 256, 4, 64).transpose(1, 2)
    assert not backward(none, loose)
    assert backward(none)


def test_a_cotangent_that_is_an_operand_is_not_taken_for_it(logs, calls):
    launched = logs[1]
    q, k, v = leaves(wanted=(True, False, False))
    for _ in range(2):
        foci.attention(q, k, v).backward(v)
    other = torch.zeros_like(v)
    for _ in range(2):
        launched.clear()
        foci.attention(q, k, v).backward(other)
    name, _, args = launched[-1]
    assert name == "attention_query_gradient"
    assert other.data_ptr() in flatten(args)


def test_known_calls_are_seen_by_those_who_watch(logs, calls):
    for _ in range(2):
        with foci.observe() as log:
            foci.attention(*leaves()).sum().backward()
        assert [(call.backend, call.problem.head_dim) for call in (*log.calls, *log.backward_calls)] == [("triton", 64)] * 2


def test_a_known_call_keeps_no_tensor_alive(logs, calls):
    for _ in range(2):
        q, k, v = leaves()
        slopes = SLOPES.clone()
        out = foci.attention(q, k, v, score=scores.alibi(slopes))
        out.backward(torch.zeros_like(out))
        refs = [weakref.ref(t) for t in (q, k, v, slopes, out, q.grad)]
        del q, k, v, slopes, out
        logs[0].clear()
        assert [ref() for ref in refs] == [None] * len(refs)


def test_offsets_without_versions_are_read_at_each_call(logs, calls):
    with torch.inference_mode():
        unseen = OFFSETS + 0
        for offsets, looked in ((unseen, 2), (OFFSETS, 0)):
            calls.clear()
            packed_call(*leaves(packed=True, wanted=(False, False, False)), offsets)
            logs[1].clear()
            for _ in range(2):
                packed_call(*leaves(packed=True, wanted=(False, False, False)), offsets)
            assert [is_known for _, is_known in calls][1:] == [True, True]
            assert [name for name, *_ in logs[1]].count("place_sequences") == looked


def oddly(values):
    """A tensor that begins 8 bytes behind a multiple of 16."""
    storage = torch.zeros(len(values) + 3, dtype=torch.int64)
    view = storage[1 + storage.data_ptr() // 8 % 2 :][: len(values)]
    return view.copy_(torch.tensor(values))


def test_what_finds_sequences_is_compiled_for_how_each_tensor_lies(logs, calls):
    """A kernel for one tensor at a multiple of 16 bytes reads it in pieces of 16."""
    worked_out, _ = logs
    query = torch.zeros(1, 4, 256, 64)
    for ends, used in ((oddly, torch.tensor), (torch.tensor, oddly), (oddly, oddly), (torch.tensor, torch.tensor)):
        for is_known in (False, True):
            worked_out.clear()
            offsets, lengths = ends([0, 56, 256]), used([50, 190])
            tile_tables.sequences_at(query, (offsets, offsets, lengths, lengths))
            assert (not worked_out) == is_known


PAGED = {
    "plain": {},
    "mask by lengths": {"mask": masks.causal_lower_right()},
    "alibi": {"score": scores.alibi(SLOPES)},
    "row max": {"return_aux": foci.AuxRequest(row_max=True)},
    "bound": {"max_kv": 100},
}


def pages(count=8, dtype=torch.int32, queries=1):
    pool = [torch.zeros(3 * count, 2, 16, 64, dtype=torch.bfloat16) for _ in range(2)]
    return [torch.zeros(3, 4, queries, 64, dtype=torch.bfloat16), *pool, torch.zeros(3, count, dtype=dtype), torch.ones(3, dtype=dtype)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("queries", [1, 64])
@pytest.mark.parametrize("name", PAGED)
def test_a_known_paged_call_launches_what_a_new_one_does(logs, calls, name, queries, dtype):
    worked_out, launched = logs
    inputs = [pages(dtype=dtype, queries=queries) for _ in range(3)]
    foci.paged_attention(*inputs[0], **PAGED[name])
    assert not any(is_known for _, is_known in calls)
    sought = worked_out.copy()
    assert [entry[0] for entry in sought if "decode" in entry[0]] == ["attention_decode"]
    worked_out.clear()
    for again in inputs[1:]:
        calls.clear()
        launched.clear()
        foci.paged_attention(*again, **PAGED[name])
        assert calls == [("launch_forward", True)]
        assert not worked_out
        assert [entry[:2] for entry in launched] == [entry[:2] for entry in sought]
        before, after = addressed(sought, inputs[0]), addressed(launched, again)
        for tensor in (f"tensor {n}" for n in range(5)):  # all that was given is read anew, of this call
            assert str(before).count(tensor) == str(after).count(tensor) > 0
        assert not [t for t in inputs[0] if str(t.data_ptr()) in str(launched)]


@pytest.mark.parametrize("needs_grad", [False, True])
def test_long_queries_of_pages_are_launched_again_too(logs, calls, needs_grad):
    """Once the pages are gathered, which is another kernel's work."""
    worked_out, launched = logs
    names = []
    for _ in range(3):
        query = torch.zeros(3, 4, 300, 64, dtype=torch.bfloat16, requires_grad=needs_grad)
        calls.clear(), worked_out.clear(), launched.clear()
        out = foci.paged_attention(query, *pages()[1:], mask=masks.causal_lower_right(), max_kv=100)
        if needs_grad:
            out.backward(torch.zeros_like(out))
        names.append(([entry[0] for entry in worked_out], [entry[0] for entry in launched], [*calls]))
    tables = {"place_sequences", "assign_tasks"}
    first, second, third = names
    assert {"attention_forward", *(["attention_query_gradient"] if needs_grad else [])} <= {*first[0]}
    assert second[0] == third[0] == []
    assert [name for name in second[1] if name not in tables] == [name for name in first[1] if name not in tables]
    assert second[1] == third[1]
    # the kernel of pages itself has no such pass
    assert second[2] == [("launch_forward", False), ("launch_forward", True), *([("launch_backward", True)] if needs_grad else [])]


def test_another_page_table_is_another_call(logs, calls):
    for operands in (pages(), pages(count=9), pages(dtype=torch.int64), [*pages()[:4], torch.ones(6, dtype=torch.int32)[::2]]):
        calls.clear()
        foci.paged_attention(*operands, max_kv=100)
        assert calls == [("launch_forward", False)]
    calls.clear()
    apart = [*pages()[:4], torch.ones(6, dtype=torch.int32)[::2]]
    foci.paged_attention(*apart, max_kv=100)
    assert calls == [("launch_forward", False)]  # lengths with gaps are laid out first


@pytest.mark.parametrize("place", [3, 4], ids=["table", "lengths"])
@pytest.mark.parametrize("fixed", [False, True])
def test_a_place_of_compiled_code_sees_how_pages_are_aligned(logs, calls, place, fixed):
    call, found = compiled_call.Forward(fixed=fixed), []
    for is_odd in (True, False, False, True):
        tensors = pages()
        if is_odd:
            storage = torch.zeros(tensors[place].numel() + 4, dtype=torch.int32)
            tensors[place] = (
                storage[1 + -storage.data_ptr() // 4 % 4 :][: tensors[place].numel()].view(tensors[place].shape).copy_(tensors[place])
            )
        query, key, value, table, lengths = tensors
        extras = Extras(Outputs(), page_table=table, kv_lengths=lengths, max_kv=128, exact_lengths=False)
        calls.clear()
        call(*flatten_call(*prepare((query, key, value), None, None, extras), None))
        found.append(calls[-1])
    assert found == [("launch_forward", is_known) for is_known in (False, False, True, False)]


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False)], ids=["all", "query"])
def test_gradients_of_a_learned_bias_are_launched_at_once(logs, calls, wanted, monkeypatch):
    worked_out, launched = logs
    function = Function(captured_grad.attention_bias_gradient, worked_out, launched)
    monkeypatch.setattr(captured_grad, "attention_bias_gradient", function)
    biases = [torch.zeros(1, 4, 256, 256, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    inputs = [leaves(wanted=wanted) for _ in biases]

    def both_ways(q, k, v, bias):
        out = foci.attention(q, k, v, score=lambda s, b, h, i, j: s + bias[0, h, i, j])
        return [out, *torch.autograd.grad(out, [t for t in (q, k, v, bias) if t.requires_grad], torch.zeros_like(out))]

    first = both_ways(*inputs[0], biases[0])
    sought = [entry[0] for entry in worked_out]
    assert "attention_bias_gradient" in sought
    worked_out.clear()
    for operands, bias in zip(inputs[1:], biases[1:], strict=True):
        launched.clear()
        kept = both_ways(*operands, bias)
        assert not worked_out
        assert [entry[0] for entry in launched] == sought
        assert lies(kept) == lies(first)
        arguments = next(str(entry) for entry in launched if entry[0] == "attention_bias_gradient")
        for t in (*operands, bias, kept[0], kept[1], kept[-1]):  # read and written where they are in this call
            assert str(t.data_ptr()) in arguments
        assert str(biases[0].data_ptr()) not in arguments
