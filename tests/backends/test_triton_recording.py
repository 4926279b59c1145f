"""Passes that are noted once and launched again: the same launches, with the addresses of the call at hand."""

import contextlib
import gc
import os
import sys
import types
import weakref
from collections import OrderedDict

import pytest
import torch

import foci
from foci import execution, masks, planner, recall, scores
from foci.backends.contract import Plan
from foci.binding import bind
from foci.problem import Cotangents, Formula, Layout, Operands, Outputs, Problem, Target

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from foci.backends.triton import kernel, known, recording, sparsity

MODULES = {
    kernel: (
        "attention_forward",
        "prepare_rows",
        "attention_query_gradient",
        "attention_key_gradient",
        "attention_decode",
        "combine_splits",
    ),
    sparsity: ("classify_tiles", "list_tiles", "assign_tasks", "place_sequences"),
}


class Compiled:
    """Stands in for a compiled kernel: notes what its launcher is given."""

    packed_metadata = (4, 1, 0)
    function = 7

    def __init__(self, name, launched, count):
        self.name, self.launched, self.count = name, launched, count

    def run(self, x, y, z, stream, function, metadata, *rest):
        assert rest[:3] == (None, None, None)
        assert len(rest[3:]) == self.count
        self.launched.append((self.name, (x, y, z), flat(rest[3:])))


class Function:
    """Stands in for a kernel: notes what Triton is given, and compiles to a `Compiled`."""

    def __init__(self, function, worked_out, launched):
        name = function.__name__
        self.signature = function.signature
        self.name, self.worked_out, self.compiled = name, worked_out, Compiled(name, launched, len(self.signature.parameters))

    def __getitem__(self, grid):
        def run(*args, **options):
            assert_plain((grid, args))
            bound = self.signature.bind(*args)
            bound.apply_defaults()
            self.worked_out.append((self.name, (*grid, 1, 1)[:3], flat(tuple(bound.arguments.values()))))
            return self.compiled

        return run


def assert_plain(value):
    """Triton knows int, and nothing that is one besides."""
    assert not isinstance(value, int) or type(value) in (int, bool)
    for part in value if isinstance(value, (tuple, list)) else value.shape if isinstance(value, TensorDescriptor) else ():
        assert_plain(part)


def flat(value):
    if isinstance(value, (tuple, list)):
        return tuple(map(flat, value))
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, TensorDescriptor):
        return (value.base.data_ptr(), *value.shape, *value.strides, *value.block_shape)
    return value


@pytest.fixture
def logs(monkeypatch):
    worked_out, launched = [], []
    for module, names in MODULES.items():
        for name in names:
            monkeypatch.setattr(module, name, Function(getattr(module, name), worked_out, launched))
    monkeypatch.setattr(sparsity, "_WHOLE", sparsity.Sequences())
    monkeypatch.setattr(sparsity, "_sets", type(sparsity._sets)())
    monkeypatch.setattr(sparsity, "_ways", recording.Kept(256))
    monkeypatch.setattr(known, "_templates", recording.Kept(1024))
    return worked_out, launched


def made(operands, variant, **formula):
    q, k = operands.query, operands.key
    grads = tuple(False for _ in operands.captures)
    asked = Problem(
        Formula(variant, **formula), q.dtype, q.shape[3], q.shape[3], q.shape[1], k.shape[1], q.shape[0], q.shape[2], k.shape[2],
        True, True, True, grads,
    )  # fmt: skip
    return kernel.TritonKernel(Plan("triton", asked, Target("cuda", 90, frozenset({"triton"}))))


def operands_of(bound, *, lengths=(256, 256), heads=4, offsets=None, step=8, seed=None):
    q, k, v = (
        torch.zeros(1 if offsets is not None else 2, n, heads, 64, dtype=torch.bfloat16).transpose(1, 2) for n in (*lengths, lengths[1])
    )
    jagged = {} if offsets is None else {"cu_q": offsets, "cu_kv": offsets, "max_q": 200, "max_kv": 200}
    return Operands(q, k, v, bound.captures, bound.ints, bound.floats, 0.125, 0.1 if seed is not None else 0.0, seed, **jagged)


