"""When a traced function may be remembered: everything it can depend on is part of the key.

A function is remembered by its code and by what its code reads of closure variables, globals and the object whose method it is:
numbers by value, tensors by shape and dtype (their values and identity are looked up anew), functions by their own key. Attributes of
modules and other objects (`self.slopes`, `self.config.window`) are looked up anew too, if that runs no code but Python's and torch's. A
function that reads anything else has no key and is traced at each call, so that no call sees a stale expression.

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
from typing import Any, Final, NamedTuple, cast

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
_CLASS_LOOKUP: Final[Any] = type.__getattribute__
_PLAIN_FALLBACKS: Final[tuple[Any, ...]] = (_UNKNOWN, torch.nn.Module.__getattr__)
_PLAIN_DESCRIPTORS: Final = (types.FunctionType, types.MemberDescriptorType, staticmethod)
"""What a class may hold under a name whose lookup runs no code of the user's."""


@dataclass(slots=True)
class Fingerprint:
    """Everything that determines the outcome of tracing a function.

    Attributes:
        structure: its code, and the code, types, shapes and dtypes of what it reads besides its arguments.
        numbers: the integers and floats it reads.
        tensors: the tensors it reads, each once, in an order the structure fixes.
        functions: the function and the functions it reads, each with the object whose method it is, or None; empty if there is only one.
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
    if not (known.is_safe_function if owner is None else known.is_safe_method) or type(scope) is not dict:
        return None
    parts: list[Any] = [known.token] if owner is None else [known.token, types.MethodType]
    if known.makes_tensors:
        parts.append(torch.get_default_dtype())
    if known.globals and known.scope is not scope:
        if cast(Any, function).__builtins__ is not vars(builtins):
            return None
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
    """Key of a path of a global or a builtin."""
    value = scope[name] if name in scope else vars(builtins).get(name, _UNKNOWN)
    if name in _BUILTINS and value is _BUILTINS[name]:
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
    if kind is types.FunctionType and not value.__closure__ and _is_of_foci(value.__globals__):
        return (value,)  # foci's own globals do not change
    return _key(value, into)


def _read_attribute(value: Any, name: str) -> Any:
    """An attribute; `_UNKNOWN`, which has no key, where looking it up may run other code than Python's and torch's own."""
    kind = type(value)
    if kind is types.ModuleType:
        return vars(value).get(name, _UNKNOWN)
    if _in_class(type(kind), "__getattribute__") is not _CLASS_LOOKUP:
        return _UNKNOWN
    if _in_class(kind, "__getattribute__") not in _PLAIN_LOOKUPS or _in_class(kind, "__getattr__") not in _PLAIN_FALLBACKS:
        return _UNKNOWN
    descriptor = type(_in_class(kind, name))
    if hasattr(descriptor, "__get__") and descriptor not in _PLAIN_DESCRIPTORS:
        return _UNKNOWN
    return getattr(value, name, _UNKNOWN)


def _in_class(kind: type, name: str) -> Any:
    """The attribute of a class or its bases, as it is stored; `_UNKNOWN` if there is none."""
    for each in kind.__mro__:
        found = each.__dict__.get(name, _UNKNOWN)
        if found is not _UNKNOWN:
            return found
    return _UNKNOWN


def _is_of_foci(scope: dict[str, Any]) -> bool:
    """Whether these are the globals of a module of foci."""
    return str(scope.get("__name__")).startswith("foci.")


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
        makes_tensors: whether it may make tensors of torch's default dtype.
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
    makes_tensors: bool
    fingerprint: Fingerprint
    is_alone: bool


_CODES: Final = 8192
_BUILTINS: Final[dict[str, Any]] = {name: getattr(builtins, name) for name in (
    "abs", "all", "any", "bool", "divmod", "enumerate", "filter", "float", "int", "isinstance", "len", "list", "map", "max", "min", "pow",
    "range", "reversed", "round", "slice", "sorted", "sum", "tuple", "zip",
)}  # fmt: skip
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


@functools.cache
def _constructors() -> frozenset[str]:
    """Names of what makes tensors."""
    from foci.ir.trace import CONSTRUCTORS

    return frozenset(CONSTRUCTORS)


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
        return _Known(code, token, False, False, (), {}, (), None, False, fingerprint, is_alone=False)
    names = reads.attributes.union(*(path for paths in reads.cells.values() if () in paths for path in paths))
    is_safe = _attributes().issuperset(names)
    is_safe_function = is_safe and _attributes().issuperset(name for path in reads.first for name in path)
    is_safe_method = is_safe and code.co_argcount > 0 and () not in reads.first
    globals_read = tuple((name, path) for name, paths in sorted(reads.globals.items()) for path in sorted(paths))
    cells = {n: tuple(sorted(paths)) for n, paths in enumerate(reads.cells.values()) if () not in paths}
    makes_tensors = not _constructors().isdisjoint(reads.names)
    is_own = _is_of_foci(scope) and is_safe_function and not makes_tensors and _are_constant(globals_read, scope)
    return _Known(
        code, token, is_safe_function, is_safe_method, globals_read, cells, tuple(sorted(reads.first)), scope if is_own else None,
        makes_tensors, fingerprint, is_alone=is_safe_function and not globals_read,
    )  # fmt: skip


def _are_constant(globals_read: tuple[tuple[str, Path], ...], scope: dict[str, Any]) -> bool:
    """Whether globals of foci's are builtins, modules and foci's functions alone."""
    keys = [_global_key(name, path, scope, Fingerprint((), [], [], [])) for name, path in globals_read]
    return all(key is not None and isinstance(key[0], str | types.ModuleType | types.FunctionType) for key in keys)
