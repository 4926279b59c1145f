"""Kernels of a graph's attentions, compiled while the rest of the graph is.

On a GPU the kernels of an attention take seconds to compile, and so does the rest of a model. So each attention of a fused graph
runs once, on zeros of its sizes, in a thread beside the compiler, forward and backward; the first step then finds them compiled.
Their Python is read in the processes that Inductor has for its own kernels, where it has some: the compiler wants this one's lock.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from foci.backends.compile_priority import Submit, unhurried
from foci.compat.inductor import process_pool
from foci.environment import allowed_backends, is_tuning, read_environment
from foci.execution import choose_kernel
from foci.fusion.fx_utils import example_tensor, example_value, needs_grad, size_hint
from foci.fusion.nested import walk_graphs
from foci.operator.op_schema import unflatten
from foci.problem import Cotangents
from foci.spec import NO_NEEDS, Needs

__all__ = ["Call", "begin", "find_calls"]

_MOST_BYTES: Final = 1 << 30
"""Most bytes of zeros: a larger attention runs so long that its compilation does not matter."""

_begun: set[str] = set()


@dataclass(frozen=True)
class Call:
    """A call of the operator in a graph.

    Attributes:
        args: of the operator; for a tensor its sizes, strides, dtype and device.
        needs: whose gradients are wanted.
        lse_grad: whether a gradient of the logsumexp comes.
    """

    args: tuple[Any, ...]
    needs: Needs
    lse_grad: bool

    @property
    def bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(math.prod(t.sizes) * t.dtype.itemsize for t in _geometries(self.args))

    @property
    def device(self) -> torch.device:
        """Device of the call."""
        query: _Geometry = self.args[0]
        return query.device

    def rehearse(self) -> None:
        """Runs it once, on zeros: what is read by index is there, whatever the index."""
        formula, operands, allowed = unflatten(_made(self.args))
        environment = read_environment(allowed, self.device)
        forward = choose_kernel(formula, operands, (*NO_NEEDS, (False,) * len(operands.captures)), environment)
        results = forward.kernel.forward(operands)
        if any((*self.needs[:3], *self.needs[3])):
            lse = torch.zeros_like(results.lse) if self.lse_grad else None
            cotangents = Cotangents(torch.zeros_like(results.out), lse, None, None)
            choose_kernel(formula, operands, self.needs, environment).kernel.backward(operands, results, cotangents)


@dataclass(frozen=True)
class _Geometry:
    """A tensor without its values."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def begin(graph_module: fx.GraphModule, inductor: Mapping[str, Any] | None = None) -> Callable[[], None]:
    """Start to compile the kernels of a graph's attentions on GPUs, in a thread.

    Args:
        graph_module: a fused graph.
        inductor: its settings where it compiles the rest.

    Returns:
        What waits for the end. Until then nobody may record what the device does.
    """
    if allowed_backends() is not None or is_tuning():
        return lambda: None
    all_calls = (call for graph in walk_graphs(graph_module) for call in find_calls(graph))
    calls = {str(call): call for call in all_calls if call.device.type == "cuda" and call.bytes <= _MOST_BYTES}
    new = [call for text, call in calls.items() if text not in _begun]
    _begun.update(calls)
    if not new:
        return lambda: None
    submit = None if inductor is None else process_pool(inductor.get("compile_threads"), _FEWEST)
    thread = threading.Thread(target=_rehearse_all, args=(new, submit), name="foci-ahead", daemon=True)
    thread.start()
    return thread.join


def _rehearse_all(calls: Sequence[Call], submit: Submit | None = None) -> None:
    with torch.no_grad(), unhurried(submit):
        for call in calls:
            # what goes wrong here goes wrong in the first step, where somebody sees it
            with contextlib.suppress(Exception), torch.cuda.device(call.device):
                call.rehearse()


_FEWEST: Final = 4
"""Fewest processes: fewer are needed for Inductor's own kernels."""


def find_calls(graph: fx.Graph) -> Iterator[Call]:
    """The graph's calls of the operator, symbolic sizes at their hints."""
    for node in graph.nodes:
        if node.target is not torch.ops.foci.attention.default:
            continue
        query, key, value, captures = node.args[:4]
        grads = [needs_grad(n) for n in (query, key, value)]
        needs = (grads[0], grads[1], grads[2], tuple(needs_grad(n) for n in captures))
        parts = (part for part in node.users if part.target is operator.getitem and part.args[1] == 1)
        yield Call(tuple(map(_described, node.args)), needs, any(needs_grad(reader) for part in parts for reader in part.users))


def _described(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return tuple(map(_described, arg))
    tensor = example_tensor(arg)
    if tensor is not None:
        return _Geometry(tuple(map(size_hint, tensor.shape)), tuple(map(size_hint, tensor.stride())), tensor.dtype, tensor.device)
    value = example_value(arg)
    return size_hint(value) if isinstance(value, torch.SymInt) else value


def _made(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return tuple(map(_made, arg))
    return torch.empty_strided(arg.sizes, arg.strides, dtype=arg.dtype, device=arg.device).zero_() if isinstance(arg, _Geometry) else arg


def _geometries(arg: Any) -> Iterator[_Geometry]:
    if isinstance(arg, tuple):
        for part in arg:
            yield from _geometries(part)
    elif isinstance(arg, _Geometry):
        yield arg
