"""Kernel packs: files of compiled kernels, built on one machine and looked up on others before anything is compiled.

A pack is a zip archive. Its `manifest.json` names the format, what the kernels were compiled for, and each entry: its key, the kernel's
name, and the SHA-256 of each of its files, which lie in the archive under `<key>/<file>`. Nothing in a pack is executed by reading it, and
no file is used whose digest differs. Two packs of the same entries have the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["SUFFIX", "BrokenPack", "Entry", "Pack", "write_pack"]

SUFFIX: Final = ".foci-kernels"
_FORMAT: Final = 1
_MANIFEST: Final = "manifest.json"
_KEY: Final = re.compile(r"[0-9a-z-]{16,128}")
_FILE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_DATE: Final = (1980, 1, 1, 0, 0, 0)  # the first that a zip archive can have, so that its bytes do not depend on the day
_MOST: Final = 2**28  # bytes of one file


class BrokenPack(ValueError):
    """A file that is no kernel pack, or one that was damaged or changed."""


class Entry(NamedTuple):
    """A compiled kernel.

    Attributes:
        key: what it was compiled from, as a digest.
        name: of the kernel.
        files: content by file name.
    """

    key: str
    name: str
    files: dict[str, bytes]


def write_pack(path: Path, kind: str, facts: Mapping[str, str], entries: Iterable[Entry]) -> int:
    """Write a pack, and return the number of its entries; of entries with one key the first is kept.

    Args:
        path: of the file, which appears whole or not at all.
        kind: "gpu" or "cpu".
        facts: what the kernels were compiled for and with, such as arch and Triton's version, by name.
        entries: the kernels.
    """
    kept: dict[str, Entry] = {}
    for entry in entries:
        kept.setdefault(entry.key, entry)
    manifest = {
        "format": _FORMAT,
        "kind": kind,
        "facts": dict(facts),
        "entries": {
            key: {"name": entry.name, "files": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(entry.files.items())}}
            for key, entry in sorted(kept.items())
        },
    }
    unfinished = path.with_name(f".{path.name}.new")
    try:
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            _put(archive, _MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
            for key, entry in sorted(kept.items()):
                for name, data in sorted(entry.files.items()):
                    _put(archive, f"{key}/{name}", data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return len(kept)


def _put(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, _DATE)
    info.compress_type, info.external_attr, info.create_system = zipfile.ZIP_DEFLATED, 0o600 << 16, 3
    archive.writestr(info, data)


class Pack:
    """A pack that is read.

    Raises:
        BrokenPack: if the file is no pack of a known format.
        OSError: if it cannot be read.

    Attributes:
        path: of the file.
        kind: "gpu" or "cpu".
        facts: what the kernels were compiled for and with.
        names: the kernel's name, by key.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        content = path.read_bytes()
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                manifest = json.loads(_read(archive, _MANIFEST))
            self.kind, self.facts, self._entries = _parse(manifest)
        except Exception as error:  # of any type: zipfile, zlib and json are given what anybody may have written
            raise BrokenPack(f"{path} is no kernel pack that this version of foci reads: {error}") from error
        self.names = {key: name for key, (name, _) in self._entries.items()}

    def entry(self, key: str) -> Entry | None:
        """The kernel of a key; None if the pack has none.

        Raises:
            BrokenPack: if one of its files is missing or has another digest.
        """
        if key not in self._entries:
            return None
        name, digests = self._entries[key]
        files: dict[str, bytes] = {}
        try:
            with zipfile.ZipFile(self.path) as archive:
                for file, digest in digests.items():
                    files[file] = _read(archive, f"{key}/{file}")
                    if hashlib.sha256(files[file]).hexdigest() != digest:
                        raise ValueError(f"{file} of {name} has another digest than the manifest says")
        except Exception as error:  # as above
            raise BrokenPack(f"{self.path} is damaged: {error}") from error
        return Entry(key, name, files)

    def verify(self) -> None:
        """Read every entry.

        Raises:
            BrokenPack: for the first that is damaged.
        """
        for key in self._entries:
            self.entry(key)


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    if info.file_size > _MOST:
        raise ValueError(f"{name} has {info.file_size} bytes")
    return archive.read(info)


def _parse(manifest: Any) -> tuple[str, dict[str, str], dict[str, tuple[str, dict[str, str]]]]:
    if manifest["format"] != _FORMAT:
        raise ValueError(f"its format is {manifest['format']!r}, not {_FORMAT}")
    entries: dict[str, tuple[str, dict[str, str]]] = {}
    for key, entry in manifest["entries"].items():
        files = {str(file): str(digest) for file, digest in entry["files"].items()}
        # names become paths in a cache
        if not _KEY.fullmatch(key) or not all(map(_FILE.fullmatch, files)):
            raise ValueError(f"it has an entry of an unknown form, {key!r}")
        entries[key] = str(entry["name"]), files
    return str(manifest["kind"]), {str(name): str(value) for name, value in manifest["facts"].items()}, entries
