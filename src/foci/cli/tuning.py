"""What `foci tune` does: a table of measurements, written where compilations look for it."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from foci.cli.expr_parser import Unknown
from foci.cli.progress import progress
from foci.padding.gemm_times import KINDS, Kind, extend
from foci.padding.tuning import SHAPES, SMALL_SHAPES, count_rows, device_name, tune

__all__ = ["run_tune"]


def run_tune(device: str, kinds: str | None, repeats: int, out: Path | None, console: Console) -> None:
    """Measures and writes.

    Args:
        device: to measure on.
        kinds: of arithmetic, with commas; those that a device of this type is used for, if None.
        repeats: of each measurement.
        out: the file; if None, the one that compilations read.
        console: for progress and the result.

    Raises:
        Unknown: for a kind that there is not.
    """
    usual: tuple[Kind, ...] = ("float16", "bfloat16", "tf32") if device.startswith("cuda") else ("float32", "bfloat16")
    chosen = usual if kinds is None else tuple(_kind(name.strip()) for name in kinds.split(","))
    shapes = SHAPES if device.startswith("cuda") else SMALL_SHAPES
    count = count_rows(chosen, shapes)
    console.print(f"measuring {count} products of {', '.join(chosen)} on {device_name(torch.device(device))}")
    with progress(console, "products", count) as advance:
        table = tune(torch.device(device), chosen, shapes=shapes, repeats=repeats, step=advance)
    path = extend(table, out)
    worst = max(table.rows, key=lambda row: row.slowdown(padded=False))
    console.print(
        f"{len(table.rows)} measurements of {table.device}: {path}\n"
        f"worst: {worst.kind} {worst.shape}, matrix {worst.role} of rows of {worst.alignment} bytes, "
        f"{worst.slowdown(padded=False):.2f} times slower",
        soft_wrap=True,
    )


def _kind(name: str) -> Kind:
    for kind in KINDS:
        if kind == name:
            return kind
    raise Unknown(f"no kind of arithmetic {name!r}; there are {', '.join(KINDS)}", "--kinds")
