"""Triton's releases, and what foci reads of Triton that is not public. Nothing here imports Triton before it is asked.

Each function has a way by public means: where a release looks other than the known ones, it gives None, and Triton launches kernels.
"""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Final, NamedTuple

from foci.compat.lookup import find

__all__ = [
    "COMPILE_OPTIONS",
    "TESTED",
    "KernelSource",
    "LaunchFacts",
    "MapFacts",
    "async_compile_mode",
    "cached_files",
    "defer_driver",
    "digest_triton",
    "keep_files",
    "kernel_source",
    "launch_facts",
    "ptxas_version",
    "release",
    "untested_release",
]

TESTED: Final = ((3, 6), (3, 7), (3, 8), (3, 9))
"""Releases whose kernels were run and timed on a GPU."""

COMPILE_OPTIONS: Final = {"enable_fp_fusion": True}
"""Options of every launch: a product and a sum are one instruction. Triton 3.9 warns where nobody says so, and 3.10 changes the default."""


@functools.cache
def release() -> tuple[int, int]:
    """The installed release of Triton; (0, 0) where there is none."""
    if importlib.util.find_spec("triton") is None:
        return (0, 0)
    major, minor = importlib.metadata.version("triton").split(".")[:2]
    return int(major), int(minor)


def untested_release(features: Collection[str]) -> str | None:
    """The release that a target's features name, such as "3.10" for "triton-3.10"; None for a tested one, or if they name none."""
    version = next((feature.removeprefix("triton-") for feature in features if feature.startswith("triton-")), None)
    return None if version in {f"{major}.{minor}" for major, minor in TESTED} else version


@functools.cache
def async_compile_mode() -> ContextVar[Any] | None:
    """The context variable with the asynchronous compiler that Triton uses; None where Triton has no such variable."""
    active_mode: ContextVar[Any] | None = find(
        "triton.runtime._async_compile.active_mode", without="compiles new kernels one after the other", seen=("3.6", "3.9")
    )
    return active_mode


@functools.cache
def digest_triton() -> str | None:
    """Triton's digest of its own files: part of the cache key of every kernel. None where it has no such name.

    One of the files is a library of 400 MB, which takes Triton a third of a second to read. The record of an installed wheel has that
    file's digest.
    """
    digest = find(
        "triton.runtime.cache.triton_key", without="lets a process's first kernel wait for a digest of Triton's files", seen=("3.6", "3.9")
    )
    if digest is None:
        return None
    with suppress(Exception):  # something is not where these releases have it
        library = _recorded_library() if release() in TESTED else None
        if library is not None:
            return _digest_files(library)
    return str(digest())


def _digest_files(library: str) -> str:
    """`triton_key` of Triton 3.6 to 3.9, given the digest of the library."""
    import triton
    from triton.runtime import cache

    root = Path(triton.__file__).parent

    def digests(folder: str) -> list[str]:
        found = pkgutil.walk_packages([str(root / folder)], prefix=f"triton.{folder}.")
        return [_sha256(each.module_finder.find_spec(each.name, None).origin) for each in found]  # type: ignore[union-attr, arg-type]

    parts = [_sha256(cache.__file__), *digests("compiler"), *digests("backends"), library, *digests("language")]
    return f"{triton.__version__}{'-'.join(parts)}"


def _sha256(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _recorded_library() -> str | None:
    """SHA-256 of Triton's library as its installed wheel records it; None where no record has it, or the file was written after the record,
    as one is that somebody built anew."""
    import triton

    library = Path(triton.__file__).parent / "_C" / "libtriton.so"
    wheel = distribution("triton")
    rows = {row[0]: row[1:] for row in csv.reader((wheel.read_text("RECORD") or "").splitlines()) if len(row) == 3}
    digest, size = rows.get("triton/_C/libtriton.so", ("", ""))
    record = next((name for name in rows if name.endswith(".dist-info/RECORD")), None)
    if record is None or not digest.startswith("sha256=") or not library.samefile(str(wheel.locate_file("triton/_C/libtriton.so"))):
        return None
    status, written = library.stat(), Path(str(wheel.locate_file(record))).stat().st_mtime_ns
    is_that = status.st_size == int(size) and status.st_mtime_ns <= written
    return base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "=").hex() if is_that else None


