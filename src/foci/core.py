"""The one road every entry point takes: functions, tensors and extras in; output and auxiliary outputs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foci.context import allowed_backends
from foci.execution import Allowed, decide
from foci.operator import attend
from foci.planner import Decision
from foci.prepare import Extras, prepare
from foci.problem import Results

__all__ = ["Function", "Tensors", "decision", "run"]

Function = Callable[..., Any] | None
Tensors = tuple[Tensor, Tensor, Tensor]


def run(tensors: Tensors, score: Function, mask: Function, extras: Extras) -> Results:
    """Attention of checked or unchecked arguments, eager or under any tracer.

    Args:
        tensors: query, key, value as `foci.prepare.prepare` takes them.
        score, mask: functions of (score, b, h, q_idx, kv_idx) and (b, h, q_idx, kv_idx), or None.
        extras: everything else.

    Raises:
        TypeError, ValueError: for wrong arguments.
        NoViableBackend: if no backend accepts the problem.
    """
    if torch.compiler.is_dynamo_compiling():
        from foci.graph.capture import run_captured

        results = run_captured(tensors, score, mask, extras)
    else:
        results = run_now(tensors, score, mask, extras)
    return results if extras.sink is None else _with_sink(results, extras.sink)


def _with_sink(results: Results, sink: Tensor) -> Results:
    """A logit without a value scales its row by sigmoid(lse - sink), and enters the row's logsumexp."""
    lse = results.lse
    logit = sink.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - logit)
    out = (results.out * share[..., None]).to(results.out.dtype)
    weights = None if results.weights is None else (results.weights * share[..., None]).to(results.weights.dtype)
    return Results(out, torch.logaddexp(lse, logit), results.row_max, results.column_sums, weights)


def run_now(tensors: Tensors, score: Function, mask: Function, extras: Extras) -> Results:
    """`run` without the sink, where Python runs: eagerly, or while a graph is made of tensor operations."""
    formula, operands = prepare(tensors, score, mask, extras)
    return attend(formula, operands, _allowed(extras))


def decision(tensors: Tensors, score: Function, mask: Function, extras: Extras) -> Decision:
    """What the planner would do with a call; nothing runs."""
    with torch.random.fork_rng(devices=[]):  # a seed that nobody will use must not move the generator
        formula, operands = prepare(tensors, score, mask, extras)
    grad = torch.is_grad_enabled()
    flags = [grad and t.requires_grad for t in (operands.query, operands.key, operands.value, *operands.captures)]
    return decide(formula, operands, (flags[0], flags[1], flags[2], tuple(flags[3:])), _allowed(extras))


def _allowed(extras: Extras) -> Allowed:
    allowed = allowed_backends()
    if extras.honour_sdp_flags:
        by_torch = _allowed_by_torch()
        if by_torch is not None:
            return by_torch if allowed is None else tuple(name for name in by_torch if name in allowed)
    return allowed


def _allowed_by_torch() -> Allowed:
    """torch's `sdpa_kernel` context and global flags, read as foci backends (SDPA-15).

    MATH is the formula, `reference`; every other flag allows the fused backends; no flag at all allows none.
    """
    from foci import backends

    switches = torch.backends.cuda
    fused = switches.flash_sdp_enabled() or switches.mem_efficient_sdp_enabled() or switches.cudnn_sdp_enabled()
    math = switches.math_sdp_enabled()
    if fused:
        return None if math else tuple(name for name in backends.names() if name != "reference")
    return ("reference",) if math else ()
