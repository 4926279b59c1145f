"""Tiles, warps and stages: the rows of `schedules.toml`, by architecture, kernel, width and head dim, each proved to fit shared memory.

`shared_bytes` bounds what a kernel takes from above; tests compile every row and compare. A row that does not fit the
device at hand is passed over for the next, smaller one, so nothing is ever tried and failed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Final

from foci.backends.data_tables import load_table, rows_by_width
from foci.backends.gpu.architectures import HOPPER, find
from foci.backends.problem_class import tile_bytes
from foci.problem import Formula, Layout, Problem, bucket
from foci.variant import Variant

__all__ = [
    "KINDS",
    "LIKE",
    "SCHEDULES",
    "Schedule",
    "busy_fraction",
    "fit_schedule",
    "padded_dim",
    "schedule_for",
    "schedule_rows",
    "scratch_bytes",
    "shared_bytes",
    "split_efficiency",
    "split_kind",
    "splits_for",
    "takes_splits",
    "vector_bytes",
]

KINDS: Final = (
    "forward",
    "query_gradient",
    "query_gradient_sparse",
    "forward_sparse",
    "forward_listed",
    "key_gradient",
    "key_gradient_scored",
    "key_gradient_dropped",
    "key_gradient_alone",
    "value_gradient_alone",
    "captures",
    "bias_gradient",
    "decode",
    "split",
)


@dataclass(frozen=True)
class Schedule:
    """Tile shape and launch options of one kernel."""

    tile_q: int  # rows of a tile
    tile_kv: int  # keys of a tile
    warps: int  # of a program
    stages: int  # loads in flight
    descriptors: bool = False  # load streamed tiles through tensor descriptors
    turned: bool = False  # dk and dv only, see `Config.TURNED`
    by_work: bool = False  # sort tasks of packed sequences by their work, not by their sequences' lengths


def _read_row(row: list[Any]) -> Schedule:
    """A row of the file: four numbers, then the names of flags."""
    return Schedule(*row[:4], **dict.fromkeys(row[4:], True))


def _read_schedules(table: dict[str, Any]) -> dict[tuple[int, str, int, int], tuple[Schedule, ...]]:
    """{(architecture, kernel, bytes of an element, padded head dim): rows, best first}."""
    return {
        (int(arch.removeprefix("sm_")), kind, int(bits.removesuffix("bit")) // 8, dim): tuple(map(_read_row, rows))
        for arch, kernels in table.items()
        if arch.startswith("sm_")
        for kind, by_bits in kernels.items()
        for bits, by_dim in by_bits.items()
        for dim, rows in rows_by_width(by_dim).items()
    }


_TABLE: Final = load_table(__file__, "schedules.toml")
SCHEDULES: Final = _read_schedules(_TABLE)
_SMALL: Final = tuple(map(_read_row, _TABLE["smallest"]["rows"]))
LIKE: Final[dict[str, str]] = _TABLE["like"]
"""Kernels that use the rows of another if the table has none of their own."""


def padded_dim(dim: int) -> int:
    """Pad a head dim to a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


@functools.lru_cache(maxsize=1024)
def vector_bytes(variant: Variant) -> int:
    """Bytes that each key, or query if that is more, reads from captured tensors by itself; these loads are pipelined too."""
    loads = {e for part in (variant.score, variant.mask) for e in part.walk() if e.op == "load"}
    return max(
        sum(variant.captures[int(str(e.value))].dtype.itemsize for e in loads if {one, other} & e.variables() == {one})
        for one, other in (("kv_idx", "q_idx"), ("q_idx", "kv_idx"))
    )


def scratch_bytes(problem: Problem) -> int:
    """The argument `scratch` of `shared_bytes`; gradients of returned weights stream by (q, kv) as captured tensors do."""
    return tile_bytes(problem.variant) + 4 * problem.formula.outputs.weights or int(problem.formula.dropout)


