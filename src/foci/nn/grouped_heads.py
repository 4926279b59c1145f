"""What foci's attention has besides torch's: its attributes, and parameters of fewer key heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from foci.compat.modules import reset_attention_parameters

__all__ = ["Variant", "group", "plug", "regroup"]

Variant: TypeAlias = Callable[..., Any] | torch.nn.Module | None


def plug(module: Any, *, num_kv_heads: int, rotary: Any = None, mask: Variant = None, score: Variant = None) -> None:
    """Gives a module the attributes."""
    module.num_kv_heads = num_kv_heads
    module.rotary, module.mask, module.score = rotary, mask, score


def group(module: torch.nn.MultiheadAttention, width: int) -> None:
    """Parameters for keys and values of `width` features."""
    size = module.embed_dim
    packed: Tensor | None = module.in_proj_weight

    def empty(like: Tensor, *shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(like.new_empty(shape))

    if packed is not None:
        module.in_proj_weight = empty(packed, size + 2 * width, size)
    else:
        assert module.k_proj_weight is not None and module.v_proj_weight is not None
        module.k_proj_weight = empty(module.k_proj_weight, width, module.kdim)
        module.v_proj_weight = empty(module.v_proj_weight, width, module.vdim)
    if module.in_proj_bias is not None:
        module.in_proj_bias = empty(module.in_proj_bias, size + 2 * width)
    if module.bias_k is not None and module.bias_v is not None:
        module.bias_k, module.bias_v = (empty(module.bias_k, 1, 1, width) for _ in range(2))
    reset_attention_parameters(module)


def regroup(module: Any, num_heads: int) -> None:
    """Other heads over the same parameters, as torch's attention takes them: head dim and key heads follow.

    Raises:
        ValueError: if the features of queries or of keys are no multiple of the new heads.
    """
    width = module.num_kv_heads * module.head_dim
    head_dim, rest = divmod(module.embed_dim, num_heads)
    if rest or width % head_dim or num_heads % (width // head_dim):
        raise ValueError(
            f"num_heads must divide embed_dim = {module.embed_dim}, and be a multiple of key heads over {width} features of keys; "
            f"got {num_heads}"
        )
    module.head_dim, module.num_kv_heads = head_dim, width // head_dim
