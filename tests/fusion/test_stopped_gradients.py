"""What is computed under `torch.no_grad()`, inside an attention or beside it, gets the gradients that eager gives it."""

# FUSE-04

import pytest
import torch
from test_mutated import check

NO_GRAD = "with torch.no_grad():"
SCORES = "s = q @ k.mT * 0.3"


def sites_of(*steps):
    """The sites of a program whose outputs and gradients are compared with eager's."""
    lines = ("later = torch.ones(6, 6, dtype=torch.bool).triu(1)", *steps, "return o, q * 1.0, k * 1.0, v * 1.0, m * 1.0")
    return check("def program(q, k, v, m):\n" + "".join(f"    {line}\n" for line in lines), learn=True)


@pytest.mark.parametrize(
    "steps",
    [
        (SCORES, NO_GRAD, "    p = s.softmax(-1)", "o = p @ v"),
        (SCORES, NO_GRAD, "    p = torch.nn.functional.softmax(s + m, -1)", "o = p @ v"),
        (SCORES, NO_GRAD, "    p = s.log_softmax(-1)", "o = p.exp() @ v"),
        (SCORES, "p = s.log_softmax(-1)", NO_GRAD, "    p = p.exp()", "o = p @ v"),
        (SCORES, "p = s.softmax(-1)", NO_GRAD, "    p = p * 2", "o = p @ v"),
        (SCORES, "p = s.softmax(-1)", NO_GRAD, "    p = p.view(p.shape)", "o = p @ v"),
        (SCORES, NO_GRAD, "    s = s.view(s.shape)", "o = s.softmax(-1) @ v"),
        (SCORES, NO_GRAD, "    u = s.view(s.shape)", "    p = u.softmax(-1)", "o = p @ v"),
        (SCORES, "t = s.amax(-1, keepdim=True)", NO_GRAD, "    d = s - t", "o = d.softmax(-1) @ v"),
        ("s = torch.cat([q @ k.mT, m[:, :1].expand(2, 2, 6, 1)], -1)", NO_GRAD, "    s = s - s.amax(-1, keepdim=True)",
         "o = s.softmax(-1)[..., :-1] @ v"),
        ("s = q @ k.mT", "r = k @ q.mT", NO_GRAD, "    s = s + r", "o = s.softmax(-1) @ v"),
    ],
)  # fmt: skip
def test_an_attention_of_which_a_part_stops_gradients_is_not_fused(steps):
    assert not any(site.fused for site in sites_of(*steps))


EXPONENTIALS = "e = s.exp()"


@pytest.mark.parametrize(
    "steps",
    [
        ("e = (s - s.amax(-1, keepdim=True)).exp()", NO_GRAD, "    z = e.sum(-1, keepdim=True)", "o = (e / z) @ v"),
        (EXPONENTIALS, NO_GRAD, "    z = s.exp().sum(-1, keepdim=True)", "o = (e / z) @ v"),
        (EXPONENTIALS, NO_GRAD, "    r = e.sum(-1, keepdim=True).reciprocal()", "o = (e * r) @ v"),
        (EXPONENTIALS, "o = e @ v", NO_GRAD, "    z = e.sum(-1, keepdim=True)", "o = o / z"),
        (EXPONENTIALS, "z = e.sum(-1)", NO_GRAD, "    z = z.unsqueeze(-1)", "o = (e / z) @ v"),
        (EXPONENTIALS, "o = (e / e.sum(-1, keepdim=True).detach()) @ v"),
        (EXPONENTIALS, NO_GRAD, "    e = e.masked_fill(later, 0.0)", "o = (e / e.sum(-1, keepdim=True)) @ v"),
        (EXPONENTIALS, NO_GRAD, "    p = torch.nn.functional.normalize(e, p=1, dim=-1)", "o = p @ v"),
        (NO_GRAD, "    p = torch.nn.functional.softmin(s, -1)", "o = p @ v"),
        (NO_GRAD, "    e = s.exp()", "    p = e / e.sum(-1, keepdim=True)", "o = p @ v"),
        (NO_GRAD, "    e = s.exp()", "f = s.exp()", "o = (f / e.sum(-1, keepdim=True)) @ v"),
        (NO_GRAD, "    e = s.exp()", "f = s.exp()", "o = (e / f.sum(-1, keepdim=True)) @ v"),
        ("t = s.logsumexp(-1)", NO_GRAD, "    t = t.unsqueeze(-1)", "o = (s - t).exp() @ v"),
        ("t = s.logsumexp(-1, keepdim=True)", NO_GRAD, "    d = s - t", "o = d.exp() @ v"),
        ("d = s - s.logsumexp(-1, keepdim=True)", NO_GRAD, "    p = d.exp()", "o = p @ v"),
        ("t = s.amax(-1, keepdim=True)", NO_GRAD, "    u = t.view(t.shape)",
         "l = u + (s - t).exp().sum(-1, keepdim=True).log()", "o = (s - l).exp() @ v"),
        ("t = s.amax(-1, keepdim=True)", NO_GRAD, "    u = t.view(t.shape)",
         "l = t + (s - u).exp().sum(-1, keepdim=True).log()", "o = (s - l).exp() @ v"),
        ("t = s.amax(-1, keepdim=True)", "h = (s - t).exp().sum(-1).log()", NO_GRAD, "    h = h[..., None]", "o = (s - (t + h)).exp() @ v"),
    ],
)  # fmt: skip
def test_a_softmax_by_hand_of_which_a_part_stops_gradients_is_not_fused(steps):
    assert not any(site.fused for site in sites_of(SCORES, *steps))


