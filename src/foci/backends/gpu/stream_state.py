"""The current stream, and whether launches may bypass Triton."""

from __future__ import annotations

from torch import Tensor
from triton import knobs

from foci.backends.contract import Inputs
from foci.compat.cuda import Allocator, allocator_on, current_device, is_capturing, is_inductor_stream, raw_stream

__all__ = [
    "Allocator",
    "allocator_on",
    "current_stream",
    "free_stream",
    "free_stream_on",
    "has_launch_hooks",
    "is_for_graphs",
    "tensor_addresses",
]


def tensor_addresses(tensors: Inputs) -> list[int | None]:
    """Addresses of tensors."""
    return [None if t is None else t.data_ptr() for t in tensors]


def current_stream(tensor: Tensor) -> int:
    """Current stream of the tensor's device; 0 on a CPU."""
    return raw_stream(tensor.get_device()) if tensor.is_cuda else 0


def has_launch_hooks() -> bool:
    """Whether a launch hook of Triton is set, such as a profiler's."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)
    except AttributeError:  # somebody put a function, or None, in the place of Triton's chain of them
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def free_stream(tensor: Tensor) -> int | None:
    """Current stream, if launches may bypass Triton and their tensors be cached. None if the tensor is not on the current device, a launch
    hook is set, or a CUDA graph is being captured, which would outlive cached tensors.
    """
    return free_stream_on(tensor.get_device() if tensor.is_cuda else -1)


def free_stream_on(device: int) -> int | None:
    """`free_stream` by device index; negative for no GPU."""
    if has_launch_hooks():
        return None
    if device < 0:
        return 0
    if device != current_device() or is_capturing():
        return None
    stream = raw_stream(device)
    return None if is_inductor_stream(device, stream) else stream


def is_for_graphs(tensor: Tensor) -> bool:
    """Whether memory allocated now belongs to a CUDA graph: one is being captured, or Inductor prepares for it."""
    if not tensor.is_cuda:
        return False
    device = tensor.get_device()
    return is_capturing() or is_inductor_stream(device, raw_stream(device))
