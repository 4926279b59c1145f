"""Compiles kernels in another process, which has a GIL of its own for Triton's front end.

The two processes share Triton's cache on disk. Its key of a kernel consists of the kernel's source and arguments, which are sent, of the
digest of Triton's files, which is sent too, of the version of ptxas, and of environment variables. The other process computes the key
itself. If it differs, the caller does not find the kernel and compiles it. Triton's environment variables are set to the caller's during
a compilation. So is the version of ptxas: Triton caches the first that it finds, and Inductor later sets the path of another ptxas, which
comes with torch.
"""

from __future__ import annotations

import importlib
import inspect
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

from foci.backends.compile_lock import locked
from foci.backends.gpu.generated import GENERATED, jit_function
from foci.compat.jit import has_own_keys
from foci.compat.triton import assume_digest, digest_triton

__all__ = ["compile_packed", "is_sendable", "pack"]


class _Compilation(NamedTuple):
    """A kernel to compile, as it is pickled."""

    source_class: type  # Triton's class of the source
    source: tuple[Any, ...]  # what its constructor takes: function, signature, constants and attributes
    target: Any
    options: dict[str, Any]
    key: str  # Triton's key of the kernel
    environment: dict[str, str]  # see `_surroundings`
    digest: str | None  # of Triton's files


def is_sendable(function: Any, asked: Mapping[str, str]) -> bool:
    """Whether another process may compile a kernel, and this one finds it.

    Args:
        function: of the kernel.
        asked: debugging options of Triton's compiler from the environment. Output of another process would not be seen.
    """
    return has_own_keys(function) and not asked and not knobs.compilation.always_compile


def pack(src: Any, target: Any, options: Mapping[str, Any], key: str) -> bytes:
    """Pickle a kernel's source, target, options and Triton's key of it for `compile_packed`.

    Raises:
        Exception: of any type, if something cannot be pickled.
    """
    file = io.BytesIO()
    source = (src.fn, src.signature, src.constants, src.attrs)
    compilation = _Compilation(type(src), source, target, dict(options), key, _surroundings(target.arch), digest_triton())
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(compilation)
    return file.getvalue()


def compile_packed(packed: bytes) -> None:
    """Compile a kernel into Triton's cache on disk. Errors are ignored: the caller compiles again and raises them, while an exception that
    cannot be pickled would break this process's pool."""
    with suppress(Exception):
        compilation: _Compilation = pickle.loads(packed)
        assume_digest(compilation.digest)
        with _as_there(compilation.environment), locked(compilation.key):
            source = compilation.source_class(*compilation.source)
            triton.compile(source, target=compilation.target, options=compilation.options)


class _Pickler(pickle.Pickler):
    """Pickles jit functions by name, and generated ones by their source."""

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
    """Triton's environment variables that make another process compute the same cache keys, for one architecture."""
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
    for function in vars(compiler).values():  # cached facts about ptxas, such as its version, which is part of a kernel's key
        if hasattr(function, "cache_clear"):
            function.cache_clear()
