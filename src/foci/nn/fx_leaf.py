"""Modules as leaves of the graphs that `torch.fx.symbolic_trace` makes, as torch.nn's own are."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Proxy

__all__ = ["is_traced", "leaf"]


def is_traced(*args: Any) -> bool:
    """Whether any of these stands for a tensor while torch.fx traces a model."""
    return any(isinstance(x, Proxy) for x in args)


def leaf(module: torch.nn.Module, *args: Any) -> Any:
    """The call of a module as one node, `call_module`, of the graph that is traced.

    torch.fx.Tracer takes modules of torch.nn for leaves by their name alone. It goes through any others, where what depends on values and
    shapes stops it.

    Raises:
        TypeError: for the module that is itself being traced, which cannot be a node of its own graph.
    """
    tracer: Any = next(x for x in args if isinstance(x, Proxy)).tracer
    path = tracer.path_of_module(module)
    if not path:
        raise TypeError(f"torch.fx cannot trace {type(module).__name__} itself, only a model that has it; torch.export takes both")
    return tracer.create_proxy("call_module", path, args, {})
