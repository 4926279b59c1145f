"""Attention as papers' and people's own code has it: relative positions by skewing, clipped scores, chunks, quotients by hand."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from spelling_harness import BATCH, DIM, HEADS, Spelling, draw, qkv

SCALE = DIM**-0.5


def less_logsumexp(q, k, v):
    scores = q @ k.mT * SCALE
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ v


def less_logsumexp_twin(q, k, v):
    scores = q @ k.mT * SCALE
    return torch.exp(scores - torch.logsumexp(scores, -2, keepdim=True)) @ v


def guarded_sum(q, k, v):
    """A sum that cannot be zero is kept from it."""
    scores = q @ k.mT * SCALE
    raised = (scores - scores.max(dim=-1, keepdim=True).values).exp()
    return (raised / raised.sum(-1, keepdim=True).clamp(min=1e-6)) @ v


def guarded_sum_twin(q, k, v):
    scores = q @ k.mT * SCALE
    raised = (scores - scores.max(dim=-1, keepdim=True).values).exp()
    return (raised / raised.sum(-1, keepdim=True).clamp(min=2.0)) @ v


def small_added(q, k, v):
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * SCALE
    raised = torch.exp(scores - scores.amax(dim=-1, keepdim=True).detach())
    return torch.einsum("b h i j, b h j d -> b h i d", raised / (raised.sum(dim=-1, keepdim=True) + 1e-9), v)


def small_added_twin(q, k, v):
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * SCALE
    raised = torch.exp(scores)
    return torch.einsum("b h i j, b h j d -> b h i d", raised / (raised.sum(dim=-1, keepdim=True) + 1e-9), v)


def relative(length, batch=BATCH):
    return (*qkv(length, batch), draw(2 * length - 1, DIM, seed=5), draw(HEADS, DIM, seed=6), draw(HEADS, DIM, seed=7))


def transformer_xl(q, k, v, positions, by_content, by_position):
    """Dai et al. 2019, section 3.3: the distances' scores are computed for all and shifted into place."""
    content = (q + by_content[:, None]) @ k.mT
    shifted = (q + by_position[:, None]) @ positions.mT
    batch, heads, rows, columns = shifted.shape
    shifted = torch.cat([shifted.new_zeros(batch, heads, rows, 1), shifted], -1)
    shifted = shifted.view(batch, heads, columns + 1, rows)[:, :, 1:].view(batch, heads, rows, columns)[..., :rows]
    return ((content + shifted) * SCALE).softmax(-1) @ v


def transformer_xl_twin(q, k, v, positions, by_content, by_position):
    content = (q + by_content[:, None]) @ k.mT
    shifted = ((q + by_position[:, None]) @ positions.mT)[..., : q.shape[2]]
    return ((content + shifted) * SCALE).softmax(-2) @ v


def music(length, batch=BATCH):
    return (*qkv(length, batch), draw(length, DIM, seed=5))


def music_transformer(q, k, v, table):
    """Huang et al. 2018, section 3.4.1: skewing under a causal mask."""
    padded = F.pad(q @ table.mT, (1, 0))
    batch, heads, rows, columns = padded.shape
    skewed = padded.reshape(batch, heads, columns, rows)[:, :, 1:]
    later = torch.tril(torch.ones(rows, rows, device=q.device)) == 0
    return ((q @ k.mT + skewed) / math.sqrt(DIM)).masked_fill(later, float("-inf")).softmax(-1) @ v


def one_key_head(length, batch=BATCH):
    q, k, v = qkv(length, batch)
    return q, k[:, 0].contiguous(), v[:, 0].contiguous()


def multi_query(q, k, v):
    scores = torch.einsum("bhid,bjd->bhij", q * SCALE, k)
    return torch.einsum("bhij,bjd->bhid", F.softmax(scores, dim=-1, dtype=torch.float32).type_as(v), v)


def multi_query_twin(q, k, v):
    scores = torch.einsum("bhid,bjd->bhij", q * SCALE, k)
    return torch.einsum("bhij,bjd->bhid", F.softmax(scores, dim=1, dtype=torch.float32).type_as(v), v)


def clipped(q, k, v):
    return torch.clamp(q @ k.mT * SCALE, -3, 3).softmax(-1) @ v


def clipped_twin(q, k, v):
    return torch.clamp((q @ k.mT * SCALE).softmax(-1), 0.01, 0.5) @ v


def gates(length, batch=BATCH):
    return (*qkv(length, batch), draw(batch, length, seed=9))


def forgetting(q, k, v, gate):
    """Lin et al. 2025: scores decay by the gates between query and key."""
    passed = F.logsigmoid(gate).cumsum(-1)
    decay = passed[:, None, :, None] - passed[:, None, None, :]
    earlier = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    return (q @ k.mT * SCALE + decay).masked_fill(~earlier, float("-inf")).softmax(-1) @ v


def chunked(length, batch=BATCH):
    return qkv(20, batch)


