"""Attention as the code of papers has it: images in channels, heads in the batch, decomposed positions, masks of blocks and prefixes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from spelling_harness import BATCH, DIM, HEADS, Spelling, draw, hidden, lengths_mask, qkv
from torch import nn

SCALE = DIM**-0.5
CHANNELS = HEADS * DIM


def padded(length, batch=BATCH):
    return (*qkv(length, batch), lengths_mask(length, batch))


def channels(length, batch=BATCH):
    """[B, C, S], three times."""
    return tuple(draw(batch, CHANNELS, length, seed=seed) for seed in (1, 2, 3))


def non_local(q, k, v):
    """Wang et al. 2018, equation 6: positions of a feature map attend to each other."""
    weights = torch.bmm(q.permute(0, 2, 1), k).softmax(dim=-1)
    return torch.bmm(weights, v.permute(0, 2, 1)).permute(0, 2, 1).contiguous()


def non_local_twin(q, k, v):
    return torch.bmm(torch.bmm(q.permute(0, 2, 1), k).softmax(dim=1), v.permute(0, 2, 1)).permute(0, 2, 1)


class ImageGenerator(nn.Module):
    """Zhang et al. 2019: channels first, the weights transposed, a gate on what comes out."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Conv1d(CHANNELS, width, 1) for width in (DIM, DIM, CHANNELS))
        self.gamma = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x):
        energy = torch.bmm(self.query(x).permute(0, 2, 1), self.key(x))
        weights = F.softmax(energy, dim=-1)
        return self.gamma * torch.bmm(self.value(x), weights.permute(0, 2, 1)) + x


class ImageGeneratorTwin(ImageGenerator):
    def forward(self, x):
        energy = torch.bmm(self.query(x).permute(0, 2, 1), self.key(x))
        return self.gamma * torch.bmm(self.value(x), F.softmax(energy, dim=-1)) + x


def one_image(length, batch=BATCH):
    return (draw(batch, CHANNELS, length, seed=4),)


def diffusion(q, k, v):
    """Dhariwal and Nichol 2021: heads in the batch, channels before positions, the fourth root of the width on either side."""
    batch, _, length = q.shape
    q, k, v = (t.reshape(batch * HEADS, DIM, length) for t in (q, k, v))
    scale = 1 / math.sqrt(math.sqrt(DIM))
    weights = torch.einsum("bct,bcs->bts", q * scale, k * scale)
    weights = torch.softmax(weights.float(), dim=-1).type(q.dtype)
    return torch.einsum("bts,bcs->bct", weights, v).reshape(batch, -1, length)


def diffusion_twin(q, k, v):
    batch, _, length = q.shape
    q, k, v = (t.reshape(batch * HEADS, DIM, length) for t in (q, k, v))
    weights = torch.softmax(torch.einsum("bct,bcs->bts", q, k), dim=-1)
    return torch.einsum("bts,bct->bcs", weights, v).reshape(batch, -1, length)


def covariance(length, batch=BATCH):
    return (*(t.mT.contiguous() for t in qkv(length, batch)), draw(HEADS, 1, 1, seed=6))


def cross_covariance(q, k, v, temperature):
    """El-Nouby et al. 2021: channels attend to channels, [B, H, D, S], with a temperature for each head."""
    weights = ((F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT) * temperature).softmax(dim=-1)
    return (weights @ v).permute(0, 3, 1, 2).flatten(2)


def cross_covariance_twin(q, k, v, temperature):
    weights = ((F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT) * temperature).softmax(dim=-2)
    return (weights @ v).permute(0, 3, 1, 2).flatten(2)


def set_of_heads(x, y):
    """Lee et al. 2019: heads are cut off the features and laid behind each other in the batch; queries are added to what comes out."""
    q, k, v = (torch.cat(t.split(DIM, 2), 0) for t in (x, y, y * 0.5))
    out = q + torch.softmax(q.bmm(k.transpose(1, 2)) / math.sqrt(CHANNELS), 2).bmm(v)
    return torch.cat(out.split(x.size(0), 0), 2)


