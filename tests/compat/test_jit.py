"""Decorators of functions of kernels: Triton's, but a source is read when something first needs it, and a key is made without parsing.
Keys of foci's kernels: `tests/backends/triton_backend/test_triton_keys.py`."""

import importlib.util
import itertools
import linecache
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

import triton
from triton.experimental import gluon
from triton.runtime import jit as runtime
from triton.runtime.jit import JITFunction

from foci.backends.gpu.generated import jit_function
from foci.compat import jit
from foci.compat.gluon import gluon_jit
from foci.compat.jit import triton_jit

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has functions of its own")


def plain(x_ptr, SIZE: triton.language.constexpr = 16):
    """Adds one."""
    offsets = triton.language.arange(0, SIZE)
    triton.language.store(x_ptr + offsets, triton.language.load(x_ptr + offsets) + 1)


def is_read(function):
    return "params" in vars(function)


@pytest.mark.parametrize(("ours", "theirs"), [(triton_jit, triton.jit), (gluon_jit, gluon.jit)], ids=["triton", "gluon"])
@pytest.mark.parametrize("options", [{}, {"noinline": True, "do_not_specialize": ["x_ptr"]}], ids=["bare", "options"])
def test_a_function_is_as_tritons(ours, theirs, options):
    function = ours(plain) if not options else ours(**options)(plain)
    expected = theirs(plain) if not options else theirs(**options)(plain)
    assert not is_read(function)
    assert is_read(expected)
    assert isinstance(function, type(expected))
    assert type(function).__name__ == type(expected).__name__
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__globals__"):
        assert getattr(function, name) is getattr(expected, name)
    assert function.fn is plain and not is_read(function)
    assert function.params[0].name == "x_ptr"
    assert is_read(function)
    assert vars(expected).keys() <= vars(function).keys()
    for name in ("src", "arg_names", "noinline", "do_not_specialize", "starting_line_number", "signature", "launch_metadata", "module"):
        assert getattr(function, name) == getattr(expected, name)
    assert hash(function) == hash(ours(plain))


@pytest.mark.parametrize("ask", [str, lambda f: f.params, lambda f: f.src, lambda f: f.parse()], ids=["str", "params", "src", "parse"])
def test_whatever_is_asked_first_reads_it(ask):
    assert type(ask(triton_jit(plain))) is type(ask(triton.jit(plain)))


def test_attributes_that_it_lacks_are_missing():
    function = triton_jit(plain)
    assert not hasattr(function, "no_such_attribute")
    assert not hasattr(function, "__no_such_attribute__")
    assert not hasattr(type(function).__new__(type(function)), "src")  # as `copy` and `pickle` make them


def test_a_source_that_cannot_be_read_is_an_error_each_time():
    space = {}
    exec(compile("def unread(x):\n    pass\n", "<no such file>", "exec"), space)
    function = triton_jit(space["unread"])
    for _ in range(2):
        with pytest.raises((OSError, ValueError)):
            function.src  # noqa: B018


def test_threads_read_it_once(monkeypatch):
    made, start = [], threading.Barrier(8)
    construct = JITFunction.__init__

    def counting(self, *args, **options):
        made.append(self)
        construct(self, *args, **options)

    monkeypatch.setattr(JITFunction, "__init__", counting)
    function = triton_jit(plain)

    def ask():
        start.wait(10)
        return function.src

    with ThreadPoolExecutor(8) as pool:
        sources = [each.result(10) for each in [pool.submit(ask) for _ in range(8)]]
    assert made == [function]
    assert len(set(sources)) == 1


HELPER = """
from triton.language import constexpr
FACTOR = constexpr(2)
class Place: pass
"""
CALLED = """
from foci.compat.jit import triton_jit
from foci.helper_of_test import Place
from triton.language import constexpr
ADDED = constexpr(1)
@triton_jit
def called(x):
    return x + ADDED
"""
KERNEL = """
from foci.called_of_test import called
from foci.compat.jit import triton_jit
from foci.helper_of_test import FACTOR, Place
@triton_jit
def kernel(x):
    place = Place()
    return called(x) * FACTOR
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A function that writes and imports three modules, and gives the last one's kernel."""

    writes = itertools.count(1)

    def make(helper=HELPER, called=CALLED, kernel=KERNEL, folder="first"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for name, text in (("helper", helper), ("called", called), ("kernel", kernel)):
            path = tmp_path / folder / f"{name}_of_test.py"
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
                os.utime(path, (next(writes),) * 2)  # long before this process began
            spec = importlib.util.spec_from_file_location(f"foci.{path.stem}", path)
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, spec.name, module)
            spec.loader.exec_module(module)
        return module.kernel

    return make


def test_a_key_is_of_the_texts_of_all_modules_that_are_reached(modules):
    keys = {
        modules(folder="1").cache_key,
        modules(HELPER.replace("pass", "SIZE = 1"), folder="2").cache_key,
        modules(called=CALLED.replace("x + ADDED", "x - ADDED"), folder="3").cache_key,
        modules(kernel=KERNEL.replace("x) *", "x) /"), folder="4").cache_key,
    }
    assert len(keys) == 4
    assert modules(folder="5").cache_key in keys


