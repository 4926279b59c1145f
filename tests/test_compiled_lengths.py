"""Every test that compiles a function calls it with at least three values of each number and length, or says why it does not.

`tests/compiled.py` has the reason, and what checks that values differ. A test file may name `torch.compile` in a function that calls one of
`CHECKS`, or that has a comment "one length: " with a reason.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = {str(path.relative_to(TESTS)): path for path in sorted(TESTS.rglob("*.py"))}

# What fails where a compiled function sees fewer values: of `compiled` itself, and of the helpers that call it.
CHECKS = {
    "compiled": {"check_variety", "compare", "several"},
    "fusing": {"fused"},
    "machines": {"other_sizes"},
}
# Helpers that give a compiled function to their caller, who has to call it often enough.
COMPILERS = {"machines": {"compiled"}, "spelling_harness": {"compiled"}}
REASON = re.compile(r"# one length: \S.{8,}")


def imported(tree: ast.Module, table: dict[str, set[str]]) -> set[str]:
    """The names of a table that a file imports, as it calls them."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
        if alias.name in table.get(node.module.split(".")[-1], ())
    }


def compilations(node: ast.AST, compilers: set[str]) -> Iterator[ast.expr]:
    """Where `torch.compile` or `foci.compile` is named, or a helper called that compiles."""
    for inner in ast.walk(node):
        if (isinstance(inner, ast.Attribute) and inner.attr == "compile" and ast.unparse(inner.value) in ("torch", "foci")) or (
            isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id in compilers
        ):
            yield inner


def calls(node: ast.AST) -> set[str]:
    return {n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


def units(tree: ast.Module) -> Iterator[ast.stmt]:
    """Functions and statements at a file's top, and those of its classes."""
    for node in tree.body:
        yield from node.body if isinstance(node, ast.ClassDef) else (node,)


def unchecked(source: str) -> list[str]:
    """Functions that compile, call none of `CHECKS`, and state no reason: each with its line."""
    tree, lines, messages = ast.parse(source), source.splitlines(), []
    compilers, checks = imported(tree, COMPILERS), imported(tree, CHECKS)
    for unit in units(tree):
        first = min((n.lineno for n in getattr(unit, "decorator_list", ())), default=unit.lineno)
        places = [place.lineno for place in compilations(unit, compilers)]
        stated = REASON.search("\n".join(lines[max(first - 2, 0) : unit.end_lineno]))
        if places and not stated and not checks & calls(unit):
            messages.append(f"{places[0]}: {getattr(unit, 'name', 'at the top')}")
    return messages


@pytest.mark.parametrize("name", FILES)
def test_compiled_functions_are_called_with_three_values_of_each_length(name):
    if name == "compiled.py":
        return
    assert unchecked(FILES[name].read_text(encoding="utf-8")) == []


ONE_CALL = "def test_it():\n    out = torch.compile(f)(x)\n"


@pytest.mark.parametrize(
    "source",
    [
        ONE_CALL,
        "def test_it():\n    foci.compile(f)(x)\n",
        "@torch.compile\ndef f(x): ...\n",
        "class Test:\n    def test_it(self):\n        def f(x): ...\n        list(map(torch.compile, [f]))\n",
        "from machines import compiled\ndef test_it():\n    compiled(f, r)(x)\n",
        "from spelling_harness import compare\ndef test_it():\n    compare(f, torch.compile(f))\n",
        "from compiled import compare\ndef test_it():\n    torch.compile(f)(x)\ndef test_other():\n    compare(f, [])\n",
        "def test_it():\n    torch.compile(f)(x)  # one length:\n",
    ],
)
def test_a_single_call_is_found(source):
    assert len(unchecked(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from compiled import compare\ndef test_it():\n    compare(f, [], torch.compile(f))\n",
        "from compiled import several\ndef test_it():\n    c = torch.compile(f)\n    for n in several(1, 2, 3):\n        c(n)\n",
        "def test_it():\n    torch.compile(f)(x)  # one length: the file that it is exported to has one\n",
        "re.compile('a')\n",
    ],
)
def test_others_are_not(source):
    assert unchecked(source) == []
