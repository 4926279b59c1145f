"""What a published attention is made of here: functions as its users write them, and an independent dense formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Build = Callable[["Draw"], "Published"]


@dataclass(frozen=True)
class Shape:
    B: int = 2
    H: int = 4
    Sq: int = 48
    Skv: int = 48
    D: int = 8


@dataclass(frozen=True, eq=False)
class Published:
    """One attention of the literature.

    Attributes:
        formula: (scores [B, H, Sq, Skv], *learned) -> scores, -inf where a query does not attend; in torch, dense,
            without any of the functions below.
        score_mod, mask_mod: as users write them for flex_attention.
        learned: tensors the functions capture that must receive gradients.
        shape: of the problem.
        torch_runs_it: whether torch's own eager flex_attention takes the functions too.
    """

    formula: Callable[..., Tensor]
    score_mod: Callable[..., object] | None = None
    mask_mod: Callable[..., object] | None = None
    learned: tuple[Tensor, ...] = ()
    shape: Shape = Shape()
    torch_runs_it: bool = True


class Draw:
    """Random tensors, the same for every dtype."""

    def __init__(self, dtype: torch.dtype, *, learned: bool = True) -> None:
        self.dtype = dtype
        self.learned = learned
        self._generator = torch.Generator().manual_seed(5)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """A learned tensor."""
        values = torch.randn(shape, generator=self._generator, dtype=torch.float64) * scale
        return values.to(torch.float32).to(self.dtype).requires_grad_(self.learned)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """A learned tensor between bounds."""
        values = torch.rand(shape, generator=self._generator, dtype=torch.float64) * (high - low) + low
        return values.to(torch.float32).to(self.dtype).requires_grad_(self.learned)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self._generator)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self._generator)


REGISTRY: dict[str, tuple[str, Build]] = {}


def published(source: str) -> Callable[[Build], Build]:
    """Adds an attention to the registry, with where it comes from."""

    def add(build: Build) -> Build:
        assert build.__name__ not in REGISTRY
        REGISTRY[build.__name__] = (source, build)
        return build

    return add


def grid(shape: Shape = Shape()) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, q and kv as int64 tensors that broadcast to [B, H, Sq, Skv]."""
    b, h, q, kv = (torch.arange(n) for n in (shape.B, shape.H, shape.Sq, shape.Skv))
    return b[:, None, None, None], h[:, None, None], q[:, None], kv


def hide(scores: Tensor, attend: Tensor) -> Tensor:
    return scores.masked_fill(~attend, -torch.inf)
