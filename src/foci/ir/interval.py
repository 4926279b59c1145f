"""Bounds of an expression over whole blocks of coordinates: interval analysis (R. E. Moore, Interval Analysis, 1966).

Sound also for what float32 rounds: wherever an operation may round, its range grows by a few units in the last place, so
that a comparison is only decided where rounding cannot turn it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from foci.ir import ranges
from foci.ir.expr import DType, Expr
from foci.ir.ops import OPS
from foci.ir.ranges import Range
from foci.ir.rewrite import reduction
from foci.ir.segment_minmax import segment_range

__all__ = ["EXACT_OPS", "Grid", "bounds", "is_whole"]


@dataclass(frozen=True, eq=False)
class Grid:
    """Known bounds of the coordinates of every block, and the captured values.

    Attributes:
        ranges: of the variables, float64 tensors that broadcast against each other, such as b [B, 1, 1, 1] and
            kv_idx [1, 1, 1, blocks]. A variable `score` may be left out: then nothing is known of it.
        captures: the captured tensors, by slot.
        ints, floats: the run-time numbers, by slot.
    """

    ranges: Mapping[str, Range]
    captures: Sequence[Tensor] = ()
    ints: Sequence[int] = ()
    floats: Sequence[float] = ()


def bounds(expr: Expr, grid: Grid) -> Range:
    """The range of `expr` over each block, in the broadcast shape of what it reads. A BOOL is within [0, 1].

    Raises:
        ValueError: for a variable that the grid does not give.

    Example:
        >>> from foci.ir.expr import variable
        >>> from foci.ir.ops import apply
        >>> first = torch.tensor([0.0, 4.0], dtype=torch.float64)
        >>> grid = Grid({"q_idx": Range(first[:, None], first[:, None] + 3), "kv_idx": Range(first, first + 3)})
        >>> causal = bounds(apply("le", variable("kv_idx"), variable("q_idx")), grid)
        >>> causal.lo.tolist(), causal.hi.tolist()
        ([[0.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 1.0]])
    """
    return _Analysis(grid, expr).find_range(expr, (_Frame(None),))


_UNROLLED: Final = 64  # longest reduction that is followed index by index
_EXACT_FLOAT: Final = 2.0**24
_EXACT_DOUBLE: Final = 2.0**53
_MARGIN: Final = 2.0**-20
_MOST_REDUCED: Final = 1 << 26  # elements of a tensor that is reduced in two dimensions, and of what is left after one
_MOST_SLICES: Final = 1 << 22
_LIMITS: Final = {DType.INT32: (-(2.0**31), 2.0**31 - 1), DType.INT64: (-(2.0**63), 2.0**63)}


@dataclass(eq=False)
class _Frame:
    """One pass over the body of a reduction, or the top."""

    level: int | None
    known: dict[Expr, Range] = field(default_factory=dict)


_Frames = tuple[_Frame, ...]


@dataclass(frozen=True, eq=False)
class _Facts:
    """Facts about an expression that every analysis needs: depth of each node, number of readers, which nodes are integral."""

    depth: Mapping[Expr, int]
    uses: Mapping[Expr, int]
    integral: frozenset[Expr]


@functools.lru_cache(maxsize=512)
def _facts(root: Expr) -> _Facts:
    depth: dict[Expr, int] = {}
    uses: dict[Expr, int] = {root: 1}
    for e in root.walk():
        depth[e] = 1 + max((depth[arg] for arg in e.args), default=0)
        for arg in e.args:
            # what a reduction reads is read again on every pass
            uses[arg] = uses.get(arg, 0) + (1 << 30 if e.op == "reduce" or e.free else 1)
    return _Facts(depth, uses, _integral(root))


class _Analysis:
    def __init__(self, grid: Grid, root: Expr) -> None:
        facts = _facts(root)
        self.grid = grid
        self.depth = facts.depth
        self.integral = facts.integral
        self.uses = dict(facts.uses)
        example = next(iter(grid.ranges.values()), None)
        self.device = torch.device("cpu") if example is None else example.lo.device

    def find_range(self, root: Expr, frames: _Frames) -> Range:
        """The range of an expression, its operands first, each once."""
        stack = [root]
        while stack:
            e = stack[-1]
            own_frames = self._find_frames(e, frames)
            if e in own_frames[-1].known:
                stack.pop()
                continue
            operands = e.args[1:] if e.op == "reduce" else e.args
            missing = [arg for arg in operands if arg not in self._find_frames(arg, own_frames)[-1].known]
            if missing:
                # the deepest first, so that little is held meanwhile
                stack.extend(sorted(missing, key=self.depth.__getitem__))
                continue
            own_frames[-1].known[e] = self._node(e, [self._read(arg, own_frames) for arg in operands], own_frames)
            stack.pop()
        return self._read(root, frames)

    def _find_frames(self, e: Expr, frames: _Frames) -> _Frames:
        for i in range(len(frames) - 1, 0, -1):
            if frames[i].level in e.free:
                return frames[: i + 1]
        return frames[:1]

    def _read(self, e: Expr, frames: _Frames) -> Range:
        known = self._find_frames(e, frames)[-1].known
        self.uses[e] -= 1
        return known[e] if self.uses[e] else known.pop(e)

    def _node(self, e: Expr, args: list[Range], frames: _Frames) -> Range:
        if e.op in OPS:
            rule = _TYPED_RULES.get((e.op, e.dtype), OPS[e.op].range)
            return _unless_nan(e, self._settled(e, rule(*args)), args)
        if e.op == "load":
            return self._load(e, args)
        if e.op == "reduce":
            return self._settled(e, self._reduce(e, args[0], frames))
        if e.op == "cast":
            return self._settled(e, _CASTS[e.dtype](args[0], e.args[0].dtype))
        if e.op == "round_to":
            dtype = getattr(torch, str(e.value))
            return ranges.increasing(lambda x: x.to(dtype).to(torch.float64))(_widened(args[0]))
        return self._leaf(e)

    def _leaf(self, e: Expr) -> Range:
        if e.op == "var":
            name = str(e.value)
            if name in self.grid.ranges:
                return self.grid.ranges[name]
            if name == "score":
                return self._point(-torch.inf).hull(self._point(torch.inf))
            raise ValueError(f"bounds: the grid gives no range of {name}; it gives {', '.join(self.grid.ranges) or 'none'}")
        value = e.value
        if e.op == "param":
            assert isinstance(value, int)
            value = self.grid.ints[value] if e.dtype.is_integer else self.grid.floats[value]
        if e.op == "size":
            assert isinstance(value, tuple)
            value = self.grid.captures[int(value[0])].shape[int(value[1])]
        assert isinstance(value, (bool, int, float))
        point = self._point(float(value))
        exact = e.dtype is not DType.FLOAT or float(torch.tensor(value, dtype=torch.float32, device="cpu")) == value or value != value
        if value != value:
            return self._point(-torch.inf).hull(self._point(torch.inf))
        return point if exact else _widened(point)

    def _point(self, value: float) -> Range:
        at = torch.tensor(value, dtype=torch.float64, device=self.device)
        return Range(at, at)

    def _settled(self, e: Expr, interval: Range) -> Range:
        """`found` with what arithmetic of the device does to it: rounding of floats, wrapping of integers."""
        if e.op in EXACT_OPS or e.dtype is DType.BOOL:
            return interval
        if e.dtype is not DType.FLOAT:
            lowest, highest = _LIMITS[e.dtype]
            beyond = (interval.lo < lowest) | (interval.hi > highest)
            if not bool(beyond.any()):
                return interval
            return Range(interval.lo.masked_fill(beyond, lowest), interval.hi.masked_fill(beyond, highest))
        if e in self.integral:
            large = (interval.lo < -_EXACT_FLOAT) | (interval.hi > _EXACT_FLOAT)
            return _widened(interval).where(large, interval) if bool(large.any()) else interval
        return _widened(interval)

    # Loads ---------------------------------------------------------------------------------------------------------

    def _load(self, e: Expr, indices: list[Range]) -> Range:
        assert isinstance(e.value, int)
        tensor = self.grid.captures[e.value].detach()
        if not tensor.numel():
            return self._anything(e.dtype)
        places = [_place(index, length) for index, length in zip(indices, tensor.shape, strict=True)]
        bounds = _element_range(tensor, places)
        bounds = Range(bounds.lo.to(self.device), bounds.hi.to(self.device))
        if tensor.dtype is torch.float64:
            return _widened(bounds)
        if tensor.dtype is torch.int64:
            return Range(_beyond_double(bounds.lo, -torch.inf), _beyond_double(bounds.hi, torch.inf))
        return bounds

    def _anything(self, dtype: DType) -> Range:
        most = 1.0 if dtype is DType.BOOL else torch.inf
        return self._point(0.0 if dtype is DType.BOOL else -torch.inf).hull(self._point(most))

    # Reductions ----------------------------------------------------------------------------------------------------

    def _reduce(self, e: Expr, extent: Range, frames: _Frames) -> Range:
        kind, level = reduction(e)
        body = e.args[0]
        least, most = float(extent.lo.min()), float(extent.hi.max())
        if least == most and 1 <= most <= _UNROLLED:
            total: Range | None = None
            for i in range(int(most)):
                step = self._pass(body, (*frames, _Frame(level)), self._point(float(i)))
                total = step if total is None else _COMBINED[kind](total, step)
            assert total is not None
            return total
        steps = self._point(0.0).hull(self._point(max(0.0, most - 1)))
        step = self._pass(body, (*frames, _Frame(level)), steps)
        return _WHOLE[kind](step, extent)

    def _pass(self, body: Expr, frames: _Frames, index: Range) -> Range:
        frame = frames[-1]
        for e in body.walk():
            if e.op == "axis" and e.value == frame.level:
                frame.known[e] = index
        return self.find_range(body, frames)


# Rules -------------------------------------------------------------------------------------------------------------


def _unless_nan(e: Expr, result: Range, args: Sequence[Range]) -> Range:
    """`result`, without bounds where a FLOAT operand has none: that may be nan, and then so is the result."""
    if e.dtype is not DType.FLOAT or e.op == "where":
        return result
    for arg, operand in zip(e.args, args, strict=True):
        if arg.dtype is DType.FLOAT:
            result = _unbounded_where(operand, result)
    return result


def _unbounded_where(operand: Range, result: Range) -> Range:
    nothing_known = (operand.lo == -torch.inf) & (operand.hi == torch.inf)
    return Range(torch.where(nothing_known, -torch.inf, result.lo), torch.where(nothing_known, torch.inf, result.hi))


def _extreme(rule: Callable[[Range, Range], Range]) -> Callable[[Range, Range], Range]:
    """The least or greatest of steps of a reduction: nan where one of them is."""
    return lambda a, b: _unbounded_where(a, _unbounded_where(b, rule(a, b)))


def _integer_mod(a: Range, b: Range) -> Range:
    result = ranges.mod(a, b)
    return Range(result.lo, torch.where(b.lo > 0, torch.minimum(result.hi, b.hi - 1), result.hi))


_TYPED_RULES: Final[Mapping[tuple[str, DType], Callable[..., Range]]] = {
    ("and", DType.BOOL): ranges.minimum,
    ("or", DType.BOOL): ranges.maximum,
    ("xor", DType.BOOL): ranges.ne,
    ("not", DType.BOOL): ranges.negated,
    ("mod", DType.INT32): _integer_mod,
    ("mod", DType.INT64): _integer_mod,
}
"""Rules by type, where the op table's row, which holds for every type, is too coarse."""
_COMBINED: Final[Mapping[str, Callable[[Range, Range], Range]]] = {
    "sum": lambda a, b: _widened(ranges.add(a, b)),
    "max": _extreme(ranges.maximum),
    "min": _extreme(ranges.minimum),
    "any": ranges.maximum,
    "all": ranges.minimum,
}


