"""Registers derivatives of custom operators. A call that autograd does not record goes through the dispatcher once, not twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from foci.compat.lookup import find

__all__ = ["register_autograd"]

_BY_LIBRARY: Final = "registers derivatives of its operators by torch.library alone, which costs each call in a graph more"

_Info: Final[Any] = find("torch._library.autograd.Info", without=_BY_LIBRARY)
_make: Final[Any] = find("torch._library.autograd.make_autograd_impl", without=_BY_LIBRARY)
_keys_below: Final[Any] = find("torch._C._after_ADInplaceOrView_keyset", without=_BY_LIBRARY)
_any_requires_grad: Final[Any] = find("torch._C._any_requires_grad", without=_BY_LIBRARY)
_KeySet: Final[Any] = find("torch._C.DispatchKeySet", without=_BY_LIBRARY)
_Key: Final[Any] = find("torch._C.DispatchKey", without=_BY_LIBRARY)
_IS_FAST: Final = all(name is not None for name in (_Info, _make, _keys_below, _any_requires_grad, _KeySet, _Key))


def register_autograd(
    library: torch.library.Library, name: str, run: Callable[..., Any], backward: Callable[..., Any], setup: Callable[..., Any]
) -> None:
    """`torch.library.register_autograd` of an operator of a library. `run` is its kernel on every device."""
    full_name = f"{library.ns}::{name}"
    if not _IS_FAST:
        torch.library.register_autograd(full_name, backward, setup_context=setup, lib=library)
        return
    recorded = _make(getattr(getattr(torch.ops, library.ns), name).default, _Info(backward, setup))
    library.impl(name, _unless_recorded(run, recorded), "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


def _unless_recorded(run: Callable[..., Any], recorded: Callable[..., Any]) -> Callable[..., Any]:
    """The operator's autograd kernel: a call without gradients and modes, as compiled code makes, runs the operator's kernel directly.
    Dispatching it again would take as long as a small kernel."""
    kernels = (_Key.CPU, _Key.CUDA)
    plain: dict[int, bool] = {}

    def call(keyset: Any, *args: Any) -> Any:
        keys = keyset.raw_repr()
        is_plain = plain.get(keys)
        if is_plain is None:
            is_plain = plain[keys] = (keyset & _keys_below).highestPriorityTypeId() in kernels
        if is_plain and not (torch.is_grad_enabled() and _any_requires_grad(*args)):
            return run(*args)
        return recorded(keyset, *args)

    return call
