"""Passes known from before: what each is known by, and where it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from foci.backends.contract import Given, Inputs
from foci.backends.triton.counts import Tokens
from foci.backends.triton.keeping import Kept
from foci.backends.triton.sparsity import Sequences
from foci.backends.triton.templates import Recording, Template
from foci.problem import Geometry

__all__ = ["Key", "are_aligned", "find_pass", "is_ready", "keep_pass", "lie", "lie_packed", "source_of_places", "strides_of", "tokens_at"]

Key: TypeAlias = tuple[object, ...]

_templates: Final[Kept[Template]] = Kept(1024)
"""Passes of jagged calls, wherever their sequences lie."""


def source_of_places(sequences: Sequences, tokens: Tokens, captures: Inputs) -> Inputs:
    """The `Source` of where sequences lie."""
    return sequences.tensors


def find_pass(key: Key, sequences: Sequences, tokens: Tokens, captures: Inputs) -> Recording | None:
    """The pass of that key, known of these sequences or of others."""
    if sequences.q_start is None:
        return sequences.recordings.find(key)
    found = sequences.recordings.find((key, *tokens))
    if found is None and (template := _templates.find((key, sequences.form))) is not None:
        found = template.bound(sequences, tokens, captures)
        sequences.recordings.add((key, *tokens), (), found)
    return found


def keep_pass(key: Key, sequences: Sequences, read: tuple[Tensor, ...], made: Recording) -> None:
    """Keeps a pass for `find_pass`; for other sequences too, unless their lengths are not all that it takes from them."""
    if sequences.q_start is None:
        sequences.recordings.add(key, read, made)
        return
    sequences.recordings.add((key, *made.tokens), read, made)
    if min(made.tokens) > 1:  # strides of a single token say nothing
        _templates.add((key, sequences.form), (), made.template.unbound())


def tokens_at(geometry: Geometry, query: Tensor, key: Tensor) -> Tokens:
    """Queries and keys of a head, of tensors as a known call is given them: [B, H, S, D], or packed [T, H, D]."""
    return (query.shape[0], key.shape[0]) if geometry.packed else (query.shape[2], key.shape[2])


def lie(tensor: Tensor | None) -> object:
    """How a tensor lies: what of it a launch takes besides its address."""
    return None if tensor is None else (tensor.shape, tensor.stride())


def lie_packed(tensor: Tensor | None) -> object:
    """`lie` of [1, H, T, D], but for T; row statistics [1, H, T] have no gaps."""
    if tensor is None or tensor.dim() == 3:
        return tensor is None
    return tensor.shape[1], tensor.shape[3], tensor.stride()[1:]


def strides_of(inputs: Inputs, given: Given, *, packed: bool = False) -> Key:
    """Of what a backward pass is given; as those of [T, H, D] with `packed`, where tensors are [1, H, T, D]."""
    found = [None if t is None else t.stride() for t in (given.out, given.dout, *inputs)]
    if packed:
        found[:5] = [(s[2], s[1], s[3]) for s in found[:5] if s is not None]
    elif given.out.dim() == 4 and given.out.shape[0] == 1:  # a step along one entry may depend on how many tokens it has
        found[:5] = [s[1:] for s in found[:5] if s is not None]
    return (given.dlse is None, *found)


def is_ready(given: Given) -> bool:
    """Whether row statistics are as kernels read them."""
    lse, dlse = given.lse, given.dlse
    return lse.is_contiguous() and (dlse is None or (dlse.dtype == torch.float32 and dlse.is_contiguous()))


def are_aligned(places: Sequence[int | None]) -> bool:
    """Whether all addresses are multiples of 16 bytes, as compiled kernels expect them."""
    address = 0
    for place in places:
        address |= place or 0
    return address & 15 == 0
