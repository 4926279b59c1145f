"""Architectures of Hugging Face transformers made small: two layers, random parameters, inputs with padding."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from spelling_harness import draw
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LENGTH, WIDTH, HEADS, VOCABULARY = 20, 32, 4, 64

# Whatever a configuration calls them. A model type's own row adds to these.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "num_embeddings"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "d_embed", "emb_dim", "projection_dim"), WIDTH),
    **dict.fromkeys(
        ("intermediate_size", "d_inner", "n_inner", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "hidden_dim"), 48
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"), 2
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "d_head", "d_kv", "rotary_dim"), WIDTH // HEADS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    "num_key_value_heads": 2,
    "image_size": 24,
    "patch_size": 8,
    "use_cache": False,
    "num_local_experts": 2,
    "num_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "num_mel_bins": 8,
    "sliding_window": 7,
    "window_size": 7,
}

_CONV = {
    "conv_dim": (16, 16),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}

OWN: dict[str, dict[str, Any]] = {
    "albert": {"num_hidden_groups": 1},
    "wav2vec2": {**_CONV, "mask_time_prob": 0.0},
    "hubert": {**_CONV, "mask_time_prob": 0.0},
    "wavlm": {**_CONV, "mask_time_prob": 0.0},
    "swin": {"embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 3, "patch_size": 4},
    "swinv2": {"embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 3, "patch_size": 4},
    "gemma2": {"attn_logit_softcapping": 5.0},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    },
    "deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "phi": {"partial_rotary_factor": 0.5},
    "mpt": {"expansion_ratio": 2},
    "yolos": {"image_size": [24, 24], "num_detection_tokens": 4},
    "longt5": {"encoder_attention_type": "local", "local_radius": 4},
    "esm": {"emb_layer_norm_before": False, "token_dropout": False, "mask_token_id": 5},
    "falcon": {"alibi": False},
    "segformer": {
        "depths": [1, 1],
        "num_encoder_blocks": 2,
        "sr_ratios": [2, 1],
        "hidden_sizes": [16, 32],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_attention_heads": [2, 2],
        "mlp_ratios": [2, 2],
    },
    "distilbert": {"dim": WIDTH},
    "lilt": {"hidden_size": 48},
}


@dataclass(frozen=True)
class Architecture:
    """One of transformers' model types.

    Attributes:
        kind: its name there.
        task: the automatic class that makes it.
        overrides: settings in place of the table's.
    """

    kind: str
    task: str = "AutoModel"
    overrides: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        cls = type(transformers.AutoConfig.for_model(self.kind))
        default = transformers.AutoConfig.for_model(self.kind)
        known = {name: value for name, value in SMALL.items() if hasattr(default, name) and _is_set(cls, name)}
        settings = {**OWN.get(self.kind, {}), **self.overrides}
        nested = {
            part: {n: v for n, v in SMALL.items() if hasattr(getattr(default, part), n)}
            for part in ("text_config", "vision_config")
            if getattr(default, part, None) is not None
        }
        return cls(**{**known, **nested, **settings})

    def model(self, attention: str = "eager") -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return getattr(transformers, self.task).from_config(self.config(), attn_implementation=attention)

    def inputs(self, model: nn.Module, length: int = LENGTH) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(3, VOCABULARY, (2, length), generator=generator)
        keep = (torch.arange(length) < torch.tensor([[length], [length - 6]])).long()
        config = model.config
        tensors: dict[str, Tensor] = {}
        if model.main_input_name == "pixel_values" or hasattr(config, "vision_config"):
            size = getattr(getattr(config, "vision_config", config), "image_size", 24)
            size = size if isinstance(size, (list, tuple)) else (size, size)
            tensors["pixel_values"] = torch.randn(2, 3, *size, generator=generator)
        if model.main_input_name == "input_values":
            tensors |= {"input_values": torch.randn(2, 32 * length, generator=generator)}
        elif model.main_input_name == "input_features":
            tensors |= {"input_features": torch.randn(2, 8, 2 * config.max_source_positions, generator=generator)}
        elif model.main_input_name == "input_ids" or hasattr(config, "text_config"):
            tensors |= {"input_ids": tokens, "attention_mask": keep}
        if config.is_encoder_decoder:
            tensors |= {"decoder_input_ids": tokens.flip(1), "decoder_attention_mask": keep.flip(0)}
        return tensors


def _is_set(cls: type, name: str) -> bool:
    """Whether a configuration holds the setting itself: it is no other name for one, and not computed."""
    return name not in cls.attribute_map and not isinstance(getattr(cls, name, None), property)


class _Softmaxes(TorchFunctionMode):
    """Counts softmaxes over scores: of three dimensions or more, a router's have two."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "softmax" and isinstance(result, Tensor) and result.ndim >= 3:
            self.count += 1
        return result


