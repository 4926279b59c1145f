"""Attention by other names: products summed by hand or over odd dimensions, columns beside the scores, logarithms of sums, grids."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from spelling_harness import BATCH, DIM, HEADS, Spelling, draw, hidden, lengths_mask, qkv

SCALE = DIM**-0.5
CAUSAL = ("score where kv_idx <= q_idx",)


def one_head(length, batch=BATCH):
    return tuple(t[0, 0].contiguous() for t in qkv(length, batch))


def sinks(length, batch=BATCH):
    return (*qkv(length, batch), draw(HEADS, 1, 1, seed=7))


def sink_first(q, k, v, sink):
    scores = q @ k.mT * SCALE
    beside = torch.cat([sink.expand(scores.shape[0], -1, scores.shape[2], 1), scores], -1)
    return beside.softmax(-1)[..., 1:] @ v


def sink_first_twin(q, k, v, sink):
    scores = q @ k.mT * SCALE
    beside = torch.cat([sink.expand(scores.shape[0], -1, scores.shape[2], 1), scores], -1)
    return beside.softmax(-1)[..., :-1] @ v


def one_beside(q, k, v):
    """Miller 2023: weights may sum to less than one."""
    raised = torch.exp(q @ k.mT * SCALE)
    return (raised / (1 + raised.sum(-1, keepdim=True))) @ v


def one_beside_twin(q, k, v):
    raised = torch.exp(q @ k.mT * SCALE)
    return (raised / (2 + raised.sum(-1, keepdim=True))) @ v


def one_beside_late(q, k, v):
    raised = torch.exp(torch.einsum("bhid,bhjd->bhij", q, k) * SCALE)
    return torch.einsum("bhij,bhjd->bhid", raised, v) / (raised.sum(-1) + 1.0).unsqueeze(-1)


def one_beside_late_twin(q, k, v):
    raised = torch.exp(torch.einsum("bhid,bhjd->bhij", q, k) * SCALE)
    return torch.einsum("bhij,bhjd->bhid", raised, v) / (raised.sum(-2) + 1.0).unsqueeze(-1)


def padded_scores(q, k, v):
    return F.pad(q @ k.mT * SCALE, (0, 1)).softmax(-1)[..., :-1] @ v


def padded_scores_twin(q, k, v):
    return F.pad(q @ k.mT * SCALE, (0, 2)).softmax(-1)[..., :-2] @ v


def padded_before(q, k, v):
    return F.pad(q @ k.mT * SCALE, (1, 0), value=-0.5).softmax(-1)[..., 1:] @ v


def padded_before_twin(q, k, v):
    return F.pad(q @ k.mT * SCALE, (1, 0), value=-0.5).softmax(-1)[..., :-1] @ v


def logarithm_by_hand(q, k, v):
    scores = q @ k.mT * SCALE
    largest = scores.amax(-1, keepdim=True)
    logarithm = largest + torch.log(torch.exp(scores - largest).sum(-1, keepdim=True))
    return torch.exp(scores - logarithm) @ v


def logarithm_by_hand_twin(q, k, v):
    """The same values, but another gradient: the largest score counts once more."""
    scores = q @ k.mT * SCALE
    largest = scores.amax(-1, keepdim=True)
    logarithm = largest + torch.log(torch.exp(scores - largest.detach()).sum(-1, keepdim=True))
    return torch.exp(scores - logarithm) @ v


def logarithm_apart(q, k, v):
    scores = q @ k.mT * SCALE
    return torch.exp(scores - scores.logsumexp(-1)[..., None]) @ v


def logarithm_apart_twin(q, k, v):
    scores = q @ k.mT * SCALE
    return torch.exp(scores - scores.logsumexp(-1)[..., None, :]) @ v


def logarithm_without_gradient_twin(q, k, v):
    scores = q @ k.mT * SCALE
    with torch.no_grad():
        logarithm = scores.logsumexp(-1, keepdim=True)
    return torch.exp(scores - logarithm) @ v


def summed_by_hand(q, k, v):
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) * SCALE
    return (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


def summed_by_hand_twin(q, k, v):
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) * SCALE
    return (scores.softmax(-2).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


def inner_products(q, k, v):
    return torch.tensordot(F.softmax(torch.inner(q, k) * SCALE, dim=1), v, dims=1)


def inner_products_twin(q, k, v):
    return torch.tensordot(F.softmax(torch.inner(q, k) * SCALE, dim=0), v, dims=1)


def dotted(q, k, v):
    return torch.tensordot(
        torch.tensordot(v, F.softmax(torch.tensordot(k, q, ([1], [1])) * SCALE, 0), ([0], [0])).t(), torch.eye(DIM).to(v), 1
    )


def dotted_twin(q, k, v):
    return torch.tensordot(v, F.softmax(torch.tensordot(k, q, ([1], [1])) * SCALE, 1), ([0], [0])).t()


def added_product(q, k, v):
    nothing = torch.empty(1, 1, dtype=q.dtype, device=q.device)
    return torch.addmm(nothing, q, k.t(), beta=0, alpha=SCALE).softmax(-1).mm(v)


def added_product_twin(q, k, v):
    nothing = torch.empty(1, 1, dtype=q.dtype, device=q.device)
    return torch.addmm(nothing, q, k.t(), beta=0, alpha=SCALE).softmax(0).mm(v)


def assigned(q, k, v):
    scores = q @ k.mT * SCALE
    later = torch.ones(q.shape[2], q.shape[2], device=q.device).triu(1)
    scores[:, :, later == 1] = float("-inf")
    return scores.softmax(-1) @ v


def assigned_twin(q, k, v):
    scores = q @ k.mT * SCALE
    before = scores[:, :1]
    later = torch.ones(q.shape[2], q.shape[2], device=q.device).triu(1)
    scores[:, :, later == 1] = -20.0
    return scores.softmax(-1) @ v, before * 2


def grid(q, k, v):
    places = torch.arange(q.shape[2], device=q.device)
    columns, rows = torch.meshgrid(places, places, indexing="xy")
    return (q @ k.mT * SCALE).masked_fill(columns > rows, float("-inf")).softmax(-1) @ v


def grid_twin(q, k, v):
    places = torch.arange(q.shape[2], device=q.device)
    columns, rows = torch.meshgrid(places, places, indexing="xy")
    return (q @ k.mT * SCALE).softmax(-1).masked_fill(columns > rows, 0.0) @ v


def counted(q, k, v):
    ones = torch.ones(q.shape[2], q.shape[2], dtype=torch.long, device=q.device)
    keep = ones.cumsum(0) >= ones.cumsum(1)
    return torch.where(keep, q @ k.mT * SCALE, float("-inf")).softmax(-1) @ v


def counted_twin(q, k, v):
    ones = torch.ones(q.shape[2], q.shape[2], dtype=torch.long, device=q.device)
    keep = ones.cumsum(0) >= ones.cumsum(1)
    return torch.where(keep, (q @ k.mT * SCALE).softmax(-1), 0.0) @ v


def kept_or_low(q, k, v):
    """Radford et al. 2019, as first published: what is not kept becomes minus a large number."""
    scores = q @ k.mT * SCALE
    keep = torch.ones(q.shape[2], q.shape[2], device=q.device).tril().to(scores.dtype)
    return (scores * keep - 60000.0 * (1 - keep)).softmax(-1) @ v


def kept_or_low_twin(q, k, v):
    scores = q @ k.mT * SCALE
    keep = torch.ones(q.shape[2], q.shape[2], device=q.device).tril().to(scores.dtype)
    return (scores * keep - 60000.0 * (1 - keep)).softmax(1) @ v


def images(length, batch=BATCH):
    return tuple(draw(batch, batch, HEADS, length, DIM, seed=seed) for seed in (1, 2, 3))


def five_dimensions(q, k, v):
    return (q @ k.transpose(3, 4) * SCALE).softmax(4) @ v


def five_dimensions_twin(q, k, v):
    return (q @ k.transpose(3, 4) * SCALE).softmax(1) @ v


def length_first(length, batch=BATCH):
    return tuple(draw(length, batch, HEADS, DIM, seed=seed) for seed in (1, 2, 3))


def odd_letters(q, k, v):
    weights = torch.einsum("zbha,ybha->yzbh", q, k).mul(SCALE).softmax(0)
    return torch.einsum("yzbh,ybhc->zbhc", weights, v)


def odd_letters_twin(q, k, v):
    weights = torch.einsum("zbha,ybha->yzbh", q, k).mul(SCALE).softmax(1)
    return torch.einsum("yzbh,ybhc->zbhc", weights, v)


def by_lengths(q, k, v):
    scores = q @ k.mT / (q.norm(dim=-1, keepdim=True) * k.norm(dim=-1, keepdim=True).mT)
    return (scores * 10).softmax(-1) @ v


def by_lengths_twin(q, k, v):
    scores = q @ k.mT
    return (scores / scores.norm(dim=-1, keepdim=True)).softmax(-1) @ v


def null_padded(length, batch=BATCH):
    return (*qkv(length, batch), lengths_mask(length, batch), draw(2, DIM, seed=7))


def null_key(q, k, v, keep, null):
    batch, heads = q.shape[:2]
    null_k, null_v = (t.expand(batch, heads, 1, DIM) for t in null.unbind(0))
    k, v = torch.cat((null_k, k), -2), torch.cat((null_v, v), -2)
    keep = F.pad(keep, (1, 0), value=True)
    scores = torch.einsum("bhid,bhjd->bhij", q * SCALE, k).masked_fill(~keep[:, None, None], -torch.finfo(q.dtype).max)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def null_key_twin(q, k, v, keep, null):
    batch, heads = q.shape[:2]
    null_k, null_v = (t.expand(batch, heads, 1, DIM) for t in null.unbind(0))
    k, v = torch.cat((null_k, k), -2), torch.cat((v, null_v), -2)
    keep = F.pad(keep, (1, 0), value=True)
    scores = torch.einsum("bhid,bhjd->bhij", q * SCALE, k).masked_fill(~keep[:, None, None], -torch.finfo(q.dtype).max)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-2), v)


def heads_on_the_batch(x):
    """Vaswani et al. 2017, as ported from code that has three dimensions only."""
    q, k, v = (torch.cat(t.split(DIM, -1), 0) for t in (x, x.cos(), x.sin()))
    out = F.softmax(q.bmm(k.transpose(1, 2)) / math.sqrt(DIM), 2).bmm(v)
    return torch.cat(out.chunk(HEADS, 0), -1)


def heads_on_the_batch_twin(x):
    q, k, v = (torch.cat(t.split(DIM, -1), 0) for t in (x, x.cos(), x.sin()))
    out = F.softmax(q.bmm(k.transpose(1, 2)) / math.sqrt(DIM), 0).bmm(v)
    return torch.cat(out.chunk(HEADS, 0), -1)


def twenty(length, batch=BATCH):
    return qkv(20, batch)


def unfolded(q, k, v):
    """Blocks of four queries and the eight keys around them."""
    batch, heads, length, dim = q.shape
    around_k, around_v = (F.pad(t, (0, 0, 4, 4)).unfold(2, 12, 4) for t in (k, v))
    scores = torch.einsum("bhnid,bhndj->bhnij", q.reshape(batch, heads, length // 4, 4, dim), around_k) * SCALE
    places = F.pad(torch.arange(length, device=q.device), (4, 4), value=-1).unfold(0, 12, 4)
    scores = scores.masked_fill((places < 0)[:, None], float("-inf"))
    return torch.einsum("bhnij,bhndj->bhnid", scores.softmax(-1), around_v).reshape(q.shape)


ROWS = (
    Spelling("a sink before the scores", sink_first, sinks, sink_first_twin, "concatenated"),
    Spelling("one beside the sum", one_beside, qkv, one_beside_twin, None),
    Spelling("one beside the sum, divided late", one_beside_late, qkv, one_beside_late_twin, None),
    Spelling("scores with a column of zeros", padded_scores, qkv, padded_scores_twin, "more than the keys"),
    Spelling("scores behind a column of one number", padded_before, qkv, padded_before_twin, "more than the keys"),
    Spelling("a logarithm of the sum by hand", logarithm_by_hand, qkv, logarithm_by_hand_twin, None),
    Spelling("a logsumexp that gets its dimension back", logarithm_apart, qkv, logarithm_apart_twin, None),
    Spelling("a logsumexp with its gradient", logarithm_apart, qkv, logarithm_without_gradient_twin, None),
    Spelling("products summed by hand", summed_by_hand, qkv, summed_by_hand_twin, "the softmax is over dimension"),
    Spelling("inner products", inner_products, one_head, inner_products_twin, "the softmax is over dimension", grows=False),
    Spelling("tensordot over first dimensions", dotted, one_head, dotted_twin, "the softmax is over dimension"),
    Spelling("addmm", added_product, one_head, added_product_twin, "the softmax is over dimension"),
    Spelling("assigned behind whole dimensions", assigned, qkv, assigned_twin, "written", variant=CAUSAL),
    Spelling("a grid of positions", grid, qkv, grid_twin, "zeroed", variant=CAUSAL),
    Spelling("counted positions", counted, qkv, counted_twin, "zeroed", variant=CAUSAL),
    Spelling("kept, or minus a large number", kept_or_low, qkv, kept_or_low_twin, "", variant=CAUSAL),
    Spelling("five dimensions, two of one size", five_dimensions, images, five_dimensions_twin, "the softmax is over dimension"),
    Spelling("einsum with letters in odd orders", odd_letters, length_first, odd_letters_twin, "the softmax is over dimension"),
    Spelling("cosines by division", by_lengths, qkv, by_lengths_twin, ""),
    Spelling("a key that is always there", null_key, null_padded, null_key_twin, "the softmax is over dimension"),
    Spelling("heads on the batch", heads_on_the_batch, hidden, heads_on_the_batch_twin, "the softmax is over dimension"),
    Spelling("windows by unfold", unfolded, twenty, grows=False),
)
