"""How the CPU backend builds, keeps and finds its kernels: compilers, the cache on disk, and what others may do to it."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import foci
from foci import execution
from foci.backends import disk
from foci.backends.cpu import build
from foci.planner import choose, find_target
from foci.problem import Formula, Problem
from foci.trace_functions import bind

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return %d; }\n'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCI_CACHE_DIR", str(tmp_path))
    start_anew(monkeypatch)
    yield tmp_path / "cpu"
    build._probe.cache_clear()


def start_anew(monkeypatch):
    """As a new process does."""
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_failed", {})
    build._probe.cache_clear()


def test_second_load_comes_from_disk(cache, monkeypatch):
    assert build.load(SOURCE % 1).answer() == 1
    build._loaded.clear()
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    start = time.perf_counter()
    assert build.load(SOURCE % 1).answer() == 1
    assert time.perf_counter() - start < 0.1


def libraries(cache):
    return sorted(cache.glob("*.so"))


def test_damaged_files_are_built_again(cache):
    build.load(SOURCE % 2)
    (library,) = libraries(cache)
    half = library.read_bytes()[:1000]
    library.unlink()  # the loaded one stays mapped
    library.write_bytes(half)
    library.chmod(0o600)
    build._loaded.clear()
    assert build.load(SOURCE % 2).answer() == 2


@pytest.mark.parametrize("mode", [0o666, 0o620])
def test_files_that_others_may_write_are_never_loaded(cache, mode):
    build.load(SOURCE % 3)
    (library,) = libraries(cache)
    library.chmod(mode)
    assert not build._is_intact(library)
    build._loaded.clear()
    assert build.load(SOURCE % 3).answer() == 3
    assert not stat.S_IMODE(libraries(cache)[0].stat().st_mode) & 0o022


def test_a_shared_folder_is_not_used(cache):
    cache.mkdir(mode=0o700)
    assert build.cache_directory() == cache
    cache.chmod(0o777)
    assert build.cache_directory() is None


def test_an_unusable_cache_warns_and_uses_a_private_folder(cache, monkeypatch):
    cache.mkdir(mode=0o700)
    cache.chmod(0o777)
    build._temporary_directory.cache_clear()
    with pytest.warns(UserWarning, match="FOCI_CACHE_DIR"):
        assert build.load(SOURCE % 4).answer() == 4
    assert not libraries(cache)
    assert stat.S_IMODE(build._temporary_directory().stat().st_mode) == 0o700


@pytest.mark.slow
def test_many_processes_build_at_once(cache):
    program = f"from foci.backends.cpu import build; print(build.load({SOURCE % 5!r}).answer())"
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [p.communicate()[0].strip() for p in running] == ["5"] * 4
    assert len(libraries(cache)) == 1
    assert not [p for p in cache.iterdir() if p.name.startswith((".new-", ".build-"))]


def test_a_refused_kernel_shows_its_source(cache):
    with pytest.raises(build.CompileError, match=r"(?s)error.*The generated source:.*not C\+\+"):
        build.load("not C++")


def test_an_old_compiler_is_named(cache, tmp_path, monkeypatch):
    script = tmp_path / "old-g++"
    script.write_text('#!/bin/sh\necho "#define __GNUC__ 9"\necho "#define __VERSION__ \\"9.4.0\\""\n')
    script.chmod(0o755)
    monkeypatch.setenv("FOCI_CXX", str(script))
    assert re.search(r"is 9\.4\.0; .*12 or later", build.obstacle())


# Without a compiler, or with one that fails ------------------------------------------------------------------------------

PROGRAM = """
import json, sys, warnings
import torch, foci
torch.manual_seed(0)
tensors = [torch.randn(1, 2, 70, 16, requires_grad=True) for _ in range(3)]
rows = []
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    with foci.observe() as log:
        for window in (9, 30):
            for score in (None, lambda s, b, h, q, k: s * 0.5):
                out = foci.attention(*tensors, mask=lambda b, h, q, k: (q - k).abs() < window, score=score)
                rows += [out.sum(), *(t.sum() for t in torch.autograd.grad(out.pow(2).sum(), tensors))]
