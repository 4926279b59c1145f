"""Compiles C++ sources once and loads them: from memory, from a cache on disk, or with the system's compiler.

A library's name in the cache is the hash of everything that decides its content: source, headers, flags, and every macro
that the compiler defines for this CPU, which names its version and instruction sets. Files appear by an atomic rename, so
any number of processes may build at once; each carries its own checksum, and one that is damaged, or that another user
could have written, is never loaded.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from foci.backends import disk

__all__ = ["CompileError", "Toolchain", "cache_directory", "flags", "load", "obstacle", "toolchain"]

HEADERS: Final = Path(__file__).parent / "include"
_FLAGS: Final = (
    "-std=c++17", "-O2", "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast", "-fno-exceptions", "-fno-rtti", "-w",
    # a quarter of the time to compile, and nothing that the kernels gain from
    "-fno-tree-vrp", "-fno-tree-pre", "-fno-tree-slp-vectorize", "-fno-ipa-cp", "-fno-ipa-icf",
)  # fmt: skip
_OLDEST: Final = 12
_CHECKSUM: Final = 32  # bytes of SHA-256 at the end of a library
_TIMEOUT: Final = 300.0


class CompileError(RuntimeError):
    """The C++ compiler refused a generated kernel. The message holds its complaint and the generated source."""


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


def _command() -> tuple[str, ...]:
    """The compiler to try: FOCI_CXX, else g++, else c++."""
    return _chosen(os.environ.get("FOCI_CXX"), os.environ.get("PATH"))


@functools.lru_cache(maxsize=16)
def _chosen(named: str | None, path: str | None) -> tuple[str, ...]:
    return tuple(shlex.split(named)) if named else ("g++",) if shutil.which("g++", path=path) else ("c++",)


def obstacle() -> str | None:
    """Why kernels cannot be built here, or None."""
    found = toolchain()
    return found if isinstance(found, str) else None


def toolchain() -> Toolchain | str:
    """The compiler, or why there is none."""
    return _probe(_command(), flags())


@functools.lru_cache(maxsize=16)
def _probe(command: tuple[str, ...], options: tuple[str, ...]) -> Toolchain | str:
    path = shutil.which(command[0])
    if path is None:
        return f"no C++ compiler: {command[0]} was not found; install g++ {_OLDEST} or later, or name one in FOCI_CXX"
    remembered = _remembered_probe(path, command, options)
    if remembered is not None and remembered.is_file() and disk.is_private(remembered):
        lines = remembered.read_text().splitlines()
        if len(lines) == 2:
            return Toolchain(path, *lines)
    found = _ask(path, command, options)
    if isinstance(found, Toolchain) and remembered is not None:
        disk.write_atomically(remembered, f"{found.version}\n{found.fingerprint}\n".encode())
    return found


def _ask(path: str, command: tuple[str, ...], options: tuple[str, ...]) -> Toolchain | str:
    """Runs the compiler for its macros."""
    arguments = [*command, *(o for o in options if o != "-shared"), "-dM", "-E", "-x", "c++", os.devnull]
    try:
        ran = subprocess.run(arguments, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the C++ compiler {path} does not run: {error}"
    if ran.returncode != 0:
        return f"the C++ compiler {path} does not take the flags {' '.join(options)}: {ran.stderr.strip()[:300]}"
    macros = dict(line.removeprefix("#define ").partition(" ")[::2] for line in ran.stdout.splitlines())
    version = macros.get("__VERSION__", "unknown").strip('"')
    if "__clang__" in macros or int(macros.get("__GNUC__", "0")) < _OLDEST:
        return f"the C++ compiler {path} is {version}; the CPU backend needs g++ {_OLDEST} or later (name one in FOCI_CXX)"
    return Toolchain(path, version, hashlib.sha256(ran.stdout.encode()).hexdigest())


def _remembered_probe(path: str, command: tuple[str, ...], options: tuple[str, ...]) -> Path | None:
    """The file that remembers what a compiler said: asking costs more than loading a cached kernel."""
    directory = cache_directory()
    if directory is None:
        return None
    real = os.stat(os.path.realpath(path))
    facts = (command, options, os.path.realpath(path), real.st_mtime_ns, real.st_size, _cpu_flags())
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
    warnings.warn(
        "the kernel cache is not usable (not writable, or another user's), so compiled kernels live in a temporary folder of this "
        "process; set FOCI_CACHE_DIR to a folder of your own",
        stacklevel=2,
    )
    return Path(directory)


def _is_intact(path: Path) -> bool:
    """Whether a library is this user's and its checksum is right."""
    if not disk.is_private(path):
        return False
    content = path.read_bytes()
    return len(content) > _CHECKSUM and hashlib.sha256(content[:-_CHECKSUM]).digest() == content[-_CHECKSUM:]


# Building --------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _headers_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(HEADERS.rglob("*.h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


_loaded: dict[str, ctypes.CDLL] = {}
_loading = threading.Lock()


def _after_fork() -> None:
    # the thread that had the lock is not in the child
    global _loading
    _loading = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def load(source: str) -> ctypes.CDLL:
    """The library of a translation unit, compiled if nobody did before. Calls through it release the GIL.

    Raises:
        CompileError: if there is no compiler, or it refuses the source.
    """
    found = toolchain()
    if isinstance(found, str):
        raise CompileError(found)
    options = flags()
    key = hashlib.sha256("\0".join((source, _headers_hash(), found.fingerprint, *options)).encode()).hexdigest()
    with _loading:
        library = _loaded.get(key)
        if library is None:
            path = (cache_directory() or _temporary_directory()) / f"{key[:40]}.so"
            if not _is_intact(path):
                _compile(source, path, found)
            library = _loaded[key] = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        return library


def _compile(source: str, target: Path, compiler: Toolchain) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        unit, library = Path(folder, "kernel.cc"), Path(folder, "kernel.so")
        unit.write_text(source)
        command = [*_command(), *flags(), f"-I{HEADERS}", str(unit), "-o", str(library)]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"the C++ compiler {compiler.path} did not finish: {error}") from error
        if ran.returncode != 0:
            complaint = ran.stderr.strip()[:4000]
            raise CompileError(
                f"{compiler.path} ({compiler.version}) refused a generated kernel:\n{complaint}\n\nThe generated source:\n{source}"
            )
        content = library.read_bytes()
    disk.write_atomically(target, content + hashlib.sha256(content).digest())