def assume_digest(digest: str | None) -> None:
    """Have Triton take over the digest of its own files that another process computed; None leaves it alone."""
    from triton.runtime import cache

    if digest is not None and hasattr(cache, "triton_key"):
        cache.triton_key = lambda: digest


def ptxas_version(arch: int) -> None:
    """Have Triton find the version of ptxas for an architecture, which it keeps: part of the cache key of every kernel."""
    name = "triton.backends.nvidia.compiler.get_ptxas_version"
    version = find(name, without="lets a process's first kernel wait for the version of ptxas", seen=("3.6", "3.9"))
    if version is not None:
        version(arch)


def defer_driver() -> None:
    """Have Triton's driver compile its C code when that is first asked for: for launches that Triton makes. foci's kernels need none of it.

    Nothing changes where Triton has a driver already, would choose another than NVIDIA's, or is of another release than these.
    """
    with suppress(Exception):  # something is not where these releases have it
        from triton.backends import backends
        from triton.runtime import driver

        if driver._active is not None or driver._default is not None or release() not in TESTED:
            return
        active = [name for name, backend in backends.items() if backend.driver.is_active()]
        if active == ["nvidia"] and os.environ.get("TRITON_DEFAULT_BACKEND", "nvidia") == "nvidia":
            driver.set_active(_late_driver())


def _late_driver() -> Any:
    """Triton's driver for NVIDIA's GPUs, but for what it compiles."""
    from triton.backends.driver import GPUDriver
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    class LateDriver(CudaDriver):  # type: ignore[misc]
        def __init__(self) -> None:
            GPUDriver.__init__(self)

        @functools.cached_property
        def utils(self) -> Any:
            return CudaUtils()

        @property
        def launcher_cls(self) -> Any:
            _ = self.utils  # launchers read what it leaves in its module
            return CudaLauncher

    return LateDriver()


class MapFacts(NamedTuple):
    """How a kernel reads tiles of a tensor, in numbers of NVIDIA's driver."""

    dtype: int
    item_bytes: int
    tile: tuple[int, ...]
    swizzle: int


class LaunchFacts(NamedTuple):
    """Facts about the launches of a compiled kernel.

    Attributes:
        name: of the kernel in its binary.
        binary: the cubin.
        warps: of a program.
        shared: bytes of shared memory of a program.
        is_cooperative: all programs run at once.
        is_dependent: it may start before the kernel before it in the stream has ended.
        signature: the type of each argument; "constexpr" for one of which the kernel takes nothing, a tuple for another tuple.
        maps: of its tensor descriptors, in order. Each is passed as a tensor map, lengths and strides.
    """

    name: str
    binary: bytes
    warps: int
    shared: int
    is_cooperative: bool
    is_dependent: bool
    signature: tuple[Any, ...]
    maps: tuple[MapFacts, ...]


def launch_facts(compiled: Any) -> LaunchFacts | None:
    """Return the facts about a compiled kernel's launches; None for one that needs more, for a release that does not state them, and where
    someone watches kernels being loaded, or has given Triton another driver than NVIDIA's."""
    from triton import knobs
    from triton.runtime import driver

    try:
        from triton.backends.nvidia.driver import CudaDriver

        if not isinstance(driver.active, CudaDriver):
            return None
        m, hooks = compiled.metadata, (knobs.runtime.kernel_load_start_hook, knobs.runtime.kernel_load_end_hook)
        if m.instrumentation_mode or any(getattr(chain, "calls", chain) for chain in hooks):
            return None
        maps = [_map_facts(**facts) for facts in m.tensordesc_meta or ()]
        if m.target.backend != "cuda" or m.num_ctas != 1 or m.global_scratch_size or m.profile_scratch_size:
            return None
        if m.shared > _MOST_SHARED or (m.tmem_size or 0) > _MOST_TENSOR_MEMORY:
            return None
        switches = bool(m.launch_cooperative_grid), bool(m.launch_pdl)
        signature = tuple(map(_kind, compiled.src.signature.values()))
        if _count_descriptors(signature) != len(maps):
            return None
        return LaunchFacts(m.name, compiled.asm["cubin"], m.num_warps, m.shared, *switches, signature, (*maps,))
    except (ImportError, AttributeError, KeyError, TypeError):
        return None


