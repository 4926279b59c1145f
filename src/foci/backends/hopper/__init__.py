"""Any variant at the full rate of NVIDIA Hopper GPUs, written in Gluon: TMA, wgmma, specialised warps.

Triton, of which Gluon is a part, is imported when the first plan is compiled.
"""

from __future__ import annotations

from typing import Final

import torch

from foci.backends.causal import is_causal
from foci.backends.contract import Kernel, Plan
from foci.backends.hopper.schedules import forward_schedule, is_slow
from foci.backends.triton import BACKEND as TRITON
from foci.problem import Layout, Problem, Target

__all__ = ["BACKEND", "VERSIONS", "HopperBackend"]

VERSIONS: Final = ("3.6",)
"""Releases of Triton whose Gluon the kernels are written for."""

_FLOPS: Final = 6e14
_SLOW: Final = 3.5e14
_LAUNCH: Final = 2e-5
_PROCESSORS: Final = 132


class HopperBackend:
    """Fused attention by warpgroup products, for sm_90."""

    name = "hopper"

    def reject(self, problem: Problem, target: Target, /) -> str | None:
        """Why not, or None."""
        if target.device != "cuda" or target.arch != 90:
            return "needs an NVIDIA GPU of compute capability 9.0"
        if "triton" not in target.features:
            return "needs Triton, which is not installed"
        if not any(f"triton-{version}" in target.features for version in VERSIONS):
            return f"is written for the Gluon of Triton {', '.join(VERSIONS)}; another version is installed"
        if problem.needs_backward and (reason := TRITON.reject(problem, target)) is not None:
            return f"takes gradients as the backend triton does, which {reason}"
        return self._reject_problem(problem)

    def _reject_problem(self, problem: Problem) -> str | None:
        outputs, formula = problem.formula.outputs, problem.formula
        if problem.dtype not in (torch.float16, torch.bfloat16):
            return f"computes in float16 and bfloat16, not {str(problem.dtype).removeprefix('torch.')}"
        if max(problem.head_dim, problem.value_dim) > 256:
            return f"head dims go to 256; this has D = {problem.head_dim}, Dv = {problem.value_dim}"
        if problem.head_dim % 8 or problem.value_dim % 8:
            return f"rows must be multiples of 16 bytes; this has D = {problem.head_dim}, Dv = {problem.value_dim}"
        if not problem.aligned:
            return "copies rows that begin at multiples of 16 bytes and are contiguous; query, key or value lie otherwise"
        if formula.layout not in (Layout.DENSE, Layout.JAGGED):
            return f"takes no {formula.layout.value} keys"
        if outputs.weights or outputs.column_sums:
            return "does not return weights or their column sums"
        if formula.block_size is not None and formula.layout is Layout.JAGGED:
            return "block masks are for the dense layout"
        if formula.block_size is not None and any(size % 128 for size in formula.block_size):
            return f"block sizes must be multiples of 128, not {formula.block_size}"
        return None

    def note(self, problem: Problem, target: Target, /) -> str:
        """Which forward kernel, and why."""
        schedule = forward_schedule(problem)
        return f"{schedule.name}, {schedule.why}"

    def cost(self, problem: Problem, target: Target, /) -> float:
        """A launch, and so many turns of the device's multiprocessors: rows come in tiles, which few queries leave mostly empty."""
        rows = forward_schedule(problem).tile_q
        tiles = problem.batch * problem.q_heads * -(-problem.q_len // rows)
        turns = max(1.0, tiles / _PROCESSORS)
        rate = (_SLOW if is_slow(problem) else _FLOPS) / _PROCESSORS
        seconds = turns * 2.0 * rows * problem.kv_len * (problem.head_dim + problem.value_dim) / rate
        part = 0.5 if is_causal(problem.variant) else 1.0
        return _LAUNCH + part * seconds * (3.5 if problem.needs_backward else 1.0)

    def compile(self, plan: Plan, /) -> Kernel:
        """Kernels of a plan. Each is compiled when it is first launched."""
        from foci.backends.hopper.kernel import HopperKernel

        return HopperKernel(plan)


BACKEND = HopperBackend()
