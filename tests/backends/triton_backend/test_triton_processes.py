"""Other processes compile: workers beside a call that waits, and in the background. Without a GPU, by a driver that launches nothing."""

import multiprocessing
import os
import pickle
import time
from concurrent.futures import Future, ProcessPoolExecutor
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

import torch
import triton
from compile_events import first_kernel, launch, second_kernel
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia

from foci.backends import compile_workers
from foci.backends.compile_priority import unhurried
from foci.backends.gpu import compiling
from foci.backends.gpu.compile_subprocess import compile_packed, pack
from foci.backends.gpu.compiling import compile_in_parallel, launch_ahead
from foci.backends.gpu.generated import jit_function
from foci.compat.jit import triton_jit


@pytest.fixture
def hits(events):
    """Kernels that Triton was asked for here, and whether they were in its cache."""
    lookups = []
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: lookups.append((src.name, cache_hit))
    return lookups


def set_other_surroundings():
    """A process that was started for something else: another assembler, another cache."""
    os.environ["TRITON_PTXAS_PATH"] = "/bin/true"
    os.environ["TRITON_CACHE_DIR"] = "/nowhere"


@pytest.fixture
def remembered(monkeypatch):
    """Triton's first look at the assembler was at another one than it takes now."""
    version = nvidia.get_ptxas_version(80)
    monkeypatch.setattr(nvidia, "get_ptxas_version", lambda arch: f"{version}, once")


@pytest.mark.usefixtures("remembered")
def test_another_process_compiles_for_those_that_do_not_hurry(hits):
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, set_other_surroundings) as other, unhurried(other.submit), compile_in_parallel():
        launch(first_kernel)
        launch(second_kernel)
    assert sorted(hits) == [("first_kernel", True), ("second_kernel", True)]


def fail(*_):
    raise RuntimeError("closed")


def failed(*_):
    future = Future()
    future.set_exception(ValueError("no such module"))
    return future


def cancelled(*_):
    future = Future()
    future.cancel()
    return future


def forgotten(*_):
    return Future()


def set_unoptimized():
    os.environ["DISABLE_LLVM_OPT"] = "1"


def unoptimized(_, packed):
    """Another process makes another kernel."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), set_unoptimized) as other:
        return other.submit(compile_packed, packed)


@pytest.mark.parametrize("submit", [fail, failed, cancelled, forgotten, unoptimized])
def test_what_no_other_process_compiles_is_compiled_here(hits, monkeypatch, submit):
    monkeypatch.setattr(compiling, "_LONGEST", 0.1)
    with unhurried(submit), compile_in_parallel():
        launch(first_kernel)
    assert hits == [("first_kernel", False)]


@pytest.fixture
def workers(monkeypatch, events):
    """A worker for kernels that a call waits for, as on a machine of eight cores."""
    pool = compile_workers._Pool(compile_workers._WAITED, 1)
    monkeypatch.setattr(compiling, "waited_workers", lambda: pool.submit)
    monkeypatch.setattr(compiling, "compiles_beside", lambda: True)


def stores(name):
    """A kernel that is shorter than `second_kernel`."""
    return jit_function(name, f"def {name}(x, n):\n    tl.store(x, n)\n")


@pytest.mark.usefixtures("workers")
def test_workers_compile_beside_the_kernel_that_takes_longest(hits):
    short, later = stores("short"), stores("later")
    with compile_in_parallel():
        launch(short)
        launch(second_kernel)
        launch(short)
        launch_ahead(later, (torch.zeros(16), 1), {"num_warps": 1}, compiling.Turn.FORWARD)
    assert sorted(hits) == [("second_kernel", False), ("short", True)]
    hits.clear()
    with compile_in_parallel():
        launch(later)
    assert hits == [("later", True)]


@pytest.mark.usefixtures("workers")
def test_a_backward_compiles_here_and_its_forward_in_workers(hits):
    backward, other = stores("backward"), stores("other")
    forward = stores("forward")
    with compile_in_parallel():
        launch(forward)
        launch_ahead(other, (torch.zeros(16), 1), {"num_warps": 1}, compiling.Turn.OTHER_LENGTHS)
        launch_ahead(backward, (torch.zeros(16), 1), {"num_warps": 1}, compiling.Turn.BACKWARD)
    with compile_in_parallel():
        launch(backward)
        launch(other)
    assert sorted(hits) == [("backward", False), ("forward", True), ("other", True)]


@pytest.mark.parametrize(("decorator", "is_sent"), [(triton_jit, True), (triton.jit, False)], ids=["foci's", "Triton's"])
@pytest.mark.usefixtures("hits", "workers")
def test_a_kernel_with_a_key_of_tritons_is_not_sent(decorator, is_sent, monkeypatch):
    """Another process may make another key of it, under which this one would not find it."""
    sent = []
    monkeypatch.setattr(compiling, "waited_workers", lambda: lambda function, packed: sent.append(function))
    with compile_in_parallel():
        launch(second_kernel)  # compiles here, as the longest
        launch(decorator(first_kernel.fn))
    assert sent == [compile_packed] * is_sent


@pytest.mark.parametrize("variable", ["TRITON_ALWAYS_COMPILE", "MLIR_ENABLE_DIAGNOSTICS"])
def test_nothing_is_sent_where_triton_is_asked_for_something_of_its_own(hits, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    with unhurried(lambda *_: pytest.fail("sent")), compile_in_parallel():
        launch(first_kernel)
    assert hits == [("first_kernel", False)]


def test_no_exception_leaves_the_other_process():
    compile_packed(b"nothing")


def test_functions_made_of_text_are_made_again_elsewhere():
    function = jit_function("twice", "def twice(x):\n    return x + x\n")
    source = SimpleNamespace(fn=first_kernel, signature={"x": "*fp32"}, constants={(1,): function}, attrs={})
    compilation = pickle.loads(pack(source, GPUTarget("cuda", 80, 32), {"num_warps": 4}, "key"))
    fn, _, constants, _ = compilation.source
    assert (fn, compilation.target, compilation.options) == (first_kernel, GPUTarget("cuda", 80, 32), {"num_warps": 4})
    assert constants[1,] is not function
    assert constants[1,].cache_key == function.cache_key


def test_a_kernel_that_no_worker_has_begun_is_compiled_here_when_it_is_needed(events):
    jobs = []

    def submit(function, argument):
        jobs.append(compile_workers.Job(function, argument))
        return jobs[-1]

    with unhurried(submit), compile_in_parallel():
        launch_ahead(first_kernel, (torch.zeros(16), 1), {"num_warps": 1}, compiling.Turn.FORWARD)
    assert len(jobs) == 1
    assert not [event for event in events if event[0] == "compile"]
    start = time.monotonic()
    with compile_in_parallel():
        launch(first_kernel)
    assert time.monotonic() - start < compiling._LONGEST / 2
    assert jobs[0].cancelled()
    assert [event[:2] for event in events] == [("compile", "first_kernel"), ("launch", "first_kernel")]
