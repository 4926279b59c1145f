"""Whether one fused call beats separate operations: a stated rule, from measured constants, never a timing in the moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["PRICED", "estimate_seconds", "obstacle"]

PRICED: Final = frozenset({"cpu"})
"""Types of device whose separate operations have prices here: seconds of two cores of AMD Zen 4 with torch 2.13."""

# A call of foci costs tens of microseconds on the CPU, whatever its size; so few scores cost less as separate operations.
_FEW_SCORES_CPU: Final = 16


def obstacle(device_type: str, q_len: int, kv_len: int) -> str | None:
    """Why fusing does not pay, or None.

    Args:
        device_type: such as "cpu" or "cuda".
        q_len, kv_len: of one head; of symbolic lengths, those of the example inputs.

    Example:
        >>> from foci.fusion.profitable import obstacle
        >>> obstacle("cpu", 2, 2)
        'too few scores to pay: 2 x 2 on the CPU, where fewer than 16 a head are faster apart'
        >>> obstacle("cpu", 128, 128) is None
        True
    """
    if device_type == "cpu" and q_len * kv_len < _FEW_SCORES_CPU:
        return f"too few scores to pay: {q_len} x {kv_len} on the CPU, where fewer than {_FEW_SCORES_CPU} a head are faster apart"
    return None


_ARITHMETIC, _SELECTION = 0.15e-9, 0.5e-9
_WITH_BACKWARD: Final = 2.5
_ELEMENTS: Final[Mapping[str, float]] = {
    **dict.fromkeys(("where", "masked_fill", "clamp", "clip"), _SELECTION),
    **dict.fromkeys(("gather", "embedding", "index_select", "take_along_dim", "getitem", "index"), 0.65e-9),
    **dict.fromkeys(("contiguous", "clone", "copy"), 1.0e-9),  # they are there to lay elements out otherwise
    **dict.fromkeys(("tanh", "exp", "log", "log2", "sigmoid", "pow", "erf", "sin", "cos"), 1.2e-9),
}


def estimate_seconds(operation: str, elements: float, *, needs_backward: bool) -> float:
    """Estimated seconds of a torch operation that computes this many elements.

    Example:
        >>> estimate_seconds("gather", 1e6, needs_backward=False) > estimate_seconds("add", 1e6, needs_backward=False)
        True
    """
    return elements * _ELEMENTS.get(operation, _ARITHMETIC) * (_WITH_BACKWARD if needs_backward else 1.0)
