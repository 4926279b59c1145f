"""Calls known from before give what they gave, of the tensors and functions at hand."""

import pytest
import torch

import foci
from foci import masks, recall

GEOMETRY = (2, 4, 24, 8)


def tensors(*, grad=False, batch=2):
    return tuple(torch.randn(batch, *GEOMETRY[1:]).requires_grad_(grad) for _ in range(3))


def reference(q, k, v, **options):
    with foci.use("reference"):
        return foci.attention(q, k, v, **options)


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(recall, "_known", type(recall._known)())


@pytest.mark.parametrize("grad", [False, True])
def test_other_tensors_captures_and_numbers(grad):
    for number in (2.0, 2.0, 3.0):
        q, k, v = tensors(grad=grad)
        slopes = torch.rand(4, requires_grad=grad)
        options = {
            "mask": foci.masks.window(5),
            "score": lambda s, b, h, i, j, slopes=slopes, number=number: s * number + slopes[h] * (i - j),
            "scale": 0.3,
        }
        got, want = foci.attention(q, k, v, **options), reference(q, k, v, **options)
        torch.testing.assert_close(got, want)
        if grad:
            weights = torch.randn_like(got)
            inputs = (q, k, v, slopes)
            found, sought = (torch.autograd.grad(out, inputs, weights) for out in (got, want))
            torch.testing.assert_close(found, sought, rtol=1e-4, atol=1e-4)
    known = [call for call in recall._known.values() if call.outline.chosen.decision.plan.backend != "reference"]
    assert len(known) == 2  # one for each number


def test_calls_that_differ_are_told_apart():
    q, k, v = tensors()
    first = foci.attention(q, k, v)
    assert foci.attention(q, k, v, mask=masks.causal()).ne(first).any()
    assert foci.attention(q, k, v, scale=0.1).ne(first).any()
    with foci.use("reference"), foci.observe() as log:
        foci.attention(q, k, v)
    assert log.calls[0].backend == "reference"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert foci.attention(q, k, v).dtype == torch.bfloat16
    with torch.no_grad():
        leaves = tensors(grad=True)
        assert not foci.attention(*leaves).requires_grad
    assert foci.attention(*leaves).requires_grad
    wide = torch.randn(2, 4, 24, 16)[..., ::2]
    torch.testing.assert_close(foci.attention(wide, k, v), reference(wide, k, v))


def test_a_batch_that_is_repeated_is_not_taken_for_one_that_is_not():
    q, (k, v) = tensors()[0], tensors(batch=1)[:2]
    for _ in range(2):
        torch.testing.assert_close(foci.attention(q, k, v), reference(q, k, v))


def test_dropout_draws_anew():
    q, k, v = tensors()
    assert foci.attention(q, k, v, dropout_p=0.5).ne(foci.attention(q, k, v, dropout_p=0.5)).any()


def test_packed_calls_of_new_offsets():
    for cut in (5, 9):
        q, k, v = (torch.randn(24, 4, 8, requires_grad=True) for _ in range(3))
        offsets = torch.tensor([0, cut, 24])
        with foci.use("reference"):
            want = foci.varlen_attn(q, k, v, offsets, offsets, 19, 19, window_size=(-1, 0))
        got = foci.varlen_attn(q, k, v, offsets, offsets, 19, 19, window_size=(-1, 0))
        torch.testing.assert_close(got, want)
        weights = torch.randn_like(got)
        torch.testing.assert_close(torch.autograd.grad(got, (q, k, v), weights), torch.autograd.grad(want, (q, k, v), weights))


def test_wrong_arguments_are_told_at_each_call():
    q, k, v = tensors()
    foci.attention(q, k, v, dropout_p=0.0)
    for _ in range(2):
        with pytest.raises(TypeError, match="dropout_p"):
            foci.attention(q, k, v, dropout_p=False)
        with pytest.raises(TypeError, match="scale"):
            foci.attention(q, k, v, scale=True)
        with pytest.raises(ValueError, match="head dim"):
            foci.attention(q, k[..., :4], v)


def test_what_is_known_is_bounded(monkeypatch):
    monkeypatch.setattr(recall, "_CAPACITY", 4)
    for length in range(1, 12):
        q = torch.randn(1, 1, length, 8)
        foci.attention(q, q, q)
    assert len(recall._known) == 4
