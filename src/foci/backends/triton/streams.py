"""What a kernel streams tiles from: a tensor, or a descriptor of its tiles where the device and the tensor take one."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from foci.backends.triton.arguments import Config
from foci.backends.triton.schedules import padded

__all__ = ["is_aligned", "streamed", "takes_descriptor"]


def is_aligned(tensor: Tensor) -> bool:
    *outer, last = tensor.stride()
    rows = all(stride % 8 == 0 for stride, n in zip(outer, tensor.shape, strict=False) if n > 1)
    return rows and (last == 1 or tensor.shape[-1] == 1) and tensor.data_ptr() % 16 == 0


def takes_descriptor(tensor: Tensor) -> bool:
    """Whether a tensor descriptor may describe it: no zero strides, 16-byte steps."""
    steps = ((stride, n) for stride, n in zip(tensor.stride()[:-1], tensor.shape, strict=False) if n > 1)
    return all(stride > 0 and stride * tensor.element_size() % 16 == 0 for stride, _ in steps)


def streamed(config: Config, rows: int, tensor: Tensor) -> Tensor | TensorDescriptor:
    """What a kernel streams: the tensor, or a descriptor of tiles of so many rows."""
    if not config.DESCRIPTORS.value:
        return tensor
    # a dimension of length 1 may have any stride; a descriptor wants a multiple of 16 bytes
    step = 16 // tensor.element_size()
    strides = [stride if n > 1 else step for stride, n in zip(tensor.stride()[:-1], tensor.shape, strict=False)]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, padded(tensor.shape[-1])])
