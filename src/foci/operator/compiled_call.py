"""The operators as a compiled graph calls them by name: without the dispatcher, which turns every argument into its own kind and back.

Autograd and modes have had their turn when the graph was made. Each place in a graph has a function of its own. Where sizes and strides are
fixed, it remembers its last call, and compares what may still change: switches around the call, which tensors are one, and alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from foci import cache_check
from foci.environment import allowed_backends, read_environment
from foci.operator import op_impl
from foci.operator.op_impl import Known
from foci.spec import find_alignment

__all__ = ["Backward", "BackwardRows", "Forward"]


class _Last(NamedTuple):
    """The last call of a place, and what it was found by."""

    surroundings: tuple[object, ...]
    known: Known


class _Place:
    """Where a graph calls an operator.

    Args:
        fixed: whether all arguments but tensors, and the sizes, strides and dtypes of these, are the same in all calls.
    """

    __slots__ = ("_fixed", "_last")

    def __init__(self, *, fixed: bool) -> None:
        self._fixed = fixed
        self._last: _Last | None = None

    def _known(self, find: Callable[[Sequence[Any]], Known], args: Sequence[Any], operands: Sequence[Any]) -> Known:
        """The last call, or what `find` finds of the arguments where something has changed."""
        if not self._fixed:
            return find(args)
        surroundings, last = _surroundings(operands), self._last
        if last is None or last.surroundings != surroundings:
            last = self._last = _Last(surroundings, find(args))  # at once: backward passes run in threads of their own
        elif cache_check.ENABLED:
            op_impl.compare(last.known, find(args))
        return last.known


def _surroundings(args: Sequence[Any]) -> tuple[object, ...]:
    """Return what a call depends on that may change where sizes, strides and numbers do not.

    Args:
        args: the flat arguments of `foci::attention`.
    """
    query, key, value = args[:3]
    return find_alignment(args), query is key, key is value, query is value, read_environment(allowed_backends(), query.device)


class Forward(_Place):
    """`foci::attention` at one place of a graph; None for what its formula does not ask for."""

    __slots__ = ()

    def __call__(self, *args: Any) -> tuple[Tensor | None, ...]:
        results = op_impl.forward(self._known(op_impl.forward_known, args, args), args)
        return results.out, results.lse.contiguous(), results.row_max, results.column_sums, results.weights


class Backward(_Place):
    """`foci::attention_backward` at one place of a graph."""

    __slots__ = ()

    def __call__(self, *args: Any) -> list[Tensor]:
        return op_impl.backward(self._known(op_impl.backward_known, args, args[7:]), args)


class BackwardRows(_Place):
    """`foci::attention_backward_rows` at one place of a graph."""

    __slots__ = ()

    def __call__(self, *args: Any) -> Tensor:
        return op_impl.backward_rows(self._known(op_impl.backward_rows_known, args, args[7:]), args)
