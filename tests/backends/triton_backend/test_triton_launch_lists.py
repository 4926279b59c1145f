"""Launch lists: built once, run at every call, with the addresses of the call at hand."""

import gc
import sys
import types
import weakref
from dataclasses import replace

import pytest
import torch
from kernel_stand_ins import (
    SLOPES,
    VARIANTS,
    addressed,
    build_attention,
    flatten,
    is_address,
    operands_of,
    run_backward,
    run_forward,
)
from torch.utils._python_dispatch import TorchDispatchMode

import foci
from foci import masks, scores
from foci.backends.gpu import allocations, launch_builder, launch_cache, launch_list, tile_tables
from foci.backends.gpu.compiling import compile_in_parallel
from foci.backends.gpu.symbolic_tokens import Count
from foci.compat import cuda
from foci.compat import triton as compat
from foci.problem import Layout, Outputs, Program
from foci.trace_functions import bind


@pytest.mark.parametrize("name", VARIANTS)
def test_a_second_call_launches_what_the_first_worked_out(logs, name):
    worked_out, launched = logs
    score, mask, options = VARIANTS[name]
    bound = bind(score, mask, torch.device("cpu"))
    layout = Layout.JAGGED if name == "jagged" else Layout.DENSE
    program = Program()
    calls = [operands_of(bound, **options, program=program) for _ in range(2)]
    attention = build_attention(calls[0], bound.variant, layout=layout, outputs=Outputs(lse=True, row_max=True), dropout=name == "dropout")

    def both(operands):
        results = run_forward(attention, operands)
        assert results.row_max is not None
        if name == "decode":
            return [operands.query, operands.key, operands.value, results.out, results.lse, results.row_max]
        dout = torch.zeros_like(results.out)
        gradients = run_backward(attention, operands, results, dout)
        tensors = [operands.query, operands.key, operands.value, results.out, results.lse, results.row_max, dout]
        return [*tensors, gradients.query, gradients.key, gradients.value]

    kept = [both(calls[0])]  # kept, so that no address is used twice
    count = len(worked_out)
    launched.clear()
    kept.append(both(calls[1]))
    assert len(worked_out) == count
    tables = ("classify_tiles", "list_tiles", "assign_tasks", "place_sequences")
    first = [entry for entry in worked_out if entry[0] not in tables]
    assert not any(entry[0] in tables for entry in launched)
    assert [entry[:2] for entry in launched] == [entry[:2] for entry in first]
    temporaries = (
        "attention_decode",
        "combine_splits",
        "attention_query_gradient",
        "attention_key_gradient",
        "mend_splits",
        "mend_gradients",
    )
    for before, after in zip(addressed(first, kept[0]), addressed(launched, kept[1]), strict=True):
        differing = [a for a, b in zip(flatten(before[2]), flatten(after[2]), strict=True) if a != b]
        assert before[0] in temporaries or not differing, (before, after)
        assert all(map(is_address, differing))  # of temporary tensors
        assert len(differing) <= 4


class Unread(TorchDispatchMode):
    """No number of a tensor is read."""

    READING = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select, torch.ops.aten.equal)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket not in self.READING, function
        return function(*args, **(kwargs or {}))


# JAG-08
@pytest.mark.parametrize("name", ["plain", "causal", "causal lower right", "alibi", "document", "dropout"])
def test_no_pass_over_sequences_reads_a_number_of_the_device(logs, name, monkeypatch):
    score, mask, options = VARIANTS.get(name, (None, masks.causal_lower_right(), {}))
    bound = bind(score, mask, torch.device("cpu"))
    for offsets in ((0, 56, 256), (0, 200, 200)):
        operands = operands_of(bound, **options, offsets=torch.tensor(offsets))
        attention = build_attention(
            operands, bound.variant, layout=Layout.JAGGED, outputs=Outputs(lse=True, row_max=True), dropout=name == "dropout"
        )
        with monkeypatch.context() as patched, Unread():
            for reader in ("tolist", "numpy", "cpu", "__array__"):  # which on the CPU no operation is asked for
                patched.setattr(torch.Tensor, reader, None)
            for _ in range(2):  # the second is launched as it was noted
                results = run_forward(attention, operands)
                run_backward(attention, operands, results, torch.zeros_like(results.out))
    assert {"attention_forward", "attention_query_gradient", "attention_key_gradient"} <= {entry[0] for entry in logs[1]}


