"""The operators as a compiled graph calls them by name: without the dispatcher, which turns every argument into its own kind and back.

Autograd and modes have had their turn when the graph was made. Each place in it has a function of its own, that remembers what
was decided there: where sizes and strides are fixed, a call asks for little more than the addresses of its tensors, and where the
kernel knows the pass, it is launched with nothing looked up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor

from foci import cache_check
from foci.backends.contract import Fixed
from foci.context import observers
from foci.environment import allowed_backends, read_environment
from foci.operator import op_impl
from foci.operator.op_impl import Known

__all__ = ["Backward", "BackwardRows", "Forward"]

_TRIES: Final = 4
"""Calls after which a pass that is not known by then is not asked for again."""


class _Last(NamedTuple):
    """The last call of a place in compiled code: the modes and switches around it, whether query, key and value are aligned and whether
    captured tensors are, the call, its launches where the kernel keeps them, and how often they were asked for."""

    around: tuple[object, ...]
    aligned: tuple[bool, bool]
    known: Known
    run: Fixed | None = None
    tries: int = 0


class _Place:
    """Where a graph calls an operator.

    Args:
        fixed: whether all arguments but tensors, and the sizes, strides and dtypes of these, are the same in all calls.
    """

    __slots__ = ("_fixed", "_last")

    def __init__(self, *, fixed: bool) -> None:
        self._fixed = fixed
        self._last: _Last | None = None

    def _known(self, find: Callable[[Sequence[Any]], Known], args: Sequence[Any], operands: Sequence[Any], around: Any) -> Known:
        """What is known of a call whose pass is not: found where something has changed."""
        if not self._fixed:
            return find(args)
        query, key, value, captures = operands
        address, others = query.data_ptr() | key.data_ptr() | value.data_ptr(), 0
        for tensor in captures:
            others |= tensor.data_ptr()
        aligned, last = (not address & 15, not others & 15), self._last
        if last is None or last.around != around or last.aligned != aligned:
            last = self._last = _Last(around, aligned, find(args))  # at once: backward passes run in threads of their own
        elif cache_check.ENABLED:
            op_impl.compare(last.known, find(args))
        return last.known

    def _fix(self, known: Known, around: Any, make: Callable[[], Fixed | None]) -> None:
        """Asks for the pass of a call that was run."""
        last = self._last
        if last is not None and last.known is known and last.around == around and last.tries < _TRIES:
            self._last = last._replace(run=make() or last.run, tries=last.tries + 1)


def _around(query: Tensor, key: Tensor, value: Tensor) -> tuple[object, ...]:
    """What a pass depends on besides its arguments."""
    return query is key, key is value, query is value, read_environment(allowed_backends(), query.device.type)


class Forward(_Place):
    """`foci::attention` at one place of a graph; None for what its formula does not ask for."""

    __slots__ = ()

    def __call__(self, *args: Any) -> tuple[Tensor | None, ...]:
        around, last = _around(*args[:3]), self._last
        if last is not None and last.run is not None and last.around == around and not observers():
            made = last.run((*args[:3], *args[3], args[4]))
            if made is not None:
                if cache_check.ENABLED:
                    anew = op_impl.forward(op_impl.forward_known(args), args)
                    cache_check.compare_tensors("the launch of a compiled forward", made, (anew.out, anew.lse, anew.row_max)[: len(made)])
                return (*made, *_NONE[len(made) :])
        known = self._known(op_impl.forward_known, args, args[:4], around)
        found = op_impl.forward(known, args)
        self._fix(known, around, lambda: op_impl.fix_forward(known, args))
        return found.out, found.lse.contiguous(), found.row_max, found.column_sums, found.weights


_NONE: Final = (None,) * 5


class Backward(_Place):
    """`foci::attention_backward` at one place of a graph."""

    __slots__ = ()

    def __call__(self, *args: Any) -> list[Tensor]:
        around, last = _around(*args[7:10]), self._last
        if last is not None and last.run is not None and last.around == around and not observers():
            made = last.run(_places(args))
            if made is not None:
                if cache_check.ENABLED:
                    anew = op_impl.backward(op_impl.backward_known(args), args)
                    cache_check.compare_tensors("the launch of a compiled backward", made, anew)
                return made
        known = self._known(op_impl.backward_known, args, args[7:11], around)
        found = op_impl.backward(known, args)
        self._fix(known, around, lambda: op_impl.fix_backward(known, args))
        return found


class BackwardRows(_Place):
    """`foci::attention_backward_rows` at one place of a graph."""

    __slots__ = ()

    def __call__(self, *args: Any) -> Tensor:
        around, last = _around(*args[7:10]), self._last
        if last is not None and last.run is not None and last.around == around and not observers():
            made = last.run(_places(args))
            if made is not None:
                if cache_check.ENABLED:
                    anew = op_impl.backward_rows(op_impl.backward_known(args, joined=True), args)
                    cache_check.compare_tensors("the launch of a compiled backward", made[0], anew)
                return made[0]
        known = self._known(functools.partial(op_impl.backward_known, joined=True), args, args[7:11], around)
        found = op_impl.backward_rows(known, args)
        self._fix(known, around, lambda: op_impl.fix_backward(known, args))
        return found


def _places(args: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """Of a backward's arguments, in the order that its pass takes them: operands, seed, and what is given."""
    return (*args[7:10], *args[10], args[11], args[4], args[5], args[0], args[1])