def addressed(log, tensors):
    """Launches with the addresses of tensors replaced by their numbers: two passes then compare equal."""
    numbers = {t.data_ptr(): f"tensor {n}" for n, t in enumerate(tensors)}

    def replaced(value):
        return tuple(map(replaced, value)) if isinstance(value, tuple) else numbers.get(value, value)

    return [replaced(entry) for entry in log]


SLOPES = torch.rand(4)
DOCUMENTS = torch.arange(256) // 50
VARIANTS = {
    "plain": (None, None, {}),
    "causal": (None, masks.causal(), {}),
    "alibi": (scores.alibi(SLOPES), masks.causal(), {}),
    "document": (None, foci.Mask(lambda b, h, q, k, ids=DOCUMENTS: ids[q] == ids[k]), {}),
    "decode": (None, None, {"lengths": (1, 4096)}),
    "jagged": (None, masks.causal(), {"offsets": torch.tensor([0, 56, 256])}),
    "dropout": (None, None, {"seed": torch.tensor([1])}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_second_call_launches_what_the_first_worked_out(logs, name):
    worked_out, launched = logs
    score, mask, options = VARIANTS[name]
    bound = bind(score, mask, torch.device("cpu"))
    layout = Layout.JAGGED if name == "jagged" else Layout.DENSE
    calls = [operands_of(bound, **options) for _ in range(2)]
    attention = made(calls[0], bound.variant, layout=layout, outputs=Outputs(lse=True, row_max=True), dropout=name == "dropout")

    def both(operands):
        results = attention.forward(operands)
        assert results.row_max is not None
        if name == "decode":
            return [operands.query, operands.key, operands.value, results.out, results.lse, results.row_max]
        dout = torch.zeros_like(results.out)
        gradients = attention.backward(operands, results, Cotangents(dout))
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
    temporaries = ("attention_decode", "combine_splits", "attention_query_gradient", "attention_key_gradient")
    for before, after in zip(addressed(first, kept[0]), addressed(launched, kept[1]), strict=True):
        differing = [at for at, (a, b) in enumerate(zip(before[2], after[2], strict=True)) if a != b]
        assert before[0] in temporaries or not differing, (before, after)
        assert all(isinstance(before[2][at], int) for at in differing)
        assert len(differing) <= 3


def test_captured_tensors_are_those_of_the_call(logs):
    launched = logs[1]
    tables = [torch.rand(4) for _ in range(2)]
    bounds = [bind(scores.alibi(table), masks.causal(), torch.device("cpu")) for table in tables]
    calls = [operands_of(bound) for bound in bounds]
    attention = made(calls[0], bounds[0].variant)
    for operands in calls:
        attention.forward(operands)
    (name, _, args), *rest = launched
    assert name == "attention_forward"
    assert not rest
    assert any(
        tables[1].data_ptr() in part[2] for part in args if isinstance(part, tuple) and len(part) == 5 and isinstance(part[2], tuple)
    )


@pytest.mark.parametrize(
    "change", ["version", "new tensor", "length", "strides", "number", "alignment", "same tensor", "inference", "offsets"]
)
def test_what_changes_the_launch_is_worked_out_anew(logs, change):
    worked_out, launched = logs
    ids, bound_of = (
        (torch.arange(256) // 50),
        lambda ids, n: bind(None, foci.Mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q - k < n)), torch.device("cpu")),
    )
    offsets = torch.tensor([0, 56, 256])
    options = {"offsets": offsets} if change == "offsets" else {}
    bound = bound_of(ids, 9)
    operands = operands_of(bound, **options)
    attention = made(operands, bound.variant, layout=Layout.JAGGED if options else Layout.DENSE)
    attention.forward(operands)
    before = len(worked_out)
    if change == "version":
        ids.add_(1)
    elif change == "new tensor":
        operands = operands_of(bound_of(ids.clone(), 9))
    elif change == "length":
        operands = operands_of(bound, lengths=(255, 256))
    elif change == "strides":
        operands = Operands(
            *(t.contiguous() for t in (operands.query, operands.key, operands.value)), bound.captures, bound.ints, (), 0.125
        )
    elif change == "number":
        operands = operands_of(bound_of(ids, 10))
    elif change == "alignment":
        loose = torch.zeros(2 * 4 * 256 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 256, 4, 64).transpose(1, 2)
        operands = Operands(loose, operands.key, operands.value, bound.captures, bound.ints, (), 0.125)
    elif change == "same tensor":
        operands = Operands(operands.query, operands.query, operands.query, bound.captures, bound.ints, (), 0.125)
    elif change == "inference":
        with torch.inference_mode():
            ids = torch.arange(256)
        operands = operands_of(bound_of(ids, 9))
    elif change == "offsets":
        offsets[1] = 80
    attention.forward(operands)
    assert "attention_forward" not in [name for name, *_ in launched]
    assert worked_out[before:][-1][0] == "attention_forward"


def test_someone_who_watches_launches_sees_them_all(logs):
    from triton import knobs

    bound = bind(None, None, torch.device("cpu"))
    operands = operands_of(bound)
    attention = made(operands, bound.variant)
    attention.forward(operands)

    def watch(metadata):
        pass

    knobs.runtime.launch_enter_hook.add(watch)
    try:
        attention.forward(operands)
    finally:
        knobs.runtime.launch_enter_hook.remove(watch)
    assert not logs[1]
    attention.forward(operands)
    assert len(logs[1]) == 1


class Launcher:
    """As Triton 3.6 has it: Python around a function that takes maps of tiles, lengths and strides one by one."""

    global_scratch_size = profile_scratch_size = launch_cooperative_grid = launch_pdl = 0

    def __init__(self, given, tensordesc_meta):
        def launcher(*args):
            given.append(args)

        def inner(*args):
            raise AssertionError("the way around was not taken", launcher, tensordesc_meta)

        self.launch = inner


def test_a_known_launcher_is_called_at_its_bottom(monkeypatch):
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    from foci.backends.triton import recording

    described = []
    monkeypatch.setattr(
        driver,
        "make_tensordesc_arg",
        lambda arg, facts: described.append((arg.base.data_ptr(), facts)) or [f"map of {arg.base.data_ptr()}"],
    )
    monkeypatch.setattr(recording, "RELEASE", (3, 6))
    given = []
    compiled = Compiled("kernel", [], 4)
    compiled.run = Launcher(given, [{"swizzle": 3}])
    x, y = (torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16) for _ in range(2))
    noted = recording._Arguments(
        [5, None, None, (1, 2)], [(2, 0)], [(1, 1, recording.Tiles(TensorDescriptor, {"shape": [1, 64], "strides": [64, 1]}))], [], []
    )
    launch = recording.direct(compiled, (8, 1, 1, 0, compiled.function), noted)
    again = recording.Template([launch], [], [], []).as_recorded((0, 0))
    for _ in range(3):
        for pair in ((x, y), (y, x)):
            again.run(pair)
            before, args = given[-1][:13], given[-1][13:]
            assert before == (8, 1, 1, 0, 7, 0, 0, None, None, (4, 1, 0), None, None, None)
            assert args == (5, f"map of {pair[1].data_ptr()}", 1, 64, 64, 1, pair[0].data_ptr(), (1, 2))
    assert len(described) == 2  # once for each address
    monkeypatch.setattr(recording, "RELEASE", (3, 9))
    assert recording.direct(compiled, (8, 1, 1, 0, 7), noted) is None


