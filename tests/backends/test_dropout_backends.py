"""The keep mask: known answers, statistics, independence of how it is cut."""

# SDPA-08

from __future__ import annotations

import math

import pytest
import torch

from foci.dropout import keep, keep_run, philox, threshold

WORD = 0xFFFFFFFF
# philox4x32 with 7 rounds, of the known answers that Random123 publishes: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((WORD,) * 4, (WORD, WORD), (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


def philox_of_big_integers(counter, key, rounds=7):
    """The definition, on unbounded integers (Salmon et al. 2011, section 3.3)."""
    c, (k0, k1) = list(counter), key
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return tuple(c)


def signed(key) -> torch.Tensor:
    word = key[0] | key[1] << 32
    return torch.tensor([word - (1 << 64) if word >= 1 << 63 else word])


@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_known_answers(counter, key, result):
    assert philox_of_big_integers(counter, key) == result
    words = philox(signed(key), tuple(torch.tensor([c]) for c in counter))
    assert tuple(int(w) for w in words) == result


def test_equals_big_integers():
    generator = torch.Generator().manual_seed(0)
    counters = torch.randint(0, 1 << 32, (200, 4), generator=generator)
    seed = torch.tensor([-0x123456789ABCDEF])
    key = (int(seed) & WORD, (int(seed) >> 32) & WORD)
    words = torch.stack(philox(seed, tuple(counters.unbind(1))), dim=1)
    assert words.tolist() == [list(philox_of_big_integers(row, key)) for row in counters.tolist()]


def grid(b=3, h=2, q=5, kv=37):
    sizes = (b, h, q, kv)
    return [torch.arange(n, dtype=torch.int32).view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(sizes)]


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.25, 0.5, 0.999, 1.0])
def test_follows_the_definition(p):
    seed = torch.tensor([0x1234567887654321])
    actual = keep(seed, p, *grid())
    key = (0x87654321, 0x12345678)
    for b, h, q, kv in [(0, 0, 0, 0), (2, 1, 4, 36), (1, 0, 3, 7), (0, 1, 2, 30)]:
        word = philox_of_big_integers((kv // 4, q, h, b), key)[kv % 4]
        assert bool(actual[b, h, q, kv]) == (p < 1 and word >= min(math.floor(p * 2**32), WORD))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("start, stop", [(0, 37), (0, 4), (1, 2), (3, 9), (8, 8), (5, 37), (36, 37)])
def test_runs_are_parts_of_the_whole(p, start, stop):
    seed, (b, h, q, kv) = torch.tensor([99]), grid()
    full = keep(seed, p, b, h, q, kv)
    assert torch.equal(keep_run(seed, p, (b, h, q), start, stop), full[..., start:stop])
    assert torch.equal(keep_run(seed, p, (b[1:], h, q[:, :, 2:4]), start, stop), full[1:, :, 2:4, start:stop])


def test_ends_of_the_probability():
    seed, at = torch.tensor([5]), grid()
    assert keep(seed, 0.0, *at).all()
    assert not keep(seed, 1.0, *at).any()
    assert threshold(1 - 2**-40) == WORD


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_statistics(p):
    kept = keep(torch.tensor([2024]), p, *grid(4, 4, 64, 256)).double()
    n = kept.numel()
    assert abs(float(kept.mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
    for dim in range(4):  # neighbours along each coordinate are uncorrelated
        first, second = kept.narrow(dim, 0, kept.shape[dim] - 1), kept.narrow(dim, 1, kept.shape[dim] - 1)
        correlation = float(((first - (1 - p)) * (second - (1 - p))).mean()) / (p * (1 - p))
        assert abs(correlation) < 5 / math.sqrt(first.numel())


def test_seeds_differ():
    masks = [keep(torch.tensor([seed]), 0.5, *grid()) for seed in (0, 1, 1 << 32, -1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
