"""Hugging Face transformers on foci: `attn_implementation="foci"`.

Importing this module registers an attention function and a mask function under the name "foci", through the two registries
that transformers has for this (`AttentionInterface`, `AttentionMaskInterface`). Models then carry a `ModelMask`: the mask
functions that transformers composes (causal, sliding window, chunks, padding, packed sequences, caches) are expressions of
foci, and no [B, 1, Sq, Skv] mask exists.

transformers accepts a registered name for every model, also for one that computes attention by itself and never looks the name up.
Such a model would run eager attention without a word, so `PreTrainedModel.get_correct_attn_implementation`, where transformers checks
the names of its own implementations, is wrapped: it refuses "foci" for these models.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from foci import masks, scores
from foci.api import AuxRequest, attention
from foci.compat.transformers import ACTIVE_COLLECTOR
from foci.integrations.model_mask import ModelMask
from foci.normalize import broadcast
from foci.variant import Mask, Score

__all__ = ["NAME", "attention_forward", "attention_mask", "register"]

NAME: Final = "foci"

_REFUSED: Final = {
    "indices": "selects keys for each query",
    "block_indices": "selects blocks of keys for each query",
    "cache": "is a paged cache",
}
"""Arguments that change the result and have no meaning here yet, with what they do."""


def register() -> None:
    """Makes `attn_implementation="foci"` known to transformers; more calls change nothing.

    Example:
        >>> from foci.integrations.transformers import register
        >>> register()
    """
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, attention_mask)
    check = PreTrainedModel.get_correct_attn_implementation
    if not hasattr(check, "_foci_checks"):
        PreTrainedModel.get_correct_attn_implementation = _refuse_other_models(check)


def _refuse_other_models(check: Callable[..., str]) -> Callable[..., str]:
    """transformers' check of a name for a model, and foci's."""

    @functools.wraps(check)
    def get_correct_attn_implementation(self: PreTrainedModel, *args: Any, **kwargs: Any) -> str:
        applicable = check(self, *args, **kwargs)
        if applicable == NAME and not _reads_interface(type(self)):
            raise ValueError(
                f"attn_implementation={NAME!r}: {type(self).__name__} computes attention by itself and never looks it up in transformers' "
                f'AttentionInterface. Load it with "eager"; torch.compile(model, backend={NAME!r}) fuses attention that is written out. '
                f'If another part of the model does look it up, name that part: attn_implementation={{"text_config": {NAME!r}}}'
            )
        return applicable

    get_correct_attn_implementation._foci_checks = True  # type: ignore[attr-defined]
    return get_correct_attn_implementation


_ATTENTION_CLASS: Final = re.compile(r"^class \w*Attention\w*\((?:torch\.)?nn\.Module\)", re.MULTILINE)


def _reads_interface(model: type) -> bool:
    """Whether a model's attention is looked up by name: so says the source of the first class of its line that has attention classes.

    A model without any, which holds other models or inherits them, is asked for these; one without source is believed.
    """
    for base in model.__mro__[: model.__mro__.index(PreTrainedModel)]:
        try:
            source = inspect.getsource(sys.modules[base.__module__])
        except (KeyError, OSError, TypeError):
            continue
        if _ATTENTION_CLASS.search(source):
            return "ALL_ATTENTION_FUNCTIONS" in source or "AttentionInterface" in source
    return True


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers' models call it.

    Without a mask, a module that is causal attends causally, the last query to every key, as with transformers' fused
    implementations.

    Args:
        module: the attention layer; its `is_causal` counts where no mask and no argument say otherwise.
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Skv, D]; not repeated for grouped heads.
        value: [B, Hkv, Skv, Dv].
        attention_mask: a `ModelMask` of these queries and keys; a bool tensor (true attends) or a floating one (added), which broadcast to
            [B, Hq, Sq, Skv] and may have more keys than there are; or None.
        scaling: 1 / sqrt(D) by default.
        dropout: probability of dropping a weight.
        is_causal: overrides the module's.
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
        s_aux: [Hq], attention sinks (gpt-oss).
        position_bias: [B or 1, Hq, Sq, Skv], added to the scores (T5).
        sinks: [B, Hq, Sq, 1], a sink for each query (Inkling 2).
        kwargs: what models pass besides; `output_attentions` asks for the weights; `cu_seq_lens_q` and `cu_seq_lens_k` [documents + 1],
            where packed documents begin and end, keep them apart; others have no effect.

    Returns:
        [B, Sq, Hq, Dv], and the weights [B, Hq, Sq, Skv] before dropout if asked for, else None.

    Raises:
        TypeError: for a mask of another dtype.
        ValueError: for arguments of sparse or paged attention, for a mask of other queries or keys than there are, and for packed
            documents in more than one row or of queries and keys that differ.
    """
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"attn_implementation={NAME!r} does not take {name}, which {what}: choose another one for this model")
    mask, bias = _mask_and_bias(attention_mask, query, key)
    if attention_mask is None and query.size(2) > 1 and _is_causal(module, is_causal):  # a mask that hides nothing says so
        mask = _causal(key.size(2) - query.size(2), kwargs.get("sliding_window"))
    documents = _documents(kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k"), query, key)
    if documents is not None:
        if isinstance(mask, Tensor):
            mask = masks.dense(broadcast("attention_mask", mask, query, key))
        mask = documents if mask is None else documents & mask
    wants_weights = _wants_weights(kwargs.get("output_attentions"))
    result = attention(
        query,
        key,
        value,
        mask=mask,
        score=_score(softcap, position_bias, key),
        bias=bias,
        sink=s_aux,
        scale=scaling,
        dropout_p=dropout,
        return_aux=AuxRequest(lse=sinks is not None, weights=wants_weights) if wants_weights or sinks is not None else None,
    )
    if not isinstance(result, tuple):
        return result.transpose(1, 2).contiguous(), None
    out, weights = result[0], result[1].weights
    if sinks is not None and result[1].lse is not None:
        kept = torch.sigmoid(result[1].lse[..., None] - sinks)  # of a row's weights, what the sink leaves
        out, weights = (out * kept).to(out.dtype), None if weights is None else (weights * kept).to(weights.dtype)
    return out.transpose(1, 2).contiguous(), weights


def _documents(offsets: Any, kv_offsets: Any, query: Tensor, key: Tensor) -> Mask | None:
    """Packed documents by where they begin: each token attends within its own. None without offsets."""
    if offsets is None and kv_offsets is None:
        return None
    if offsets is None or kv_offsets is None:
        missing = "cu_seq_lens_q" if offsets is None else "cu_seq_lens_k"
        raise ValueError(f"cu_seq_lens_q and cu_seq_lens_k come together; {missing} is None")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k need one row of documents, batch size 1, with as many keys as queries; "
            f"got batch size {query.shape[0]}, {query.shape[2]} queries and {key.shape[2]} keys"
        )
    positions = torch.arange(query.shape[2], device=query.device, dtype=offsets.dtype)
    ids = torch.bucketize(positions, offsets[1:], right=True, out_int32=True)
    kv_ids = ids if kv_offsets is offsets else torch.bucketize(positions, kv_offsets[1:], right=True, out_int32=True)
    return masks.document(ids, kv_ids)


