"""A softmax in an autograd.Function is fused where the Function's backward is its derivative; else it stays, and the report says why."""

import pytest
import torch
from fusing import fused, learned, qkv, reasons


def hidden(scores):
    return torch.arange(scores.shape[-1]) % 3 == 1


def every_fifth(scores):
    return torch.arange(scores.shape[-1]) % 5 == 2


def of(weigh, derive=lambda ctx, grad: torch._softmax_backward_data(grad, *ctx.saved_tensors, -1, grad.dtype)):
    """Attention with a Function of scores that saves its result."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scores):
            weights = weigh(scores)
            ctx.save_for_backward(weights)
            return weights

        backward = staticmethod(derive)

    return lambda q, k, v: Own.apply(q @ k.mT / 3) @ v


# The numbers are literals: Dynamo makes a symbol of a float that a function has as a default or closes over.
def filled(scores):
    mask = hidden(scores)
    return scores.masked_fill(mask, -1e30).softmax(-1).masked_fill(mask, 0.0)


def filled_with_half(scores):
    mask = hidden(scores)
    return scores.masked_fill(mask, 0.5).softmax(-1).masked_fill(mask, 0.0)


def weighing_a_tenth(scores):
    mask = hidden(scores)
    return scores.masked_fill(mask, -1e30).softmax(-1).masked_fill(mask, 0.1)


FUSED = {
    "alone": of(lambda scores: scores.softmax(-1)),
    "along a dim that is counted from the first": of(lambda scores: torch.softmax(scores, 3)),
    "filled": of(filled),
    "by arguments' names": of(filled, lambda ctx, grad: torch._softmax_backward_data(
        grad_output=grad, output=ctx.saved_tensors[0], dim=-1, input_dtype=grad.dtype)),
}  # fmt: skip
LEFT = {
    "filled before alone": of(lambda scores: scores.masked_fill(hidden(scores), -1e30).softmax(-1)),
    "filled behind alone": of(lambda scores: scores.softmax(-1).masked_fill(hidden(scores), 0.0)),
    "filled under two masks": of(
        lambda scores: scores.masked_fill(hidden(scores), -1e30).softmax(-1).masked_fill(every_fifth(scores), 0.0)
    ),
    "filled with another number": of(weighing_a_tenth),
    "scaled within": of(lambda scores: (scores * 2).softmax(-1)),
    "scaled from the left": of(lambda scores: (2 * scores).softmax(-1)),
    "nothing of the scores": of(lambda scores: torch.ones_like(scores).softmax(-1)),
    "of other rows": of(filled, lambda ctx, grad: torch._softmax_backward_data(grad, *ctx.saved_tensors, -2, grad.dtype)),
    "straight through": of(filled, lambda ctx, grad: grad),
    "doubled": of(filled, lambda ctx, grad: 2 * torch._softmax_backward_data(grad, *ctx.saved_tensors, -1, grad.dtype)),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_softmax_with_its_derivative_is_fused(name):
    backend = fused(FUSED[name], *learned(*qkv()))
    assert reasons(backend) == [None]


def test_weights_that_are_zeroed_though_they_count_are_declined_for_that():
    backend = fused(of(filled_with_half), *learned(*qkv()))
    assert reasons(backend) == ["weights that the scores do not mask are zeroed after the softmax"]


@pytest.mark.parametrize("name", LEFT)
def test_another_backward_is_left(name):
    backend = fused(LEFT[name], *learned(*qkv()))
    assert reasons(backend) == ["the softmax is in an autograd.Function with a backward of its own"]
    assert all(__file__ in site.location for site in backend.sites)


def test_an_attention_in_a_function_is_reported():
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q)
            return (q @ k.mT).softmax(-1) @ v

        @staticmethod
        def backward(ctx, grad):
            return grad * 2, None, None

    backend = fused(Attention.apply, *learned(*qkv()))
    assert reasons(backend) == ["the softmax is in an autograd.Function with a backward of its own"]


def test_a_softmax_that_is_no_attention_is_no_site():
    class Chances(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.softmax(-1)

        @staticmethod
        def backward(ctx, grad):
            return grad

    assert fused(lambda q, k, v: Chances.apply(q).sum(-1), *learned(*qkv())).sites == []
