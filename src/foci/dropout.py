"""Which weights dropout keeps: a counter-based random number for every (seed, b, h, q, kv), whatever the tiling.

Philox4x32 with 7 rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in
torch int64 arithmetic. The key is the seed (low word, high word), the counter is `(kv // 4, q, h, b)`, and entry
`kv % 4` of the four output words decides about key `kv`. A weight is kept when its word is at least
`floor(p * 2**32)`, so a kernel in any language rebuilds the same mask.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

__all__ = ["keep", "keep_run", "philox", "threshold"]

ROUNDS: Final = 7
_WORD: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)


def threshold(probability: float) -> int:
    """The least 32-bit word that keeps a weight: `floor(probability * 2**32)`, at most `2**32 - 1`."""
    return min(math.floor(probability * 2.0**32), _WORD)


def philox(seed: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute random numbers with Philox4x32-7.

    Args:
        seed: int64, one element or broadcastable; its low and high word are the key.
        counter: four integer tensors that broadcast together, each entry in [0, 2**32).

    Returns:
        Four int64 tensors of uniform words in [0, 2**32).

    Example:
        >>> words = philox(torch.tensor([0]), tuple(torch.zeros(1, dtype=torch.int64) for _ in range(4)))
        >>> [hex(int(word)) for word in words]
        ['0x5f6fb709', '0xd893f64', '0x4f121f81', '0x4f730a48']
    """
    key0, key1 = seed & _WORD, (seed >> 32) & _WORD
    c0, c1, c2, c3 = (c.to(torch.int64) for c in counter)
    for i in range(ROUNDS):
        # The product wraps around 2**63, which leaves all 64 bits of the unsigned product in place.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        round_key0, round_key1 = (key0 + i * _WEYL[0]) & _WORD, (key1 + i * _WEYL[1]) & _WORD
        c0, c2 = ((second >> 32) & _WORD) ^ c1 ^ round_key0, ((first >> 32) & _WORD) ^ c3 ^ round_key1
        c1, c3 = second & _WORD, first & _WORD
    return c0, c1, c2, c3


def _broadcast(*tensors: Tensor) -> torch.Size:
    shape: torch.Size = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    return shape


def keep(seed: Tensor, probability: float, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Which weights are kept, at any coordinates.

    Args:
        seed: int64 [1].
        probability: of dropping a weight, in [0, 1].
        b, h, q, kv: batch entry (or sequence), query head, query and key position within the sequence: integer
            tensors that broadcast together.

    Returns:
        bool, of the broadcast shape. A kept weight is to be divided by `1 - probability`.

    Example:
        >>> at = torch.arange(4)
        >>> keep(torch.tensor([7]), 0.5, at[:1], at[:1], at[:, None], at).shape
        torch.Size([4, 4])
    """
    shape = _broadcast(b, h, q, kv)
    if probability >= 1:
        return torch.zeros(shape, dtype=torch.bool, device=kv.device)
    words = philox(seed, (kv >> 2, q, h, b))
    lane = kv & 3
    word = torch.where(lane < 2, torch.where(lane == 0, words[0], words[1]), torch.where(lane == 2, words[2], words[3]))
    return (word >= threshold(probability)).expand(shape)


def keep_run(seed: Tensor, probability: float, rows: tuple[Tensor, Tensor, Tensor], start: int, stop: int) -> Tensor:
    """`keep` for the keys `start` to `stop`, four keys to one evaluation.

    Args:
        seed: int64 [1].
        probability: of dropping a weight, in [0, 1].
        rows: b, h and q, integer tensors that broadcast together, the last dimension of size 1.
        start, stop: the run of keys.

    Returns:
        bool [..., stop - start], the leading dimensions those of the rows.
    """
    b, h, q = rows
    leading = _broadcast(b, h, q)[:-1]
    if probability >= 1 or start >= stop:
        return torch.zeros((*leading, stop - start), dtype=torch.bool, device=q.device)
    groups = torch.arange(start >> 2, ((stop - 1) >> 2) + 1, device=q.device)
    words = torch.stack(philox(seed, (groups, q, h, b)), dim=-1)
    kept = (words >= threshold(probability)).flatten(-2)
    skip = start & 3
    return kept[..., skip : skip + stop - start]
