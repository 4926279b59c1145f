# mypy: ignore-errors
"""Adding a tile in shared memory to one of a tensor by TMA.

Triton 3.6 compiles the copy, but its Gluon has no name for it; later releases call it `tma.async_atomic_add`. Where a release has
neither, `HAS_ADD` is false, and no kernel that adds may be launched.
"""

from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon.language._core import builtin

from foci.backends.hopper.interface import tma

__all__ = ["HAS_ADD", "begin_add"]

_NAMED = getattr(tma, "async_atomic_add", None)
HAS_ADD = _NAMED is not None or hasattr(gluon_ir.GluonOpBuilder, "create_async_tma_reduce")


@builtin
def _begin_add(target, coord, source, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, target.handle, coord, source.handle)


begin_add = _NAMED or _begin_add
