"""foci.nn.MultiheadAttention against torch.nn's: constructor options, masks, dtypes, modes; outputs and every gradient."""

import itertools
import math

import pytest
import torch
from attention_pairs import B, E, H, L, S, explicit, outcome, padding, pair, same, tensors
from twins import rand

import foci
import foci.nn
from compiled import resize, several

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


# MOD-02
@pytest.mark.parametrize("options", OPTIONS[4:], ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
def test_masks_over_no_keys_but_the_modules_own(options, need_weights):
    theirs, ours = pair(batch_first=True, **options)
    query, key, value = (rand(B, n, width).requires_grad_() for n, width in ((L, E), (0, options.get("kdim", E)), (0, E)))
    inputs = (query, key, value) if "kdim" in options else (query, key, key)
    for dtype in (torch.bool, query.dtype):
        for masks in (
            {"attn_mask": (L, 0)},
            {"attn_mask": (B * H, L, 0)},
            {"key_padding_mask": (B, 0)},
            {"key_padding_mask": (B, 0), "attn_mask": (L, 0)},
        ):
            options = {name: torch.zeros(shape, dtype=dtype) for name, shape in masks.items()}
            same(theirs, ours, inputs, need_weights=need_weights, **options)


# MOD-02
@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_tokens_whose_memory_is_all_padding(options):
    """Each attends to the module's own keys."""
    layers = []
    for nn in (torch.nn, foci.nn):
        layer = nn.TransformerDecoderLayer(E, H, 12, dropout=0.0, batch_first=True, dtype=torch.float64)
        layer.multihead_attn = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **options)
        layer.load_state_dict((layers or [layer])[0].state_dict())
        layers.append(layer)
    hidden = torch.full((B, S), -torch.inf, dtype=torch.float64).requires_grad_()
    query = torch.zeros(B, L, dtype=torch.float64)
    query[0, 2:] = -torch.inf
    tokens = rand(B, L, E), rand(B, S, E)
    theirs, ours = (layer(*tokens, tgt_key_padding_mask=query, memory_key_padding_mask=hidden) for layer in layers)
    torch.testing.assert_close(ours[query == 0], theirs[query == 0])


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
    errors = []
    for module in (theirs, ours):
        with pytest.raises((AssertionError, RuntimeError)) as caught:
            module(**inputs)
        errors.append(caught)
    assert errors[1].type is errors[0].type
    # torch transposes before it looks, so its shapes may be in another order
    assert str(errors[1].value).split("torch.Size")[0] == str(errors[0].value).split("torch.Size")[0]


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
    arguments = *tensors("three", batch_first=True), padding(S), explicit((L, S), "bool", 3)
    for more in several(0, 4, 6):
        *inputs, hidden, mask = resize(arguments, {L: L + more, S: S + more})
        args = {"key_padding_mask": hidden, "attn_mask": mask, "need_weights": need_weights}
        expected, got = outcome(ours, inputs, **args), outcome(compiled, inputs, **args)
        for (name, want), actual in zip(expected.items(), got.values()):
            assert (want is None) is (actual is None), name
            if want is not None:
                torch.testing.assert_close(actual, want, msg=name)


# MOD-08
def test_export():
    _, ours = pair(batch_first=True)
    x = rand(B, L, E)
    program = torch.export.export(ours, (x, x, x), {"key_padding_mask": padding(L)})
    for actual, want in zip(program.module()(x, x, x, key_padding_mask=padding(L)), ours(x, x, x, key_padding_mask=padding(L))):
        torch.testing.assert_close(actual, want)