@pytest.mark.parametrize(
    "steps",
    [
        (NO_GRAD, "    t = s.amax(-1, keepdim=True)", "e = (s - t).exp()", "o = (e / e.sum(-1, keepdim=True)) @ v"),
        ("t = s.amax(-1)", NO_GRAD, "    t = t[..., None]", "e = (s - t).exp()", "o = (e / e.sum(-1, keepdim=True)) @ v"),
        (NO_GRAD, "    t = s.amax(-1, keepdim=True)", "o = (s - t).softmax(-1) @ v"),
        (NO_GRAD, "    e = s.exp()", "    p = e / e.sum(-1, keepdim=True)", "    o = p @ v", "o = o * 1"),
        (NO_GRAD, "    o = (s.softmax(-1) @ v).transpose(1, 2)", "o = o * 2"),
        ("o = s.softmax(-1) @ v", NO_GRAD, "    o = o + s.logsumexp(-1)[..., None]"),
    ],
)
def test_gradients_that_a_softmax_does_not_need_may_stop(steps):
    assert [site.fused for site in sites_of(SCORES, *steps)] == [True]


@pytest.mark.parametrize(
    "view",
    [
        "m[None]",
        "m.mT",
        "m.unsqueeze(0)",
        "m.view(6, 6)",
        "m.expand(2, 6, 6)",
        "m[:, :1]",
        "m.split(3, 0)[0].repeat(2, 1)",
        "m.unbind(0)[0]",
    ],
)
@pytest.mark.parametrize("after", ["b", "b * 2", "b.mT.mT", "b[..., :1]"])
def test_a_view_made_without_gradients_gets_none(view, after):
    steps = (NO_GRAD, f"    b = torch.atleast_2d({view})", f"b = {after}", "o = (q @ k.mT * 0.3 + b).softmax(-1) @ v")
    assert [site.fused for site in sites_of(*steps)] == [True]


@pytest.mark.parametrize(
    "steps",
    [
        ("    b = k[:, :1].expand(k.shape)", "o = torch.nn.functional.scaled_dot_product_attention(q, b, v)"),
        ("    b = m.expand(2, 6, 6)", "o = torch.nn.functional.scaled_dot_product_attention(q, k, v, b)"),
        ("    b = m[None]", "o = (q @ k.mT * b).softmax(-1) @ v"),
        ("    a = m[None]", "    with torch.enable_grad():", "        b = m[None]", "o = (q @ k.mT + a + b).softmax(-1) @ v"),
    ],
)
def test_views_made_without_gradients_beside_an_attention(steps):
    assert [site.fused for site in sites_of(NO_GRAD, *steps)] == [True]


@pytest.mark.parametrize(
    "steps",
    [
        ("b = m * 1.0", NO_GRAD, "    b.mul_(0.3)"),
        ("b = m * 1.0", NO_GRAD, "    b.masked_fill_(later, 0.3)"),
        (NO_GRAD, "    b = torch.zeros(6, 6)", "b.copy_(m)"),
        (NO_GRAD, "    b = torch.zeros(6, 6)", "b[:3].copy_(m[:3])"),
        ("m.mul_(2)", NO_GRAD, "    b = m[None]"),
    ],
)
def test_writes_with_and_without_gradients(steps):
    sites_of(*steps, "o = (q @ k.mT + b).softmax(-1) @ v")


@pytest.mark.parametrize("write", ["s.mul_(0.3)", "s += m", "s.masked_fill_(later, -9.0)"])
def test_scores_written_without_gradients(write):
    assert not any(site.fused for site in sites_of("s = q @ k.mT", NO_GRAD, f"    {write}", "o = s.softmax(-1) @ v"))


@pytest.mark.parametrize("place", ["before", "around"])
def test_no_grad_and_a_checkpoint(place):
    step = "torch.utils.checkpoint.checkpoint(lambda *t: (t[0] @ t[1].mT + t[3].mT).softmax(-1) @ t[2], q, k, v, b, use_reentrant=False)"
    steps = (f"o = {step}",) if place == "before" else (f"    o = {step}", "o = o * 1")
    assert [site.fused for site in sites_of(NO_GRAD, "    b = m[None]", *steps)] == [True]


def test_nothing_stops_in_a_graph_without_gradients():
    with torch.no_grad():
        source = f"def program(q, k, v, m):\n    {SCORES} + m[None]\n    e = s.exp()\n    return (e / e.sum(-1, keepdim=True) @ v,)\n"
        assert [site.fused for site in check(source, learn=False)] == [True]
