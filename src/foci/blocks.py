"""Which blocks of keys a block of queries needs: classes of blocks, found by interval analysis of the mask.

A class says of all pairs of positions within a block whether the mask lets them attend: none (`EMPTY`), some
(`PARTIAL`), all (`FULL`). Time and memory are those of the grid of blocks, O((S / block)^2), never S x S: interval
arithmetic (Moore, 1966) bounds the mask over all blocks at once, captured vectors by the bounds of their slices. Only
where intervals cannot decide, and the caller wants to know, a block is evaluated, a bounded number of pairs at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from foci.ir.eager import Env, evaluate
from foci.ir.expr import Expr
from foci.ir.interval import Grid, bounds
from foci.ir.ranges import Range

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "Extent",
    "classes_of_lists",
    "classify",
    "combine",
    "from_lists",
    "resize",
    "to_lists",
    "transpose_lists",
]

EMPTY: Final = 0
PARTIAL: Final = 1
FULL: Final = 2

_BLOCKS_AT_ONCE: Final = 1 << 17
_PAIRS_AT_ONCE: Final = 1 << 20
_PROBES: Final = 8  # positions along each side of a block


@dataclass(frozen=True, eq=False)
class Extent:
    """The sizes a mask is classified over.

    Attributes:
        B, Hq, Sq, Skv: batch entries (or sequences), query heads, query and key length (of the longest sequence).
        q_len, kv_len: integer [B], lengths of each sequence where they differ (jagged); else Sq and Skv.
    """

    B: int
    Hq: int
    Sq: int
    Skv: int
    q_len: Tensor | None = None
    kv_len: Tensor | None = None

    @property
    def is_jagged(self) -> bool:
        """Whether sequences have lengths of their own."""
        return self.q_len is not None or self.kv_len is not None


def classify(
    mask: Expr,
    *,
    sizes: Extent,
    block: tuple[int, int],
    captures: Sequence[Tensor] = (),
    ints: Sequence[int] = (),
    floats: Sequence[float] = (),
    exact: bool = False,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Classes of all blocks of a mask.

    Positions past a length do not count: a block that overhangs is FULL if every pair inside attends.

    Args:
        mask: BOOL expression of the coordinates.
        sizes: what it is classified over.
        block: queries and keys per block.
        captures, ints, floats: what the expression reads, by slot.
        exact: evaluate the blocks that intervals leave undecided; otherwise they count as PARTIAL.
        device: of the result; captures must be there.

    Returns:
        int8 [B or 1, Hq or 1, ceil(Sq / block_q), ceil(Skv / block_kv)]; 1 where the mask does not depend on the
        batch entry or the head.

    Raises:
        ValueError: for a block size under 1.

    Example:
        >>> from foci.ir.expr import variable
        >>> from foci.ir.ops import apply
        >>> causal = apply("le", variable("kv_idx"), variable("q_idx"))
        >>> classify(causal, sizes=Extent(1, 1, 256, 256), block=(128, 128))
        tensor([[[[1, 0],
                  [2, 1]]]], dtype=torch.int8)
    """
    if min(block) < 1:
        raise ValueError(f"block must be two sizes of at least 1, got {block}")
    work = _Work(mask, sizes, block, tuple(captures), tuple(ints), tuple(floats), torch.device(device))
    classes = torch.empty(work.shape, dtype=torch.int8, device=device)
    for part in _parts(work.shape):
        classes[part] = _by_intervals(work, part)
    if exact:
        _settle(work, classes)
    return classes


