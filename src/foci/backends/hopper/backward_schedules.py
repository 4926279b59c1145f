"""Tile shapes of the backward kernels, and which kernel takes which problem, by padded head dims and kind of problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from foci.backends.causal import is_causal
from foci.backends.data_tables import load_table, rows_by_width
from foci.backends.gpu.architectures import HOPPER
from foci.backends.gpu.schedules import Schedule as Tiles
from foci.backends.gpu.schedules import padded_dim
from foci.backends.hopper.schedules import padded_width
from foci.backends.mask_intervals import find_bounds
from foci.backends.problem_class import score_kind, tile_bytes
from foci.problem import Layout, Problem

__all__ = [
    "DK_DV_TILES",
    "DK_DV_WIDE_TILES",
    "DQ_FROM_DS_TILES",
    "DQ_TILES",
    "DROPOUT_QUERIES",
    "POSTPROCESS_COLUMNS",
    "PREPROCESS_NUMBERS",
    "REDUCE_NUMBERS",
    "REDUCE_REGISTERS",
    "ROW_KERNEL_REGISTERS",
    "UNSPLIT_WIDTHS",
    "FusedSchedule",
    "TileShape",
    "ds_chunk_heads",
    "ds_scratch_schedule",
    "ds_scratch_shape",
    "fused_schedule",
    "is_prefix",
    "padded_widths",
    "place_schedule",
    "short_q_schedule",
    "split_short_q",
]


@dataclass(frozen=True)
class TileShape:
    """Tile shape of a kernel: query rows and keys of a tile, and streamed tiles in flight."""

    tile_q: int
    tile_kv: int
    stages: int

    @property
    def tiles(self) -> Tiles:
        """Return the tile sizes as the classification of tiles takes them."""
        return Tiles(self.tile_q, self.tile_kv, 4, self.stages)


@dataclass(frozen=True)
class FusedSchedule:
    """How the fused kernel computes all gradients."""

    shape: TileShape
    heads_together: int  # query heads whose key tiles alternate, few enough that their accumulators stay in L2
    sums: int  # accumulators of dq: with more, fewer key tiles wait for each other, and more is read and written
    defers: bool  # see `config.Config.DEFERS_DQ`
    goes_round: bool  # key tiles begin at different query tiles (`dq_semaphore`), if all programs run at once (`place_schedule`)


def _read_tiles(table: dict[str, Any]) -> dict[int, TileShape]:
    """Tile shapes by width."""
    return {width: TileShape(*row) for width, row in rows_by_width(table).items()}


_TABLE: Final = load_table(__file__, "backward.toml")
DK_DV_WIDE_TILES: Final = TileShape(*_TABLE["bwd_dk_dv_wide"]["any"])
"""Of `bwd_dk_dv` where one warpgroup accumulates dv and the other dk."""
DQ_TILES: Final = _read_tiles(_TABLE["bwd_dq"])
"""By the wider of the padded head dims."""
DK_DV_TILES: Final = _read_tiles(_TABLE["bwd_dk_dv"])
UNSPLIT_WIDTHS: Final = frozenset({(192, 128)})
"""Padded head dims over 128 for which a warpgroup accumulates both dk and dv of 64 keys: measured to be faster than to split them."""
DQ_FROM_DS_TILES: Final = _read_tiles(_TABLE["bwd_dq_from_ds"])
"""Of `bwd_dq` where dS is stored, by the wider of the padded head dims."""
DS_SCRATCH_BYTES: Final = 528 << 20
"""Most bytes of dS stored at a time: under the causal mask eight heads of 8192 positions, or two of 16384."""
DS_CHUNK_PROGRAMS: Final = 256
"""Fewest programs of a chunk, if there are several chunks: with two per SM, short programs make up for long ones."""
SHORT_Q_TILES: Final = _read_tiles(_TABLE["bwd_short_q"])
"""Of `bwd_short_q`, by the padded head dim: as many stages as fit, up to four."""
SHORT_Q_PROGRAMS: Final = 64
"""Fewest programs of `bwd_short_q`: with fewer, half of the SMs are idle."""
SHORT_Q_SPLIT_KEYS: Final = 128
"""Fewest keys of a program where several share a head: reducing their partial dq costs as much as a few tiles."""
FUSED_SCHEDULES: Final = {
    (width, kind): (TileShape(*row["shape"]), bool(row["defers"]))
    for width, kinds in rows_by_width(_TABLE["bwd_dq_dk_dv"]).items()
    for kind, row in kinds.items()
}
"""{(both head dims, padded, at least 64; `score_kind`): (tile shape, `FusedSchedule.defers`)}. A kind without a row is not fused."""
_L2_SUMS_BYTES: Final = HOPPER.sms << 17
"""Most bytes of the accumulators of heads that alternate: what L2 holds beside streamed tiles; twice as much at most."""
_HEADS_TOGETHER: Final = {64: HOPPER.sms, 128: 48}
"""Most heads that alternate, by padded head dim: with as many as SMs, no key tile waits for another."""
_FEW_HEADS: Final = 16
"""Up to this many heads, batch entries included, key tiles of one head must run side by side."""
_MAX_SUMS: Final = 8
"""Most accumulators of dq, where there are few query tiles."""
_ASSUMED_LENGTH: Final = 8192
"""Assumed length of packed sequences at most, where only a bound is known."""
_UNDEFERRED_KEYS: Final = 512
"""Up to this many keys of narrow heads nothing is deferred: tasks end before it pays."""
DROPOUT_QUERIES: Final = {128: 32, 64: 64}
"""By query rows of a tile: for how many of them dropout's random numbers are computed at a time, 32 or 64."""
PREPROCESS_NUMBERS: Final = 4096
"""Elements of a tensor that a program of `begin_gradients` reads, 16 to 128 rows: so few that a thread issues all its loads at once, and
that few heads still have programs for every SM."""
POSTPROCESS_COLUMNS: Final = 32
"""Columns of 64 rows that a program of `finish_query_gradient` writes; fewer where they do not divide the padded head dim."""
REDUCE_NUMBERS: Final = 1024
"""Elements of dq that a program of `reduce_dq_partials` writes, from eight partials at a time."""
REDUCE_REGISTERS: Final = 128
"""Most registers of a thread of `reduce_dq_partials`."""
ROW_KERNEL_REGISTERS: Final = 64
"""Most registers of a thread of `begin_gradients` and `finish_query_gradient`: without a limit ptxas uses so few that loads serialize."""


