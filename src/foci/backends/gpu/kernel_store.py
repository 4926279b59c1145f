"""Compiled GPU kernels by what they mean: looked up in kernel packs before Triton compiles, and noted for packs to come.

Triton's own key of a kernel holds a digest of Triton's files, and the wheels of one release for two releases of Python differ in these.
The key here is made of the kernel's source and arguments, the target, the options, and Triton's version. What a pack has is put into
Triton's cache on disk under Triton's key, where Triton finds it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from foci.backends import disk, installed_packs
from foci.backends.pack_file import Entry
from foci.compat.triton import KernelSource, cached_files, keep_files

__all__ = ["facts", "is_empty", "meaning", "note", "noted", "restore"]

_KINDS: Final = ("cubin", "json")
"""Files of a compiled kernel that a launch needs."""
_MOST_NOTED: Final = 8 * 2**20  # bytes, of some twenty thousand kernels


def meaning(made_of: KernelSource) -> str:
    """The key of a kernel: a digest of everything that decides its code."""
    parts = (_triton(), made_of.source_hash, *map(str, made_of.target), made_of.options_hash)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def _triton() -> str:
    return importlib.metadata.version("triton").partition("+")[0]


def facts(arch: int) -> dict[str, str]:
    """Return what a pack of kernels that are compiled here says of itself."""
    return {"arch": f"sm_{arch}", "triton": _triton()}


def is_empty() -> bool:
    """Whether nothing is kept on this machine: no pack, and no kernel that was compiled here."""
    folder = disk.cache_directory("kernels")
    return not installed_packs.packs("gpu") and (folder is None or not any(folder.glob("*.json")))


def restore(made_of: KernelSource) -> bool:
    """Put the kernel into Triton's cache, if a pack has it and Triton's cache has not. Whether it is there now."""
    if cached_files(made_of):
        return True
    entry = installed_packs.entry("gpu", meaning(made_of)) if installed_packs.packs("gpu") else None
    if entry is not None:
        keep_files(made_of, entry.files)
    return entry is not None


def note(made_of: KernelSource) -> None:
    """Note a kernel that was compiled here, for `foci kernels list` and `export`: by its meaning, where Triton keeps it."""
    folder = disk.cache_directory("kernels")
    path = None if folder is None else folder / f"{meaning(made_of)}.json"
    if path is not None and not path.exists():
        line = {"name": made_of.name, "arch": made_of.target[1], "triton": _triton(), "files": cached_files(made_of)}
        with suppress(OSError):
            disk.write_atomically(path, json.dumps(line).encode())
            disk.remove_oldest(path.parent, ".json", _MOST_NOTED)


def noted(folder: Path) -> Iterator[tuple[int, Entry]]:
    """Architecture and kernel, of those that this release of Triton compiled and that are still kept.

    Args:
        folder: that `note` wrote to, in the cache folder of those who compiled.
    """
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError, KeyError):
            line = json.loads(path.read_text())
            if line["triton"] != _triton():
                continue
            files = {name: Path(file) for name, file in line["files"].items() if name.rpartition(".")[2] in _KINDS}
            yield line["arch"], Entry(path.stem, line["name"], {name: _portable(name, file.read_bytes()) for name, file in files.items()})


def _portable(name: str, content: bytes) -> bytes:
    """A file without what holds for this machine alone: Triton's own key of the kernel, and where its libraries lie."""
    if not name.endswith(".json"):
        return content
    return json.dumps({**json.loads(content), "hash": "", "extern_libs": []}, sort_keys=True).encode()
