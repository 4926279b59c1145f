"""What a row, or all scores, have in common is taken away or divided by; masks put together from pieces."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from spelling_harness import DIM, Spelling, lengths_mask, qkv

SCALE = DIM**-0.5


def padded(length, batch=2):
    return (*qkv(length, batch), lengths_mask(length, batch))


def less_the_largest_of_all(q, k, v):
    scores = q @ k.mT * SCALE
    return (scores - scores.max()).softmax(-1) @ v


def less_the_largest_of_all_twin(q, k, v):
    """The largest of a key's scores."""
    scores = q @ k.mT * SCALE
    return (scores - scores.amax(-2, keepdim=True)).softmax(-1) @ v


def less_the_largest_of_a_head(q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * SCALE
    return torch.einsum("bhij,bhjd->bhid", F.softmax(scores - scores.detach().amax(dim=(-2, -1), keepdim=True), dim=-1), v)


def less_the_largest_of_a_head_twin(q, k, v):
    """The largest of all heads and queries."""
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * SCALE
    return torch.einsum("bhij,bhjd->bhid", F.softmax(scores - scores.amax(dim=(1, 2), keepdim=True), dim=-1), v)


def less_the_largest_of_an_image(q, k, v):
    """Through a view that has all its scores in a row."""
    scores = q @ k.mT * SCALE
    largest = scores.reshape(scores.shape[0], -1).max(dim=-1).values
    return (scores - largest[:, None, None, None]).softmax(-1) @ v


def less_the_largest_of_an_image_twin(q, k, v):
    scores = q @ k.mT * SCALE
    largest = scores.reshape(scores.shape[0], -1, scores.shape[-1]).max(dim=1).values
    return (scores - largest[:, None, None]).softmax(-1) @ v


def shifted_then_masked(q, k, v, keep):
    scores = q @ k.mT * SCALE
    scores = scores - scores.max()
    return scores.masked_fill(~keep[:, None, None], torch.finfo(scores.dtype).min).softmax(-1) @ v


def shifted_then_masked_twin(q, k, v, keep):
    """A score that the shift moves past."""
    scores = q @ k.mT * SCALE
    scores = scores - scores.max()
    return scores.masked_fill(~keep[:, None, None], -3.0).softmax(-1) @ v


def divided_by_one(q, k, v):
    """Weights by their own sum, once more."""
    weights = torch.softmax(q @ k.mT * SCALE, dim=-1)
    weights = weights / (1e-9 + weights.sum(dim=-1, keepdim=True))
    return weights @ v


def divided_by_one_twin(q, k, v):
    """By the sum of a key's weights, as point clouds' attention does."""
    weights = torch.softmax(q @ k.mT * SCALE, dim=-1)
    weights = weights / (1e-9 + weights.sum(dim=-2, keepdim=True))
    return weights @ v


def normalised_again(q, k, v):
    return F.normalize(torch.softmax(q @ k.mT * SCALE, dim=-1), p=1, dim=-1) @ v


def normalised_again_twin(q, k, v):
    return F.normalize(torch.softmax(q @ k.mT * SCALE, dim=-1), p=2, dim=-1) @ v


def one_more(q, k, v):
    """Divided by 1 + 1: half of the weights, which no sink of one's own is."""
    weights = torch.softmax(q @ k.mT * SCALE, dim=-1)
    return weights / (1 + weights.sum(dim=-1, keepdim=True)) @ v


def mask_from_pieces(q, k, v):
    """A cache's columns beside a triangle."""
    length = q.shape[2]
    early = torch.zeros(length, 3, device=q.device)
    late = torch.full((length, length - 3), float("-inf"), device=q.device).triu(-2)
    return (q @ k.mT * SCALE + torch.hstack([early, late]).type_as(q)).softmax(-1) @ v


def mask_from_pieces_twin(q, k, v):
    length = q.shape[2]
    early = torch.zeros(length, 3, device=q.device)
    late = torch.full((length, length - 3), float("-inf"), device=q.device).triu(-2)
    return (q @ k.mT * SCALE + torch.hstack([early, late]).type_as(q)).softmax(-2) @ v


def rows_from_pieces(q, k, v):
    """Global queries above a band."""
    length = q.shape[2]
    band = torch.ones(length - 2, length, dtype=torch.bool, device=q.device).tril(2)
    keep = torch.vstack((torch.ones(2, length, dtype=torch.bool, device=q.device), band))
    return (q @ k.mT * SCALE).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def rows_from_pieces_twin(q, k, v):
    length = q.shape[2]
    band = torch.ones(length - 2, length, dtype=torch.bool, device=q.device).tril(2)
    keep = torch.vstack((torch.ones(2, length, dtype=torch.bool, device=q.device), band))
    return (q @ k.mT * SCALE).softmax(-1).masked_fill(~keep, 0.0) @ v


WHOLES = (
    Spelling("minus the largest of all", less_the_largest_of_all, qkv, less_the_largest_of_all_twin, "amax"),
    Spelling("minus the largest of a head", less_the_largest_of_a_head, qkv, less_the_largest_of_a_head_twin, "amax"),
    Spelling("minus the largest of an image", less_the_largest_of_an_image, qkv, less_the_largest_of_an_image_twin, "getitem"),
    Spelling("minus the largest, then masked", shifted_then_masked, padded, shifted_then_masked_twin, "max", variant=("score where c0",)),
    Spelling("weights divided by one", divided_by_one, qkv, divided_by_one_twin, "divided by a tensor"),
    Spelling("weights normalised again", normalised_again, qkv, normalised_again_twin, "normalize"),
    Spelling("weights divided by two", one_more, qkv, reason="divided by a tensor"),
    Spelling(
        "a mask of two pieces, side by side",
        mask_from_pieces,
        qkv,
        mask_from_pieces_twin,
        "the softmax is over dimension",
        variant=("(kv_idx <= 2)",),
    ),
    Spelling("a mask of two pieces, one above the other", rows_from_pieces, qkv, rows_from_pieces_twin, "zeroed", variant=("q_idx",)),
)
