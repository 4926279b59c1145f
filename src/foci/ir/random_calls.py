"""Which torch calls draw random numbers. Tracing refuses them: an expression would hold one draw for all positions, and for later calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

__all__ = ["draws_random_numbers"]

_PYTHON_FUNCTIONS: Final = frozenset(("dropout1d", "dropout2d", "dropout3d", "gumbel_softmax"))
"""Functions of torch that draw without an operator of the same name."""

_TRAINING: Final = {"rrelu": (3, False), "alpha_dropout": (2, False), "feature_alpha_dropout": (2, False)}
_OF_DROPOUT: Final = (2, True)
"""Position and default of the argument `training`; outside of training these functions draw nothing."""


def draws_random_numbers(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call takes numbers from a random generator."""
    name = getattr(function, "__name__", "")
    if not _is_random(name):
        return False
    if "dropout" not in name and name not in _TRAINING:
        return True
    position, default = _TRAINING.get(name, _OF_DROPOUT)
    positional = args[position] if len(args) > position else default
    return bool(kwargs.get("training", kwargs.get("train", positional)))


@functools.lru_cache(maxsize=1024)
def _is_random(name: str) -> bool:
    if name in _PYTHON_FUNCTIONS:
        return True
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("__") else None
    if packet is None:
        return False
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in packet.overloads())
