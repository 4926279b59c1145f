"""What the Hopper backend takes, what it declines and in which words. Pure: no device, no Triton."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import foci
from foci import execution, masks, scores
from foci.backends.contract import Plan
from foci.backends.hopper import BACKEND, VERSIONS, schedules
from foci.backends.hopper.backward_schedules import FUSED_SCHEDULES, fused_schedule, short_q_schedule, split_short_q
from foci.backends.hopper.kernel_rates import MEASURED, estimate_rates
from foci.backends.hopper.schedules import forward_schedule
from foci.backends.problem_class import MAX_MASK_BYTES, score_kind
from foci.backends.triton import BACKEND as TRITON
from foci.planner import choose
from foci.problem import Formula, Layout, Operands, Outputs, Problem, Target, bucket
from foci.trace_functions import bind

TABLE = torch.zeros(64, 64)
H200 = Target("cuda", 90, frozenset({"triton", f"triton-{VERSIONS[0]}"}))


def problem(mask=None, score=None, layout=Layout.DENSE, outputs=None, **rest):
    bound = bind(score, mask, torch.device("cpu"))
    formula = Formula(bound.variant, layout, outputs or Outputs())
    asked = Problem(formula, torch.bfloat16, 128, 128, 16, 16, 2, 8192, 8192, capture_grads=(False,) * len(bound.captures))
    return replace(asked, **rest)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"mask": masks.causal()},
        {"score": scores.alibi(16)},
        {"dtype": torch.float16, "head_dim": 64, "value_dim": 64},
        {"head_dim": 256, "value_dim": 256},
        {"head_dim": 80, "value_dim": 16},
        {"q_heads": 32, "kv_heads": 8},
        {"layout": Layout.JAGGED},
        {"query_grad": True, "key_grad": True, "value_grad": True},
    ],
    ids=lambda value: value if isinstance(value, str) else None,  # a set's text differs between processes
)
def test_it_is_chosen_for_large_problems(given):
    decision = choose(problem(**given), H200)
    assert decision.plan is not None
    assert decision.plan.backend == "hopper", decision.table()


@pytest.mark.parametrize(
    ("given", "target", "said"),
    [
        ({}, Target("cpu"), "compute capability 9.0"),
        ({}, Target("cuda", 80, H200.features), "compute capability 9.0"),
        ({}, Target("cuda", 100, H200.features), "compute capability 9.0"),
        ({}, Target("cuda", 90), "not installed"),
        ({}, Target("cuda", 90, frozenset({"triton"})), "needs to know the release of Triton"),
        ({"dtype": torch.float32}, H200, "not float32"),
        ({"head_dim": 264}, H200, "go to 256"),
        ({"head_dim": 20}, H200, "multiples of 16 bytes"),
        ({"aligned": False}, H200, "16-byte aligned"),
        ({"layout": Layout.PAGED}, H200, "paged"),
        ({"outputs": Outputs(weights=True)}, H200, "weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,  # a set's text differs between processes
)
def test_what_it_cannot_take_is_declined_in_words(given, target, said):
    reason = BACKEND.reject(problem(**given), target)
    assert reason is not None
    assert said in reason


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "N3"),
        ({"mask": masks.causal(), "score": scores.alibi(16)}, "N3"),
        ({"mask": masks.window(1023)}, "C2"),
        ({"mask": masks.window(1023), "head_dim": 64, "value_dim": 64}, "N2"),
        ({"head_dim": 256, "value_dim": 256}, "C2"),
        ({"batch": 64, "q_len": 512, "kv_len": 512, "head_dim": 64, "value_dim": 64}, "N2"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,  # a set's text differs between processes
)
def test_explain_says_which_kernel_and_why(given, name):
    line = next(line for line in choose(problem(**given), H200).table().splitlines() if "hopper" in line)
    assert f": {name}, " in line
    assert "warpgroups" in line


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        ((128, 128), ()),
        ((192, 128), ("D = 192 as 128 + 64",)),
        ((72, 96), ("D = 72 padded to 80 = 64 + 16", "Dv = 96 as 64 + 32", "D = 72 padded to 96 = 64 + 32")),
        ((200, 64), ("D = 200 padded to 256",)),
    ],
)
def test_explain_says_what_head_dims_are_padded_to(dims, said):
    asked = problem(head_dim=dims[0], value_dim=dims[1], query_grad=True, key_grad=True, value_grad=True)
    note = BACKEND.note(asked, H200)
    assert all(words in note for words in said)
    assert ("padded" in note or " as " in note) == bool(said)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"mask": masks.causal()}, True),
        ({"mask": masks.causal(), "score": scores.softcap(20.0)}, True),
        ({}, True),
        ({"head_dim": 256, "value_dim": 64, "kv_heads": 4}, True),
        ({"head_dim": 128}, False),
        ({"mask": masks.window(64)}, False),
        ({"mask": masks.causal(), "layout": Layout.JAGGED}, False),
        ({"mask": masks.causal(), "query_grad": False}, False),
    ],
)
def test_explain_says_where_gradients_of_scores_are_kept(given, kept):
    asked = problem(**{"head_dim": 192, "value_dim": 128, "query_grad": True, "key_grad": True, "value_grad": True, **given})
    assert ("kept in up to 528 MB" in BACKEND.note(asked, H200)) == kept


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


NARROW = {"head_dim": 64, "value_dim": 64}
OWNERS = torch.zeros(8192)
DOCUMENT = foci.Mask(lambda b, h, q, k: OWNERS[q] == OWNERS[k])
TRAINED = {"query_grad": True, "key_grad": True, "value_grad": True}
KINDS = {
    "full": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(1023)},
    "document": {"mask": DOCUMENT},
    "added": {"mask": masks.causal(), "score": scores.alibi(16)},
    "score": {"mask": masks.causal(), "score": scores.softcap(20.0)},
    "pair": {"score": foci.Score(lambda s, b, h, q, k: s + TABLE[q % 64, k % 64])},
    "mask": {"mask": foci.Mask(lambda b, h, q, k: TABLE[q % 64, k % 64] > 0)},
}


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
    assert forward_schedule(asked) is getattr(schedules, name)
    assert forward_schedule(problem(**KINDS[kind], head_dim=192, value_dim=128, layout=Layout.JAGGED)) is schedules.OVERLAP_2


def test_wide_keys_with_narrow_values_and_a_score_without_a_mask_take_task_after_task():
    asked = problem(score=scores.softcap(20.0), head_dim=192, value_dim=128)
    assert forward_schedule(asked) is schedules.OVERLAP_2_LOOP


def test_wide_keys_with_narrow_values_and_lengths_that_may_be_0_take_one_task_a_program():
    lengths = torch.tensor([5, 0])
    asked = problem(mask=foci.Mask(lambda b, h, q, k: k < lengths[b]), head_dim=192, value_dim=128)
    assert score_kind(asked) == "full"
    assert forward_schedule(asked) is schedules.OVERLAP_2


@pytest.mark.parametrize(("kind", "given"), KINDS.items(), ids=KINDS)
@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.parametrize("is_trained", [False, True])
def test_the_faster_backend_is_chosen_as_measured(kind, given, width, is_trained):
    asked = problem(**given, head_dim=width, value_dim=width, **(TRAINED if is_trained else {}))
    assert score_kind(asked) == kind
    rates, measured = estimate_rates(asked), MEASURED.get((width, kind), MEASURED[128, kind])
    own = measured.backward.fused if (width, kind) in FUSED_SCHEDULES else measured.backward.apart
    assert (rates.forward, rates.backward.triton) == (measured.forward, measured.backward.triton)
    # a single kernel's sums of dq take a little over many keys
    assert rates.backward.hopper == own if (width, kind) not in FUSED_SCHEDULES else 0.94 * own < rates.backward.hopper <= own * (1 + 1e-9)
    times = {
        "hopper": 1 / rates.forward.hopper + (2.5 / rates.backward.best if is_trained else 0),
        "triton": 1 / rates.forward.triton + (2.5 / rates.backward.triton if is_trained else 0),
    }
    decision = choose(asked, H200)
    assert decision.plan is not None
    assert decision.plan.backend == min(times, key=times.__getitem__), decision.table()


def built(asked, **options):
    kernel = pytest.importorskip("foci.backends.hopper.kernel", reason="needs a Triton with Gluon")
    return kernel.build_kernel(Plan("hopper", asked, H200), **options)


def passes(asked):
    """Names of the classes of both passes."""
    kernel = built(asked)
    return type(kernel.forward_pass).__name__, type(kernel.backward_pass).__name__


@pytest.mark.parametrize(("kind", "width"), [("full", 16), ("full", 128), ("causal", 64), ("added", 128)])
def test_dropouts_backward_is_the_single_kernels(kind, width):
    asked = problem(**KINDS[kind], head_dim=width, value_dim=width, **TRAINED)
    asked = replace(asked, formula=replace(asked.formula, dropout=True))
    assert estimate_rates(asked).backward.is_ahead
    assert passes(asked) == ("HopperForward", "HopperBackward")


@pytest.mark.parametrize(("kind", "width"), [("full", 256), ("score", 128), ("pair", 128)])
def test_dropouts_backward_is_tritons_where_several_kernels_take_it(kind, width):
    asked = problem(**KINDS[kind], head_dim=width, value_dim=width, **TRAINED)
    asked = replace(asked, formula=replace(asked.formula, dropout=True))
    assert not estimate_rates(asked).backward.is_ahead
    assert BACKEND.note(asked, H200).endswith("so taken from triton")
    assert passes(asked) == ("HopperForward", "PortableBackward")


JAGGED = {"layout": Layout.JAGGED}


def keys(count):
    return {"batch": 64, "q_len": count, "kv_len": count}


@pytest.mark.parametrize(
    ("given", "wide", "narrow"),
    [
        (KINDS["full"], schedules.TURNS_3_NAMED, schedules.TURNS_3_QREG),
        (KINDS["causal"], schedules.TURNS_3, schedules.TURNS_3_QREG),
        (KINDS["window"], schedules.OVERLAP_2_KV64, schedules.PAIRED_2_QUEUE),
        (KINDS["full"] | keys(256), schedules.TURNS_2, schedules.PAIRED_2),
        (KINDS["full"] | keys(512), schedules.TURNS_3_NAMED, schedules.PAIRED_2),
        (KINDS["full"] | keys(1024), schedules.TURNS_3_NAMED, schedules.PAIRED_2),
        (KINDS["full"] | keys(2048), schedules.TURNS_3_NAMED, schedules.TURNS_3_QREG),
        (KINDS["causal"] | keys(512), schedules.OVERLAP_2_KV64, schedules.PAIRED_2_SERPENTINE),
        (KINDS["causal"] | keys(1024), schedules.OVERLAP_2_KV64, schedules.PAIRED_2_SERPENTINE),
        (KINDS["causal"] | keys(2048), schedules.OVERLAP_2_LOOP, schedules.PAIRED_2_QUEUE),
        (KINDS["causal"] | keys(4096), schedules.OVERLAP_2_LOOP, schedules.PAIRED_2_QUEUE),
        ({"mask": masks.causal_lower_right(), **keys(512), "q_len": 256}, schedules.OVERLAP_2_KV64, schedules.PAIRED_2_SERPENTINE),
        (KINDS["window"] | keys(512), schedules.OVERLAP_2_KV64, schedules.PAIRED_2_QUEUE),
        (KINDS["document"], schedules.OVERLAP_2_LISTS, schedules.TURNS_3_QREG_SORTED),
        (KINDS["document"] | keys(512), schedules.OVERLAP_2_KV64, schedules.PAIRED_2_SORTED),
        (KINDS["document"] | keys(2048), schedules.OVERLAP_2_KV64, schedules.PAIRED_2_SORTED),
        (KINDS["mask"], schedules.OVERLAP_2_LISTS, schedules.TURNS_3_QREG_SORTED),
        (KINDS["added"], schedules.TURNS_3, schedules.PAIRED_2_QUEUE),
        (KINDS["added"] | keys(512), schedules.OVERLAP_2_KV64, schedules.PAIRED_2_SERPENTINE),
        (KINDS["score"], schedules.TURNS_3, schedules.PAIRED_2_QUEUE),
        (KINDS["score"] | keys(1024), schedules.OVERLAP_2_KV64, schedules.PAIRED_2_SERPENTINE),
        (KINDS["score"] | keys(4096), schedules.OVERLAP_2_LOOP, schedules.PAIRED_2_QUEUE),
        (KINDS["pair"] | keys(512), schedules.OVERLAP_2, schedules.TURNS_3),
        (KINDS["window"] | {"score": scores.softcap(20.0)}, schedules.OVERLAP_2, schedules.TURNS_3_STATIC),
        (KINDS["full"] | JAGGED, schedules.TURNS_3_BRIEF, schedules.TURNS_3_QREG),
        (KINDS["full"] | JAGGED | keys(2048), schedules.TURNS_3_BRIEF, schedules.PAIRED_2_PACKED),
        (KINDS["causal"] | JAGGED, schedules.TURNS_3_BRIEF, schedules.PAIRED_2_PACKED),
        (KINDS["causal"] | JAGGED | keys(1024), schedules.OVERLAP_2_KV64, schedules.PAIRED_2_PACKED),
        (KINDS["added"] | JAGGED | keys(1024), schedules.OVERLAP_2_KV64, schedules.PAIRED_2_PACKED),
        (KINDS["added"] | JAGGED, schedules.TURNS_3_BRIEF, schedules.PAIRED_2_PACKED),
        (KINDS["window"] | JAGGED, schedules.OVERLAP_2_KV64, schedules.PAIRED_2_PACKED),
        (KINDS["document"] | JAGGED | keys(1024), schedules.OVERLAP_2_LISTS, schedules.PAIRED_2_PACKED),
        (KINDS["document"] | JAGGED, schedules.OVERLAP_2_LISTS, schedules.TURNS_3_QREG_SORTED),
    ],
)
def test_programs_take_tasks_as_was_fastest(given, wide, narrow):
    assert forward_schedule(problem(**given)) == wide
    assert forward_schedule(problem(**given, **NARROW)) == narrow
    assert forward_schedule(problem(**given, head_dim=256, value_dim=256)) == schedules.OVERLAP_2_D256


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
    assert forward_schedule(asked, sizes) == replace(getattr(schedules, name), static=is_placed)
    # nothing of that where a mask or a score asks for more, or where lengths are a sequence's own
    for other in ({"mask": masks.causal()}, {"score": scores.softcap(20.0)}, {"layout": Layout.JAGGED}):
        given = problem(**other, head_dim=dim, value_dim=dim)
        assert forward_schedule(given, sizes) == forward_schedule(given)


def test_a_kernel_goes_by_the_lengths_at_hand(monkeypatch):
    forward_pass = pytest.importorskip("foci.backends.hopper.forward_pass", reason="needs a Triton with Gluon")
    found, asked = [], problem(batch=4, q_len=512, kv_len=512)

    def noted(problem, sizes):
        found.append(forward_schedule(problem, sizes))
        raise InterruptedError

    monkeypatch.setattr(forward_pass, "forward_schedule", noted)
    for length in (384, 512):
        query = torch.zeros(4, 16, length, 128, dtype=torch.bfloat16)
        with pytest.raises(InterruptedError):
            built(asked).forward(Operands(query, query, query, (), (), (), 1.0))
    assert [one.tile_q for one in found] == [192, 128]


def test_explain_says_that_lengths_decide():
    assert "N2 or C2 instead when the actual lengths need fewer waves" in BACKEND.note(problem(), H200)
    assert "instead" not in BACKEND.note(problem(mask=masks.causal()), H200)


@pytest.mark.parametrize("dim", [80, 96])
def test_heads_in_pieces_free_tiles_by_warpgroups(dim):
    widths = {"head_dim": dim, "value_dim": dim}
    assert forward_schedule(problem(**KINDS["full"], **widths)) == schedules.TURNS_3_LOOP
    assert forward_schedule(problem(**KINDS["causal"], **widths)) == schedules.TURNS_3_BRIEF
    assert forward_schedule(problem(**KINDS["causal"], **keys(2048), **widths)) == schedules.TURNS_2_SERPENTINE
    assert forward_schedule(problem(**KINDS["causal"], **JAGGED, **widths)) == schedules.TURNS_3_BRIEF


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize(("batch", "heads", "length"), [(4, 24, 2048), (1, 24, 4096), (64, 2, 1024), (16, 96, 512), (1, 16, 2048)])
def test_words_of_a_mask_that_are_to_be_kept_have_room(batch, heads, length, dim):
    table = torch.zeros(1, 1, 1, dtype=torch.bool).expand(heads, length, length)
    of_pairs = foci.Mask(lambda b, h, q, k: table[h, q, k] & (b >= 0))
    asked = problem(mask=of_pairs, batch=batch, q_heads=heads, kv_heads=heads, q_len=length, kv_len=length, head_dim=dim, value_dim=dim)
    assert score_kind(asked) == "mask"
    found = forward_schedule(asked)
    tiles = -(-length // found.tile_q) * -(-length // found.tile_kv)
    # four words for each query of a tile, of each batch entry and head
    assert 16 * found.tile_q * tiles * batch * heads <= MAX_MASK_BYTES


def test_two_programs_share_the_registers_of_a_multiprocessor():
    for one in (
        schedules.PAIRED_2,
        schedules.PAIRED_2_PACKED,
        schedules.PAIRED_2_QUEUE,
        schedules.PAIRED_2_SORTED,
        schedules.PAIRED_2_SERPENTINE,
    ):
        assert one.programs_per_sm * one.max_registers * 128 * (one.consumers + 1) <= 65536
        # the consumers' and 24 of the producer's, which the program's own registers pay for
        assert one.registers * one.consumers + 24 <= one.max_registers * (one.consumers + 1)


class Launches:
    """What a forward would allocate and launch."""

    def __init__(self):
        self.names = []

    def empty(self, shape, strides, dtype, like):
        return torch.empty(shape, dtype=dtype)

    def add(self, function, grid, *arguments, **options):
        self.names.append(function.__name__)


@pytest.mark.parametrize(
    ("given", "tasks", "expected"),
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
def test_tasks_of_a_last_round_that_is_half_empty_are_halved(given, tasks, expected):
    asked, launches = problem(**given), Launches()
    query = torch.empty(1, 1, 1, 1, device="meta")
    operands = Operands(query, query, query, (), (), (), 1.0)
    programs, tickets, halved = built(asked).forward_pass._programs(tasks, forward_schedule(asked), operands, None, launches)
    assert (programs, halved) == expected
    # tickets are counted from zero, where there are any to be taken
    schedule = forward_schedule(asked)
    assert launches.names == (["zero_counters"] if programs < tasks and not schedule.static else [])
    assert (tickets is None) == (not schedule.persistent or schedule.static)


def test_explain_says_what_was_measured_and_where_the_backward_is_from():
    def said(**given):
        return BACKEND.note(problem(**given), H200)

    assert "forward measured at 1.43x triton's speed" in said()
    assert "backward" not in said()
    assert said(**TRAINED).endswith("backward estimated at 1.45x triton's speed")
    shared = {"q_heads": 32, "kv_heads": 8}
    assert said(**KINDS["score"], **NARROW, **shared, **TRAINED).endswith(
        "backward estimated at 0.75x triton's speed, so taken from triton"
    )


def test_the_backward_is_that_of_the_faster_backend():
    window, document = ({**KINDS[kind], "layout": Layout.JAGGED} for kind in ("window", "document"))
    shared = {**KINDS["score"], **NARROW, "q_heads": 32, "kv_heads": 8}
    cases = ({}, NARROW, KINDS["window"], window, document, {**KINDS["score"], **NARROW}, shared)
    found = [passes(problem(**given, **TRAINED))[1] for given in cases]
    assert found == ["HopperBackward"] * 4 + ["PortableBackward", "HopperBackward", "PortableBackward"]


def test_a_forward_without_gradients_has_no_backward_of_its_own():
    assert passes(problem()) == ("HopperForward", "PortableBackward")


def test_a_backward_that_makes_tables_is_not_precompiled():
    window = problem(**KINDS["window"], **TRAINED)
    for own in (True, False):
        assert built(window, own_backward=own).backward_pass.only_launches != own
    assert built(problem(**TRAINED)).backward_pass.only_launches


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"q_len": 512, "kv_len": 512, **NARROW}, (1, 132)),
        ({"q_len": 512, **NARROW}, (2, 66)),
        ({"q_len": 128, **NARROW}, (8, 66)),
        ({"q_len": 256, "batch": 1, **NARROW}, (8, 16)),
        ({"q_len": 128, "mask": masks.causal(), **NARROW}, (1, 132)),
        ({"q_len": 128, "layout": Layout.JAGGED, **NARROW}, (1, 132)),
        ({"q_len": 1024, **NARROW}, (1, 66)),
        ({"q_len": 8192, **NARROW}, (1, 16)),
        ({"q_len": 1 << 16, **NARROW}, (1, 2)),
        ({"q_len": 512}, (1, 48)),
        ({"q_len": 2048}, (1, 16)),
        ({"q_len": 1 << 18}, (1, 1)),
        ({"q_len": 2048, "mask": masks.causal(), **NARROW}, (1, 33)),
        ({"q_len": 8192, "mask": masks.causal(), **NARROW}, (2, 8)),
        ({"q_len": 8192, "mask": masks.causal()}, (2, 4)),
        ({"q_len": 1024, "batch": 1}, (2, 16)),
        ({"q_len": 4096, "batch": 1, "mask": masks.causal(), **NARROW}, (1, 16)),
        ({"q_len": 1024, "kv_heads": 4}, (1, 66)),
        ({"q_len": 512, "kv_len": 512, "kv_heads": 4, **NARROW}, (1, 264)),
        ({"q_len": 8192, "kv_heads": 4}, (1, 8)),
        ({"q_len": 8192, "kv_heads": 4, "mask": masks.causal()}, (1, 16)),
        ({"q_len": 1024, "mask": masks.causal(), "layout": Layout.JAGGED, **NARROW}, (2, 33)),
        ({"q_len": 1024, "layout": Layout.JAGGED, "batch": 1, **NARROW}, (1, 66)),
        ({"q_len": 1 << 17, "layout": Layout.JAGGED}, (1, 8)),
        ({"q_len": 1 << 17, "layout": Layout.JAGGED, "mask": masks.causal(), **NARROW}, (2, 8)),
    ],
    ids=str,
)
def test_as_many_heads_add_up_dq_together_as_have_room(given, expected):
    found = fused_schedule(problem(**TRAINED, **given))
    assert (found.sums, found.heads_together) == expected


FEW = {"batch": 8, "q_len": 128, "kv_len": 1024}


@pytest.mark.parametrize(
    ("given", "is_few"),
    [
        ({}, True),
        (NARROW, True),
        ({"head_dim": 72, "value_dim": 96}, True),
        ({"head_dim": 16, "value_dim": 16, "q_len": 1}, True),
        ({"score": scores.softcap(20.0)}, True),
        ({"score": scores.alibi(16), **NARROW}, True),
        ({"batch": 4}, True),
        ({"batch": 2}, True),
        ({"batch": 2, "kv_len": 128}, False),
        ({"batch": 1}, True),
        ({"batch": 1, "kv_len": 256}, False),
        ({"q_len": 256}, False),
        ({"kv_len": 64}, True),
        ({"kv_heads": 4}, False),
        ({"head_dim": 192}, False),
        ({"head_dim": 128, "value_dim": 64}, False),
        ({"mask": masks.causal()}, False),
        ({"mask": masks.window(64)}, False),
        (KINDS["pair"], False),
        ({"layout": Layout.JAGGED}, False),
        ({"query_grad": False}, False),
    ],
    ids=str,
)
def test_a_program_takes_all_queries_of_a_head_where_they_are_few(given, is_few):
    asked = problem(**{**TRAINED, **FEW, **given})
    assert (short_q_schedule(asked) is not None) == is_few
    assert ("each program taking all queries of a head" in BACKEND.note(asked, H200)) == is_few
    if is_few:
        assert estimate_rates(asked).backward.is_ahead
        assert choose(asked, H200).plan.backend == "hopper"


@pytest.mark.parametrize(
    ("batch", "heads", "lengths", "dim", "backend"),
    [
        (2, (16, 16), (128, 4096), 64, "triton"),
        (1, (16, 16), (128, 8192), 128, "triton"),
        (1, (32, 8), (64, 8192), 128, "triton"),
        (1, (16, 16), (256, 4096), 128, "triton"),
        (4, (16, 16), (128, 8192), 128, "hopper"),  # in two, which is slower than 64 programs that take all keys
        (8, (16, 16), (128, 1024), 64, "hopper"),
        (4, (16, 16), (128, 1024), 128, "hopper"),
        (8, (16, 16), (128, 8192), 128, "hopper"),
    ],
)
def test_few_queries_over_many_keys_go_where_keys_are_split(batch, heads, lengths, dim, backend):
    given = {"batch": batch, **dict(zip(("q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim"), (*heads, *lengths, dim, dim)))}
    decision = choose(problem(**given), H200)
    assert decision.plan.backend == backend
    if backend == "triton":
        assert "split-KV" in decision.table()
    # with gradients the forward alone
    trained = choose(problem(**given, **TRAINED), H200)
    assert trained.plan.backend == "hopper"
    assert ("the forward runs the triton split-KV kernel" in BACKEND.note(trained.problem, H200)) == (backend == "triton")


# SDPA-13
@pytest.mark.parametrize("given", [{}, TRAINED], ids=["forward", "trained"])
@pytest.mark.parametrize("kv_heads", [0, 2])
def test_no_heads_are_planned_for_as_well(given, kv_heads):
    decision = choose(problem(q_heads=0, kv_heads=kv_heads, **given), H200)
    assert decision.plan is not None
    assert "zero heads" in decision.table()


@pytest.mark.parametrize(
    ("batch", "rows", "length", "way"),
    [(2, 128, 4096, "triton"), (2, 64, 4096, "triton"), (2, 128, 512, "hopper"), (4, 128, 8192, "hopper"), (4, 64, 4096, "hopper")],
)
def test_a_forward_with_gradients_is_tritons_where_that_is_sooner_done_as_explain_says(batch, rows, length, way):
    asked = problem(**TRAINED, batch=batch, q_len=rows, kv_len=length)
    assert passes(asked)[0] == {"triton": "PortableForward", "hopper": "HopperForward"}[way]
    assert ("the forward runs the triton split-KV kernel" in BACKEND.note(asked, H200)) == (way == "triton")


@pytest.mark.parametrize("heads", [1, 64])
def test_a_backward_taken_from_triton_costs_what_it_costs_there(heads):
    given = {**KINDS["pair"], "batch": 1, "q_heads": heads, "kv_heads": heads, "q_len": 1024, "kv_len": 1024}
    costs = [[one.cost(problem(**given, **more), H200) for more in ({}, TRAINED)] for one in (BACKEND, TRITON)]
    own, other = (trained - plain for plain, trained in costs)
    assert own == pytest.approx(other)


def test_dropout_of_few_queries_is_the_other_kernels():
    asked = problem(**TRAINED, **FEW)
    assert short_q_schedule(replace(asked, formula=replace(asked.formula, dropout=True))) is None


@pytest.mark.parametrize(
    ("kind", "length", "is_own"),
    [("full", 128, True), ("full", 256, True), ("causal", 64, False), ("causal", 128, True), ("score", 64, False), ("score", 128, True)],
)
def test_few_keys_do_not_make_up_for_what_sums_of_dq_cost(kind, length, is_own):
    asked = problem(**KINDS[kind], **NARROW, **TRAINED, batch=16, q_len=length, kv_len=length)
    assert estimate_rates(asked).backward.is_ahead == is_own
    # the forward is this backend's all the same
    assert choose(asked, H200).plan.backend == "hopper"


def test_long_tiles_of_keys_are_too_few_to_fill_a_device():
    few, many = (problem(**TRAINED, batch=batch, q_len=512, kv_len=512) for batch in (1, 8))
    assert not estimate_rates(few).backward.is_ahead
    assert estimate_rates(many).backward.is_ahead


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"kv_len": 8192}, {"kv_len": 512}),
        ({"q_heads": 8}, {"kv_heads": 4}),
        ({"kv_heads": 4}, {"q_heads": 8, "kv_heads": 8}),
    ],
)
def test_kernels_are_of_the_lengths_and_heads_they_are_given(first, then):
    pytest.importorskip("triton", reason="Triton is not installed")
    narrow = {"head_dim": 64, "value_dim": 64, "query_grad": True, "key_grad": True, "value_grad": True}
    for given in (first, then):
        decision = choose(problem(**KINDS["causal"], **narrow, **given), H200, ("hopper",))
        assert execution._compiled(decision).builder.problem == decision.plan.problem
        assert execution._compiled(decision) is execution._compiled(decision)


def test_kernels_of_the_backward_are_left_unread_without_gradients():
    pytest.importorskip("foci.backends.hopper.gluon_compat", reason="needs a Triton with Gluon")
    code = """
