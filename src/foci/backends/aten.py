"""torch's own fused kernels, where the problem is exactly one of theirs: plain or causal attention of dense tensors.

| device | operator | for |
|---|---|---|
| cpu | `_scaled_dot_product_flash_attention_for_cpu` | every dtype, grouped heads |
| cuda | `_scaled_dot_product_flash_attention` | float16 and bfloat16 from sm_80, grouped heads |
| cuda | `_scaled_dot_product_efficient_attention` | float32, without gradients, which it would sum in no fixed order |

cuDNN is left out: it builds a plan for every new shape, which a first call of each length would wait for. Where torch's kernel lets NaN of
an excluded position through, the backend `blocked` computes the call once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from foci.backends import blocked
from foci.backends.causal import is_causal
from foci.backends.contract import Backend, Kernel, Plan
from foci.backends.excluded import has_not_finite
from foci.backends.sequences import is_empty, without_keys
from foci.compat.aten import EFFICIENT_FORWARD, FLASH_BACKWARD, FLASH_CPU_BACKWARD, FLASH_CPU_FORWARD, FLASH_FORWARD, Absent
from foci.problem import Cotangents, Gradients, Layout, Operands, Problem, Results, Target, empty_out, result_strides
from foci.variant import PLAIN

__all__ = ["BACKEND"]

_HALF: Final = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True, eq=False)
class _Call:
    """Tensors as torch's operators want them: the last stride 1."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    causal: bool


