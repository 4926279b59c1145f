"""Fake tensors: the example values of a graph's nodes, and whether they are being made."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor

from foci.compat.lookup import find

__all__ = [
    "FakeTensor", "FakeTensorMode", "below_dispatch", "detect_fake_mode", "has_symbols", "is_fake_tensor", "is_making_fakes",
    "python_dispatcher", "real_values", "tracing_metadata",
]  # fmt: skip

_T = TypeVar("_T")

_MODULE: Final = "torch._subclasses.fake_tensor"
_BY_EXPORT: Final = "exports a small module, which takes a second, to find the class"


def _exported() -> Tensor:
    """A fake tensor, by public means."""

    class Same(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    program = torch.export.export(Same(), (torch.zeros(2),))
    fake_tensor: Tensor = next(node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
    return fake_tensor


if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
else:
    FakeTensor = find(f"{_MODULE}.FakeTensor", without=_BY_EXPORT)
    if FakeTensor is None:
        FakeTensor = type(_exported())
    FakeTensorMode = find(f"{_MODULE}.FakeTensorMode", without=_BY_EXPORT)
    if FakeTensorMode is None:
        FakeTensorMode = type(_exported().fake_mode)


def is_fake_tensor(value: Any) -> bool:
    """Whether a value is a tensor without values."""
    return isinstance(value, FakeTensor)


def _detect_by_value(inputs: Iterable[Any] = ()) -> Any:
    of_inputs = (value.fake_mode for value in inputs if is_fake_tensor(value))
    probe: Any = torch.empty(0, device="cpu")
    return next(of_inputs, probe.fake_mode if is_fake_tensor(probe) else None)


_detect: Final[Callable[..., Any]] = find(
    "torch._guards.detect_fake_mode", _detect_by_value, without="makes a tensor to see whether it is a fake one"
)


def detect_fake_mode(inputs: Iterable[Any] = ()) -> FakeTensorMode | None:
    """The mode of fake tensors that the inputs live in, or that is on."""
    mode: FakeTensorMode | None = _detect(list(inputs))
    return mode


def is_making_fakes() -> bool:
    """Whether a graph is made, so that tensors have no values."""
    return _detect([]) is not None


_unset: Final[Callable[[], AbstractContextManager[Any]] | None] = find(
    "torch.utils._python_dispatch._disable_current_modes", without="computes constants of graphs in a thread of their own"
)


def real_values(function: Callable[[], _T]) -> _T:
    """Return what a function computes outside of every mode that makes a graph: its tensors have values."""
    if _unset is not None:
        with _unset():
            return function()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # modes are each thread's own
        return thread.submit(function).result()


python_dispatcher: Final[Callable[[], AbstractContextManager[Any]]] = find(
    "torch._dispatch.python.enable_python_dispatcher",
    contextlib.nullcontext,
    without="fuses no attention in graphs whose operators take symbolic sizes in Python alone",
)
"""A context in which every operator takes symbolic sizes."""


def _has_symbols(tensor: Tensor) -> bool:
    return any(isinstance(n, torch.SymInt) for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))


has_symbols: Final[Callable[[Tensor], bool]] = (
    _has_symbols
    if find("torch.Tensor._has_symbolic_sizes_strides", without="looks at every size and stride of fake tensors") is None
    else lambda tensor: tensor._has_symbolic_sizes_strides
)
"""Whether a size or stride of a tensor is a symbol."""

_no_dispatch: Final[Any] = find("torch._C._DisableTorchDispatch", without="makes fake tensors by their mode, which is slower")
_below_autograd: Final[Any] = find("torch._C._AutoDispatchBelowAutograd", without="makes fake tensors by their mode, which is slower")


def below_dispatch() -> AbstractContextManager[Any] | None:
    """A context in which operators run without modes and without autograd; None where torch has none."""
    if _no_dispatch is None or _below_autograd is None:
        return None
    stack = contextlib.ExitStack()
    stack.enter_context(_no_dispatch())
    stack.enter_context(_below_autograd())
    return stack


_context: Final[Any] = find("torch._guards.TracingContext", without="pads no stride that leaves a compiled function's forward pass")


def tracing_metadata() -> Any:
    """AOTAutograd's metadata of the graph that is compiled now; None outside of one, or where torch does not tell."""
    context = None if _context is None else _context.try_get()
    return None if context is None else context.fw_metadata
