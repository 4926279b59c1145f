"""How kernels split head dims. It imports nothing: kernels and schedules both read it."""

from __future__ import annotations

__all__ = ["width_pieces"]


def width_pieces(width: int) -> tuple[int, ...]:
    """Split a width into the powers of two that add up to it, largest first."""
    return tuple(1 << n for n in range(width.bit_length() - 1, -1, -1) if width >> n & 1)
