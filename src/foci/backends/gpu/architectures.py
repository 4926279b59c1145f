"""NVIDIA architectures: one row for each compute capability that foci knows something about, and one for all others.

Sources: shared memory from the CUDA C++ Programming Guide (technical specifications per compute capability); SMs of the largest GPU of an
architecture that is sold in number (A100, RTX A6000, RTX 4090, H100 SXM and H200, B200, RTX 5090), from NVIDIA's data sheets.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Final

import torch

__all__ = ["AMPERE", "ARCHITECTURES", "HOPPER", "INTERPRETER", "OLDEST", "Architecture", "count_sms", "describe_schedules", "find"]


@dataclass(frozen=True)
class Architecture:
    """An architecture, as schedules and cost models see it."""

    arch: int  # compute capability times ten, as in `Target.arch`
    shared_bytes: int  # shared memory that a block may use
    sms: int  # of a large GPU; `count_sms` gives those of a device
    rate: float  # flop/s of float16 or bfloat16 that the portable forward is estimated to reach
    schedules_of: int  # the architecture whose rows of `schedules.SCHEDULES` it takes
    is_known: bool = True  # False: there is no row, and these are assumptions


AMPERE: Final = Architecture(80, 166912, 108, 1.6e14, schedules_of=80)
HOPPER: Final = Architecture(90, 232448, 132, 4.5e14, schedules_of=90)
INTERPRETER: Final = Architecture(0, 101376, 108, 1.5e14, schedules_of=0)
"""Triton's interpreter, for tests; it takes the smallest tiles."""

ARCHITECTURES: Final[dict[int, Architecture]] = {
    row.arch: row
    for row in (
        INTERPRETER,
        AMPERE,
        Architecture(86, 101376, 84, 6e13, schedules_of=80),
        Architecture(89, 101376, 128, 1.5e14, schedules_of=80),
        HOPPER,
        Architecture(100, 232448, 148, 6e14, schedules_of=80),
        Architecture(120, 101376, 170, 1.5e14, schedules_of=80),
    )
}

OLDEST: Final = AMPERE.arch
"""Compute capability that the portable kernels need."""

_LEAST: Final = ARCHITECTURES[86]  # the least shared memory of all rows


def find(arch: int) -> Architecture:
    """The row of an architecture. One without a row is assumed to have the least shared memory of all rows and Ampere's schedules, and
    `describe_schedules` says so.

    Example:
        >>> find(90).sms
        132
        >>> find(121).shared_bytes == min(row.shared_bytes for row in ARCHITECTURES.values())
        True
    """
    known = ARCHITECTURES.get(arch)
    return replace(_LEAST, arch=arch, sms=AMPERE.sms, rate=1.5e14, is_known=False) if known is None else known


def describe_schedules(arch: int) -> str:
    """Say so where the portable kernels take schedules of another architecture; "" where they have some for this one.

    Example:
        >>> describe_schedules(90)
        ''
        >>> describe_schedules(100)
        'sm_100 has no schedules of its own and takes those of sm_80'
        >>> describe_schedules(121)
        'foci knows nothing about sm_121: it assumes the shared memory of sm_86 and takes the schedules of sm_80'
    """
    row = find(arch)
    if not row.is_known:
        assumed = f"it assumes the shared memory of sm_{_LEAST.arch} and takes the schedules of sm_{row.schedules_of}"
        return f"foci knows nothing about sm_{arch}: {assumed}"
    return "" if row.schedules_of == arch else f"sm_{arch} has no schedules of its own and takes those of sm_{row.schedules_of}"


@functools.lru_cache(maxsize=64)
def count_sms(device: torch.device) -> int:
    """Count the SMs of a device; those of an H100 where the device is no GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else HOPPER.sms
