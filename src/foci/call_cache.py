"""Calls known from before: what geometry, functions and options decided once need not be worked out again.

A call is known by all that its preparation and planning read, but for values: tensors by geometry, functions by what
`foci.ir.function_fingerprint` knows them by. What it lacks there is prepared anew each time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from foci import backends, cache_check
from foci.compat.torch import is_any_autocast_enabled, is_forward_ad_open
from foci.context import is_tuning
from foci.execution import Allowed, Needs, choose_kernel
from foci.ir.function_fingerprint import Fingerprint, fingerprint, shared
from foci.operator import NOTHING, Optional, Outline, find_needs, is_plain_eager, make_outline, optional_tensors
from foci.prepare import Extras, draw_seed
from foci.problem import Formula, Geometry, Operands
from foci.trace_functions import is_kept

__all__ = ["Known", "Site", "compare_with_prepared", "find_site", "remember"]

_CAPACITY: Final = 512
_REAL: Final = (float, int)
_TENSORS: Final = frozenset((Tensor, type(None)))


class Site(NamedTuple):
    """A call's key, its tensors, those that its functions close over, the functions, and the call of that key, if it is known."""

    key: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    closed: list[Tensor]
    functions: tuple[Fingerprint, Fingerprint]
    known: Known | None

    def recalled(self, extras: Extras) -> tuple[Outline, tuple[Tensor, ...], Optional] | None:
        """The call, if it is known, as `remember` returns it."""
        known = self.known
        if known is None:
            return None
        tensors, optional = self.tensors, NOTHING
        if known.spots:
            tensors += tuple([self.closed[n] for n in known.spots])
        draws = known.outline.dropout_p > 0
        if draws or extras.cu_q is not None or extras.page_table is not None:
            seed, e = draw_seed(tensors[0].device) if draws else None, extras
            optional = (seed, None, e.cu_q, e.cu_kv, e.q_lengths, e.kv_lengths, e.page_table)
        return known.outline, tensors, optional


@dataclass(frozen=True, eq=False)
class Known:
    """A call without its tensors; `spots` says which closed-over tensor each captured one is."""

    outline: Outline
    spots: tuple[int, ...]


_known: OrderedDict[tuple[Any, ...], Known] = OrderedDict()


def find_site(
    tensors: tuple[Tensor, Tensor, Tensor], score: Any, mask: Any, extras: Extras, allowed: Allowed, *, learns: bool = False
) -> Site | None:
    """What a call is known by; None for one that cannot be: casts by autocast, block masks, parts, modes, functions that read more.

    `learns`: gradients of query, key and value, and of these alone, are wanted whatever the tensors say.
    """
    query, key, value = tensors
    e, scale, dropout_p = extras, extras.scale, extras.dropout_p
    if e.blocks is not None or e.part is not None or not is_plain_eager(tensors) or is_forward_ad_open():
        return None
    if query.is_neg() or key.is_neg() or value.is_neg():
        return None  # in memory lies the opposite
    if not query.shape[-1]:
        return None  # `prepare` gives it a head dim
    if type(dropout_p) not in _REAL or not (scale is None or type(scale) in _REAL):
        return None  # whatever else passes for a number is for `prepare` to say
    device, dtype = query.device, query.dtype
    is_autocast = is_any_autocast_enabled() and torch.is_autocast_enabled(device.type)
    if is_autocast and not dtype == key.dtype == value.dtype == torch.get_autocast_dtype(device.type):
        return None
    scored, masked = fingerprint(score), fingerprint(mask)
    if scored is None or masked is None:
        return None
    closed = scored.tensors + masked.tensors if masked.tensors else scored.tensors
    address, others = query.data_ptr() | key.data_ptr() | value.data_ptr(), 0
    strides = None
    if closed:
        strides = tuple([t.stride() for t in closed])
        for t in closed:
            if t.is_neg():
                return None
            others |= t.data_ptr()
    shapes: tuple[object, ...] = (query.shape, key.shape, value.shape)
    lengths = None
    if e.cu_q is not None:
        if not _TENSORS.issuperset(map(type, (e.cu_q, e.cu_kv, e.q_lengths, e.kv_lengths))):
            return None
        shapes, lengths = _of_tokens(query.shape, key.shape, value.shape), _of_sequences(e)
    pages = None
    if e.page_table is not None and e.kv_lengths is not None:
        pages = tuple([(t.shape, t.stride(), t.dtype, t.device) for t in (e.page_table, e.kv_lengths)])
        others |= e.page_table.data_ptr() | e.kv_lengths.data_ptr()
    o = e.outputs
    wanted = torch.is_grad_enabled() and (query.requires_grad, key.requires_grad, value.requires_grad, *[t.requires_grad for t in closed])
    if learns:
        wanted = (True, True, True, *[False for _ in closed])
    signature = (
        shapes, query.stride(), dtype, device, key.stride(), key.dtype, key.device, value.stride(), value.dtype, value.device, address & 15,
        others & 15, query is key, key is value, query is value,
        wanted, scored.structure, (*scored.numbers,), masked.structure, (*masked.numbers,), shared(scored, masked), strides,
        o.lse, o.row_max, o.column_sums, o.weights, scale, dropout_p, lengths, pages, e.max_q, e.max_kv, e.exact_lengths, allowed,
        e.lower_right_form, backends.changes(), torch.are_deterministic_algorithms_enabled(), is_tuning(), is_autocast,
    )  # fmt: skip
    return Site(signature, tensors, closed, (scored, masked), _known.get(signature))


