"""What is said of each named mask and score: its definition, and examples at small sizes. Tests, docs and benchmarks read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foci.variant import Mask, Score

__all__ = ["Definition", "MaskExample", "ScoreExample", "Sizes"]


@dataclass(frozen=True)
class Sizes:
    """The sizes an example is built for: batch entries, query and key heads, query and key length, head dim."""

    B: int = 2
    Hq: int = 4
    Hkv: int = 2
    Sq: int = 40
    Skv: int = 40
    D: int = 16

    def generator(self) -> torch.Generator:
        """A generator in a fixed state, so that what `tensors` and `formula` draw is the same."""
        return torch.Generator().manual_seed(1)

    def positions(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """b [B, 1, 1, 1], h [1, Hq, 1, 1], q_idx [1, 1, Sq, 1] and kv_idx [1, 1, 1, Skv]."""
        b, h, q, kv = (torch.arange(n, device=device) for n in (self.B, self.Hq, self.Sq, self.Skv))
        return b[:, None, None, None], h[:, None, None], q[:, None], kv


@dataclass(frozen=True)
class Definition:
    """A mask or a score as the gallery prints it.

    Attributes:
        formula: a Python expression of its parameters, True where a query attends, or the new score. The tests evaluate it.
        where: definitions that the formula uses, in order, as name and expression.
        note: a sentence about the names in the formula.
        paper: title, authors and year.
        arxiv: the paper's number.
    """

    formula: str
    where: tuple[tuple[str, str], ...] = ()
    note: str = ""
    paper: str = ""
    arxiv: str = ""


def _no_tensors(sizes: Sizes) -> tuple[Tensor, ...]:
    return ()


def _always(sizes: Sizes) -> bool:
    return True


@dataclass(frozen=True)
class MaskExample:
    """A mask at work.

    Attributes:
        name: of the mask, with what distinguishes the example.
        doc: one line for people.
        make: the mask of the sizes and the tensors it captures.
        formula: the same as a bool tensor that broadcasts to [B, Hq, Sq, Skv], computed independently.
        tensors: what the mask captures, the same values at each call, on the CPU.
        fits: whether the mask makes sense at the sizes.
    """

    name: str
    doc: str
    make: Callable[..., Mask]
    formula: Callable[..., Tensor]
    tensors: Callable[[Sizes], Sequence[Tensor]] = _no_tensors
    fits: Callable[[Sizes], bool] = _always

    def captures(self, sizes: Sizes, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """The tensors the mask captures."""
        return tuple(t.to(device) for t in self.tensors(sizes))

    def build(self, sizes: Sizes, device: torch.device | str = "cpu") -> Mask:
        """Build the mask."""
        return self.make(sizes, *self.captures(sizes, device))

    def expected(self, sizes: Sizes, device: torch.device | str = "cpu") -> Tensor:
        """bool [B, Hq, Sq, Skv]: where a query attends, by the plain formula."""
        attend = self.formula(sizes, *self.captures(sizes, device))
        return attend.expand(sizes.B, sizes.Hq, sizes.Sq, sizes.Skv)


@dataclass(frozen=True)
class ScoreExample:
    """A score at work.

    Attributes:
        name: of the score, with what distinguishes the example.
        doc: one line for people.
        make: the score of the sizes and the tensors it captures.
        formula: of (scores [B, Hq, Sq, Skv], sizes, *tensors), the scores afterwards; differentiable, independent.
        tensors: what the score captures, float64 where it may be learned, the same values at each call, on the CPU.
        fits: whether the score makes sense at the sizes.
    """

    name: str
    doc: str
    make: Callable[..., Score]
    formula: Callable[..., Tensor]
    tensors: Callable[[Sizes], Sequence[Tensor]] = _no_tensors
    fits: Callable[[Sizes], bool] = _always

    def captures(self, sizes: Sizes, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        """The tensors the score captures; floating ones in `dtype`, requiring grad."""
        moved = (t.to(device=device, dtype=dtype if t.is_floating_point() else t.dtype) for t in self.tensors(sizes))
        return tuple(t.requires_grad_() if t.is_floating_point() else t for t in moved)

    def build(self, sizes: Sizes, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Score:
        """The score, its learned tensors in `dtype`."""
        return self.make(sizes, *self.captures(sizes, device, dtype))

    def expected(self, scores: Tensor, sizes: Sizes) -> Tensor:
        """[B, Hq, Sq, Skv]: what the score makes of `scores`, by the plain formula."""
        return self.formula(scores, sizes, *self.captures(sizes, scores.device, scores.dtype))
