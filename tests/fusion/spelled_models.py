"""Attention layers of well-known language models, written anew as small modules."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from spelling_harness import BATCH, DIM, HEADS, Spelling, hidden, lengths_mask
from torch import Tensor, nn

WIDTH = HEADS * DIM

MOST = 32


def split(x: Tensor, heads: int = HEADS) -> Tensor:
    batch, length, width = x.shape
    return x.view(batch, length, heads, width // heads).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    batch, heads, length, dim = x.shape
    return x.transpose(1, 2).contiguous().view(batch, length, heads * dim)


def lowest(x: Tensor) -> float:
    return torch.finfo(x.dtype).min


def padded(length, batch=BATCH):
    return (*hidden(length, batch), lengths_mask(length, batch))


class Projections(nn.Module):
    def __init__(self, width: int = WIDTH, *, kv_heads: int = HEADS, bias: bool = True) -> None:
        super().__init__()
        self.q = nn.Linear(width, WIDTH, bias=bias)
        self.k = nn.Linear(width, kv_heads * DIM, bias=bias)
        self.v = nn.Linear(width, kv_heads * DIM, bias=bias)
        self.o = nn.Linear(WIDTH, width, bias=bias)


class SmallGPT(nn.Module):
    """One projection for three, a buffer of ones under the diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("below", torch.tril(torch.ones(MOST, MOST)).view(1, 1, MOST, MOST))

    def attend(self, q, k, v):
        length = q.size(2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.below[:, :, :length, :length] == 0, float("-inf"))
        return self.drop(F.softmax(scores, dim=-1)) @ v

    def forward(self, x):
        q, k, v = (split(part) for part in self.qkv(x).split(WIDTH, dim=2))
        return self.drop(self.o(merge(self.attend(q, k, v))))


class SmallGPTTwin(SmallGPT):
    """The mask hides the weights, after they were normalised."""

    def attend(self, q, k, v):
        length = q.size(2)
        weights = F.softmax((q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1))), dim=-1)
        return weights.masked_fill(self.below[:, :, :length, :length] == 0, 0.0) @ v


class OldGPT(Projections):
    """A causal mask made where it is used, minus a large number."""

    def forward(self, x):
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        length = x.shape[1]
        ones = torch.ones(length, length, device=x.device, dtype=x.dtype).tril()[None, None]
        scores = q @ k.mT / math.sqrt(DIM)
        scores = scores * ones - 1e4 * (1 - ones)
        return self.o(merge(scores.softmax(-1) @ v))


class OldGPTTwin(Projections):
    def forward(self, x):
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        length = x.shape[1]
        ones = torch.ones(length, length, device=x.device, dtype=x.dtype).tril()[None, None]
        scores = q @ k.mT / math.sqrt(DIM)
        scores = scores * ones - 1e4 * (1 - ones)
        return self.o(merge((scores - scores.std(-1, keepdim=True) * scores).softmax(-1) @ v))


