"""What excluded positions hold never contributes: NaN and infinities in their keys, values, queries and gradients. The reference is
written out by hand, sequence of sums by sequence of sums, in float64."""

import pytest
import torch

import foci
from foci.backends.cpu import build

BACKENDS = ("cpu", "blocked")


def attention(backend, tensors, **arguments):
    if backend == "cpu" and build.obstacle() is not None:
        pytest.skip(str(build.obstacle()))
    with foci.use(backend):
        return foci.attention(*tensors, **arguments)


def weighted(weights, attended, values):
    """Sums over attended positions alone, [.., q, k] and [.., k, d] to [.., q, d]."""
    products = weights[..., None] * values[..., None, :, :]
    return torch.where(attended[..., None], products, 0.0).sum(-2)


def by_hand(tensors, attended, grad_out):
    """out, lse and the gradients of query, key and value, where excluded positions are left out of every sum."""
    query, key, value, grad_out = (t.double() for t in (*tensors, grad_out))
    scale = query.shape[-1] ** -0.5
    scores = torch.where(attended, scale * (query @ key.mT), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(attended, (scores - lse[..., None]).exp(), 0.0)
    out = weighted(weights, attended, value)
    delta = torch.where(attended.any(-1), (out * grad_out).sum(-1), 0.0)
    grad = torch.where(attended, weights * (grad_out @ value.mT - delta[..., None]), 0.0)
    turned = attended.mT
    grads = scale * weighted(grad, attended, key), scale * weighted(grad.mT, turned, query), weighted(weights.mT, turned, grad_out)
    return out, lse, *grads


def compare(found, expected, tolerance):
    for name, a, b in zip(("out", "lse", "query", "key", "value"), found, expected, strict=True):
        a, b = a.double(), b.double()
        finite = b.isfinite() | (b == -torch.inf if name == "lse" else torch.zeros_like(b, dtype=torch.bool))
        assert torch.equal(a.isfinite() | (a == -torch.inf if name == "lse" else False), finite), name
        torch.testing.assert_close(a[finite], b[finite], atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


# Rows 40 to 50 attend to nothing; keys 90 on are padding, and so on: what each kind of mask excludes.
LENGTH = 150
AT = torch.arange(LENGTH)
MASKS = {
    "causal": AT[:, None] >= AT,
    "padding": (AT < 90).expand(LENGTH, LENGTH),
    "documents": AT[:, None] // 37 == AT // 37,
    "window": (AT[:, None] - AT).abs() < 20,
    "nothing in some rows": (AT < 90) & ((AT[:, None] < 40) | (AT[:, None] > 50)),
}
# what holds it: (tensor, position), each of which some mask excludes for some rows or all
PLACES = {
    "a value": ("value", 100), "a key": ("key", 100), "an early value": ("value", 3), "an early key": ("key", 3), "a query": ("query", 45),
    "a gradient": ("grad_out", 45), "a late gradient": ("grad_out", 140),
}  # fmt: skip


# SDPA-06, FLEX-05
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_excluded_positions_contribute_nothing(backend, mask, dtype, bad):
    torch.manual_seed(0)
    keep = MASKS[mask]
    for place, (name, at) in PLACES.items():
        if bad == torch.inf and name in ("key", "query"):
            continue  # an infinite score is -inf or NaN by the sign of its partner
        named = {n: torch.randn(1, 2, LENGTH, 24).to(dtype) for n in ("query", "key", "value", "grad_out")}
        named[name][:, :, at, 5] = bad
        leaves = [named[n].clone().requires_grad_() for n in ("query", "key", "value")]
        out, aux = attention(backend, leaves, mask=lambda b, h, q, k: keep[q, k], return_aux=foci.AuxRequest(lse=True))
        grads = torch.autograd.grad(out, leaves, named["grad_out"])
        expected = by_hand([t.detach() for t in leaves], keep, named["grad_out"])
        try:
            compare((out, aux.lse, *grads), expected, 5e-6 if dtype is torch.float32 else 3e-2)
        except AssertionError as error:
            raise AssertionError(f"{place}: {error}") from error


# SDPA-03
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_score_of_minus_infinity_excludes_too(backend, dtype):
    """As in a float mask."""
    torch.manual_seed(0)
    keep = MASKS["documents"]
    bias = torch.where(keep, 0.0, -torch.inf).to(dtype)
    named = {n: torch.randn(1, 2, LENGTH, 24).to(dtype) for n in ("query", "key", "value", "grad_out")}
    named["value"][:, :, 100, 5] = torch.nan
    named["grad_out"][:, :, 10, 3] = torch.inf
    leaves = [named[n].clone().requires_grad_() for n in ("query", "key", "value")]
    out, aux = attention(backend, leaves, bias=bias, return_aux=foci.AuxRequest(lse=True))
    grads = torch.autograd.grad(out, leaves, named["grad_out"])
    expected = by_hand([t.detach() for t in leaves], keep, named["grad_out"])
    compare((out, aux.lse, *grads), expected, 5e-6 if dtype is torch.float32 else 3e-2)
