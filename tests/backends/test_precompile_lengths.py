"""After a problem's first call, calls of other lengths, batches and numbers of sequences need no kernel that is not compiled already."""

import os

import pytest

pytest.importorskip("triton.experimental.gluon", reason="needs a Triton with Gluon")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from kernel_needs import Needed, Problem, Sizes, by_name, make_problems, needs, run
from launch_recorder import recording_launches
from record_launches import ARCHS

import foci
from foci import execution
from foci import precompile_lengths as ahead
from foci.backends.gpu import precompile
from foci.backends.gpu.kernel import GpuKernel
from foci.compat.triton import COMPILE_OPTIONS
from foci.operator import autograd

FIRST = Sizes(2, 300, 300)
FORWARD = {
    "attention_forward",
    "mend_rows",
    "zero_counters",
    "classify_tiles",
    "list_tiles",
    "mark_keys",
    "cover_keys",
    "order_tasks",
    "pack_masks",
}
LENGTHS = (1, 5, 17, 64, 100, 257, 500, 1000, 1025, 2050, 4096, 5000, 9000, 16384)
BATCHES = (1, 2, 3, 8, 17, 64)


def precompiled(arch, problem, monkeypatch):
    """Kernels that the first call launches, and those that it compiles ahead."""
    launched, compiled = [], []

    def note(function, args, options, turn):
        compiled.append(function.kernel(args, {**COMPILE_OPTIONS, **options}))

    def run_as_on_a_gpu(call, operands):
        results = run_forward(call, operands)
        target, allowed = call.decision.target, call.allowed
        thread = ahead.precompile_lengths(
            call.decision.problem, operands, lambda problem: execution._built(execution.choose(problem, target, allowed))[1]
        )
        thread.join()
        return results

    run_forward = execution.run_forward
    with recording_launches(monkeypatch, arch, lambda function, log: Needed(function, arch, launched)), foci.use(*ARCHS[arch]):
        monkeypatch.setattr(precompile, "launch_ahead", note)
        monkeypatch.setattr(ahead, "_begun", set())
        monkeypatch.setattr(ahead, "background_workers", lambda: lambda function, argument: None)  # also on a machine of few cores
        monkeypatch.setattr(autograd, "run_forward", run_as_on_a_gpu)
        run(problem, Sizes(2, 1, 300) if problem.is_decode else FIRST)
    monkeypatch.undo()
    return {*launched, *compiled}


# START-01
@pytest.mark.parametrize("arch", ARCHS, ids="sm_{}".format)
@pytest.mark.filterwarnings("error:foci cannot compile")
@pytest.mark.parametrize("problem", make_problems(), ids=str)
def test_other_sizes_need_no_other_kernel(problem: Problem, arch, monkeypatch):
    known = precompiled(arch, problem, monkeypatch)
    asked = [sizes for sizes in problem.sizes(LENGTHS, BATCHES) if sizes.batch * sizes.kv_len <= 1 << 18]
    sizes_by_kernel = needs(arch, problem, asked)
    new = [kernel for kernel in sizes_by_kernel if kernel not in known]
    lines = []
    for kernel in new:
        alike = by_name(known).get(kernel.name, [])
        nearest = min(alike, key=lambda other: len(kernel.differences(other)), default=None)
        lines.append(f"{kernel.name} {sizes_by_kernel[kernel][:3]} {nearest and kernel.differences(nearest)}")
    assert not new, "\n".join(lines)


# problems whose backward on sm_90 is never the fused kernel, so that it has no sums of dq to finish
UNFUSED = ("varlen document", "block mask", "learned slopes, block mask", "learned table")


@pytest.mark.parametrize("problem", [p for p in make_problems() if p.needs_grad and p.dim == 64 and p.kind not in UNFUSED], ids=str)
def test_the_short_kernels_of_a_backward_are_one_for_all_sizes(problem, monkeypatch):
    kernels = by_name(precompiled(90, problem, monkeypatch))
    assert [len(kernels[name]) for name in ("finish_query_gradient", "begin_gradients")] == [1, 2 if problem.kind == "plain" else 1]


def test_a_failure_ahead_is_told(monkeypatch):
    def fail(*_):
        raise NameError("no such kernel")

    monkeypatch.setattr(GpuKernel, "_build_ahead", fail)
    problem = next(problem for problem in make_problems() if problem.kind == "plain")
    with pytest.warns(RuntimeWarning, match="cannot compile some kernels for other lengths ahead.*NameError: no such kernel"):
        precompiled(80, problem, monkeypatch)


def first_call(arch, problem, monkeypatch):
    """Kernels that the first call launches, forward and backward, and those that it compiles ahead on a machine of many cores."""
    launched, compiled = [], []

    def note(function, args, options, turn):
        compiled.append(function.kernel(args, {**COMPILE_OPTIONS, **options}))

    with recording_launches(monkeypatch, arch, lambda function, log: Needed(function, arch, launched)), foci.use(*ARCHS[arch]):
        monkeypatch.setattr(precompile, "launch_ahead", note)
        monkeypatch.setattr(precompile, "is_new", lambda: True)
        monkeypatch.setattr(precompile, "compiles_beside", lambda: True)
        monkeypatch.setattr(precompile, "_packed", set())
        run(problem, FIRST)
    monkeypatch.undo()
    return set(launched), set(compiled)


# START-02
@pytest.mark.parametrize("arch", ARCHS, ids="sm_{}".format)
@pytest.mark.parametrize("problem", [p for p in make_problems() if p.needs_grad], ids=str)
def test_a_first_call_compiles_its_backward_beside_its_forward(problem, arch, monkeypatch):
    launched, compiled = first_call(arch, problem, monkeypatch)
    late = launched - compiled
    if problem.layout == "packed":
        assert {kernel.name for kernel in late} <= {"place_sequences"}
    else:
        assert {kernel.name for kernel in late} <= FORWARD


# START-01
@pytest.mark.parametrize(
    "problem", [p for p in make_problems() if p.kind in ("plain", "causal", "window", "document") and p.needs_grad], ids=str
)
def test_a_first_call_compiles_forwards_of_other_lengths_beside_its_own(problem, monkeypatch):
    launched, compiled = first_call(90, problem, monkeypatch)
    known = launched | compiled
    sizes = [sizes for sizes in problem.sizes(LENGTHS, BATCHES) if sizes.batch * sizes.kv_len <= 1 << 18]
    # the portable backend's forwards are left to the workers; only the Hopper backend's have consumers
    needed = {
        kernel for kernel in needs(90, problem, sizes) if kernel.name == "attention_forward" and "c.CONSUMERS" in dict(kernel.constants)
    }
    assert needed
    assert needed <= known
