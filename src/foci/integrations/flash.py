"""foci as torch's flash attention: "FOCI" in the registry of `torch.nn.attention`, below `scaled_dot_product_attention` and `varlen_attn`.

The registry (torch 2.11 and later) lets an implementation take the place of aten's flash attention operators for CUDA in the dispatcher.
Their schemas say what arrives and what must come back: out lies in memory as query does, gradients as what they are of, the logsumexp
is [B, Hq, Sq] or, packed, [Hq, T]. Autograd is torch's: it keeps out and logsumexp of the forward operator and hands them to the
backward operator, which computes no forward pass again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.nn.attention
from torch import Tensor

from foci import backends, masks
from foci.api import AuxRequest, attention
from foci.context import use
from foci.core import PlannedCall, find_call
from foci.environment import allowed_backends
from foci.execution import as_written
from foci.functional import varlen_attn
from foci.operator import as_batch, backward_now, find_outline, optional_tensors
from foci.prepare import Extras, describe, prepare
from foci.problem import OUT_ALONE
from foci.variant import Mask

__all__ = ["NAME", "Handle", "install", "register"]

NAME: Final = "FOCI"

Auxiliary = tuple[Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]

_WITH_LSE: Final = AuxRequest(lse=True)

_REFUSED: Final = {
    "dropout_p": "must be 0: these operators hand on a random state that is not foci's; foci.attention and foci.varlen_attn have dropout",
    "return_debug_mask": "must be False: foci.attention returns weights",
    "alibi_slopes": "must be None: foci.attention and foci.varlen_attn take foci.scores.alibi",
    "block_table": "must be None: foci.paged_attention attends to pages",
    "q_descale": "must be None: quantised query, key and value are not taken",
    "k_descale": "must be None: quantised query, key and value are not taken",
    "v_descale": "must be None: quantised query, key and value are not taken",
}
"""Arguments that change the result and are not served, with what to do instead."""


class Handle:
    """The handle that torch keeps while an implementation is active."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        """Gives torch's operators back; more calls change nothing."""
        self._library = None  # its end is that of what it registered


def register() -> None:
    """Makes "FOCI" known to `torch.nn.attention.activate_flash_attention_impl`; more calls change nothing, and nothing is activated.

    Raises:
        RuntimeError: if this torch has no such registry.

    Example:
        >>> import torch
        >>> from foci.integrations.flash import register
        >>> register()
        >>> "FOCI" in torch.nn.attention.list_flash_attention_impls()
        True
    """
    register_impl = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register_impl is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no registry of flash attention implementations, torch 2.11 to 2.13 have: "
            "foci.patch() routes scaled_dot_product_attention and varlen_attn to foci in every torch"
        )
    register_impl(NAME, register_fn=install)


def install(device: str = "CUDA") -> Handle:
    """Puts foci in the place of torch's flash attention operators, those that this torch has.

    Args:
        device: the dispatch key.

    Returns:
        What takes it back.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, function in OPERATORS.items():
        operator, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, operator, None)
        if packet is not None and (overload or "default") in packet.overloads():
            library.impl(name, function, device)  # type: ignore[no-untyped-call]
    return Handle(library)


def dense_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:
    """`aten::_scaled_dot_product_flash_attention` of query [B, Hq, Sq, D], key and value [B, Hkv, Skv, D].

    `is_causal` is aligned to the lower right, as the operator's is: `scaled_dot_product_attention` calls it with equal lengths.

    Raises:
        TypeError, ValueError: for wrong arguments, and for those that are not served.
        NoViableBackend: if no backend of foci accepts.
    """
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask)
    out, lse = _attend((query, key, value), _dense_mask((query, key), is_causal), scale)
    return (_lying_as(out, query), lse, None, None, query.shape[2], key.shape[2], *_auxiliary(query))


def dense_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Gradients:
    """`aten::_scaled_dot_product_flash_attention_backward`: gradients of query, key and value."""
    _refuse(dropout_p=dropout_p)
    extras = Extras(OUT_ALONE, scale=scale)
    grads = _differentiate((query, key, value), _dense_mask((query, key), is_causal), extras, (out, logsumexp), grad_out, packed=False)
    return _lying_as(grads[0], query), _lying_as(grads[1], key), _lying_as(grads[2], value)


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`aten::_flash_attention_forward`: of packed query [Tq, Hq, D], key and value [Tkv, Hkv, D] with cumulative lengths, or of
    [B, S, H, D] without.

    Windows and `is_causal` are aligned to the lower right of each sequence. `num_splits` tunes torch's kernels and changes nothing.

    Raises:
        TypeError, ValueError: for wrong arguments, and for those that are not served.
        NoViableBackend: if no backend of foci accepts.
    """
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask, alibi_slopes=alibi_slopes, block_table=block_table)
    window = _window(is_causal, window_size_left, window_size_right)
    tensors = query, key, value
    if _is_packed(cum_seq_q, cum_seq_k):
        assert cum_seq_q is not None
        _check_head_dims(query, key, value)
        _check_used(seqused_k, tensors)
        with _by_foci(query):
            out, lse = varlen_attn(
                *tensors, cum_seq_q, cum_seq_k, max_q, max_k, return_aux=_WITH_LSE, scale=scale, window_size=window, enable_gqa=True,
                seqused_k=seqused_k,
            )  # fmt: skip
        lse = lse.contiguous()
    else:
        if seqused_k is not None:
            raise ValueError(f"{NAME}: seqused_k needs packed tensors, with cum_seq_q and cum_seq_k")
        rows = _by_heads(tensors)
        out, lse = _attend(rows, _dense_mask(rows, is_causal, window_size_left, window_size_right), scale)
        out = out.transpose(1, 2)
    return (_lying_as(out, query), lse, *_auxiliary(query))


