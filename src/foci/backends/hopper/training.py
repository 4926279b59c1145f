"""Kernel of a plan with gradients: chooses between this backend's passes and those of `triton`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foci.backends.contract import Given, Plan
from foci.backends.gpu.kernel import TritonKernel
from foci.backends.gpu.recorder import Recorder
from foci.backends.gpu.tile_tables import Sequences
from foci.backends.hopper.backward import HopperGradients
from foci.backends.hopper.kernel import HopperKernel
from foci.backends.hopper.kernel_rates import estimate_rates
from foci.backends.hopper.perf_model import takes_split
from foci.problem import Operands, Results

__all__ = ["TrainingKernel"]


class TrainingKernel(HopperKernel, HopperGradients):
    """Forward and backward of a plan.

    `takes_own`: this backend's kernels compute the backward, not `triton`'s. `takes_split`: `triton`'s split-KV kernel computes the
    forward, which is faster for short queries over many keys.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.takes_own = estimate_rates(self.problem).backward.is_ahead
        self.takes_split = takes_split(self.problem, plan.target)

    @property
    def can_precompile_backward(self) -> bool:
        """False if this backend's backward builds mask tables: those kernels run at once, not when they are compiled."""
        return self.is_prefix or not self.takes_own

    def _forward(self, operands: Operands, sequences: Sequences, recorder: Recorder) -> Results:
        kernel = TritonKernel if self.takes_split else HopperKernel
        return kernel._forward(self, operands, sequences, recorder)

    def _backward(
        self, operands: Operands, given: Given, sequences: Sequences, recorder: Recorder, flow: Any = None
    ) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
        kernel = HopperGradients if self.takes_own else TritonKernel
        return kernel._backward(self, operands, given, sequences, recorder, flow)