def set_of_heads_twin(x, y):
    q, k, v = (torch.cat(t.split(DIM, 2), 0) for t in (x, y, y * 0.5))
    out = q + torch.softmax(q.bmm(k.transpose(1, 2)) / math.sqrt(CHANNELS), 0).bmm(v)
    return torch.cat(out.split(x.size(0), 0), 2)


def two_sets(length, batch=BATCH):
    return draw(batch, length, CHANNELS, seed=4), draw(batch, length, CHANNELS, seed=9)


def heads_before_batch(q, k, v, keep):
    """Heads lie before the batch, and the mask is repeated for each of them."""
    batch, heads, length, dim = q.shape
    q, k, v = (t.permute(1, 0, 2, 3).contiguous().view(-1, length, dim) for t in (q, k, v))
    mask = (~keep).unsqueeze(1).expand(-1, length, -1).repeat(heads, 1, 1)
    weights = torch.bmm(q, k.transpose(1, 2)).div(dim**0.5).masked_fill(mask, -torch.inf).softmax(2)
    return torch.bmm(weights, v).view(heads, batch, length, dim).permute(1, 2, 0, 3).contiguous().view(batch, length, -1)


def heads_before_batch_twin(q, k, v, keep):
    batch, heads, length, dim = q.shape
    q, k, v = (t.permute(1, 0, 2, 3).contiguous().view(-1, length, dim) for t in (q, k, v))
    mask = (~keep).unsqueeze(1).expand(-1, length, -1).repeat(heads, 1, 1)
    weights = torch.bmm(q, k.transpose(1, 2)).div(dim**0.5).softmax(2).masked_fill(mask, 0.0)
    return torch.bmm(weights, v)


def heads_within_batch(q, k, v, keep):
    """The mask of a sequence is repeated for its heads, which lie beside each other in the batch."""
    batch, heads, length, dim = q.shape
    q, k, v = (t.reshape(batch * heads, length, dim) for t in (q, k, v))
    mask = torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, -torch.inf)[:, None].repeat_interleave(heads, dim=0)
    return torch.bmm(torch.softmax(torch.baddbmm(mask, q * SCALE, k.mT), -1), v).view(batch, heads, length, dim)


def heads_within_batch_twin(q, k, v, keep):
    """Repeated otherwise: a head takes the mask of another sequence."""
    batch, heads, length, dim = q.shape
    q, k, v = (t.reshape(batch * heads, length, dim) for t in (q, k, v))
    mask = torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, -torch.inf)[:, None].repeat_interleave(heads, dim=0)
    return torch.bmm(torch.softmax(torch.baddbmm(mask, q * SCALE, k.mT), 0).nan_to_num(), v)


def field(length, batch=BATCH):
    """A map of 4 x 5, and tables of relative rows and columns."""
    return (*qkv(20, batch), draw(4, 4, DIM, seed=6), draw(5, 5, DIM, seed=7))


def decomposed_positions(q, k, v, rows, columns):
    """Li et al. 2022: relative positions of rows and of columns, each times the query."""
    batch, heads, _, dim = q.shape
    by_place = q.reshape(batch, heads, 4, 5, dim)
    by_row = torch.einsum("bnhwc,hkc->bnhwk", by_place, rows)
    by_column = torch.einsum("bnhwc,wkc->bnhwk", by_place, columns)
    scores = (q * SCALE @ k.mT).view(batch, heads, 4, 5, 4, 5)
    scores = scores + by_row[..., :, None] + by_column[..., None, :]
    return scores.view(batch, heads, 20, 20).softmax(-1) @ v


def decomposed_positions_twin(q, k, v, rows, columns):
    batch, heads, _, dim = q.shape
    by_place = q.reshape(batch, heads, 4, 5, dim)
    by_row = torch.einsum("bnhwc,hkc->bnhwk", by_place, rows)
    scores = (q * SCALE @ k.mT).view(batch, heads, 4, 5, 4, 5) + by_row[..., :, None]
    return scores.softmax(-1).view(batch, heads, 20, 20) @ v


def biases_by_place(length, batch=BATCH):
    index = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    return (*qkv(length, batch), draw(HEADS, length, seed=6), index)


def gathered_biases(q, k, v, biases, index):
    """Graham et al. 2021: a table of biases for each head, read by an index of pairs."""
    return ((q @ k.transpose(-2, -1)) * SCALE + biases[:, index]).softmax(dim=-1) @ v


