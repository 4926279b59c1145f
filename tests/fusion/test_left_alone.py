"""What keeps attention from being fused, and what is read as it was or as it is now."""

# FUSE-04

import pytest
import torch
import torch.nn.functional as F
from fusing import B, D, Fusing, H, S, draw, fused, learned, plain, qkv, reasons

import foci
from compiled import several
from foci.fusion import fuse

DECLINED = {
    "scaled by its own sum": lambda q, k, v: (lambda s: (s.softmax(-1) * s.logsumexp(-1, True)) @ v)(q @ k.mT),
    "drawn by its own sum": lambda q, k, v: (lambda s: (torch.bernoulli((s.logsumexp(-1) < 1e9).double()), s.softmax(-1) @ v))(q @ k.mT),
    "scores are returned": lambda q, k, v: (lambda s: (s.softmax(-1) @ v, s))(q @ k.mT),
    "scores are summed": lambda q, k, v: (lambda s: (s.softmax(-1) @ v, s.sum()))(q @ k.mT),
    "weights are returned": lambda q, k, v: (lambda w: (w @ v, w))((q @ k.mT).softmax(-1)),
    "other rows": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "mixed rows": lambda q, k, v: (lambda s: (s + s.mT).softmax(-1) @ v)(q @ k.mT),
    "weights of two": lambda q, k, v: ((q @ k.mT).softmax(-1) - (k @ q.mT).softmax(-1)) @ v,
    "a temperature of keys": lambda q, k, v: ((q @ k.mT).softmax(-1) * torch.arange(k.shape[2])) @ v,
    "sharpened weights": lambda q, k, v: (q @ k.mT).softmax(-1).pow(2) @ v,
    "less the largest of other rows": lambda q, k, v: (lambda s: (s - s.amax(-1).unsqueeze(-2)).softmax(-1) @ v)(q @ k.mT),
    "less the largest, beside a sink": lambda q, k, v: (
        lambda s: torch.cat([s - s.amax(-1, True), q[..., :1]], -1).softmax(-1)[..., :-1] @ v
    )(q @ k.mT),
    "less the largest of all, beside a sink": lambda q, k, v: (
        lambda s: torch.cat([s - s.max(), q[..., :1]], -1).softmax(-1)[..., :-1] @ v
    )(q @ k.mT),
    "masked by what the largest left": lambda q, k, v: (
        lambda s: (lambda less: less.masked_fill(less < -3, -1e9).softmax(-1) @ v)(s - s.max())
    )(q @ k.mT),
    "no head dim": lambda q, k, v: (q[..., :0] @ k[..., :0].mT).softmax(-1) @ v,
    "two softmaxes": lambda q, k, v: (q @ k.mT).softmax(-1).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_only_looks_like_attention_is_left_alone(name):
    backend = fused(DECLINED[name], *learned(*qkv()))
    assert not any(site.fused for site in backend.sites), backend.sites
    assert all(reasons(backend))


NO_SITES = {
    "a classifier": lambda q, k, v: torch.softmax(q @ k[0, 0].mT, -1),
    "a router": lambda q, k, v: torch.softmax(F.linear(q[:, 0], k[0, 0]), -1).topk(2, -1).values.sum(-1, keepdim=True) * v[:, 0],
    "pooling": lambda q, k, v: (torch.softmax(q.sum(-1), -1)[..., None] * v).sum(2),
}


@pytest.mark.parametrize("name", NO_SITES)
def test_a_softmax_that_is_no_attention_is_no_site(name):
    assert fused(NO_SITES[name], *learned(*qkv())).sites == []


def test_a_write_between_reading_and_end_is_seen():
    def overwritten(q, k, v):
        k = k * 1
        scores = q @ k.mT
        k.zero_()
        return scores.softmax(-1) @ v, k

    backend = fused(overwritten, *qkv())
    assert "written in place" in backend.sites[0].reason


def test_a_cache_that_is_written_before_it_is_read_does_not_block():
    def cached(q, k, v, cache):
        cache[:, :, 3:4] = k[:, :, 3:4]
        return plain(q, cache, v)

    torch._dynamo.reset()
    backend = Fusing()
    compiled = torch.compile(cached, backend=backend)
    for length in several(S, S + 3, S + 9):
        args, cache = qkv(length=length), draw(B, H, length, D, seed=8)
        want = cached(*args, cache.clone())
        torch.testing.assert_close(compiled(*args, cache.clone()), want)
    assert reasons(backend) == [None, None]


def block_mask(q):
    mask = torch.full((q.shape[2], q.shape[2]), torch.finfo(q.dtype).min, dtype=q.dtype)
    mask[:7, :7] = 0
    mask[7:, 7:] = 0
    return mask[None, None]


def repeated_then_written(k):
    repeated = k[:, :2].repeat_interleave(2, 1)
    repeated[:, 1, :3] = 0
    return repeated


def written_after_repeating(q, k, v):
    repeated = k[:, :2].repeat_interleave(2, 1)
    k.zero_()
    return F.scaled_dot_product_attention(q, repeated, v)


def test_a_copy_outlives_what_it_was_made_of():
    torch._dynamo.reset()
    compiled = torch.compile(written_after_repeating, backend=Fusing())
    for length in several(S, S + 3, S + 9):
        torch.testing.assert_close(compiled(*qkv(length=length)), written_after_repeating(*qkv(length=length)))


WRITTEN_BEFORE = {
    "a mask": lambda q, k, v: (q @ k.mT + block_mask(q)).softmax(-1) @ v,
    "a mask given by name": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, block_mask(q)),
    "a copy of a mask": lambda q, k, v: (lambda m: (m[:, :, 0].fill_(-1.0), (q @ k.mT + m).softmax(-1) @ v)[1])(block_mask(q).clone()),
    "repeated heads": lambda q, k, v: (q @ repeated_then_written(k).mT).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", WRITTEN_BEFORE)
def test_what_was_written_after_it_was_made_is_read_as_it_is_now(name):
    backend = fused(WRITTEN_BEFORE[name], *learned(*qkv()))
    assert [site.fused for site in backend.sites] == [True], backend.sites


def test_a_method_with_an_underscore_may_have_no_other_form():
    def layer(q, k, v):
        return torch.softmax(q @ k.mT, -1).mul_(0.5).requires_grad_(False) @ v

    module = fuse(torch.fx.symbolic_trace(layer), qkv()).graph_module
    torch.testing.assert_close(module(*qkv()), layer(*qkv()))


def test_a_gradient_that_stops_inside_is_not_fused_away():
    def stopped(q, k, v):
        return (q @ k.mT).detach().softmax(-1) @ v

    def stopped_weights(q, k, v):
        with torch.no_grad():
            weights = (q @ k.mT).softmax(-1)
        return weights @ v

    for function in (stopped, stopped_weights):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=Fusing())
        for length in several(S, S + 3, S + 9):
            args = learned(*qkv(length=length))
            compiled(*args).sum().backward()
            assert args[0].grad is None
            assert args[2].grad is not None


