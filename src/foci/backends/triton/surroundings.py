"""Where launches go, and whether they may go around Triton's Python."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TypeAlias

import torch
import triton
from torch import Tensor

from foci.backends.contract import Inputs

__all__ = ["Allocator", "allocator_on", "free_stream", "free_stream_on", "is_for_graphs", "is_watched", "places_of", "stream_of"]


def places_of(tensors: Inputs) -> list[int | None]:
    """Addresses."""
    return [None if t is None else t.data_ptr() for t in tensors]


def stream_of(tensor: Tensor) -> int:
    """The stream that work on the tensor's device goes to."""
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if tensor.is_cuda else 0


def is_watched() -> bool:
    """Whether somebody is told of Triton's launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))  # a chain of hooks, in older releases one or None


def free_stream(tensor: Tensor) -> int | None:
    """The stream, if launches may go around Triton: the tensor is on the current device, nobody watches, and no CUDA graph is made, which
    outlives what is kept. Else None.
    """
    return free_stream_on(tensor.get_device() if tensor.is_cuda else -1)


def free_stream_on(device: int) -> int | None:
    """`free_stream` of tensors on a GPU of that number, or elsewhere if it is negative."""
    if is_watched():
        return None
    if device < 0:
        return 0
    if device != torch._C._cuda_getDevice() or torch._C._cuda_isCurrentStreamCapturing():
        return None
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return None if _is_of_graphs(device, stream) else stream


def is_for_graphs(tensor: Tensor) -> bool:
    """Whether what is allocated now belongs to CUDA graphs: one is captured, or about to be."""
    if not tensor.is_cuda:
        return False
    device = tensor.get_device()
    return torch._C._cuda_isCurrentStreamCapturing() or _is_of_graphs(device, torch._C._cuda_getCurrentRawStream(device))


def _is_of_graphs(device: int, stream: int) -> bool:
    """Whether Inductor captures on this stream. It first runs there what it will capture, in the memory of its graphs, and lets nothing
    stay in that but results.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees") if stream else None  # the default stream is not its own
    manager = None if trees is None else trees.get_manager(device, create_if_none_exists=False)
    return manager is not None and manager.stream.cuda_stream == stream


Allocator: TypeAlias = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""An uninitialised tensor of size and strides, plain tuples, and dtype."""


@functools.cache
def allocator_on(device: torch.device) -> Allocator:
    """What allocates on a device, which is the current one: as Inductor's code does, where torch has that."""
    own: Allocator | None = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    return own or (lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device))
