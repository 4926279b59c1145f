"""Any variant at the full rate of NVIDIA Hopper GPUs, written in Gluon: TMA, wgmma, specialised warps.

Triton, of which Gluon is a part, is imported when the first plan is compiled.
"""

from __future__ import annotations

from typing import Final

import torch

from foci.backends import self_check
from foci.backends.contract import Kernel, Plan
from foci.backends.hopper.backward_schedules import KEPT_AT_MOST, few_schedule, kept_schedule, padded_widths
from foci.backends.hopper.kernel_rates import Pair, estimate_rates
from foci.backends.hopper.perf_model import backward_cost, forward_cost, split_cost, takes_split
from foci.backends.hopper.schedules import alternative_schedules, describe_width, forward_schedule, padded_width
from foci.backends.row_kernels import RowKernels
from foci.backends.triton import BACKEND as TRITON
from foci.backends.triton.schedules import padded_dim
from foci.compat.triton import TESTED
from foci.problem import Layout, Problem, Target

__all__ = ["BACKEND", "VERSIONS", "HopperBackend"]

VERSIONS: Final = tuple(f"{major}.{minor}" for major, minor in TESTED)
"""Releases of Triton that the kernels were tested with. With another one they check themselves before they run."""


class HopperBackend:
    """Fused attention by warpgroup products, for sm_90."""

    name = "hopper"

    def reject(self, problem: Problem, target: Target, /) -> str | None:
        """Why not, or None."""
        if target.device != "cuda" or target.arch != 90:
            return "needs an NVIDIA GPU of compute capability 9.0"
        if "triton" not in target.features:
            return "needs Triton, which is not installed"
        if not any(feature.startswith("triton-") for feature in target.features):
            return "needs to know the release of Triton, as its kernels were tested with some; the target does not say it"
        if problem.needs_backward and (reason := TRITON.obstacle_to(problem, target)) is not None:
            return f"needs the triton backend's gradients, but triton {reason}"
        return self._reject_problem(problem) or self_check.failure_of(self.name, problem, target)

    def is_failed_check(self, reason: str, /) -> bool:
        """Whether a reason is that the kernels failed their self-check under this release of Triton."""
        return self_check.is_failure(reason)

    def _reject_problem(self, problem: Problem) -> str | None:
        outputs, formula = problem.formula.outputs, problem.formula
        if problem.dtype not in (torch.float16, torch.bfloat16):
            return f"computes in float16 and bfloat16, not {str(problem.dtype).removeprefix('torch.')}"
        if 0 in (problem.q_heads, problem.kv_heads):
            return "does not support zero heads"
        if max(problem.head_dim, problem.value_dim) > 256:
            return f"head dims go to 256; this has D = {problem.head_dim}, Dv = {problem.value_dim}"
        if problem.head_dim % 8 or problem.value_dim % 8:
            return f"rows must be multiples of 16 bytes; this has D = {problem.head_dim}, Dv = {problem.value_dim}"
        if not problem.aligned:
            return "needs query, key and value rows that are contiguous and 16-byte aligned (TMA)"
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
        """Which kernels, and why."""
        schedule, rates = forward_schedule(problem), estimate_rates(problem)
        widths = padded_width(problem.head_dim), padded_width(problem.value_dim)
        others = " or ".join(one.name for one in alternative_schedules(problem) if one.name != schedule.name)
        unless = f"; {others} instead when the actual lengths need fewer waves" if others else ""
        how = f"{schedule.name}, {schedule.why}{unless}{_taken(problem, widths)}"
        said = f"{self_check.note_of(target)}{how}; forward {_compared('measured', rates.forward)}"
        if not problem.needs_backward:
            return said
        if takes_split(problem, target):
            said = f"{self_check.note_of(target)}short queries: the forward runs the triton split-KV kernel"
        is_own = rates.backward.is_ahead
        widths = padded_widths(problem) if is_own else (padded_dim(problem.head_dim), padded_dim(problem.value_dim))
        taken = "" if is_own else ", so taken from triton"
        kept = f", dq from gradients of scores kept in up to {KEPT_AT_MOST >> 20} MB" if is_own and kept_schedule(problem) else ""
        few = ", each program taking all queries of a head" if is_own and few_schedule(problem) else ""
        return f"{said}; backward {_compared('estimated', rates.backward)}{taken}{_taken(problem, widths)}{kept}{few}"

    def cost(self, problem: Problem, target: Target, /) -> float:
        """Launches and flops. Where gradients are wanted and splitting keys is sooner done, the forward is that of `triton`."""
        forward = forward_cost(problem, target)
        if not problem.needs_backward:
            return forward
        return min(forward, split_cost(problem, target)) + backward_cost(problem)

    def compile(self, plan: Plan, /) -> Kernel:
        """Kernels of a plan. Each is compiled when it is first launched; under a release of Triton that foci was not tested with, their
        kind is checked first."""
        self_check.check(plan)
        if plan.problem.needs_backward:
            from foci.backends.hopper.training import TrainingKernel

            return TrainingKernel(plan)
        # the backward's kernels, whose Python takes longer to read than the forward's, are left unread
        from foci.backends.hopper.kernel import HopperKernel

        return HopperKernel(plan)

    def key_of(self, plan: Plan, /) -> Plan:
        """The plan: schedules follow lengths, and how heads share keys is compiled in."""
        return plan

    def row_kernels(self, target: Target, /) -> RowKernels | None:
        """Those of the backend triton: memory is what they wait for."""
        return TRITON.row_kernels(target)


def _taken(problem: Problem, widths: tuple[int, int]) -> str:
    dims = ("D", problem.head_dim, widths[0]), ("Dv", problem.value_dim, widths[1])
    return "".join(f", {words}" for words in (describe_width(*one) for one in dims) if words)


def _compared(how: str, pair: Pair) -> str:
    return f"{how} at {pair.hopper / pair.triton:.2f}x triton's speed" if pair.hopper else "not measured"


BACKEND = HopperBackend()
