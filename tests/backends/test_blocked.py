"""What the blocked backend promises beyond its results: memory, skipping, derivatives of any order, many heads."""

from __future__ import annotations

import pytest
import torch

from foci import backends
from foci.backends.blocked import tiles
from foci.backends.blocked.differentiable import differentiable
from foci.backends.contract import Plan
from foci.backends.reference import formula as reference
from foci.backends.sequences import Sequence
from foci.blocks import EMPTY, FULL, PARTIAL
from foci.ir import eager
from foci.problem import Cotangents, Formula, Operands, Outputs, Problem, Results, Target, bucket
from foci.trace_functions import bind

EVERYTHING = Outputs(lse=True, row_max=True, column_sums=True, weights=True)
CPU = Target("cpu")


def causal(b, h, q, kv):
    return q >= kv


def window(b, h, q, kv):
    return (q >= kv) & (q - kv < 200)


def call(shapes, score=None, mask=None, outputs=Outputs(), dtype=torch.float32):  # noqa: B008
    B, Hq, Hkv, Sq, Skv, D = shapes
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=generator).to(dtype) for s in ((B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, D))]
    bound = bind(score, mask, torch.device("cpu"))
    asked = Formula(bound.variant, outputs=outputs)
    operands = Operands(*inputs, bound.captures, bound.ints, bound.floats, D**-0.5)
    problem = Problem(asked, dtype, D, D, Hq, Hkv, bucket(B), bucket(Sq), bucket(Skv), True, True, True)
    return operands, problem, backends.load("blocked").build(Plan("blocked", problem, CPU))


