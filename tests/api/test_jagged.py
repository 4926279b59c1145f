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
    gradients = []
    for learn in (False, True):
        table, holder = rand(2, 5, 5).requires_grad_(), [1.0]
        by_name = {
            "table": table if "bias" in options else lambda s, b, h, i, j: s + table[h, i, j],
            "unseen": lambda s, b, h, i, j: s * holder[0] + table[h, i, j],
        }
        inputs = [t.detach().requires_grad_(learn) for t in (q, k, v)]
        out = foci.attention(*inputs, **{name: by_name[way] for name, way in options.items()})
        gradients.append(torch.autograd.grad(unpacked(out).square().sum(), table)[0])
    torch.testing.assert_close(*gradients)


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
    results = []
    for backend in BACKENDS:
        with foci.use(backend):
            torch.manual_seed(3)
            results.append(unpacked(foci.attention(q, q, q, dropout_p=0.4)))
            torch.manual_seed(3)
            results.append(foci.attention(dense, dense, dense, dropout_p=0.4).transpose(1, 2).flatten(0, 1))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other)


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


@pytest.mark.parametrize("options", [{}, {"mask": foci.masks.causal()}, {"dropout_p": 0.4}, {"score": foci.scores.softcap(2.0)}], ids=str)
@pytest.mark.parametrize("same", [True, False], ids=["self", "cross"])
def test_by_the_tensors_inside_as_by_their_operations(monkeypatch, same, options):
    ends = [torch.tensor([0, 3, 10, 17]), torch.tensor([0, 5, 9, 20])]
    leaves = [torch.randn(int(e[-1]), 2, 8, dtype=torch.float64).requires_grad_() for e in (ends[0], ends[1 - same], ends[1 - same])]
    query, key = (torch.nested.nested_tensor_from_jagged(t, e) for t, e in zip(leaves, (ends[0], ends[1 - same])))
    value = torch.nested.nested_tensor_from_jagged(leaves[2], key.offsets())
    inputs = [t.transpose(1, 2) for t in (query, key, value)]
    weights, now, runs = torch.randn(17, 2, 8, dtype=torch.float64), jagged.attend_nested_now, []
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
        runs.append([out.values(), again.values(), *gradients])
        assert out.shape == inputs[0].shape
        assert not again.requires_grad
    torch.testing.assert_close(*runs)


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

    actual = unpacked(foci.attention(njt, njt, njt, score=score))
    wanted = torch.cat([foci.attention(part, part, part, score=score)[0].transpose(0, 1) for part in pieces(values, lengths)])
    torch.testing.assert_close(actual, wanted)


def test_undefined_gradients():
    values, query = nested((3, 0, 5), 4, 8)
    out = Undefined.apply(foci.attention(query, query, query))
    (grad,) = torch.autograd.grad(unpacked(out).sum() + values.sum(), values)
    torch.testing.assert_close(grad, torch.ones_like(values))
