"""Attention in plain torch on any device, with memory linear in the lengths.

Queries are cut into tiles and keys into runs. Blocks without an attended position are skipped; full blocks are computed without the mask.
Gradients follow from the derivatives that `foci.ir.derivative` derives.
"""

from __future__ import annotations

import torch

from foci.backends.causal import is_causal
from foci.backends.contract import Backend, Kernel, Plan
from foci.backends.paged_gather import Gathered, jagged_plan
from foci.backends.sequences import shapeless_weights
from foci.ir.expr import const
from foci.problem import Formula, Layout, Outputs, Problem, Target

__all__ = ["BACKEND"]


class _Blocked(Backend):
    name = "blocked"

    def reject(self, problem: Problem, target: Target, /) -> str | None:
        return shapeless_weights(problem.formula)

    def cost(self, problem: Problem, target: Target, /) -> float:
        """Seconds: 50 us (300 us on an accelerator), a backward five times that, and flops at measured rates.

        Measured on 2 cores of AMD Zen 4 and estimated for an H200: forward 100 GFLOP/s and 20 TFLOP/s, half of that in
        float64, backward 2.5 times the flops. Causal attention has half of them; what other masks skip is unknown here.
        """
        overhead, rate = (50e-6, 1e11) if target.device == "cpu" else (300e-6, 2e13)
        flops = problem.flops * (0.5 if is_causal(problem.variant) else 1.0)
        seconds = flops / (rate / 2 if problem.dtype is torch.float64 else rate)
        return overhead + seconds + (5 * overhead + 2.5 * seconds if problem.needs_backward else 0.0)

    def build(self, plan: Plan, /) -> Kernel:
        if plan.problem.formula.layout is Layout.PAGED:
            return Gathered(plan, self.build(jagged_plan(plan)))
        from foci.backends.blocked.kernel import BlockedKernel

        formula = plan.problem.formula
        simple = Formula(formula.variant, outputs=Outputs(lse=formula.outputs.lse))
        return BlockedKernel(plan.problem, formula == simple and formula.variant.mask is not const(False))


BACKEND = _Blocked()
