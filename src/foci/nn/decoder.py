"""Transformer decoder: torch.nn's modules on foci, without work on padding of either side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.jit import is_scripting  # type: ignore[attr-defined]
from torch.nn.functional import relu

from foci.compat.modules import submodules
from foci.nn import torchscript
from foci.nn.attention import adopt
from foci.nn.cache import KVCache, LayerCache, Memory, check_cache
from foci.nn.encoder import (
    Activation,
    attend_self,
    clones,
    feed_forward,
    is_batch_first,
    set_variants,
    unwrapped,
    warn_padded,
    why_not_tokens,
)
from foci.nn.fx_leaf import is_traced, leaf
from foci.nn.grouped_heads import Variant
from foci.nn.layer_attention import attended
from foci.nn.masking import check_input, check_mask, detect_causal
from foci.nn.packing import Packing, Pair, is_nested, pack_batch, pack_pair, restore_batch
from foci.nn.rotary import RotaryEmbedding
from foci.nn.skip_module_call import caller, is_alone, is_silent

__all__ = ["TransformerDecoder", "TransformerDecoderLayer", "overridden"]

_BLOCKS = ("_layer", "_sa_block", "_mha_block", "_ff_block")


class TransformerDecoderLayer(torch.nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer` on foci: padding of target and memory is left out of every computation.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype:
            as in torch.
        num_kv_heads: as in `foci.nn.MultiheadAttention`, for both attentions.
        rotary, mask, score: the same, for self-attention.

    Raises:
        RuntimeError: for an unknown name of an activation.
        ValueError, AssertionError: as `foci.nn.MultiheadAttention`.

    Example:
        >>> import torch, foci.nn
        >>> layer = foci.nn.TransformerDecoderLayer(32, 4, batch_first=True)
        >>> layer(torch.randn(2, 5, 32), torch.randn(2, 9, 32)).shape
        torch.Size([2, 5, 32])
    """

    takes_tokens = False
    """Set it in a subclass with a method of its own that works on tokens [T, E]."""

    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1, activation: Activation = relu,
        layer_norm_eps: float = 1e-5, batch_first: bool = False, norm_first: bool = False, bias: bool = True, device: Any = None,
        dtype: torch.dtype | None = None, *, num_kv_heads: int | None = None, rotary: RotaryEmbedding | None = None,
        mask: Variant = None, score: Variant = None,
    ) -> None:  # fmt: skip
        super().__init__(d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype)
        adopt(self.self_attn, num_kv_heads=num_kv_heads, rotary=rotary, mask=mask, score=score)
        adopt(self.multihead_attn, num_kv_heads=num_kv_heads)

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]  # torch's own makes activations that are modules relu
        if not hasattr(self, "activation"):
            self.activation = relu

    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None, tgt_is_causal: bool = False,
        memory_is_causal: bool = False, cache: Any = None,
    ) -> Tensor:  # fmt: skip
        """The layer's output.

        Args:
            tgt, memory: [S, B, E], [B, S, E] with batch_first, [S, E], or NestedTensors [B, ragged, E].
            tgt_mask, memory_mask: [T, T] and [T, S], or [B * H, ...], bool, true where not to attend, or floating, added.
            tgt_key_padding_mask, memory_key_padding_mask: [B, T] and [B, S], bool, true where there is padding, or floating.
            tgt_is_causal, memory_is_causal: hints that the masks are causal.
            cache: a layer's part of a `foci.nn.KVCache`, whose tokens tgt continues; keeps the memory's keys and values too.

        Returns:
            As tgt, zeros where there is padding.

        Raises:
            AssertionError, RuntimeError: for wrong arguments, in torch's words.
        """
        if is_scripting():
            masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
            return self._scripted(tgt, memory, masks, tgt_is_causal, memory_is_causal)
        else:
            if is_traced(tgt, memory):
                masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
                return leaf(self, tgt, memory, *masks, tgt_is_causal, memory_is_causal, cache)  # type: ignore[no-any-return]
            inputs = ((tgt, tgt_key_padding_mask), (memory, memory_key_padding_mask))
            return self._run(inputs, (tgt_mask, memory_mask), (tgt_is_causal, memory_is_causal), cache)

    def _scripted(
        self, tgt: Tensor, memory: Tensor, masks: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None], tgt_is_causal: bool,
        memory_is_causal: bool,
    ) -> Tensor:  # fmt: skip
        """`forward` as TorchScript runs it."""
        batch_first = self.self_attn.batch_first
        padding = torchscript.additive(masks[2], tgt.dtype, "tgt_key_padding_mask")
        hidden = torchscript.additive(masks[3], tgt.dtype, "memory_key_padding_mask")
        x, mem = torchscript.zeroed(tgt, padding, batch_first), torchscript.zeroed(memory, hidden, batch_first)
        y = self.norm1(x) if self.norm_first else x
        out = self.self_attn(y, y, y, attn_mask=masks[0], key_padding_mask=padding, need_weights=False, is_causal=tgt_is_causal)[0]
        x = x + self.dropout1(out)
        x = x if self.norm_first else self.norm1(x)
        y = self.norm2(x) if self.norm_first else x
        out = self.multihead_attn(y, mem, mem, attn_mask=masks[1], key_padding_mask=hidden, need_weights=False, is_causal=memory_is_causal)[
            0
        ]
        x = x + self.dropout2(out)
        x = x if self.norm_first else self.norm2(x)
        if self.norm_first:
            x = x + self._ff_block(self.norm3(x))
        else:
            x = self.norm3(x + self._ff_block(x))
        return torchscript.zeroed(x, padding, batch_first)

    def _run(
        self, inputs: tuple[tuple[Tensor, Any], tuple[Tensor, Any]], masks: tuple[Tensor | None, Tensor | None],
        causal: tuple[bool, bool], cache: LayerCache | None,
    ) -> Tensor:  # fmt: skip
        check_input(tgt=inputs[0][0], memory=inputs[1][0])
        if isinstance(inputs[0][1], Packing) and isinstance(inputs[1][1], Packing):
            for x, padding in inputs:
                pack_batch(x, padding, batch_first=True, may_pack=cache is None)
            return self._layer(*inputs, masks, causal, cache)
        batch_first = self.self_attn.batch_first
        check_masks(*masks, inputs[0][1], inputs[1][1])
        reason = why_not_tokens(self, TransformerDecoderLayer, _BLOCKS)
        target, source = enter_both(*inputs, batch_first=batch_first, may_pack=reason is None and cache is None)
        out = self._layer(target, source, masks, causal, cache)
        return restore_batch(out, target[1], batch_first=batch_first, input_padding=inputs[0][1])

    def _layer(
        self, target: tuple[Tensor, Any], memory: tuple[Tensor, Any], masks: tuple[Tensor | None, ...], causal: tuple[bool, bool],
        cache: LayerCache | None,
    ) -> Tensor:  # fmt: skip
        (x, padding), (mem, mem_padding) = target, memory
        cross = Pair(padding, mem_padding) if isinstance(padding, Packing) else mem_padding
        more = {} if cache is None else {"cache": cache.memory}
        call, part = caller(), submodules(self)
        if self.norm_first:
            x = x + attend_self(self, call(part["norm1"], x), masks[0], padding, is_causal=causal[0], cache=cache)
            x = x + self._mha_block(call(part["norm2"], x), mem, masks[1], cross, causal[1], **more)
            return x + self._ff_block(call(part["norm3"], x))
        x = call(part["norm1"], x + attend_self(self, x, masks[0], padding, is_causal=causal[0], cache=cache))
        x = call(part["norm2"], x + self._mha_block(x, mem, masks[1], cross, causal[1], **more))
        return call(part["norm3"], x + self._ff_block(x))

    def _sa_block(
        self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool = False, cache: LayerCache | None = None
    ) -> Tensor:
        call, part = caller(), submodules(self)
        x = attended(part["self_attn"], (x, x, x), attn_mask, key_padding_mask, is_causal=is_causal, cache=cache)
        return call(part["dropout1"], x)

    def _mha_block(
        self, x: Tensor, mem: Tensor, attn_mask: Tensor | None, key_padding_mask: Any, is_causal: bool = False, cache: Memory | None = None
    ) -> Tensor:
        call, part = caller(), submodules(self)
        x = attended(part["multihead_attn"], (x, mem, mem), attn_mask, key_padding_mask, is_causal=is_causal, cache=cache)
        return call(part["dropout2"], x)

    def _ff_block(self, x: Tensor) -> Tensor:
        if is_scripting():
            return self.dropout3(self.linear2(self.dropout(self.activation(self.linear1(x)))))  # type: ignore[no-any-return]
        else:
            return feed_forward(self, x, "dropout3")