def flash_forward_into(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`aten::_flash_attention_forward_no_dropout_inplace`: `flash_forward` written to `out`; the logsumexp."""
    attn_out, lse, *_ = flash_forward(*args, **kwargs)
    out.copy_(attn_out)
    return lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Gradients:
    """`aten::_flash_attention_backward`: gradients of query, key and value."""
    _refuse(dropout_p=dropout_p)
    tensors = query, key, value
    if _is_packed(cum_seq_q, cum_seq_k):
        extras = Extras(OUT_ALONE, scale=scale, cu_q=cum_seq_q, cu_kv=cum_seq_k, max_q=max_q, max_kv=max_k)
        mask = _mask(*_window(is_causal, window_size_left, window_size_right), lower_right=True)
        grads = _differentiate(tensors, mask, extras, (out, logsumexp), grad_out, packed=True)
    else:
        rows, extras, forward_results = _by_heads(tensors), Extras(OUT_ALONE, scale=scale), (out.transpose(1, 2), logsumexp)
        mask = _dense_mask(rows, is_causal, window_size_left, window_size_right)
        grads = _by_heads(_differentiate(rows, mask, extras, forward_results, grad_out.transpose(1, 2), packed=False))
    return _lying_as(grads[0], query), _lying_as(grads[1], key), _lying_as(grads[2], value)


def refuse_quantised(*args: Any, **kwargs: Any) -> Any:
    """The overloads of tensors with scales for quantised values, none of which is served.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{NAME}: q_descale, k_descale and v_descale, of quantised query, key and value, are not taken")


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "_scaled_dot_product_flash_attention": dense_forward,
    "_scaled_dot_product_flash_attention.quantized": refuse_quantised,
    "_scaled_dot_product_flash_attention_backward": dense_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward.quantized": refuse_quantised,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,
    "_flash_attention_backward": flash_backward,
}
"""torch's operators and what takes their place."""


def _refuse(**named: Any) -> None:
    for name, value in named.items():
        if isinstance(value, Tensor) or value:
            raise ValueError(f"{NAME}: {name} {_REFUSED[name]}")


def _check_used(seqused_k: Tensor | None, tensors: tuple[Tensor, ...]) -> None:
    """torch's backward operator is not told of it."""
    if seqused_k is not None and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise ValueError(f"{NAME}: seqused_k has no gradients in torch's operators: call under torch.no_grad(), or foci.varlen_attn")


def _is_packed(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None) -> bool:
    if (cum_seq_q is None) != (cum_seq_k is None):
        raise ValueError(f"{NAME}: cum_seq_q and cum_seq_k come together; {'cum_seq_q' if cum_seq_q is None else 'cum_seq_k'} is None")
    return cum_seq_q is not None


def _check_head_dims(query: Tensor, key: Tensor, value: Tensor) -> None:
    """foci takes more, but what torch promises of out holds for these alone."""
    if query.shape[-1:] != value.shape[-1:]:
        raise ValueError(f"{NAME}: value must have query's head dim; got query {describe(query)}, value {describe(value)}")
    if query.dim() == 4 and not query.shape[:1] == key.shape[:1] == value.shape[:1]:
        raise ValueError(f"{NAME}: query, key and value must have one batch size; got {len(query)}, {len(key)} and {len(value)}")


