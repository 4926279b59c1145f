"""How the backward kernels are cut up, and which problems one kernel takes whole, by padded head dims and kinds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from foci.backends.causal import is_causal
from foci.backends.hopper.schedules import DEFAULT_SMS, padded_width
from foci.backends.mask_intervals import find_bounds
from foci.backends.problem_class import score_kind, tile_bytes
from foci.backends.triton.schedules import Schedule as Tiles
from foci.backends.triton.schedules import padded_dim
from foci.problem import Layout, Problem

__all__ = [
    "ADDED",
    "ADDING",
    "AT_ONCE",
    "BEGUN",
    "FINISHED",
    "KEPT",
    "KEYS",
    "QUERIES",
    "REGISTERS",
    "SPLIT",
    "WHOLE",
    "Cut",
    "Fused",
    "few_schedule",
    "few_shares",
    "fused_schedule",
    "is_prefix",
    "kept_heads",
    "kept_schedule",
    "kept_shape",
    "padded_widths",
    "place_schedule",
]


@dataclass(frozen=True)
class Cut:
    """How a kernel is cut up: rows and keys of a tile, tiles that stream by in flight."""

    tile_q: int
    tile_kv: int
    stages: int

    @property
    def tiles(self) -> Tiles:
        """The same as the search for visited tiles takes it."""
        return Tiles(self.tile_q, self.tile_kv, 4, self.stages)


@dataclass(frozen=True)
class Fused:
    """How one kernel computes all gradients.

    `together`: query heads whose tiles of keys come together, so that their sums stay in the cache. `sums`: float32 sums of dq, to which
    tiles of keys add in turn: with more of them fewer wait for each other, and more is read and written. `defers`: see `config.Config`.
    `goes_round`: whether, where all programs run at once (`place_schedule`), key tiles begin apart and add to one sum (`dq_semaphore`).
    """

    cut: Cut
    together: int
    sums: int
    defers: bool
    goes_round: bool


SPLIT: Final = Cut(64, 64, 2)
"""Of the kernel that splits dk and dv of wide heads between two warpgroups."""
_NARROW: Final = Cut(128, 128, 2)
_WIDE: Final = Cut(64, 128, 2)
QUERIES: Final = {
    **dict.fromkeys((16, 32, 64, 80, 96, 128), _NARROW),
    **dict.fromkeys((160, 192), Cut(128, 64, 2)),
    256: Cut(128, 32, 2),
}
"""By the wider of the padded head dims."""
KEYS: Final = {
    **dict.fromkeys((16, 32, 64), _NARROW),
    **dict.fromkeys((80, 96, 128), _WIDE),
    **dict.fromkeys((160, 192, 256), Cut(32, 128, 2)),
}
WHOLE: Final = frozenset({(192, 128)})
"""Padded head dims over 128 of which a warpgroup sums dk and dv of 64 keys: measured to be faster than to split them."""
KEPT: Final = {**dict.fromkeys((160, 192), Cut(128, 64, 4)), 256: Cut(128, 64, 3)}
"""How dq's product of gradients of scores that are kept is cut up, see `bwd_dq_from_ds`, by the wider of the padded head dims."""
KEPT_AT_MOST: Final = 528 << 20
"""Bytes of gradients of scores that are kept at a time: under the causal mask eight heads of 8192 positions, or two of 16384."""
KEPT_PROGRAMS: Final = 256
"""Fewest programs of a chunk of several: with twice as many as multiprocessors long ones are made up for by short ones."""
FEW_QUERIES: Final = {
    **dict.fromkeys((16, 32, 64), Cut(128, 64, 4)),
    **dict.fromkeys((80, 96), Cut(128, 64, 3)),
    128: Cut(128, 64, 2),
}
"""Of the kernel that holds all queries of a head, by the padded head dims: as many stages as have room, up to four."""
PROGRAMS_OF_FEW_QUERIES: Final = 64
"""Fewest heads, batch entries included, or shares of their keys, of a program each: with fewer, half of the multiprocessors are idle."""
KEYS_OF_A_SHARE: Final = 128
"""Fewest keys of a program where several take those of a head: what their sums of dq cost is that of a few tiles."""
FUSED: Final[dict[tuple[int, str], tuple[Cut, bool]]] = {
    # (both head dims, padded, 64 for narrower ones; kind): how it is cut up, and `Fused.defers`
    (64, "full"): (_NARROW, True),
    (64, "causal"): (_NARROW, False),
    (64, "window"): (_NARROW, True),
    (64, "document"): (_NARROW, True),
    (64, "added"): (_NARROW, False),
    (64, "score"): (_NARROW, True),
    (128, "full"): (_WIDE, True),
    (128, "causal"): (_WIDE, False),
    (128, "window"): (_WIDE, True),
    (128, "document"): (_WIDE, True),
    (128, "added"): (_WIDE, True),
    (128, "score"): (_WIDE, True),
}
"""As measured on an H200 (`foci.backends.hopper.kernel_rates`)."""
_SUMS_BYTES: Final = DEFAULT_SMS << 17
"""Of the sums of heads that come together: what the second cache holds beside all that streams by, and twice as much at a pinch."""
_TOGETHER: Final = {64: DEFAULT_SMS, 128: 48}
"""Most heads that come together, by padded head dim: with as many as there are multiprocessors none waits for another."""
_FEW_HEADS: Final = 16
"""Up to how many heads in all, batch entries included, there are too few for tiles of one to begin after each other."""
_MOST_SUMS: Final = 8
"""Sums of dq that tiles of keys add to at most, where there are few tiles of queries."""
_LONG: Final = 8192
"""What packed sequences are taken to have at most, where only a bound is known."""
_SOON: Final = 512
"""Up to how many keys of narrow heads nothing is deferred: tasks end before that pays."""
AT_ONCE: Final = {128: 32, 64: 64}
"""By queries of a tile: for how many of them the random numbers of dropout are made at a time, 32 or 64, in a loop over the others."""
BEGUN: Final = 4096
"""Numbers of a tensor that a program of `begin_gradients` reads, 16 to 128 rows of them: so few that a thread asks for all of its own at
once, and that few heads have programs for every multiprocessor."""
FINISHED: Final = 32
"""Columns of 64 rows that a program of `finish_query_gradient` writes, likewise; fewer where a head dim has no whole number of them."""
ADDED: Final = 1024
"""Numbers of dq that a program of `reduce_dq_shares` writes, of eight shares at a time."""
ADDING: Final = 128
"""Most registers of a thread of it."""
REGISTERS: Final = 64
"""Most of a thread of the kernels before and after: told none, the assembler makes do with so few that loads wait for each other."""


