"""Packed tensors: every sequence as a dense call of its own."""

import pytest
import torch
from drawn import rand
from packed import ASKED, BACKENDS, per_sequence, pieces

import foci


def window(left, right):
    def mask(sq, skv):
        distance = torch.arange(sq)[:, None] + skv - sq - torch.arange(skv)
        return (distance <= (left if left >= 0 else skv + sq)) & (distance >= (-right if right >= 0 else -skv - sq))

    return mask


# JAG-01, JAG-03
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [(-1, -1), (-1, 0), (2, 0), (0, 0), (1, 2), (-1, 1), (3, -1)], ids=str)
def test_varlen(size, dtype, backend):
    q_lengths, kv_lengths = (3, 0, 7, 1), (5, 2, 7, 4)
    cu_q, cu_kv = (torch.tensor([0, *ls]).cumsum(0).to(dtype) for ls in (q_lengths, kv_lengths))
    q, k, v = (rand(n, 4, 8, seed=n).requires_grad_() for n in (11, 18, 18))
    with foci.use(backend):
        out, lse = foci.varlen_attn(q, k, v, cu_q, cu_kv, 7, 7, window_size=size, return_aux=ASKED)
    want = per_sequence(q, k, v, q_lengths, kv_lengths, window(*size))
    assert out.shape == (11, 4, 8) and lse.shape == (4, 11)
    torch.testing.assert_close(out, want)
    weights = rand(*want.shape, seed=4)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), weights), torch.autograd.grad(want, (q, k, v), weights))


# JAG-01
def test_varlen_has_torchs_signature():
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    ours, theirs = inspect.signature(foci.varlen_attn).parameters, inspect.signature(varlen_attn).parameters
    assert list(theirs)[:7] == list(ours)[:7]
    for name in theirs:
        assert ours[name].kind == theirs[name].kind and ours[name].default == theirs[name].default, name


def test_varlen_takes_what_tunes_torchs_kernels_and_no_pages():
    q, cu = rand(9, 2, 8), torch.tensor([0, 4, 9])
    assert torch.equal(foci.varlen_attn(q, q, q, cu, cu, 5, 5, num_splits=1), foci.varlen_attn(q, q, q, cu, cu, 5, 5))
    with pytest.raises(ValueError, match=r"block_table .* foci\.paged_attention"):
        foci.varlen_attn(q, q, q, cu, cu, 5, 5, block_table=torch.zeros(2, 1, dtype=torch.int32))


def test_varlen_of_some_keys():
    cu = torch.tensor([0, 4, 9])
    q, k, v = (rand(9, 2, 8, seed=n).requires_grad_() for n in range(3))
    out = foci.varlen_attn(q, k, v, cu, cu, 5, 5, seqused_k=torch.tensor([2, 5]))
    want = torch.cat([per_sequence(q[:4], k[:2], v[:2], [4], [2]), per_sequence(q[4:], k[4:], v[4:], [5], [5])])
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (q, k, v)), torch.autograd.grad(want.square().sum(), (q, k, v)))


# SDPA-22
def test_varlen_to_the_second_order():
    cu, table = torch.tensor([0, 3, 7]), rand(2, seed=5).requires_grad_()
    tensors = tuple(rand(7, 2, 3, seed=n).requires_grad_() for n in range(3))

    def call(q, k, v, t):
        return foci.varlen_attn(q, k, v, cu, cu, 4, 4, score=lambda s, b, h, i, j: s * t[h], return_aux=ASKED)

    assert torch.autograd.gradcheck(call, (*tensors, table))
    assert torch.autograd.gradgradcheck(call, (*tensors, table))
    assert torch.autograd.gradcheck(call, (*tensors, table), check_batched_grad=True)


def test_varlen_under_autocast_and_torch_func():
    cu = torch.tensor([0, 3, 7])
    q = rand(7, 2, 8).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = foci.varlen_attn(q, q, q, cu, cu, 4, 4)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32
    plain = q.detach()
    want = torch.autograd.grad(foci.varlen_attn(q, q, q, cu, cu, 4, 4).square().sum(), q)[0]
    got = torch.func.grad(lambda t: foci.varlen_attn(t, t, t, cu, cu, 4, 4).square().sum())(plain)
    torch.testing.assert_close(got, want)


