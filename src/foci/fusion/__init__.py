"""Attention recognised in graphs by its meaning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from foci.fusion.compiler import Compiler, compile
    from foci.fusion.exported import fuse_exported
    from foci.fusion.fuse_pass import fuse
    from foci.fusion.fusion_report import Fused, Site
    from foci.fusion.inductor import inductor_pass
    from foci.fusion.report import summary, table
    from foci.fusion.verify import VerificationError

__all__ = ["Compiler", "Fused", "Site", "VerificationError", "compile", "fuse", "fuse_exported", "inductor_pass", "summary", "table"]

# Imported when asked for: padding needs nothing of recognition, and `inductor_pass` needs Inductor, which takes a second to import.
_LATER: Final = {
    "Compiler": "compiler",
    "Fused": "fusion_report",
    "Site": "fusion_report",
    "VerificationError": "verify",
    "compile": "compiler",
    "fuse": "fuse_pass",
    "fuse_exported": "exported",
    "inductor_pass": "inductor",
    "summary": "report",
    "table": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'foci.fusion' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"foci.fusion.{_LATER[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
