"""What the Hopper backend takes, what it declines and in which words. Pure: no device, no Triton."""

from dataclasses import replace

import pytest
import torch

import foci
from foci import masks, scores
from foci.backends.hopper import BACKEND, VERSIONS
from foci.binding import bind
from foci.planner import choose
from foci.problem import Formula, Layout, Outputs, Problem, Target

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
        ({}, Target("cuda", 90, frozenset({"triton", "triton-3.99"})), "another version is installed"),
        ({"dtype": torch.float32}, H200, "not float32"),
        ({"head_dim": 264}, H200, "go to 256"),
        ({"head_dim": 20}, H200, "multiples of 16 bytes"),
        ({"aligned": False}, H200, "lie otherwise"),
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
        ({"head_dim": 256, "value_dim": 256}, "C2"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,  # a set's text differs between processes
)
def test_explain_says_which_kernel_and_why(given, name):
    line = next(line for line in choose(problem(**given), H200).table().splitlines() if "hopper" in line)
    assert f": {name}, " in line
    assert "warpgroups" in line


@pytest.mark.parametrize(
    "given",
    [
        {"mask": masks.window(1023), "head_dim": 64, "value_dim": 64},
        {"score": foci.Score(lambda s, b, h, q, k: s + TABLE[q % 64, k % 64])},
    ],
    ids=["narrow window", "bias"],
)
def test_what_was_measured_faster_elsewhere_is_left_there(given):
    decision = choose(problem(**given), H200)
    assert decision.plan is not None
    assert decision.plan.backend == "triton"


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
