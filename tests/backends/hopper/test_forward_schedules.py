"""How the Hopper forward goes over tiles and tasks. No device."""

import itertools
from dataclasses import replace

import pytest
import torch
from plan_problems import JAGGED, KINDS, NARROW, built, keys, problem

import foci
from foci import masks, scores
from foci.backends.hopper import schedules
from foci.backends.hopper.schedules import forward_schedule
from foci.backends.problem_class import MAX_MASK_BYTES, score_kind
from foci.problem import Layout, Operands, bucket


# SDPA-10
@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_head_dims_are_padded_to_what_products_take(dim):
    width = schedules.padded_width(dim)
    pieces = schedules.width_pieces(width)
    assert width >= dim
    assert sum(pieces) == width
    assert len(pieces) <= 2
    assert min(pieces) >= 16  # the step of a product over the width
    assert width < max(17, 2 * dim)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("full", "OVERLAP_2_LOOP"),
        ("causal", "OVERLAP_2_LOOP"),
        ("window", "OVERLAP_2"),
        ("document", "OVERLAP_2"),
        ("added", "OVERLAP_2"),
        ("score", "OVERLAP_2_LOOP"),
        ("pair", "OVERLAP_2"),
    ],
)
def test_wide_keys_with_narrow_values_take_task_after_task_where_each_has_keys(kind, name):
    asked = problem(**KINDS[kind], head_dim=192, value_dim=128)
    assert forward_schedule(asked) is schedules.SCHEDULES[name]
    assert forward_schedule(problem(**KINDS[kind], head_dim=192, value_dim=128, layout=Layout.JAGGED)) is schedules.SCHEDULES["OVERLAP_2"]


def test_wide_keys_with_narrow_values_and_a_score_without_a_mask_take_task_after_task():
    asked = problem(score=scores.softcap(20.0), head_dim=192, value_dim=128)
    assert forward_schedule(asked) is schedules.SCHEDULES["OVERLAP_2_LOOP"]


def test_wide_keys_with_narrow_values_and_lengths_that_may_be_0_take_one_task_a_program():
    lengths = torch.tensor([5, 0])
    asked = problem(mask=foci.Mask(lambda b, h, q, k: k < lengths[b]), head_dim=192, value_dim=128)
    assert score_kind(asked) == "full"
    assert forward_schedule(asked) is schedules.SCHEDULES["OVERLAP_2"]


