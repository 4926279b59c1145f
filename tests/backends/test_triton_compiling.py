"""New kernels compile side by side, and launches wait for them: without a GPU, by a driver that launches nothing."""

import os
import threading
import time
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from foci.backends.triton import compiling  # noqa: E402
from foci.backends.triton.compiling import after_launches, side_by_side  # noqa: E402
from foci.backends.triton.recording import Recorder  # noqa: E402


@triton.jit
def first_kernel(x, n: tl.constexpr):
    tl.store(x + tl.arange(0, 16), n)


@triton.jit
def second_kernel(x, n: tl.constexpr):
    tl.store(x + tl.arange(0, 16), n + 1)


@triton.jit
def wrong_kernel(x, n: tl.constexpr):
    tl.static_assert(n > 100, "of no use")


@pytest.fixture
def events(monkeypatch, tmp_path):
    """What compiles, by which thread, and what is launched, in order."""
    found = []

    class Launcher:
        def __init__(self, src, metadata):
            found.append(("launcher", src.name, threading.current_thread() is threading.main_thread()))
            self.name = src.name

        def __call__(self, *args):
            found.append(("launch", self.name))

    def note(*, src, metadata, metadata_group, times, cache_hit):
        found.append(("compile", src.name, threading.current_thread() is threading.main_thread()))

    device = SimpleNamespace(
        utils=SimpleNamespace(
            load_binary=lambda *_: (1, 1, 32, 0, 1024), get_device_properties=lambda _: {"max_shared_mem": 166912, "multiprocessor_count": 1}
        ),
        launcher_cls=Launcher, get_current_device=lambda: 0, get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 80, 32),
    )  # fmt: skip
    for kernel in (first_kernel, second_kernel, wrong_kernel):
        kernel.device_caches.clear()
    monkeypatch.setattr(compiling, "_met", set())
    monkeypatch.setattr(triton.compiler.compiler, "max_shared_mem", lambda _: 166912)
    with triton.knobs.compilation.scope(), triton.knobs.cache.scope():
        triton.knobs.compilation.listener = note
        triton.knobs.cache.dir = str(tmp_path)
        monkeypatch.setattr(driver, "_active", device)
        yield found


def launch(kernel, n=1):
    Recorder((), None).launch(kernel, (1,), torch.zeros(16), n, num_warps=1)


def test_new_kernels_compile_in_threads_and_launch_in_order(events):
    with side_by_side():
        launch(first_kernel)
        launch(second_kernel)
        assert not events
    compiled = [event for event in events if event[0] == "compile"]
    assert {name for _, name, _ in compiled} == {"first_kernel", "second_kernel"}
    assert not any(in_main for _, _, in_main in compiled)
    assert [event[1] for event in events if event[0] == "launch"] == ["first_kernel", "second_kernel"]
    events.clear()
    with side_by_side():
        launch(first_kernel)
    assert events == [("launch", "first_kernel")]


def test_the_front_end_reads_one_kernel_at_a_time(events, monkeypatch):
    read, inside, real = [], [], triton.compiler.ASTSource.make_ir

    def watched(self, *args, **options):
        inside.append(self.name)
        read.append(tuple(inside))
        time.sleep(0.05)
        made = real(self, *args, **options)
        inside.remove(self.name)
        return made

    monkeypatch.setattr(triton.compiler.ASTSource, "make_ir", watched)
    with side_by_side():
        launch(first_kernel)
        launch(second_kernel)
    assert sorted(read) == [("first_kernel",), ("second_kernel",)]


def test_what_is_kept_is_kept_after_the_launches_that_fill_it(events):
    with side_by_side():
        launch(first_kernel)
        after_launches(lambda: events.append("kept"))
        assert "kept" not in events
    assert events[-2:] == [("launch", "first_kernel"), "kept"]
    after_launches(lambda: events.append("at once"))
    assert events[-1] == "at once"


def test_a_template_launches_what_waits(events):
    with side_by_side():
        recorder = Recorder((), None)
        recorder.launch(first_kernel, (1,), torch.zeros(16), 1, num_warps=1)
        recorder.template()
        assert events[-1] == ("launch", "first_kernel")


def test_an_error_in_the_block_launches_nothing(events):
    with pytest.raises(ValueError, match="mine"), side_by_side():
        launch(first_kernel)
        raise ValueError("mine")
    assert not events
    launch(second_kernel)
    assert events[-1] == ("launch", "second_kernel")


def test_a_kernel_that_does_not_compile_says_so_and_keeps_nothing(events):
    with pytest.raises(triton.CompilationError, match="of no use"), side_by_side():
        launch(first_kernel)
        launch(wrong_kernel)
        after_launches(lambda: events.append("kept"))
    assert ("launch", "first_kernel") in events
    assert "kept" not in events
