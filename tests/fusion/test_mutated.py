"""Random programs with an attention in them: what is written in place, aliased or read besides gives eager's results and gradients."""

# FUSE-04

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spelling_harness import DIM, draw, fused_only

import foci
from foci.fusion import Compiler

LENGTH = 6
TENSORS = {name: draw(2, 2, LENGTH, DIM, seed=seed) for seed, name in enumerate("qkv")} | {"m": draw(LENGTH, LENGTH, seed=4)}

# What becomes of a tensor `t` that is there; `u` is a new name, `w` another tensor.
CHANGES = (
    "{t}.mul_(1.5)",
    "{t}.add_(0.25)",
    "{t}[..., :1].mul_(2)",
    "{t}[..., 1] = 0.5",
    "{t}.mT.sub_(0.1)",
    "{t}.clamp_(-2.0, 2.0)",
    "{t}.copy_({t}.flip(0))",
    "{t} = {t}.clone()",
    "{t} = {t}.contiguous()",
    "{t} = {t} * 1.0",
    "{t} *= 0.5",
    "{u} = {t}.mT",
    "{u} = {t}[..., :3]",
    "{u} = {t}.view({t}.shape)",
    "{u} = {t}.detach()",
    "{u} = {t}",
    "{u} = {t} + 0.0",
    "{t} = {t}.detach()",
    "extras.append({t})",
    "extras.append({t}.sum())",
    "extras.append({t}.mT)",
    "extras.append({t}.amax(-1) * 2)",
    "{t} = {t}.mT.contiguous().mT",
    "{t}.masked_fill_({t} > 3.0, 0.0)",
    "torch.add({t}, 0.1, out={t})",
    "{t}.unsqueeze(0).squeeze(0).neg_()",
    "with torch.no_grad(): {t} = {t} * 1.0",
    "with torch.no_grad(): {t}.mul_(0.5)",
)

# An attention in steps; a tensor may be changed before any of them.
ATTENTIONS = (
    ("s = q @ k.mT * 0.3", "s = s + m", "p = torch.softmax(s, -1)", "o = p @ v"),
    ("s = torch.baddbmm(m, q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, (2, 2))", "p = s.softmax(-1)", "o = p.matmul(v)"),
    ("s = torch.einsum('bhqd,bhkd->bhqk', q, k)", "s.mul_(0.3)", "s.masked_fill_(later, -torch.inf)", "p = s.softmax(-1)",
     "o = torch.einsum('bhqk,bhkd->bhqd', p, v)"),
    ("s = q @ k.mT * 0.3", "e = (s - s.amax(-1, keepdim=True)).exp()", "p = e / e.sum(-1, keepdim=True)", "o = p @ v"),
    ("s = q @ k.mT * 0.3", "e = s.exp()", "e = e.masked_fill(later, 0.0)", "o = e @ v", "t = e.sum(-1, keepdim=True)", "o = o / t"),
    ("s = q @ k.mT * 0.3", "t = s.logsumexp(-1, keepdim=True)", "p = (s - t).exp()", "o = p @ v"),
    ("s = (q * 0.3) @ k.transpose(2, 3)", "s = torch.where(later, torch.finfo(s.dtype).min, s)", "p = s.softmax(-1)",
     "o = (p @ v).transpose(1, 2)"),
    ("o = torch.nn.functional.scaled_dot_product_attention(q, k, v, m)", "o = o + 1"),
)  # fmt: skip


@st.composite
def programs(draw_one):
    steps, live, lines = draw_one(st.sampled_from(ATTENTIONS)), ["q", "k", "v", "m"], []
    if draw_one(st.booleans()):
        lines.append(draw_one(st.sampled_from(("v = k", "k = q", "v = k.detach()", "q = q[:]", "k = k.mT.mT"))))
    for step in (*steps, None):
        for _ in range(draw_one(st.sampled_from((0, 0, 0, 1, 1, 2)))):
            change, name, new = draw_one(st.sampled_from(CHANGES)), draw_one(st.sampled_from(live)), f"u{len(live)}"
            lines.append(change.format(t=name, u=new))
            if "{u}" in change:
                live.append(new)
        if step is not None:
            lines.append(step)
            target = step.partition(" = ")[0]
            if target.isidentifier() and target not in live:
                live.append(target)
    head = "def program(q, k, v, m):\n    extras = []\n    later = torch.ones(6, 6, dtype=torch.bool).triu(1)\n"
    return head + "".join(f"    {line}\n" for line in lines) + "    return o, *extras\n"


