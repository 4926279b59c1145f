"""Writes docs/api/: a page for each public module, with an entry for each name in its `__all__`: `make reference`.

mkdocstrings finds a docstring by where its object is defined, which is not where users import it from.
"""

from __future__ import annotations

import importlib
import types
from pathlib import Path

PAGES = {
    "foci": "Attention with any mask and score, torch's functions, and what says and restricts which backend runs.",
    "foci.masks": "Masks by name. Combine them with `&`, `|` and `~`. The [gallery](../gallery.md) shows each one.",
    "foci.scores": "Scores by name. Combine them with `>>`. The [gallery](../gallery.md) shows each one.",
    "foci.nn": "Transformer modules with torch.nn's arguments and parameters. [Modules](../modules.md) explains them.",
    "foci.integrations": "foci in transformers and in torch's registry. [Integrations](../integrations.md) explains them.",
    "foci.kernel_packs": "Kernels compiled before they are needed. [First calls and kernel packs](../kernel-packs.md) explains them.",
    "foci.distributed": "Attention over tensors that the ranks of a process group share.",
}

API = Path(__file__).parent / "api"


def page(module: str) -> str:
    """The text of a module's page."""
    lines = [f"# {module}", "", PAGES[module]]
    namespace = importlib.import_module(module)
    for name in sorted(namespace.__all__, key=str.lower):
        value = getattr(namespace, name)
        if isinstance(value, types.ModuleType):  # has a page of its own
            continue
        path = f"{value.__module__}.{value.__qualname__}"
        lines += ["", f"::: {path}", "    options:", f"      heading: {module}.{name}", f"      toc_label: {name}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    API.mkdir(exist_ok=True)
    for module in PAGES:
        (API / f"{module}.md").write_text(page(module), encoding="utf-8")


if __name__ == "__main__":
    main()
