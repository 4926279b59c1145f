"""Bounds of masks against the masks themselves, pair by pair."""

import pytest
import torch

import foci
from foci import masks
from foci.backends.mask_intervals import as_comparisons, find_bounds
from foci.ir.eager import Env, evaluate
from foci.trace_functions import bind

STARTS = torch.tensor([3, 0, 9, 40])
LARGE = torch.tensor([2**63 - 1, 2**63 - 1])
SMALL = torch.tensor([-(2**31), -(2**31)], dtype=torch.int32)
MOST = 2**31 - 1
BOUNDED = {
    "everything": masks.everything(),
    "causal": masks.causal(),
    "lower right": masks.causal_lower_right(),
    "window": masks.window(5),
    "both sides": masks.window(5, 3),
    "aligned window": masks.window(4, 2, align="lower_right"),
    "causal and window": masks.causal() & masks.window(7),
    "strict": foci.Mask(lambda b, h, q, k: (k < q) & (k > q - 6)),
    "a length for each batch entry": foci.Mask(lambda b, h, q, k: k < STARTS[b]),
    "rows": foci.Mask(lambda b, h, q, k: (q < 7) & (k <= 2 * q)),
    "distance": foci.Mask(lambda b, h, q, k: abs(q - k) <= 6),
    "distance by a method": foci.Mask(lambda b, h, q, k: (k - q).abs() < 6),
    "distance, other way round": foci.Mask(lambda b, h, q, k: ~(torch.abs(k - q) > 6)),
    "distance for each batch entry": foci.Mask(lambda b, h, q, k: abs(q - k) < STARTS[b + 1]),
    "distance for each row": foci.Mask(lambda b, h, q, k: abs(q - k) <= STARTS[q // 10]),
    "distance in two terms": foci.Mask(lambda b, h, q, k: abs(q - k) < 5 + 2 * b),
    "distance from elsewhere": foci.Mask(lambda b, h, q, k: abs(q - k + 4) <= 6),
    "causal distance": foci.Mask(lambda b, h, q, k: (q >= k) & (abs(q - k) <= 6)),
    "behind for each batch entry": foci.Mask(lambda b, h, q, k: q - k < STARTS[b + 1]),
    "ahead for each batch entry": foci.Mask(lambda b, h, q, k: k - q <= STARTS[b]),
    "larger of both": foci.Mask(lambda b, h, q, k: torch.maximum(q - k, k - q) <= 6),
    "smaller of two lengths": foci.Mask(lambda b, h, q, k: k <= torch.minimum(q, STARTS[3 - b])),
    "as far as numbers go": foci.Mask(lambda b, h, q, k: abs(q - k) <= MOST),
    "ahead as far as numbers go": foci.Mask(lambda b, h, q, k: k - q <= MOST),
    "farther than numbers go": foci.Mask(lambda b, h, q, k: abs(q - k) <= 2**40),
    "as far as tensors go": foci.Mask(lambda b, h, q, k: abs(q - k) <= LARGE[b]),
    "none by a tensor": foci.Mask(lambda b, h, q, k: q - k <= SMALL[b]),
    "nothing": foci.Mask(lambda b, h, q, k: (k < q) & (k > q)),
}
UNBOUNDED = {
    "either": foci.Mask(lambda b, h, q, k: (k < 3) | (k > q)),
    "documents": foci.Mask(lambda b, h, q, k: STARTS[q // 10] == STARTS[k // 10]),
    "doubled": foci.Mask(lambda b, h, q, k: 2 * k <= q),
    "far": foci.Mask(lambda b, h, q, k: abs(q - k) >= 6),
    "distance of what is read": foci.Mask(lambda b, h, q, k: abs(STARTS[q // 10] - STARTS[k // 10]) <= 3),
    "distance by key": foci.Mask(lambda b, h, q, k: abs(q - k) <= STARTS[k // 10]),
    "either of two": foci.Mask(lambda b, h, q, k: torch.minimum(q - k, k - 9) <= 0),
    "of its own reading": foci.Mask(lambda b, h, q, k: k <= STARTS[k // 10]),
}


def values(exprs, bound, q, k):
    variables = {"b": torch.tensor(1), "h": torch.tensor(0), "q_idx": q, "kv_idx": k, "q_len": torch.tensor(31), "kv_len": torch.tensor(37)}
    return evaluate(exprs, Env({n: v.to(torch.int32) for n, v in variables.items()}, bound.captures, bound.ints, bound.floats))


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_keep_what_the_mask_keeps(name):
    bound = bind(None, BOUNDED[name], torch.device("cpu"))
    interval = find_bounds(bound.variant.mask)
    assert interval is not None
    q, k = torch.arange(31)[:, None], torch.arange(37)
    keep, low, high = values((bound.variant.mask, interval.low, interval.high), bound, q, k)
    assert torch.equal(((low <= k) & (k <= high)).expand(31, 37), keep.expand(31, 37))
    assert interval.is_low or (low == 0).all()
    assert (low >= 0).all()
    assert (high < 37).all()


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("side", ["q_idx", "kv_idx"])
def test_a_mask_within_bounds_is_the_mask(name, side):
    bound = bind(None, BOUNDED[name], torch.device("cpu"))
    mask = bound.variant.mask
    q, k = torch.arange(31)[:, None], torch.arange(37)
    for is_inside in (True, False):
        comparisons = as_comparisons(mask, side, is_inside=is_inside)
        if comparisons is None:
            assert side == "q_idx"
            continue
        keep, same = values((mask, comparisons), bound, q, k)
        assert torch.equal(torch.as_tensor(same).expand(31, 37), keep.expand(31, 37))
    beyond = as_comparisons(mask, "kv_idx")
    assert beyond is not None
    assert not torch.as_tensor(values((beyond,), bound, q, k + 37)[0]).any()


@pytest.mark.parametrize("name", UNBOUNDED)
def test_other_masks_have_none(name):
    assert find_bounds(bind(None, UNBOUNDED[name], torch.device("cpu")).variant.mask) is None
