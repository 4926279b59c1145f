"""Reads the inner tensors of NestedTensors, makes NestedTensors without their constructor, and has a subclass whose parts autograd reads
at once. Where torch lacks one of the names, foci calls torch's public functions instead, which are slower.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from foci.compat.lookup import find
from foci.compat.torch import (
    disabled_torch_function_subclass,
    is_forward_ad_open,
    is_legacy_batched,
    is_watched,
)  # fmt: skip

__all__ = [
    "HAS_FIELDS", "KINDS", "LearnedNested", "NestedTensor", "inner_lengths", "inner_offsets", "inner_values", "known_extremes",
    "length_extremes",
    "nested_like", "nested_of_rows", "ragged_dim", "strided_sizes",
]  # fmt: skip

_CLASS: Final = "torch.nested._internal.nested_tensor.NestedTensor"
_SLOWLY: Final = "makes and reads NestedTensors by torch's public functions, which is slower"

if TYPE_CHECKING:
    from torch.nested._internal.nested_tensor import NestedTensor
else:
    NestedTensor = find(_CLASS, without="makes a NestedTensor to find the class")
    if NestedTensor is None:
        with torch.inference_mode(mode=False):
            _values, _offsets = torch.zeros((1, 1), device="cpu"), torch.tensor([0, 1], device="cpu")
            NestedTensor = type(torch.nested.nested_tensor_from_jagged(_values, _offsets))


def _are_found(prefix: str, names: str) -> bool:
    objects = [find(f"{prefix}.{name}", without=_SLOWLY) for name in names.split()]  # all of them, so that each is noted
    return all(each is not None for each in objects)


HAS_FIELDS: Final[bool] = _are_found(_CLASS, "_values _offsets _lengths _size _strides _ragged_idx _metadata_cache")
"""Whether Python can look into a NestedTensor past its operators."""

_KNOWS_EXTREMES: Final[bool] = _are_found(_CLASS, "_get_max_seqlen _get_min_seqlen _maybe_max_seqlen _maybe_min_seqlen")
_HAS_OPERATORS: Final[bool] = _are_found(
    "torch.ops.aten", "_nested_view_from_jagged.default _nested_get_values.default _nested_get_offsets.default _nested_get_lengths.default "
    "_nested_get_ragged_idx.default _nested_get_min_seqlen.default _nested_get_max_seqlen.default _nested_get_jagged_dummy.default",
)  # fmt: skip
_HAS_FUNCTIONS: Final[bool] = _are_found(
    "torch", "_nested_get_values _nested_view_from_jagged Tensor._make_wrapper_subclass _C.DispatchKeySet"
)
_IS_FAST: Final[bool] = HAS_FIELDS and _HAS_OPERATORS and _HAS_FUNCTIONS


# ---- the tensors inside ----


def _public_ragged_dim(nested: Any) -> int:
    sizes, inside = nested.shape, nested.values().shape
    for dim in range(1, len(sizes)):
        if sizes[dim] != inside[dim - 1]:
            return dim
    return 1


def _detached_values(nested: Any) -> Any:
    return nested.detach().values()


inner_values: Final[Callable[[Any], Any]] = operator.attrgetter("_values") if HAS_FIELDS else _detached_values
"""The values of a NestedTensor of jagged layout, for code that autograd does not record."""
inner_offsets: Final[Callable[[Any], Any]] = operator.attrgetter("_offsets") if HAS_FIELDS else lambda nested: nested.offsets()
"""Its offsets, [B + 1]."""
inner_lengths: Final[Callable[[Any], Any]] = operator.attrgetter("_lengths") if HAS_FIELDS else lambda nested: nested.lengths()
"""Its lengths, where sequences have gaps between them; None otherwise."""


def ragged_dim(nested: Any) -> int:
    """Which dim of a NestedTensor differs between its sequences."""
    return nested._ragged_idx if HAS_FIELDS else _public_ragged_dim(nested)


def known_extremes(nested: Any) -> tuple[Any, Any]:
    """The longest and the shortest sequence; None where the NestedTensor has not kept them."""
    return (nested._maybe_max_seqlen, nested._maybe_min_seqlen) if _KNOWS_EXTREMES else (None, None)


def length_extremes(nested: Any) -> tuple[int, int]:
    """The longest and the shortest sequence, which a NestedTensor keeps once it was asked."""
    if nested.offsets().numel() < 2:
        return 0, 0  # no sequence has none
    if _KNOWS_EXTREMES:
        return nested._get_max_seqlen(), nested._get_min_seqlen()
    lengths = nested.offsets().diff() if nested.lengths() is None else nested.lengths()
    return (int(lengths.max()), int(lengths.min())) if lengths.numel() else (0, 0)


def nested_of_rows(values: Tensor, like: Any) -> Tensor:
    """A NestedTensor of values whose sequences are those of another and stand in the same dim."""
    if not HAS_FIELDS:
        return torch.nested.nested_tensor_from_jagged(values, like.offsets(), jagged_dim=ragged_dim(like))
    cache = dict(like._metadata_cache)
    if _IS_FAST and _is_laid_out_as(values, like):
        return _wrap(values, like, cache, NestedTensor)
    nested: Any = NestedTensor(values, like._offsets, _ragged_idx=like._ragged_idx)
    nested._metadata_cache = cache  # not given above, where its tensors would be marked again
    return nested  # type: ignore[no-any-return]


def _public_sizes(nested: Tensor) -> Tensor:
    return torch.tensor([list(part.shape) for part in nested.unbind()], dtype=torch.int64).view(nested.size(0), nested.dim() - 1)


strided_sizes: Final[Callable[[Tensor], Tensor]] = (
    _public_sizes
    if find("torch.Tensor._nested_tensor_size", without="takes NestedTensors of strided layout apart to know their sizes") is None
    else lambda nested: nested._nested_tensor_size()
)
"""[B, dims - 1] of a NestedTensor of strided layout: the sizes of each sequence."""


# ---- NestedTensors of tokens ----


class _LearnedNested(NestedTensor):
    """A NestedTensor that requires gradients, with the results of torch's own.

    The gradient of `values()` reads offsets, lengths and so on with one operator each, and makes another NestedTensor of them. torch
    dispatches each of these in Python, which takes longer than a layer's backward; this subclass answers them directly.
    """

    def values(self) -> Tensor:
        """[T, E], a view."""
        if torch.compiler.is_compiling():
            return super().values()  # type: ignore[no-any-return, no-untyped-call]
        with disabled_torch_function_subclass():
            if torch.is_grad_enabled() and self.requires_grad and self._ragged_idx == 1 and _is_eager():
                return _values_of(self)  # type: ignore[no-any-return]
            return torch._nested_get_values(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        answer = _ANSWERS.get(func)
        if answer is None or kwargs or type(args[0 if func is not _VIEW else 2]._values) is not Tensor:
            result = NestedTensor.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            if func in _KEEP and type(result) is NestedTensor:
                result.__class__ = _LearnedNested  # torch's compiler makes its stand-ins by these
            return result
        return answer(*args)

    @staticmethod
    def __tensor_unflatten__(*args: Any, **kwargs: Any) -> Tensor:
        nested: Tensor = NestedTensor.__tensor_unflatten__(*args, **kwargs)
        nested.__class__ = _LearnedNested
        return nested

    def __reduce_ex__(self, protocol: Any) -> Any:
        build, (function, _, *rest) = super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return build, (function, NestedTensor, *rest)


class _Values(torch.autograd.Function):
    """The view that `values()` returns. Its gradient is nested in one step, where torch calls nine operators on the NestedTensor first."""

    @staticmethod
    def forward(ctx: Any, nested: Any) -> Tensor:
        ctx.save_for_backward(nested)
        return torch._nested_get_values(nested)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (nested,) = ctx.saved_tensors
        if type(grad) is Tensor and not torch.is_grad_enabled() and not is_legacy_batched(grad):
            return nested_like(grad, nested, _LearnedNested)
        shortest, longest = map(nested._metadata_cache.get, ("min_seqlen", "max_seqlen"))
        return torch._nested_view_from_jagged(grad, nested._offsets, nested, None, 1, shortest, longest)


_values_of: Final[Any] = super(torch.autograd.Function, _Values).apply
"""`_Values.apply` without the part that only torch.func needs."""


def _is_eager() -> bool:
    """Whether autograd alone is active: no mode, transform or tracing."""
    return not is_watched() and not is_forward_ad_open()


LearnedNested: Final[Any] = _LearnedNested if _IS_FAST else NestedTensor
"""The kind of NestedTensors that modules of foci give where gradients are wanted."""

KINDS: Final = frozenset((NestedTensor, LearnedNested))
"""Types of NestedTensors of jagged layout."""


def nested_like(tokens: Tensor, like: Any, kind: type[NestedTensor] = NestedTensor) -> Tensor:
    """A NestedTensor of tokens [T, ...] with the sequences of another. The constructor would compute symbolic sizes and strides, which a
    NestedTensor of the same features has already."""
    if not _IS_FAST:
        longest, shortest = known_extremes(like)
        return torch.nested.nested_tensor_from_jagged(tokens.detach(), like.offsets(), min_seqlen=shortest, max_seqlen=longest)
    return _made(tokens.detach(), like, dict(like._metadata_cache), kind)


def _made(values: Tensor, like: Any, cache: dict[str, Any], kind: type[NestedTensor]) -> Tensor:
    mark_dynamic = _find_mark_dynamic() if like._ragged_idx == 1 and _is_laid_out_as(values, like) else None
    if mark_dynamic is None:
        return NestedTensor(values, like._offsets, _metadata_cache=cache)
    for extreme in cache.values():
        if extreme is not None and not hasattr(extreme, _MARK):
            mark_dynamic(extreme, 0)
    return _wrap(values, like, cache, kind)


def _is_laid_out_as(values: Tensor, like: Any) -> bool:
    """Whether a NestedTensor of the values has the sizes and strides of another."""
    other: Tensor = like._values
    return values.shape == other.shape and values.stride() == other.stride() and values.device == other.device


def _wrap(values: Tensor, like: Any, cache: dict[str, Any], kind: type[NestedTensor]) -> Tensor:
    """A NestedTensor with the sizes and strides of another, whose symbols the constructor would compute again."""
    size, strides, ragged = like._size, like._strides, like._ragged_idx
    of_nested, of_values = _marks(ragged, values.dim())
    nested: Any = Tensor._make_wrapper_subclass(
        kind, size, strides, 0, torch.contiguous_format, values.dtype, torch.jagged, values.device, False, False,
        "sizes", False, True, _KEYS, storage_size=values.untyped_storage().size(),
    )  # fmt: skip
    nested._ragged_idx, nested._size, nested._strides = ragged, size, strides
    nested._values, nested._offsets, nested._lengths, nested._metadata_cache = values, like._offsets, None, cache
    for tensor, marks in ((nested, of_nested), (values, of_values)):
        for name, mark in marks.items():
            setattr(tensor, name, copy.copy(mark))
    return nested  # type: ignore[no-any-return]


_MARK: Final = "_dynamo_dynamic_indices"


@functools.cache
def _find_mark_dynamic() -> Callable[[Tensor, int], None] | None:
    """Not looked up on import, as that would import torch's compiler."""
    mark_dynamic: Callable[[Tensor, int], None] | None = find("torch._dynamo.mark_dynamic", without=_SLOWLY)
    return mark_dynamic


