"""Modules called past `torch.nn.Module.__call__`, which looks up hooks and attributes for longer than a GPU takes to launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from foci.compat.modules import has_global_hooks
from foci.compat.torch import is_any_autocast_enabled, is_forward_ad_open
from foci.nn.linear_ops import linear, linear_relu
from foci.operator import is_plain_eager

__all__ = ["HOOKS", "Call", "activated", "caller", "is_alone", "is_silent", "parameter", "project_out"]

Call: TypeAlias = Callable[[torch.nn.Module, Tensor], Tensor]

HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps those that `is_silent` looks for."""
_CALL: Final = torch.nn.Module.__call__


def is_alone() -> bool:
    """Whether nobody can see that a module is not called: no graph is made, no hook is set for all modules."""
    return (
        not torch.compiler.is_compiling()
        and not has_global_hooks()
        and torch.nn.Module.__call__ is _CALL  # tracers put theirs in its place
    )


def is_silent(module: torch.nn.Module) -> bool:
    """Whether calling this module would call its class's `forward` and nothing else."""
    state = module.__dict__
    return not (
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "forward" in state
        or state.get("_compiled_call_impl") is not None
    )


def caller() -> Call:
    """How the modules of a layer are called here: linear layers, norms and dropout by their parameters, if `is_alone` and they
    are `is_silent`; anything else as a module."""
    return _directly if is_alone() else _as_module


def parameter(module: torch.nn.Module, name: str) -> Any:
    """A module's parameter, also where something else than a parameter stands for it now."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def project_out(module: torch.nn.Module, x: Tensor) -> Tensor:
    """An attention's out-projection, by its parameters: torch.nn never calls that module, so hooks on it are not heard. A module of
    another class, or with a `forward` of its own, is called, as it may compute something else."""
    kind = type(module)
    forward, compute = _COMPUTE.get(kind, _UNKNOWN)
    return compute(module, x) if kind.forward is forward and "forward" not in vars(module) else _as_module(module, x)


def activated(module: torch.nn.Module, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """The activation of what a linear layer gives."""
    if activation is F.relu and x.dim() == 2 and not torch.is_grad_enabled() and is_alone():
        kind = type(module)
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        is_plain = kind is torch.nn.Linear and kind.forward is _COMPUTE[kind][0] and is_silent(module)
        is_whole = weight is not None and bias is not None and x.dtype == weight.dtype == bias.dtype and weight.layout == torch.strided
        is_seen = is_forward_ad_open() or is_any_autocast_enabled()
        if is_plain and is_whole and not is_seen and is_plain_eager((x, weight, bias)):  # type: ignore[arg-type]
            return linear_relu(x, weight, bias)  # type: ignore[arg-type]
    return activation(caller()(module, x))


def _as_module(module: torch.nn.Module, x: Tensor) -> Tensor:
    return module(x)  # type: ignore[no-any-return]


def _directly(module: torch.nn.Module, x: Tensor) -> Tensor:
    kind = type(module)
    forward, compute = _COMPUTE.get(kind, _UNKNOWN)
    return (compute if kind.forward is forward and is_silent(module) else _as_module)(module, x)


def _linear(module: Any, x: Tensor) -> Tensor:
    return linear(x, parameter(module, "weight"), parameter(module, "bias"))


def _layer_norm(module: Any, x: Tensor) -> Tensor:
    return torch.layer_norm(x, module.normalized_shape, parameter(module, "weight"), parameter(module, "bias"), module.eps)


def _dropout(module: Any, x: Tensor) -> Tensor:
    return F.dropout(x, module.p, True, module.inplace) if module.training and module.p != 0.0 else x


_DIRECT: Final[dict[type[torch.nn.Module], Call]] = {
    torch.nn.Linear: _linear,
    NonDynamicallyQuantizableLinear: _linear,
    torch.nn.LayerNorm: _layer_norm,
    torch.nn.Dropout: _dropout,
}
# with the forward that each stands for: some libraries put theirs into torch's classes
_COMPUTE: Final[dict[type[torch.nn.Module], tuple[Any, Call]]] = {kind: (kind.forward, compute) for kind, compute in _DIRECT.items()}
_UNKNOWN: Final[tuple[Any, Call]] = (None, _as_module)
