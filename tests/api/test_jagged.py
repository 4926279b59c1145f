"""NestedTensors: every sequence as a dense call of its own."""

import pytest
import torch
import torch.nn.functional as F
from drawn import rand
from packed import ASKED, BACKENDS, nested, pieces, unpacked

import foci
from foci import jagged
from undefined import Undefined


def check(q_lengths, kv_lengths, *, heads=(4, 4), dims=(8, 8), backend="blocked", per_sequence=None, **kwargs):
    """`foci.attention` of nested tensors against dense calls of each sequence: outputs and gradients."""
    (qv, q), (kv, k), (vv, v) = (
        nested(q_lengths, heads[0], dims[0]), nested(kv_lengths, heads[1], dims[0], seed=1), nested(kv_lengths, heads[1], dims[1], seed=2),
    )  # fmt: skip
    if q_lengths == kv_lengths:  # the same ragged structure
        k, v = (torch.nested.nested_tensor_from_jagged(t, offsets=q.offsets()).transpose(1, 2) for t in (kv, vv))
    with foci.use(backend):
        out, aux = foci.attention(q, k, v, return_aux=ASKED, **kwargs)
    assert out.is_nested and out.layout == torch.jagged
    assert out.offsets() is q.offsets() and out.shape[2] == q.shape[2]
    weights = [rand(*unpacked(t).shape, seed=9) for t in (out, aux.lse, aux.column_sums)]
    finite = unpacked(aux.lse).isfinite()
    loss = sum(((t * w)[t.isfinite()]).sum() for t, w in zip(map(unpacked, (out, aux.lse, aux.column_sums)), weights, strict=True))
    grads = torch.autograd.grad(loss, (qv, kv, vv))
    expected, expected_aux = [], []
    for n, parts in enumerate(zip(pieces(qv, q_lengths), pieces(kv, kv_lengths), pieces(vv, kv_lengths), strict=True)):
        more = kwargs if per_sequence is None else {**kwargs, **per_sequence(n)}
        with foci.use("reference"):
            one, one_aux = foci.attention(*parts, return_aux=ASKED, **more)
        expected.append(one[0].transpose(0, 1))
        expected_aux.append([t[0].transpose(0, 1) for t in one_aux[:3]])
    wanted = [torch.cat(expected), *(torch.cat(ts) for ts in zip(*expected_aux, strict=True))]
    for got, want in zip((out, aux.lse, aux.row_max, aux.column_sums), wanted, strict=True):
        torch.testing.assert_close(unpacked(got), want)
    assert torch.equal(finite, wanted[1].isfinite())
    loss = sum(((t * w)[t.isfinite()]).sum() for t, w in zip((wanted[0], wanted[1], wanted[3]), weights, strict=True))
    torch.testing.assert_close(grads, torch.autograd.grad(loss, (qv, kv, vv)))


# JAG-05, JAG-08
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [(3, 5, 1), (4,), (0, 3, 0, 7, 0), (1, 1, 1), (300, 40)], ids=str)
def test_plain(lengths, backend):
    check(lengths, lengths, backend=backend)


VARIANTS = {
    "causal": {"mask": foci.masks.causal()},
    "causal lower right": {"mask": foci.masks.causal_lower_right()},
    "window": {"mask": foci.masks.window(2)},
    "lambda mask": {"mask": lambda b, h, q, kv: (q + kv) % 2 == 0},
    "inverse causal": {"mask": lambda b, h, q, kv: q < kv},
    "last keys": {"mask": lambda b, h, q, kv: kv >= foci.kv_len() - 2},
    "alibi": {"score": foci.scores.alibi(4)},
    "softcap": {"score": foci.scores.softcap(2.0)},
    "score of everything": {"score": lambda s, b, h, q, kv: s * 0.5 + h - 0.1 * (q - kv) + 0.01 * foci.q_len()},
    "scale": {"scale": -0.3},
    "masked by the score": {"score": lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf"))},
}


# JAG-03, JAG-04
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [((3, 5, 1), (3, 5, 1)), ((3, 0, 2), (4, 6, 0)), ((2, 9), (7, 3))], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, lengths, backend):
    check(*lengths, backend=backend, **VARIANTS[name])


