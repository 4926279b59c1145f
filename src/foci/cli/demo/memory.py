"""How much memory a piece of work takes at its peak."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["peak_memory"]

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def peak_memory(work: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that `work` adds, at its peak, to what the process held before.

    On CUDA, of the device's allocator. On Linux, of the process's resident memory: the kernel keeps its high-water
    mark, which counts every allocation, whoever made it; pages that were freed earlier are given back first, so that
    their reuse counts too. None elsewhere.

    Example:
        >>> import torch
        >>> peak = peak_memory(lambda: torch.ones(4_000_000), torch.device("cpu"))
        >>> peak is None or peak > 8_000_000
        True
    """
    if device.type == "cuda":
        return _cuda_peak(work, device)
    return _resident_peak(work) if _RESET.exists() else None


def _cuda_peak(work: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _resident_peak(work: Callable[[], object]) -> int:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    _RESET.write_text("5", encoding="ascii")  # proc(5): resets the high-water mark
    before = _status("VmRSS")
    work()
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"{_STATUS} has no line {name}")
