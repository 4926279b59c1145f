"""`Mask` and `Score`, what users write; `Variant`, what the rest of foci sees of them: two expressions, no tensors."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foci.ir import expr as ir
from foci.ir.expr import DType, Expr
from foci.ir.lift import lift_constants
from foci.ir.memo import fingerprint
from foci.ir.ops import apply, cast
from foci.ir.rewrite import rewrite
from foci.ir.simplify import lift_mask, simplify
from foci.ir.text import from_text, to_infix, to_text
from foci.ir.trace import SYMBOLIC_BASE, TraceError, Tracer, length_symbol
from foci.ir.verify import verify

__all__ = ["Bound", "Capture", "Mask", "Score", "Variant", "bind", "kv_len", "q_len"]

MASK_VARIABLES = ("b", "h", "q_idx", "kv_idx")
SCORE_VARIABLES = ("score", "b", "h", "q_idx", "kv_idx")


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def q_len() -> Any:
    """Number of queries of the sequence at hand. For use inside a score or mask function.

    Example:
        >>> import foci
        >>> last_rows = foci.Mask(lambda b, h, q_idx, kv_idx: q_idx >= foci.q_len() - 4)
    """
    return length_symbol("q_len")


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def kv_len() -> Any:
    """Number of keys of the sequence at hand. For use inside a score or mask function.

    Example:
        >>> import foci
        >>> recent = foci.Mask(lambda b, h, q_idx, kv_idx: kv_idx >= foci.kv_len() - 4)
    """
    return length_symbol("kv_len")


class Mask:
    """Which keys a query attends to, as a value: `function(b, h, q_idx, kv_idx)`, true where it does.

    Masks compose: `&` keeps what both keep, `|` what either keeps, `~` the opposite. The other operand may be a
    function as well.

    Args:
        function: of four 0-d integers; pointwise torch functions, comparisons, boolean logic, indexing of captured
            tensors and reductions over captured rows. True where the query attends to the key.
        name: for printing.

    Example:
        >>> import foci
        >>> local = foci.masks.causal() & foci.Mask(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 128)
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self.function = function
        self.name = name

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(b, h, q_idx, kv_idx)

    def __and__(self, other: Callable[..., Any]) -> Mask:
        left, right = self.function, _mask_function(other)
        return Mask(lambda b, h, q_idx, kv_idx: left(b, h, q_idx, kv_idx) & right(b, h, q_idx, kv_idx), name=_joined(self, "&", other))

    def __or__(self, other: Callable[..., Any]) -> Mask:
        left, right = self.function, _mask_function(other)
        return Mask(lambda b, h, q_idx, kv_idx: left(b, h, q_idx, kv_idx) | right(b, h, q_idx, kv_idx), name=_joined(self, "|", other))

    def __invert__(self) -> Mask:
        function = self.function
        return Mask(lambda b, h, q_idx, kv_idx: ~function(b, h, q_idx, kv_idx), name=f"~{_label(self)}")

    __rand__ = __and__
    __ror__ = __or__

    def __bool__(self) -> bool:
        raise TypeError("a Mask has no truth value: compose masks with &, | and ~ instead of `and`, `or` and `not`")

    def __repr__(self) -> str:
        return f"Mask({_label(self)})"


