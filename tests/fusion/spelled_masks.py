"""Masks in odd ways: logarithms of zeros and ones, assignments, products of masks, what is put right after the softmax."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from spelling_harness import BATCH, DIM, Spelling, lengths_mask, qkv

SCALE = DIM**-0.5


def padded(length, batch=BATCH):
    return (*qkv(length, batch), lengths_mask(length, batch))


def triangle_like_the_queries(q, k, v):
    """The dtype is taken from another tensor, which has a gradient."""
    length = q.shape[2]
    mask = torch.triu(torch.full((length, length), float("-inf"), device=q.device), diagonal=1)
    return F.softmax(q @ k.transpose(-2, -1) * SCALE + mask.to(q), dim=-1) @ v


def triangle_like_the_queries_twin(q, k, v):
    length = q.shape[2]
    mask = torch.triu(torch.full((length, length), float("-inf"), device=q.device), diagonal=1)
    return torch.tanh(F.softmax(q @ k.transpose(-2, -1) * SCALE + mask.to(q), dim=-1)) @ v


def subsequent(q, k, v):
    """Integers of a triangle, compared twice."""
    length = q.shape[2]
    later = torch.triu(torch.ones(1, length, length, device=q.device), diagonal=1).type(torch.uint8) == 0
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(DIM)
    return torch.matmul(scores.masked_fill(later.unsqueeze(1) == 0, torch.finfo(q.dtype).min).softmax(dim=-1), v)


def logarithm(q, k, v, keep):
    length = q.shape[2]
    both = torch.tril(torch.ones(length, length, device=q.device)) * keep[:, None, None].float()
    return (q @ k.mT * SCALE + both.log().to(q.dtype)).softmax(-1) @ v


def logarithm_twin(q, k, v, keep):
    """Of what is neither 0 nor 1 for the softmax down the columns."""
    return (q @ k.mT * SCALE + (keep[:, None, None] + 1.0).log().to(q.dtype)).softmax(-2) @ v


def assigned(q, k, v, keep):
    scores = q @ k.mT * SCALE
    scores[~keep[:, None, None].expand_as(scores)] = -torch.inf
    return scores.softmax(-1) @ v


def assigned_twin(q, k, v, keep):
    """A view of the scores was taken before, and is read after."""
    scores = q @ k.mT * SCALE
    first = scores[:, :1]
    scores[~keep[:, None, None].expand_as(scores)] = 0.5
    return scores.softmax(-1) @ v, first


def zeros_for_nan(q, k, v, keep):
    """Rows without keys give nan, which become zeros."""
    both = keep[:, None, None] & keep[:, None, :, None]
    weights = (q @ k.mT * SCALE).masked_fill(~both, -torch.inf).softmax(-1)
    return torch.where(torch.isnan(weights), 0.0, weights) @ v


def zeros_for_nan_twin(q, k, v, keep):
    weights = (q @ k.mT * SCALE).masked_fill(~keep[:, None, None], -torch.inf).softmax(-1)
    return torch.where(torch.isnan(weights), weights, 0.0) @ v


def masked_weights(q, k, v, keep):
    """Multiplied by the mask once more."""
    mask = (keep[:, None, None] & torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()).to(q.dtype)
    return ((q @ k.mT * SCALE).masked_fill(mask == 0, torch.finfo(q.dtype).min).softmax(-1) * mask) @ v


def masked_weights_twin(q, k, v, keep):
    """By another mask."""
    mask = keep[:, None, None].to(q.dtype)
    return ((q @ k.mT * SCALE).softmax(-1) * mask) @ v


CAUSAL = ("kv_idx <= q_idx",)
MASKS = (
    Spelling("a triangle like the queries", triangle_like_the_queries, qkv, triangle_like_the_queries_twin, "tanh", variant=CAUSAL),
    Spelling("integers of a triangle", subsequent, qkv, variant=CAUSAL),
    Spelling("the logarithm of a mask", logarithm, padded, logarithm_twin, "the softmax is over dimension", variant=CAUSAL),
    Spelling("assigned by a mask", assigned, padded, assigned_twin, "written"),
    Spelling("zeros for nan", zeros_for_nan, padded, zeros_for_nan_twin, "zeroed"),
    Spelling("weights times their mask", masked_weights, padded, masked_weights_twin, "zeroed", variant=CAUSAL),
)
