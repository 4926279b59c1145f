# mypy: ignore-errors
"""The Gluon names that kernels use, across Triton releases.

Gluon is `triton.experimental.gluon`. With a version that is not in `foci.backends.hopper.VERSIONS` another process imports this first
(`foci.backends.self_check`): where a name is missing, the planner says so, and another backend runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import builtin

from foci.compat.gluon import CallerContext, reinterpreted

# the two copies and the barrier were renamed after Triton 3.6
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@builtin
def view_smem(buffer, dtype, shape, layout, _semantic=None):
    """Reinterpret a buffer in shared memory with another dtype, shape and layout."""
    return reinterpreted(buffer)(dtype, shape, layout, _semantic=_semantic)


class _SharedConsumers:
    """Wraps Triton's code generator so that all consumers share one compiled function: each is a partition of four warps with its number
    as a run-time value.

    Triton otherwise generates a function for every constexpr number, and again for the program's own warps. Shared, the forward's code is
    generated in half of the time, and the PTX is the same.
    """

    def __init__(self, reader, consume, semantic):
        self._reader, self._consume, self._semantic = reader, consume, semantic

    def __getattr__(self, name):
        return getattr(self._reader, name)

    def call_JitFunction(self, function, args, kwargs, caller_context=None):
        if function is self._consume:
            caller_context = caller_context or CallerContext(num_warps=4)
            me, *consumer_args = args
            args = (self._semantic.to_tensor(me), *consumer_args)
        return self._reader.call_JitFunction(function, args, kwargs, caller_context=caller_context)


@builtin
def specialize(consumers, consume, consumer_args, args, produce, producer_args, registers, _semantic=None, _generator=None):
    """Specialize warps: each of `consumers` warpgroups, the first being the program's own, calls
    `consume(number, *consumer_args[number], *args)`, and one more warp calls `produce(*producer_args)`. `registers`: of a consumer's
    thread."""
    n, max_registers = (x.value if isinstance(x, gl.constexpr) else x for x in (consumers, registers))
    parts = [(consume, (gl.constexpr(me), *consumer_args[me], *args)) for me in range(n)]
    reader = _generator if CallerContext is None else _SharedConsumers(_generator, consume, _semantic)
    warps, limits = [*[4] * (n - 1), 1], [*[max_registers] * (n - 1), 24]
    gl.warp_specialize([*parts, (produce, producer_args)], warps, limits, _semantic=_semantic, _generator=reader)


__all__ = [
    "TensorDescriptor",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "specialize",
    "thread_barrier",
    "tma",
    "tma_load",
    "tma_store",
    "view_smem",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
