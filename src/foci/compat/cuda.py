"""Torch's streams, CUDA graphs and storages on a GPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from foci.compat.lookup import find

__all__ = [
    "Allocator", "allocator_on", "copy_all", "current_device", "is_capturing", "is_inductor_stream", "raw_stream", "unowned",
]  # fmt: skip


def _find_if_built(path: str, fallback: Any, *, without: str) -> Any:
    """`find`, in a torch that is built with CUDA. Other builds lack these names, and nothing asks for them there."""
    is_built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    return find(path, fallback, without=without) if is_built else fallback


current_device: Final[Callable[[], int]] = _find_if_built(
    "torch._C._cuda_getDevice", torch.cuda.current_device, without="asks torch.cuda.current_device, which is slower"
)
"""The number of the current device, in a process that has used CUDA."""

is_capturing: Final[Callable[[], bool]] = _find_if_built(
    "torch._C._cuda_isCurrentStreamCapturing",
    torch.cuda.is_current_stream_capturing,
    without="asks torch.cuda.is_current_stream_capturing, which is slower",
)
"""Whether a CUDA graph is captured on the current stream."""


def _public_raw_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


raw_stream: Final[Callable[[int], int]] = _find_if_built(
    "torch._C._cuda_getCurrentRawStream", _public_raw_stream, without="asks torch.cuda.current_stream, which is slower"
)
"""The handle of a device's current stream."""

_TREES: Final = "torch._inductor.cudagraph_trees"


def is_inductor_stream(device: int, stream: int) -> bool:
    """Whether Inductor captures CUDA graphs on this stream. It first runs the program there once, in the memory pool of its
    graphs, where only results may remain.

    Where torch does not tell, True on any stream but the default one, which is never Inductor's, once Inductor has made CUDA graphs.
    """
    trees = sys.modules.get(_TREES) if stream else None
    if trees is None:
        return False
    get = _find_manager()
    if get is None:
        return True
    manager = get(device, create_if_none_exists=False)
    if manager is None:
        return False
    graph_stream = getattr(manager, "stream", None)
    return graph_stream is None or graph_stream.cuda_stream == stream


@functools.cache
def _find_manager() -> Callable[..., Any] | None:
    get_manager: Callable[..., Any] | None = find(f"{_TREES}.get_manager", without="keeps nothing of calls on streams of their own")
    return get_manager


Allocator: TypeAlias = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""An uninitialised tensor of size and strides, plain tuples, and dtype."""


@functools.cache
def allocator_on(device: torch.device) -> Allocator:
    """Return what allocates on a device, which is the current one: as Inductor's code does, where torch has that."""
    fallback: Allocator = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)  # noqa: E731
    if device.type not in ("cpu", "cuda"):
        return fallback
    allocator: Allocator = find(
        f"torch._C._dynamo.guards._empty_strided_{device.type}", fallback, without="allocates by torch.empty_strided, which is slower"
    )
    return allocator


_foreach_copy: Final[Callable[[list[Tensor], list[Tensor]], Any] | None] = find(
    "torch._foreach_copy_", without="copies results of CUDA graphs one after the other"
)


def copy_all(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copies tensors into as many others, in as few launches as torch can."""
    if _foreach_copy is not None:
        _foreach_copy(list(into), list(tensors))
        return
    for new, tensor in zip(into, tensors, strict=True):
        new.copy_(tensor)


_storage_at: Final[Callable[[int, torch.device, int], Any] | None] = find(
    "torch._C._construct_storage_from_data_pointer", without="gives each CUDA graph memory of its own, which no other graph uses"
)


def unowned(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor that does not hold it, so that a pool of CUDA graphs can give it to others; the tensor itself
    where torch makes no such tensor.
    """
    if _storage_at is None:
        return tensor
    storage = tensor.untyped_storage()
    same = _storage_at(storage.data_ptr(), tensor.device, storage.nbytes())
    with torch.inference_mode(mode=False):
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(same, tensor.storage_offset(), tensor.size(), tensor.stride())
