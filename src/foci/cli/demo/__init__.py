"""`foci demo`: a trained encoder and a model in training, with foci and with PyTorch's own attention."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from foci.cli.demo.curve import draw_curves, draw_line
from foci.cli.demo.decoder import Decoder, Pattern, Training, patterns, train
from foci.cli.demo.encoder import Answer, Comparison, Encoder, answers, compare, load_encoder
from foci.cli.demo.texts import passages
from foci.cli.mask_picture import draw_mask, draw_masks

__all__ = ["Row", "Scale", "run"]

# Entries of an embedding are at most 1, so float32 rounding through six layers stays far below this.
_SAME_EMBEDDING = 1e-4
# Nats per byte, between the means of the last steps' losses: rounding grows from step to step.
_SAME_LOSS = 0.1
_LAST = 20  # steps that a final loss is the mean of


@dataclass(frozen=True)
class Scale:
    """How much the demo does.

    Attributes:
        passages, batch, rounds: of the encoder: texts embedded, how many at a time, timed passes over them.
        decoder_batch, decoder_length: rows of bytes of a training step, and their length.
        steps, few_steps: training steps with the first pattern, and with each other pattern.
    """

    passages: int = 16
    batch: int = 8
    rounds: int = 2
    decoder_batch: int = 2
    decoder_length: int = 512
    steps: int = 200
    few_steps: int = 5


@dataclass(frozen=True)
class Row:
    """A line of the last table: one piece of work with sdpa and with foci.

    Attributes:
        work: in words.
        seconds, memory: with sdpa and with foci; memory in bytes, or None where it cannot be measured.
        difference: between the two, of an embedding's entries or of losses.
        backends: the backend of each of foci's calls, and how many calls.
    """

    work: str
    seconds: tuple[float, float]
    memory: tuple[int | None, int | None]
    difference: float
    backends: Mapping[str, int]


def run(console: Console, output: Path, *, device: torch.device | str = "cpu", scale: Scale | None = None) -> tuple[str, ...]:
    """Runs the demo, prints each step and in the end a table to `console`, and writes pictures to the folder `output`.

    Returns:
        What did not hold, in words: embeddings that differ, an answer not found, a loss that did not fall. Empty if all did.

    Raises:
        ModuleNotFoundError: when the extra `demo` is not installed.
    """
    start = time.perf_counter()
    scale = scale or Scale()
    device = torch.device(device)
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    console.print(Text.assemble(("foci demo", "bold"), f" on {device} ({where}), torch {torch.__version__}\n"))

    def say(words: str) -> None:
        console.print(f"{time.perf_counter() - start:4.0f} s  {words}", highlight=False)

    say("loads all-MiniLM-L6-v2, a trained sentence encoder, from the installed package")
    encoder = load_encoder(device)
    say(_describe_texts(encoder, scale))
    comparisons = compare(encoder, count=scale.passages, batch=scale.batch, rounds=scale.rounds)
    replies = answers(encoder, "foci")
    right = sum(reply.nearest == reply.expected for reply in replies)
    say(f"asks {len(replies)} questions about Python's standard library: foci's embeddings find {right} of the modules that answer them")
    say(f"  such as {replies[0].question!r}: {replies[0].nearest}")

    chosen = patterns(scale.decoder_batch, scale.decoder_length, Decoder.HEADS, device)
    trainings = []
    for number, pattern in enumerate(chosen):
        steps = scale.few_steps if number else scale.steps
        say(f"trains a GPT-2-style model over bytes for {steps} steps, {pattern.name}, with sdpa and foci in turns")
        for pair in train(pattern, batch=scale.decoder_batch, length=scale.decoder_length, steps=steps, device=device):
            taken = len(pair[0].losses)
            if taken % 50 == 0:
                losses = ", ".join(f"{training.losses[-1]:.3f} with {training.implementation}" for training in pair)
                say(f"  step {taken:3}: loss {losses}")
        trainings.append(pair)
    ours = trainings[0][1].losses
    say(f"loss with foci over {len(ours)} steps, {ours[0]:.2f} to {ours[-1]:.2f} ({math.log(256):.2f} is a guess among all bytes):")
    say(f"  {draw_line(ours, width=64)}")
    say(f"drew the training curves: {draw_curves(trainings[0], output / 'training.png')}")
    say(f"drew the masks of the three patterns: {_draw_masks(chosen, scale.decoder_length, output / 'masks.png')}\n")

    rows = [_encoder_row(comparisons), *(_training_row(pair) for pair in trainings)]
    console.print(_table(rows, time.perf_counter() - start))
    return tuple(_failures(comparisons, replies, trainings))


def _describe_texts(encoder: Encoder, scale: Scale) -> str:
    masks = [tokens["attention_mask"] for tokens in encoder.batches(passages(scale.passages), scale.batch)]
    lengths = torch.cat([mask.sum(1) for mask in masks])
    padding = 1 - lengths.sum().item() / sum(mask.numel() for mask in masks)
    spread = f"{len(lengths)} docstrings of {int(lengths.min())} to {int(lengths.max())} tokens, {padding:.0%} padding"
    return f"embeds {spread}, with eager, sdpa and foci"


def _draw_masks(chosen: Iterable[Pattern], length: int, path: Path) -> Path:
    draw_masks([draw_mask(pattern.mask, q_len=length, kv_len=length, block=32, name=pattern.name) for pattern in chosen], path)
    return path


def _encoder_row(comparisons: Iterable[Comparison]) -> Row:
    by_name = {row.implementation: row for row in comparisons}
    sdpa, ours = by_name["sdpa"], by_name["foci"]
    return Row("embed, padding mask", (sdpa.seconds, ours.seconds), (sdpa.memory, ours.memory), ours.difference, ours.backends)


def _training_row(pair: Sequence[Training]) -> Row:
    sdpa, ours = pair
    difference = abs(_final_loss(sdpa) - _final_loss(ours))
    work = f"training step, {ours.pattern.name}"
    return Row(work, (sdpa.seconds, ours.seconds), (sdpa.memory, ours.memory), difference, ours.backends)


def _final_loss(training: Training) -> float:
    return statistics.fmean(training.losses[-_LAST:])


def _table(rows: Iterable[Row], seconds: float) -> Table:
    caption = "ratio: foci to sdpa, below 1 is better; difference: of embeddings to eager's, of final losses to sdpa's"
    table = Table(title=f"foci beside sdpa, after {seconds:.0f} s", caption=caption)
    for heading in ("", "sdpa", "foci", "time\nratio", "sdpa\nMiB", "foci\nMiB", "memory\nratio", "differ-\nence", "backend,\ncalls"):
        table.add_column(heading, justify="left" if heading in ("", "backend,\ncalls") else "right", no_wrap=True)
    for row in rows:
        theirs, ours = row.seconds
        memory = ("-", "-", "-")
        if row.memory[0] is not None and row.memory[1] is not None:
            memory = (f"{row.memory[0] / 2**20:.0f}", f"{row.memory[1] / 2**20:.0f}", f"{row.memory[1] / max(1, row.memory[0]):.2f}")
        times = (f"{theirs * 1e3:.0f} ms", f"{ours * 1e3:.0f} ms", f"{ours / theirs:.2f}")
        backends = ", ".join(f"{name} {count}" for name, count in row.backends.items())
        table.add_row(row.work, *times, *memory, f"{row.difference:.0e}", backends)
    return table


def _failures(comparisons: Iterable[Comparison], replies: Iterable[Answer], trainings: Iterable[Sequence[Training]]) -> Iterator[str]:
    # Comparisons are written so that NaN fails too.
    for row in comparisons:
        if not row.difference <= _SAME_EMBEDDING:
            yield f"embeddings of {row.implementation} differ from eager's by {row.difference:.1e}, more than {_SAME_EMBEDDING:.0e}"
    for reply in replies:
        if reply.nearest != reply.expected:
            yield f"{reply.question!r} found {reply.nearest}, not {reply.expected}"
    for sdpa, ours in trainings:
        name = ours.pattern.name
        if not _final_loss(ours) < ours.losses[0]:
            yield f"training with {name} moved the loss from {ours.losses[0]:.4f} to {_final_loss(ours):.4f}"
        if not abs(_final_loss(ours) - _final_loss(sdpa)) <= _SAME_LOSS:
            yield f"training with {name} ends at {_final_loss(ours):.4f} with foci and {_final_loss(sdpa):.4f} with sdpa"
