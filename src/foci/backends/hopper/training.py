"""A plan with gradients made runnable."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foci.backends.contract import Given, Plan
from foci.backends.hopper.backward import HopperGradients
from foci.backends.hopper.kernel import HopperKernel
from foci.backends.hopper.kernel_rates import estimate_rates
from foci.backends.hopper.perf_model import takes_split
from foci.backends.triton.kernel import TritonKernel
from foci.backends.triton.recorder import Recorder
from foci.backends.triton.tile_tables import Sequences
from foci.problem import Operands, Results

__all__ = ["TrainingKernel"]


class TrainingKernel(HopperKernel, HopperGradients):
    """Forward and backward of a plan. A forward of few queries over many keys is that of `triton`, which splits keys, where that is sooner
    done.

    `takes_own`: whether the backward is by kernels of this backend, and not by those of `triton`. `takes_split`: whether the forward is by
    those, as `explain` says.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.takes_own = estimate_rates(self.problem).backward.is_ahead
        self.takes_split = takes_split(self.problem, plan.target)

    @property
    def can_precompile_backward(self) -> bool:
        """False where the backward kernels of this backend build tables of the mask, which would run at once."""
        return self.is_prefix or not self.takes_own

    def _forward(self, operands: Operands, sequences: Sequences, recorder: Recorder) -> Results:
        by = TritonKernel if self.takes_split else HopperKernel
        return by._forward(self, operands, sequences, recorder)

    def _backward(
        self, operands: Operands, given: Given, sequences: Sequences, recorder: Recorder, flow: Any = None
    ) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
        by = HopperGradients if self.takes_own else TritonKernel
        return by._backward(self, operands, given, sequences, recorder, flow)
