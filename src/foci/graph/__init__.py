"""Attention recognised in graphs by its meaning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from foci.graph.compiler import Compiler, compile
    from foci.graph.exported import fuse_exported
    from foci.graph.inductor import inductor_pass
    from foci.graph.recognise import fuse
    from foci.graph.report import summary, table
    from foci.graph.sites import Fused, Site
    from foci.graph.verify import VerificationError

__all__ = ["Compiler", "Fused", "Site", "VerificationError", "compile", "fuse", "fuse_exported", "inductor_pass", "summary", "table"]

# Imported when asked for: padding needs nothing of recognition, and `inductor_pass` needs Inductor, which takes a second to import.
_LATER: Final = {
    "Compiler": "compiler",
    "Fused": "sites",
    "Site": "sites",
    "VerificationError": "verify",
    "compile": "compiler",
    "fuse": "recognise",
    "fuse_exported": "exported",
    "inductor_pass": "inductor",
    "summary": "report",
    "table": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'foci.graph' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"foci.graph.{_LATER[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