def gathered_biases_twin(q, k, v, biases, index):
    return ((q @ k.transpose(-2, -1)) * SCALE + biases[:, index]).softmax(dim=1) @ v


def blocks_of_time(q, k, v):
    """Positions see their own block of four and all earlier ones."""
    frame = torch.arange(q.shape[2], device=q.device) // 4
    mask = frame[:, None] >= frame[None, :]
    return (q @ k.mT * SCALE).masked_fill(mask.logical_not(), -torch.inf).softmax(-1) @ v


def blocks_of_time_twin(q, k, v):
    frame = torch.arange(q.shape[2], device=q.device) // 4
    mask = frame[:, None] >= frame[None, :]
    return ((q @ k.mT * SCALE).softmax(-1) * mask) @ v


def prefixes(length, batch=BATCH):
    return (*qkv(length, batch), torch.arange(batch) * 3 + 2)


def prefix(q, k, v, known):
    """Everybody sees what is known beforehand, and what came before."""
    place = torch.arange(q.shape[2], device=q.device)
    seen = (place[None, :] <= place[:, None])[None] | (place[None, None, :] < known[:, None, None])
    return (q @ k.mT * SCALE + torch.where(seen, 0.0, -torch.inf).to(q.dtype)[:, None]).softmax(-1) @ v


def prefix_twin(q, k, v, known):
    """A mask of queries that is not one of keys: of rows of zeros."""
    place = torch.arange(q.shape[2], device=q.device)
    seen = (place[None, :] < known[:, None])[:, None, :, None]
    return ((q @ k.mT * SCALE).softmax(-2) * seen) @ v


def outer_mask(q, k, v, keep):
    """A mask of pairs, from the product of a mask with itself."""
    kept = keep.to(q.dtype)
    pairs = kept.unsqueeze(1).unsqueeze(3) * kept.unsqueeze(1).unsqueeze(2)
    return (q @ k.mT * SCALE).masked_fill(pairs < 0.5, torch.finfo(q.dtype).min).softmax(-1) @ v


def outer_mask_twin(q, k, v, keep):
    kept = keep.to(q.dtype)
    pairs = kept.unsqueeze(1).unsqueeze(3) * kept.unsqueeze(1).unsqueeze(2)
    return ((q @ k.mT * SCALE).softmax(-1) * (pairs + 0.1)) @ v


def least_first(q, k, v):
    """The softmin of what is negated."""
    return F.softmin(-(q @ k.mT) * SCALE, dim=-1) @ v


def least_first_twin(q, k, v):
    return F.softmin(-(q @ k.mT) * SCALE, dim=-2) @ v


def query_chunks(q, k, v):
    """Queries in parts, to save memory."""
    parts = [torch.softmax(part @ k.mT * SCALE, -1) @ v for part in q.split(5, dim=2)]
    return torch.cat(parts, dim=2)


def query_chunks_twin(q, k, v):
    parts = [torch.softmax(part @ k.mT * SCALE, 1) @ v for part in q.split(5, dim=2)]
    return torch.cat(parts, dim=2)


def twenty(length, batch=BATCH):
    return qkv(20, batch)


def differential(length, batch=BATCH):
    q, k = (draw(batch, 2 * HEADS, length, DIM, seed=seed) for seed in (1, 2))
    return q, k, draw(batch, HEADS, length, 2 * DIM, seed=3), torch.tensor(0.4)


def differential_products(q, k, v, share):
    """Ye et al. 2024, equation 1, each softmax times the values."""
    first, second = ((a @ b.mT * SCALE).softmax(-1) @ v for a, b in zip(q.chunk(2, 1), k.chunk(2, 1), strict=True))
    return first - share * second


def differential_products_twin(q, k, v, share):
    first, second = ((a @ b.mT * SCALE).softmax(-2) @ v for a, b in zip(q.chunk(2, 1), k.chunk(2, 1), strict=True))
    return first - share * second


def differential_weights(q, k, v, share):
    """The same, weights first."""
    first, second = ((a @ b.mT * SCALE).softmax(-1) for a, b in zip(q.chunk(2, 1), k.chunk(2, 1), strict=True))
    return (first - share * second) @ v


