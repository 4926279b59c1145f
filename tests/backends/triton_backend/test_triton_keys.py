"""A kernel has one key in Triton's cache: in every process, whatever was compiled before it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

from triton.language import constexpr
from triton.runtime.jit import JITCallable

import foci

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no keys")

PROGRAM = """
import importlib, random, re, sys
from pathlib import Path
from triton.runtime.jit import JITFunction
import foci
from foci.backends.gpu.generated import jit_function

def all_functions():
    '''Functions of kernels in foci, and a generated one.'''
    root = Path(foci.__file__).parent
    found = [jit_function("score", "def score(x):\\n    return tanh(x)\\n")]
    for path in sorted(root.glob("backends/*/*.py")):
        if re.search(r"^@(gluon|triton)_jit", path.read_text(), re.M):
            module = importlib.import_module(".".join(("foci", *path.relative_to(root).with_suffix("").parts)))
            found += [each for each in vars(module).values() if isinstance(each, JITFunction) and each.fn.__module__ == module.__name__]
    return found
"""
KEYS = """
functions = all_functions()
for each in random.sample(functions, len(functions)):
    each.cache_key
for each in functions:
    print(each.fn.__module__, each.fn.__qualname__, each.cache_key)
"""


def test_keys_are_the_same_in_every_process_and_order():
    said = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM + KEYS], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    assert said[0] == said[1]
    assert len(said[0]) > 200
    assert len({line.split()[2] for line in said[0]}) == len(said[0])


@pytest.fixture(scope="module")
def functions():
    space = {}
    exec(PROGRAM, space)
    return [each for each in space["all_functions"]() if each.fn.__module__ in sys.modules]


def test_functions_of_kernels_have_the_decorators_of_foci():
    source = Path(foci.__file__).parent
    own = re.compile(r"\b(triton|gluon)\.jit\b(?!\.)|from triton\S* import .*\bjit\b")
    found = {path.relative_to(source).as_posix() for path in source.rglob("*.py") if own.search(path.read_text())}
    assert found == {"compat/jit.py", "compat/gluon.py"}  # where they are made of Triton's


def find(functions, module, name="attention_forward"):
    return next(each for each in functions if (each.fn.__module__, each.fn.__name__) == (module, name))


def test_a_key_has_all_that_its_function_reads(functions):
    """Constants by what they are, foci's functions and classes by the text of their modules, and Triton's by its release. Of anything else a
    key would have the name alone."""
    from foci.compat.jit import _globals_read, called_functions

    def is_known(value):
        if isinstance(value, JITCallable):
            value = value.fn
        if isinstance(value, FunctionType | type):
            return value.__module__.startswith(("foci.", "triton.")) or value.__module__ == "builtins"
        if isinstance(value, ModuleType):
            return value.__name__.startswith("triton.") or value.__name__ in ("math",)
        return isinstance(value, constexpr | int | float | str | None)

    read = 0
    for function in {called for each in functions for called in called_functions(each.fn)}:
        assert function.__closure__ is None or function.__wrapped__, function
        for name, value in _globals_read(function):
            read += 1
            assert is_known(value), (function, name)
    assert read > 1000


def test_a_kernel_has_the_functions_that_it_calls(functions):
    from foci.compat.jit import called_functions

    portable = {each.__name__ for each in called_functions(find(functions, "foci.backends.gpu.forward").fn)}
    assert {"attention_forward", "find_task", "decode"} <= portable
    assert len(portable) > 20
    hopper = {each.__name__ for each in called_functions(find(functions, "foci.backends.hopper.forward").fn)}
    assert {"attention_forward", "consume_all", "accumulate_tiles", "smem_layout", "specialize"} <= hopper
    assert len(hopper) > 50


def test_a_constant_of_a_called_function_is_part_of_the_key(functions, monkeypatch):
    from foci.backends.gpu import tiles
    from foci.compat.jit import triton_jit

    forward = find(functions, "foci.backends.gpu.forward")
    assert triton_jit(forward.fn).cache_key == forward.cache_key
    monkeypatch.setattr(tiles, "RECORD", constexpr(tiles.RECORD.value + 1))
    assert triton_jit(forward.fn).cache_key != forward.cache_key
    monkeypatch.undo()
    assert triton_jit(forward.fn).cache_key == forward.cache_key


def test_triton_asks_for_these_keys(functions):
    """Of a kernel and of the functions among its arguments."""
    from triton.compiler import ASTSource

    from foci.backends.gpu.generated import jit_function

    kernel = find(functions, "foci.backends.gpu.forward")
    scores = [jit_function("score", f"def score(x):\n    return tanh(x) + {n}\n") for n in (1, 2)]
    at = kernel.arg_names.index("score")
    hashes = [ASTSource(kernel, dict.fromkeys(kernel.arg_names, "*fp32"), {(at,): score}).hash() for score in (*scores, scores[0])]
    assert hashes[0] == hashes[2] != hashes[1]
    assert [each.hash for each in (kernel, *scores)] == [None] * 3  # Triton made none of its own