@pytest.mark.parametrize(
    ("changes", "wide", "narrow"),
    [
        (KINDS["full"], schedules.SCHEDULES["TURNS_3_NAMED"], schedules.SCHEDULES["TURNS_3_QREG"]),
        (KINDS["causal"], schedules.SCHEDULES["TURNS_3"], schedules.SCHEDULES["TURNS_3_QREG"]),
        (KINDS["window"], schedules.SCHEDULES["OVERLAP_2_KV64"], schedules.SCHEDULES["PAIRED_2_QUEUE"]),
        (KINDS["full"] | keys(256), schedules.SCHEDULES["TURNS_2"], schedules.SCHEDULES["PAIRED_2"]),
        (KINDS["full"] | keys(512), schedules.SCHEDULES["TURNS_3_NAMED"], schedules.SCHEDULES["PAIRED_2"]),
        (KINDS["full"] | keys(1024), schedules.SCHEDULES["TURNS_3_NAMED"], schedules.SCHEDULES["PAIRED_2"]),
        (KINDS["full"] | keys(2048), schedules.SCHEDULES["TURNS_3_NAMED"], schedules.SCHEDULES["TURNS_3_QREG"]),
        (KINDS["causal"] | keys(512), schedules.SCHEDULES["OVERLAP_2_KV64"], schedules.SCHEDULES["PAIRED_2_SERPENTINE"]),
        (KINDS["causal"] | keys(1024), schedules.SCHEDULES["OVERLAP_2_KV64"], schedules.SCHEDULES["PAIRED_2_SERPENTINE"]),
        (KINDS["causal"] | keys(2048), schedules.SCHEDULES["OVERLAP_2_LOOP"], schedules.SCHEDULES["PAIRED_2_QUEUE"]),
        (KINDS["causal"] | keys(4096), schedules.SCHEDULES["OVERLAP_2_LOOP"], schedules.SCHEDULES["PAIRED_2_QUEUE"]),
        (
            {"mask": masks.causal_lower_right(), **keys(512), "q_len": 256},
            schedules.SCHEDULES["OVERLAP_2_KV64"],
            schedules.SCHEDULES["PAIRED_2_SERPENTINE"],
        ),
        (KINDS["window"] | keys(512), schedules.SCHEDULES["OVERLAP_2_KV64"], schedules.SCHEDULES["PAIRED_2_QUEUE"]),
        (KINDS["document"], schedules.SCHEDULES["OVERLAP_2_LISTS"], schedules.SCHEDULES["TURNS_3_QREG_SORTED"]),
        (KINDS["document"] | keys(512), schedules.SCHEDULES["OVERLAP_2_KV64"], schedules.SCHEDULES["PAIRED_2_SORTED"]),
        (KINDS["document"] | keys(2048), schedules.SCHEDULES["OVERLAP_2_KV64"], schedules.SCHEDULES["PAIRED_2_SORTED"]),
        (KINDS["mask"], schedules.SCHEDULES["OVERLAP_2_LISTS"], schedules.SCHEDULES["TURNS_3_QREG_SORTED"]),
        (KINDS["added"], schedules.SCHEDULES["TURNS_3"], schedules.SCHEDULES["PAIRED_2_QUEUE"]),
        (KINDS["added"] | keys(512), schedules.SCHEDULES["OVERLAP_2_KV64"], schedules.SCHEDULES["PAIRED_2_SERPENTINE"]),
        (KINDS["score"], schedules.SCHEDULES["TURNS_3"], schedules.SCHEDULES["PAIRED_2_QUEUE"]),
        (KINDS["score"] | keys(1024), schedules.SCHEDULES["OVERLAP_2_KV64"], schedules.SCHEDULES["PAIRED_2_SERPENTINE"]),
        (KINDS["score"] | keys(4096), schedules.SCHEDULES["OVERLAP_2_LOOP"], schedules.SCHEDULES["PAIRED_2_QUEUE"]),
        (KINDS["pair"] | keys(512), schedules.SCHEDULES["OVERLAP_2"], schedules.SCHEDULES["TURNS_3"]),
        (KINDS["window"] | {"score": scores.softcap(20.0)}, schedules.SCHEDULES["OVERLAP_2"], schedules.SCHEDULES["TURNS_3_STATIC"]),
        (KINDS["full"] | JAGGED, schedules.SCHEDULES["TURNS_3_BRIEF"], schedules.SCHEDULES["TURNS_3_QREG"]),
        (KINDS["full"] | JAGGED | keys(2048), schedules.SCHEDULES["TURNS_3_BRIEF"], schedules.SCHEDULES["PAIRED_2_PACKED"]),
        (KINDS["causal"] | JAGGED, schedules.SCHEDULES["TURNS_3_BRIEF"], schedules.SCHEDULES["PAIRED_2_PACKED"]),
        (KINDS["causal"] | JAGGED | keys(1024), schedules.SCHEDULES["OVERLAP_2_KV64"], schedules.SCHEDULES["PAIRED_2_PACKED"]),
        (KINDS["added"] | JAGGED | keys(1024), schedules.SCHEDULES["OVERLAP_2_KV64"], schedules.SCHEDULES["PAIRED_2_PACKED"]),
        (KINDS["added"] | JAGGED, schedules.SCHEDULES["TURNS_3_BRIEF"], schedules.SCHEDULES["PAIRED_2_PACKED"]),
        (KINDS["window"] | JAGGED, schedules.SCHEDULES["OVERLAP_2_KV64"], schedules.SCHEDULES["PAIRED_2_PACKED"]),
        (KINDS["document"] | JAGGED | keys(1024), schedules.SCHEDULES["OVERLAP_2_LISTS"], schedules.SCHEDULES["PAIRED_2_PACKED"]),
        (KINDS["document"] | JAGGED, schedules.SCHEDULES["OVERLAP_2_LISTS"], schedules.SCHEDULES["TURNS_3_QREG_SORTED"]),
    ],
)
def test_programs_take_tasks_as_was_fastest(changes, wide, narrow):
    assert forward_schedule(problem(**changes)) == wide
    assert forward_schedule(problem(**changes, **NARROW)) == narrow
    assert forward_schedule(problem(**changes, head_dim=256, value_dim=256)) == schedules.SCHEDULES["OVERLAP_2_D256"]


