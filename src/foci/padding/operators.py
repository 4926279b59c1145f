"""What the pass puts into graphs: values in padded strides, and products that write them.

Each is a function of its operands' values; its result's strides follow from sizes alone, symbolic ones included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from foci.padding.grouped import mm_by_rows, mm_into_rows
from foci.padding.strides import pad_strides

__all__ = ["OPERATORS"]

_library = torch.library.Library("foci", "FRAGMENT")  # type: ignore[no-untyped-call]

_SCHEMAS: Final = (
    # The value of x, in its strides padded.
    "padded(Tensor x, int alignment, int smallest) -> Tensor",
    # Products into rows padded.
    "padded_mm(Tensor a, Tensor b, int alignment, int smallest) -> Tensor",
    "padded_bmm(Tensor a, Tensor b, int alignment, int smallest) -> Tensor",
    "padded_cat(Tensor[] tensors, int dim, int alignment, int smallest) -> Tensor",
    # a @ b of an `a` with misaligned rows, where it lies.
    "mm_by_rows(Tensor a, Tensor b) -> Tensor",
    # a @ b + bias into misaligned rows.
    "mm_into_rows(Tensor a, Tensor b, Tensor? bias) -> Tensor",
)

for _schema in _SCHEMAS:
    # Inductor then pads no operand by itself
    _library.define(_schema, tags=(torch.Tag.needs_exact_strides,))  # type: ignore[no-untyped-call]


def _empty(sizes: Sequence[int], strides: Sequence[int], like: Tensor, alignment: int, smallest: int) -> Tensor:
    return like.new_empty_strided(tuple(sizes), pad_strides(strides, sizes, like.dtype, alignment=alignment, smallest=smallest))


def _product_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a matrix, or of a batch of them, without gaps."""
    rows = (sizes[-1], 1)
    return rows if len(sizes) == 2 else (sizes[-2] * sizes[-1], *rows)


def _empty_product(a: Tensor, b: Tensor, alignment: int, smallest: int) -> Tensor:
    sizes = (*a.shape[:-1], b.shape[-1])
    return _empty(sizes, _product_strides(sizes), a, alignment, smallest)


def _empty_cat(tensors: Sequence[Tensor], dim: int, alignment: int, smallest: int) -> Tensor:
    sizes = list(tensors[0].shape)
    sizes[dim] = sum(tensor.shape[dim] for tensor in tensors)
    strides = [1] * len(sizes)
    for outer in range(len(sizes) - 2, -1, -1):
        strides[outer] = strides[outer + 1] * sizes[outer + 1]
    return _empty(sizes, strides, tensors[0], alignment, smallest)


def _padded(x: Tensor, alignment: int, smallest: int) -> Tensor:
    return _empty_padded(x, alignment, smallest).copy_(x)


def _padded_mm(a: Tensor, b: Tensor, alignment: int, smallest: int) -> Tensor:
    return torch.mm(a, b, out=_empty_product(a, b, alignment, smallest))


def _padded_bmm(a: Tensor, b: Tensor, alignment: int, smallest: int) -> Tensor:
    return torch.bmm(a, b, out=_empty_product(a, b, alignment, smallest))


def _padded_cat(tensors: Sequence[Tensor], dim: int, alignment: int, smallest: int) -> Tensor:
    return torch.cat(tuple(tensors), dim, out=_empty_cat(tensors, dim, alignment, smallest))


def _empty_padded(x: Tensor, alignment: int, smallest: int) -> Tensor:
    return _empty(x.shape, x.stride(), x, alignment, smallest)


def _empty_mm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


_KERNELS: Final[Mapping[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]]] = {
    "padded": (_padded, _empty_padded),
    "padded_mm": (_padded_mm, _empty_product),
    "padded_bmm": (_padded_bmm, _empty_product),
    "padded_cat": (_padded_cat, _empty_cat),
    "mm_by_rows": (mm_by_rows, _empty_mm),
    "mm_into_rows": (mm_into_rows, _empty_mm),
}

for _name, (_kernel, _fake) in _KERNELS.items():
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    # fakes too; `register_fake` would look for the line that calls it through all modules that there are
    _library.impl(_name, _fake, "Meta")  # type: ignore[no-untyped-call]

OPERATORS: Final = {name: getattr(torch.ops.foci, name).default for name in _KERNELS}
"""By name."""
