"""NestedTensors of tokens, made past their constructor, and a kind of them whose parts autograd reads at once."""

from __future__ import annotations

import copy
import functools
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nested._internal.nested_tensor import NestedTensor

__all__ = ["KINDS", "LearnedNested", "nested_like"]


class LearnedNested(NestedTensor):
    """A NestedTensor that gradients are wanted of. All it does is torch's.

    The gradient of `values()` asks a NestedTensor for its offsets, lengths and so on, one operator each, and makes another of them. torch
    looks each of these up and its arguments over, in Python, which takes longer than a layer's backward; here they are answered at once.
    """

    def values(self) -> Tensor:
        """[T, E], a view."""
        if torch.compiler.is_compiling():
            return super().values()  # type: ignore[no-any-return, no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            if torch.is_grad_enabled() and self.requires_grad and self._ragged_idx == 1 and _is_eager():
                return _values_of(self)  # type: ignore[no-any-return]
            return torch._nested_get_values(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        answer = _ANSWERS.get(func)
        if answer is None or kwargs or type(args[0 if func is not _VIEW else 2]._values) is not Tensor:
            made = NestedTensor.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            if func in _KEEP and type(made) is NestedTensor:
                made.__class__ = LearnedNested  # torch's compiler makes its stand-ins by these
            return made
        return answer(*args)

    @staticmethod
    def __tensor_unflatten__(*args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = NestedTensor.__tensor_unflatten__(*args, **kwargs)
        made.__class__ = LearnedNested
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        build, (function, _, *rest) = super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return build, (function, NestedTensor, *rest)


class _Values(torch.autograd.Function):
    """The view that `values()` is; its gradient is nested at once, where torch puts nine questions to the NestedTensor first."""

    @staticmethod
    def forward(ctx: Any, nested: Any) -> Tensor:
        ctx.save_for_backward(nested)
        return torch._nested_get_values(nested)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (nested,) = ctx.saved_tensors
        if type(grad) is Tensor and not torch.is_grad_enabled() and not torch._C._functorch.is_legacy_batchedtensor(grad):
            return nested_like(grad, nested, LearnedNested)
        shortest, longest = map(nested._metadata_cache.get, ("min_seqlen", "max_seqlen"))
        return torch._nested_view_from_jagged(grad, nested._offsets, nested, None, 1, shortest, longest)


_values_of: Final[Any] = super(torch.autograd.Function, _Values).apply
"""`_Values.apply` less what serves torch.func alone."""


def _is_eager() -> bool:
    """Whether nobody but autograd looks on."""
    c = torch._C
    return (
        c._len_torch_dispatch_stack() == 0
        and c._functorch.peek_interpreter_stack() is None
        and c._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


KINDS: Final = frozenset((NestedTensor, LearnedNested))
"""Types of NestedTensors of jagged layout."""


def nested_like(tokens: Tensor, like: Any, kind: type[NestedTensor] = NestedTensor) -> Tensor:
    """A NestedTensor of tokens [T, ...] with the sequences of another: what the constructor makes, which works out sizes and strides, as
    numbers with symbols in them, that another of the same features has already."""
    return _made(tokens.detach(), like, dict(like._metadata_cache), kind)


def _made(values: Tensor, like: Any, cache: dict[str, Any], kind: type[NestedTensor]) -> Tensor:
    own = like._values
    if like._ragged_idx != 1 or values.shape[1:] != own.shape[1:] or values.stride() != own.stride() or values.device != own.device:
        return NestedTensor(values, like._offsets, _metadata_cache=cache)
    of_nested, of_values = _marks()
    for extreme in cache.values():
        if extreme is not None and not hasattr(extreme, _MARK):
            torch._dynamo.mark_dynamic(extreme, 0)
    made: Any = Tensor._make_wrapper_subclass(
        kind, like._size, like._strides, 0, torch.contiguous_format, values.dtype, torch.jagged, values.device, False, False,
        "sizes", False, True, _KEYS, storage_size=values.untyped_storage().size(),
    )  # fmt: skip
    made._ragged_idx, made._size, made._strides = 1, like._size, like._strides
    made._values, made._offsets, made._lengths, made._metadata_cache = values, like._offsets, None, cache
    for tensor, marks in ((made, of_nested), (values, of_values)):
        for name, mark in marks.items():
            setattr(tensor, name, copy.copy(mark))
    return made  # type: ignore[no-any-return]


_MARK: Final = "_dynamo_dynamic_indices"
_KEYS: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.NestedTensor).add(torch._C.DispatchKey.AutogradNestedTensor)


@functools.cache
def _marks() -> tuple[dict[str, Any], dict[str, Any]]:
    """What torch notes, for its compiler, on a NestedTensor that it constructs, and on the values in it."""
    with torch.inference_mode(mode=False):
        values = torch.empty((1, 1), device="cpu")
        made = NestedTensor(values, torch.zeros(2, dtype=torch.int64, device="cpu"))
    return {name: mark for name, mark in vars(made).items() if "dynamo" in name}, dict(vars(values))


def _view(
    values: Tensor, offsets: Tensor, dummy: Any, lengths: Tensor | None = None, ragged: int = 1, shortest: Any = None, longest: Any = None
) -> Tensor:
    """What torch makes of a gradient of `values()`; `dummy` is whose gradient it will be."""
    cache = {name: extreme for name, extreme in (("min_seqlen", shortest), ("max_seqlen", longest)) if extreme is not None}
    if dummy._offsets is offsets and lengths is None and ragged == 1:
        return _made(values, dummy, cache, NestedTensor)
    return NestedTensor(values, offsets, lengths=lengths, _ragged_idx=ragged, _metadata_cache=cache)


_aten: Final = torch.ops.aten
_VIEW: Final = _aten._nested_view_from_jagged.default
_KEEP: Final = frozenset((_aten.clone.default, _aten.detach.default, _aten.alias.default))
_ANSWERS: Final[dict[Any, Any]] = {
    _aten.sym_size.default: lambda nested: nested._size,
    torch.ops.prim.layout.default: lambda nested: torch.jagged,
    _aten._nested_get_values.default: lambda nested: nested._values.detach(),
    _aten._nested_get_offsets.default: lambda nested: nested._offsets,
    _aten._nested_get_lengths.default: lambda nested: nested._lengths,
    _aten._nested_get_ragged_idx.default: lambda nested: nested._ragged_idx,
    _aten._nested_get_min_seqlen.default: lambda nested: nested._metadata_cache.get("min_seqlen"),
    _aten._nested_get_max_seqlen.default: lambda nested: nested._metadata_cache.get("max_seqlen"),
    _aten._nested_get_jagged_dummy.default: lambda nested: nested,  # so that the gradient's sizes are known by it
    _VIEW: _view,
}