def _sum(step: Range, extent: Range) -> Range:
    total = ranges.mul(step, extent)
    # rounding grows with the number of terms and their size
    size = torch.maximum(total.lo.abs(), total.hi.abs())
    slack = torch.where(torch.isfinite(size), size, 0.0) * (_MARGIN * extent.hi.clamp(min=1.0, max=2.0**19))
    return Range(total.lo - slack, total.hi + slack)


def _any(step: Range, extent: Range) -> Range:
    return Range(torch.where(extent.lo >= 1, step.lo, 0.0), torch.where(extent.hi >= 1, step.hi, 0.0))


def _all(step: Range, extent: Range) -> Range:
    return Range(torch.where(extent.hi >= 1, step.lo, 1.0), torch.where(extent.lo >= 1, step.hi, 1.0))


_WHOLE: Final[Mapping[str, Callable[[Range, Range], Range]]] = {
    "sum": _sum,
    "max": lambda step, extent: step,
    "min": lambda step, extent: step,
    "any": _any,
    "all": _all,
}


def _to_float(a: Range, source: DType) -> Range:
    large = (a.lo < -_EXACT_FLOAT) | (a.hi > _EXACT_FLOAT)
    return _widened(a).where(large, a) if bool(large.any()) else a


def _to_integer(a: Range, source: DType) -> Range:
    return Range(torch.trunc(a.lo), torch.trunc(a.hi)) if source is DType.FLOAT else a


