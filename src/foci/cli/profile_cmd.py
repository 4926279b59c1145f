"""What `foci report` does: runs a script and collects the attentions in every graph that it compiles. And scripts as commands run them."""

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

__all__ = ["run", "run_script"]


def run(script: Path, arguments: Sequence[str]) -> tuple[Log, SystemExit | None]:
    """Runs the script as `python script arguments` would, with foci's pass in Inductor too.

    Args:
        script: a Python file.
        arguments: its own, `sys.argv[1:]`.

    Returns:
        What was collected, and how the script exited: None where it ran to its end.
    """
    torch.compiler.reset()  # a graph compiled before would not be compiled, and looked at, again
    with observe() as log, with_pre_grad_pass(inductor_pass):
        exited = run_script(script, arguments)
    return log, exited


def run_script(script: Path, arguments: Sequence[str]) -> SystemExit | None:
    """Runs the script as `python script arguments` would. Returns how it exited: None where it ran to its end."""
    with _as_main(script, arguments):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as raised:
            return raised
    return None


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
