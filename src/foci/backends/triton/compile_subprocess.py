"""Kernels compiled in another process, which reads their Python under a lock of its own.

Triton's cache on disk is what the two share. A kernel is known there by what it is made of, which is sent whole, by the versions of
compiler and assembler, and by variables of the environment. The other process finds the key by itself: where it would compile something
else, it leaves something else, and whoever asked does not find it and compiles. It may have been started with other variables, so Triton's
are replaced for as long as the compilation takes. The assembler's version goes with them: Triton remembers the first that it met, and
Inductor has it take another assembler afterwards, which comes with torch.
"""

from __future__ import annotations

import importlib
import inspect
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

from foci.backends.triton.functions import GENERATED, jit_function
from foci.backends.triton.triton_cache_key import fill_cache_keys

__all__ = ["compile_packed", "is_sendable", "pack"]


def is_sendable(asked: Mapping[str, str]) -> bool:
    """Whether a compilation may happen elsewhere.

    Args:
        asked: what the environment asks of Triton's compiler. It may be to print, which nobody would see of another process.
    """
    return not asked and not knobs.compilation.always_compile


def pack(src: Any, target: Any, options: Mapping[str, Any]) -> bytes:
    """What `compile_packed` takes: what Triton would compile, for what, and how.

    Raises:
        Exception: of whatever type, where something cannot be sent.
    """
    file = io.BytesIO()
    parts = (type(src), src.fn, src.signature, src.constants, src.attrs)
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump((parts, target, dict(options), _surroundings(target.arch)))
    return file.getvalue()


def compile_packed(packed: bytes) -> None:
    """Leaves a kernel in Triton's cache on disk. What goes wrong here goes wrong again where it was asked for, which says why: an
    exception that cannot be sent back would close the pool that this process is of."""
    with suppress(Exception):
        (kind, function, signature, constants, attrs), target, options, surroundings = pickle.loads(packed)
        fill_cache_keys((function, *constants.values()))
        with _as_there(surroundings):
            triton.compile(kind(function, signature, constants, attrs), target=target, options=options)


class _Pickler(pickle.Pickler):
    """Functions go by their names, those made of text as their text."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, JITFunction):
            return NotImplemented
        if obj.fn.__module__ == GENERATED:
            return jit_function, (obj.fn.__name__, inspect.getsource(obj.fn))
        return _function_named, (obj.fn.__module__, obj.fn.__qualname__)


def _function_named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


_PREFIX: Final = "TRITON_"
_ASSEMBLERS: Final = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}


def _surroundings(arch: int) -> dict[str, str]:
    """Triton's variables as another process needs them, for one architecture."""
    from triton.backends.nvidia import compiler

    assembler = dict.fromkeys(_ASSEMBLERS, compiler.get_ptxas(arch).path)
    known = {"TRITON_MOCK_PTX_VERSION": compiler.get_ptxas_version(arch), "TRITON_CACHE_DIR": knobs.cache.dir}
    return {**_variables(), **assembler, **known}


@contextmanager
def _as_there(surroundings: Mapping[str, str]) -> Iterator[None]:
    before = _variables()
    try:
        _put(surroundings)
        yield
    finally:
        _put(before)


def _put(variables: Mapping[str, str]) -> None:
    from triton.backends.nvidia import compiler

    for name in _variables().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    for function in vars(compiler).values():  # what follows from the assembler, such as its version, which is part of a kernel's key
        if hasattr(function, "cache_clear"):
            function.cache_clear()
