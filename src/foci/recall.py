"""Calls known from before: what geometry, functions and options decided once need not be worked out again.

A call is known by all that its preparation and planning read, but for values: tensors by geometry, functions by what
`foci.ir.memo` knows them by. What it lacks there is prepared anew each time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from foci import backends
from foci.context import is_tuning
from foci.execution import Allowed, Chosen, choose_kernel
from foci.ir.memo import fingerprint
from foci.operator import is_plain_eager, needs_of
from foci.prepare import Extras
from foci.problem import Formula, Operands

__all__ = ["Known", "Site", "find_site", "recalled", "remember"]

_CAPACITY: Final = 512
_REAL: Final = (float, int)


class Site(NamedTuple):
    """A call's key, its tensors, and those that its functions close over."""

    key: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    closed: list[Tensor]


@dataclass(frozen=True, eq=False)
class Known:
    """A call without its tensors; `spots` says which closed-over tensor each captured one is."""

    call: Chosen
    spots: tuple[int, ...]
    ints: tuple[int, ...]
    floats: tuple[float, ...]
    scale: float

    def operands(self, tensors: tuple[Tensor, Tensor, Tensor], site: Site, extras: Extras) -> Operands:
        """The operands of a call with this key."""
        captures = tuple([site.closed[n] for n in self.spots])
        e = extras
        return Operands(
            *tensors, captures, self.ints, self.floats, self.scale, 0.0, None, None,
            e.cu_q, e.cu_kv, e.q_lengths, e.kv_lengths, max_q=e.max_q, max_kv=e.max_kv,
        )  # fmt: skip


_known: OrderedDict[tuple[Any, ...], Known | None] = OrderedDict()


def find_site(tensors: tuple[Tensor, ...], score: Any, mask: Any, extras: Extras, allowed: Allowed) -> Site | None:
    """What a call is known by; None for one that cannot be: autocast, dropout, block masks, modes, functions that read more."""
    query, key, value = tensors
    e = extras
    if e.blocks is not None or e.page_table is not None or type(e.dropout_p) not in _REAL or e.dropout_p or not is_plain_eager(tensors):
        return None
    if torch.autograd.forward_ad._current_level >= 0 or (e.scale is not None and type(e.scale) not in _REAL):
        return None
    device = query.device
    if not torch.amp.is_autocast_available(device.type) or torch.is_autocast_enabled(device.type):
        return None
    prints = (fingerprint(score), fingerprint(mask))
    if prints[0] is None or prints[1] is None:
        return None
    closed = prints[0].tensors + prints[1].tensors
    lengths = tuple([None if t is None else (t.shape, t.dtype, t.device) for t in (e.cu_q, e.cu_kv, e.q_lengths, e.kv_lengths)])
    signature = (
        query.shape, query.stride(), query.dtype, device, key.shape, key.stride(), key.dtype, key.device, value.shape, value.stride(),
        value.dtype, value.device, (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15, torch.is_grad_enabled(),
        needs_of((*tensors, *closed)), prints[0].structure, (*prints[0].numbers,), prints[1].structure, (*prints[1].numbers,),
        e.outputs, e.scale, lengths, e.max_q, e.max_kv, e.exact_lengths, allowed, backends.names(),
        torch.are_deterministic_algorithms_enabled(), is_tuning(),
    )  # fmt: skip
    return Site(signature, tensors, closed)


def recalled(site: Site) -> Known | None:
    """The call of that key, if it is known."""
    return _known.get(site.key)


def remember(site: Site, given: tuple[Tensor, ...], formula: Formula, operands: Operands, allowed: Allowed) -> Chosen:
    """Chooses the kernel for a call prepared from the tensors `given`, and keeps the choice if its key says all it depends on.

    Raises:
        NoViableBackend: if no backend accepts the problem.
    """
    call = choose_kernel(formula, operands, needs_of((*site.tensors, *operands.captures)), allowed)
    spots = {id(t): n for n, t in enumerate(site.closed)}
    as_given = given[0] is operands.query and given[1] is operands.key and given[2] is operands.value  # no batch was repeated
    if as_given and all(id(t) in spots for t in operands.captures):
        found = tuple(spots[id(t)] for t in operands.captures)
        _known[site.key] = Known(call, found, operands.ints, operands.floats, operands.scale)
        if len(_known) > _CAPACITY:
            _known.popitem(last=False)
    return call