def test_varlen_takes_functions_and_shared_offsets():
    cu = torch.tensor([0, 4, 9])
    q = rand(9, 4, 8)
    k = rand(9, 2, 8, seed=1)
    out = foci.varlen_attn(q, k, k, cu, None, 5, 5, enable_gqa=True, mask=lambda b, h, i, j: i >= j, score=foci.scores.softcap(1.0))
    want = []
    for a, b in zip(pieces(q, (4, 5)), pieces(k, (4, 5)), strict=True):
        b = b.repeat_interleave(2, 1)
        scores = (a @ b.mT / 8**0.5).tanh().masked_fill(torch.ones(a.shape[2], a.shape[2]).triu(1) > 0, -torch.inf)
        want.append((scores.softmax(-1) @ b)[0].transpose(0, 1))
    torch.testing.assert_close(out, torch.cat(want))


# JAG-03
def test_tokens_outside_every_sequence():
    cu = torch.tensor([2, 5, 8])
    q = rand(10, 2, 8).requires_grad_()
    for backend in BACKENDS:
        with foci.use(backend):
            out, lse = foci.varlen_attn(q, q, q, cu, cu, 3, 3, return_aux=ASKED)
        assert not out[[0, 1, 8, 9]].any() and bool((lse[:, [0, 1, 8, 9]] == -torch.inf).all())
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert not grad[[0, 1, 8, 9]].any() and bool(grad.isfinite().all())


@pytest.mark.parametrize("backend", ["cpu", *BACKENDS])
@pytest.mark.parametrize("offsets", [(0, 3, 30), (-3, 3, 9), (0, 7, 5)], ids=str)
def test_offsets_beyond_the_tokens(offsets, backend):
    q = rand(9, 2, 8, dtype=torch.float32)
    with foci.use(backend), pytest.raises(ValueError, match="sequences of query must follow each other within its 9 tokens: cu_seq_q must"):
        foci.varlen_attn(q, q, q, torch.tensor(offsets), None, 30, 30)


def test_used_keys_of_the_next_sequence():
    q, cu = rand(9, 2, 8, dtype=torch.float32), torch.tensor([0, 4, 9])
    with pytest.raises(ValueError, match="sequences of key must .* got one from 0 to 5, the next from 4"):
        foci.varlen_attn(q, q, q, cu, cu, 5, 5, seqused_k=torch.tensor([5, 5]))


@pytest.mark.parametrize("name", ["max_q", "max_k"])
def test_sequences_longer_than_the_call_says(name):
    q, cu = rand(9, 2, 8, dtype=torch.float32), torch.tensor([0, 4, 9])
    with pytest.raises(ValueError, match=f"{name} must be the length of the longest sequence of .*; got 4, one has 5"):
        foci.varlen_attn(q, q, q, cu, cu, **{"max_q": 5, "max_k": 5, name: 4})


def test_wrong_arguments_are_refused_after_right_ones():
    q, k = torch.randn(10, 4, 16), torch.randn(10, 2, 16)
    offsets = torch.tensor([0, 3, 10])
    for _ in range(3):  # known from then on
        foci.varlen_attn(q, q, q, offsets, offsets, 7, 7)
        foci.varlen_attn(q, k, k, offsets, offsets, 7, 7, enable_gqa=True)
    with pytest.raises(TypeError, match="cu_seq_q"):
        foci.varlen_attn(q, q, q, offsets.float(), offsets, 7, 7)
    with pytest.raises(TypeError, match="cu_seq_k"):
        foci.varlen_attn(q, q, q, offsets, offsets.tolist(), 7, 7)
    with pytest.raises(TypeError, match="cu_seq_q"):
        foci.varlen_attn(q, q, q, None, None, 7, 7)
    with pytest.raises(ValueError, match="cu_seq_q"):
        foci.varlen_attn(q, q, q, offsets[None], offsets, 7, 7)
    with pytest.raises(ValueError, match="same sequences"):
        foci.varlen_attn(q, q, q, offsets, offsets[:2], 7, 7)
    with pytest.raises(ValueError, match="max_q"):
        foci.varlen_attn(q, q, q, offsets, offsets, -1, 7)
    with pytest.raises(ValueError, match="seqused_k"):
        foci.varlen_attn(q, q, q, offsets, offsets, 7, 7, seqused_k=torch.tensor([1]))
    with pytest.raises(ValueError, match="enable_gqa"):
        foci.varlen_attn(q, k, k, offsets, offsets, 7, 7)
    with pytest.raises(ValueError, match="3 dimensions"):
        foci.varlen_attn(q[None], q, q, offsets, offsets, 7, 7)
