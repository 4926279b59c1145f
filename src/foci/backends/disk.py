"""What backends keep on disk: a folder of this user's alone, files that appear whole or not at all.

What is read here may be code that runs, so that nobody else may be able to write it, or to put another file or folder in its place.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import pwd
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = [
    "CHECKSUM", "cache_directory", "cache_limit", "cache_root", "folder_obstacle", "is_intact", "open_folder", "read_private",
    "remove_oldest", "usable_folder", "write_atomically",
]  # fmt: skip

CHECKSUM: Final = 32
"""Bytes of SHA-256 at the end of a library."""
_DEFAULT_LIMIT: Final = 1024  # MiB
_IN_USE: Final = 3600.0  # seconds after its last use during which a file stays, as a process may be about to load it


def cache_root() -> Path:
    """Where everything is kept: FOCI_CACHE_DIR, else foci under XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("FOCI_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "foci")


def cache_limit() -> int:
    """Bytes of compiled kernels that are kept: FOCI_CACHE_LIMIT in MiB, else 1024 MiB.

    Raises:
        ValueError: for a FOCI_CACHE_LIMIT that is no number of MiB.
    """
    text = os.environ.get("FOCI_CACHE_LIMIT", str(_DEFAULT_LIMIT))
    if not text.isdecimal():
        raise ValueError(f"FOCI_CACHE_LIMIT must be a number of MiB, such as {_DEFAULT_LIMIT}; got {text!r}")
    return int(text) * 2**20


def cache_directory(kind: str) -> Path | None:
    """A folder of `cache_root` for one kind of files; None if not usable.

    Made on first use, for this user alone. A folder of another user, one that others may write to, and one below a folder in which
    others may rename it, are not usable.
    """
    folder = usable_folder(cache_root() / kind)
    return folder if isinstance(folder, Path) else None


def usable_folder(path: Path) -> Path | str:
    """The folder without symbolic links on its way, made if it is missing; or why it is not usable."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = path.resolve(strict=True)
        reason = folder_obstacle(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: symbolic links in a circle
        return f"{path} cannot be made or read ({getattr(error, 'strerror', None) or error})"
    return folder if reason is None else reason


def folder_obstacle(folder: Path) -> str | None:
    """Why a folder, whose path holds no symbolic links, is not one that this user alone writes to; None if it is."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is not a folder"
    if status.st_uid != os.geteuid():
        return f"{folder} belongs to another user"
    if status.st_mode & 0o022:
        return f"others may write to {folder}"
    trusted = {0, os.geteuid(), os.stat("/").st_uid}  # in a container root may have another number: it owns the top folder
    for ancestor in folder.parents:
        status = ancestor.lstat()
        if status.st_uid not in trusted:
            return f"{ancestor} belongs to another user"
        if not status.st_mode & stat.S_ISVTX and (status.st_mode & 0o002 or (status.st_mode & 0o020 and not _is_own_group(status.st_gid))):
            return f"others may write to {ancestor}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to"


def _is_own_group(group: int) -> bool:
    """Whether this user is alone in a group, the one of the user's name that many systems give each of their users."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == user.pw_name and user.pw_gid == group and set(entry.gr_mem) <= {user.pw_name}


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


@contextlib.contextmanager
def open_folder(folder: Path) -> Iterator[int]:
    """A descriptor of a folder of this user's alone, which stays that folder whatever becomes of its path.

    Raises:
        OSError: if it is not such a folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_private(os.fstat(descriptor)):
            raise PermissionError(f"{folder} belongs to another user, or others may write to it")
        yield descriptor
    finally:
        os.close(descriptor)


def read_private(path: str | Path, folder: int | None = None) -> bytes | None:
    """A file's content, None unless it is a regular file that this user alone may write to: it is opened once, then looked at.

    Args:
        path: of the file; with `folder`, its name.
        folder: descriptor of the folder that holds it.
    """
    try:
        # without O_NONBLOCK a named pipe would wait for a writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not _is_private(status):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def is_intact(content: bytes | None) -> bool:
    """Whether a library, as the CPU backend keeps it, ends with the SHA-256 of its content."""
    return content is not None and len(content) > CHECKSUM and hashlib.sha256(content[:-CHECKSUM]).digest() == content[-CHECKSUM:]


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


def remove_oldest(folder: Path, suffix: str, limit: int) -> None:
    """Removes the files that were not used for longest until those that are left fit into `limit` bytes.

    A file's time of modification is that of its last use. A file that was used within the last hour stays.

    Args:
        folder: of the files.
        suffix: of the names of the files that count, such as ".so".
        limit: bytes.
    """
    files = []
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            if entry.name.endswith(suffix):
                status = entry.stat(follow_symlinks=False)
                files.append((status.st_mtime, status.st_size, entry.path))
    size, now = sum(size for _, size, _ in files), time.time()
    for used, bytes_of_file, path in sorted(files):
        if size <= limit or now - used < _IN_USE:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        size -= bytes_of_file
