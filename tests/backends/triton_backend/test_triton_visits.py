"""Tables of tiles against the mask, looked at place by place: in Triton's interpreter, or on a GPU."""

import os
import random

import pytest
import torch

import foci
from foci import masks
from foci.backends.contract import Plan
from foci.problem import Formula, Operands, Problem, Target
from foci.trace_functions import bind

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs Triton's interpreter or a GPU", allow_module_level=True)

import triton.language as tl  # noqa: E402

from foci import weak_cache  # noqa: E402
from foci.backends.gpu import tile_tables  # noqa: E402
from foci.backends.gpu.kernel_args import Size, Spans, encode, table_config  # noqa: E402
from foci.backends.gpu.launch_builder import LaunchBuilder  # noqa: E402
from foci.backends.gpu.schedules import Schedule  # noqa: E402
from foci.backends.gpu.tiles import find_task  # noqa: E402
from foci.backends.triton.kernel import build_kernel  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, COLUMNS = 100, 200
IDS = (torch.arange(COLUMNS, device=DEVICE) * 3 // 200).to(torch.int32)
KEEP = torch.rand(2, ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).to(DEVICE) > 0.998
MASKS = {
    "causal": masks.causal(),
    "window": foci.Mask(lambda b, h, q, k: (q >= k) & (q - k < 30)),
    "documents": foci.Mask(lambda b, h, q, k: IDS[q] == IDS[k]),
    "few, by head": foci.Mask(lambda b, h, q, k: KEEP[h, q, k]),
    "many, by batch entry": foci.Mask(lambda b, h, q, k: (q + b * 60 > k) | (k > 130)),
}
TILES = [(128, 128), (64, 128), (32, 64), (192, 64)]


def begun(mask):
    """A kernel of the mask, and a pass of it."""
    query, key = (torch.zeros(2, 2, n, 16, dtype=torch.float16, device=DEVICE) for n in (ROWS, COLUMNS))
    bound = bind(None, mask, DEVICE)
    operands = Operands(query, key, key, bound.captures, bound.ints, bound.floats, 0.25)
    asked = Problem(
        Formula(bound.variant), torch.float16, 16, 16, 2, 2, 2, ROWS, COLUMNS, False, False, False, (False,) * len(bound.captures)
    )
    arch = 10 * torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    attention = build_kernel(Plan("triton", asked, Target("cuda", arch, frozenset({"triton"}))))
    return attention, attention.builder.begin(operands, {"out": query}, tile_tables.Sequences(), LaunchBuilder((), None))


def kept_by(mask):
    """bool [B, H, ROWS, COLUMNS]."""
    index = (
        torch.arange(n, device=DEVICE).view(shape) for n, shape in ((2, (2, 1, 1, 1)), (2, (2, 1, 1)), (ROWS, (-1, 1)), (COLUMNS, (1, -1)))
    )
    return mask.function(*index).expand(2, 2, ROWS, COLUMNS)


def visited(visits, b, h, task):
    """(full, partial) tiles of a task, as kernels read them."""
    table = visits.table
    row = b * (table.b_stride >> 2) + h * (table.h_stride >> 2) + task
    counts = table.counts[row].tolist()
    if visits.mode == "ranges":
        low, full, behind, high = counts
        return set(range(full, behind)), set(range(low, full)) | set(range(behind, high))
    tiles = table.lists[row].tolist()
    return set(tiles[: counts[0]]), set(tiles[counts[0] : counts[0] + counts[1]])


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_tiles_are_those_the_mask_keeps(name, tiles):
    attention, call = begun(MASKS[name])
    kept = kept_by(MASKS[name])
    for side in ("queries", "keys"):
        visits = tile_tables.build_visits(attention.builder, call, Schedule(*tiles, 4, 1), side)
        by_task, tile, other = (kept, *tiles) if side == "queries" else (kept.transpose(2, 3), *tiles[::-1])
        assert visits.tasks == -(-by_task.shape[2] // tile)
        for b, h, task in ((b, h, task) for b in range(2) for h in range(2) for task in range(visits.tasks)):
            mine = by_task[b, h, task * tile : (task + 1) * tile].split(other, 1)
            full = {at for at, part in enumerate(mine) if part.all() and part.shape[1] == other}
            partial = {at for at, part in enumerate(mine) if part.any()} - full
            assert visited(visits, b, h, task) == (full, partial), (side, b, h, task)


def test_both_sides_and_other_tiles_share_what_was_looked_at(monkeypatch):
    looked = []
    monkeypatch.setattr(weak_cache, "_derived", weak_cache.make_store())
    real = tile_tables.classify_tiles
    monkeypatch.setattr(tile_tables, "classify_tiles", Noted(real, looked))
    attention, call = begun(MASKS["documents"])
    for tiles, side in (((128, 64), "queries"), ((64, 64), "queries"), ((64, 128), "keys")):
        tile_tables.build_visits(attention.builder, call, Schedule(*tiles, 4, 2), side)
    assert len(looked) == 1
    visits = tile_tables.build_visits(attention.builder, call, Schedule(64, 64, 4, 2), "queries")
    assert tile_tables.build_visits(attention.builder, call, Schedule(64, 64, 8, 3, descriptors=True), "queries") is visits
    tile_tables.build_visits(attention.builder, call, Schedule(32, 64, 4, 2), "queries")
    assert len(looked) == 2


LENGTHS = [5, 0, 130, 64, 130, 1, 63]


def placed(lengths, kv_lengths):
    """Sequences whose queries have such lengths, and their keys `others`."""
    places = [
        torch.tensor(values, dtype=torch.int32, device=DEVICE)
        for n in (lengths, kv_lengths)
        for values in ([10 + sum(n[:i]) for i in range(len(n))], n)
    ]
    return tile_tables.Sequences(*places)


@pytest.mark.parametrize("is_by_query", [True, False])
@pytest.mark.parametrize("spare", [1, 2, 200])
def test_tasks_say_where_their_sequences_lie(spare, is_by_query):
    other_lengths = [9, 7, 300, 0, 20, 64, 2]
    sequences = placed(*((LENGTHS, other_lengths) if is_by_query else (other_lengths, LENGTHS)))
    tiles = [-(-n // 64) for n in LENGTHS]
    table = tile_tables._assigned(sequences, 64, sum(tiles) + spare, is_by_query=is_by_query).tolist()
    order = sorted(range(len(LENGTHS)), key=lambda b: (-LENGTHS[b], b))
    there = list(zip(*(t.tolist() for t in sequences.tensors), strict=True))
    assert [row[:6] for row in table[1 : sum(tiles) + 1]] == [[b, n, *there[b]] for b in order for n in reversed(range(tiles[b]))]
    assert [row[:2] for row in (table[0], *table[sum(tiles) + 1 :])] == [[-1, n] for n in range(spare)]


@pytest.mark.parametrize("count", [7, 300])
def test_tasks_of_queries_come_by_their_work(count):
    draw, tile, other = random.Random(count), 192, 128
    lengths, kv_lengths = ([draw.choice([0, 1, 60, 70, 140, 191, 192, 256, 300, 700]) for _ in range(count)] for _ in range(2))
    sequences = placed(lengths, kv_lengths)
    tiles = [-(-n // tile) for n in lengths]
    table = tile_tables._assigned(sequences, tile, sum(tiles) + 2, is_by_query=True, other=other).tolist()
    tasks = [(b, n) for b in range(count) for n in range(tiles[b])]

    def work(task):
        b, n = task
        return -(-kv_lengths[b] // other) * (1 + -(-min(tile, lengths[b] - n * tile) // 64))

    order = [tuple(row[:2]) for row in table[1:-1]]
    assert sorted(order) == tasks
    assert [work(task) for task in order] == sorted(map(work, tasks), reverse=True)
    # of as much work, those of a sequence together
    assert [(-work(task), task[0]) for task in order] == sorted((-work(task), task[0]) for task in order)
    assert [row[2:6] for row in table[1:-1]] == [[t[b].item() for t in sequences.tensors] for b, _ in order]
    assert [row[:2] for row in (table[0], table[-1])] == [[-1, 0], [-1, 1]]
    assert table[0][2] == 0


@triton.jit
def note_places(places, size, spans, c):
    place = find_task(size, spans, c, True)
    at = places + 4 * tl.program_id(0)
    tl.store(at, place.b)
    tl.store(at + 1, place.h)
    tl.store(at + 2, place.task)
    tl.store(at + 3, place.tile)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 16, 20])
def test_programs_have_each_head_of_each_task_once(heads, together):
    sequences = placed(LENGTHS, LENGTHS)
    count = sum(-(-n // 64) for n in LENGTHS) + 3
    table = tile_tables._assigned(sequences, 64, count, is_by_query=True)
    spans = Spans(table, *sequences.tensors, encode(len(LENGTHS)), encode(together))
    places = torch.full((heads * count, 4), -7, dtype=torch.int32, device=DEVICE)
    size = Size(*map(encode, (1, heads, 1, count, sum(LENGTHS), sum(LENGTHS))))
    note_places[(heads * count,)](places, size, spans, table_config(64, 64, is_packed=True))
    wanted = [[b, h, task, tile] for task, (b, tile) in enumerate(table[:, :2].tolist()) for h in range(heads)]
    assert sorted(places.tolist()) == sorted(wanted)
    assert (places.tolist() == wanted) is (together or heads <= 8)


@pytest.mark.parametrize("room", [1, 2, 5])
def test_no_task_is_written_beyond_the_table(room, monkeypatch):
    # as where a call says that its longest sequence is shorter than it is
    allocated = []

    def within(self, shape, strides, dtype, like):
        buffer = torch.full((room + 40, 8), 77, dtype=dtype, device=like.device)
        allocated.append(buffer)
        return buffer[:room]

    monkeypatch.setattr(LaunchBuilder, "empty", within)
    monkeypatch.setattr(weak_cache, "_derived", weak_cache.make_store())
    tile_tables._assigned(placed(LENGTHS, LENGTHS), 64, room, is_by_query=True)
    (storage,) = allocated
    assert bool((storage[room:] == 77).all())
    assert storage[0, 0] == -1


class Noted:
    """A kernel whose launches are noted."""

    def __init__(self, function, launches):
        self.function, self.launches, self.signature = function, launches, getattr(function, "signature", None)

    def warmup(self, *args, grid, **options):
        """Nothing is compiled, so that the launch goes through `__getitem__`."""

    def __getitem__(self, grid):
        self.launches.append(grid)
        return self.function[grid]
