"""Lines of the user's code, for messages: which one runs, and what it does that a score or mask function cannot do."""

from __future__ import annotations

import contextlib
import inspect
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, NamedTuple

import torch

__all__ = ["PYTHON_ERRORS", "Location", "closed_over", "complaint", "definition", "find_location", "user_frame"]

PYTHON_ERRORS: Final = (
    ("does not support ufuncs", "a function of NumPy", "use the function of torch of that name"),
    ("for &: 'function' and 'function'", "& of two functions", "write foci.and_masks(f, g), or foci.Mask(f) & g"),
    ("for |: 'function' and 'function'", "| of two functions", "write foci.or_masks(f, g), or foci.Mask(f) | g"),
    ("for >>: 'function' and 'function'", ">> of two functions", "write foci.Score(f) >> g"),
)
"""Of errors that Python or NumPy raises within a function, part of the message; what the function did; what to write instead."""

_SKIP: Final = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    "<eval_with_key>",
    "<string>",
)


def _skipped() -> tuple[str, ...]:
    """Beginnings of the file names that hold no code of the user."""
    numpy = sys.modules.get("numpy")
    return _SKIP if numpy is None or numpy.__file__ is None else (*_SKIP, str(Path(numpy.__file__).parent))


class Location(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int


def user_frame() -> FrameType | None:
    """The innermost frame outside of foci, torch, NumPy and the standard library."""
    frame, skipped = inspect.currentframe(), _skipped()
    while frame is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    return frame


def find_location(traceback: TracebackType | None) -> Location | None:
    """The innermost line of a traceback outside of foci, torch, NumPy and the standard library."""
    location, skipped = None, _skipped()
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(skipped):
            location = Location(file, traceback.tb_lineno)
        traceback = traceback.tb_next
    return location


def definition(function: Callable[..., Any]) -> str:
    """The file and line of a function, `file:line: `, or nothing for one that has no Python code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}: " if code is not None else ""


def closed_over(function: Callable[..., Any]) -> str:
    """The name of a tensor with dimensions that a function closes over or reads as a global, `tensor` if none is found."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return "tensor"
    values = {name: getattr(function, "__globals__", {}).get(name) for name in code.co_names}
    for name, cell in zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # a cell that has no value yet
            values[name] = cell.cell_contents
    return next((name for name, value in values.items() if isinstance(value, torch.Tensor) and value.dim() > 0), "tensor")


def complaint(what: str, instead: str = "", location: Location | None = None) -> str:
    """The message of a `TraceError`: the user's line, what it does, and what may stand there `instead`.

    Args:
        what: the user's function does.
        instead: of it; if empty, what the language has.
        location: of the line; if None, that which runs now.
    """
    frame = user_frame() if location is None else None
    if frame is not None:
        location = Location(frame.f_code.co_filename, frame.f_lineno)
    where = f"{location.file}:{location.line}: " if location is not None else ""
    hint = (
        f"; {instead}"
        if instead
        else "; the language has pointwise functions, indexing of captured tensors, and sum, dot, any, all, max, min over captured rows"
    )
    return f"{where}{what} is outside what a score or mask function can do{hint}"
