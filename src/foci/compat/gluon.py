# mypy: ignore-errors
"""Names of Gluon that are not public. Gluon is `triton.experimental.gluon`; only kernels for Hopper import this module."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import builtin

from foci.compat.jit import make_decorator
from foci.compat.lookup import find

__all__ = ["HAS_ADD", "CallerContext", "begin_add", "gluon_jit", "reinterpreted"]

gluon_jit = make_decorator("triton.experimental.gluon._runtime.GluonJITFunction", gluon.jit)

CallerContext = find(
    "triton.experimental.gluon.language._semantic.GluonCallerContext",
    without="has the consumers' functions read once for each warpgroup, which takes Triton longer",
    seen=("3.6", "3.9"),
)
"""`CallerContext(num_warps=...)`: the context in which a warp partition calls a function. None where Triton has none."""


def reinterpreted(buffer: Any) -> Any:
    """The method that views a buffer in shared memory in another shape and layout; public from Triton 3.7 on."""
    return getattr(buffer, "reinterpret", None) or buffer._reinterpret


_named_add = getattr(tma, "async_atomic_add", None)


def _find_builders() -> Any:
    """The module of Triton 3.6's and 3.7's builders, whose Gluon has no name for a copy that its compiler has; None where it lacks it."""
    without, seen = "adds gradients of queries up in kernels of their own, which is slower", ("3.6", "3.9")
    gluon_ir = find("triton._C.libtriton.gluon_ir", without=without, seen=seen)
    ir = find("triton._C.libtriton.ir", without=without, seen=seen)
    has_copy = ir is not None and hasattr(getattr(gluon_ir, "GluonOpBuilder", None), "create_async_tma_reduce")
    return ir if has_copy else None


_ir = None if _named_add is not None else _find_builders()


@builtin
def _begin_add(target: Any, coord: Any, source: Any, _semantic: Any = None) -> None:
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(_ir.DESCRIPTOR_REDUCE_KIND.ADD, target.handle, coord, source.handle)


HAS_ADD = _named_add is not None or _ir is not None
"""Whether a tile in shared memory can be added to one of a tensor by TMA. Where it cannot, no kernel that adds may be launched."""
begin_add = _named_add or _begin_add
"""Adds a tile in shared memory to one of a tensor by TMA. Triton 3.6 and 3.7 compile the copy, but their Gluon has no name for it."""
