"""Compiles the kernels of passes to come: of the backward while the forward compiles and runs, and of calls of other lengths."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foci.backends.contract import Given, Inputs
from foci.backends.gpu.compiling import compiles_beside, is_new, launch_ahead
from foci.backends.gpu.launch_builder import LaunchBuilder, plain_arguments
from foci.backends.gpu.stream_state import free_stream
from foci.backends.gpu.symbolic_tokens import Tokens
from foci.backends.gpu.triton_cache_key import fill_cache_keys
from foci.problem import Operands, Results

if TYPE_CHECKING:
    from foci.backends.gpu.kernel import GpuKernel
    from foci.backends.gpu.tile_tables import Sequences

__all__ = ["PrecompileBuilder", "meta_sequences", "precompile_backward", "precompile_other_lengths"]


class PrecompileBuilder(LaunchBuilder):
    """Compiles the kernels of a pass that has not begun: its tensors take no memory, and it launches and keeps nothing."""

    is_ahead = True

    def __init__(self) -> None:
        super().__init__((), None)

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
        """A tensor without memory, which kernels take for an aligned one."""
        return torch.empty_strided(tuple(map(int, shape)), tuple(map(int, strides)), dtype=dtype, device="meta")

    def another(self, inputs: Inputs, stream: int | None) -> LaunchBuilder:
        """Another of the kind."""
        return PrecompileBuilder()

    def add(self, function: Any, grid: tuple[int, ...], *args: Any, between: bool = False, **options: Any) -> None:
        """Compile a kernel that will be launched."""
        plain = plain_arguments(args)
        fill_cache_keys((function, *plain))
        launch_ahead(function, plain, options)

    def finish(self, tokens: Tokens) -> None:
        """Nothing is run."""


def precompile_backward(kernel: GpuKernel, operands: Operands, sequences: Sequences, results: Results) -> None:
    """Compiles the kernels that the backward pass will launch, where the forward pass has kernels to compile too.

    Called within `compile_in_parallel`. Four cases compile their backward kernels at the first backward pass instead: packed sequences,
    block masks, captured tensors that require gradients, and schedules that are being timed. So does a backward pass that also gets a
    gradient of the logsumexp or of another auxiliary output, for the kernels that only this gradient needs.
    """
    is_empty = 0 in (results.out.numel(), operands.key.shape[2])
    is_other = kernel.needs_capture_grads or kernel.builder.problem.tuned or operands.cu_q is not None or operands.blocks is not None
    if (
        kernel.gradients == 0
        or not kernel.backward_pass.only_launches
        or is_empty
        or is_other
        or free_stream(operands.query) is None
        or not is_new()
    ):
        return
    bwd_args = Given(results.out, results.lse, results.out, None)
    # the backward pass raises the same error, where the caller expects it
    with suppress(Exception):
        kernel.backward_pass.build(operands, bwd_args, sequences, PrecompileBuilder(), None)


def precompile_other_lengths(kernel: GpuKernel, operands: Operands) -> None:
    """Compiles the forward kernels of the problem's other lengths, where this one is new, and the machine has cores to do so beside it.

    Called within `compile_in_parallel`. The front end processes them while the caller waits for its own kernel, and workers would not
    have started by then. Packed sequences and block masks are left to `foci.precompile_lengths`.
    """
    is_other = kernel.builder.problem.tuned or operands.cu_q is not None or operands.blocks is not None or operands.page_table is not None
    is_empty = 0 in (*operands.query.shape, *operands.key.shape, *operands.value.shape)
    if is_other or is_empty or free_stream(operands.query) is None or not compiles_beside() or not is_new():
        return
    query, key, value = (
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (operands.query, operands.key, operands.value)
    )
    for forward in kernel.forward_pass.of_other_lengths():
        # a call of these lengths raises the same error
        with suppress(Exception):
            meta = replace(operands, query=query, key=key, value=value, program=None)
            forward.build(meta, meta_sequences(meta), PrecompileBuilder())


def meta_sequences(operands: Operands) -> Sequences:
    """`tile_tables.operand_sequences` of operands without memory."""
    from foci.backends.gpu.tile_tables import Sequences

    if operands.cu_q is None:
        return Sequences(stays=False)

    def make() -> tuple[Tensor, Tensor]:
        start, length = (torch.empty(operands.cu_q.shape[0] - 1, dtype=torch.int32, device="meta") for _ in range(2))  # type: ignore[union-attr]
        return start, length

    q = make()
    kv = q if operands.cu_kv is operands.cu_q and operands.kv_lengths is operands.q_lengths else make()
    return Sequences(*q, *kv, stays=False)
