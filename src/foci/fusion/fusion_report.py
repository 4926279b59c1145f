"""Result of the fuse pass: one `Site` for every attention, fused or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import fx

__all__ = ["Fused", "Kind", "Site"]

Kind: TypeAlias = Literal["matmul-softmax-matmul", "sdpa", "flex", "mha"]


@dataclass(frozen=True)
class Site:
    """One attention of a graph.

    Attributes:
        fused: foci runs it.
        location: "file.py:line" of the user's code, "" where the graph does not say.
        variant: the printed expression: score and mask. "" when not fused.
        reason: when not fused, the one thing that stood in the way.
        kind: how the graph spells it.
    """

    fused: bool
    location: str
    variant: str
    reason: str | None
    kind: Kind


@dataclass(frozen=True, eq=False)
class Fused:
    """A graph with its attentions replaced, and what was found in it."""

    graph_module: fx.GraphModule
    sites: tuple[Site, ...]
