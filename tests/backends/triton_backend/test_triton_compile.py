"""Every kernel compiled for sm_90, those of every kind for sm_80, without a GPU: within the shared memory promised, few spills."""

import os

import pytest
import torch

import foci
from foci import masks, scores, weak_cache
from foci.backends.contract import Plan
from foci.compat.triton import COMPILE_OPTIONS
from foci.problem import Cotangents, Formula, Layout, Operands, Outputs, Problem, Target
from foci.trace_functions import bind

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

from launched import LAUNCHED  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from foci.backends.gpu import kernel, mend_launches, portable_passes, precompile, tile_tables  # noqa: E402
from foci.backends.gpu.architectures import find  # noqa: E402
from foci.backends.gpu.schedules import shared_bytes  # noqa: E402
from foci.backends.gpu.tensor_descriptors import describe_layout  # noqa: E402
from foci.backends.triton import paged  # noqa: E402
from foci.backends.triton.kernel import build_kernel  # noqa: E402

KINDS = {
    "attention_forward": ("forward", "forward_sparse", "forward_listed"),
    "attention_query_gradient": ("query_gradient", "query_gradient_sparse"),
    "capture_gradient": ("captures",),
    "attention_bias_gradient": ("bias_gradient",),
    "attention_decode": ("decode", "split"),
}


class KeyNoting:
    """Stands in for a kernel: notes what Triton would key its cache by."""

    def __init__(self, function, keys):
        self.function, self.keys = function, keys

    def warmup(self, *args, grid, **options):
        """Nothing is compiled, so that the launch goes through `__getitem__`."""

    def __getitem__(self, grid):
        def note(*args, **options):
            backend = make_backend(GPUTarget("cuda", 90, 32))
            _, specialization, _ = create_function_from_signature(self.function.signature, self.function.params, backend)(*args, **options)
            self.keys.append((self.function.__name__, str(replaced(specialization)), str(options)))

        return note


def replaced(value):
    if isinstance(value, (tuple, list)):
        return tuple(map(replaced, value))
    return value.cache_key if hasattr(value, "cache_key") else str(value)


DOCUMENTS = torch.arange(2048) // 100
IDS, NUMBERS = torch.arange(8192), torch.zeros(8192)
ROWS = torch.zeros(512, 4)
KEEP = torch.zeros(512, 512, dtype=torch.bool)
# stack: bytes that may be spilled; a loop over a captured row at each place holds several tiles of scores in registers
CASES = {
    "plain": {},
    "no gradient of queries": {"query_grad": False},
    "causal": {"mask": masks.causal()},
    "causal D 64 alibi": {"mask": masks.causal(), "score": scores.alibi(2), "dim": 64},
    "softcap": {"mask": masks.causal(), "score": scores.softcap(20.0)},
    "D 256": {"mask": masks.causal(), "dim": 256},
    "learned bias": {"score": scores.bias(torch.zeros(1, 2, 512, 512, dtype=torch.bfloat16)), "learned": True, "stack": 2048},
    "learned bias of an entry": {"score": scores.bias(torch.zeros(2, 2, 512, 512, dtype=torch.bfloat16)), "learned": True},
    "learned bias, causal": {
        "score": scores.bias(torch.zeros(1, 2, 512, 512, dtype=torch.bfloat16)),
        "learned": True,
        "mask": masks.causal(),
    },
    "jagged D 64": {"jagged": True, "dim": 64},
    "jagged D 64 causal": {"mask": masks.causal(), "jagged": True, "dim": 64},
    "jagged dropout": {"mask": masks.causal(), "dropout": 0.1, "jagged": True},
    "document": {"mask": foci.Mask(lambda b, h, q, k, ids=DOCUMENTS: ids[q] == ids[k])},
    "mask of a tensor": {"mask": foci.Mask(lambda b, h, q, k, t=KEEP: t[q, k])},
    "decode": {"queries": 1, "keys": 2048},
    "split": {"queries": 128, "keys": 8192},
    "split D 64 lower right": {"queries": 128, "keys": 8192, "dim": 64, "mask": masks.causal_lower_right()},
    "split D 64 dropout": {"queries": 128, "keys": 8192, "dim": 64, "dropout": 0.1},
    "split documents": {
        "queries": 128,
        "keys": 8192,
        "mask": foci.Mask(lambda b, h, q, k, t=IDS, u=IDS + 1: (t[q] == t[k]) | (u[q] < u[k])),
    },
    "score of keys": {"queries": 512, "score": foci.Score(lambda s, b, h, q, k, t=NUMBERS, u=IDS: s + t[k] * u[k])},
    "documents D 64": {
        "queries": 512,
        "mask": foci.Mask(lambda b, h, q, k, t=IDS, u=IDS + 1, w=IDS + 2: (t[k] == t[q]) & (u[q] == u[k]) & (w[q] >= w[k])),
        "dim": 64,
    },
    "outputs": {"mask": masks.causal(), "outputs": {"column_sums": True, "weights": True}},
    "learned rows": {
        "score": foci.Score(lambda s, b, h, q, k, t=ROWS: s + torch.dot(t[q], t[k])),
        "learned": True,
        "dim": 64,
        "stack": 4096,
    },
    "learned blocks": {"score": scores.bias(torch.zeros(1, 2, 512, 512)), "learned": True, "block_size": (128, 64), "dim": 64},
    "paged": {"queries": 1, "keys": 2048, "page": 256, "mask": masks.causal_lower_right()},
    "short pages": {"queries": 1, "keys": 2048, "page": 16, "mask": masks.causal_lower_right()},
    "split pages": {"queries": 64, "keys": 2048, "page": 256, "mask": masks.causal_lower_right()},
    "split short pages": {"queries": 64, "keys": 2048, "page": 16, "mask": masks.causal_lower_right()},
}


