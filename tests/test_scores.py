"""Named scores against their plain formulas, with gradients; composition; wrong arguments."""

import math

import pytest
import torch

import foci
from foci import masks, scores
from foci.ir.eager import Env, evaluate
from foci.mask_examples import Sizes
from foci.scores import EXAMPLES, _t5_buckets
from foci.trace_functions import bind
from foci.variant import Score

SIZES = (
    Sizes(B=2, Hq=4, Sq=24, Skv=24),
    Sizes(B=3, Hq=1, Sq=9, Skv=31),
    Sizes(B=1, Hq=12, Sq=33, Skv=5),
)
CASES = [pytest.param(e, s, id=f"{e.name}-{s.B}x{s.Hq}x{s.Sq}x{s.Skv}") for e in EXAMPLES for s in SIZES if e.fits(s)]
CPU = torch.device("cpu")


def run(score: Score, values: torch.Tensor) -> torch.Tensor:
    bound = bind(score, None, CPU)
    b, h, q, kv = (torch.arange(n, dtype=torch.int32) for n in values.shape)
    variables = {"score": values, "b": b[:, None, None, None], "h": h[:, None, None], "q_idx": q[:, None], "kv_idx": kv}
    return evaluate((bound.variant.score,), Env(variables, bound.captures, bound.ints, bound.floats, values.dtype))[0]


@pytest.mark.parametrize("example, sizes", CASES)
def test_score_and_gradients_equal_the_formula(example, sizes):
    values = torch.randn(sizes.B, sizes.Hq, sizes.Sq, sizes.Skv, dtype=torch.float64, generator=sizes.generator()).requires_grad_()
    ours, plain = (example.captures(sizes, dtype=torch.float64) for _ in range(2))
    actual, wanted = run(example.make(sizes, *ours), values), example.formula(values, sizes, *plain)
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(actual)
    got = torch.autograd.grad((actual * weight).sum(), (values, *ours))
    want = torch.autograd.grad((wanted * weight).sum(), (values, *plain))
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10)


def test_every_named_score_has_an_example():
    used = {name for name in scores.__all__ if name not in ("EXAMPLES", "alibi_slopes", "t5_bias")}
    assert {name for name in used if not any(e.name.startswith(name) for e in EXAMPLES)} == set()
    assert any(e.name == "t5" for e in EXAMPLES)
    assert len({e.name for e in EXAMPLES}) == len(EXAMPLES)


def test_composition_is_in_order():
    values = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    double = Score(lambda score, b, h, q_idx, kv_idx: score * 2)
    shift = Score(lambda score, b, h, q_idx, kv_idx: score + kv_idx)
    torch.testing.assert_close(run(double >> shift, values), values * 2 + torch.arange(4))
    torch.testing.assert_close(run(shift >> double, values), (values + torch.arange(4)) * 2)
    torch.testing.assert_close(run(double >> shift >> double, values), (values * 2 + torch.arange(4)) * 2)


def test_truth_values_are_refused():
    with pytest.raises(TypeError, match="compose scores with >>"):
        scores.alibi(4) and scores.softcap(2.0)
    with pytest.raises(TypeError, match="Mask cannot be composed with a Score"):
        scores.alibi(4) >> masks.causal()


@pytest.mark.parametrize("make", [scores.softcap, scores.temperature])
def test_new_numbers_are_the_same_variant(make):
    assert bind(make(31.0), None, CPU).variant == bind(make(7.5), None, CPU).variant


def test_alibi_slopes_of_any_number_of_heads():
    assert scores.alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert scores.alibi_slopes(1) == (2.0**-8,)
    # Press et al.: for 12 heads those of 8, then every other one of 16.
    assert scores.alibi_slopes(12) == (*(2.0**-i for i in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("count, most", [(32, 128), (16, 20), (64, 256), (8, 40)])
def test_t5_buckets_are_those_of_trained_models(bidirectional, count, most):
    attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    distances = torch.arange(-3 * most, 3 * most + 1)
    wanted = attention._relative_position_bucket(distances, bidirectional, count, most)
    assert torch.equal(_t5_buckets(distances, count, bidirectional, most), wanted)
    clamped = distances.clamp(-most, most)
    assert torch.equal(_t5_buckets(clamped, count, bidirectional, most), wanted)


ROW = torch.zeros(5)
WRONG = [
    (lambda: scores.alibi(0), ValueError, "slopes must be at least 1, got 0"),
    (lambda: scores.alibi(2.0), TypeError, r"slopes must be a number of heads or \[Hq\], got float"),
    (lambda: scores.alibi(ROW.long()), TypeError, "slopes must be floating, got torch.int64"),
    (lambda: scores.alibi(ROW[None]), ValueError, r"slopes must be a number of heads or \[Hq\], got shape \[1, 5\]"),
    (lambda: scores.alibi_slopes(-3), ValueError, "heads must be at least 1, got -3"),
    (lambda: scores.softcap(0.0), ValueError, "cap must be positive and finite, got 0.0"),
    (lambda: scores.softcap(float("inf")), ValueError, "cap must be positive and finite, got inf"),
    (lambda: scores.softcap(float("nan")), ValueError, "cap must be positive and finite, got nan"),
    (lambda: scores.softcap(None), TypeError, "cap must be a number, got None of type NoneType"),
    (lambda: scores.temperature(-1), ValueError, "value must be positive and finite, got -1"),
    (lambda: scores.temperature(ROW[0]), ValueError, r"value must be a number or \[Hq\], got shape \[\]"),
    (lambda: scores.bias(ROW > 0), TypeError, "values must be floating, got torch.bool"),
    (lambda: scores.bias(ROW[0]), ValueError, "of 1 to 4 dims, got shape"),
    (lambda: scores.bias(3.0), TypeError, "values must be a tensor broadcastable"),
    (lambda: scores.relative_position(ROW[:4]), ValueError, r"odd number of distances, -k to k, got shape \[4\]"),
    (lambda: scores.relative_position(ROW.long()), TypeError, "table must be floating, got torch.int64"),
    (lambda: scores.t5_bias(ROW), ValueError, r"table must be \[num_buckets, Hq\], got shape \[5\]"),
    (lambda: scores.t5_bias(torch.zeros(2, 4)), ValueError, "at least 4 buckets"),
    (lambda: scores.t5_bias(torch.zeros(32, 4), max_distance=8), ValueError, "must exceed the 8 exact distances, got 8"),
]


@pytest.mark.parametrize("call, error, message", WRONG)
def test_wrong_arguments_say_what_is_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("backend", ["reference", "blocked", "cpu"])
def test_numbers_in_place_of_nan_and_infinities_pass_no_gradient(backend):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 24, 8) for _ in range(3))
    bias = torch.randn(24, 24)
    bias[3, 4], bias[5, 6], bias[7], bias[9, 2], bias[11, :2] = math.nan, math.inf, -math.inf, -math.inf, math.inf
    leaves = [t.requires_grad_() for t in (query, key, value, bias)]
    with foci.use(backend):
        actual = foci.attention(query, key, value, score=lambda s, b, h, q, k: torch.nan_to_num(s + bias[q, k], -2.0, 3.0, -4.0))
    replaced = (query @ key.mT / math.sqrt(8) + bias).nan_to_num(-2.0, 3.0, -4.0)
    right = torch.softmax(replaced, -1) @ value
    torch.testing.assert_close(actual, right)
    dout = torch.randn_like(right)
    gradients = torch.autograd.grad(actual, leaves, dout)
    torch.testing.assert_close(gradients, torch.autograd.grad(right, leaves, dout))
    assert not gradients[3][~bias.isfinite()].any()