def padded_widths(problem: Problem) -> tuple[int, int]:
    """Pad the head dims; to the same width where that lets one kernel compute all gradients."""
    widths = padded_width(problem.head_dim), padded_width(problem.value_dim)
    is_alike = padded_dim(widths[0]) == padded_dim(widths[1]) <= 128
    return (max(widths), max(widths)) if is_alike else widths


def short_q_schedule(problem: Problem) -> TileShape | None:
    """Tile shape of `bwd_short_q`; None if it does not take the problem. A program visits its key tiles one after another, so there must be
    heads, or parts of their keys, for half of the SMs."""
    formula, variant = problem.formula, problem.variant
    if not _is_unmasked(problem) or formula.dropout or tile_bytes(variant):
        return None
    is_small = problem.q_len <= 128 and problem.q_heads == problem.kv_heads
    if not is_small or not all((problem.query_grad, problem.key_grad, problem.value_grad)):
        return None
    widths = padded_widths(problem)
    tiles, heads = SHORT_Q_TILES.get(widths[0]), problem.batch * problem.q_heads
    if tiles is None or widths[0] != widths[1]:
        return None
    return tiles if heads * split_short_q(heads, problem.kv_len, tiles.tile_kv)[1] >= SHORT_Q_PROGRAMS else None


def split_short_q(heads: int, keys: int, tile: int) -> tuple[int, int]:
    """(key tiles of a program, programs of a head) in `bwd_short_q`: as many programs as there are SMs for, with `SHORT_Q_SPLIT_KEYS` keys
    or more each, so that none is without a tile.

    `heads`: over all batch entries. `tile`: keys of a tile.
    """
    tiles = -(-keys // tile)
    tiles_each = -(-tiles // max(1, min(HOPPER.sms // heads, keys // SHORT_Q_SPLIT_KEYS)))
    return tiles_each, -(-tiles // tiles_each)


def ds_scratch_schedule(problem: Problem) -> TileShape | None:
    """Tile shape of `bwd_dq` with stored dS; None if dS is not stored. `ds_chunk_heads` decides whether it has room."""
    formula, grads = problem.formula, (problem.query_grad, problem.key_grad, problem.value_grad)
    if formula.layout is not Layout.DENSE or formula.dropout or not is_prefix(problem) or not all(grads):
        return None
    return DQ_FROM_DS_TILES.get(max(padded_widths(problem)))


def ds_scratch_shape(q_len: int, kv_len: int, *, is_causal: bool) -> tuple[int, int]:
    """(rows, columns) of a head's stored dS, keys and queries, see `ds_scratch`."""
    queries, keys = -(-q_len // 128), -(-kv_len // 128)
    return 128 * (min(keys, queries // 2 + 1) if is_causal else keys), 128 * queries


def ds_chunk_heads(heads: int, group: int, kv_len: int, size: int) -> int | None:
    """Key heads whose dS is stored at a time, of `heads` over all batch entries; None if so few leave the GPU idle.

    `group`: query heads per key head. `size`: stored elements of a query head.
    """
    fit = DS_SCRATCH_BYTES // (2 * group * size)
    if not fit:
        return None
    chunks = -(-heads // fit)
    chunk = -(-heads // chunks)
    return chunk if chunks == 1 or chunk * -(-kv_len // 128) >= DS_CHUNK_PROGRAMS else None


def is_prefix(problem: Problem) -> bool:
    """Whether the visited tiles are computed: all of them, or those of the causal mask."""
    mask = problem.variant.mask
    return problem.formula.block_size is None and (is_causal(problem.variant) or (mask.op == "const" and mask.value is True))


def fused_schedule(problem: Problem) -> FusedSchedule | None:
    """Schedule of the fused kernel `bwd_dq_dk_dv`; None if it does not take the problem."""
    formula, variant, kind = problem.formula, problem.variant, score_kind(problem)
    if formula.block_size is not None or padded_dim(problem.value_dim) != padded_dim(problem.head_dim):
        return None
    width = max(64, padded_dim(problem.head_dim))
    if formula.layout is not Layout.DENSE and not is_prefix(problem) and find_bounds(variant.mask, "q_idx") is None:
        return None
    entry, group = FUSED_SCHEDULES.get((width, kind)), problem.q_heads // problem.kv_heads
    if kind == "score" and formula.dropout:
        return None
    is_by_head = "h" in variant.mask.variables() | variant.score.variables()
    if entry is None or (group > 1 and (is_by_head or (is_causal(variant) and width == 64))):
        return None
    shape, defers = entry
    tiles = -(-problem.q_len // shape.tile_q)
    sums, together = _choose_dq_sums(problem, width, tiles)
    return FusedSchedule(
        shape, together, sums, defers and (width == 128 or problem.kv_len > _UNDEFERRED_KEYS), _can_go_round(problem, width, tiles)
    )


def place_schedule(schedule: FusedSchedule, programs: int, processors: int) -> FusedSchedule:
    """Adapt the schedule to a number of key tiles: they go round only if all can run at once, one program on each SM."""
    if not schedule.goes_round:
        return schedule
    return replace(schedule, sums=1) if programs <= processors else replace(schedule, goes_round=False)


def _can_go_round(problem: Problem, width: int, tiles: int) -> bool:
    """Whether key tiles may go round: all visit all queries, there are enough query tiles to start at different ones, and the accumulators
    fit in L2, since a query tile is no longer visited by all key tiles at about the same time."""
    if not _is_unmasked(problem) or not 128 < problem.kv_len <= 128 * tiles:
        return False
    return problem.batch * problem.q_heads * problem.q_len * width * 4 <= _L2_SUMS_BYTES


def _is_unmasked(problem: Problem) -> bool:
    """Whether a problem is dense and without a mask."""
    return problem.formula.layout is Layout.DENSE and is_prefix(problem) and not is_causal(problem.variant)


def _choose_dq_sums(problem: Problem, width: int, tiles: int) -> tuple[int, int]:
    """(`FusedSchedule.sums`, `FusedSchedule.heads_together`), as measured on an H200.

    One accumulator of dq, and as many alternating heads as fit, so that few key tiles of a head wait for each other. Two accumulators where
    there are too few heads for that, except under the causal mask; and under it if heads are long or packed, since its key tiles begin with
    the longest. More where few heads have few query `tiles`, to which many key tiles would add one after another.
    """
    heads, group, is_steep = problem.q_heads, problem.q_heads // problem.kv_heads, is_causal(problem.variant)
    is_packed, is_long = problem.formula.layout is Layout.JAGGED, problem.q_len > 2048
    if not is_packed and problem.batch * heads <= _FEW_HEADS and problem.q_len <= 4096:
        return (1 if is_steep else max(2, _count_dq_sums(problem, tiles))), _FEW_HEADS
    sums = 2 if is_steep and (is_packed or (is_long and group == 1)) else _count_dq_sums(problem, tiles)
    # packed, the length may be no more than a bound: that of all tokens
    length = min(problem.q_len, _ASSUMED_LENGTH) if is_packed else problem.q_len
    fit = _L2_SUMS_BYTES // (sums * length * width * 4)
    # twice as many for long heads, which would wait more, and for GQA, so that as many key heads alternate
    together = max(min(_HEADS_TOGETHER[width], fit), min(1024 // (width * sums), 2 * fit), 1)
    if group > 1:
        together = max(min(2 * _HEADS_TOGETHER[width], 2 * fit), 4 * group if is_steep else 2 * group)
    return sums, together


def _count_dq_sums(problem: Problem, tiles: int) -> int:
    """Number of accumulators without a mask, a power of two: twice the key tiles of a head that start at once, divided by its query
    `tiles`, among which they spread. One if there are at least as many query tiles as key tiles."""
    if not _is_unmasked(problem) or problem.kv_len <= 128 * tiles:
        return 1
    at_once = 2 * HOPPER.sms // (problem.batch * problem.q_heads * tiles)
    return min(_MAX_SUMS, 1 << max(at_once, 1).bit_length() - 1)
