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
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import triton
from triton.language import constexpr

from foci.compat.lookup import IMPORTED_AT, find

__all__ = ["called_functions", "has_own_keys", "make_decorator", "triton_jit"]

_PACKAGE: Final = __name__.partition(".")[0] + "."
_OF_FUNCTION: Final = ("__name__", "__qualname__", "__module__", "__doc__", "__globals__")
"""What Triton's constructor copies from a function, and Python asks of it by names that `__getattr__` is not asked for."""


class _LateFunction:
    """Mixed into Triton's class of functions. Its constructor runs when an attribute is asked for that only the constructor sets."""

    def __init__(self, fn: FunctionType, **options: Any) -> None:
        setattr(fn, _TEXT_ATTRIBUTE, _keep_texts(fn))
        self.fn = fn
        self._options: dict[str, Any] | None = options
        self._construction = threading.RLock()
        self.__dict__.update((name, getattr(fn, name)) for name in _OF_FUNCTION)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_construction" not in self.__dict__:
            raise AttributeError(name)
        self._construct()
        return object.__getattribute__(self, name)

    def _construct(self) -> None:
        with self._construction:
            if self._options is not None:
                options, self._options = self._options, None
                try:
                    with _as_imported(self.fn):
                        super().__init__(self.fn, **options)  # type: ignore[call-arg]
                except BaseException:
                    self._options = options
                    raise

    @property
    def params(self) -> Any:
        """The parameters. Triton's constructor fills the list one by one: another thread waits until all are there."""
        with self._construction:
            self._construct()
            return self.__dict__["params"]

    @params.setter
    def params(self, value: Any) -> None:
        self.__dict__["params"] = value

    @functools.cached_property
    def cache_key(self) -> str:
        """A digest of all Python that decides what this function compiles to. A kernel's key has arguments and compiler besides."""
        self._construct()
        # those that Triton compares at a launch, to refuse a kernel whose constants have changed
        self.used_global_vals = {
            (name, id(each.__globals__)): (value, each.__globals__)
            for each in called_functions(self.fn)
            for name, value in _globals_read(each)
            if isinstance(value, constexpr)
        }
        return _digest(self.fn)


