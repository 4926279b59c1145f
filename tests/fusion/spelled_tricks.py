"""Unusual but honest ways to write attention, and calls of torch's own attention functions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from spelling_harness import BATCH, DIM, HEADS, Spelling, draw, hidden, lengths_mask, qkv
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

# Eager flex_attention compiles itself, which no dispatch mode may watch; the reference is to run as it is written.
torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True

SCALE = DIM**-0.5


def grouped(length, batch=BATCH):
    q, k, v = qkv(length, batch)
    return q, k[:, :2].contiguous(), v[:, :2].contiguous()


def padded(length, batch=BATCH):
    return (*qkv(length, batch), lengths_mask(length, batch))


def padded_before(length, batch=BATCH):
    """With a logit for each head; the first rows attend to nothing."""
    return (*qkv(length, batch), lengths_mask(length, batch).flip(1), draw(HEADS, seed=8))


def biased(length, batch=BATCH):
    return (*qkv(length, batch), draw(1, HEADS, length, length, seed=6))


def cross(length, batch=BATCH):
    return (draw(batch, HEADS, 5, DIM, seed=1), *qkv(length, batch)[1:])


def grouped_five_dims(q, k, v):
    batch, heads, length, dim = q.shape
    q = q.view(batch, k.shape[1], heads // k.shape[1], length, dim)
    scores = torch.einsum("bghqd,bgkd->bghqk", q, k) * SCALE
    return torch.einsum("bghqk,bgkd->bghqd", scores.softmax(-1), v).reshape(batch, heads, length, dim)


def grouped_five_dims_twin(q, k, v):
    batch, heads, length, dim = q.shape
    q = q.view(batch, k.shape[1], heads // k.shape[1], length, dim)
    scores = torch.einsum("bghqd,bgkd->bghqk", q, k) * SCALE
    return torch.einsum("bghqk,bgkd->bghqd", scores.softmax(2), v).reshape(batch, heads, length, dim)


def broadcast_groups(q, k, v):
    q = q.unflatten(1, (2, 2))
    return ((q @ k[:, :, None].mT * SCALE).softmax(-1) @ v[:, :, None]).flatten(1, 2)


def broadcast_groups_twin(q, k, v):
    q = q.unflatten(1, (2, 2))
    return ((q @ k[:, :, None].mT * SCALE).softmax(-1).flip(-1) @ v[:, :, None]).flatten(1, 2)


def keys_times_queries(q, k, v):
    """Scores turned over: keys in rows, softmax down the columns."""
    return (k @ q.mT * SCALE).softmax(dim=-2).mT @ v


def keys_times_queries_twin(q, k, v):
    return (k @ q.mT * SCALE).softmax(dim=-1).mT @ v


def values_first(q, k, v):
    """The transposed product of transposed factors."""
    return (v.mT @ (q @ k.mT * SCALE).softmax(-1).mT).mT


def shifted(q, k, v):
    """What every score of a row has in common does not matter."""
    scores = q @ k.mT * SCALE
    return (scores - scores.amax(-1, keepdim=True).detach()).softmax(-1) @ v


def shifted_twin(q, k, v):
    """What every score of a column has in common does."""
    scores = q @ k.mT * SCALE
    return (scores - scores.amax(-2, keepdim=True)).softmax(-1) @ v


def learned_bias(q, k, v, bias):
    return torch.softmax(q @ k.mT * SCALE + bias, -1) @ v


def learned_bias_twin(q, k, v, bias):
    return torch.softmax(q @ k.mT * SCALE, -1) @ (bias @ v).sigmoid_(), bias.softmax(-1)


def bias_of_distance(q, k, v):
    position = torch.arange(q.shape[2], device=q.device)
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, device=q.device)
    bias = -(position[:, None] - position).abs() * slopes[:, None, None]
    return torch.softmax(q @ k.mT * SCALE + bias.to(q.dtype), -1) @ v


def bias_of_distance_twin(q, k, v):
    """Dropout of scores is no dropout of weights."""
    return torch.softmax(F.dropout(q @ k.mT * SCALE, 0.0).cummax(-1).values, -1) @ v


def in_place(q, k, v, keep):
    scores = q @ k.mT
    scores *= SCALE
    scores.masked_fill_(~keep[:, None, None], -torch.inf)
    return scores.softmax(-1) @ v


def in_place_twin(q, k, v, keep):
    """A write through a view changes the first head's scores, and nobody reads its result."""
    scores = q @ k.mT * SCALE
    scores[:, :1].mul_(2)
    return scores.softmax(-1) @ v


