"""Any variant as fused GPU kernels, for NVIDIA devices from sm_80 on, written in Triton: the portable kernels of `foci.backends.gpu`.

Triton is imported when the first plan is compiled, so that planning works where it is not installed.
"""

from __future__ import annotations

from foci.backends import self_check
from foci.backends.contract import Backend, Kernel, MachineFact, Plan
from foci.backends.gpu import portable
from foci.backends.gpu.architectures import describe_schedules
from foci.backends.row_kernels import RowKernels
from foci.problem import Layout, Problem, Target

__all__ = ["BACKEND", "TritonBackend"]


class TritonBackend(Backend):
    """Fused attention in Triton."""

    name = "triton"

    def reject(self, problem: Problem, target: Target, /) -> str | None:
        """Why not, or None."""
        return portable.reject(problem, target) or self_check.find_failure(self.name, problem, target)

    def note(self, problem: Problem, target: Target, /) -> str:
        """Whose schedules the kernels take, and whether keys are split."""
        split = (
            "short queries: split-KV (Flash-Decoding), then a kernel that combines the splits"
            if portable.splits_keys(problem, target)
            else ""
        )
        foreign = describe_schedules(target.arch) if target.device == "cuda" else ""
        return "; ".join(part for part in (self_check.describe_check(target).removesuffix("; "), foreign, split) if part)

    def cost(self, problem: Problem, target: Target, /) -> float:
        """See `portable.estimate_cost`."""
        return portable.estimate_cost(problem, target)

    def build(self, plan: Plan, /) -> Kernel:
        """Kernels of a plan. Triton compiles each when it is first launched; under a release that foci was not tested with, their kind is
        checked first."""
        self_check.check(plan)
        if plan.target.device == "cuda":
            from foci.backends.gpu.toolchain import prepare_compiler

            prepare_compiler(plan.target.arch)
        from foci.backends.triton.kernel import build_kernel
        from foci.backends.triton.paged import PagedKernel
        from foci.backends.triton.tuning import TunedKernel

        if plan.problem.formula.layout is Layout.PAGED:
            return PagedKernel(plan)
        if plan.problem.tuned and not self_check.is_needed(plan.target):  # a check is of the kernels' usual schedules
            return TunedKernel(plan, build_kernel)
        return build_kernel(plan)

    def facts(self) -> dict[str, MachineFact]:
        """Whether the environment turned the self-check off."""
        return {} if self_check.ENABLED else {"self-check": MachineFact("off (FOCI_SELF_CHECK=0)")}

    def row_kernels(self, target: Target, /) -> RowKernels | None:
        """See `portable.row_kernels`."""
        return portable.row_kernels(target)


BACKEND = TritonBackend()
