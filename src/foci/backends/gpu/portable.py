"""Which problems the portable kernels take, and at what cost. They are those in Triton that run on every GPU from sm_80 on
(`foci.backends.gpu.portable_passes`), alone as the backend `triton`, and for what another GPU backend has no faster kernel.

Triton is imported when the first kernel is built, so that planning works where it is not installed.
"""

from __future__ import annotations

import os
from typing import Final

import torch

from foci.backends import self_check
from foci.backends.causal import is_causal
from foci.backends.gpu.architectures import OLDEST, find
from foci.backends.gpu.schedules import (
    busy_fraction,
    padded_dim,
    schedule_for,
    scratch_bytes,
    split_efficiency,
    split_kind,
    takes_splits,
    vector_bytes,
)
from foci.backends.row_kernels import RowKernels
from foci.backends.sequences import shapeless_weights
from foci.ir.derivative import CaptureDerivative, capture_derivatives
from foci.problem import Layout, Problem, Target

__all__ = ["estimate_cost", "forward_cost", "reject", "row_kernels", "splits_keys"]

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
_FORWARD: Final = 2.2e-5
_BACKWARD: Final = 5e-5
"""Seconds of host time of a pass, measured beside an H200 (benchmarks/gpu_overhead.py)."""


def reject(problem: Problem, target: Target) -> str | None:
    """Why portable kernels cannot run a problem, or None, whatever a self-check may have said."""
    return _reject_target(target) or _reject_problem(problem, target)


def _reject_target(target: Target) -> str | None:
    """Why portable kernels do not run on a target, or None. On the CPU they run in Triton's interpreter, for tests."""
    if target.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs an NVIDIA GPU (or TRITON_INTERPRET=1, for tests)"
    if target.device not in ("cuda", "cpu"):
        return f"needs an NVIDIA GPU, not {target.device}"
    if target.device == "cuda" and "triton" not in target.features:
        return "needs Triton, which is not installed"
    if target.device == "cuda" and target.arch < OLDEST:
        return f"needs compute capability {OLDEST / 10} or newer, not {target.arch / 10}"
    return None


def _reject_problem(problem: Problem, target: Target) -> str | None:
    if problem.dtype not in _DTYPES:
        return f"computes in float32; {str(problem.dtype).removeprefix('torch.')} needs more"
    if problem.dtype == torch.bfloat16 and target.device == "cpu":
        return "Triton's interpreter has no products of bfloat16"
    if max(problem.head_dim, problem.value_dim) > 512:
        return f"head dims go to 512; this has D = {problem.head_dim}, Dv = {problem.value_dim}"
    if (reason := shapeless_weights(problem.formula)) is not None:
        return reason
    if problem.formula.block_size is not None and any(size % 16 for size in problem.formula.block_size):
        return f"block sizes must be multiples of 16, not {problem.formula.block_size}"
    if problem.formula.block_size is not None and problem.formula.layout is not Layout.DENSE:
        return "block masks are for the dense layout"
    rows = (extent for d in _derivatives(problem) if problem.capture_grads[d.slot] for _, extent in d.axes)
    if any(extent.op not in ("size", "const") for extent in rows):
        return "does not compute gradients of captured tensors through a reduction whose length differs from place to place"
    return _reject_size(problem, target)


def _reject_size(problem: Problem, target: Target) -> str | None:
    """Whether every kernel has a schedule that fits the device's shared memory."""
    dims = (padded_dim(problem.head_dim), padded_dim(problem.value_dim))
    kinds = ["forward", "forward_sparse", "forward_listed", "decode", "split"]
    if problem.needs_backward:
        kinds += [
            "query_gradient",
            "query_gradient_sparse",
            "key_gradient",
            "key_gradient_scored",
            "key_gradient_alone",
            "value_gradient_alone",
        ]
    outputs = problem.formula.outputs
    if any(problem.capture_grads) or outputs.weights or outputs.column_sums:
        kinds.append("captures")
    scratch, vectors = scratch_bytes(problem), vector_bytes(problem.variant)
    for kind in kinds:
        if schedule_for(kind, target.arch, dims, problem.dtype.itemsize, scratch=scratch, vectors=vectors) is None:
            size = f"D = {problem.head_dim}, Dv = {problem.value_dim}"
            return f"the {kind} kernel does not fit the shared memory of sm_{target.arch} with {size}"
    return None


def estimate_cost(problem: Problem, target: Target) -> float:
    """Estimate seconds: launches, and flops at the rate that these kernels reach, half of them under the causal mask. A backward is slower
    where it leaves SMs idle. Triton's interpreter costs more than any other backend."""
    if target.device == "cpu":
        return 1e3 + problem.flops / 1e6
    forward = forward_cost(problem, target)
    if not problem.needs_backward:
        return forward
    return forward + _BACKWARD + 2.5 * (forward - _FORWARD) / busy_fraction(problem, target.arch)


def forward_cost(problem: Problem, target: Target) -> float:
    """Estimate seconds of a forward on a GPU."""
    rate = find(target.arch).rate / (1 if problem.dtype != torch.float32 else 8)
    if splits_keys(problem, target):
        rate *= split_efficiency(problem, target.arch)
    return _FORWARD + problem.flops * (0.5 if is_causal(problem.variant) else 1.0) / rate


def splits_keys(problem: Problem, target: Target) -> bool:
    """Whether a forward splits keys over programs, whatever its lengths within those that the problem stands for."""
    heads, lengths = (problem.q_heads, problem.kv_heads), (problem.q_len, problem.kv_len // 2 + 1)
    return takes_splits(problem.formula) and split_kind(problem.batch, heads, lengths, target.arch) is not None


def _derivatives(problem: Problem) -> tuple[CaptureDerivative, ...]:
    return capture_derivatives(problem.variant.score) if any(problem.capture_grads) else ()


def row_kernels(target: Target) -> RowKernels | None:
    """Row kernels in Triton, wherever it runs; nothing checks them, so a release that foci was not tested with has none."""
    if _reject_target(target) is not None or self_check.is_needed(target):
        return None
    from foci.backends.gpu.layernorm import ROW_KERNELS
    from foci.backends.gpu.toolchain import prepare_compiler

    prepare_compiler(target.arch)
    return ROW_KERNELS
