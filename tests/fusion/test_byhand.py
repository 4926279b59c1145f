"""Softmax by hand: each spelling becomes torch's, and what is something else stays what it is."""

# FUSE-03

import math

import pytest
import torch
import torch.nn.functional as F
from spelling_harness import compare, compiled, fused_only, graph_of, lengths_mask, qkv

import foci
from compiled import resize, several
from foci.fusion.emit import Sizes
from foci.fusion.fx_utils import as_call
from foci.fusion.manual_softmax import MASK_RULES, QUOTIENT_RULES, without_softmaxes_by_hand

Q, K, V = qkv(9)
KEEP = lengths_mask(9)


def scores(q, k):
    return q @ k.mT / 3


def largest_last(x):
    return x - x.max(-1)[0].unsqueeze(-1)


def spelled(numerator, divided):
    """From scores to weights, then the product."""
    return lambda q, k, v: divided(numerator(scores(q, k)), v)


SUMS = {
    "the dimension kept": lambda e, v: (e / e.sum(-1, keepdim=True)) @ v,
    "put back by None": lambda e, v: (e / e.sum(-1)[..., None]) @ v,
    "put back by unsqueeze": lambda e, v: e.div(e.sum(dim=-1).unsqueeze(3)) @ v,
    "inverted": lambda e, v: (e * e.sum(-1, keepdim=True).reciprocal()) @ v,
    "one over it": lambda e, v: ((1 / e.sum(-1, keepdim=True)) * e) @ v,
    "to the power -1": lambda e, v: (e * e.sum(-1, keepdim=True).pow(-1)) @ v,
    "after the product": lambda e, v: (e @ v) / e.sum(-1, keepdim=True),
    "after the product, inverted": lambda e, v: torch.einsum("bhij,bhjd->bhid", e, v) * (1 / e.sum(-1))[..., None],
    "after einsum, transposed": lambda e, v: torch.einsum("bhij,bhjd->bhdi", e, v) / e.sum(-1)[:, :, None],
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_divides_its_own_row(name):
    assert_softmax(spelled(torch.exp, SUMS[name]))


RAISED = {
    "twice": lambda x, keep: (x.exp(), x.exp()),
    "powers of two": lambda x, keep: (torch.exp2(x * math.log2(math.e)),) * 2,
    "less the largest": lambda x, keep: (largest_last(x).exp(),) * 2,
    "masked": lambda x, keep: (x.exp() * keep[:, None, None],) * 2,
    "masked by numbers": lambda x, keep: (x.exp() * (1 - (~keep).float())[:, None, None],) * 2,
    "filled with zeros": lambda x, keep: (x.exp().masked_fill(~keep[:, None, None], 0),) * 2,
    "chosen": lambda x, keep: (torch.where(keep[:, None, None], x.exp(), 0.0),) * 2,
    "normalised twice": lambda x, keep: (x.softmax(-1) * keep[:, None, None],) * 2,
}


@pytest.mark.parametrize("name", RAISED)
def test_exponentials_over_their_sum(name):
    def attend(q, k, v, keep):
        above, below = RAISED[name](scores(q, k), keep)
        return (above / below.sum(-1, keepdim=True)) @ v

    assert_softmax(attend, Q, K, V, KEEP)


OTHERS = {
    "softmin": lambda x: F.softmin(-x, dim=-1),
    "the 1-norm": lambda x: F.normalize(largest_last(x).exp(), p=1, dim=-1),
    "a bounded sum": lambda x: (lambda e: e / e.sum(-1, keepdim=True).clamp(min=1e-6))((x - x.amax(-1, keepdim=True)).exp()),
    "a small number added": lambda x: (lambda e: e / (e.sum(-1, keepdim=True) + 1e-9))(largest_last(x).exp()),
    "given by name": lambda x: (lambda e: torch.mul(input=e, other=torch.pow(e.sum(-1, keepdim=True), exponent=-1)))(torch.exp(input=x)),
    "masked by name": lambda x: (lambda e: torch.div(input=e, other=torch.sum(input=e, dim=-1, keepdim=True)))(
        torch.masked_fill(input=x.exp(), mask=torch.ones_like(x).tril() == 0, value=0)
    ),
    "bounded by name": lambda x: F.normalize(input=torch.exp(largest_last(x)), p=1, dim=-1),
    "over two dimensions": lambda x: (lambda e: e / e.sum((-2, -1), keepdim=True))(x.unflatten(-1, (3, -1)).exp()).flatten(-2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_spellings(name):
    one_length = "a symbol need not be a multiple of three" if name == "over two dimensions" else None
    assert_softmax(lambda q, k, v: OTHERS[name](scores(q, k)) @ v, one_length=one_length)


DIFFERENT = {
    "a column's sum as a row's": lambda x: (lambda e: e / e.sum(-1)[:, :, None])(x.exp()),
    "the sum of others": lambda x: x.exp() / (2 * x).exp().sum(-1, keepdim=True),
    "the sum of powers of two": lambda x: x.exp() / x.exp2().sum(-1, keepdim=True),
    "a sum of a part": lambda x: (lambda e: e / e[..., 1:].sum(-1, keepdim=True))(x.exp()),
    "multiplied": lambda x: (lambda e: e * e.sum(-1, keepdim=True))(x.exp()),
    "two more than the sum": lambda x: (lambda e: e / (2 + e.sum(-1, keepdim=True)))(x.exp()),
    "one more than the sum of what is masked": lambda x: (lambda e: e / (1 + e.sum(-1, keepdim=True)))(x.exp() * KEEP[:, None, None]),
    "the sum over other numbers": lambda x: x.exp() / (x.exp().sum(-1, keepdim=True) / torch.linspace(1, 2, 9)[:, None]),
    "a power of other numbers": lambda x: x.exp() * x.exp().sum(-1, keepdim=True) ** -torch.linspace(1, 2, 9)[:, None],
    "filled with another's number": lambda x: (lambda e: e / e.sum(-1, keepdim=True))(torch.masked_fill(x.exp(), KEEP[:, None, None], x.mean())),
    "a bound that binds": lambda x: (lambda e: e / e.sum(-1, keepdim=True).clamp(min=2.0))(largest_last(x).exp()),
    "a number added to what may be small": lambda x: (lambda e: e / (e.sum(-1, keepdim=True) + 1e-9))(x.exp()),
    "a bound after masking": lambda x: (lambda e: e / e.sum(-1, keepdim=True).clamp(min=1e-6))(largest_last(x).exp() * KEEP[:, None, None]),
    "less the columns' largest, bounded": lambda x: (lambda e: e / e.sum(-1, keepdim=True).clamp(min=1e-6))((x - x.amax(-2, keepdim=True)).exp()),
    "weighed by what is no mask": lambda x: (lambda e: e / e.sum(-1, keepdim=True))(x.exp() * torch.linspace(-1, 1, 9)),
    "the 2-norm": lambda x: F.normalize(largest_last(x).exp(), p=2, dim=-1),
    "the 1-norm of what may be small": lambda x: F.normalize(x.exp(), p=1, dim=-1),
    "two dimensions apart": lambda x: (lambda e: e / e.sum((1, 3), keepdim=True))(x.exp()),
    "noise": lambda x: F.dropout(x, 0.5).exp() / F.dropout(x, 0.5).exp().sum(-1, keepdim=True),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_is_something_else_stays(name):
    module = graph_of(lambda q, k, v: DIFFERENT[name](scores(q, k)) @ v, Q, K, V)
    before = module.code
    rewritten(module)
    assert module.code == before


@pytest.mark.parametrize("read", ["the exponentials", "the sum"])
def test_what_somebody_else_reads_stays(read):
    def attend(q, k, v):
        e = scores(q, k).exp()
        total = e.sum(-1, keepdim=True)
        return (e / total) @ v, e if read == "the exponentials" else total

    module = graph_of(attend, Q, K, V)
    before = module.code
    rewritten(module)
    assert module.code == before


@pytest.mark.parametrize(
    "function", [lambda q, k, v: (lambda e: e / e.sum(-1, keepdim=True))(q.exp()), lambda q, k, v: F.softmin(q, -1) @ v.mT]
)
def test_what_stands_between_no_products_stays(function):
    module = graph_of(function, Q, K, V)
    before = module.code
    rewritten(module)
    assert module.code == before


@pytest.mark.parametrize("read", [False, True])
def test_softmin_in_another_dtype(read):
    def attend(q, k, v):
        weights = F.softmin(scores(q, k), dim=-1, dtype=torch.float64)
        out = weights @ v.double()
        return (out, weights.cumsum(-1)) if read else out

    module = rewritten(graph_of(attend, Q, K, V))
    torch.testing.assert_close(module(Q, K, V), attend(Q, K, V))
    run, _ = compiled(attend, backend=fused_only)
    for length in several(9, 12, 20):
        operands = qkv(length)
        torch.testing.assert_close(run(*operands), attend(*operands), rtol=1e-5, atol=1e-6)


def test_a_quotient_wider_than_its_exponentials_stays():
    def attend(q, k, v):
        e = scores(q, k).bfloat16().exp()
        return (e / e.sum(-1, keepdim=True).float()) @ v

    module = graph_of(attend, Q, K, V)
    before = module.code
    assert rewritten(module).code == before


def test_the_second_of_two_equal_chains_goes_too():
    def attend(q, k, v):
        return (scores(q, k).exp() / scores(q, k).exp().sum(-1, keepdim=True)) @ v

    module = graph_of(attend, Q, K, V)
    rewritten(module)
    assert [as_call(n).name for n in module.graph.nodes if as_call(n)].count("matmul") == 2


def expression(text, names):
    return eval(f"lambda {', '.join(names)}: {text}", {"torch": torch, "F": F})


def quotient(text):
    """Attention whose weights are an expression of the scores."""
    weigh = expression(text, ["s"])
    return lambda q, k, v: weigh(scores(q, k)) @ v


def masked_quotient(text):
    """Attention whose weights are an expression of exponentials and a mask, over its sum."""
    mask = expression(text, ["e", "keep"])

    def attend(q, k, v, keep):
        e = mask(scores(q, k).exp(), keep[:, None, None])
        return (e / e.sum(-1, keepdim=True)) @ v

    return attend


def names_of(module):
    return [call.name for n in module.graph.nodes if (call := as_call(n)) is not None]


@pytest.mark.parametrize(("rule", "text"), [(rule, text) for rule in QUOTIENT_RULES for text in rule.examples])
def test_a_row_of_quotients_is_a_softmax(rule, text):
    assert set(names_of(graph_of(quotient(text), Q, K, V))) & set(rule.names)
    assert_softmax(quotient(text))


@pytest.mark.parametrize(("rule", "text"), [(rule, text) for rule in MASK_RULES for text in rule.examples])
def test_a_row_of_masks_is_a_mask_of_a_softmax(rule, text):
    assert set(names_of(graph_of(masked_quotient(text), Q, K, V, KEEP))) & set(rule.names)
    assert_softmax(masked_quotient(text), Q, K, V, KEEP)


@pytest.mark.parametrize("text", [text for rule in QUOTIENT_RULES for text in rule.counterexamples])
def test_a_quotient_that_looks_alike_stays(text):
    assert "softmax" not in names_of(rewritten(graph_of(quotient(text), Q, K, V)))


@pytest.mark.parametrize("text", [text for rule in MASK_RULES for text in rule.counterexamples])
def test_a_mask_that_looks_alike_stays(text):
    assert "softmax" not in names_of(rewritten(graph_of(masked_quotient(text), Q, K, V, KEEP)))


def rewritten(module):
    without_softmaxes_by_hand(module.graph, Sizes(module.graph), None)
    module.graph.lint()
    module.recompile()
    return module


def assert_softmax(function, *operands, one_length=None):
    """It becomes torch's softmax and nothing else, with the same values; and the attention around it is fused.

    So it is at other lengths, unless `one_length` says why not.
    """
    operands = operands or (Q, K, V)
    module = rewritten(graph_of(function, *operands))
    names = [as_call(n).name for n in module.graph.nodes if as_call(n)]
    assert names.count("softmax") == 1
    assert not {"exp", "exp2", "sum", "softmin", "normalize"} & set(names)
    torch.testing.assert_close(module(*operands), function(*operands))
    run, _ = compiled(function, backend=fused_only)
    for length in (9,) if one_length else several(9, 12, 21):
        with foci.observe() as log:
            compare(function, resize(operands, {9: length}), torch.float32, run, backward=True)
        assert [site.reason for site in log.fusions] == [None] * len(log.fusions)
        assert log.calls


def written_scores(q, k, v):
    scores = q @ k.mT
    first = scores[:, :1]
    logarithm = scores.logsumexp(-1)[..., None]
    scores.mul_(2)
    return torch.exp(scores - logarithm) @ v, first * 1


def written_logarithm(q, k, v):
    scores = q @ k.mT
    logarithm = scores.logsumexp(-1)
    first = logarithm[:1]
    logarithm.add_(1)
    return torch.exp(scores - logarithm[..., None]) @ v, first * 1


def written_difference(q, k, v):
    scores = q @ k.mT
    less = scores - scores.logsumexp(-1)[..., None]
    first = less[:1]
    less.add_(1)
    return torch.exp(less) @ v, first * 1


def written_scores_at_once(q, k, v):
    scores = q @ k.mT
    first = scores[:, :1]
    logarithm = scores.logsumexp(-1, keepdim=True)
    scores.mul_(2)
    return torch.exp(scores - logarithm) @ v, first * 1


def written_difference_at_once(q, k, v):
    scores = q @ k.mT
    less = scores - scores.logsumexp(-1, keepdim=True)
    first = less[:1]
    less.add_(1)
    return torch.exp(less) @ v, first * 1


def written_logarithm_of_weights(q, k, v):
    less = torch.log_softmax(q @ k.mT, -1)
    first = less[:1]
    less.add_(1)
    return torch.exp(less) @ v, first * 1


def written_sum(q, k, v):
    scores = q @ k.mT
    total = torch.exp(scores).sum(-1)
    first = total[:1]
    total.add_(1)
    return torch.exp(scores - total.log()[..., None]) @ v, first * 1


def written_products(q, k, v):
    products = q.unsqueeze(-2) * k.unsqueeze(-3)
    first = products[:1]
    products.add_(1)
    return products.sum(-1).softmax(-1) @ v, first * 1


WRITTEN = (
    written_scores, written_logarithm, written_difference, written_scores_at_once, written_difference_at_once,
    written_logarithm_of_weights, written_sum, written_products,
)  # fmt: skip


@pytest.mark.parametrize("function", WRITTEN)
def test_what_is_written_on_the_way_is_read_as_it_is(function):
    run, _ = compiled(function, backend=fused_only)
    for length in several(9, 12, 20):
        compare(function, qkv(length), torch.float32, run, backward=False)