# JAG-03
@pytest.mark.parametrize("backend", BACKENDS)
def test_functions_of_the_sequence(backend):
    table = rand(3)
    check(
        (3, 5, 2), (4, 1, 6), backend=backend, score=lambda s, b, h, q, kv: s * table[b] + b,
        per_sequence=lambda n: {"score": lambda s, b, h, q, kv: s * table[n] + n},
    )  # fmt: skip


# JAG-04
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (6, 3)], ids=str)
def test_grouped_heads(heads, backend):
    check((3, 5, 1), (4, 2, 6), heads=heads, backend=backend, mask=foci.masks.causal())


# JAG-06
@pytest.mark.parametrize("dims", [(1, 1), (7, 5), (3, 16), (33, 9)], ids=str)
def test_head_dims(dims):
    check((3, 5, 1), (3, 5, 1), dims=dims)


# JAG-04
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_captured_tensors(backend):
    lengths = (3, 0, 5)
    _, q = nested(lengths, 4, 8)
    slopes, bias = rand(4).requires_grad_(), rand(3, 4, 5, 5).requires_grad_()
    with foci.use(backend):
        out = foci.attention(q, q, q, score=lambda s, b, h, i, j: s + slopes[h] * (i - j) + bias[b, h, i, j])
    weights = rand(*unpacked(out).shape, seed=9)
    got = torch.autograd.grad((unpacked(out) * weights).sum(), (slopes, bias))
    loss = 0.0
    for n, (part, weight) in enumerate(zip(pieces(unpacked(q).detach(), lengths), weights.split(list(lengths)), strict=True)):
        size = part.shape[2]
        at = torch.arange(size)
        scores = part @ part.mT / 8**0.5 + slopes[:, None, None] * (at[:, None] - at) + bias[n, :, :size, :size]
        loss = loss + ((scores.softmax(-1) @ part)[0].transpose(0, 1) * weight).sum()
    torch.testing.assert_close(got, torch.autograd.grad(loss, (slopes, bias)))


# JAG-04
@pytest.mark.parametrize("options", [{"score": "table"}, {"bias": "table"}, {"score": "unseen"}], ids=str)
def test_gradients_of_captured_tensors_alone(options):
    q, k, v = (t.detach() for t in (nested((3, 5), 2, 8)[1], *(nested((3, 5), 2, 8, seed=n)[1] for n in (1, 2))))
    k, v = (torch.nested.nested_tensor_from_jagged(t.transpose(1, 2).values(), offsets=q.offsets()).transpose(1, 2) for t in (k, v))
    found = []
    for learn in (False, True):
        table, holder = rand(2, 5, 5).requires_grad_(), [1.0]
        by_name = {
            "table": table if "bias" in options else lambda s, b, h, i, j: s + table[h, i, j],
            "unseen": lambda s, b, h, i, j: s * holder[0] + table[h, i, j],
        }
        given = [t.detach().requires_grad_(learn) for t in (q, k, v)]
        out = foci.attention(*given, **{name: by_name[way] for name, way in options.items()})
        found.append(torch.autograd.grad(unpacked(out).square().sum(), table)[0])
    torch.testing.assert_close(*found)


# JAG-04
def test_gradcheck():
    offsets = torch.tensor([0, 2, 2, 5])

    def attend(q, k, v, slopes):
        return foci.varlen_attn(
            q,
            k,
            v,
            offsets,
            offsets,
            3,
            3,
            score=lambda s, b, h, i, j: s.sin() + slopes[h] * (i - j),
            mask=foci.masks.causal(),
            return_aux=ASKED,
        )

    inputs = [rand(5, 2, 3, seed=n).requires_grad_() for n in range(3)]
    assert torch.autograd.gradcheck(attend, (*inputs, rand(2).requires_grad_()))


# SDPA-08
def test_dropout_is_that_of_the_dense_call():
    lengths = (6, 6)
    values, q = nested(lengths, 4, 8)
    dense = torch.cat(pieces(values, lengths))
    found = []
    for backend in BACKENDS:
        with foci.use(backend):
            torch.manual_seed(3)
            found.append(unpacked(foci.attention(q, q, q, dropout_p=0.4)))
            torch.manual_seed(3)
            found.append(foci.attention(dense, dense, dense, dropout_p=0.4).transpose(1, 2).flatten(0, 1))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)


