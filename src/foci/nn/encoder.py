"""Transformer encoder: torch.nn's modules on foci, without work on padding."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.jit import is_scripting  # type: ignore[attr-defined]
from torch.nn.functional import relu

from foci.compat.modules import submodules
from foci.nn import torchscript
from foci.nn.attention import adopt
from foci.nn.cache import KVCache, LayerCache, check_cache
from foci.nn.fused_encoder import noted
from foci.nn.fx_leaf import is_traced, leaf
from foci.nn.grouped_heads import Variant
from foci.nn.layer_attention import attended, is_plain_attention
from foci.nn.masking import check_input, check_mask, check_variants, detect_causal
from foci.nn.packing import Packing, is_nested, pack_batch, restore_batch
from foci.nn.rotary import RotaryEmbedding
from foci.nn.skip_module_call import activated, caller, is_alone, is_silent

__all__ = [
    "Activation",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "attend_self",
    "clones",
    "feed_forward",
    "is_batch_first",
    "overridden",
    "set_variants",
    "unwrapped",
    "warn_padded",
    "why_not_tokens",
]

Activation = str | Callable[[Tensor], Tensor]
_BLOCKS = ("_layer", "_sa_block", "_ff_block")


class TransformerEncoderLayer(torch.nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` on foci: one forward for training, evaluation and torch.compile.

    With a padding mask, on any side or with holes, the layer computes tokens only, and returns zeros elsewhere. Finding
    them reads the mask once, which on a GPU waits for the device. Where Python may not read values (torch.compile,
    torch.export, transforms) the padded batch is computed with a mask, to the same result.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype:
            as in torch.
        num_kv_heads, rotary, mask, score: as in `foci.nn.MultiheadAttention`.

    Raises:
        RuntimeError: for an unknown name of an activation.
        ValueError, AssertionError: as `foci.nn.MultiheadAttention`.

    Example:
        >>> import torch, foci.nn
        >>> layer = foci.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> padding = torch.tensor([[False] * 6, [False] * 3 + [True] * 3])
        >>> out = layer(torch.randn(2, 6, 32), src_key_padding_mask=padding)
        >>> out.shape, bool((out[1, 3:] == 0).all())
        (torch.Size([2, 6, 32]), True)
    """

    takes_tokens = False
    """Set it in a subclass with a `forward`, `_sa_block` or `_ff_block` of its own that works on tokens [T, E]."""

    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1, activation: Activation = relu,
        layer_norm_eps: float = 1e-5, batch_first: bool = False, norm_first: bool = False, bias: bool = True, device: Any = None,
        dtype: torch.dtype | None = None, *, num_kv_heads: int | None = None, rotary: RotaryEmbedding | None = None,
        mask: Variant = None, score: Variant = None,
    ) -> None:  # fmt: skip
        super().__init__(d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype)
        adopt(self.self_attn, num_kv_heads=num_kv_heads, rotary=rotary, mask=mask, score=score)

    def forward(
        self, src: Tensor, src_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None, is_causal: bool = False,
        cache: Any = None,
    ) -> Tensor:  # fmt: skip
        """The layer's output.

        Args:
            src: [S, B, E], [B, S, E] with batch_first, [S, E], or a NestedTensor [B, ragged, E].
            src_mask: [S, S] or [B * H, S, S], bool, true where not to attend, or floating, added to the scores.
            src_key_padding_mask: [B, S] or [S], bool, true where there is padding, or floating, -inf there.
            is_causal: a hint that src_mask is causal.
            cache: a layer's part of a `foci.nn.KVCache`, whose tokens src continues.

        Returns:
            As src, zeros where there is padding.

        Raises:
            AssertionError, RuntimeError: for wrong arguments, in torch's words.
        """
        if is_scripting():
            return self._scripted(src, src_mask, src_key_padding_mask, is_causal)
        else:
            if is_traced(src):
                return leaf(self, src, src_mask, src_key_padding_mask, is_causal, cache)  # type: ignore[no-any-return]
            return self._run(src, src_mask, src_key_padding_mask, is_causal, cache)

    def _scripted(self, src: Tensor, src_mask: Tensor | None, src_key_padding_mask: Tensor | None, is_causal: bool) -> Tensor:
        """`forward` as TorchScript runs it."""
        padding = torchscript.additive(src_key_padding_mask, src.dtype, "src_key_padding_mask")
        x = torchscript.zeroed(src, padding, self.self_attn.batch_first)
        y = self.norm1(x) if self.norm_first else x
        out = self.self_attn(y, y, y, attn_mask=src_mask, key_padding_mask=padding, need_weights=False, is_causal=is_causal)[0]
        x = x + self.dropout1(out)
        if self.norm_first:
            x = x + self._ff_block(self.norm2(x))
        else:
            x = self.norm1(x)
            x = self.norm2(x + self._ff_block(x))
        return torchscript.zeroed(x, padding, self.self_attn.batch_first)

    def _run(self, src: Tensor, src_mask: Tensor | None, src_key_padding_mask: Any, is_causal: bool, cache: LayerCache | None) -> Tensor:
        check_input(src=src)
        if isinstance(src_key_padding_mask, Packing):
            pack_batch(src, src_key_padding_mask, batch_first=True, may_pack=cache is None)
            return self._layer(src, src_mask, src_key_padding_mask, is_causal=is_causal, cache=cache)
        check_mask("src_key_padding_mask", src_key_padding_mask)
        check_mask("src_mask", src_mask)
        batch_first = self.self_attn.batch_first
        can_pack = cache is None and why_not_tokens(self, TransformerEncoderLayer, _BLOCKS) is None
        x, padding = pack_batch(src, src_key_padding_mask, batch_first=batch_first, may_pack=can_pack)
        x = self._layer(x, src_mask, padding, is_causal=is_causal, cache=cache)
        return restore_batch(x, padding, batch_first=batch_first)

    def _layer(self, x: Tensor, mask: Tensor | None, padding: Any, *, is_causal: bool, cache: LayerCache | None) -> Tensor:
        if isinstance(padding, Packing) and cache is None and is_alone() and (stack := noted(self, TransformerEncoderLayer, (self,))):
            out = stack.run(x, mask, padding, is_causal=is_causal)
            if out is not None:
                return out
        call, part = caller(), submodules(self)
        if self.norm_first:
            x = x + attend_self(self, call(part["norm1"], x), mask, padding, is_causal=is_causal, cache=cache)
            return x + self._ff_block(call(part["norm2"], x))
        x = call(part["norm1"], x + attend_self(self, x, mask, padding, is_causal=is_causal, cache=cache))
        return call(part["norm2"], x + self._ff_block(x))

    def _ff_block(self, x: Tensor) -> Tensor:
        if is_scripting():
            return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))  # type: ignore[no-any-return]
        else:
            return feed_forward(self, x, "dropout2")

    def _sa_block(
        self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool = False, cache: LayerCache | None = None
    ) -> Tensor:
        call, part = caller(), submodules(self)
        x = attended(part["self_attn"], (x, x, x), attn_mask, key_padding_mask, is_causal=is_causal, cache=cache)
        return call(part["dropout1"], x)


