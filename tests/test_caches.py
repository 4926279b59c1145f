"""Every container at module level that calls fill is in the table of docs/design.md, with its key and its bound."""

import ast
import re
from pathlib import Path

import foci

SOURCE = Path(foci.__file__).parent
DESIGN = SOURCE.parents[1] / "docs" / "design.md"
MAKERS = {
    "Counter",
    "OrderedDict",
    "WeakCache",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "WeakSet",
    "defaultdict",
    "deque",
    "dict",
    "list",
    "set",
    "Sequences",
}


def containers(source):
    """Names of module-level containers that are empty at first, or made by one of `MAKERS`."""
    for node in ast.parse(source).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        value = node.value
        is_empty = (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)
        is_made = isinstance(value, ast.Call) and re.split(r"[.\[]", ast.unparse(value.func))[-1] in MAKERS
        name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        if (is_empty or is_made) and name != "__all__":
            yield name


def test_the_table_of_caches_is_whole():
    modules = ((path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py")))
    actual = {f"{module}: {name}" for module, source in modules if not module.startswith("cli/") for name in containers(source)}
    section = DESIGN.read_text(encoding="utf-8").partition("## Caches and other state")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))
    assert actual == listed


def test_a_container_is_found():
    source = "a = {}\nb: list[int] = []\nc = {1: 2}\nd = weakref.WeakKeyDictionary()\ne = OrderedDict()\n"
    assert [*containers(source)] == ["a", "b", "d", "e"]
