"""Sizes that many batches share: tokens, sequences and lengths rounded up, and rows that no sequence has between."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from torch import Tensor

from foci.nn.packing import Packing

__all__ = ["Bucket", "BucketShape", "check_sizes", "choose_shape", "round_up"]

_PARTS: Final = 32
"""Steps to a power of two: a batch has 3 % spare rows on average, 6 % at most."""
_TOKENS: Final = 64
_SEQUENCES: Final = 8


def round_up(count: int, *, least: int, parts: int) -> int:
    """The next multiple of `least`, or of a share of the power of two above, whichever is larger.

    Example:
        >>> [round_up(n, least=64, parts=32) for n in (0, 1, 65, 5151)]
        [64, 64, 128, 5376]
    """
    step = max(least, (1 << max(0, count - 1).bit_length()) // parts)
    return max(1, -(-count // step)) * step


def check_sizes(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    """The sizes, in order.

    Raises:
        TypeError: for what is no sequence of them.
        ValueError: for none at all, or some that are no positive integers.
    """
    if sizes is None:
        return None
    if not isinstance(sizes, Sequence):
        raise TypeError(f"sizes must be a sequence of positive integers, numbers of tokens; got {type(sizes).__name__}")
    sorted_sizes = tuple(sorted(sizes))
    if not sorted_sizes or any(type(size) is not int or size < 1 for size in sorted_sizes):
        raise ValueError(f"sizes must be positive integers, numbers of tokens; got {list(sizes)}")
    return sorted_sizes


@dataclass(frozen=True)
class BucketShape:
    """Sizes that a batch fits in: rows for its tokens, sequences, a bound of their length, and the padded length."""

    tokens: int
    sequences: int
    longest: int
    length: int


def choose_shape(packing: Packing, tokens: int, sizes: tuple[int, ...] | None, *, exact: bool) -> BucketShape:
    """The room that a batch is computed in.

    Args:
        packing: of the batch.
        tokens: how many it has.
        sizes: what to round these up to; None for steps of a power of two.
        exact: whether sequences and lengths are as given, because something is indexed by them.

    Raises:
        ValueError: for more tokens than the largest of the sizes.
    """
    if sizes is None:
        rows = round_up(tokens, least=_TOKENS, parts=_PARTS)
    elif tokens <= sizes[-1]:
        rows = sizes[bisect.bisect_left(sizes, tokens)]
    else:
        raise ValueError(f"sizes go to {sizes[-1]} tokens; this batch has {tokens}")
    batch, length = packing.shape
    if exact:
        return BucketShape(rows, batch, length, length)
    longest = round_up(packing.longest, least=_TOKENS, parts=1)
    return BucketShape(rows, round_up(batch, least=_SEQUENCES, parts=_PARTS), longest, longest)


class Bucket(NamedTuple):
    """One packed input among the tensors of a bucket: its room, and which tensors of its `Packing` it has besides the offsets."""

    room: BucketShape
    columns: bool
    starts: bool
    bias: bool

    @staticmethod
    def of(packing: Packing, room: BucketShape) -> Bucket:
        """The seat of a batch."""
        return Bucket(room, packing.columns is not None, packing.starts is not None, packing.bias is not None)

    def make(self, tokens: Tensor, packing: Packing) -> list[Tensor]:
        """Tensors that this batch, and any other of this seat, is copied into: tokens [N, E], then the packing's."""
        room, like = self.room, packing.offsets
        buffers = [tokens.new_empty((room.tokens, *tokens.shape[1:])), like.new_empty(room.sequences + 1)]
        sizes = ((packing.columns, room.tokens), (packing.starts, room.sequences), (packing.bias, room.tokens))
        return buffers + [t.new_empty(size) for t, size in sizes if t is not None]

    def fill(self, tensors: Sequence[Tensor], tokens: Tensor, packing: Packing) -> None:
        """Copies a batch into them. Spare rows are zeros, and behind the last sequence; spare sequences have no token."""
        sources = [tokens, packing.offsets, packing.columns, packing.starts, packing.bias]
        for into, tensor in zip(tensors, [t for t in sources if t is not None], strict=True):
            count = tensor.shape[0]
            into[:count].copy_(tensor)
            if count < into.shape[0]:
                if tensor is packing.offsets:
                    into[count:].copy_(tensor[-1:].expand(into.shape[0] - count))
                else:
                    into[count:].zero_()

    def packing(self, tensors: Sequence[Tensor]) -> Packing:
        """The `Packing` that they make, the tokens first."""
        rest, room = iter(tensors[1:]), self.room
        offsets = next(rest)
        columns, starts, bias = (next(rest) if has else None for has in self[1:])
        return Packing(offsets, room.longest, (room.sequences, room.length), columns=columns, starts=starts, bias=bias)

    @property
    def width(self) -> int:
        """How many tensors there are."""
        return 2 + self.columns + self.starts + self.bias
