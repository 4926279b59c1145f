"""When a traced function may be remembered: everything it can depend on is part of the key.

A function is remembered by its code and by what it closes over: numbers by value, tensors by shape and dtype (their
values and identity are looked up anew), functions likewise. A function that reads anything else, an object's attribute
or a global that can change, has no key and is traced at each call, so a stale expression cannot exist.

The test is a list of names that are known to be safe, `_attributes` and `_BUILTINS`. A name that is on neither list may
read anything, so code that holds one has no key.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

__all__ = ["NOTHING", "Fingerprint", "fingerprint", "shared"]

_CONSTANT: Final = (bool, str, type(None), torch.dtype)
_IMPORT: Final = dis.opmap["IMPORT_NAME"]
_MODULES: Final = (torch, math, torch.nn.functional)


@dataclass(slots=True)
class Fingerprint:
    """Everything that determines the outcome of tracing a function.

    Attributes:
        structure: its code, and the code, types, shapes and dtypes of what it closes over.
        numbers: the integers and floats it closes over.
        tensors: the tensors it closes over, each once, in an order the structure fixes.
        functions: likewise the function and the functions it closes over.
    """

    structure: tuple[Any, ...] = ()
    numbers: list[int | float] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)


NOTHING: Final = Fingerprint(structure=(type(None), None))
"""Fingerprint of no function."""


def fingerprint(function: Callable[..., Any] | None) -> Fingerprint | None:
    """The function's fingerprint, or None if it must be traced each time."""
    if function is None:
        return NOTHING
    if type(function) is types.FunctionType and (ready := _ready_fingerprint(function)) is not None:
        return ready
    result = Fingerprint((), [], [], [])
    structure = _function_key(function, result) if type(function) is types.FunctionType else _key(function, result)
    if structure is None:
        return None
    result.structure = structure
    return result


def shared(one: Fingerprint, other: Fingerprint) -> tuple[tuple[int, int], ...]:
    """Which tensors both close over: what is traced of two functions has one capture for each."""
    if not (one.tensors and other.tensors):
        return ()
    return tuple([(n, m) for n, t in enumerate(one.tensors) for m, tensor in enumerate(other.tensors) if t is tensor])


def _key(value: Any, into: Fingerprint) -> tuple[Any, ...] | None:
    kind = type(value)
    if kind in _CONSTANT:
        return (kind, value)
    if kind is int or kind is float:
        into.numbers.append(value)
        return (kind,) if value or kind is int else (kind, str(value))  # 0.0 == -0.0
    if kind is Tensor or kind is torch.nn.Parameter:
        if value.dim() == 0 or value.layout is not torch.strided:
            return None  # may be read as a number
        if value.__dict__ and not _attributes().isdisjoint(value.__dict__):
            return None  # an attribute of Python's hides one of torch's; code that reads another has no key
        for n, other in enumerate(into.tensors):
            if other is value:
                return (Tensor, n)  # one tensor is one capture
        into.tensors.append(value)
        return (Tensor, value.dtype, value.shape, value.device)
    if kind is types.FunctionType:
        return _function_key(value, into)
    if kind is tuple:
        parts = [_key(item, into) for item in value]
        return None if None in parts else (tuple, *parts)
    return None


def _ready_fingerprint(function: types.FunctionType) -> Fingerprint | None:
    """The fingerprint of a function of foci that has nothing but its code, such as that of `foci.masks.causal`, which all of them share;
    None for any other."""
    if function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__:
        return None
    entry = _known.get(id(function.__code__))
    return entry.fingerprint if entry is not None and entry.scope is function.__globals__ else None


def _function_key(function: types.FunctionType, into: Fingerprint) -> tuple[Any, ...] | None:
    if function.__kwdefaults__:
        return None
    functions = into.functions
    if functions:
        for n, other in enumerate(functions):
            if other is function:
                return (types.FunctionType, n)  # it closes over itself, or two close over it
    functions.append(function)
    parts: list[Any] = [_code_key(function.__code__, function.__globals__)]
    try:
        parts += [_key(value, into) for value in function.__defaults__ or ()]
        for cell in function.__closure__ or ():
            parts.append(_key(cell.cell_contents, into))
    except ValueError:  # a cell that is not filled yet
        return None
    if function.__dict__:  # whoever has the function may read its attributes
        for name, value in function.__dict__.items():
            parts += [(str, name), _key(value, into)]
    return None if None in parts else tuple(parts)