def test_a_recording_keeps_no_tensor_of_the_call_alive(logs):
    bound = bind(scores.alibi(SLOPES.clone()), masks.causal(), torch.device("cpu"))
    operands = operands_of(bound)
    attention = made(operands, bound.variant)
    results = attention.forward(operands)
    attention.backward(operands, results, Cotangents(torch.zeros_like(results.out)))
    refs = [weakref.ref(t) for t in (operands.query, operands.key, operands.value, results.out, results.lse, *operands.captures)]
    assert len(sparsity._WHOLE.recordings._found) == 2
    logs[0].clear()
    del operands, results, bound
    assert [ref() for ref in refs] == [None] * len(refs)


@pytest.fixture
def calls(logs, monkeypatch):
    """Calls of foci as on a GPU; notes which passes were known, by direction."""
    monkeypatch.setitem(planner._targets, torch.device("cpu"), Target("cuda", 90, frozenset({"triton"})))
    for module, name in ((execution, "_decisions"), (execution, "_kernels"), (recall, "_known")):
        monkeypatch.setattr(module, name, OrderedDict())
    known = []
    for name in ("forward_again", "backward_again"):
        method = getattr(kernel.TritonKernel, name)

        def again(self, *args, name=name, method=method):
            made = method(self, *args)
            known.append((name, made is not None))
            return made

        monkeypatch.setattr(kernel.TritonKernel, name, again)
    with foci.use("triton"):
        yield known


