"""What became of each matrix that products read or write with misaligned rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from foci.context import observers

__all__ = ["Padding", "tell"]


@dataclass(frozen=True)
class Padding:
    """One matrix, padded or not.

    Attributes:
        tensor: its name in the graph.
        products: those that read or write it, as "mm [8192, 768] @ [768, 30523]".
        sizes: its sizes; symbolic ones at their hint.
        strides: before.
        padded: after; None if it was refused.
        how: "in place" by whoever writes it, "copied" at each call, "copied once" while compiling, "by rows", read or written
            where it lies, or "cut", its last columns added to the product; None if it was refused.
        seconds: expected gain of each call.
        bytes: of padding, copies included; by rows, of all that the product takes besides its result.
        reason: why it was refused.
        location: of the user's code.
    """

    tensor: str
    products: tuple[str, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padded: tuple[int, ...] | None = None
    how: str | None = None
    seconds: float = 0.0
    bytes: int = 0
    reason: str | None = None
    location: str | None = None

    def __str__(self) -> str:
        what = f"{self.tensor} {list(self.sizes)}, strides {list(self.strides)}"
        if self.how is None:
            return f"{what}: not padded, {self.reason}"
        return f"{what} -> {list(self.padded or ())}: {self.how}, gains {self.seconds * 1e6:.0f} us for {self.bytes} bytes"


def tell(paddings: Iterable[Padding]) -> None:
    """Adds them to every log that is open."""
    entries = list(paddings)
    for log in observers():
        log.paddings.extend(entries)
