"""Performance model: estimated seconds of a problem, from its launches and its flops.

Flops take the rate by which the portable kernels are estimated, `HOPPER.rate`, times the ratio of the rates measured in `kernel_rates`.
"""

from __future__ import annotations

import math
from typing import Final

from foci.backends.causal import is_causal
from foci.backends.gpu import portable
from foci.backends.gpu.architectures import HOPPER
from foci.backends.hopper.kernel_rates import estimate_rates
from foci.backends.hopper.schedules import forward_schedule
from foci.problem import Problem, Target

__all__ = ["backward_cost", "forward_cost", "split_cost", "takes_split"]

_LAUNCH: Final = 2e-5
_BACKWARD: Final = 5e-5
"""Seconds of host time of a pass, measured beside an H200 (benchmarks/gpu_overhead.py)."""


def forward_cost(problem: Problem, target: Target) -> float:
    """Estimate the forward. Short queries leave query tiles partly empty and few tiles leave SMs idle, so both are rounded up. Persistent
    kernels skip empty warpgroups and pay for whole 64-row blocks only. Where `triton` would split keys, too few tasks remain to hide that,
    and each takes as long as its rows.
    """
    schedule, rates = forward_schedule(problem), estimate_rates(problem).forward
    rows = 64 if schedule.persistent else schedule.tile_q
    if schedule.persistent and portable.splits_keys(problem, target):
        rows = min(schedule.tile_q, -(-problem.q_len // 64) * 64)
    tiles = problem.batch * problem.q_heads * -(-problem.q_len // rows)
    flops = 2.0 * max(HOPPER.sms, tiles) * rows * problem.kv_len * (problem.head_dim + problem.value_dim)
    return _LAUNCH + (0.5 if is_causal(problem.variant) else 1.0) * flops / HOPPER.rate * rates.triton / rates.hopper


def split_cost(problem: Problem, target: Target) -> float:
    """Estimate the forward by `triton`'s split-KV kernel; infinite if it does not split."""
    return portable.forward_cost(problem, target) if portable.splits_keys(problem, target) else math.inf


def takes_split(problem: Problem, target: Target) -> bool:
    """Whether `triton`'s split-KV forward is faster for a problem with gradients."""
    return split_cost(problem, target) < forward_cost(problem, target)


def backward_cost(problem: Problem) -> float:
    """Estimate the backward, by this backend's kernels or `triton`'s."""
    rates, part = estimate_rates(problem), 0.5 if is_causal(problem.variant) else 1.0
    return _BACKWARD + 2.5 * part * problem.flops / HOPPER.rate * rates.backward.triton / rates.busy / rates.backward.best