def attentions(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """How many softmaxes of scores one forward of the eager model has."""
    with torch.no_grad(), _Softmaxes() as counting:
        copy.deepcopy(model).eval()(**inputs)
    return counting.count


def first(output: Any) -> Tensor:
    """The result that counts."""
    for name in ("logits", "last_hidden_state", "logits_per_image"):
        if name in output and output[name] is not None:
            return output[name]
    return next(t for t in output.values() if isinstance(t, Tensor) and t.is_floating_point())


def cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}


def results(model: nn.Module, inputs: dict[str, Tensor], *, training: bool) -> dict[str, Tensor]:
    """The output, and the gradients of all parameters in training."""
    model.zero_grad()
    with torch.set_grad_enabled(training):
        out = first(model(**inputs))
    tensors = {"output": out.detach()}
    if training:
        out.backward(flowing(out))
        tensors |= {name.removeprefix("_orig_mod."): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return tensors


def flowing(out: Tensor) -> Tensor:
    """The gradient of the result that `results` starts from."""
    return draw(*out.shape, seed=3).to(out)


def undropped(model: nn.Module) -> nn.Module:
    """Without dropout, which draws from another generator when it is fused."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for each in (*model.modules(), model.config):
        for name in ("dropout", "attention_dropout", "attn_dropout", "activation_dropout", "layerdrop", "drop_prob"):
            if isinstance(getattr(each, name, None), float):
                setattr(each, name, 0.0)
    return model


TESTED = (
    Architecture("bert"),
    Architecture("gpt2", "AutoModelForCausalLM"),
    Architecture("llama", "AutoModelForCausalLM"),
    Architecture("t5", "AutoModelForSeq2SeqLM"),
    Architecture("vit"),
    Architecture("whisper", "AutoModelForSpeechSeq2Seq"),
    Architecture("gemma2", "AutoModelForCausalLM"),
    Architecture("bloom", "AutoModelForCausalLM"),
    Architecture("gpt_oss", "AutoModelForCausalLM"),
    Architecture("deberta-v2"),
)

FURTHER = (
    *(Architecture(kind, "AutoModelForCausalLM") for kind in (
        "opt", "gpt_neo", "gpt_neox", "gptj", "codegen", "falcon", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "phi", "phi3", "gemma",
        "gemma3_text", "olmo", "olmo2", "cohere", "starcoder2", "stablelm", "granite", "mpt", "gpt_bigcode", "smollm3", "glm", "biogpt", "xglm",
        "granite_swa", "cpmant",
    )),
    *(Architecture(kind) for kind in (
        "roberta", "electra", "distilbert", "albert", "xlm-roberta", "camembert", "mpnet", "esm", "xlnet", "deberta", "layoutlm", "convbert",
        "modernbert", "nomic_bert", "squeezebert", "ernie", "flaubert", "xlm", "roformer", "rembert",
    )),
    *(Architecture(kind, "AutoModelForSeq2SeqLM") for kind in ("bart", "pegasus", "marian", "mbart", "longt5", "mt5", "blenderbot", "m2m_100", "umt5", "switch_transformers")),
    *(Architecture(kind) for kind in ("clip", "siglip", "deit", "beit", "swin", "swinv2", "dinov2", "segformer", "vit_mae", "ijepa", "yolos", "blip", "git", "pixtral")),
    *(Architecture(kind) for kind in ("wav2vec2", "hubert", "wavlm")),
    *(Architecture(kind, "AutoModelForCausalLM") for kind in (
        "seed_oss", "exaone4", "glm4", "gpt_neox_japanese", "ernie4_5_moe", "ministral", "qwen3_moe", "apertus", "cohere2", "vaultgemma", "arcee",
        "phimoe", "hunyuan_v1_moe", "jetmoe", "diffllama", "doge", "lfm2", "olmoe", "nemotron", "persimmon", "helium", "glm4_moe",
        "afmoe", "falcon_h1", "roberta-prelayernorm", "nemotron_h", "granitemoeshared", "ernie4_5", "big_bird", "bitnet", "nanochat",
        "prophetnet", "hrm_text",
    )),
    *(Architecture(kind) for kind in (
        "imagegpt", "chinese_clip", "dpr", "radio", "dpt", "megatron-bert", "gte", "mlcd", "sam_hq_vision_model", "voxtral_encoder", "lilt", "longformer",
        "groupvit", "nystromformer", "canine", "tapas", "roc_bert", "splinter", "mobilebert", "aimv2", "altclip", "visual_bert", "vitdet",
        "metaclip_2", "eurobert", "flava", "owlv2", "qwen2_audio_encoder", "fastspeech2_conformer", "openai_privacy_filter",
    )),
    *(Architecture(kind, "AutoModelForSeq2SeqLM") for kind in ("bigbird_pegasus", "plbart", "nllb-moe", "led", "pegasus_x", "fsmt", "seamless_m4t_v2")),
)  # fmt: skip