def outcome(function, *, learn):
    """Outputs, what became of the inputs, and gradients; or what error it is."""
    leaves = {name: t.clone().requires_grad_(learn) for name, t in TENSORS.items()}
    inputs = [t * 1.0 for t in leaves.values()]  # leaves may not be written in place
    try:
        with torch.set_grad_enabled(learn):
            outputs = function(*inputs)
            tensors = [*outputs, *inputs]
            if learn:
                flowing = [t for t in outputs if t.requires_grad]
                weighed = sum((t * draw(*t.shape, seed=9)).sum() for t in flowing)
                tensors += torch.autograd.grad(weighed, list(leaves.values()), allow_unused=True) if flowing else []
    except (RuntimeError, IndexError) as error:
        return str(error)
    return tensors


def check(source, *, learn):
    space = {"torch": torch}
    exec(compile(source, "<program>", "exec"), space)
    wanted = outcome(space["program"], learn=learn)
    if isinstance(wanted, str):
        return None
    torch._dynamo.reset()
    with foci.observe() as log, foci.use("blocked", "reference"):
        # autograd of the fused graph as it is would refuse writes to what an attention saved, which eager's saves elsewhere
        backend = Compiler(rest="eager") if learn else fused_only
        # one length: drawn programs have their sizes as numbers
        actual = outcome(torch.compile(space["program"], backend=backend), learn=learn)
    if isinstance(actual, str):  # what is written in place after an attention saved it, and eager saved something else
        assert "modified by an inplace operation" in actual, actual
        return None
    for a, b in zip(actual, wanted, strict=True):
        assert (a is None or not a.any()) if b is None else True
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
    return log.fusions


@settings(max_examples=60, deadline=None)
@given(programs(), st.booleans())
def test_mutated_programs_give_what_eager_gives(source, learn):
    check(source, learn=learn)


@pytest.mark.parametrize(
    "steps",
    [
        (
            "s = q @ k.mT * 0.3",
            "e = (s - s.amax(-1, keepdim=True)).exp()",
            "s[..., 1] = 0.5",
            "p = e / e.sum(-1, keepdim=True)",
            "o = p @ v",
        ),
        ("s = q @ k.mT * 0.3", "e = s.exp()", "t = e.sum(-1, keepdim=True)", "s.view(-1)[3] = 0.5", "o = (e * t.reciprocal()) @ v"),
        (
            "drop = m > 1",
            "e = (q @ k.mT * 0.3).exp().masked_fill(drop, 0.0)",
            "drop[..., 2] = True",
            "o = (e / e.sum(-1, keepdim=True)) @ v",
        ),
        ("e = (q @ k.mT * 0.3).exp()", "o = e @ v", "v[:, :, 2] = 1.0", "o = o / e.sum(-1, keepdim=True)"),
    ],
)
def test_what_exponentials_were_made_of_is_written_before_they_are_divided(steps):
    check("def program(q, k, v, m):\n" + "".join(f"    {line}\n" for line in steps) + "    return (o,)\n", learn=False)


@pytest.mark.parametrize(
    "steps",
    [
        ("s = (q @ k.mT * 0.3).detach()", "o = s.softmax(-1) @ v.detach()"),
        ("s = (q @ k.mT * 0.3).detach()", "later = s.logsumexp(-1)", "o = s.softmax(-1) @ v.detach() + later[..., None]"),
        ("o = ((q @ k.mT * 0.3).softmax(-1) @ v).detach()",),
    ],
)
def test_what_no_gradient_flows_through_has_none(steps):
    program = "def program(q, k, v, m):\n" + "".join(f"    {line}\n" for line in steps) + "    return o, q * 1.0\n"
    assert [site.fused for site in check(program, learn=True)] == [True]


def test_programs_without_changes_are_fused():
    for steps in ATTENTIONS:
        head = "def program(q, k, v, m):\n    later = torch.ones(6, 6, dtype=torch.bool).triu(1)\n"
        sites = check(head + "".join(f"    {line}\n" for line in steps) + "    return (o,)\n", learn=True)
        assert [site.fused for site in sites] == [True], (steps, sites)
