"""Docstrings begin with a sentence that stands alone: a noun for a class, an imperative for a function. Names of functions are verbs."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
FILES = sorted(SOURCE.rglob("*.py"))
FRAGMENTS = ("They", "It", "Its", "Those", "These", "That", "This", "Them", "Likewise", "So", "What", "Of", "The same")


def first_lines(source):
    """Names and first lines of the docstrings of classes and functions."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [(node.name, ast.get_docstring(node).splitlines()[0]) for node in nodes if ast.get_docstring(node)]


def is_fragment(line):
    return line.startswith(tuple(f"{word} " for word in FRAGMENTS)) or len(line.split()) == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_docstrings_begin_with_a_sentence(path):
    fragments = [(name, line) for name, line in first_lines(path.read_text(encoding="utf-8")) if is_fragment(line)]
    assert fragments == []


@pytest.mark.parametrize("line", ["They.", "Of the forward.", "The same for keys.", "What is known."])
def test_fragments_are_found(line):
    assert is_fragment(line) and not is_fragment("Return the keys.")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_functions_are_named_by_verbs(path):
    """`find_range`, not `range_of`."""
    functions = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)]
    assert [node.name for node in functions if node.name.endswith("_of")] == []