def _wants_weights(asked: bool | None) -> bool:
    """Some models do not hand `output_attentions` on to their layers: the collector of layer outputs knows too."""
    if asked is not None or ACTIVE_COLLECTOR is None or torch.compiler.is_compiling():
        return bool(asked)
    collected = ACTIVE_COLLECTOR.get() or {}
    return "attentions" in collected or "cross_attentions" in collected


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _mask_and_bias(mask: Any, query: Tensor, key: Tensor) -> tuple[Any, Tensor | None]:
    if mask is None:
        return None, None
    if isinstance(mask, ModelMask):
        mask = mask.broadcast(query.shape[2])
        queries, keys = mask.lengths[2:]
        if queries != query.shape[2] or keys != key.shape[2]:
            raise ValueError(
                f"attention_mask must be of {query.shape[2]} queries and {key.shape[2]} keys; got one of {queries} and {keys}. If "
                f'the model added keys of its own, load it with attn_implementation="eager"'
            )
        return None if mask.everywhere else mask, None
    if not isinstance(mask, Tensor):
        return mask, None
    mask = _first_keys(mask, key)
    return (None, mask) if mask.is_floating_point() else (mask, None)


def _first_keys(tensor: Tensor, key: Tensor) -> Tensor:
    """Models hand over masks and biases for the whole of a cache."""
    return tensor[..., : key.shape[2]] if tensor.shape[-1] > key.shape[2] else tensor


def _score(softcap: float | None, position_bias: Tensor | None, key: Tensor) -> Score | None:
    score = None if softcap is None else scores.softcap(softcap)
    if position_bias is None:
        return score
    bias = scores.bias(_first_keys(position_bias, key))
    return bias if score is None else score >> bias


