"""TMA descriptors of [B, H, S, D] tensors, in boxes of rows.

Dense tensors have descriptors of rank 4, packed sequences of rank 5, see `triton.tensor_descriptors.packed_dims`. `smem.tma_coordinates`
makes the coordinates for both.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from foci.backends.gpu.schedules import padded_dim
from foci.backends.gpu.tensor_descriptors import packed_dims
from foci.backends.hopper.gluon_compat import TensorDescriptor
from foci.backends.hopper.layouts import smem_layout, tma_columns

__all__ = ["describe", "takes_descriptor"]


def takes_descriptor(tensor: Tensor) -> bool:
    """Whether TMA can read a tensor without a copy: contiguous rows, other strides positive and multiples of 16 bytes."""
    *outer, last = tensor.stride()
    unit = 16 // tensor.element_size()
    if tensor.data_ptr() % 16 or (last != 1 and tensor.shape[-1] != 1):
        return False
    return all(n == 1 or (stride > 0 and stride % unit == 0) for stride, n in zip(outer, tensor.shape, strict=False))


def describe(tensor: Tensor, rows: int, width: int = 0, *, ragged: bool) -> TensorDescriptor:
    """Make a descriptor of tiles [rows, width] of a [B, H, S, D] tensor, or of packed sequences [1, H, T, D] if `ragged`.

    `width`: of the tile, at least D; by default D padded to a power of two.
    """
    columns = tma_columns.fn(width or padded_dim(tensor.shape[-1]))
    return TensorDescriptor(tensor, *_geometry(tuple(tensor.shape), tensor.stride(), tensor.dtype, rows, columns, ragged))


@functools.lru_cache(maxsize=1024)
def _geometry(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rows: int, width: int, ragged: bool) -> tuple[Any, ...]:
    # a dimension of length 1 may have any stride; TMA wants a multiple of 16 bytes
    step = 16 // dtype.itemsize
    b, h, s = (stride if n > 1 else step for stride, n in zip(strides[:-1], shape[:-1], strict=True))
    if ragged:
        return *packed_dims(shape[1], shape[3], (h, s)), [1, 1, 1, rows, width], smem_layout.fn(rows, width, 5)
    return list(shape), [b, h, s, 1], [1, 1, rows, width], smem_layout.fn(rows, width, 4)
