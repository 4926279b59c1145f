"""When a traced function may be remembered: everything it can depend on is part of the key.

A function is remembered by its code and by what its code reads of variables it closes over, globals and the object it is a method of:
numbers by value, tensors by shape and dtype (their values and identity are looked up anew), functions likewise. Attributes of modules
and other objects (`self.slopes`, `self.config.window`) are looked up anew too, where looking them up runs no code of the user's. A
function that reads anything else has no key and is traced at each call, so a stale expression cannot exist.

The test is a list of names that are known to be safe, `_attributes` and `_BUILTINS`. Any other name that is read of a value with no key
of its own may read anything, so code that holds one has no key.
"""

from __future__ import annotations

import builtins
import functools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from foci.ir.code_reads import Path, read_code

__all__ = ["NOTHING", "Fingerprint", "fingerprint", "shared"]

_CONSTANT: Final = (bool, str, type(None), torch.dtype)
_MODULES: Final = (torch, math, torch.nn.functional)
_VALUES: Final = frozenset((*_CONSTANT, int, float, tuple, Tensor, torch.nn.Parameter, types.FunctionType, types.MethodType))
"""Types whose values are keyed as a whole, whichever of their attributes is read."""
_UNKNOWN: Final = object()
_PLAIN_LOOKUPS: Final[tuple[Any, ...]] = (object.__getattribute__, types.SimpleNamespace.__getattribute__)
_MODULE_GETATTR: Final = torch.nn.Module.__getattr__
_PLAIN_DESCRIPTORS: Final = (types.FunctionType, types.MemberDescriptorType, staticmethod)
"""What a class may hold under a name whose lookup runs no code of the user's."""


@dataclass(slots=True)
class Fingerprint:
    """Everything that determines the outcome of tracing a function.

    Attributes:
        structure: its code, and the code, types, shapes and dtypes of what it reads besides its arguments.
        numbers: the integers and floats it reads.
        tensors: the tensors it reads, each once, in an order the structure fixes.
        functions: likewise the function and the functions it reads, each with the object whose method it is, or None.
    """

    structure: tuple[Any, ...] = ()
    numbers: list[int | float] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    functions: list[tuple[types.FunctionType, object]] = field(default_factory=list)


NOTHING: Final = Fingerprint(structure=(type(None), None))
"""Fingerprint of no function."""


def fingerprint(function: Callable[..., Any] | None) -> Fingerprint | None:
    """The function's fingerprint, or None if it must be traced each time."""
    if function is None:
        return NOTHING
    if type(function) is types.FunctionType and (ready := _ready_fingerprint(function)) is not None:
        return ready
    result = Fingerprint((), [], [], [])
    structure = _function_key(function, None, result) if type(function) is types.FunctionType else _key(function, result)
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
        return _function_key(value, None, into)
    if kind is types.MethodType:
        return _function_key(value.__func__, value.__self__, into) if type(value.__func__) is types.FunctionType else None
    if kind is tuple:
        parts = [_key(item, into) for item in value]
        return None if None in parts else (tuple, *parts)
    return None


def _ready_fingerprint(function: types.FunctionType) -> Fingerprint | None:
    """The fingerprint of a function that is nothing but its code, which all such functions share; None for any other."""
    if function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__:
        return None
    known = _known.get(id(function.__code__))
    return known.fingerprint if known is not None and (known.is_alone or known.scope is function.__globals__) else None


def _function_key(function: types.FunctionType, owner: object, into: Fingerprint) -> tuple[Any, ...] | None:
    """Key of a function. `owner`: the object whose method it is, or None."""
    if function.__kwdefaults__:
        return None
    functions = into.functions
    if functions:
        for n, (other, its_owner) in enumerate(functions):
            if other is function and its_owner is owner:
                return (types.FunctionType, n)  # it closes over itself, or two close over it
    functions.append((function, owner))
    code, scope = function.__code__, function.__globals__
    known = _known.get(id(code)) or _add(code, scope)
    if not (known.is_safe_function if owner is None else known.is_safe_method):
        return None
    parts: list[Any] = [known.token]
    if known.globals and known.scope is not scope:
        parts += [_global_key(name, path, scope, into) for name, path in known.globals]
    try:
        parts += [_key(value, into) for value in function.__defaults__ or ()]
        for n, cell in enumerate(function.__closure__ or ()):
            if n not in known.cells:
                parts.append(_key(cell.cell_contents, into))
            else:
                parts += [_path_key(cell.cell_contents, path, into) for path in known.cells[n]]
    except ValueError:  # a cell that is not filled yet
        return None
    if owner is not None and known.first:
        parts += [_path_key(owner, path, into) for path in known.first]
    if function.__dict__:  # whoever has the function may read its attributes
        for name, value in function.__dict__.items():
            parts += [(str, name), _key(value, into)]
    return None if None in parts else tuple(parts)


