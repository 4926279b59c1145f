"""Kernel packs on this machine: imported ones, and those of installed wheels."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from foci.backends import disk
from foci.backends.pack_file import SUFFIX, BrokenPack, Entry, Pack

__all__ = ["entry", "forget", "imported", "packs"]

_GROUP: Final = "foci.kernel_packs"


def imported() -> list[Path]:
    """Files of the packs that were imported."""
    folder = disk.cache_directory("packs")
    return [] if folder is None else sorted(folder.glob(f"*{SUFFIX}"))


def _of_wheels() -> Iterator[Path]:
    """Files of packs in installed packages, which name themselves by an entry point in the group `foci.kernel_packs`."""
    for point in importlib.metadata.entry_points(group=_GROUP):
        with suppress(Exception):  # a broken installation keeps no kernel from compiling
            yield from sorted(Path(str(point.load().__path__[0])).glob(f"*{SUFFIX}"))


@functools.cache
def packs(kind: str) -> tuple[Pack, ...]:
    """Packs of a kind, imported ones first, as they were when this process first asked. One that is broken is left out, with a warning.

    Args:
        kind: "gpu" or "cpu".
    """
    usable_packs: list[Pack] = []
    for path in (*imported(), *_of_wheels()):
        try:
            usable_packs.append(Pack(path))
        except (BrokenPack, OSError) as error:
            warnings.warn(f"a kernel pack is not used: {error}", stacklevel=2)
    return tuple(pack for pack in usable_packs if pack.kind == kind)


def forget() -> None:
    """Look for packs anew."""
    packs.cache_clear()


def entry(kind: str, key: str) -> Entry | None:
    """A kernel by its key; None if no pack has it, or only one that is damaged, which is said."""
    for pack in packs(kind):
        try:
            kernel_entry = pack.entry(key)
        except BrokenPack as error:
            warnings.warn(f"a kernel is compiled instead of read: {error}", stacklevel=2)
            continue
        if kernel_entry is not None:
            return kernel_entry
    return None
