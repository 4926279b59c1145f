"""Operands in, results out: plans the problem, finds the kernel, runs it, tells the observers."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from foci import backends, cache_check
from foci.backends.contract import Backend, Given, Inputs, Kernel, Obstacle, Plan, Rejection, Unbuildable
from foci.backends.sequences import check_pages, check_spans, is_empty, without_keys
from foci.context import Call, observers
from foci.environment import Allowed, Environment, autocast_dtype
from foci.planner import Decision, NoViableBackend, choose, find_target
from foci.precompile_lengths import is_wanted, precompile_lengths
from foci.prepare import check_room
from foci.problem import (
    Cotangents,
    Formula,
    Gradients,
    Layout,
    Operands,
    OptionalTensors,
    Problem,
    Program,
    Results,
    bucket,
    is_aligned,
)
from foci.spec import Needs

__all__ = [
    "Chosen",
    "as_written",
    "cache_sizes",
    "choose_kernel",
    "decide",
    "launch_backward",
    "launch_forward",
    "run_backward",
    "run_forward",
]

_CAPACITY: Final = 2048
_Decided: TypeAlias = tuple[Decision, Kernel]
_plans: OrderedDict[Hashable, tuple[Any, Kernel]] = OrderedDict()
"""What was planned: decision and kernel by a problem and what else decides; backend and kernel by `kernel_key`, as many problems have one
kernel."""


def _make_problem(formula: Formula, operands: Operands, needs: Needs, environment: Environment) -> Problem:
    """The problem these operands pose."""
    query, key, value = operands.query, operands.key, operands.value
    jagged = formula.layout is Layout.JAGGED
    return Problem(
        formula=formula,
        dtype=query.dtype,
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        q_heads=query.shape[1],
        kv_heads=key.shape[1],
        batch=bucket(operands.cu_q.shape[0] - 1 if jagged and operands.cu_q is not None else query.shape[0]),
        q_len=bucket(operands.max_q if jagged else query.shape[2]),
        kv_len=bucket(key.shape[2] if formula.layout is Layout.DENSE else operands.max_kv),
        query_grad=needs[0],
        key_grad=needs[1],
        value_grad=needs[2],
        capture_grads=needs[3],
        deterministic=environment.deterministic,
        aligned=_is_aligned(query, key, value),
        tuned=environment.tuned,
    )


def _is_aligned(query: Tensor, key: Tensor, value: Tensor) -> bool:
    # the copy engine is a GPU's; elsewhere the question is not worth its time
    return not query.is_cuda or (is_aligned(query) and is_aligned(key) and is_aligned(value))


def decide(formula: Formula, operands: Operands, needs: Needs, environment: Environment) -> Decision:
    """The planner's decision on these operands; nothing runs."""
    return choose(_make_problem(formula, operands, needs, environment), find_target(operands.query.device), environment.allowed)


def _kernel(problem: Problem, device: torch.device, environment: Environment) -> _Decided:
    signature = (problem, device, environment.allowed, environment.registry)
    entry: _Decided | None = _plans.get(signature)
    if entry is None:
        entry = _built(choose(problem, find_target(device), environment.allowed))
        _keep(signature, entry)
    elif cache_check.ENABLED:
        # the planner is a pure function of the key, and of what a target says of the device
        rebuilt = {"problem": problem, "target": find_target(device)}
        cache_check.compare("the cache of decisions", vars(entry[0]), rebuilt)
    return entry


def _built(decision: Decision) -> tuple[Decision, Kernel]:
    """The kernel of the planner's choice; where it cannot be built here, of the next one. What is slower for want of something is said.

    Raises:
        NoViableBackend: if no backend accepts.
        Unbuildable: if none of those that accept can be built.
    """
    if decision.plan is None:
        raise NoViableBackend(decision)
    try:
        kernel = _compiled(decision)
    except Unbuildable as error:
        return _built(_instead(decision, error))
    taken = next(v.cost for v in decision.verdicts if v.backend == decision.plan.backend)
    for rejection in decision.rejections:
        obstacle = rejection.reason
        if isinstance(obstacle, Obstacle) and backends.load(rejection.backend).cost(decision.problem, decision.target) < taken:
            _warn(rejection.backend, obstacle, decision.plan)
    return decision, kernel


def _instead(decision: Decision, error: Unbuildable) -> Decision:
    """The decision among the other backends, once the chosen one's kernel could not be built."""
    assert decision.plan is not None
    name = decision.plan.backend
    other = decision.without(Rejection(name, error.obstacle))
    if other.plan is None:
        raise error
    _warn(name, error.obstacle, other.plan)
    return other


_warned: set[str] = set()


def _warn(backend: str, obstacle: Obstacle, plan: Plan) -> None:
    """Say why a backend does not run, once in a process for each topic."""
    if obstacle.topic not in _warned:
        _warned.add(obstacle.topic)
        instead = f"foci runs its backend {plan.backend!r} instead of {backend!r}, which would be faster"
        warnings.warn(f"{instead}: {obstacle}", stacklevel=2)


def _compiled(decision: Decision) -> Kernel:
    plan = decision.plan
    assert plan is not None
    backend = backends.load(plan.backend)
    key = plan.backend, backend.kernel_key(plan)
    entry: tuple[Backend, Kernel] | None = _plans.get(key)
    if entry is None or entry[0] is not backend:  # names may be given away again
        kernel = backend.build(plan)
        if Kernel not in type(kernel).__mro__:
            raise TypeError(f"{type(kernel).__name__}, of the backend {plan.backend!r}, does not derive from foci.backends.contract.Kernel")
        entry = backend, kernel
        _keep(key, entry)
    return entry[1]


