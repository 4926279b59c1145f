"""Integers of 8 and 16 bits in plain graphs: a fused graph computes what torch computes, which wraps."""

import pytest
import torch
import torch.nn.functional as F

import foci
from compiled import compare

LIMITS = {torch.uint8: (0, 256), torch.int8: (-128, 128), torch.int16: (-32768, 32768)}


def sdpa(x, mask):
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def rows(c):
    return torch.arange(c.shape[0], device=c.device)


# Masks and biases of a vector c; each overflows for some of its elements in at least one of the dtypes.
MASKS = {
    "difference": lambda c: c[:, None] - c < 2,
    "sum": lambda c: c[:, None] + c > 100,
    "product": lambda c: c[:, None] * c > 5,
    "negative": lambda c: (-c)[:, None] > c,
    "absolute": lambda c: (c[:, None] - c).abs() < 2,
    "inverse": lambda c: (~c)[:, None] > c,
    "cast": lambda c: (rows(c)[:, None] * 2999).to(c.dtype) - c < 2,
    "method cast": lambda c: (rows(c)[:, None] * 2999).type_as(c) <= c,
    "positions": lambda c: torch.arange(c.shape[0], dtype=c.dtype)[:, None] * 20 + c < 90,
    "counted": lambda c: torch.ones_like(c).cumsum(0, dtype=c.dtype)[:, None] * 20 - c < 30,
    "filled": lambda c: (torch.full_like(c, 100) + 100)[:, None] - c < 3,
    "number": lambda c: (c + 100)[:, None] > c,
    "number less": lambda c: (1 - c)[:, None] > c,
    "square": lambda c: (c**2)[:, None] > c,
    "shift": lambda c: (c << 2)[:, None] > c,
    "in place": lambda c: c[:, None].clone().sub_(100) > c,
    "other dtype": lambda c: c[:, None] + torch.tensor(90, dtype=torch.int16) > c,
    "equal": lambda c: c[:, None] // 8 == c // 8,
    "two dtypes": lambda c: c[:, None] - c.to(torch.int32) < 2,
}


# FUSE-03
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, dtype):
    calls = []
    for length in (20, 24, 31):
        low, high = LIMITS[dtype]
        c = torch.randint(low, high, (length,), dtype=dtype)
        calls.append((torch.randn(1, 2, length, 16, requires_grad=True), c))

    def attend(x, c):
        mask = MASKS[name](c) | torch.eye(c.shape[0], dtype=torch.bool)  # no row is empty: torch's SDPA gives NaN or 0 by release
        return sdpa(x, mask)

    torch._dynamo.reset()
    with foci.observe() as log:
        compare(attend, calls, backend="foci", dynamic=True, options={"rest": "eager"})
    assert [site.reason for site in log.fusions] == [None] * len(log.fusions) and log.fusions


# FUSE-03
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_a_bias(dtype):
    def attend(x, c):
        return torch.softmax(x @ x.mT * 0.25 + (c[:, None] - c) * 0.01, -1) @ x

    calls = [(torch.randn(1, 2, n, 16), torch.randint(*LIMITS[dtype], (n,), dtype=dtype)) for n in (20, 24, 31)]
    torch._dynamo.reset()
    compare(attend, calls, backend="foci", options={"rest": "eager"})


KEPT = {
    "ones and zeros": lambda n, d: torch.ones(n, n, dtype=d).tril() == 1,
    "less than one": lambda n, d: (1 - torch.ones(n, n, dtype=d).triu(1)) > 0,
    "both": lambda n, d: (torch.ones(n, n, dtype=d).tril() & torch.ones(n, n, dtype=d).tril(2)).bool(),
    "of a bool": lambda n, d: (torch.arange(n)[:, None] >= torch.arange(n)).to(d) != 0,
}


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", KEPT)
def test_masks_of_zeros_and_ones_stay_expressions(name, dtype):
    torch._dynamo.reset()
    with foci.observe() as log:
        calls = [(torch.randn(1, 2, n, 16),) for n in (20, 24, 31)]
        compare(lambda x: sdpa(x, KEPT[name](x.shape[2], dtype)), calls, backend="foci", dynamic=True, options={"rest": "eager"})
    (site,) = log.fusions
    assert "kv_idx <= q_idx" in site.variant
    assert "c0" not in site.variant, "a tensor is captured"
