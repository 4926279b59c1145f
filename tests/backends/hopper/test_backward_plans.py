"""Which backend and which kernel take a Hopper backward. No device."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from plan_problems import H200, KINDS, NARROW, TRAINED, passes, problem

from foci import masks, scores
from foci.backends.hopper import BACKEND
from foci.backends.hopper.backward_schedules import fused_schedule, short_q_schedule, split_short_q
from foci.backends.hopper.kernel_rates import estimate_rates
from foci.backends.triton import BACKEND as TRITON
from foci.planner import choose
from foci.problem import Layout


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


def test_the_backward_is_that_of_the_faster_backend():
    window, document = ({**KINDS[kind], "layout": Layout.JAGGED} for kind in ("window", "document"))
    shared = {**KINDS["score"], **NARROW, "q_heads": 32, "kv_heads": 8}
    cases = ({}, NARROW, KINDS["window"], window, document, {**KINDS["score"], **NARROW}, shared)
    names = [passes(problem(**case, **TRAINED))[1] for case in cases]
    assert names == ["HopperBackward"] * 4 + ["PortableBackward", "HopperBackward", "PortableBackward"]


def test_a_forward_without_gradients_has_no_backward_of_its_own():
    assert passes(problem()) == ("HopperForward", "PortableBackward")


@pytest.mark.parametrize(
    ("changes", "expected"),
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
def test_as_many_heads_add_up_dq_together_as_have_room(changes, expected):
    schedule = fused_schedule(problem(**TRAINED, **changes))
    assert (schedule.sums, schedule.heads_together) == expected


FEW = {"batch": 8, "q_len": 128, "kv_len": 1024}


@pytest.mark.parametrize(
    ("changes", "is_few"),
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
def test_a_program_takes_all_queries_of_a_head_where_they_are_few(changes, is_few):
    asked = problem(**{**TRAINED, **FEW, **changes})
    assert (short_q_schedule(asked) is not None) == is_few
    assert ("each program taking all queries of a head" in BACKEND.note(asked, H200)) == is_few
    if is_few:
        assert estimate_rates(asked).backward.is_ahead
        assert choose(asked, H200).plan.backend == "hopper"


@pytest.mark.parametrize("heads", [1, 64])
def test_a_backward_taken_from_triton_costs_what_it_costs_there(heads):
    options = {**KINDS["pair"], "batch": 1, "q_heads": heads, "kv_heads": heads, "q_len": 1024, "kv_len": 1024}
    costs = [[one.cost(problem(**options, **more), H200) for more in ({}, TRAINED)] for one in (BACKEND, TRITON)]
    ours, other = (trained - plain for plain, trained in costs)
    assert ours == pytest.approx(other)


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


def test_kernels_of_the_backward_are_left_unread_without_gradients():
    pytest.importorskip("foci.backends.hopper.gluon_compat", reason="needs a Triton with Gluon")
    code = """
import sys
from foci.backends.contract import Plan
from foci.backends.hopper import BACKEND
from plan_problems import H200, TRAINED, problem

def read():
    return [name for name in sys.modules if name.startswith("foci.backends.hopper.bwd_")]

BACKEND.build(Plan("hopper", problem(), H200))
assert read() == [], read()
BACKEND.build(Plan("hopper", problem(**TRAINED), H200))
assert read()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


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
