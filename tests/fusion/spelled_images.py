"""Attention layers of models of images, pairs and distances, written anew as small modules."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from spelled_models import WIDTH, Projections, lowest, merge, padded, split
from spelling_harness import BATCH, DIM, HEADS, Spelling, draw, hidden, lengths_mask
from torch import nn


class Swin(nn.Module):
    """Windows as batches; a bias table by relative position; a mask of shifted windows."""

    side = 3

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.table = nn.Parameter(torch.randn((2 * self.side - 1) ** 2, HEADS))
        at = torch.stack(torch.meshgrid(torch.arange(self.side), torch.arange(self.side), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None] + self.side - 1).permute(1, 2, 0)
        self.register_buffer("index", apart[..., 0] * (2 * self.side - 1) + apart[..., 1])

    def weights(self, scores):
        return scores.softmax(-1)

    def forward(self, x, mask):
        count, size, width = x.shape
        q, k, v = self.qkv(x).reshape(count, size, 3, HEADS, DIM).permute(2, 0, 3, 1, 4)
        scores = (q * DIM**-0.5) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(size, size, -1).permute(2, 0, 1).contiguous()
        scores = scores + bias.unsqueeze(0)
        windows = mask.shape[0]
        scores = (scores.view(count // windows, windows, HEADS, size, size) + mask.unsqueeze(1).unsqueeze(0)).view(-1, HEADS, size, size)
        return (self.weights(scores) @ v).transpose(1, 2).reshape(count, size, width)


class SwinTwin(Swin):
    """Weights are made sharper after the softmax."""

    def weights(self, scores):
        return scores.softmax(-1) ** 2


def windows(length, batch=BATCH):
    count = 2 * batch * (length // 10)
    mask = torch.where(torch.arange(9) % 3 == 0, -100.0, 0.0)
    return draw(count, 9, WIDTH, seed=8), torch.stack([mask.expand(9, 9), torch.zeros(9, 9)])


class PairBias(Projections):
    """Rows of an alignment attend along their length; a bias made of pairs; a gate after."""

    def __init__(self) -> None:
        super().__init__(bias=False)
        self.pair = nn.Linear(4, HEADS, bias=False)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def bias(self, pairs):
        return self.pair(pairs).permute(0, 3, 1, 2).unsqueeze(1)  # [B, 1, H, S, S]

    def forward(self, x, pairs, keep):
        rows = (*x.shape[:3], HEADS, DIM)
        q, k, v = ((layer(x)).view(rows).transpose(-2, -3) for layer in (self.q, self.k, self.v))  # [B, R, H, S, D]
        scores = torch.matmul(q * DIM**-0.5, k.transpose(-1, -2))
        scores = scores + (1e4 * (keep.to(x.dtype) - 1))[:, None, None, None, :]
        scores = scores + self.bias(pairs)
        out = torch.matmul(scores.softmax(-1), v).transpose(-2, -3)
        return self.o((out * self.gate(x).view(rows).sigmoid()).flatten(-2))


class PairBiasTwin(PairBias):
    """The bias is added to the weights."""

    def forward(self, x, pairs, keep):
        rows = (*x.shape[:3], HEADS, DIM)
        q, k, v = ((layer(x)).view(rows).transpose(-2, -3) for layer in (self.q, self.k, self.v))
        weights = torch.matmul(q * DIM**-0.5, k.transpose(-1, -2)).softmax(-1) + self.bias(pairs)
        return self.o(torch.matmul(weights, v).transpose(-2, -3).flatten(-2))


def alignment(length, batch=BATCH):
    return draw(batch, 3, length, WIDTH, seed=9), draw(batch, length, length, 4, seed=10), lengths_mask(length, batch)


class Deberta(Projections):
    """Content to position and position to content, gathered by distance, in the scores."""

    span = 6

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(2 * self.span, WIDTH))

    def weights(self, scores, keep):
        hidden_ = ~(keep[:, None, None] & keep[:, None, :, None])
        return scores.masked_fill(hidden_, lowest(scores)).softmax(-1)

    def forward(self, x, keep):
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        place_k, place_q = (split(layer(self.places)[None]) for layer in (self.k, self.q))
        position = torch.arange(x.shape[1], device=x.device)
        index = (position[:, None] - position[None, :] + self.span).clamp(0, 2 * self.span - 1)
        scale = math.sqrt(3 * DIM)
        scores = torch.matmul(q, k.transpose(-1, -2) / scale)
        wide = index.expand(*scores.shape)
        to_place = torch.gather(torch.matmul(q, place_k.transpose(-1, -2)), dim=-1, index=wide) / scale
        from_place = torch.gather(torch.matmul(k, place_q.transpose(-1, -2)), dim=-1, index=wide).transpose(-1, -2) / scale
        return self.o(merge(self.weights(scores + to_place + from_place, keep) @ v))


class DebertaTwin(Deberta):
    def weights(self, scores, keep):
        hidden_ = ~(keep[:, None, None] & keep[:, None, :, None])
        return scores.masked_fill(hidden_, lowest(scores)).softmax(-1).roll(1, -1)


class Perceiver(Projections):
    """A few learned queries over a long input."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x, keep):
        q = split(self.q(self.latents).expand(x.shape[0], -1, -1))
        k, v = split(self.k(x)), split(self.v(x))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(DIM)
        scores = scores.masked_fill(~keep[:, None, None], -torch.inf)
        return self.o(merge(torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)))


