"""A product with a matrix whose rows are misaligned, read or written where it lies.

Fast products move 16 bytes at a time, of aligned rows. If rows are `k` elements apart, and k is not a multiple of the g
elements of 16 bytes, every g-th row still starts at the same misalignment. So the rows fall into at most g groups, each of
which is a matrix of aligned rows, once its first few columns are left off; and those are off by the same number of columns
from one group to the next, so that all groups together are one batched product. The columns that were left off are
a product of their own, with a few columns only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foci.padding.strides import LOAD, round_up

__all__ = ["Groups", "bytes_read_by_rows", "bytes_written_by_rows", "mm_by_rows", "mm_into_rows", "split_rows"]


@dataclass(frozen=True)
class Groups:
    """How rows k elements apart fall into groups.

    Attributes:
        count: of groups; row r belongs to group r % count.
        skip: columns that each group leaves off at the left more than the one before.
        width: columns that the batched product takes.
    """

    count: int
    skip: int
    width: int

    @property
    def edge(self) -> int:
        """Columns that some group leaves off, at the left."""
        return self.skip * (self.count - 1)


def split_rows(rows: int, k: int, itemsize: int, stride: int | None = None) -> Groups | None:
    """The groups of a matrix [rows, k], or None if it has too few columns, or rows that are no multiple of the groups.

    Args:
        rows, k: its sizes.
        itemsize: bytes of an element.
        stride: elements from row to row; k if not given.

    Example:
        >>> split_rows(8192, 30522, 2)
        Groups(count=4, skip=6, width=30504)
        >>> split_rows(8191, 30522, 2) is None
        True
    """
    stride = k if stride is None else stride
    load = LOAD // itemsize
    count = load // math.gcd(stride, load)
    skip = -stride % load
    width = (k - skip * (count - 1)) // load * load
    if rows % count or width < 16 * load:
        return None
    return Groups(count, skip, width)


def _ends(groups: Groups, k: int, itemsize: int) -> int:
    """Columns at either end that make a product of their own."""
    return int(round_up(max(groups.edge, k - groups.width), LOAD // itemsize))


def bytes_read_by_rows(m: int, k: int, n: int, itemsize: int) -> int:
    """Memory that `mm_by_rows` takes at most besides its result: the columns at the ends, twice, and their places.

    Example:
        >>> bytes_read_by_rows(8192, 30522, 768, 2)
        1712320
    """
    groups = split_rows(m, k, itemsize)
    width = _ends(groups, k, itemsize) if groups is not None else 0
    return (4 * m * width + 2 * width * n) * itemsize + 8 * (m + width)


def bytes_written_by_rows(m: int, k: int, n: int, itemsize: int, *, biased: bool) -> int:
    """Memory that `mm_into_rows` takes at most besides its result: the columns at the ends, or factors with the bias in them.

    Example:
        >>> bytes_written_by_rows(8192, 768, 30522, 2, biased=False)
        860160
    """
    groups = split_rows(m, n, itemsize)
    if groups is None:
        return 0
    width = 2 * _ends(groups, n, itemsize)
    ends = width * (m + k + biased) * itemsize
    if not biased:
        return ends
    rows, load = max(end - start for start, end in _pieces(groups, itemsize)) + groups.edge, LOAD // itemsize
    return max(ends, ((m + rows) * (k + load) + n * load) * itemsize)


def mm_by_rows(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b.

    Args:
        a: [M, K], each row's elements side by side, M a multiple of the number of groups.
        b: [K, N] with aligned rows.

    Returns:
        [M, N]

    Raises:
        ValueError: for an `a` that does not fall into groups.
    """
    (m, k), n = a.shape, b.shape[1]
    stride = a.stride(0)
    groups = split_rows(m, k, a.dtype.itemsize, stride)
    if groups is None or a.stride(1) != 1:
        raise ValueError(f"a must have rows that fall into groups of equal misalignment: {tuple(a.shape)}, {a.stride()}")
    count, skip, width = groups.count, groups.skip, groups.width
    out = _edges(a, b, groups)
    by_group = out.as_strided((count, m // count, n), (n, count * n, 1))
    left = a.as_strided((count, m // count, width), (stride + skip, count * stride, 1), a.storage_offset())
    right = b.as_strided((count, width, n), (skip * b.stride(0), b.stride(0), b.stride(1)), b.storage_offset())
    return torch.baddbmm(by_group, left, right, out=by_group).as_strided((m, n), (n, 1))


def _edges(a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    """[M, N]: the product of the columns that the batched product leaves off, at either end."""
    k = a.shape[1]
    width = _ends(groups, k, a.dtype.itemsize)
    first = torch.arange(a.shape[0], device=a.device)[:, None] % groups.count * groups.skip
    column = torch.arange(width, device=a.device)
    # where, not a product with zero: what stands in the other columns may be infinite
    left = torch.where(column < first, a[:, :width], 0)
    right = torch.where(column + (k - width) >= first + groups.width, a[:, k - width :], 0)
    return torch.cat((left, right), 1) @ torch.cat((b[:width], b[k - width :]), 0)


def mm_into_rows(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b + bias, into rows of a length that is misaligned.

    Args:
        a: [M, K], M a multiple of the number of groups.
        b: [K, N]
        bias: [N]; it becomes one more row of `b`, so that it is added before the result is rounded.

    Returns:
        [M, N], contiguous.

    Raises:
        ValueError: for a result that does not fall into groups.
    """
    m, n = a.shape[0], b.shape[1]
    groups = split_rows(m, n, a.dtype.itemsize)
    if groups is None:
        raise ValueError(f"the result must have rows that fall into groups of equal misalignment: {(m, n)}")
    out = a.new_empty((m, n))
    edge = _ends(groups, n, a.dtype.itemsize)
    _write_ends(out, a, b, bias, edge)
    if bias is None:
        _write_groups(out, a, b, groups, 0)
        return out
    left, last = _beside(a, 1), _column(bias, a.dtype)
    for start, end in _pieces(groups, a.dtype.itemsize):
        _write_piece(out, left, (b, last), groups, start, end)
    return out


def _pieces(groups: Groups, itemsize: int) -> list[tuple[int, int]]:
    """Columns that the batched product of factors with a bias takes in turn, in two, so that half of `b` is copied at a time."""
    middle = int(round_up(groups.width // 2, LOAD // itemsize))
    return [(0, middle), (middle, groups.width)]


def _beside(rows: Tensor, last: int) -> Tensor:
    """Rows with one more column of a number, and zeros up to the next that would be aligned."""
    return torch.cat((rows, _column(rows.new_full((rows.shape[0],), last), rows.dtype)), 1)


def _column(values: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, 16 bytes]: values, and zeros behind each."""
    column = values.new_zeros((values.shape[0], LOAD // dtype.itemsize), dtype=dtype)
    column[:, 0] = values
    return column


def _write_piece(out: Tensor, left: Tensor, right: tuple[Tensor, Tensor], groups: Groups, start: int, end: int) -> None:
    """The batched product of these columns; of `right`, and of the rows below it, they are copied for as long as this takes."""
    (b, last), columns = right, slice(start, end + groups.edge)
    part = torch.cat((b[:, columns].t(), last[columns]), 1)
    _write_groups(out, left, part.t(), replace(groups, width=end - start), start)


def _write_ends(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, edge: int) -> None:
    """The columns at either end, which are more than the batched product leaves off."""
    n = b.shape[1]
    columns = torch.cat((b[:, :edge], b[:, n - edge :]), 1)
    ends = a @ columns if bias is None else torch.addmm(torch.cat((bias[:edge], bias[n - edge :])), a, columns)
    out[:, :edge], out[:, n - edge :] = ends[:, :edge], ends[:, edge:]


def _write_groups(out: Tensor, a: Tensor, b: Tensor, groups: Groups, start: int) -> None:
    """The batched product, from a column of each group's on."""
    (m, n), k, count, skip, width = out.shape, a.shape[1], groups.count, groups.skip, groups.width
    left = a.as_strided((count, m // count, k), (a.stride(0), count * a.stride(0), a.stride(1)), a.storage_offset())
    right = b.as_strided((count, k, width), (skip * b.stride(1), b.stride(0), b.stride(1)), b.storage_offset())
    into = out.as_strided((count, m // count, width), (n + skip, count * n, 1), start)
    if out.is_cpu:  # one by one: torch turns oneDNN off for the whole process where it cannot describe how a batch lies
        for group in range(count):
            torch.mm(left[group], right[group], out=into[group])
    else:
        torch.baddbmm(into, left, right, beta=0, out=into)