def _causal(offset: Any, window: int | None = None) -> Mask:
    """Query i attends to keys up to i + offset, to `window` of them at most."""
    if window is not None:
        return Mask(lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx + offset) & (kv_idx > q_idx + (offset - window)))
    if isinstance(offset, int) and offset == 0:
        return _CAUSAL
    return Mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + offset)


_CAUSAL: Final = Mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx)


@dataclass(frozen=True, eq=False)
class _Sizes:
    """Sizes of one mask: how many entries, queries and keys, and where in the text the first query and key stand."""

    batch: Any
    queries: Any
    keys: Any
    q_offset: Any
    kv_offset: Any


def attention_mask(
    batch_size: Any,
    q_length: Any = None,
    kv_length: Any = None,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Any = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str | None = None,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> ModelMask:
    """The mask of a model as an expression, as transformers' models ask for it.

    Args:
        batch_size, q_length, kv_length: B, Sq and Skv.
        q_offset, kv_offset: position of the first query and of the first key; q_offset may be a 0-d tensor.
        mask_function: (b, h, q_idx, kv_idx) -> bool of positions.
        attention_mask: [B, length], true for tokens that are not padding; or a mask made by this function before.
        local_size: size of the window or chunk that `mask_function` has.
        allow_is_causal_skip: `mask_function` is causal, but for `local_size`.
        allow_is_bidirectional_skip: `mask_function` attends everywhere, but for `local_size`.
        device: of the model's inputs.
        cache_position: [Sq], positions of the queries, where transformers gives these and no q_length (before 5.0).
        kwargs: what other implementations need.

    Returns:
        A `ModelMask` of shape (B, 1, Sq, Skv).
    """
    if isinstance(attention_mask, ModelMask):
        return attention_mask
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    sizes = _Sizes(batch_size, q_length, kv_length, _snapshot(q_offset), kv_offset)
    local = local_size is not None and kv_length >= local_size
    plain_causal = allow_is_causal_skip and not local
    function = _structure(mask_function, sizes, causal=plain_causal, everywhere=allow_is_bidirectional_skip and not local)
    padding = _padding(attention_mask, sizes, causal=plain_causal)
    at = _device(device, attention_mask, q_offset)
    return ModelMask(_joined(function, padding), (batch_size, 1, q_length, kv_length), at)


def _device(device: torch.device | str | None, *tensors: Any) -> torch.device:
    if device is not None:
        return torch.device(device)
    return next((t.device for t in tensors if isinstance(t, Tensor)), torch.device("cpu"))


def _snapshot(offset: Any) -> Any:
    """A static cache hands out its own counter, which has moved on by the time that the layers attend."""
    if not isinstance(offset, Tensor):
        return offset
    if torch.compiler.is_compiling() or offset.device.type != "cpu":
        return offset.clone()
    return int(offset)


def _structure(function: Callable[..., Any], sizes: _Sizes, *, causal: bool, everywhere: bool) -> Callable[..., Any] | None:
    """The mask function on indices from zero, None if it attends everywhere."""
    if everywhere:
        return None
    q_offset, kv_offset = sizes.q_offset, sizes.kv_offset
    if causal:
        ahead = q_offset - kv_offset
        if not isinstance(ahead, Tensor) and ahead >= sizes.keys - 1:
            return None
        return _causal(ahead).function
    if isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset == 0 and kv_offset == 0:
        return function

    def shifted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return function(b, h, q_idx + q_offset, kv_idx + kv_offset)

    return shifted


def _padding(keep: Tensor | None, sizes: _Sizes, *, causal: bool) -> Tensor | None:
    """bool [B, Skv], true for tokens that are not padding; None if no query can see any that is."""
    if keep is None:
        return None
    keep = keep.to(torch.bool)[:, sizes.kv_offset : sizes.kv_offset + sizes.keys]
    missing = sizes.keys - keep.shape[1]
    if not torch.compiler.is_compiling():
        visible = sizes.q_offset + sizes.queries - sizes.kv_offset if causal and isinstance(sizes.q_offset, int) else sizes.keys
        if visible <= keep.shape[1] and bool(keep[:, :visible].all()):
            return None
    return torch.nn.functional.pad(keep, (0, missing)) if missing > 0 else keep


def _joined(function: Callable[..., Any] | None, padding: Tensor | None) -> Callable[..., Any] | None:
    if padding is None:
        return function
    if function is None:
        return lambda b, h, q_idx, kv_idx: padding[b, kv_idx]
    return lambda b, h, q_idx, kv_idx: function(b, h, q_idx, kv_idx) & padding[b, kv_idx]


register()
