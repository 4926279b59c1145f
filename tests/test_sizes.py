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


def counts(source):
    """Parameters of each function, `self` and `cls` aside, that Triton does not compile."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            found.append(len(names) - (names[:1] in (["self"], ["cls"])))
    return found


@pytest.mark.parametrize("path", [*FILES, *TESTS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_is_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_functions_take_few_parameters():
    every = sorted(count for path in FILES for count in counts(path.read_text(encoding="utf-8")))
    assert every[int(0.95 * len(every))] <= MOST_PARAMETERS


def test_parameters_are_counted():
    assert counts("class A:\n    def f(self, a, /, b, *, c): ...\n\n@triton.jit\ndef g(a): ...\n\n\ndef h(): ...\n") == [0, 3]
