"""Operators of torch whose names begin with an underscore: torch's fused attention, and what graphs hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from foci.compat.lookup import find

__all__ = [
    "EFFICIENT_FORWARD", "ENCODER_LAYER", "FLASH_BACKWARD", "FLASH_CPU_BACKWARD", "FLASH_CPU_FORWARD", "FLASH_FORWARD", "LOG_SOFTMAX",
    "LOG_SOFTMAX_BACKWARD", "MKLDNN_LINEAR", "SOFTMAX", "SOFTMAX_BACKWARD", "TO_COPY", "UNSAFE_VIEW", "Absent", "OpOverload",
    "OpOverloadPacket", "is_mkldnn_enabled", "linear_with_relu", "read_schema",
]  # fmt: skip


class Absent:
    """Stands for an operator that the installed torch does not have: no graph holds it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.path} is missing in torch {torch.__version__}")

    def __repr__(self) -> str:
        return f"{self.path} (missing)"


def _operator(path: str, without: str) -> Any:
    return find(f"torch.ops.{path}", Absent(f"torch.ops.{path}"), without=without)


# ---- torch's fused attention; the backend `aten` declines what is absent ----

FLASH_CPU_FORWARD: Final = _operator("aten._scaled_dot_product_flash_attention_for_cpu", "has no backend aten on the CPU")
FLASH_CPU_BACKWARD: Final = _operator("aten._scaled_dot_product_flash_attention_for_cpu_backward", "has no backend aten on the CPU")
FLASH_FORWARD: Final = _operator("aten._scaled_dot_product_flash_attention", "has no backend aten for half precision on a GPU")
FLASH_BACKWARD: Final = _operator("aten._scaled_dot_product_flash_attention_backward", "has no backend aten for half precision on a GPU")
EFFICIENT_FORWARD: Final = _operator("aten._scaled_dot_product_efficient_attention", "has no backend aten for float32 on a GPU")


# ---- products of torch.nn ----

MKLDNN_LINEAR: Final = _operator("mkldnn._linear_pointwise.default", "multiplies by torch.nn.functional.linear on every CPU")
"""(x, weight, bias, "none", [], None). Inductor's compiled programs call it too, so its arguments are kept."""

is_mkldnn_enabled: Final[Callable[[], bool]] = find(
    "torch._C._get_mkldnn_enabled", lambda: bool(torch.backends.mkldnn.enabled), without="asks torch.backends.mkldnn, which is slower"
)

_addmm_activation: Final[Any] = find("torch._addmm_activation", without="applies relu after a product, in a kernel of its own")


def linear_with_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(x weight^T + bias) of x [T, E], in one kernel where torch has that."""
    if _addmm_activation is None:
        return F.linear(x, weight, bias).relu_()
    out: Tensor = _addmm_activation(bias, x, weight.t(), use_gelu=False)
    return out


# ---- operators in graphs ----

_UNSEEN: Final = "does not know the operator in graphs, where it no longer is"

UNSAFE_VIEW: Final = _operator("aten._unsafe_view.default", _UNSEEN)
TO_COPY: Final = _operator("aten._to_copy.default", _UNSEEN)
SOFTMAX: Final = _operator("aten._softmax.default", _UNSEEN)
SOFTMAX_BACKWARD: Final = _operator("aten._softmax_backward_data.default", _UNSEEN)
LOG_SOFTMAX: Final = _operator("aten._log_softmax.default", _UNSEEN)
LOG_SOFTMAX_BACKWARD: Final = _operator("aten._log_softmax_backward_data.default", _UNSEEN)
ENCODER_LAYER: Final = find("torch._transformer_encoder_layer_fwd", Absent("torch._transformer_encoder_layer_fwd"), without=_UNSEEN)
"""What torch.nn.TransformerEncoderLayer calls in eval mode."""

if TYPE_CHECKING:
    from torch._ops import OpOverload, OpOverloadPacket
else:
    OpOverload, OpOverloadPacket = type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add)


_has_schemas: Final[bool] = (
    find("torch.ops.aten.add.Tensor._schema", without="takes no operation for element-wise or for a view, so pads and fuses less")
    is not None
)


def read_schema(operator: Any) -> Any:
    """An operator's schema: its name, its arguments, whether it writes them; None where torch does not tell."""
    return operator._schema if _has_schemas else None
