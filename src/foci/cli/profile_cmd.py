"""What `foci report` does: runs a script and collects the attentions in every graph that it compiles."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from foci.compat.inductor import with_pre_grad_pass
from foci.context import Log, observe
from foci.fusion import inductor_pass

__all__ = ["run"]


def run(script: Path, arguments: Sequence[str]) -> tuple[Log, SystemExit | None]:
    """Runs the script as `python script arguments` would, with foci's pass in Inductor too.

    Args:
        script: a Python file.
        arguments: its own, `sys.argv[1:]`.

    Returns:
        What was collected, and how the script exited: None where it ran to its end.
    """
    exited: SystemExit | None = None
    torch.compiler.reset()  # a graph compiled before would not be compiled, and looked at, again
    with (
        observe() as log,
        _as_main(script, arguments),
        with_pre_grad_pass(inductor_pass),
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as raised:
            exited = raised
    return log, exited


@contextlib.contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path
