"""The reference against formulas written out by hand, which know nothing of expressions."""

from __future__ import annotations

import math

import pytest
import torch

from foci import backends
from foci.backends.contract import Plan
from foci.backends.reference import formula as attend
from foci.problem import Cotangents, Formula, Layout, Operands, Outputs, Problem, Target
from foci.trace_functions import bind

EVERYTHING = Outputs(lse=True, row_max=True, column_sums=True, weights=True)
B, HQ, HKV, SQ, SKV, D, DV = 2, 4, 2, 5, 7, 3, 6


def tensors(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, HQ, SQ, D), (B, HKV, SKV, D), (B, HKV, SKV, DV))
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def call(inputs, score=None, mask=None, outputs=EVERYTHING, **more):
    bound = bind(score, mask, torch.device("cpu"))
    asked = Formula(bound.variant, outputs=outputs, dropout="seed" in more, block_size=more.pop("block_size", None))
    return Operands(*inputs, bound.captures, bound.ints, bound.floats, 0.6, **more), asked


def by_loops(query, key, value, score, allowed):
    """out, lse, row_max, column_sums and weights, one number at a time; `score` and `allowed` take Python integers."""
    out, lse = torch.zeros(B, HQ, SQ, DV, dtype=torch.float64), torch.full((B, HQ, SQ), -math.inf, dtype=torch.float64)
    row_max, weights = lse.clone(), torch.zeros(B, HQ, SQ, SKV, dtype=torch.float64)
    for b in range(B):
        for h in range(HQ):
            for i in range(SQ):
                scores = {}
                for j in range(SKV):
                    product = sum(float(query[b, h, i, d]) * float(key[b, h // 2, j, d]) for d in range(D))
                    if allowed(b, h, i, j):
                        scores[j] = score(0.6 * product, b, h, i, j)
                if scores:
                    row_max[b, h, i] = max(scores.values())
                    total = math.fsum(math.exp(s) for s in scores.values())
                    lse[b, h, i] = math.log(total)
                    for j, s in scores.items():
                        weights[b, h, i, j] = math.exp(s) / total
                        out[b, h, i] += weights[b, h, i, j] * value[b, h // 2, j]
    return out, lse, row_max, weights.sum(2), weights


SLOPES = torch.tensor([0.5, 0.25, -0.125, 1.0], dtype=torch.float64)
VARIANTS = {
    "plain": (None, None, lambda s, b, h, i, j: s, lambda b, h, i, j: True),
    "causal": (None, lambda b, h, q, kv: q >= kv, lambda s, b, h, i, j: s, lambda b, h, i, j: i >= j),
    "empty-rows": (None, lambda b, h, q, kv: (kv < q - 1) & (b == 1), lambda s, b, h, i, j: s, lambda b, h, i, j: j < i - 1 and b == 1),
    "alibi-softcap": (
        lambda s, b, h, q, kv: torch.tanh((s + SLOPES[h] * (kv - q)) / 3) * 3,
        lambda b, h, q, kv: (q - kv).abs() <= 2,
        lambda s, b, h, i, j: 3 * math.tanh((s + float(SLOPES[h]) * (j - i)) / 3),
        lambda b, h, i, j: abs(i - j) <= 2,
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_loops(name):
    score, mask, by_hand, allowed = VARIANTS[name]
    inputs = tensors()
    operands, asked = call(inputs, score, mask)
    for actual, exact in zip(vars(attend(operands, asked)).values(), by_loops(*inputs, by_hand, allowed)):
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-13)


def test_blocks_override_the_mask():
    blocks = torch.tensor([[[[0, 1, 2], [2, 0, 1]]]], dtype=torch.int8)
    operands, asked = call(tensors(), mask=lambda b, h, q, kv: kv % 2 == 0, blocks=blocks, block_size=(3, 3))

    def allowed(b, h, i, j):
        kind = int(blocks[0, 0, i // 3, j // 3])
        return kind == 2 or (kind == 1 and j % 2 == 0)

    for actual, exact in zip(vars(attend(operands, asked)).values(), by_loops(*tensors(), lambda s, *_: s, allowed)):
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-13)


# JAG-03
def test_jagged_is_each_sequence_alone():
    query, key, value = (torch.randn(1, heads, 20, width, dtype=torch.float64) for heads, width in ((HQ, D), (HKV, D), (HKV, DV)))
    cu_q, cu_kv = torch.tensor([0, 4, 4, 13, 20]), torch.tensor([0, 6, 9, 9, 20])
    bound = bind(lambda s, b, h, q, kv: s + 0.1 * b * (q - kv), lambda b, h, q, kv: kv <= q + 2, torch.device("cpu"))
    operands = Operands(query, key, value, (), bound.ints, bound.floats, 0.6, cu_q=cu_q, cu_kv=cu_kv, max_q=9, max_kv=11)
    packed = attend(operands, Formula(bound.variant, Layout.JAGGED, Outputs(lse=True, column_sums=True)))
    for n in range(4):
        q, kv = slice(*cu_q[n : n + 2].tolist()), slice(*cu_kv[n : n + 2].tolist())
        scores = 0.6 * query[0, :, q] @ key[0, :, kv].repeat_interleave(2, 0).mT
        i, j = torch.arange(scores.shape[1])[:, None], torch.arange(scores.shape[2])
        weights = torch.softmax((scores + 0.1 * n * (i - j)).masked_fill(j > i + 2, -math.inf), -1)
        torch.testing.assert_close(packed.out[0, :, q], weights @ value[0, :, kv].repeat_interleave(2, 0))
        torch.testing.assert_close(packed.column_sums[0, :, kv], weights.sum(1))


@pytest.mark.slow
@pytest.mark.parametrize("score", [None, lambda s, b, h, q, kv: torch.tanh(s) * 2 + s * s])
def test_gradcheck(score):
    inputs = [t.requires_grad_() for t in tensors()]

    def function(*arguments):
        operands, asked = call(arguments, score, lambda b, h, q, kv: (kv <= q + 1) & (q != 2), seed=torch.tensor([3]), dropout_p=0.4)
        results = attend(operands, asked)
        return results.out, results.lse.nan_to_num(neginf=0.0), results.column_sums, results.weights

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_is_differentiable_in_every_mode():
    inputs, tangents = tensors(), tensors(seed=1)

    def out(*arguments):
        return attend(*call(arguments, mask=lambda b, h, q, kv: kv <= q)).out

    _, forward = torch.func.jvp(out, tuple(inputs), tuple(tangents))
    direction = torch.randn_like(forward)
    _, pull = torch.func.vjp(out, *inputs)
    reverse = sum((g * t).sum() for g, t in zip(pull(direction), tangents))
    torch.testing.assert_close((forward * direction).sum(), reverse)
    stacked = torch.vmap(out)(*(torch.stack([t, 2 * t]) for t in inputs))
    torch.testing.assert_close(stacked[1], out(*(2 * t for t in inputs)))


def test_backward_records_inside_an_operator():
    # an operator's kernel runs below autograd's dispatch keys
    operands, asked = call(tensors(), mask=lambda b, h, q, kv: q >= kv, outputs=Outputs())
    problem = Problem(asked, torch.float64, D, DV, HQ, HKV, 2, 8, 8, True, True, True)
    kernel = backends.load("reference").build(Plan("reference", problem, Target("cpu")))
    results = kernel.forward(operands)
    flowing = Cotangents(torch.ones_like(results.out))
    outside = kernel.backward(operands, results, flowing)
    with torch._C._AutoDispatchBelowAutograd():
        inside = kernel.backward(operands, results, flowing)
    assert torch.equal(inside.query, outside.query)
    assert inside.query.abs().sum() > 0


def test_rejects_weights_of_sequences():
    asked = Formula(bind(None, None, torch.device("cpu")).variant, Layout.JAGGED, Outputs(weights=True))
    problem = Problem(asked, torch.float32, 8, 8, 2, 2, 4, 16, 16)
    assert "rectangular" in backends.load("reference").reject(problem, Target("cpu"))
