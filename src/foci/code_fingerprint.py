"""The key under which Inductor's caches on disk hold code that foci had a part in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

__all__ = ["code_fingerprint", "hash_files"]


@cache
def code_fingerprint() -> str:
    """A digest of torch's version and of all of foci's code and tables: any module may decide what compiled code says or relies on."""
    package = Path(__file__).parent
    return hash_files(torch.__version__, (path for suffix in ("py", "json", "toml") for path in package.rglob(f"*.{suffix}")))


def hash_files(text: str, files: Iterable[Path]) -> str:
    """A digest of a text and of what files hold, whatever their order."""
    digest = hashlib.sha256(text.encode())
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()
