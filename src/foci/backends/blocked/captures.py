"""Gradients of captured tensors: sums over tiles, in a fixed order, without atomic additions."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from foci.backends.blocked.scores import Scores
from foci.backends.blocked.tiles import Chunk, Run, Tile
from foci.backends.row_gradients import summed_derivatives
from foci.ir.derivative import CaptureDerivative
from foci.ir.eager import Env, evaluate
from foci.ir.expr import COORDINATES, DType, Expr, const
from foci.ir.ops import apply, cast
from foci.problem import Problem

__all__ = ["CaptureSums", "Site"]

_LABEL: Final = {name: dim for dim, name in enumerate(COORDINATES)}
_FIRST_AXIS: Final = len(COORDINATES)
# Elements of a derivative that is evaluated over the rows of a reduction.
_ELEMENTS: Final = 1 << 22


@dataclass(frozen=True)
class Site:
    """One load to differentiate: grad[slot][indices] += sum of dscore * factor * rest.

    `factor` reads no axis of the site's reductions, `rest` may. Labels 0 to 3 are the coordinates, those from 4 the
    axes; `kept` are the labels that the indices read, over all others the sum is taken.
    """

    slot: int
    indices: tuple[Expr, ...]
    factor: Expr
    rest: Expr
    axes: tuple[tuple[int, Expr], ...]
    kept: tuple[int, ...]

    @functools.cached_property
    def labels(self) -> tuple[int | None, ...] | None:
        """For each index the label it is, or None for one number; None at all where an index is neither."""
        labels = tuple(_axis_labels(index, self.axes) for index in self.indices)
        plain = all(not axis_labels or index.op in ("var", "axis") for index, axis_labels in zip(self.indices, labels, strict=True))
        single = [axis_labels[0] for axis_labels in labels if len(axis_labels) == 1]
        if not plain or len(set(single)) != len(single):
            return None
        return tuple(axis_labels[0] if axis_labels else None for axis_labels in labels)


@functools.lru_cache(maxsize=1024)
def _capture_sites(score: Expr, needs_grad: tuple[bool, ...]) -> tuple[Site, ...]:
    """The loads of a score function whose captured tensors want a gradient."""
    return tuple(_site(d) for d in summed_derivatives(score) if needs_grad[d.slot])


def _site(derivative: CaptureDerivative) -> Site:
    levels = {level for level, _ in derivative.axes}
    factor = rest = const(1.0)
    for part in _factors(derivative.weight):
        if part.free & levels:
            rest = apply("mul", rest, part) if rest.op != "const" else part
        else:
            factor = apply("mul", factor, part) if factor.op != "const" else part
    kept = sorted({label for index in derivative.indices for label in _axis_labels(index, derivative.axes)})
    return Site(derivative.slot, derivative.indices, cast(factor, DType.FLOAT), cast(rest, DType.FLOAT), derivative.axes, tuple(kept))


def _factors(expr: Expr) -> Iterator[Expr]:
    if expr.op == "mul":
        yield from _factors(expr.args[0])
        yield from _factors(expr.args[1])
    else:
        yield expr


def _axis_labels(index: Expr, axes: tuple[tuple[int, Expr], ...]) -> tuple[int, ...]:
    names = index.variables()
    if "score" in names:
        return (*range(_FIRST_AXIS), *(_FIRST_AXIS + i for i in range(len(axes))))
    read = (_FIRST_AXIS + i for i, (level, _) in enumerate(axes) if level in index.free)
    return (*sorted(_LABEL[n] for n in names if n in _LABEL), *read)


class CaptureSums:
    """Sums that become the gradients, one for each captured tensor that wants one, in the accumulation type."""

    def __init__(self, problem: Problem, captures: Sequence[Tensor], acc: torch.dtype) -> None:
        needs_grad = problem.capture_grads + (False,) * (len(captures) - len(problem.capture_grads))
        self.sites = _capture_sites(problem.variant.score, needs_grad) if any(needs_grad) else ()
        self.captures = captures
        self.sums = [torch.zeros(c.shape, dtype=acc, device=c.device) if on else None for c, on in zip(captures, needs_grad, strict=True)]

    def gradients(self) -> tuple[Tensor | None, ...]:
        """The sums, in the dtypes of what was captured; None where none is asked for."""
        return tuple(None if total is None else total.to(c.dtype) for total, c in zip(self.sums, self.captures, strict=True))

    def add(self, scores: Scores, dscore: Tensor, values: Sequence[Tensor], raw: Tensor, at: tuple[Chunk, Tile, Run]) -> None:
        """Adds one tile.

        Args:
            scores: of the sequence.
            dscore: [b, h, q, kv], gradient of what the score function returned; 0 where masked.
            values: the sites' factors, over the tile.
            raw: [b, h, q, kv], the scores before the function.
            at: the tile.
        """
        products: dict[int, Tensor] = {}
        for site, value in zip(self.sites, values, strict=True):
            if site.factor.op == "const" and site.factor.value == 1.0:
                product = dscore
            else:
                if id(value) not in products:
                    # A factor may be infinite where the gradient is zero.
                    products[id(value)] = torch.where(dscore == 0, 0.0, dscore * value)
                product = products[id(value)]
            self._add_site(scores, site, product, raw, at)

    def _add_site(self, scores: Scores, site: Site, product: Tensor, raw: Tensor, at: tuple[Chunk, Tile, Run]) -> None:
        if not site.axes:
            dropped = [dim for dim in range(_FIRST_AXIS) if dim not in site.kept]
            total = product.sum(dropped, keepdim=True) if dropped else product
            self._scatter(scores, site, total, _TileSpans(at, scores.env(at, raw), {}))
            return
        plain = scores.env(at, raw)
        extents = [int(extent) for extent in evaluate(tuple(extent for _, extent in site.axes), plain)]
        step = max(1, _ELEMENTS // (_count_elements(site.rest, product) * math.prod(extents[1:])))
        for first in range(0, extents[0], step):
            spans = {_FIRST_AXIS + i: (0, extent) for i, extent in enumerate(extents)}
            spans[_FIRST_AXIS] = (first, min(extents[0], first + step))
            env = _with_axes(plain, site, spans)
            self._scatter(scores, site, _contract(site, product, env, spans), _TileSpans(at, env, spans))

    def _scatter(self, scores: Scores, site: Site, total: Tensor, place: _TileSpans) -> None:
        """Adds `total`, which has a dimension for each label, 1 for those that are not kept."""
        target = self.sums[site.slot]
        assert target is not None
        if site.labels is None:
            _scatter_any(target, site, total, place.env)
            return
        index: list[slice | int] = []
        for i, label in enumerate(site.labels):
            length = target.shape[i]
            if label is None:
                at = int(evaluate((site.indices[i],), place.env)[0].flatten()[0])
                index.append(max(0, min(length - 1, at + length if at < 0 else at)))
            else:
                start, stop = place.span(scores, label)
                index.append(slice(start, min(stop, length)))
                # Coordinates beyond the tensor are masked: their gradient is zero.
                total = total.narrow(label, 0, max(0, min(stop, length) - start)) if stop > length else total
        order = [label for label in site.labels if label is not None]
        summed_dims = [dim for dim in range(total.dim()) if dim not in order]
        target[tuple(index)] += total.permute(*order, *summed_dims).flatten(len(order)).squeeze(-1) if summed_dims else total.permute(order)


@dataclass(frozen=True, eq=False)
class _TileSpans:
    """A tile, what evaluates expressions there, and the spans of axes by label."""

    at: tuple[Chunk, Tile, Run]
    env: Env
    axes: dict[int, tuple[int, int]]

    def span(self, scores: Scores, label: int) -> tuple[int, int]:
        chunk, tile, run = self.at
        if label in self.axes:
            return self.axes[label]
        if label == 0 and scores.sequence.b is not None:
            return scores.sequence.b, scores.sequence.b + 1
        return (chunk.b, chunk.heads, (tile.start, tile.stop), (run.start, run.stop))[label]


def _count_elements(expr: Expr, tile: Tensor) -> int:
    """Elements of an expression over a tile, not counting axes."""
    names = expr.variables()
    return math.prod(tile.shape[_LABEL[name]] for name in COORDINATES if name in names or "score" in names)


def _with_axes(env: Env, site: Site, spans: dict[int, tuple[int, int]]) -> Env:
    """The environment with one more dimension for each axis."""
    count, device = len(site.axes), env.variables["score"].device
    variables = {name: t[(..., *[None] * count)] for name, t in env.variables.items()}
    axes = {}
    for i, (level, _) in enumerate(site.axes):
        start, stop = spans[_FIRST_AXIS + i]
        axes[level] = torch.arange(start, stop, device=device, dtype=torch.int32).view(-1, *[1] * (count - 1 - i))
    return Env(variables, env.captures, env.ints, env.floats, env.dtype, axes)


def _contract(site: Site, product: Tensor, env: Env, spans: dict[int, tuple[int, int]]) -> Tensor:
    """Sum of product * rest over all labels that are not kept, as a product of matrices where it is one."""
    rank = _FIRST_AXIS + len(site.axes)
    (rest,) = evaluate((site.rest,), env)
    rest = rest.to(product.device).expand(*[1] * (rank - rest.dim()), *rest.shape)
    axes = [stop - start for start, stop in (spans[label] for label in range(_FIRST_AXIS, rank))]
    rest = rest.expand(*rest.shape[:_FIRST_AXIS], *axes)
    if not bool(torch.isfinite(rest).all()):
        rest = torch.where(product[(..., *[None] * len(site.axes))] == 0, 0.0, rest)
    varying = [label for label in range(rank) if rest.shape[label] > 1 or label >= _FIRST_AXIS]
    squeezed = rest.squeeze(tuple(label for label in range(rank) if label not in varying))
    total = torch.einsum(product, list(range(_FIRST_AXIS)), squeezed, varying, list(site.kept))
    shape = [1] * rank
    for label, length in zip(site.kept, total.shape, strict=True):
        shape[label] = length
    return total.reshape(shape)


def _scatter_any(target: Tensor, site: Site, total: Tensor, env: Env) -> None:
    """Adds entries at computed indices, always in the same order."""
    linear: Tensor = torch.zeros((), dtype=torch.int64, device=target.device)
    for length, index in zip(target.shape, evaluate(site.indices, env), strict=True):
        wide = index.to(torch.int64)
        linear = linear * length + torch.where(wide < 0, wide + length, wide).clamp(0, length - 1)
    linear, entries = linear.expand(total.shape).reshape(-1), total.reshape(-1)
    if target.device.type == "cpu":
        target.view(-1).scatter_add_(0, linear, entries)  # index_put_ adds float32 atomically here
    else:
        target.view(-1).index_put_((linear,), entries, accumulate=True)  # sorts its indices first
