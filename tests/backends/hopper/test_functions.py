"""What is generated for the backward against the score function itself: exponents of weights and slopes, in float64."""

import math
from types import SimpleNamespace

import pytest
import torch

import foci
from foci import masks, scores
from foci.ir.eager import Env, evaluate
from foci.trace_functions import bind

functions = pytest.importorskip("foci.backends.hopper.functions", reason="needs Triton")
pytest.importorskip("triton", reason="Triton is not installed")

# the few operations of Triton that the cases are spelled by
TRITON = SimpleNamespace(exp2=torch.exp2, maximum=torch.maximum, float32=torch.float64, cast=lambda x, dtype: torch.as_tensor(x).to(dtype))
SCORES = {
    "alibi": scores.alibi(4),
    "softcap": scores.softcap(3.0),
    "scaled": foci.Score(lambda s, b, h, q, k: s * 2.5 + (q - k) / 7),
    "softcap of alibi": foci.Score(lambda s, b, h, q, k: 4.0 * torch.tanh((s + 0.1 * (q - k)) / 4.0)),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("resident", ["q_idx", "kv_idx"])
def test_exponents_and_slopes_are_those_of_the_score(name, resident):
    bound = bind(SCORES[name], masks.causal(), torch.device("cpu"))
    code = functions.build_functions(bound.variant, (), half=True, resident=resident)
    known = {"tl": TRITON, "tanh_half": torch.tanh}
    exec(code.source, known)
    q, k, h, scale = torch.arange(9)[:, None], torch.arange(7)[None, :], torch.tensor(2), 0.3
    raw, lse2 = torch.randn(9, 7, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64)
    lengths, numbers = (torch.tensor(9), torch.tensor(7)), SimpleNamespace(floats=bound.floats, ints=bound.ints)
    aux = known["pre"](0, h, {"q_idx": q, "kv_idx": k}[resident], *lengths, scale, numbers)
    exponent, slope = known["both"](raw, lse2, 0, h, q, k, *lengths, numbers, aux)
    score = (raw * scale).requires_grad_()
    at = {"score": score, "b": torch.tensor(0), "h": h, "q_idx": q, "kv_idx": k, "q_len": lengths[0], "kv_len": lengths[1]}
    (right,) = evaluate((bound.variant.score,), Env(at, bound.captures, bound.ints, bound.floats))
    (grad,) = torch.autograd.grad(right.sum(), score)
    torch.testing.assert_close(exponent, right.detach().double() * math.log2(math.e) - lse2, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.as_tensor(slope).expand(9, 7).double(), grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["alibi", "softcap", "farther is more"])
def test_a_line_of_queries_is_what_a_score_adds(name):
    """In base 2, for one query and, by what it rises by, for those behind."""
    score = {**SCORES, "farther is more": foci.Score(lambda s, b, h, q, k: s + 0.3 * (q - k))}[name]
    bound = bind(score, None, torch.device("cpu"))
    code = functions.build_functions(bound.variant, (), half=True, resident="kv_idx")
    assert (code.line is None) == (name == "softcap")
    if code.line is None:
        return
    known = {"tl": TRITON}
    exec(code.source, known)
    q, k, h = torch.arange(9)[:, None], torch.arange(7)[None, :], torch.tensor(2)
    lengths, numbers = (torch.tensor(9), torch.tensor(7)), SimpleNamespace(floats=bound.floats, ints=bound.ints)
    aux = known["pre"](0, h, k, *lengths, 0.3, numbers)
    lead, rise = known["line"](0, h, torch.tensor(4), k, *lengths, numbers, aux)
    at = {"score": torch.tensor(0.0), "b": torch.tensor(0), "h": h, "q_idx": q, "kv_idx": k, "q_len": lengths[0], "kv_len": lengths[1]}
    (right,) = evaluate((bound.variant.score,), Env(at, bound.captures, bound.ints, bound.floats))
    torch.testing.assert_close((lead + (q - 4) * rise).double(), right.double() * math.log2(math.e), rtol=1e-6, atol=1e-6)