# JAG-01
@pytest.mark.parametrize("entry", ["sdpa", "flex", "attention"])
def test_every_entry_point(entry):
    lengths = (3, 5)
    values, q = nested(lengths, 4, 8)
    if entry == "sdpa":
        out = foci.scaled_dot_product_attention(q, q, q, is_causal=True)
    elif entry == "flex":
        out, lse = foci.flex_attention(q, q, q, block_mask=lambda b, h, i, j: i >= j, return_lse=True)
        assert lse.is_nested and lse.shape[2] == q.shape[2]
    else:
        out = foci.attention(q, q, q, mask=foci.masks.causal())
    for got, part in zip(out.unbind(), pieces(values, lengths), strict=True):
        torch.testing.assert_close(got[None], F.scaled_dot_product_attention(part, part, part, is_causal=True))


@pytest.mark.parametrize("mask", [foci.causal_upper_left(4, 4), foci.causal_lower_right(4, 4)])
def test_causal_values(mask):
    values, q = nested((3, 5), 4, 8)
    out = foci.scaled_dot_product_attention(q, q, q, mask)
    for got, part in zip(out.unbind(), pieces(values, (3, 5)), strict=True):
        torch.testing.assert_close(got[None], F.scaled_dot_product_attention(part, part, part, is_causal=True))


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
    out, *others = results if isinstance(results, tuple) else (results,)
    found = [out, *(t for t in (others[0][:2] if others and isinstance(others[0], tuple) else others) if t is not None)]
    if out.requires_grad and q.lengths() is None:
        found.append(torch.autograd.grad(out.values().sum(), q)[0])
    for nested_one in found:
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


# JAG-05
@pytest.mark.parametrize("backend", BACKENDS)
def test_dense_query(backend):
    lengths = (3, 1, 6)
    q = rand(3, 4, 5, 8).requires_grad_()
    values, k = nested(lengths, 4, 8)
    with foci.use(backend):
        out, aux = foci.attention(q, k, k, mask=foci.masks.causal(), return_aux=foci.AuxRequest(lse=True))
    assert not out.is_nested and out.shape == q.shape and aux.lse.shape == q.shape[:3]
    want = torch.cat([F.scaled_dot_product_attention(q[n : n + 1], p, p, is_causal=True) for n, p in enumerate(pieces(values, lengths))])
    torch.testing.assert_close(out, want)
    weights = rand(*out.shape, seed=4)
    torch.testing.assert_close(torch.autograd.grad(out, (q, values), weights), torch.autograd.grad(want, (q, values), weights))


def test_nested_query_of_dense_keys():
    lengths = (3, 0, 6)
    values, q = nested(lengths, 4, 8)
    k = rand(1, 4, 5, 8).requires_grad_()
    out = foci.attention(q, k, k)
    want = torch.cat([F.scaled_dot_product_attention(p, k, k)[0].transpose(0, 1) for p in pieces(values, lengths)])
    torch.testing.assert_close(unpacked(out), want)
    weights = rand(*want.shape, seed=4)
    torch.testing.assert_close(torch.autograd.grad(unpacked(out), (values, k), weights), torch.autograd.grad(want, (values, k), weights))


# JAG-05
@pytest.mark.parametrize("which", ["query heads", "key heads", "value heads", "key and value batch", "query batch"])
def test_broadcast_heads_and_batch(which):
    lengths, heads = [[3, 2, 6]] * 3, [4, 4, 4]
    for n, name in enumerate(("query", "key", "value")):
        if name in which and "heads" in which:
            heads[n] = 1
        if name in which and "batch" in which:
            lengths[n] = [5]
    packed, njts = zip(*(nested(ls, h, 8, seed=n) for n, (ls, h) in enumerate(zip(lengths, heads, strict=True))), strict=True)
    out = foci.attention(*njts)
    want = []
    for n in range(3):
        q, k, v = (pieces(t, ls)[n if len(ls) == 3 else 0].expand(1, 4, -1, -1) for t, ls in zip(packed, lengths, strict=True))
        want.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
    want = torch.cat(want)
    torch.testing.assert_close(unpacked(out), want)
    weights = rand(*want.shape, seed=4)
    torch.testing.assert_close(torch.autograd.grad(unpacked(out), packed, weights), torch.autograd.grad(want, packed, weights))