def padded_widths(problem: Problem) -> tuple[int, int]:
    """What head dims are padded to: narrow ones to the same where a kernel may then take the problem whole."""
    widths = padded_width(problem.head_dim), padded_width(problem.value_dim)
    is_alike = padded_dim(widths[0]) == padded_dim(widths[1]) <= 128
    return (max(widths), max(widths)) if is_alike else widths


def few_schedule(problem: Problem) -> Cut | None:
    """How one kernel computes all gradients where a program holds all queries of a head; None where several do, or tiles of keys add up dq.
    A program's tiles of keys come one after the other, so there must be heads, or shares of their keys, for half of the multiprocessors."""
    formula, variant = problem.formula, problem.variant
    if not _is_unmasked(problem) or formula.dropout or tile_bytes(variant):
        return None
    is_small = problem.q_len <= 128 and problem.q_heads == problem.kv_heads
    if not is_small or not all((problem.query_grad, problem.key_grad, problem.value_grad)):
        return None
    widths = padded_widths(problem)
    found, heads = FEW_QUERIES.get(widths[0]), problem.batch * problem.q_heads
    if found is None or widths[0] != widths[1]:
        return None
    return found if heads * few_shares(heads, problem.kv_len, found.tile_kv)[1] >= PROGRAMS_OF_FEW_QUERIES else None


