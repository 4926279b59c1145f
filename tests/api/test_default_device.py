"""Another default device, as while a model is made on `meta`: tensors of a call stay where its operands are."""

import pytest
import torch

import foci
import foci.nn

Q, K = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 24, 8)
TABLE, DOCUMENTS, SINK = torch.randn(4, 24), torch.arange(24) // 5, torch.randn(4)
OFFSETS = torch.tensor([0, 7, 7, 40])
ALL = foci.AuxRequest(lse=True, row_max=True, column_sums=True)


def learned(table):
    return lambda score, b, h, q_idx, kv_idx: score + table[h, kv_idx] * 0.5


def dense(query, key, table):
    out, aux = foci.attention(
        query, key, key, mask=foci.masks.document(DOCUMENTS) | foci.masks.window(3), score=learned(table), return_aux=ALL
    )
    return out, *aux[:3]


def dropped(query, key, table):
    torch.manual_seed(3)
    return (foci.attention(query, key, key, score=learned(table), sink=SINK, dropout_p=0.3),)


def packed(query, key, table):
    rows, keys = query.transpose(1, 2).flatten(0, 1), key.repeat(1, 2, 1, 1).transpose(1, 2).flatten(0, 1)[:40]
    return (foci.varlen_attn(rows, keys, keys, OFFSETS, OFFSETS, 33, 33, window_size=(-1, 0), score=learned(table.repeat(1, 2))),)


def nested(query, key, table):
    rows = torch.nested.nested_tensor_from_jagged(query.transpose(1, 2).flatten(0, 1), OFFSETS, min_seqlen=0, max_seqlen=33).transpose(1, 2)
    return (foci.attention(rows, rows, rows, mask=foci.masks.causal_lower_right()).values() + table.sum() + key.sum(),)


def blocks(query, key, table):
    mask = foci.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 20, 24, device="cpu", BLOCK_SIZE=8)
    return (foci.flex_attention(query, key, key, score_mod=learned(table), block_mask=mask, enable_gqa=True),)


def biased(query, key, table):
    return (foci.scaled_dot_product_attention(query, key, key, table[:, None], enable_gqa=True),)


def forward_and_gradients(call):
    leaves = [t.clone().requires_grad_() for t in (Q, K, TABLE)]
    results = call(*leaves)
    loss = sum(t.square().sum() for t in results if t.requires_grad)
    return *results, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("backend", ["cpu", "blocked", "reference"])
@pytest.mark.parametrize("call", [dense, dropped, packed, nested, blocks, biased])
def test_results_lie_with_the_operands(call, backend):
    with foci.use(backend):
        wanted = forward_and_gradients(call)
        with torch.device("meta"):
            actual = forward_and_gradients(call)
    for got, want in zip(actual, wanted, strict=True):
        assert got.device.type == "cpu"
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_tensors_without_memory_have_results_without_memory(backend):
    query = torch.randn(2, 2, 7, 8, device="meta", requires_grad=True)
    keep = torch.zeros(2, 7, dtype=torch.bool, device="meta")
    for options in ({}, {"mask": foci.masks.causal()}, {"mask": lambda b, h, i, j: keep[b, j]}, {"dropout_p": 0.1}):
        with foci.use(backend):
            out, aux = foci.attention(query, query, query, return_aux=foci.AuxRequest(lse=True, column_sums=True), **options)
        (gradient,) = torch.autograd.grad(out.sum() + aux.lse.sum(), query)
        assert out.shape == gradient.shape == query.shape
        assert aux.lse.shape == aux.column_sums.shape == (2, 2, 7)
        assert out.is_meta
        assert gradient.is_meta
    module = foci.nn.MultiheadAttention(16, 2, batch_first=True, device="meta")
    tokens = torch.randn(2, 7, 16, device="meta")
    assert module(tokens, tokens, tokens, key_padding_mask=keep)[0].shape == (2, 7, 16)
