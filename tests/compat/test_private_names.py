"""Names of dependencies that are not public stand in foci.compat alone, and each is looked up with what foci does without it."""

import ast
import importlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import foci
from foci.compat import lookup

SOURCE = Path(foci.__file__).parent
PACKAGES = ("torch", "triton", "transformers", "numpy", "sympy", "rich", "typer", "matplotlib")


def is_private(name):
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def own_names(trees):
    """Underscore names that classes of foci have: methods, fields, what they set on themselves, and what it writes on others' objects."""
    names = {"_replace", "_fields", "_asdict"}  # of NamedTuple
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.FunctionDef):
                        names.add(part.name)
                    elif isinstance(part, (ast.Assign, ast.AnnAssign)):
                        targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                        names |= {target.id for target in targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.Attribute):
                is_set = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
                if is_set or node.attr.startswith("_foci_"):
                    names.add(node.attr)
    return names


def roots(tree):
    """Names in a module that stand for a dependency, or for a part of one."""
    names = set(PACKAGES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname for alias in node.names if alias.asname and alias.name.split(".")[0] in PACKAGES}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            names |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Attribute) and root_of(node.value) in names:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def root_of(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def private_names(tree, known_names):
    """(line, name) of what a module reads of its dependencies that is not public."""
    outside = roots(tree)
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] in PACKAGES and any(map(is_private, name.split("."))):
                yield node.lineno, name
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            is_outside = root_of(node) in outside and not isinstance(node.value, ast.Call)
            if node.attr not in known_names or (is_outside and root_of(node) != node.attr):
                yield node.lineno, ast.unparse(node)


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
OWN = own_names(tree for path, tree in TREES.items() if path.parent.name != "compat")


# NOW-03
@pytest.mark.parametrize("module", [path.relative_to(SOURCE).as_posix() for path in TREES if path.parent.name != "compat"])
def test_private_names_stand_in_compat(module):
    assert list(private_names(TREES[SOURCE / module], OWN)) == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._inductor import config",
        "from triton.runtime._async_compile import active_mode",
        "torch._C._get_tracing_state()",
        "nested._metadata_cache",
        "aten._softmax.default",
        "torch.nn.modules.module._has_any_global_hook()",
    ],
)
def test_a_private_name_is_found(line):
    assert len(list(private_names(ast.parse(line), OWN))) > 0


def test_own_names_are_no_private_names():
    assert list(private_names(ast.parse("self._mine; t._replace(a=1); Tensor.__repr__; _local"), {"_mine", "_replace"})) == []


# NOW-03
def test_a_missing_name_has_a_fallback_and_one_warning(monkeypatch):
    monkeypatch.setattr(lookup, "_names", {})
    with pytest.warns(UserWarning, match=r"torch\.nn\.no_such is missing .* without it, foci adds by hand"):
        assert lookup.find("torch.nn.no_such", sum, without="adds by hand") is sum
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lookup.find("torch.nn.no_such", sum, without="adds by hand") is sum
    assert lookup._names["torch.nn.no_such"] == lookup.PrivateName("torch.nn.no_such", lookup.SEEN, "adds by hand", False)


def test_a_name_taken_away_by_the_environment_gives_no_warning(monkeypatch):
    monkeypatch.setattr(lookup, "_names", {})
    monkeypatch.setattr(lookup, "_patterns", ["torch.nn.Lin*"])
    assert lookup.find("torch.nn.Linear", 1, without="does nothing") == 1
    assert lookup.find("torch.nn.Bilinear", 1, without="does nothing") != 1


def test_the_first_of_several_names_is_taken(monkeypatch):
    def look_up():
        return lookup.find_first(("torch.nn.no_such", ("3.0", "3.1")), ("torch.nn.Linear", ("2.11", "3.1")), fallback=sum, without="adds")

    monkeypatch.setattr(lookup, "_names", {})
    assert look_up() is torch.nn.Linear and list(lookup._names) == ["torch.nn.Linear"]
    monkeypatch.setattr(lookup, "_patterns", ["torch.nn.*"])
    assert look_up() is sum


def test_a_name_of_a_module_that_is_being_imported(tmp_path, monkeypatch):
    package = tmp_path / "foci_half_imported"
    package.mkdir()
    (package / "__init__.py").write_text("")
    looks = "from foci.compat.lookup import find\nNAME = 1\nFOUND = find('foci_half_imported.part.NAME', without='fails')\n"
    (package / "part.py").write_text(looks)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(lookup, "_names", {})
    assert importlib.import_module("foci_half_imported.part").FOUND == 1


# NOW-01
def test_importing_warns_of_nothing():
    modules = "foci, foci.nn, foci.fusion, foci.torch_compile, foci.integrations.patch, foci_cli.app, foci.distributed"
    code = f"import torch, warnings; warnings.simplefilter('error', UserWarning); import {modules}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
