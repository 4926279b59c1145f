"""What a launch list allocates at each run: tensors whose sizes may depend on the number of tokens."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from foci.backends.gpu.stream_state import allocator_on
from foci.backends.gpu.symbolic_tokens import Count, Tokens, row_function

__all__ = ["Joint", "New", "Parts", "Scratch"]

_LINE: Final = 512
"""Bytes that the allocator's own tensors are aligned to."""


class New(NamedTuple):
    """A tensor that each run allocates."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int | None = None  # in the one allocation that all tensors with an offset share, in elements

    @property
    def packed(self) -> New:
        """Return the allocation as the caller of a packed call gets it: [1, H, T, D] as [T, H, D], and [1, H, T] as [H, T]."""
        (_, *size), (_, *stride) = self.size, self.stride
        if len(size) == 3:
            size[:2], stride[:2] = size[1::-1], stride[1::-1]
        return self._replace(size=tuple(size), stride=tuple(stride))

    def maker(self) -> Callable[[Tokens], functools.partial[Tensor]]:
        """Return a function from the number of tokens to a function that allocates the tensor."""
        allocate, dtype = allocator_on(self.device), self.dtype
        if not any(isinstance(n, Count) for n in (*self.size, *self.stride)):
            known = functools.partial(allocate, self.size, self.stride, dtype)
            return lambda tokens: known
        size, stride = row_function(self.size), row_function(self.stride)
        return lambda tokens: functools.partial(allocate, size(tokens), stride(tokens), dtype)

    @property
    def lines(self) -> int:
        """Size in lines of `_LINE` bytes, from the first element to the last."""
        if 0 in self.size:
            return 0
        span = 1
        for n, step in zip(self.size, self.stride, strict=True):
            span = (n - 1) * step + span  # `Count` supports the operations in this order
        return (span * self.dtype.itemsize + (_LINE - 1)) // _LINE


class Joint(NamedTuple):
    """Tensors that share one allocation."""

    # (size, strides, offset)
    parts: Sequence[tuple[tuple[int, ...], tuple[int, ...], int]]
    dtype: torch.dtype
    device: torch.device

    def maker(self) -> Callable[[], list[Tensor]]:
        """Return a function that allocates them."""
        last = max(at + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) for size, stride, at in self.parts)
        allocate = functools.partial(torch.empty, (last + 1,), dtype=self.dtype, device=self.device)

        def make() -> list[Tensor]:
            buffer = allocate()
            return [buffer.as_strided(*part) for part in self.parts]

        return make


class Parts(NamedTuple):
    """The tensors that share one allocation, for any number of tokens."""

    # (tokens -> size, tokens -> strides, offset)
    layouts: list[tuple[Callable[[Tokens], tuple[int, ...]], Callable[[Tokens], tuple[int, ...]], int]]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(news: Sequence[New]) -> Parts | None:
        layouts = [(row_function(new.size), row_function(new.stride), new.offset) for new in news if new.offset is not None]
        return Parts(layouts, news[0].dtype, news[0].device) if layouts else None

    def at(self, tokens: Tokens) -> Joint:
        """Return the allocation for a number of tokens."""
        return Joint([(size(tokens), stride(tokens), at) for size, stride, at in self.layouts], self.dtype, self.device)


class Scratch(NamedTuple):
    """One allocation for the tensors that a pass does not return."""

    lines: Callable[[Tokens], tuple[int, ...]]  # tokens -> for each tensor the line at which it ends
    device: torch.device

    @staticmethod
    def of(news: Sequence[New]) -> Scratch | None:
        return Scratch(row_function(list(itertools.accumulate(new.lines for new in news))), news[0].device) if news else None

    def at(self, tokens: Tokens) -> tuple[functools.partial[Tensor], list[int]]:
        """(function that allocates it, byte offset of each tensor) for a number of tokens."""
        ends = [_LINE * lines for lines in self.lines(tokens)]
        return functools.partial(allocator_on(self.device), (ends[-1],), (1,), torch.uint8), [0, *ends[:-1]]
