"""A call where Python runs: prepared, planned, handed to the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci import cache_check, call_cache
from foci.compat.torch import is_forward_ad_open
from foci.environment import Allowed, allowed_backends, allowed_by_torch, read_environment
from foci.execution import choose_kernel, decide
from foci.ir.function_fingerprint import Fingerprint, fingerprint
from foci.operator import (
    NOTHING,
    Outline,
    as_batch,
    attend,
    attend_outlined,
    find_outline,
    is_plain_eager,
    make_outline,
    optional_tensors,
    packed_rows,
)
from foci.planner import Decision
from foci.prepare import Extras, draw_seed, prepare
from foci.problem import Formula, Operands, OptionalTensors, Program, Results, make_tuple
from foci.spec import CallSpec, Needs, find_needs, spec_of_functions
from foci.trace_functions import is_kept

__all__ = ["Check", "Function", "PlannedCall", "Tensors", "allowed_for", "decision", "find_call", "run_now", "run_packed_now"]

Function = Callable[..., Any] | None
Tensors = tuple[Tensor, Tensor, Tensor]
Check = Callable[[Tensors, Extras], None]


class PlannedCall(NamedTuple):
    """A planned call, as `foci.operator.attend_outlined` takes it.

    Attributes:
        outline: the call without its tensors.
        tensors: query, key, value and captured tensors.
        optional: the others.
    """

    outline: Outline
    tensors: tuple[Tensor, ...]
    optional: OptionalTensors


class _Site(NamedTuple):
    """The arguments of `find_call`, with the call's spec and its functions' fingerprints."""

    spec: CallSpec
    functions: tuple[Fingerprint, Fingerprint]
    tensors: Tensors
    score: Function
    mask: Function
    extras: Extras
    packed: bool
    needs_all: bool

    @property
    def closed(self) -> list[Tensor]:
        """The tensors that the functions read."""
        return self.functions[0].tensors + self.functions[1].tensors


class _Known(NamedTuple):
    """A planned call without its tensors; `spots` has the number of each captured tensor among those that the functions read."""

    outline: Outline
    spots: tuple[int, ...]


def run_now(
    tensors: Tensors, score: Function, mask: Function, extras: Extras, allowed: Allowed, check: Check | None = None
) -> Results:  # fmt: skip
    """Attention without its sink, eagerly or while a graph is made of tensor operations. Arguments as `foci.dispatch.run`."""
    call = find_call(tensors, score, mask, extras, allowed, check=check)
    if call is not None:
        return attend_outlined(*call)
    formula, operands = prepare(tensors, score, mask, extras)
    return attend(formula, operands, allowed)


def run_packed_now(
    tensors: Tensors, score: Function, mask: Function, extras: Extras, allowed: Allowed, check: Check | None = None
) -> Results:  # fmt: skip
    """`run_now` of packed tensors [T, H, D]; out is [T, Hq, Dv], and lse, the only other output it may be asked for, [Hq, T]."""
    call = find_call(tensors, score, mask, extras, allowed, check=check, packed=True)
    if call is not None:
        return attend_outlined(*call)
    results = run_now(_batches(tensors), score, mask, extras, allowed)
    return Results(packed_rows(results.out), results.lse.squeeze(0))


def find_call(
    tensors: Tensors, score: Function, mask: Function, extras: Extras, allowed: Allowed, *, check: Check | None = None,
    packed: bool = False, needs_all: bool = False,
) -> PlannedCall | None:  # fmt: skip
    """The planned call, from the cache or planned now; None for one that has no spec, or where more than autograd watches.

    Args:
        tensors: query, key and value.
        score, mask: the functions.
        extras: the rest.
        allowed: backends that it may use.
        check: called with tensors and extras, unless the call was planned before: then it passed.
        packed: tensors are [T, H, D].
        needs_all: gradients of query, key and value, and of these alone, are wanted, whatever the tensors say.

    Raises:
        NoViableBackend: if no backend accepts the problem.
    """
    scored = masked = spec = None
    if is_plain_eager(tensors) and not is_forward_ad_open():
        scored, masked = fingerprint(score), fingerprint(mask)
        if scored is not None and masked is not None:
            spec = spec_of_functions(tensors, (scored, masked), extras, allowed, needs_all=needs_all)
    known: _Known | None = None if spec is None else call_cache.recall(spec)
    if known is None and check is not None:
        check(tensors, extras)
    if spec is None or scored is None or masked is None:
        return None
    if known is not None and not cache_check.ENABLED:
        return _with_tensors(known, tensors, (scored, masked), extras)
    site = _Site(spec, (scored, masked), tensors, score, mask, extras, packed, needs_all)
    if known is None:
        return _plan(site)
    call = _with_tensors(known, tensors, site.functions, extras)
    _compare(call, site)
    return call


def _with_tensors(known: _Known, inputs: Tensors, functions: tuple[Fingerprint, Fingerprint], e: Extras) -> PlannedCall:
    """A call that was planned for other tensors, and a dropout seed of its own."""
    tensors: tuple[Tensor, ...] = inputs
    if known.spots:
        closed = functions[0].tensors + functions[1].tensors
        tensors += tuple([closed[n] for n in known.spots])
    call: PlannedCall
    has_dropout = known.outline.dropout_p > 0
    if not has_dropout and e.cu_q is None and e.page_table is None and e.blocks is None:
        call = make_tuple(PlannedCall, (known.outline, tensors, NOTHING))
        return call
    seed = draw_seed(inputs[0].device) if has_dropout else None
    optional = make_tuple(OptionalTensors, (seed, e.blocks, e.cu_q, e.cu_kv, e.q_lengths, e.kv_lengths, e.page_table))
    call = make_tuple(PlannedCall, (known.outline, tensors, optional))
    return call


def _plan(site: _Site) -> PlannedCall:
    """Prepares and plans a call, and keeps the plan if the spec says all that it depends on."""
    _, _, tensors, score, mask, extras, packed, _ = site
    batches = tensors
    if packed:
        with torch.no_grad():  # autograd takes the tensors as they are
            batches = _batches(tensors)
    formula, operands = prepare(batches, score, mask, extras)
    spots = {id(t): n for n, t in enumerate(site.closed)}
    is_unchanged = batches[0] is operands.query and batches[1] is operands.key and batches[2] is operands.value  # no batch was repeated
    has_blocks = extras.blocks is not None
    is_complete = (
        is_unchanged
        and is_kept(*site.functions, operands.query.device, has_blocks=has_blocks)
        and all(id(t) in spots for t in operands.captures)
    )
    if not is_complete:
        first = tensors if packed else (operands.query, operands.key, operands.value)
        every = (*first, *operands.captures)
        outline = find_outline(formula, operands, every, _needs(site, every), site.spec.environment.allowed, packed=packed)
        return PlannedCall(outline, every, optional_tensors(operands))
    call = _outlined(site, formula, operands, Program(packed=packed))
    call_cache.keep(site.spec, _Known(call.outline, tuple(spots[id(t)] for t in operands.captures)))
    return call


def _outlined(site: _Site, formula: Formula, operands: Operands, program: Program | None) -> PlannedCall:
    tensors, packed = site.tensors, site.packed
    needs = _needs(site, (*tensors, *operands.captures))
    chosen = choose_kernel(formula, operands, needs, site.spec.environment)
    outline = make_outline(chosen, operands, packed=packed, program=program)
    first = tensors if packed else (operands.query, operands.key, operands.value)
    return PlannedCall(outline, (*first, *operands.captures), optional_tensors(operands))


def _needs(site: _Site, tensors: Sequence[Tensor]) -> Needs:
    return (True, True, True, (False,) * (len(tensors) - 3)) if site.needs_all else find_needs(tensors)


def _compare(cached: PlannedCall, site: _Site) -> None:
    """Compares a call of the cache with the same call prepared and planned anew.

    Raises:
        StaleCacheError: if they differ.
    """
    _, _, tensors, score, mask, extras, packed, _ = site
    device = tensors[0].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        formula, operands = prepare(_batches(tensors) if packed else tensors, score, mask, extras)
    rebuilt = _outlined(site, formula, operands, None)
    # each call draws a seed of its own
    one, other = ({**call.outline.comparable(), "tensors": call.tensors, "optional": call.optional[1:]} for call in (cached, rebuilt))
    cache_check.compare("the cache of planned calls", one, other)


def _batches(tensors: Tensors) -> Tensors:
    return as_batch(tensors[0]), as_batch(tensors[1]), as_batch(tensors[2])


def decision(tensors: Tensors, score: Function, mask: Function, extras: Extras) -> Decision:
    """Return what the planner would do with a call; nothing runs."""
    with torch.random.fork_rng(devices=[]):  # a seed that nobody will use must not move the generator
        formula, operands = prepare(tensors, score, mask, extras)
    needs = find_needs((operands.query, operands.key, operands.value, *operands.captures))
    return decide(formula, operands, needs, read_environment(allowed_for(extras), operands.query.device))


def allowed_for(extras: Extras) -> Allowed:
    """The backends that `foci.use` and, for torch's entry point, torch's switches leave; None for all."""
    return allowed_by_torch() if extras.honour_sdp_flags else allowed_backends()
