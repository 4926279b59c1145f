"""Kernels whose products begin at a score's line, against the formula: in Triton's interpreter, or on a GPU."""

import dataclasses
import os

import pytest
import torch

import foci
from foci import masks, scores
from foci.backends import load
from foci.backends.contract import Plan
from foci.problem import Cotangents, Formula, Layout, Operands, Outputs, Problem, Target
from foci.trace_functions import bind

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs Triton's interpreter or a GPU", allow_module_level=True)

from foci.backends.gpu.launch_builder import LaunchBuilder
from foci.backends.gpu.tile_tables import operand_sequences
from foci.backends.triton.kernel import build_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOPES = torch.tensor([0.5, 0.03], device=DEVICE)
SCORES = {
    "alibi": scores.alibi(2),
    "rising": foci.Score(lambda s, b, h, q, k: s + SLOPES[h] * (k - q) * 0.2),
    "by key": foci.Score(lambda s, b, h, q, k: s + (SLOPES[h] + k * 0.07)),
    "against queries": foci.Score(lambda s, b, h, q, k: s + (0.1 * k + SLOPES[h] * q)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem with a score of `SCORES`."""

    score: str = "alibi"
    mask: foci.Mask | None = None
    lengths: tuple[int, int] = (45, 53)
    heads: tuple[int, int] = (2, 2)
    scale: float = 0.2
    dropout: float = 0.0
    packed: bool = False
    turned: bool = False


WINDOW = foci.Mask(lambda b, h, q, k: (q >= k) & (q - k < 20))
CASES = {
    "causal": Case(mask=masks.causal()),
    "rising": Case("rising"),
    "by key, few keys": Case("by key", lengths=(53, 30)),
    "against queries, few queries": Case("against queries", lengths=(18, 61)),
    "shared heads, negative scale": Case(mask=WINDOW, heads=(4, 2), scale=-0.3),
    "packed": Case("rising", masks.causal(), (50, 50), packed=True),
    "dropout, turned": Case(mask=masks.causal(), dropout=0.3, turned=True),
    "turned, negative scale": Case("against queries", lengths=(40, 40), scale=-0.2, turned=True),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_the_formula(name):
    case = CASES[name]
    problem, operands = asked(case)
    target = Target("cuda", 10 * torch.cuda.get_device_capability()[0] if DEVICE.type == "cuda" else 0, frozenset({"triton"}))
    kernel = build_kernel(Plan("triton", problem, target))
    assert kernel.builder.begin(operands, {"out": operands.query}, operand_sequences(operands), LaunchBuilder((), None)).line is not None
    if case.turned:
        kind = kernel.backward_pass.key_kind
        kernel.schedules[kind] = dataclasses.replace(kernel.builder.schedule(kind), turned=True)
    reference = load("reference").build(Plan("reference", dataclasses.replace(problem, dtype=torch.float64), target))
    wide = dataclasses.replace(
        operands, query=operands.query.double(), key=operands.key.double(), value=operands.value.double(),
        captures=tuple(t.double() if t.is_floating_point() else t for t in operands.captures),
    )  # fmt: skip
    results, wanted = kernel.forward(operands), reference.forward(wide)
    torch.testing.assert_close(results.lse.double(), wanted.lse.double(), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(results.row_max.double(), wanted.row_max.double(), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(results.out.double(), wanted.out, rtol=4e-3, atol=3e-3)
    dout = torch.randn(results.out.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.float16)
    got = kernel.backward(operands, results, Cotangents(dout))
    right = reference.backward(wide, wanted, Cotangents(dout.double()))
    for ours, exact in ((got.query, right.query), (got.key, right.key), (got.value, right.value)):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-2, atol=1e-2)


def asked(case):
    """Problem and operands of a case, float16."""
    generator = torch.Generator().manual_seed(1)
    (rows, columns), (heads, kv_heads), batch = case.lengths, case.heads, 1 if case.packed else 2
    shapes = ((heads, rows), (kv_heads, columns), (kv_heads, columns))
    q, k, v = (torch.randn(batch, h, n, 16, generator=generator).to(DEVICE, torch.float16) for h, n in shapes)
    bound = bind(SCORES[case.score], case.mask, DEVICE)
    cu = torch.tensor([0, 17, 17, rows], device=DEVICE)
    packed = {"cu_q": cu, "cu_kv": cu, "max_q": rows - 17, "max_kv": columns - 17} if case.packed else {}
    seed = torch.tensor([7], device=DEVICE) if case.dropout else None
    operands = Operands(q, k, v, bound.captures, bound.ints, bound.floats, case.scale, case.dropout, seed, **packed)
    layout = Layout.JAGGED if case.packed else Layout.DENSE
    formula = Formula(bound.variant, layout, Outputs(lse=True, row_max=True), case.dropout > 0)
    grads = (True, True, True, (False,) * len(bound.captures))
    return Problem(formula, torch.float16, 16, 16, heads, kv_heads, batch, rows, columns, *grads), operands


@pytest.mark.parametrize("scale", [0.0, 1e-9])
def test_a_scale_that_numbers_cannot_be_divided_by_takes_the_score(scale):
    problem, operands = asked(Case(scale=scale))
    kernel = build_kernel(Plan("triton", problem, Target("cuda", 0, frozenset({"triton"}))))
    assert kernel.builder.begin(operands, {"out": operands.query}, operand_sequences(operands), LaunchBuilder((), None)).line is None
