"""Sources of streamed tiles: a tensor, or a tensor descriptor if device and tensor allow one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from foci.backends.gpu.kernel_args import Config, is_countable_by_eights
from foci.backends.gpu.schedules import padded_dim
from foci.backends.gpu.tiles import FAR

__all__ = ["Layout", "describe_layout", "packed_dims", "stream_operand", "without_overlap"]

_FAR: Final[int] = FAR.value
_MANY: Final = 0x7FFF0000
_AROUND: Final = 1 << 34
"""Number of elements whose product with `FAR` is 0 modulo 2^64, for any power-of-two element size."""


class Layout(NamedTuple):
    """Layout facts of a tensor [B, H, S, D].

    Attributes:
        strides: of each dimension, 0 where its length is 1, whatever torch says of it.
        is_aligned: rows begin at multiples of 8 elements and 16 bytes, and have no gaps; and strides `is_countable_by_eights`.
        takes_descriptor: a tensor descriptor may describe it: besides, no stride is 0 and each is a multiple of 16 bytes.
        is_wide: offsets within a tile may need 64 bits.
    """

    strides: tuple[int, int, int, int]
    is_aligned: bool
    takes_descriptor: bool
    is_wide: bool


def describe_layout(tensor: Tensor) -> Layout:
    """Describe the layout of a tensor."""
    b, h, s, d = tensor.shape
    b_stride, h_stride, s_stride, d_stride = tensor.stride()
    strides = (b_stride if b > 1 else 0, h_stride if h > 1 else 0, s_stride if s > 1 else 0, d_stride if d > 1 else 0)
    together = strides[0] | strides[1] | strides[2]
    is_aligned = together % 8 == 0 and (d == 1 or d_stride == 1) and tensor.data_ptr() % 16 == 0 and is_countable_by_eights(strides)
    steps = not ((b > 1 and b_stride == 0) or (h > 1 and h_stride == 0) or (s > 1 and s_stride == 0))
    is_describable = is_aligned and steps and together * tensor.element_size() % 16 == 0
    return Layout(strides, is_aligned, is_describable, max(strides[2:]) * 512 >= 2**31)


def without_overlap(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor itself; or a copy laid out as `like`, if its elements share memory, such as a gradient that autograd expands from a sum:
    kernels that read it element by element would cost more than the copy, and be compiled for it alone."""
    shares = any(stride == 0 and n > 1 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor) if shares else tensor


def packed_dims(heads: int, width: int, strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """(lengths, strides) of dimensions by which a descriptor reads packed sequences [H, T, D] of such strides.

    Two dimensions more, whose strides cancel by 64-bit wraparound, turn the end of a sequence into the end of a dimension: rows beyond it
    read as zeros and are never written. Row i of a sequence of n rows from row s is at [FAR, s + n, h, FAR - n + i]."""
    h, s = strides
    return [_MANY, _MANY, heads, _FAR, width], [_AROUND - s, s, h, s, 1]


def stream_operand(config: Config, rows: int, length: int, tensor: Tensor) -> Tensor | TensorDescriptor:
    """Source of streamed tiles: the tensor, [B, H, length, D], or a descriptor of its tiles."""
    if not config.DESCRIPTORS.value:
        return tensor
    # a dimension of length 1 may have any stride; a descriptor wants a multiple of 16 bytes
    step = 16 // tensor.element_size()
    strides = [stride if n > 1 else step for stride, n in zip(tensor.stride()[:-1], tensor.shape, strict=False)]
    batch, heads, _, width = tensor.shape
    if config.JAGGED.value:
        return TensorDescriptor(tensor, *packed_dims(heads, width, strides[1:]), [1, 1, 1, rows, padded_dim(width)])
    return TensorDescriptor(tensor, [batch, heads, length, width], [*strides, 1], [1, 1, rows, padded_dim(width)])