# a case of every kernel, of the most shared memory and of each way to visit tiles; of the others sm_90 is compiled alone
ON_AMPERE = ("D 256", "learned bias, causal", "jagged dropout", "document", "outputs", "learned blocks", "decode", "split", "short pages")

# architectures that have no schedules of their own
FOREIGN = [("causal", 100), ("causal", 120), ("decode", 120)]

PAIRS = {(case, "attention_forward", 90) for case in ("causal", "softcap", "document", "mask of a tensor")}
"""Kernels of which two share a multiprocessor: one alone is slower by a third."""

THREES = {(case, "attention_forward", 90) for case in ("jagged D 64", "jagged D 64 causal")}
"""Of which three do: with more registers than 168 for a thread of four warps there is room for two, slower by a quarter."""

FOURS = {(case, "attention_query_gradient", 90) for case in ("jagged D 64", "jagged D 64 causal")}
"""Of which four do, with 128 registers."""


# SDPA-04
@pytest.mark.parametrize(("name", "arch"), [*((name, 90) for name in CASES), *((name, 80) for name in CASES if name not in ON_AMPERE)])
def test_triton_reads_every_kernel(name, arch, stand_in, monkeypatch):
    # the interpreter takes Python that the compiler does not, and compiling takes minutes
    case = CASES[name]
    kernels = stand_in(LAUNCHED, arch, is_read_only=True)
    monkeypatch.setattr(weak_cache, "_derived", weak_cache.make_store())
    launch_paged(case, arch) if "page" in case else launch(case, arch)
    assert kernels
    if name.startswith("learned bias"):  # its gradient is a sum in a fixed order
        assert len(kernels) > 2
        assert all("tt.func" in one.ir and "atomic" not in one.ir for one in kernels)


# FLEX-12
@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch"), [*((name, 90) for name in CASES), *((name, 80) for name in ON_AMPERE), *FOREIGN])
def test_kernels_compile_within_bounds(name, arch, stand_in, monkeypatch):
    case = dict(CASES[name])
    kernels = stand_in(LAUNCHED, arch)
    monkeypatch.setattr(weak_cache, "_derived", weak_cache.make_store())
    attention = launch_paged(case, arch) if "page" in case else launch(case, arch)
    for one in kernels:
        assert one.shared <= find(arch).shared_bytes, one.name
        for kind in kinds_of(one.name, attention):
            bound = shared_bytes(kind, attention.schedules[kind], attention.builder.dims, 2, **attention.builder.read)
            assert one.shared <= bound, (one.name, kind)
        if one.name.startswith("mend"):
            # it computes anything only where results hold a NaN
            assert one.stack is None or one.stack <= 1024, one.name
            continue
        if one.stack is not None:
            assert one.stack <= case.get("stack", 1024), one.name
        if (name, one.name, arch) in PAIRS:
            # a multiprocessor has 228 KB, of which each program takes one more than its own
            assert 2 * (one.shared + 1024) <= 228 * 1024, one.name
        if name.startswith("split"):
            assert one.stack is None or "dropout" in name or one.stack == 0, one.name
        if (name, one.name, arch) in THREES and one.registers is not None:
            assert one.registers <= 168, one.name
            assert 3 * (one.shared + 1024) <= 228 * 1024, one.name
        if (name, one.name, arch) in FOURS and one.registers is not None:
            assert one.registers <= 128, one.name
            assert 4 * (one.shared + 1024) <= 228 * 1024, one.name
            assert one.stack <= 32, one.name


