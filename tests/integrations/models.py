"""Two-layer models of many kinds, from their configurations, with inputs and what of the result counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import foci.integrations

foci.integrations.register_transformers()


def _formula(
    module, query, key, value, mask, scaling=None, dropout=0.0, softcap=None, s_aux=None, position_bias=None, **options
) -> tuple[Tensor, None]:
    """Attention written out in the dtype of the inputs: eager models go through float32 and finfo.min, which float64 cannot use."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    empty = torch.isneginf(scores).all(-1, keepdim=True)
    weights = torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, scores), -1))
    return (weights[..., : key.shape[2]] @ value).transpose(1, 2).contiguous(), None


def _dense_mask(*args, allow_is_causal_skip=True, allow_is_bidirectional_skip=False, **kwargs) -> Tensor:
    return sdpa_mask(*args, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **kwargs)


ALL_ATTENTION_FUNCTIONS.register("formula", _formula)
ALL_MASK_ATTENTION_FUNCTIONS.register("formula", _dense_mask)

_DECODER: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
_ENCODER: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)

LENGTH = 24
REAL = 17
"""Tokens of the second sequence that are not padding."""


def tokens() -> Tensor:
    return torch.randint(2, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def padding(side: str) -> Tensor:
    keep = torch.ones(2, LENGTH, dtype=torch.long)
    if side == "right":
        keep[1, REAL:] = 0
    else:
        keep[1, : LENGTH - REAL] = 0
    return keep


def _padded(side: str) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_ids": tokens(), "attention_mask": padding(side)}


def _pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(1))}


def _speech() -> dict[str, Any]:
    features = torch.randn(2, 8, 2 * 20, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "decoder_input_ids": tokens(), "decoder_attention_mask": padding("right")}


def _translation() -> dict[str, Any]:
    return {
        "input_ids": tokens().flip(1), "attention_mask": padding("left"), "decoder_input_ids": tokens(),
        "decoder_attention_mask": padding("right"),
    }  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A kind of model.

    Attributes:
        make: the configuration.
        auto: the class that builds the model.
        inputs: of one forward.
        keep: [2, length], which positions of the result count; None for all.
        calls: attention layers.
        captured: rank of the largest tensor that a problem captures; T5 itself makes a bias [1, H, S, S].
        generates: whether `generate` takes its inputs as they are.
    """

    name: str
    make: Callable[[], Any]
    auto: Any = transformers.AutoModelForCausalLM
    inputs: Callable[[], dict[str, Any]] = _padded("right")
    keep: Callable[[], Tensor] | None = lambda: padding("right").bool()
    calls: int = 2
    captured: int = 2
    generates: bool = True

    def model(self, implementation: str, dtype: torch.dtype = torch.float32, *, experts: str = "eager") -> Any:
        torch.manual_seed(0)
        config = self.make()
        if hasattr(config, "num_experts_per_tok"):
            config._experts_implementation = experts
        model = self.auto.from_config(config, attn_implementation=implementation)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "sink" in name or "bias" in name:
                    parameter.normal_()
        return model.eval().to(dtype)

    def run(self, model: Any) -> Tensor:
        """The positions of the result that count, [n, features]."""
        inputs = {n: t.to(model.dtype) if t.is_floating_point() else t for n, t in self.inputs().items()}
        out = model(**inputs)
        result = out.logits if "logits" in out else out.last_hidden_state
        return result.flatten(0, 1) if self.keep is None else result[self.keep()]


CASES = (
    Case("llama", lambda: transformers.LlamaConfig(**_DECODER)),
    Case("llama, padded left", lambda: transformers.LlamaConfig(**_DECODER), inputs=_padded("left"), keep=lambda: padding("left").bool()),
    Case("qwen2", lambda: transformers.Qwen2Config(**_DECODER)),
    Case("mistral", lambda: transformers.MistralConfig(**_DECODER, sliding_window=7)),
    Case("gemma2", lambda: transformers.Gemma2Config(**_DECODER, head_dim=8, sliding_window=7, attn_logit_softcapping=5.0)),
    Case("gpt_oss", lambda: transformers.GptOssConfig(**_DECODER, head_dim=8, sliding_window=7, num_local_experts=2, num_experts_per_tok=2)),
    Case(
        "llama4",
        lambda: transformers.Llama4TextConfig(
            **_DECODER, intermediate_size_mlp=48, head_dim=8, attention_chunk_size=6, num_local_experts=1, interleave_moe_layer_step=3
        ),
        inputs=_padded("left"), keep=lambda: padding("left").bool(),
    ),
    Case("gpt2", lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, pad_token_id=0, bos_token_id=1, eos_token_id=None)),
    Case("bert", lambda: transformers.BertConfig(**_ENCODER, vocab_size=64, pad_token_id=0), auto=transformers.AutoModel, generates=False),
    Case(
        "vit", lambda: transformers.ViTConfig(**_ENCODER, image_size=24, patch_size=8), auto=transformers.AutoModel, inputs=_pixels, keep=None,
        captured=0, generates=False,
    ),
    Case(
        "whisper",
        lambda: transformers.WhisperConfig(
            d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
            decoder_ffn_dim=48, vocab_size=64, num_mel_bins=8, max_source_positions=20, max_target_positions=64, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        ),
        auto=transformers.AutoModelForSpeechSeq2Seq, inputs=_speech, calls=6, generates=False,
    ),
    Case(
        "t5",
        lambda: transformers.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64, pad_token_id=0, eos_token_id=None, decoder_start_token_id=0
        ),
        auto=transformers.AutoModelForSeq2SeqLM, inputs=_translation, calls=6, captured=4,
    ),
)  # fmt: skip


def exact(model: Any) -> Any:
    """The same model in float64, its attention by the formula."""
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("formula")
    return model


def within_budget(name: str, actual: Tensor, plain: Tensor, true: Tensor, factor: float, term: float = 0.0) -> None:
    """The error budget of a whole model: no further from float64 than `factor` times the eager model is, plus rounding.

    `term` is the largest of what a gradient sums: rounding is a share of that, also where the sum is zero.
    """
    eps = torch.finfo(actual.dtype).eps
    distance, of_plain = (float((t.double() - true).abs().max().detach()) for t in (actual, plain))
    budget = factor * of_plain + 16 * eps * max(float(true.abs().max().detach()), term) + 1e-9
    assert distance <= budget, f"{name}: off by {distance:.3g}, the eager model by {of_plain:.3g}, budget {budget:.3g}"
