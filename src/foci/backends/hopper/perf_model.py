"""Estimated seconds of a problem: those of its launches, and those of its flops at the rates of `kernel_rates`."""

from __future__ import annotations

import math
from typing import Final

from foci.backends import triton
from foci.backends.causal import is_causal
from foci.backends.hopper.kernel_rates import estimate_rates
from foci.backends.hopper.schedules import DEFAULT_SMS, forward_schedule
from foci.problem import Problem, Target

__all__ = ["backward_cost", "forward_cost", "split_cost", "takes_split"]

_TRITON: Final = 4.5e14
"""The rate that the backend triton estimates its cost by; ours is estimated from it, by how the measured ones compare."""
_LAUNCH: Final = 2e-5
_BACKWARD: Final = 5e-5
"""What a pass costs the host, measured beside an H200 (benchmarks/gpu_overhead.py)."""


def forward_cost(problem: Problem, target: Target) -> float:
    """Of the forward by this backend's kernel: rows come in tiles, which few queries leave mostly empty, and too few tiles leave
    multiprocessors so. Programs that take task after task have been seen to lose nothing by rows that are not there, but those of a
    warpgroup; where there are so few that `triton` splits keys, each takes as long as its rows."""
    schedule, rates = forward_schedule(problem), estimate_rates(problem).forward
    rows = 64 if schedule.persistent else schedule.tile_q
    if schedule.persistent and triton.splits_keys(problem, target):
        rows = min(schedule.tile_q, -(-problem.q_len // 64) * 64)
    tiles = problem.batch * problem.q_heads * -(-problem.q_len // rows)
    flops = 2.0 * max(DEFAULT_SMS, tiles) * rows * problem.kv_len * (problem.head_dim + problem.value_dim)
    return _LAUNCH + (0.5 if is_causal(problem.variant) else 1.0) * flops / _TRITON * rates.triton / rates.hopper


def split_cost(problem: Problem, target: Target) -> float:
    """Of the forward by `triton`'s kernel that splits keys over programs; infinite where that splits none."""
    return triton.forward_cost(problem, target) if triton.splits_keys(problem, target) else math.inf


def takes_split(problem: Problem, target: Target) -> bool:
    """Whether a forward with gradients is better taken from `triton`, which splits keys over programs."""
    return split_cost(problem, target) < forward_cost(problem, target)


def backward_cost(problem: Problem) -> float:
    """Of the backward by the kernels that take it."""
    rates, part = estimate_rates(problem), 0.5 if is_causal(problem.variant) else 1.0
    return _BACKWARD + 2.5 * part * problem.flops / _TRITON * rates.backward.triton / rates.busy / rates.backward.best
