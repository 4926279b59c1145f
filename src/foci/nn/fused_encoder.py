"""Encoder layers of packed tokens computed from their parameters, where nobody could tell that no module is called.

Modules may be told apart by hooks, forwards of their own, other classes, parametrizations, settings. What layers consist of is looked at
once and noted flat, for all of a stack, so that a later call sees in a few comparisons that it is still so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from foci.compat.modules import submodules
from foci.compat.torch import count_function_modes, is_any_autocast_enabled, is_forward_ad_open, is_jit_tracing
from foci.environment import allowed_backends, read_environment
from foci.nn.attention import MultiheadAttention
from foci.nn.fused_rowwise import layer_rows
from foci.nn.layer_autograd import compute_layer_saving
from foci.nn.layer_ops import Attention, Heads, InferenceOps, LayerOps, Plan, compute_layer
from foci.nn.packing import Packing, round_bound
from foci.nn.skip_module_call import HOOKS, is_silent
from foci.nn.sliding_window import SlidingWindowAttention
from foci.operator import is_plain_eager
from foci.weak_cache import tensor_state

__all__ = ["Stack", "noted"]

_NOTED: Final = "_foci_straight"
"""Where a module keeps what was noted of its layers."""
_SELF, _FIRST, _SECOND, _NORM1, _NORM2, _WITHIN, _BEHIND, _LAST, _OUT = range(9)
_PARTS: Final = ("self_attn", "linear1", "linear2", "norm1", "norm2", "dropout", "dropout1", "dropout2")
_parts_in: Final = operator.itemgetter(*_PARTS)
_SET: Final = (
    (_SELF, ("num_heads", "num_kv_heads", "head_dim", "embed_dim", "add_zero_attn", "rotary", "bias_k", "bias_v", "dropout", "training")),
    *[(n, ("normalized_shape", "eps")) for n in (_NORM1, _NORM2)],
    *[(n, ("p", "training", "inplace")) for n in (_BEHIND, _WITHIN, _LAST)],
)
"""What parts keep that a layer's plan follows from."""
_READ: Final = [(n, operator.itemgetter(*names)) for n, names in _SET]
_LINEAR, _NORM, _DROPOUT = (torch.nn.Linear,), (torch.nn.LayerNorm,), (torch.nn.Dropout,)
_ATTENTIONS: Final = (MultiheadAttention, SlidingWindowAttention)
_KINDS: Final[tuple[tuple[type, ...], ...]] = (
    _ATTENTIONS, _LINEAR, _LINEAR, _NORM, _NORM, _DROPOUT, _DROPOUT, _DROPOUT, (torch.nn.Linear, NonDynamicallyQuantizableLinear),
)  # fmt: skip
"""Of the parts, and of the attention's projection behind them."""
_BLOCKS: Final = frozenset(("forward", "_compiled_call_impl", "_run", "_layer", "_sa_block", "_ff_block"))
_STEPS: Final = ("_packed", "_project", "_split_heads", "_own", "_extra_keys", "_of_packed", "_extras")
_FORMS: Final = ("forward", "_compiled_call_impl")
_HOOKS_OF: Final = operator.itemgetter(*HOOKS)
_PARAMETERS_OF: Final = operator.itemgetter("_parameters")
_METHODS: Final[list[tuple[Any, str]]] = [
    *[(kind, "forward") for kind in (torch.nn.Linear, NonDynamicallyQuantizableLinear, torch.nn.LayerNorm, torch.nn.Dropout)],
    *[(kind, name) for kind in _ATTENTIONS for name in ("forward", "_attend", *_STEPS)],
]
_WRITTEN: Final = [getattr(kind, name) for kind, name in _METHODS]
"""As they were: some libraries put theirs into torch's classes."""
_NUMBERS: Final = (float, int)
_PLAIN: Final = frozenset((Tensor, torch.nn.Parameter))
_facts_of: Final = operator.attrgetter("dtype", "layout", "requires_grad")
_AS_NODES = frozenset(("cuda",))
"""Devices on which the kernels and the nodes between products cost more than a node in Python does."""
_PLACES: Final = 12
"""Parameters of a layer."""


class _Layer(NamedTuple):
    """The plan of a layer, its attention, and what layers that attend alike share."""

    plan: Plan
    attention: Any
    alike: tuple[Heads, float]


_Shared: TypeAlias = dict[tuple[Heads, float], Attention]


class _Unlike(Exception):
    """Layers that must be called as modules."""


