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
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def peak_memory(work: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that `work` adds, at its peak, to what the process held before.

    On CUDA, of the device's allocator. On Linux, of the process's resident memory: the kernel keeps its high-water
    mark, which counts every allocation, whoever made it. Pages that were freed earlier are given back first, so that
    their reuse counts too. glibc maps each block of 64 KiB or more by itself meanwhile: on its heap, holes between blocks
    would count as well, and depend on what ran before. None elsewhere.

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
    libc = ctypes.CDLL(None)
    is_glibc = hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt")
    if is_glibc:
        libc.malloc_trim(0)
        libc.mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
    try:
        _RESET.write_text("5", encoding="ascii")  # proc(5): resets the high-water mark
        before = _status("VmRSS")
        work()
        return max(0, _status("VmHWM") - before)
    finally:
        if is_glibc:  # the most that glibc would have set it to by itself
            libc.mallopt(_M_MMAP_THRESHOLD, 32 * 1024 * 1024)
            libc.mallopt(_M_TRIM_THRESHOLD, 64 * 1024 * 1024)


def _status(name: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"{_STATUS} has no line {name}")
