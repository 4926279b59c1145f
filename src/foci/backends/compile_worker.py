"""What the process runs that becomes the workers of `compile_workers`. It is a script: nothing imports it.

It imports Triton, once for all workers, which are its forks. The packages around modules of kernels would import torch, which takes
seconds, so here they are packages without code of their own.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import Final

_BACKENDS: Final = Path(__file__).parent


def without_packages() -> None:
    """Have modules of kernels imported without the packages around them: foci, its backends, and each backend."""
    for folder in (_BACKENDS.parent, _BACKENDS, *(path.parent for path in _BACKENDS.glob("*/__init__.py"))):
        name = ".".join(("foci", *folder.relative_to(_BACKENDS.parent).parts))
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package


def serve(jobs: int, answers: int) -> None:
    """Do jobs from a pipe, one after another, and answer each, and the start, with a byte in another pipe."""
    with open(jobs, "rb") as source, open(answers, "wb", buffering=0) as sink:
        sink.write(b"\0")
        while header := source.read(8):
            module, _, name = source.read(int.from_bytes(header, "little")).decode().partition(":")
            argument = source.read(int.from_bytes(source.read(8), "little"))
            getattr(importlib.import_module(module), name)(argument)
            sink.write(b"\0")


def become_workers(pipes: list[int]) -> None:
    """Fork a worker for each two descriptors of pipes, of its jobs and of its answers, and wait for their end."""
    for place in range(0, len(pipes), 2):
        if os.fork() == 0:
            mine = pipes[place : place + 2]
            for other in {*pipes} - {*mine}:  # a pipe ends when no process holds it
                os.close(other)
            serve(*mine)
            return
    for end in pipes:
        os.close(end)
    with suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    os.nice(int(sys.argv[1]))
    without_packages()
    with suppress(ImportError):  # Triton may not be installed
        importlib.import_module("foci.backends.gpu.compile_subprocess")  # before the first job, as it takes half of the start
    gc.freeze()  # a collection would copy the memory that the workers share
    become_workers([*map(int, sys.argv[2:])])
