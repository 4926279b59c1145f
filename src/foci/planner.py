"""Which backend solves a problem, and why the others do not. Pure: no tensors, no device."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from foci import backends
from foci.backends.contract import CaptureFacts, Plan, Rejection
from foci.backends.row_kernels import RowKernels
from foci.ir.expr import Expr
from foci.problem import Problem, Target

__all__ = ["Decision", "NoViableBackend", "Verdict", "choose", "find_target", "plan_for", "row_kernels", "seconds_per_score"]


@dataclass(frozen=True)
class Verdict:
    """One backend's answer to a problem: a reason to decline, or a cost in seconds, and how it would go about it."""

    backend: str
    reason: str | None
    cost: float = float("inf")
    note: str = ""


@dataclass(frozen=True)
class Decision:
    """The planner's answer: a plan if any backend accepts, and every verdict, in the registry's order."""

    problem: Problem
    target: Target
    plan: Plan | None
    verdicts: tuple[Verdict, ...]

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The backends that declined, with their reasons."""
        return tuple(Rejection(v.backend, v.reason) for v in self.verdicts if v.reason is not None)

    def without(self, other: Rejection) -> Decision:
        """The decision where one more backend declines."""
        verdicts = [Verdict(other.backend, other.reason) if v.backend == other.backend else v for v in self.verdicts]
        return _decision(self.problem, self.target, verdicts)

    def table(self) -> str:
        """One line per backend: chosen, accepted with its cost, or its reason to decline."""
        width = max((len(v.backend) for v in self.verdicts), default=0)
        lines = []
        for verdict in self.verdicts:
            if verdict.reason is not None:
                said = f"no: {verdict.reason}"
            elif self.plan is not None and verdict.backend == self.plan.backend:
                said = f"chosen, about {_seconds(verdict.cost)}"
            else:
                said = f"possible, about {_seconds(verdict.cost)}"
            said += f": {verdict.note}" if verdict.note else ""
            lines.append(f"  {verdict.backend:<{width}}  {said}")
        return "\n".join(lines)


class NoViableBackend(RuntimeError):
    """No backend accepts the problem. The message holds each one's reason; `decision` holds all of it."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(f"no viable backend for this attention:\n{decision.table()}")
        self.decision = decision

    def __reduce__(self) -> tuple[type[NoViableBackend], tuple[Decision]]:
        return NoViableBackend, (self.decision,)  # an exception is pickled by its message otherwise, for other processes


def choose(problem: Problem, target: Target, allowed: Iterable[str] | None = None) -> Decision:
    """Asks every backend and takes the cheapest that accepts; the registry's order decides ties.

    Args:
        problem: what is asked.
        target: the device it is asked of; need not exist here.
        allowed: names of the backends to consider, all by default.

    Raises:
        ValueError: for a name in `allowed` that no backend has.
    """
    wanted = None if allowed is None else tuple(allowed)
    for name in wanted or ():
        backends.load(name)
    return _decision(problem, target, [_ask(name, problem, target, wanted) for name in backends.names()])


def _decision(problem: Problem, target: Target, verdicts: list[Verdict]) -> Decision:
    best = min((v for v in verdicts if v.reason is None), key=lambda v: v.cost, default=None)
    plan = None if best is None else Plan(best.backend, problem, target)
    return Decision(problem, target, plan, tuple(verdicts))


def _ask(name: str, problem: Problem, target: Target, allowed: tuple[str, ...] | None) -> Verdict:
    if allowed is not None and name not in allowed:
        return Verdict(name, f"only {', '.join(allowed)} may be used here" if allowed else "no backend may be used here")
    only = backends.only_device(name)
    if only not in (None, target.device):
        return Verdict(name, f"needs tensors on {only}, not on {target.device}")
    backend = backends.load(name)
    reason = backend.reject(problem, target)
    if reason is not None:
        return Verdict(name, reason)
    return Verdict(name, None, backend.cost(problem, target), backend.note(problem, target))


@backends.remembered
def row_kernels(device: torch.device, allowed: tuple[str, ...] | None = None) -> RowKernels | None:
    """Kernels for what a layer computes between its products: of the first backend, in the registry's order, that has them for a device.

    Args:
        device: where the layer runs.
        allowed: names of the backends to consider, all by default.
    """
    target = find_target(device)
    considered = (backends.load(name) for name in backends.names_on(device.type) if allowed is None or name in allowed)
    return next((kernels for one in considered if (kernels := one.row_kernels(target)) is not None), None)


def seconds_per_score(score: Expr, facts: tuple[CaptureFacts, ...], target: Target, *, needs_backward: bool) -> float | None:
    """Return what a score function adds to the cost of each score on a target, by the first backend that knows; None where it does not
    matter.

    Args:
        score: the function.
        facts: of each captured tensor, by slot.
        target: where it would run.
        needs_backward: whether gradients are wanted.
    """
    for one in map(backends.load, backends.names_on(target.device)):
        price = one.seconds_per_score(score, facts, target, needs_backward=needs_backward)
        if price is not None:
            return price
    return None


def _seconds(cost: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if cost >= size:
            return f"{cost / size:.3g} {unit}"
    return f"{cost / 1e-9:.3g} ns"


def find_target(device: torch.device) -> Target:
    """The target a tensor's device is: kind, compute capability, features.

    CPU features are the instruction sets torch reports (`torch.backends.cpu.get_cpu_capability`) and what backends find here, `cxx` of a
    C++ compiler; CUDA features hold `triton` and, say, `triton-3.6` where it is installed.
    """
    target = _targets.get(device)
    if target is None:
        target = _inspect(device)
        if device.type != "cpu":  # what is there for it to build with may come and go
            _targets[device] = target
    return target


def plan_for(device: torch.device, target: Target) -> None:
    """Plan calls on a device for another target from now on: for what compiles kernels for a GPU that is not there."""
    _targets[device] = target


_targets: dict[torch.device, Target] = {}


def _triton() -> set[str]:
    """`triton`, and `triton-3.6` for a release 3.6.0, where it is installed."""
    if importlib.util.find_spec("triton") is None:
        return set()
    release = importlib.metadata.version("triton").split(".")
    return {"triton", f"triton-{'.'.join(release[:2])}"}


def _inspect(device: torch.device) -> Target:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return Target("cuda", 10 * major + minor, frozenset(_triton()))
    if device.type == "cpu":
        features = {torch.backends.cpu.get_cpu_capability().lower()}
        return Target("cpu", 0, frozenset(features.union(*(backends.load(name).features() for name in backends.names_on(device.type)))))
    return Target(device.type)
