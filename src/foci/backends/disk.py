"""What backends keep on disk: a folder of this user's alone, files that appear whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

__all__ = ["cache_directory", "cache_root", "is_private", "write_atomically"]


def cache_root() -> Path:
    """Where everything is kept: FOCI_CACHE_DIR, else foci under XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("FOCI_CACHE_DIR")
    if chosen is not None:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "foci")


def cache_directory(kind: str) -> Path | None:
    """A folder of `cache_root` for one kind of files; None if not usable.

    Made on first use, for this user alone. A folder of another user, or one that others may write to, is not usable.
    """
    directory = cache_root() / kind
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return directory if is_private(directory) and os.access(directory, os.W_OK | os.X_OK) else None


def is_private(path: Path) -> bool:
    """Whether this user owns the file or folder and nobody else may write to it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return not stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that other processes see whole or not at all.

    Raises:
        OSError: if it cannot be written.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