def _to_bool(a: Range, source: DType) -> Range:
    zero = torch.zeros((), dtype=torch.float64, device=a.lo.device)
    return ranges.ne(a, Range(zero, zero))


_CASTS: Final[Mapping[DType, Callable[[Range, DType], Range]]] = {
    DType.FLOAT: _to_float,
    DType.INT32: _to_integer,
    DType.INT64: _to_integer,
    DType.BOOL: _to_bool,
}

EXACT_OPS: Final = frozenset(
    ("sign", "min", "max", "floor", "ceil", "round", "trunc", "where", "floordiv", "and", "or", "xor", "not", "shr")
)
"""Operations whose result, given exact operands, is exact whatever they are: no rounding, no overflow."""
_INTEGRAL_OPS: Final = frozenset(("neg", "abs", "add", "sub", "mul", "min", "max", "where", "mod", "fmod", "floordiv", "sign"))
_ROUNDINGS: Final = frozenset(("floor", "ceil", "round", "trunc"))


def is_whole(e: Expr) -> bool:
    """Whether a FLOAT expression is an integer whatever it reads, and so exact while it is small."""
    return e in _integral(e)


def _integral(root: Expr) -> frozenset[Expr]:
    """FLOAT nodes that are integers: their sums and products are exact while they are small."""
    integral: set[Expr] = set()
    for e in root.walk():
        if e.dtype is not DType.FLOAT:
            continue
        is_leaf = isinstance(e.value, float) and e.value.is_integer() if e.op == "const" else e.op == "cast" or e.op in _ROUNDINGS
        operands = e.args[1:] if e.op == "where" else e.args
        if is_leaf or (e.op in _INTEGRAL_OPS and all(arg in integral for arg in operands)):
            integral.add(e)
    return frozenset(integral)