def _window(is_causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    window = -1 if left is None else left, 0 if is_causal else -1 if right is None else right
    if min(window) < -1:
        raise ValueError(f"{NAME}: window_size_left and window_size_right must be at least -1 (unlimited); got {left} and {right}")
    return window


def _dense_mask(tensors: Sequence[Tensor], is_causal: bool, left: int | None = None, right: int | None = None) -> Mask | None:
    """For query and key [B, H, S, D]. Of equal lengths both corners are one: the mask that reads no lengths has the plainer formula."""
    return _mask(*_window(is_causal, left, right), lower_right=tensors[0].shape[-2] != tensors[1].shape[-2])


@functools.lru_cache(maxsize=64)
def _mask(left: int, right: int, *, lower_right: bool) -> Mask | None:
    """One object for one set of arguments: calls are known by it."""
    if left == right == -1:
        return None
    if (left, right) == (-1, 0):
        return masks.causal_lower_right() if lower_right else masks.causal()
    ends = None if left == -1 else left, None if right == -1 else right
    return masks.window(*ends, align="lower_right" if lower_right else "upper_left")


def _attend(tensors: tuple[Tensor, Tensor, Tensor], mask: Mask | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """out and logsumexp of [B, H, S, D]."""
    _check_head_dims(*tensors)
    with _by_foci(tensors[0]):
        out, aux = attention(*tensors, mask=mask, scale=scale, return_aux=_WITH_LSE)
    assert aux.lse is not None
    return out, aux.lse.contiguous()


def _differentiate(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Mask | None,
    extras: Extras,
    forward_results: tuple[Tensor, Tensor],
    grad_out: Tensor,
    *,
    packed: bool,
) -> Gradients:
    """Gradients of [B, H, S, D], or packed [T, H, D], by what the forward pass found and the gradient of out."""
    with _by_foci(tensors[0]):
        grads = backward_now(*_plan_backward(tensors, mask, extras, packed=packed), forward_results, (grad_out,))
    return grads[0], grads[1], grads[2]  # type: ignore[return-value]


def _plan_backward(tensors: tuple[Tensor, Tensor, Tensor], mask: Mask | None, extras: Extras, *, packed: bool) -> PlannedCall:
    """A call that gradients of query, key and value are asked of."""
    function, allowed = None if mask is None else mask.function, allowed_backends()
    call = find_call(tensors, None, function, extras, allowed, packed=packed, needs_all=True)
    if call is not None:
        return call
    query, key, value = tensors
    formula, operands = prepare((as_batch(query), as_batch(key), as_batch(value)) if packed else tensors, None, function, extras)
    every, needs = (*tensors, *operands.captures), (True, True, True, (False,) * len(operands.captures))
    return PlannedCall(find_outline(formula, operands, every, needs, allowed, packed=packed), every, optional_tensors(operands))


@contextlib.contextmanager
def _by_foci(query: Tensor) -> Iterator[None]:
    """Inside, autograd and autocast have had their turn, and the backend that calls torch's operators, which are foci's now, is out."""
    allowed = allowed_backends()
    with torch.no_grad(), as_written(query), use(*[name for name in (backends.names() if allowed is None else allowed) if name != "aten"]):
        yield


def _by_heads(tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, S, D] of [B, S, H, D], and back."""
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        if tensor.dim() != 4:
            raise ValueError(f"{NAME}: {name} without cumulative lengths must be [batch, length, heads, head dim]; got {describe(tensor)}")
    query, key, value = tensors
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _lying_as(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor, or a copy, in memory as `empty_like` lays it: compiled graphs count on that."""
    wanted = torch.empty_like(like, device="meta").stride()
    if all(n < 2 or a == b for n, a, b in zip(tensor.shape, tensor.stride(), wanted, strict=True)):
        return tensor
    return torch.empty_like(like).copy_(tensor)


def _auxiliary(query: Tensor) -> Auxiliary:
    """Random state, its offset and the matrix for debugging, that nobody reads where nothing is dropped."""
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    return state, torch.empty((), dtype=torch.uint64, device=query.device), torch.empty(0, dtype=query.dtype, device=query.device)
