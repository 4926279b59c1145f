"""Masks that read a tensor: prefixes, documents, padding, any bool tensor."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from foci.mask_examples import Definition, MaskExample, Sizes
from foci.masks.positional import check_tensor
from foci.variant import Mask, picklable

__all__ = ["causal_or_bidirectional", "dense", "document", "document_offsets", "key_padding", "padding", "prefix_lm"]

_INTEGERS: Final = (torch.int32, torch.int64)


@picklable
def prefix_lm(prefix: int | Tensor) -> Mask:
    """Causal, but the first `prefix` keys are seen by all (Raffel et al., 2020, section 3.2.1).

    Args:
        prefix: length of the prefix, or an integer tensor [B] of lengths.

    Raises:
        TypeError: for a tensor that is not of an integer dtype, or another type.
        ValueError: for a tensor of another rank, or a negative length.

    Example:
        >>> prefix_lm(100).name
        'prefix_lm'
    """
    if isinstance(prefix, Tensor):
        lengths = prefix
        check_tensor("prefix", lengths, dtypes=_INTEGERS, ranks=(1,), shape="an integer or [B]")
        return Mask(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (kv_idx < lengths[b]), name="prefix_lm")
    if isinstance(prefix, bool) or not isinstance(prefix, (int, torch.SymInt)):
        raise TypeError(f"prefix must be an integer or an integer tensor [B], got {type(prefix).__name__}")
    if prefix < 0:
        raise ValueError(f"prefix must not be negative, got {prefix}")
    return Mask(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (kv_idx < prefix), name="prefix_lm")


@picklable
def causal_or_bidirectional(bounds: Tensor) -> Mask:
    """Queries before their batch entry's bound are causal, later ones attend everything.

    A bound of 0 makes an entry bidirectional, a bound of Sq makes it causal.

    Args:
        bounds: integer tensor [B].

    Raises:
        TypeError: for another dtype.
        ValueError: for another rank.

    Example:
        >>> causal_or_bidirectional(torch.tensor([0, 128])).name
        'causal_or_bidirectional'
    """
    check_tensor("bounds", bounds, dtypes=_INTEGERS, ranks=(1,), shape="[B]")
    return Mask(lambda b, h, q_idx, kv_idx: (q_idx >= bounds[b]) | (q_idx >= kv_idx), name="causal_or_bidirectional")


@picklable
def document(ids: Tensor, kv_ids: Tensor | None = None) -> Mask:
    """Packed documents: a query attends the keys of its own document (Krell et al., 2021).

    Args:
        ids: integer tensor [Sq] or [B, Sq], the document of each query.
        kv_ids: integer tensor [Skv] or [B, Skv], the document of each key, where they differ.

    Raises:
        TypeError: for another dtype.
        ValueError: for another rank.

    Example:
        >>> mask = document(torch.tensor([0, 0, 0, 1, 1])) & Mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    """
    keys = ids if kv_ids is None else kv_ids
    check_tensor("ids", ids, dtypes=_INTEGERS, ranks=(1, 2), shape="[Sq] or [B, Sq]")
    check_tensor("kv_ids", keys, dtypes=_INTEGERS, ranks=(1, 2), shape="[Skv] or [B, Skv]")

    def attend(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        of_query = ids[q_idx] if ids.dim() == 1 else ids[b, q_idx]
        of_key = keys[kv_idx] if keys.dim() == 1 else keys[b, kv_idx]
        return of_query == of_key

    return Mask(attend, name="document")


def document_offsets(offsets: Tensor, kv_offsets: Tensor | None = None) -> Mask:
    """Packed documents given by where each begins: document i covers `offsets[i]` to `offsets[i + 1]`.

    Args:
        offsets: integer tensor [documents + 1], from 0 to Sq, never falling (`cu_seqlens`). Its end is read on the host once.
        kv_offsets: the same for the keys, where they differ; as many documents.

    Raises:
        TypeError: for another dtype.
        ValueError: for another rank, or different numbers of documents.

    Example:
        >>> document_offsets(torch.tensor([0, 100, 350, 512])).name
        'document'
    """
    check_tensor("offsets", offsets, dtypes=_INTEGERS, ranks=(1,), shape="[documents + 1]")
    if kv_offsets is None:
        return document(_ids("offsets", offsets))
    check_tensor("kv_offsets", kv_offsets, dtypes=_INTEGERS, ranks=(1,), shape="[documents + 1]")
    if kv_offsets.shape != offsets.shape:
        raise ValueError(
            f"offsets and kv_offsets must name as many documents, got shapes {list(offsets.shape)} and {list(kv_offsets.shape)}"
        )
    return document(_ids("offsets", offsets), _ids("kv_offsets", kv_offsets))


def _ids(name: str, offsets: Tensor) -> Tensor:
    if offsets.numel() and bool((offsets.diff() < 0).any() | (offsets[0] != 0)):
        raise ValueError(f"{name} must begin at 0 and not decrease, got {offsets.tolist()}")
    positions = torch.arange(int(offsets[-1]), device=offsets.device, dtype=offsets.dtype)
    return torch.bucketize(positions, offsets[1:], right=True, out_int32=True)


@picklable
def padding(lengths: Tensor, q_lengths: Tensor | None = None) -> Mask:
    """Keys within the length of their batch entry.

    Args:
        lengths: integer tensor [B], keys of each entry.
        q_lengths: integer tensor [B]; queries past it attend nothing, so that their output is zero.

    Raises:
        TypeError: for another dtype.
        ValueError: for another rank.

    Example:
        >>> padding(torch.tensor([37, 512])).name
        'padding'
    """
    check_tensor("lengths", lengths, dtypes=_INTEGERS, ranks=(1,), shape="[B]")
    if q_lengths is None:
        return Mask(lambda b, h, q_idx, kv_idx: kv_idx < lengths[b], name="padding")
    rows = q_lengths
    check_tensor("q_lengths", rows, dtypes=_INTEGERS, ranks=(1,), shape="[B]")
    return Mask(lambda b, h, q_idx, kv_idx: (kv_idx < lengths[b]) & (q_idx < rows[b]), name="padding")


@picklable
def key_padding(keep: Tensor) -> Mask:
    """Keys that a bool tensor keeps, such as a tokenizer's attention mask.

    Args:
        keep: bool [B, Skv], True where a key may be attended.

    Raises:
        TypeError: for another dtype.
        ValueError: for another rank.

    Example:
        >>> key_padding(torch.tensor([[True, True, False]])).name
        'key_padding'
    """
    check_tensor("keep", keep, dtypes=(torch.bool,), ranks=(2,), shape="[B, Skv]")
    return Mask(lambda b, h, q_idx, kv_idx: keep[b, kv_idx], name="key_padding")


@picklable
def dense(mask: Tensor) -> Mask:
    """Any bool tensor: True where a query attends.

    Args:
        mask: bool, 1 to 4 dims that broadcast to [B, Hq, Sq, Skv].

    Raises:
        TypeError: for another dtype.
        ValueError: for another rank.

    Example:
        >>> dense(torch.ones(5, 5, dtype=torch.bool).tril()).name
        'dense'
    """
    check_tensor("mask", mask, dtypes=(torch.bool,), ranks=(1, 2, 3, 4), shape="broadcastable to [B, Hq, Sq, Skv], of 1 to 4 dims")
    rank = mask.dim()

    def attend(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        coordinates = (b, h, q_idx, kv_idx)[4 - rank :]
        return mask[tuple(0 if n == 1 else at for n, at in zip(mask.shape, coordinates, strict=True))]

    return Mask(attend, name="dense")


def _lengths(sizes: Sizes) -> tuple[Tensor, ...]:
    return (torch.randint(0, sizes.Skv + 1, (sizes.B,), generator=sizes.generator()),)


def _both_lengths(sizes: Sizes) -> tuple[Tensor, ...]:
    return (*_lengths(sizes), torch.randint(0, sizes.Sq + 1, (sizes.B,), generator=sizes.generator()))


def _document_ids(sizes: Sizes) -> tuple[Tensor, ...]:
    return (torch.arange(max(sizes.Sq, sizes.Skv)) // 13,)


def _batched_ids(sizes: Sizes) -> tuple[Tensor, ...]:
    steps = torch.arange(7, 7 + sizes.B)[:, None]
    return torch.arange(sizes.Sq) // steps, torch.arange(sizes.Skv) // steps


def _offsets(sizes: Sizes) -> tuple[Tensor, ...]:
    fractions = torch.tensor([0.0, 0.3, 0.3, 0.8, 1.0])
    return (fractions * sizes.Sq).to(torch.int32), (fractions * sizes.Skv).to(torch.int32)


def _offsets_formula(sizes: Sizes, q_offsets: Tensor, kv_offsets: Tensor) -> Tensor:
    attend = torch.zeros(sizes.Sq, sizes.Skv, dtype=torch.bool, device=q_offsets.device)
    for i in range(len(q_offsets) - 1):
        attend[q_offsets[i] : q_offsets[i + 1], kv_offsets[i] : kv_offsets[i + 1]] = True
    return attend


def _keep(sizes: Sizes) -> tuple[Tensor, ...]:
    return (torch.rand(sizes.B, sizes.Skv, generator=sizes.generator()) < 0.7,)


def _random(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(2)) < 0.5


def _causal(sizes: Sizes) -> Tensor:
    return torch.ones(sizes.Sq, sizes.Skv, dtype=torch.bool).tril()


def _column(lengths: Tensor) -> Tensor:
    return lengths[:, None, None, None]


_T5: Final = ("Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer (Raffel et al., 2020)", "1910.10683")
DEFINITIONS: Final = {
    "prefix_lm": Definition("(kv_idx <= q_idx) | (kv_idx < prefix[b])", (), "A number is the prefix of each batch entry.", *_T5),
    "causal_or_bidirectional": Definition("(kv_idx <= q_idx) | (q_idx >= bounds[b])"),
    "document": Definition(
        "ids[b, q_idx] == kv_ids[b, kv_idx]",
        (),
        "`kv_ids` is `ids` unless given; without a batch dim all batch entries share them.",
        "Efficient Sequence Packing without Cross-contamination (Krell et al., 2021)",
        "2107.02027",
    ),
    "document_offsets": Definition(
        "count(offsets <= q_idx) == count(kv_offsets <= kv_idx)",
        (),
        "`count` is the number of offsets for which the comparison is true.",
        "Efficient Sequence Packing without Cross-contamination (Krell et al., 2021)",
        "2107.02027",
    ),
    "padding": Definition("(kv_idx < lengths[b]) & (q_idx < q_lengths[b])", (), "Without `q_lengths` the second condition is not there."),
    "key_padding": Definition("keep[b, kv_idx]"),
    "dense": Definition("mask[b, h, q_idx, kv_idx]", (), "`mask` broadcasts."),
}

EXAMPLES: Final = (
    MaskExample("prefix_lm", "causal after a common prefix", lambda s: prefix_lm(9), lambda s: _causal(s) | (torch.arange(s.Skv) < 9)),
    MaskExample(
        "prefix_lm_batch",
        "causal after a prefix of each batch entry",
        lambda s, n: prefix_lm(n),
        lambda s, n: _causal(s).to(n.device) | (torch.arange(s.Skv, device=n.device) < _column(n)),
        _lengths,
    ),
    MaskExample(
        "causal_or_bidirectional",
        "causal rows up to a bound of each batch entry",
        lambda s, n: causal_or_bidirectional(n),
        lambda s, n: _causal(s).to(n.device) | (torch.arange(s.Sq, device=n.device)[:, None] >= _column(n)),
        _lengths,
    ),
    MaskExample(
        "document",
        "packed documents by their ids",
        lambda s, ids: document(ids),
        lambda s, ids: ids[: s.Sq, None] == ids[: s.Skv],
        _document_ids,
    ),
    MaskExample(
        "document_batch",
        "packed documents, other ids in each batch entry",
        lambda s, q, kv: document(q, kv),
        lambda s, q, kv: q[:, None, :, None] == kv[:, None, None, :],
        _batched_ids,
    ),
    MaskExample(
        "document_offsets", "packed documents by where they begin", lambda s, q, kv: document_offsets(q, kv), _offsets_formula, _offsets
    ),
    MaskExample(
        "padding",
        "keys within the length of their batch entry",
        lambda s, n: padding(n),
        lambda s, n: torch.arange(s.Skv, device=n.device) < _column(n),
        _lengths,
    ),
    MaskExample(
        "padding_both",
        "keys and queries within their lengths",
        lambda s, n, m: padding(n, m),
        lambda s, n, m: (torch.arange(s.Skv, device=n.device) < _column(n)) & (torch.arange(s.Sq, device=n.device)[:, None] < _column(m)),
        _both_lengths,
    ),
    MaskExample(
        "key_padding", "keys that a bool tensor keeps", lambda s, keep: key_padding(keep), lambda s, keep: keep[:, None, None, :], _keep
    ),
    MaskExample("dense", "any bool matrix", lambda s, m: dense(m), lambda s, m: m, lambda s: (_random(s.Sq, s.Skv),)),
    MaskExample("dense_keys", "a bool vector over the keys", lambda s, m: dense(m), lambda s, m: m, lambda s: (_random(s.Skv),)),
    MaskExample(
        "dense_heads", "a bool matrix for each head", lambda s, m: dense(m), lambda s, m: m, lambda s: (_random(s.Hq, s.Sq, s.Skv),)
    ),
    MaskExample(
        "dense_rows", "a bool for each batch entry and row", lambda s, m: dense(m), lambda s, m: m, lambda s: (_random(s.B, 1, s.Sq, 1),)
    ),
)
