"""Any variant on the CPU as native code: hand-written C++ kernels around a small generated score and mask function.

Kernels are compiled by the system's C++ compiler when they are first needed and cached on disk (`foci.backends.cpu.build`).
"""

from __future__ import annotations

from typing import Final

import torch

from foci.backends.contract import Backend, CaptureFacts, Kernel, MachineFact, Obstacle, Plan
from foci.backends.cpu import build
from foci.backends.cpu.functor import ELEMENT_TYPES
from foci.backends.cpu.kernel import CpuKernel
from foci.backends.cpu.price import seconds_per_score
from foci.backends.cpu.source import backward_source, forward_source
from foci.backends.paged_gather import Gathered, jagged_plan
from foci.compat import releases
from foci.ir.emit import UnsupportedOperation
from foci.ir.expr import Expr
from foci.problem import Layout, Problem, Target

__all__ = ["BACKEND"]

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST_HEAD: Final = 4096
_LAUNCH: Final = 15e-6
_RATES: Final = {torch.float32: (200e9, 190e9), torch.float16: (200e9, 190e9), torch.bfloat16: (370e9, 390e9)}


class _Cpu(Backend):
    name = "cpu"

    def reject(self, problem: Problem, target: Target, /) -> str | None:
        """Why this backend declines a problem, or None."""
        if target.device != "cpu":
            return f"compiles for the CPU; the tensors are on {target.device}"
        if problem.dtype not in _DTYPES:
            return f"computes in float32; {problem.dtype} is left to the blocked and reference backends"
        if problem.formula.outputs.weights:
            return "never forms the weights; the blocked backend returns them"
        if max(problem.head_dim, problem.value_dim) > _LARGEST_HEAD:
            return f"head dimensions up to {_LARGEST_HEAD}; these are {problem.head_dim} and {problem.value_dim}"
        odd = [c.dtype for c in problem.variant.captures if c.dtype not in ELEMENT_TYPES]
        if odd:
            return f"reads captured tensors of real and integer dtypes; one is {odd[0]}"
        if "cxx" not in target.features:
            return _obstacle() or f"no C++ compiler on the target; install g++ {releases.OLDEST_GXX} or later"
        try:
            forward = forward_source(problem)
        except UnsupportedOperation as gap:
            return str(gap)
        missing = _obstacle()
        if missing is not None and build.is_kept(forward) and (not problem.needs_backward or build.is_kept(backward_source(problem))):
            return None
        return missing

    def features(self) -> frozenset[str]:
        """`cxx`, where there is a compiler or what one left in the cache."""
        return frozenset({"cxx"} if build.obstacle() is None or build.has_libraries() else ())

    def cost(self, problem: Problem, target: Target, /) -> float:
        """Seconds: the launch, and the flops (2.5 times as many backward) at measured rates per second of two Zen 4 cores.

        A mask halves the flops, as a causal one does: tiles in which nothing is attended to are skipped.
        """
        forward, backward = _RATES[problem.dtype]
        flops = problem.flops * (1.0 if problem.variant.mask.op == "const" else 0.5)
        return _LAUNCH + flops / forward + (2 * _LAUNCH + 2.5 * flops / backward if problem.needs_backward else 0.0)

    def seconds_per_score(self, score: Expr, facts: tuple[CaptureFacts, ...], target: Target, /, *, needs_backward: bool) -> float | None:
        """Seconds that a score function adds to each score on a CPU; None for another device."""
        return seconds_per_score(score, facts, needs_backward=needs_backward) if target.device == "cpu" else None

    def build(self, plan: Plan, /) -> Kernel:
        if plan.problem.formula.layout is Layout.PAGED:
            return Gathered(plan, CpuKernel(jagged_plan(plan)))
        return CpuKernel(plan)

    def facts(self) -> dict[str, MachineFact]:
        """Compiler, flags and cache."""
        toolchain, directory = build.toolchain(), build.cache_directory()
        if isinstance(toolchain, str):
            compiler = MachineFact(toolchain, releases.describe_gxx(""))
        else:
            compiler = MachineFact(f"{toolchain.path} ({toolchain.version})", releases.describe_gxx(toolchain.version))
        return {
            "compiler": compiler,
            "flags": MachineFact(" ".join(build.flags())),
            "cache": MachineFact("a temporary folder of each process" if directory is None else str(directory)),
        }


def _obstacle() -> Obstacle | None:
    """Why nothing can be compiled here, or None."""
    reason = build.obstacle()
    return None if reason is None else Obstacle(reason)


BACKEND = _Cpu()
