"""The build for the kernels library is whole, and holds no import by the name of foci. `make hub` runs it."""

import ast
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = runpy.run_path(str(ROOT / "kernels_hub/build.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("hub")
    namespace = BUILD["build"](target)
    path = target / "build" / "torch-cuda"
    assert json.loads((path / "metadata.json").read_text())["id"] == namespace
    return path


def test_imports_are_relative_and_reach_a_file(folder):
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert [alias.name for alias in node.names if alias.name.split(".")[0] == "foci"] == [], path
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module.split(".")[0] != "foci", path
            elif isinstance(node, ast.ImportFrom):
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                names = [base / alias.name for alias in node.names]
                files = [base.with_suffix(".py"), base / "__init__.py", *(name.with_suffix(".py") for name in names)]
                assert any(file.exists() for file in files), (path, node.lineno)


def test_operators_have_a_namespace_of_their_own(folder):
    text = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    for name in ("torch.ops.foci.", 'Library("foci"', "NAMESPACE"):
        assert name not in text
    assert '"foci::' not in (folder / "operator" / "library.py").read_text(encoding="utf-8")
    assert f"torch.ops.{json.loads((folder / 'metadata.json').read_text())['id']}.attention" in text


def test_what_the_build_leaves_out(folder):
    assert not {"cli", "fusion", "nn", "integrations", "padding"} & {path.name for path in folder.iterdir()}


def test_an_equal_source_gives_an_equal_name(folder, tmp_path):
    assert BUILD["build"](tmp_path / "again") == json.loads((folder / "metadata.json").read_text())["id"]


KEYS = """
import importlib, importlib.util, sys
folder, namespace = sys.argv[1:]
spec = importlib.util.spec_from_file_location(namespace, folder + "/__init__.py")
module = sys.modules[namespace] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
forward = importlib.import_module(namespace + ".backends.gpu.forward").attention_forward
jit = importlib.import_module(namespace + ".compat.jit")
modules = {function.__module__ for function in jit.called_functions(forward.fn)}
assert modules >= {f"{namespace}.backends.gpu.{name}" for name in ("forward", "tiles")}, modules
assert not any(name.startswith("foci.") for name in sys.modules)
print(forward.cache_key)
"""


def test_keys_of_kernels_are_of_all_that_they_call(folder):
    """The package has another name there."""
    pytest.importorskip("triton.experimental.gluon", reason="needs a Triton with Gluon")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter has no keys")
    command = [sys.executable, "-W", "ignore", "-c", KEYS, str(folder), json.loads((folder / "metadata.json").read_text())["id"]]
    done = [subprocess.run(command, capture_output=True, text=True, timeout=300, check=False) for _ in range(2)]
    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    assert done[0].stdout == done[1].stdout
