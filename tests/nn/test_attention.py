"""foci.nn.MultiheadAttention against torch.nn's: constructor options, masks, dtypes, modes; outputs and every gradient."""

import itertools
import math

import pytest
import torch
from twins import rand

import foci
import foci.nn
from compiled import resize, several

B, L, S, E, H = 3, 5, 7, 12, 3


def pair(dtype=torch.float64, **options):
    """torch.nn's module and foci's with its state."""
    torch.manual_seed(1)
    theirs = torch.nn.MultiheadAttention(E, H, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.4)
    ours = foci.nn.MultiheadAttention(E, H, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def tensors(kind, *, batch_first=False, kdim=E, vdim=E, dtype=torch.float64):
    """Query, key and value; the same tensor twice or thrice where `kind` says so."""

    def make(length, dim, seed):
        shape = (length, dim) if kind == "unbatched" else (B, length, dim) if batch_first else (length, B, dim)
        return rand(*shape, dtype=dtype, seed=seed).requires_grad_()

    if kind == "self":
        x = make(L, E, 0)
        return x, x, x
    query, key = make(L, E, 0), make(S, kdim, 1)
    return query, key, key if kind == "memory" else make(S, vdim, 2)


def padding(length, kind="bool", dtype=torch.float64):
    mask = torch.zeros(B, length, dtype=torch.bool)
    mask[0, length - 2 :] = True
    mask[1, 0] = mask[1, 2] = True
    return mask if kind == "bool" else rand(B, length, dtype=dtype, seed=5).masked_fill(mask, -torch.inf)


def explicit(lengths, kind, rank=2, dtype=torch.float64):
    shape = lengths if rank == 2 else (B * H, *lengths)
    blocked = rand(*shape, seed=3) > 0.8
    blocked[..., 1] = False  # no row without a key, where torch gives NaN
    return blocked if kind == "bool" else rand(*shape, dtype=dtype, seed=4).masked_fill(blocked, -torch.inf)


def outcome(module, inputs, weights_too=True, **kwargs):
    """Output, weights and the gradients of inputs and parameters."""
    distinct = list(
        {id(t): t for t in (*inputs, *(t for t in kwargs.values() if isinstance(t, torch.Tensor) and t.requires_grad))}.values()
    )
    out, weights = module(*inputs, **kwargs)
    loss = (out * rand(*out.shape, dtype=out.dtype, seed=8)).sum()
    if weights is not None and weights_too:
        loss = loss + (weights * rand(*weights.shape, dtype=weights.dtype, seed=9)).sum()
    names, parameters = zip(*module.named_parameters())
    grads = torch.autograd.grad(loss, [*distinct, *parameters])
    return {"out": out, "weights": weights, **dict(zip([*map(str, range(len(distinct))), *names], grads))}


def same(theirs, ours, inputs, **kwargs):
    expected, got = outcome(theirs, inputs, **kwargs), outcome(ours, inputs, **kwargs)
    assert expected.keys() == got.keys()
    for name in expected:
        if expected[name] is None:
            assert got[name] is None, name
        else:
            assert got[name].shape == expected[name].shape, name
            torch.testing.assert_close(got[name], expected[name], msg=lambda text, name=name: f"{name}: {text}")


OPTIONS = [
    {},
    {"bias": False},
    {"kdim": 6, "vdim": 10},
    {"kdim": 6, "vdim": 10, "bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "kdim": 6},
]


# MOD-01, MOD-02
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("batch_first", [False, True])
def test_constructor_options(options, batch_first):
    theirs, ours = pair(batch_first=batch_first, **options)
    dims = {name: options.get(name, E) for name in ("kdim", "vdim")}
    for kind in ("self", "memory", "three", "unbatched") if dims == {"kdim": E, "vdim": E} else ("three", "unbatched"):
        inputs = tensors(kind, batch_first=batch_first, **dims)
        for need_weights in (False, True):
            same(theirs, ours, inputs, need_weights=need_weights)
    for average in (False, True):
        same(theirs, ours, inputs, average_attn_weights=average)
    inputs = tensors("three", batch_first=batch_first, **dims)
    same(theirs, ours, inputs, key_padding_mask=padding(S), attn_mask=explicit((L, S), "bool", 3))
    same(theirs, ours, inputs, key_padding_mask=padding(S, "float"), attn_mask=explicit((L, S), "float"), need_weights=False)


MASKS = [
    {"attn_mask": kind, "rank": rank, "padding": pad}
    for kind, rank, pad in itertools.product((None, "bool", "float"), (2, 3), (None, "bool", "float"))
    if not (kind is None and rank == 3)
]


# MOD-02
@pytest.mark.parametrize("case", MASKS, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_masks(case, training):
    theirs, ours = (m.train(training) for m in pair(batch_first=True))
    inputs = tensors("three", batch_first=True)
    attn_mask = None if case["attn_mask"] is None else explicit((L, S), case["attn_mask"], case["rank"])
    key_padding_mask = None if case["padding"] is None else padding(S, case["padding"])
    for need_weights in (False, True):
        same(theirs, ours, inputs, attn_mask=attn_mask, key_padding_mask=key_padding_mask, need_weights=need_weights)


# MOD-02
@pytest.mark.parametrize("rank", [2, 3])
def test_gradient_of_a_mask(rank):
    theirs, ours = pair()
    bias = rand(*((L, S) if rank == 2 else (B * H, L, S)), seed=6).requires_grad_()
    same(theirs, ours, tensors("three"), attn_mask=bias, need_weights=False)


# MOD-02
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_unbatched_masks(kind):
    theirs, ours = pair()
    inputs = tensors("unbatched")
    same(theirs, ours, inputs, attn_mask=explicit((L, S), kind), key_padding_mask=padding(S, kind)[0])
    same(theirs, ours, inputs, attn_mask=explicit((L, S), kind, 3)[:H])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype):
    theirs, ours = pair(dtype=dtype, batch_first=True)
    exact = pair(batch_first=True)[0]
    exact.load_state_dict({name: value.double() for name, value in theirs.state_dict().items()})
    x = rand(B, L, E).to(dtype)
    args = {"key_padding_mask": padding(L), "attn_mask": explicit((L, L), "bool"), "need_weights": False}
    want, they, we = (m(*[t] * 3, **args)[0].double() for m, t in ((exact, x.double()), (theirs, x), (ours, x)))
    assert (we - want).abs().max() <= 2 * (they - want).abs().max() + 4 * torch.finfo(dtype).eps * want.abs().max()


# MOD-03
def test_causal_hint():
    theirs, ours = pair(batch_first=True)
    inputs = tensors("self", batch_first=True)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    for need_weights in (False, True):
        same(theirs, ours, inputs, attn_mask=causal, is_causal=True, need_weights=need_weights)
    same(
        theirs, ours, inputs, attn_mask=causal, is_causal=True, key_padding_mask=torch.zeros(B, L, dtype=torch.float64), need_weights=False
    )
    with foci.observe() as log:
        ours(*inputs, attn_mask=causal, is_causal=True, need_weights=False)
    assert not log.calls[0].problem.variant.captures  # the hint is taken: the mask is not read
    for module in (theirs, ours):
        with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
            module(*inputs, is_causal=True, need_weights=False)


# MOD-06
def test_rows_without_keys_give_zeros():
    _, ours = pair(batch_first=True)
    x = rand(B, L, E).requires_grad_()
    everything = torch.ones(B, L, dtype=torch.bool)
    everything[1] = False
    out, weights = ours(x, x, x, key_padding_mask=everything)
    assert (weights[0] == 0).all() and (weights[2] == 0).all()
    torch.testing.assert_close(out[0], ours.out_proj.bias.expand(L, E))
    torch.testing.assert_close(weights[1].sum(-1), torch.ones(L, dtype=torch.float64))
    grads = torch.autograd.grad(out.sum() + weights.sum(), [x, *ours.parameters()])
    assert all(g.isfinite().all() for g in grads)


# MOD-02
def test_weights_only_when_asked():
    _, ours = pair(batch_first=True)
    x = rand(B, L, E)
    with foci.observe() as log:
        assert ours(x, x, x, need_weights=False)[1] is None
    assert not log.calls[0].problem.formula.outputs.weights


def test_row_statistics():
    _, ours = pair(batch_first=True)
    x = rand(B, L, E)
    out, aux = ours(x, x, x, return_aux=foci.AuxRequest(lse=True, column_sums=True))
    full, weights = ours(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(out, full)
    torch.testing.assert_close(aux.column_sums, weights.sum(2))
    assert aux.lse.shape == (B, H, L) and aux.weights is None
    assert ours(x[0], x[0], x[0], return_aux=foci.AuxRequest(lse=True))[1].lse.shape == (H, L)


# MOD-06
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
@pytest.mark.parametrize("training", [False, True])
def test_masks_of_other_dtypes_are_refused(dtype, training):
    _, ours = pair(batch_first=True)
    ours.train(training)
    x = rand(B, L, E)
    with pytest.raises(AssertionError, match="only bool and floating types of key_padding_mask are supported"):
        ours(x, x, x, key_padding_mask=torch.zeros(B, L, dtype=dtype))
    with pytest.raises(AssertionError, match="only bool and floating types of attn_mask are supported"):
        ours(x, x, x, attn_mask=torch.zeros(L, L, dtype=dtype))


WRONG = {
    "four dims": lambda x: {"query": x[None], "key": x[None], "value": x[None]},
    "unbatched key": lambda x: {"query": x, "key": x[0], "value": x[0]},
    "padding dims": lambda x: {"key_padding_mask": torch.zeros(L, dtype=torch.bool)},
    "padding batch": lambda x: {"key_padding_mask": torch.zeros(B + 1, L, dtype=torch.bool)},
    "padding length": lambda x: {"key_padding_mask": torch.zeros(B, L + 1, dtype=torch.bool)},
    "mask dims": lambda x: {"attn_mask": torch.zeros(1, 1, L, L)},
    "2-D mask": lambda x: {"attn_mask": torch.zeros(L, L + 1, dtype=torch.float64)},
    "3-D mask": lambda x: {"attn_mask": torch.zeros(B, L, L, dtype=torch.float64)},
    "embedding": lambda x: {"query": x[..., 1:]},
    "key and value": lambda x: {"value": x[:, 1:]},
}


@pytest.mark.parametrize("case", WRONG)
def test_error_texts(case):
    theirs, ours = pair(batch_first=True)
    x = rand(B, L, E)
    inputs = {"query": x, "key": x, "value": x, "need_weights": False, **WRONG[case](x)}
    found = []
    for module in (theirs, ours):
        with pytest.raises((AssertionError, RuntimeError)) as caught:
            module(**inputs)
        found.append(caught)
    assert found[1].type is found[0].type
    # torch transposes before it looks, so its shapes may be in another order
    assert str(found[1].value).split("torch.Size")[0] == str(found[0].value).split("torch.Size")[0]


@pytest.mark.parametrize("arguments", [(0, 1), (12, 0), (12, 5)])
def test_constructor_errors(arguments):
    for module in (torch.nn.MultiheadAttention, foci.nn.MultiheadAttention):
        with pytest.raises((ValueError, AssertionError), match="must be"):
            module(*arguments)
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads = 4"):
        foci.nn.MultiheadAttention(12, 4, num_kv_heads=3)


# MOD-01
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_initialisation(options):
    states = []
    for module in (torch.nn.MultiheadAttention, foci.nn.MultiheadAttention):
        torch.manual_seed(3)
        states.append(module(E, H, **options).state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# MOD-01
@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 10}, {"bias": False}, {"add_bias_kv": True}], ids=str)
def test_grouped_heads(options):
    torch.manual_seed(0)
    grouped = foci.nn.MultiheadAttention(16, 4, num_kv_heads=2, batch_first=True, dtype=torch.float64, **options)
    whole = foci.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64, **options)

    def repeated(t, dim=0):  # rows of each key head, for each of its query heads
        return t.unflatten(dim, (2, 4)).repeat_interleave(2, dim=dim).flatten(dim, dim + 1)

    state = grouped.state_dict()
    for name in ("k_proj_weight", "v_proj_weight"):
        if name in state:
            state[name] = repeated(state[name])
    for name in ("in_proj_weight", "in_proj_bias"):
        if name in state:
            q, k, v = state[name].split([16, 8, 8])
            state[name] = torch.cat((q, repeated(k), repeated(v)))
    for name in ("bias_k", "bias_v"):
        if name in state:
            state[name] = repeated(state[name], 2)
    whole.load_state_dict(state)
    inputs = (rand(B, L, 16), rand(B, S, options.get("kdim", 16)), rand(B, S, options.get("vdim", 16)))
    for ours, theirs in zip(grouped(*inputs), whole(*inputs)):
        torch.testing.assert_close(ours, theirs)