def make_decorator(path: str, decorator: Callable[..., Any]) -> Callable[..., Any]:
    """Make a decorator as one of Triton's, of a class whose functions are read late.

    Args:
        path: of the class that Triton's decorator makes instances of; where Triton has no such class, its decorator is returned.
        decorator: Triton's.
    """
    base = find(
        path, without="reads the sources of all kernels as they are imported, and compiles none in other processes", seen=("3.6", "3.9")
    )
    if base is None:
        return decorator
    made: Any = type(base.__name__, (_LateFunction, base), {})

    def decorate(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
        return made(fn, **options) if fn is not None else lambda fn: made(fn, **options)

    return decorate


def has_own_keys(function: Any) -> bool:
    """Whether a function's cache key is the one made here, which is the same in every process."""
    return isinstance(function, _LateFunction)


triton_jit = triton.jit if triton.knobs.runtime.interpret else make_decorator("triton.runtime.jit.JITFunction", triton.jit)


class _Text(NamedTuple):
    """A module's text, as it was imported."""

    lines: list[str]
    digest: str
    written: tuple[int, int] | None  # time of modification in ns, and bytes
    space: dict[str, Any]  # the module's globals


_TEXT_ATTRIBUTE: Final = "_foci_text"
"""The attribute of a kernel's function that holds its module's text."""
_texts: Final[dict[str, _Text]] = {}
"""Texts of modules by file, as they were last imported."""
_THIS_PROCESS: Final = uuid.uuid4().hex
"""In place of the digest of a text of which it is not known whether it is what runs here: no other process has such a key."""
_linecache_lock: Final = threading.RLock()


@contextmanager
def _as_imported(function: FunctionType) -> Iterator[None]:
    """`inspect` reads the text of the function's module that was imported, whatever has become of the file and of `linecache` since."""
    file, text = function.__code__.co_filename, getattr(function, _TEXT_ATTRIBUTE)
    with _linecache_lock:
        before = linecache.cache.get(file)
        linecache.cache[file] = (sum(map(len, text.lines)), None, text.lines, file)  # None: the file is not looked at
        try:
            yield
        finally:
            if before is None:
                linecache.cache.pop(file, None)
            else:
                linecache.cache[file] = before


def _keep_texts(function: FunctionType) -> _Text:
    """Keep the text of a function's module, and of foci's modules that it names, as they are imported. In a module that is imported again,
    text that changed since is kept anew."""
    file, space = function.__code__.co_filename, function.__globals__
    known = _texts.get(file)
    if known is None:
        return _keep_text(file, space)
    if (known.space is not space or function.__name__ in space) and known.written != _written(file):
        known = _keep_text(file, space)
        for name in _named_files(space):
            if _texts[name].written != _written(name):  # whether that was imported again too is not known
                _texts[name] = _texts[name]._replace(digest=_THIS_PROCESS)
    return known


def _keep_text(file: str, space: dict[str, Any]) -> _Text:
    written = _written(file)
    if written is None:
        lines = linecache.getlines(file, space)
    else:
        with open(file, encoding="utf-8") as text:
            lines = text.readlines()
    kept = _texts[file] = _Text(lines, hashlib.sha256("".join(lines).encode()).hexdigest(), written, space)
    for name, named in _named_files(space).items():
        if name not in _texts:
            other = _keep_text(name, named)
            if other.written is not None and other.written[0] >= IMPORTED_AT:  # it was imported before, and may have been another text
                _texts[name] = other._replace(digest=_THIS_PROCESS)
    return kept


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
    return module.startswith(_PACKAGE)


def _digest(function: FunctionType) -> str:
    """A digest of a function's name, of the texts of all modules that it reaches, and of the constants that it reads."""
    texts, constants = set(), set()
    for each in called_functions(function):
        texts.add((each.__module__, _digest_text(each)))
        for name, value in _globals_read(each):
            if isinstance(value, constexpr | int | float | str | None):
                constants.add((each.__module__, name, repr(value)))
            elif isinstance(value, type) and _is_own(value.__module__):
                texts.add((value.__module__, _digest_text(value)))
    found = (function.__module__, function.__qualname__, sorted(texts), sorted(constants))
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _digest_text(value: FunctionType | type) -> str:
    """The digest of the text that a function or a class was imported from."""
    own = vars(value).get(_TEXT_ATTRIBUTE)
    if own is not None:
        return str(own.digest)
    module = sys.modules[value.__module__]
    if "." not in value.__qualname__ and _undecorated(vars(module).get(value.__name__)) is not value:
        return _THIS_PROCESS  # the module was imported again since
    file = str(module.__file__)
    return (_texts.get(file) or _keep_text(file, vars(module))).digest


@functools.lru_cache(maxsize=1024)
def called_functions(function: FunctionType) -> tuple[FunctionType, ...]:
    """Functions of foci that a function calls, directly or not, with itself: of kernels, and such as run while these compile."""
    found, begun = {function}, [function]
    while begun:
        read = [value for _, value in _globals_read(begun.pop())]
        methods = [method for value in read if isinstance(value, type) and _is_own(value.__module__) for method in vars(value).values()]
        new = {
            value for value in map(_undecorated, (*read, *methods)) if isinstance(value, FunctionType) and _is_own(value.__module__)
        } - found
        found |= new
        begun.extend(new)
    return tuple(found)


def _undecorated(value: Any) -> Any:
    """The function under Triton's decorators."""
    return inspect.unwrap(getattr(value, "fn", value))


def _globals_read(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Names of globals that a function reads, with their values."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += (constant for constant in code.co_consts if isinstance(constant, CodeType))
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