def chunked_projection(q, k, v):
    both = torch.cat([k, v], -1)
    k, v = both.chunk(2, -1)
    return (q.mul(SCALE) @ k.swapaxes(-1, -2)).softmax(-1).__matmul__(v)


def temperature_of_queries(q, k, v):
    """A temperature from the query's position."""
    length = q.shape[2]
    heat = torch.log(torch.arange(length, device=q.device, dtype=q.dtype) + 2.0)
    return torch.softmax(q @ k.mT * SCALE * heat[:, None], -1) @ v


def temperature_of_queries_twin(q, k, v):
    """A temperature from all scores."""
    scores = q @ k.mT * SCALE
    return torch.softmax(scores / scores.std(), -1) @ v


def documents(length, batch=BATCH):
    return (*qkv(length, batch), (torch.arange(length) // 7).expand(batch, length).contiguous())


def same_document(q, k, v, document):
    same = document[:, None, :, None] == document[:, None, None, :]
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return (q @ k.mT * SCALE).masked_fill(~(same & causal), torch.finfo(q.dtype).min).softmax(-1) @ v


def same_document_twin(q, k, v, document):
    same = document[:, None, :, None] == document[:, None, None, :]
    weights = (q @ k.mT * SCALE).softmax(-1) * same
    return (weights / weights.sum(-2, keepdim=True).clamp(min=1e-3)) @ v


def sdpa(q, k, v, keep):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None], scale=0.3)


def sdpa_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def flex(q, k, v):
    return flex_attention(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score - (q_idx - kv_idx).abs())


class TorchModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(HEADS * DIM, HEADS, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


def relaxed(q, k, v, mask):
    """Ding et al. 2021, section 2.4: scores are made small before the row's largest is taken off."""
    scores = (q / math.sqrt(DIM) @ k.mT + mask) / 32
    return torch.softmax((scores - scores.amax(-1).unsqueeze(-1)) * 32, -1) @ v


def relaxed_twin(q, k, v, mask):
    scores = (q / math.sqrt(DIM) @ k.mT + mask) / 32
    return torch.softmax((scores - scores.amax(-2).unsqueeze(-2)) * 32, -1) @ v


def half_weights(q, k, v):
    """Weights go through half precision."""
    return (q @ k.mT * SCALE).softmax(-1).to(torch.bfloat16).to(v.dtype) @ v


def weights_too(q, k, v):
    weights = torch.softmax(q @ k.mT * SCALE, -1)
    return weights @ v, weights


def mean_weights_too(q, k, v):
    weights = torch.softmax(q @ k.mT * SCALE, -1)
    return weights @ v, weights.mean(1)


def sink_of_logsumexp(q, k, v, keep, sinks):
    """A logit without a value, by what it takes from each row's sum, computed before the product with the values."""
    length = q.shape[-2]
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    low = torch.finfo(q.dtype).min
    scores = q @ k.transpose(2, 3) * SCALE + torch.where(causal & keep[:, None, None], 0.0, low).to(q.dtype)
    share = (torch.logsumexp(scores, dim=-1) - sinks.view(1, -1, 1)).float().sigmoid()
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v) * share.unsqueeze(-1).to(q.dtype)


def sink_of_logsumexp_twin(q, k, v, keep, sinks):
    # the sums of columns
    scores = q @ k.transpose(2, 3) * SCALE
    share = (torch.logsumexp(scores, dim=-2) - sinks.view(1, -1, 1)).float().sigmoid()
    return (F.softmax(scores, dim=-1) @ v) * share.unsqueeze(-1).to(q.dtype)