print(json.dumps({
    "said": [str(w.message) for w in said],
    "ran": sorted({call.backend for call in (*log.calls, *log.backward_calls)}),
    "sums": [float(x) for x in rows],
}))
"""


def run(**environment):
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def failing(path, on, words, code=1):
    """A compiler that answers questions, and fails on kernels that hold some text."""
    compiler = build.toolchain().path
    kernels = f'grep -q {on} "$f"'
    return script(
        path,
        f'for f; do case "$f" in *.cc) if {kernels}; then echo "{words}" >&2; exit {code}; fi;; esac; done\nexec {compiler} "$@"',
    )


def test_without_a_compiler_the_planner_takes_another(cache, monkeypatch):
    monkeypatch.setenv("FOCI_CXX", "no-such-compiler")
    variant = bind(None, None, torch.device("cpu")).variant
    decision = choose(Problem(Formula(variant), torch.float32, 16, 16, 2, 2, 1, 64, 64), find_target(torch.device("cpu")))
    assert decision.plan.backend != "cpu"
    assert "no-such-compiler was not found" in next(r.reason for r in decision.rejections if r.backend == "cpu")


# SDPA-15, FLEX-10
@pytest.mark.slow
def test_without_a_compiler_one_warning_has_the_cure_and_cached_kernels_run(cache):
    missing = {"FOCI_CXX": "no-such-compiler", "FOCI_CACHE_DIR": str(cache.parent)}
    without = run(**missing)
    assert "cpu" not in without["ran"]
    (said,) = without["said"]
    assert re.match("foci runs its backend '.*' instead of 'cpu', which would be faster: no C", said)
    assert said.endswith(": no C++ compiler: no-such-compiler was not found; install g++ 12 or later, or name one in FOCI_CXX")
    compiled = run(FOCI_CACHE_DIR=str(cache.parent))
    assert compiled["ran"] == ["cpu"]
    assert not compiled["said"]
    for gone in (missing, {**missing, "FOCI_CXX": "", "PATH": "/nowhere"}):
        again = run(**gone)
        assert again["ran"] == ["cpu"]
        assert not again["said"]
        assert again["sums"] == compiled["sums"]
    assert without["sums"] == pytest.approx(compiled["sums"], abs=1e-3)


# SDPA-15
@pytest.mark.slow
@pytest.mark.parametrize("of", ["foci::forward", "foci::backward"])
def test_a_compiler_that_fails_later_is_warned_of_and_done_without(cache, tmp_path, of):
    """Its kernels are forward and backward ones; where the backward alone fails, the forward has run."""
    words = "g++: fatal error: Killed signal terminated program cc1plus"
    result = run(FOCI_CXX=failing(tmp_path / "g++", of, words), FOCI_CACHE_DIR=str(cache.parent))
    (said,) = result["said"]
    assert ", which would be faster: Killed signal terminated program cc1plus: the C++ compiler " in said
    assert ("cpu" in result["ran"]) is (of == "foci::backward")
    assert len(result["ran"]) > ("cpu" in result["ran"])
    assert result["sums"] == pytest.approx(run(FOCI_CACHE_DIR=str(cache.parent))["sums"], abs=1e-3)


# SDPA-15
def test_a_failure_is_not_waited_for_twice(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("FOCI_CXX", failing(tmp_path / "g++", "answer", "error: no space left"))
    with pytest.raises(build.CompileError, match="^no space left"):
        build.load(SOURCE % 20)
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    with pytest.raises(build.CompileError, match="^no space left"):
        build.load(SOURCE % 20)


# SDPA-15
def test_a_forced_backend_says_why_it_cannot_run(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("FOCI_CXX", failing(tmp_path / "g++", "foci", "error: no space left"))
    monkeypatch.setattr(execution, "_plans", OrderedDict())
    with foci.use("cpu"), pytest.raises(build.CompileError, match="^no space left"):
        foci.attention(*(torch.randn(1, 1, 70, 16) for _ in range(3)))


@pytest.mark.parametrize(
    "named", ['g++ "', " ", "\\", "/", ".", "no/such", "''", "true", "false", "cat", "yes n", "sh -c 'echo \\#define __GNUC__ many'"]
)
def test_odd_names_of_a_compiler_are_a_reason_or_a_compiler(cache, monkeypatch, named):
    monkeypatch.setenv("FOCI_CXX", named)
    reason = build.obstacle()
    assert (reason is None) is (named == " ")
    assert reason is None or "FOCI_CXX" in reason or "does not" in reason


def test_a_compiler_that_does_not_speak_unicode(cache, tmp_path, monkeypatch):
    compiler = build.toolchain().path
    monkeypatch.setenv(
        "FOCI_CXX", script(tmp_path / "g++", f"printf '#define __WHERE__ \"\\351\"\\n'\nprintf '\\351' >&2\nexec {compiler} \"$@\"")
    )
    assert build.load(SOURCE % 21).answer() == 21
    with pytest.raises(build.CompileError, match="generated source"):
        build.load("not C++")


def test_a_compiler_behind_another_program_is_asked_again_when_it_changes(cache, tmp_path, monkeypatch):
    inner = tmp_path / "g++"
    script(inner, "echo '#define __GNUC__ 9'")
    monkeypatch.setenv("FOCI_CXX", f"env {inner}")
    assert "12 or later" in build.obstacle()
    script(inner, f'exec {build._probe(("g++",), build.flags()).path} "$@"')
    build._probe.cache_clear()
    assert build.obstacle() is None
    script(inner, "exit 3  # a third one")
    build._probe.cache_clear()
    assert "does not take" in build.obstacle()


# What else may lie in the cache ----------------------------------------------------------------------------------------


@pytest.fixture
def soon():
    """Nothing here may wait for ever."""
    signal.alarm(120)
    yield
    signal.alarm(0)


def anew(path, kind):
    """Puts something else in a file's place."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "inside").mkdir(parents=True)
    elif kind == "link":
        (path.parent / "elsewhere").write_bytes(b"else")
        path.symlink_to(path.parent / "elsewhere")
    else:
        path.write_bytes(b"\xff\xfe\x00\n\xe9\n")


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "bytes"])
def test_other_things_in_the_place_of_a_library(cache, monkeypatch, soon, kind):
    build.load(SOURCE % 22)
    (library,) = libraries(cache)
    anew(library, kind)
    start_anew(monkeypatch)
    build._temporary_directory.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert build.load(SOURCE % 22).answer() == 22
    assert ["takes no new files" in str(w.message) for w in said] == [True] * (kind == "folder")
    assert library.is_dir() or build._is_intact(library)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "bytes"])
