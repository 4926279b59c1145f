"""Writes docs/gallery.md, docs/gallery.png, docs/pictures/ and the tables of docs/masks-and-scores.md: `make gallery`.

All is made from the DEFINITIONS and EXAMPLES of foci.masks and foci.scores.
A formula here is a Python expression of the parameters of its mask or score. tests/test_gallery.py evaluates each one and compares it with
what the mask or score computes, and compares the page with what this script writes.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

import foci
from foci.cli.catalogue import list_entries
from foci.cli.mask_picture import CELLS, MaskPicture, color_cells, draw_mask
from foci.mask_examples import Definition, MaskExample, ScoreExample, Sizes

DOCS = Path(__file__).parent
BLOCK = 8
SQUARE = Sizes()
LOWER_RIGHT = Sizes(Sq=24)
HEADS = 4
"""Sizes of the pictures: 40 queries over 40 keys, or 24 over 40 where the alignment matters; 4 heads."""

TWO_SIDED = LinearSegmentedColormap.from_list("score", ["#b4532a", "#f7f8fa", "#1d5a8c"])
INK = "#26323f"


MASKS, SCORES = foci.masks.DEFINITIONS, foci.scores.DEFINITIONS

SHEET_MASKS = (
    "causal",
    "causal_lower_right",
    "window_left",
    "dilated_window",
    "global_window",
    "prefix_lm",
    "document",
    "causal & document",
    "key_padding",
    "causal_or_bidirectional",
    "natten_2d",
    "block_diffusion",
)
SHEET_SCORES = ("alibi", "relative_position", "t5", "bias", "softcap", "temperature_learned")


def sizes_of(example: MaskExample | ScoreExample) -> Sizes:
    """The sizes at which an example is drawn."""
    if isinstance(example, ScoreExample):
        return Sizes(Hq=12) if not example.fits(SQUARE) else SQUARE
    return LOWER_RIGHT if "lower_right" in example.name else SQUARE


def function_of(example: MaskExample | ScoreExample) -> str:
    """The name of the public function that an example shows, "" for a composed score or a function of the user's."""
    names = MASKS if isinstance(example, MaskExample) else SCORES
    spelled = {"t5": "t5_bias", "t5_causal": "t5_bias"}.get(example.name, example.name)
    return max((name for name in names if spelled == name or spelled.startswith(f"{name}_")), key=len, default="")


def picture_of(example: MaskExample) -> MaskPicture:
    """The mask of batch entry 0 and head 0."""
    sizes = sizes_of(example)
    mask = example.build(sizes)
    return draw_mask(mask, q_len=sizes.Sq, kv_len=sizes.Skv, block=BLOCK, name=mask.name)


def scores_of(example: ScoreExample, scores: Tensor) -> Tensor:
    """[Hq, Sq, Skv]: what the score makes of `scores` in batch entry 0."""
    sizes = sizes_of(example)
    b, h, q, kv = sizes.positions()
    with torch.no_grad():
        return example.build(sizes)(scores, b[:1], h, q, kv).expand(1, sizes.Hq, sizes.Sq, sizes.Skv)[0]


