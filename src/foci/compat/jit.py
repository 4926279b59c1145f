"""Decorators of the functions that kernels are made of. The functions are Triton's with two differences, which shorten first calls.

- **A source is read late.** Triton reads and tokenizes the source of every function of a module as the module is imported; a problem needs
  about half of them. Here that happens when something first asks for it. The text is the one that was imported, though its file changes.
- **A cache key is made without parsing.** Triton makes the key of a kernel from the syntax trees of all functions that it calls. Here it is
  made from the text of the modules that have these functions, and from the constants that these read. Triton's key also depends on which
  functions were asked for theirs before, and a kernel with two keys is compiled twice.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import triton
from triton.language import constexpr

from foci.compat.lookup import find

__all__ = ["called_functions", "make_decorator", "triton_jit"]

_OF_FUNCTION: Final = ("__name__", "__qualname__", "__module__", "__doc__", "__globals__")
"""What Triton's constructor copies from a function, and Python asks of it by names that `__getattr__` is not asked for."""


class _LateFunction:
    """Mixed into Triton's class of functions. Its constructor runs when an attribute is asked for that only the constructor sets."""

    def __init__(self, fn: FunctionType, **options: Any) -> None:
        _keep_texts(fn)
        self.fn = fn
        self._options: dict[str, Any] | None = options
        self._construction = threading.RLock()
        self.__dict__.update((name, getattr(fn, name)) for name in _OF_FUNCTION)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_construction" not in self.__dict__:
            raise AttributeError(name)
        with self._construction:
            if self._options is not None:
                options, self._options = self._options, None
                try:
                    super().__init__(self.fn, **options)  # type: ignore[call-arg]
                except BaseException:
                    self._options = options
                    raise
        return object.__getattribute__(self, name)

    @functools.cached_property
    def cache_key(self) -> str:
        """A digest of all Python that decides what this function compiles to. A kernel's key has arguments and compiler besides."""
        return _digest(self.fn)


def make_decorator(path: str, decorator: Callable[..., Any]) -> Callable[..., Any]:
    """Make a decorator as one of Triton's, of a class whose functions are read late.

    Args:
        path: of the class that Triton's decorator makes instances of; where Triton has no such class, its decorator is returned.
        decorator: Triton's.
    """
    base = find(path, without="reads the sources of all kernels as they are imported, and may compile one twice", seen=("3.6", "3.9"))
    if base is None:
        return decorator
    made: Any = type(base.__name__, (_LateFunction, base), {})

    def decorate(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
        return made(fn, **options) if fn is not None else lambda fn: made(fn, **options)

    return decorate


triton_jit = triton.jit if triton.knobs.runtime.interpret else make_decorator("triton.runtime.jit.JITFunction", triton.jit)


class _Text(NamedTuple):
    """A module's text, as it was imported."""

    digest: str
    written: tuple[int, int] | None  # time of modification in ns, and bytes
    space: dict[str, Any]  # the module's globals


_texts: Final[dict[str, _Text]] = {}
"""Texts of modules by file."""
_THIS_PROCESS: Final = uuid.uuid4().hex


def _keep_texts(function: FunctionType) -> None:
    """Keep the text of a function's module, and of foci's modules that it names, as they are imported. In a module that is imported again,
    text that changed since is kept anew."""
    file, space = function.__code__.co_filename, function.__globals__
    known = _texts.get(file)
    if known is None:
        _keep_text(file, space)
    elif (known.space is not space or function.__name__ in space) and known.written != _written(file):
        _keep_text(file, space)
        for name in _named_files(space):
            if _texts[name].written != _written(name):  # whether that was imported again too is not known
                _texts[name] = _texts[name]._replace(digest=_THIS_PROCESS)


def _keep_text(file: str, space: dict[str, Any]) -> None:
    """Keep a text where `inspect` reads it, and its digest here."""
    written = _written(file)
    if written is not None:
        with open(file, encoding="utf-8") as text:
            linecache.cache[file] = (written[1], None, text.readlines(), file)  # None: it is not read again when the file changes
    lines = linecache.getlines(file, space)
    _texts[file] = _Text(hashlib.sha256("".join(lines).encode()).hexdigest(), written, space)
    for name, named in _named_files(space).items():
        if name not in _texts:
            _keep_text(name, named)


def _named_files(space: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Files of foci's modules of which a module's globals have something, with these modules' globals."""
    found = {}
    for value in list(space.values()):
        module = value if isinstance(value, ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
        if module is not None and _is_own(module.__name__) and getattr(module, "__file__", None):
            found[str(module.__file__)] = vars(module)
    return found


def _written(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:  # the text is not in a file
        return None
    return status.st_mtime_ns, status.st_size


def _is_own(module: str) -> bool:
    return module.startswith("foci.")


def _digest(function: FunctionType) -> str:
    """A digest of a function's name, of the texts of all modules that it reaches, and of the constants that it reads."""
    files, constants = {}, set()
    for each in called_functions(function):
        files[each.__module__, each.__code__.co_filename] = each.__globals__
        for name, value in _globals_read(each):
            if isinstance(value, constexpr | int | float | str | tuple | None):
                constants.add((each.__module__, name, repr(value)))
            elif isinstance(value, type) and _is_own(value.__module__):
                space = vars(sys.modules[value.__module__])
                files[value.__module__, space["__file__"]] = space
    for (_, file), space in files.items():
        if file not in _texts:
            _keep_text(file, space)
    texts = [_texts[file].digest for _, file in sorted(files)]
    return hashlib.sha256(repr((function.__module__, function.__qualname__, texts, sorted(constants))).encode()).hexdigest()


@functools.lru_cache(maxsize=1024)
def called_functions(function: FunctionType) -> tuple[FunctionType, ...]:
    """Functions of foci that a function calls, directly or not, with itself: of kernels, and such as run while these compile."""
    found, begun = {function}, [function]
    while begun:
        values = [inspect.unwrap(getattr(value, "fn", value)) for _, value in _globals_read(begun.pop())]
        new = {value for value in values if isinstance(value, FunctionType) and _is_own(value.__module__)} - found
        found |= new
        begun.extend(new)
    return tuple(found)


def _globals_read(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Names of globals that a function reads, with their values."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += (constant for constant in code.co_consts if isinstance(constant, CodeType))
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
