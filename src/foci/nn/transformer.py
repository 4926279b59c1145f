"""The encoder-decoder Transformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.jit import is_scripting  # type: ignore[attr-defined]
from torch.nn.functional import relu

from foci.nn.decoder import TransformerDecoder, TransformerDecoderLayer
from foci.nn.encoder import Activation, TransformerEncoder, TransformerEncoderLayer
from foci.nn.fx_leaf import is_traced, leaf
from foci.nn.rotary import RotaryEmbedding

__all__ = ["Transformer"]


class Transformer(torch.nn.Transformer):
    """`torch.nn.Transformer` (Vaswani et al., 2017) on foci.

    Args:
        d_model, nhead, num_encoder_layers, num_decoder_layers, dim_feedforward, dropout, activation, custom_encoder,
            custom_decoder, layer_norm_eps, batch_first, norm_first, bias, device, dtype: as in torch.
        num_kv_heads: as in `foci.nn.MultiheadAttention`, for every attention.
        rotary: the same, for self-attention.

    Raises:
        RuntimeError: for an unknown name of an activation.
        ValueError, AssertionError: as `foci.nn.MultiheadAttention`.

    Example:
        >>> import torch, foci.nn
        >>> model = foci.nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
        >>> causal = model.generate_square_subsequent_mask(7)
        >>> model(torch.randn(2, 9, 32), torch.randn(2, 7, 32), tgt_mask=causal).shape
        torch.Size([2, 7, 32])
    """

    def __init__(
        self, d_model: int = 512, nhead: int = 8, num_encoder_layers: int = 6, num_decoder_layers: int = 6, dim_feedforward: int = 2048,
        dropout: float = 0.1, activation: Activation = relu, custom_encoder: Any = None, custom_decoder: Any = None,
        layer_norm_eps: float = 1e-5, batch_first: bool = False, norm_first: bool = False, bias: bool = True, device: Any = None,
        dtype: torch.dtype | None = None, *, num_kv_heads: int | None = None, rotary: RotaryEmbedding | None = None,
    ) -> None:  # fmt: skip
        sizes = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype)

        def norm() -> torch.nn.LayerNorm:
            return torch.nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, device=device, dtype=dtype)

        encoder, decoder = custom_encoder, custom_decoder
        if encoder is None:
            layer = TransformerEncoderLayer(*sizes, num_kv_heads=num_kv_heads, rotary=rotary)
            encoder = TransformerEncoder(layer, num_encoder_layers, norm())
        if decoder is None:
            decoder_layer = TransformerDecoderLayer(*sizes, num_kv_heads=num_kv_heads, rotary=rotary)
            decoder = TransformerDecoder(decoder_layer, num_decoder_layers, norm())
        super().__init__(
            d_model, nhead, num_encoder_layers, num_decoder_layers, dim_feedforward, dropout, activation, encoder, decoder,
            layer_norm_eps, batch_first, norm_first, bias, device, dtype,
        )  # fmt: skip

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None, tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None, src_is_causal: bool | None = None, tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """The decoder's output over the encoder's.

        Args:
            src, src_mask, src_key_padding_mask, src_is_causal: as in `TransformerEncoder.forward`.
            tgt, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, tgt_is_causal, memory_is_causal: as in
                `TransformerDecoder.forward`.

        Returns:
            As tgt, zeros where there is padding.

        Raises:
            RuntimeError: for batch sizes or features that do not fit, in torch's words; others as the parts raise them.
        """
        if not is_scripting():  # noqa: SIM102  TorchScript leaves out a branch, not half of a condition
            if is_traced(src, tgt):
                masks = (src_mask, tgt_mask, memory_mask, src_key_padding_mask, tgt_key_padding_mask, memory_key_padding_mask)
                return leaf(self, src, tgt, *masks, src_is_causal, tgt_is_causal, memory_is_causal)  # type: ignore[no-any-return]
        if src.dim() == 3 and not (src.is_nested or tgt.is_nested):
            batch_dim = 0 if self.batch_first else 1
            if tgt.dim() == 3 and src.size(batch_dim) != tgt.size(batch_dim):
                raise RuntimeError("the batch number of src and tgt must be equal")
        if src.size(-1) != self.d_model or tgt.size(-1) != self.d_model:
            raise RuntimeError("the feature number of src and tgt must be equal to d_model")
        memory = self.encoder(src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal)
        out: Tensor = self.decoder(
            tgt, memory, tgt_mask=tgt_mask, memory_mask=memory_mask, tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask, tgt_is_causal=tgt_is_causal, memory_is_causal=memory_is_causal,
        )  # fmt: skip
        return out
