"""The lengths of a sequence as calls that stay in Dynamo's graph. Imports Dynamo, so it is imported only under it."""

from __future__ import annotations

from typing import Any

import torch

from foci.ir.trace import length_symbol

__all__ = ["length_in_graph"]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def length_in_graph(name: str) -> Any:
    """`foci.ir.trace.length_symbol`, left to whoever runs the graph."""
    return length_symbol(name)
