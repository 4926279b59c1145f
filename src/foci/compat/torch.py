"""The state of torch that foci reads before it goes around the dispatcher: modes, transforms, tracing, autograd, autocast, SDPA switches.

Where a name is missing, foci assumes that a mode or transform is active, so the call goes through the dispatcher.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from foci.compat.lookup import find

__all__ = [
    "OperatorMode", "TransformType",
    "are_transforms_open",
    "count_dispatch_modes",
    "count_function_modes",
    "disabled_torch_function",
    "disabled_torch_function_subclass",
    "enabled_torch_function",
    "has_tangent",
    "is_any_autocast_enabled",
    "is_cudnn_sdp_enabled",
    "is_flash_sdp_enabled",
    "is_forward_ad_open",
    "is_jit_tracing",
    "is_legacy_batched",
    "is_math_sdp_enabled",
    "is_mem_efficient_sdp_enabled",
    "is_transformed",
    "is_watched",
    "open_transforms",
    "version_of",
    "with_autograd",
]  # fmt: skip

_THROUGH_DISPATCHER: Final = "sends every call through the dispatcher"


_T = TypeVar("_T")

# ---- modes and tracing ----


def _one() -> int:
    return 1


count_dispatch_modes: Final[Callable[[], int]] = find("torch._C._len_torch_dispatch_stack", _one, without=_THROUGH_DISPATCHER)
"""How many modes see each operator; 1, so that nothing goes around them, where torch does not tell."""

count_function_modes: Final[Callable[[], int]] = find(
    "torch._C._len_torch_function_stack", _one, without="passes by no module and leaves products to torch"
)
"""How many modes see each torch function; 1 where torch does not tell."""

_tracing_state: Final[Callable[[], Any] | None] = find("torch._C._get_tracing_state", without="asks torch.jit.is_tracing, which is slower")


def is_watched() -> bool:
    """Whether a dispatch mode, a transform of torch.func or torch.jit.trace sees each operator; True if this torch cannot say."""
    return bool(count_dispatch_modes() or _peek is None or _peek() is not None or is_jit_tracing())


def is_jit_tracing() -> bool:
    """Whether torch.jit.trace makes a graph."""
    return torch.jit.is_tracing() if _tracing_state is None else _tracing_state() is not None  # type: ignore[attr-defined, no-untyped-call]


is_any_autocast_enabled: Final[Callable[[], bool]] = find(
    "torch._C._is_any_autocast_enabled",
    lambda: torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
    without="asks for each kind of device",
)
"""Whether autocast is on for any kind of device that foci has kernels for."""


# ---- __torch_function__ ----


class _Probe:
    """Has a `__torch_function__`, which torch finds unless it is turned off."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


@contextlib.contextmanager
def _require_torch_function() -> Any:
    if not torch.overrides.has_torch_function((_Probe(),)):
        raise RuntimeError(
            "a score or mask function cannot be traced where __torch_function__ is turned off (torch._C.DisableTorchFunction): "
            "this release of torch has no torch._C._EnableTorchFunction"
        )
    yield


enabled_torch_function: Final[Callable[[], AbstractContextManager[Any]]] = find(
    "torch._C._EnableTorchFunction", _require_torch_function, without="traces no function inside torch._C.DisableTorchFunction"
)
"""A context in which `__torch_function__` is called, whatever the caller turned off."""

disabled_torch_function: Final[Callable[[], AbstractContextManager[Any]]] = find(
    "torch._C.DisableTorchFunction", contextlib.nullcontext, without="asks tensors of subclasses through their own Python"
)
"""A context without `__torch_function__`: faster, with the same answers."""

disabled_torch_function_subclass: Final[Callable[[], AbstractContextManager[Any]]] = find(
    "torch._C.DisableTorchFunctionSubclass", contextlib.nullcontext, without="asks NestedTensors through their own Python"
)
"""A context without the `__torch_function__` of tensors: faster, with the same answers."""


class _ByFunctions(TorchFunctionMode):
    """Hands torch's functions to `__torch_dispatch__`, which is given operators otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[attr-defined]


OperatorMode: Final[Any] = find(
    "torch.utils._python_dispatch.TorchDispatchMode", _ByFunctions, without="checks fused graphs function by function, not by operators"
)
"""The base of modes with a `__torch_dispatch__`."""


# ---- torch.func and forward-mode AD ----

TransformType: Final[Any] = find("torch._C._functorch.TransformType", without="differentiates inside torch.func through the formula")
"""Kinds of torch.func's transforms: Grad, Jvp, Vmap, Functionalize; None where torch does not tell them."""

