"""Every kind of score function with every kind of mask, however the mask is given: a score may exclude keys too, by -inf.

The reference is the formula in float64, written out here: the functions are called with whole tensors.
"""

from __future__ import annotations

import functools
import itertools
import math
import os

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as create_by_torch

import foci

BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 2, 83, 101, 16
if os.environ.get("TRITON_INTERPRET") == "1":  # each of its tiles, 16 by 16, is a second
    BATCH, HEADS, QUERIES, KEYS = 1, 2, 19, 40
BLOCK = 16
LONGEST = max(QUERIES, KEYS)

DRAWN = torch.Generator().manual_seed(25)
KEPT = torch.rand(LONGEST, generator=DRAWN) < 0.7
DOCUMENT = torch.arange(LONGEST) // 19
BIAS = torch.randn(HEADS, LONGEST, generator=DRAWN).masked_fill(torch.rand(HEADS, LONGEST, generator=DRAWN) < 0.3, -math.inf)

SCORES = {
    "plain": None,
    "distance": lambda s, b, h, i, j: s * 1.5 - 0.02 * (i - j).abs(),
    "where": lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf),
    "where_turned": lambda s, b, h, i, j: torch.where(i < j, -math.inf, s) * 0.5,
    "filled": lambda s, b, h, i, j: s.masked_fill(i < j, -math.inf),
    "added": lambda s, b, h, i, j: s + torch.where(i >= j, 0.0, -math.inf),
    "window": lambda s, b, h, i, j: torch.where((i - j).abs() < 11, s + 0.1 * (i - j), -math.inf),
    "captured": lambda s, b, h, i, j: torch.where(KEPT[j], s, -math.inf),
    "by_head": lambda s, b, h, i, j: torch.where(h == 0, s, torch.where(i >= j, 2.0 * s, -math.inf)),
    "everything": lambda s, b, h, i, j: torch.where(i > LONGEST, s, -math.inf),
    "bias": lambda s, b, h, i, j: s + BIAS[h, j],
}
MASKS = {
    "all": lambda b, h, i, j: j >= 0,
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i - j).abs() <= 30,
    "document": lambda b, h, i, j: DOCUMENT[i] == DOCUMENT[j],
    "by_head": lambda b, h, i, j: (h == 0) | (j < 37),
}


def at(batch=BATCH, heads=HEADS):
    """Coordinates that broadcast to [B, Hq, Sq, Skv]."""
    return (
        torch.arange(batch).view(-1, 1, 1, 1),
        torch.arange(heads).view(1, -1, 1, 1),
        torch.arange(QUERIES).view(-1, 1),
        torch.arange(KEYS),
    )


def dense(mask):
    return mask(*at()).expand(BATCH, HEADS, QUERIES, KEYS)


def full_where_some(mask):
    """A block mask whose blocks all are full, where they have a pair that attends: a full block does not ask the mask."""
    rows, columns = -(-QUERIES // BLOCK), -(-KEYS // BLOCK)
    padded = torch.zeros(BATCH, HEADS, rows * BLOCK, columns * BLOCK, dtype=torch.bool)
    padded[:, :, :QUERIES, :KEYS] = dense(mask)
    some = padded.unflatten(3, (columns, BLOCK)).unflatten(2, (rows, BLOCK)).any(5).any(3)
    counts, indices = some.sum(-1, dtype=torch.int32), torch.argsort(some.int(), dim=-1, descending=True, stable=True).int()
    none = torch.zeros_like(counts)
    block_mask = foci.BlockMask.from_kv_blocks(none, indices, counts, indices, BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=(QUERIES, KEYS))
    return block_mask, some.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[:, :, :QUERIES, :KEYS]


def created(create, block, mask, **options):
    return create(mask, BATCH, HEADS, QUERIES, KEYS, device="cpu", BLOCK_SIZE=block, **options), dense(mask)


GIVEN = {
    "function": lambda mask: (mask, dense(mask)),
    "tensor": lambda mask: (dense(mask), dense(mask)),
    "blocks": functools.partial(created, foci.create_block_mask, BLOCK),
    "one_block": functools.partial(created, foci.create_block_mask, 128),
    "joined_blocks": functools.partial(created, foci.create_block_mask, BLOCK, separate_full_blocks=False),
    "torch_blocks": functools.partial(created, create_by_torch, BLOCK),
    "full_blocks": full_where_some,
}
"""How a mask is given: what the call takes, and which pairs it means."""


def expected(tensors, score, allowed, gradient):
    """Results, gradients, by the formula in float64."""
    q, k, v = (t.detach().double().requires_grad_() for t in tensors)
    s = q @ k.mT / math.sqrt(WIDTH)
    s = torch.where(allowed, s if score is None else score(s, *at()), -math.inf)
    some = (s > -math.inf).any(-1, keepdim=True)
    weights = torch.where(some, torch.softmax(torch.where(some, s, 0.0), -1), 0.0)
    out = weights @ v
    return (out, *torch.autograd.grad(out, (q, k, v), gradient.double()))


def drawn():
    shapes = ((QUERIES,), (KEYS,), (KEYS,))
    return tuple(torch.randn(BATCH, HEADS, *n, WIDTH, generator=DRAWN).requires_grad_() for n in shapes)


def check(actual, exact):
    for name, a, b in zip(("out", "query", "key", "value"), actual, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=3e-5, msg=lambda text, name=name: f"{name}: {text}")


BACKENDS = ("triton",) if os.environ.get("TRITON_INTERPRET") == "1" else ("reference", "blocked", "cpu")
CASES = [pytest.param(*case, id="-".join(case)) for case in itertools.product(BACKENDS, GIVEN, MASKS, SCORES)]
FLEX = ("blocks", "one_block", "full_blocks")


# FLEX-02, FLEX-03, FLEX-04, FLEX-05, FLEX-06
@pytest.mark.parametrize("backend, form, mask, score", CASES)
def test_out_and_gradients(backend, form, mask, score):
    tensors, gradient = drawn(), torch.randn(BATCH, HEADS, QUERIES, WIDTH)
    taken, allowed = GIVEN[form](MASKS[mask])
    with foci.use(backend):
        if form in FLEX:
            out = foci.flex_attention(*tensors, score_mod=SCORES[score], block_mask=taken)
        else:
            out = foci.attention(*tensors, score=SCORES[score], mask=taken)
        results = (out, *torch.autograd.grad(out, tensors, gradient))
    check(results, expected(tensors, SCORES[score], allowed, gradient))
