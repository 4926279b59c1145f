"""Attention over keys and values that lie in pages of a pool, as a server keeps them."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from foci.api import AuxOutput, AuxRequest, returned
from foci.core import Tensors
from foci.dispatch import run
from foci.errors import ArgumentError
from foci.normalize import MaskLike, ScoreLike, check_outputs, check_sink, lower_right_form, mask_parts, score_parts
from foci.prepare import Extras, check_inputs, check_integers, check_is_tensor, describe

__all__ = ["paged_attention"]


@overload
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    *,
    max_kv: int | None = None,
    mask: MaskLike = None,
    score: ScoreLike = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_aux: None = None,
) -> Tensor: ...


@overload
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    *,
    max_kv: int | None = None,
    mask: MaskLike = None,
    score: ScoreLike = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]: ...


@overload
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    *,
    max_kv: int | None = None,
    mask: MaskLike = None,
    score: ScoreLike = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]: ...


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    *,
    max_kv: int | None = None,
    mask: MaskLike = None,
    score: ScoreLike = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """`foci.attention` over a paged cache (Kwon et al., "PagedAttention", 2023): row b attends to its own pages, in order.

    Key n of row b lies in page `page_table[b, n // page_size]` at place `n % page_size`. Functions are told the index n
    within the row, and `foci.kv_len()` is the row's own length: `masks.causal_lower_right()` is the mask of decoding.

    Args:
        query: [B, Hq, Sq, D], float16, bfloat16, float32 or float64.
        key: [pages, Hkv, page_size, D], the pool; Hq a multiple of Hkv. Any strides.
        value: [pages, Hkv, page_size, Dv].
        page_table: int32 or int64 [B, pages of a row]; entries behind a row's last page are never used.
        kv_lengths: int32 or int64 [B], keys of each row.
        max_kv: a bound of `kv_lengths`; by default all that the table holds. It is never read from the device. On a GPU, page indices
            and lengths are not bounds-checked.
        mask: a `foci.Mask` or a function (b, h, q_idx, kv_idx) -> bool.
        score, sink, scale, dropout_p: as in `foci.attention`.
        return_aux: auxiliary outputs to return besides; `column_sums` are [B, Hq, max_kv], `weights` is not supported.

    Returns:
        [B, Hq, Sq, Dv] in the query's dtype; with `return_aux`, that and an `AuxOutput`. Query, captured tensors and sink
        get gradients; pages do not.

    Raises:
        TypeError: for an argument of a wrong type or dtype.
        ValueError: for a wrong shape, device or value, or pages that require grad.
        NoViableBackend: if no backend accepts; the message has each one's reason.

    Example:
        >>> import foci, torch
        >>> pool = torch.randn(2, 10, 4, 16, 32)  # keys and values: 10 pages of 16 tokens, 4 heads
        >>> table = torch.tensor([[3, 1, 7], [9, 2, 0]])
        >>> query = torch.randn(2, 8, 1, 32)
        >>> mask = foci.masks.causal_lower_right()
        >>> foci.paged_attention(query, pool[0], pool[1], table, torch.tensor([41, 20]), mask=mask).shape
        torch.Size([2, 8, 1, 32])
    """
    check_inputs(query, key, value)
    if not (type(page_table) is type(kv_lengths) is Tensor and page_table.layout is kv_lengths.layout is torch.strided):
        check_is_tensor(page_table=page_table, kv_lengths=kv_lengths)
    if page_table.dim() != 2 or key.dim() != 4:
        _check_pages(query, key, value, page_table, kv_lengths)  # says which is wrong
    if mask is not None and (isinstance(mask, Tensor) or hasattr(mask, "kv_num_blocks")):
        raise TypeError(f"mask must be a foci.Mask or a function: rows have lengths of their own; got {type(mask).__name__}")
    room = page_table.size(1) * key.size(2)
    if max_kv is not None and (isinstance(max_kv, bool) or not isinstance(max_kv, (int, torch.SymInt)) or not 0 <= max_kv <= room):
        raise ArgumentError(
            f"max_kv must be an integer from 0 to {room}, what {page_table.size(1)} pages of {key.size(2)} hold; got {max_kv}"
        )
    outputs = check_outputs(return_aux, sink)
    if outputs.weights:
        raise ArgumentError("weights of rows of different lengths have no rectangular shape; ask for column_sums or row_max")
    extras = Extras(
        outputs, scale=scale, dropout_p=dropout_p, kv_lengths=kv_lengths, page_table=page_table, max_kv=room if max_kv is None else max_kv,
        sink=check_sink(sink, query), exact_lengths=False, lower_right_form=lower_right_form(mask),
    )  # fmt: skip
    functions = score_parts(score, None, query, key), mask_parts(mask, query, key, holds_many=True)[0]
    return returned(run((query, key, value), *functions, extras, _check), return_aux)


def _check(tensors: Tensors, extras: Extras) -> None:
    assert extras.page_table is not None
    assert extras.kv_lengths is not None
    _check_pages(*tensors, extras.page_table, extras.kv_lengths)


def _check_pages(query: Tensor, key: Tensor, value: Tensor, page_table: Tensor, kv_lengths: Tensor) -> None:
    if query.dim() != 4:
        raise ArgumentError(f"query must have 4 dimensions [batch, heads, length, head dim]; got {describe(query)}")
    for name, tensor, dims in (("page_table", page_table, 2), ("kv_lengths", kv_lengths, 1)):
        check_integers(name, tensor, query.device)
        if tensor.dim() != dims or tensor.shape[0] != query.shape[0]:
            wanted = "[batch, pages of a row]" if dims == 2 else "[batch]"
            raise ArgumentError(f"{name} must be {wanted} for a batch of {query.shape[0]}; got {describe(tensor)}")
    for name, pool in (("key", key), ("value", value)):
        if pool.dim() != 4:
            raise ArgumentError(f"{name} must have 4 dimensions [pages, heads, page size, head dim]; got {describe(pool)}")
        if pool.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(f"{name} requires grad: pages take no gradient; detach them, or gather them into a dense tensor")
    if key.shape[0] != value.shape[0]:
        raise ArgumentError(f"key and value must have one number of pages; got {key.shape[0]} and {value.shape[0]}")
    if key.shape[2] == 0:
        raise ArgumentError(f"a page must hold at least one token; got key {describe(key)}")