# JAG-06
@pytest.mark.parametrize("backend", BACKENDS)
def test_narrowed(backend):
    base = rand(3, 9, 4, 8).requires_grad_()
    starts, lengths = torch.tensor([0, 2, 1]), torch.tensor([3, 5, 0])
    njt = torch.nested.narrow(base, 1, starts, lengths, layout=torch.jagged).transpose(1, 2)
    with foci.use(backend):
        out = foci.attention(njt, njt, njt, mask=foci.masks.causal_lower_right())
    assert out.lengths() is njt.lengths() and out.shape[2] == njt.shape[2]
    loss, want = 0.0, 0.0
    for n, got in enumerate(out.unbind()):
        part = base[n, starts[n] : starts[n] + lengths[n]].transpose(0, 1)
        if lengths[n]:
            one = F.scaled_dot_product_attention(part, part, part, is_causal=True)
            torch.testing.assert_close(got, one)
            loss, want = loss + got.square().sum(), want + one.square().sum()
    torch.testing.assert_close(torch.autograd.grad(loss, base), torch.autograd.grad(want, base))


@pytest.mark.parametrize("which", ["query", "key and value"])
def test_a_narrowed_batch_of_one(which):
    lengths = (3, 1, 6)
    base = rand(1, 9, 4, 8).requires_grad_()
    one = torch.nested.narrow(base, 1, torch.tensor([2]), torch.tensor([5]), layout=torch.jagged).transpose(1, 2)
    values, many = nested(lengths, 4, 8, seed=1)
    part = base[:, 2:7].transpose(1, 2)
    if which == "query":
        out, calls = foci.attention(one, many, many).unbind(), [(part, p, p) for p in pieces(values, lengths)]
    else:
        out, calls = foci.attention(many, one, one).unbind(), [(p, part, part) for p in pieces(values, lengths)]
    want = [F.scaled_dot_product_attention(*call)[0] for call in calls]
    torch.testing.assert_close(list(out), want)
    found = [torch.autograd.grad(sum(t.square().sum() for t in ts), (base, values)) for ts in (out, want)]
    torch.testing.assert_close(*found)


def test_one_sequence_per_head_without_a_head_dim():
    lengths = (3, 0, 6)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = rand(9, 8).requires_grad_()
    njt = torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
    out = foci.scaled_dot_product_attention(njt, njt, njt, is_causal=True)
    assert out.shape == njt.shape
    want = torch.cat([F.scaled_dot_product_attention(p, p, p, is_causal=True) for p in values.split(list(lengths)) if len(p)])
    torch.testing.assert_close(out.values(), want)
    torch.testing.assert_close(torch.autograd.grad(out.values().sum(), values), torch.autograd.grad(want.sum(), values))


# JAG-06
def test_contiguous_heads_first():
    parts = [rand(4, n, 8, seed=n) for n in (3, 5)]
    values = torch.cat(parts, 1).requires_grad_()
    njt = torch.nested.nested_tensor_from_jagged(values, offsets=torch.tensor([0, 3, 8]), jagged_dim=2)
    out = foci.attention(njt, njt, njt)
    for got, part in zip(out.unbind(), parts, strict=True):
        torch.testing.assert_close(got, F.scaled_dot_product_attention(part, part, part))


# JAG-07
@pytest.mark.parametrize("rest", [(4, 8), (2, 4, 8)], ids=str)
def test_ragged_before_the_length(rest):
    offsets = torch.tensor([0, 3, 3, 7])
    packed = [rand(7, *rest, seed=n).requires_grad_() for n in range(3)]
    q, k, v = (torch.nested.nested_tensor_from_jagged(t, offsets=offsets) for t in packed)
    out = foci.scaled_dot_product_attention(q, k, v, is_causal=True)
    want = F.scaled_dot_product_attention(*packed, is_causal=True)
    assert out.shape == q.shape and out.offsets() is offsets
    torch.testing.assert_close(out.values(), want)
    weights = rand(*want.shape, seed=5)
    torch.testing.assert_close(torch.autograd.grad(out.values(), packed, weights), torch.autograd.grad(want, packed, weights))
    scored, aux = foci.attention(q, k, v, score=lambda s, b, h, i, j: s * (b + 1), return_aux=foci.AuxRequest(lse=True, weights=True))
    scale = torch.arange(1, 8)[(..., *[None] * len(rest))]
    torch.testing.assert_close(scored.values(), F.scaled_dot_product_attention(packed[0] * scale, *packed[1:]))
    assert aux.lse.shape == q.shape[:-1] and aux.weights.shape == (*q.shape[:-1], 4)
    assert foci.explain(q, k, v).backend is not None


