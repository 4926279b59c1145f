"""Compiles the kernels of passes to come: of the backward while the forward compiles and runs, and of calls of other lengths."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from foci.backends.compile_workers import compiles_beside
from foci.backends.contract import Inputs
from foci.backends.gpu.compiling import Turn, compile_in_parallel, is_new, launch_ahead
from foci.backends.gpu.launch_builder import LaunchBuilder, plain_arguments
from foci.backends.gpu.stream_state import free_stream
from foci.backends.gpu.symbolic_tokens import Tokens
from foci.problem import Operands, Problem, Results, is_aligned

if TYPE_CHECKING:
    from foci.backends.gpu.kernel import GpuKernel
    from foci.backends.gpu.tile_tables import Sequences

__all__ = ["PrecompileBuilder", "meta_sequences", "precompile_backward", "precompile_other_lengths", "precompile_packed"]


class PrecompileBuilder(LaunchBuilder):
    """Compiles the kernels of a pass that has not begun: its tensors take no memory, and it launches and keeps nothing."""

    is_ahead = True

    def __init__(self, turn: Turn) -> None:
        super().__init__((), None)
        self._turn = turn

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
        """A tensor without memory, which kernels take for an aligned one."""
        return torch.empty_strided(tuple(map(int, shape)), tuple(map(int, strides)), dtype=dtype, device="meta")

    def another(self, inputs: Inputs, stream: int | None) -> LaunchBuilder:
        """Another of the kind."""
        return PrecompileBuilder(self._turn)

    def add(self, function: Any, grid: tuple[int, ...], *args: Any, between: bool = False, **options: Any) -> None:
        """Compile a kernel that will be launched."""
        plain = plain_arguments(args)
        launch_ahead(function, plain, options, self._turn)

    def finish(self, tokens: Tokens) -> None:
        """Nothing is run."""


def precompile_backward(kernel: GpuKernel, operands: Operands, results: Results) -> None:
    """Compiles the kernels that the backward pass will launch, where the forward pass has kernels to compile too.

    Called within `compile_in_parallel`. A backward pass that also gets a gradient of the logsumexp or of another auxiliary output compiles
    the kernels that only this gradient needs at its first run.
    """
    if operands.cu_q is None and _is_predictable(kernel, operands) and is_new():
        meta = _without_memory(operands)
        # the backward pass raises the same error, where the caller expects it
        with suppress(Exception):
            kernel.build_backward_ahead(meta, meta_sequences(meta), Results(*map(_empty_like, (results.out, results.lse))))


def precompile_packed(kernel: GpuKernel, operands: Operands) -> None:
    """Compiles all kernels of packed sequences' passes beside each other, at a problem's first call.

    Called before the passes are built: tables of the sequences are made in between, so that each of these kernels, and those of the passes
    after them, would compile alone.
    """
    kind = replace(kernel.builder.problem, batch=1, q_len=1, kv_len=1)
    if operands.cu_q is None or kind in _packed or not _is_predictable(kernel, operands) or not compiles_beside():
        return
    if len(_packed) >= _MOST_PACKED:
        _packed.clear()
    _packed.add(kind)
    meta = _without_memory(operands)
    sequences = meta_sequences(meta)
    # the passes raise the same error, where the caller expects it
    with compile_in_parallel(), suppress(Exception):
        kernel.build_backward_ahead(meta, sequences, kernel.forward_pass.build(meta, sequences, PrecompileBuilder(Turn.FORWARD)))


_packed: Final[set[Problem]] = set()
"""Problems of packed sequences, without lengths, whose kernels compile ahead."""
_MOST_PACKED: Final = 1024


def precompile_other_lengths(kernel: GpuKernel, operands: Operands) -> None:
    """Compiles the forward kernels of the problem's other lengths, where this one is new, and the machine has cores to do so beside it.

    Called within `compile_in_parallel`. The front end processes them while the caller waits for its own kernel, and workers would not
    have started by then. Packed sequences and block masks are left to `foci.precompile_lengths`.
    """
    is_other = operands.cu_q is not None or operands.blocks is not None or operands.page_table is not None
    if is_other or not _is_predictable(kernel, operands) or not compiles_beside() or not is_new():
        return
    meta = _without_memory(operands)
    for forward in kernel.forward_pass.of_other_lengths():
        # a call of these lengths raises the same error
        with suppress(Exception):
            forward.build(meta, meta_sequences(meta), PrecompileBuilder(Turn.OTHER_LENGTHS))


def _is_predictable(kernel: GpuKernel, operands: Operands) -> bool:
    """Whether operands without memory need the same kernels as a call's."""
    tensors = (operands.query, operands.key, operands.value)
    is_empty = any(0 in t.shape for t in tensors)
    return not (kernel.builder.problem.tuned or is_empty) and all(map(is_aligned, tensors)) and free_stream(operands.query) is not None


def _without_memory(operands: Operands) -> Operands:
    q, k, v = map(_empty_like, (operands.query, operands.key, operands.value))
    blocks = None if operands.blocks is None else _empty_like(operands.blocks)
    meta = replace(operands, query=q, key=k, value=v, blocks=blocks, program=None)
    if operands.cu_q is None or operands.cu_kv is None:
        return meta
    cu_q = _empty_like(operands.cu_q)
    return replace(meta, cu_q=cu_q, cu_kv=cu_q if operands.cu_kv is operands.cu_q else _empty_like(operands.cu_kv))


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


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
