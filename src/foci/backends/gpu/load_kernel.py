"""Compiles a kernel and loads it on the current device, for launches through NVIDIA's driver."""

from __future__ import annotations

import struct
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from triton.runtime.errors import OutOfResources

from foci.backends.gpu import cuda_driver
from foci.backends.gpu.compiling import built
from foci.compat.cuda import current_device
from foci.compat.triton import COMPILE_OPTIONS, LaunchFacts, MapFacts, launch_facts, release

__all__ = ["SCRATCH", "Loaded", "bits", "compile_and_load", "parameter_sizes"]

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

    None where Triton has to launch it: in its interpreter, without NVIDIA's driver or with one from before CUDA 12.4, and for a release of
    Triton whose kernels take other parameters.

    Raises:
        Unbuildable: if a release of Triton that foci was not tested with does not compile it, or not for this device.
        OutOfResources: if the device has too little shared memory for it, or too few registers.
    """

    def load() -> Loaded | None:
        compiled = function.warmup(*args, grid=grid, **COMPILE_OPTIONS, **options)
        if getattr(compiled, "metadata", None) is None:
            return None
        with _lock:
            if compiled not in _loaded:
                _loaded[compiled] = _load(compiled)
            return _loaded[compiled]

    loaded: Loaded | None = built(function, args, options, load)
    return loaded


_lock: Final = threading.Lock()
_loaded: Final[weakref.WeakKeyDictionary[Any, Loaded | None]] = weakref.WeakKeyDictionary()
"""Kernels by Triton's object, which belongs to one device."""


def _load(compiled: Any) -> Loaded | None:
    facts = launch_facts(compiled) if cuda_driver.is_there() else None
    if facts is None:
        return None
    device, threads = current_device(), _WARP * facts.warps
    has = cuda_driver.shared_memory(device)
    if facts.shared > has:
        raise OutOfResources(facts.shared, has, "shared memory")
    kernel = cuda_driver.load(device, facts.binary, facts.name, facts.shared)
    if threads > kernel.most_threads:
        raise OutOfResources(threads, kernel.most_threads, "threads")
    if [*parameter_sizes(facts.signature, iter(facts.maps)), *[8 for _ in SCRATCH]] != [*kernel.parameters]:
        warnings.warn(
            f"Triton {'.'.join(map(str, release()))} gives kernels other parameters than foci knows, so Triton launches them, which takes "
            "the host longer",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return Loaded(kernel, cuda_driver.Shape(threads, facts.shared, facts.is_cooperative, facts.is_dependent), facts)


def parameter_sizes(kinds: Sequence[Any], maps: Iterator[MapFacts]) -> Iterator[int]:
    """Bytes of each parameter that arguments of these types become, without `SCRATCH`."""
    for kind in kinds:
        if isinstance(kind, tuple):
            yield from parameter_sizes(kind, maps)
        elif kind.startswith("tensordesc"):
            rank = len(next(maps).tile)
            yield from (cuda_driver.MAP_BYTES, *[4] * rank, *[8] * rank)
        elif kind != "constexpr":
            yield 8 if kind.startswith("*") else -(-int(kind.lstrip("uifpb")) // 8)


_FORMATS: Final = {"fp16": ("<e", "<H"), "fp32": ("<f", "<I"), "fp64": ("<d", "<Q")}


def bits(kind: str, number: float) -> int:
    """The bits of a number of a floating type, as an integer."""
    packed, read = _FORMATS[kind]
    whole: int = struct.unpack(read, struct.pack(packed, number))[0]
    return whole