@functools.cache
def _marks(ragged: int, dims: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what torch notes, for its compiler, on a NestedTensor that it constructs, and on the values in it, of so many dims."""
    with torch.inference_mode(mode=False):
        values = torch.empty((1,) * dims, device="cpu")
        nested = NestedTensor(values, torch.zeros(2, dtype=torch.int64, device="cpu"), _ragged_idx=ragged)
    return {name: mark for name, mark in vars(nested).items() if "dynamo" in name}, dict(vars(values))


def _view(
    values: Tensor, offsets: Tensor, dummy: Any, lengths: Tensor | None = None, ragged: int = 1, shortest: Any = None, longest: Any = None
) -> Tensor:
    """The NestedTensor that torch makes of a gradient of `values()`; `dummy` is the tensor that the gradient belongs to."""
    cache = {name: extreme for name, extreme in (("min_seqlen", shortest), ("max_seqlen", longest)) if extreme is not None}
    if dummy._offsets is offsets and lengths is None and ragged == 1:
        return _made(values, dummy, cache, NestedTensor)
    return NestedTensor(values, offsets, lengths=lengths, _ragged_idx=ragged, _metadata_cache=cache)


_ANSWERS: Final[dict[Any, Any]] = {}
"""The results of a NestedTensor's operators, without dispatch."""

if _IS_FAST:
    _aten: Final = torch.ops.aten
    _VIEW: Final = _aten._nested_view_from_jagged.default
    _KEEP: Final = frozenset((_aten.clone.default, _aten.detach.default, _aten.alias.default))
    _KEYS: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.NestedTensor).add(torch._C.DispatchKey.AutogradNestedTensor)
    _ANSWERS.update(
        {
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
    )