class TransformerEncoder(torch.nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder` on foci: a padding mask makes every layer compute tokens only, in training too.

    Padding is left out before the first layer and put back, as zeros, behind the last norm; the mask is read once. Hooks
    on layers see tokens [T, E] then, and a `foci.nn.Packing` in place of the mask, whose `pad` gives the padded form;
    `enable_nested_tensor=False` hands padded batches from layer to layer instead, and each leaves padding out by itself.

    Args:
        encoder_layer: the layer to copy; foci's or any other.
        num_layers, norm: as in torch.
        enable_nested_tensor: whether layers are given tokens.
        mask_check: has no meaning here; padding may be anywhere.
        masks, scores: a mask or score for each layer (None for none), put into its self-attention.

    Raises:
        TypeError: for masks or scores that are none.
        ValueError: for another number of them than layers.

    Example:
        >>> import torch, foci, foci.nn
        >>> layer = foci.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> local = foci.masks.window(8, 8)
        >>> encoder = foci.nn.TransformerEncoder(layer, 2, masks=[local, None])
        >>> encoder(torch.randn(2, 6, 32)).shape
        torch.Size([2, 6, 32])
    """

    def __init__(
        self, encoder_layer: torch.nn.Module, num_layers: int, norm: torch.nn.Module | None = None, enable_nested_tensor: bool = True,
        mask_check: bool = True, *, masks: Sequence[Variant] | None = None, scores: Sequence[Variant] | None = None,
    ) -> None:  # fmt: skip
        torch.nn.Module.__init__(self)  # torch's own constructor warns of limits that are not here
        self.layers = clones(encoder_layer, num_layers)
        self.num_layers = num_layers
        self.norm = norm
        self.enable_nested_tensor = self.use_nested_tensor = enable_nested_tensor
        self.mask_check = mask_check
        set_variants(self.layers, masks=masks, scores=scores)

    def forward(
        self, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None, is_causal: bool | None = None,
        cache: Any = None,
    ) -> Tensor:  # fmt: skip
        """The last layer's output, normed.

        Args:
            src, src_key_padding_mask: as in `TransformerEncoderLayer.forward`; or tokens [T, E] and their `foci.nn.Packing`.
            mask: its src_mask.
            is_causal: a hint that mask is causal; None has it looked at.
            cache: a `foci.nn.KVCache`, whose tokens src continues.

        Returns:
            As src, zeros where there is padding.

        Raises:
            AssertionError, RuntimeError: for wrong arguments, in torch's words.
        """
        if is_scripting():
            return self._scripted(src, mask, src_key_padding_mask, is_causal)
        else:
            if is_traced(src):
                return leaf(self, src, mask, src_key_padding_mask, is_causal, cache)  # type: ignore[no-any-return]
            return self._run(src, mask, src_key_padding_mask, is_causal, cache)

    def _scripted(self, src: Tensor, mask: Tensor | None, src_key_padding_mask: Tensor | None, is_causal: bool | None) -> Tensor:
        """`forward` as TorchScript runs it."""
        padding = torchscript.additive(src_key_padding_mask, src.dtype, "src_key_padding_mask")
        x = src
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=is_causal is True, src_key_padding_mask=padding)
        if self.norm is not None:
            x = self.norm(x)
        return torchscript.zeroed(x, padding, self.layers[0].self_attn.batch_first)

    def _run(self, src: Tensor, mask: Tensor | None, src_key_padding_mask: Any, is_causal: bool | None, cache: KVCache | None) -> Tensor:
        check_input(src=src)
        check_mask("src_key_padding_mask", src_key_padding_mask)
        check_mask("mask", mask)
        layers: Any = self.layers
        check_cache(cache, len(layers))
        batch_first = is_batch_first(layers)
        has_padding = cache is None and (src_key_padding_mask is not None or is_nested(src))
        stack = noted(self, TransformerEncoderLayer, [*layers]) if has_padding and is_alone() else None
        reason = None if stack else next((r for r in map(overridden, layers) if r is not None), None)
        x, padding = pack_batch(
            src, src_key_padding_mask, batch_first=batch_first, may_pack=self.use_nested_tensor and reason is None and cache is None
        )
        if reason is not None and isinstance(padding, Tensor):
            warn_padded(self, reason)
        ragged = is_nested(src) or isinstance(src_key_padding_mask, Packing)
        causal = detect_causal(mask, is_causal, None if ragged else src.shape[-2] if batch_first else src.shape[0])
        alone = isinstance(padding, Packing) and is_alone()
        out = stack.run(x, mask, padding, is_causal=causal) if stack and isinstance(padding, Packing) else None
        if out is not None:
            x, layers = out, ()
        for n, layer in enumerate(layers):
            if alone and type(layer) is TransformerEncoderLayer and is_silent(layer):
                x = layer._layer(x, mask, padding, is_causal=causal, cache=None)
                continue
            more = {} if cache is None else {"cache": cache[n]}
            x = layer(x, src_mask=mask, is_causal=causal, src_key_padding_mask=padding, **more)
        if self.norm is not None:
            x = caller()(self.norm, x)
        return restore_batch(x, padding, batch_first=batch_first, input_padding=src_key_padding_mask)


def attend_self(layer: Any, x: Tensor, mask: Tensor | None, padding: Any, *, is_causal: bool, cache: LayerCache | None) -> Tensor:
    """A layer's self-attention block; only told of a cache if there is one, as a subclass's block may not know it."""
    if cache is None:
        return layer._sa_block(x, mask, padding, is_causal=is_causal)  # type: ignore[no-any-return]
    return layer._sa_block(x, mask, padding, is_causal=is_causal, cache=cache)  # type: ignore[no-any-return]


def feed_forward(layer: Any, x: Tensor, last: str) -> Tensor:
    """A layer's feed-forward block; `last` names the dropout behind it."""
    call, part = caller(), submodules(layer)
    hidden = activated(part["linear1"], x, layer.activation)
    return call(part[last], call(part["linear2"], call(part["dropout"], hidden)))


def clones(layer: torch.nn.Module, count: int) -> torch.nn.ModuleList:
    """Make deep copies of a layer."""
    return torch.nn.ModuleList([copy.deepcopy(layer) for _ in range(count)])


def set_variants(layers: Any, *, masks: Sequence[Variant] | None, scores: Sequence[Variant] | None) -> None:
    """One mask and score for the self-attention of each layer."""
    for name, variants in (("mask", masks), ("score", scores)):
        if variants is None:
            continue
        if not isinstance(variants, Sequence):
            raise TypeError(f"{name}s must be a sequence, one for each of {len(layers)} layers; got {type(variants).__name__}")
        if len(variants) != len(layers):
            raise ValueError(f"{name}s must hold one {name} or None for each of {len(layers)} layers; got {len(variants)}")
        for layer, variant in zip(layers, variants, strict=True):
            check_variants(**{name: variant})
            setattr(layer.self_attn, name, variant)


_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")  # where torch.compile and checkpoint_wrapper keep what they call


def unwrapped(layer: torch.nn.Module) -> torch.nn.Module:
    """The layer inside those of torch's wrappers that hand on what they are given."""
    parts = submodules(layer)
    inside = next((parts[name] for name in _WRAPPED if name in parts), None)
    return layer if inside is None else unwrapped(inside)


def overridden(layer: torch.nn.Module) -> str | None:
    """Why a layer may not be given tokens [T, E], if it may not."""
    layer = unwrapped(layer)
    if not isinstance(layer, TransformerEncoderLayer):
        return f"its layers are {type(layer).__name__}, not foci.nn.TransformerEncoderLayer"
    return why_not_tokens(layer, TransformerEncoderLayer, ("forward", "_run", *_BLOCKS))


def why_not_tokens(layer: torch.nn.Module, base: type, methods: Sequence[str]) -> str | None:
    """Why a layer of foci may not be given tokens [T, E], if it may not: it has methods or an attention of its own."""
    if getattr(layer, "takes_tokens", False):
        return None
    kind, state = type(layer), vars(layer)
    overrides = [name for name in methods if name in state or (kind is not base and getattr(kind, name) is not getattr(base, name))]
    if overrides:
        return f"{type(layer).__name__} has a {overrides[0]} of its own; set takes_tokens = True in it if that works on tokens [T, E]"
    parts = submodules(layer)
    attentions = [parts[name] for name in ("self_attn", "multihead_attn") if name in parts]
    if not all(map(is_plain_attention, attentions)):
        return f"{type(layer).__name__} has an attention that is not foci.nn.MultiheadAttention"
    return None


def warn_padded(module: torch.nn.Module, reason: str) -> None:
    """Says, where Python runs, that padding is computed."""
    if not torch.compiler.is_compiling():
        warnings.warn(f"{type(module).__name__} hands padded batches from layer to layer: {reason}", stacklevel=3)


def is_batch_first(layers: Any) -> bool:
    """Whether a padded batch of these layers is [B, S, E]."""
    attention = getattr(next(iter(layers), None), "self_attn", None)
    return bool(getattr(attention, "batch_first", False))
