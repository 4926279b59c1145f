"""The plain forms: scale, mask, dropout and layout as written in papers, tutorials and ports, with and without each part."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from spelling_harness import BATCH, DIM, HEADS, Spelling, draw, lengths_mask, qkv

SCALE = 1 / math.sqrt(DIM)


def bshd(length, batch=BATCH):
    """[B, S, H, D], three times."""
    return tuple(t.transpose(1, 2).contiguous() for t in qkv(length, batch))


def additive(length, batch=BATCH):
    return (*qkv(length, batch), (~lengths_mask(length, batch)).float()[:, None, None] * -100.0)


def additive_bshd(length, batch=BATCH):
    return (*bshd(length, batch), (~lengths_mask(length, batch)).float()[:, None, None] * -100.0)


def padded(length, batch=BATCH):
    return (*qkv(length, batch), lengths_mask(length, batch))


def padded_bshd(length, batch=BATCH):
    return (*bshd(length, batch), lengths_mask(length, batch))


def flat(length, batch=BATCH):
    """[B * H, S, D]."""
    return tuple(t.flatten(0, 1) for t in qkv(length, batch))


def divided(q, k, v):
    return torch.matmul(q, k.transpose(-2, -1)).div(math.sqrt(DIM)).softmax(dim=-1).matmul(v)


def divided_twin(q, k, v):
    return torch.matmul(q, k.transpose(-2, -1)).div(math.sqrt(DIM)).softmax(dim=-2).matmul(v)


def multiplied(q, k, v):
    return torch.softmax(SCALE * (q @ k.mT), -1) @ v


def multiplied_twin(q, k, v):
    return torch.sigmoid(SCALE * (q @ k.mT)) @ v


def divided_dropout(q, k, v):
    return F.dropout(F.softmax(torch.matmul(q, k.transpose(-2, -1)) / 3.0, dim=-1), p=0.0) @ v


def divided_dropout_twin(q, k, v):
    return F.softmax(F.dropout(torch.matmul(q, k.transpose(-2, -1)) / 3.0, p=0.0), dim=1) @ v


def multiplied_dropout(q, k, v):
    weights = torch.nn.functional.dropout(torch.softmax((q @ k.transpose(-1, -2)).mul(0.25), dim=-1), 0.5, training=False)
    return torch.matmul(weights, v)


def multiplied_dropout_twin(q, k, v):
    weights = torch.nn.functional.dropout(torch.softmax((q @ k.transpose(-1, -2)).mul(0.25), dim=-1), 0.5, training=False)
    return torch.matmul(weights.mT, v)


def added_mask(q, k, v, mask):
    return torch.softmax(q @ k.mT / math.sqrt(DIM) + mask, dim=-1) @ v


def added_mask_twin(q, k, v, mask):
    return (torch.softmax(q @ k.mT / math.sqrt(DIM), dim=-1) + mask) @ v


def added_mask_dropout(q, k, v, mask):
    return F.dropout(torch.softmax(torch.add(mask, torch.mul(q, SCALE) @ k.transpose(-2, -1)), -1), 0.0, True) @ v


def added_mask_dropout_twin(q, k, v, mask):
    scores = torch.add(mask, torch.mul(q, SCALE) @ k.transpose(-2, -1))
    return F.dropout(torch.softmax(scores, -1), 0.0, True) @ v, scores


def upcast(q, k, v):
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)) / 2.5
    return F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).type_as(q), p=0.1, training=False) @ v


def upcast_twin(q, k, v):
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)) / 2.5
    return F.softmax(scores, dim=-1, dtype=torch.float32).type_as(q).detach() @ v


def upcast_no_dropout(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.softmax((q @ k.transpose(2, 3) * SCALE).float(), -1).to(v.dtype) @ v


def upcast_no_dropout_twin(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.log_softmax((q @ k.transpose(2, 3) * SCALE).float(), -1).to(v.dtype) @ v


def scaled_query(q, k, v):
    q, k, v = (t.permute([0, 2, 1, 3]) for t in (q, k, v))
    return F.dropout((q.div(math.sqrt(DIM)) @ k.transpose(-2, -1)).softmax(-1), 0.0) @ v


def scaled_query_twin(q, k, v):
    # keys turned over in memory, not transposed
    q, k, v = (t.permute([0, 2, 1, 3]) for t in (q, k, v))
    turned = k.reshape(k.shape[0], k.shape[1], k.shape[3], k.shape[2])
    return F.dropout((q.div(math.sqrt(DIM)) @ turned).softmax(-1), 0.0) @ v


def scaled_query_upcast(q, k, v):
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    q = q / math.sqrt(q.size(-1))
    return (q @ k.transpose(-2, -1)).to(torch.float32).softmax(-1).to(v.dtype) @ v


def scaled_query_upcast_twin(q, k, v):
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    q = q / math.sqrt(q.size(-1))
    return (q @ k.transpose(-2, -1)).to(torch.float32).softmax(-2).to(v.dtype) @ v


def scaled_key(q, k, v):
    return torch.softmax(q @ (k * SCALE).mT, -1) @ v


def scaled_key_twin(q, k, v):
    return torch.softmax(q @ (k * SCALE).mT, -1).square() @ v


def permuted_out(q, k, v):
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    out = torch.matmul(torch.matmul(q, k.permute(0, 1, 3, 2)).div(2.0).softmax(dim=-1), v)
    return out.permute(0, 2, 1, 3).contiguous()


def permuted_out_twin(q, k, v):
    # attends over heads at each position: [B, S, H, D] as it came
    out = torch.matmul(torch.matmul(q, k.permute(0, 1, 3, 2)).div(2.0).softmax(dim=-3), v)
    return out.permute(0, 2, 1, 3).contiguous()


def three_dims(q, k, v):
    return torch.bmm(F.dropout(torch.bmm(q, k.transpose(1, 2)).softmax(dim=-1), p=0.0), v)


def three_dims_twin(q, k, v):
    return torch.bmm(F.dropout(torch.bmm(q, k.transpose(1, 2)).softmax(dim=0), p=0.0), v)


def permuted_mask(q, k, v, mask):
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    return ((q @ k.transpose(-2, -1)).div(3.0) + mask).softmax(dim=-1).matmul(v)


def permuted_mask_twin(q, k, v, mask):
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    weights = ((q @ k.transpose(-2, -1)).div(3.0) + mask).softmax(dim=-1)
    return weights.cumsum(-1).matmul(v)


def filled_mask(q, k, v, keep):
    batch, length = keep.shape
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(DIM)
    hidden = (keep == 0).view(batch, 1, 1, length).expand_as(scores)
    return torch.softmax(scores.masked_fill(hidden, -float("inf")), dim=-1) @ v


def filled_mask_twin(q, k, v, keep):
    batch, length = keep.shape
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(DIM), dim=-1)
    hidden = (keep == 0).view(batch, 1, 1, length).expand_as(weights)
    return weights.masked_fill(hidden, 0.0) @ v


def filled_mask_dropout(q, k, v, keep):
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    scores = (q / math.sqrt(DIM)) @ k.transpose(-2, -1)
    hidden = (keep == 0).view(keep.shape[0], 1, 1, keep.shape[1]).expand_as(scores)
    return F.dropout(torch.softmax(scores.masked_fill(hidden, -float("inf")), dim=-1), p=0.0) @ v


def filled_mask_dropout_twin(q, k, v, keep):
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    scores = (q / math.sqrt(DIM)) @ k.transpose(-2, -1)
    hidden = (keep == 0).view(keep.shape[0], 1, 1, keep.shape[1]).expand_as(scores)
    return F.dropout(torch.softmax(scores, dim=-1).masked_fill(hidden, 1.0), p=0.0) @ v


def filled_lowest(q, k, v, keep):
    scores = torch.matmul(q, k.transpose(2, 3)) * SCALE
    scores = scores.masked_fill(~keep[:, None, None, :], torch.finfo(scores.dtype).min)
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v).transpose(1, 2).contiguous()


def filled_lowest_twin(q, k, v, keep):
    scores = torch.matmul(q, k.transpose(2, 3)) * SCALE
    scores.masked_fill_(~keep[:, None, None, :], torch.finfo(scores.dtype).min)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous(), scores.sum()


def kept_cache(q, k, v):
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    length = q.shape[-2]
    causal = torch.ones((length, length), dtype=torch.bool, device=q.device).tril()
    scores = q @ k.transpose(-1, -2) / torch.full([], math.sqrt(DIM), dtype=q.dtype, device=q.device)
    lowest = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
    weights = F.dropout(torch.where(causal, scores, lowest).softmax(dim=-1), 0.2, training=False)
    return weights @ v, k, v


def kept_cache_twin(q, k, v):
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    length = q.shape[-2]
    causal = torch.ones((length, length), dtype=torch.bool, device=q.device).tril()
    scores = q @ k.transpose(-1, -2) / torch.full([], math.sqrt(DIM), dtype=q.dtype, device=q.device)
    weights = torch.where(causal, scores.softmax(dim=-1), 0.0)
    return weights @ v, k, v


def where_then_added(q, k, v, mask):
    length = q.shape[-2]
    causal = torch.tril(torch.ones(length, length, device=q.device)).bool().view(1, 1, length, length)
    scores = torch.matmul(q, k.transpose(-1, -2)) / torch.full([], v.size(-1) ** 0.5, dtype=q.dtype, device=q.device)
    scores = torch.where(causal, scores, torch.full([], torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)) + mask
    return F.dropout(F.softmax(scores, dim=-1).type(v.dtype), 0.0) @ v


def where_then_added_twin(q, k, v, mask):
    length = q.shape[-2]
    causal = torch.tril(torch.ones(length, length, device=q.device)).bool().view(1, 1, length, length)
    scores = torch.matmul(q, k.transpose(-1, -2)) / torch.full([], v.size(-1) ** 0.5, dtype=q.dtype, device=q.device)
    scores = torch.where(causal, scores, torch.full([], torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)) + mask
    return F.softmax(scores, dim=-1).type(v.dtype) @ v, scores.amax(-1)


def baddbmm(q, k, v, bias):
    scores = torch.baddbmm(bias, q, k.mT, beta=0.5, alpha=SCALE)
    return torch.bmm(scores.softmax(-1), v)


def baddbmm_twin(q, k, v, bias):
    scores = torch.baddbmm(bias, q, k.mT, beta=0.5, alpha=SCALE)
    return torch.baddbmm(bias, scores.softmax(-1), scores)


def einsum(q, k, v):
    weights = torch.einsum("bihd,bjhd->bhij", q, k).mul(SCALE).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def einsum_twin(q, k, v):
    weights = torch.einsum("bihd,bjhd->bhij", q, k).mul(SCALE).softmax(-1)
    return torch.einsum("bhij,bihd->bjhd", weights, v)


def by_hand(q, k, v):
    scores = q @ k.mT * SCALE
    raised = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return (raised / raised.sum(dim=-1, keepdim=True)) @ v


def by_hand_twin(q, k, v):
    scores = q @ k.mT * SCALE
    raised = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return (raised / raised.sum(dim=-2, keepdim=True)) @ v


def late_division(q, k, v):
    scores = q @ k.mT * SCALE
    raised = (scores - scores.amax(-1, keepdim=True)).exp()
    return (raised @ v) / raised.sum(-1, keepdim=True)


def late_division_twin(q, k, v):
    scores = q @ k.mT * SCALE
    raised = (scores - scores.amax(-1, keepdim=True)).exp()
    return (raised @ v) / (1 + raised.sum(-1, keepdim=True))


def safe(q, k, v, keep):
    scores = (q @ k.mT * SCALE).masked_fill(~keep[:, None, None], -torch.inf)
    weights = torch.softmax(scores, -1)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.where(nothing, torch.zeros_like(weights), weights) @ v


def safe_twin(q, k, v, keep):
    scores = (q @ k.mT * SCALE).masked_fill(~keep[:, None, None], -torch.inf)
    weights = torch.softmax(scores, -1)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.where(nothing, weights, torch.zeros_like(weights)) @ v


def biased_3d(length, batch=BATCH):
    return (*flat(length, batch), draw(batch * HEADS, length, length, seed=6))


FORMS = (
    Spelling("divided by a constant", divided, qkv, divided_twin, "the softmax is over dimension"),
    Spelling("multiplied by a constant", multiplied, qkv, multiplied_twin),
    Spelling("divided, with dropout of nothing", divided_dropout, qkv, divided_dropout_twin, ""),
    Spelling("multiplied, dropout off", multiplied_dropout, qkv, multiplied_dropout_twin, ""),
    Spelling("an added mask", added_mask, additive, added_mask_twin, ""),
    Spelling("an added mask first, dropout of nothing, scaled queries", added_mask_dropout, additive, added_mask_dropout_twin, ""),
    Spelling("from [B, S, H, D], softmax in float32, dropout off", upcast, bshd, upcast_twin, ""),
    Spelling("from [B, S, H, D], scores in float32", upcast_no_dropout, bshd, upcast_no_dropout_twin),
    Spelling("divided queries", scaled_query, bshd, scaled_query_twin, twin_fused=1),
    Spelling("divided queries, scores in float32", scaled_query_upcast, bshd, scaled_query_upcast_twin, "the softmax is over dimension"),
    Spelling("scaled keys", scaled_key, qkv, scaled_key_twin, ""),
    Spelling("permuted in and out", permuted_out, bshd, permuted_out_twin),
    Spelling("three dimensions, unscaled", three_dims, flat, three_dims_twin, ""),
    Spelling("permuted, an added mask", permuted_mask, additive_bshd, permuted_mask_twin, ""),
    Spelling("mask == 0 filled with -inf", filled_mask, padded_bshd, filled_mask_twin, ""),
    Spelling("mask == 0 filled with -inf, dropout of nothing", filled_mask_dropout, padded_bshd, filled_mask_dropout_twin, "replaced"),
    Spelling("filled with the lowest number", filled_lowest, padded, filled_lowest_twin, ""),
    Spelling("where causal, 0-d tensors, keys and values returned", kept_cache, bshd, kept_cache_twin, "", variant=("q_idx", "kv_idx")),
    Spelling("where causal, then an added mask", where_then_added, additive, where_then_added_twin, ""),
    Spelling("baddbmm", baddbmm, biased_3d, baddbmm_twin, ""),
    Spelling("einsum", einsum, bshd, einsum_twin),
    Spelling("softmax by hand", by_hand, qkv, by_hand_twin),
    Spelling("divided after the product with values", late_division, qkv, late_division_twin),
    Spelling("zeros where nothing is attended", safe, padded, safe_twin, "weights of rows with scores are zeroed"),
)
