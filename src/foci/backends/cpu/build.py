"""Compiles C++ sources once and loads them: from memory, from a cache on disk, or with the system's compiler.

A library's name in the cache holds hashes of everything that decides its content: of source, headers, flags and CPU, and of every
macro that the compiler defines for it, which names its version and instruction sets. By the first part alone a library is found
where its compiler is gone. Files appear by an atomic rename, so any number of processes may build at once; each carries its own
checksum, and one that is damaged, or that another user could have written, is never loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from foci.backends import disk, installed_packs
from foci.backends.compile_lock import compiling, locked
from foci.backends.contract import Unbuildable
from foci.compat.releases import OLDEST_GXX

__all__ = [
    "CompileError", "Toolchain", "cache_directory", "flags", "has_libraries", "is_kept", "load", "obstacle", "toolchain",
]  # fmt: skip

HEADERS: Final = Path(__file__).parent / "include"
_FLAGS: Final = (
    "-std=c++17", "-O2", "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast", "-fno-exceptions", "-fno-rtti", "-w",
    # a quarter of the time to compile, and nothing that the kernels gain from
    "-fno-tree-vrp", "-fno-tree-pre", "-fno-tree-slp-vectorize", "-fno-ipa-cp", "-fno-ipa-icf",
)  # fmt: skip
_HEX_DIGITS: Final = 64  # hex digits of SHA-256
_TIMEOUT: Final = 300.0
_LITTER_AGE: Final = 3600.0  # seconds after which an unfinished file is removed


class CompileError(Unbuildable):
    """A generated kernel could not be compiled, cached or loaded. The message begins with the cause; the compiler's full output and the
    generated source follow."""


@dataclass(frozen=True)
class Toolchain:
    """A compiler that can build kernels here.

    Attributes:
        path: of the compiler.
        version: what it calls itself.
        fingerprint: hash of all macros that it defines, for this CPU and these flags.
    """

    path: str
    version: str
    fingerprint: str


def flags() -> tuple[str, ...]:
    """Flags of every build. FOCI_CPU_ARCH replaces `native` as the architecture, such as x86-64-v3 for AVX2."""
    return (*_FLAGS, f"-march={os.environ.get('FOCI_CPU_ARCH', 'native')}")


def _command() -> tuple[str, ...] | str:
    """The compiler to try: FOCI_CXX, else g++, else c++. Or what is wrong with FOCI_CXX."""
    return _chosen(os.environ.get("FOCI_CXX"), os.environ.get("PATH"))


@functools.lru_cache(maxsize=16)
def _chosen(named: str | None, path: str | None) -> tuple[str, ...] | str:
    try:
        words = tuple(shlex.split(named or ""))
    except ValueError as error:
        return f"no C++ compiler: FOCI_CXX is {named!r}, which is no command ({error}); name one, such as g++-12"
    return words or (("g++",) if shutil.which("g++", path=path) else ("c++",))


def obstacle() -> str | None:
    """Why kernels cannot be built here, or None."""
    compiler = toolchain()
    return compiler if isinstance(compiler, str) else None


def toolchain() -> Toolchain | str:
    """The compiler, or why there is none."""
    command = _command()
    return command if isinstance(command, str) else _probe(command, flags())


@functools.lru_cache(maxsize=16)
def _probe(command: tuple[str, ...], options: tuple[str, ...]) -> Toolchain | str:
    path = shutil.which(command[0])
    if path is None:
        return f"no C++ compiler: {command[0]} was not found; install g++ {OLDEST_GXX} or later, or name one in FOCI_CXX"
    remembered = _remembered_probe(command, options)
    content = None if remembered is None else disk.read_private(remembered)
    lines = [] if content is None else content.decode(errors="replace").splitlines()
    if len(lines) == 2 and len(lines[1]) == _HEX_DIGITS:
        return Toolchain(path, *lines)
    compiler = _ask(path, command, options)
    if isinstance(compiler, Toolchain) and remembered is not None:
        with contextlib.suppress(OSError):  # it is asked again
            disk.write_atomically(remembered, f"{compiler.version}\n{compiler.fingerprint}\n".encode())
    return compiler


def _run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT, check=False
    )


def _ask(path: str, command: tuple[str, ...], options: tuple[str, ...]) -> Toolchain | str:
    """Runs the compiler for its macros."""
    try:
        ran = _run([*command, *(o for o in options if o != "-shared"), "-dM", "-E", "-x", "c++", os.devnull])
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the C++ compiler {path} does not run: {error}"
    if ran.returncode != 0:
        return f"the C++ compiler {path} does not take the flags {' '.join(options)}: {ran.stderr.strip()[:300]}"
    macros = dict(line.removeprefix("#define ").partition(" ")[::2] for line in ran.stdout.splitlines())
    version, major = macros.get("__VERSION__", "unknown").strip('"'), macros.get("__GNUC__", "")
    if "__clang__" in macros or not major.isdecimal() or int(major) < OLDEST_GXX:
        return f"the C++ compiler {path} is {version}; the CPU backend needs g++ {OLDEST_GXX} or later (name one in FOCI_CXX)"
    return Toolchain(path, version, hashlib.sha256(ran.stdout.encode()).hexdigest())


def _remembered_probe(command: tuple[str, ...], options: tuple[str, ...]) -> Path | None:
    """The file that remembers what a compiler said: asking costs more than loading a cached kernel."""
    directory = cache_directory()
    if directory is None:
        return None
    programs = []
    for word in command:  # a compiler behind another program is a word of its own
        path = os.path.realpath(shutil.which(word) or "/")
        with contextlib.suppress(OSError):
            status = os.stat(path)
            programs.append((path, status.st_mtime_ns, status.st_size))
    facts = (command, options, programs, _cpu_flags())
    return directory / f"compiler-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.txt"


@functools.lru_cache(maxsize=1)
def _cpu_flags() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            head = file.read(8192)
    except OSError:
        return " ".join(os.uname())
    wanted = ("flags", "Features", "model", "cpu family", "vendor_id", "CPU part")
    return "\n".join(dict.fromkeys(line for line in head.splitlines() if line.startswith(wanted)))


# Cache on disk ---------------------------------------------------------------------------------------------------------


def cache_directory() -> Path | None:
    """The folder of compiled kernels, None if not usable: see `foci.backends.disk.cache_directory`."""
    return disk.cache_directory("cpu")


@functools.lru_cache(maxsize=1)
def _temporary_directory() -> Path:
    directory = tempfile.mkdtemp(prefix="foci-")
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(directory, ignore_errors=True) if os.getpid() == owner else None)
    reason = disk.usable_folder(disk.cache_root() / "cpu")
    warnings.warn(
        f"{reason if isinstance(reason, str) else f'{reason} takes no new files'}, so compiled kernels live in a temporary folder of this "
        "process; set FOCI_CACHE_DIR to a folder of your own",
        stacklevel=2,
    )
    return Path(directory)


def _is_intact(path: Path) -> bool:
    """Whether a library is this user's and its checksum is right."""
    return disk.is_intact(disk.read_private(path))