class PerceiverTwin(Perceiver):
    """Queries compete for inputs."""

    def forward(self, x, keep):
        q = split(self.q(self.latents).expand(x.shape[0], -1, -1))
        k, v = split(self.k(x)), split(self.v(x))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(DIM)
        return self.o(merge(torch.einsum("bhij,bhjd->bhid", scores.softmax(-2), v)))


class UNetCross(nn.Module):
    """Pixels look at a text: channels first, heads folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Conv2d(12, WIDTH, 1)
        self.kv = nn.Linear(10, 2 * WIDTH)
        self.o = nn.Conv2d(WIDTH, 12, 1)

    def fold(self, x):
        batch, length, width = x.shape
        return x.reshape(batch, length, HEADS, DIM).permute(0, 2, 1, 3).reshape(batch * HEADS, length, DIM)

    def weights(self, scores):
        return scores.softmax(dim=-1)

    def forward(self, image, text):
        batch, _, high, wide = image.shape
        q = self.fold(self.q(image).flatten(2).transpose(1, 2))
        k, v = (self.fold(part) for part in self.kv(text).chunk(2, -1))
        scores = torch.baddbmm(
            torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device), q, k.mT, beta=0, alpha=DIM**-0.5
        )
        out = torch.bmm(self.weights(scores), v).view(batch, HEADS, high * wide, DIM)
        return image + self.o(out.transpose(2, 3).reshape(batch, WIDTH, high, wide))


class UNetCrossTwin(UNetCross):
    def weights(self, scores):
        return scores.softmax(dim=-1).pow(1.5)


def image_and_text(length, batch=BATCH):
    return draw(batch, 12, 4, length // 4, seed=11), draw(batch, length // 2 + 1, 10, seed=12)


class NormalisedKeys(Projections):
    """Cosine attention with a learned temperature for each head, as in Swin's second version."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.full((HEADS, 1, 1), 1.2))

    def forward(self, x):
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        return self.o(merge((scores * self.temperature.clamp(max=4.6).exp()).softmax(dim=-1) @ v))


class NormalisedKeysTwin(NormalisedKeys):
    """Scores are normalised over the keys, not the keys."""

    def forward(self, x):
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        scores = F.normalize(q @ k.transpose(-2, -1), dim=-1)
        return self.o(merge((scores * self.temperature.exp()).softmax(dim=-1) @ v))


class LocalWindow(Projections):
    """A band around the diagonal, as blocks of a longer document have it; True is hidden."""

    def forward(self, x, keep):
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        position = torch.arange(x.shape[1], device=x.device)
        far = (position.unsqueeze(0) - position.unsqueeze(1)).abs() > 3
        scores = (q @ k.mT).mul(DIM**-0.5).masked_fill(torch.logical_or(far, ~keep[:, None, None]), lowest(x))
        return self.o(merge(torch.softmax(scores.float(), -1).to(x.dtype) @ v))


class LocalWindowTwin(LocalWindow):
    """Only the best few scores of a row are kept: a mask that depends on all of it."""

    def forward(self, x, keep):
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        scores = (q @ k.mT).mul(DIM**-0.5)
        best = scores.topk(3, dim=-1).values[..., -1:]
        return self.o(merge(torch.softmax(scores.masked_fill(scores < best, -torch.inf), -1) @ v))


IMAGES = (
    Spelling("Swin", Swin, windows, SwinTwin, "", grows=False),
    Spelling("AlphaFold pair bias", PairBias, alignment, PairBiasTwin, ""),
    Spelling("DeBERTa", Deberta, padded, DebertaTwin, ""),
    Spelling("Perceiver", Perceiver, padded, PerceiverTwin, ""),
    Spelling("UNet cross attention", UNetCross, image_and_text, UNetCrossTwin, ""),
    Spelling("cosine scores", NormalisedKeys, hidden, NormalisedKeysTwin, ""),
    Spelling("a band", LocalWindow, padded, LocalWindowTwin, ""),
)
