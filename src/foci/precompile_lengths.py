"""Compiles, after a problem's first call on a GPU, the kernels that its calls of other lengths and batches will need.

A problem has one kernel for each pass wherever that costs no speed. Where lengths decide between schedules, and so between kernels, there
are a few: they are found by planning calls of the sizes below, and compile in the background. Kernels that are known already cost nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from foci.backends.compile_priority import Submit, in_background, is_stopping, unhurried
from foci.backends.compile_workers import background_workers
from foci.backends.contract import Kernel
from foci.problem import Layout, Operands, Problem, bucket, gradient_strides, is_aligned

__all__ = ["Sizes", "is_wanted", "meta_operands", "other_sizes", "precompile_lengths", "precompile_offline"]


class Sizes(NamedTuple):
    """Sizes of a call."""

    batch: int  # B, or the number of packed sequences
    q_len: int  # Sq, or that of each sequence
    kv_len: int


_LENGTHS: Final = (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384, 32768)
_BATCHES: Final = (1, 2, 8, 64)
_SHORT: Final = (1, 16, 128)
"""Numbers of queries of a decode."""
_MAX_TOKENS: Final = 1 << 18
"""Most tokens of a call that is planned for."""
_begun: set[tuple[Problem, torch.device]] = set()


def other_sizes(problem: Problem) -> Iterator[Sizes]:
    """Sizes that between them need every kernel that a problem may need, beginning with those next to the problem's own.

    Calls with gradients have as many keys as queries here; without, a few queries may read many keys, too.
    """
    sizes = [(batch, length, length) for batch in _BATCHES for length in _LENGTHS]
    if problem.formula.layout is Layout.DENSE and not problem.needs_backward:
        sizes += [(batch, rows, length) for batch in _BATCHES for rows in _SHORT for length in _LENGTHS if rows < length]
    yield from sorted(
        (Sizes(*each) for each in sizes if each[0] * each[2] <= _MAX_TOKENS),
        key=lambda each: abs(bucket(each.kv_len).bit_length() - problem.kv_len.bit_length()),
    )


def precompile_lengths(problem: Problem, operands: Operands, kernel_of: Callable[[Problem], Kernel]) -> threading.Thread | None:
    """Compile in a thread the kernels of other lengths, at the first call of a problem.

    Args:
        problem: the call's.
        operands: the call's.
        kernel_of: plans a problem, and returns its kernel.

    Returns:
        the thread; None if there is nothing to do, or no worker process to do it, as on a machine of few cores. Decoding from pages is left
        out, as its kernels are the same for all sizes.
    """
    kind = replace(problem, batch=1, q_len=1, kv_len=1), operands.query.device
    if kind in _begun:
        return None
    _begun.add(kind)
    if operands.page_table is not None or problem.tuned or not all(map(is_aligned, (operands.query, operands.key, operands.value))):
        return None
    if _is_offline:
        _precompile_all(problem, operands, kernel_of, None)
        return None
    workers = background_workers()
    return None if workers is None else in_background(_precompile_all, problem, operands, kernel_of, workers)


_is_offline = False


def is_wanted(operands: Operands) -> bool:
    """Whether a call's kernels for other lengths are compiled ahead: on a GPU, or once `precompile_offline` was called."""
    return operands.query.is_cuda or _is_offline


def precompile_offline() -> None:
    """From now on, compile kernels of other lengths in the calling thread, and also where no GPU is there: for kernel packs."""
    global _is_offline
    _is_offline = True


def _precompile_all(problem: Problem, operands: Operands, kernel_of: Callable[[Problem], Kernel], workers: Submit | None) -> None:
    device = operands.query.device
    # a thread begins on the first GPU, whatever the caller's
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with torch.no_grad(), on_device, unhurried(workers):
        kernel_of(problem).precompile(_calls(problem, operands, kernel_of))


def _calls(problem: Problem, operands: Operands, kernel_of: Callable[[Problem], Kernel]) -> Iterator[tuple[Kernel, Operands]]:
    for sizes in other_sizes(problem):
        if is_stopping():
            return
        batch, q_len, kv_len = map(bucket, sizes)
        other = replace(problem, batch=batch, q_len=q_len, kv_len=kv_len)
        yield kernel_of(other), meta_operands(operands, sizes, problem.formula.block_size)


def meta_operands(operands: Operands, sizes: Sizes, block_size: tuple[int, int] | None) -> Operands:
    """Operands of other sizes, laid out alike, without memory; captured tensors are those of the call.

    Args:
        operands: a call's.
        sizes: of the other call.
        block_size: the formula's, (queries, keys) of a block of the block mask.
    """
    batch, q_len, kv_len = sizes
    is_packed = operands.cu_q is not None

    def make(tensor: Tensor, length: int) -> Tensor:
        _, heads, _, dim = tensor.shape
        shape = (1, heads, batch * length, dim) if is_packed else (batch, heads, length, dim)
        strides = gradient_strides(shape, heads_in_rows=tensor.stride(1) < tensor.stride(2))
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")

    of_queries = replace(
        operands,
        query=make(operands.query, q_len), key=make(operands.key, kv_len), value=make(operands.value, kv_len), program=None,
    )  # fmt: skip
    if operands.blocks is not None and block_size is not None:
        batch_entries, heads, _, _ = operands.blocks.shape
        shape = (min(batch, batch_entries), heads, -(-q_len // block_size[0]), -(-kv_len // block_size[1]))
        return replace(of_queries, blocks=torch.empty(shape, dtype=operands.blocks.dtype, device="meta"))
    if not is_packed:
        return of_queries
    cu_q = torch.empty(batch + 1, dtype=torch.int32, device="meta")
    cu_kv = cu_q if operands.cu_kv is operands.cu_q else torch.empty_like(cu_q)
    return replace(of_queries, cu_q=cu_q, cu_kv=cu_kv, max_q=q_len, max_kv=kv_len)