def test_captured_tensors_are_those_of_the_call(logs):
    launched = logs[1]
    tables = [torch.rand(4) for _ in range(2)]
    bounds = [bind(scores.alibi(table), masks.causal(), torch.device("cpu")) for table in tables]
    program = Program()
    calls = [operands_of(bound, program=program) for bound in bounds]
    attention = build_attention(calls[0], bounds[0].variant)
    for operands in calls:
        launched.clear()
        run_forward(attention, operands)
    (name, _, args), *rest = launched
    assert name == "attention_forward"
    assert [entry[0] for entry in rest] == ["mend_rows"]
    assert tables[1].data_ptr() in flatten(args)


@pytest.mark.parametrize("change", ["version", "memory", "new tensor", "inference", "offsets", "program"])
def test_what_changes_the_launch_is_worked_out_anew(logs, change):
    worked_out, _ = logs
    ids, bound_of = (
        (torch.arange(256) // 50),
        lambda ids, n: bind(None, foci.Mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q - k < n)), torch.device("cpu")),
    )
    offsets = torch.tensor([0, 56, 256])
    options = {"offsets": offsets} if change == "offsets" else {}
    bound = bound_of(ids, 9)
    operands = operands_of(bound, **options)
    attention = build_attention(operands, bound.variant, layout=Layout.JAGGED if options else Layout.DENSE)
    run_forward(attention, operands)
    before = len(worked_out)
    if change == "version":
        ids.add_(1)
    elif change == "memory":
        ids.data = ids + 1
    elif change == "new tensor":
        operands = operands_of(bound_of(ids.clone(), 9), program=operands.program)
    elif change == "inference":
        with torch.inference_mode():
            ids = torch.arange(256)
        operands = operands_of(bound_of(ids, 9), program=operands.program)
    elif change == "offsets":
        offsets[1] = 80
    elif change == "program":
        operands = operands_of(bound)
    run_forward(attention, operands)
    assert [entry[0] for entry in worked_out[before:][-2:]] == ["attention_forward", "mend_rows"]


def test_someone_who_watches_launches_sees_them_all(logs):
    from triton import knobs

    bound = bind(None, None, torch.device("cpu"))
    operands = operands_of(bound)
    attention = build_attention(operands, bound.variant)
    run_forward(attention, operands)

    def watch(metadata):
        pass

    knobs.runtime.launch_enter_hook.add(watch)
    try:
        run_forward(attention, operands)
    finally:
        knobs.runtime.launch_enter_hook.remove(watch)
    assert [entry.is_launch for entry in logs[0]] == [False, True]
    assert len(logs[1]) == 1
    run_forward(attention, operands)
    assert len(logs[1]) == 2


def test_maps_are_made_once_for_so_many_tokens(monkeypatch):
    encodings = []

    def encode(address, dtype, item_bytes, shape, strides, tile, swizzle):
        encodings.append((address, shape))
        return len(encodings)

    monkeypatch.setattr(launch_list, "encode_tiles", encode)
    maps = launch_list.Maps(compat.MapFacts(9, 2, (16, 64), 3), (Count(8, "t[0]"), 64), (64, 1))

    def of(address, tokens):
        bound = maps.bound((tokens, tokens))
        return bound.known.get(address) or bound(address)

    x, y = 4096, 8192
    assert [of(x, 8), of(y, 8), of(x, 5), of(x, 8), of(y, 8), of(x, 5), of(y, 5)] == [1, 2, 3, 1, 2, 3, 4]
    assert encodings == [(x, (8, 64)), (y, (8, 64)), (x, (5, 64)), (y, (5, 64))]
    for tokens in range(100, 100 + 2 * launch_list._SHAPES):
        of(x, tokens)
    assert len(maps._of_others) == launch_list._SHAPES
    assert of(x, 8) == len(encodings)  # forgotten, and made again