def paint_mask(axes: Axes, picture: MaskPicture) -> None:
    """One mask with its blocks; a line between blocks."""
    rows, columns = picture.attend.shape
    axes.imshow(color_cells(picture).numpy(), interpolation="nearest", extent=(0, columns, rows, 0))
    axes.set_xticks(range(0, columns + 1, picture.block), minor=True)
    axes.set_yticks(range(0, rows + 1, picture.block), minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    _bare(axes)


def paint_score(axes: Axes, example: ScoreExample) -> None:
    """Head 0's addition to a score of 0 as a heat map; for a score that ignores positions a curve for each head."""
    zeros = torch.zeros(())
    added = scores_of(example, zeros)
    if (added[0] == added[0, 0, 0]).all():
        x = torch.linspace(-4, 4, 81)
        curves = torch.stack([scores_of(example, value)[:HEADS, 0, 0] for value in x])
        axes.axhline(0, color="#c9d0d8", linewidth=0.8)
        axes.axvline(0, color="#c9d0d8", linewidth=0.8)
        axes.plot(x, x, color="#9aa5b1", linewidth=1, linestyle=":")
        for head in range(HEADS):
            if head == 0 or not torch.equal(curves[:, head], curves[:, 0]):
                axes.plot(x, curves[:, head], color="#1d5a8c", linewidth=2, alpha=1 - 0.2 * head)
        axes.set_xlim(-4, 4)
        axes.set_ylim(-4, 4)
        axes.set_aspect("equal")
    else:
        reach = float(added[0].abs().max())
        axes.imshow(added[0].numpy(), cmap=TWO_SIDED, vmin=-reach, vmax=reach, interpolation="nearest")
    _bare(axes)


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.tick_params(which="both", length=0)
    for spine in axes.spines.values():
        spine.set_color("#c9d0d8")


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _label(example: MaskExample | ScoreExample) -> str:
    name = example.build(sizes_of(example)).name or example.name
    return name if "(" in name else example.name


def write_row(examples: list[MaskExample] | list[ScoreExample], path: Path) -> None:
    """A PNG with the examples side by side."""
    figure = _figure(2.6 * len(examples), 2.9)
    for axes, example in zip(figure.subplots(1, len(examples), squeeze=False)[0], examples, strict=True):
        if isinstance(example, MaskExample):
            paint_mask(axes, picture_of(example))
        else:
            paint_score(axes, example)
        axes.set_title(_label(example), fontsize=9, color=INK, family="monospace")
    figure.savefig(path, metadata={"Software": None})


def write_sheet(path: Path) -> None:
    """The sheet of the README: twelve masks, six scores, 1200 pixels wide."""
    masks = {example.name: example for example in foci.masks.EXAMPLES}
    scores = {example.name: example for example in foci.scores.EXAMPLES}
    figure = _figure(10, 5.9)
    grid = figure.subplots(3, 6)
    figure.get_layout_engine().set(w_pad=0.05, h_pad=0.05)
    for axes, name in zip(grid[:2].flat, SHEET_MASKS, strict=True):
        if name == "causal & document":
            both = masks["causal"].build(SQUARE) & masks["document"].build(SQUARE)
            picture = draw_mask(both, q_len=SQUARE.Sq, kv_len=SQUARE.Skv, block=BLOCK)
        else:
            picture = picture_of(masks[name])
            name = function_of(masks[name])
        paint_mask(axes, picture)
        axes.set_title(name, fontsize=10 if len(name) < 20 else 8.5, color=INK, family="monospace")
    for axes, name in zip(grid[2], SHEET_SCORES, strict=True):
        paint_score(axes, scores[name])
        axes.set_title(function_of(scores[name]), fontsize=10, color=INK, family="monospace")
    legend = [Patch(facecolor=color, edgecolor="#9aa5b1", label=label) for label, color in CELLS.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False, fontsize=9, labelcolor=INK)
    figure.savefig(path, metadata={"Software": None})


def page() -> str:
    """The text of docs/gallery.md."""
    masks: dict[str, list[MaskExample]] = {name: [] for name in MASKS}
    scores: dict[str, list[ScoreExample]] = {name: [] for name in SCORES}
    other: list[ScoreExample] = []
    for example in foci.masks.EXAMPLES:
        masks[function_of(example)].append(example)
    for example in foci.scores.EXAMPLES:
        name = function_of(example)
        (scores[name] if name else other).append(example)
    lines = [
        "# Gallery",
        "",
        "Each mask of `foci.masks` and each score of `foci.scores`. [Masks and scores](masks-and-scores.md) says how to combine them",
        "and how to write your own. `foci mask`, with the extra `plots`, draws any combination of named masks:",
        "",
        "```sh",
        'foci mask "causal & window(96)" --q 512 --block 64 --out mask.png',
        "```",
        "",
        "## Masks",
        "",
        f"A row is a query, a column a key, the first of both in the upper left corner. Blocks are {BLOCK} x {BLOCK} pairs.",
        "foci skips empty blocks and evaluates the mask in partial blocks only.",
        "",
        "| color | pair of a query and a key |",
        "|---|---|",
        "| blue | attends, in a full block |",
        "| orange | attends, in a partial block |",
        "| light orange | masked out, in a partial block |",
        "| grey | masked out, in an empty block |",
        "",
    ]
    for name, examples in masks.items():
        lines += _section(name, MASKS[name], foci.masks, "mask", [_mask_line(example) for example in examples])
    lines += [
        "## Scores",
        "",
        "A heat map shows what head 0 adds to a score of 0, blue above 0 and red below; rows are queries, columns keys. A score that does",
        "not depend on positions is a curve: the new score over the old one, from -4 to 4, for up to four heads.",
        "",
    ]
    for name, examples in scores.items():
        lines += _section(name, SCORES[name], foci.scores, "score", [_score_line(example) for example in examples])
    lines += ["### Composed, and a function of your own", "", "![composed and own](pictures/score-composed.png)", ""]
    lines += ["| example | shows |", "|---|---|", *(_score_line(example) for example in other)]
    return "\n".join(lines) + "\n"


def guide(text: str) -> str:
    """The text of docs/masks-and-scores.md, its two tables written anew."""
    for module in (foci.masks, foci.scores):
        kind = module.__name__.removeprefix("foci.").removesuffix("s")
        rows = "".join(f"| `{entry.call}` | {entry.line} |\n" for entry in list_entries(module))
        table = f"| {kind} | |\n|---|---|\n{rows}"
        text = re.sub(rf"^\| {kind} \|.*\n(?:\|.*\n)+", lambda _, table=table: table, text, count=1, flags=re.MULTILINE)
    return text


def _section(name: str, entry: Definition, module: object, kind: str, rows: list[str]) -> list[str]:
    function = getattr(module, name)
    # "window(left, right, *, align)": the annotations are in the API reference.
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    lines = [f"### {name}", "", f"`foci.{kind}s.{name}{inspect.Signature(parameters)}`", "", _first_sentence(function), ""]
    lines += ["```text", *(f"{left} = {right}" for left, right in entry.where), entry.formula.replace(" | ", "\n| "), "```", ""]
    if entry.note:
        lines += [entry.note, ""]
    if entry.paper:
        lines += [f"Paper: {entry.paper}, [arXiv:{entry.arxiv}](https://arxiv.org/abs/{entry.arxiv}).", ""]
    header = (
        ["| example | shows | pairs that attend | empty blocks |", "|---|---|---|---|"]
        if kind == "mask"
        else ["| example | shows |", "|---|---|"]
    )
    return [*lines, f"![{name}](pictures/{kind}-{name}.png)", "", *header, *rows, ""]


def _first_sentence(function: object) -> str:
    # The paper has a line of its own.
    text = inspect.getdoc(function) or ""
    return re.sub(r" \([A-Z][^()]*\d{4}[^()]*\)", "", text.split("\n\n")[0].replace("\n", " "))


def _mask_line(example: MaskExample) -> str:
    picture = picture_of(example)
    return f"| `{_label(example)}` | {example.doc} | {picture.density:.0%} | {picture.sparsity:.0%} |"


def _score_line(example: ScoreExample) -> str:
    return f"| `{_label(example)}` | {example.doc} |"


def main() -> None:
    (DOCS / "gallery.md").write_text(page(), encoding="utf-8")
    masks_and_scores = DOCS / "masks-and-scores.md"
    masks_and_scores.write_text(guide(masks_and_scores.read_text(encoding="utf-8")), encoding="utf-8")
    pictures = DOCS / "pictures"
    pictures.mkdir(exist_ok=True)
    for name in MASKS:
        write_row([example for example in foci.masks.EXAMPLES if function_of(example) == name], pictures / f"mask-{name}.png")
    for name in (*SCORES, ""):
        write_row(
            [example for example in foci.scores.EXAMPLES if function_of(example) == name], pictures / f"score-{name or 'composed'}.png"
        )
    write_sheet(DOCS / "gallery.png")


if __name__ == "__main__":
    main()
