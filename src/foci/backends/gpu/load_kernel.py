"""Compiles a kernel and loads it on the current device, for launches through NVIDIA's driver."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from triton.runtime.errors import OutOfResources

from foci.backends.gpu import cuda_driver
from foci.backends.gpu.compiling import built
from foci.compat.cuda import current_device
from foci.compat.triton import COMPILE_OPTIONS, TESTED, LaunchFacts, MapFacts, launch_facts, release

__all__ = ["SCRATCH", "Loaded", "bits", "compile_and_load"]

SCRATCH: Final = (0, 0)
"""The last two parameters of each kernel: memory that the compiler and a profiler may ask for."""
_WARP: Final = 32


class Loaded(NamedTuple):
    """A kernel on a device."""

    kernel: cuda_driver.Kernel
    shape: cuda_driver.Shape
    facts: LaunchFacts


def compile_and_load(function: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Loaded | None:
    """Compile the kernel for these arguments, unless it is known, and load it.

    None where Triton has to launch it: in its interpreter, without NVIDIA's driver, under load hooks, with a driver that somebody else gave
    Triton, for a kernel that needs scratch memory, and for a release of Triton whose kernels take other parameters.

    Raises:
        Unbuildable: if a release of Triton that foci was not tested with does not compile it, or not for this device.
        OutOfResources: if the device has too little shared memory for it, or too few registers.
    """

    def load() -> Loaded | None:
        compiled = function.warmup(*args, grid=grid, **COMPILE_OPTIONS, **options)
        if getattr(compiled, "metadata", None) is None:
            return None
        with _lock:
            return _loaded.get(compiled) or _load(compiled)

    loaded: Loaded | None = built(function, args, options, load)
    return loaded


_lock: Final = threading.Lock()
_loaded: Final[weakref.WeakKeyDictionary[Any, Loaded]] = weakref.WeakKeyDictionary()
"""Kernels by Triton's object, which belongs to one device."""


def _load(compiled: Any) -> Loaded | None:
    if not cuda_driver.is_there():
        return None
    facts = launch_facts(compiled)
    if facts is None or compiled in _misfits:
        if release() not in TESTED:
            _warn("says other things of its kernels")
        return None
    device, threads = current_device(), _WARP * facts.warps
    has = cuda_driver.shared_memory(device)
    if facts.shared > has:
        raise OutOfResources(facts.shared, has, "shared memory")
    kernel = cuda_driver.load(device, facts.binary, facts.name, facts.shared)
    if threads > kernel.most_threads:
        cuda_driver.unload(kernel)
        raise OutOfResources(threads, kernel.most_threads, "threads")
    sizes = (*_parameter_sizes(facts.signature, iter(facts.maps)), *[8 for _ in SCRATCH])
    if kernel.parameters != sizes and (kernel.parameters is not None or release() not in TESTED):
        cuda_driver.unload(kernel)
        _misfits.add(compiled)
        _warn("gives kernels other parameters")
        return None
    loaded = _loaded[compiled] = Loaded(kernel, cuda_driver.Shape(threads, facts.shared, facts.is_cooperative, facts.is_dependent), facts)
    return loaded


_misfits: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""Kernels with other parameters."""


@functools.cache
def _warn(what: str) -> None:
    version = ".".join(map(str, release()))
    text = f"Triton {version} {what} than foci knows, so Triton launches them, and each call takes the host longer"
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def _parameter_sizes(kinds: Sequence[Any], maps: Iterator[MapFacts]) -> Iterator[int]:
    """Bytes of each parameter that arguments of these types become, without `SCRATCH`."""
    for kind in kinds:
        if isinstance(kind, tuple):
            yield from _parameter_sizes(kind, maps)
        elif kind.startswith("tensordesc"):
            rank = len(next(maps).tile)
            yield from (cuda_driver.MAP_BYTES, *[4] * rank, *[8] * rank)
        elif kind != "constexpr":
            yield 8 if kind.startswith("*") else -(-int(kind.lstrip("uifpb")) // 8)


_FLOATS: Final = {"fp32": ctypes.c_float, "fp64": ctypes.c_double}


def bits(kind: str, number: float) -> int:
    """The bits of a number of a floating type, as an integer; it is cast as C casts it, to an infinity where it is too large."""
    return int.from_bytes(bytes(_FLOATS[kind](number)), sys.byteorder, signed=True)