def merged(q, k, v, keep):
    """Two attentions over parts of the keys, merged by their sums."""
    parts = [(q @ k[:, :, part].mT * SCALE, v[:, :, part]) for part in (slice(0, 9), slice(9, None))]
    sums = [scores.logsumexp(-1, keepdim=True) for scores, _ in parts]
    total = torch.logaddexp(*sums)
    return sum((scores.softmax(-1) @ values) * (part_lse - total).exp() for (scores, values), part_lse in zip(parts, sums, strict=True))


def zeroed_again(q, k, v, keep):
    hidden = keep[:, None, None].expand(-1, 1, q.shape[2], -1) == torch.tensor(False)
    scores = torch.masked_fill(q @ k.mT * SCALE, hidden, torch.scalar_tensor(-torch.inf, dtype=q.dtype))
    return torch.masked_fill(scores.softmax(-1), hidden, torch.scalar_tensor(0, dtype=q.dtype)) @ v


def zeroed_again_twin(q, k, v, keep):
    hidden = keep[:, None, None].expand(-1, 1, q.shape[2], -1) == torch.tensor(False)
    scores = torch.masked_fill(q @ k.mT * SCALE, hidden, torch.scalar_tensor(-torch.inf, dtype=q.dtype))
    return torch.masked_fill(scores.softmax(-1), hidden, torch.scalar_tensor(0.01, dtype=q.dtype)) @ v


def one_query(q, k, v):
    """The last query alone, as a decoder asks."""
    return torch.softmax(q[:, :, -1:] @ k.mT / math.sqrt(DIM), -1) @ v


def one_query_twin(q, k, v):
    return torch.softmax((q[:, :, -1:] @ k.mT / math.sqrt(DIM)).mT, -1).mT @ v


TRICKS = (
    Spelling("grouped heads in five dimensions", grouped_five_dims, grouped, grouped_five_dims_twin, ""),
    Spelling("grouped heads by broadcasting", broadcast_groups, grouped, broadcast_groups_twin, ""),
    Spelling("keys times queries", keys_times_queries, qkv, keys_times_queries_twin, ""),
    Spelling("values first", values_first, qkv),
    Spelling("minus the row's largest", shifted, qkv, shifted_twin, ""),
    Spelling("a learned bias", learned_bias, biased),
    Spelling("a bias of distance", bias_of_distance, qkv, bias_of_distance_twin, "", variant=("q_idx", "kv_idx")),
    Spelling("in place", in_place, padded, in_place_twin, "written"),
    Spelling("one tensor for keys and values", chunked_projection, qkv),
    Spelling("cross attention of few queries", one_query, cross, one_query_twin),
    Spelling("a temperature of queries", temperature_of_queries, qkv, temperature_of_queries_twin, ""),
    Spelling("documents in a row", same_document, documents, same_document_twin, ""),
    Spelling("F.scaled_dot_product_attention, a mask", sdpa, padded),
    Spelling("F.scaled_dot_product_attention, causal, grouped", sdpa_causal, grouped, variant=("q_idx", "kv_idx")),
    Spelling("flex_attention", flex, qkv, variant=("q_idx", "kv_idx"), dtypes=(torch.float32,), trains_on_cpu=False),
    Spelling("nn.MultiheadAttention", TorchModule, hidden),
    Spelling("a sink by the logsumexp", sink_of_logsumexp, padded_before, sink_of_logsumexp_twin, "read"),
    Spelling("two attentions merged by their sums", merged, padded, fused=2),
    Spelling("masked and zeroed by 0-d tensors", zeroed_again, padded, zeroed_again_twin, "replaced"),
    Spelling("scores made small for a while", relaxed, biased, relaxed_twin, "amax"),
    Spelling("weights through another dtype", half_weights, qkv, reason="rounded to bfloat16", dtypes=(torch.float32,)),
    Spelling("weights returned too", weights_too, qkv, reason="also returned"),
    Spelling("the mean of weights returned too", mean_weights_too, qkv, reason="also read"),
)
