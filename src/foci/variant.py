"""`Mask` and `Score`, what users write; `Variant`, what the rest of foci sees of them: two expressions, no tensors."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from foci.errors import ArgumentError
from foci.ir import expr as ir
from foci.ir.expr import Expr
from foci.ir.text import from_text, to_infix, to_text
from foci.ir.trace import length_symbol

__all__ = [
    "PLAIN",
    "Capture",
    "Mask",
    "Score",
    "Variant",
    "check_heads",
    "check_is_made",
    "check_length",
    "kv_len",
    "name_with_numbers",
    "picklable",
    "q_len",
]

_Made = TypeVar("_Made", bound="Mask | Score")
_Arguments = ParamSpec("_Arguments")


def q_len() -> Any:
    """Number of queries of the sequence at hand. For use inside a score or mask function.

    Example:
        >>> import foci
        >>> last_rows = foci.Mask(lambda b, h, q_idx, kv_idx: q_idx >= foci.q_len() - 4)
    """
    return _length("q_len")


def kv_len() -> Any:
    """Number of keys of the sequence at hand. For use inside a score or mask function.

    Example:
        >>> import foci
        >>> recent = foci.Mask(lambda b, h, q_idx, kv_idx: kv_idx >= foci.kv_len() - 4)
    """
    return _length("kv_len")


def _length(name: str) -> Any:
    if torch.compiler.is_dynamo_compiling():
        from foci.ir.graph_lengths import length_in_graph

        return length_in_graph(name)
    return length_symbol(name)


def picklable(factory: Callable[_Arguments, _Made]) -> Callable[_Arguments, _Made]:
    """The factory, whose masks or scores are pickled and copied as a call of it: functions within functions cannot be."""

    @functools.wraps(factory)
    def make(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Made:
        return _recorded(factory(*args, **kwargs), make, args, kwargs)

    module = ".".join(factory.__module__.split(".")[:2])
    needs_arguments = any(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in inspect.signature(factory).parameters.values())
    make._call = f"{module}.{factory.__name__}({'...' if needs_arguments else ''})"  # type: ignore[attr-defined]
    return make


def check_is_made(name: str, value: Any) -> None:
    """Refuses a factory, such as `foci.masks.causal`, in the place of what it makes.

    Raises:
        TypeError: with the argument's name and the call that makes the value.
    """
    call = getattr(value, "_call", None) if inspect.isfunction(value) else None
    if call is not None:
        raise TypeError(f"{name} is the function {call.partition('(')[0]}, which makes what belongs here: write {call}")


def _recorded(value: _Made, make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> _Made:
    value._recipe = (make, args, kwargs or {})
    return value


def _made(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return make(*args, **kwargs)


class _Recorded:
    """A value that is pickled and copied as the call that made it, so that a copy captures the copies of its tensors; by attributes
    otherwise."""

    _recipe: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if self._recipe is None else (_made, self._recipe)


class Mask(_Recorded):
    """Which keys a query attends to, as a value: `function(b, h, q_idx, kv_idx)`, true where it does.

    Masks compose: `&` keeps what both keep, `|` what either keeps, `~` the opposite. The other operand may be a
    function as well. Python has no `&` of two plain functions: write `foci.and_masks(f, g)`, or `foci.Mask(f) & g`.

    Args:
        function: of four 0-d integers; pointwise torch functions, comparisons, boolean logic, indexing of captured
            tensors and reductions over captured rows. True where the query attends to the key.
        name: for printing.
        length: of the one sequence that it is for, such as a grid of so many positions; dense queries and keys of other lengths are
            then an error. Masks composed of it are for any.

    Raises:
        TypeError: for a function that cannot be called, or a length that is no integer.

    Example:
        >>> import foci
        >>> local = foci.masks.causal() & foci.Mask(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 128)
    """

    lower_right_form = ""
    """Of a mask of `foci.masks` whose diagonal starts in the upper left corner: how to write it with the last query at the last key."""

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, length: int | None = None) -> None:
        check_is_made("function", function)
        if not callable(function) or isinstance(function, Score):
            raise TypeError(f"function must be a function (b, h, q_idx, kv_idx) -> bool; got {type(function).__name__}")
        if length is not None and (isinstance(length, bool) or not isinstance(length, (int, torch.SymInt))):
            raise TypeError(f"length must be an integer or None; got {type(length).__name__}")
        self.function = function
        self.name = name
        self.length = length

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(b, h, q_idx, kv_idx)

    def __and__(self, other: Callable[..., Any]) -> Mask:
        left, right = self.function, _mask_function(other)
        both = Mask(lambda b, h, q_idx, kv_idx: left(b, h, q_idx, kv_idx) & right(b, h, q_idx, kv_idx), name=_joined(self, "&", other))
        both.lower_right_form = " & ".join(form for form in (self.lower_right_form, getattr(other, "lower_right_form", "")) if form)
        return _recorded(both, operator.and_, (self, other))

    def __or__(self, other: Callable[..., Any]) -> Mask:
        left, right = self.function, _mask_function(other)
        either = Mask(lambda b, h, q_idx, kv_idx: left(b, h, q_idx, kv_idx) | right(b, h, q_idx, kv_idx), name=_joined(self, "|", other))
        return _recorded(either, operator.or_, (self, other))

    def __invert__(self) -> Mask:
        function = self.function
        opposite = Mask(lambda b, h, q_idx, kv_idx: ~function(b, h, q_idx, kv_idx), name=f"~{_label(self)}")
        return _recorded(opposite, operator.invert, (self,))

    __rand__ = __and__
    __ror__ = __or__

    def __bool__(self) -> bool:
        raise TypeError("a Mask has no truth value: compose masks with &, | and ~ instead of `and`, `or` and `not`")

    def __repr__(self) -> str:
        return f"Mask({_label(self)})"


class Score(_Recorded):
    """A change of scores before the softmax, as a value: `function(score, b, h, q_idx, kv_idx)`.

    `first >> second` applies `first`, then `second` to its result.

    Args:
        function: of the scaled score and four 0-d integers, returning the new score; made of what a `Mask` may be
            made of.
        name: for printing.
        heads: number of query heads that it is for, such as a slope for each; a call with another number is then an error. A score
            composed of it is for as many.

    Raises:
        TypeError: for a function that cannot be called, or a number of heads that is no integer.

    Example:
        >>> import foci
        >>> capped = foci.scores.alibi(8) >> foci.scores.softcap(30.0)
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, heads: int | None = None) -> None:
        check_is_made("function", function)
        if not callable(function) or isinstance(function, Mask):
            raise TypeError(f"function must be a function (score, b, h, q_idx, kv_idx) -> score; got {type(function).__name__}")
        if heads is not None and (isinstance(heads, bool) or not isinstance(heads, (int, torch.SymInt))):
            raise TypeError(f"heads must be an integer or None; got {type(heads).__name__}")
        self.function = function
        self.name = name
        self.heads = heads

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(score, b, h, q_idx, kv_idx)

    def __rshift__(self, other: Callable[..., Any]) -> Score:
        first, then = self.function, _score_function(other)
        both = Score(
            lambda score, b, h, q_idx, kv_idx: then(first(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx),
            name=_joined(self, ">>", other),
            heads=_common_heads(self, other),
        )
        return _recorded(both, operator.rshift, (self, other))

    def __rrshift__(self, other: Callable[..., Any]) -> Score:
        return Score(_score_function(other)) >> self

    def __bool__(self) -> bool:
        raise TypeError("a Score has no truth value: compose scores with >> instead of `and` and `or`")

    def __repr__(self) -> str:
        return f"Score({_label(self)})"


def check_length(mask: Any, q_len: int, kv_len: int, said: str) -> None:
    """Refuses lengths that a mask is not for.

    Raises:
        ValueError: `said` is how the message leads up to the lengths.
    """
    length = mask.length if isinstance(mask, Mask) else None
    if length is not None and not q_len == kv_len == length:
        raise ArgumentError(f"{_label(mask)} is for {length} queries and keys; {said} {q_len} and {kv_len}")


def check_heads(score: Any, heads: int) -> None:
    """Refuses a number of query heads that a score is not for.

    Raises:
        ValueError: with both numbers.
    """
    wanted = score.heads if isinstance(score, Score) else None
    if wanted is not None and wanted != heads:
        raise ArgumentError(f"{_label(score)} is for {wanted} query heads; query has {heads}")


def _common_heads(first: Score, second: Any) -> int | None:
    counts = [score.heads for score in (first, second) if isinstance(score, Score) and score.heads is not None]
    if len(counts) == 2 and counts[0] != counts[1]:
        raise ValueError(f"{_label(first)} is for {counts[0]} query heads, {_label(second)} for {counts[1]}: they do not compose")
    return counts[0] if counts else None


def _label(value: Any) -> str:
    return getattr(value, "name", None) or getattr(value, "__name__", None) or type(value).__name__


def name_with_numbers(template: str, *numbers: Any) -> str:
    """The name of a mask or score, such as "window({}, {})", with its numbers. Dynamo cannot write a number that changes from call to
    call, so in its graphs the name stands alone."""
    return template.partition("(")[0] if torch.compiler.is_dynamo_compiling() else template.format(*numbers)


def _joined(left: Any, operator: str, right: Any) -> str:
    return f"({_label(left)} {operator} {_label(right)})"


def _mask_function(value: Any) -> Callable[..., Any]:
    check_is_made("the other mask", value)
    if isinstance(value, Score):
        raise TypeError("a Score cannot be composed with a Mask: pass it as score=")
    if isinstance(value, Mask):
        return value.function
    if not callable(value):
        raise TypeError(f"a Mask composes with another Mask or a function (b, h, q_idx, kv_idx); got {type(value).__name__}")
    return value  # type: ignore[no-any-return]


def _score_function(value: Any) -> Callable[..., Any]:
    check_is_made("the other score", value)
    if isinstance(value, Mask):
        raise TypeError("a Mask cannot be composed with a Score: pass it as mask=")
    if isinstance(value, Score):
        return value.function
    if not callable(value):
        raise TypeError(f"a Score composes with another Score or a function (score, b, h, q_idx, kv_idx); got {type(value).__name__}")
    return value  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Capture:
    """A captured tensor, as a variant knows it: never its sizes or values."""

    dtype: torch.dtype
    rank: int


@dataclass(frozen=True)
class Variant:
    """Two expressions and what they capture: attention without its tensors.

    Attributes:
        score: FLOAT, of the scaled score and the coordinates.
        mask: BOOL, of the coordinates.
        captures: the captured tensors, by slot.
    """

    score: Expr
    mask: Expr
    captures: tuple[Capture, ...] = ()

    @functools.cached_property
    def text(self) -> str:
        """Canonical: equal for variants that compute the same in the same way, across processes."""
        captures = " ".join(f"{str(c.dtype).removeprefix('torch.')}:{c.rank}" for c in self.captures)
        return f"captures {captures}\n{to_text((self.score, self.mask))}"

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Variant:
        """The variant with this text."""
        head, _, body = text.partition("\n")
        pairs = (item.split(":") for item in head.removeprefix("captures").split())
        captures = tuple(Capture(getattr(torch, dtype), int(rank)) for dtype, rank in pairs)
        score, mask = from_text(body)
        return Variant(score, mask, captures)

    @property
    def is_plain(self) -> bool:
        """Neither mask nor score function."""
        return self == PLAIN

    def __str__(self) -> str:
        mask = "" if self.mask is PLAIN.mask else f" where {to_infix(self.mask)}"
        return f"{to_infix(self.score)}{mask}"


PLAIN = Variant(ir.variable("score"), ir.const(True))
