"""A small GPT-2-style model (Radford et al. 2019) over bytes, trained with foci and with sdpa side by side."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import foci
from foci.cli.demo.encoder import count_backends
from foci.cli.demo.memory import peak_memory
from foci.cli.demo.texts import corpus

__all__ = ["ATTENTION", "Decoder", "Pattern", "Training", "patterns", "train"]

_WINDOW = 96
_DOCUMENT = 160
_BYTES = 256
_CORPUS = 1 << 16  # bytes that the training text is drawn from


@dataclass(frozen=True, eq=False)
class Pattern:
    """A kind of causal attention, for foci as functions and for sdpa as a tensor.

    Attributes:
        name: for people.
        mask, score: what foci takes.
        attn_mask: what sdpa takes, bool or floating, broadcastable to [B, H, S, S]; None where `is_causal` says it.
    """

    name: str
    mask: foci.Mask
    score: foci.Score | None = None
    attn_mask: Tensor | None = None


def patterns(batch: int, length: int, heads: int, device: torch.device) -> tuple[Pattern, ...]:
    """ALiBi within a sliding window; causal within documents, cut at other places in each batch entry; causal."""
    at = torch.arange(length, device=device)
    documents = (at + 37 * torch.arange(batch, device=device)[:, None]) // _DOCUMENT  # [B, S]
    distance = at[:, None] - at
    is_causal = distance >= 0
    slopes = torch.tensor(foci.scores.alibi_slopes(heads), device=device)
    alibi = (-slopes[:, None, None] * distance).masked_fill(~is_causal | (distance > _WINDOW), -torch.inf)  # [H, S, S]
    same_document = documents[:, None, :, None] == documents[:, None, None, :]
    causal = foci.masks.causal()
    return (
        Pattern(f"ALiBi in a window of {_WINDOW}", foci.masks.window(_WINDOW), foci.scores.alibi(heads), alibi),
        Pattern("causal in documents", causal & foci.masks.document(documents), None, is_causal & same_document),
        Pattern("causal", causal),
    )


Attention = Callable[[Tensor, Tensor, Tensor, Pattern], Tensor]


def _attend_with_sdpa(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, pattern.attn_mask, is_causal=pattern.attn_mask is None)


def _attend_with_foci(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Tensor:
    attended: Tensor = foci.attention(query, key, value, mask=pattern.mask, score=pattern.score)
    return attended


ATTENTION: Final[Mapping[str, Attention]] = {"sdpa": _attend_with_sdpa, "foci": _attend_with_foci}


class Layer(nn.Module):
    """Attention and a perceptron, each behind a layer norm and added to its input; [B, S, width] to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        self.norm_perceptron = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor, pattern: Pattern, attention: Attention) -> Tensor:
        """The layer's output for `hidden`, [B, S, width], attended to as the pattern says."""
        packed = self.project_in(self.norm_attention(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)  # [B, heads, S, D] each, views of one tensor
        hidden = hidden + self.project_out(attention(query, key, value, pattern).transpose(1, 2).flatten(2))
        result: Tensor = hidden + self.perceptron(self.norm_perceptron(hidden))
        return result


class Decoder(nn.Module):
    """Bytes [B, S] to logits [B, S, 256]; the embedding also decodes, as in GPT-2."""

    HEADS: Final = 4

    def __init__(self, *, width: int = 128, layers: int = 3, length: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_BYTES, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, self.HEADS) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor, pattern: Pattern, attention: Attention) -> Tensor:
        """Logits of the next byte at each position of `text`, integers [B, S]."""
        hidden = self.tokens(text) + self.positions.weight[: text.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, pattern, attention)
        return F.linear(self.norm(hidden), self.tokens.weight)


@dataclass(eq=False)
class Training:
    """A model that learns to predict bytes with one implementation of attention.

    Attributes:
        losses: cross entropy in nats per byte, of each step, before it.
        times: seconds of each step.
        memory: bytes at the peak of one step, or None where they cannot be measured.
        backends: of a step's calls of foci, the backend and how many calls; empty for sdpa.
    """

    pattern: Pattern
    implementation: str
    model: Decoder
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    memory: int | None = None
    backends: Mapping[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(self.times)

    def loss(self, text: Tensor) -> Tensor:
        """Cross entropy of each next byte of `text`, [B, S + 1]."""
        logits = self.model(text[:, :-1], self.pattern, ATTENTION[self.implementation])
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def differentiate(self, text: Tensor) -> None:
        """One forward and backward pass that changes nothing but gradients."""
        self.loss(text).backward()  # type: ignore[no-untyped-call]

    def step(self, text: Tensor) -> None:
        """One AdamW step, in place."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.loss(text)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.losses.append(loss.item())
        self.times.append(time.perf_counter() - start)


def train(pattern: Pattern, *, batch: int, length: int, steps: int, device: torch.device) -> Iterator[Sequence[Training]]:
    """Trains one model for each of `ATTENTION`, equal at first and on the same text, in turns; yields them after each step."""
    trainings = []
    texts = _draw_texts(batch, length, device)
    first = next(texts)
    for name in ATTENTION:
        torch.manual_seed(0)
        model = Decoder(length=length).to(device)
        training = Training(pattern, name, model, torch.optim.AdamW(model.parameters(), lr=2e-3))
        with foci.observe() as log:
            training.differentiate(first)  # the first call makes kernels, where a backend compiles them
        training.backends = count_backends(log.calls)
        training.optimizer.zero_grad()
        training.memory = peak_memory(functools.partial(training.differentiate, first), device)
        trainings.append(training)
    for _ in range(steps):
        text = next(texts)
        for training in trainings:
            training.step(text)
        yield trainings


def _draw_texts(batch: int, length: int, device: torch.device) -> Iterator[Tensor]:
    """int64 [batch, length + 1] again and again: bytes from the standard library's docstrings, each row with its next byte."""
    text = torch.frombuffer(bytearray(corpus(max(_CORPUS, length + 1))), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
        yield text[starts + torch.arange(length + 1)].to(device)