def test_without_gradients_nothing_stops():
    with torch.no_grad():
        assert reasons(fused(lambda q, k, v: (q @ k.mT).detach().softmax(-1) @ v, *learned(*qkv()))) == [None]


def one_head(q, k, v):
    return torch.softmax(q @ k.mT / 4, dim=-1) @ v


def test_what_is_mapped_over_a_dimension_says_so():
    """Inside torch.vmap tensors lack the dimension that they are mapped over."""
    mapped = fused(lambda q, k, v: torch.vmap(torch.vmap(one_head))(q, k, v), *qkv())
    assert [site.reason for site in mapped.sites] == ["it is inside a transform of torch.func, such as vmap"]


BESIDE = {
    "side by side": lambda q, k, v, bias: (q @ k.mT + torch.cat([bias, bias.flip(-1)], -1)).softmax(-1) @ v,
    "padded": lambda q, k, v, bias: (q @ k.mT + F.pad(bias, (0, bias.shape[-1]))).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_fills_part_of_the_scores_is_read_where_it_is(name):
    torch._dynamo.reset()
    backend = Fusing()
    compiled = torch.compile(BESIDE[name], backend=backend)
    for length in several(S, S + 4, S + 10):
        args = (*qkv(length=length), torch.randn(length, length // 2))
        with foci.use("blocked"):
            actual = compiled(*args)
        torch.testing.assert_close(actual, BESIDE[name](*args))
    assert [site.fused for site in backend.sites] == [True, True]