def test_other_things_in_the_place_of_what_a_compiler_said(cache, monkeypatch, soon, kind):
    expected = build.toolchain()
    (remembered,) = cache.glob("compiler-*")
    anew(remembered, kind)
    start_anew(monkeypatch)
    assert build.toolchain() == expected


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_something_else_in_the_place_of_the_folder(cache, soon, kind):
    os.mkfifo(cache) if kind == "pipe" else cache.write_text("")
    assert build.cache_directory() is None
    build._temporary_directory.cache_clear()
    with pytest.warns(UserWarning, match=f"^{re.escape(str(cache))} .*FOCI_CACHE_DIR"):
        assert build.load(SOURCE % 23).answer() == 23


@pytest.mark.parametrize(
    ("mode", "own_group", "usable"),
    [(0o755, False, True), (0o777, False, False), (0o1777, False, True), (0o775, False, False), (0o775, True, True), (0o777, True, False)],
)
def test_folders_above_the_cache_count_too(cache, monkeypatch, mode, own_group, usable):
    monkeypatch.setattr(disk, "_is_own_group", lambda group: own_group)
    above = cache.parent / "above"
    monkeypatch.setenv("FOCI_CACHE_DIR", str(above / "below" / "cache"))
    (above / "below" / "cache").mkdir(parents=True, mode=0o700)
    above.chmod(mode)
    assert (build.cache_directory() is not None) is usable
    through = cache.parent / "through"
    through.symlink_to(above / "below")
    monkeypatch.setenv("FOCI_CACHE_DIR", str(through / "cache"))  # where a link leads to is what counts
    assert (build.cache_directory() is not None) is usable


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
@pytest.mark.parametrize("folder", ["above", "above/cache/cpu"])
def test_folders_of_another_user_are_not_used(cache, monkeypatch, folder):
    monkeypatch.setenv("FOCI_CACHE_DIR", str(cache.parent / "above" / "cache"))
    assert build.cache_directory() is not None
    os.chown(cache.parent / folder, 12345, -1)
    assert build.cache_directory() is None


