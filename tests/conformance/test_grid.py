"""Every score kind with every mask kind, however it is given, by every name, in every layout, forward and backward, on every backend."""

from __future__ import annotations

import contextlib

import torch
from budget import check
from dense_reference import Dense, attend
from grid import CHEAP, DEVICE, GRAPH_NAMES, eager_product, point_id, point_of, table
from grid_calls import arguments, compiled, learns, make_call, make_turn, tokens_of
from grid_functions import MASKS, SCORES, Position

import foci


def references(point, turn, seed):
    """Results of the dense reference: in the point's dtype, in float64, and of the terms that gradients are sums of."""
    ways = ((point.dtype, False), (torch.float64, False), (torch.float64, True))
    plain, exact, terms = (differentiate(*dense(point, turn, seed, dtype, detaches_lse=flag)) for dtype, flag in ways)
    if point.sink:  # its gradient is one of the normalizer alone: the sum over tokens of weight * (gradient of out . out)
        products = (cotangent(exact["out"]) * exact["out"]).sum(-1).abs()
        terms["gradient of sink"] = (products + (cotangent(exact["lse"]).abs() if point.lse else 0.0)).sum(0)
    return plain, exact, terms


def dense(point, turn, seed, dtype, *, detaches_lse):
    """The reference's outputs by name, and the leaves that learn."""
    is_exact = dtype == torch.float64
    leaves = {name: (t.double() if is_exact else t).detach().clone().requires_grad_(learns(point, name)) for name, t in turn.leaves.items()}
    captured = {**leaves, **turn.fixed}
    kind, score = MASKS[point.mask], SCORES[point.score]

    def attends(b, h, i, j, q_len, kv_len):
        return kind.attends(Position(b, h, i, j, lambda: q_len, lambda: kv_len), captured, turn.numbers)

    problem = Dense(
        turn.lengths, score.make(captured, turn.numbers), attends, turn.numbers.scale,
        added=None if kind.added is None else captured[kind.added], sink=captured.get("sink"), dropout_p=point.dropout, seed=seed,
        detaches_lse=detaches_lse,
    )  # fmt: skip
    out, lse = attend(problem, leaves["query"], leaves["key"], leaves["value"])
    return {"out": out, "lse": lse}, {name: t for name, t in leaves.items() if t.requires_grad}, ("out", "lse") if point.lse else ("out",)


def differentiate(outputs, leaves, flowing):
    """Outputs by name, and gradients by "gradient of NAME"; `flowing` names the outputs that gradients flow into."""
    results = {name: t.detach() for name, t in outputs.items()}
    if leaves:
        roots = [outputs[name] for name in flowing]
        cotangents = [cotangent(t) for t in roots]
        gradients = torch.autograd.grad(roots, list(leaves.values()), cotangents, allow_unused=True, materialize_grads=True)
        results |= {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}
    return results


def cotangent(output):
    """The gradient that flows into an output, the same for each shape."""
    generator = torch.Generator().manual_seed(output.dim())
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)


def ours(point, call, turn):
    """Outputs and gradients of foci's call, and the seed of its dropout."""
    leaves = {name: t.detach().clone().requires_grad_(learns(point, name)) for name, t in turn.leaves.items()}
    q, k, v, inputs = arguments(point, turn._replace(leaves=leaves))
    torch.manual_seed(5)
    result = call(q, k, v, inputs, turn.numbers)
    torch.manual_seed(5)
    seed = torch.randint(0, 2**63 - 1, (1,), device=DEVICE)
    out, lse = tokens_of(point, result)
    outputs = {"out": out} if lse is None else {"out": out, "lse": lse}
    return differentiate(outputs, {name: t for name, t in leaves.items() if t.requires_grad}, tuple(outputs)), seed


@contextlib.contextmanager
def surroundings(point):
    """What stands around a call: the backend it is bound to, foci.patch(), and torch.compile's options."""
    with contextlib.ExitStack() as stack:
        if point.backend is not None:
            stack.enter_context(foci.use(point.backend))
        if point.name.startswith("patched"):
            stack.enter_context(foci.patch())
        if point.way in ("inductor", "foci"):  # no graph of an earlier version from the disk; dropout by torch's own generator
            stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False, fallback_random=True))
            stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        stack.enter_context(torch.set_grad_enabled(point.learns != "nothing"))
        yield


PARTS = {"query": "query", "key": "key", "value": "value"}  # names that the budget has factors for


def share(point, part):
    """By how much the terms of a gradient count. Those of captures are float32 sums over rows whose normalizers, dO . O, come from outputs in
    half precision: the whole rounding of that dtype, of which the budget counts a sixteenth."""
    return 16 if part not in PARTS and point.dtype in (torch.float16, torch.bfloat16) else 1


def check_point(point):
    with surroundings(point), foci.observe() as log:
        call = compiled(point, make_call(point))
        for number in range(3):
            turn = make_turn(point, number)
            actual, seed = ours(point, call, turn)
            plain, exact, terms = references(point, turn, seed)
            for name, tensor in actual.items():
                part = name.removeprefix("gradient of ")
                if part == name:
                    check(name, point.dtype, tensor, plain[name], exact[name])
                else:
                    check(
                        PARTS.get(part, "captures"),
                        point.dtype,
                        tensor,
                        plain[name],
                        exact[name],
                        exact["lse"],
                        terms[name] * share(point, part),
                    )
    calls = [c.backend for c in log.calls]
    assert point.name in GRAPH_NAMES or len(calls) == 3
    assert point.backend is None or set(calls) <= {point.backend}


def pytest_generate_tests(metafunc):
    """Rows that hold every pair; where all cases are asked for, the whole eager product as well."""
    rows = table().cover(0, CHEAP)[0]
    if metafunc.config.getoption("--sample") == 1:
        rows += eager_product()
    points = dict.fromkeys(point_of(row) for row in rows)
    metafunc.parametrize("point", list(points), ids=point_id)


# SDPA-06, SDPA-08, SDPA-11, SDPA-20, FLEX-01, FLEX-02, FLEX-03, FLEX-04, FLEX-09, FLEX-13, JAG-01, JAG-04, ECO-01
def test_point(point):
    check_point(point)
