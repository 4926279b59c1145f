"""Neighborhood attention over one, two or three spatial dimensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from foci.mask_examples import Definition, MaskExample, Sizes
from foci.variant import Mask, picklable

__all__ = ["natten"]


@picklable
def natten(extent: tuple[int, ...], kernel: int | tuple[int, ...], *, dilation: int | tuple[int, ...] = 1) -> Mask:
    """The `kernel` nearest positions of each dimension; at a border the neighborhood shifts inside.

    Hassani et al., Neighborhood Attention Transformer (2022); with dilation, Hassani and Shi, Dilated Neighborhood
    Attention Transformer (2022): positions of one residue modulo the dilation form a grid of their own.

    Queries and keys of a dense call must be as many as the grid has positions. For more tokens than those of the grid compose it with
    masks that say what the others do.

    Args:
        extent: 1 to 3 sizes, such as (height, width); tokens are numbered with the last dimension fastest.
        kernel: odd size of the neighborhood, one for all dimensions or one for each.
        dilation: step between neighbors, one for all dimensions or one for each.

    Raises:
        TypeError: for sizes that are no integers.
        ValueError: for another number of dimensions, an even kernel, or a dilated kernel wider than its dimension.

    Example:
        >>> natten((32, 32), 7).name
        'natten((32, 32), 7)'
    """
    _check_sizes("extent", extent)
    rank = len(extent)
    if rank not in (1, 2, 3):
        raise ValueError(f"extent must have 1 to 3 sizes, got {extent}")
    kernels, dilations = _per_dimension("kernel", kernel, rank), _per_dimension("dilation", dilation, rank)
    for n, size, step in zip(extent, kernels, dilations, strict=True):
        if size % 2 == 0 or size < 1:
            raise ValueError(
                f"kernel must be odd, such as {max(1, size - 1)} or {max(3, size + 1)}, so that a neighborhood has a center; got {size}"
            )
        if step < 1 or size * step > n:
            raise ValueError(f"kernel * dilation must be at most the size of its dimension; got {size} * {step} over {n}")
    strides = tuple(math.prod(extent[i + 1 :]) for i in range(rank))

    def attend(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        inside = torch.ones_like(q_idx, dtype=torch.bool)
        for n, stride, size, step in zip(extent, strides, kernels, dilations, strict=True):
            inside = inside & _near(q_idx // stride % n, kv_idx // stride % n, n, size, step)
        return inside

    name = f"natten({extent}, {kernel}{f', dilation={dilation}' if dilation != 1 else ''})"
    return Mask(attend, name=name, length=math.prod(extent))


def _near(q: Any, kv: Any, n: int, size: int, step: int) -> Any:
    if step == 1:
        start = torch.clamp(q - size // 2, 0, n - size)
        return (kv >= start) & (kv < start + size)
    residue = q % step
    count = (n - 1 - residue) // step + 1
    start = torch.minimum(torch.clamp(q // step - size // 2, min=0), count - size)
    neighbor = kv // step
    return (kv % step == residue) & (neighbor >= start) & (neighbor < start + size)


def _per_dimension(name: str, size: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    if isinstance(size, int):
        _check_sizes(name, (size,))
        return (size,) * rank
    _check_sizes(name, size)
    if len(size) != rank:
        raise ValueError(f"{name} must be one integer or {rank} of them, one for each size of extent; got {size}")
    return size


def _check_sizes(name: str, sizes: Any) -> None:
    if not isinstance(sizes, Sequence) or any(isinstance(n, bool) or not isinstance(n, int) for n in sizes):
        raise TypeError(f"{name} must be integers, one for each dimension; got {sizes!r}")


def _formula(extent: tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    # By enumeration: the neighbors of a point are those of each coordinate, from its residue's own list.
    places = list(itertools.product(*(range(n) for n in extent)))
    attend = torch.zeros(len(places), len(places), dtype=torch.bool)
    number = {place: i for i, place in enumerate(places)}
    for place in places:
        neighbors = []
        for at, n, size, step in zip(place, extent, kernel, dilation, strict=True):
            line = range(at % step, n, step)
            first = min(max(line.index(at) - size // 2, 0), len(line) - size)
            neighbors.append(line[first : first + size])
        for other in itertools.product(*neighbors):
            attend[number[place], number[other]] = True
    return attend


def _square(sizes: Sizes) -> bool:
    return sizes.Sq == sizes.Skv and sizes.Sq % 40 == 0 and sizes.Sq > 0


DEFINITIONS: Final = {
    "natten": Definition(
        "(kv % dilation == r) & (start <= kv // dilation) & (kv // dilation < start + kernel)",
        (
            ("r", "q % dilation"),
            ("size", "(extent - r + dilation - 1) // dilation"),
            ("start", "clamp(q // dilation - kernel // 2, 0, size - kernel)"),
        ),
        "For each dimension of the grid, whose coordinates are `q` and `kv`; a query attends where all dimensions agree.",
        "Neighborhood Attention Transformer (Hassani et al., 2022), and with dilation "
        "Dilated Neighborhood Attention Transformer (Hassani and Shi, 2022)",
        "2204.07143",
    ),
}

EXAMPLES: Final = (
    MaskExample(
        "natten_1d", "the five nearest tokens", lambda s: natten((s.Sq,), 5), lambda s: _formula((s.Sq,), (5,), (1,)), fits=_square
    ),
    MaskExample(
        "natten_1d_dilated",
        "the three nearest of every fourth token",
        lambda s: natten((s.Sq,), 3, dilation=4),
        lambda s: _formula((s.Sq,), (3,), (4,)),
        fits=_square,
    ),
    MaskExample(
        "natten_2d",
        "a neighborhood of 3 x 5 in an image",
        lambda s: natten((s.Sq // 8, 8), (3, 5)),
        lambda s: _formula((s.Sq // 8, 8), (3, 5), (1, 1)),
        fits=_square,
    ),
    MaskExample(
        "natten_2d_dilated",
        "a dilated neighborhood in an image",
        lambda s: natten((s.Sq // 8, 8), 3, dilation=(1, 2)),
        lambda s: _formula((s.Sq // 8, 8), (3, 3), (1, 2)),
        fits=_square,
    ),
    MaskExample(
        "natten_3d",
        "a neighborhood in a video",
        lambda s: natten((2, s.Sq // 8, 4), (1, 3, 3)),
        lambda s: _formula((2, s.Sq // 8, 4), (1, 3, 3), (1, 1, 1)),
        fits=_square,
    ),
)
