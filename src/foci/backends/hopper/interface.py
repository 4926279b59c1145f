# mypy: ignore-errors
"""The names of Gluon that kernels use, and where each is found: the one place that follows Gluon's versions.

Gluon is `triton.experimental.gluon`. A version that is not in `foci.backends.hopper.VERSIONS` is declined by the planner, with
its number, before anything here is imported.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# the two copies were renamed after Triton 3.6
bring = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
send = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def send_sum(target, coordinates, source, _semantic=None):
    """Begins to add a tile in shared memory to a tensor: the builder has it, `tma` has no name for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, target.handle, coordinates, source.handle)


__all__ = [
    "TensorDescriptor",
    "bring",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "send",
    "send_sum",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
