"""Biases that cost more to compute for every score than to read stay tensors; others, and masks, are drawn into the kernel."""

import math

import pytest
import torch
from fusing import LENGTH, B, D, H, draw, fused, learned, qkv, reasons

from foci.fusion.profitable import estimate_seconds

LENGTHS = (36, 48, 60)


def variants(backend):
    assert reasons(backend) == [None] * len(backend.sites), reasons(backend)
    return [site.variant for site in backend.sites]


def scores(q, k):
    return q @ k.mT / math.sqrt(D)


def attend(q, k, v, bias):
    return torch.softmax(scores(q, k) + bias, -1) @ v


# FUSE-03, FUSE-06
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("way", ["view", "reshape_as"])
def test_a_decomposed_bias(way, grad):
    """SAM's: a term for the row of the key, one for its column."""

    def function(q, k, v, rows, columns):
        raw = scores(q, k)
        bias = rows[..., None] + columns[..., None, :]  # [B, H, Sq, 6, 6]
        return torch.softmax(raw + (bias.view(raw.shape) if way == "view" else bias.reshape_as(raw)), -1) @ v

    def tensors(rows, columns):
        length = rows * columns
        operands = (*qkv(length=length), draw(B, H, length, rows, seed=4), draw(B, H, length, columns, seed=5))
        return learned(*operands) if grad else operands

    backend = fused(function, *tensors(6, 6), other_calls=[tensors(7, 8), tensors(8, 9)])
    assert variants(backend) == ["score + c0[b, h, q_idx, kv_idx]"]


def table_bias_tensor(q, table):
    """T5's: a table by distance, one entry a head, its heads last in memory."""
    at = torch.arange(q.shape[2])
    distance = (at - at[:, None]).abs().clamp(max=31)
    return torch.nn.functional.embedding(distance, table).permute(2, 0, 1).unsqueeze(0)


def table_bias(q, k, v, table):
    return attend(q, k, v, table_bias_tensor(q, table))


# FUSE-03, FUSE-06
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_table_is_read_once_a_distance(grad):
    tensors = (*qkv(length=LENGTH), draw(32, H, seed=4))
    backend = fused(table_bias, *(learned(*tensors) if grad else tensors))
    assert variants(backend) == ["score + c0[h, q_idx, kv_idx]"]
    (call,) = [n for n in backend.after[0].graph.nodes if n.target is torch.ops.foci.attention.default]
    (bias,) = call.args[3]
    assert bias.meta["example_value"].stride()[-1] == 1  # a row's elements side by side


# FUSE-03
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_table_at_several_lengths(grad):
    for length in LENGTHS:
        tensors = (*qkv(length=length), draw(32, H, seed=4))
        fused(table_bias, *(learned(*tensors) if grad else tensors), dynamic=True)


# FUSE-03
def test_one_copy_serves_all_layers():
    def function(q, k, v, table):
        at = torch.arange(q.shape[2])
        bias = torch.nn.functional.embedding((at - at[:, None]).abs(), table).permute(2, 0, 1)
        for _ in range(3):
            q = attend(q, k, v, bias)
        return q

    backend = fused(function, *learned(*qkv(length=LENGTH), draw(LENGTH, H, seed=4)))
    assert variants(backend) == ["score + c0[h, q_idx, kv_idx]"] * 3
    nodes = list(backend.after[0].graph.nodes)
    assert sum(n.target == "contiguous" for n in nodes) == 1
    assert len({n.args[3] for n in nodes if n.target is torch.ops.foci.attention.default}) == 1


# FUSE-03, FUSE-06
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_gathered_scores(grad):
    """DeBERTa's: content to position gathered along the keys, position to content along the queries and turned."""

    def function(q, k, v, positions):
        at = torch.arange(q.shape[2])
        index = (at[:, None] - at + 40).clamp(0, 79).expand(q.shape[0], H, -1, -1)
        to_position = torch.gather(q @ positions.mT, -1, index) / 3
        to_content = torch.gather(k @ positions.mT, -1, index).transpose(-1, -2) / 3
        return attend(q, k, v, to_position + to_content)

    tensors = (*qkv(length=LENGTH), draw(B, H, 80, D, seed=4))
    backend = fused(function, *(learned(*tensors) if grad else tensors))
    assert variants(backend) == ["score + c0[b, h, q_idx, kv_idx]"]