def _sweep(directory: Path) -> None:
    """Remove leftovers of processes that were killed while they built: folders without a lock holder, and old files."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(directory)):
            path = directory / entry.name
            with contextlib.suppress(OSError):
                if entry.name.startswith(".build-"):
                    with _locked(path):
                        shutil.rmtree(path, ignore_errors=True)
                elif entry.name.startswith((".new-", ".begun-")) and time.time() - entry.stat(follow_symlinks=False).st_mtime > _LITTER_AGE:
                    shutil.rmtree(path) if entry.is_dir(follow_symlinks=False) else path.unlink()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a folder's lock, which ends with the process.

    Raises:
        OSError: if another process has it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _build_folder(parent: Path) -> Iterator[Path]:
    """A folder that is removed in the end, here or by the next process that builds. Its name says so only once it is locked."""
    begun = Path(tempfile.mkdtemp(dir=parent, prefix=".begun-"))
    folder = parent / begun.name.replace(".begun-", ".build-")
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # where there are no locks, it goes by its age
                stack.enter_context(_locked(begun))
                begun.rename(folder)
            yield folder if folder.exists() else begun
    finally:
        for path in (begun, folder):
            shutil.rmtree(path, ignore_errors=True)


# Building --------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _headers_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(HEADERS.rglob("*.h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


_loaded: dict[str, ctypes.CDLL] = {}
_failed: dict[str, str] = {}
_building: dict[str, Future[ctypes.CDLL]] = {}
_loading = threading.Lock()


def _after_fork() -> None:
    # the threads that had the lock, or compile, are not in the child
    global _loading
    _loading = threading.Lock()
    _building.clear()


os.register_at_fork(after_in_child=_after_fork)


def _stem(source: str) -> str:
    """The part of a library's name that no compiler is needed for."""
    options = flags()
    cpu = _cpu_flags() if any("native" in option for option in options) else ""
    return hashlib.sha256("\0".join((source, _headers_hash(), cpu, *options)).encode()).hexdigest()[:32]


def _names(stem: str, compiler: Toolchain | str, directory: Path) -> Iterator[str]:
    """Names of the libraries that will do: the compiler's own, or whose ever, where there is none."""
    if isinstance(compiler, Toolchain):
        yield f"{stem}-{compiler.fingerprint[:16]}.so"
    else:
        yield from sorted(path.name for path in directory.glob(f"{stem}-*.so"))


def has_libraries() -> bool:
    """Whether the cache or a kernel pack holds any."""
    directory = cache_directory()
    return directory is not None and (next(directory.glob("*.so"), None) is not None or bool(installed_packs.packs("cpu")))


def is_kept(source: str) -> bool:
    """Whether a translation unit's library can be loaded without a compiler."""
    directory, stem = cache_directory(), _stem(source)
    if stem in _loaded or _keys_of_packs(stem):
        return True
    return directory is not None and any(_is_intact(directory / name) for name in _names(stem, "", directory))