@dataclass(frozen=True, eq=False)
class _Work:
    mask: Expr
    sizes: Extent
    block: tuple[int, int]
    captures: tuple[Tensor, ...]
    ints: tuple[int, ...]
    floats: tuple[float, ...]
    device: torch.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        reads, s = self.mask.variables(), self.sizes
        return (
            s.B if "b" in reads or s.is_jagged else min(s.B, 1),
            s.Hq if "h" in reads else min(s.Hq, 1),
            math.ceil(s.Sq / self.block[0]),
            math.ceil(s.Skv / self.block[1]),
        )

    def lengths(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key length of the batch entries, in their shape."""
        s = self.sizes
        q = torch.full_like(b, s.Sq) if s.q_len is None else s.q_len.to(b)[b]
        kv = torch.full_like(b, s.Skv) if s.kv_len is None else s.kv_len.to(b)[b]
        return q, kv


Part = tuple[slice, slice, slice, slice]


def _parts(shape: tuple[int, int, int, int]) -> Iterator[Part]:
    """Pieces of the grid of at most `_BLOCKS_AT_ONCE` blocks, or one row of blocks."""
    b, h, rows, columns = shape
    if 0 in shape:
        return
    row_step = min(rows, max(1, _BLOCKS_AT_ONCE // columns))
    h_step = min(h, max(1, _BLOCKS_AT_ONCE // (columns * row_step)))
    b_step = min(b, max(1, _BLOCKS_AT_ONCE // (columns * row_step * h_step)))
    for i in range(0, b, b_step):
        for j in range(0, h, h_step):
            for k in range(0, rows, row_step):
                yield slice(i, i + b_step), slice(j, j + h_step), slice(k, k + row_step), slice(0, columns)


def _by_intervals(work: _Work, part: Part) -> Tensor:
    b, h, rows, columns = (torch.arange(n, device=work.device)[cut] for n, cut in zip(work.shape, part))
    b, h, rows = b[:, None, None, None], h[:, None, None], rows[:, None]
    q_len, kv_len = work.lengths(b)
    q_first, kv_first = rows * work.block[0], columns * work.block[1]
    ranges = {
        "b": _range(b, b),
        "h": _range(h, h),
        "q_idx": _range(q_first, torch.minimum(q_first + work.block[0], q_len) - 1),
        "kv_idx": _range(kv_first, torch.minimum(kv_first + work.block[1], kv_len) - 1),
        "q_len": _range(q_len, q_len),
        "kv_len": _range(kv_len, kv_len),
    }
    truth = bounds(work.mask, Grid(ranges, work.captures, work.ints, work.floats))
    classes = (truth.lo == 1).to(torch.int8) + (truth.hi != 0).to(torch.int8)
    if work.sizes.is_jagged:
        classes = classes.masked_fill((q_first >= q_len) | (kv_first >= kv_len), EMPTY)
    return classes


def _range(lo: Tensor, hi: Tensor) -> Range:
    # Past the end of a short sequence the range would be upside down; such blocks are EMPTY whatever it says.
    return Range(lo.to(torch.float64), torch.maximum(lo, hi).to(torch.float64))


def _settle(work: _Work, classes: Tensor) -> None:
    """Evaluates the PARTIAL blocks, in place: at a few positions, which settles most, then at all."""
    block_q, block_kv = work.block
    undecided = (classes == PARTIAL).nonzero()
    if not len(undecided):
        return
    probes = tuple(torch.linspace(0, n - 1, min(n, _PROBES), device=work.device).to(torch.int64) for n in work.block)
    everywhere = tuple(torch.arange(n, device=work.device) for n in work.block)
    terms = _terms(work)
    step = max(1, _PAIRS_AT_ONCE // (len(probes[0]) * len(probes[1]) * terms))
    probe_classes = [_by_value(work, chunk, *probes) for chunk in torch.split(undecided, step)]
    undecided = undecided[torch.cat(probe_classes) != PARTIAL]
    step = max(1, _PAIRS_AT_ONCE // (block_q * block_kv * terms))
    for chunk in torch.split(undecided, step) if len(undecided) else ():
        classes[tuple(chunk.unbind(1))] = _by_value(work, chunk, *everywhere)


def _terms(work: _Work) -> int:
    """Numbers in flight for one pair of positions: the rows that reductions run over."""
    extents = {e.args[1] for e in work.mask.walk() if e.op == "reduce"}
    sizes = (e.value for e in extents if e.op == "size")
    return math.prod(max(1, work.captures[int(at[0])].shape[int(at[1])]) for at in sizes if isinstance(at, tuple))


def _by_value(work: _Work, chunk: Tensor, within_q: Tensor, within_kv: Tensor) -> Tensor:
    """Classes of the blocks `chunk` [n, 4] by their positions within, as many rows of the blocks at a time as fit."""
    b, h, row, column = (at[:, None, None] for at in chunk.unbind(1))
    q_len, kv_len = work.lengths(b)
    kv_idx = column * work.block[1] + within_kv
    some = torch.zeros(len(chunk), dtype=torch.bool, device=work.device)
    every = torch.ones_like(some)
    rows = max(1, _PAIRS_AT_ONCE // (len(chunk) * len(within_kv) * _terms(work)))
    for part in torch.split(within_q, rows):
        q_idx = row * work.block[0] + part[:, None]
        inside = (q_idx < q_len) & (kv_idx < kv_len)
        variables = {
            "b": b,
            "h": h,
            "q_idx": torch.minimum(q_idx, (q_len - 1).clamp(min=0)),
            "kv_idx": torch.minimum(kv_idx, (kv_len - 1).clamp(min=0)),
            "q_len": q_len,
            "kv_len": kv_len,
        }
        env = Env({name: value.to(torch.int32) for name, value in variables.items()}, work.captures, work.ints, work.floats)
        attend = evaluate((work.mask,), env)[0]
        some |= (attend & inside).flatten(1).any(1)
        every &= (attend | ~inside).flatten(1).all(1)
    return some.to(torch.int8) + (some & every).to(torch.int8)


def combine(a: Tensor, b: Tensor) -> Tensor:
    """Classes of the intersection of two masks: what both need, FULL where both are.

    Args:
        a, b: int8 classes that broadcast together.

    Example:
        >>> combine(torch.tensor([0, 1, 2], dtype=torch.int8), torch.tensor([2, 2, 1], dtype=torch.int8))
        tensor([0, 1, 1], dtype=torch.int8)
    """
    return torch.minimum(a, b)


def resize(classes: Tensor, from_block: tuple[int, int], to_block: tuple[int, int], lengths: tuple[int, int]) -> Tensor:
    """Classes for another block size: of a tile that covers several blocks what they agree on, PARTIAL otherwise.

    Args:
        classes: int8 [..., ceil(Sq / from_q), ceil(Skv / from_kv)].
        from_block: the block size of `classes`.
        to_block: the block size wanted; any, not only multiples or divisors.
        lengths: Sq and Skv.

    Returns:
        int8 [..., ceil(Sq / to_q), ceil(Skv / to_kv)].

    Example:
        >>> resize(torch.tensor([[1, 0], [2, 1]], dtype=torch.int8), (128, 128), (256, 128), (256, 256))
        tensor([[1, 1]], dtype=torch.int8)
    """
    if from_block == to_block:
        return classes
    low = high = classes
    for dim, old, new, length in zip((-2, -1), from_block, to_block, lengths):
        if old == new:
            continue
        touched = _touched(old, new, length, classes.device)
        low = _gathered(low, dim, touched).amin(dim)
        high = _gathered(high, dim, touched).amax(dim)
    return torch.where(low == high, low, PARTIAL)


def _touched(old: int, new: int, length: int, device: torch.device) -> Tensor:
    """[tiles, most blocks in a tile]: the blocks that each tile touches, the last one repeated."""
    start = torch.arange(0, length, new, device=device)
    first, last = start // old, ((start + new).clamp(max=length) - 1) // old
    most = math.ceil(new / old) + 1
    return torch.minimum(first[:, None] + torch.arange(most, device=device), last[:, None])


def _gathered(classes: Tensor, dim: int, touched: Tensor) -> Tensor:
    shape = list(classes.shape)
    shape[dim : dim + 1 or None] = touched.shape
    picked = classes.index_select(dim, touched.flatten())
    return picked.reshape(shape)


def to_lists(present: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks as lists, row by row: how many, and which.

    Args:
        present: bool [..., rows, columns].

    Returns:
        counts int32 [..., rows] and indices int32 [..., rows, columns]: those present in order, then the others.

    Example:
        >>> to_lists(torch.tensor([[False, True, True]]))
        (tensor([2], dtype=torch.int32), tensor([[1, 2, 0]], dtype=torch.int32))
    """
    columns = present.shape[-1]
    counts = present.sum(-1, dtype=torch.int32)
    before = present.cumsum(-1, dtype=torch.int32)
    at = torch.arange(columns, device=present.device, dtype=torch.int32)
    place = torch.where(present, before - 1, counts[..., None] + at - before)
    indices = torch.empty_like(place).scatter_(-1, place.to(torch.int64), at.expand_as(place))
    return counts, indices


def from_lists(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """The blocks that lists name.

    Args:
        counts: integer [..., rows].
        indices: integer [..., rows, most]; entries from `counts` on are ignored, and so are negative ones, as in torch.
        columns: number of blocks in a row.

    Returns:
        bool [..., rows, columns].

    Example:
        >>> from_lists(torch.tensor([2]), torch.tensor([[1, 2, 0]]), 3)
        tensor([[False,  True,  True]])
    """
    used = (torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]) & (indices >= 0)
    place = torch.where(used, indices, columns).to(torch.int64)
    present = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return present.scatter_(-1, place, True)[..., :columns]


def classes_of_lists(counts: Tensor, indices: Tensor, full_counts: Tensor | None, full_indices: Tensor | None) -> Tensor:
    """The classes of blocks that lists name: PARTIAL for those of the first, FULL for those of the second, if there are any.

    Args:
        counts, full_counts: integer [..., rows].
        indices, full_indices: integer [..., rows, columns].

    Returns:
        int8 [..., rows, columns].

    Example:
        >>> classes_of_lists(torch.tensor([1]), torch.tensor([[1, 0]]), torch.tensor([1]), torch.tensor([[0, 1]]))
        tensor([[2, 1]], dtype=torch.int8)
    """
    columns = indices.shape[-1]
    classes = from_lists(counts, indices, columns).to(torch.int8) * PARTIAL
    if full_counts is None or full_indices is None:
        return classes
    return classes.masked_fill(from_lists(full_counts, full_indices, columns), FULL)


def transpose_lists(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """For each column the rows that name it, as lists: what a pass over keys needs.

    Args:
        counts: integer [..., rows].
        indices: integer [..., rows, columns].

    Returns:
        counts int32 [..., columns] and indices int32 [..., columns, rows].

    Example:
        >>> transpose_lists(torch.tensor([1, 2]), torch.tensor([[0, 1], [0, 1]]))[0]
        tensor([2, 1], dtype=torch.int32)
    """
    return to_lists(from_lists(counts, indices, indices.shape[-1]).transpose(-1, -2))
