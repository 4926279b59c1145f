"""Every container at module level that calls fill is in docs/design.md: at most six caches, each with key, value, bound and owner."""

import ast
import re
from pathlib import Path

import foci
from foci import weak_cache

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
    "make_store",
    "set",
}


MUTABLE = r"(Final\[)?(dict|list|set|deque|Counter|OrderedDict|defaultdict|WeakCache|weakref\.\w+)\["
CACHES_AT_MOST = 6


def containers(source):
    """Names of module-level containers that are empty at first, made by one of `MAKERS`, or annotated as one unless named as a constant."""
    for node in ast.parse(source).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        value = node.value
        name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        is_empty = (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)
        is_made = isinstance(value, ast.Call) and re.split(r"[.\[]", ast.unparse(value.func))[-1] in MAKERS
        is_annotated = isinstance(node, ast.AnnAssign) and re.match(MUTABLE, ast.unparse(node.annotation)) and not name.isupper()
        if (is_empty or is_made or is_annotated) and name != "__all__":
            yield name


def tables():
    """Rows of the tables in "Caches and other state", as lists of cells, by the first cell of the head."""
    section = DESIGN.read_text(encoding="utf-8").partition("## Caches and other state")[2].partition("\n## ")[0]
    found = re.findall(r"^\|(.*)\|\n\|[-|]*\|\n((?:\|.*\|\n)+)", section, re.MULTILINE)
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *rows.strip().split("\n"))] for head, rows in found]


def test_every_container_is_in_a_table():
    modules = ((path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py")))
    actual = {f"{module}: {name}" for module, source in modules if not module.startswith("cli/") for name in containers(source)}
    named = [row[0].strip("`") for head, *rows in tables() if head[0] == "module and name" for row in rows]
    assert sorted(actual) == sorted(named)


def test_caches_are_few_and_have_a_key_a_bound_and_an_owner():
    head, *rows = tables()[0]
    assert head == ["module and name", "key", "value", "bound", "owner"]
    assert len(rows) <= CACHES_AT_MOST
    assert all(len(row) == len(head) and all(row) for row in rows)


def test_kinds_and_bounds_of_derived_values_are_those_of_the_table():
    head, *rows = tables()[1]
    assert head == ["kind", "computed from", "bound", "module"]
    assert {kind: int(bound) for kind, _, bound, _ in rows} == weak_cache._CAPACITIES
    for kind, _, _, module in rows:
        assert f'"{kind}"' in (SOURCE / f"{module.strip('`')}.py").read_text(encoding="utf-8")


def test_attributes_that_cache_are_those_of_the_table():
    head, *rows = tables()[2]
    assert head == ["object", "attribute", "holds", "bound"]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    for name, attributes, _, _ in rows:
        body = re.search(rf"^class {name.strip('`')}\b.*?(?=^class |\Z)", sources, re.MULTILINE | re.DOTALL)[0]
        assert all(attribute.strip("` ") in body for attribute in attributes.split(","))


def test_a_container_is_found():
    source = (
        "a = {}\nb: list[int] = []\nc = {1: 2}\nd = weakref.WeakKeyDictionary()\ne = OrderedDict()\n"
        "f: dict[str, int] = make()\nG: dict[str, int] = {1: 2}\nh: Final[set[int]] = {*range(3)}\n"
    )
    assert [*containers(source)] == ["a", "b", "d", "e", "f", "h"]
