"""New kernels compile side by side, and launches wait for them: without a GPU, by a driver that launches nothing."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

import compile_events  # noqa: E402
import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from compile_events import adding_kernel, first_kernel, launch, second_kernel, wrong_kernel  # noqa: E402
from triton.runtime import driver  # noqa: E402

from foci.backends import compile_lock  # noqa: E402
from foci.backends.compile_priority import unhurried  # noqa: E402
from foci.backends.contract import Unbuildable  # noqa: E402
from foci.backends.gpu import compiling  # noqa: E402
from foci.backends.gpu.compiling import after_launches, compile_in_parallel, is_new, launch_ahead  # noqa: E402
from foci.backends.gpu.launch_builder import LaunchBuilder, plain_arguments  # noqa: E402
from foci.backends.gpu.symbolic_tokens import Count  # noqa: E402


def test_new_kernels_compile_in_threads_and_launch_in_order(events):
    with compile_in_parallel():
        launch(first_kernel)
        launch(second_kernel)
        assert not events
    compiled = [event for event in events if event[0] == "compile"]
    assert {name for _, name, _ in compiled} == {"first_kernel", "second_kernel"}
    assert not any(in_main for _, _, in_main in compiled)
    assert [event[1] for event in events if event[0] == "launch"] == ["first_kernel", "second_kernel"]
    events.clear()
    with compile_in_parallel():
        launch(first_kernel)
    assert events == [("launch", "first_kernel")]


def test_kernels_that_differ_in_a_constant_or_in_what_is_absent_compile_each(events):
    with compile_in_parallel():
        launch(first_kernel, 1)
        launch(first_kernel, 2)
    assert [event for event in events if event[0] == "compile"] == [("compile", "first_kernel", False)] * 2
    x, there, absent = torch.zeros(16), (1, torch.zeros(16)), (1, None)
    kinds = {compiling.Waiting(first_kernel, (x, part), {}, print).kind for part in (there, absent)}
    assert len(kinds) == 2


class Config(NamedTuple):
    """Compile-time configuration, as the Hopper backend's."""

    TILE: tl.constexpr


def test_a_configuration_stays_one_object_so_that_a_known_kernel_is_known():
    config = Config(tl.constexpr(64))
    plain = plain_arguments((config, (3, config), (Count(5, "t[0]"), config)))
    assert plain == (config, (3, config), (5, config))
    assert all(each is config for each in (plain[0], plain[1][1], plain[2][1]))
    kinds = {compiling.Waiting(first_kernel, plain_arguments((torch.zeros(16), config)), {}, print).kind for _ in range(2)}
    assert len(kinds) == 1


def test_the_front_end_reads_one_kernel_at_a_time(events, monkeypatch):
    read, inside, real = [], [], triton.compiler.ASTSource.make_ir

    def watched(self, *args, **options):
        inside.append(self.name)
        read.append(tuple(inside))
        time.sleep(0.05)
        module = real(self, *args, **options)
        inside.remove(self.name)
        return module

    monkeypatch.setattr(triton.compiler.ASTSource, "make_ir", watched)
    with compile_in_parallel():
        launch(first_kernel)
        launch(second_kernel)
    assert sorted(read) == [("first_kernel",), ("second_kernel",)]


def test_what_is_kept_is_kept_after_the_launches_that_fill_it(events):
    with compile_in_parallel():
        launch(first_kernel)
        after_launches(lambda: events.append("kept"))
        assert "kept" not in events
    assert events[-2:] == [("launch", "first_kernel"), "kept"]
    after_launches(lambda: events.append("at once"))
    assert events[-1] == "at once"


def test_a_finished_pass_launches_what_waits(events):
    with compile_in_parallel():
        launches = LaunchBuilder((), None)
        launches.add(first_kernel, (1,), torch.zeros(16), 1, num_warps=1)
        launches.finish((0, 0))
        assert launches.built is None
        assert events[-1] == ("launch", "first_kernel")


def test_an_error_in_the_block_launches_nothing(events):
    with pytest.raises(ValueError, match="mine"), compile_in_parallel():
        launch(first_kernel)
        raise ValueError("mine")
    assert not events
    launch(second_kernel)
    assert events[-1] == ("launch", "second_kernel")


def test_a_kernel_that_does_not_compile_says_so_and_keeps_nothing(events):
    with pytest.raises(triton.CompilationError, match="of no use"), compile_in_parallel():
        launch(first_kernel)
        launch(wrong_kernel)
        after_launches(lambda: events.append("kept"))
    assert ("launch", "first_kernel") in events
    assert "kept" not in events


# NOW-02
def test_what_a_release_never_tested_does_not_compile_is_left_to_another_backend(events, monkeypatch):
    monkeypatch.setattr(compiling, "release", lambda: (3, 99))
    monkeypatch.setattr(compiling, "_uncompiled", {})
    tried = []
    monkeypatch.setattr(
        wrong_kernel, "warmup", lambda *args, inner=wrong_kernel.warmup, **options: tried.append(1) or inner(*args, **options)
    )
    launch(first_kernel)
    for _ in range(3):
        with pytest.raises(Unbuildable, match=r"Triton 3.99, .* does not compile wrong_kernel: CompileTimeAssertionFailure: .*of no use"):
            launch(wrong_kernel)
    assert len(tried) == 3  # as a new kernel, to load it, then for its error
    assert names(events, "launch") == ["first_kernel"]


