"""torch.nn's mask arguments: checked in its words, and brought to mask and score functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from foci import kv_len, masks, scores
from foci.nn.cache import Stored
from foci.nn.packing import Packing, is_nested, is_readable
from foci.prepare import check_is_tensor
from foci.variant import Mask, Score

__all__ = [
    "CAUSAL",
    "NOTHING",
    "Functions",
    "Place",
    "cached_place",
    "check_batches",
    "check_input",
    "check_mask",
    "check_packed",
    "check_padding_shape",
    "check_shapes",
    "check_variants",
    "detect_causal",
    "dropped",
    "explicit",
    "itself",
    "key_padding",
    "matrix",
    "packed_bias",
    "packed_place",
    "placed",
    "with_extra_keys",
]

Place: TypeAlias = Callable[[Any, Any], Any]


def check_mask(name: str, mask: Any) -> None:
    """Raises torch's AssertionError unless the mask is None, bool or floating, or a `Packing` in its place; TypeError for no tensor."""
    if mask is None or isinstance(mask, Packing):
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(mask).__name__}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise AssertionError(f"only bool and floating types of {name} are supported; got {mask.dtype}")


def check_shapes(query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> bool:
    """Whether the input is batched; raises torch's AssertionErrors where the numbers of dims do not fit."""
    if query.dim() not in (2, 3):
        raise AssertionError(f"query should be unbatched 2D or batched 3D tensor but received {query.dim()}-D query tensor")
    batched = query.dim() == 3
    words, dims = ("batched (3-D)", 3) if batched else ("unbatched (2-D)", 2)
    if key.dim() != dims or value.dim() != dims:
        raise AssertionError(
            f"For {words} `query`, expected `key` and `value` to be {dims}-D "
            f"but found {key.dim()}-D and {value.dim()}-D tensors respectively"
        )
    if key_padding_mask is not None and key_padding_mask.dim() != dims - 1:
        raise AssertionError(
            f"For {words} `query`, expected `key_padding_mask` to be `None` or {dims - 1}-D "
            f"but found {key_padding_mask.dim()}-D tensor instead"
        )
    if attn_mask is not None and attn_mask.dim() not in (2, 3):
        raise AssertionError(
            f"For {words} `query`, expected `attn_mask` to be `None`, 2-D or 3-D but found {attn_mask.dim()}-D tensor instead"
        )
    return batched


def check_input(**named: Any) -> None:
    """Raises a TypeError for what is no tensor, an AssertionError for one that is no batch, no sequence and no tokens."""
    check_is_tensor(**named)
    for name, x in named.items():
        if not is_nested(x) and x.dim() not in (2, 3):
            raise AssertionError(f"{name} must have 2 or 3 dimensions; got {x.dim()}")


def check_batches(query: int, key: int) -> None:
    """Raises an AssertionError unless there are as many rows of queries as of keys."""
    if query != key:
        raise AssertionError(f"query and key must have one batch size; got {query} and {key}")


def check_packed(cache: Any) -> None:
    """Raises a ValueError for a cache beside packed tokens."""
    if cache is not None:
        raise ValueError("cache takes padded batches only; got packed tokens")


def check_padding_shape(padding: Tensor, batch: int, length: int) -> None:
    """Raises torch's AssertionError unless the padding mask is [batch, length]."""
    for dim, size in enumerate((batch, length)):
        if padding.shape[dim] != size:
            raise AssertionError(f"Expected key_padded_mask.shape[{dim}] to be {size}, but got {padding.shape[dim]}")


def dropped(padding: Tensor | None) -> Tensor | None:
    """bool [B, n], which of the new tokens a cache does not store.

    Raises:
        ValueError: for a floating padding mask that adds to scores: what it adds would be gone at the next call.
    """
    if padding is None or not padding.is_floating_point():
        return padding
    out = padding == -torch.inf
    if is_readable(padding) and bool((~out & (padding != 0)).any()):
        raise ValueError("key_padding_mask beside a cache must be bool, or floating of 0 and -inf alone; it has other values")
    return out


def detect_causal(mask: Tensor | None, is_causal: bool | None, length: int | None) -> bool:
    """Whether a mask is the causal one: what the caller says, else a look at it, where values may be looked at.

    The result is a matter of speed only: a causal mask that is not recognised is applied as it stands.
    """
    if is_causal is not None or mask is None:
        return is_causal is True
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1] or mask.requires_grad or not is_readable(mask):
        return False
    if length is not None and mask.shape[0] != length:
        return False
    blocked = torch.ones_like(mask, dtype=torch.bool).triu_(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, blocked)
    return torch.equal(mask, torch.zeros_like(mask).masked_fill_(blocked, -torch.inf))


@dataclass(frozen=True)
class Functions:
    """A mask and a score, each None where there is none; `and_` composes."""

    mask: Mask | None = None
    score: Score | None = None

    def and_(self, other: Functions) -> Functions:
        """Both masks; these scores, then the others."""
        if other is NOTHING:
            return self
        mask = other.mask if self.mask is None else self.mask if other.mask is None else self.mask & other.mask
        score = other.score if self.score is None else self.score if other.score is None else self.score >> other.score
        return Functions(mask, score)


