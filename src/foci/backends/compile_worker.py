"""What a worker process of `compile_workers` runs. It is a script: nothing imports it.

A worker imports Triton and modules of kernels. The packages around these would import torch, which takes seconds, so here they are packages
without code of their own.
"""

from __future__ import annotations

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


def serve() -> None:
    """Do jobs from standard input, one after another, and answer each, and the start, with a byte."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints is no answer
    sink.write(b"\0")
    sink.flush()
    while header := source.read(8):
        module, _, name = source.read(int.from_bytes(header, "little")).decode().partition(":")
        argument = source.read(int.from_bytes(source.read(8), "little"))
        getattr(importlib.import_module(module), name)(argument)
        sink.write(b"\0")
        sink.flush()


if __name__ == "__main__":
    os.nice(int(sys.argv[1]))
    without_packages()
    with suppress(ImportError):  # Triton may not be installed
        importlib.import_module("foci.backends.gpu.compile_subprocess")  # before the first job, as it takes half of the start
    serve()
