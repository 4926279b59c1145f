"""Which problems may exclude positions: those that do not, no kernel looks at twice."""

import pytest
import torch

import foci
from foci.backends.problem_class import may_exclude
from foci.trace_functions import bind

NINF = float("-inf")
SLOPES, TABLE, BIAS = torch.ones(2), torch.ones(64), torch.zeros(64, 64)
NUMBERS = torch.arange(64)
# score function, whether it may be -inf
SCORES = {
    "none": (None, False),
    "softcap": (foci.scores.softcap(20.0), False),
    "alibi": (foci.scores.alibi(SLOPES), False),
    "distance": (lambda s, b, h, q, k: s - (q - k).abs() * 0.1, False),
    "captured integers": (lambda s, b, h, q, k: s + NUMBERS[k], False),
    "bias": (foci.scores.bias(BIAS[None, None]), True),
    "table by key": (lambda s, b, h, q, k: s + TABLE[k], True),
    "where": (lambda s, b, h, q, k: torch.where(q >= k, s, NINF), True),
    "added where": (lambda s, b, h, q, k: s + torch.where(q >= k, 0.0, NINF), True),
    "logarithm": (lambda s, b, h, q, k: s + torch.log((q - k).abs() * 1.0), True),
    "quotient": (lambda s, b, h, q, k: s - 1 / (q - k), True),
    "exponential": (lambda s, b, h, q, k: s - torch.exp((q - k) * 1.0), True),
}


# SDPA-06
@pytest.mark.parametrize("name", SCORES)
def test_scores_that_may_exclude(name):
    score, expected = SCORES[name]
    assert may_exclude(bind(score, None, torch.device("cpu")).variant, None) == expected


# SDPA-06
def test_masks_and_blocks_may_exclude():
    device = torch.device("cpu")
    assert may_exclude(bind(None, foci.masks.causal(), device).variant, None)
    assert may_exclude(bind(None, None, device).variant, (128, 128))