NOTHING: Final = Functions()
CAUSAL: Final = Functions(Mask(masks.causal().function, name="causal"))  # as torch.nn means it: no word on decoding steps


def explicit(attn_mask: Tensor, lengths: tuple[int, int], *, batch: int, heads: int) -> Tensor:
    """torch's [L, S] as it is, [B * H, L, S] as [B, H, L, S].

    Raises:
        RuntimeError: for another shape, in torch's words.
    """
    if attn_mask.dim() == 2:
        if attn_mask.shape != lengths:
            raise RuntimeError(f"The shape of the 2D attn_mask is {attn_mask.shape}, but should be {tuple(lengths)}.")
        return attn_mask
    if attn_mask.shape != (batch * heads, *lengths):
        raise RuntimeError(f"The shape of the 3D attn_mask is {attn_mask.shape}, but should be {(batch * heads, *lengths)}.")
    return torch.unflatten(attn_mask, 0, (batch, heads))


def matrix(values: Tensor) -> Functions:
    """Functions of a matrix: bool, true where the query does not attend, or added to the scores."""
    if values.dtype != torch.bool:
        return Functions(score=scores.bias(values))
    if values.dim() == 2:
        return Functions(Mask(lambda b, h, q_idx, kv_idx: ~values[q_idx, kv_idx], name="attn_mask"))
    return Functions(Mask(lambda b, h, q_idx, kv_idx: ~values[b, h, q_idx, kv_idx], name="attn_mask"))


def key_padding(padding: Tensor) -> Functions:
    """Functions of a padding mask [B, S]: bool, true where the key is padding, or added to the key's scores."""
    if padding.dtype != torch.bool:
        return Functions(score=scores.bias(padding[:, None, None]))
    return Functions(Mask(lambda b, h, q_idx, kv_idx: ~padding[b, kv_idx], name="key_padding"))


def packed_bias(packing: Packing) -> Functions:
    """Return what a floating padding mask adds to the keys that it keeps."""
    if packing.bias is None:
        return NOTHING
    values, offsets = packing.bias, packing.offsets
    return Functions(score=Score(lambda score, b, h, q_idx, kv_idx: score + values[offsets[b] + kv_idx], name="key_padding"))


def itself(b: Any, index: Any) -> Any:
    """An index that is a position."""
    return index


def packed_place(packing: Packing) -> Place:
    """Index within the sequence to position in the padded row."""
    if packing.columns is None:
        return itself
    if packing.starts is not None:
        starts = packing.starts
        return lambda b, index: index + starts[b]
    columns, offsets = packing.columns, packing.offsets
    return lambda b, index: columns[offsets[b] + index]


def cached_place(stored: Stored) -> Place:
    """Index of a new query to its position behind the tokens of a cache."""
    start, positions = stored.start, stored.positions
    if positions is not None:
        return lambda b, index: positions[b, index]
    return lambda b, index: index + start


def placed(functions: Functions, query: Place, key: Place) -> Functions:
    """Functions of positions as functions of indices."""
    if functions is NOTHING or (query is itself and key is itself):
        return functions
    mask, score = functions.mask, functions.score
    if mask is not None:
        attend = mask.function
        mask = Mask(lambda b, h, q_idx, kv_idx: attend(b, h, query(b, q_idx), key(b, kv_idx)), name=mask.name)
    if score is not None:
        change = score.function
        score = Score(lambda s, b, h, q_idx, kv_idx: change(s, b, h, query(b, q_idx), key(b, kv_idx)), name=score.name)
    return Functions(mask, score)


def with_extra_keys(functions: Functions, count: int, *, longest: int) -> Functions:
    """Functions for the keys before the last `count` of each sequence; those are attended as they are. `longest`: the other keys of the
    longest sequence; where there are none, tensors of masks have no entry to read."""
    if longest == 0:
        return NOTHING
    mask, score = functions.mask, functions.score

    def clamp_kv_idx(kv_idx: Any) -> Any:  # an index of the sequence's own keys, whatever the key
        return torch.minimum(kv_idx, kv_len() - (count + 1))

    if mask is not None:
        attend = mask.function
        mask = Mask(lambda b, h, q_idx, kv_idx: (kv_idx >= kv_len() - count) | attend(b, h, q_idx, clamp_kv_idx(kv_idx)), name=mask.name)
    if score is not None:
        change = score.function
        score = Score(
            lambda s, b, h, q_idx, kv_idx: torch.where(kv_idx >= kv_len() - count, s, change(s, b, h, q_idx, clamp_kv_idx(kv_idx))),
            name=score.name,
        )
    return Functions(mask, score)


_VARIANTS: Final[dict[str, tuple[str, type[Mask | Score]]]] = {
    "mask": ("a foci.Mask, a function (b, h, q_idx, kv_idx)", Score),
    "score": ("a foci.Score, a function (score, b, h, q_idx, kv_idx)", Mask),
}


def check_variants(**named: Any) -> None:
    """Raises a TypeError for a `mask` or `score` that cannot be one; None is none."""
    for name, variant in named.items():
        wanted, other = _VARIANTS[name]
        if variant is not None and (not callable(variant) or isinstance(variant, other)):
            raise TypeError(f"{name} must be {wanted} or a module that returns one; got {type(variant).__name__}")