def test_a_launch_that_goes_wrong_is_not_taken_for_a_kernel_that_does_not_compile(events, monkeypatch):
    monkeypatch.setattr(compiling, "release", lambda: (3, 99))

    def fail(self, *args):
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(driver.active.launcher_cls, "__call__", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        launch(first_kernel)
    assert compiling._uncompiled == {}


# NOW-03
def test_where_triton_has_no_place_for_it_kernels_compile_one_after_the_other(events, monkeypatch):
    monkeypatch.setattr(compiling, "async_compile_mode", lambda: None)
    with compile_in_parallel():
        launch(first_kernel)
        launch(second_kernel)
    assert names(events, "launch") == names(events, "compile") == ["first_kernel", "second_kernel"]
    assert all(in_main for what, _, *in_main in events if what == "compile" for in_main in in_main)


def ahead(kernel, warps=1):
    launch_ahead(kernel, (torch.empty(16, device="meta"), 1), {"num_warps": warps}, compiling.Turn.FORWARD)


def names(events, what):
    return [event[1] for event in events if event[0] == what]


@pytest.mark.parametrize("cores", [2, 64])
def test_a_later_pass_takes_up_what_was_begun_for_it(events, monkeypatch, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    with compile_in_parallel():
        launch(first_kernel)
        ahead(second_kernel)
        assert is_new()
    assert names(events, "launch") == ["first_kernel"]
    assert len(compiling._begun) == 1
    with compile_in_parallel():
        launch(second_kernel)
        assert is_new()
    assert names(events, "launch") == ["first_kernel", "second_kernel"]
    assert sorted(names(events, "compile")) == ["first_kernel", "second_kernel"]
    assert not any(in_main for what, _, *rest in events if what == "compile" for in_main in rest)
    assert not compiling._begun


def test_a_kernel_that_waits_and_is_ahead_is_waited_for(events):
    with compile_in_parallel():
        launch(first_kernel)
        ahead(first_kernel)
    assert names(events, "compile") == names(events, "launch") == ["first_kernel"]
    assert not compiling._begun


def test_what_fails_ahead_says_so_where_it_is_launched(events):
    with compile_in_parallel():
        launch(first_kernel)
        ahead(wrong_kernel)
    assert names(events, "launch") == ["first_kernel"]
    with pytest.raises(triton.CompilationError, match="of no use"), compile_in_parallel():
        launch(wrong_kernel)


def test_a_kernel_whose_constant_has_changed_is_refused(events, monkeypatch):
    launch(adding_kernel)
    monkeypatch.setattr(compile_events, "ADDED", tl.constexpr(2))
    with pytest.raises(RuntimeError, match="ADDED has changed"):
        launch(adding_kernel)
    assert names(events, "launch") == ["adding_kernel"]


def test_passes_that_never_come_are_forgotten(events, monkeypatch):
    monkeypatch.setattr(compiling, "_MOST_BEGUN", 2)
    with compile_in_parallel():
        for warps in (1, 2, 4, 8):
            ahead(second_kernel, warps=warps)
    assert len(compiling._begun) == 2
    ahead(first_kernel)  # nobody waits: nothing begins
    assert len(compiling._begun) == 2


def test_a_process_that_ends_meanwhile_ends_well(tmp_path):
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import triton, torch, compile_events as events, test_triton_compiling as t
from triton.runtime import driver
driver._active = events.device_of(lambda *_: lambda *_: None)
triton.compiler.compiler.max_shared_mem = lambda _: 166912
with t.compile_in_parallel():
    events.launch(events.first_kernel)
    t.ahead(events.second_kernel)
print(len(t.compiling._begun))
"""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "Exception" not in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_what_waits_is_read_before_what_is_ahead(events, monkeypatch):
    read, real = [], triton.compiler.ASTSource.make_ir

    def watched(self, *args, **options):
        time.sleep(0.05)
        module = real(self, *args, **options)
        read.append(self.name)
        return module

    monkeypatch.setattr(triton.compiler.ASTSource, "make_ir", watched)
    with compile_in_parallel():
        ahead(second_kernel)
        launch(first_kernel)
    with compile_in_parallel():
        launch(second_kernel)
    assert read == ["first_kernel", "second_kernel"]


def settings():
    return sys.getswitchinterval(), gc.isenabled()


@pytest.mark.parametrize("collects", [True, False])
def test_the_interpreters_settings_are_the_users_again(events, collects):
    interval, seen = sys.getswitchinterval(), []
    inside = compiling._compile

    def noted(new):
        seen.append(settings())
        with compiling.caller_waits():
            inside(new)
        seen.append(settings())

    compiling._compile = noted
    try:
        if not collects:
            gc.disable()
        with pytest.raises(triton.CompilationError), compile_in_parallel():
            launch(wrong_kernel)
        assert seen == [(pytest.approx(2e-4), False)] * 2
        assert settings() == (interval, collects)
    finally:
        compiling._compile = inside
        gc.enable()


def test_the_switch_interval_stays_where_nobody_waits(events, monkeypatch):
    before, seen = sys.getswitchinterval(), []
    inside = compiling._compile
    monkeypatch.setattr(compiling, "_compile", lambda new: (seen.append(sys.getswitchinterval()), inside(new)))
    with unhurried(), compile_in_parallel():
        launch(first_kernel)
    with compile_in_parallel():
        launch(second_kernel)
    assert seen == [before, pytest.approx(2e-4)]
    assert ("launch", "first_kernel") in events


def test_nothing_is_said_of_kernels_that_nobody_waits_for(events, monkeypatch, capsys):
    monkeypatch.setattr(compile_lock, "_PATIENCE", 0.0)
    monkeypatch.delenv("FOCI_QUIET", raising=False)
    with unhurried(), compile_in_parallel():
        launch(first_kernel)
    with compile_in_parallel():
        launch_ahead(second_kernel, (torch.zeros(16), 1), {"num_warps": 1}, compiling.Turn.FORWARD)
    assert capsys.readouterr().err == ""
    with compile_in_parallel():
        launch(first_kernel, 2)
    assert "first_kernel" in capsys.readouterr().err