def packed_call(q, k, v, offsets, **options):
    return foci.varlen_attn(q, k, v, offsets, offsets, 200, 200, **options)


def leaves(*, packed=False, wanted=(True, True, True)):
    shape = (256, 4, 64) if packed else (2, 256, 4, 64)
    made = [torch.zeros(shape, dtype=torch.bfloat16).requires_grad_(on) for on in wanted]
    return made if packed else [t.detach().transpose(1, 2).requires_grad_(on) for t, on in zip(made, wanted, strict=True)]


OFFSETS, USED = torch.tensor([0, 56, 256]), torch.tensor([50, 190])
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
    given = [torch.zeros_like(t) for t in results if t.requires_grad]
    gradients = torch.autograd.grad([t for t in results if t.requires_grad], wanted, given) if wanted else ()
    return [*inputs, *results, *given, *gradients]


def lies(tensors):
    return [(t.shape, t.stride(), t.dtype) for t in tensors]


@pytest.mark.parametrize("wanted", [(True, True, True), (False, False, False), (False, True, False)], ids=["all", "none", "key"])
@pytest.mark.parametrize("name", KNOWN)
def test_a_known_call_launches_what_a_new_one_does(logs, calls, name, wanted):
    worked_out, launched = logs
    inputs = [leaves(packed="packed" in name, wanted=wanted) for _ in range(3)]
    first = run_both_ways(KNOWN[name], inputs[0])
    assert not any(found for _, found in calls)
    tables = ("classify_tiles", "list_tiles", "assign_tasks", "place_sequences")
    sought = [entry for entry in worked_out if entry[0] not in tables]
    worked_out.clear()
    for again in inputs[1:]:
        calls.clear()
        launched.clear()
        kept = run_both_ways(KNOWN[name], again)
        assert calls == [("forward_again", True), ("backward_again", True)][: 1 + any(wanted)]
        assert not worked_out
        assert lies(kept) == lies(first)
        assert [entry[:2] for entry in launched] == [entry[:2] for entry in sought]
        for before, after in zip(addressed(sought, first), addressed(launched, kept), strict=True):
            differing = [at for at, (a, b) in enumerate(zip(before[2], after[2], strict=True)) if a != b]
            # what the caller never sees has addresses of its own: the logsumexp, the rows' statistics, the seed among the numbers
            assert all(isinstance(before[2][at], int) or "dropout" in name for at in differing), (before, after)
            assert len(differing) <= 4


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
        assert [found for _, found in calls] == [True, True]
        assert not worked_out
        read[1] += 1
        launched.clear()
        way()
        assert [found for _, found in calls] == [True, True, is_known, is_known]
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
    kept = run_both_ways(lambda q, k, v: foci.varlen_attn(q, k, v, *offsets, 200, 200, **options), (q, k, v))
    return [*kept, *offsets]


