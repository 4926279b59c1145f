"""Column sums of an attention with a sink: the sums of the weights that the sink leaves, on every backend of the CPU."""

# SDPA-19

import pytest
import torch

import foci

B, HQ, HKV, SQ, SKV, D = 2, 4, 2, 37, 53, 8
COLUMNS = foci.AuxRequest(column_sums=True)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def weights(query, key, bias, sink, allowed):
    """By the formula, with the sink as one more column that is then left out."""
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT / query.shape[-1] ** 0.5 + bias
    scores = scores.masked_fill(~allowed, -torch.inf)
    logits = torch.cat([scores, sink[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.softmax(logits, -1)[..., :-1]


def aligned_right(b, h, q_idx, kv_idx):
    return (kv_idx - foci.kv_len() <= q_idx - foci.q_len()) & (q_idx != 5)


@pytest.mark.parametrize("backend", ["cpu", "blocked", "reference"])
def test_dense(backend):
    torch.manual_seed(0)
    query, key, value, bias, sink = draw(B, HQ, SQ, D), draw(B, HKV, SKV, D), draw(B, HKV, SKV, D), draw(HQ, SQ, SKV), draw(HQ)
    rows, columns = torch.arange(SQ)[:, None], torch.arange(SKV)
    expected = weights(query, key, bias, sink, (columns - SKV <= rows - SQ) & (rows != 5)).sum(2)
    cotangent = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (query, key, bias, sink), cotangent)

    dtype = torch.float32 if backend == "cpu" else torch.float64
    q, k, v, b, s = (t.detach().to(dtype).requires_grad_() for t in (query, key, value, bias, sink))
    with foci.use(backend):
        _, aux = foci.attention(q, k, v, mask=aligned_right, score=lambda x, n, h, i, j: x + b[h, i, j], sink=s, return_aux=COLUMNS)
        gradients = torch.autograd.grad(aux.column_sums, (q, k, b, s), cotangent.to(dtype))
    tolerance = 2e-5 if backend == "cpu" else 1e-9
    torch.testing.assert_close(aux.column_sums.double(), expected, atol=tolerance, rtol=tolerance)
    for a, e in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a.double(), e, atol=tolerance, rtol=tolerance)


def test_a_sink_of_minus_infinity_takes_nothing():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    none = torch.full((2,), -torch.inf)
    actual = foci.attention(q, k, v, mask=aligned_right, sink=none, return_aux=COLUMNS)[1].column_sums
    torch.testing.assert_close(actual, foci.attention(q, k, v, mask=aligned_right, return_aux=COLUMNS)[1].column_sums)


def test_blocks_of_the_caller():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 300, 8) for _ in range(3))
    sink, blocks = (
        torch.randn(2),
        foci.create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 70), None, None, 300, 300, device="cpu", BLOCK_SIZE=64),
    )
    actual, plain = (
        foci.attention(q, k, v, mask=mask, sink=sink, return_aux=COLUMNS)[1].column_sums
        for mask in (blocks, lambda b, h, i, j: (i >= j) & (i - j < 70))
    )
    torch.testing.assert_close(actual, plain)


def test_jagged():
    torch.manual_seed(0)
    lengths, sink = (7, 0, 20), torch.randn(2)
    pieces = [torch.randn(3, n, 2, 8) for n in lengths]
    q, k, v = (torch.nested.nested_tensor([p[i] for p in pieces], layout=torch.jagged).transpose(1, 2) for i in range(3))
    _, aux = foci.attention(q, k, v, mask=foci.masks.causal(), sink=sink, return_aux=COLUMNS)
    for actual, p in zip(aux.column_sums.unbind(), pieces, strict=True):
        dense = tuple(t.transpose(0, 1).unsqueeze(0) for t in p)
        expected = foci.attention(*dense, mask=foci.masks.causal(), sink=sink, return_aux=COLUMNS)[1].column_sums[0]
        torch.testing.assert_close(actual.transpose(0, 1) if actual.shape != expected.shape else actual, expected)
