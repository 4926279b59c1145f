"""Dropout, auxiliary outputs and sinks of dense attention."""

import math

import pytest
import torch
from by_formula import BACKENDS, check, use
from drawn import rand

import foci


# SDPA-08
def test_dropout_is_a_function_of_seed_and_position():
    q, k, v = (rand(2, 4, 70, 8, seed=n).requires_grad_() for n in range(3))
    runs = []
    for backend in ("reference", "blocked", None):
        with use(backend):
            torch.manual_seed(11)
            out = foci.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
            runs.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


# SDPA-08
def test_dropout_mask_can_be_rebuilt():
    from foci.dropout import keep

    q, k, v = (rand(2, 4, 9, 8, seed=n) for n in range(3))
    torch.manual_seed(5)
    out = foci.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
    torch.manual_seed(5)
    seed = torch.randint(0, 2**63 - 1, (1,))
    b, h, i, j = (
        torch.arange(n).view(shape) for n, shape in ((2, (-1, 1, 1, 1)), (4, (1, -1, 1, 1)), (9, (1, 1, -1, 1)), (9, (1, 1, 1, -1)))
    )
    weights = (q @ k.mT / math.sqrt(8)).softmax(-1) * keep(seed, 0.4, b, h, i, j) / 0.6
    torch.testing.assert_close(out, weights @ v)


# SDPA-08
def test_dropout_seeds():
    q = rand(1, 2, 16, 8)
    torch.manual_seed(0)
    first, second = (foci.scaled_dot_product_attention(q, q, q, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(0)
    again = foci.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert torch.equal(first, again) and not torch.equal(first, second)


# SDPA-08
def test_dropout_of_nothing_and_of_everything():
    q, k, v = (rand(1, 2, 16, 8, seed=n).requires_grad_() for n in range(3))
    before = torch.get_rng_state()
    check(q, k, v, dropout_p=0.0)
    foci.explain(q, k, v, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)  # neither a call without dropout nor an explanation draws numbers
    out = foci.scaled_dot_product_attention(q, k, v, dropout_p=1.0)
    out.sum().backward()
    assert not out.any() and not q.grad.any() and not k.grad.any() and not v.grad.any()


# SDPA-08
def test_dropout_keeps_the_mean():
    ones = torch.ones(4, 8, 128, 1)
    q = torch.randn(4, 8, 128, 4)
    out = foci.scaled_dot_product_attention(q, q, ones, dropout_p=0.25)
    assert abs(out.mean().item() - 1) < 0.01
    assert out.std() > 0.01


# SDPA-19
def test_dropout_leaves_auxiliary_outputs_alone():
    q = rand(1, 2, 16, 8)
    asked = foci.AuxRequest(lse=True, row_max=True, column_sums=True, weights=True)
    _, without = foci.attention(q, q, q, return_aux=asked)
    _, dropped = foci.attention(q, q, q, dropout_p=0.5, return_aux=asked)
    for a, b in zip(without, dropped, strict=True):
        torch.testing.assert_close(a, b)


# SDPA-19
@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_auxiliary_outputs(backend):
    q, k, v = (rand(2, 4, n, 8, seed=n).requires_grad_() for n in (9, 12, 12))
    scores = q @ k.mT / math.sqrt(8)
    weights = scores.softmax(-1)
    wanted = (scores.logsumexp(-1), scores.amax(-1), weights.sum(2), weights)
    with foci.use(backend):
        out, aux = foci.attention(q, k, v, return_aux=foci.AuxRequest(lse=True, row_max=True, column_sums=True, weights=True))
    assert not aux.row_max.requires_grad
    for got, want in zip(aux, wanted, strict=True):
        torch.testing.assert_close(got, want)
    cotangents = [rand(*t.shape, seed=50 + n) for n, t in enumerate((out, aux.lse, aux.column_sums, aux.weights))]
    got = torch.autograd.grad((out, aux.lse, aux.column_sums, aux.weights), (q, k, v), cotangents)
    want = torch.autograd.grad((weights @ v, wanted[0], wanted[2], wanted[3]), (q, k, v), cotangents)
    torch.testing.assert_close(got, want)


# SDPA-19
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("asked", ["column_sums", "weights"])
def test_each_backward_is_of_the_outputs_that_it_was_used_with(backend, asked):
    """Of calls of one spec, some losses use out alone, some another output too, in any order."""
    q, k, v = (rand(2, 4, n, 8, seed=n, dtype=torch.float32).requires_grad_() for n in (9, 12, 12))
    weights = (q @ k.mT / math.sqrt(8)).softmax(-1)
    wanted = {"out": weights @ v, "lse": (q @ k.mT / math.sqrt(8)).logsumexp(-1), "column_sums": weights.sum(2), "weights": weights}
    for used in [("out",)] * 2 + [("out", asked)] * 2 + [("lse",), (asked,), ("out",), ("out", "lse"), ("out", "lse", asked), ("out",)]:
        with use(backend):
            out, aux = foci.attention(q, k, v, return_aux=foci.AuxRequest(lse=True, **{asked: True}))
        found = {"out": out, "lse": aux.lse, asked: getattr(aux, asked)}
        cotangents = [rand(*wanted[name].shape, seed=n, dtype=torch.float32) for n, name in enumerate(used)]
        got = torch.autograd.grad([found[name] for name in used], (q, k, v), cotangents, allow_unused=True)
        want = torch.autograd.grad([wanted[name] for name in used], (q, k, v), cotangents, retain_graph=True, allow_unused=True)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(
                torch.zeros(()).expand(v.shape) if one is None else one, torch.zeros_like(v) if other is None else other
            )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sink(backend, dtype):
    q, k, v = (rand(2, 4, n, 8, seed=n, dtype=dtype).requires_grad_() for n in (9, 12, 12))
    sink = rand(4, dtype=dtype).requires_grad_()
    scores = q @ k.mT / math.sqrt(8)
    logits = torch.cat([scores, sink[None, :, None, None].expand(2, 4, 9, 1)], -1)
    with use(backend):
        out, aux = foci.attention(q, k, v, sink=sink, return_aux=foci.AuxRequest(lse=True))
    want = logits.softmax(-1)[..., :-1] @ v
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(aux.lse, logits.logsumexp(-1))
    cotangent = rand(*out.shape, seed=3, dtype=dtype)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v, sink), cotangent), torch.autograd.grad(want, (q, k, v, sink), cotangent))


# SDPA-06
def test_sink_with_rows_without_keys():
    q, k, v = (rand(1, 2, 4, 8, seed=n).requires_grad_() for n in range(3))
    sink = rand(2).requires_grad_()
    mask = torch.ones(4, 4, dtype=torch.bool).tril(-1)
    out, aux = foci.attention(q, k, v, mask=mask, sink=sink, return_aux=foci.AuxRequest(lse=True))
    (out.sum() + aux.lse.sum()).backward()
    assert not out[:, :, 0].any()
    torch.testing.assert_close(aux.lse[:, :, 0], sink.detach()[None])
    assert all(bool(t.grad.isfinite().all()) for t in (q, k, v, sink))


def test_sink_alone():
    q, k, v = (rand(2, 4, n, 8, seed=n).requires_grad_() for n in (9, 12, 12))
    sink = rand(4).requires_grad_()
    logits = torch.cat([q @ k.mT / math.sqrt(8), sink[None, :, None, None].expand(2, 4, 9, 1)], -1)
    want = logits.softmax(-1)[..., :-1] @ v
    out = foci.attention(q, k, v, sink=sink)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), (q, k, v, sink)), torch.autograd.grad(want.square().sum(), (q, k, v, sink))
    )