def test_sink():
    lengths = (3, 0, 5)
    values, q = nested(lengths, 4, 8)
    sink = rand(4).requires_grad_()
    out, aux = foci.attention(q, q, q, sink=sink, return_aux=foci.AuxRequest(lse=True))
    dense = [foci.attention(p, p, p, sink=sink, return_aux=foci.AuxRequest(lse=True)) for p in pieces(values, lengths)]
    want = torch.cat([o[0].transpose(0, 1) for o, _ in dense])
    torch.testing.assert_close(unpacked(out), want)
    torch.testing.assert_close(unpacked(aux.lse), torch.cat([a.lse[0].T for _, a in dense]))
    torch.testing.assert_close(
        torch.autograd.grad(unpacked(out).square().sum(), (values, sink)), torch.autograd.grad(want.square().sum(), (values, sink))
    )


@pytest.mark.parametrize("entry", ["one head", "entries of one head", "entries", "a dense query"])
def test_sink_has_a_logit_for_each_head(entry):
    values, offsets, heads = rand(6, 3, 5, 8), torch.tensor([0, 2, 6]), 1
    keys = torch.nested.nested_tensor_from_jagged(values[:, 0, 0], offsets=offsets)
    if entry == "one head":
        query = keys
    elif entry == "a dense query":
        query = rand(2, 4, 8)
    elif entry == "entries of one head":
        query = keys = torch.nested.nested_tensor_from_jagged(values[:, 0], offsets=offsets)
    else:
        query, heads = torch.nested.nested_tensor_from_jagged(values, offsets=offsets), 3
        keys = query
    out = foci.attention(query, keys, keys, sink=torch.full((heads,), -1e4, dtype=values.dtype))
    want = foci.attention(query, keys, keys)
    torch.testing.assert_close(*(t.values() if t.is_nested else t for t in (out, want)))
    with pytest.raises(ValueError, match=rf"^sink must be .* one logit per query head, \[{heads}\]"):
        foci.attention(query, keys, keys, sink=torch.zeros(heads + 1))


# JAG-09
def test_no_backend_says_why():
    _, q = nested((3, 5), 2, 8)
    with foci.use("aten"), pytest.raises(foci.NoViableBackend, match="aten .* dense layout") as caught:
        foci.attention(q, q, q)
    assert all(name in str(caught.value) for name in foci.backends.names())


def test_lengths_that_say_what_offsets_say():
    offsets, lengths = torch.tensor([0, 3, 8]), torch.tensor([3, 5])
    values = [rand(8, 2, 8, seed=n) for n in range(3)]
    q, k, v = (torch.nested.nested_tensor_from_jagged(t, offsets.clone()).transpose(1, 2) for t in values)
    narrowed = torch.nested.nested_tensor_from_jagged(values[2], offsets, lengths).transpose(1, 2)
    torch.testing.assert_close(foci.attention(q, k, narrowed).values(), foci.attention(q, k, v).values())


def test_a_batch_of_nothing():
    q = torch.nested.nested_tensor_from_jagged(rand(0, 4, 8), offsets=torch.tensor([0])).transpose(1, 2)
    assert foci.attention(q, q, q).shape[0] == 0


def test_a_nested_mask_is_refused():
    q = nested((3, 5), 2, 8)[1]
    with pytest.raises(TypeError, match="attn_mask must be a dense tensor; got a NestedTensor"):
        foci.scaled_dot_product_attention(q, q, q, attn_mask=q)


# Errors in torch's words -------------------------------------------------------------------------------------------


