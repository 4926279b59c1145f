"""The kernel of a plan: for each pass this backend's kernels or the portable ones of `foci.backends.gpu`, whichever are faster."""

from __future__ import annotations

from foci.backends.contract import Plan
from foci.backends.gpu.kernel import BackwardPass, ForwardPass, GpuKernel
from foci.backends.gpu.passes import PassBuilder
from foci.backends.gpu.portable_passes import PortableBackward, PortableForward
from foci.backends.hopper.forward_pass import HopperForward
from foci.backends.hopper.kernel_rates import estimate_rates
from foci.backends.hopper.perf_model import takes_split

__all__ = ["build_kernel"]


def build_kernel(plan: Plan, *, own_backward: bool | None = None) -> GpuKernel:
    """Build the kernel of a plan. With gradients, the portable kernels compute a forward of short queries (split-KV), and a backward for
    which this backend has no faster kernel.

    Args:
        plan: what to compute, on what.
        own_backward: whether this backend computes the backward; None lets `kernel_rates` decide.
    """
    builder, problem = PassBuilder(plan), plan.problem
    portable_forward, portable_backward = PortableForward(builder), PortableBackward(builder)
    forward: ForwardPass = portable_forward
    backward: BackwardPass = portable_backward
    if not (problem.needs_backward and takes_split(problem, plan.target)):
        forward = HopperForward(builder, portable_forward)
    own_backward = estimate_rates(problem).backward.is_ahead if own_backward is None else own_backward
    if problem.needs_backward and own_backward:
        # importing the backward's kernels takes longer than the forward's: skip it without gradients
        from foci.backends.hopper.backward_pass import HopperBackward

        backward = HopperBackward(builder, portable_backward)
    return GpuKernel(builder, forward, backward)
