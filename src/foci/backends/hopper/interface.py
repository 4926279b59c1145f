# mypy: ignore-errors
"""The names of Gluon that kernels use, and where each is found: the one place that follows Gluon's versions.

Gluon is `triton.experimental.gluon`. A version that is not in `foci.backends.hopper.VERSIONS` is declined by the planner, with
its number, before anything here is imported.
"""

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

# the two copies and the barrier were renamed after Triton 3.6
bring = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
send = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@builtin
def viewed(buffer, dtype, shape, layout, _semantic=None):
    """A buffer in shared memory as one of another shape and layout; a method made public after Triton 3.6."""
    view = getattr(buffer, "reinterpret", None) or buffer._reinterpret
    return view(dtype, shape, layout, _semantic=_semantic)


__all__ = [
    "TensorDescriptor",
    "bring",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "send",
    "thread_barrier",
    "tma",
    "viewed",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
