"""When a traced function may be remembered: everything it can depend on is part of the key.

A function is remembered by its code and by what it closes over: numbers by value, tensors by shape and dtype (their
values and identity are looked up anew), functions likewise. A function that reads anything else, an object's attribute
or a global that can change, has no key and is traced at each call, so a stale expression cannot exist.
"""

from __future__ import annotations

import builtins
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["Fingerprint", "fingerprint"]

_CONSTANT: Final = (bool, str, type(None), torch.dtype)
_MODULES: Final = (torch, math, torch.nn.functional)


@dataclass(slots=True)
class Fingerprint:
    """What determines the outcome of tracing a function.

    Attributes:
        structure: its code, and the code, types, shapes and dtypes of what it closes over.
        numbers: the integers and floats it closes over.
        tensors: the tensors it closes over, in an order the structure fixes.
    """

    structure: tuple[Any, ...] = ()
    numbers: list[int | float] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)


_NOTHING: Final = Fingerprint(structure=(type(None), None))


def fingerprint(function: Callable[..., Any] | None) -> Fingerprint | None:
    """The function's fingerprint, or None if it must be traced each time."""
    if function is None:
        return _NOTHING
    found = Fingerprint()
    structure = _key(function, found)
    if structure is None:
        return None
    found.structure = structure
    return found


def _key(value: Any, into: Fingerprint) -> tuple[Any, ...] | None:
    kind = type(value)
    if kind in _CONSTANT:
        return (kind, value)
    if kind is int or kind is float:
        into.numbers.append(value)
        return (kind,)
    if kind is Tensor or kind is torch.nn.Parameter:
        if value.dim() == 0:
            return None  # may be read as a number
        into.tensors.append(value)
        return (Tensor, value.dtype, value.shape, value.device)
    if kind is types.FunctionType:
        return _function_key(value, into)
    if kind is tuple:
        parts = [_key(item, into) for item in value]
        return None if None in parts else (tuple, *parts)
    return None


def _function_key(function: types.FunctionType, into: Fingerprint) -> tuple[Any, ...] | None:
    code = function.__code__
    if function.__kwdefaults__ or not _reads_constants_only(code, function.__globals__):
        return None
    try:
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:  # a cell that is not filled yet
        return None
    parts = [_key(item, into) for item in (*(function.__defaults__ or ()), *cells)]
    return None if None in parts else (code, *parts)


def _reads_constants_only(code: types.CodeType, scope: dict[str, Any]) -> bool:
    found = _constant_code.get(code)
    if found is None:
        nested = any(isinstance(c, types.CodeType) for c in code.co_consts)
        found = not nested and all(_is_constant_global(name, scope) for name in code.co_names)
        if len(_constant_code) >= 4096:
            _constant_code.clear()
        # A name that is not a constant today may shadow nothing tomorrow: only the sure answer is kept.
        if found:
            _constant_code[code] = found
    # foci's own modules do not change; a user's may.
    return found and (scope.get("__name__", "").startswith("foci.") or all(_is_constant_global(name, scope) for name in code.co_names))


_constant_code: dict[types.CodeType, bool] = {}


def _is_constant_global(name: str, scope: dict[str, Any]) -> bool:
    if name not in scope:
        return True  # a builtin, or the name of an attribute
    value = scope[name]
    if isinstance(value, types.FunctionType):
        return value.__module__.startswith("foci.")
    return any(value is module for module in _MODULES) or (hasattr(builtins, name) and value is getattr(builtins, name))
