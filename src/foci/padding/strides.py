"""Strides that memory likes: which are misaligned, and what they grow to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import torch

__all__ = [
    "ALIGNMENT",
    "LOAD",
    "SMALLEST_STRIDE",
    "is_channels_last",
    "known",
    "pad_strides",
    "padding_bytes",
    "round_up",
]

ALIGNMENT: Final = 128
"""Bytes that padded strides are multiples of: what a warp of a GPU reads at once, and two cache lines of a CPU."""

LOAD: Final = 16
"""Bytes that fast products read at once."""

SMALLEST_STRIDE: Final = 1024
"""Strides below it stay: padding them would cost a large share of the tensor."""


def round_up(value: Any, multiple: int) -> Any:
    """The least multiple at or above `value`, an int or a symbolic one."""
    return (value + multiple - 1) // multiple * multiple


def pad_strides(
    strides: Sequence[int], sizes: Sequence[int], dtype: torch.dtype, *, alignment: int = ALIGNMENT, smallest: int = SMALLEST_STRIDE
) -> tuple[int, ...]:
    """Strides of the same order whose misaligned ones have grown, from the innermost outwards.

    Each stride above the innermost is the extent of what lies inside it, rounded up to `alignment` bytes where it is
    misaligned and not below `smallest` elements. Channels-last layouts stay as they are, and so does a tensor in
    which nothing grows, gaps and repeated elements included.

    Args:
        strides: of the tensor, in elements.
        sizes: of the tensor; a symbolic size grows into a symbolic stride.
        dtype: of its elements.
        alignment: in bytes.
        smallest: stride that is padded, in elements.

    Returns:
        As many strides.

    Raises:
        TypeError: for strides, sizes, an alignment or a smallest that are no integers, or a dtype that is none.
        ValueError: if one of them is negative, strides and sizes differ in length, or `alignment` is no positive multiple of the
            element's size.

    Example:
        >>> import torch
        >>> pad_strides([2047 * 16, 2047, 1], [2, 16, 2047], torch.float32)
        (32768, 2048, 1)
        >>> pad_strides([127 * 32, 127, 1], [2, 32, 127], torch.float32)
        (4064, 127, 1)
    """
    _check_counts("strides", strides)
    _check_counts("sizes", sizes)
    for name, value in (("alignment", alignment), ("smallest", smallest)):
        if not _is_integer(value):
            raise TypeError(f"{name} must be an integer, not {value!r}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, such as torch.float32, not {dtype!r}")
    if len(strides) != len(sizes):
        raise ValueError(f"strides and sizes must be equally many, not {len(strides)} and {len(sizes)}")
    if alignment < 1 or alignment % dtype.itemsize:
        raise ValueError(f"alignment must be a positive multiple of the {dtype.itemsize} bytes of {dtype}, not {alignment}")
    if smallest < 0:
        raise ValueError(f"smallest must be 0 or more, in elements, not {smallest}")
    current = tuple(strides)
    if is_channels_last(current, sizes) or any(stride == 0 for stride in current):
        return current
    inwards = sorted(range(len(current)), key=lambda dim: (known(current[dim]), dim in _units(sizes), -dim))
    padded = list(current)
    grown = False
    elements = alignment // dtype.itemsize
    for inner, outer in itertools.pairwise(inwards):
        extent = padded[inner] * sizes[inner]
        if not grown and known(current[outer]) > known(extent):
            extent = current[outer]
        if known(extent) >= smallest and known(extent) % elements and sizes[outer] != 1:
            extent, grown = round_up(extent, elements), True
        padded[outer] = extent
    return tuple(padded) if grown else current


def _check_counts(name: str, values: Any) -> None:
    if not isinstance(values, Sequence) or not all(map(_is_integer, values)):
        raise TypeError(f"{name} must be integers, in elements and one for each dim, not {values!r}")
    if any(isinstance(value, int) and value < 0 for value in values):
        raise ValueError(f"{name} must be 0 or more, in elements and one for each dim, not {tuple(values)}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def known(value: int | torch.SymInt) -> int:
    """A symbolic value's hint: decisions on it need no guard."""
    return int(value.node.hint) if isinstance(value, torch.SymInt) else value


def _units(sizes: Sequence[int]) -> set[int]:
    return {dim for dim, size in enumerate(sizes) if size == 1}


def is_channels_last(strides: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a tensor of four or five dims lies with its channels innermost, and not also as usual.

    Example:
        >>> is_channels_last([24, 1, 6, 2], [1, 2, 4, 3])
        True
    """
    if len(sizes) not in (4, 5) or sizes[1] == 1:
        return False
    expected = 1
    for dim in (1, *range(len(sizes) - 1, 1, -1), 0):
        if sizes[dim] != 1 and strides[dim] != expected:
            return False
        expected *= sizes[dim]
    return True


def padding_bytes(strides: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> int:
    """Return what a tensor with these strides takes more than its elements need.

    Example:
        >>> import torch
        >>> padding_bytes((2048, 1), (3, 2047), torch.float32)
        8
    """
    elements = math.prod(map(known, sizes))
    if elements == 0:
        return 0
    last = sum((known(size) - 1) * known(stride) for size, stride in zip(sizes, strides))
    return max(0, last + 1 - elements) * dtype.itemsize