def test_a_library_swapped_after_it_was_looked_at_is_not_loaded(cache, monkeypatch):
    build.load(SOURCE % 24)
    (library,) = libraries(cache)
    other = cache.parent / "other"
    other.mkdir()
    build._compile(SOURCE % 25, other, build.toolchain())
    disk.write_atomically(other / library.name, build._compile(SOURCE % 25, other, build.toolchain()))
    looked = disk.read_private

    def look_and_swap(*args):
        content = looked(*args)
        if other.exists():
            cache.rename(cache.parent / "away")
            other.rename(cache)
        return content

    monkeypatch.setattr(disk, "read_private", look_and_swap)
    build._loaded.clear()
    assert build.load(SOURCE % 24).answer() == 24
    assert not other.exists()


# Litter ------------------------------------------------------------------------------------------------------------------


def test_what_a_killed_process_left_is_removed(cache, tmp_path, soon):
    compiler = build.toolchain().path
    slow = script(tmp_path / "g++", f'for f; do case "$f" in *.cc) sleep 60;; esac; done\nexec {compiler} "$@"')
    program = f"from foci.backends.cpu import build; build.load({SOURCE % 26!r})"
    child = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "FOCI_CXX": slow}, start_new_session=True)
    while not list(cache.glob(".build-*")):
        assert child.poll() is None
        time.sleep(0.05)
    build.load(SOURCE % 27)
    assert len(list(cache.glob(".build-*"))) == 1  # it is at work
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    build.load(SOURCE % 28)
    assert not [p for p in cache.iterdir() if p.name.startswith(".")]


def test_old_unfinished_files_are_removed(cache):
    build.load(SOURCE % 29)
    old, new, begun = (cache / name for name in (".new-old", ".new-fresh", ".begun-old"))
    for path in (old, new):
        path.write_bytes(b"")
    begun.mkdir()
    for path in (old, begun):
        os.utime(path, (0, 0))
    build.load(SOURCE % 30)
    assert not old.exists()
    assert not begun.exists()
    assert new.exists()


@pytest.fixture
def nothing_loaded(monkeypatch):
    for name in ("_loaded", "_failed", "_building"):
        monkeypatch.setattr(build, name, {})


def test_two_libraries_are_made_at_once_and_one_only_once(nothing_loaded, monkeypatch):
    together, sources = threading.Barrier(2, timeout=30), []

    def find(source, stem, compiler):
        together.wait()
        sources.append(source)
        return SimpleNamespace(source=source)

    monkeypatch.setattr(build, "_find", find)
    with ThreadPoolExecutor(4) as pool:
        libraries = [library.source for library in pool.map(build.load, ("one", "other", "one", "other"))]
    assert libraries == ["one", "other", "one", "other"]
    assert sorted(sources) == ["one", "other"]


def test_all_who_wait_for_a_library_are_told_that_it_failed(nothing_loaded, monkeypatch):
    waits, tries = threading.Event(), []

    def find(source, stem, compiler):
        tries.append(source)
        waits.wait(30)
        raise OSError("no room")

    monkeypatch.setattr(build, "_find", find)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(build.load, "one") for _ in range(2)]
        waits.set()
        for future in futures:
            with pytest.raises(build.CompileError, match="no room"):
                future.result()
    with pytest.raises(build.CompileError, match="no room"):
        build.load("one")
    assert tries == ["one"]