def wrong(name):
    _, q = nested((3, 5), 2, 8)
    _, k = nested((3, 5), 2, 8, seed=1)
    dense = rand(2, 2, 5, 8)
    flat = torch.nested.nested_tensor_from_jagged(rand(8, 2, 8), offsets=torch.tensor([0, 3, 8]))
    return {
        "dtype": (q, k.float(), k),
        "device": (q, k.to("meta"), k),
        "key dense": (q, dense, k),
        "dims": (rand(2, 8), k, k),
        "other dims": (rand(2, 5, 8), k, k),
        "ragged": (flat, k, k),
        "head dim": tuple(
            torch.nested.nested_tensor_from_jagged(rand(2, 4, 8), offsets=torch.tensor([0, 3, 8]), jagged_dim=3) for _ in range(3)
        ),
        "batch": (q, *(nested((3, 5, 1), 2, 8)[1] for _ in range(2))),
        "tokens": (q, nested((3, 5), 2, 8)[1], nested((3, 6), 2, 8)[1]),
        "lengths": (q, nested((3, 5), 2, 8)[1], nested((5, 3), 2, 8)[1]),
        "narrowed": (
            q,
            k,
            torch.nested.nested_tensor_from_jagged(rand(8, 2, 8), torch.tensor([0, 3, 8]), torch.tensor([3, 4])).transpose(1, 2),
        ),
        "grouped": (nested((3, 5), 4, 8)[1], k, k),
        "strided": tuple(torch.nested.nested_tensor([rand(2, 3, 8), rand(3, 3, 8)]) for _ in range(3)),
        "heads": (q, *(nested((3, 5), 3, 8)[1] for _ in range(2))),
    }[name]


MESSAGES = {
    "dtype": "to have the same dtype; got query torch.float64, key torch.float32, value torch.float64",
    "device": "to have the same device; got query cpu, key meta, value cpu",
    "key dense": "key and value to be nested together; got a nested value and a dense key",
    "dims": "at least 3 dimensional; got 2, 4 and 4",
    "other dims": "one number of dimensions; got 3, 4 and 4",
    "ragged": r"ragged on the same dimension; got ragged dims \[1, 2, 2\]",
    "head dim": "ragged in the head dim",
    "batch": "query has batch size 2; it must be 3 or 1",
    "tokens": "same sequences; got float64.1, 2, 8, 8. on cpu and float64.1, 2, 9, 8. on cpu when packed",
    "lengths": r"same sequences; got tokens \[\(0, 3\), \(3, 8\)\] and \[\(0, 5\), \(5, 8\)\]",
    "narrowed": r"same sequences; got tokens \[\(0, 3\), \(3, 8\)\] and \[\(0, 3\), \(3, 7\)\]",
    "grouped": "have 4, 2, 2 heads: grouped heads need enable_gqa=True",
    "strided": "query must be ragged in the length alone",
    "heads": "have 2, 3, 3 heads: grouped heads need enable_gqa=True",
}


# JAG-02
@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_wrong_nested_tensors(name):
    with pytest.raises(ValueError, match=MESSAGES[name]):
        foci.scaled_dot_product_attention(*wrong(name))


@pytest.mark.parametrize("options", [{}, {"mask": foci.masks.causal()}, {"dropout_p": 0.4}, {"score": foci.scores.softcap(2.0)}], ids=str)
@pytest.mark.parametrize("same", [True, False], ids=["self", "cross"])
def test_by_the_tensors_inside_as_by_their_operations(monkeypatch, same, options):
    ends = [torch.tensor([0, 3, 10, 17]), torch.tensor([0, 5, 9, 20])]
    leaves = [torch.randn(int(e[-1]), 2, 8, dtype=torch.float64).requires_grad_() for e in (ends[0], ends[1 - same], ends[1 - same])]
    query, key = (torch.nested.nested_tensor_from_jagged(t, e) for t, e in zip(leaves, (ends[0], ends[1 - same])))
    value = torch.nested.nested_tensor_from_jagged(leaves[2], key.offsets())
    inputs = [t.transpose(1, 2) for t in (query, key, value)]
    weights, now, found = torch.randn(17, 2, 8, dtype=torch.float64), jagged.attend_nested_now, []
    for way in (now, lambda *_: None):
        taken = []
        monkeypatch.setattr(jagged, "attend_nested_now", lambda *args, way=way, taken=taken: (taken.append(way(*args)), taken[-1])[1])
        torch.manual_seed(0)
        out = foci.attention(*inputs, **options)
        gradients = torch.autograd.grad((out.transpose(1, 2).values() * weights).sum(), leaves)
        torch.manual_seed(0)
        with torch.no_grad():
            again = foci.attention(*inputs, **options)
        assert [t is not None for t in taken] == [way is now] * 2
        found.append([out.values(), again.values(), *gradients])
        assert out.shape == inputs[0].shape
        assert not again.requires_grad
    torch.testing.assert_close(*found)


