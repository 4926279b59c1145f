# mypy: ignore-errors
"""The names of Gluon that kernels use, and where each is found: the one place that follows Gluon's versions.

Gluon is `triton.experimental.gluon`. A version that is not in `foci.backends.hopper.VERSIONS` is declined by the planner, with
its number, before anything here is imported.
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

__all__ = ["TensorDescriptor", "fence_async_shared", "gl", "gluon", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait"]
