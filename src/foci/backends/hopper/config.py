"""What a kernel is compiled for. All else that kernels receive is as `foci.backends.triton.kernel_args` has it."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Config", "MaskedTable"]


class Config(NamedTuple):
    """Each field a `tl.constexpr`.

    CONSUMERS: warpgroups of 64 rows each. OVERLAPPED: each computes softmax while its products run. TILE_Q: rows of a
    program; TILE_KV: keys of a tile. STAGES: tiles of keys, and of values, in flight. D, DV: head dims; D_PAD, DV_PAD: the
    same, padded to a power of two or to the sum of some (`foci.backends.hopper.layouts.pieces`). MODE: which tiles are
    visited: those within the rows' "bounds", or "all", "ranges" or "lists" (see `foci.backends.triton.tile_table_kernels`). JAGGED:
    packed sequences. PLAIN: the score function is the identity, and the scale positive. DROPOUT: weights are dropped.
    BLOCKS: the caller gave classes of blocks, and a tile marked FORCED is attended to whatever the mask says. LOW: a row's
    first key need not be 0. WORDS: masks of partial tiles are given as words. PERSISTENT: a program takes one task after
    another. GROUPED: more than one query head shares keys. BOUNDED: queries that attend to a key are one run. DEFERS: a
    share in dq is shown to the warp that adds it a tile later. LINE: `score`, or `both`, is given as the function `line`
    (`foci.backends.hopper.functions`). JOINED: one loop for whole and partial tiles. NUMBERED: how
    consumers free stages (`foci.backends.hopper.barriers`). EXACT: a row's weights are
    measured against its largest score itself. HELD: queries stay in registers. EARLY: overlapped consumers round weights before they
    wait for values. TOGETHER: heads whose tasks come in turn. STARTS: lists say at which keys tiles begin, not which tiles they are.
    AT_ONCE: queries whose random numbers the backward makes at a time. REGISTERS: of a thread of the forward's consumers.
    TURNING: strided programs take every second round of tasks in reverse. ROUND: the backward's tiles of keys begin at tiles of queries of
    their own and go round (`foci.backends.hopper.dq_semaphore`).
    """

    CONSUMERS: Any
    OVERLAPPED: Any
    TILE_Q: Any
    TILE_KV: Any
    STAGES: Any
    D: Any
    D_PAD: Any
    DV: Any
    DV_PAD: Any
    MODE: Any
    JAGGED: Any
    PLAIN: Any
    DROPOUT: Any
    BLOCKS: Any
    LOW: Any = None
    WORDS: Any = None
    PERSISTENT: Any = None
    GROUPED: Any = None
    BOUNDED: Any = None
    DEFERS: Any = None
    LINE: Any = None
    JOINED: Any = None
    NUMBERED: Any = None
    EXACT: Any = None
    HELD: Any = None
    EARLY: Any = None
    TOGETHER: Any = None
    STARTS: Any = None
    AT_ONCE: Any = None
    REGISTERS: Any = None
    TURNING: Any = None
    ROUND: Any = None


class MaskedTable(NamedTuple):
    """A `foci.backends.triton.kernel_args.Table`, the words of its partial tiles and their limits (`foci.backends.hopper.mask_bits`).

    tickets: int32 of zero, how many tasks persistent programs have taken besides their first, None if each takes every so-manieth.
        Packed, the table of tasks, which holds them (`foci.backends.triton.tiles.TICKETS`), zero again behind the last.
    halved: how many of the last tasks are for two programs each, encoded.
    order: int32 [rows of the lists], in the place of each task the one that is taken for it, or None.
    late: 1 where the last task of each head comes behind all others, else 0, encoded; None where tasks are of any length.
    """

    counts: Any
    lists: Any
    b_stride: int
    h_stride: int
    width: int
    words: Any
    limits: Any = None
    tickets: Any = None
    halved: Any = None
    order: Any = None
    late: Any = None
