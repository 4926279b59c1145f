"""NestedTensors beside dense tensors, broadcast, narrowed, and ragged in other dims."""

import pytest
import torch
import torch.nn.functional as F
from drawn import rand
from packed import BACKENDS, nested, pieces, unpacked

import foci


# JAG-05
@pytest.mark.parametrize("backend", BACKENDS)
def test_dense_query(backend):
    lengths = (3, 1, 6)
    q = rand(3, 4, 5, 8).requires_grad_()
    values, k = nested(lengths, 4, 8)
    with foci.use(backend):
        out, aux = foci.attention(q, k, k, mask=foci.masks.causal(), return_aux=foci.AuxRequest(lse=True))
    assert not out.is_nested and out.shape == q.shape and aux.lse.shape == q.shape[:3]
    want = torch.cat([F.scaled_dot_product_attention(q[n : n + 1], p, p, is_causal=True) for n, p in enumerate(pieces(values, lengths))])
    torch.testing.assert_close(out, want)
    weights = rand(*out.shape, seed=4)
    torch.testing.assert_close(torch.autograd.grad(out, (q, values), weights), torch.autograd.grad(want, (q, values), weights))


def test_nested_query_of_dense_keys():
    lengths = (3, 0, 6)
    values, q = nested(lengths, 4, 8)
    k = rand(1, 4, 5, 8).requires_grad_()
    out = foci.attention(q, k, k)
    want = torch.cat([F.scaled_dot_product_attention(p, k, k)[0].transpose(0, 1) for p in pieces(values, lengths)])
    torch.testing.assert_close(unpacked(out), want)
    weights = rand(*want.shape, seed=4)
    torch.testing.assert_close(torch.autograd.grad(unpacked(out), (values, k), weights), torch.autograd.grad(want, (values, k), weights))


# JAG-05
@pytest.mark.parametrize("which", ["query heads", "key heads", "value heads", "key and value batch", "query batch"])
def test_broadcast_heads_and_batch(which):
    lengths, heads = [[3, 2, 6]] * 3, [4, 4, 4]
    for n, name in enumerate(("query", "key", "value")):
        if name in which and "heads" in which:
            heads[n] = 1
        if name in which and "batch" in which:
            lengths[n] = [5]
    packed, njts = zip(*(nested(ls, h, 8, seed=n) for n, (ls, h) in enumerate(zip(lengths, heads, strict=True))), strict=True)
    out = foci.attention(*njts)
    want = []
    for n in range(3):
        q, k, v = (pieces(t, ls)[n if len(ls) == 3 else 0].expand(1, 4, -1, -1) for t, ls in zip(packed, lengths, strict=True))
        want.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
    want = torch.cat(want)
    torch.testing.assert_close(unpacked(out), want)
    weights = rand(*want.shape, seed=4)
    torch.testing.assert_close(torch.autograd.grad(unpacked(out), packed, weights), torch.autograd.grad(want, packed, weights))


# JAG-06
@pytest.mark.parametrize("backend", BACKENDS)
def test_narrowed(backend):
    base = rand(3, 9, 4, 8).requires_grad_()
    starts, lengths = torch.tensor([0, 2, 1]), torch.tensor([3, 5, 0])
    njt = torch.nested.narrow(base, 1, starts, lengths, layout=torch.jagged).transpose(1, 2)
    with foci.use(backend):
        out = foci.attention(njt, njt, njt, mask=foci.masks.causal_lower_right())
    assert out.lengths() is njt.lengths() and out.shape[2] == njt.shape[2]
    loss, want = 0.0, 0.0
    for n, got in enumerate(out.unbind()):
        part = base[n, starts[n] : starts[n] + lengths[n]].transpose(0, 1)
        if lengths[n]:
            one = F.scaled_dot_product_attention(part, part, part, is_causal=True)
            torch.testing.assert_close(got, one)
            loss, want = loss + got.square().sum(), want + one.square().sum()
    torch.testing.assert_close(torch.autograd.grad(loss, base), torch.autograd.grad(want, base))


@pytest.mark.parametrize("which", ["query", "key and value"])
def test_a_narrowed_batch_of_one(which):
    lengths = (3, 1, 6)
    base = rand(1, 9, 4, 8).requires_grad_()
    one = torch.nested.narrow(base, 1, torch.tensor([2]), torch.tensor([5]), layout=torch.jagged).transpose(1, 2)
    values, many = nested(lengths, 4, 8, seed=1)
    part = base[:, 2:7].transpose(1, 2)
    if which == "query":
        out, calls = foci.attention(one, many, many).unbind(), [(part, p, p) for p in pieces(values, lengths)]
    else:
        out, calls = foci.attention(many, one, one).unbind(), [(p, part, part) for p in pieces(values, lengths)]
    want = [F.scaled_dot_product_attention(*call)[0] for call in calls]
    torch.testing.assert_close(list(out), want)
    gradients = [torch.autograd.grad(sum(t.square().sum() for t in ts), (base, values)) for ts in (out, want)]
    torch.testing.assert_close(*gradients)


