"""Results that were computed from the values of tensors, each cached for as long as everything that it was computed from lives."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any, Final, Generic, TypeVar

from torch import Tensor

from foci.compat.torch import version_of

__all__ = ["WeakCache", "cache_derived", "find_derived", "make_store", "tensor_state"]

_Value = TypeVar("_Value")


class _Source(weakref.ref[Any]):
    """A reference to something that an entry was computed from. It names the entry, which goes when its source does."""

    __slots__ = ("cache", "key")

    cache: weakref.ref[WeakCache[Any]]  # weak: a cache is freed with its owner, without the garbage collector
    key: tuple[object, ...]


def _forget(source: _Source) -> None:
    cache = source.cache()
    if cache is not None:
        cache.remove(source.key)


class WeakCache(Generic[_Value]):
    """The last values added, each for as long as the objects live that it was computed from."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._found: OrderedDict[tuple[object, ...], tuple[tuple[_Source, ...], _Value]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: tuple[object, ...]) -> _Value | None:
        """Return the value with that key. Keys hold the identity and version of what was read, which are those of a live object only."""
        entry = self._found.get(key)
        if entry is None:
            return None
        for source in entry[0]:
            if source() is None:
                return None
        return entry[1]

    def add(self, key: tuple[object, ...], read: tuple[Any, ...], value: _Value | None) -> None:
        """Cache a value that was computed from `read`, unless it is None. The oldest entry goes if there are too many.

        A value must not refer to what is in `read`: it would keep its own sources alive.
        """
        if value is None:
            return
        sources = []
        for each in read:
            source = _Source(each, _forget)
            source.cache, source.key = weakref.ref(self), key
            sources.append(source)
        self._found[key] = tuple(sources), value
        if len(self._found) > self._capacity:
            self._found.popitem(last=False)

    def remove(self, key: tuple[object, ...]) -> None:
        """Remove the value with that key, if there is one."""
        self._found.pop(key, None)


_CAPACITIES: Final = {
    "block classes": 64,  # classes of blocks, of the lists of a block mask
    "padding": 8,  # places of the tokens of a padding mask, by its bytes
    "sequences": 8,  # starts and lengths of packed sequences, of their offsets
    "task records": 64,  # tasks of a kernel, of sequences
    "tile classes": 32,  # classes of tiles, of a mask and the tensors that it reads
    "tile tables": 256,  # tiles that each task visits, likewise
    "table launches": 256,  # launches that compute task records, starts and lengths, of no tensor: for any values
}
"""How many values of each kind are cached."""


def make_store() -> dict[str, WeakCache[Any]]:
    """Return an empty store."""
    return {kind: WeakCache(capacity) for kind, capacity in _CAPACITIES.items()}


_derived: dict[str, WeakCache[Any]] = make_store()


def find_derived(kind: str, key: tuple[object, ...]) -> Any:
    """Return the value of a kind with that key; None if there is none."""
    entry = _derived[kind]._found.get(key)  # as `WeakCache.find`, without its call
    if entry is None:
        return None
    for source in entry[0]:
        if source() is None:
            return None
    return entry[1]


def cache_derived(kind: str, key: tuple[object, ...], read: tuple[Any, ...], value: Any) -> None:
    """Cache a value of a kind for as long as `read` lives. The key holds the state of the tensors in `read`, see `tensor_state`."""
    _derived[kind].add(key, read, value)


def tensor_state(tensor: Tensor) -> tuple[int, int, int]:
    """By what a tensor that lives is known to hold what it held: its memory may be another's, without a new version (`.data = `)."""
    return id(tensor), version_of(tensor), tensor.data_ptr()