class Stack:
    """Layers as they were when they were looked at. Refers to their parts and not to them, so that it does not keep them alive."""

    def __init__(self, kind: type, layers: Sequence[torch.nn.Module]) -> None:
        self._parts: list[Any] = []
        self._states: list[dict[str, Any]] = []
        self._absent: list[tuple[dict[str, Any], str]] = []
        self._settings: list[tuple[dict[str, Any], Callable[[dict[str, Any]], tuple[Any, ...]]]] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._ways: list[tuple[bool, Any]] = []
        self._layers = [self._looked_at(kind, layer) for layer in layers]
        self._kinds = [*map(type, self._parts)]
        self._parameters = [*map(_PARAMETERS_OF, self._states)]
        self._values = [read(state) for state, read in self._settings]
        if not all(name in parameters for parameters, name in self._places):
            raise _Unlike  # parametrized
        self._lacks = [parameters[name] is None for parameters, name in self._places]
        self._last: tuple[tuple[object, ...], Tensor, tuple[int, ...], _Shared] | None = None
        self._lacks_some = True in self._lacks

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the module is looked at by itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def _looked_at(self, kind: type, layer: torch.nn.Module) -> _Layer:
        if not _is_bare(kind, layer):
            raise _Unlike
        parts: list[Any] = [submodules(layer).get(name) for name in _PARTS]
        if type(parts[_SELF]) not in _ATTENTIONS:
            raise _Unlike
        parts.append(submodules(parts[_SELF]).get("out_proj"))
        if any(type(part) not in kinds or not is_silent(part) for part, kinds in zip(parts, _KINDS, strict=True)):
            raise _Unlike
        states = [vars(part) for part in parts]
        attention = states[_SELF]
        self._parts += parts
        self._states += states
        self._absent += [(state, name) for state in states for name in _FORMS] + [(attention, name) for name in _STEPS]
        self._settings += [(states[n], read) for n, read in _READ]
        self._places += [(attention["_parameters"], name) for name in ("in_proj_weight", "in_proj_bias")]
        self._places += [(states[n]["_parameters"], name) for n in (_OUT, _FIRST, _SECOND, _NORM1, _NORM2) for name in ("weight", "bias")]
        self._ways.append((layer.norm_first, layer.activation))  # type: ignore[arg-type]
        return _read_layer(layer, states, parts[_SELF])

    def is_still(self, kind: type, layers: Sequence[torch.nn.Module]) -> bool:
        """Whether these layers consist of what was looked at, as it was."""
        parts: list[Any] = []
        try:
            for layer, (norm_first, activation) in zip(layers, self._ways, strict=True):
                state = layer.__dict__
                modules = submodules(layer)
                parts += _parts_in(modules)
                parts.append(submodules(modules["self_attn"])["out_proj"])
                if not (_is_bare(kind, layer) and state["norm_first"] == norm_first and state["activation"] is activation):
                    return False
            values = [read(state) for state, read in self._settings]
        except (AttributeError, KeyError, ValueError):  # others, or another number of them
            return False
        return (
            len(parts) == len(self._parts)
            and all(map(operator.is_, parts, self._parts))
            and [*map(type, parts)] == self._kinds
            and not any(map(any, map(_HOOKS_OF, self._states)))
            and all(map(operator.is_, map(_PARAMETERS_OF, self._states), self._parameters))
            and not [name for state, name in self._absent if name in state]
            and values == self._values
        )

    def run(self, x: Tensor, mask: Tensor | None, packing: Packing, *, is_causal: bool) -> Tensor | None:
        """The last layer's output for tokens [T, E]; None where somebody looks on, or the tensors are no plain ones."""
        if (is_causal and mask is None) or not _is_plain_call(x, packing):
            return None
        try:
            params: list[Any] = [parameters[name] for parameters, name in self._places]
        except KeyError:  # parametrized
            return None
        if self._lacks_some and [t is None for t in params] != self._lacks:
            return None
        tensors = [t for t in params if t is not None] if self._lacks_some else params
        if not _PLAIN.issuperset(map(type, tensors)):  # or taken away since
            return None
        facts = {*map(_facts_of, tensors)}  # a few
        if {(dtype, layout) for dtype, layout, _ in facts} - {(x.dtype, torch.strided)}:
            return None
        needs_grad = torch.is_grad_enabled() and (x.requires_grad or True in [needs_grad for *_, needs_grad in facts])
        casts = is_any_autocast_enabled()
        is_seen, as_node = needs_grad or casts, needs_grad and not casts and x.device.type in _AS_NODES
        if any(layer.plan.width[0] != x.shape[1] for layer in self._layers[:1]):
            return None  # modules say what is wrong
        rows = layer_rows(x, self._layers[0].plan, params, needs_grad=needs_grad) if self._layers and (as_node or not is_seen) else None
        shared = {} if casts or mask is not None else self._attentions(x, packing)
        for n, layer in enumerate(self._layers):
            attention_state = layer.attention.__dict__
            is_bare = attention_state.get("mask", attention_state) is None and attention_state.get("score", attention_state) is None
            attention = shared.get(layer.alike) if is_bare else None
            if attention is None:
                attention = _read_attention(layer.attention, mask, packing, is_causal=is_causal, tokens=x.shape[0])
            if is_bare:
                shared[layer.alike] = attention
            if not is_seen and torch.is_grad_enabled() and attention.captures_learn:
                is_seen = True  # from here on there are gradients, though no parameter wants one
            p = params[_PLACES * n : _PLACES * (n + 1)]
            if as_node and attention.captures_nothing:
                x = compute_layer_saving(layer.plan, attention, rows, x, p)
            else:
                x = compute_layer(layer.plan, x, p, LayerOps(attention) if is_seen else InferenceOps(attention, rows))
        return x

    def _attentions(self, x: Tensor, packing: Packing) -> _Shared:
        """Return what bare layers attend with, as far as the last call has found it: the same for the same sequences, else moved to
        others."""
        offsets, tokens = packing.offsets, x.shape[0]
        if packing.bias is not None or offsets.is_inference():
            return {}
        no_padding, state = packing.is_whole(tokens), tensor_state(offsets)
        form = (
            offsets.shape, offsets.dtype, offsets.device, round_bound(packing.longest), tokens > 1, no_padding, x.dtype, x.device,
            read_environment(allowed_backends(), x.device),
        )  # fmt: skip
        last = self._last
        shared: _Shared = {}
        if last is not None and last[0] == form:
            if last[1] is offsets and last[2] == state:
                return last[3]
            shared = {alike: attention.moved(offsets) for alike, attention in last[3].items()}
        self._last = form, offsets, state, shared
        return shared


