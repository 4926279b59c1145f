"""What the CPU's kernels read and write: strides, head dims, dtypes of captured tensors, and nothing beside them."""

import math
from dataclasses import replace

import pytest
import torch
from cpu_calls import CPU, attention, exact, gradients, problem, qkv

import foci
from foci.backends.contract import Plan
from foci.backends.cpu import BACKEND, build
from foci.problem import Cotangents, Operands, Program

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))


# SDPA-12
def test_odd_strides():
    base = torch.randn(3, 130, 2, 80)
    q = base[..., ::2].transpose(1, 2)
    k = base.transpose(1, 2)[..., 40:]
    v = base[:1, :, :1, 40:].transpose(1, 2).expand(3, 2, 130, 40)
    torch.testing.assert_close(attention(q, k, v), exact(q, k, v).float(), atol=2e-6, rtol=0)


# SDPA-12
@pytest.mark.parametrize(
    ("heads", "q_len", "kv_len", "D", "Dv"), [((2, 2), 48, 48, 40, 40), ((4, 2), 37, 133, 17, 33), ((2, 1), 200, 70, 48, 24)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_transposed_tensors(heads, q_len, kv_len, D, Dv, dtype, causal):
    """Neighbours in memory are neighbours along the tokens: channels of an image, or attention over channels. Around them lies NaN."""

    def transposed(heads, length, width):
        around = torch.full((2, heads, width + 2, length + 2), torch.nan, dtype=dtype)
        return around[:, :, 1:-1, 1:-1].copy_(torch.randn(2, heads, width, length)).mT

    shapes = ((heads[0], q_len, D), (heads[1], kv_len, D), (heads[1], kv_len, Dv), (heads[0], q_len, Dv))
    query, key, value, grad_out = (transposed(*shape) for shape in shapes)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    out = attention(*leaves, mask=foci.masks.causal() if causal else None)
    got = (out, *torch.autograd.grad(out, leaves, grad_out))
    q, k, v = (t.detach().double().requires_grad_() for t in leaves)
    groups = heads[0] // heads[1]
    scores = q @ k.repeat_interleave(groups, 1).mT / math.sqrt(D)
    if causal:
        scores = scores.masked_fill(torch.ones(q_len, kv_len, dtype=torch.bool).triu(1), -math.inf)
    exact_out = torch.softmax(scores, -1) @ v.repeat_interleave(groups, 1)
    expected = (exact_out, *torch.autograd.grad(exact_out, (q, k, v), grad_out.double()))
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("heads_in_rows", [True, False])
def test_gradients_lie_as_the_tensors_do(heads_in_rows):
    rows = torch.randn(2, 3, 70, 48, requires_grad=True)
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) if heads_in_rows else t for t in rows.split(16, 3))
    grads = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    expected = torch.autograd.grad(exact(q, k, v).sum(), (q, k, v))
    for gradient, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(gradient, right.float(), atol=2e-6, rtol=1e-5)
        assert gradient.transpose(1, 2).is_contiguous() is heads_in_rows
        assert gradient.is_contiguous() is not heads_in_rows


def test_gradients_side_by_side_have_the_bits_of_those_apart():
    asked = problem(q_heads=4, query_grad=True, key_grad=True, value_grad=True)
    kernel = BACKEND.build(Plan("cpu", asked, CPU))
    q, k, v = torch.randn(2, 4, 70, 16), *qkv(2, 2, 70)[:2]
    operands = Operands(q, k, v, scale=0.25)
    results = kernel.forward(operands)
    arguments = results, Cotangents(torch.randn_like(results.out))
    apart = kernel.backward(operands, *arguments)
    together = kernel.backward(replace(operands, program=Program(joined=True)), *arguments)
    for name in ("query", "key", "value"):
        gradient = getattr(together, name)
        assert torch.equal(gradient, getattr(apart, name))
        assert gradient.stride()[1:] == (16, 128, 1)
    assert together.query.untyped_storage().data_ptr() == together.value.untyped_storage().data_ptr()


# SDPA-10
@pytest.mark.parametrize("D", [1, 3, 17, 512, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_head_dim(D, dtype):
    tensors = qkv(1, 2, 70, D, dtype)
    tolerance = 5e-6 if dtype is torch.float32 else 3e-2
    grads = gradients(tensors)
    with foci.use("reference"):
        leaves = tuple(t.double().requires_grad_() for t in tensors)
        out = foci.attention(*leaves)
        expected = (out, *torch.autograd.grad(out, leaves, torch.ones_like(out)))
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=tolerance)


# SDPA-10
@pytest.mark.parametrize("D", [1, 16, 24, 48, 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_read_to_their_last_column_alone(D, dtype):
    """The elements beside a row are NaN, and so would be whatever used them."""
    wide = torch.full((3, 1, 2, 45, 96), torch.nan, dtype=dtype)
    wide[..., :D] = torch.randn(3, 1, 2, 45, D)
    rows = [t.requires_grad_() for t in wide[..., :D].unbind(0)]
    out = attention(*rows)
    got = (out, *torch.autograd.grad(out, rows, torch.ones_like(out)))
    q, k, v = (t.detach().double().requires_grad_() for t in rows)
    exact_out = torch.softmax(q @ k.mT / math.sqrt(D), -1) @ v
    expected = (exact_out, *torch.autograd.grad(exact_out, (q, k, v), torch.ones_like(exact_out)))
    tolerance = 5e-6 if dtype is torch.float32 else 3e-2
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_captured_integers_of_every_dtype_and_stride(dtype):
    q, k, v = qkv(2, 2, 100, 16)
    ids = (torch.arange(400).reshape(2, 200) // 9 % 3).to(dtype)[:, ::2]
    mask = foci.Mask(lambda b, h, q, k: ids[b, q] == ids[b, k])
    torch.testing.assert_close(attention(q, k, v, mask=mask), exact(q, k, v, mask=mask).float(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_captured_numbers_of_every_dtype_and_stride(dtype):
    q, k, v = qkv(2, 2, 100, 16)
    table = torch.randn(2, 230).to(dtype).t()
    score = foci.Score(lambda s, b, h, q, k: s + table[q - k + 110, h])
    torch.testing.assert_close(attention(q, k, v, score=score), exact(q, k, v, score=score).float(), atol=3e-6, rtol=0)


def test_loads_stop_at_the_end_of_a_tensor():
    page = 4096 // 4
    q, k, v = qkv(1, 1, 50, 16)
    memory = torch.full((6 * page,), torch.nan)
    bias = memory[page : page + 50 * 50].view(50, 50)  # NaN on either side
    bias.normal_()
    score = foci.Score(lambda s, b, h, q, k: s + bias[q, k])
    assert torch.isfinite(attention(q, k, v, score=score)).all()


def test_tokens_of_no_sequence_get_zeros():
    tokens = torch.randn(20, 2, 16, requires_grad=True)
    offsets = torch.tensor([2, 9, 9, 15], dtype=torch.int32)
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # empty tensors start as NaN
    try:
        with foci.use("cpu"):
            out = foci.varlen_attn(tokens, tokens, tokens, offsets, offsets, 7, 7)
        (grad,) = torch.autograd.grad(out.sum(), tokens)
    finally:
        torch.use_deterministic_algorithms(was)
    for tensor in (out, grad):
        assert not tensor[:2].any()
        assert not tensor[15:].any()
        assert tensor[2:15].isfinite().all()
