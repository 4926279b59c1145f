"""Pictures of masks. Needs the extra `plots`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foci.blocks import EMPTY, Extent, classify
from foci.mask_mods import create_mask
from foci.trace_functions import bind

__all__ = ["CELLS", "MaskPicture", "color_cells", "draw_mask", "draw_masks"]

_ATTEND = "#1d3f5c"
_CLASSES = {"empty": "#eef1f5", "partial": "#f2a65a", "full": "#2f6f9f"}  # in the order of their values
CELLS = {
    "block is empty": "#eef1f5",
    "pair is masked out": "#fbe3c8",
    "attends, partial block": "#f2a65a",
    "attends, full block": "#2f6f9f",
}
"""Colors of `color_cells`, by what they say of a pair of a query and a key."""
_MOST_PIXELS = 2048
_MOST_LINES = 64


@dataclass(frozen=True, eq=False)
class MaskPicture:
    """One row of a picture.

    Attributes:
        name: the title.
        attend: bool [Sq, Skv], where a query attends to a key.
        blocks: int8 [ceil(Sq / block), ceil(Skv / block)]: 0 empty, 1 partial, 2 full.
        block: the block size.
    """

    name: str
    attend: Tensor
    blocks: Tensor
    block: int

    @property
    def sparsity(self) -> float:
        """Share of the blocks that are empty, so never computed; 0 where there is no block."""
        return (self.blocks == EMPTY).float().mean().item() if self.blocks.numel() else 0.0

    @property
    def density(self) -> float:
        """Share of the pairs of a query and a key that attend."""
        return self.attend.float().mean().item() if self.attend.numel() else 0.0


def draw_mask(
    mask: Callable[..., Any], *, q_len: int, kv_len: int, block: int, at: tuple[int, int] = (0, 0), name: str | None = None
) -> MaskPicture:
    """Return what to draw of a mask function (b, h, q_idx, kv_idx), for one batch entry and head.

    Args:
        mask: the function, or a `foci.Mask`.
        q_len, kv_len: lengths.
        block: queries and keys per block. Positions past a length do not count: a block that overhangs may be full.
        at: batch entry and head.
        name: the title; the mask's own name if it has one.

    Raises:
        TypeError: for no mask function, or a function that leaves the language.
        ValueError: for a block size or a length under 1.

    Example:
        >>> import foci
        >>> picture = draw_mask(foci.masks.causal(), q_len=256, kv_len=256, block=64)
        >>> picture.blocks.tolist()
        [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]
        >>> picture.sparsity
        0.375
    """
    if min(q_len, kv_len) < 1:
        raise ValueError(f"q_len and kv_len must be at least 1 to be drawn, got {q_len} and {kv_len}")
    entry, head = at
    attend = create_mask(mask, entry + 1, head + 1, q_len, kv_len, device="cpu")[entry, head]
    bound = bind(None, mask, torch.device("cpu"))
    classes = classify(
        bound.variant.mask,
        sizes=Extent(entry + 1, head + 1, q_len, kv_len),
        block=(block, block),
        captures=bound.captures,
        ints=bound.ints,
        floats=bound.floats,
        exact=True,
    )
    blocks = classes.expand(entry + 1, head + 1, -1, -1)[entry, head]
    return MaskPicture(name or getattr(mask, "name", None) or "mask", attend, blocks, block)


def draw_masks(pictures: list[MaskPicture], path: Path) -> None:
    """Writes a PNG with one row per picture: left the mask, right its blocks with the sparsity in the title.

    Raises:
        ModuleNotFoundError: when the extra `plots` is not installed.
        ValueError: for no picture at all.
    """
    if not pictures:
        raise ValueError("pictures is empty; give at least one MaskPicture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # A figure of its own, without pyplot: no display and no global state.
    figure = Figure(figsize=(10, 5.2 * len(pictures)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(pictures), 2, squeeze=False)
    shades = LinearSegmentedColormap.from_list("attend", [_CLASSES["empty"], _ATTEND])
    classes = ListedColormap(list(_CLASSES.values()))
    for (left, right), picture in zip(axes, pictures, strict=True):
        rows, columns = picture.attend.shape
        left.imshow(_shrunk(picture.attend).numpy(), cmap=shades, vmin=0, vmax=1, extent=(0, columns, rows, 0), interpolation="nearest")
        left.set_title(f"{picture.name}\n{rows} × {columns}, {picture.density:.1%} of the pairs attend")
        height, width = picture.blocks.shape
        span = (0, width * picture.block, height * picture.block, 0)
        right.imshow(picture.blocks.cpu().numpy(), cmap=classes, vmin=0, vmax=2, extent=span, interpolation="nearest")
        right.set_title(f"blocks of {picture.block}: {picture.sparsity:.1%} sparse\n{_counts(picture.blocks)}")
        right.set_xlim(0, columns)
        right.set_ylim(rows, 0)
        if max(height, width) <= _MOST_LINES:
            right.set_xticks(range(0, columns + 1, picture.block), minor=True)
            right.set_yticks(range(0, rows + 1, picture.block), minor=True)
            right.grid(which="minor", color="white", linewidth=1)
            right.tick_params(which="minor", length=0)
        for side in (left, right):
            side.set_xlabel("key position")
            side.set_ylabel("query position")
    legend = [Patch(facecolor=color, edgecolor="#888888", label=name) for name, color in _CLASSES.items()]
    figure.legend(handles=legend, loc="outside lower right", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", pad_inches=0.2)


def color_cells(picture: MaskPicture) -> Tensor:
    """The mask and its blocks in one picture: the color in `CELLS` of each pair of a query and a key.

    Returns:
        uint8 [Sq, Skv, 3].

    Example:
        >>> import foci
        >>> color_cells(draw_mask(foci.masks.causal(), q_len=64, kv_len=96, block=32)).shape
        torch.Size([64, 96, 3])
    """
    rows, columns = picture.attend.shape
    blocks = picture.blocks.cpu().repeat_interleave(picture.block, 0)[:rows].repeat_interleave(picture.block, 1)[:, :columns]
    kinds = torch.where(picture.attend.cpu(), blocks + 1, blocks).long()  # in the order of CELLS; each pair of a full block attends
    palette = torch.tensor([[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in CELLS.values()], dtype=torch.uint8)
    return palette[kinds]


def _shrunk(attend: Tensor) -> Tensor:
    """float32, at most `_MOST_PIXELS` each way: the share of the pairs under a pixel that attend."""
    step = max(1, math.ceil(max(attend.shape) / _MOST_PIXELS))
    shares = torch.nn.functional.avg_pool2d(attend.float()[None], step, ceil_mode=True) if step > 1 else attend.float()[None]
    return shares[0].cpu()


def _counts(blocks: Tensor) -> str:
    return ", ".join(f"{int((blocks == value).sum())} {name}" for value, name in enumerate(_CLASSES))
