"""Trains the model with foci.nn, trains torch.nn's on the same batches for a while, compares, plots and generates."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from data import BEGIN, VOCABULARY, batches, documents
from model import LanguageModel, Sizes, generate
from torch import Tensor
from torch.nn.functional import cross_entropy

import foci.nn

__all__ = ["BEGIN", "SMALL", "Run", "batches", "documents", "generate", "packed_loss", "padded_loss", "train"]

Loss = Callable[[LanguageModel, list[Tensor]], Tensor]
Documents = tuple[list[Tensor], list[Tensor]]
SMALL = Sizes(width=32, heads=4, layers=2, max_length=256, tokens=1024)


def packed_loss(model: LanguageModel, batch: list[Tensor]) -> Tensor:
    """Mean loss of a batch of documents that lie behind each other, without padding."""
    lengths = [len(document) - 1 for document in batch]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    places = torch.cat([torch.arange(n) for n in lengths])

    def nested(values: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, min_seqlen=min(lengths), max_seqlen=max(lengths))

    logits = model(nested(torch.cat([document[:-1] for document in batch])), nested(places))
    return cross_entropy(logits.values(), torch.cat([document[1:] for document in batch]))


def padded_loss(model: LanguageModel, batch: list[Tensor]) -> Tensor:
    """The same loss of the same documents, padded to the longest."""
    ids = torch.nn.utils.rnn.pad_sequence([document[:-1] for document in batch], batch_first=True)
    targets = torch.nn.utils.rnn.pad_sequence([document[1:] for document in batch], batch_first=True, padding_value=-100)
    padding = torch.zeros(ids.shape).masked_fill(targets == -100, -torch.inf)
    logits = model(ids, torch.arange(ids.shape[1]), padding)
    return cross_entropy(logits.view(-1, VOCABULARY), targets.flatten())


@dataclass
class Run:
    """Losses of one training.

    Attributes:
        training: of each step.
        validation: (step, loss) now and then.
        seconds: of the steps alone.
    """

    training: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0


def train(model: LanguageModel, loss_of: Loss, docs: Documents, *, tokens: int, steps: int, stop: int | None = None) -> Run:
    """Trains with AdamW: a short warm-up, then a linear fall of the learning rate over `steps`, of which `stop` are made."""
    run, every = Run(), max(1, steps // 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 20, 1 - n / (steps + steps // 10 + 1)))
    held_out = list(itertools.islice(batches(docs[1], tokens, seed=1), 4))
    for step, batch in enumerate(itertools.islice(batches(docs[0], tokens, seed=0), steps if stop is None else stop)):
        if step % every == 0:
            run.validation.append((step, validation(model, loss_of, held_out)))
            print(f"  step {step}: validation loss {run.validation[-1][1]:.3f}", flush=True)
        start = time.perf_counter()
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        run.training.append(loss.item())
        run.seconds += time.perf_counter() - start
    run.validation.append((len(run.training), validation(model, loss_of, held_out)))
    return run


@torch.no_grad()
def validation(model: LanguageModel, loss_of: Loss, held_out: list[list[Tensor]]) -> float:
    return sum(loss_of(model, batch).item() for batch in held_out) / len(held_out)


def plot(path: Path, ours: Run, theirs: Run) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(ours.training, color="#9ecae1", linewidth=1, label="training, foci.nn, packed documents")
    axes.plot(*zip(*ours.validation), color="#08519c", linewidth=2, marker="o", markersize=3, label="validation, foci.nn")
    axes.plot(theirs.training, color="#d94801", linewidth=1, linestyle=":", label="training, torch.nn, padded, first steps")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="Python's standard library, byte by byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny model, seconds")
    parser.add_argument("--steps", type=int, help="training steps, 600 by default")
    parser.add_argument("--plot", type=Path, help="where to save a plot of the losses")
    options = parser.parse_args()
    sizes = SMALL if options.small else Sizes()
    steps = options.steps or (60 if options.small else 600)
    compared = min(steps, 20 if options.small else 40)
    docs = documents(sizes.max_length, files=60 if options.small else None)
    print(f"{len(docs[0])} documents to train on, {len(docs[1])} to validate, {min(map(len, docs[0]))} to {max(map(len, docs[0]))} bytes")

    torch.manual_seed(0)
    model = LanguageModel(foci.nn, sizes)
    other = LanguageModel(torch.nn, sizes)
    other.load_state_dict(model.state_dict())
    ours = train(model, packed_loss, docs, tokens=sizes.tokens, steps=steps)
    print(f"validation loss {ours.validation[0][1]:.3f} -> {ours.validation[-1][1]:.3f}, {ours.seconds / steps:.3f} s a step")

    theirs = train(other, padded_loss, docs, tokens=sizes.tokens, steps=steps, stop=compared)
    worst = max(abs(a - b) / b for a, b in zip(ours.training, theirs.training))
    print(f"torch.nn, padded: {theirs.seconds / compared:.3f} s a step; the losses of {compared} steps differ by {worst:.1e} at most")
    if options.plot:
        plot(options.plot, ours, theirs)
    print(generate(model, b"def ", 40 if options.small else 300).decode(errors="replace"))


if __name__ == "__main__":
    main()
