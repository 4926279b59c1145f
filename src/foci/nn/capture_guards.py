"""What a captured module is made of: looked at in each call, as graphs know only what it was."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor

from foci.compat.modules import submodules
from foci.ir.function_fingerprint import fingerprint
from foci.nn.attention import MultiheadAttention
from foci.nn.cuda_graphs.replay import Place
from foci.nn.skip_module_call import HOOKS, is_alone, is_silent
from foci.trace_functions import bind

__all__ = ["Watch"]

_SETTINGS: Final = (
    "p", "dropout", "mask", "score", "norm_first", "activation", "eps", "inplace", "rotary", "add_zero_attn", "num_heads", "num_kv_heads",
    "head_dim", "normalized_shape", "dim", "base", "interleaved",
)  # fmt: skip
"""Attributes that computation depends on."""
_KNOWN: Final = ("torch.nn.", "foci.nn.")
"""Modules of other classes may compute by any of their numbers."""
_PLAIN: Final = frozenset((bool, int, float, str, type(None), torch.dtype))


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
        self._children = [submodules(m) for m in modules]
        self._were = [tuple(children.values()) for children in self._children]
        named_tensors = list(_tensors(modules))
        self._named, self._tensors = [(tensors, name) for tensors, name, _ in named_tensors], [t for _, _, t in named_tensors]
        self.places = [Place(m._parameters, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
        self._parameters = tuple({id(p.parameter): p.parameter for p in self.places}.values())
        self._dicts = [(state, name, state[name]) for state in self._states for name in ("_parameters", "_buffers", "_modules")]
        self._settings = [(state, name) for state in self._states for name in _SETTINGS if name in state]
        self._others = [state for m, state in zip(modules, self._states, strict=True) if not type(m).__module__.startswith(_KNOWN)]
        self._others += [vars(m.activation) for m in modules if _is_object(getattr(m, "activation", None))]
        self._values = self._read()
        self._memory = self._addresses()
        attentions = [m for m in modules if isinstance(m, MultiheadAttention)]
        self._variants = [(m, name) for m in attentions for name in ("mask", "score") if getattr(m, name) is not None]
        self._functions = self._find_functions()
        if [by for by, _ in self._find_functions()] != [by for by, _ in self._functions]:
            raise ValueError(
                "a mask or score of a captured module must read the same tensors and numbers in each call; one makes them anew: give it "
                "tensors that stay"
            )
        self.is_exact = any(map(_may_index, map(self._function, self._variants)))

    def _read(self) -> list[Any]:
        values = [state[name] for state, name in self._settings]
        return values + [(name, v) for state in self._others for name, v in state.items() if type(v) in _PLAIN and name != "training"]

    @staticmethod
    def _function(place: tuple[MultiheadAttention, str]) -> Any:
        """The function of a mask or score that an attention has of its own."""
        module, name = place
        variant = getattr(module, name)
        if isinstance(variant, torch.nn.Module):
            variant = variant()
        return getattr(variant, "function", variant)

    def _find_functions(self) -> list[tuple[object, Sequence[Tensor]]]:
        """For each mask and score what it computes by, and the tensors that it reads: its fingerprint, or what it is traced to now."""
        found: list[tuple[object, Sequence[Tensor]]] = []
        for place in self._variants:
            function = self._function(place)
            closure = fingerprint(function)
            if closure is not None:
                tensors: Sequence[Tensor] = closure.tensors
                how: tuple[object, ...] = (closure.structure, closure.numbers)
            else:
                device = place[0].out_proj.weight.device
                bound = bind(function, None, device) if place[1] == "score" else bind(None, function, device)
                tensors, how = bound.captures, (bound.variant, bound.ints, bound.floats)
            found.append(((how, [(id(t), t.data_ptr()) for t in tensors]), tensors))
        return found

    def _addresses(self) -> list[int]:
        return [t.data_ptr() for t in self._tensors]

    def has_changed(self) -> bool:
        """Whether it has other parameters, buffers, submodules or settings now, or they lie elsewhere."""
        return (
            [tuple(children.values()) for children in self._children] != self._were
            or not all(map(operator.is_, [tensors.get(name) for tensors, name in self._named], self._tensors))
            or self._addresses() != self._memory
            or any(state[name] is not kept for state, name, kept in self._dicts)
            or self._read() != self._values
            or [by for by, _ in self._find_functions()] != [by for by, _ in self._functions]
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
        if not (
            any(any(map(s.get, HOOKS)) for s in self._lower)
            or [s for s in self._lower if "forward" in s or s.get("_compiled_call_impl") is not None]
        ):
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


def _is_object(activation: Any) -> bool:
    """Whether an activation is neither function nor module, and may have numbers of its own."""
    return hasattr(activation, "__dict__") and not isinstance(activation, (FunctionType, torch.nn.Module))


def _may_index(function: Any) -> bool:
    closure = None if isinstance(function, torch.nn.Module) else fingerprint(function)
    return closure is None or bool(closure.tensors)
