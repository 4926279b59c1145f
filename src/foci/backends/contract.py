"""What a backend is: a reason to decline, a cost, and a way to make a kernel of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from foci.problem import Cotangents, Gradients, Operands, Problem, Results, Target

__all__ = ["Backend", "Kernel", "Noted", "Plan", "Rejection"]


@dataclass(frozen=True)
class Plan:
    """A problem given to a backend. `text` is canonical: the key of every kernel cache, in memory and on disk."""

    backend: str
    problem: Problem
    target: Target

    @property
    def text(self) -> str:
        p = self.problem
        grads = "".join(letter for letter, on in zip("qkv", (p.query_grad, p.key_grad, p.value_grad), strict=True) if on)
        captures = "".join(str(int(on)) for on in p.capture_grads)
        tuned = ";tuned" if p.tuned else ""
        return (
            f"backend={self.backend};device={self.target.device};arch={self.target.arch};dtype={p.dtype};"
            f"D={p.head_dim};Dv={p.value_dim};grads={grads}:{captures}{tuned}\n{p.formula.text}"
        )


@dataclass(frozen=True)
class Rejection:
    """A backend that cannot take a problem, and why, in words a user can act on."""

    backend: str
    reason: str


class Kernel(Protocol):
    """A plan made runnable. Pure: the same operands give the same bits."""

    def forward(self, operands: Operands, /) -> Results:
        """Attention of the operands."""
        ...

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        """Gradients of the operands; `results` holds `out` and `lse` of the forward."""
        ...


class Backend(Protocol):
    """One way to compute attention. Register with `foci.register_backend`."""

    name: str

    def reject(self, problem: Problem, target: Target, /) -> str | None:
        """Why this backend cannot solve the problem on the target, or None if it can. Pure: no tensors, no device."""
        ...

    def cost(self, problem: Problem, target: Target, /) -> float:
        """Estimated seconds of a call; the planner takes the least."""
        ...

    def compile(self, plan: Plan, /) -> Kernel:
        """A kernel for every problem with this plan's text."""
        ...


@runtime_checkable
class Noted(Protocol):
    """A backend that says which of its kernels it would take, and why; `explain` prints it."""

    def note(self, problem: Problem, target: Target, /) -> str:
        """In a few words."""
        ...