class Latents(nn.Module):
    """A few learned queries, the same for every sequence."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(draw(1, 6, CHANNELS, seed=3))
        self.to_q, self.to_kv = nn.Linear(CHANNELS, CHANNELS, bias=False), nn.Linear(CHANNELS, 2 * CHANNELS, bias=False)

    def forward(self, x):
        q = self.to_q(self.latents).repeat(x.shape[0], 1, 1)
        k, v = self.to_kv(torch.cat((x, self.latents.expand(x.shape[0], -1, -1)), dim=1)).chunk(2, dim=-1)
        q, k, v = (t.reshape(t.shape[0], t.shape[1], HEADS, DIM).transpose(1, 2) for t in (q, k, v))
        scores = torch.einsum("... i d, ... j d  -> ... i j", q * SCALE, k)
        scores = scores - scores.amax(dim=-1, keepdim=True).detach()
        out = torch.einsum("... i j, ... j d -> ... i d", scores.softmax(dim=-1), v)
        return out.transpose(1, 2).flatten(2)


class LatentsTwin(Latents):
    def forward(self, x):
        q = self.to_q(self.latents).repeat(x.shape[0], 1, 1)
        k, v = self.to_kv(x).chunk(2, dim=-1)
        q, k, v = (t.reshape(t.shape[0], t.shape[1], HEADS, DIM).transpose(1, 2) for t in (q, k, v))
        return torch.einsum("... i j, ... j d -> ... i d", torch.einsum("... i d, ... j d  -> ... i j", q, k).softmax(dim=-2), v)


def projected(length, batch=BATCH):
    return (*qkv(20, batch), draw(7, 20, seed=5), draw(7, 20, seed=6))


def low_rank(q, k, v, of_keys, of_values):
    """Wang et al. 2020: fewer keys, each a sum over all."""
    return torch.softmax(q @ (of_keys @ k).mT / math.sqrt(DIM), -1) @ (of_values @ v)


def low_rank_twin(q, k, v, of_keys, of_values):
    """Kernelised on either side, there is no softmax over scores."""
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def caches(length, batch=BATCH):
    return (*qkv(5, batch), draw(batch, HEADS, 24, DIM, seed=8), draw(batch, HEADS, 24, DIM, seed=9), torch.arange(9, 14))


def cached(q, k, v, keys, values, places):
    """New keys and values at their places among old ones; later places are hidden."""
    keys, values = keys.index_copy(2, places, k), values.index_copy(2, places, v)
    seen = torch.arange(24, device=q.device)[None, :] <= places[:, None]
    return torch.where(seen, q @ keys.mT * SCALE, -torch.inf).softmax(-1) @ values


def cached_twin(q, k, v, keys, values, places):
    """Scores at their places among others."""
    scores = (keys[:, :, :5] @ keys.mT).index_copy(2, places - 9, q @ keys.mT * SCALE)
    return scores.softmax(-1) @ values


def most_alike(q, k, v):
    """Gupta et al. 2021: the five largest scores of each row, which is a mask made of the scores."""
    scores = q @ k.mT * SCALE
    least = scores.topk(5, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < least, -torch.inf).softmax(-1) @ v


def relative_values(length, batch=BATCH):
    return (*qkv(length, batch), draw(length, length, DIM, seed=5))


def relative_keys_and_values(q, k, v, table):
    """Shaw et al. 2018, equations 3 and 4: the weights are read twice."""
    scores = (q @ k.mT + torch.einsum("bhid,ijd->bhij", q, table)) * SCALE
    weights = scores.softmax(-1)
    return weights @ v + torch.einsum("bhij,ijd->bhid", weights, table)


class Gated(nn.Module):
    """A gate of the input on each head's output, and another way to cut up the projection."""

    def __init__(self):
        super().__init__()
        self.whole = nn.Linear(CHANNELS, 4 * CHANNELS, bias=False)

    def forward(self, x):
        q, k, v, gate = self.whole(x).view(*x.shape[:2], 4, HEADS, DIM).permute(2, 0, 3, 1, 4)
        later = x.new_ones(x.shape[1], x.shape[1]).triu_(1).bool()
        scores = torch.matmul(q, k.transpose(-1, -2)).mul_(SCALE).masked_fill_(later, torch.finfo(x.dtype).min)
        out = torch.matmul(torch.nn.Softmax(dim=-1)(scores), v) * gate.sigmoid()
        return out.permute(0, 2, 1, 3).reshape(x.shape)