Forward = Callable[[_Call], tuple[Tensor, Tensor]]
Backward = Callable[[_Call, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class _Op:
    """One of torch's operators: what it takes, how fast it is, how it is called.

    Attributes:
        device: kind of device.
        dtypes: of query, key and value; empty for all.
        arch: least compute capability.
        head_dim: largest head dim, and what it must be a multiple of.
        grouped: whether it takes fewer key heads than query heads.
        overhead: seconds of a call with hardly any work.
        flops: forward and backward, per second; a half type first, float32, float64.
        forward, backward: the call; no backward where its gradients would not be repeatable.
        needs: what they call.
    """

    name: str
    device: str
    dtypes: frozenset[torch.dtype]
    arch: int
    head_dim: tuple[int, int]
    grouped: bool
    overhead: float
    flops: dict[torch.dtype, tuple[float, float]]
    forward: Forward
    backward: Backward | None
    needs: tuple[Any, ...]

    def reject(self, problem: Problem, target: Target) -> str | None:
        """Why torch's operator cannot solve the problem on the target, or None."""
        largest, multiple = self.head_dim
        named = str(problem.dtype).removeprefix("torch.")
        absent = [operator for operator in self.needs if isinstance(operator, Absent)]
        checks = (
            (bool(absent), f"torch {torch.__version__} has no {absent[0].path}" if absent else ""),
            (problem.dtype not in self.dtypes, f"{self.name} does not take {named}"),
            (target.arch < self.arch, f"{self.name} needs sm_{self.arch}, this is sm_{target.arch}"),
            (problem.head_dim > largest, f"{self.name} takes a head dim up to {largest}, this is {problem.head_dim}"),
            (problem.head_dim % multiple != 0, f"{self.name} takes multiples of {multiple} for a head dim, this is {problem.head_dim}"),
            (not self.grouped and problem.q_heads != problem.kv_heads, f"{self.name} takes as many key heads as query heads"),
            (self.backward is None and problem.needs_backward, f"{self.name} would sum gradients in no fixed order"),
        )
        return next((reason for is_unsupported, reason in checks if is_unsupported), None)


def _cpu_forward(call: _Call) -> tuple[Tensor, Tensor]:
    out, lse = FLASH_CPU_FORWARD(call.query, call.key, call.value, 0.0, call.causal, scale=call.scale)
    return out, lse


def _cpu_backward(call: _Call, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grads: tuple[Tensor, Tensor, Tensor] = FLASH_CPU_BACKWARD(
        grad, call.query, call.key, call.value, out, lse, 0.0, call.causal, scale=call.scale
    )
    return grads


def _squares(call: _Call) -> list[tuple[_Call, slice, slice]]:
    """Calls that add up to this one, with their queries and keys: flash attention aligns causal to the lower right.

    Upper-left causal is a square of the leading queries and keys, then queries that see every key.
    """
    q_len, kv_len = call.query.shape[2], call.key.shape[2]
    if not call.causal or q_len == kv_len:
        return [(call, slice(0, q_len), slice(0, kv_len))]
    side = min(q_len, kv_len)
    pieces = [(slice(0, side), slice(0, side), True), (slice(side, q_len), slice(0, kv_len), False)]
    return [
        (_Call(call.query[:, :, q], call.key[:, :, kv], call.value[:, :, kv], call.scale, causal), q, kv)
        for q, kv, causal in pieces
        if q.stop > q.start
    ]


def _flash_forward(call: _Call) -> tuple[Tensor, Tensor]:
    def run(part: _Call) -> tuple[Tensor, Tensor]:
        inputs = (part.query, part.key, part.value)
        out, lse, *_ = FLASH_FORWARD(*inputs, 0.0, part.causal, False, scale=part.scale)
        return out, lse

    outs, lses = zip(*(run(part) for part, _, _ in _squares(call)), strict=True)
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, dim=2), torch.cat(lses, dim=2))


def _flash_backward(call: _Call, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.zeros(2, dtype=torch.uint64, device=grad.device)
    queries = []
    key, value = (torch.zeros_like(t, dtype=torch.float32) for t in (call.key, call.value))
    pieces = _squares(call)
    with _repeatable():
        for part, q, kv in pieces:
            lengths = (part.query.shape[2], part.key.shape[2])
            rows = (grad[:, :, q], part.query, part.key, part.value, out[:, :, q], lse[:, :, q].contiguous())
            part_grads = FLASH_BACKWARD(*rows, None, None, *lengths, 0.0, part.causal, random, random, scale=part.scale)
            if len(pieces) == 1 and kv.stop == call.key.shape[2]:
                return part_grads[0], part_grads[1], part_grads[2]
            queries.append(part_grads[0])
            key[:, :, kv] += part_grads[1]
            value[:, :, kv] += part_grads[2]
    return torch.cat(queries, dim=2), key.to(call.key.dtype), value.to(call.value.dtype)


def _efficient_forward(call: _Call) -> tuple[Tensor, Tensor]:
    inputs = (call.query, call.key, call.value)
    out, lse, *_ = EFFICIENT_FORWARD(*inputs, None, True, 0.0, call.causal, scale=call.scale)
    return out, lse[:, :, : call.query.shape[2]]  # rows are padded to a multiple of 32


@contextmanager
def _repeatable() -> Iterator[None]:
    """torch's flash backward sums dq in a fixed order when asked for deterministic algorithms."""
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if was and not warns:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warns)


# CPU: measured on 2 cores of AMD Zen 4, torch 2.13. CUDA: H200, torch 2.11, head dim 128, length 8192.
_OPS: Final = (
    _Op(
        name="flash attention for the CPU",
        device="cpu",
        dtypes=_HALF | {torch.float32, torch.float64},
        arch=0,
        head_dim=(1 << 30, 1),
        grouped=True,
        overhead=15e-6,
        flops={torch.float32: (150e9, 140e9), torch.bfloat16: (150e9, 200e9), torch.float16: (100e9, 100e9), torch.float64: (55e9, 44e9)},
        forward=_cpu_forward,
        backward=_cpu_backward,
        needs=(FLASH_CPU_FORWARD, FLASH_CPU_BACKWARD),
    ),
    _Op(
        name="flash attention",
        device="cuda",
        dtypes=_HALF,
        arch=80,
        head_dim=(256, 8),
        grouped=True,
        overhead=55e-6,
        flops={torch.bfloat16: (330e12, 200e12), torch.float16: (330e12, 200e12)},
        forward=_flash_forward,
        backward=_flash_backward,
        needs=(FLASH_FORWARD, FLASH_BACKWARD),
    ),
    _Op(
        name="memory-efficient attention",
        device="cuda",
        dtypes=frozenset({torch.float32}),
        arch=50,
        head_dim=(1 << 16, 4),
        grouped=False,
        overhead=55e-6,
        flops={torch.float32: (30e12, 20e12)},
        forward=_efficient_forward,
        backward=None,
        needs=(EFFICIENT_FORWARD,),
    ),
)


def _op_for(problem: Problem, target: Target) -> _Op | str:
    """The operator that solves the problem, or why none does."""
    reasons = []
    for op in _OPS:
        if op.device == target.device:
            reason = op.reject(problem, target)
            if reason is None:
                return op
            reasons.append(reason)
    return "; ".join(reasons) or f"torch has no fused kernel for {target.device}"


def _unsupported(problem: Problem) -> str | None:
    """Return what torch's fused kernels lack of the problem's formula, if anything."""
    formula, outputs = problem.formula, problem.formula.outputs
    checks = (
        (formula.layout is not Layout.DENSE, "torch's fused kernels take the dense layout"),
        (formula.variant.score is not PLAIN.score, "torch's fused kernels take no score function"),
        (
            formula.variant.mask is not PLAIN.mask and not is_causal(formula.variant),
            "torch's fused kernels take no mask function but upper-left causal",
        ),
        (formula.block_size is not None, "torch's fused kernels take no block mask"),
        (formula.dropout, "torch's fused kernels have a dropout of their own, which depends on their tiles"),
        (outputs.row_max or outputs.column_sums or outputs.weights, "torch's fused kernels return no row_max, column_sums or weights"),
        (outputs.lse and problem.needs_backward, "torch's fused kernels have no gradient of lse"),
        (problem.head_dim != problem.value_dim, f"torch's fused kernels need Dv = D, these are {problem.value_dim} and {problem.head_dim}"),
    )
    return next((reason for is_unsupported, reason in checks if is_unsupported), None)


@dataclass(frozen=True)
class _Kernel(Kernel):
    problem: Problem
    op: _Op
    exact: Kernel  # of `blocked`

    def forward(self, operands: Operands, /) -> Results:
        if is_empty(operands):  # torch's kernel for the CPU divides by zero
            return without_keys(operands, self.problem.formula.outputs)
        out, lse = self.op.forward(self._call(operands))
        if self._lets_through(out):
            return self.exact.forward(operands)
        query = operands.query
        wanted = result_strides(query.shape, query.stride(), out.shape[3])
        if any(n > 1 and a != b for n, a, b in zip(out.shape, out.stride(), wanted, strict=True)):
            out = empty_out(query, operands.value).copy_(out)
        return Results(out, lse)

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        """Gradients by torch's own operator, which takes no gradient of the logsumexp."""
        assert self.op.backward is not None
        assert cotangents.lse is None
        asked = (self.problem.query_grad, self.problem.key_grad, self.problem.value_grad)
        if is_empty(operands):
            grads: tuple[Tensor, ...] = tuple(torch.zeros_like(t) for t in (operands.query, operands.key, operands.value))
        else:
            grads = self.op.backward(self._call(operands), _unit(cotangents.out), results.out, results.lse)
            if self._lets_through(*grads):
                return self.exact.backward(operands, results, cotangents)
            if operands.scale <= 0:
                grads = (grads[0] * _sign(operands.scale), *grads[1:])
        query, key, value = (grad if on else None for grad, on in zip(grads, asked, strict=True))
        return Gradients(query, key, value)

    def _lets_through(self, *results: Tensor) -> bool:
        """Whether results may hold NaN of excluded positions, which torch's operators multiply by weights of 0. A GPU is waited for; while
        a CUDA graph is captured there is nothing to wait for."""
        if not is_causal(self.problem.variant) or (results[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        return has_not_finite(*results)

    def _call(self, operands: Operands) -> _Call:
        query, scale = operands.query, operands.scale
        if scale <= 0:
            # torch's kernel for the CPU scales the -inf of masked scores too, to +inf or NaN.
            query, scale = query * _sign(scale), -scale or 1.0
        return _Call(_unit(query), _unit(operands.key), _unit(operands.value), scale, is_causal(self.problem.variant))


def _sign(scale: float) -> float:
    return -1.0 if scale < 0 else 0.0


def _unit(t: Tensor) -> Tensor:
    # torch's operators read another last stride as if it were 1.
    return t if t.stride(-1) == 1 else t.contiguous()


class _Aten(Backend):
    name = "aten"

    def reject(self, problem: Problem, target: Target, /) -> str | None:
        reason = _unsupported(problem)
        if reason is None:
            op = _op_for(problem, target)
            reason = op if isinstance(op, str) else None
        return reason

    def cost(self, problem: Problem, target: Target, /) -> float:
        """Seconds: the operator's measured overhead, and its flops (2.5 times as many backward) at its measured rates.

        Causal attention has half the flops.
        """
        op = _op_for(problem, target)
        assert isinstance(op, _Op)
        forward, backward = op.flops[problem.dtype]
        flops = problem.flops * (0.5 if is_causal(problem.variant) else 1.0)
        seconds = op.overhead + flops / forward
        return seconds + (2 * op.overhead + 2.5 * flops / backward if problem.needs_backward else 0.0)

    def kernel_key(self, plan: Plan, /) -> tuple[str, str]:
        """The text and the operator, which not every number of heads finds."""
        op = _op_for(plan.problem, plan.target)
        assert isinstance(op, _Op)
        return plan.text, op.name

    def build(self, plan: Plan, /) -> _Kernel:
        op = _op_for(plan.problem, plan.target)
        assert isinstance(op, _Op)
        return _Kernel(plan.problem, op, blocked.BACKEND.build(plan))


BACKEND = _Aten()
