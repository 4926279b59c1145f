"""Prepares Triton's compiler in threads, while the caller imports kernels and plans.

Before Triton compiles or looks up the first kernel of a process, it hashes all of its own files for its cache keys, and asks ptxas for its
version. Nearly all of this runs outside of the GIL. On a machine that has compiled nothing yet, the workers that will compile start too.
Triton's driver contains C code, which a C compiler builds on each machine. foci's launches need none of it, so the driver builds it only at
the first launch through Triton (`foci.compat.triton.defer_driver`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import torch
import triton

from foci.backends.compile_workers import start_waited_workers
from foci.backends.gpu.caller_waits import caller_waits
from foci.backends.gpu.kernel_store import is_empty
from foci.compat.triton import assume_digest, defer_driver, digest_triton, ptxas_version

__all__ = ["prepare_compiler", "wait_until_prepared"]


def prepare_compiler(arch: int) -> None:
    """Begin to prepare Triton's compiler, once in a process.

    Args:
        arch: of the GPU, such as 90. Without a GPU Triton's driver is left alone.
    """
    with _lock:
        if _begun or triton.knobs.runtime.interpret:
            return
        if torch.cuda.is_available():
            defer_driver()
        steps: list[Callable[[], object]] = [lambda: assume_digest(digest_triton()), lambda: ptxas_version(arch)]
        _begun.extend(threading.Thread(target=_try, args=(step,), name="foci-toolchain") for step in steps)
        for thread in _begun:
            thread.start()
    if is_empty():  # the first kernels will have to be compiled
        start_waited_workers()


def wait_until_prepared() -> None:
    """Wait for what `prepare_compiler` began: a thread that asked for the same meanwhile would do it a second time."""
    for thread in _begun:
        thread.join()


def _try(step: Callable[[], object]) -> None:
    with caller_waits(), suppress(Exception):  # the compilation asks again, and raises the error
        step()


_begun: Final[list[threading.Thread]] = []
_lock: Final = threading.Lock()
