"""What padding a tensor would take, and whether it may be: never its profit."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch
from torch import fx

from foci.compat.fake import real_values
from foci.padding.grouped import split_rows
from foci.padding.reading import VIEWS, Matrix, Origin, Product, chain_to, fake_value, find_origin, hints, replayed
from foci.padding.strides import ALIGNMENT, SMALLEST_STRIDE, is_channels_last, known, pad_strides, round_up

__all__ = ["Fix", "How", "Illegal", "Readers", "is_legal_to_pad", "reads_between_rows", "rows_fix"]

aten = torch.ops.aten

_CONVOLUTIONS: Final = frozenset({aten.convolution.default, aten.convolution_backward.default})


class How(Enum):
    """In which way a matrix comes to have aligned rows."""

    IN_PLACE = "in place"
    WRITTEN_TWICE = "written twice"
    COPIED = "copied"
    COPIED_ONCE = "copied once"
    BY_ROWS = "by rows"


@dataclass(frozen=True, eq=False)
class Fix:
    """A way to give a tensor aligned rows.

    Attributes:
        base: the tensor.
        how: it is done.
        strides: it gets, symbolic ones at their hints.
        alignment, smallest: for `pad_strides`.
        passes: how often its elements are read or written more than without padding.
        only: the one product that this mends; None for all that read or write the tensor.
    """

    base: fx.Node
    how: How
    strides: tuple[int, ...]
    alignment: int
    smallest: int
    passes: int
    only: fx.Node | None = None


@dataclass(frozen=True)
class Illegal:
    """Why a tensor may not be padded."""

    reason: str


@dataclass(frozen=True)
class Readers:
    """Who reads a tensor, through views too.

    Attributes:
        products: matrix products.
        user: whether the tensor leaves the graph for somebody who may look at its strides.
        other: a kernel that may insist on strides or copy what has others, or None.
    """

    products: tuple[fx.Node, ...]
    user: bool
    other: fx.Node | None


def _find_readers(base: fx.Node, visible: frozenset[fx.Node]) -> Readers:
    """Walks the views of a tensor.

    Args:
        base: the tensor.
        visible: the outputs of the graph that a user sees.
    """
    products: list[fx.Node] = []
    other: fx.Node | None = None
    user = base in visible
    todo = [base]
    while todo:
        node = todo.pop()
        for reader in node.users:
            if reader.target in VIEWS:
                user = user or reader in visible
                todo.append(reader)
            elif reader.op == "output":
                continue
            elif (origin := find_origin(reader)) is Origin.PRODUCT:
                products.append(reader)
            elif origin is Origin.OTHER:
                other = reader
    return Readers(tuple(products), user, other)


def is_legal_to_pad(base: fx.Node, matrices: Iterable[Matrix], visible: frozenset[fx.Node], load: int) -> Fix | Illegal:
    """How a tensor can be padded without a change that anybody sees, or why it cannot.

    Args:
        base: of the matrices.
        matrices: that products read or write, at least one of them misaligned.
        visible: the outputs of the graph that a user sees.
        load: bytes that aligned rows are multiples of.
    """
    value = fake_value(base)
    if value is None:
        return Illegal("it is no strided tensor")
    if value.device.type == "cpu" and reads_between_rows(value.dtype):
        return Illegal(f"products of {value.dtype} on this CPU read memory between rows, as torch's mkldnn does")
    sizes, strides = hints(value.shape), hints(value.stride())
    if is_channels_last(strides, sizes):
        return Illegal("it is laid out with channels last")
    if any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())) and not _is_plain(value):
        return Illegal("its sizes are symbolic and it has gaps or another order of dims")
    chosen = _grown(base, list(matrices), load)
    if chosen is None:
        return Illegal("no strides of it give products aligned rows through the views that they read")
    grown, alignment, smallest = chosen
    origin = find_origin(base)
    readers = _find_readers(base, visible)
    how, passes = _way(origin, readers)
    if how is How.IN_PLACE and readers.other is not None:
        return Illegal(f"{readers.other.name} would copy it")
    return Fix(base, how, grown, alignment, smallest, passes)


@functools.cache
def reads_between_rows(dtype: torch.dtype) -> bool:
    """Whether torch's products on this CPU read what lies between the rows of a matrix, so that NaN there reaches results: mkldnn does with
    bfloat16 where the CPU has AMX, as it rounds the length of rows up to its tiles. Asks for the products themselves, of several sizes.
    """
    return dtype in (torch.bfloat16, torch.float16) and real_values(lambda: _finds_nan_between_rows(dtype))


def _finds_nan_between_rows(dtype: torch.dtype) -> bool:
    for rows, length, columns in ((64, 17, 64), (256, 2047, 64), (64, 100, 16)):
        around = torch.full((rows, round_up(length, 64)), torch.nan, dtype=dtype)
        left, right = around[:, :length].fill_(1.0), torch.ones(columns, length, dtype=dtype)
        if torch.mm(left, right.t()).isnan().any() or torch.mm(right, left.t()).isnan().any():
            return True
    return False


def _way(origin: Origin, readers: Readers) -> tuple[How, int]:
    """How a tensor of this origin gets padded, and how often its elements are moved for it."""
    if origin is Origin.CONSTANT:
        return How.COPIED_ONCE, 0
    if origin in (Origin.INPUT, Origin.OTHER):
        return How.COPIED, 2
    if not readers.user and (readers.other is None or readers.other.target in _CONVOLUTIONS):
        return How.IN_PLACE, 0
    # a loop writes both in one go; a product's result, or a concatenation's, is read again
    return How.WRITTEN_TWICE, 1 if origin is Origin.LOOP else 2


def _is_plain(value: torch.Tensor) -> bool:
    """Contiguous for every value of the symbols."""
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride())):
        if str(stride) != str(expected) and known(size) != 1:
            return False
        expected = expected * size
    return True


def _grown(base: fx.Node, matrices: Sequence[Matrix], load: int) -> tuple[tuple[int, ...], int, int] | None:
    """The first strides by which every matrix gets aligned rows, with the alignment and the smallest stride that made them."""
    value = fake_value(base)
    assert value is not None
    sizes, strides = hints(value.shape), hints(value.stride())
    for alignment, smallest in ((ALIGNMENT, SMALLEST_STRIDE), (load, 1)):
        grown = pad_strides(strides, sizes, value.dtype, alignment=alignment, smallest=smallest)
        if all(_aligned(base, matrix, sizes, grown, load) for matrix in matrices):
            return grown, alignment, smallest
    return None


def _aligned(base: fx.Node, matrix: Matrix, sizes: Sequence[int], strides: Sequence[int], load: int) -> bool:
    value = fake_value(base)
    seen = replayed(sizes, strides, chain_to(matrix.node, base))
    if seen is None or value is None:
        return False
    inner = -1 if matrix.role in ("a", "b", "out") else -2
    if seen.stride(inner) != 1 and seen.shape[inner] != 1:
        return False
    rest = [(size, stride) for dim, (size, stride) in enumerate(zip(seen.shape, seen.stride())) if dim != seen.dim() + inner]
    return all(size == 1 or stride * value.dtype.itemsize % load == 0 for size, stride in rest)


def rows_fix(product: Product, matrix: Matrix) -> Fix | None:
    """Reading a misaligned left matrix, or writing a misaligned result, by groups of rows, where nothing else is misaligned."""
    value = fake_value(matrix.node)
    if value is None or value.device.type != "cuda" or not _goes_by_rows(product, matrix):
        return None
    if any(isinstance(size, torch.SymInt) for size in value.shape) or not value.is_contiguous():
        return None
    rows, columns = value.shape
    if split_rows(rows, columns, value.dtype.itemsize) is None:
        return None
    return Fix(matrix.node, How.BY_ROWS, hints(value.stride()), 0, 0, 0, only=product.node)


def _goes_by_rows(product: Product, matrix: Matrix) -> bool:
    roles, target = {other.role for other in product.matrices}, product.node.target
    if matrix.role == "a":
        return target is aten.mm.default
    # columns of the right matrix are left off, which must be rows in memory
    written = matrix.role == "out" and {"a", "bt"} <= roles
    return written and (target is aten.mm.default or (target is aten.addmm.default and not product.node.kwargs and _is_bias(product.node)))


def _is_bias(product: fx.Node) -> bool:
    bias = fake_value(product.args[0])
    return bias is not None and bias.dim() == 1 and bias.shape[0] == product.meta["val"].shape[1]