def _global_key(name: str, path: Path, scope: dict[str, Any], into: Fingerprint) -> tuple[Any, ...] | None:
    """Key of what is read of a global or a builtin."""
    if name not in scope:
        return (name,) if name in _BUILTINS and _attributes().issuperset(path) else None
    value = scope[name]
    if name in _BUILTINS and value is getattr(builtins, name):
        return (name,) if _attributes().issuperset(path) else None
    return _path_key(value, path, into)


def _path_key(value: Any, path: Path, into: Fingerprint) -> tuple[Any, ...] | None:
    """Key of an attribute of an attribute ... of a value."""
    for n, name in enumerate(path):
        kind = type(value)
        if kind in _VALUES or (kind is types.ModuleType and value in _MODULES):
            if not _attributes().issuperset(path[n:]):
                return None
            break
        value = _read_attribute(value, name)
    kind = type(value)
    if kind is types.ModuleType:
        return (value,) if value in _MODULES else None
    if kind is types.FunctionType and not value.__closure__ and str(value.__module__).startswith("foci."):
        return (value,)  # foci's own globals do not change
    return _key(value, into)


def _read_attribute(value: Any, name: str) -> Any:
    """An attribute; `_UNKNOWN`, which has no key, where looking it up may run other code than Python's and torch's own."""
    kind = type(value)
    if kind is types.ModuleType:
        return vars(value).get(name, _UNKNOWN)
    if kind.__getattribute__ not in _PLAIN_LOOKUPS or getattr(kind, "__getattr__", _MODULE_GETATTR) is not _MODULE_GETATTR:
        return _UNKNOWN
    if hasattr(kind, name):
        of_class = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
        if hasattr(type(of_class), "__get__") and type(of_class) not in _PLAIN_DESCRIPTORS:
            return _UNKNOWN
    return getattr(value, name, _UNKNOWN)


class _Code:
    """Stands in keys for equal code, which is dear to hash."""


class _Known(NamedTuple):
    """Facts about code, kept by its identity.

    Attributes:
        code: held, so that its identity is no other's.
        token: stands for it.
        is_safe_function: whether all that it reads can be looked up, where its first argument is a symbol.
        is_safe_method: likewise where that is the object whose method it is.
        globals: (name, path) of each global and builtin that it reads.
        cells: paths that it reads of variables it closes over, by their number; those that it reads as a whole are not among them.
        first: paths that it reads of its first argument.
        scope: foci's own globals, where all that it reads can be looked up: a user's may change, foci's do not.
        fingerprint: of a function of this code alone.
        is_alone: whether it reads nothing but its arguments.
    """

    code: types.CodeType
    token: _Code
    is_safe_function: bool
    is_safe_method: bool
    globals: tuple[tuple[str, Path], ...]
    cells: dict[int, tuple[Path, ...]]
    first: tuple[Path, ...]
    scope: dict[str, Any] | None
    fingerprint: Fingerprint
    is_alone: bool


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


def _add(code: types.CodeType, scope: dict[str, Any]) -> _Known:
    if len(_known) >= _CODES:
        _known.clear()
    equal = _known.get(code)
    token = _Code() if equal is None else equal.token
    entry = _known[id(code)] = _facts(code, token, scope)
    _known.setdefault(code, entry)
    return entry


def _facts(code: types.CodeType, token: _Code, scope: dict[str, Any]) -> _Known:
    fingerprint, reads = Fingerprint(structure=(token,)), read_code(code)
    if reads is None:
        return _Known(code, token, False, False, (), {}, (), None, fingerprint, is_alone=False)
    names = reads.attributes.union(*(path for paths in reads.cells.values() if () in paths for path in paths))
    is_safe = _attributes().issuperset(names)
    is_safe_function = is_safe and _attributes().issuperset(name for path in reads.first for name in path)
    is_safe_method = is_safe and code.co_argcount > 0 and () not in reads.first
    globals_read = tuple((name, path) for name, paths in sorted(reads.globals.items()) for path in sorted(paths))
    cells = {n: tuple(sorted(paths)) for n, paths in enumerate(reads.cells.values()) if () not in paths}
    is_of_foci = str(scope.get("__name__")).startswith("foci.")
    into = Fingerprint((), [], [], [])
    keys = [_global_key(name, path, scope, into) for name, path in globals_read] if is_of_foci and is_safe_function else [None]
    is_own = None not in keys and not into.tensors
    own_scope, is_alone, first = scope if is_own else None, is_safe_function and not globals_read, tuple(sorted(reads.first))
    return _Known(code, token, is_safe_function, is_safe_method, globals_read, cells, first, own_scope, fingerprint, is_alone)
