"""Dropout of the weights stays dropout: each weight is zero or scaled up, in the asked proportion, anew at each call, and in the gradients."""

import pytest
import torch
import torch.nn.functional as F
from spelling_harness import HEADS, qkv

import foci
from compiled import several

LENGTH, P = 64, 0.25


def functional(q, k, v):
    return F.dropout(torch.softmax(q @ k.mT, -1), P) @ v


def before_a_cast(q, k, v):
    return F.dropout(torch.softmax((q @ k.mT).float(), -1), p=P, training=True).to(v.dtype) @ v


def after_a_mask(q, k, v):
    weights = torch.softmax((q @ k.mT).masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf), -1)
    return torch.dropout(weights, P, True) @ v


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(P)

    def forward(self, q, k, v):
        return torch.bmm(self.drop((q @ k.mT).flatten(0, 1).softmax(-1)), v.flatten(0, 1)).view_as(
            q[..., :1].expand(*q.shape[:3], v.shape[-1])
        )


def weights_of(function, seed):
    """The dropped weights themselves: values are the identity."""
    q, k, _ = qkv(LENGTH)
    v = torch.eye(LENGTH).expand(*q.shape[:2], LENGTH, LENGTH).clone().requires_grad_()
    torch.manual_seed(seed)
    out = function(q, k, v)
    (columns,) = torch.autograd.grad(out.sum(), v)
    return out.detach(), columns


# FUSE-02
@pytest.mark.parametrize("spelled", [functional, before_a_cast, after_a_mask, Module], ids=lambda f: f.__name__)
def test_weights_are_dropped_and_scaled(spelled):
    function = spelled() if isinstance(spelled, type) else spelled
    torch._dynamo.reset()
    # one length: its statistics are those of a length; dropout at several is in api/test_compile.py
    run = foci.compile(function, rest="eager", fullgraph=True)
    with foci.observe() as log:
        out, columns = weights_of(run, 1)
    assert [site.fused for site in log.fusions] == [True]
    assert log.calls[0].problem.formula.dropout
    q, k, v = qkv(LENGTH)
    weights = torch.softmax(
        (q @ k.mT).masked_fill(torch.ones(LENGTH, LENGTH).triu(1) > 0, -torch.inf) if spelled is after_a_mask else q @ k.mT, -1
    )
    some = weights > 0
    kept = (out != 0) & some
    torch.testing.assert_close(out[kept], (weights / (1 - P))[kept], rtol=1e-4, atol=1e-6)
    assert abs(kept.sum() / some.sum() - (1 - P)) < 4 * (P * (1 - P) / int(some.sum())) ** 0.5 + 1e-3
    # the gradient of each value is the sum of the very same weights
    torch.testing.assert_close(columns[..., 0], out.sum(-2), rtol=1e-4, atol=1e-5)
    again, _ = weights_of(run, 1)
    other, _ = weights_of(run, 2)
    assert torch.equal(out, again)
    assert not torch.equal(out, other)
    assert out.shape[1] == HEADS


# FUSE-02
def test_evaluation_drops_nothing():
    module = Module().eval()
    torch._dynamo.reset()
    run = foci.compile(module, rest="eager")
    for length in several(LENGTH, LENGTH + 3, LENGTH + 9):
        q, k, v = qkv(length)
        torch.testing.assert_close(run(q, k, v), module(q, k, v), rtol=1e-4, atol=1e-5)
