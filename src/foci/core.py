"""A call where Python runs: prepared, planned, handed to the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foci import cache_check
from foci.call_cache import compare_with_prepared, find_site, remember
from foci.compat.torch import is_cudnn_sdp_enabled, is_flash_sdp_enabled, is_math_sdp_enabled, is_mem_efficient_sdp_enabled
from foci.context import allowed_backends
from foci.execution import Allowed, decide
from foci.operator import Optional, Outline, as_batch, attend, attend_outlined, packed_rows
from foci.planner import Decision
from foci.prepare import Extras, prepare
from foci.problem import Formula, Operands, Results

__all__ = ["Check", "Function", "Tensors", "allowed_for", "decision", "packed_call", "run_now", "run_packed_now"]

Function = Callable[..., Any] | None
Tensors = tuple[Tensor, Tensor, Tensor]
Check = Callable[[Tensors, Extras], None]


def run_now(tensors: Tensors, score: Function, mask: Function, extras: Extras, allowed: Allowed) -> Results:
    """Attention without its sink, eagerly or while a graph is made of tensor operations. Arguments as `foci.dispatch.run`."""
    site = find_site(tensors, score, mask, extras, allowed)
    if site is None:
        formula, operands = prepare(tensors, score, mask, extras)
        return attend(formula, operands, allowed)
    found = site.recalled(extras)
    if found is not None:
        if cache_check.ENABLED:
            formula, operands = _prepared_again(tensors, score, mask, extras)
            compare_with_prepared(found, site, formula, operands, allowed)
        return attend_outlined(*found)
    formula, operands = prepare(tensors, score, mask, extras)
    return attend_outlined(*remember(site, tensors, formula, operands, allowed))


def run_packed_now(
    tensors: Tensors, score: Function, mask: Function, extras: Extras, allowed: Allowed, check: Check | None = None
) -> Results:  # fmt: skip
    """`run_now` of packed tensors [T, H, D]; out is [T, Hq, Dv], and lse, the only other output it may be asked for, [Hq, T]."""
    found = packed_call(tensors, score, mask, extras, allowed, check)
    if found is None:
        results = run_now(_batches(tensors), score, mask, extras, allowed)
        return Results(packed_rows(results.out), results.lse.squeeze(0))
    return attend_outlined(*found)


def packed_call(
    tensors: Tensors, score: Function, mask: Function, extras: Extras, allowed: Allowed, check: Check | None = None, *, learns: bool = False
) -> tuple[Outline, tuple[Tensor, ...], Optional] | None:
    """A call of packed tensors as `foci.operator` takes it; None for one that must be prepared each time.

    `check` is called unless the call is known, of which it held. `learns`: it is asked for gradients of query, key and value, whatever
    they say.
    """
    site = find_site(tensors, score, mask, extras, allowed, learns=learns)
    found = None if site is None else site.recalled(extras)
    if site is not None and found is not None:
        if cache_check.ENABLED:
            with torch.no_grad():
                formula, operands = _prepared_again(_batches(tensors), score, mask, extras)
            compare_with_prepared(found, site, formula, operands, allowed, packed=True, learns=learns)
        return found
    if check is not None:
        check(tensors, extras)
    if site is None:
        return None
    with torch.no_grad():  # autograd takes the tensors as they are
        batches = _batches(tensors)
    formula, operands = prepare(batches, score, mask, extras)
    return remember(site, batches, formula, operands, allowed, packed=True, learns=learns)


def _prepared_again(tensors: Tensors, score: Function, mask: Function, extras: Extras) -> tuple[Formula, Operands]:
    """`prepare` without moving the generator that dropout draws its seed from."""
    device = tensors[0].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return prepare(tensors, score, mask, extras)


def _batches(tensors: Tensors) -> Tensors:
    return as_batch(tensors[0]), as_batch(tensors[1]), as_batch(tensors[2])


def decision(tensors: Tensors, score: Function, mask: Function, extras: Extras) -> Decision:
    """What the planner would do with a call; nothing runs."""
    with torch.random.fork_rng(devices=[]):  # a seed that nobody will use must not move the generator
        formula, operands = prepare(tensors, score, mask, extras)
    grad = torch.is_grad_enabled()
    flags = [grad and t.requires_grad for t in (operands.query, operands.key, operands.value, *operands.captures)]
    return decide(formula, operands, (flags[0], flags[1], flags[2], tuple(flags[3:])), allowed_for(extras))


def allowed_for(extras: Extras) -> Allowed:
    """The backends that `foci.use` and, for torch's entry point, torch's switches leave; None for all."""
    allowed = allowed_backends()
    if extras.honour_sdp_flags:
        by_torch = _allowed_by_torch()
        if by_torch is not None:
            return by_torch if allowed is None else tuple(name for name in by_torch if name in allowed)
    return allowed


def _allowed_by_torch() -> Allowed:
    """torch's `sdpa_kernel` context and global flags, read as foci backends.

    MATH is the formula, `reference`; every other flag allows the fused backends; no flag at all allows none.
    """
    from foci import backends

    math = is_math_sdp_enabled()
    if is_flash_sdp_enabled() or is_mem_efficient_sdp_enabled() or is_cudnn_sdp_enabled():
        return None if math else tuple(name for name in backends.names() if name != "reference")
    return ("reference",) if math else ()
