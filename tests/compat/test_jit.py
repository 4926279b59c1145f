"""Decorators of functions of kernels: Triton's, and a source is read when something first needs it."""

import linecache
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

import triton
from triton.experimental import gluon
from triton.runtime.jit import JITFunction

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
    assert function.cache_key == expected.cache_key
    assert is_read(function)
    assert vars(expected).keys() <= vars(function).keys()
    for name in ("src", "arg_names", "noinline", "do_not_specialize", "used_global_vals", "signature", "launch_metadata", "module"):
        assert getattr(function, name) == getattr(expected, name)
    assert hash(function) == hash(ours(plain)) or options


@pytest.mark.parametrize(
    "ask", [hash, str, lambda f: f.params, lambda f: f[1,], lambda f: f.cache_key], ids=["hash", "str", "params", "grid", "key"]
)
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
    text = "def unread(x):\n    pass\n"
    linecache.cache["<no such file>"] = (len(text), None, text.splitlines(keepends=True), "<no such file>")
    try:
        assert function.src == text
    finally:
        del linecache.cache["<no such file>"]


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
