"""The gradient of a learned bias that comes with dq, and who takes that way; in Triton's interpreter or on a GPU."""

import os

import pytest
import torch

import foci
from foci import scores

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels run on a GPU or in the interpreter", allow_module_level=True)

from foci.backends.gpu import captured_grad  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.parametrize("device", [DEVICE.type])


@pytest.fixture
def taken(monkeypatch):
    """Entries that each bias gradient summed over."""
    entries = []

    def note(builder, call, grad_inputs, rows, dq, learned, target):
        entries.append(learned.entries)
        return original(builder, call, grad_inputs, rows, dq, learned, target)

    original = captured_grad.bias_gradient
    from foci.backends.gpu import portable_passes

    monkeypatch.setattr(portable_passes, "bias_gradient", note)
    return entries


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]


def gradients(q, k, v, bias, *, scale=None, **options):
    with foci.use("triton"):
        out = foci.attention(q, k, v, score=scores.bias(bias), scale=scale, **options)
    return torch.autograd.grad(out, (q, k, v, bias), torch.ones_like(out).cumsum(2) / 10)


def expected(q, k, v, bias, *, scale=None):
    q, k, v, bias = (t.detach().double().requires_grad_() for t in (q, k, v, bias))
    group = q.shape[1] // k.shape[1]
    out = torch.softmax(
        q @ k.repeat_interleave(group, 1).mT * (q.shape[3] ** -0.5 if scale is None else scale) + bias, -1
    ) @ v.repeat_interleave(group, 1)
    return torch.autograd.grad(out, (q, k, v, bias), torch.ones_like(out).cumsum(2) / 10)


# SDPA-04
@pytest.mark.parametrize(
    ("batch", "bias_batch", "kv_len", "stretch", "heads", "scale"),
    [
        (3, 1, 37, 32, (2, 1), None),  # several stretches, the last one cut short
        (2, 1, 32, 16, (1, 1), -0.3),
        (2, 1, 37, 512, (1, 1), None),
        (2, 2, 37, 16, (2, 2), None),
        (1, 1, 32, 16, (2, 1), None),
    ],
)
def test_gradients_are_those_of_the_formula(batch, bias_batch, kv_len, stretch, heads, scale, device, taken, monkeypatch):
    monkeypatch.setattr(captured_grad, "_STRETCH", stretch)
    inputs = tensors(
        (batch, heads[0], 19, 24), (batch, heads[1], kv_len, 24), (batch, heads[1], kv_len, 24), (bias_batch, heads[0], 19, kv_len)
    )
    grads = gradients(*inputs, scale=scale)
    assert taken == [batch // bias_batch]
    for got, want in zip(grads, expected(*inputs, scale=scale), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-5)
    if DEVICE.type == "cuda":  # the interpreter has one thread: programs run in the same order again
        for got, again in zip(grads, gradients(*inputs, scale=scale), strict=True):
            assert torch.equal(got, again)


def test_who_is_not_read_at_every_place_by_one_head_takes_the_other_way(device, taken):
    q, k, v, shared, wide = tensors((2, 2, 9, 16), (2, 2, 11, 16), (2, 2, 11, 16), (9, 11), (2, 2, 9, 20))
    gradients(q, k, v, shared)
    gradients(q, k, v, shared, mask=foci.masks.causal())
    gradients(q, k, v, wide[..., :11].detach().requires_grad_(), mask=foci.masks.causal())
    with foci.use("triton"):
        out = foci.attention(q, k, v, score=foci.Score(lambda s, b, h, i, j: s + wide[b, h, i, j]))
    torch.autograd.grad(out.sum(), wide)
    assert taken == []


def test_a_bias_read_at_a_computed_place_takes_the_other_way(device, taken):
    q, k, v, table = tensors((2, 2, 19, 16), (2, 2, 21, 16), (2, 2, 21, 16), (19 + 20, 2))
    with foci.use("triton"):
        out = foci.attention(q, k, v, score=foci.Score(lambda s, b, h, i, j: s + table[i - j + 20, h]))
    rows, columns = torch.arange(19, device=device)[:, None], torch.arange(21, device=device)
    plain = torch.softmax(q @ k.mT * 16**-0.5 + table[rows - columns + 20].permute(2, 0, 1), -1) @ v
    (got,), (want,) = (torch.autograd.grad(t.square().sum(), table) for t in (out, plain))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert taken == []
