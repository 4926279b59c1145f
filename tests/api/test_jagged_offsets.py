"""Results of NestedTensors carry the query's offsets and extreme lengths, which are computed once."""

import pytest
import torch
from drawn import rand
from packed import ASKED, nested

import foci


# JAG-08
def test_results_compute_with_the_query():
    _, q = nested((3, 5, 1), 4, 8)
    out = foci.attention(q, q, q)
    total = out + q  # the same ragged length
    assert total.shape == q.shape
    assert out._get_max_seqlen() == 5 and out._get_min_seqlen() == 1
    assert out._maybe_max_seqlen == 5  # carried, not computed anew


def told(tokens, offsets, low, high, *, lengths=None, seed=0, rest=(4, 8)):
    """A NestedTensor [B, ragged, *rest] whose extremes were told, as none of its sequences' are."""
    values = rand(tokens, *rest, seed=seed).requires_grad_()
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets), lengths, min_seqlen=low, max_seqlen=high)


def heads_second(njt):
    return njt.transpose(1, 2)


QUERY, KEYS, ONE = (9, (0, 3, 8, 9), 0, 7), (12, (0, 4, 5, 12), 0, 9), (5, (0, 5), 4, 6)  # extremes that are none: nobody works them out
OF_CALLS = {
    "plain": lambda q: foci.attention(q, q, q),
    "without gradients": lambda q: foci.attention(*(t.detach() for t in (q, q, q))),
    "other keys": lambda q: foci.attention(q, *[heads_second(told(*KEYS))] * 2, mask=foci.masks.causal()),
    "logsumexp": lambda q: foci.attention(q, q, q, return_aux=foci.AuxRequest(lse=True, row_max=True)),
    "dropout": lambda q: foci.attention(q, q, q, dropout_p=0.4),
    "sdpa": lambda q: foci.scaled_dot_product_attention(q, q, q, is_causal=True),
    "flex": lambda q: foci.flex_attention(q, q, q, lambda s, b, h, i, j: s * 2, return_lse=True),
    "dense keys": lambda q: foci.attention(q, *[rand(3, 4, 5, 8)] * 2),
    "one sequence of keys": lambda q: foci.attention(q, *[heads_second(told(*ONE))] * 2),
    "one head of keys": lambda q: foci.attention(q, *[heads_second(told(*QUERY, rest=(1, 8)))] * 2),
}
SHAPED = {
    "narrowed": lambda: heads_second(told(9, (0, 3, 8, 9), 0, 7, lengths=torch.tensor([2, 4, 1]))),
    "without heads": lambda: told(*QUERY, rest=(8,)),
    "ragged before the length": lambda: told(*QUERY, rest=(2, 4, 8)),
}


# JAG-08
@pytest.mark.parametrize("name", [*OF_CALLS, *SHAPED])
def test_results_carry_what_the_query_knows_of_its_sequences(name):
    q = SHAPED[name]() if name in SHAPED else heads_second(told(*QUERY))
    results = OF_CALLS.get(name, OF_CALLS["sdpa"] if name == "ragged before the length" else OF_CALLS["plain"])(q)
    out, *more = results if isinstance(results, tuple) else (results,)
    nested_results = [out, *(t for t in (more[0][:2] if more and isinstance(more[0], tuple) else more) if t is not None)]
    if out.requires_grad and q.lengths() is None:
        nested_results.append(torch.autograd.grad(out.values().sum(), q)[0])
    for nested_one in nested_results:
        assert nested_one.offsets() is q.offsets()
        assert nested_one.lengths() is q.lengths()
        assert (nested_one._maybe_min_seqlen, nested_one._maybe_max_seqlen) == (0, 7)


# JAG-08
@pytest.mark.parametrize(
    "options", [{}, {"mask": foci.masks.causal()}, {"return_aux": ASKED}, {"dropout_p": 0.4}], ids=lambda o: next(iter(o), "plain")
)
def test_extremes_are_worked_out_once(options, monkeypatch):
    from torch.nested._internal import nested_tensor

    worked_out, compute = [], nested_tensor._get_sdpa_extreme_seqlen
    monkeypatch.setattr(nested_tensor, "_get_sdpa_extreme_seqlen", lambda which, *of: worked_out.append(which) or compute(which, *of))
    offsets = torch.tensor([0, 3, 8, 9])
    q, k, v = (torch.nested.nested_tensor_from_jagged(rand(9, 4, 8, seed=n), offsets).transpose(1, 2) for n in range(3))
    for _ in range(3):
        out = foci.attention(q, k, v, **options)
        out = out[0] if isinstance(out, tuple) else out
    foci.attention(out, out, out, **options)  # the next layer's
    assert len(set(worked_out)) == len(worked_out) <= 2
