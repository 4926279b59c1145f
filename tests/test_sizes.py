"""Sizes that keep the source readable: lines of a file, and parameters of a function."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MOST_LINES = 500
MOST_PARAMETERS = 6
"""Of 19 functions in 20, outside of GPU kernels: entry points take what torch's do."""
MOST_OF_KERNELS = 10
"""Of 19 in 20 functions that Triton compiles: what travels together is one named tuple."""


def counts(source, *, compiled=False):
    """Parameters of each function, `self` and `cls` aside, that Triton does not compile, or of those that it does."""
    lengths = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list) == compiled:
            names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            lengths.append(len(names) - (names[:1] in (["self"], ["cls"])))
    return lengths


@pytest.mark.parametrize("path", [*FILES, *TESTS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_is_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize(("compiled", "most"), [(False, MOST_PARAMETERS), (True, MOST_OF_KERNELS)])
def test_functions_take_few_parameters(compiled, most):
    every = sorted(count for path in FILES for count in counts(path.read_text(encoding="utf-8"), compiled=compiled))
    assert every[int(0.95 * len(every))] <= most


def test_parameters_are_counted():
    source = "class A:\n    def f(self, a, /, b, *, c): ...\n\n@triton.jit\ndef g(a): ...\n\n\ndef h(): ...\n"
    assert (counts(source), counts(source, compiled=True)) == ([0, 3], [1])
