"""foci.nn.MultiheadAttention of nested and of packed inputs."""

import itertools

import pytest
import torch
from attention_pairs import B, E, L, S, explicit, padding, pair
from twins import rand

import foci
import foci.nn
from compiled import several


def nested(lengths, seed=0):
    return torch.nested.nested_tensor([rand(n, E, seed=seed + k) for k, n in enumerate(lengths)], layout=torch.jagged)


@pytest.mark.parametrize("need_weights", [False, True])
def test_nested(need_weights):
    _, ours = pair(batch_first=True)
    query, key = nested((3, 0, 5)), nested((4, 2, 1), seed=7)
    out, weights = ours(query, key, key, need_weights=need_weights)
    assert out.is_nested and out.shape[1] == query.shape[1]
    for n, (q, k, o) in enumerate(zip(query.unbind(), key.unbind(), out.unbind())):
        want, one = ours(q, k, k)
        torch.testing.assert_close(o, want)
        if need_weights:
            torch.testing.assert_close(weights[n, : q.shape[0], : k.shape[0]], one)
            assert weights[n].sum().item() == pytest.approx(q.shape[0])


def test_hooks_fire_once_where_weights_of_nested_inputs_are_asked_for():
    _, ours = pair(batch_first=True)
    fired = []
    ours.register_forward_pre_hook(lambda module, args: fired.append("before"))
    ours.register_forward_hook(lambda module, args, result: fired.append("behind"))
    query = nested((3, 1))
    ours(query, query, query)
    assert fired == ["before", "behind"]


@pytest.mark.parametrize("side", ["right", "left", "holes", "none"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_weights_of_packed_tokens(side, batch_first):
    _, ours = pair(batch_first=batch_first, add_bias_kv=batch_first)
    ours.mask = foci.masks.window(2, 2)  # positions are those of the padded row
    hidden = {
        "right": torch.arange(L) >= torch.tensor([[L], [2], [0]]), "left": torch.arange(L) < torch.tensor([[0], [L], [3]]),
        "holes": padding(L), "none": torch.zeros(B, L, dtype=torch.bool),
    }[side]  # fmt: skip
    blocked = explicit((L, L), "bool")
    adds = rand(B, L).masked_fill(hidden, -torch.inf).requires_grad_() if side == "holes" else hidden
    packing = foci.nn.Packing.from_mask(adds, batch_first=batch_first)
    x = rand(*((B, L) if batch_first else (L, B)), E)
    for average in (False, True):
        options = {"attn_mask": blocked, "average_attn_weights": average}
        tokens = packing.pack(x)
        out, weights = ours(tokens, tokens, tokens, packing, **options)
        want, theirs = ours(x, x, x, adds, **options)
        want, theirs = packing.pack(want), theirs.masked_fill(hidden[:, :, None] if average else hidden[:, None, :, None], 0.0)
        torch.testing.assert_close((out, weights), (want, theirs))
        torch.testing.assert_close(out, ours(tokens, tokens, tokens, packing, need_weights=False, **options)[0])
    if adds.requires_grad:
        gradients = [torch.autograd.grad(w.square().sum(), (adds, ours.in_proj_weight)) for w in (weights, theirs)]
        torch.testing.assert_close(*gradients)


def test_weights_of_tokens_behind_the_last_sequence():
    _, ours = pair()
    packing = foci.nn.Packing(torch.tensor([0, 2, 5]), longest=3, shape=(2, 4))
    tokens = rand(7, E)
    out, weights = ours(tokens, tokens, tokens, packing)
    assert weights.shape == (2, 4, 4) and (weights[0, 2:] == 0).all() and (weights[..., 3] == 0).all()
    torch.testing.assert_close(out[2:5], ours(*[tokens[2:5]] * 3)[0])


def test_masks_for_longer_sequences_than_the_nested_ones():
    _, ours = pair(batch_first=True)
    query, key = nested((3, 0, 5)), nested((4, 2, 1), seed=7)
    for mask in (explicit((9, 8), "bool"), explicit((9, 8), "floating", rank=3)):
        part = mask[..., :5, :4]
        for need_weights in (False, True):
            got, want = (ours(query, key, key, attn_mask=m, need_weights=need_weights) for m in (mask, part))
            torch.testing.assert_close((got[0].values(), got[1]), (want[0].values(), want[1]))
    with pytest.raises(RuntimeError, match=r"attn_mask is torch.Size\(\[4, 4\]\), but should be \(5, 4\)"):
        ours(query, key, key, attn_mask=part[0, :4, :4], need_weights=False)


def test_compiled_masks_of_nested_inputs_whose_longest_is_unknown():
    _, ours = pair(batch_first=True)

    def both(x, mask):
        return [ours(x, x, x, attn_mask=mask, need_weights=asked) for asked in (False, True)]

    compiled = torch.compile(both, backend="eager", fullgraph=True)
    for first, second in several((4, 2), (5, 3), (3, 7)):
        query = torch.nested.nested_tensor_from_jagged(rand(first + second, E), offsets=torch.tensor([0, first, first + second]))
        mask = explicit((max(first, second),) * 2, "bool")
        for (out, weights), (want, theirs) in zip(compiled(query, mask), both(query, mask), strict=True):
            torch.testing.assert_close((out.values(), weights), (want.values(), theirs))


ROWS = foci.AuxRequest(lse=True, row_max=True, column_sums=True)


@pytest.mark.parametrize("extra_keys", [False, True])
@pytest.mark.parametrize("kind", ["nested", "dense keys", "dense queries", "tokens"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_row_statistics_of_nested_inputs(kind, extra_keys, batch_first):
    _, ours = pair(batch_first=batch_first, add_bias_kv=extra_keys, add_zero_attn=extra_keys)
    query, key = nested((3, 0, 5)), nested((4, 2, 1), seed=7)

    def laid(dense):
        return dense if batch_first else dense.transpose(0, 1)

    if kind == "tokens":
        packing = foci.nn.Packing(query.offsets(), 5, (3, 5))
        out, aux = ours(*[query.values()] * 3, packing, return_aux=ROWS)
        key, ends = query, query.offsets() + 2 * extra_keys * torch.arange(4)
        split = [[t[:, a:b] for a, b in itertools.pairwise(at)] for t, at in zip(aux[:3], (query.offsets(), query.offsets(), ends))]
        outs = out.split([3, 0, 5])
    else:
        query = rand(B, L, E) if kind == "dense queries" else query
        key = rand(B, S, E, seed=1) if kind == "dense keys" else key
        inputs = [t if t.is_nested else laid(t) for t in (query, key, key)]
        out, aux = ours(*inputs, return_aux=ROWS)
        assert [t.is_nested for t in aux[:3]] == [query.is_nested, query.is_nested, key.is_nested]
        split, outs = [t.unbind() for t in aux[:3]], (out if out.is_nested else laid(out)).unbind()
    assert aux.weights is None
    for n, (q, k) in enumerate(zip(query.unbind(), key.unbind())):
        want, rows = ours(q, k, k, return_aux=ROWS)
        torch.testing.assert_close(outs[n], want)
        torch.testing.assert_close([part[n] for part in split], list(rows[:3]))


def test_nested_against_dense():
    _, ours = pair()
    query, key = nested((3, 1, 5)), rand(S, B, E)
    out, _ = ours(query, key, key, need_weights=False)
    for n, (q, o) in enumerate(zip(query.unbind(), out.unbind())):
        torch.testing.assert_close(o, ours(q, key[:, n], key[:, n])[0])
    with pytest.raises(ValueError, match="take no key_padding_mask"):
        ours(query, query, query, key_padding_mask=padding(L))
