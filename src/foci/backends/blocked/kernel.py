"""The kernel of a plan: the passes of this backend, which are imported with it."""

from __future__ import annotations

from dataclasses import dataclass

from foci.backends.blocked.backward import backward
from foci.backends.blocked.forward import forward, forward_single, is_single
from foci.backends.contract import Kernel
from foci.problem import Cotangents, Gradients, Operands, Problem, Results

__all__ = ["BlockedKernel"]


@dataclass(frozen=True)
class BlockedKernel(Kernel):
    problem: Problem
    may_be_single: bool

    def forward(self, operands: Operands, /) -> Results:
        if self.may_be_single and is_single(operands):
            return forward_single(operands, self.problem.formula)
        return forward(operands, self.problem.formula)

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        return backward(operands, self.problem, results, cotangents)
