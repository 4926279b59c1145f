"""A small GPT-2-style model (Radford et al. 2019) over bytes, its attention given as a function."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import foci
from foci.cli.demo.encoder import count_backends
from foci.cli.demo.texts import corpus

__all__ = ["Decoder", "Pattern", "Step", "patterns", "sample_text", "train_one_step"]

_WINDOW = 96
_DOCUMENT = 160
_BYTES = 256


@dataclass(frozen=True, eq=False)
class Pattern:
    """A kind of attention: a name for people, the mask, and the score function if there is one."""

    name: str
    mask: foci.Mask
    score: foci.Score | None = None


def patterns(batch: int, length: int, heads: int, device: torch.device) -> tuple[Pattern, ...]:
    """Causal; ALiBi within a sliding window; causal within documents, cut at other places in each batch entry."""
    positions = torch.arange(length, device=device) + 37 * torch.arange(batch, device=device)[:, None]
    causal = foci.masks.causal()
    return (
        Pattern("causal", causal),
        Pattern(f"ALiBi, window {_WINDOW}", foci.masks.window(_WINDOW), foci.scores.alibi(heads)),
        Pattern("documents, causal", causal & foci.masks.document(positions // _DOCUMENT)),
    )


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

    def forward(self, hidden: Tensor, pattern: Pattern) -> Tensor:
        """The layer's output for `hidden`, [B, S, width], attended to as the pattern says."""
        packed = self.project_in(self.norm_attention(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)  # [B, heads, S, D] each, views of one tensor
        attended: Tensor = foci.attention(query, key, value, mask=pattern.mask, score=pattern.score)
        hidden = hidden + self.project_out(attended.transpose(1, 2).flatten(2))
        result: Tensor = hidden + self.perceptron(self.norm_perceptron(hidden))
        return result


class Decoder(nn.Module):
    """Bytes [B, S] to logits [B, S, 256]; the embedding also decodes, as in GPT-2."""

    HEADS: Final = 8

    def __init__(self, *, width: int = 256, layers: int = 4, length: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_BYTES, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, self.HEADS) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor, pattern: Pattern) -> Tensor:
        """Logits of the next byte at each position of `text`, integers [B, S]."""
        hidden = self.tokens(text) + self.positions.weight[: text.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, pattern)
        return F.linear(self.norm(hidden), self.tokens.weight)


@dataclass(frozen=True)
class Step:
    """One training step: the loss before it and, on the same text, after it; its time; the backend of each attention."""

    name: str
    before: float
    after: float
    seconds: float
    backends: Mapping[str, int]


def sample_text(batch: int, length: int, device: torch.device) -> Tensor:
    """int64 [batch, length + 1]: bytes of the standard library's docstrings, each row with its next byte."""
    text = torch.frombuffer(bytearray(corpus(batch * (length + 1))), dtype=torch.uint8)
    return text.long().view(batch, length + 1).to(device)


def train_one_step(model: Decoder, text: Tensor, pattern: Pattern) -> Step:
    """One AdamW step of `model`, in place, predicting each next byte of `text` [batch, length + 1]."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        return F.cross_entropy(model(text[:, :-1], pattern).flatten(0, 1), text[:, 1:].flatten())

    loss().backward()  # type: ignore[no-untyped-call]  # the first call makes kernels, where a backend compiles them
    optimizer.zero_grad()
    start = time.perf_counter()
    with foci.observe() as log:
        first = loss()
        first.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        before = first.item()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        after = loss().item()
    return Step(pattern.name, before, after, seconds, count_backends(log.calls))