def hopper_functions(monkeypatch, worked_out, launched):
    """Stand-ins for the kernels of the backend hopper, where its Gluon is installed."""
    hosts = [pytest.importorskip(f"foci.backends.hopper.{name}") for name in ("kernel", "backward")]
    for module in hosts:
        for name, function in list(vars(module).items()):
            if isinstance(function, JITFunction):
                monkeypatch.setattr(module, name, Function(function, worked_out, launched))
    target = Target("cuda", 90, frozenset({"triton", "triton-3.6"}))
    monkeypatch.setitem(planner._targets, torch.device("cpu"), target)


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("name", MOVED)
def test_other_sequences_and_tokens_take_the_known_pass(logs, calls, storages, name, separate, backend, monkeypatch):
    """What is launched for them is what a pass worked out for them alone would launch, but for addresses."""
    worked_out, launched = logs
    if backend == "hopper":
        hopper_functions(monkeypatch, *logs)
    first, other = ((256, 300), (333, 171)) if separate else ((256, 256), (333, 333))
    with foci.use(backend):
        moved_call(first, MOVED[name], separate=separate)
        worked_out.clear()
        launched.clear()
        calls.clear()
        moved_call(other, MOVED[name], separate=separate)
        assert calls == [("forward_again", True), ("backward_again", True)]
        assert not worked_out
        found = [*launched]
        for kept in (recall._known, known._templates._found, sparsity._ways._found, sparsity._sets):
            kept.clear()
        launched.clear()
        moved_call(other, MOVED[name], separate=separate)
    # by name and numbers: tables are made at other times, as they are needed
    assert sorted(map(storages.masked, worked_out + launched), key=str) == sorted(map(storages.masked, found), key=str)


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
        if isinstance(value, tuple):
            return tuple(map(self.masked, value))
        if isinstance(value, (int, float, str)):
            lies = isinstance(value, int) and any(start <= value < end for start, end in self.ranges)
            return "address" if lies else value
        return getattr(value, "value", type(value).__name__)  # of a constant, or of a function that was generated


@pytest.fixture
def storages(monkeypatch):
    found = Storages()
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: found.data_ptr(tensor), raising=False)
    return found


def test_known_gradients_are_for_tensors_that_lie_as_they_did(logs, calls):
    def backward(hooks, cotangent=None):
        with hooks:
            out = foci.attention(*leaves())
        out.backward(torch.zeros_like(out) if cotangent is None else cotangent)
        found = calls[-1]
        assert found[0] == "backward_again"
        return found[1]

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
    assert other.data_ptr() in args


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
            assert [found for _, found in calls][1:] == [True, True]
            assert [name for name, *_ in logs[1]].count("place_sequences") == looked


@pytest.mark.parametrize("makes", [True, False], ids=["made", "not made"])
@pytest.mark.parametrize("name", ["causal", "document", "jagged"])
def test_no_tensor_stays_where_graphs_are_made(logs, name, makes, monkeypatch):
    if makes:
        monkeypatch.setattr(sparsity, "is_for_graphs", lambda tensor: True)
        for module in (kernel, sparsity):
            monkeypatch.setattr(module, "free_stream", lambda tensor: None)
    score, mask, options = VARIANTS[name]
    bound = bind(score, mask, torch.device("cpu"))
    operands = operands_of(bound, **options)
    attention = made(operands, bound.variant, layout=Layout.JAGGED if name == "jagged" else Layout.DENSE)

    def alive():
        gc.collect()
        return {id(t): t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)}

    before = alive()
    results = attention.forward(operands)
    attention.backward(operands, results, Cotangents(torch.zeros_like(results.out)))
    del results
    assert bool(alive().keys() - before.keys()) != makes


@pytest.mark.parametrize("stream, of_graphs", [(0, False), (5, False), (7, True)])
def test_the_stream_of_inductors_graphs(monkeypatch, stream, of_graphs):
    manager = types.SimpleNamespace(stream=types.SimpleNamespace(cuda_stream=7))
    trees = types.SimpleNamespace(get_manager=lambda device, create_if_none_exists: manager)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    assert recording._is_of_graphs(0, stream) == of_graphs
    trees.get_manager = lambda device, create_if_none_exists: None
    assert not recording._is_of_graphs(0, stream)