def peak(function) -> int:
    """Most bytes allocated at a time while the function runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


# FLEX-05
@pytest.mark.parametrize("mask", [None, causal, window])
def test_memory_is_linear_in_the_lengths(mask):
    used = []
    for length in (1024, 4096):
        operands, _, kernel = call((1, 1, 1, length, length, 8), mask=mask)
        flowing = Cotangents(torch.ones(1, 1, length, 8))

        def both():
            results = kernel.forward(operands)
            kernel.backward(operands, results, flowing)

        used.append(peak(both))
    assert used[1] < 4096 * 4096 * 4 / 2  # half of one S x S matrix
    assert used[1] <= 4.5 * used[0]


# SDPA-19
def test_sums_of_columns_need_no_matrix_of_weights():
    asked = Outputs(lse=True, row_max=True, column_sums=True)
    operands, _, kernel = call((1, 1, 1, 4096, 4096, 8), mask=causal, outputs=asked)

    def both():
        results = kernel.forward(operands)
        kernel.backward(operands, results, Cotangents(results.out, column_sums=results.column_sums))

    assert peak(both) < 4096 * 4096 * 4 / 2  # half of one S x S matrix


def test_measures_memory():
    assert peak(lambda: torch.zeros(1 << 20)) >= 4 << 20


# FLEX-05
def test_skips_empty_blocks_and_masks_only_partial_ones(monkeypatch):
    operands, _, kernel = call((1, 2, 2, 4096, 4096, 8), mask=window)
    evaluated = []

    def counting(exprs, env):
        values = eager.evaluate(exprs, env)
        evaluated.append(sum(value.numel() for value in values))
        return values

    monkeypatch.setattr("foci.backends.blocked.scores.evaluate", counting)
    kernel.forward(operands)
    assert 0 < sum(evaluated) < 0.2 * 4096 * 4096
    bound = bind(None, window, torch.device("cpu"))
    classes = tiles.block_classes(operands, Formula(bound.variant), [Sequence(None, (0, 4096), (0, 4096))])
    (chunk,) = tiles.plan_chunks(operands, Sequence(None, (0, 4096), (0, 4096)), classes)
    computed = sum((run.stop - run.start) * (tile.stop - tile.start) for tile in chunk.tiles for run in tile.runs)
    assert computed < 0.2 * 4096 * 4096
    monkeypatch.undo()
    evaluated.clear()
    operands, _, kernel = call((1, 2, 2, 4096, 4096, 8), mask=causal)
    monkeypatch.setattr("foci.backends.blocked.scores.evaluate", counting)
    kernel.forward(operands)
    assert 0 < sum(evaluated) < 0.2 * 4096 * 4096


def test_runs_cover_what_is_needed_once():
    generator = torch.Generator().manual_seed(1)
    classes = torch.randint(0, 3, (1, 1, 3, 9), generator=generator, dtype=torch.int8)
    operands, _, _ = call((1, 1, 1, 600, 1100, 8))
    (chunk,) = tiles.plan_chunks(operands, Sequence(None, (0, 600), (0, 1100)), classes)
    assert [(t.start, t.stop) for t in chunk.tiles] == [(0, 256), (256, 512), (512, 600)]
    for tile, row in zip(chunk.tiles, classes[0, 0]):
        seen = torch.zeros(1100, dtype=torch.int)
        for run in tile.runs:
            seen[run.start : run.stop] += 1
            kinds = row[torch.arange(run.start, run.stop) // 128]
            assert run.masked or (kinds == FULL).all()
        expected = row[torch.arange(1100) // 128] != EMPTY
        assert torch.equal(seen, expected.int())


def test_batch_entries_that_differ_are_computed_apart():
    classes = torch.full((2, 1, 8, 16), EMPTY, dtype=torch.int8)
    classes[0, :, :, :2] = FULL
    classes[1, :, :, 14:] = PARTIAL
    operands, _, _ = call((2, 1, 1, 2048, 2048, 8))
    chunks = tiles.plan_chunks(operands, Sequence(None, (0, 2048), (0, 2048)), classes)
    assert [chunk.b for chunk in chunks] == [(0, 1), (1, 2)]
    assert [(run.start, run.stop, run.masked) for run in chunks[0].tiles[0].runs] == [(0, 256, False)]


# SDPA-13
def test_more_heads_than_a_grid_holds():
    operands, problem, kernel = call((70000, 1, 1, 2, 3, 4), mask=causal)
    results = kernel.forward(operands)
    gradients = kernel.backward(operands, results, Cotangents(torch.ones_like(results.out)))
    exact = reference(operands, problem.formula)
    torch.testing.assert_close(results.out, exact.out)
    assert gradients.key.shape == (70000, 1, 3, 4)
    assert torch.equal(gradients.key[:, :, 2], torch.zeros(70000, 1, 4))  # no query sees the last key


@pytest.mark.parametrize("score", [None, lambda s, b, h, q, kv: torch.tanh(s) + 0.01 * (q - kv)])
@pytest.mark.parametrize("shapes", [(2, 4, 2, 9, 11, 4), (1, 2, 1, 300, 270, 4)])
def test_differentiable_formula_equals_the_reference(score, shapes):
    operands, problem, _ = call(shapes, score, lambda b, h, q, kv: (q >= kv) & (q % 5 != 1), EVERYTHING, torch.float64)
    actual, exact = differentiable(operands, problem.formula), reference(operands, problem.formula)
    for a, b in zip(vars(actual).values(), vars(exact).values()):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert actual.out.is_contiguous()  # as the query is

    def out(function):
        return lambda q, k, v: (lambda r: (r.out, r.weights, r.column_sums))(
            function(Operands(q, k, v, operands.captures, operands.ints, operands.floats, operands.scale), problem.formula)
        )

    inputs = (operands.query, operands.key, operands.value)
    tangents = tuple(torch.randn_like(t) for t in inputs)
    for a, b in zip(torch.func.jvp(out(differentiable), inputs, tangents)[1], torch.func.jvp(out(reference), inputs, tangents)[1]):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)

    def second(function):
        leaves = [t.detach().requires_grad_() for t in inputs]
        first = torch.autograd.grad(sum((r * r).sum() for r in out(function)(*leaves)), leaves, create_graph=True)
        return torch.autograd.grad(sum((g * t).sum() for g, t in zip(first, tangents)), leaves)

    for a, b in zip(second(differentiable), second(reference)):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_differentiable_formula_under_vmap_and_gradcheck():
    operands, problem, _ = call((1, 2, 1, 5, 6, 3), lambda s, b, h, q, kv: s * s, causal, Outputs(lse=True), torch.float64)

    def both(q, k, v):
        results = differentiable(Operands(q, k, v, (), operands.ints, operands.floats, 0.5), problem.formula)
        return results.out, results.lse

    inputs = [t.requires_grad_() for t in (operands.query, operands.key, operands.value)]
    assert torch.autograd.gradcheck(both, inputs)
    assert torch.autograd.gradgradcheck(both, inputs)
    stacked = torch.vmap(both)(*(torch.stack([t, -t]) for t in inputs))
    torch.testing.assert_close(stacked[0][1], both(*(-t for t in inputs))[0])


def test_computes_only_what_is_asked(monkeypatch):
    operands, problem, _ = call((1, 2, 2, 32, 32, 8))
    results = reference(operands, problem.formula)
    only_value = Problem(problem.formula, torch.float32, 8, 8, 2, 2, 1, 32, 32, value_grad=True)
    kernel = backends.load("blocked").build(Plan("blocked", only_value, CPU))
    products = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *args: products.append(1) or bmm(*args))
    gradients = kernel.backward(operands, Results(results.out, results.lse), Cotangents(torch.ones_like(results.out)))
    assert gradients.query is None and gradients.key is None
    assert len(products) == 1  # the scores; the gradient of the weights is not needed


def test_costs_less_than_the_reference():
    for length in (16, 512, 16384):
        for dtype in (torch.float16, torch.float32, torch.float64):
            for target in (CPU, Target("cuda", 90)):
                _, problem, _ = call((1, 2, 2, 4, 4, 8), dtype=dtype)
                asked = Problem(problem.formula, dtype, 64, 64, 8, 8, 4, length, length, query_grad=True)
                assert backends.load("blocked").cost(asked, target) < backends.load("reference").cost(asked, target)