def shared_bytes(kind: str, schedule: Schedule, dims: tuple[int, int], itemsize: int, *, scratch: int, vectors: int = 0) -> int:
    """An upper bound of the shared memory that a kernel takes.

    Args:
        kind: one of `KINDS`.
        schedule: how it is cut up.
        dims: padded D and Dv.
        itemsize: bytes of an element of query, key and value.
        scratch: bytes that each score reads from captured tensors by (q, kv), which streams like keys and values; or 1 with
            dropout. Such tiles also change layout through shared memory.
        vectors: `vector_bytes`, which stream likewise.
    """
    # a float32 product passes its operands through shared memory once more, as the sum of two tf32 numbers
    wide = sum(dims) * itemsize * (2 if itemsize == 4 else 1)
    scores = schedule.tile_q * schedule.tile_kv
    buffers = max(schedule.stages, 1)
    streamed = schedule.tile_q if kind.startswith(("key_gradient", "value_gradient")) else schedule.tile_kv
    beside = max(2048, 512 + (buffers - 1) * streamed * vectors)
    spare = beside + (scores * (4 + buffers * scratch) if scratch or itemsize == 4 else 0)
    if kind.startswith("forward") or kind in ("decode", "split"):
        rows = schedule.tile_q * max(dims) * itemsize * (2 if itemsize == 4 else 1)
        return rows + buffers * schedule.tile_kv * wide + spare + 64  # and what masks of 128 x 128 reduce through it
    if kind == "captures":
        return (schedule.tile_q + schedule.tile_kv) * wide + scores * 4 + spare
    if kind == "bias_gradient" and itemsize < 4:
        # tiles that are read stream, and one of sums, and what changes layout, lie beside them
        return (schedule.tile_q + buffers * schedule.tile_kv) * wide + scores * (buffers * scratch + 6) + beside
    if kind.startswith("query_gradient") or kind == "bias_gradient":
        return schedule.tile_q * wide + buffers * schedule.tile_kv * wide + 2 * scores * itemsize + spare
    stationary = wide if kind != "value_gradient_alone" else wide * dims[0] // sum(dims)
    return schedule.tile_kv * stationary + buffers * schedule.tile_q * (wide + 8) + 2 * scores * itemsize + spare


def schedule_rows(arch: int, kind: str, itemsize: int, width: int) -> tuple[Schedule, ...]:
    """Rows of the table for a kernel, best first; none for a width or dtype that it does not cover."""
    rows = SCHEDULES.get((arch, kind, itemsize, width))
    return SCHEDULES.get((arch, LIKE.get(kind, kind), itemsize, width), ()) if rows is None else rows


def schedule_for(kind: str, arch: int, dims: tuple[int, int], itemsize: int, *, scratch: int = 0, vectors: int = 0) -> Schedule | None:
    """The first row of the table that fits the device's shared memory; None when none does.

    Args: as `shared_bytes`; `arch` 0 is Triton's interpreter, which takes the smallest tiles.
    """
    if arch == 0:
        return Schedule(16, 16, 4, 1)
    width = max(64, *dims)
    rows = schedule_rows(find(arch).schedules_of, kind, itemsize, width)
    limit = find(arch).shared_bytes
    for row in (*rows, *_SMALL, *(replace(r, stages=1) for r in _SMALL)):
        if shared_bytes(kind, row, dims, itemsize, scratch=scratch, vectors=vectors) <= limit:
            # large float32 scores make much of a rounding: all kernels multiply queries by keys the same way round
            return replace(row, turned=True) if itemsize == 4 and kind.startswith(("key_gradient", "value_gradient")) else row
    return None


def fit_schedule(schedule: Schedule, block_size: tuple[int, int] | None) -> Schedule:
    """The schedule with tiles that divide the blocks of a caller's block mask."""
    if block_size is None:
        return schedule
    return replace(schedule, tile_q=math.gcd(schedule.tile_q, block_size[0]), tile_kv=math.gcd(schedule.tile_kv, block_size[1]))


