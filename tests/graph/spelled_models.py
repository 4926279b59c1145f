"""Attention layers of well-known architectures, written anew as small modules."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from spelling_harness import BATCH, DIM, HEADS, Spelling, draw, hidden, lengths_mask
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


MODELS = (
    Spelling("small GPT, buffer of ones", SmallGPT, hidden, SmallGPTTwin, "", variant=("q_idx", "kv_idx")),
    Spelling("old GPT, minus a large number", OldGPT, hidden, OldGPTTwin, "", variant=("q_idx", "kv_idx")),
    Spelling("BERT", Bert, padded, BertTwin, ""),
    Spelling("ViT", ViT, hidden, ViTTwin, ""),
    Spelling("T5", T5, padded, T5Twin, ""),
    Spelling("BLOOM", Bloom, padded, variant=("q_idx", "kv_idx")),
    Spelling("Falcon", Falcon, hidden, variant=("q_idx", "kv_idx")),
    Spelling("Llama", Llama, padded, LlamaTwin, "", variant=("q_idx", "kv_idx")),
    Spelling("Gemma 2", Gemma, hidden, GemmaTwin, "", variant=("tanh",)),
    Spelling("sinks", Sinks, padded, SinksTwin, ""),
    Spelling("Swin", Swin, windows, SwinTwin, "", grows=False),
    Spelling("AlphaFold pair bias", PairBias, alignment, PairBiasTwin, ""),
    Spelling("DeBERTa", Deberta, padded, DebertaTwin, ""),
    Spelling("Perceiver", Perceiver, padded, PerceiverTwin, ""),
    Spelling("UNet cross attention", UNetCross, image_and_text, UNetCrossTwin, ""),
    Spelling("cosine scores", NormalisedKeys, hidden, NormalisedKeysTwin, ""),
    Spelling("a band", LocalWindow, padded, LocalWindowTwin, ""),
)