class Score:
    """What happens to scores before the softmax, as a value: `function(score, b, h, q_idx, kv_idx)`.

    `first >> second` applies `first`, then `second` to its result.

    Args:
        function: of the scaled score and four 0-d integers, returning the new score; made of what a `Mask` may be
            made of.
        name: for printing.

    Example:
        >>> import foci
        >>> capped = foci.scores.alibi(8) >> foci.scores.softcap(30.0)
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self.function = function
        self.name = name

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(score, b, h, q_idx, kv_idx)

    def __rshift__(self, other: Callable[..., Any]) -> Score:
        first, then = self.function, _score_function(other)
        return Score(
            lambda score, b, h, q_idx, kv_idx: then(first(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx), name=_joined(self, ">>", other)
        )

    def __rrshift__(self, other: Callable[..., Any]) -> Score:
        return Score(_score_function(other)) >> self

    def __bool__(self) -> bool:
        raise TypeError("a Score has no truth value: compose scores with >> instead of `and` and `or`")

    def __repr__(self) -> str:
        return f"Score({_label(self)})"


def _label(value: Any) -> str:
    return getattr(value, "name", None) or getattr(value, "__name__", None) or type(value).__name__


def _joined(left: Any, operator: str, right: Any) -> str:
    return f"({_label(left)} {operator} {_label(right)})"


def _mask_function(value: Any) -> Callable[..., Any]:
    if isinstance(value, Score):
        raise TypeError("a Score cannot be composed with a Mask: pass it as score=")
    if isinstance(value, Mask):
        return value.function
    if not callable(value):
        raise TypeError(f"a Mask composes with another Mask or a function (b, h, q_idx, kv_idx); got {type(value).__name__}")
    return value  # type: ignore[no-any-return]


def _score_function(value: Any) -> Callable[..., Any]:
    if isinstance(value, Mask):
        raise TypeError("a Mask cannot be composed with a Score: pass it as mask=")
    if isinstance(value, Score):
        return value.function
    if not callable(value):
        raise TypeError(f"a Score composes with another Score or a function (score, b, h, q_idx, kv_idx); got {type(value).__name__}")
    return value  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Capture:
    """What a variant knows of a captured tensor: never its sizes or values."""

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


@dataclass(frozen=True, eq=False)
class Bound:
    """A variant with what it captured this time."""

    variant: Variant
    captures: tuple[Tensor, ...] = ()
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()


_PLAIN_BOUND = Bound(PLAIN)


def bind(score: Callable[..., Any] | None, mask: Callable[..., Any] | None, device: torch.device) -> Bound:
    """Runs the functions on symbols and separates what they compute from the tensors and numbers they captured.

    Raises:
        TraceError: for an operation outside the language.
    """
    if score is None and mask is None:
        return _PLAIN_BOUND
    prints = (fingerprint(score), fingerprint(mask))
    if prints[0] is None or prints[1] is None or torch._guards.detect_fake_mode() is not None:
        return _traced(score, mask, device)[0]
    key = (prints[0][0], prints[1][0], device)
    tensors = prints[0][1] + prints[1][1]
    found = _remembered.get(key)
    if found is None:
        return _remember(key, tensors, *_traced(score, mask, device))
    _remembered.move_to_end(key)
    return Bound(found[0].variant, tuple(tensors[n] for n in found[1]), found[0].ints, found[0].floats)


_remembered: OrderedDict[tuple[Any, ...], tuple[Bound, tuple[int, ...]]] = OrderedDict()
_REMEMBERED = 512


def _remember(key: tuple[Any, ...], tensors: list[Tensor], bound: Bound, symbolic: bool) -> Bound:
    """Keeps what was traced, without its tensors, if each of them is one the functions close over."""
    spots = {id(t): n for n, t in enumerate(tensors)}
    if not symbolic and all(id(t) in spots for t in bound.captures):
        _remembered[key] = Bound(bound.variant, (), bound.ints, bound.floats), tuple(spots[id(t)] for t in bound.captures)
        while len(_remembered) > _REMEMBERED:
            _remembered.popitem(last=False)
    return bound


def _traced(score: Callable[..., Any] | None, mask: Callable[..., Any] | None, device: torch.device) -> tuple[Bound, bool]:
    tracer = Tracer(device)
    score_expr = PLAIN.score if score is None else _as_score(tracer.trace(score, SCORE_VARIABLES))
    mask_expr = PLAIN.mask if mask is None else _as_mask(tracer.trace(mask, MASK_VARIABLES))
    form = _canonical(score_expr, mask_expr)
    tensors = tuple(tracer.tensors[slot] for slot in form.slots)
    specs = tuple(Capture(t.dtype, t.dim()) for t in tensors)
    ints = form.ints + tuple(tracer.symbolic[n] for n in form.symbolic_ints)
    floats = form.floats + tuple(tracer.symbolic[n] for n in form.symbolic_floats)
    return Bound(_variant(form.score, form.mask, specs), tensors, ints, floats), bool(tracer.symbolic)


def _as_score(expr: Expr) -> Expr:
    if expr.dtype is DType.BOOL:
        raise TraceError("a score function must return a score, got a boolean: pass a mask function as mask=")
    return cast(expr, DType.FLOAT)


def _as_mask(expr: Expr) -> Expr:
    if expr.dtype is not DType.BOOL:
        raise TraceError(f"a mask function must return a boolean, true where the query attends to the key; got {expr.dtype.value}")
    return expr


@functools.lru_cache(maxsize=1024)
def _variant(score: Expr, mask: Expr, captures: tuple[Capture, ...]) -> Variant:
    return Variant(score, mask, captures)


@dataclass(frozen=True)
class _Canonical:
    score: Expr
    mask: Expr
    slots: tuple[int, ...]
    ints: tuple[int, ...]
    floats: tuple[float, ...]
    symbolic_ints: tuple[int, ...]
    symbolic_floats: tuple[int, ...]


@functools.lru_cache(maxsize=512)
def _canonical(score: Expr, mask: Expr) -> _Canonical:
    score, extra = lift_mask(simplify(score))
    mask = simplify(apply("and", mask, extra))
    (score, mask), ints, floats = lift_constants((score, mask))
    score, mask, slots = _renumber_captures(score, mask)
    score, mask, symbolic_ints, symbolic_floats = _renumber_symbolic(score, mask, len(ints), len(floats))
    for expr in (score, mask):
        verify(expr, len(slots))
    return _Canonical(score, mask, slots, ints, floats, symbolic_ints, symbolic_floats)


def _renumber_captures(score: Expr, mask: Expr) -> tuple[Expr, Expr, tuple[int, ...]]:
    order: dict[int, int] = {}
    for root in (score, mask):
        for e in root.walk():
            if e.op == "load":
                order.setdefault(int(str(e.value)), len(order))

    def rule(e: Expr) -> Expr | None:
        if e.op == "load":
            return ir.load(order[int(str(e.value))], e.args, e.dtype)
        if e.op == "size" and isinstance(e.value, tuple):
            return ir.size(order[int(e.value[0])], int(e.value[1]))
        return None

    for root in (score, mask):
        for e in root.walk():
            if e.op == "size" and isinstance(e.value, tuple):
                order.setdefault(int(e.value[0]), len(order))
    return rewrite(score, rule), rewrite(mask, rule), tuple(order)


def _renumber_symbolic(score: Expr, mask: Expr, ints: int, floats: int) -> tuple[Expr, Expr, tuple[int, ...], tuple[int, ...]]:
    order: dict[DType, dict[int, int]] = {DType.INT32: {}, DType.FLOAT: {}}
    base = {DType.INT32: ints, DType.FLOAT: floats}

    def rule(e: Expr) -> Expr | None:
        if e.op == "param" and isinstance(e.value, int) and e.value >= SYMBOLIC_BASE:
            known = order[e.dtype]
            return ir.param(base[e.dtype] + known.setdefault(e.value - SYMBOLIC_BASE, len(known)), e.dtype)
        return None

    score, mask = rewrite(score, rule), rewrite(mask, rule)
    return score, mask, tuple(order[DType.INT32]), tuple(order[DType.FLOAT])
