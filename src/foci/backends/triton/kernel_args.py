"""What kernels receive: named tuples that hosts fill and kernels read, and integers that never specialise a kernel.

Triton compiles a kernel anew when an integer argument becomes 1 or a multiple of 16. Integers travel as 4 v + 3, which
is neither for any v, and `tiles.decode` undoes it, so that new lengths and values meet the same kernel. Alignment is
said by `Config.UNIT` instead: strides travel in units of so many elements.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor

__all__ = [
    "Config",
    "Environment",
    "Numbers",
    "Size",
    "Spans",
    "Strides",
    "Table",
    "encode",
    "encode_strides",
    "encode_word",
    "is_countable_by_eights",
    "table_config",
]


class Config(NamedTuple):
    """What a kernel is compiled for; each field a `tl.constexpr`.

    TILE_Q, TILE_KV: rows and keys of a tile. D, DV: head dims; D_PAD, DV_PAD: the same, padded to a power of two. STAGES: loads in
    flight. TURNED: the kernel of dk and dv holds scores as rows of queries, as the others do: fewer registers, but products read them
    from shared memory. MODE: which tiles are visited: "all", "ranges" or "lists" (see `tile_table_kernels`). JAGGED: packed
    sequences. DESCRIPTORS: tiles that stream by are loaded through tensor descriptors. UNIT: 8 when every tensor has a contiguous last
    dimension and otherwise strides that are multiples of 8, else 1. WIDE: 64-bit offsets within a tile. PLAIN: the kernel asks no score
    function: scores are products, or products on a line. AFFINE: they are the latter, and the function `line` takes the score function's
    place (see `foci.backends.triton.functions`). NEGATIVE: the scale is below zero. SPLIT_EDGE: the tile that overhangs the keys is
    visited apart. DROPOUT: weights are dropped. BLOCKS: the caller gave classes of blocks, and a tile marked FORCED is attended to
    whatever the mask says. BOUNDED: the mask is by a query's first and last key, and holds for none beyond the last (see
    `foci.backends.mask_intervals`). PRECISION: of float32 products.
    """

    TILE_Q: Any
    TILE_KV: Any
    D: Any
    D_PAD: Any
    DV: Any
    DV_PAD: Any
    STAGES: Any
    TURNED: Any
    MODE: Any
    JAGGED: Any
    DESCRIPTORS: Any
    UNIT: Any
    WIDE: Any
    PLAIN: Any
    AFFINE: Any
    NEGATIVE: Any
    SPLIT_EDGE: Any
    DROPOUT: Any
    BLOCKS: Any
    BOUNDED: Any
    PRECISION: Any


class Strides(NamedTuple):
    """Strides of [B, H, S, D], encoded; in units of `Config.UNIT` but for the last."""

    b: int
    h: int
    s: int
    d: int


class Size(NamedTuple):
    """Encoded counts. `heads` are those a program may have; `group` query heads share a kv head; `rows` and `columns` are
    the queries and keys of a whole head: Sq and Skv, or the packed tokens."""

    batch: int
    heads: int
    group: int
    tasks: int
    rows: int
    columns: int


class Spans(NamedTuple):
    """Jagged only: where each task and each sequence lies. `tasks` is int32 [n, 8], see `tile_table_kernels.assign_tasks`; `sequences` is
    their encoded number, `together` whether programs take all heads of a task at a time, encoded."""

    tasks: Tensor | None
    q_start: Tensor | None
    q_length: Tensor | None
    kv_start: Tensor | None
    kv_length: Tensor | None
    sequences: int
    together: int


class Table(NamedTuple):
    """Which tiles a task visits: `counts` int32 [rows, 4] and `lists` int32 [rows, width]; strides select the row."""

    counts: Tensor | None
    lists: Tensor | None
    b_stride: int
    h_stride: int
    width: int


class Environment(NamedTuple):
    """What score and mask functions read besides coordinates. `sizes` and `strides` are encoded, flat over captures."""

    ints: tuple[int, ...]
    floats: tuple[float, ...]
    captures: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Numbers(NamedTuple):
    """Scale (its absolute value), dropout's threshold and factor, the seed, and what flows into the weights in a backward pass.

    `flow_columns`: gradient of the column sums, float32 [B, Hq, Skv], or [1, Hq, Tkv] jagged, with `flow_start` the first key
    of each sequence. `flow_weights`: of the weights, float32 [B, Hq, Sq, Skv]. Contiguous, or None. `flow_counts`: Hq, Sq, and
    Skv or Tkv, encoded; empty where nothing flows.
    """

    scale: float
    threshold: int
    keep_factor: float
    seed: Tensor | None
    flow_columns: Tensor | None = None
    flow_weights: Tensor | None = None
    flow_start: Tensor | None = None
    flow_counts: tuple[int, ...] = ()


def encode(value: int) -> int:
    """4 v + 3: never 1, never a multiple of 16."""
    return 4 * value + 3


def encode_word(value: int) -> int:
    """A 32-bit word as an odd integer that always takes 64 bits."""
    return (1 << 40) + (value << 5) + 1


def encode_strides(strides: tuple[int, int, int, int], unit: int) -> Strides:
    """Strides of a [B, H, S, D] tensor as `Strides` holds them."""
    b, h, s, d = strides
    return Strides(4 * (b // unit) + 3, 4 * (h // unit) + 3, 4 * (s // unit) + 3, 4 * d + 3)


def is_countable_by_eights(strides: Iterable[int]) -> bool:
    """Whether kernels may be told strides in units of 8 elements: from 2^31 elements on the number of units fits into 32 bits, in which it
    is multiplied by 8 again, and the product does not; from 2^32 on the number is one of 64 bits."""
    return not any(2**31 <= stride < 2**32 for stride in strides)


@functools.lru_cache(maxsize=256)
def table_config(tile_q: int, tile_kv: int, *, is_packed: bool, mode: str = "all", is_forced: bool = False) -> Config:
    """What the kernels that find tiles are compiled for: little, so that the kernels of many problems share them."""
    named = {"TILE_Q": tile_q, "TILE_KV": tile_kv, "MODE": mode, "JAGGED": is_packed, "BLOCKS": is_forced}
    return Config(*(tl.constexpr(named.get(name, 0)) for name in Config._fields))
