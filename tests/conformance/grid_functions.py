"""Score and mask functions of the generated grid, each written once in torch's words.

foci traces a function; the reference runs the same function on index tensors. Captures are named in `CAPTURES`.

Letters: B sequences, Hq query heads, Sq and Skv the longest query and key sequence, S the longer of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import foci
from foci import masks


class Numbers(NamedTuple):
    """Python numbers of a call, which functions close over."""

    scale: float
    width: int  # of windows, in positions
    cap: float  # of softcap
    max_q: int  # longest query sequence
    max_kv: int  # longest key sequence


class Extent(NamedTuple):
    """Sizes that captured tensors are made for."""

    batch: int
    heads: int
    q_len: int
    kv_len: int

    @property
    def longest(self) -> int:
        return max(self.q_len, self.kv_len)


@dataclass(frozen=True)
class Capture:
    """A tensor that functions close over.

    Attributes:
        draw: makes it, from an extent and a generator; floating ones in float64.
        learned: whether it gets a gradient.
        dtype: of a floating capture, if not the one that functions compute in.
    """

    draw: Callable[[Extent, torch.Generator], Tensor]
    learned: bool = False
    dtype: torch.dtype | None = None


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _bernoulli(*shape: int, generator: torch.Generator, share: float = 0.7) -> Tensor:
    return torch.rand(shape, generator=generator) < share


def _sorted_ids(*shape: int, generator: torch.Generator) -> Tensor:
    """Documents in order, a third of the positions begin one."""
    return (torch.rand(shape, generator=generator) < 0.15).cumsum(-1)


CAPTURES: dict[str, Capture] = {
    "slopes": Capture(lambda e, g: _normal(e.heads, generator=g).abs() * 0.2, learned=True),
    "gains": Capture(lambda e, g: 1 + 0.3 * _normal(e.heads, generator=g), learned=True),
    "relative": Capture(lambda e, g: _normal(e.heads, 13, generator=g), learned=True),
    "table": Capture(lambda e, g: _normal(e.heads, e.q_len, e.kv_len, generator=g), learned=True),
    "temperature": Capture(lambda e, g: 1 + 0.5 * torch.rand(e.batch, dtype=torch.float64, generator=g), learned=True),
    "half": Capture(lambda e, g: _normal(e.kv_len, generator=g), learned=True, dtype=torch.float16),
    "penalty": Capture(lambda e, g: torch.where(_bernoulli(e.kv_len, generator=g), 0.0, -torch.inf).double()),
    "keep": Capture(lambda e, g: _bernoulli(e.kv_len, generator=g)),
    "pairs": Capture(lambda e, g: _bernoulli(e.q_len, e.kv_len, generator=g)),
    "keys": Capture(lambda e, g: _bernoulli(e.batch, e.kv_len, generator=g)),
    "ids": Capture(lambda e, g: _sorted_ids(e.longest, generator=g)),
    "batch_ids": Capture(lambda e, g: _sorted_ids(e.batch, e.longest, generator=g).to(torch.int32)),
    "levels": Capture(lambda e, g: torch.randint(-2, 3, (e.longest,), generator=g).to(torch.int8)),
    "bound": Capture(lambda e, g: torch.tensor(max(1, e.kv_len // 3))),
    "prefix": Capture(lambda e, g: torch.randint(1, 8, (e.batch,), generator=g).to(torch.int32)),
    "bias": Capture(lambda e, g: _normal(e.heads, e.q_len, e.kv_len, generator=g), learned=True),
    "additive": Capture(lambda e, g: torch.full((e.q_len, e.kv_len), -torch.inf, dtype=torch.float64).triu(1)),
    "sink": Capture(lambda e, g: _normal(e.heads, generator=g), learned=True),
}

Captured = dict[str, Tensor]
ScoreFunction = Callable[[Any, Any, Any, Any, Any], Any]


@dataclass(frozen=True)
class ScoreKind:
    """A score function.

    Attributes:
        make: the function (score, b, h, q_idx, kv_idx), from captured tensors and numbers.
        captures: names of the tensors that it reads.
        named: makes the `foci.Score` that is given instead of the function, or None.
    """

    make: Callable[[Captured, Numbers], ScoreFunction]
    captures: tuple[str, ...] = ()
    named: Callable[[Captured, Numbers], foci.Score] | None = None

    @property
    def is_named(self) -> bool:
        return self.named is not None


def _where(condition: Callable[..., Any]) -> Callable[[Captured, Numbers], ScoreFunction]:
    """Score functions that exclude with -inf where a condition of (captures, numbers, q_idx, kv_idx) does not hold."""
    return lambda c, n: lambda s, b, h, i, j: torch.where(condition(c, n, i, j), s, -torch.inf)


def _alibi(c: Captured, n: Numbers) -> ScoreFunction:
    return lambda s, b, h, i, j: s + c["slopes"][h] * (j - i)


def _softcap(c: Captured, n: Numbers) -> ScoreFunction:
    return lambda s, b, h, i, j: n.cap * torch.tanh(s / n.cap)


def _relative(c: Captured, n: Numbers) -> ScoreFunction:
    return lambda s, b, h, i, j: s + c["relative"][h, torch.clamp(j - i, -6, 6) + 6]


SCORES: dict[str, ScoreKind] = {
    "none": ScoreKind(lambda c, n: lambda s, b, h, i, j: s),
    "where": ScoreKind(_where(lambda c, n, i, j: i >= j)),
    "where reversed": ScoreKind(lambda c, n: lambda s, b, h, i, j: torch.where(i < j, -torch.inf, s)),
    "masked_fill": ScoreKind(lambda c, n: lambda s, b, h, i, j: s.masked_fill(j > i + n.width, -torch.inf)),
    "plus where": ScoreKind(lambda c, n: lambda s, b, h, i, j: s + torch.where((i - j).abs() < n.width, 0.0, -torch.inf)),
    "where nested": ScoreKind(
        lambda c, n: lambda s, b, h, i, j: torch.where(i >= j, torch.where(i - j < n.width, s, -torch.inf), -torch.inf)
    ),
    "where capped": ScoreKind(lambda c, n: lambda s, b, h, i, j: torch.where(i >= j, n.cap * torch.tanh(s / n.cap), -torch.inf)),
    "where scaled": ScoreKind(lambda c, n: lambda s, b, h, i, j: 0.5 * torch.where(i >= j, s + 0.01 * (i - j), -torch.inf) + 1),
    "bool vector": ScoreKind(_where(lambda c, n, i, j: c["keep"][j]), ("keep",)),
    "int vector": ScoreKind(_where(lambda c, n, i, j: c["ids"][i] == c["ids"][j]), ("ids",)),
    "float vector": ScoreKind(lambda c, n: lambda s, b, h, i, j: s + c["penalty"][j], ("penalty",)),
    "int number": ScoreKind(_where(lambda c, n, i, j: (i - j).abs() <= c["bound"]), ("bound",)),
    "bool table": ScoreKind(_where(lambda c, n, i, j: c["pairs"][i, j]), ("pairs",)),
    "small ints": ScoreKind(lambda c, n: lambda s, b, h, i, j: s + 0.25 * c["levels"][j] * c["levels"][i], ("levels",)),
    "half vector": ScoreKind(lambda c, n: lambda s, b, h, i, j: s * 0.5 + c["half"][j], ("half",)),
    "softcap": ScoreKind(_softcap),
    "alibi": ScoreKind(_alibi, ("slopes",)),
    "gains": ScoreKind(lambda c, n: lambda s, b, h, i, j: s * c["gains"][h] + 0.125 * h, ("gains",)),
    "relative": ScoreKind(_relative, ("relative",)),
    "table": ScoreKind(lambda c, n: lambda s, b, h, i, j: s + c["table"][h, i, j], ("table",)),
    "temperature": ScoreKind(lambda c, n: lambda s, b, h, i, j: s / c["temperature"][b], ("temperature",)),
    "curved": ScoreKind(lambda c, n: lambda s, b, h, i, j: torch.sin(s) + s * torch.sigmoid(s) * n.cap),
    "foci.scores.softcap": ScoreKind(_softcap, named=lambda c, n: foci.scores.softcap(n.cap)),
    "foci.scores.alibi": ScoreKind(_alibi, ("slopes",), named=lambda c, n: foci.scores.alibi(c["slopes"])),
    "foci.scores.relative_position": ScoreKind(_relative, ("relative",), named=lambda c, n: foci.scores.relative_position(c["relative"])),
}


class Position(NamedTuple):
    """Where a mask is asked: indices, and functions that return the lengths of the sequence."""

    b: Any
    h: Any
    i: Any
    j: Any
    q_len: Callable[[], Any]
    kv_len: Callable[[], Any]


@dataclass(frozen=True)
class MaskKind:
    """A mask.

    Attributes:
        attends: which keys a query attends to, a bool expression of (position, captures, numbers).
        captures: names of the tensors that it reads.
        named: makes the `foci.Mask` of the same meaning.
        added: name of the floating tensor that is added to the scores, of a mask that is one.
        window: torch's window_size of `varlen_attn`, from the numbers.
        is_causal: torch's name of it: "upper left" or "lower right".
        reads: "b" and "h" if sequences or heads differ in it.
    """

    attends: Callable[[Position, Captured, Numbers], Any]
    captures: tuple[str, ...] = ()
    named: Callable[[Captured, Numbers], foci.Mask] | None = None
    added: str | None = None
    window: Callable[[Numbers], tuple[int, int]] | None = None
    is_causal: str | None = None
    reads: str = ""


def _everywhere(at: Position, c: Captured, n: Numbers) -> Any:
    return at.j >= 0


MASKS: dict[str, MaskKind] = {
    "none": MaskKind(_everywhere),
    "everything": MaskKind(_everywhere, named=lambda c, n: masks.everything()),
    "causal": MaskKind(lambda at, c, n: at.i >= at.j, named=lambda c, n: masks.causal(), is_causal="upper left"),
    "lower right": MaskKind(
        lambda at, c, n: at.j <= at.i + (at.kv_len() - at.q_len()),
        named=lambda c, n: masks.causal_lower_right(),
        window=lambda n: (-1, 0),
        is_causal="lower right",
    ),
    "window": MaskKind(
        lambda at, c, n: (at.i - at.j <= n.width) & (at.j - at.i <= 2),
        named=lambda c, n: masks.window(n.width, 2),
    ),
    "window of the last": MaskKind(
        lambda at, c, n: (at.i + (at.kv_len() - at.q_len()) - at.j <= n.width) & (at.j - at.i - (at.kv_len() - at.q_len()) <= 2),
        named=lambda c, n: masks.window(n.width, 2, align="lower_right"),
        window=lambda n: (n.width, 2),
    ),
    "documents": MaskKind(
        lambda at, c, n: c["batch_ids"][at.b, at.i] == c["batch_ids"][at.b, at.j],
        ("batch_ids",),
        named=lambda c, n: masks.document(c["batch_ids"]),
        reads="b",
    ),
    "prefix": MaskKind(
        lambda at, c, n: (at.i >= at.j) | (at.j < c["prefix"][at.b]),
        ("prefix",),
        named=lambda c, n: masks.prefix_lm(c["prefix"]),
        reads="b",
    ),
    "keys": MaskKind(lambda at, c, n: c["keys"][at.b, at.j], ("keys",), named=lambda c, n: masks.key_padding(c["keys"]), reads="b"),
    "empty rows": MaskKind(lambda at, c, n: (at.i % 3 != 1) & (at.j <= at.i)),
    "heads": MaskKind(lambda at, c, n: (at.i + at.j + at.h) % 3 != 0, reads="h"),
    "pairs": MaskKind(lambda at, c, n: c["pairs"][at.i, at.j], ("pairs",), named=lambda c, n: masks.dense(c["pairs"])),
    "bias": MaskKind(_everywhere, ("bias",), added="bias"),
    "additive": MaskKind(_everywhere, ("additive",), added="additive"),
}


def draw_captures(names: tuple[str, ...], extent: Extent, dtype: torch.dtype, generator: torch.Generator) -> Captured:
    """The tensors of these names; `dtype` is what floating ones have unless they say otherwise."""
    captured = {}
    for name in names:
        tensor = CAPTURES[name].draw(extent, generator)
        captured[name] = tensor.to(CAPTURES[name].dtype or dtype) if tensor.is_floating_point() else tensor
    return captured