_peek: Final[Callable[[], Any] | None] = find("torch._C._functorch.peek_interpreter_stack", without=_THROUGH_DISPATCHER)
_stack: Final[Callable[[], Any] | None] = find(
    "torch._C._functorch.get_interpreter_stack", without="differentiates inside torch.func through the formula"
)


def are_transforms_open() -> bool:
    """Whether a transform of torch.func is open; True where torch does not tell."""
    return _peek is None or _peek() is not None


def open_transforms(tensors: Sequence[Tensor]) -> list[Any] | None:
    """Kinds of the open transforms of torch.func, innermost last; None if one is open, or may be, and torch does not tell its kind.

    Args:
        tensors: of the call; their wrappers betray a transform where torch tells nothing else.
    """
    if _peek is not None and _peek() is None:
        return []
    if _stack is None or TransformType is None:
        return None if any(map(is_transformed, tensors)) else []
    return [level.key() for level in _stack() or ()]


is_transformed: Final[Callable[[Tensor], bool]] = find(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    lambda tensor: torch.func.debug_unwrap(tensor, recurse=False) is not tensor,
    without="asks torch.func.debug_unwrap, which is slower",
)
"""Whether a tensor is one of a transform of torch.func."""


def _has_no_storage(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return True
    return False


is_legacy_batched: Final[Callable[[Tensor], bool]] = find(
    "torch._C._functorch.is_legacy_batchedtensor", _has_no_storage, without="asks for the storage, which is slower"
)
"""Whether a gradient is a batch of them, of torch.autograd.grad(is_grads_batched=True)."""

_level: Final[int | None] = find(
    "torch.autograd.forward_ad._current_level", without="sends every call through the dispatcher, in case forward-mode AD is on"
)


def is_forward_ad_open() -> bool:
    """Whether a level of forward-mode AD is open; True where torch does not tell."""
    return _level is None or forward_ad._current_level >= 0


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward-mode AD differentiates this tensor."""
    if not is_forward_ad_open() or not tensor.is_floating_point():
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


# ---- autograd inside an operator's kernel ----

_tls_excluded: Final[Any] = find("torch._C._dispatch_tls_local_exclude_set", without="runs the reference's backward in a thread of its own")
_tls_included: Final[Any] = find("torch._C._dispatch_tls_local_include_set", without="runs the reference's backward in a thread of its own")
_tls_guard: Final[Any] = find("torch._C._ForceDispatchKeyGuard", without="runs the reference's backward in a thread of its own")


def with_autograd(function: Callable[[], _T]) -> _T:
    """Return what a function computes where autograd records, also inside an operator's kernel, which runs below autograd's dispatch
    keys."""
    if _tls_excluded is None or _tls_included is None or _tls_guard is None:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # excluded dispatch keys are per thread
            return thread.submit(function).result()
    keys = torch._C.DispatchKey
    excluded = _tls_excluded()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(keys, name))
    with _tls_guard(_tls_included(), excluded), torch.enable_grad():
        return function()


# ---- tensors ----


class _Never:
    """Equals nothing, itself included: a version that nothing can be found by again."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__


def _unknown_version(tensor: Tensor) -> Any:
    return _Never()


version_of: Final[Callable[[Tensor], Any]] = (
    _unknown_version
    if find("torch.Tensor._version", without="reads masks and offsets anew at each call, as they may have changed") is None
    else operator.attrgetter("_version")
)
"""Counts writes to a tensor; what never equals another where torch does not count. Raises RuntimeError for inference tensors."""


# ---- which of torch's SDPA kernels are on ----

is_math_sdp_enabled: Final[Callable[[], bool]] = find(
    "torch._C._get_math_sdp_enabled", torch.backends.cuda.math_sdp_enabled, without="asks torch.backends.cuda, which is slower"
)
is_flash_sdp_enabled: Final[Callable[[], bool]] = find(
    "torch._C._get_flash_sdp_enabled", torch.backends.cuda.flash_sdp_enabled, without="asks torch.backends.cuda, which is slower"
)
is_mem_efficient_sdp_enabled: Final[Callable[[], bool]] = find(
    "torch._C._get_mem_efficient_sdp_enabled",
    torch.backends.cuda.mem_efficient_sdp_enabled,
    without="asks torch.backends.cuda, which is slower",
)
is_cudnn_sdp_enabled: Final[Callable[[], bool]] = find(
    "torch._C._get_cudnn_sdp_enabled", torch.backends.cuda.cudnn_sdp_enabled, without="asks torch.backends.cuda, which is slower"
)
