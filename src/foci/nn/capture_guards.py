"""What a captured module is made of: looked at in each call, as graphs know only what it was."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from foci.compat.modules import submodules
from foci.ir.function_fingerprint import fingerprint
from foci.nn.attention import MultiheadAttention
from foci.nn.cuda_graphs.replay import Place
from foci.nn.skip_module_call import HOOKS, is_alone, is_silent

__all__ = ["Watch"]

_SETTINGS: Final = (
    "p", "dropout", "mask", "score", "norm_first", "activation", "eps", "inplace", "rotary", "add_zero_attn", "num_heads", "num_kv_heads",
    "head_dim", "normalized_shape", "dim", "base", "interleaved",
)  # fmt: skip
"""Attributes that computation depends on."""


class Watch:
    """A module as it was when it was captured.

    Attributes:
        places: where its parameters are.
        is_exact: whether a mask or score of its own may index a tensor by sequence or position.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        modules = list(module.modules())
        self._below = modules[1:]
        self._states = [vars(m) for m in modules]
        self._lower = self._states[1:]
        self._hooks = [state[name] for state in self._lower for name in HOOKS]
        self._children = [submodules(m) for m in modules]
        self._were = [tuple(children.values()) for children in self._children]
        named_tensors = list(_tensors(modules))
        self._named, self._tensors = [(tensors, name) for tensors, name, _ in named_tensors], [t for _, _, t in named_tensors]
        self.places = [Place(m._parameters, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
        self._parameters = tuple({id(p.parameter): p.parameter for p in self.places}.values())
        self._settings = [(state, name) for state in self._states for name in _SETTINGS if name in state]
        self._values = self._read()
        self._memory = self._addresses()
        self._functions = _functions(modules)
        self._closed = [_closed(function) for function in self._functions]
        self._held = [closure.tensors for closure in map(fingerprint, self._functions) if closure is not None]
        self.is_exact = any(map(_may_index, self._functions))

    def _read(self) -> list[Any]:
        return [state[name] for state, name in self._settings]

    def _addresses(self) -> list[int]:
        return [t.data_ptr() for t in self._tensors]

    def has_changed(self) -> bool:
        """Whether it has other parameters, buffers, submodules or settings now, or they lie elsewhere."""
        return (
            [tuple(children.values()) for children in self._children] != self._were
            or not all(map(operator.is_, [tensors.get(name) for tensors, name in self._named], self._tensors))
            or self._addresses() != self._memory
            or self._read() != self._values
            or [_closed(function) for function in self._functions] != self._closed
        )

    def in_training(self) -> tuple[bool, ...]:
        """Which modules are; each way has captures of its own."""
        return tuple([state["training"] for state in self._states])

    def learning(self) -> tuple[Tensor, ...]:
        """The parameters that require grad, each once, in the order of `places`."""
        return tuple([t for t in self._parameters if t.requires_grad])

    def check(self) -> None:
        """Raises ValueError where a replay would pass over somebody's hook."""
        if not is_alone():
            raise ValueError("a captured module cannot be computed while hooks are set for all modules, or modules are traced")
        if not (any(self._hooks) or [s for s in self._lower if "forward" in s or s.get("_compiled_call_impl") is not None]):
            return
        module = next(module for module in self._below if not is_silent(module))
        raise ValueError(
            f"{type(module).__name__} within a captured module must have no hooks, forward of its own or compiled form: a CUDA "
            "graph calls no module; foci.nn.release(module) computes it as it was"
        )


def _tensors(modules: list[torch.nn.Module]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            yield from ((tensors, name, t) for name, t in tensors.items() if t is not None)


def _functions(modules: list[torch.nn.Module]) -> list[Any]:
    """Masks and scores that attentions have of their own."""
    variants = [getattr(m, name) for m in modules if isinstance(m, MultiheadAttention) for name in ("mask", "score")]
    return [getattr(f, "function", f) for f in variants if f is not None]


def _closed(function: Any) -> object:
    """Return what a function computes by, where that can be told."""
    closure = fingerprint(function)
    return None if closure is None else (closure.structure, closure.numbers, [(id(t), t.data_ptr()) for t in closure.tensors])


def _may_index(function: Any) -> bool:
    closure = None if isinstance(function, torch.nn.Module) else fingerprint(function)
    return closure is None or bool(closure.tensors)
