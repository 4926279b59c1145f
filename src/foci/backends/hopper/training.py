"""A plan with gradients made runnable."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foci.backends.contract import Given, Plan
from foci.backends.hopper.backward import HopperGradients
from foci.backends.hopper.costs import takes_split
from foci.backends.hopper.kernel import HopperKernel
from foci.backends.hopper.rates import rates_of
from foci.backends.triton.kernel import TritonKernel
from foci.backends.triton.recording import Recorder
from foci.backends.triton.sparsity import Sequences
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
        self.takes_own = rates_of(self.problem).backward.is_ahead
        self.takes_split = takes_split(self.problem, plan.target)

    @property
    def foresees(self) -> bool:
        """Not where tables of a mask are made by themselves."""
        return self.is_prefix or not self.takes_own

    def _forward(self, operands: Operands, sequences: Sequences, recorder: Recorder) -> Results:
        by = TritonKernel if self.takes_split else HopperKernel
        return by._forward(self, operands, sequences, recorder)

    def _backward(
        self, operands: Operands, given: Given, sequences: Sequences, recorder: Recorder, flow: Any = None
    ) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
        by = HopperGradients if self.takes_own else TritonKernel
        return by._backward(self, operands, given, sequences, recorder, flow)