class Bert(Projections):
    """(1 - mask) times the lowest number, added."""

    def bias(self, keep: Tensor, scores: Tensor) -> Tensor:
        return (1.0 - keep[:, None, None, :].to(scores.dtype)) * lowest(scores)

    def forward(self, x, keep):
        q, k, v = (layer(x).view(*x.shape[:2], HEADS, DIM).permute(0, 2, 1, 3) for layer in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(DIM)
        weights = F.dropout(nn.functional.softmax(scores + self.bias(keep, scores), dim=-1), 0.1, training=False)
        out = torch.matmul(weights, v).permute(0, 2, 1, 3).contiguous()
        return self.o(out.view(*out.size()[:-2], WIDTH))


class BertTwin(Bert):
    """Heads are mixed after the softmax."""

    def forward(self, x, keep):
        q, k, v = (layer(x).view(*x.shape[:2], HEADS, DIM).permute(0, 2, 1, 3) for layer in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(DIM)
        weights = nn.functional.softmax(scores + self.bias(keep, scores), dim=-1)
        mixed = torch.einsum("bhij,gh->bgij", weights, self.o.weight[:HEADS, :HEADS])
        return self.o(merge(torch.matmul(mixed, v)))


class ViT(nn.Module):
    """[3, B, H, S, D] from one projection, unbound; queries scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q * DIM**-0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.o((weights @ v).transpose(1, 2).reshape(batch, length, width))


class ViTTwin(ViT):
    """Square roots of the weights."""

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q * DIM**-0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.o((weights.relu().sqrt() @ v).transpose(1, 2).reshape(batch, length, width))


class T5(Projections):
    """A learned bias for buckets of distance, no scale."""

    def __init__(self) -> None:
        super().__init__(bias=False)
        self.table = nn.Embedding(8, HEADS)

    def buckets(self, length: int, device) -> Tensor:
        position = torch.arange(length, device=device)
        distance = position[None, :] - position[:, None]
        past = -torch.min(distance, torch.zeros_like(distance))
        far = 4 + (torch.log(past.float().clamp(min=1) / 4) / math.log(8) * 4).to(torch.long)
        return torch.where(past < 4, past, torch.min(far, torch.full_like(far, 7)))

    def forward(self, x, keep):
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        bias = self.table(self.buckets(x.shape[1], x.device)).permute(2, 0, 1).unsqueeze(0)
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += bias + torch.where(keep[:, None, None], 0.0, lowest(x)).to(x.dtype)
        return self.o(merge(torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)))


class LongT5(T5):
    """What is added is of float32, whatever the scores are."""

    def forward(self, x, keep):
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        bias = self.table(self.buckets(x.shape[1], x.device)).permute(2, 0, 1).unsqueeze(0)
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += bias + torch.where(keep[:, None, None], 0.0, -1e10)
        return self.o(merge(torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)))


class LongT5Twin(LongT5):
    def forward(self, x, keep):
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += torch.where(keep[:, None, None], 0.0, -1e10)
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        return self.o(merge(torch.matmul(weights + scores.sigmoid(), v)))


class T5Twin(T5):
    def forward(self, x, keep):
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        scores = torch.matmul(q, k.transpose(3, 2))
        before = scores.view_as(scores)
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        scores += self.table(self.buckets(x.shape[1], x.device)).permute(2, 0, 1).unsqueeze(0)
        return self.o(merge(torch.matmul(weights + before.sigmoid(), v)))


class Bloom(Projections):
    """ALiBi from positions in each row, baddbmm on [B * H, S, S]."""

    def forward(self, x, keep):
        batch, length, _ = x.shape
        q, k, v = (split(layer(x)).reshape(batch * HEADS, length, DIM) for layer in (self.q, self.k, self.v))
        slopes = torch.tensor([2.0 ** (-2 * (n + 1)) for n in range(HEADS)], device=x.device)
        position = ((keep.cumsum(-1) - 1) * keep)[:, None, :]
        alibi = (slopes[:, None] * position).reshape(batch * HEADS, 1, length).to(x.dtype)
        scores = alibi.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=DIM**-0.5).view(batch, HEADS, length, length)
        causal = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=1)
        scores = torch.masked_fill(scores, causal | ~keep[:, None, None], lowest(scores))
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype).view(batch * HEADS, length, length)
        return self.o(merge(torch.bmm(weights, v).view(batch, HEADS, length, DIM)))


class Falcon(Projections):
    """One key head for all."""

    def __init__(self) -> None:
        super().__init__(kv_heads=1)

    def forward(self, x):
        q, k, v = split(self.q(x)), self.k(x)[:, None], self.v(x)[:, None]
        causal = torch.arange(x.shape[1], device=x.device)
        hidden_ = causal[None, :] > causal[:, None]
        scores = (q @ k.transpose(-1, -2)).masked_fill(hidden_, lowest(x)) / math.sqrt(DIM)
        return self.o(merge(scores.softmax(-1, dtype=x.dtype) @ v))


class Llama(Projections):
    """Grouped heads repeated, a mask to add made from both padding and positions, rotary positions outside."""

    def __init__(self) -> None:
        super().__init__(kv_heads=2, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2], device=x.device)[:, None] * 0.1 ** torch.arange(DIM // 2, device=x.device).repeat(2)
        first, second = x.chunk(2, -1)
        return (x * angle.cos() + torch.cat((-second, first), -1) * angle.sin()).to(x.dtype)

    def repeat(self, x: Tensor, times: int) -> Tensor:
        batch, heads, length, dim = x.shape
        return x[:, :, None].expand(batch, heads, times, length, dim).reshape(batch, heads * times, length, dim)

    def mask(self, x, keep):
        length = x.shape[1]
        added = torch.full((length, length), lowest(x), dtype=x.dtype, device=x.device).triu(1)[None, None]
        return added.masked_fill(~keep[:, None, None], lowest(x))

    def forward(self, x, keep):
        q, k, v = split(self.q(x)), split(self.k(x), 2), split(self.v(x), 2)
        q, k = self.rotate(q), self.rotate(k)
        k, v = self.repeat(k, 2), self.repeat(v, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) * DIM**-0.5 + self.mask(x, keep)
        weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return self.o(merge(torch.matmul(weights, v)))


class LlamaTwin(Llama):
    """No weight above a half."""

    def forward(self, x, keep):
        q, k, v = split(self.q(x)), split(self.k(x), 2), split(self.v(x), 2)
        k, v = self.repeat(k, 2), self.repeat(v, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) * DIM**-0.5 + self.mask(x, keep)
        return self.o(merge(torch.matmul(torch.softmax(scores, -1).clamp(max=0.5), v)))


class Gemma(Llama):
    """Softcapped scores, a sliding window."""

    def forward(self, x):
        q, k, v = split(self.q(x)), split(self.k(x), 2), split(self.v(x), 2)
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        scores = torch.tanh(torch.matmul(q, k.mT) * DIM**-0.5 / 5.0) * 5.0
        position = torch.arange(x.shape[1], device=x.device)
        seen = (position[:, None] >= position) & (position[:, None] - position < 7)
        scores = torch.where(seen, scores, torch.tensor(lowest(scores), dtype=x.dtype, device=x.device))
        return self.o(merge(scores.softmax(-1) @ v))


class GemmaTwin(Llama):
    """Capped by the row's own largest score."""

    def forward(self, x):
        q, k, v = split(self.q(x)), split(self.k(x), 2), split(self.v(x), 2)
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        scores = torch.matmul(q, k.mT) * DIM**-0.5
        scores = torch.tanh(scores / (1 + scores.abs().amax(-1, keepdim=True)))
        return self.o(merge(scores.softmax(-1) @ v))


class Sinks(Llama):
    """A learned logit for each head in a column of its own, dropped after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.arange(HEADS) / 2.0)

    def forward(self, x, keep):
        q, k, v = split(self.q(x)), self.repeat(split(self.k(x), 2), 2), self.repeat(split(self.v(x), 2), 2)
        scores = torch.matmul(q, k.transpose(2, 3)) * DIM**-0.5 + self.mask(x, keep)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        both = torch.cat([scores, sinks], dim=-1)
        both = both - both.max(dim=-1, keepdim=True).values
        weights = F.softmax(both, dim=-1, dtype=both.dtype)[..., :-1]
        return self.o(merge(torch.matmul(weights, v)))


class SinksTwin(Sinks):
    """The wrong column is dropped."""

    def forward(self, x, keep):
        q, k, v = split(self.q(x)), self.repeat(split(self.k(x), 2), 2), self.repeat(split(self.v(x), 2), 2)
        scores = torch.matmul(q, k.transpose(2, 3)) * DIM**-0.5 + self.mask(x, keep)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        weights = F.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., 1:]
        return self.o(merge(torch.matmul(weights, v)))


MODELS = (
    Spelling("small GPT, buffer of ones", SmallGPT, hidden, SmallGPTTwin, "", variant=("q_idx", "kv_idx")),
    Spelling("old GPT, minus a large number", OldGPT, hidden, OldGPTTwin, "", variant=("q_idx", "kv_idx")),
    Spelling("BERT", Bert, padded, BertTwin, ""),
    Spelling("ViT", ViT, hidden, ViTTwin, ""),
    Spelling("T5", T5, padded, T5Twin, ""),
    Spelling("LongT5", LongT5, padded, LongT5Twin, "", dtypes=(torch.float32, torch.bfloat16)),
    Spelling("BLOOM", Bloom, padded, variant=("q_idx", "kv_idx")),
    Spelling("Falcon", Falcon, hidden, variant=("q_idx", "kv_idx")),
    Spelling("Llama", Llama, padded, LlamaTwin, "", variant=("q_idx", "kv_idx")),
    Spelling("Gemma 2", Gemma, hidden, GemmaTwin, "", variant=("tanh",)),
    Spelling("sinks", Sinks, padded, SinksTwin, ""),
)
