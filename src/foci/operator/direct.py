"""The operators as a compiled graph calls them by name: without the dispatcher, which turns every argument into its own kind and back.

Autograd and modes have had their turn when the graph was made. Each place in it has a function of its own, that remembers what
was decided there: where sizes and strides are fixed, a call asks for little more than the addresses of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foci import backends
from foci.context import allowed_backends, is_tuning
from foci.operator import dispatched
from foci.operator.dispatched import Known

__all__ = ["Backward", "Forward"]


class _Place:
    """Where a graph calls an operator.

    Args:
        fixed: whether all arguments but tensors, and the sizes, strides and dtypes of these, are the same in all calls.
    """

    __slots__ = ("_fixed", "_last")

    def __init__(self, *, fixed: bool) -> None:
        self._fixed = fixed
        self._last: tuple[tuple[object, ...], Known] | None = None

    def _known(self, find: Callable[[Sequence[Any]], Known], args: Sequence[Any], operands: Sequence[Any]) -> Known:
        if not self._fixed:
            return find(args)
        query, key, value, captures = operands
        address = query.data_ptr() | key.data_ptr() | value.data_ptr()
        for tensor in captures:
            address |= tensor.data_ptr()
        now = (
            address & 15, query is key, key is value, query is value, allowed_backends(), backends.changes(),
            torch.are_deterministic_algorithms_enabled(), is_tuning(),
        )  # fmt: skip
        last = self._last
        if last is None or last[0] != now:
            last = self._last = now, find(args)  # at once: backward passes run in threads of their own
        return last[1]


class Forward(_Place):
    """`foci::attention` at one place of a graph; None for what its formula does not ask for."""

    __slots__ = ()

    def __call__(self, *args: Any) -> tuple[Tensor | None, ...]:
        found = dispatched.forward(self._known(dispatched.forward_known, args, args[:4]), args)
        return found.out, found.lse.contiguous(), found.row_max, found.column_sums, found.weights


class Backward(_Place):
    """`foci::attention_backward` at one place of a graph."""

    __slots__ = ()

    def __call__(self, *args: Any) -> list[Tensor]:
        return dispatched.backward(self._known(dispatched.backward_known, args, args[7:11]), args)