def test_what_is_left_to_nested_operations(monkeypatch):
    taken, now = [], jagged.attend_nested_now
    monkeypatch.setattr(jagged, "attend_nested_now", lambda *args: (taken.append(now(*args)), taken[-1])[1])
    slopes = torch.rand(2, requires_grad=True)
    offsets = torch.tensor([0, 3, 7])
    q = torch.nested.nested_tensor_from_jagged(torch.randn(7, 2, 8), offsets).transpose(1, 2)
    loose = torch.nested.nested_tensor_from_jagged(torch.randn(7, 2, 8), offsets, lengths=torch.tensor([2, 4])).transpose(1, 2)
    leaf = torch.nested.nested_tensor_from_jagged(torch.randn(7, 2, 8).requires_grad_(), offsets).transpose(1, 2)
    for tensors, options in (
        ((q, q, q), {"return_aux": foci.AuxRequest(lse=True)}),
        ((loose, loose, loose), {}),
        ((leaf, leaf, leaf), {"score": lambda s, b, h, i, j: s * slopes[h]}),
        ((torch.randn(2, 2, 3, 8), q, q), {}),
    ):
        foci.attention(*tensors, **options)
    assert taken == [None] * 4


def test_functions_of_torch_are_traced_for_nested_tensors():
    lengths = (3, 5, 1)
    values, njt = nested(lengths, 4, 8)

    def score(s, b, h, q_idx, kv_idx):
        return s + torch.exp2(h * -1.0) * torch.tanh(kv_idx - q_idx)

    found = unpacked(foci.attention(njt, njt, njt, score=score))
    wanted = torch.cat([foci.attention(part, part, part, score=score)[0].transpose(0, 1) for part in pieces(values, lengths)])
    torch.testing.assert_close(found, wanted)


# JAG-05
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("learns", [True, False])
def test_one_query_head_beside_many_heads_of_the_same_sequences(learns, backend):
    values, keys = nested((3, 0, 5), 4, 8)
    rows = rand(8, 1, 8, seed=3).requires_grad_(learns)
    query = torch.nested.nested_tensor_from_jagged(rows, offsets=keys.offsets()).transpose(1, 2)
    whole = torch.nested.nested_tensor_from_jagged(rows.expand(-1, 4, -1), offsets=keys.offsets()).transpose(1, 2)
    with foci.use(backend):
        found, want = (unpacked(foci.attention(q, keys, keys, mask=foci.masks.causal())) for q in (query, whole))
    torch.testing.assert_close(found, want)
    inputs = (rows, values) if learns else (values,)
    torch.testing.assert_close(*(torch.autograd.grad(t.square().sum(), inputs) for t in (found, want)))


def test_undefined_gradients():
    values, query = nested((3, 0, 5), 4, 8)
    out = Undefined.apply(foci.attention(query, query, query))
    (grad,) = torch.autograd.grad(unpacked(out).sum() + values.sum(), values)
    torch.testing.assert_close(grad, torch.ones_like(values))


def test_grouped_heads_of_entries_are_asked_for():
    offsets = torch.tensor([0, 2, 5])
    query, key = (torch.nested.nested_tensor_from_jagged(rand(5, heads, 6, 8), offsets=offsets) for heads in (4, 2))
    with pytest.raises(ValueError, match="^query, key and value have 4, 2, 2 heads: grouped heads need enable_gqa=True"):
        foci.scaled_dot_product_attention(query, key, key)
    assert foci.scaled_dot_product_attention(query, key, key, enable_gqa=True).shape[2] == 4


def test_names_of_arguments_that_do_not_fit():
    _, query = nested((3, 5), 2, 8)
    with pytest.raises(ValueError, match="^attn_mask must broadcast to .*; got float64.1, 1, 1, 5, 5. on cpu"):
        foci.scaled_dot_product_attention(query, query, query, attn_mask=rand(1, 1, 1, 5, 5))


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (3, 3, 3), (5, 1, 3, 3)], ids=str)
def test_matrices_too_small_for_the_longest(sizes):
    _, q = nested((2, 3), 4, 8)
    message = r"^attn_mask must broadcast to .* = \[2, 4, 3, 3\], or have room for longer ones; got float64"
    for key in (q, rand(2, 4, 3, 8)):
        with pytest.raises(ValueError, match=message):
            foci.scaled_dot_product_attention(q, key, key, rand(*sizes))
    assert foci.scaled_dot_product_attention(q, q, q, rand(2, 1, 5, 7)).is_nested
