"""Where the tokens of a padding mask are: found by the host, where that is faster, and known again."""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import itertools
from contextlib import AbstractContextManager
from typing import Final, NamedTuple

import torch
from torch import Tensor

from foci import cache_check
from foci.compat.cuda import raw_stream
from foci.weak_cache import cache_derived, find_derived, tensor_state

__all__ = ["TokenPlaces", "find_tokens"]


class TokenPlaces(NamedTuple):
    """As `foci.nn.Packing` has them."""

    offsets: Tensor
    longest: int
    indices: Tensor
    columns: Tensor | None = None
    starts: Tensor | None = None
    bias: Tensor | None = None


def find_tokens(padding: Tensor, *, batch_first: bool) -> TokenPlaces | None:
    """Where the tokens of a padding mask [B, S] are, for tensors [B, S, ...] or [S, B, ...]; None if it masks nothing and adds nothing."""
    count = padding.numel()
    if count == 0:
        return None
    if count <= _FEW and padding.dtype == torch.bool and (padding.is_cuda or padding.is_cpu):
        return _of_bytes(padding, batch_first=batch_first)
    with _ordinary():
        if padding.is_inference():
            padding = padding.clone()
        read = padding.detach()
        return _search_tokens(padding, read.cpu() if padding.is_cuda and count <= _FEW else read, padding.device, batch_first=batch_first)


def _ordinary() -> AbstractContextManager[None]:
    """Where tensors are made of which backends may keep what they find, layer for layer."""
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def _of_bytes(padding: Tensor, *, batch_first: bool) -> TokenPlaces | None:
    """Tokens of a bool mask that the host looks through; known again by the mask's bytes, as modules are often given one mask one after
    another, and kernels keep what they find of its offsets."""
    (batch, length), device = padding.shape, padding.device
    read = padding.cpu().contiguous()
    memory = ctypes.string_at(read.data_ptr(), batch * length)
    stream = raw_stream(device.index) if padding.is_cuda else 0  # it is copied there by
    key = _SearchKey(memory, batch, device, stream, batch_first)
    cached: _CachedSearch | None = find_derived("padding", key)
    if cached is not None and cached.is_unchanged():
        if cache_check.ENABLED:
            anew = _CachedSearch.of(_search_bytes(memory, read, device, batch_first=batch_first))
            cache_check.compare_tensors("the cache of padding masks", cached.tensors, anew.tensors)
        return cached.places
    places = _search_bytes(memory, read, device, batch_first=batch_first)
    cache_derived("padding", key, (), _CachedSearch.of(places))
    return places


def _search_bytes(memory: bytes, read: Tensor, device: torch.device, *, batch_first: bool) -> TokenPlaces | None:
    """Tokens of a bool mask `read` on the host, which has these bytes."""
    with _ordinary():
        on_the_left = _lengths_on_the_left(memory, *read.shape) if batch_first else None
        if on_the_left is not None:
            return _found_on_the_left(on_the_left, read.shape[1], device)
        read = read.clone()
        return _search_tokens(read, read, device, batch_first=batch_first)


class _SearchKey(NamedTuple):
    """The inputs of a search through a mask's bytes."""

    memory: bytes
    batch: int
    device: torch.device
    stream: int
    batch_first: bool


class _CachedSearch(NamedTuple):
    """A result of a search, and the states of its tensors then: they are handed to whoever may write to them."""

    places: TokenPlaces | None
    tensors: tuple[Tensor, ...]
    states: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(places: TokenPlaces | None) -> _CachedSearch:
        tensors = tuple([t for t in places or () if isinstance(t, Tensor)])
        return _CachedSearch(places, tensors, tuple([tensor_state(t) for t in tensors]))

    def is_unchanged(self) -> bool:
        return tuple([tensor_state(t) for t in self.tensors]) == self.states


def _search_tokens(padding: Tensor, read: Tensor, device: torch.device, *, batch_first: bool) -> TokenPlaces | None:
    """Tokens of any mask, for tensors on the device, by a look at `read`, the mask wherever it is looked at."""
    batch, length = padding.shape
    floating = padding.is_floating_point()
    keep = read > -torch.inf if floating else read.logical_not()
    lengths = keep.sum(1)
    rises = (keep[:, 1:] > keep[:, :-1]).sum(1)
    facts = [lengths, rises, keep[:, 0]]
    if floating:
        facts.append((keep & (read != 0)).any(1))
    filled, inner_rises, first, *added = torch.stack(facts).tolist()  # the one synchronisation, of a mask that lies on the device
    tokens, longest, inner = sum(filled), max(filled), max(inner_rises)
    runs = max(rise + start for rise, start in zip(inner_rises, first, strict=True))
    bias_used = any(any(row) for row in added) or padding.requires_grad
    if tokens == batch * length and not bias_used:
        return None
    flat = keep.flatten().nonzero() if keep.device.type == "cpu" else torch.nonzero_static(keep.flatten(), size=tokens)
    flat = flat.squeeze(1)
    columns = flat % length if inner > 0 or not batch_first else None
    offsets = lengths.new_zeros(batch + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])

    def sent(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    indices = sent(flat if columns is None or batch_first else columns * batch + flat // length)
    return TokenPlaces(
        offsets=sent(offsets),
        longest=longest,
        indices=indices,
        columns=None if columns is None or inner == 0 else sent(columns),
        starts=sent(keep.long().argmax(1)) if inner > 0 and runs <= 1 else None,
        bias=padding.flatten().index_select(0, sent(flat)) if bias_used else None,
    )


def _lengths_on_the_left(memory: bytes, batch: int, length: int) -> list[int] | None:
    """Tokens of each row of a bool mask [B, S], if all padding is on the right; by its bytes, as each operation of torch takes longer
    than a look at a row."""
    lengths: list[int] = []
    rows: list[bytes] = []
    token, hidden = bytes(length), b"\1" * length
    for start in range(0, batch * length, length):
        end = memory.find(1, start, start + length)
        tokens = length if end < 0 else end - start
        lengths.append(tokens)
        rows += (token[:tokens], hidden[tokens:])
    return lengths if b"".join(rows) == memory else None


def _found_on_the_left(lengths: list[int], length: int, device: torch.device) -> TokenPlaces | None:
    """Tokens of rows [S] whose first `lengths` positions are tokens, of `_FEW` positions at most."""
    batch, places = len(lengths), _places()
    ends = list(itertools.accumulate(lengths, initial=0))
    if ends[-1] == batch * length:
        return None
    rows = [places[start : start + tokens] for start, tokens in zip(range(0, batch * length, length), lengths, strict=True)]
    both = torch.frombuffer(bytearray().join([array.array("q", ends), *rows]), dtype=torch.int64)
    if device.type != "cpu":
        both = both.to(device, non_blocking=True)
    offsets, indices = both.split_with_sizes((batch + 1, ends[-1]))
    return TokenPlaces(offsets, max(lengths), indices)


@functools.cache
def _places() -> memoryview:
    """0, 1, 2, ... as int64."""
    return memoryview(array.array("q", range(_FEW)))


_FEW: Final = 1 << 15
"""Elements of a mask at most that the host looks through itself: it launches kernels that do for longer."""