def _of_tokens(query: torch.Size, key: torch.Size, value: torch.Size) -> tuple[object, ...]:
    """What of packed shapes is part of a call's key: [T, H, D] however many tokens, but for one, whose strides say nothing."""
    if not len(query) == len(key) == len(value) == 3:
        return query, key, value
    (queries, q_heads, q_dim), (keys, k_heads, k_dim), (values, v_heads, v_dim) = query, key, value
    counts = (queries > 1 and keys > 1 and values > 1) or (queries, keys, values)
    return counts, keys == values, q_heads, q_dim, k_heads, k_dim, v_heads, v_dim


def _of_sequences(extras: Extras) -> tuple[object, ...]:
    """Likewise of tensors that say where sequences lie; keys that lie as queries do, in the same tensor, have None."""
    e = extras
    own = None if e.cu_kv is e.cu_q else _kind(e.cu_kv)
    if e.q_lengths is None and e.kv_lengths is None:
        return _kind(e.cu_q), own
    return _kind(e.cu_q), own, _kind(e.q_lengths), _kind(e.kv_lengths)


def _kind(tensor: Tensor | None) -> object:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def remember(
    site: Site,
    given: tuple[Tensor, ...],
    formula: Formula,
    operands: Operands,
    allowed: Allowed,
    *,
    packed: bool = False,
    learns: bool = False,
) -> tuple[Outline, tuple[Tensor, ...], Optional]:
    """Chooses the kernel for a call prepared from the tensors `given`, and keeps the choice if its key says all it depends on.

    Returns:
        The call, its query, key, value and captured tensors, and its others: what `attend_outlined` takes.

    Raises:
        NoViableBackend: if no backend accepts the problem.
    """
    chosen = choose_kernel(formula, operands, _needs(site, operands, learns=learns), allowed)
    spots = {id(t): n for n, t in enumerate(site.closed)}
    as_given = given[0] is operands.query and given[1] is operands.key and given[2] is operands.value  # no batch was repeated
    stays = as_given and is_kept(*site.functions, operands.query.device) and all(id(t) in spots for t in operands.captures)
    outline = make_outline(chosen, operands, packed=packed, geometry=Geometry(packed=packed) if stays else None)
    if stays:
        _known[site.key] = Known(outline, tuple(spots[id(t)] for t in operands.captures))
        if len(_known) > _CAPACITY:
            _known.popitem(last=False)
    tensors = site.tensors if packed else (operands.query, operands.key, operands.value)
    return outline, (*tensors, *operands.captures), optional_tensors(operands)


def compare_with_prepared(
    found: tuple[Outline, tuple[Tensor, ...], Optional],
    site: Site,
    formula: Formula,
    operands: Operands,
    allowed: Allowed,
    *,
    packed: bool = False,
    learns: bool = False,
) -> None:
    """Compare a recalled call with the same call prepared and planned anew.

    Raises:
        StaleCacheError: if they differ.
    """
    chosen = choose_kernel(formula, operands, _needs(site, operands, learns=learns), allowed)
    rebuilt = make_outline(chosen, operands, packed=packed)
    tensors = site.tensors if packed else (operands.query, operands.key, operands.value)
    outline, cached_tensors, cached_optional = found
    cached = {**outline.comparable(), "tensors": cached_tensors, "optional": cached_optional[1:]}  # each call draws a seed of its own
    again = {**rebuilt.comparable(), "tensors": (*tensors, *operands.captures), "optional": optional_tensors(operands)[1:]}
    cache_check.compare("the cache of prepared calls", cached, again)


def _needs(site: Site, operands: Operands, *, learns: bool) -> Needs:
    return (True, True, True, (False,) * len(operands.captures)) if learns else find_needs((*site.tensors, *operands.captures))
