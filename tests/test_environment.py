"""One module reads what surrounds a call, so that nothing a kernel depends on is missing from the key of its cache."""

import ast
from pathlib import Path

import pytest

import foci

SOURCE = Path(foci.__file__).parent
MODULES = {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}

READERS = {
    "is_autocast_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype", "is_autocast_available",
    "are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled", "get_float32_matmul_precision",
    "get_deterministic_debug_mode", "allow_tf32", "fp32_precision", "allow_fp16_reduced_precision_reduction",
    "is_cudnn_sdp_enabled", "is_flash_sdp_enabled", "is_math_sdp_enabled", "is_mem_efficient_sdp_enabled",
    "flash_sdp_enabled", "math_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled", "get_num_threads",
}  # fmt: skip
"""Functions and attributes of torch that tell how the process or the thread is set."""
WHERE = {
    "environment.py": "reads them for all others",
    "compat/torch.py": "names them",
    "backends/aten.py": "turns torch's switch for deterministic algorithms on for torch's kernels, and back",
    "backends/cpu/native_call.py": "the running kernel takes as many threads as torch, and no plan depends on it",
    "nn/linear_ops.py": "chooses the library of a linear layer at each call",
    "padding/model.py": "prices products that a graph compiles once, for the precision that its guards hold",
    "padding/tuning.py": "times products in a precision of its own",
}
"""Modules that read one, and why their readings belong in no key of a call."""
OF_FOCI = {"context.py", "environment.py"}
"""Modules that know how `foci.use` is set."""


def names_read(source):
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def read_in(source, readers=frozenset(READERS)):
    return readers & {*names_read(source)}


# FLEX-09
@pytest.mark.parametrize("module", MODULES)
def test_settings_of_torch_are_read_in_one_place(module):
    settings = read_in(MODULES[module])
    if module.startswith(("bench/", "cli/", "demo/")):
        settings = settings - {"get_num_threads"}  # printed
    assert not settings or module in WHERE, f"{module} reads {sorted(settings)}: take it from foci.environment.Environment"


def test_each_exception_is_one():
    assert [module for module in WHERE if not read_in(MODULES[module])] == []


@pytest.mark.parametrize("module", [m for m in MODULES if m not in OF_FOCI and not m.startswith("cli/")])
def test_what_may_run_is_read_in_one_place(module):
    tree = ast.parse(MODULES[module])
    imported = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "foci.context" for alias in node.names
    }
    assert imported.isdisjoint({"allowed_backends", "is_tuning"}), "import them from foci.environment"
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert "backends.changes" not in calls, "foci.environment.Environment has the registry's version"


def test_a_reading_is_found():
    assert read_in("import torch\nx = torch.is_autocast_enabled('cpu')") == {"is_autocast_enabled"}
    assert read_in("from torch.backends.cuda import flash_sdp_enabled as f") == {"flash_sdp_enabled"}
    assert read_in("import torch\nx = torch.backends.cuda.matmul.fp32_precision") == {"fp32_precision"}