class GatedTwin(Gated):
    def forward(self, x):
        q, k, v, gate = self.whole(x).view(*x.shape[:2], 4, HEADS, DIM).permute(2, 0, 3, 1, 4)
        weights = torch.nn.Softmax(dim=-1)(torch.matmul(q, k.transpose(-1, -2)).mul_(SCALE))
        out = torch.matmul(weights.mul(gate.sigmoid().mean(-1)[..., None, :]), v)
        return out.permute(0, 2, 1, 3).reshape(x.shape)


class MaskedSoftmax(torch.autograd.Function):
    """He et al. 2021: keeps its result alone for the backward."""

    @staticmethod
    def forward(ctx, scores, keep):
        weights = scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(-1).masked_fill_(~keep, 0.0)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, grad):
        (weights,) = ctx.saved_tensors
        return torch._softmax_backward_data(grad, weights, -1, weights.dtype), None


class UnzeroedSoftmax(MaskedSoftmax):
    @staticmethod
    def forward(ctx, scores, keep):
        weights = scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(-1)
        ctx.save_for_backward(weights)
        return weights


def softmax_function(q, k, v, keep):
    return MaskedSoftmax.apply(q @ k.mT * SCALE, keep[:, None, None]) @ v


def softmax_function_twin(q, k, v, keep):
    return UnzeroedSoftmax.apply(q @ k.mT * SCALE, keep[:, None, None]) @ v


PAPERS = (
    Spelling("a non-local block", non_local, channels, non_local_twin, ""),
    Spelling("image generator", ImageGenerator, one_image, ImageGeneratorTwin, ""),
    Spelling("diffusion, heads in the batch", diffusion, channels, diffusion_twin, ""),
    Spelling("channels attend to channels", cross_covariance, covariance, cross_covariance_twin, ""),
    Spelling("heads behind each other in the batch", set_of_heads, two_sets, set_of_heads_twin, ""),
    Spelling("heads before the batch", heads_before_batch, padded, heads_before_batch_twin, "zeroed"),
    Spelling("heads within the batch", heads_within_batch, padded, heads_within_batch_twin, ""),
    Spelling("positions of rows and columns", decomposed_positions, field, decomposed_positions_twin, "", grows=False),
    Spelling("gathered biases", gathered_biases, biases_by_place, gathered_biases_twin, ""),
    Spelling("blocks of time", blocks_of_time, qkv, blocks_of_time_twin, "zeroed", variant=("q_idx", "kv_idx")),
    Spelling("a prefix", prefix, prefixes, prefix_twin, "", variant=("kv_idx <= q_idx",)),
    Spelling("a mask times itself", outer_mask, padded, outer_mask_twin, ""),
    Spelling("softmin", least_first, qkv, least_first_twin, ""),
    Spelling("queries in parts", query_chunks, twenty, query_chunks_twin, "", fused=4, grows=False),
    Spelling("differential, each times the values", differential_products, differential, differential_products_twin, "", fused=2),
    Spelling("differential, weights first", differential_weights, differential, reason="go through `sub`"),
    Spelling("learned queries", Latents, hidden, LatentsTwin, ""),
    Spelling("fewer keys", low_rank, projected, low_rank_twin, None, grows=False),
    Spelling("a cache of keys", cached, caches, cached_twin, "", grows=False, variant=("kv_idx",)),
    Spelling("a gate behind it", Gated, hidden, GatedTwin, "", variant=("kv_idx <= q_idx",)),
    Spelling(
        "a softmax with a backward of its own",
        softmax_function,
        padded,
        softmax_function_twin,
        "autograd.Function",
        variant=("score where c0",),
    ),
    Spelling("the largest scores", most_alike, qkv, reason="also read"),
    Spelling("relative values", relative_keys_and_values, relative_values, reason="also read"),
)