@pytest.mark.parametrize(
    ("heads", "dim", "sizes", "name", "is_placed"),
    [
        # one round of 192 queries a task, of 128, of two programs to a multiprocessor: 128, 96 and 256 tasks
        (16, 128, (4, 384, 384), "TURNS_3_NAMED", True),
        (16, 128, (2, 384, 384), "TURNS_2", True),
        (16, 64, (1, 2048, 2048), "PAIRED_2", True),
        (12, 64, (1, 2048, 2048), "TURNS_3_QREG", True),
        (8, 64, (1, 2048, 2048), "OVERLAP_2_LOOP", True),
        (8, 32, (1, 2048, 2048), "OVERLAP_2_LOOP", True),
        # two or more
        (12, 64, (2, 1536, 1536), "TURNS_3_QREG", True),
        (10, 64, (2, 1536, 1536), "PAIRED_2", True),
        (16, 128, (1, 2048, 2048), "OVERLAP_2_LOOP", True),
        (16, 128, (3, 1024, 1024), "OVERLAP_2_LOOP", True),
        (12, 128, (1, 2048, 2048), "TURNS_3_NAMED", True),
        (24, 128, (1, 2048, 2048), "TURNS_3_NAMED", True),
        (16, 128, (4, 128, 1024), "OVERLAP_2_LOOP", True),
        (10, 64, (2, 4096, 77), "PAIRED_2", True),
        (12, 96, (16, 512, 512), "TURNS_2_SERPENTINE", True),
        (12, 96, (4, 2048, 2048), "TURNS_3_LOOP", False),
        # many: what is asked for, by the schedule that is fastest by itself
        (16, 128, (2, 8192, 8192), "TURNS_3_NAMED", False),
        (16, 128, (32, 256, 256), "TURNS_2", False),
        (12, 64, (8, 2048, 2048), "TURNS_3_QREG", False),
        (8, 32, (4, 4096, 4096), "PAIRED_2", True),
    ],
)
def test_rounds_of_tasks_decide_without_a_mask(heads, dim, sizes, name, is_placed):
    asked = problem(
        q_heads=heads, kv_heads=heads, head_dim=dim, value_dim=dim, **dict(zip(("batch", "q_len", "kv_len"), map(bucket, sizes)))
    )
    assert forward_schedule(asked, sizes) == replace(schedules.SCHEDULES[name], static=is_placed)
    # nothing of that where a mask or a score asks for more, or where lengths are a sequence's own
    for other in ({"mask": masks.causal()}, {"score": scores.softcap(20.0)}, {"layout": Layout.JAGGED}):
        other_problem = problem(**other, head_dim=dim, value_dim=dim)
        assert forward_schedule(other_problem, sizes) == forward_schedule(other_problem)


def test_a_kernel_goes_by_the_lengths_at_hand(monkeypatch):
    forward_pass = pytest.importorskip("foci.backends.hopper.forward_pass", reason="needs a Triton with Gluon")
    chosen_schedules, asked = [], problem(batch=4, q_len=512, kv_len=512)

    def noted(problem, sizes):
        chosen_schedules.append(forward_schedule(problem, sizes))
        raise InterruptedError

    monkeypatch.setattr(forward_pass, "forward_schedule", noted)
    for length in (384, 512):
        query = torch.zeros(4, 16, length, 128, dtype=torch.bfloat16)
        with pytest.raises(InterruptedError):
            built(asked).forward(Operands(query, query, query, (), (), (), 1.0))
    assert [one.tile_q for one in chosen_schedules] == [192, 128]


