"""Triton's compiler is prepared in threads, once in a process, and the first kernel waits for them."""

import threading
import time

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.nvidia import compiler as nvidia  # noqa: E402

from foci.backends.gpu import compiling, toolchain  # noqa: E402


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """(name, whether in the main thread) of each step, each of which takes a moment."""
    done = []

    def step(name):
        time.sleep(0.05)
        done.append((name, threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(toolchain, "_begun", [])
    monkeypatch.setattr(toolchain, "digest_triton", lambda: step("digest") or "the digest")
    monkeypatch.setattr(toolchain, "assume_digest", lambda digest: done.append((f"assume {digest}", False)))
    monkeypatch.setattr(toolchain, "ptxas_version", lambda arch: step(f"ptxas {arch}"))
    monkeypatch.setattr(toolchain, "is_empty", lambda: False)
    monkeypatch.setenv("FOCI_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    yield done
    toolchain.wait_until_prepared()  # no thread notes a step in the next test


def test_the_compiler_is_prepared_once_beside_the_caller(steps):
    for _ in range(2):
        toolchain.prepare_compiler(90)
    toolchain.wait_until_prepared()
    assert sorted(steps) == [("assume the digest", False), ("digest", False), ("ptxas 90", False)]


@pytest.mark.parametrize("is_empty", [True, False])
@pytest.mark.usefixtures("steps")
def test_workers_start_where_nothing_is_kept(is_empty, monkeypatch):
    started = []
    monkeypatch.setattr(toolchain, "is_empty", lambda: is_empty)
    monkeypatch.setattr(toolchain, "start_waited_workers", lambda: started.append(True))
    toolchain.prepare_compiler(90)
    assert len(started) == is_empty


def test_new_kernels_wait_until_the_compiler_is_prepared(steps, monkeypatch):
    monkeypatch.setattr(compiling, "_met", set())
    monkeypatch.setattr(compiling, "_compile", lambda new: steps.append("compile"))
    toolchain.prepare_compiler(90)
    compiling.launch_waiting([compiling.Waiting(toolchain_kernel, (), {}, lambda: steps.append("launch"))])
    assert len(steps) == 5
    assert steps[-2:] == ["compile", "launch"]


@triton.jit
def toolchain_kernel():
    pass


def test_an_error_is_left_to_the_compilation(steps, monkeypatch):
    def fail():
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(toolchain, "digest_triton", fail)
    toolchain.prepare_compiler(90)
    toolchain.wait_until_prepared()
    assert steps == [("ptxas 90", False)]


def test_nothing_is_prepared_for_the_interpreter(steps, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    toolchain.prepare_compiler(90)
    assert not toolchain._begun


def test_triton_keeps_what_is_prepared():
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter does not compile")
    assert toolchain.digest_triton() is toolchain.digest_triton()
    toolchain.ptxas_version(90)
    assert nvidia.get_ptxas_version.cache_info().currsize >= 1