# FUSE-03
def test_what_a_formula_says_is_drawn():
    def function(q, k, v, slopes):
        at = torch.arange(q.shape[2])
        return attend(q, k, v, slopes[:, None, None] * (at - at[:, None]))

    (variant,) = variants(fused(function, *qkv(), draw(H, seed=4)))
    assert "c0[h]" in variant
    assert "kv_idx" in variant


# FUSE-03
def test_a_mask_beside_a_bias_stays_a_mask():
    def function(q, k, v, table):
        at = torch.arange(q.shape[2])
        bias = torch.nn.functional.embedding((at - at[:, None]).abs(), table).permute(2, 0, 1)
        return attend(q, k, v, bias + torch.zeros(len(at), len(at)).masked_fill(at > at[:, None], torch.finfo(torch.float32).min))

    (variant,) = variants(fused(function, *qkv(length=LENGTH), draw(LENGTH, H, seed=4)))
    assert variant == "score + c0[h, q_idx, kv_idx] where kv_idx <= q_idx"


# FUSE-03
@pytest.mark.parametrize(("layers", "shared", "is_tensor"), [(1, True, False), (12, True, True), (12, False, False)])
def test_a_bias_that_many_layers_share_is_made_once_for_them(layers, shared, is_tensor):
    """A single layer computes the bias inside its kernel, as that costs less than a tensor of it does. Twelve layers with a bias each do so
    too. Twelve layers that share one bias read it as a tensor."""

    def make_bias(rows, columns):
        bias = rows - columns
        for _ in range(10):
            bias = (bias + rows).abs()
        return bias

    def function(q, k, v, a, b):
        biases = [make_bias(a[layer, ..., None], b[layer, ..., None, :]) for layer in range(1 if shared else layers)]
        for layer in range(layers):
            q = attend(q, k, v, biases[0 if shared else layer])
        return q

    def tensors(length):
        return (*qkv(length=length), *(draw(layers, B, H, length, seed=seed) for seed in (4, 5)))

    backend = fused(function, *tensors(LENGTH), other_calls=[tensors(LENGTH + 3), tensors(LENGTH + 9)])
    assert [variant == "score + c0[b, h, q_idx, kv_idx]" for variant in variants(backend)] == [is_tensor] * layers


def made_copies(backend):
    return sum(n.target == "contiguous" for n in backend.after[0].graph.nodes)


# FUSE-03, FUSE-04
def test_a_bias_that_is_written_between_layers_is_read_as_it_was():
    def function(q, k, v, table):
        bias = table_bias_tensor(q, table).clone()
        raised = bias + 1
        q = attend(q, k, v, bias)
        bias.mul_(3)
        return attend(q, k, v, bias) + attend(q, k, v, raised)

    assert len(variants(fused(function, *qkv(length=LENGTH), draw(32, H, seed=4)))) == 3


# FUSE-03
def test_a_copy_made_without_gradients_is_not_shared():
    def function(q, k, v, table):
        bias = table_bias_tensor(q, table)
        with torch.no_grad():
            before = attend(q, k, v, bias)
        return attend(q, k, v, bias) + before

    backend = fused(function, *learned(*qkv(length=LENGTH), draw(32, H, seed=4)))
    assert variants(backend) == ["score + c0[h, q_idx, kv_idx]"] * 2
    assert made_copies(backend) == 2


# FUSE-04
def test_views_like_another_tensor_do_not_hold_the_scores():
    def function(q, k, v, bias):
        raw = scores(q, k)
        return torch.softmax(raw + bias.flatten(1).view_as(raw) + bias.expand_as(raw), -1) @ v

    backend = fused(function, *learned(*qkv(length=LENGTH), draw(B, H, LENGTH, LENGTH, seed=4)))
    assert variants(backend)
    assert not any(n.target in ("view_as", "expand_as") for n in backend.after[0].graph.nodes)


# FUSE-06
@pytest.mark.parametrize("operation", ["gather", "masked_fill", "contiguous", "tanh"])
def test_elements_cost_more_where_they_are_not_plain_arithmetic(operation):
    assert estimate_seconds(operation, 1e6, needs_backward=False) > estimate_seconds("add", 1e6, needs_backward=False)
    assert estimate_seconds(operation, 1e6, needs_backward=True) > estimate_seconds(operation, 1e6, needs_backward=False)