@pytest.mark.parametrize("dim", [80, 96])
def test_heads_in_pieces_free_tiles_by_warpgroups(dim):
    widths = {"head_dim": dim, "value_dim": dim}
    assert forward_schedule(problem(**KINDS["full"], **widths)) == schedules.SCHEDULES["TURNS_3_LOOP"]
    assert forward_schedule(problem(**KINDS["causal"], **widths)) == schedules.SCHEDULES["TURNS_3_BRIEF"]
    assert forward_schedule(problem(**KINDS["causal"], **keys(2048), **widths)) == schedules.SCHEDULES["TURNS_2_SERPENTINE"]
    assert forward_schedule(problem(**KINDS["causal"], **JAGGED, **widths)) == schedules.SCHEDULES["TURNS_3_BRIEF"]


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize(("batch", "heads", "length"), [(4, 24, 2048), (1, 24, 4096), (64, 2, 1024), (16, 96, 512), (1, 16, 2048)])
def test_words_of_a_mask_that_are_to_be_kept_have_room(batch, heads, length, dim):
    table = torch.zeros(1, 1, 1, dtype=torch.bool).expand(heads, length, length)
    of_pairs = foci.Mask(lambda b, h, q, k: table[h, q, k] & (b >= 0))
    asked = problem(mask=of_pairs, batch=batch, q_heads=heads, kv_heads=heads, q_len=length, kv_len=length, head_dim=dim, value_dim=dim)
    assert score_kind(asked) == "mask"
    schedule = forward_schedule(asked)
    tiles = -(-length // schedule.tile_q) * -(-length // schedule.tile_kv)
    # four words for each query of a tile, of each batch entry and head
    assert 16 * schedule.tile_q * tiles * batch * heads <= MAX_MASK_BYTES


def test_two_programs_share_the_registers_of_a_multiprocessor():
    for one in (
        schedules.SCHEDULES["PAIRED_2"],
        schedules.SCHEDULES["PAIRED_2_PACKED"],
        schedules.SCHEDULES["PAIRED_2_QUEUE"],
        schedules.SCHEDULES["PAIRED_2_SORTED"],
        schedules.SCHEDULES["PAIRED_2_SERPENTINE"],
    ):
        assert one.programs_per_sm * one.max_registers * 128 * (one.consumers + 1) <= 65536
        # the consumers' and 24 of the producer's, which the program's own registers pay for
        assert one.registers * one.consumers + 24 <= one.max_registers * (one.consumers + 1)


class Launches:
    """What a forward would allocate and launch."""

    def __init__(self):
        self.names, self.allocated, self.kept = [], [], []

    def empty(self, shape, strides, dtype, like):
        self.allocated.append(torch.empty(shape, dtype=dtype))
        return self.allocated[-1]

    def keep(self, tensors):
        self.kept += tensors

    def add(self, function, grid, *arguments, **options):
        self.names.append(function.__name__)


@pytest.mark.parametrize(
    ("changes", "tasks", "expected"),
    [
        ({}, 100, (100, 0)),  # a program for each
        ({}, 132 * 3 + 20, (132, 20)),
        ({}, 132 * 3 + 66, (132, 66)),
        ({}, 132 * 3 + 67, (132, 0)),  # more than one for each processor
        ({}, 132 * 3, (132, 0)),
        ({"kv_len": 2048, **NARROW}, 132 * 3 + 20, (132, 20)),
        ({"kv_len": 1024, **NARROW}, 264 * 3 + 20, (264, 20)),
        ({"kv_len": 512, **NARROW}, 264 * 3 + 20, (264, 20)),  # two on each
        ({"kv_len": 512, **NARROW}, 200, (200, 0)),
        ({"mask": masks.causal(), **NARROW}, 132 * 3 + 20, (132, 0)),  # tasks differ, and the last are the shortest
        ({"mask": masks.causal(), "kv_len": 512, **NARROW}, 264 * 3 + 20, (264, 0)),
        ({"mask": masks.causal()}, 1000, (1000, 0)),
        ({"head_dim": 256, "value_dim": 256}, 1000, (1000, 0)),
    ],
)
def test_tasks_of_a_last_round_that_is_half_empty_are_halved(changes, tasks, expected):
    asked, launches = problem(**changes), Launches()
    query = torch.empty(1, 1, 1, 1, device="meta")
    operands = Operands(query, query, query, (), (), (), 1.0)
    programs, tickets, halved = built(asked).forward_pass._programs(tasks, forward_schedule(asked), operands, None, launches)
    assert (programs, halved) == expected
    # tickets are counted from zero, where there are any to be taken
    schedule = forward_schedule(asked)
    assert launches.names == (["zero_counters"] if programs < tasks and not schedule.static else [])
    assert (tickets is None) == (not schedule.persistent or schedule.static)
    # a counter that no program reads is not allocated by each run
    if tickets is not None:
        assert [t is tickets for t in (launches.allocated if programs < tasks else launches.kept)] == [True]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, True),
        (masks.causal(), True),
        (masks.causal_lower_right(), False),
        (foci.Mask(lambda b, h, q, k: k <= q + 1), False),
        (masks.window(1023), False),
        (masks.window(1023, 0), False),
        (KINDS["document"]["mask"], False),
    ],
)
def test_only_the_first_tile_that_a_consumer_visits_is_partial_where_the_kernel_relies_on_it(mask, expected):
    """A consumer goes from the last tile of its 64 rows to the first, and the kernel masks the first that it visits by itself."""
    assert built(problem(mask=mask)).forward_pass.has_one_partial is expected
    if not expected:
        return
    for q_len, kv_len, tile in itertools.product((1, 63, 64, 65, 200, 257), (1, 31, 63, 64, 65, 128, 129, 200, 333), (64, 128)):
        q_idx, kv_idx = torch.arange(q_len)[:, None], torch.arange(-(-kv_len // tile) * tile)
        kept = (kv_idx < kv_len) & ((kv_idx <= q_idx) if mask is not None else q_idx >= 0)
        for rows in kept.split(64):
            tiles = rows.unflatten(1, (-1, tile))
            is_visited, is_full = tiles.any(2).any(0), tiles.all(2).all(0)
            last = is_visited.nonzero().max()
            assert set((is_visited & ~is_full).nonzero().flatten().tolist()) <= {last.item()}