def _widened(a: Range) -> Range:
    return Range(a.lo * (1 - _MARGIN * torch.sign(a.lo)), a.hi * (1 + _MARGIN * torch.sign(a.hi)))


def _beyond_double(x: Tensor, direction: float) -> Tensor:
    """Integers that float64 rounds, moved outward by one step."""
    large = x.abs() >= _EXACT_DOUBLE
    return torch.where(large, torch.nextafter(x, torch.full_like(x, direction)), x) if bool(large.any()) else x


# Indices -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Place:
    """Bounds of an index in a dimension, int64; `is_point` if it is one position in every block."""

    first: Tensor
    last: Tensor
    is_point: bool

    @property
    def shape(self) -> torch.Size:
        return (self.first + self.last).shape


def _place(index: Range, length: int) -> _Place:
    """The range of an index as torch reads it: negative from the end; clamped into the dimension."""
    lo = index.lo.clamp(-length, length - 1).to(torch.int64)
    hi = index.hi.clamp(-length, length - 1).to(torch.int64)
    lo, hi = torch.where(lo < 0, lo + length, lo), torch.where(hi < 0, hi + length, hi)
    across = (index.lo < 0) & (index.hi >= 0)  # -1 .. 1 is the last element and the first ones
    if bool(across.any()):
        lo, hi = lo.masked_fill(across, 0), hi.masked_fill(across, length - 1)
    return _Place(lo, hi, index.lo is index.hi or torch.equal(lo, hi))


def _element_range(tensor: Tensor, places: list[_Place]) -> Range:
    """Range of the elements in the box of the places."""
    wide = [dim for dim, place in enumerate(places) if not place.is_point]
    if not wide:
        element = tensor[tuple(place.first.to(tensor.device) for place in places)].to(torch.float64)
        unknown = torch.isnan(element)
        return Range(element.masked_fill(unknown, -torch.inf), element.masked_fill(unknown, torch.inf))
    if len(wide) > 1:
        slices = tensor.numel() // tensor.shape[wide[-1]] * places[wide[-1]].shape.numel()
        if tensor.numel() <= _MOST_REDUCED and slices <= _MOST_SLICES:
            return _without_dim(tensor, places, wide[-1])
        zero = torch.zeros((), dtype=torch.int64, device=tensor.device)
        return segment_range(tensor.reshape(1, -1), zero, zero, zero + (tensor.numel() - 1))
    (dim,) = wide
    row = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for other, place in enumerate(places):
        if other != dim:
            row = row * tensor.shape[other] + place.first.to(tensor.device)
    rows = tensor.movedim(dim, -1).reshape(-1, tensor.shape[dim])
    return segment_range(rows, row, places[dim].first.to(tensor.device), places[dim].last.to(tensor.device))


def _without_dim(tensor: Tensor, places: list[_Place], dim: int) -> Range:
    """Range of the box by way of the ranges of its slices along `dim`, one for each block."""
    device, place = tensor.device, places[dim]
    rows = tensor.movedim(dim, -1)
    flat = rows.reshape(-1, rows.shape[-1])
    every = torch.arange(len(flat), device=device)[:, None]
    first, last = (end.expand(place.shape) for end in (place.first, place.last))
    if first.dim() > 1:  # the same blocks for every batch entry, head and row, as a rule
        one = first[(0,) * (first.dim() - 1)], last[(0,) * (last.dim() - 1)]
        if torch.equal(first, one[0].expand_as(first)) and torch.equal(last, one[1].expand_as(last)):
            first, last = one
    number = torch.arange(first.numel(), device=first.device).reshape(first.shape)
    slices = segment_range(flat, every, first.to(device).reshape(1, -1), last.to(device).reshape(1, -1))
    rest = [*places[:dim], *places[dim + 1 :], _Place(number, number, is_point=True)]
    lo, hi = (_element_range(end.reshape(*rows.shape[:-1], -1), rest) for end in (slices.lo, slices.hi))
    return Range(lo.lo, hi.hi)