def few_shares(heads: int, keys: int, tile: int) -> tuple[int, int]:
    """(tiles of keys of a program, programs of a head) where a program holds all queries of a head: as many as there are multiprocessors
    for, of `KEYS_OF_A_SHARE` keys or more, so that none is without a tile.

    `heads`: all batch entries together. `tile`: keys of one.
    """
    tiles = -(-keys // tile)
    share = -(-tiles // max(1, min(DEFAULT_SMS // heads, keys // KEYS_OF_A_SHARE)))
    return share, -(-tiles // share)


def kept_schedule(problem: Problem) -> Cut | None:
    """How dq is a product of gradients of scores that are kept, where `kept_heads` has room for them; None where they are computed anew."""
    formula, wanted = problem.formula, (problem.query_grad, problem.key_grad, problem.value_grad)
    if formula.layout is not Layout.DENSE or formula.dropout or not is_prefix(problem) or not all(wanted):
        return None
    return KEPT.get(max(padded_widths(problem)))


def kept_shape(q_len: int, kv_len: int, *, is_causal: bool) -> tuple[int, int]:
    """(rows, columns) of a head's gradients of scores as they are kept: of keys and queries, see `bwd_dq_from_ds`."""
    queries, keys = -(-q_len // 128), -(-kv_len // 128)
    return 128 * (min(keys, queries // 2 + 1) if is_causal else keys), 128 * queries


def kept_heads(heads: int, group: int, kv_len: int, size: int) -> int | None:
    """Heads of keys, of so many over all batch entries, whose gradients of scores are kept at a time; None where that leaves the card idle.

    `group`: query heads that share keys. `size`: numbers that are kept of a query head.
    """
    fit = KEPT_AT_MOST // (2 * group * size)
    if not fit:
        return None
    chunks = -(-heads // fit)
    found = -(-heads // chunks)
    return found if chunks == 1 or found * -(-kv_len // 128) >= KEPT_PROGRAMS else None


def is_prefix(problem: Problem) -> bool:
    """Whether the tiles that are visited are found by arithmetic: all, or those of the causal mask."""
    mask = problem.variant.mask
    return problem.formula.block_size is None and (is_causal(problem.variant) or (mask.op == "const" and mask.value is True))


def fused_schedule(problem: Problem) -> Fused | None:
    """How one kernel takes a problem, or None where several do."""
    formula, variant, kind = problem.formula, problem.variant, score_kind(problem)
    if formula.block_size is not None or padded_dim(problem.value_dim) != padded_dim(problem.head_dim):
        return None
    width = max(64, padded_dim(problem.head_dim))
    if formula.layout is not Layout.DENSE and not is_prefix(problem) and find_bounds(variant.mask, "q_idx") is None:
        return None
    found, group = FUSED.get((width, kind)), problem.q_heads // problem.kv_heads
    if kind == "score" and formula.dropout:
        return None
    is_by_head = "h" in variant.mask.variables() | variant.score.variables()
    if found is None or (group > 1 and (is_by_head or (is_causal(variant) and width == 64))):
        return None
    cut, defers = found
    tiles = -(-problem.q_len // cut.tile_q)
    sums, together = _added(problem, width, tiles)
    return Fused(cut, together, sums, defers and (width == 128 or problem.kv_len > _SOON), _is_round(problem, width, tiles))


def place_schedule(schedule: Fused, programs: int, processors: int) -> Fused:
    """The schedule for so many tiles of keys: these go round only where all can run at once, a program on a multiprocessor."""
    if not schedule.goes_round:
        return schedule
    return replace(schedule, sums=1) if programs <= processors else replace(schedule, goes_round=False)


def _is_round(problem: Problem, width: int, tiles: int) -> bool:
    """Whether tiles of keys may go round: all visit all queries, of which there are as many `tiles` to begin with, and sums stay in the
    second cache, as tiles of queries are no more visited by all at about one time."""
    if not _is_unmasked(problem) or not 128 < problem.kv_len <= 128 * tiles:
        return False
    return problem.batch * problem.q_heads * problem.q_len * width * 4 <= _SUMS_BYTES


def _is_unmasked(problem: Problem) -> bool:
    """Whether a batch is dense and without a mask."""
    return problem.formula.layout is Layout.DENSE and is_prefix(problem) and not is_causal(problem.variant)


def _added(problem: Problem, width: int, tiles: int) -> tuple[int, int]:
    """(`Fused.sums`, `Fused.together`), as measured on an H200: dq is added up in one sum, by as many heads together as have room, so that
    few tiles of a head wait for each other. In two where there are too few heads for that, but not under the causal mask; and under it if
    heads are long or packed, as its tiles of keys begin with the longest. In more where few heads have few `tiles` of queries, to which
    many tiles of keys would add one after the other."""
    heads, group, is_steep = problem.q_heads, problem.q_heads // problem.kv_heads, is_causal(problem.variant)
    is_packed, is_long = problem.formula.layout is Layout.JAGGED, problem.q_len > 2048
    if not is_packed and problem.batch * heads <= _FEW_HEADS and problem.q_len <= 4096:
        return (1 if is_steep else max(2, _side_by_side(problem, tiles))), _FEW_HEADS
    sums = 2 if is_steep and (is_packed or (is_long and group == 1)) else _side_by_side(problem, tiles)
    # packed, the length may be no more than a bound: that of all tokens
    length = min(problem.q_len, _LONG) if is_packed else problem.q_len
    fit = _SUMS_BYTES // (sums * length * width * 4)
    # twice as much for long heads, which would wait more, and for those that share keys, so that as many heads of keys come together
    together = max(min(_TOGETHER[width], fit), min(1024 // (width * sums), 2 * fit), 1)
    if group > 1:
        together = max(min(2 * _TOGETHER[width], 2 * fit), 4 * group if is_steep else 2 * group)
    return sums, together


def _side_by_side(problem: Problem, tiles: int) -> int:
    """How many sums tiles of keys add to without a mask, a power of two: twice the tiles of keys of a head that begin at once, over its
    `tiles` of queries, among which they spread. One where these are as many as tiles of keys."""
    if not _is_unmasked(problem) or problem.kv_len <= 128 * tiles:
        return 1
    at_once = 2 * DEFAULT_SMS // (problem.batch * problem.q_heads * tiles)
    return min(_MOST_SUMS, 1 << max(at_once, 1).bit_length() - 1)
