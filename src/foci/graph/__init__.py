"""Attention recognised in graphs by its meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foci.graph.compiler import Compiler, compile
from foci.graph.exported import fuse_exported
from foci.graph.recognise import fuse
from foci.graph.report import summary, table
from foci.graph.sites import Fused, Site
from foci.graph.verify import VerificationError

if TYPE_CHECKING:
    from foci.graph.inductor import inductor_pass

__all__ = ["Compiler", "Fused", "Site", "VerificationError", "compile", "fuse", "fuse_exported", "inductor_pass", "summary", "table"]


def __getattr__(name: str) -> Any:
    if name != "inductor_pass":  # needs Inductor, which takes a second to import
        raise AttributeError(f"module 'foci.graph' has no attribute {name!r}")
    from foci.graph.inductor import inductor_pass

    return inductor_pass