def busy_fraction(problem: Problem, arch: int) -> float:
    """Fraction of the SMs that a backward keeps busy: three of its seven products are in the dq kernel, a program per 64 queries, and four
    in the kernel of dk and dv, a program per 64 keys. 1 where it was not measured."""
    if arch != HOPPER.arch:
        return 1.0
    processors = HOPPER.sms
    rows = problem.batch * max(1, problem.q_heads) * -(-problem.q_len // 64)
    keys = problem.batch * max(1, problem.kv_heads) * -(-problem.kv_len // 64)
    return 7 / (3 / min(1.0, rows / processors) + 4 / min(1.0, keys / processors))


def takes_splits(formula: Formula) -> bool:
    """Whether a problem may use split-KV: one row of a tile table must hold for all queries of the heads that share keys."""
    return formula.layout is Layout.DENSE and formula.block_size is None and "h" not in formula.variant.mask.variables()


def _shares_tile(group: int, length: int) -> bool:
    """Whether one tile of a decode holds all rows of a group of heads."""
    return length <= 16 and group * length <= 64


def split_kind(batch: int, heads: tuple[int, int], lengths: tuple[int, int], arch: int) -> str | None:
    """Which kernel's schedule a forward takes that splits keys over programs, None where it splits none: "decode" where one tile holds the
    rows of all heads that share keys, "split" where several do.

    Up to 16 queries leave a tile of one head mostly empty: heads share tiles whatever the batch. More queries, up to 256, gain by it where
    tiles of 128 rows would keep half of the multiprocessors busy at most. A split has four tiles of 128 keys or more (`splits_for`), and
    results meet in a launch more, so that keys must be more than 1024. That much is decided by lengths and batch to a power of two, as
    plans count them.

    Args:
        batch: B.
        heads: Hq and Hkv.
        lengths: Sq and Skv.
        arch: as in `schedule_for`; the interpreter, which is for tests, splits fewer keys, of fewer queries.
    """
    (q_heads, kv_heads), (length, keys) = heads, lengths
    if kv_heads == 0:
        return None
    group = q_heads // kv_heads
    queries_at_most, keys_at_least = (32, 128) if arch == 0 else (256, 1024)
    if _shares_tile(group, length) and keys >= (32 if arch == 0 else 1024):
        return "decode"
    tiles = bucket(batch) * kv_heads * -(-group * bucket(length) // 128)
    if length > queries_at_most or bucket(keys) <= keys_at_least or 2 * tiles > find(arch).sms:
        return None
    return "decode" if group * length <= 64 else "split"


def split_efficiency(problem: Problem, arch: int) -> float:
    """Fraction of its usual rate that a split-KV forward reaches: 0.6 as measured on an H200 with heads of 128, times the fraction of SMs
    that its splits keep busy."""
    processors = find(arch).sms
    tiles = problem.batch * problem.kv_heads * -(-problem.q_heads // problem.kv_heads * problem.q_len // 128)
    return 0.6 * max(1, processors // tiles) * tiles / processors if tiles < processors else 0.6


def splits_for(groups: int, tiles: int, arch: int, taken: int, together: int = 16) -> int:
    """Number of splits for each of `groups` tiles of rows over `tiles` tiles of keys: the fewest, of four tiles or more, that leave at
    most a twentieth of the device idle; if none does, those that leave least.

    Args:
        arch: as in `schedule_for`.
        taken: shared memory of a program, which decides how many a multiprocessor holds.
        together: how many its registers have room for.
    """
    if arch == 0:
        return min(3, tiles)
    slots = find(arch).sms * max(1, min(together, find(arch).shared_bytes // taken))
    idle = {n: -(-groups * n // slots) * slots / (groups * n) - 1 for n in range(1, max(1, tiles // 4) + 1)}
    return next((n for n, share in idle.items() if share <= 0.05), min(idle, key=lambda n: idle[n]))
