"""What `foci cache` does: shows what foci keeps on disk, or removes it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from foci.backends import disk
from foci.cli.expr_parser import Unknown

__all__ = ["run_cache"]

_CONTENTS = {
    "cpu": "compiled kernels of the backend cpu",
    "triton": "schedules that foci.use(tune=True) found",
    "self_check": "verdicts on kernels under a Triton that foci was not tested with",
    "padding": "measurements of foci tune",
    "packs": "kernel packs that were imported",
    "kernels": "which GPU kernels were compiled here, for foci kernels export",
    "locks": "locks, so that a kernel is compiled once",
}


def run_cache(console: Console, *, clear: bool) -> None:
    """Shows sizes and the bound, or removes every folder that foci makes in the cache folder, and nothing else there.

    Raises:
        Unknown: for a folder that cannot be removed, and for a FOCI_CACHE_LIMIT that is no number.
    """
    root = disk.cache_root()
    sizes = {name: _measure(root / name) for name in _CONTENTS}
    total = sum(size for _, size in sizes.values())
    if clear:
        for name in _CONTENTS:
            try:
                if (root / name).exists():
                    shutil.rmtree(root / name)
            except OSError as error:
                raise Unknown(f"{root / name} cannot be removed: {error.strerror}", "--clear") from error
        console.print(f"removed {_mib(total)} from {root}", highlight=False, soft_wrap=True)
        return
    try:
        limit = disk.cache_limit()
    except ValueError as error:
        raise Unknown(str(error)) from error
    table = Table("folder", "files", "size", "content")
    for name, (count, size) in sizes.items():
        table.add_row(name, str(count), _mib(size), _CONTENTS[name])
    console.print(f"{root}: {_mib(total)}", highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"bound: {_mib(limit)} of compiled kernels (FOCI_CACHE_LIMIT, in MiB). foci then removes those that were not used for longest. "
        "The other folders hold a file of about a kilobyte for each entry and have no bound.\n"
        "Triton and Inductor keep what they compile in caches of their own.",
        highlight=False,
        soft_wrap=True,
    )


def _measure(folder: Path) -> tuple[int, int]:
    """Files below a folder, and their bytes."""
    sizes = [os.lstat(os.path.join(path, name)).st_size for path, _, names in os.walk(folder) for name in names]
    return len(sizes), sum(sizes)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