def noted(owner: torch.nn.Module, kind: type, layers: Sequence[torch.nn.Module]) -> Stack | None:
    """Encoder layers that may be computed by their parameters; None where they must be called. Only where `skip_module_call.is_alone`.

    Args:
        owner: the module that they are layers of, or the layer itself; keeps what is noted.
        kind: the class that they must be of.
    """
    state = vars(owner)
    stack: Stack | None = state.get(_NOTED)
    if stack is None or not stack.is_still(kind, layers):
        try:
            stack = Stack(kind, layers)
        except _Unlike:
            state.pop(_NOTED, None)
            return None
        state[_NOTED] = stack
    return stack


def _is_bare(kind: type, layer: torch.nn.Module) -> bool:
    return type(layer) is kind and is_silent(layer) and layer.__dict__.keys().isdisjoint(_BLOCKS)


def _is_plain_call(x: Tensor, packing: Packing) -> bool:
    """Whether nobody but autograd and autocast looks on."""
    return (
        x.dim() == 2
        and x.shape[0] > 0
        and x.layout is torch.strided
        and type(packing.offsets) is Tensor
        and count_function_modes() == 0
        and not is_jit_tracing()
        and not is_forward_ad_open()
        and is_plain_eager((x,))
        and all(map(operator.is_, [getattr(kind, name) for kind, name in _METHODS], _WRITTEN))
    )


def _read_layer(layer: Any, states: Sequence[dict[str, Any]], attention: Any) -> _Layer:
    """Return what a layer of plain parts computes.

    Raises:
        _Unlike: where a setting of them is not known here.
    """
    activations = [name for name, known in (("relu", F.relu), ("relu", torch.relu), ("gelu", F.gelu)) if layer.activation is known]
    chances = [states[n]["p"] if states[n]["training"] else 0.0 for n in (_BEHIND, _WITHIN, _LAST)]
    weight, shapes = attention._parameters.get("in_proj_weight"), [states[n]["normalized_shape"] for n in (_NORM1, _NORM2)]
    are_known = (
        bool(activations)
        and all(type(p) in _NUMBERS and 0 <= p < 1 for p in chances)
        and not any(states[n]["inplace"] for n in (_BEHIND, _WITHIN, _LAST))
        and weight is not None
        and all(states[n]["_parameters"].get("weight") is not None for n in (_FIRST, _SECOND, _NORM1, _NORM2, _OUT))
        and shapes == [(attention.embed_dim,)] * 2
        and type(attention.dropout) in _NUMBERS
        and vars(attention).get("rotary", weight) is None
        and not attention.add_zero_attn
        and attention.bias_k is None
        and attention.bias_v is None
    )
    if not are_known:
        raise _Unlike
    heads = Heads(attention.num_heads, attention.num_kv_heads, attention.head_dim)
    eps = (states[_NORM1]["eps"], states[_NORM2]["eps"])
    plan = Plan(heads, bool(layer.norm_first), shapes[0], eps, activations == ["gelu"], tuple(map(float, chances)))  # type: ignore[arg-type]
    return _Layer(plan, attention, (heads, attention.dropout if attention.training else 0.0))


def _read_attention(attention: Any, mask: Tensor | None, packing: Packing, *, is_causal: bool, tokens: int) -> Attention:
    functions = attention._of_packed(packing, packing, mask, is_causal=is_causal)
    score, attend = functions.score, functions.mask
    extras = attention._extras(packing, packing.offsets, packing.longest, functions)
    which = (None if score is None else score.function, None if attend is None else attend.function)
    return Attention(*which, extras, no_padding=packing.is_whole(tokens))
