"""Every backend on every problem it claims: forward and all gradients, against the formula in float64.

A new backend joins by its row in `foci.backends`; a new example by its entry in `foci.masks` or `foci.scores`.
"""

from __future__ import annotations

import functools
from dataclasses import fields, replace

import pytest
import torch
from budget import check, plain
from cases import Case, all_cases, cotangents, operands, problem

from foci import backends
from foci.backends.contract import Plan
from foci.backends.reference import formula as exact_formula
from foci.planner import find_target
from foci.problem import Cotangents, Gradients, Operands, Results

CASES = all_cases()
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def claimed() -> list:
    """Backend, case and device of everything that a backend claims."""
    params = []
    for device in DEVICES:
        target = find_target(torch.device(device))
        marks = [pytest.mark.gpu] if device == "cuda" else []
        for case in CASES:
            asked = problem(case, device)
            takers = [name for name in backends.names() if backends.load(name).reject(asked, target) is None]
            params += [pytest.param(name, case, device, id=f"{name}-{case.id}-{device}", marks=marks) for name in takers]
    return params


def in_float64(arguments: Operands) -> Operands:
    def wide(t):
        return t.double() if t.is_floating_point() else t

    return replace(
        arguments,
        query=wide(arguments.query),
        key=wide(arguments.key),
        value=wide(arguments.value),
        captures=tuple(map(wide, arguments.captures)),
    )


def differentiate(function, arguments: Operands, asked, case: Case) -> tuple[Results, Gradients]:
    """Results of a differentiable formula, and its gradients by autograd."""
    wanted = (asked.query_grad, asked.key_grad, asked.value_grad, *asked.capture_grads)
    inputs = [
        t.detach().requires_grad_(on) for t, on in zip((arguments.query, arguments.key, arguments.value, *arguments.captures), wanted)
    ]
    results = function(replace(arguments, query=inputs[0], key=inputs[1], value=inputs[2], captures=tuple(inputs[3:])), asked.formula)
    flowing = cotangents(case, results)
    pairs = [(getattr(results, f.name), getattr(flowing, f.name)) for f in fields(Cotangents)]
    pairs = [(output, g) for output, g in pairs if g is not None and output.requires_grad]
    leaves = [t for t in inputs if t.requires_grad]
    if pairs:
        grads = iter(torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs], materialize_grads=True))
    else:
        grads = iter([torch.zeros_like(leaf) for leaf in leaves])
    gradients = [next(grads) if t.requires_grad else None for t in inputs]
    return detached(results), Gradients(*gradients[:3], tuple(gradients[3:]))


def detached(results: Results) -> Results:
    return Results(*(None if t is None else t.detach() for t in vars(results).values()))


@functools.lru_cache(maxsize=2)
def expected(case: Case, device: str):
    """Plain and exact results and gradients of a case."""
    asked, arguments = problem(case, device), operands(case, device)
    return differentiate(plain, arguments, asked, case), differentiate(exact_formula, in_float64(arguments), asked, case)


def ran(name: str, case: Case, device: str) -> tuple[Results, Gradients]:
    asked, arguments = problem(case, device), operands(case, device)
    kernel = backends.load(name).build(Plan(name, asked, find_target(torch.device(device))))
    results = kernel.forward(arguments)
    if not asked.needs_backward:
        return results, Gradients(None, None, None)
    return results, kernel.backward(arguments, Results(results.out, results.lse), cotangents(case, results))


# SDPA-06, SDPA-07, SDPA-08, SDPA-09, SDPA-10, SDPA-11, SDPA-12, SDPA-13, SDPA-14, SDPA-19, SDPA-20
# FLEX-03, FLEX-04, FLEX-07, FLEX-14, JAG-04, JAG-06
@pytest.mark.parametrize("name, case, device", claimed())
def test_forward_and_gradients(name, case, device):
    arguments, outputs = operands(case, device), case.outputs
    results, gradients = ran(name, case, device)
    (plain_results, plain_gradients), (exact_results, exact_gradients) = expected(case, device)

    assert results.out.dtype == case.dtype
    heads_in_rows = arguments.query.stride(1) < arguments.query.stride(2)
    assert (results.out.transpose(1, 2) if heads_in_rows else results.out).is_contiguous()
    assert results.lse.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    for field in fields(Results):
        actual = getattr(results, field.name)
        if field.name in ("out", "lse") or getattr(outputs, field.name):
            check(field.name, case.dtype, actual, getattr(plain_results, field.name), getattr(exact_results, field.name))
        else:
            assert actual is None
    for part in ("query", "key", "value"):
        actual, exact = getattr(gradients, part), getattr(exact_gradients, part)
        assert (actual is None) == (exact is None)
        if exact is not None:
            assert actual.dtype == getattr(arguments, part).dtype
            check(part, case.dtype, actual, getattr(plain_gradients, part), exact, exact_results.lse)
    for actual, unfused, exact in zip(gradients.captures, plain_gradients.captures, exact_gradients.captures, strict=False):
        assert (actual is None) == (exact is None)
        if exact is not None:
            check("captures", case.dtype, actual, unfused, exact, exact_results.lse)


# SDPA-16, FLEX-04
@pytest.mark.parametrize("name, case, device", [p for p in claimed() if "large" in p.id or "jagged" in p.id])
def test_repeats_bit_for_bit(name, case, device):
    if case.dtype == torch.float64:
        pytest.skip("the same code as float32")
    (first, gradients), (second, again) = ran(name, case, device), ran(name, case, device)
    pairs = [*zip(vars(first).values(), vars(second).values()), (gradients.query, again.query), (gradients.key, again.key)]
    for a, b in [*pairs, (gradients.value, again.value), *zip(gradients.captures, again.captures)]:
        assert (a is None and b is None) or torch.equal(a.nan_to_num(), b.nan_to_num())


# FLEX-07
@pytest.mark.parametrize("name", ["reference", "blocked"])
def test_takes_every_case(name):
    refused = [case.id for case in CASES if backends.load(name).reject(problem(case, "cpu"), find_target(torch.device("cpu"))) is not None]
    assert refused == []


def test_aten_takes_plain_and_causal():
    taken = {case.name for case in CASES if backends.load("aten").reject(problem(case, "cpu"), find_target(torch.device("cpu"))) is None}
    assert {"plain-square", "causal-wide", "causal-large", "memory-transposed", "no-keys"} <= taken
    assert not any(name.startswith(("captured", "dropout", "blocks", "empty")) for name in taken)