def load(source: str) -> ctypes.CDLL:
    """Load the library of a translation unit, and compile it first unless it is cached. Calls through it release the GIL.

    Raises:
        CompileError: if there is no compiler and none in the cache, or it cannot be compiled, kept or loaded; again at once where that
            was so before.
    """
    compiler, stem = toolchain(), _stem(source)
    key = stem if isinstance(compiler, str) else stem + compiler.fingerprint
    with _loading:
        if key in _loaded:
            return _loaded[key]
        if key in _failed:
            raise CompileError(_failed[key])
        begun = _building.get(key)
        future = _building[key] = Future() if begun is None else begun
    if begun is not None:
        return begun.result()
    try:
        library = _loaded[key] = _find(source, stem, compiler)
    except (CompileError, OSError) as error:
        failure = error if isinstance(error, CompileError) else CompileError(f"{error}: a generated kernel could not be built or loaded")
        _failed[key] = str(failure)
        future.set_exception(failure)
        raise failure from (None if failure is error else error)
    except BaseException as error:  # interrupted: the next caller begins anew
        future.set_exception(error)
        raise
    else:
        future.set_result(library)
        return library
    finally:
        _building.pop(key, None)


def _find(source: str, stem: str, compiler: Toolchain | str) -> ctypes.CDLL:
    """From the cache, else from a kernel pack, else compiled, in the cache or in a temporary folder."""
    cache = cache_directory()
    library = None if cache is None else _find_kept(stem, compiler, cache)
    if library is not None:
        return library
    if isinstance(compiler, str):
        raise CompileError(compiler)
    name = f"{stem}-{compiler.fingerprint[:16]}.so"
    with compiling("a kernel for the CPU"), locked(name):
        library = None if cache is None else _open(cache, [name])  # another process has compiled it meanwhile
        return _compile_into(source, name, cache, compiler) if library is None else library


def _find_kept(stem: str, compiler: Toolchain | str, cache: Path) -> ctypes.CDLL | None:
    """From the cache, or from a kernel pack by way of the cache."""
    library = _open(cache, list(_names(stem, compiler, cache)))
    if library is not None:
        return library
    for key in _keys_of_packs(stem):
        kept, entry = _open(cache, [f"{key}.so"]), installed_packs.entry("cpu", key)
        with contextlib.suppress(OSError, KeyError):
            if kept is None and entry is not None:
                disk.write_atomically(cache / f"{key}.so", entry.files[f"{key}.so"])
                kept = _open(cache, [f"{key}.so"])
        if kept is not None:
            return kept
    return None


def _keys_of_packs(stem: str) -> list[str]:
    return [key for pack in installed_packs.packs("cpu") for key in pack.names if key.startswith(f"{stem}-")]


def _compile_into(source: str, name: str, cache: Path | None, compiler: Toolchain) -> ctypes.CDLL:
    content = _compile(source, cache or _temporary_directory(), compiler)
    for directory in (cache, None):
        folder = directory or _temporary_directory()
        with contextlib.suppress(OSError):  # a folder has the name, or there is no room
            disk.write_atomically(folder / name, content)
            disk.remove_oldest(folder, ".so", disk.cache_limit())
            library = _open(folder, [name])
            if library is not None:
                return library
    raise CompileError(f"a compiled kernel could be kept neither in {cache} nor in {_temporary_directory()}")


def _open(folder: Path, names: list[str]) -> ctypes.CDLL | None:
    """Load the first intact library of these names. It is checked and loaded through the folder's descriptor, so that it cannot be
    exchanged in between."""
    if not names:
        return None
    with disk.open_folder(folder) as descriptor:
        by_descriptor = Path(f"/proc/self/fd/{descriptor}")
        for name in names:
            with contextlib.suppress(OSError):  # it is not there, or the folder is read-only: then nothing is removed from it either
                os.utime(name, dir_fd=descriptor, follow_symlinks=False)
            if disk.is_intact(disk.read_private(name, descriptor)):
                path = by_descriptor / name if by_descriptor.exists() else folder / name
                return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    return None


def _compile(source: str, directory: Path, compiler: Toolchain) -> bytes:
    """The library's content, its checksum at the end."""
    command = _command()
    assert not isinstance(command, str)
    _sweep(directory)
    with _build_folder(directory) as folder:
        unit, library = folder / "kernel.cc", folder / "kernel.so"
        unit.write_text(source, encoding="utf-8")
        try:
            ran = _run([*command, *flags(), f"-I{HEADERS}", str(unit), "-o", str(library)])
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"the C++ compiler {compiler.path} did not finish: {error}") from error
        if ran.returncode != 0:
            complaint = ran.stderr.strip()[:4000]
            cause = f"{_find_cause(complaint)}: the C++ compiler {compiler.path} ({compiler.version}) failed on a generated kernel"
            raise CompileError(f"{cause}\n{complaint}\n\nThe generated source:\n{source}")
        content = library.read_bytes()
    return content + hashlib.sha256(content).digest()


def _find_cause(complaint: str) -> str:
    """The line of a compiler's complaint that says what is wrong."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()] or ["no word of what is wrong"]
    return next((line.partition("error:")[2].strip() for line in lines if "error:" in line), lines[-1])[:200]
