"""Triton's releases, and what foci reads of Triton that is not public. Nothing here imports Triton before it is asked.

Each function has a way by public means: where a release looks other than the known ones, it gives None, and launches go through
Triton's own launcher.
"""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import importlib.metadata
import importlib.util
import pkgutil
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Final, NamedTuple

from foci.compat.lookup import find

__all__ = [
    "COMPILE_OPTIONS",
    "TESTED",
    "Bottom",
    "KernelSource",
    "async_compile_mode",
    "cached_files",
    "digest_triton",
    "find_bottom",
    "keep_files",
    "kernel_source",
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


class Bottom(NamedTuple):
    """The compiled function that Triton's launcher calls. The Python around it doubles the cost of a small launch."""

    run: Callable[..., None]
    metadata: Sequence[Any]
    """The metadata of each tensor descriptor."""
    make_map: Callable[[Any, Any], list[Any]]
    """Makes a TMA map of a tensor descriptor and its metadata, as the first entry of a list."""
    settings: tuple[Any, ...]
    """The arguments after grid, stream and function."""
    are_packed: bool
    """Whether the kernel's arguments come as one tuple."""


def find_bottom(compiled: Any) -> Bottom | None:
    """The bottom of a compiled kernel's launcher; None where that does not look as in a known release, or needs scratch memory."""
    launcher = compiled.run
    run: Any = getattr(launcher, "launch", None)
    metadata: list[Any] = []
    if isinstance(run, types.FunctionType) and run.__closure__:
        around = dict(zip(run.__code__.co_freevars, (cell.cell_contents for cell in run.__closure__), strict=True))
        run, metadata = around.get("launcher"), list(around.get("tensordesc_meta") or ())
    if not callable(run) or launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
        return None
    version, switches = release(), (launcher.launch_cooperative_grid, launcher.launch_pdl)
    unwatched = (None, None, None)
    if version not in TESTED:
        return None
    if version == (3, 6):
        return Bottom(run, metadata, _make_map, (*switches, None, None, compiled.packed_metadata, *unwatched), are_packed=False)
    facts = (getattr(launcher, "arg_annotations", None), getattr(launcher, "kernel_signature", None))
    if None in facts:
        return None
    # hooks, then no scratch memory
    settings = (*switches, compiled.packed_metadata, *unwatched, None, None, *facts)
    return Bottom(run, metadata, _make_map if version == (3, 7) else _make_map_of_three, settings, are_packed=True)


def _make_map(described: Any, metadata: Any) -> list[Any]:
    from triton.backends.nvidia import driver

    tensor_map: list[Any] = driver.make_tensordesc_arg(described, metadata)
    return tensor_map


def _make_map_of_three(described: Any, metadata: Any) -> list[Any]:
    """Make a tensor map from Triton 3.8 on, whose function also takes what precedes a launch's arguments and does not read it."""
    from triton.backends.nvidia import driver

    tensor_map: list[Any] = driver.make_tensordesc_arg(described, metadata, ())
    return tensor_map


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
