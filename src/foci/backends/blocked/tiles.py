"""Work plan of a call: heads in chunks, queries in tiles, keys in runs of blocks of one class."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from foci.backends.sequences import Sequence
from foci.blocks import EMPTY, FULL, PARTIAL, Extent, classify
from foci.compat.torch import is_transformed
from foci.problem import Formula, Layout, Operands

__all__ = ["Chunk", "Run", "Tile", "block_classes", "plan_chunks"]

# Scores computed at a time: on the CPU what its caches hold, elsewhere enough to hide the launches of small kernels.
_SCORES: Final = {"cpu": 1 << 20}
_SCORES_ELSEWHERE: Final = 1 << 22
# Elements of keys or values that a chunk may widen to the accumulation type at a time.
_WIDENED: Final = 1 << 23
_TILE_Q: Final = 256
_BLOCK_KV: Final = 128
_LEAST_RUN: Final = 512


@dataclass(frozen=True)
class Run:
    """Keys `start` to `stop`; those of a run that is not masked are all attended to."""

    start: int
    stop: int
    masked: bool


@dataclass(frozen=True)
class Tile:
    """Queries `start` to `stop` and the runs of keys that they need."""

    start: int
    stop: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Chunk:
    """Batch entries `b` and key heads `kv_heads` (start, stop) that are computed at once, tile by tile."""

    b: tuple[int, int]
    kv_heads: tuple[int, int]
    groups: int
    tiles: tuple[Tile, ...]

    @property
    def heads(self) -> tuple[int, int]:
        """The query heads (start, stop) that read the key heads."""
        return self.kv_heads[0] * self.groups, self.kv_heads[1] * self.groups

    @property
    def count(self) -> int:
        """Pairs of batch entry and key head."""
        return (self.b[1] - self.b[0]) * (self.kv_heads[1] - self.kv_heads[0])


@dataclass(frozen=True)
class _Sizes:
    batch: int
    kv_heads: int
    groups: int
    q_len: int
    kv_len: int
    width: int
    scores: int

    @property
    def tile_q(self) -> int:
        return max(1, min(self.q_len, _TILE_Q))

    @property
    def pairs_at_once(self) -> int:
        """Number of (batch entry, key head) pairs in a chunk."""
        by_scores = self.scores // (self.groups * self.tile_q * min(self.kv_len, _LEAST_RUN))
        return max(1, min(by_scores, _WIDENED // (self.kv_len * self.width)))

    @property
    def steps(self) -> tuple[int, int]:
        """Batch entries and key heads of a chunk."""
        pairs = self.pairs_at_once
        return (pairs // self.kv_heads, self.kv_heads) if pairs >= self.kv_heads else (1, pairs)

    def longest_run(self, pairs: int) -> int:
        return max(_BLOCK_KV, self.scores // (pairs * self.groups * self.tile_q) // _BLOCK_KV * _BLOCK_KV)


def plan_chunks(operands: Operands, sequence: Sequence, classes: Tensor | int) -> list[Chunk]:
    """The pieces of one sequence, which must have queries, keys, heads and batch entries.

    Args:
        operands: the call.
        sequence: one of its sequences.
        classes: those of the call, of `block_classes`.
    """
    query, key = operands.query, operands.key
    sizes = _Sizes(
        batch=query.shape[0],
        kv_heads=key.shape[1],
        groups=query.shape[1] // key.shape[1],
        q_len=sequence.q_len,
        kv_len=sequence.kv_len,
        width=max(key.shape[3], operands.value.shape[3]),
        scores=_SCORES.get(query.device.type, _SCORES_ELSEWHERE),
    )
    if isinstance(classes, int):
        return list(_cut_uniform(sizes, classes))
    if sequence.b is not None and classes.shape[0] > 1:
        classes = classes[sequence.b : sequence.b + 1]
    return list(_cut(sizes, classes[:, :, : -(-sizes.q_len // _TILE_Q), : -(-sizes.kv_len // _BLOCK_KV)]))


def block_classes(operands: Operands, formula: Formula, of: Items[Sequence]) -> Tensor | int:
    """Classes of blocks of 256 queries and 128 keys: int8 [B (or sequences) or 1, Hq or 1, nq, nkv] on the CPU.

    One number where all are known to be alike without looking.
    """
    mask, query = formula.variant.mask, operands.query
    q_len, kv_len = max((s.q_len for s in of), default=0), max((s.kv_len for s in of), default=0)
    rows, columns = -(-q_len // _TILE_Q), -(-kv_len // _BLOCK_KV)
    if formula.block_size is not None:
        assert operands.blocks is not None
        edges = (_edges(q_len, _TILE_Q, formula.block_size[0]), _edges(kv_len, _BLOCK_KV, formula.block_size[1]))
        return _pool(operands.blocks.cpu(), edges)
    if mask.op == "const":
        return FULL if mask.value else EMPTY
    if rows * columns <= 1 or any(map(is_transformed, operands.captures)):
        return PARTIAL
    dense = formula.layout is Layout.DENSE
    extent = Extent(
        B=query.shape[0] if dense else len(of),
        Hq=query.shape[1],
        Sq=q_len,
        Skv=kv_len,
        q_len=None if dense else torch.tensor([s.q_len for s in of], device=query.device),
        kv_len=None if dense else torch.tensor([s.kv_len for s in of], device=query.device),
    )
    captures, ints, floats = operands.captures, operands.ints, operands.floats
    block = (_TILE_Q, _BLOCK_KV)
    return classify(mask, sizes=extent, block=block, captures=captures, ints=ints, floats=floats, device=query.device).cpu()


def _edges(length: int, tile: int, block: int) -> tuple[Tensor, Tensor]:
    """The first and one past the last block that each tile touches."""
    starts = torch.arange(0, length, tile, device="cpu")
    return starts // block, (starts.add(tile).clamp(max=length) - 1) // block + 1


def _pool(blocks: Tensor, edges: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """Classes of tiles from those of the blocks they touch, whatever the alignment, by two-dimensional prefix sums."""
    (top, bottom), (left, right) = edges

    def count(of: int) -> Tensor:
        sums = torch.nn.functional.pad((blocks == of).to(torch.int64), (1, 0, 1, 0)).cumsum(2).cumsum(3)
        upper, lower = sums[:, :, top], sums[:, :, bottom]
        return lower[..., right] - lower[..., left] - upper[..., right] + upper[..., left]

    total = (bottom - top)[:, None] * (right - left)
    classes = torch.full_like(total, PARTIAL, dtype=torch.int8).expand(*blocks.shape[:2], *total.shape)
    return classes.masked_fill(count(EMPTY) == total, EMPTY).masked_fill(count(FULL) == total, FULL)


def _cut_uniform(sizes: _Sizes, kind: int) -> Iterator[Chunk]:
    b_step, h_step = sizes.steps
    tiles_by_pairs: dict[int, tuple[Tile, ...]] = {}
    for b in range(0, sizes.batch, b_step):
        for h in range(0, sizes.kv_heads, h_step):
            b1, h1 = min(b + b_step, sizes.batch), min(h + h_step, sizes.kv_heads)
            pairs = (b1 - b) * (h1 - h)
            if pairs not in tiles_by_pairs:
                runs_of_keys = [] if kind == EMPTY else [Run(0, sizes.kv_len, kind == PARTIAL)]
                runs = tuple(_split(runs_of_keys, sizes.longest_run(pairs)))
                starts = range(0, sizes.q_len, sizes.tile_q)
                tiles_by_pairs[pairs] = tuple(Tile(start, min(start + sizes.tile_q, sizes.q_len), runs) for start in starts)
            yield Chunk((b, b1), (h, h1), sizes.groups, tiles_by_pairs[pairs])


def _cut(sizes: _Sizes, classes: Tensor) -> Iterator[Chunk]:
    b_step, h_step = sizes.steps
    if classes.shape[0] > 1 and _pays_apart(sizes, classes, 0, h_step):
        b_step = 1
    if classes.shape[1] > 1 and _pays_apart(sizes, classes, 1, b_step):
        h_step = 1
    # Batch entries or heads without work of their own share one list of tiles.
    tiles_by_entry: dict[tuple[int, int, int], tuple[Tile, ...]] = {}
    for b in range(0, sizes.batch, b_step):
        for h in range(0, sizes.kv_heads, h_step):
            b1, h1 = min(b + b_step, sizes.batch), min(h + h_step, sizes.kv_heads)
            at = (b if classes.shape[0] > 1 else 0, h if classes.shape[1] > 1 else 0, (b1 - b) * (h1 - h))
            if at not in tiles_by_entry:
                part = classes[b:b1] if classes.shape[0] > 1 else classes
                part = part[:, h * sizes.groups : h1 * sizes.groups] if classes.shape[1] > 1 else part
                low, high = part.amin((0, 1)), part.amax((0, 1))
                tiles_by_entry[at] = tuple(_tiles(sizes, torch.where(low == high, low, PARTIAL), at[2]))
            yield Chunk((b, b1), (h, h1), sizes.groups, tiles_by_entry[at])


def _pays_apart(sizes: _Sizes, classes: Tensor, dim: int, entries_at_once: int) -> bool:
    """Whether entries along `dim` differ so much that one pass for all would waste more than small pieces cost."""
    needed = classes != EMPTY
    saved = 1.0 - float(needed.float().mean()) / max(1e-9, float(needed.any(dim, keepdim=True).float().mean()))
    scores = entries_at_once * sizes.groups * sizes.tile_q * min(sizes.kv_len, _LEAST_RUN)
    return saved > 0.15 and (scores >= sizes.scores >> 4 or saved > 0.5)


def _tiles(sizes: _Sizes, classes: Tensor, pairs: int) -> Iterator[Tile]:
    longest = sizes.longest_run(pairs)
    for i, row in enumerate(classes):
        start = i * sizes.tile_q
        runs = tuple(_runs(row, sizes.kv_len, longest))
        yield Tile(start, min(start + sizes.tile_q, sizes.q_len), runs)


def _runs(row: Tensor, length: int, longest: int) -> Iterator[Run]:
    """Neighbouring blocks of one class, joined across classes where the pieces would be short, cut where too long."""
    kinds, counts = torch.unique_consecutive(row, return_counts=True)
    joined: list[Run] = []
    position = 0
    for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
        stop = min(length, position + count * _BLOCK_KV)
        if kind != EMPTY:
            last = joined[-1] if joined else None
            if last is not None and last.stop == position and stop - last.start <= max(longest // 4, 2 * _BLOCK_KV):
                joined[-1] = Run(last.start, stop, True)
            else:
                joined.append(Run(position, stop, kind == PARTIAL))
        position = stop
    return _split(joined, longest)


def _split(runs: Items[Run], longest: int) -> Iterator[Run]:
    for run in runs:
        for at in range(run.start, run.stop, longest):
            yield Run(at, min(at + longest, run.stop), run.masked)