@pytest.mark.slow
def test_packed_passes_are_made_of_as_many_products_as_dense_ones(stand_in, monkeypatch):
    """No loop is for the tile that overhangs a sequence, whose end a descriptor knows."""
    kernels = stand_in({module: LAUNCHED[module] for module in (portable_passes, mend_launches)}, 90)
    for name in LAUNCHED[tile_tables]:
        monkeypatch.setattr(tile_tables, name, KeyNoting(getattr(tile_tables, name), []))
    counts = []
    for case in ({"mask": masks.causal(), "dim": 64}, CASES["jagged D 64 causal"]):
        kernels.clear()
        monkeypatch.setattr(weak_cache, "_derived", weak_cache.make_store())
        launch(case, 90)
        counts.append({one.name: one.ptx.count("wgmma.mma_async") for one in kernels})
    dense, packed = counts
    assert len(packed) == 5
    assert packed == dense


@pytest.fixture
def keyed(monkeypatch):
    """What Triton would key its cache by, launch by launch."""
    keys = []
    for module, names in LAUNCHED.items():
        for each in names:
            monkeypatch.setattr(module, each, KeyNoting(getattr(module, each), keys))
    return keys


def test_an_expanded_gradient_meets_the_kernels_of_any_other(keyed):
    def keys(dout):
        keyed.clear()
        query = torch.zeros(2, 4, 256, 64, dtype=torch.bfloat16)
        bound = bind(None, masks.causal(), torch.device("cpu"))
        asked = Problem(Formula(bound.variant), torch.bfloat16, 64, 64, 4, 4, 2, 256, 256, True, True, True, ())
        attention = build_kernel(Plan("triton", asked, Target("cuda", 90, frozenset({"triton"}))))
        operands = Operands(query, query, query, bound.captures, bound.ints, bound.floats, 0.125)
        attention.backward(operands, attention.forward(operands), Cotangents(dout))
        return {key for key in keyed if key[0].startswith("attention")}  # tables of tiles are kept from the first call

    dense = torch.zeros(2, 256, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    expanded = keys(torch.zeros((), dtype=torch.bfloat16).expand(2, 4, 256, 64))
    assert expanded == keys(dense)
    assert len(expanded) == 3


# FLEX-10
def test_new_lengths_batches_values_and_lambdas_compile_nothing(keyed):
    def keys(length, batch, heads, window):
        keyed.clear()
        slopes = torch.rand(heads)
        score = foci.Score(lambda s, b, h, q, k: s + slopes[h] * (k - q))
        mask = foci.Mask(lambda b, h, q, k: (q >= k) & (q - k < window))
        query = torch.zeros(batch, heads, length, 64, dtype=torch.bfloat16)
        bound = bind(score, mask, torch.device("cpu"))
        operands = Operands(query, query, query, bound.captures, bound.ints, bound.floats, 0.125)
        asked = Problem(Formula(bound.variant), torch.bfloat16, 64, 64, heads, heads, batch, length, length, True, True, True, (True,))
        attention = build_kernel(Plan("triton", asked, Target("cuda", 90, frozenset({"triton"}))))
        results = attention.forward(operands)
        attention.backward(operands, results, Cotangents(torch.zeros_like(results.out)))
        return set(keyed)

    first = keys(1000, 2, 4, 100)
    assert len(first) > 5
    for sizes in ((1001, 1, 1, 5), (16, 3, 5, 16), (2048, 16, 8, 2000), (77, 1, 2, 33), (1, 1, 1, 3), (5000, 1, 1, 7)):
        assert keys(*sizes) == first, sizes


@pytest.mark.parametrize("name", ["causal", "causal D 64 alibi", "softcap", "document", "no gradient of queries", "plain"])
def test_the_kernels_precompiled_for_the_backward_pass_are_those_it_launches(name, keyed, monkeypatch):
    seen = []

    def note(function, args, options, turn):
        # what the pass will make has no memory yet
        tensors = [t for arg in args for t in (getattr(arg, "base", arg),) if isinstance(t, torch.Tensor)]
        assert all(t.is_meta or t.untyped_storage().data_ptr() in addresses for t in tensors)
        function.keys = seen
        function[(1,)](*args, **COMPILE_OPTIONS, **options)
        function.keys = keyed

    monkeypatch.setattr(precompile, "is_new", lambda: True)
    monkeypatch.setattr(precompile, "launch_ahead", note)
    monkeypatch.setattr(weak_cache, "_derived", weak_cache.make_store())
    attention, operands = begun(CASES[name], 90)
    keyed.clear()
    real, addresses = kernel.precompile_backward, set()

    def compile_and_compare(kernel_, operands, results):
        addresses.update(
            t.untyped_storage().data_ptr() for t in (operands.query, operands.key, results.out, results.lse, *operands.captures)
        )
        addresses.update(t.untyped_storage().data_ptr() for visits in found("tile tables") for t in visits.tensors if t is not None)
        before = found("tile tables"), found("tile classes")
        real(kernel_, operands, results)
        assert (found("tile tables"), found("tile classes")) == before

    monkeypatch.setattr(kernel, "precompile_backward", compile_and_compare)
    results = attention.forward(operands)
    keyed.clear()
    attention.backward(operands, results, Cotangents(torch.zeros_like(results.out)))
    assert keyed
    assert set(keyed) <= set(seen)
    assert {key for key in seen if key[0].startswith("attention")} == {key for key in keyed if key[0].startswith("attention")}


def found(kind):
    return [value for _, value in weak_cache._derived[kind]._found.values()]


def kinds_of(function, attention):
    if function == "attention_key_gradient":
        return ()  # dk and dv may be launched apart: the device's limit is checked
    return [kind for kind in KINDS.get(function, ()) if kind in attention.schedules]


def begun(case, arch):
    """The kernel of a case's plan, and its operands."""
    dim, queries, keys = case.get("dim", 128), case.get("queries", 512), case.get("keys", 512)
    batch = 1 if case.get("jagged") else 2
    query, key = (torch.zeros(batch, 2, n, dim, dtype=torch.bfloat16) for n in (queries, keys))
    cu = torch.tensor([0, 200, 512])
    jagged = {"cu_q": cu, "cu_kv": cu, "max_q": 312, "max_kv": 312} if case.get("jagged") else {}
    size = case.get("block_size")
    blocks = {} if size is None else {"blocks": torch.ones(1, 1, queries // size[0], keys // size[1], dtype=torch.int8)}
    bound = bind(case.get("score"), case.get("mask"), torch.device("cpu"))
    dropout = case.get("dropout", 0.0)
    operands = Operands(
        query, key, key, bound.captures, bound.ints, bound.floats, 0.1, dropout, torch.tensor([1]) if dropout else None, **blocks, **jagged
    )
    formula = Formula(
        bound.variant, Layout.JAGGED if jagged else Layout.DENSE, Outputs(lse=True, **case.get("outputs", {})), dropout > 0, size
    )
    learned = tuple(bool(case.get("learned")) for _ in bound.captures)
    asked = Problem(formula, torch.bfloat16, dim, dim, 2, 2, batch, queries, keys, case.get("query_grad", True), True, True, learned)
    attention = build_kernel(Plan("triton", asked, Target("cuda", arch, frozenset({"triton"}))))
    return attention, operands


def launch(case, arch):
    """Compiles what a forward and a backward launch."""
    attention, operands = begun(case, arch)
    results = attention.forward(operands)
    if "queries" not in case:
        attention.backward(operands, results, Cotangents(torch.zeros_like(results.out), None, results.column_sums, results.weights))
    return attention


def launch_paged(case, arch):
    """The same for a call over pages."""
    query = torch.zeros(2, 8, case["queries"], 128, dtype=torch.bfloat16)
    pool = torch.zeros(20, 2, case["page"], 128, dtype=torch.bfloat16)
    table, lengths = torch.zeros(2, 8, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    bound = bind(None, case["mask"], torch.device("cpu"))
    operands = Operands(query, pool, pool, scale=0.1, kv_lengths=lengths, page_table=table, max_kv=8 * case["page"])
    asked = Problem(Formula(bound.variant, Layout.PAGED), torch.bfloat16, 128, 128, 8, 2, 2, case["queries"], 8 * case["page"])
    attention = paged.PagedKernel(Plan("triton", asked, Target("cuda", arch, frozenset({"triton"}))))
    attention.forward(operands)
    return attention.native


def test_a_spread_number_is_not_aligned():
    assert not describe_layout(torch.ones(()).expand(2, 2, 16, 64)).is_aligned
    assert describe_layout(torch.ones(2, 2, 16, 64)).is_aligned
