"""The decorator of the functions that Triton's kernels are made of."""

from __future__ import annotations

import triton

__all__ = ["triton_jit"]

triton_jit = triton.jit