# MOD-01
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_by_complex_numbers(interleaved):
    rotary = foci.nn.RotaryEmbedding(6, base=100.0, interleaved=interleaved)
    x, positions = rand(2, 3, 5, 8), torch.tensor([0, 1, 4, 9, 2])
    turned = x[..., :6]
    parts = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :3], turned[..., 3:])
    speeds = torch.tensor([100.0 ** (-2 * i / 6) for i in range(3)], dtype=torch.float64)
    z = torch.complex(*(p.contiguous() for p in parts)) * torch.exp(1j * positions[:, None] * speeds)
    want = torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
    torch.testing.assert_close(rotary(x, positions), torch.cat((want, x[..., 6:]), -1))
    assert not rotary.state_dict()
    with pytest.raises(ValueError, match="positive and even"):
        foci.nn.RotaryEmbedding(5)


# MOD-01
def test_rotary_depends_on_distance_alone():
    torch.manual_seed(0)
    ours = foci.nn.MultiheadAttention(E, H, batch_first=True, rotary=foci.nn.RotaryEmbedding(4), dtype=torch.float64)
    x = rand(1, 6, E)
    shifted = torch.cat((rand(1, 3, E, seed=1), x), 1)
    hidden = torch.zeros(1, 9, dtype=torch.bool)
    hidden[:, :3] = True
    torch.testing.assert_close(ours(shifted, shifted, shifted, key_padding_mask=hidden)[0][:, 3:], ours(x, x, x)[0])
    plain = foci.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    plain.load_state_dict(ours.state_dict())
    assert not torch.allclose(plain(x, x, x)[0], ours(x, x, x)[0])


