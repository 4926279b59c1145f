"""Builds foci for the `kernels` library, which loads a kernel from a folder under a name of its own: `make hub`.

    python kernels_hub/build.py kernels_hub/dist

The build holds the modules that `foci.attention` and `foci.varlen_attn` need and no others: no fusion, modules, integrations or commands.
Imports are relative. Operators have a namespace of their own, so that the build and an installed foci can be loaded in one process.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import shutil
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
VARIANT = "torch-cuda"

BACKENDS = ("hopper", "triton", "aten", "cpu", "blocked", "reference")
ENTRIES = ("foci.api", "foci.functional", "foci.check_kernels", *(f"foci.backends.{name}" for name in BACKENDS))

INIT = '''"""foci for the kernels library: attention with any mask and score function, and FlashAttention's functions."""

from foci import masks, scores
from foci.api import AuxOutput, AuxRequest, attention, explain
from foci.context import observe, use
from foci.flash import flash_attn_func, flash_attn_varlen_func
from foci.functional import flex_attention, scaled_dot_product_attention, varlen_attn
from foci.variant import Mask, Score, kv_len, q_len

__all__ = [
    "AuxOutput", "AuxRequest", "Mask", "Score", "attention", "explain", "flash_attn_func", "flash_attn_varlen_func", "flex_attention",
    "kv_len", "masks", "observe", "q_len", "scaled_dot_product_attention", "scores", "use", "varlen_attn",
]
'''

# What names the package by itself, other than in imports: file, text, what stands there in the build. NAMESPACE is the operators'.
REWRITES = (
    ("operator/library.py", 'Library("foci"', 'Library("NAMESPACE"'),
    ("operator/library.py", '"foci::', '"NAMESPACE::'),
    ("backends/__init__.py", '"foci.backends.', '__name__ + ".'),
    ("ir/function_fingerprint.py", 'startswith("foci.")', 'startswith(__name__.partition(".")[0] + ".")'),
    # A process of its own cannot import the build by name: kernels are compiled in this one, and the check loads the build from its folder.
    ("backends/gpu/compile_subprocess.py", "return has_own_keys(function) and not asked", "return False and not asked"),
    ("backends/self_check.py", "from foci import check_kernels", "check_kernels = load(sys.argv[3])"),
    ("backends/self_check.py", "\nimport json, os, sys\n", "\nimport importlib, importlib.util, json, os, sys\n" + '''

def load(file):
    spec = importlib.util.spec_from_file_location("NAMESPACE", file)
    module = sys.modules["NAMESPACE"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return importlib.import_module("NAMESPACE.check_kernels")


'''),
    ("backends/self_check.py", "(sys.path), device]", "(sys.path), device, str(Path(__file__).parents[1] / '__init__.py')]"),
)  # fmt: skip


def find_file(module: str) -> Path | None:
    """The file of a module of foci."""
    path = SOURCE.joinpath(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in found if file.exists()), None)


def collect_modules(entries: tuple[str, ...]) -> dict[str, Path]:
    """Every module that the entries import, at the top or in functions, with its file; not the package's own."""
    files: dict[str, Path] = {}
    waiting = list(entries)
    while waiting:
        module = waiting.pop()
        file = find_file(module)
        if module == "foci" or module in files or file is None:
            continue
        files[module] = file
        waiting.append(module.rpartition(".")[0])
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "foci":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    waiting.append(full if find_file(full) is not None else node.module)
            elif isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "foci" for alias in node.names):
                raise ValueError(f"{file}:{node.lineno}: only `from foci... import` becomes relative")
    return files


def make_relative(text: str, package_depth: int) -> str:
    """Source whose imports of foci are relative, for a module in a package so many names deep."""
    return re.sub(
        r"^(\s*)from foci\.?([\w.]*) import ", lambda m: f"{m[1]}from {'.' * package_depth}{m[2]} import ", text, flags=re.MULTILINE
    )


def build(target: Path) -> str:
    """Writes the build below `target` and returns its namespace, which depends on its content alone."""
    files = collect_modules(ENTRIES)
    texts = {file.relative_to(SOURCE / "foci").as_posix(): file.read_text(encoding="utf-8") for file in files.values()}
    texts |= {"__init__.py": INIT, "flash.py": Path(__file__).with_name("flash.py").read_text(encoding="utf-8")}
    for name, old, new in REWRITES:
        if old not in texts[name]:
            raise ValueError(f"src/foci/{name} holds no {old!r} any more: mend REWRITES")
        texts[name] = texts[name].replace(old, new)
    texts = {
        name: make_relative(text, 1 + name.count("/")).replace("torch.ops.foci.", "torch.ops.NAMESPACE.") for name, text in texts.items()
    }
    data = [path for suffix in ("h", "toml") for path in (SOURCE / "foci").rglob(f"*.{suffix}")]
    digest = hashlib.sha256("\0".join(f"{name}\0{text}" for name, text in sorted(texts.items())).encode())
    for path in sorted(data):
        digest.update(path.read_bytes())
    namespace = f"foci_cuda_{digest.hexdigest()[:12]}"

    folder = target / "build" / VARIANT
    shutil.rmtree(target, ignore_errors=True)
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("NAMESPACE", namespace), encoding="utf-8")
    for path in data:
        copy = folder / path.relative_to(SOURCE / "foci")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    about = {
        "id": namespace,
        "name": "foci",
        "version": 1,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    (folder / "metadata.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    address = urlsplit(project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]).path.strip("/")
    card = Path(__file__).with_name("CARD.md").read_text(encoding="utf-8")
    (target / "README.md").write_text(card.replace("REPOSITORY", address), encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", target / "LICENSE")
    return namespace


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build foci for the kernels library.")
    parser.add_argument("target", type=Path, help="folder to write, replaced if it exists")
    print(build(parser.parse_args().target))
