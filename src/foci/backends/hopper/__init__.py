"""Backend for NVIDIA Hopper GPUs (sm_90), written in Gluon with TMA, wgmma and warp specialization.

Triton, of which Gluon is a part, is imported when the first plan is compiled.
"""

from __future__ import annotations

from typing import Final

import torch

from foci.backends import self_check
from foci.backends.contract import Backend, Kernel, Plan
from foci.backends.gpu import portable
from foci.backends.gpu.architectures import HOPPER
from foci.backends.gpu.schedules import padded_dim
from foci.backends.hopper.backward_schedules import DS_SCRATCH_BYTES, ds_scratch_schedule, padded_widths, short_q_schedule
from foci.backends.hopper.kernel_rates import Pair, estimate_rates
from foci.backends.hopper.perf_model import backward_cost, forward_cost, split_cost, takes_split
from foci.backends.hopper.schedules import alternative_schedules, describe_width, forward_schedule, padded_width
from foci.backends.row_kernels import RowKernels
from foci.compat.triton import TESTED
from foci.problem import Layout, Problem, Target

__all__ = ["BACKEND", "VERSIONS", "HopperBackend"]

VERSIONS: Final = tuple(f"{major}.{minor}" for major, minor in TESTED)
"""Tested releases of Triton. With another one the kernels check themselves before they run."""


class HopperBackend(Backend):
    """Fused attention with wgmma, for sm_90."""

    name = "hopper"

    def reject(self, problem: Problem, target: Target, /) -> str | None:
        """Return why the backend cannot run a problem, or None."""
        if target.device != "cuda" or target.arch != HOPPER.arch:
            return f"needs an NVIDIA GPU of compute capability {HOPPER.arch / 10}"
        if "triton" not in target.features:
            return "needs Triton, which is not installed"
        if not any(feature.startswith("triton-") for feature in target.features):
            return "needs to know the release of Triton, as its kernels were tested with some; the target does not say it"
        if problem.needs_backward and (reason := portable.reject(problem, target)) is not None:
            return f"needs the triton backend's gradients, but triton {reason}"
        return self._reject_problem(problem) or self_check.find_failure(self.name, problem, target)

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
        """Describe the chosen kernels for `explain`."""
        schedule, rates = forward_schedule(problem), estimate_rates(problem)
        widths = padded_width(problem.head_dim), padded_width(problem.value_dim)
        alternatives = " or ".join(one.name for one in alternative_schedules(problem) if one.name != schedule.name)
        unless = f"; {alternatives} instead when the actual lengths need fewer waves" if alternatives else ""
        how = f"{schedule.name}, {schedule.why}{unless}{_describe_widths(problem, widths)}"
        text = f"{self_check.describe_check(target)}{how}; forward {_compare_rates('measured', rates.forward)}"
        if not problem.needs_backward:
            return text
        if takes_split(problem, target):
            text = f"{self_check.describe_check(target)}short queries: the forward runs the triton split-KV kernel"
        is_ahead = rates.backward.is_ahead
        widths = padded_widths(problem) if is_ahead else (padded_dim(problem.head_dim), padded_dim(problem.value_dim))
        delegated = "" if is_ahead else ", so taken from triton"
        scratch = (
            f", dq from gradients of scores kept in up to {DS_SCRATCH_BYTES >> 20} MB" if is_ahead and ds_scratch_schedule(problem) else ""
        )
        short_q = ", each program taking all queries of a head" if is_ahead and short_q_schedule(problem) else ""
        speed = _compare_rates("estimated", rates.backward)
        return f"{text}; backward {speed}{delegated}{_describe_widths(problem, widths)}{scratch}{short_q}"

    def cost(self, problem: Problem, target: Target, /) -> float:
        """Estimate seconds of both passes; with gradients, the forward is the faster of this backend's and `triton`'s split-KV kernel."""
        forward = forward_cost(problem, target)
        if not problem.needs_backward:
            return forward
        return min(forward, split_cost(problem, target)) + backward_cost(problem)

    def build(self, plan: Plan, /) -> Kernel:
        """Build the kernels of a plan; each is compiled at its first launch. Under an untested release of Triton they are checked first."""
        self_check.check(plan)
        from foci.backends.gpu.toolchain import prepare_compiler

        prepare_compiler(plan.target.arch)
        from foci.backends.hopper.kernel import build_kernel

        return build_kernel(plan)

    def kernel_key(self, plan: Plan, /) -> Plan:
        """The plan itself: schedules depend on lengths, and kernels on whether heads share keys."""
        return plan

    def row_kernels(self, target: Target, /) -> RowKernels | None:
        """The portable ones: they are bound by memory, so wgmma would not help."""
        return portable.row_kernels(target)


def _describe_widths(problem: Problem, widths: tuple[int, int]) -> str:
    dims = ("D", problem.head_dim, widths[0]), ("Dv", problem.value_dim, widths[1])
    return "".join(f", {words}" for words in (describe_width(*one) for one in dims) if words)


def _compare_rates(how: str, pair: Pair) -> str:
    return f"{how} at {pair.hopper / pair.triton:.2f}x triton's speed" if pair.hopper else "not measured"


BACKEND = HopperBackend()
