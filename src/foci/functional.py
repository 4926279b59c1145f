"""Drop-ins for torch's own entry points, with torch's signatures and meanings."""

from __future__ import annotations

import functools
import math
from typing import Any, Final, Literal, NamedTuple, overload

import torch
from torch import Tensor

from foci import masks, scores
from foci.core import Function, Tensors
from foci.dispatch import run, run_packed
from foci.errors import ArgumentError, DtypeError
from foci.jagged import attend_nested, check_ungrouped, is_nested
from foci.normalize import FlexAuxRequest, LseRequest, broadcast, causal_bias, lower_right_form, mask_parts, score_parts
from foci.prepare import Extras, are_flags, check_inputs, check_integers, check_is_flag, check_offsets, describe
from foci.problem import OUT_ALONE, Outputs, Results
from foci.strided_nested import as_jagged, as_strided, has_strided
from foci.variant import Mask, picklable

__all__ = ["FlexAuxOutput", "causal_lower_right", "causal_upper_left", "flex_attention", "scaled_dot_product_attention", "varlen_attn"]


class CausalMask(Mask):
    """A causal mask of known lengths: passes as `attn_mask` and as `mask`; `to_tensor` writes it out.

    Attributes:
        seq_len_q, seq_len_kv: Sq and Skv.
    """

    def __init__(self, seq_len_q: int, seq_len_kv: int, *, lower_right: bool) -> None:
        named = masks.causal_lower_right() if lower_right else masks.causal()
        super().__init__(named.function, name=named.name)
        self.seq_len_q = seq_len_q
        self.seq_len_kv = seq_len_kv
        self.lower_right = lower_right

    def to_tensor(self, device: torch.device | str | None = None) -> Tensor:
        """bool [Sq, Skv], true where the query attends."""
        ones = torch.ones(self.seq_len_q, self.seq_len_kv, dtype=torch.bool, device=device)
        return ones.tril(self.seq_len_kv - self.seq_len_q if self.lower_right else 0)


def _checked_length(name: str, length: Any) -> int:
    if not isinstance(length, (int, torch.SymInt)) or isinstance(length, bool) or length < 0:
        raise ArgumentError(f"{name} must be a length, an integer of at least 0; got {length!r}")
    if isinstance(length, int) and length >= 1 << 31:
        raise ArgumentError(f"{name} must be a length below 2**31; got {length:.6g}")
    return length  # type: ignore[return-value]


@picklable
def causal_upper_left(seq_len_q: int, seq_len_kv: int) -> CausalMask:
    """The causal mask whose diagonal starts in the upper left corner: query i attends to keys 0 to i.

    Args:
        seq_len_q, seq_len_kv: lengths of query and key.

    Example:
        >>> import foci
        >>> foci.causal_upper_left(2, 3).to_tensor()
        tensor([[ True, False, False],
                [ True,  True, False]])
    """
    return CausalMask(_checked_length("seq_len_q", seq_len_q), _checked_length("seq_len_kv", seq_len_kv), lower_right=False)