_MOST_SHARED: Final = 228 * 1024
_MOST_TENSOR_MEMORY: Final = 512
"""Launches of kernels that ask for more need settings of their own, which Triton makes, or are refused by it."""


def _count_descriptors(signature: tuple[Any, ...]) -> int:
    parts = (_count_descriptors(kind) if isinstance(kind, tuple) else kind.startswith("tensordesc") for kind in signature)
    return sum(parts)


def _kind(kind: Any) -> Any:
    """A type of a signature, where a tuple of which the kernel takes nothing is not taken apart."""
    if not isinstance(kind, tuple):
        return kind
    kinds = tuple(map(_kind, kind))
    return kinds if any(part != "constexpr" for part in kinds) else "constexpr"


def _map_facts(
    swizzle: int, elem_size: int, elem_type: int, block_size: Sequence[int], fp4_padded: bool, is_im2col: bool = False
) -> MapFacts:  # fmt: skip
    """The facts of a tensor descriptor by Triton's names.

    Raises:
        TypeError: for a name that is new, or a tensor that is described in another way.
    """
    if fp4_padded or is_im2col:
        raise TypeError("neither padded nor of images")
    return MapFacts(_TYPES_OF_MAPS.get(elem_type, elem_type), elem_size, tuple(block_size), swizzle)


_TYPES_OF_MAPS: Final = {8: 10, 9: 8, 10: 9}
"""Types of elements that Triton numbers otherwise than the driver."""


class KernelSource(NamedTuple):
    """The source that Triton compiles a kernel from.

    Attributes:
        name: of the kernel.
        source_hash: of its source, of what it calls, and of its arguments' types and constants.
        target: kind, architecture and threads of a warp.
        options_hash: of the compiler's options.
        cache_key: Triton's own key of the kernel, which Triton's cache on disk knows by its digest.
    """

    name: str
    source_hash: str
    target: tuple[str, int, int]
    options_hash: str
    cache_key: str


def kernel_source(cache_key: str, inputs: Mapping[str, Any]) -> KernelSource | None:
    """Return what a kernel is compiled from; None where a release does not say it, or where the environment asks the compiler for something
    else.

    Args:
        cache_key: Triton's key of the kernel.
        inputs: of the compilation, by Triton's names: src, target, options and env_vars.
    """
    from triton import knobs

    try:
        src, target, options = inputs["src"], inputs["target"], inputs["options"]
        if inputs["env_vars"] or knobs.compilation.always_compile or knobs.compilation.override:
            return None
        return KernelSource(str(src.name), src.hash(), (target.backend, target.arch, target.warp_size), options.hash(), cache_key)
    except (AttributeError, KeyError):
        return None


def cached_files(source: KernelSource) -> dict[str, str]:
    """Paths of a kernel's files in Triton's cache on disk, by file name; none where it is not there."""
    paths: dict[str, str] = _find_cache(source).get_group(_metadata_name(source)) or {}
    return paths if _metadata_name(source) in paths else {}


def keep_files(source: KernelSource, files: Mapping[str, bytes]) -> None:
    """Put a kernel's files into Triton's cache on disk, the way Triton does."""
    cache = _find_cache(source)
    cache.put_group(_metadata_name(source), {name: cache.put(content, name) for name, content in files.items()})


def _find_cache(source: KernelSource) -> Any:
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(hashlib.sha256(source.cache_key.encode()).hexdigest())


def _metadata_name(source: KernelSource) -> str:
    return f"{source.name[:150]}.json"  # as Triton cuts it
