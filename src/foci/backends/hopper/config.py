"""Compile-time configuration of the kernels. Their other arguments are those of `foci.backends.gpu.kernel_args`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import triton.language as tl

__all__ = ["Config", "MaskedTable", "make_config"]


class Config(NamedTuple):
    """Each field is a `tl.constexpr`."""

    CONSUMERS: Any  # warpgroups of 64 rows each
    OVERLAPPED: Any  # a consumer computes softmax while its products run
    TILE_Q: Any  # query rows of a tile
    TILE_KV: Any  # keys of a tile
    STAGES: Any  # tiles in flight
    D: Any  # head dim of q and k
    D_PAD: Any  # D padded to a power of two or a sum of two (`foci.backends.hopper.layouts`)
    DV: Any  # head dim of v
    DV_PAD: Any
    MODE: Any  # visited tiles: within rows' "bounds", or "all", "causal", "ranges", "lists" (`foci.backends.gpu.tile_table_kernels`)
    JAGGED: Any  # packed sequences
    PLAIN: Any  # the score function is the identity, and the scale positive
    DROPOUT: Any
    BLOCKS: Any  # the caller gave a block mask; a tile marked FORCED is attended to whatever the mask function says
    LOW: Any = None  # a row's first key may not be 0
    MASK_BITS: Any = None  # partial tiles come with mask bits (`foci.backends.hopper.mask_bits`)
    PERSISTENT: Any = None  # a program takes one task after another
    GROUPED: Any = None  # several query heads share keys
    BOUNDED: Any = None  # the queries that attend to a key are one run
    DEFERS_DQ: Any = None  # a share of dq is handed to the adding warp one tile later: one fence less a tile
    AFFINE: Any = None  # `score`, or `both`, is the function `line` of `foci.backends.hopper.functions`
    SINGLE_LOOP: Any = None  # one loop for full and partial tiles
    ONE_PARTIAL: Any = None  # at most the first tile that a consumer's rows visit is partial
    NAMED_BARRIERS: Any = None  # see `foci.backends.hopper.barriers`
    EXACT_MAX: Any = None  # the softmax reference is the row max itself
    Q_IN_REGISTERS: Any = None  # queries stay in registers
    EARLY_ROUNDING: Any = None  # overlapped consumers round weights before they wait for the previous P V
    HEADS_TOGETHER: Any = None  # heads whose tasks alternate
    KEY_STARTS: Any = None  # lists say at which keys tiles begin, not which tiles they are
    DROPOUT_QUERIES: Any = None  # queries whose random numbers the backward computes at a time
    REGISTERS: Any = None  # of a thread of the forward's consumers
    SERPENTINE: Any = None  # static persistent programs take every second wave in reverse
    ROUND: Any = None  # backward: key tiles begin at query tiles of their own and wrap around (`foci.backends.hopper.dq_semaphore`)


class MaskedTable(NamedTuple):
    """A `foci.backends.gpu.kernel_args.Table` with mask bits and the order of tasks."""

    counts: Any
    lists: Any
    b_stride: int
    h_stride: int
    width: int
    bits: Any  # mask bits of partial tiles and their limits, see `foci.backends.hopper.mask_bits.pack_masks`
    limits: Any = None
    # int32 zero, counts the tasks that persistent programs have taken besides their first; None if tasks are assigned statically. Packed:
    # the task table, which holds it (`foci.backends.gpu.tiles.TICKETS`); the kernel zeroes it again
    tickets: Any = None
    halved: Any = None  # how many of the last tasks are split between two programs, encoded
    order: Any = None  # int32 [rows of the lists]: the task to take in place of each, or None
    short_last: Any = None  # encoded: 1 if the last task of each head comes after all others, else 0; None if tasks are of any length


@functools.lru_cache(maxsize=4096)
def make_config(**fields: int | str | None) -> Config:
    """A configuration of compile-time constants."""
    return Config(**{name: tl.constexpr(value) for name, value in fields.items()})
