"""Functions run on symbols: what they compute becomes a `Variant`, what they captured goes beside it."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from foci import cache_check
from foci.ir import expr as ir
from foci.ir.expr import DType, Expr
from foci.ir.function_fingerprint import NOTHING, Fingerprint, fingerprint, shared
from foci.ir.lift_constants import lift_constants
from foci.ir.lift_mask import lift_mask
from foci.ir.ops import apply, cast
from foci.ir.rewrite import rewrite
from foci.ir.simplify import simplify
from foci.ir.trace import SYMBOLIC_BASE, TraceError, Tracer
from foci.ir.verify import verify
from foci.variant import PLAIN, Capture, Variant

__all__ = ["Bound", "bind", "bind_expressions", "cache_sizes", "is_kept"]

_MASK_VARIABLES: Final = ("b", "h", "q_idx", "kv_idx")
_SCORE_VARIABLES: Final = ("score", *_MASK_VARIABLES)


BlockSize: TypeAlias = tuple[int, int] | None


@dataclass(frozen=True, eq=False)
class Bound:
    """A variant with what it captured this time.

    `block_size` is that of the block classes that the caller gives beside the mask. A formula takes it from here, because whether
    there are such classes decides what the variant's mask may hold (see `bind`).
    """

    variant: Variant
    captures: tuple[Tensor, ...] = ()
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    block_size: BlockSize = None


_PLAIN_BOUND = Bound(PLAIN)


def bind(score: Callable[..., Any] | None, mask: Callable[..., Any] | None, device: torch.device, block_size: BlockSize = None) -> Bound:
    """Runs the functions on symbols and separates what they compute from the tensors and numbers they captured.

    A function that has a fingerprint runs once for each of the last few sets of numbers that it reads.

    Where a score function gives -inf, the mask takes its place. But kernels do not evaluate the mask in blocks that a caller classed
    as FULL, so with given blocks such scores stay scores.

    Args:
        score, mask: the functions; either may be None.
        device: of the call.
        block_size: queries and keys of a block whose class the caller gives; None where the caller gives no classes.

    Raises:
        TraceError: for an operation outside the language.
    """
    if score is None and mask is None and block_size is None:
        return _PLAIN_BOUND
    prints = (fingerprint(score), fingerprint(mask))
    if prints[0] is None or prints[1] is None:
        bound = _traced(score, mask, device, has_blocks=block_size is not None)[0]
    else:
        bound = _remembered((prints[0], prints[1]), score, mask, device, has_blocks=block_size is not None)
    return bound if block_size is None else replace(bound, block_size=block_size)


@dataclass(frozen=True, eq=False)
class _Trace:
    """A trace without its tensors; `spots` has the number of each captured tensor among those of the fingerprints."""

    bound: Bound
    spots: tuple[int, ...]


_SETS_OF_NUMBERS: Final = 8
_STRUCTURES: Final = 512
_traces: OrderedDict[tuple[Any, ...], OrderedDict[tuple[Any, ...], _Trace]] = OrderedDict()


def _remembered(
    prints: tuple[Fingerprint, Fingerprint],
    score: Callable[..., Any] | None,
    mask: Callable[..., Any] | None,
    device: torch.device,
    *,
    has_blocks: bool,
) -> Bound:
    structure, numbers = _key(prints, device, has_blocks=has_blocks)
    tensors = prints[0].tensors + prints[1].tensors
    traces = _traces.get(structure)
    if traces is None:
        traces = _traces[structure] = OrderedDict()
        _drop_oldest(_traces, _STRUCTURES)
    trace = traces.pop(numbers, None)
    if trace is not None:
        traces[numbers] = trace  # the newest; another thread may have dropped it meanwhile
        b = trace.bound
        known = Bound(b.variant, tuple(tensors[n] for n in trace.spots), b.ints, b.floats)
        if cache_check.ENABLED:
            cache_check.compare("the cache of traced functions", vars(known), vars(_traced(score, mask, device, has_blocks=has_blocks)[0]))
        return known
    bound, varies = _traced(score, mask, device, has_blocks=has_blocks)
    spots = {id(t): n for n, t in enumerate(tensors)}
    if not varies and all(id(t) in spots for t in bound.captures):
        traces[numbers] = _Trace(Bound(bound.variant, (), bound.ints, bound.floats), tuple(spots[id(t)] for t in bound.captures))
        _drop_oldest(traces, _SETS_OF_NUMBERS)
    return bound


def _key(prints: tuple[Fingerprint, Fingerprint], device: torch.device, *, has_blocks: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    structure = (prints[0].structure, prints[1].structure, shared(*prints), device, has_blocks)
    return structure, (*prints[0].numbers, None, *prints[1].numbers)


def is_kept(score: Fingerprint, mask: Fingerprint, device: torch.device, *, has_blocks: bool) -> bool:
    """Whether the last `bind` of functions with these fingerprints holds for the next: they may read values while they run."""
    structure, numbers = _key((score, mask), device, has_blocks=has_blocks)
    return score.structure == mask.structure == NOTHING.structure or numbers in _traces.get(structure, ())


def _drop_oldest(cache: OrderedDict[Any, Any], capacity: int) -> None:
    while len(cache) > capacity:
        cache.popitem(last=False)


def _traced(
    score: Callable[..., Any] | None, mask: Callable[..., Any] | None, device: torch.device, *, has_blocks: bool
) -> tuple[Bound, bool]:
    """Return what the functions compute, and whether symbolic integers or the values of tensors took part."""
    tracer = Tracer(device)
    score_expr = PLAIN.score if score is None else _as_score(tracer.trace(score, _SCORE_VARIABLES))
    mask_expr = PLAIN.mask if mask is None else _as_mask(tracer.trace(mask, _MASK_VARIABLES))
    bound = bind_expressions(score_expr, mask_expr, tracer, has_blocks=has_blocks)
    return bound, bool(tracer.symbolic) or tracer.reads_values


def bind_expressions(score_expr: Expr, mask_expr: Expr, tracer: Tracer, *, has_blocks: bool = False) -> Bound:
    """The variant of two expressions whose captures and symbolic numbers `tracer` holds. `has_blocks`: the caller gives classes of blocks,
    so that the mask may hold nothing of the score, see `bind`."""
    # Numbers leave before anything is simplified, so that what follows is done once, whatever they are.
    lifted, ints, floats = lift_constants((score_expr, mask_expr))
    form = _canonical(*lifted, has_blocks=has_blocks)
    tensors = tuple(tracer.tensors[slot] for slot in form.captures)
    variant = _variant(form.score, form.mask, tuple(Capture(t.dtype, t.dim()) for t in tensors))
    known: dict[bool, tuple[Any, ...]] = {True: ints, False: floats}

    def values(slots: tuple[int, ...], *, integer: bool) -> Iterator[Any]:
        for slot in slots:
            yield tracer.symbolic[slot - SYMBOLIC_BASE] if slot >= SYMBOLIC_BASE else known[integer][slot]

    return Bound(variant, tensors, tuple(values(form.ints, integer=True)), tuple(values(form.floats, integer=False)))


def _as_score(expr: Expr) -> Expr:
    if expr.dtype is DType.BOOL:
        raise TraceError("a score function must return a score, got a boolean: pass a mask function as mask=")
    return cast(expr, DType.FLOAT)


def _as_mask(expr: Expr) -> Expr:
    if expr.dtype is not DType.BOOL:
        raise TraceError(f"a mask function must return a boolean, true where the query attends to the key; got {expr.dtype.value}")
    return expr


@functools.lru_cache(maxsize=1024)
def _variant(score: Expr, mask: Expr, captures: tuple[Capture, ...]) -> Variant:
    return Variant(score, mask, captures)


@dataclass(frozen=True)
class _Canonical:
    """Score and mask in canonical form, and which traced slots their captures, ints and floats were."""

    score: Expr
    mask: Expr
    captures: tuple[int, ...]
    ints: tuple[int, ...]
    floats: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _canonical(score: Expr, mask: Expr, *, has_blocks: bool) -> _Canonical:
    score, extra = (simplify(score), PLAIN.mask) if has_blocks else lift_mask(score)
    roots = (score, simplify(mask if extra is PLAIN.mask else apply("and", mask, extra)))
    captures: dict[int, int] = {}
    params: dict[bool, dict[int, int]] = {True: {}, False: {}}
    for e in (e for root in roots for e in root.walk()):
        if e.op in ("load", "size"):
            captures.setdefault(_slot(e), len(captures))
        elif e.op == "param":
            order = params[e.dtype.is_integer]
            order.setdefault(_slot(e), len(order))

    def renumber(e: Expr) -> Expr | None:
        if e.op == "load":
            return ir.load(captures[_slot(e)], e.args, e.dtype)
        if e.op == "size" and isinstance(e.value, tuple):
            return ir.size(captures[_slot(e)], int(e.value[1]))
        return ir.param(params[e.dtype.is_integer][_slot(e)], e.dtype) if e.op == "param" else None

    if all(slot == n for order in (captures, *params.values()) for slot, n in order.items()):
        score, mask = roots
    else:
        score, mask = (rewrite(root, renumber) for root in roots)
    for expr in (score, mask):
        verify(expr, len(captures))
    return _Canonical(score, mask, tuple(captures), tuple(params[True]), tuple(params[False]))


def _slot(e: Expr) -> int:
    value = e.value[0] if isinstance(e.value, tuple) else e.value
    assert isinstance(value, int)
    return value


def cache_sizes() -> dict[str, int]:
    """Entries of each cache of this module. None grows with lengths, values or re-created functions."""
    return {
        "traces": sum(len(traces) for traces in _traces.values()),
        "canonical forms": _canonical.cache_info().currsize,
        "variants": _variant.cache_info().currsize,
    }
