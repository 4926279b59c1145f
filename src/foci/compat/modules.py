"""What torch.nn keeps in private attributes: a module's submodules by name, hooks for all modules, how attention parameters are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.nn import init

from foci.compat.lookup import find

__all__ = ["has_global_hooks", "reset_attention_parameters", "submodules"]

_MISSING: Final = object()


class _Submodules(Mapping[str, Any]):
    """A module's submodules by name, looked up at each access; names that hold None are left out."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def _now(self) -> dict[str, torch.nn.Module]:
        return {name: part for name, part in self._module.named_modules(remove_duplicate=False) if name and "." not in name}

    def __getitem__(self, name: str) -> torch.nn.Module:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


_HAS_TABLE: Final = find("torch.nn.Module._modules", _MISSING, without="walks a module to find its parts, which is slower") is not _MISSING


def submodules(module: torch.nn.Module) -> Mapping[str, Any]:
    """The submodules of a module by name, as they are when the mapping is read. A plain function, which Dynamo traces."""
    return module._modules if _HAS_TABLE else _Submodules(module)


def _may_have_hooks() -> bool:
    return True


has_global_hooks: Final[Callable[[], bool]] = find(
    "torch.nn.modules.module._has_any_global_hook", _may_have_hooks, without="calls every part of a layer as a module, which is slower"
)
"""Whether a hook is set for all modules; yes where torch does not tell."""


def _draw_parameters(module: Any) -> None:
    """Draw parameters as torch.nn.MultiheadAttention does: weights by Xavier's uniform rule, its biases zero (Glorot and Bengio, 2010)."""
    packed = module.in_proj_weight
    for weight in (packed,) if packed is not None else (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight):
        init.xavier_uniform_(weight)
    if module.in_proj_bias is not None:
        init.zeros_(module.in_proj_bias)
        init.zeros_(module.out_proj.bias)
    for bias in (module.bias_k, module.bias_v):
        if bias is not None:
            init.xavier_normal_(bias)


reset_attention_parameters: Final[Callable[[Any], None]] = find(
    "torch.nn.MultiheadAttention._reset_parameters", _draw_parameters, without="draws the parameters of attention by itself"
)
"""Draw the parameters of a torch.nn.MultiheadAttention anew."""