@picklable
def causal_lower_right(seq_len_q: int, seq_len_kv: int) -> CausalMask:
    """The causal mask whose diagonal ends in the lower right corner: the last query attends to every key.

    Args:
        seq_len_q, seq_len_kv: lengths of query and key.

    Example:
        >>> import foci
        >>> foci.causal_lower_right(2, 3).to_tensor()
        tensor([[ True,  True, False],
                [ True,  True,  True]])
    """
    return CausalMask(_checked_length("seq_len_q", seq_len_q), _checked_length("seq_len_kv", seq_len_kv), lower_right=True)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Drop-in for `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: [..., Sq, D] of at least two dims; leading dims broadcast against those of key and value. May be a NestedTensor; one of
            strided layout is copied into a jagged one, and the result back.
        key: [..., Skv, D].
        value: [..., Skv, Dv].
        attn_mask: bool (true attends) or floating (added), broadcasting to [..., Sq, Skv]; may require grad. Also a
            `foci.Mask`, `foci.causal_upper_left`, `foci.causal_lower_right` or torch's CausalBias.
        dropout_p: as in torch; applied whenever it is not zero.
        is_causal: mask aligned to the upper left; excludes attn_mask.
        scale: 1 / sqrt(D) by default.
        enable_gqa: lets key and value have fewer heads (dim -3) than query.

    Returns:
        [..., Sq, Dv].

    Raises:
        TypeError, ValueError: for wrong arguments.
        NoViableBackend: if no backend accepts, torch's `sdpa_kernel` switches considered.

    Example:
        >>> import foci, torch
        >>> q = torch.randn(2, 4, 10, 8)
        >>> foci.scaled_dot_product_attention(q, q, q, is_causal=True).shape
        torch.Size([2, 4, 10, 8])
    """
    check_inputs(query, key, value)
    if not are_flags(is_causal, enable_gqa):
        check_is_flag(is_causal=is_causal, enable_gqa=enable_gqa)
    if is_causal and attn_mask is not None:
        raise ArgumentError("is_causal=True excludes attn_mask: the mask says it all; pass one of them")
    if is_nested(query, key, value):
        strided = has_strided(query, key, value)
        tensors = as_jagged((query, key, value)) if strided else (query, key, value)
        if not enable_gqa:
            check_ungrouped(*tensors)
        score, mask = _mask_argument(attn_mask, tensors[0], tensors[1], is_causal=is_causal)
        extras = Extras(OUT_ALONE, scale=scale, dropout_p=dropout_p, honour_sdp_flags=True)
        results = attend_nested(tensors, score, mask, extras)
        return (as_strided(results) if strided else results).out
    q, k, v = query.shape, key.shape, value.shape
    if len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] and k[1] == v[1] and (q[1] == k[1] or enable_gqa):
        lead, tensors = None, (query, key, value)
    else:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() < 2:
                raise ArgumentError(f"{name} must have at least 2 dimensions [..., length, head dim]; got {describe(tensor)}")
        lead = _leading(query, key, value, enable_gqa=enable_gqa)
        tensors = _as_heads(query, key, value, lead, enable_gqa=enable_gqa)
    score = mask = None
    form = ""
    if is_causal or attn_mask is not None:
        mask_tensor = attn_mask if lead is None else _fold_mask(attn_mask, lead, query, key, grouped=enable_gqa)
        score, mask = _mask_argument(mask_tensor, tensors[0], tensors[1], is_causal=is_causal)
        form = lower_right_form(attn_mask)
    extras = Extras(OUT_ALONE, scale=scale, dropout_p=dropout_p, honour_sdp_flags=True, lower_right_form=form)
    out = run(tensors, score, mask, extras).out
    return out if lead is None else out.reshape(*lead, query.shape[-2], value.shape[-1])


def _mask_argument(attn_mask: Any, query: Tensor, key: Tensor, *, is_causal: bool) -> tuple[Function, Function]:
    """torch's mask arguments as score function and mask function."""
    if is_causal:
        return None, masks.causal().function
    if attn_mask is None:
        return None, None
    if isinstance(attn_mask, CausalMask):
        got, wanted = (attn_mask.seq_len_q, attn_mask.seq_len_kv), (query.shape[-2], key.shape[-2])
        if not is_nested(query, key) and got != wanted:
            raise ArgumentError(f"the causal mask is for lengths {got[0]} x {got[1]}; query and key have {wanted[0]} x {wanted[1]}")
        return None, attn_mask.function
    if not isinstance(attn_mask, Tensor):
        if not callable(attn_mask):
            raise TypeError(f"attn_mask must be a tensor, a foci.Mask or None; got {type(attn_mask).__name__}")
        return None, mask_parts(attn_mask, query, key, name="attn_mask")[0]
    causal = causal_bias(attn_mask, query, key)
    if causal is not None:
        return None, causal.function
    if attn_mask.dtype == torch.bool:
        return None, mask_parts(attn_mask, query, key, name="attn_mask")[0]
    if not attn_mask.is_floating_point() or attn_mask.dtype.itemsize == 1:
        raise DtypeError(f"attn_mask must be bool or floating; got {describe(attn_mask)}, and floating ones have 16 bits or more")
    if attn_mask.dtype == torch.float64 != query.dtype:
        raise DtypeError(
            f"attn_mask must be bool, or floating and not float64 for a query that is {query.dtype}; got {describe(attn_mask)}"
        )
    return scores.bias(broadcast("attn_mask", attn_mask, query, key)).function, None


def _leading(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> tuple[int, ...]:
    """The common leading dims; under grouped heads those of the query."""
    shapes = [t.shape[:-2] for t in (query, key, value)]
    if enable_gqa:
        if min(len(s) for s in shapes) < 1:
            raise ArgumentError(
                f"enable_gqa needs a head dimension (-3); got query {describe(query)}, key {describe(key)}, value {describe(value)}"
            )
        heads = query.shape[-3]
        for name, tensor in (("key", key), ("value", value)):
            if tensor.shape[-3] == 0 or heads % tensor.shape[-3]:
                raise ArgumentError(f"query heads must be a multiple of {name} heads; got {heads} and {tensor.shape[-3]}")
        shapes = [(*s[:-1], heads) for s in shapes]  # type: ignore[misc]
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        got = ", ".join(str(list(t.shape[:-2])) for t in (query, key, value))
        raise ArgumentError(
            f"the leading dimensions of query, key and value must broadcast; got {got}"
            + ("" if enable_gqa else "; grouped heads need enable_gqa=True")
        ) from None


def _as_heads(query: Tensor, key: Tensor, value: Tensor, lead: tuple[int, ...], *, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Each tensor as [B, H, S, D]: the last leading dim is heads from four dims on and for grouped heads, else the batch."""

    def fold(tensor: Tensor) -> Tensor:
        dims = lead
        if enable_gqa:
            dims = (*lead[:-1], tensor.shape[-3])
        tensor = tensor.expand(*dims, *tensor.shape[-2:])
        if len(dims) < 2:
            if enable_gqa:
                return tensor.unsqueeze(0)
            return tensor.reshape(math.prod(dims), 1, *tensor.shape[-2:])
        return tensor if len(dims) == 2 else tensor.reshape(math.prod(dims[:-1]), dims[-1], *tensor.shape[-2:])

    tensors = (fold(query), fold(key), fold(value))
    if enable_gqa and tensors[1].shape[1] != tensors[2].shape[1]:
        heads = math.lcm(tensors[1].shape[1], tensors[2].shape[1])  # divides the query's heads, as both do
        return tensors[0], *(t.repeat_interleave(heads // t.shape[1], dim=1) for t in tensors[1:])  # type: ignore[return-value]
    return tensors


def _fold_mask(mask: Any, lead: tuple[int, ...], query: Tensor, key: Tensor, *, grouped: bool) -> Any:
    """A mask tensor that broadcasts over the leading dims, for [B, H, S, D]."""
    if not isinstance(mask, Tensor) or causal_bias(mask, query, key) is not None or mask.dim() <= 2:
        return mask
    wanted = (*lead, query.shape[-2], key.shape[-2])
    if mask.dim() > len(wanted) or any(n not in (1, w) for n, w in zip(reversed(mask.shape), reversed(wanted), strict=False)):
        raise ArgumentError(f"attn_mask must broadcast to {list(wanted)}; got {describe(mask)}")
    if len(lead) == 1:
        return mask if grouped else mask.unsqueeze(1)
    if len(lead) == 2 or mask.dim() <= 3:
        return mask
    full = mask.expand(*lead, *mask.shape[-2:])
    return full.reshape(math.prod(lead[:-1]), lead[-1], *mask.shape[-2:])


class FlexAuxOutput(NamedTuple):
    """Auxiliary outputs of `flex_attention`, named as torch names them; None where not asked for."""

    lse: Tensor | None = None
    max_scores: Tensor | None = None


# fmt: off
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Function = None, block_mask: Any = None, scale: float | None = None,
    enable_gqa: bool = False, return_lse: Literal[False] = False, kernel_options: Any = None, *, return_aux: None = None,
) -> Tensor: ...
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Function = None, block_mask: Any = None, scale: float | None = None,
    enable_gqa: bool = False, *, return_lse: Literal[True], kernel_options: Any = None, return_aux: None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Function = None, block_mask: Any = None, scale: float | None = None,
    enable_gqa: bool = False, return_lse: Literal[False] = False, kernel_options: Any = None, *, return_aux: FlexAuxRequest,
) -> tuple[Tensor, FlexAuxOutput]: ...
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Function = None, block_mask: Any = None, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *, return_aux: FlexAuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, FlexAuxOutput]: ...
# fmt: on


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Function = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: FlexAuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, FlexAuxOutput]:
    """Drop-in for `torch.nn.attention.flex_attention.flex_attention`, fused with and without torch.compile.

    Args:
        query: [B, Hq, Sq, D] or a NestedTensor.
        key: [B or 1, Hkv, Skv, D].
        value: [B or 1, Hkv, Skv, Dv].
        score_mod: (score, b, h, q_idx, kv_idx) -> score, of pointwise torch functions and captured tensors, which get
            gradients if they require them.
        block_mask: a `foci.BlockMask` or torch's; also whatever `foci.attention` takes as mask.
        scale: 1 / sqrt(D) by default.
        enable_gqa: lets key and value have fewer heads than query.
        return_lse: also return the logsumexp, [B, Hq, Sq], natural logarithm.
        kernel_options: tuning of torch's own Triton kernels; has no meaning here and changes nothing.
        return_aux: an object with the flags `lse` and `max_scores`, such as torch's AuxRequest; excludes return_lse.

    Returns:
        [B, Hq, Sq, Dv]; with return_lse a pair with the logsumexp, with return_aux one with a `FlexAuxOutput`.

    Raises:
        TypeError, ValueError: for wrong arguments or a function that leaves the language.

    Example:
        >>> import foci, torch
        >>> q = torch.randn(1, 2, 64, 16)
        >>> rel = lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx)
        >>> foci.flex_attention(q, q, q, score_mod=rel).shape
        torch.Size([1, 2, 64, 16])
    """
    check_inputs(query, key, value)
    if not are_flags(enable_gqa, return_lse):
        check_is_flag(enable_gqa=enable_gqa, return_lse=return_lse)
    if return_lse and return_aux is not None:
        raise ArgumentError("return_lse and return_aux exclude each other; return_aux=AuxRequest(lse=True) has the logsumexp")
    if return_aux is not None and not (hasattr(return_aux, "lse") and hasattr(return_aux, "max_scores")):
        raise TypeError(f"return_aux must have the flags lse and max_scores, as torch's AuxRequest; got {type(return_aux).__name__}")
    nested = is_nested(query, key, value)
    strided = nested and has_strided(query, key, value)
    if strided:
        query, key, value = as_jagged((query, key, value))
    if query.dim() == key.dim() == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
        raise ArgumentError(f"query has {query.shape[1]} heads and key {key.shape[1]}: grouped heads need enable_gqa=True")
    if return_aux is None:
        outputs = _WITH_LSE if return_lse else OUT_ALONE
    else:
        outputs = Outputs(lse=return_aux.lse, row_max=return_aux.max_scores)
    mask, blocks, block_size = mask_parts(block_mask, query, key, name="block_mask")
    extras = Extras(outputs, scale=scale, blocks=blocks, block_size=block_size, lower_right_form=lower_right_form(block_mask))
    score = score_parts(score_mod, None, query, key)
    results = attend_nested((query, key, value), score, mask, extras) if nested else run((query, key, value), score, mask, extras)
    return _flex_returns(as_strided(results) if strided else results, return_aux, return_lse=return_lse)


def _flex_returns(
    results: Results, return_aux: FlexAuxRequest | None, *, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, FlexAuxOutput]:
    if return_aux is not None:
        return results.out, FlexAuxOutput(results.lse if return_aux.lse else None, results.row_max)
    return (results.out, results.lse) if return_lse else results.out


_WITH_LSE: Final = Outputs(lse=True)
_UNLIMITED: Final = (-1, -1)
"""The window that is none; the same object where nobody names one."""


# fmt: off
@overload
def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: None = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    seqused_k: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None, mask: Any = None,
    score: Function = None, dropout_p: float = 0.0,
) -> Tensor: ...
@overload
def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: LseRequest | None = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
    mask: Any = None, score: Function = None, dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: LseRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = _UNLIMITED,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    mask: Any = None,
    score: Function = None,
    dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Drop-in for `torch.nn.attention.varlen.varlen_attn`: sequences packed along one token dimension.

    Beyond torch's arguments it takes any mask and score function, with indices within the sequence, and dropout.

    Args:
        query: [Tq, Hq, D].
        key: [Tkv, Hkv, D].
        value: [Tkv, Hkv, Dv].
        cu_seq_q: [N + 1] int32 or int64, first token of each query sequence, and the end of the last. Tokens outside every sequence give
            zeros; on the CPU, offsets that end before the last token warn.
        cu_seq_k: the same for key and value; None for the query's.
        max_q, max_k: longest query and key sequence. GPU offsets are not validated, as that would synchronize: the results of a longer
            sequence are undefined.
        return_aux: an object with the flag `lse`, such as torch's AuxRequest.
        scale: 1 / sqrt(D) by default.
        window_size: (left, right) keys around the diagonal that ends in the lower right corner of each sequence; -1 is
            unlimited, so (-1, 0) is causal.
        enable_gqa: lets key and value have fewer heads than query.
        seqused_k: [N], how many keys of each sequence take part, if not all.
        block_table: keys in pages; an error, as `foci.paged_attention` attends to them.
        num_splits: tuning of torch's own kernels; has no meaning here and changes nothing.
        mask: as in `foci.attention`, without block masks; composed with window_size.
        score: as in `foci.attention`.
        dropout_p: as in `foci.attention`.

    Returns:
        [Tq, Hq, Dv]; with return_aux.lse a pair with the logsumexp [Hq, Tq].

    Raises:
        TypeError, ValueError: for wrong arguments.

    Example:
        >>> import foci, torch
        >>> q = torch.randn(10, 4, 16)
        >>> offsets = torch.tensor([0, 3, 10])
        >>> foci.varlen_attn(q, q, q, offsets, offsets, 7, 7, window_size=(-1, 0)).shape
        torch.Size([10, 4, 16])
    """
    check_inputs(query, key, value)
    if not are_flags(enable_gqa):
        check_is_flag(enable_gqa=enable_gqa)
    if block_table is not None:
        raise ArgumentError("block_table (keys in pages) is not taken by varlen_attn: foci.paged_attention attends to pages")
    if not query.dim() == key.dim() == value.dim() == 3:
        name, tensor = next((n, t) for n, t in (("query", query), ("key", key), ("value", value)) if t.dim() != 3)
        raise ArgumentError(f"{name} must have 3 dimensions [tokens, heads, head dim]; got {describe(tensor)}")
    if cu_seq_k is None:
        cu_seq_k = cu_seq_q
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise TypeError(f"return_aux must have the flag lse, as torch's AuxRequest; got {type(return_aux).__name__}")
    heads = query.size(1)
    if heads != key.size(1) and not enable_gqa:
        raise ArgumentError(f"query has {heads} heads and key {key.shape[1]}: grouped heads need enable_gqa=True")
    outputs = _WITH_LSE if return_aux is not None and return_aux.lse else OUT_ALONE
    extras = Extras(
        outputs, scale=scale, dropout_p=dropout_p, cu_q=cu_seq_q, cu_kv=cu_seq_k, kv_lengths=seqused_k,
        max_q=_checked_length("max_q", max_q), max_kv=_checked_length("max_k", max_k),
        lower_right_form="" if mask is None else lower_right_form(mask),
    )  # fmt: skip
    score_function = None if score is None else score_parts(score, None, query, key, heads=heads)
    results = run_packed((query, key, value), score_function, _varlen_mask(window_size, mask, query, key), extras, _check_sequences)
    return (results.out, results.lse) if outputs.lse else results.out


def _check_sequences(tensors: Tensors, extras: Extras) -> None:
    """Checks where packed sequences lie."""
    query, key, value = tensors
    cu_seq_q, cu_seq_k, seqused_k = extras.cu_q, extras.cu_kv, extras.kv_lengths
    if not query.device == key.device == value.device:
        raise ArgumentError(
            f"query, key and value must have one device; got query {describe(query)}, key {describe(key)}, value {describe(value)}"
        )
    check_offsets("cu_seq_q", cu_seq_q, query)
    if cu_seq_k is not cu_seq_q:
        check_offsets("cu_seq_k", cu_seq_k, key)
    assert cu_seq_q is not None
    assert cu_seq_k is not None
    if cu_seq_q.shape != cu_seq_k.shape:
        raise ArgumentError(
            f"cu_seq_q and cu_seq_k must count the same sequences; got shapes {list(cu_seq_q.shape)} and {list(cu_seq_k.shape)}"
        )
    if seqused_k is not None:
        check_integers("seqused_k", seqused_k, query.device)
        if seqused_k.dim() != 1 or seqused_k.shape[0] != cu_seq_k.shape[0] - 1:
            raise ArgumentError(f"seqused_k must have one length per sequence, [{cu_seq_k.shape[0] - 1}]; got {describe(seqused_k)}")


def _varlen_mask(window_size: tuple[int, int], mask: Any, query: Tensor, key: Tensor) -> Function:
    if window_size is _UNLIMITED and mask is None:
        return None
    is_pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not is_pair or not all(isinstance(n, (int, torch.SymInt)) and not isinstance(n, bool) and n >= -1 for n in window_size):
        raise ArgumentError(f"window_size must be (left, right), each at least -1 (unlimited); got {window_size!r}")
    left, right = window_size
    if isinstance(mask, Tensor) or hasattr(mask, "kv_num_blocks"):
        raise TypeError(f"mask of packed tensors must be a foci.Mask or a function; got {type(mask).__name__}")
    function = mask_parts(mask, query, key, holds_many=True)[0]
    if (left, right) == (-1, -1):
        return function
    window = _window(left, right) if torch.compiler.is_compiling() else _known_window(left, right)
    return window.function if function is None else (window & function).function


def _window(left: int, right: int) -> Mask:
    return masks.window(None if left == -1 else left, None if right == -1 else right, align="lower_right")


_known_window: Final = functools.lru_cache(maxsize=64)(_window)