class Slopes(torch.nn.Module):
    """A learned ALiBi."""

    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.5, 0.25, 0.1], dtype=torch.float64))

    def forward(self):
        return foci.scores.alibi(self.slopes)


def test_mask_and_score_variants():
    ours = foci.nn.MultiheadAttention(
        E, H, batch_first=True, dtype=torch.float64, mask=foci.masks.causal(), score=lambda s, b, h, q, kv: s - 0.1 * (q - kv)
    )
    plain = foci.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    plain.load_state_dict(ours.state_dict())
    x, at = rand(B, L, E), torch.arange(L, dtype=torch.float64)
    bias = (-0.1 * (at[:, None] - at)).masked_fill(at[:, None] < at, -torch.inf)
    for one, other in zip(ours(x, x, x), plain(x, x, x, attn_mask=bias)):
        torch.testing.assert_close(one, other)


def test_a_learned_score():
    ours = foci.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, score=Slopes())
    assert "score.slopes" in ours.state_dict()
    x = rand(B, L, E)
    ours(x, x, x, need_weights=False)[0].square().sum().backward()
    assert ours.score.slopes.grad.abs().min() > 0


def test_sliding_window():
    ours = foci.nn.SlidingWindowAttention(E, H, left=2, right=1, batch_first=True, device="cpu", dtype=torch.float64)
    x = rand(B, 8, E)
    _, weights = ours(x, x, x)
    distance = torch.arange(8)[:, None] - torch.arange(8)
    assert torch.equal(weights[0] > 0, (distance <= 2) & (distance >= -1))


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
        found = [torch.autograd.grad(w.square().sum(), (adds, ours.in_proj_weight)) for w in (weights, theirs)]
        torch.testing.assert_close(*found)


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


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", ["nested", "dense keys", "dense queries", "tokens"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_row_statistics_of_nested_inputs(kind, own, batch_first):
    _, ours = pair(batch_first=batch_first, add_bias_kv=own, add_zero_attn=own)
    query, key = nested((3, 0, 5)), nested((4, 2, 1), seed=7)

    def laid(dense):
        return dense if batch_first else dense.transpose(0, 1)

    if kind == "tokens":
        packing = foci.nn.Packing(query.offsets(), 5, (3, 5))
        out, aux = ours(*[query.values()] * 3, packing, return_aux=ROWS)
        key, ends = query, query.offsets() + 2 * own * torch.arange(4)
        split = [[t[:, a:b] for a, b in itertools.pairwise(at)] for t, at in zip(aux[:3], (query.offsets(), query.offsets(), ends))]
        outs = out.split([3, 0, 5])
    else:
        query = rand(B, L, E) if kind == "dense queries" else query
        key = rand(B, S, E, seed=1) if kind == "dense keys" else key
        given = [t if t.is_nested else laid(t) for t in (query, key, key)]
        out, aux = ours(*given, return_aux=ROWS)
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


