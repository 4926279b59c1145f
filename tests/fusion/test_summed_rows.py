"""Scores that are sums of products are the scores of one."""

# FUSE-03

import pytest
import torch
from spelling_harness import compare, compiled, draw, graph_of

import foci
from compiled import several
from foci.fusion import fuse

B, H, S, D, R = 2, 3, 24, 8, 4


def operands(length=S):
    """Query, key and value; the others' query and key; a mask."""
    depths = (D, D, D, R, R)
    return (*(draw(B, H, length, depth, seed=n) for n, depth in enumerate(depths)), draw(1, 1, length, length, seed=9))


def attended(scores, v):
    return torch.softmax(scores, -1) @ v


def subtracted(q, k, v, a, b, mask):
    return attended(q @ k.mT * 0.3 - a @ b.mT, v)


def scaled_apart(q, k, v, a, b, mask):
    return attended(torch.add(q @ k.mT / 3, -(2 * (a @ b.mT)), alpha=0.7), v)


def masked_between(q, k, v, a, b, mask):
    return attended((q @ k.mT + mask) + a @ b.mT, v)


def three(q, k, v, a, b, mask):
    return attended(q @ k.mT + a @ b.mT - (q[..., :R] @ b.mT) * 0.5, v)


def keys_first(q, k, v, a, b, mask):
    return attended(q @ k.mT + torch.einsum("bhjr,bhir->bhij", b, a), v)


def one_key_head(q, k, v, a, b, mask):
    return attended(q @ k.mT + a @ b[:, :1].mT, v)


def two_sums(q, k, v, a, b, mask):
    """Features of two dimensions."""
    return attended(q @ k.mT + torch.einsum("bhirs,bhjrs->bhij", a.unflatten(-1, (2, 2)), b.unflatten(-1, (2, 2))), v)


def added_by_product(q, k, v, a, b, mask):
    flat = [t.flatten(0, 1) for t in (q, k, v, a, b)]
    scores = torch.baddbmm(torch.bmm(flat[3], flat[4].mT), flat[0], flat[1].mT, beta=0.5, alpha=0.25)
    return torch.bmm(scores.softmax(-1), flat[2])


def widened(q, k, v, a, b, mask):
    return attended((q @ k.mT).float() * 0.3 + (a @ b.mT).float(), v.float()).to(q.dtype)


def softened(q, k, v, a, b, mask):
    return attended(torch.tanh((q @ k.mT + a @ b.mT) / 5) * 5, v)


JOINED = (subtracted, scaled_apart, masked_between, three, keys_first, one_key_head, two_sums, added_by_product, widened, softened)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", JOINED, ids=lambda f: f.__name__)
def test_products_are_one_with_features_side_by_side(function, dtype):
    run, _ = compiled(function, dynamic=True)
    with foci.observe() as log:
        for length in several(S, S + 3, S + 9):
            compare(function, operands(length), dtype, run, backward=True)
    assert [site.reason for site in log.fusions] == [None]
    assert {call.problem.head_dim for call in log.calls} == {D + R * (2 if function is three else 1)}
    assert ("c0" in log.fusions[0].variant) == (function is masked_between)


def test_what_autocast_rounds_is_rounded_before():
    def under_autocast(q, k, v, a, b):
        with torch.autocast("cpu", torch.bfloat16):
            return attended(q @ k.mT + a @ b.mT, v)

    run, _ = compiled(under_autocast)
    with foci.observe() as log:
        for length in several(S, S + 3, S + 9):
            compare(under_autocast, operands(length)[:5], torch.float32, run, backward=True)
    assert all(site.fused for site in log.fusions)
    assert log.calls[0].problem.head_dim == D + R


def relative(q, k, v, a, b, mask):
    """Shaw et al. 2018: the other key has rows too, and would be larger than the scores."""
    places = torch.einsum("bhid,ijd->bhij", q, mask[0, 0, :, :, None] * k[0, 0, 0])
    return attended(q @ k.mT + places, v)


def short(q, k, v, a, b, mask):
    """More features than scores of a row."""
    return attended(q[:, :, :9] @ k[:, :, :9].mT + a[:, :, :9] @ b[:, :, :9].mT, v[:, :, :9])


def detached(q, k, v, a, b, mask):
    return attended(q @ k.mT + (a @ b.mT).detach(), v)


def learned_share(q, k, v, a, b, mask):
    return attended(q @ k.mT + (a @ b.mT) * mask[0, 0, 0, 0], v)


@pytest.mark.parametrize("function", [relative, short, detached, learned_share], ids=lambda f: f.__name__)
def test_others_are_captured(function):
    run, _ = compiled(function)
    with foci.observe() as log:
        for length in several(S, S + 3, S + 9):
            compare(function, operands(length), torch.float32, run, backward=True)
    assert [site.reason for site in log.fusions] == [None, None]
    assert log.calls[0].problem.head_dim == D
    assert "[b, h, q_idx, kv_idx]" in log.fusions[0].variant


def test_an_operand_that_is_written_is_read_where_it_was():
    def written(q, k, v, a, b, mask):
        position = a @ b.mT
        b.mul_(2)
        return attended(q @ k.mT + position, v) + b.sum()

    run, _ = compiled(written)
    for length in several(S, S + 3, S + 9):
        with torch.no_grad():
            inputs = operands(length)
            expected = written(*(t.clone() for t in inputs))
            torch.testing.assert_close(run(*(t.clone() for t in inputs)), expected)


def test_a_graph_whose_attention_is_not_fused_keeps_its_sum():
    def returned(q, k, v, a, b):
        weights = torch.softmax(q @ k.mT + a @ b.mT, -1)
        return weights @ v, weights

    module = graph_of(returned, *operands()[:5])
    fusion = fuse(module, operands()[:5])
    assert [site.fused for site in fusion.sites] == [False]
    assert [n.target for n in fusion.graph_module.graph.nodes] == [n.target for n in module.graph.nodes]


def test_an_error_in_between_leaves_the_sum(monkeypatch):
    def fail(*_):
        raise ValueError("unforeseen")

    def added(q, k, v, a, b):
        return attended(q @ k.mT + a @ b.mT, v)

    monkeypatch.setattr("foci.fusion.concat_scores._pays", lambda *_: True)
    monkeypatch.setattr("torch.einsum", fail)
    fusion = fuse(graph_of(added, *operands()[:5]), operands()[:5])
    assert [site.fused for site in fusion.sites] == [True]
    assert "c0[b, h, q_idx, kv_idx]" in fusion.sites[0].variant
    torch.testing.assert_close(fusion.graph_module(*operands()[:5]), added(*operands()[:5]))


def test_scores_that_come_from_another_attention():
    """Nodes that were put in another attention's place are no obstacle."""
    from torch.nn.attention.flex_attention import flex_attention

    def twice(q, k, v, a, b):
        inner = flex_attention(q, k, v) * 2
        return attended((q @ k.mT + a @ b.mT) + inner.mean(-1, keepdim=True), v)

    run, _ = compiled(twice)
    with foci.observe() as log, torch.no_grad():
        for length in several(S, S + 3, S + 9):
            torch.testing.assert_close(run(*operands(length)[:5]), twice(*operands(length)[:5]))
    assert [site.reason for site in log.fusions] == [None] * 4
    assert log.calls[1].problem.head_dim == D + R
