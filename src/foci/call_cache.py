"""The cache of calls: what was decided for a `CallSpec`, for every entry point that has one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from foci.spec import CallSpec

__all__ = ["clear", "keep", "recall"]

_CAPACITY: Final = 1024
_calls: OrderedDict[CallSpec, Any] = OrderedDict()


def recall(spec: CallSpec) -> Any:
    """Return what was kept for a spec; None where nothing was."""
    return _calls.get(spec)


def keep(spec: CallSpec, call: Any) -> None:
    """Keeps what was decided for a spec. The oldest entry goes where there are too many: that call is planned again."""
    _calls[spec] = call
    if len(_calls) > _CAPACITY:
        _calls.popitem(last=False)


def clear() -> None:
    """Forgets every call."""
    _calls.clear()
