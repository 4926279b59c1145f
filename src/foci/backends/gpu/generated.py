"""Jit functions made of generated source text. Compile workers make them too, without torch."""

from __future__ import annotations

import hashlib
import linecache
from typing import Any, Final

import triton.language as tl

from foci.backends.gpu import math
from foci.compat.jit import triton_jit

__all__ = ["GENERATED", "jit_function"]

GENERATED: Final = f"{__name__.partition('.')[0]}.generated"
"""Module name of generated functions."""
_NAMES: Final = ("floor_divide", "floor_modulo", "wrap", "tanh", "tanh_half", "atan")


def jit_function(name: str, source: str) -> Any:
    """Make a jit function of source text, and register the text where `inspect` finds it."""
    filename = f"<foci triton {name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    space: dict[str, Any] = {"tl": tl, "__name__": GENERATED} | {n: getattr(math, n) for n in _NAMES}
    exec(compile(source, filename, "exec"), space)
    return triton_jit(space[name])
