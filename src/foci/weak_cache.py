"""Results that were computed from the values of tensors, each cached for as long as everything that it was computed from lives."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from typing import Any, Final, Generic, TypeAlias, TypeVar

from torch import Tensor

from foci.compat.torch import version_of

__all__ = ["WeakCache", "cache_derived", "find_derived", "make_store", "tensor_state"]

_Value = TypeVar("_Value")


_Key: TypeAlias = tuple[object, ...]


def _forget(cache: weakref.ref[WeakCache[Any]], key: _Key, source: weakref.ref[Any]) -> None:
    """Remove an entry, one of whose sources is gone. The cache is referred to weakly, so that it is freed with its owner, without the
    garbage collector."""
    if (alive := cache()) is not None:
        alive._found.pop(key, None)


class WeakCache(Generic[_Value]):
    """The last values added, each for as long as the objects live that it was computed from."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._found: OrderedDict[_Key, tuple[tuple[weakref.ref[Any], ...], _Value]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: _Key) -> _Value | None:
        """Return the value with that key; None if there is none. Keys hold the identity and version of the sources. A weakref callback
        removes an entry before the identity of a source can be reused."""
        entry = self._found.get(key)
        return None if entry is None else entry[1]

    def add(self, key: _Key, read: tuple[Any, ...], value: _Value | None) -> None:
        """Cache a value that was computed from `read`, unless it is None. The oldest entry goes if there are too many.

        A value must not refer to what is in `read`: it would keep its own sources alive.
        """
        if value is None:
            return
        sources: tuple[weakref.ref[Any], ...] = ()
        if read:
            forget = functools.partial(_forget, weakref.ref(self), key)
            sources = tuple([weakref.ref(each, forget) for each in read])
        self._found[key] = sources, value
        if len(self._found) > self._capacity:
            self._found.popitem(last=False)


_CAPACITIES: Final = {
    "block classes": 64,  # classes of blocks, of the lists of a block mask
    "padding": 8,  # places of the tokens of a padding mask, by its bytes
    "sequences": 8,  # starts and lengths of packed sequences, of their offsets
    "tile classes": 32,  # classes of tiles, of a mask and the tensors that it reads
    "tile tables": 256,  # tiles that each task visits, likewise
    "table launches": 256,  # launches that compute task records, starts and lengths, of no tensor: for any values
}
"""How many values of each kind are cached."""


def make_store() -> dict[str, WeakCache[Any]]:
    """Return an empty store."""
    return {kind: WeakCache(capacity) for kind, capacity in _CAPACITIES.items()}


_derived: dict[str, WeakCache[Any]] = make_store()


def find_derived(kind: str, key: _Key) -> Any:
    """Return the value of a kind with that key; None if there is none."""
    return _derived[kind].find(key)


def cache_derived(kind: str, key: _Key, read: tuple[Any, ...], value: Any) -> None:
    """Cache a value of a kind for as long as `read` lives. The key holds the state of the tensors in `read`, see `tensor_state`."""
    _derived[kind].add(key, read, value)


def tensor_state(tensor: Tensor) -> tuple[int, int, int]:
    """By what a tensor that lives is known to hold what it held: its memory may be another's, without a new version (`.data = `)."""
    return id(tensor), version_of(tensor), tensor.data_ptr()
