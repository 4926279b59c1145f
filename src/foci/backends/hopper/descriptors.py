"""Tensor descriptors: what TMA needs to know of a [B, H, S, D] tensor to copy tiles of rows.

Dense tensors have descriptors of rank 4. Packed sequences have rank 5: two more dimensions, whose strides cancel by 64-bit
wraparound, turn the end of a sequence into the end of a dimension, so that rows beyond it read as zeros and are never
written. `tiles.copy_pieces_in` and `tiles.copy_pieces_out` make the coordinates for both.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from foci.backends.hopper.interface import TensorDescriptor
from foci.backends.hopper.layouts import shared, unit
from foci.backends.triton.schedules import padded

__all__ = ["FAR", "describe", "takes_descriptor"]

FAR: Final = 1 << 30
"""Rows that a ragged dimension claims to have."""
_MANY: Final = 0x7FFF0000
_AROUND: Final = 1 << 34
"""Elements such that `FAR` steps of them are 0 modulo 2^64, at any size of an element that is a power of two."""


def takes_descriptor(tensor: Tensor) -> bool:
    """Whether TMA can read a tensor as it lies: rows contiguous, other strides positive and multiples of 16 bytes."""
    *outer, last = tensor.stride()
    unit = 16 // tensor.element_size()
    if tensor.data_ptr() % 16 or (last != 1 and tensor.shape[-1] != 1):
        return False
    return all(n == 1 or (stride > 0 and stride % unit == 0) for stride, n in zip(outer, tensor.shape, strict=False))


def describe(tensor: Tensor, rows: int, width: int = 0, *, ragged: bool) -> TensorDescriptor:
    """A descriptor of tiles [rows, width] of a [B, H, S, D] tensor, or of packed sequences [1, H, T, D] when `ragged`.

    `width`: of the tile, at least D; by default D padded to a power of two."""
    columns = unit.fn(width or padded(tensor.shape[-1]))
    return TensorDescriptor(tensor, *_geometry(tuple(tensor.shape), tensor.stride(), tensor.dtype, rows, columns, ragged))


@functools.lru_cache(maxsize=1024)
def _geometry(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rows: int, width: int, ragged: bool) -> tuple[Any, ...]:
    # a dimension of length 1 may have any stride; TMA wants a multiple of 16 bytes
    step = 16 // dtype.itemsize
    b, h, s = (stride if n > 1 else step for stride, n in zip(strides[:-1], shape[:-1], strict=True))
    if ragged:
        sizes = [_MANY, _MANY, shape[1], FAR, shape[3]]
        return sizes, [_AROUND - s, s, h, s, 1], [1, 1, 1, rows, width], shared.fn(rows, width, 5)
    return list(shape), [b, h, s, 1], [1, 1, rows, width], shared.fn(rows, width, 4)