import sys
import test_planning as planning

def read():
    return [name for name in sys.modules if name.startswith("foci.backends.hopper.bwd_")]

planning.BACKEND.build(planning.Plan("hopper", planning.problem(), planning.H200))
assert read() == [], read()
planning.BACKEND.build(planning.Plan("hopper", planning.problem(**planning.TRAINED), planning.H200))
assert read()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


# FLEX-14
def test_one_query_is_left_to_the_kernel_that_splits_keys():
    decision = choose(problem(q_len=1, q_heads=32, kv_heads=8, kv_len=65536), H200)
    assert decision.plan is not None
    assert decision.plan.backend != "hopper"


def test_unaligned_operands_make_an_unaligned_problem():
    from foci.problem import is_aligned

    whole = torch.zeros(2, 4, 64, 128, dtype=torch.bfloat16)
    assert is_aligned(whole)
    assert is_aligned(whole.transpose(1, 2))
    assert is_aligned(torch.zeros(1, 1, 64, 128, dtype=torch.bfloat16)[:, :1])
    assert not is_aligned(whole.transpose(2, 3))
    assert not is_aligned(whole[..., 4:])
    assert not is_aligned(torch.zeros(2, 4, 64, 20, dtype=torch.bfloat16))
    assert not is_aligned(whole[:, :1].expand(2, 4, 64, 128))


def test_it_is_a_backend_among_the_others():
    assert "hopper" in foci.backends.names()


@pytest.mark.parametrize(
    ("heads", "keys", "expected"),
    [
        (128, 1024, (16, 1)),
        (32, 4096, (16, 4)),
        (16, 8192, (16, 8)),
        (16, 4097, (9, 8)),
        (64, 256, (2, 2)),
        (64, 250, (4, 1)),
        (32, 600, (3, 4)),
        (8, 1 << 20, (1024, 16)),
        (24, 3000, (10, 5)),
    ],
)
def test_programs_of_a_head_of_few_queries(heads, keys, expected):
    """As many as there are multiprocessors for, none of less than 128 keys but the last."""
    assert split_short_q(heads, keys, 64) == expected