class _Code:
    """Stands in keys for equal code, which is dear to hash."""


class _Known(NamedTuple):
    """Facts about code, kept by its identity.

    Attributes:
        code: held, so that its identity is no other's.
        token: stands for it.
        names: the globals and attributes it reads, None where it imports.
        scope: foci's own globals, where it reads but constants among them: a user's may change, foci's do not.
        fingerprint: of a function of this code and scope alone.
    """

    code: types.CodeType
    token: _Code
    names: tuple[str, ...] | None
    scope: dict[str, Any] | None
    fingerprint: Fingerprint


_CODES: Final = 8192
_BUILTINS: Final = frozenset((
    "abs", "all", "any", "bool", "divmod", "enumerate", "filter", "float", "int", "isinstance", "len", "list", "map", "max", "min", "pow",
    "range", "reversed", "round", "slice", "sorted", "sum", "tuple", "zip",
))  # fmt: skip
"""Builtins whose results follow from their arguments. Not among them: `getattr`, `vars`, `id`, `globals`, `eval` and their like."""


@functools.cache
def _attributes() -> frozenset[str]:
    """Names that say nothing but what shapes, dtypes and numbers say, or that only a trace sees: words of the language, and constants."""
    from foci.ir.torch_functions import TORCH_FUNCTIONS
    from foci.ir.trace import CONSTRUCTORS, GEOMETRY

    dtypes = (name for name, value in vars(torch).items() if isinstance(value, torch.dtype))
    words = (
        *TORCH_FUNCTIONS,
        *GEOMETRY,
        *CONSTRUCTORS,
        "device",
        "dtype",
        "functional",
        "ndim",
        "nn",
        "shape",
        "special",
        *dtypes,
        *vars(math),
    )
    return frozenset(name for name in words if not name.startswith("__"))


_known: dict[int | types.CodeType, _Known] = {}
"""Facts about code by its identity, and by its value: other code that is equal has the same token."""


def _code_key(code: types.CodeType, scope: dict[str, Any]) -> object | None:
    """Key of code that reads only constants, and of these; None for other code."""
    entry = _known.get(id(code)) or _add(code, scope)
    if entry.scope is scope:
        return entry.token
    names = entry.names
    if not names:
        return None if names is None else (entry.token,)
    if not all(_is_constant(name, scope) for name in names):
        return None
    return (entry.token, *[scope[name] for name in names if name in scope])


def _add(code: types.CodeType, scope: dict[str, Any]) -> _Known:
    if len(_known) >= _CODES:
        _known.clear()
    names, is_of_foci = _read_names(code), str(scope.get("__name__")).startswith("foci.")
    is_own = is_of_foci and names is not None and all(n not in scope or _is_constant(n, scope) for n in names)
    equal = _known.get(code)
    token = _Code() if equal is None else equal.token
    entry = _known[id(code)] = _Known(code, token, names, scope if is_own else None, Fingerprint(structure=(token,)))
    _known.setdefault(code, entry)
    return entry


def _read_names(code: types.CodeType) -> tuple[str, ...] | None:
    """Names of globals and attributes that code and the code within it read; None where it imports."""
    if _IMPORT in code.co_code[::2]:  # operations and their arguments alternate
        return None
    names = code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _read_names(constant)
            if inner is None:
                return None
            names += inner
    return names


def _is_constant(name: str, scope: dict[str, Any]) -> bool:
    """Whether a name that code reads has one meaning at all times: a global, a builtin or an attribute."""
    if name not in scope:
        return name in _BUILTINS or name in _attributes()
    value = scope[name]
    if isinstance(value, types.FunctionType):
        return str(value.__module__).startswith("foci.")
    return any(value is module for module in _MODULES) or (name in _BUILTINS and value is getattr(builtins, name))
