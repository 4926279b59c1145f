"""From operands to native code: one packed structure of pointers, strides and sizes, and a call through ctypes."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from foci import dropout
from foci.backends.contract import Plan
from foci.backends.cpu import build
from foci.backends.cpu.source import forward_source
from foci.problem import Cotangents, Gradients, Operands, Results, empty_out

__all__ = ["CpuKernel"]

Entry = Callable[[bytes], int]
_LAYOUT: Final = struct.Struct("<61q2d3q")
_NOTHING: Final = (0, 0, 0, 0, 0)
_SERIAL_WORK: Final = 1 << 21  # multiplications below which waking threads costs more than it gains

_threads_after_fork: int | None = None


def _after_fork() -> None:
    # The threads of libgomp's pool do not survive a fork, and it does not notice: a child stays with one.
    global _threads_after_fork
    _threads_after_fork = 1


os.register_at_fork(after_in_child=_after_fork)


def _described(tensor: Tensor | None) -> tuple[int, ...]:
    return _NOTHING if tensor is None else (tensor.data_ptr(), *tensor.stride())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Arguments:
    """The call structure's parts, and the temporaries that must outlive the call."""

    def __init__(self, operands: Operands) -> None:
        query, key = operands.query, operands.key
        self.operands = operands
        self.offsets = tuple(
            None if t is None else t.to(torch.int64).contiguous() for t in (operands.cu_q, operands.cu_kv, operands.q_lengths, operands.kv_lengths)
        )
        tensors = operands.captures if operands.blocks is None else (*operands.captures, operands.blocks)
        entries = [n for t in tensors for n in (t.data_ptr(), *(t.shape or (1,)), *(t.stride() or (0,)))]
        self.kept = (
            struct.pack(f"<{len(entries)}q", *entries),
            struct.pack(f"<{len(operands.ints)}q", *operands.ints),
            struct.pack(f"<{len(operands.floats)}d", *operands.floats),
        )
        batch, q_heads, q_tokens, _ = query.shape
        kv_heads, kv_tokens = key.shape[1:3]
        q_len, kv_len = q_tokens, kv_tokens
        if operands.cu_q is not None:
            batch, q_len, kv_len = operands.cu_q.shape[0] - 1, operands.max_q, operands.max_kv
        self.sizes = (batch, q_heads, kv_heads, q_len, kv_len, q_tokens, kv_tokens)
        self.threads = self._threads()

    def _threads(self) -> int:
        batch, q_heads, _, q_len, kv_len, _, _ = self.sizes
        if batch * q_heads * q_len * kv_len * self.operands.query.shape[3] < _SERIAL_WORK:
            return 1
        return _threads_after_fork or torch.get_num_threads()

    def packed(self, tensors: tuple[Tensor | None, ...], rows: tuple[Tensor | None, ...], gradients: bytes = b"") -> bytes:
        """The structure: `tensors` are those after query, key and value, `rows` the statistics and their gradients."""
        o = self.operands
        described = [n for t in (o.query, o.key, o.value, *tensors) for n in _described(t)]
        pointers = (*(_address_of(kept) for kept in self.kept[:1]), _address_of(gradients), *(_address_of(kept) for kept in self.kept[1:]))
        keep_scale = 1.0 / (1.0 - o.dropout_p) if o.dropout_p < 1 else 0.0
        return _LAYOUT.pack(
            *described, *map(_address, rows), *self.sizes, *map(_address, self.offsets), *pointers, _address(o.seed),
            o.scale, keep_scale, dropout.threshold(o.dropout_p), int(o.dropout_p >= 1), self.threads,
        )  # fmt: skip


def _address_of(content: bytes) -> int:
    """Address of the bytes, valid while the object lives."""
    return ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value or 0


class CpuKernel:
    """The native kernels of one plan. The backward is compiled when it is first asked for."""

    def __init__(self, plan: Plan) -> None:
        self.problem = plan.problem
        self._forward = build.load(forward_source(plan.problem)).foci_forward

    def forward(self, operands: Operands, /) -> Results:
        outputs = self.problem.formula.outputs
        query = operands.query
        arguments = Arguments(operands)
        out = empty_out(query, operands.value)
        lse = torch.empty(query.shape[:3], dtype=torch.float32)
        row_max = torch.empty_like(lse) if outputs.row_max else None
        if operands.cu_q is not None:  # tokens between sequences belong to none
            out.zero_()
            lse.fill_(-torch.inf)
            if row_max is not None:
                row_max.fill_(-torch.inf)
        none = (None,) * 4
        _check(self._forward(arguments.packed((out, *none), (lse, row_max, None, None, None))))
        return Results(out, lse, row_max)

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        raise NotImplementedError


def _check(status: int) -> None:
    if status != 0:
        raise MemoryError("the CPU backend could not allocate its working memory")
