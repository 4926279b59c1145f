"""The kernel of a plan: the portable passes, forward and backward."""

from __future__ import annotations

from foci.backends.contract import Plan
from foci.backends.gpu.kernel import GpuKernel
from foci.backends.gpu.passes import PassBuilder
from foci.backends.gpu.portable_passes import PortableBackward, PortableForward

__all__ = ["build_kernel"]


def build_kernel(plan: Plan) -> GpuKernel:
    """Build the kernel of a plan whose keys are not in pages."""
    builder = PassBuilder(plan)
    return GpuKernel(builder, PortableForward(builder), PortableBackward(builder))
