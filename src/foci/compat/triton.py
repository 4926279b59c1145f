"""Triton's releases, and what foci reads of Triton that is not public. Nothing here imports Triton before it is asked.

Each function has a way by public means: where a release looks other than the known ones, it gives None, and launches go through
Triton's own launcher.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import types
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from foci.compat.lookup import find

__all__ = ["COMPILE_OPTIONS", "TESTED", "Bottom", "async_compile_mode", "bottom_of", "release", "untested_release"]

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
    found = next((feature.removeprefix("triton-") for feature in features if feature.startswith("triton-")), None)
    return None if found in {f"{major}.{minor}" for major, minor in TESTED} else found


@functools.cache
def async_compile_mode() -> ContextVar[Any] | None:
    """The context variable with the asynchronous compiler that Triton uses; None where Triton has no such variable."""
    found: ContextVar[Any] | None = find(
        "triton.runtime._async_compile.active_mode", without="compiles new kernels one after the other", seen=("3.6", "3.9")
    )
    return found


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


def bottom_of(compiled: Any) -> Bottom | None:
    """The bottom of a compiled kernel's launcher; None where that does not look as in a known release, or needs scratch memory."""
    launcher = compiled.run
    run: Any = getattr(launcher, "launch", None)
    metadata: list[Any] = []
    if isinstance(run, types.FunctionType) and run.__closure__:
        around = dict(zip(run.__code__.co_freevars, (cell.cell_contents for cell in run.__closure__), strict=True))
        run, metadata = around.get("launcher"), list(around.get("tensordesc_meta") or ())
    if not callable(run) or launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
        return None
    found, switches = release(), (launcher.launch_cooperative_grid, launcher.launch_pdl)
    unwatched = (None, None, None)
    if found not in TESTED:
        return None
    if found == (3, 6):
        return Bottom(run, metadata, _make_map, (*switches, None, None, compiled.packed_metadata, *unwatched), are_packed=False)
    facts = (getattr(launcher, "arg_annotations", None), getattr(launcher, "kernel_signature", None))
    if None in facts:
        return None
    # hooks, then no scratch memory
    settings = (*switches, compiled.packed_metadata, *unwatched, None, None, *facts)
    return Bottom(run, metadata, _make_map if found == (3, 7) else _make_map_of_three, settings, are_packed=True)


def _make_map(described: Any, metadata: Any) -> list[Any]:
    from triton.backends.nvidia import driver

    made: list[Any] = driver.make_tensordesc_arg(described, metadata)
    return made


def _make_map_of_three(described: Any, metadata: Any) -> list[Any]:
    """The same from Triton 3.8 on, whose function also takes what precedes a launch's arguments and does not read it."""
    from triton.backends.nvidia import driver

    made: list[Any] = driver.make_tensordesc_arg(described, metadata, ())
    return made
