"""`FOCI_CHECK_CACHE=1`: every cache hit is rebuilt and compared, so that a key that is too narrow is an error, not a wrong number.

A cache calls `compare` with what it found and with what it would build now. Every call then pays for its preparation and planning again,
and a replayed GPU pass runs twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor

__all__ = ["ENABLED", "StaleCacheError", "compare", "compare_tensors"]

ENABLED: Final = os.environ.get("FOCI_CHECK_CACHE") == "1"


class StaleCacheError(AssertionError):
    """A cache returned an entry that differs from what would be built for the same call now."""


def compare(cache: str, cached: Mapping[str, Any], rebuilt: Mapping[str, Any]) -> None:
    """Compare a cache entry with its rebuilt form, field by field; tensors are compared by identity.

    Args:
        cache: name of the cache, for the message.
        cached, rebuilt: the entry's fields by name.

    Raises:
        StaleCacheError: if a field differs; the message names every such field with both values.
    """
    wrong = [
        f"{name}: cached {cached.get(name)!r}, rebuilt {value!r}" for name, value in rebuilt.items() if not _equal(cached.get(name), value)
    ]
    if wrong:
        raise StaleCacheError(f"{cache} returned a stale entry; " + "; ".join(wrong))


def compare_tensors(cache: str, cached: Any, rebuilt: Any) -> None:
    """Compare two nested sequences of tensors number by number, NaN equal to NaN.

    Raises:
        StaleCacheError: if a shape, dtype or number differs, or one side has a tensor where the other has none.
    """
    for n, (old, new) in enumerate(zip(_leaves(cached), _leaves(rebuilt), strict=True)):
        if old is None or new is None:
            same = old is new
        else:
            same = old.shape == new.shape and old.dtype == new.dtype and bool(((old == new) | (old.isnan() & new.isnan())).all())
        if not same:
            raise StaleCacheError(f"{cache} returned another tensor {n} than a call that is built anew")


def _equal(cached: Any, rebuilt: Any) -> bool:
    if isinstance(rebuilt, Tensor) or isinstance(cached, Tensor):
        return cached is rebuilt
    if isinstance(rebuilt, tuple):
        return type(cached) is type(rebuilt) and len(cached) == len(rebuilt) and all(map(_equal, cached, rebuilt))
    if isinstance(rebuilt, float) and isinstance(cached, float):
        return repr(cached) == repr(rebuilt)  # tells 0.0 from -0.0, and NaN equals NaN
    return bool(type(cached) is type(rebuilt) and cached == rebuilt)


def _leaves(value: Any) -> Iterator[Tensor | None]:
    if value is None or isinstance(value, Tensor):
        yield value
    else:
        for part in value:
            yield from _leaves(part)