class TransformerDecoder(torch.nn.TransformerDecoder):
    """`torch.nn.TransformerDecoder` on foci: padding masks make every layer compute tokens only, in training too.

    Padding of target and memory is left out before the first layer; the target's is put back, as zeros, behind the last
    norm. What is said of hooks in `TransformerEncoder` holds here too.

    Args:
        decoder_layer: the layer to copy; foci's or any other.
        num_layers, norm: as in torch.
        masks, scores: a mask or score for each layer (None for none), put into its self-attention.

    Raises:
        ValueError: for another number of masks or scores than layers.

    Example:
        >>> import torch, foci.nn
        >>> layer = foci.nn.TransformerDecoderLayer(32, 4, batch_first=True)
        >>> decoder = foci.nn.TransformerDecoder(layer, 2)
        >>> decoder(torch.randn(2, 5, 32), torch.randn(2, 9, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self, decoder_layer: torch.nn.Module, num_layers: int, norm: torch.nn.Module | None = None, *,
        masks: Sequence[Variant] | None = None, scores: Sequence[Variant] | None = None,
    ) -> None:  # fmt: skip
        torch.nn.Module.__init__(self)
        self.layers = clones(decoder_layer, num_layers)
        self.num_layers = num_layers
        self.norm = norm
        set_variants(self.layers, masks=masks, scores=scores)

    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None, tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False, cache: Any = None,
    ) -> Tensor:  # fmt: skip
        """The last layer's output, normed.

        Args:
            tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, memory_is_causal: as in
                `TransformerDecoderLayer.forward`; or tokens [T, E] and their `foci.nn.Packing`, for either of the two.
            tgt_is_causal: a hint that tgt_mask is causal; None has it looked at.
            cache: a `foci.nn.KVCache`, whose tokens tgt continues; keeps the memory's keys and values too.

        Returns:
            As tgt, zeros where there is padding.

        Raises:
            AssertionError, RuntimeError: for wrong arguments, in torch's words.
        """
        if is_scripting():
            masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
            return self._scripted(tgt, memory, masks, tgt_is_causal, memory_is_causal)
        else:
            if is_traced(tgt, memory):
                masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
                return leaf(self, tgt, memory, *masks, tgt_is_causal, memory_is_causal, cache)  # type: ignore[no-any-return]
            inputs = ((tgt, tgt_key_padding_mask), (memory, memory_key_padding_mask))
            return self._run(inputs, (tgt_mask, memory_mask), (tgt_is_causal, memory_is_causal), cache)

    def _scripted(
        self, tgt: Tensor, memory: Tensor, masks: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
        tgt_is_causal: bool | None, memory_is_causal: bool,
    ) -> Tensor:  # fmt: skip
        """`forward` as TorchScript runs it."""
        x = tgt
        for layer in self.layers:
            x = layer(
                x, memory, tgt_mask=masks[0], memory_mask=masks[1], tgt_key_padding_mask=masks[2], memory_key_padding_mask=masks[3],
                tgt_is_causal=tgt_is_causal is True, memory_is_causal=memory_is_causal,
            )  # fmt: skip
        if self.norm is not None:
            x = self.norm(x)
        return torchscript.zeroed(x, masks[2], self.layers[0].self_attn.batch_first)

    def _run(
        self, inputs: tuple[tuple[Tensor, Any], tuple[Tensor, Any]], masks: tuple[Tensor | None, Tensor | None],
        is_causal: tuple[bool | None, bool], cache: KVCache | None,
    ) -> Tensor:  # fmt: skip
        (tgt, tgt_padding), (memory, memory_padding) = inputs
        check_input(tgt=tgt, memory=memory)
        check_masks(*masks, tgt_padding, memory_padding)
        layers: Any = self.layers
        check_cache(cache, len(layers))
        batch_first = is_batch_first(layers)
        reason = next((r for r in map(overridden, layers) if r is not None), None)
        (x, padding), (mem, hidden) = enter_both(*inputs, batch_first=batch_first, may_pack=reason is None and cache is None)
        if reason is not None and (isinstance(padding, Tensor) or isinstance(hidden, Tensor)):
            warn_padded(self, reason)
        ragged = is_nested(tgt) or isinstance(tgt_padding, Packing)
        causal = detect_causal(masks[0], is_causal[0], None if ragged else tgt.shape[-2] if batch_first else tgt.shape[0])
        alone = isinstance(padding, Packing) and is_alone()
        for n, layer in enumerate(layers):
            if alone and type(layer) is TransformerDecoderLayer and is_silent(layer):
                x = layer._layer((x, padding), (mem, hidden), masks, (causal, is_causal[1]), None)
                continue
            more = {} if cache is None else {"cache": cache[n]}
            x = layer(
                x, mem, tgt_mask=masks[0], memory_mask=masks[1], tgt_key_padding_mask=padding, memory_key_padding_mask=hidden,
                tgt_is_causal=causal, memory_is_causal=is_causal[1], **more,
            )  # fmt: skip
        if self.norm is not None:
            x = caller()(self.norm, x)
        return restore_batch(x, padding, batch_first=batch_first, input_padding=tgt_padding)


def check_masks(tgt_mask: Any, memory_mask: Any, tgt_key_padding_mask: Any, memory_key_padding_mask: Any) -> None:
    """Raises torch's AssertionError for a mask of a wrong dtype."""
    check_mask("tgt_mask", tgt_mask)
    check_mask("memory_mask", memory_mask)
    check_mask("tgt_key_padding_mask", tgt_key_padding_mask)
    check_mask("memory_key_padding_mask", memory_key_padding_mask)


def enter_both(
    target: tuple[Tensor, Any], memory: tuple[Tensor, Any], *, batch_first: bool, may_pack: bool
) -> tuple[tuple[Tensor, Any], ...]:
    """Target and memory as layers compute with them, each with what stands for its padding mask."""
    packed_target = pack_batch(*target, batch_first=batch_first, may_pack=may_pack)
    packed_memory = pack_batch(*memory, batch_first=batch_first, may_pack=may_pack)
    return pack_pair(packed_target, packed_memory, batch_first=batch_first)


def overridden(layer: torch.nn.Module) -> str | None:
    """Why a layer may not be given tokens [T, E], if it may not."""
    layer = unwrapped(layer)
    if not isinstance(layer, TransformerDecoderLayer):
        return f"its layers are {type(layer).__name__}, not foci.nn.TransformerDecoderLayer"
    return why_not_tokens(layer, TransformerDecoderLayer, ("forward", "_run", *_BLOCKS))
