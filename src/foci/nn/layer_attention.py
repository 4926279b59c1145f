"""The attention of a layer: its module is called, or, if it has no hooks and is no subclass, computed on packed tokens directly."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foci.nn.attention import MultiheadAttention
from foci.nn.attention_inputs import Projected
from foci.nn.cache import LayerCache, Memory
from foci.nn.packing import Packing, Pair
from foci.nn.skip_module_call import is_alone, is_silent

__all__ = ["attended", "is_plain_attention"]


def is_plain_attention(module: Any) -> bool:
    """Whether the module computes as `MultiheadAttention` does, so that it may be given packed tokens."""
    return isinstance(module, MultiheadAttention) and type(module).forward is MultiheadAttention.forward and "forward" not in vars(module)


def attended(
    attention: Any, inputs: Projected, attn_mask: Tensor | None, padding: Any, *, is_causal: bool, cache: LayerCache | Memory | None
) -> Tensor:
    """Return what a layer's attention gives without weights."""
    if isinstance(padding, (Packing, Pair)) and is_plain_attention(attention) and is_silent(attention) and is_alone():
        return attention._packed(inputs, padding, attn_mask, is_causal=is_causal)  # type: ignore[no-any-return]
    more = {} if cache is None else {"cache": cache}  # other modules know no cache
    out: Tensor = attention(*inputs, attn_mask=attn_mask, key_padding_mask=padding, need_weights=False, is_causal=is_causal, **more)[0]
    return out