def test_dropout_is_of_the_weights():
    _, ours = pair(batch_first=True, dropout=0.5)
    x = rand(B, L, E)
    torch.manual_seed(0)
    first = ours(x, x, x)
    torch.manual_seed(0)
    second = ours(x, x, x)
    assert torch.equal(first[0], second[0])
    plain = ours.eval()(x, x, x)
    assert not torch.allclose(first[0], plain[0])
    torch.testing.assert_close(first[1], plain[1])  # weights are those before dropout
    ours.train().dropout = 1.0
    torch.testing.assert_close(ours(x, x, x)[0], ours.out_proj.bias.expand(B, L, E))


def test_large_head_dim_scale():
    ours = foci.nn.MultiheadAttention(8, 2, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        ours.in_proj_weight.copy_(torch.eye(8, dtype=torch.float64).repeat(3, 1))
        ours.out_proj.weight.copy_(torch.eye(8, dtype=torch.float64))
    x = rand(8, 8, 8)  # batch, length and embedding of one size
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    want = ((q @ q.mT / math.sqrt(4)).softmax(-1) @ q).transpose(1, 2).flatten(2)
    torch.testing.assert_close(ours(x, x, x)[0], want)


@pytest.mark.parametrize("need_weights", [False, True])
def test_compile(need_weights):
    torch._dynamo.reset()
    _, ours = pair(batch_first=True, add_bias_kv=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    given = *tensors("three", batch_first=True), padding(S), explicit((L, S), "bool", 3)
    for more in several(0, 4, 6):
        *inputs, hidden, mask = resize(given, {L: L + more, S: S + more})
        args = {"key_padding_mask": hidden, "attn_mask": mask, "need_weights": need_weights}
        expected, got = outcome(ours, inputs, **args), outcome(compiled, inputs, **args)
        for (name, want), found in zip(expected.items(), got.values()):
            assert (want is None) is (found is None), name
            if want is not None:
                torch.testing.assert_close(found, want, msg=name)


# MOD-08
def test_export():
    _, ours = pair(batch_first=True)
    x = rand(B, L, E)
    program = torch.export.export(ours, (x, x, x), {"key_padding_mask": padding(L)})
    for found, want in zip(program.module()(x, x, x, key_padding_mask=padding(L)), ours(x, x, x, key_padding_mask=padding(L))):
        torch.testing.assert_close(found, want)
