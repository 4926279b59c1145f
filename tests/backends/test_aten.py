"""When torch's own kernels are taken, and the reasons why not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foci import backends
from foci.backends.contract import Plan
from foci.planner import choose
from foci.problem import Cotangents, Formula, Layout, Operands, Outputs, Problem, Target
from foci.trace_functions import bind

ATEN = backends.load("aten")
CPU, HOPPER, VOLTA = Target("cpu"), Target("cuda", 90), Target("cuda", 70)


def variant(score=None, mask=None):
    return bind(score, mask, torch.device("cpu")).variant


PLAIN = Problem(Formula(variant()), torch.float32, 64, 64, 8, 8, 2, 512, 512)
CAUSAL = replace(PLAIN, formula=Formula(variant(mask=lambda b, h, q, kv: q >= kv)))
HALF = replace(PLAIN, dtype=torch.bfloat16)


def formula(**changes):
    return replace(PLAIN, formula=replace(PLAIN.formula, **changes))


# SDPA-16
@pytest.mark.parametrize(
    "problem, target, reason",
    [
        (formula(variant=variant(lambda s, b, h, q, kv: s * 2)), CPU, "score function"),
        (formula(variant=variant(mask=lambda b, h, q, kv: q >= kv + 1)), CPU, "mask function"),
        (formula(layout=Layout.JAGGED), CPU, "dense layout"),
        (formula(outputs=Outputs(row_max=True)), CPU, "row_max"),
        (formula(outputs=Outputs(weights=True)), CPU, "weights"),
        (formula(dropout=True), CPU, "dropout"),
        (formula(block_size=(128, 128)), CPU, "block mask"),
        (replace(PLAIN, value_dim=32), CPU, "Dv = D, these are 32 and 64"),
        (replace(formula(outputs=Outputs(lse=True)), query_grad=True), CPU, "gradient of lse"),
        (PLAIN, Target("mps"), "no fused kernel for mps"),
        (HALF, VOLTA, "needs sm_80, this is sm_70"),
        (replace(HALF, head_dim=264, value_dim=264), HOPPER, "up to 256, this is 264"),
        (replace(HALF, head_dim=20, value_dim=20), HOPPER, "multiples of 8"),
        (replace(PLAIN, kv_heads=2), HOPPER, "as many key heads"),
        (replace(PLAIN, query_grad=True), HOPPER, "no fixed order"),
        (replace(PLAIN, dtype=torch.float64), HOPPER, "does not take float64"),
    ],
)
def test_reasons(problem, target, reason):
    assert reason in ATEN.reject(problem, target)


@pytest.mark.parametrize(
    "problem, target",
    [
        (PLAIN, CPU),
        (CAUSAL, CPU),
        (replace(CAUSAL, key_grad=True, deterministic=True, kv_heads=2, head_dim=13, value_dim=13), CPU),
        (replace(PLAIN, dtype=torch.float64), CPU),
        (formula(outputs=Outputs(lse=True)), CPU),
        (HALF, HOPPER),
        (replace(HALF, query_grad=True, kv_heads=2), HOPPER),
        (PLAIN, HOPPER),
    ],
)
def test_takes(problem, target):
    assert ATEN.reject(problem, target) is None


# Written in any way, causal is causal.
@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, kv: q >= kv,
        lambda b, h, q, kv: kv <= q,
        lambda b, h, q, kv: q - kv >= 0,
        lambda b, h, q, kv: kv - q < 1,
        lambda b, h, q, kv: ~(kv > q),
    ],
)
def test_recognises_causal(mask):
    assert ATEN.reject(formula(variant=variant(mask=mask)), CPU) is None


@pytest.mark.parametrize("length", [16, 512, 16384])
@pytest.mark.parametrize("grad", [False, True])
def test_is_chosen_for_plain_and_causal_on_the_cpu(length, grad):
    for problem in (PLAIN, CAUSAL):
        asked = replace(problem, q_len=length, kv_len=length, query_grad=grad)
        assert choose(asked, CPU, ("aten", "blocked", "reference")).plan.backend == "aten"
    asked = replace(formula(variant=variant(lambda s, b, h, q, kv: s * 2)), q_len=length, kv_len=length, query_grad=grad)
    assert choose(asked, CPU, ("aten", "blocked", "reference")).plan.backend == "blocked"


# FLEX-08
@pytest.mark.parametrize("shape", [(37, 53), (53, 37), (40, 40)])
@pytest.mark.parametrize("problem", [PLAIN, CAUSAL])
def test_lse_is_natural_and_in_float32(problem, shape):
    asked = replace(problem, dtype=torch.bfloat16)
    query, key = torch.randn(2, 8, shape[0], 64).bfloat16(), torch.randn(2, 8, shape[1], 64).bfloat16()
    results = ATEN.build(Plan("aten", asked, CPU)).forward(Operands(query, key, key, scale=-0.2))
    scores = -0.2 * query.double() @ key.double().mT
    if problem is CAUSAL:
        scores = scores.masked_fill(torch.ones(shape, dtype=torch.bool).triu(1), -torch.inf)
    assert results.lse.dtype == torch.float32
    torch.testing.assert_close(results.lse.double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-3)


# SDPA-16
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("shape", [(300, 300), (300, 500), (500, 300)])
def test_flash_gradients_repeat_on_cuda(shape):
    generator = torch.Generator("cuda").manual_seed(0)
    query = torch.randn(2, 8, shape[0], 64, device="cuda", dtype=torch.bfloat16, generator=generator)
    key = torch.randn(2, 2, shape[1], 64, device="cuda", dtype=torch.bfloat16, generator=generator)
    asked = replace(CAUSAL, dtype=torch.bfloat16, kv_heads=2, query_grad=True, key_grad=True, value_grad=True)
    kernel, operands = ATEN.build(Plan("aten", asked, HOPPER)), Operands(query, key, key, scale=0.125)
    results = kernel.forward(operands)
    first, again = (kernel.backward(operands, results, Cotangents(results.out)) for _ in range(2))
    for a, b in zip((first.query, first.key, first.value), (again.query, again.key, again.value)):
        assert torch.equal(a, b)
