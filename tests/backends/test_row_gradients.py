"""Gradients of what a score adds to whole rows: those of the logsumexp, by hand in float64, and zero where it has none."""

import os

import pytest
import torch

import foci
from foci.backends.cpu import build

INTERPRETED = ("triton",) if os.environ.get("TRITON_INTERPRET") == "1" else ()
EXACT = ("blocked", "cpu", *INTERPRETED)
# What a bias broadcasts over: the keys, and other dimensions besides.
SHAPES = {"rows": (2, 4, 19, 1), "heads": (1, 4, 1, 1), "queries": (19, 1), "one": (1,), "batch": (2, 1, 1, 1)}
every_backend = pytest.mark.parametrize("backend", EXACT)


@pytest.fixture(autouse=True)
def _can_run(request):
    named = request.node.callspec.params
    if named["backend"] == "cpu" and build.obstacle() is not None:
        pytest.skip(str(build.obstacle()))
    if named["backend"] == "triton" and named.get("dtype") is torch.bfloat16:
        pytest.skip("Triton's interpreter has no bfloat16 products")


def draw(*shape, dtype):
    return torch.randn(*shape).to(dtype).requires_grad_()


# SDPA-03, FLEX-02
@pytest.mark.parametrize("backend", ("reference", *EXACT))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bias_that_is_constant_over_keys_has_no_gradient(backend, shape, dtype):
    query, key, value = draw(2, 4, 19, 24, dtype=dtype), draw(2, 2, 35, 24, dtype=dtype), draw(2, 2, 35, 16, dtype=dtype)
    bias = draw(*SHAPES[shape], dtype=dtype)
    with foci.use(backend):
        out = foci.attention(query, key, value, bias=bias)
    (grad,) = torch.autograd.grad(out, bias, torch.randn_like(out))
    assert grad.shape == bias.shape
    assert grad.dtype == dtype
    if backend == "reference":  # by autograd: the rounding of float32
        assert grad.abs().max() < 1e-4
    else:
        assert not grad.any()


def by_hand(tensors, added, keep, cotangents):
    """Gradients of query, key, value and of what is added to the scores, in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (*tensors, added)]
    query, key, value, more = leaves
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = torch.where(keep, query @ key.mT * query.shape[-1] ** -0.5 + more, -torch.inf)
    some = keep.any(-1)
    lse = scores.where(some[..., None], 0.0).logsumexp(-1).where(some, 0.0)
    weights = torch.softmax(scores.where(some[..., None], 0.0), -1) * keep
    return torch.autograd.grad([weights @ value, lse], leaves, [t.double() for t in cotangents])


# SDPA-03, FLEX-02
@pytest.mark.parametrize("backend", ("reference", *EXACT))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_has_the_gradient_of_the_logsumexp(backend, shape, dtype):
    """Rows 5 to 7 attend to nothing, so the gradient of their logsumexp contributes nothing."""
    query, key, value = draw(2, 4, 19, 24, dtype=dtype), draw(2, 2, 35, 24, dtype=dtype), draw(2, 2, 35, 16, dtype=dtype)
    bias = draw(*SHAPES[shape], dtype=dtype)
    rows = torch.arange(19)
    keep = ((rows < 5) | (rows > 7))[:, None] & (torch.arange(35) < 30)
    with foci.use(backend):
        mask = foci.Mask(lambda b, h, q, k: keep[q, k])
        out, aux = foci.attention(query, key, value, bias=bias, mask=mask, return_aux=foci.AuxRequest(lse=True))
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(aux.lse)
    expected = by_hand((query, key, value), bias.detach().expand(2, 4, 19, 35), keep.expand(2, 4, 19, 35), (grad_out, grad_lse))
    grad_lse[:, :, 5:8] = torch.nan
    gradients = torch.autograd.grad((out, aux.lse), (query, key, value, bias), (grad_out, grad_lse))
    tolerance = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 4e-2}[dtype]
    for a, b in zip(gradients, (*expected[:3], expected[3].sum_to_size(bias.shape)), strict=True):
        torch.testing.assert_close(a.double(), b, atol=tolerance * max(1.0, float(b.abs().max())), rtol=0)


# FLEX-02
@every_backend
def test_beside_reads_that_follow_the_keys(backend):
    """One tensor read twice: by rows, times a number of the row, and by keys."""
    query, key, value = (draw(1, 2, 23, 16, dtype=torch.float32) for _ in range(3))
    table = draw(2, 23, dtype=torch.float32)
    with foci.use(backend):
        out, aux = foci.attention(
            query, key, value, score=lambda s, b, h, q, k: s + table[h, q] * (q + 1) + table[h, k], return_aux=foci.AuxRequest(lse=True)
        )
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(aux.lse)
    (gradient,) = torch.autograd.grad((out, aux.lse), table, (grad_out, grad_lse))
    wide = table.detach().double().requires_grad_()
    added = wide[:, :, None] * torch.arange(1, 24)[:, None] + wide[:, None, :]
    scores = query.double() @ key.double().mT * 0.25 + added
    flowing = (torch.softmax(scores, -1) @ value.double(), scores.logsumexp(-1))
    (expected,) = torch.autograd.grad(flowing, wide, (grad_out.double(), grad_lse.double()))
    torch.testing.assert_close(gradient.double(), expected, atol=1e-4, rtol=1e-4)


# JAG-01
@every_backend
def test_in_packed_sequences(backend):
    """One of them empty, tokens behind the last; a weight that reads the lengths."""
    lengths = [7, 0, 12, 3]
    offsets = torch.tensor([0, 7, 7, 19, 22])
    query, key, value = (draw(25, 2, 16, dtype=torch.float32) for _ in range(3))
    table = draw(4, 2, 12, dtype=torch.float32)
    with foci.use(backend):
        out, lse = foci.varlen_attn(
            query, key, value, offsets, None, 12, 12, score=lambda s, b, h, q, k: s + table[b, h, q] * foci.kv_len(),
            return_aux=foci.AuxRequest(lse=True),
        )  # fmt: skip
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    (gradient,) = torch.autograd.grad((out, lse), table, (grad_out, grad_lse))
    expected = torch.zeros(table.shape, dtype=torch.float64)
    for n, (start, length) in enumerate(zip(offsets.tolist(), lengths, strict=False)):
        expected[n, :, :length] = grad_lse[:, start : start + length].double() * length
    torch.testing.assert_close(gradient.double(), expected, atol=1e-5, rtol=1e-5)