def chunks_looking_back(q, k, v):
    """Each chunk of four attends to itself and the one before."""
    batch, heads, length, dim = q.shape
    chunks = [t.reshape(batch, heads, length // 4, 4, dim) for t in (q, k, v)]
    keys, values = (torch.cat([F.pad(t, (0, 0, 0, 0, 1, -1)), t], dim=-2) for t in chunks[1:])
    rows = torch.arange(length, device=q.device).view(length // 4, 4)
    columns = torch.cat([F.pad(rows, (0, 0, 1, -1), value=-1), rows], -1)
    keep = (columns[:, None, :] <= rows[:, :, None]) & (columns[:, None, :] >= 0)
    scores = (chunks[0] @ keys.mT * SCALE).masked_fill(~keep, -torch.finfo(q.dtype).max)
    return (scores.softmax(-1) @ values).reshape(batch, heads, length, dim)


def heads_mixed(length, batch=BATCH):
    return (*qkv(length, batch), draw(HEADS, HEADS, seed=6))


def talking_heads(q, k, v, mix):
    """Shazeer et al. 2020: scores of one head are made of all heads' products."""
    scores = torch.einsum("bhij,hg->bgij", q @ k.mT * SCALE, mix)
    return scores.softmax(-1) @ v


def text_and_layout(length, batch=BATCH):
    keep = torch.arange(length) < torch.tensor([length - 2 * n for n in range(batch)])[:, None]
    layout = (draw(batch, HEADS, length, DIM // 2, seed=seed) for seed in (11, 12, 13))
    return (*qkv(length, batch), *layout, torch.where(keep, 0.0, -60000.0)[:, None, None])


def text_with_layout(q, k, v, layout_q, layout_k, layout_v, mask):
    """Wang et al. 2022, equation 4: two attentions, each with the scores of both."""
    text = q @ k.mT / math.sqrt(DIM)
    layout = layout_q @ layout_k.mT / math.sqrt(DIM // 2)
    return (layout + text + mask).softmax(-1) @ layout_v, (text + layout + mask).softmax(-1) @ v


def text_with_layout_twin(q, k, v, layout_q, layout_k, layout_v, mask):
    """The layout's scores the other way round: keys ask queries."""
    text = q @ k.mT / math.sqrt(DIM)
    layout = (layout_q @ layout_k.mT / math.sqrt(DIM // 2)).mT
    return (layout + text + mask).softmax(-1) @ layout_v, (text + layout + mask).softmax(-1) @ v


def latents(length, batch=BATCH):
    return tuple(draw(batch, length, *shape, seed=seed) for seed, shape in ((14, (HEADS, DIM)), (15, (DIM,)), (16, (HEADS, 4)), (17, (4,))))


def latent_scores(q, latent, rotated_q, rotated_k):
    scores = (torch.einsum("bshc,btc->bsht", q, latent) + torch.einsum("bshr,btr->bsht", rotated_q, rotated_k)) * 0.3
    length = q.shape[1]
    return scores + torch.full((length, length), float("-inf"), device=q.device).triu(1).unsqueeze(1)


def latent(q, latent, rotated_q, rotated_k):
    """DeepSeek-V2 2024, section 2.1.3: keys are values, and positions have features of their own."""
    weights = latent_scores(q, latent, rotated_q, rotated_k).softmax(-1, dtype=torch.float32).type_as(q)
    return torch.einsum("bsht,btc->bshc", weights, latent)


def latent_twin(q, latent, rotated_q, rotated_k):
    weights = latent_scores(q, latent, rotated_q, rotated_k).softmax(2, dtype=torch.float32).type_as(q)
    return torch.einsum("bsht,btc->bshc", weights, latent)


PEOPLE = (
    Spelling("scores less their logsumexp", less_logsumexp, qkv, less_logsumexp_twin, None),
    Spelling("a guarded sum", guarded_sum, qkv, guarded_sum_twin, None),
    Spelling("a small number added to the sum", small_added, qkv, small_added_twin, None),
    Spelling("Transformer-XL", transformer_xl, relative, transformer_xl_twin, ""),
    Spelling("Music Transformer", music_transformer, music, variant=("kv_idx <= q_idx",)),
    Spelling("one head of keys, by einsum", multi_query, one_key_head, multi_query_twin, ""),
    Spelling("clipped scores", clipped, qkv, clipped_twin, "clamp"),
    Spelling("forgetting", forgetting, gates, variant=("kv_idx <= q_idx",)),
    Spelling("chunks that look back", chunks_looking_back, chunked, grows=False),
    Spelling("text with layout", text_with_layout, text_and_layout, text_with_layout_twin, "also read", fused=2),
    Spelling("latent attention", latent, latents, latent_twin, "", variant=("score where kv_idx <= q_idx",)),
    Spelling("talking heads", talking_heads, heads_mixed, reason="the scores go through"),
)
