"""What is found once and kept for as long as the tensors live that it was found from."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Generic, TypeVar

from torch import Tensor

from foci.compat.torch import version_of

__all__ = ["WeakCache", "tensor_state"]

_Value = TypeVar("_Value")


class WeakCache(Generic[_Value]):
    """The last things found, each good for as long as the tensors live that it was found from."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._found: OrderedDict[tuple[object, ...], tuple[tuple[weakref.ref[Tensor], ...], _Value]] = OrderedDict()

    def find(self, key: tuple[object, ...]) -> _Value | None:
        """Return what has that key. Keys hold the identity and version of what was read, which are those of a live tensor only."""
        entry = self._found.get(key)
        if entry is None or (entry[0] and any(ref() is None for ref in entry[0])):
            return None
        return entry[1]

    def add(self, key: tuple[object, ...], read: tuple[Tensor, ...], value: _Value | None) -> None:
        """Keeps a value found from `read`; what was found from tensors that are gone, goes, and the oldest where there are many."""
        if value is None:
            return
        if read:
            # copied first: backward passes come from threads of their own
            for dead in [other for other, (refs, _) in list(self._found.items()) if any(ref() is None for ref in refs)]:
                self._found.pop(dead, None)
        self._found[key] = tuple(map(weakref.ref, read)), value
        if len(self._found) > self._capacity:
            self._found.popitem(last=False)


def tensor_state(tensor: Tensor) -> tuple[int, int, int]:
    """By what a tensor that lives is known to hold what it held: its memory may be another's, without a new version (`.data = `)."""
    return id(tensor), version_of(tensor), tensor.data_ptr()