@pytest.mark.parametrize("packed", [False, True])
def test_what_only_the_pass_reads_is_one_allocation(packed):
    calls, count = [], Count(6, "t[0]")
    cpu = torch.device("cpu")
    shapes = [(1, 2, count, 4), (1, 2, count), (count // 2 + 1, 3), (0, 5), (7,)]
    strides = [(count * 8, 4, 8, 1), (count * 2, count, 1), (3, 1), (5, 1), (2,)]
    news = [allocations.New(size, stride, torch.float32, cpu) for size, stride in zip(shapes, strides)]

    class Noted:
        maps, between = (), False

        def bound(self, tokens, kept, maps):
            return lambda addresses: calls.append((*addresses,))

    x = torch.zeros(3)
    pass_ = launch_list.Template((True,), [Noted()], news, (), []).as_built((6, 6)).returning(2, packed=packed)
    for tokens in (6, 100):
        bound = pass_.template.bound(None, (tokens, tokens), ())
        outputs = bound.run((x,))
        first = (tokens, 2, 4) if packed else (1, 2, tokens, 4)
        assert [tuple(t.shape) for t in outputs] == [first, (2, tokens) if packed else (1, 2, tokens)]
        addresses = calls[-1]
        assert addresses[:3] == (x.data_ptr(), *[t.data_ptr() for t in outputs])
        lengths = [4 * 3 * (tokens // 2 + 1), 0, 4 * 13]
        assert all(after - before >= length for before, after, length in zip(addresses[3:], addresses[4:], lengths))
        assert all((place - addresses[3]) % 512 == 0 for place in addresses[3:])
        allocate, offsets = bound.sized.scratch
        assert allocate().numel() >= offsets[-1] + lengths[-1]


def test_a_recording_keeps_no_tensor_of_the_call_alive(logs):
    bound = bind(scores.alibi(SLOPES.clone()), masks.causal(), torch.device("cpu"))
    operands = operands_of(bound)
    attention = build_attention(operands, bound.variant)
    results = run_forward(attention, operands)
    run_backward(attention, operands, results, torch.zeros_like(results.out))
    refs = [weakref.ref(t) for t in (operands.query, operands.key, operands.value, results.out, results.lse, *operands.captures)]
    assert len(operands.program.launches) == 2
    logs[0].clear()
    del operands, results, bound
    assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.parametrize("makes", [True, False], ids=["made", "not made"])
@pytest.mark.parametrize("name", ["causal", "document", "jagged"])
def test_no_tensor_stays_where_graphs_are_made(logs, name, makes, monkeypatch):
    if makes:
        monkeypatch.setattr(tile_tables, "is_for_graphs", lambda tensor: True)
        for module in (launch_cache, tile_tables):
            monkeypatch.setattr(module, "free_stream", lambda tensor: None)
    score, mask, options = VARIANTS[name]
    bound = bind(score, mask, torch.device("cpu"))
    operands = operands_of(bound, **options)
    attention = build_attention(operands, bound.variant, layout=Layout.JAGGED if name == "jagged" else Layout.DENSE)

    def alive():
        gc.collect()
        return {id(t): t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)}

    before = alive()
    results = run_forward(attention, operands)
    run_backward(attention, operands, results, torch.zeros_like(results.out))
    del results
    logs[0].clear()  # it keeps what was launched with
    assert bool(alive().keys() - before.keys()) != makes


@pytest.mark.parametrize("stream, of_graphs", [(0, False), (5, False), (7, True)])
def test_the_stream_of_inductors_graphs(monkeypatch, stream, of_graphs):
    managers = [types.SimpleNamespace(stream=types.SimpleNamespace(cuda_stream=7))]
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", types.ModuleType("cudagraph_trees"))
    monkeypatch.setattr(cuda, "_find_manager", lambda: lambda device, create_if_none_exists: managers[-1])
    assert cuda.is_inductor_stream(0, stream) == of_graphs
    managers.append(None)
    assert not cuda.is_inductor_stream(0, stream)


def test_gradients_of_parts_of_one_tensor_are_parts_of_one(logs):
    """In the pass that is worked out, in the same again, and where it is bound to other sequences, of as many keys or fewer."""
    bound, attentions, programs = bind(None, None, torch.device("cpu")), set(), {True: Program(), False: Program()}
    for queries, keys in ((256, 256), (256, 256), (200, 200), (200, 120), (120, 200)):
        offsets = [torch.tensor([0, 56, count]) for count in (queries, keys)]
        parts = [t[None].transpose(1, 2) for t in torch.zeros(256, 12, 64, dtype=torch.bfloat16).split((4, 4, 4), 1)]
        q, k, v = (t[:, :, :count] for t, count in zip(parts, (queries, keys, keys)))
        known = operands_of(bound, program=programs[queries == keys])
        operands = replace(known, query=q, key=k, value=v, cu_q=offsets[0], cu_kv=offsets[1], max_q=200, max_kv=200)
        attention = attentions.pop() if attentions else build_attention(operands, bound.variant, layout=Layout.JAGGED)
        attentions.add(attention)
        results = run_forward(attention, operands)
        grads = run_backward(attention, operands, results, torch.zeros_like(results.out))
        gradients = (grads.query, grads.key, grads.value)
        start = gradients[0].data_ptr()
        assert [t.data_ptr() - start for t in gradients] == [0, 2 * 256, 2 * 512]
        assert [t.stride()[1:] for t in gradients] == [(64, 768, 1)] * 3
        assert [t.shape for t in gradients] == [q.shape, k.shape, v.shape]
        assert gradients[0].untyped_storage().nbytes() == max(queries * 1536 - 1024, keys * 1536)


@pytest.mark.parametrize("case", ["apart", "gap"])
def test_gradients_of_tensors_with_rows_of_their_own_have_such(logs, case):
    bound, offsets = bind(None, None, torch.device("cpu")), torch.tensor([0, 56, 256])
    operands = operands_of(bound, offsets=offsets)
    if case == "gap":
        parts = torch.zeros(256, 13, 64, dtype=torch.bfloat16).split((4, 4, 4, 1), 1)[:3]
        query, key, value = (t[None].transpose(1, 2) for t in parts)
        operands = replace(operands, query=query, key=key, value=value)
    attention = build_attention(operands, bound.variant, layout=Layout.JAGGED)
    results = run_forward(attention, operands)
    grads = run_backward(attention, operands, results, torch.zeros_like(results.out))
    for gradient in (grads.query, grads.key, grads.value):
        assert gradient.stride()[1:] == (64, 256, 1)
        assert gradient._base is None


def test_the_first_call_launches_as_every_later_one(logs):
    worked_out, launched = logs
    bound = bind(None, masks.causal(), torch.device("cpu"))
    operands = operands_of(bound)
    attention = build_attention(operands, bound.variant)
    run_forward(attention, operands)
    assert launched
    assert not any(entry.is_launch for entry in worked_out)  # Triton only compiles


@pytest.mark.parametrize("unknown", [0, 1, 2])
def test_a_pass_with_a_tensor_of_nobody_is_launched_in_order(logs, unknown):
    worked_out, launched = logs
    query = torch.zeros(1, 1, 16, 16)
    builder = launch_builder.LaunchBuilder((query,), 0)
    with compile_in_parallel():
        for n in range(3):
            builder.add(tile_tables.place_sequences, (n + 1,), *[torch.zeros(4) if n == unknown else query] * 4, 0, 256)
        builder.finish((16, 16))
    assert builder.built is None
    assert [entry[1][0] for entry in launched] == [1, 2, 3]
    assert not any(entry.is_launch for entry in worked_out)


def test_a_pass_that_turns_out_not_to_be_repeatable_is_launched_in_order(logs):
    worked_out, launched = logs
    query = torch.zeros(1, 1, 16, 16)
    builder = launch_builder.LaunchBuilder((query,), 0)
    builder.add(tile_tables.place_sequences, (1,), *[query] * 4, 0, 256)
    builder.forget()
    builder.add(tile_tables.place_sequences, (2,), *[query] * 4, 0, 256)
    builder.finish((16, 16))
    assert builder.built is None
    assert [entry[1][0] for entry in launched] == [1, 2]
    assert not any(entry.is_launch for entry in worked_out)