def test_one_sequence_per_head_without_a_head_dim():
    lengths = (3, 0, 6)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = rand(9, 8).requires_grad_()
    njt = torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
    out = foci.scaled_dot_product_attention(njt, njt, njt, is_causal=True)
    assert out.shape == njt.shape
    want = torch.cat([F.scaled_dot_product_attention(p, p, p, is_causal=True) for p in values.split(list(lengths)) if len(p)])
    torch.testing.assert_close(out.values(), want)
    torch.testing.assert_close(torch.autograd.grad(out.values().sum(), values), torch.autograd.grad(want.sum(), values))


# JAG-06
def test_contiguous_heads_first():
    parts = [rand(4, n, 8, seed=n) for n in (3, 5)]
    values = torch.cat(parts, 1).requires_grad_()
    njt = torch.nested.nested_tensor_from_jagged(values, offsets=torch.tensor([0, 3, 8]), jagged_dim=2)
    out = foci.attention(njt, njt, njt)
    for got, part in zip(out.unbind(), parts, strict=True):
        torch.testing.assert_close(got, F.scaled_dot_product_attention(part, part, part))


# JAG-07
@pytest.mark.parametrize("rest", [(4, 8), (2, 4, 8)], ids=str)
def test_ragged_before_the_length(rest):
    offsets = torch.tensor([0, 3, 3, 7])
    packed = [rand(7, *rest, seed=n).requires_grad_() for n in range(3)]
    q, k, v = (torch.nested.nested_tensor_from_jagged(t, offsets=offsets) for t in packed)
    out = foci.scaled_dot_product_attention(q, k, v, is_causal=True)
    want = F.scaled_dot_product_attention(*packed, is_causal=True)
    assert out.shape == q.shape and out.offsets() is offsets
    torch.testing.assert_close(out.values(), want)
    weights = rand(*want.shape, seed=5)
    torch.testing.assert_close(torch.autograd.grad(out.values(), packed, weights), torch.autograd.grad(want, packed, weights))
    scored, aux = foci.attention(q, k, v, score=lambda s, b, h, i, j: s * (b + 1), return_aux=foci.AuxRequest(lse=True, weights=True))
    scale = torch.arange(1, 8)[(..., *[None] * len(rest))]
    torch.testing.assert_close(scored.values(), F.scaled_dot_product_attention(packed[0] * scale, *packed[1:]))
    assert aux.lse.shape == q.shape[:-1] and aux.weights.shape == (*q.shape[:-1], 4)
    assert foci.explain(q, k, v).backend is not None


def test_lengths_that_say_what_offsets_say():
    offsets, lengths = torch.tensor([0, 3, 8]), torch.tensor([3, 5])
    values = [rand(8, 2, 8, seed=n) for n in range(3)]
    q, k, v = (torch.nested.nested_tensor_from_jagged(t, offsets.clone()).transpose(1, 2) for t in values)
    narrowed = torch.nested.nested_tensor_from_jagged(values[2], offsets, lengths).transpose(1, 2)
    torch.testing.assert_close(foci.attention(q, k, narrowed).values(), foci.attention(q, k, v).values())


def test_a_batch_of_nothing():
    q = torch.nested.nested_tensor_from_jagged(rand(0, 4, 8), offsets=torch.tensor([0])).transpose(1, 2)
    assert foci.attention(q, q, q).shape[0] == 0


# JAG-05
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("needs_grad", [True, False])
def test_one_query_head_beside_many_heads_of_the_same_sequences(needs_grad, backend):
    values, keys = nested((3, 0, 5), 4, 8)
    rows = rand(8, 1, 8, seed=3).requires_grad_(needs_grad)
    query = torch.nested.nested_tensor_from_jagged(rows, offsets=keys.offsets()).transpose(1, 2)
    expanded_query = torch.nested.nested_tensor_from_jagged(rows.expand(-1, 4, -1), offsets=keys.offsets()).transpose(1, 2)
    with foci.use(backend):
        actual, want = (unpacked(foci.attention(q, keys, keys, mask=foci.masks.causal())) for q in (query, expanded_query))
    torch.testing.assert_close(actual, want)
    inputs = (rows, values) if needs_grad else (values,)
    torch.testing.assert_close(*(torch.autograd.grad(t.square().sum(), inputs) for t in (actual, want)))
