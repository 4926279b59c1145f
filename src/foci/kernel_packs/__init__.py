"""Kernel packs: kernels that are compiled before they are needed, on this machine or on another.

`foci kernels` on the command line does what the functions here do. A pack of GPU kernels is built without a GPU, for one architecture and
one release of Triton; one of CPU kernels for the processor that it is built on. foci looks a kernel up in all imported packs and in packs
that installed wheels bring, before it compiles it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from foci.backends import disk, installed_packs
from foci.backends.compile_priority import wait_for_background
from foci.backends.pack_file import SUFFIX, BrokenPack, Entry, Pack, write_pack
from foci.errors import ArgumentError

__all__ = ["BrokenPack", "Built", "Pack", "build", "clear", "export", "import_pack", "installed", "warm"]


def __dir__() -> list[str]:
    return sorted(__all__)


class Built(NamedTuple):
    """A pack that was written.

    Attributes:
        path: of the file.
        kernels: number of kernels in it.
    """

    path: Path
    kernels: int


def build(arch: str, path: str | os.PathLike[str] | None = None, *, select: str = "common", jobs: int | None = None) -> Built:
    """Compile the kernels of common problems into a pack. No GPU is needed, and nothing that was compiled before is used.

    Args:
        arch: `sm_80`, `sm_90` or another compute capability from 8.0 on, or `cpu` for this machine's processor.
        path: of the pack; `foci-<arch>.foci-kernels` in the current folder by default.
        select: `common` for all common problems, or words that occur in the names of the wanted ones, separated by commas, such as
            `causal D 64 bfloat16`.
        jobs: processes that compile side by side; one for each CPU by default.

    Returns:
        Path and number of kernels.

    Raises:
        ArgumentError: for an unknown arch, or a `select` that no problem's name holds.
        RuntimeError: if a process fails.
    """
    from foci.kernel_packs.offline import compile_common

    pack_path = Path(path) if path is not None else Path(f"foci-{arch}{SUFFIX}")
    folder = Path(tempfile.mkdtemp(prefix="foci-kernels-"))
    try:
        compile_common(arch, select, folder, jobs or len(os.sched_getaffinity(0)))
        return _write(pack_path, arch, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def export(path: str | os.PathLike[str], arch: str) -> Built:
    """Write the kernels that this machine has compiled for an architecture, and still keeps, into a pack.

    Args:
        path: of the pack.
        arch: such as `sm_90`, or `cpu`.

    Raises:
        ArgumentError: for an unknown arch, or if nothing is kept for it.
    """
    from foci.kernel_packs.offline import check_arch

    check_arch(arch)
    return _write(Path(path), arch, disk.cache_root())


def _write(path: Path, arch: str, cache: Path) -> Built:
    """Write what a cache folder has for an architecture."""
    if arch == "cpu":
        facts, entries = {"arch": "cpu"}, _libraries(cache / "cpu")
    else:
        from foci.backends.gpu import kernel_store

        number = int(arch.removeprefix("sm_"))
        facts, entries = kernel_store.facts(number), [entry for of, entry in kernel_store.noted(cache / "kernels") if of == number]
    if not entries:
        raise ArgumentError(f"nothing that foci compiled for {arch} is kept in {cache}; run what needs its kernels first")
    return Built(path, write_pack(path, "cpu" if arch == "cpu" else "gpu", facts, entries))


def _libraries(folder: Path) -> list[Entry]:
    """The CPU backend's libraries in a cache folder. A name says by digests for which flags and processor."""
    entries = []
    for path in sorted(folder.glob("*.so")):
        content = disk.read_private(path)
        if content is not None and disk.is_intact(content):
            entries.append(Entry(path.stem, "CPU kernel", {path.name: content}))
    return entries


def import_pack(path: str | os.PathLike[str]) -> Pack:
    """Take a pack into the cache folder, where foci looks its kernels up. Every file in it is checked first.

    A pack holds code that your programs will run: import packs of people whom you trust.

    Args:
        path: of the pack.

    Raises:
        BrokenPack: if it is no pack, or damaged.
        ArgumentError: if there is no folder to keep it in.
    """
    pack = Pack(Path(path))
    pack.verify()
    folder = disk.cache_directory("packs")
    if folder is None:
        raise ArgumentError(f"{disk.cache_root() / 'packs'} cannot be used; set FOCI_CACHE_DIR to a folder of your own")
    kept = folder / f"{Path(path).name.removesuffix(SUFFIX)}{SUFFIX}"
    disk.write_atomically(kept, Path(path).read_bytes())
    installed_packs.forget()
    return Pack(kept)


def installed() -> list[Pack]:
    """The packs in which foci looks kernels up."""
    return [*installed_packs.packs("gpu"), *installed_packs.packs("cpu")]


def clear() -> list[Path]:
    """Remove all imported packs, and return their paths. Packs of wheels go with `pip uninstall`."""
    paths = installed_packs.imported()
    for path in paths:
        path.unlink(missing_ok=True)
    installed_packs.forget()
    return paths


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """Compile ahead what calls inside the block need: run one step of a program in it before the program starts to serve or to train.

    Calls run as always. At the end of the block also the kernels are compiled that foci compiles in the background, those of backward
    passes and of other lengths, so that nothing compiles later for the same problems. Other processes of the machine find them on disk.

    Example:
        >>> import torch, foci, foci.kernel_packs
        >>> query = torch.randn(1, 2, 16, 8)
        >>> with foci.kernel_packs.warm():
        ...     out = foci.attention(query, query, query)
    """
    yield
    import sys

    compiling = sys.modules.get("foci.backends.gpu.compiling")  # not imported where no GPU kernel was needed
    if compiling is not None:
        wait_for_background()
        compiling.wait_for_ahead()
