"""Kernel arguments: named tuples that the host fills and kernels read, and integers encoded so that they never specialise a kernel.

Triton compiles a kernel again when an integer argument becomes 1 or a multiple of 16. So integers are passed as 4 v + 3, which is neither
for any v; `tiles.decode` inverts it. New lengths and values then reuse the same kernel. `Config.UNIT` carries alignment instead: strides
are passed in units of that many elements.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import triton.language as tl

if TYPE_CHECKING:  # workers, which unpickle these tuples, do without torch
    from torch import Tensor

__all__ = [
    "CallArgs",
    "Config",
    "Environment",
    "Numbers",
    "Size",
    "Spans",
    "Strides",
    "Table",
    "Tensors",
    "encode",
    "encode_strides",
    "encode_word",
    "is_countable_by_eights",
    "table_config",
]


class Config(NamedTuple):
    """Compile-time configuration; each field is a `tl.constexpr`."""

    TILE_Q: Any  # rows of a tile
    TILE_KV: Any  # keys of a tile
    D: Any  # head dim of q and k
    D_PAD: Any  # D padded to a power of two
    DV: Any  # head dim of v
    DV_PAD: Any
    STAGES: Any  # loads in flight
    TURNED: Any  # the kernel of dk and dv holds S, not S^T, as the others do: fewer registers, but its products read S from shared memory
    MODE: Any  # visited tiles: "all", "ranges" or "lists" (see `tile_table_kernels`), or "every", all with the mask
    JAGGED: Any  # packed sequences
    DESCRIPTORS: Any  # streamed tiles are loaded through tensor descriptors
    UNIT: Any  # 8 if every tensor has a contiguous last dimension and other strides that are multiples of 8, else 1
    WIDE: Any  # 64-bit offsets within a tile
    PLAIN: Any  # no score function is called: scores are products, or affine
    AFFINE: Any  # scores are affine; the function `line` takes the score function's place (`foci.backends.gpu.functions`)
    NEGATIVE: Any  # the scale is negative
    SPLIT_EDGE: Any  # the tile that overhangs the keys has a loop of its own
    DROPOUT: Any
    BLOCKS: Any  # the caller gave a block mask; a tile marked FORCED is attended to whatever the mask function says
    BOUNDED: Any  # the mask compares with a query's first and last key, and keeps none past the end (`foci.backends.mask_intervals`)
    PRECISION: Any  # of float32 products
    EXCLUDES: Any  # positions may be excluded, and no later kernel mends what these reach: the kernel does so itself (`excluded_products`)


class Strides(NamedTuple):
    """Encoded strides of [B, H, S, D], in units of `Config.UNIT` except the last."""

    b: int
    h: int
    s: int
    d: int


class Tensors(NamedTuple):
    """Strides of tensors [B, H, S, D]; those of an absent tensor are the query's."""

    q: Strides
    k: Strides
    v: Strides
    out: Strides
    dout: Strides
    dq: Strides
    dk: Strides
    dv: Strides


class Size(NamedTuple):
    """Encoded sizes."""

    batch: int
    heads: int  # heads that programs are launched for
    group: int  # query heads per kv head
    tasks: int  # tasks of a head
    rows: int  # queries of a head: Sq, or all packed tokens
    columns: int  # keys of a head: Skv, or all packed tokens


class Spans(NamedTuple):
    """Task records, starts and lengths of packed sequences."""

    tasks: Tensor | None  # int32 [n, 8], see `tile_table_kernels.assign_tasks`
    q_start: Tensor | None
    q_length: Tensor | None
    kv_start: Tensor | None
    kv_length: Tensor | None
    sequences: int  # their number, encoded
    together: int  # encoded: whether the heads of a task run together


class Table(NamedTuple):
    """Tiles that each task visits: `counts` int32 [rows, 4] and `lists` int32 [rows, width]. Strides select the row; integers are
    encoded."""

    counts: Tensor | None
    lists: Tensor | None
    b_stride: int
    h_stride: int
    width: int


class Environment(NamedTuple):
    """The values that score and mask functions read besides coordinates: captured scalars and tensors. Sizes and strides are encoded, flat
    over captures."""

    ints: tuple[int, ...]
    floats: tuple[float, ...]
    captures: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Numbers(NamedTuple):
    """Scale, dropout, and gradients of the weights in a backward pass."""

    scale: float  # absolute value
    threshold: int  # of dropout, by `encode_word`: smaller random words drop
    keep_factor: float  # dropout's factor of kept weights
    seed: Tensor | None
    flow_columns: Tensor | None = None  # gradient of the column sums, float32, contiguous [B, Hq, Skv], or packed [1, Hq, Tkv]
    flow_weights: Tensor | None = None  # gradient of the weights, float32, contiguous [B, Hq, Sq, Skv]
    flow_start: Tensor | None = None  # packed: first key of each sequence
    flow_counts: tuple[int, ...] = ()  # (Hq, Sq, Skv or Tkv), encoded; empty without such gradients


class CallArgs(NamedTuple):
    """Arguments that all attention kernels of a call have. Where a kernel passes them on, the function that it calls reads some of the
    fields, and another tuple with these fields may take their place."""

    strides: tuple[Strides, ...]  # by tensor, see `foci.backends.gpu.passes.Tensors`
    size: Size
    spans: Spans
    table: Table
    numbers: Numbers
    env: Environment


def encode(value: int) -> int:
    """Encode an integer as 4 v + 3, which is never 1 and never a multiple of 16."""
    return 4 * value + 3


def encode_word(value: int) -> int:
    """Encode a 32-bit word as an odd integer that always takes 64 bits."""
    return (1 << 40) + (value << 5) + 1


def encode_strides(strides: tuple[int, int, int, int], unit: int) -> Strides:
    """Encode the strides of a [B, H, S, D] tensor."""
    b, h, s, d = strides
    return Strides(4 * (b // unit) + 3, 4 * (h // unit) + 3, 4 * (s // unit) + 3, 4 * d + 3)


def is_countable_by_eights(strides: Iterable[int]) -> bool:
    """Whether strides can be passed in units of 8 elements. Between 2^31 and 2^32 elements the number of units fits into 32 bits, but its
    product with 8, computed in 32 bits, does not; from 2^32 on the number of units takes 64 bits."""
    return not any(2**31 <= stride < 2**32 for stride in strides)


@functools.lru_cache(maxsize=256)
def table_config(tile_q: int, tile_kv: int, *, is_packed: bool, mode: str = "all", is_forced: bool = False) -> Config:
    """Configuration of the kernels that build tile tables: few fields, so that many problems share the kernels."""
    named = {"TILE_Q": tile_q, "TILE_KV": tile_kv, "MODE": mode, "JAGGED": is_packed, "BLOCKS": is_forced}
    return Config(*(tl.constexpr(named.get(name, 0)) for name in Config._fields))
