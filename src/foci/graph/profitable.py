"""Whether one fused call beats separate operations: a stated rule, from measured constants, never a timing in the moment."""

from __future__ import annotations

from typing import Final

__all__ = ["obstacle"]

# A call of foci costs tens of microseconds on the CPU, whatever its size; so few scores cost less as separate operations.
_FEW_SCORES_CPU: Final = 16


def obstacle(device_type: str, q_len: int, kv_len: int) -> str | None:
    """Why fusing does not pay, or None.

    Args:
        device_type: such as "cpu" or "cuda".
        q_len, kv_len: of one head; of symbolic lengths, those of the example inputs.

    Example:
        >>> from foci.graph.profitable import obstacle
        >>> obstacle("cpu", 2, 2)
        'too few scores to pay: 2 x 2 on the CPU, where fewer than 16 a head are faster apart'
        >>> obstacle("cpu", 128, 128) is None
        True
    """
    if device_type == "cpu" and q_len * kv_len < _FEW_SCORES_CPU:
        return f"too few scores to pay: {q_len} x {kv_len} on the CPU, where fewer than {_FEW_SCORES_CPU} a head are faster apart"
    return None