def test_a_key_is_of_the_constants_that_are_read(modules, monkeypatch):
    """As those that modules make of the environment."""
    called = CALLED.replace("constexpr(1)", 'constexpr(__import__("os").environ.get("ADDED_OF_TEST"))')
    keys = []
    for added in ("1", "2", "1"):
        monkeypatch.setenv("ADDED_OF_TEST", added)
        keys.append(modules(called=called).cache_key)
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize("changed", ["helper", "called", "kernel"])
def test_a_module_keeps_the_text_that_was_imported(modules, changed, tmp_path):
    """Or another process, which imports the new text, would take this one's kernel for its own."""
    expected = modules(folder="another").cache_key
    old = modules()
    path = tmp_path / "first" / f"{changed}_of_test.py"
    path.write_text("# another text\n" + path.read_text())
    assert old.cache_key == expected
    assert old.src == "def kernel(x):\n    place = Place()\n    return called(x) * FACTOR\n"
    assert old.starting_line_number == KERNEL.splitlines().index("@triton_jit") + 1


def test_a_module_that_is_imported_again_has_its_new_text(modules):
    key = modules().cache_key
    new = modules(kernel="\n\n" + KERNEL.replace("x) *", "x) /"))
    assert new.src.endswith("return called(x) / FACTOR\n")
    assert new.cache_key != key
    assert modules().cache_key == key


def test_a_module_that_is_reloaded_has_its_new_text(modules, tmp_path):
    modules()
    path, module = tmp_path / "first" / "kernel_of_test.py", sys.modules["foci.kernel_of_test"]
    path.write_text("\n\n" + KERNEL.replace("x) *", "x) /"))
    module.__spec__.loader.exec_module(module)
    assert module.kernel.src.endswith("return called(x) / FACTOR\n")


def test_a_function_that_is_held_while_its_module_is_reloaded_has_its_old_text(modules, tmp_path):
    """Read late, at its old lines, it would be another function of the new text."""
    expected = modules(folder="another").cache_key
    kernel = modules()
    path, module = tmp_path / "first" / "called_of_test.py", sys.modules["foci.called_of_test"]
    held = kernel.fn.__globals__["called"]
    path.write_text(CALLED.replace("@triton_jit", "@triton_jit\ndef zero(x):\n    return x\n@triton_jit"))
    sys.modules["foci.called_of_test"].__spec__.loader.exec_module(module)
    assert module.called is not held
    assert held.src == "def called(x):\n    return x + ADDED\n"
    assert kernel.cache_key == expected


def test_a_source_does_not_need_what_linecache_holds(modules):
    kernel = modules()
    made = jit_function("score", "def score(x):\n    return x\n")
    linecache.clearcache()
    assert made.src == "def score(x):\n    return x\n"
    assert kernel.src == "def kernel(x):\n    place = Place()\n    return called(x) * FACTOR\n"
    assert not linecache.cache  # nothing is left there


def test_a_module_that_was_written_after_its_import_gives_keys_of_this_process_alone(modules, monkeypatch):
    """A text that is read later than its module, as that of one without kernels, may not be what runs."""
    keys = []
    for process in ("one", "another"):
        monkeypatch.setattr(jit, "_THIS_PROCESS", process)
        monkeypatch.setattr(jit, "IMPORTED_AT", 0)
        keys.append(modules(folder=process).cache_key)
    assert keys[0] != keys[1]


def test_a_class_of_a_module_that_was_imported_again_gives_keys_of_this_process_alone(modules, monkeypatch):
    keys = []
    for process in ("one", "another"):
        monkeypatch.setattr(jit, "_THIS_PROCESS", process)
        kernel = modules(folder=process)
        sys.modules["foci.helper_of_test"].Place = type("Place", (), {})
        keys.append(kernel.cache_key)
    assert keys[0] != keys[1]


def test_triton_is_told_of_the_constants_that_are_read(modules):
    """To refuse a kernel once they have changed: `tests/backends/triton_backend/test_triton_compiling.py`."""
    kernel = modules()
    kernel.cache_key  # noqa: B018
    named = {name: value for (name, _), (value, _) in kernel.used_global_vals.items()}
    assert {name: value.value for name, value in named.items()} == {"FACTOR": 2, "ADDED": 1}


def test_another_thread_sees_all_parameters(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    class Slow(runtime.KernelParam):
        def __init__(self, *args, **options):
            begun.set()
            go_on.wait(10)
            super().__init__(*args, **options)

    monkeypatch.setattr(runtime, "KernelParam", Slow)
    function = triton_jit(plain)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: function.src)
        begun.wait(10)
        second = pool.submit(lambda: [parameter.name for parameter in function.params])
        time.sleep(0.05)
        go_on.set()
        first.result(10)
        assert second.result(10) == ["x_ptr", "SIZE"]


def test_text_of_which_it_is_not_known_whether_it_runs_gives_keys_of_this_process_alone(modules, monkeypatch):
    """A kernel's module is imported again, and a module that it names, of which nobody heard, has changed."""
    keys = []
    for process in ("one", "another"):
        monkeypatch.setattr(jit, "_THIS_PROCESS", process)
        modules(folder=process)
        keys.append(modules(HELPER + "CHANGED = 1", kernel=KERNEL + "# changed", folder=process).cache_key)
    assert keys[0] != keys[1]


UNREAD = """
import gc
from triton.runtime.jit import JITFunction
import foci.backends.hopper.kernel, foci.backends.gpu.kernel, foci.backends.gpu.mend
from foci.backends.gpu import backward, decode, forward
ours = [each for each in gc.get_objects() if isinstance(each, JITFunction) and each.fn.__module__.startswith("foci.")]
print(len(ours), sum("params" in vars(each) for each in ours))
"""


@pytest.mark.parametrize("patterns", ["", "triton.runtime.jit.JITFunction,triton.experimental.gluon._runtime.GluonJITFunction"])
def test_an_import_reads_no_source(patterns):
    """Except where Triton's classes have other names: its own decorators do."""
    env = {**os.environ, "FOCI_WITHOUT": patterns}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", UNREAD], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    functions, read = map(int, done.stdout.split())
    assert functions > 150
    assert read == (functions if patterns else 0)