def _keep(key: Hashable, entry: tuple[Any, Kernel]) -> None:
    _plans[key] = entry
    # The oldest entry goes: what is dropped is planned again, never run in another way.
    while len(_plans) > _CAPACITY:
        _plans.popitem(last=False)


def cache_sizes() -> dict[str, int]:
    """How many decisions and kernels are cached. Neither grows with exact lengths, values or re-created functions."""
    decisions = sum(isinstance(first, Decision) for first, _ in list(_plans.values()))
    return {"decisions": decisions, "kernels": len(_plans) - decisions}


def _tell(decision: Decision, *, backward: bool) -> None:
    plan = decision.plan
    assert plan is not None
    for log in observers():
        call = Call(decision.problem, plan.backend, decision.rejections)
        (log.backward_calls if backward else log.calls).append(call)


_UNCHANGED: Final = contextlib.nullcontext()


def as_written(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside, operations run in the dtypes they are given: autocast has had its say on the operands."""
    device = tensor.device.type
    return _UNCHANGED if autocast_dtype(device) is None else torch.autocast(device, enabled=False)


class Chosen(NamedTuple):
    """A formula with the gradients that are wanted, and what was decided to run it."""

    formula: Formula
    needs: Needs
    allowed: Allowed
    decision: Decision
    kernel: Kernel


def choose_kernel(formula: Formula, operands: Operands, needs: Needs, environment: Environment) -> Chosen:
    """The kernel of the backend that the planner takes for operands like these.

    Raises:
        NoViableBackend: if none accepts.
    """
    problem = _make_problem(formula, operands, needs, environment)
    return Chosen(formula, needs, environment.allowed, *_kernel(problem, operands.query.device, environment))


def run_forward(call: Chosen, operands: Operands) -> Results:
    """Attention of the operands."""
    if operands.cu_q is not None and operands.cu_q.device.type == "cpu":  # elsewhere one would have to wait for them
        check_spans(operands, warns=True)
    if operands.page_table is not None and operands.page_table.device.type == "cpu":
        check_pages(operands)
        if operands.captures and operands.kv_lengths is not None and operands.kv_lengths.numel():
            check_room(call.formula.variant, operands.captures, {"kv_idx": int(operands.kv_lengths.max())})
    if not is_empty(operands):
        results = _forward(call.decision, call.kernel, operands)
        if is_wanted(operands):
            target, allowed = call.decision.target, call.allowed
            precompile_lengths(call.decision.problem, operands, lambda problem: _built(choose(problem, target, allowed))[1])
        return results
    if observers():
        _tell(call.decision, backward=False)
    return without_keys(operands, call.formula.outputs)


def _forward(decision: Decision, kernel: Kernel, operands: Operands) -> Results:
    try:
        with as_written(operands.query):
            results = kernel.forward(operands)
    except Unbuildable as error:
        return _forward(*_built(_instead(decision, error)), operands)
    if observers():
        _tell(decision, backward=False)
    return results


def run_backward(call: Chosen, operands: Operands, results: Results, cotangents: Cotangents) -> Gradients:
    """Gradients of the operands that the call needs."""
    if operands.cu_q is not None and operands.cu_q.device.type == "cpu":  # numpy may have changed them since the forward
        check_spans(operands, warns=False)
    if not is_empty(operands):
        return _backward(call.decision, call.kernel, operands, results, cotangents)
    if observers():
        _tell(call.decision, backward=True)
    return _empty_gradients(operands, call.needs)


def _backward(decision: Decision, kernel: Kernel, operands: Operands, results: Results, cotangents: Cotangents) -> Gradients:
    try:
        with as_written(operands.query):
            gradients = kernel.backward(operands, results, cotangents)
    except Unbuildable as error:  # all backends have the same `out` and `lse`, so that another one goes on from here
        return _backward(*_built(_instead(decision, error)), operands, results, cotangents)
    if observers():
        _tell(decision, backward=True)
    return gradients


def launch_forward(call: Chosen, program: Program, tensors: Inputs, optional: OptionalTensors) -> list[Tensor] | None:
    """See `foci.backends.contract.Kernel`."""
    outputs = call.kernel.launch_forward(program, tensors, optional)
    if outputs is not None and observers():
        _tell(call.decision, backward=False)
    return outputs


def launch_backward(call: Chosen, program: Program, tensors: Inputs, optional: OptionalTensors, bwd_args: Given) -> list[Tensor] | None:
    """See `foci.backends.contract.Kernel`."""
    gradients = call.kernel.launch_backward(program, tensors, optional, bwd_args)
    if gradients is not None and observers():
        _tell(call.decision, backward=True)
    return gradients


def _empty_gradients(operands: Operands, needs: Needs) -> Gradients:
    return Gradients(
        query=torch.zeros_like(operands.query) if needs[0] else None,
        key=torch.zeros_like(operands.key) if needs[1] else None,
        value=torch.zeros_like(operands.value) if needs[2] else None,
        captures=tuple(torch.zeros_like(c) if need else None for c, need in zip(operands.captures, needs[3], strict=True)),
    )
