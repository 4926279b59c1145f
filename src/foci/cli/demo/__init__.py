"""`foci demo`: a trained transformer on three attention implementations, and one training step with three attention patterns."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from foci.cli.demo.decoder import Decoder, Pattern, Step, patterns, sample_text, train_one_step
from foci.cli.demo.encoder import IMPLEMENTATIONS, Answer, Comparison, Encoder, answers, compare, load_encoder
from foci.cli.demo.texts import passages
from foci.cli.mask_picture import draw_mask, draw_masks

__all__ = ["Scale", "run"]

# Entries of an embedding are at most 1, so float32 rounding through six layers stays far below this.
_SAME = 1e-4


@dataclass(frozen=True)
class Scale:
    """How much the demo does: passages embedded, their batch size, timed rounds; batch and length of the training text."""

    passages: int = 32
    batch: int = 16
    rounds: int = 2
    decoder_batch: int = 4
    decoder_length: int = 512


def run(console: Console, output: Path, *, device: torch.device | str = "cpu", scale: Scale | None = None) -> tuple[str, ...]:
    """Runs the demo, prints its tables to `console` and writes pictures of the masks to the folder `output`.

    Returns:
        What did not hold, in words: embeddings that differ, an answer not found, a loss that did not fall. Empty if all did.

    Raises:
        ModuleNotFoundError: when the extra `demo` is not installed.
    """
    start = time.perf_counter()
    scale = scale or Scale()
    device = torch.device(device)
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    console.print(f"[bold]foci demo[/] on {device} ({where}), torch {torch.__version__}\n")

    with _progress(console) as progress:
        loading = progress.add_task("loading all-MiniLM-L6-v2", total=1)
        encoder = load_encoder(device)
        progress.update(loading, completed=1)
        passes = progress.add_task("embedding with " + ", ".join(IMPLEMENTATIONS), total=len(IMPLEMENTATIONS) * (scale.rounds + 1))
        comparisons = compare(encoder, count=scale.passages, batch=scale.batch, rounds=scale.rounds, step=lambda: progress.advance(passes))
        asking = progress.add_task("asking questions", total=1)
        replies = answers(encoder, "foci")
        progress.update(asking, completed=1)

        chosen = patterns(scale.decoder_batch, scale.decoder_length, Decoder.HEADS, device)
        training = progress.add_task("training a step of a GPT-2-style model", total=len(chosen))
        steps = []
        for pattern in chosen:
            steps.append(_trained(pattern, scale, device))
            progress.advance(training)
        drawing = progress.add_task("drawing the masks", total=1)
        picture = _draw(chosen, scale.decoder_length, output)
        progress.update(drawing, completed=1)

    console.print(_encoder_table(encoder, comparisons, scale))
    console.print(_answers_table(replies))
    console.print(_training_table(steps, scale))
    console.print(f"masks of the three patterns: {picture}")
    console.print(f"{time.perf_counter() - start:.0f} s in all")
    return tuple(_failures(comparisons, replies, steps))


def _progress(console: Console) -> Progress:
    return Progress(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True)


def _trained(pattern: Pattern, scale: Scale, device: torch.device) -> Step:
    torch.manual_seed(0)
    model = Decoder(length=scale.decoder_length).to(device)
    return train_one_step(model, sample_text(scale.decoder_batch, scale.decoder_length, device), pattern)


def _draw(chosen: Iterable[Pattern], length: int, output: Path) -> Path:
    path = output / "masks.png"
    draw_masks([draw_mask(pattern.mask, q_len=length, kv_len=length, block=32, name=pattern.name) for pattern in chosen], path)
    return path


def _encoder_table(encoder: Encoder, comparisons: Iterable[Comparison], scale: Scale) -> Table:
    masks = [tokens["attention_mask"] for tokens in encoder.batches(passages(scale.passages), scale.batch)]
    lengths = torch.cat([mask.sum(1) for mask in masks])
    padding = 1 - lengths.sum().item() / sum(mask.numel() for mask in masks)
    spread = f"{len(lengths)} texts of {int(lengths.min())} to {int(lengths.max())} tokens in {len(masks)} padded batches"
    table = Table(title="all-MiniLM-L6-v2 on docstrings of the standard library", caption=f"{spread}, {padding:.0%} padding")
    for heading in ("attention", "time", "peak memory", "max difference to eager", "backend, calls"):
        table.add_column(heading, justify="left" if heading in ("attention", "backend, calls") else "right")
    for row in comparisons:
        memory = "not measured" if row.memory is None else f"{row.memory / 2**20:.0f} MiB"
        table.add_row(row.implementation, f"{row.seconds:.2f} s", memory, f"{row.difference:.1e}", _backends(row.backends))
    return table


def _answers_table(replies: Iterable[Answer]) -> Table:
    table = Table(title="the module of the standard library nearest in meaning, by embeddings from foci")
    for heading in ("question", "found", "similarity", "of the others, mean"):
        table.add_column(heading, justify="left" if heading in ("question", "found") else "right")
    for reply in replies:
        table.add_row(reply.question, reply.found, f"{reply.similarity:.2f}", f"{reply.unrelated:.2f}")
    return table


def _training_table(steps: Iterable[Step], scale: Scale) -> Table:
    table = Table(
        title="one training step of a GPT-2-style model over bytes",
        caption=f"batch {scale.decoder_batch} of {scale.decoder_length} bytes; a loss of {math.log(256):.2f} is a guess among all bytes",
    )
    for heading in ("attention", "loss before", "after", "time", "backend, calls"):
        table.add_column(heading, justify="left" if heading in ("attention", "backend, calls") else "right")
    for step in steps:
        table.add_row(step.name, f"{step.before:.4f}", f"{step.after:.4f}", f"{step.seconds:.2f} s", _backends(step.backends))
    return table


def _backends(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "not foci"


def _failures(comparisons: Iterable[Comparison], replies: Iterable[Answer], steps: Iterable[Step]) -> Iterable[str]:
    for row in comparisons:
        # Written so that NaN fails too.
        if not row.difference <= _SAME:
            yield f"embeddings of {row.implementation} differ from eager's by {row.difference:.1e}, more than {_SAME:.0e}"
    for reply in replies:
        if reply.found != reply.expected:
            yield f"{reply.question!r} found {reply.found}, not {reply.expected}"
    for step in steps:
        if not step.after < step.before:
            yield f"a training step with {step.name} moved the loss from {step.before:.4f} to {step.after:.4f}"
