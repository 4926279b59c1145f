"""Backward, host side: which kernels a call launches, and with what.

Rows, visits and gradients of captured tensors are found as the backend `triton` finds them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.backends.causal import is_causal
from foci.backends.contract import Plan
from foci.backends.hopper.arguments import Config
from foci.backends.hopper.backward_fused import attention_gradients
from foci.backends.hopper.backward_keys import attention_key_gradient
from foci.backends.hopper.backward_queries import attention_query_gradient
from foci.backends.hopper.backward_sums import finish_query_gradient
from foci.backends.hopper.descriptors import describe, takes_descriptor
from foci.backends.hopper.functions import Functions, functions_of
from foci.backends.hopper.interface import TensorDescriptor, gl
from foci.backends.triton.arguments import encode
from foci.backends.triton.backward import prepare_rows
from foci.backends.triton.capture_gradients import capture_gradients
from foci.backends.triton.functions import is_half, lies_of
from foci.backends.triton.kernel import Pass, TritonKernel
from foci.backends.triton.recording import Recorder
from foci.backends.triton.schedules import Schedule
from foci.backends.triton.sparsity import ALL, DENSE, Visits, sequences_of
from foci.problem import Cotangents, Gradients, Operands, Results

__all__ = ["HopperGradients"]


@dataclass(frozen=True)
class Cut:
    """How a kernel is cut up: rows and keys of a tile, tiles that stream by in flight."""

    tile_q: int
    tile_kv: int
    stages: int

    @property
    def schedule(self) -> Schedule:
        """The same as the search for visited tiles takes it."""
        return Schedule(self.tile_q, self.tile_kv, 4, self.stages)


QUERIES: Final = {16: Cut(128, 128, 2), 32: Cut(128, 128, 2), 64: Cut(128, 128, 2), 128: Cut(128, 128, 2), 256: Cut(128, 32, 2)}
"""By the wider of the padded head dims."""
FUSED: Final = Cut(64, 128, 2)
_LINE: Final = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
KEYS: Final = {16: Cut(128, 128, 2), 32: Cut(128, 128, 2), 64: Cut(128, 128, 2), 128: Cut(64, 128, 2), 256: Cut(32, 128, 2)}


class HopperGradients:
    """The backward of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.problem = plan.problem
        self.rows = TritonKernel(plan)
        self.dims = self.rows.dims
        mask, formula = self.problem.variant.mask, self.problem.formula
        is_prefix = is_causal(self.problem.variant) or (mask.op == "const" and mask.value is True)
        self.is_fused = self.dims == (128, 128) and is_prefix and formula.block_size is None

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        """Gradients of the operands."""
        p, query, key, value = self.problem, operands.query, operands.key, operands.value
        if not (query.numel() and key.numel() and value.numel() and p.needs_backward):
            return self.rows.backward(operands, results, cotangents)
        fresh = torch.zeros_like if operands.cu_q is not None else torch.empty_like
        wanted = (p.query_grad, p.key_grad, p.value_grad)
        dq, dk, dv = (
            fresh(t, memory_format=torch.contiguous_format) if on else None for t, on in zip((query, key, value), wanted, strict=True)
        )
        dout = _described(cotangents.out)
        extra = {"out": results.out, "dout": dout} | {n: t for n, t in (("dq", dq), ("dk", dk), ("dv", dv)) if t is not None}
        call = self.rows.begin(operands, extra, sequences_of(operands), Recorder((), None))
        lse2, delta = self._prepare(call, results, dout, cotangents.lse)
        if dq is not None and dk is not None and dv is not None and self.is_fused and operands.cu_q is None:
            self._fused(call, dout, (lse2, delta), (dq, dk, dv))
        else:
            if dq is not None:
                self._query_gradient(call, dout, (lse2, delta), dq)
            for pair in self._key_passes(dk, dv):
                self._key_gradient(call, dout, (lse2, delta), pair)
        captures: tuple[Tensor | None, ...] = tuple(None for _ in operands.captures)
        if any(p.capture_grads):
            captures = capture_gradients(self.rows, call, (dout, lse2, delta), cotangents.lse)
        return Gradients(dq, dk, dv, captures)

    def _prepare(self, call: Pass, results: Results, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
        """lse in base 2, and delta: float32 [B, Hq, Sq], contiguous."""
        lse2, delta = (torch.empty_like(results.lse, memory_format=torch.contiguous_format) for _ in range(2))
        tile = 128 if self.dims[1] <= 128 else 32
        batch, heads, length = results.lse.shape
        dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
        prepare_rows[(batch * heads * triton.cdiv(length, tile),)](
            results.out, dout, results.lse.contiguous(), dlse, lse2, delta,
            self.rows.strides(call), self.rows.size(call, heads, 1), self.rows.config(call, Schedule(tile, tile, 4, 1), None), num_warps=4,
        )  # fmt: skip
        return lse2, delta

    def _query_gradient(self, call: Pass, dout: Tensor, rows: tuple[Tensor, Tensor], dq: Tensor) -> None:
        cut, operands = QUERIES[max(self.dims)], call.operands
        visits, functions = self.rows.visits(call, cut.schedule, "queries"), self._functions(operands, "q_idx")
        ragged = operands.cu_q is not None
        query, key, value = map(_described, (operands.query, operands.key, operands.value))
        of = functools.partial(describe, ragged=ragged)
        attention_query_gradient[(operands.query.shape[0] * operands.query.shape[1] * visits.tasks,)](
            of(query, 64), of(key, cut.tile_kv), of(value, cut.tile_kv), of(dout, 64), *rows, of(dq, 64),
            self.rows.size(call, query.shape[1], visits.tasks), visits.spans, visits.table, call.numbers, operands.scale,
            call.environment, self._config(call, cut, visits), functions.pre, functions.both, functions.mask, num_warps=4,
        )  # fmt: skip

    def _fused(self, call: Pass, dout: Tensor, rows: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor, Tensor]) -> None:
        operands, functions, (dq, dk, dv) = call.operands, self._functions(call.operands, "kv_idx"), grads
        ragged = operands.cu_q is not None
        query, key, value = map(_described, (operands.query, operands.key, operands.value))
        of = functools.partial(describe, ragged=ragged)
        (batch, heads, length, _), kv_heads, tasks = query.shape, key.shape[1], triton.cdiv(key.shape[2], FUSED.tile_kv)
        slots = triton.cdiv(length, FUSED.tile_q)
        turns = torch.zeros(1 + batch * heads * slots, dtype=torch.int32, device=query.device)
        sums = torch.empty(batch * heads * slots * FUSED.tile_q * self.dims[0], dtype=torch.float32, device=query.device)
        visits = Visits(tasks, "causal" if is_causal(self.problem.variant) else "all", DENSE, ALL)
        config = self._config(call, FUSED, visits)
        attention_gradients[(batch * kv_heads * tasks,)](
            of(query, FUSED.tile_q), of(key, 64), of(value, 64), of(dout, FUSED.tile_q), *(_row_values(t, FUSED.tile_q) for t in rows),
            sums, of(dk, 64), of(dv, 64), turns, encode(slots), self.rows.size(call, kv_heads, tasks), DENSE, call.numbers,
            operands.scale, call.environment, config, functions.pre, functions.both, functions.mask, num_warps=4,
        )  # fmt: skip
        finish_query_gradient[(batch * heads * slots,)](
            sums, turns, dq, self.rows.size(call, heads, slots), DENSE, encode(slots), operands.scale, config, num_warps=4
        )

    def _key_passes(self, dk: Tensor | None, dv: Tensor | None) -> tuple[tuple[Tensor | None, Tensor | None], ...]:
        """dk and dv in one kernel, or in two where their sums would not fit the registers together."""
        if dk is not None and dv is not None and sum(self.dims) > 256:
            return (dk, None), (None, dv)
        return () if dk is None and dv is None else ((dk, dv),)

    def _key_gradient(self, call: Pass, dout: Tensor, rows: tuple[Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None]) -> None:
        cut, operands = KEYS[max(self.dims)], call.operands
        visits, functions = self.rows.visits(call, cut.schedule, "keys"), self._functions(operands, "kv_idx")
        ragged = operands.cu_q is not None
        query, key, value = map(_described, (operands.query, operands.key, operands.value))
        of = functools.partial(describe, ragged=ragged)
        half = cut.tile_kv // 2
        attention_key_gradient[(key.shape[0] * key.shape[1] * visits.tasks,)](
            of(query, cut.tile_q), of(key, half), of(value, half), of(dout, cut.tile_q), *(_row_values(t, cut.tile_q) for t in rows),
            *(None if t is None else of(t, half) for t in grads),
            self.rows.size(call, key.shape[1], visits.tasks), visits.spans, visits.table, call.numbers, operands.scale,
            call.environment, self._config(call, cut, visits), functions.pre, functions.both, functions.mask,
            grads[0] is not None, grads[1] is not None, num_warps=4,
        )  # fmt: skip

    def _functions(self, operands: Operands, resident: str) -> Functions:
        return functions_of(self.rows.variant, lies_of(operands.captures), half=is_half(self.problem.dtype), resident=resident)

    def _config(self, call: Pass, cut: Cut, visits: Visits) -> Config:
        p = self.problem
        return _config(
            (
                2, False, cut.tile_q, cut.tile_kv, cut.stages, p.head_dim, self.dims[0], p.value_dim, self.dims[1], visits.mode,
                call.operands.cu_q is not None, call.is_plain, p.formula.dropout, p.formula.block_size is not None,
            )
        )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _config(values: tuple[Any, ...]) -> Config:
    return Config(*map(tl.constexpr, values))


def _described(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where TMA cannot read it as it lies."""
    return tensor if takes_descriptor(tensor) else tensor.contiguous()


def _row_values(tensor: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of runs of a float32 tensor, which is contiguous."""
    return TensorDescriptor(tensor.view(-1), [tensor.numel()], [1], [rows], _LINE)
