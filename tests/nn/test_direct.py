"""foci.nn's layers pass modules by only where nobody can tell; tokens given with their packing; second derivatives of nested ones."""

import copy
import sys
import warnings

import pytest
import torch
from torch.nn.utils import parametrize, prune
from twins import rand

import foci.nn
from foci import call_cache

B, S, T, E, H, FF = 3, 6, 5, 8, 2, 12
HIDDEN = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]], dtype=torch.bool)


def stack(kind="Encoder", nn=torch.nn, **options):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = getattr(nn, f"Transformer{kind}Layer")(E, H, FF, 0.0, batch_first=True, dtype=torch.float64, **options)
        return getattr(nn, f"Transformer{kind}")(layer, 2, torch.nn.LayerNorm(E, dtype=torch.float64))


PARTS = ("self_attn", "linear1", "linear2", "norm1", "norm2", "dropout", "dropout1", "dropout2")


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Halved(torch.nn.Module):
    def forward(self, x):
        return 0.5 * x


def part_of(model, name):
    return model.layers[0].get_submodule(name)


def scaled(out):
    return (1.5 * out[0], out[1]) if isinstance(out, tuple) else 1.5 * out


def hook_forward(model, name):
    part_of(model, name).register_forward_hook(lambda module, args, out: scaled(out))


def hook_before(model, name):
    part_of(model, name).register_forward_pre_hook(lambda module, args: (1.5 * args[0],))


def hook_backward(model, name):
    part_of(model, name).register_full_backward_pre_hook(lambda module, grads: (1.5 * grads[0], *grads[1:]))


def hook_behind(model, name):
    part_of(model, name).register_full_backward_hook(lambda module, inputs, outputs: tuple(1.5 * g if g is not None else g for g in inputs))


def own_forward(model, name):
    part = part_of(model, name)
    forward = type(part).forward
    part.forward = lambda *args, **kwargs: scaled(forward(part, *args, **kwargs))


HOOKS = [hook_forward, hook_before, hook_backward, hook_behind, own_forward]


# one attention is given what it attends to in three places, which a hook may tell apart
@pytest.mark.parametrize(("hang", "name"), [(h, n) for h in HOOKS for n in PARTS if (h, n) != (hook_before, "self_attn")])
@pytest.mark.filterwarnings("ignore:TransformerEncoder hands padded batches", "ignore:Full backward hook")
def test_what_hangs_on_a_part(hang, name):
    same(lambda model: hang(model, name))


def test_what_hangs_on_the_out_projection():
    """torch.nn never calls that module, so what hangs on it is not heard. A module of another class is called."""
    theirs, ours = stack(), foci.nn.convert(stack())
    for model in (theirs, ours):
        for hang in (hook_forward, hook_before, hook_backward, hook_behind):
            hang(model, "self_attn.out_proj")
    torch.testing.assert_close(outcome(ours), outcome(theirs))
    scaling = foci.nn.convert(stack())
    hook_forward(theirs, "self_attn")
    part_of(scaling, "self_attn.out_proj").__class__ = Doubled
    with pytest.raises(AssertionError):
        torch.testing.assert_close(outcome(scaling), outcome(ours))


def test_hooks_on_the_out_projection_of_an_attention_alone():
    x, results = rand(B, S, E), []
    for make in (torch.nn.MultiheadAttention, foci.nn.MultiheadAttention):
        torch.manual_seed(0)
        layer = make(E, 2, batch_first=True, dtype=x.dtype)
        layer.out_proj.register_forward_hook(lambda module, args, out: 1 / 0)
        results += [layer(x, x, x, need_weights=needed)[0] for needed in (True, False)]
        if make is foci.nn.MultiheadAttention:
            # one length: it is about a hook that is not called
            results.append(torch.compile(layer, backend="eager")(x, x, x, need_weights=False)[0])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("bias_kv", [False, True])
def test_number_of_heads_changed_after_conversion(heads, bias_kv):
    x = rand(B, S, E)
    layer = torch.nn.MultiheadAttention(E, 4, batch_first=True, dtype=x.dtype, add_bias_kv=bias_kv)
    ours = foci.nn.convert(copy.deepcopy(layer))
    ours(x, x, x)
    layer.num_heads = ours.num_heads = heads
    layer.head_dim = E // heads  # which torch's own fast path reads
    assert (ours.head_dim, ours.num_kv_heads) == (E // heads, heads)
    for needed in (True, False):
        torch.testing.assert_close(ours(x, x, x, need_weights=needed)[0], layer(x, x, x, need_weights=needed)[0])


def test_number_of_heads_changed_within_a_stack():
    theirs, ours = stack(), foci.nn.convert(stack())
    outcome(ours)  # what a call found is kept
    for model in (theirs, ours):
        part_of(model, "self_attn").num_heads = 4
        part_of(model, "self_attn").head_dim = E // 4
    torch.testing.assert_close(outcome(ours), outcome(theirs))


def test_number_of_heads_that_does_not_fit():
    layer = foci.nn.MultiheadAttention(16, 8, num_kv_heads=2)
    with pytest.raises(ValueError, match="num_heads must divide embed_dim = 16, .*; got 3"):
        layer.num_heads = 3
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (8, 2, 2)
    layer.num_heads = 4
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (4, 1, 4)
    with pytest.raises(ValueError, match=r"key heads over 4 features of keys; got 2"):
        layer.num_heads = 2


def subclassed(model):
    part_of(model, "linear2").__class__ = Doubled


def replaced(model):
    model.layers[0].dropout1 = Halved()
    model.layers[1].norm2 = torch.nn.Identity()
    model.norm = Halved()


def parametrized(model):
    for name, parameter in (("linear1", "weight"), ("norm1", "bias"), ("self_attn.out_proj", "weight"), ("self_attn", "in_proj_weight")):
        parametrize.register_parametrization(part_of(model, name), parameter, Halved())


def pruned(model):
    torch.manual_seed(1)
    prune.random_unstructured(part_of(model, "linear1"), "weight", amount=0.5)
    prune.random_unstructured(part_of(model, "norm2"), "bias", amount=0.5)


def plain_tensor(model):
    part = part_of(model, "linear1")
    weight = part.weight
    del part.weight
    part.weight = 2 * weight


def hooked_layer(model):
    model.layers[0].register_forward_hook(lambda module, args, out: 1.5 * out)
    model.norm.register_forward_hook(lambda module, args, out: out + 1)


@pytest.mark.parametrize("change", [subclassed, replaced, parametrized, pruned, plain_tensor, hooked_layer])
@pytest.mark.filterwarnings("ignore:TransformerEncoder hands padded batches")
def test_changed_modules(change):
    same(change)


def test_hooks_for_all_modules():
    def double(module, args, out):
        return 2 * out if type(module) in (torch.nn.Linear, torch.nn.LayerNorm) else None  # not the out-projection, see above

    theirs, ours = stack(), foci.nn.convert(stack())
    handle = torch.nn.modules.module.register_module_forward_hook(double)
    try:
        expected, got = outcome(theirs), outcome(ours)
    finally:
        handle.remove()
    torch.testing.assert_close(got, expected)
    assert not torch.allclose(outcome(ours)[0], got[0])


def test_functional_call():
    theirs, ours = stack(), foci.nn.convert(stack())
    x = rand(B, S, E)
    parameters = {name: 1.5 * p.detach() for name, p in theirs.named_parameters()}
    outs = [torch.func.functional_call(m, parameters, (x,), {"src_key_padding_mask": HIDDEN}) for m in (theirs, ours)]
    torch.testing.assert_close(outs[1][~HIDDEN], outs[0][~HIDDEN])


def test_compiled_layer():
    model, graphs = foci.nn.convert(stack()), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    x = rand(B, S, E)
    want = model(x, src_key_padding_mask=HIDDEN)
    model.layers[0].compile(backend=backend)
    torch.testing.assert_close(model(x, src_key_padding_mask=HIDDEN), want)
    assert graphs


def same(change):
    """The same change to torch.nn's model and to foci.nn's makes the same outputs and gradients, and not those without it."""
    theirs, ours = stack(), foci.nn.convert(stack())
    before = outcome(ours)
    for model in (theirs, ours):
        change(model)
    expected, got = outcome(theirs), outcome(ours)
    torch.testing.assert_close(got, expected)
    assert not all(a.shape == b.shape and torch.allclose(a, b) for a, b in zip(before, got))


def outcome(model):
    x = rand(B, S, E).requires_grad_()
    out = model(x, src_key_padding_mask=HIDDEN)[~HIDDEN]
    grads = torch.autograd.grad((out * rand(*out.shape, seed=3)).sum(), [x, *model.parameters()])
    return [out, *grads]


def test_patched_class(monkeypatch):
    theirs, ours = stack(), foci.nn.convert(stack())
    before = outcome(ours)[0]
    forward = torch.nn.LayerNorm.forward
    monkeypatch.setattr(torch.nn.LayerNorm, "forward", lambda self, x: forward(self, x) + 1)
    got = outcome(ours)
    torch.testing.assert_close(got, outcome(theirs))
    assert not torch.allclose(got[0], before)


def calls_of(function):
    """Names of the classes whose modules were called."""
    seen = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code is torch.nn.Module._wrapped_call_impl.__code__:
            seen.append(type(frame.f_locals["self"]).__name__)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen


def test_modules_are_passed_by():
    encoder, decoder = stack("Encoder", foci.nn), stack("Decoder", foci.nn)
    x = rand(B, S, E)
    assert calls_of(lambda: encoder(x, src_key_padding_mask=HIDDEN)) == ["TransformerEncoder"]
    masks = {"tgt_key_padding_mask": HIDDEN, "memory_key_padding_mask": HIDDEN}
    assert calls_of(lambda: decoder(x, x, **masks)) == ["TransformerDecoder"]
    encoder.layers[1].linear1.register_forward_hook(lambda *args: None)
    assert calls_of(lambda: encoder(x, src_key_padding_mask=HIDDEN)) == ["TransformerEncoder", "Linear"]


def read_packing(hidden):
    lengths = (~hidden).sum(1)
    return foci.nn.Packing(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), int(lengths.max()), tuple(hidden.shape))


def test_tokens_with_a_packing():
    x, packing = rand(B, S, E), read_packing(HIDDEN)
    encoder = stack("Encoder", foci.nn)
    want = encoder(x, src_key_padding_mask=HIDDEN)
    torch.testing.assert_close(encoder(x[~HIDDEN], src_key_padding_mask=packing), want[~HIDDEN])
    torch.testing.assert_close(encoder.norm(encoder.layers[1](encoder.layers[0](x[~HIDDEN], None, packing), None, packing)), want[~HIDDEN])
    torch.testing.assert_close(packing.padded(want[~HIDDEN]), want)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    want = encoder(x, mask=causal, src_key_padding_mask=HIDDEN)
    torch.testing.assert_close(encoder(x[~HIDDEN], mask=causal, src_key_padding_mask=packing), want[~HIDDEN])


def test_decoder_tokens_with_a_packing():
    x, memory, packing = rand(B, S, E), rand(B, S, E, seed=1), read_packing(HIDDEN)
    decoder = stack("Decoder", foci.nn)
    want = decoder(x, memory, tgt_key_padding_mask=HIDDEN, memory_key_padding_mask=HIDDEN)
    for module, expected in ((decoder, want), (decoder.layers[0], decoder.layers[0](x, memory, None, None, HIDDEN, HIDDEN))):
        both = module(x[~HIDDEN], memory[~HIDDEN], tgt_key_padding_mask=packing, memory_key_padding_mask=packing)
        torch.testing.assert_close(both, expected[~HIDDEN])
        one = module(x[~HIDDEN], memory, tgt_key_padding_mask=packing, memory_key_padding_mask=HIDDEN)
        torch.testing.assert_close(one, expected[~HIDDEN])
        other = module(x, memory[~HIDDEN], tgt_key_padding_mask=HIDDEN, memory_key_padding_mask=packing)
        torch.testing.assert_close(other, expected)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("rows", [HIDDEN, HIDDEN.flip(1), torch.zeros_like(HIDDEN)], ids=["right", "left", "none"])
@pytest.mark.parametrize("floating", [False, True])
def test_one_packing_for_several_modules(batch_first, rows, floating):
    torch.manual_seed(0)
    model = foci.nn.Transformer(E, H, 1, 1, FF, 0.0, batch_first=batch_first, dtype=torch.float64)
    x, y = (rand(B, S, E, seed=n) if batch_first else rand(S, B, E, seed=n) for n in range(2))
    hidden = torch.zeros_like(rows, dtype=torch.float64).masked_fill(rows, -torch.inf) if floating else rows
    packing = foci.nn.Packing.from_mask(hidden, batch_first=batch_first)
    names = ("src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
    tokens = model(packing.pack(x), packing.pack(y), **dict.fromkeys(names, packing))
    torch.testing.assert_close(packing.pad(tokens), model(x, y, **dict.fromkeys(names, hidden)))


def test_masks_that_cannot_be_packed():
    for wrong in (HIDDEN.long(), HIDDEN[0]):
        with pytest.raises(AssertionError, match=r"padding must be bool or floating, \[batch, length\]; got torch\.(int64|bool)"):
            foci.nn.Packing.from_mask(wrong)


LIE = {"as it is": lambda m: m, "turned": lambda m: m.T.contiguous().T, "narrowed": lambda m: torch.nn.functional.pad(m, (3, 2))[:, 3:-2]}


@pytest.mark.parametrize("lies", list(LIE))
@pytest.mark.parametrize("rows", [[4, 0, 6, 1], [0, 0, 0, 0], [6, 6, 6, 5]], ids=["mixed", "no tokens", "few hidden"])
def test_packings_by_the_mask(rows, lies):
    """What says where tokens are, of a mask however it lies and wherever its padding is."""
    right = torch.arange(6) >= torch.tensor(rows)[:, None]
    left, holes = right.flip(1), right ^ (torch.arange(6) == 2)
    for hidden in (right, left, holes):
        mask = LIE[lies](hidden)
        packing, counts = foci.nn.Packing.from_mask(mask), (~hidden).sum(1)
        assert packing.offsets.tolist() == [0, *counts.cumsum(0).tolist()] and packing.longest == int(counts.max())
        assert packing.indices.tolist() == (~hidden).flatten().nonzero().flatten().tolist()
        inside = (~hidden).nonzero()
        places = torch.cat([torch.arange(n) for n in counts])
        assert torch.equal(packing.positions(len(inside)), inside[:, 1])
        assert (packing.columns is None) == torch.equal(places, inside[:, 1])
        assert torch.equal(packing.pack(packing.pad(inside.double())), inside.double())


def test_wrong_tokens_with_a_packing():
    x, packing = rand(B, S, E), read_packing(HIDDEN)
    encoder = stack("Encoder", foci.nn)
    with pytest.raises(ValueError, match=r"a Packing comes with tokens \[tokens, features\].*got 3 dimensions"):
        encoder(x, src_key_padding_mask=packing)
    with pytest.raises(ValueError, match="a cache take padded batches only"):
        encoder(x[~HIDDEN], src_key_padding_mask=packing, cache=foci.nn.KVCache(2, 10))


def test_nested_outputs():
    """Second derivatives, and a result that is ragged as the input is."""
    encoder, tokens = foci.nn.convert(stack()), rand(11, E)
    nested = torch.nested.nested_tensor_from_jagged(tokens, torch.tensor([0, 4, 5, 11]))
    out = encoder(nested)
    assert (out + nested).shape == nested.shape
    assert (out._get_min_seqlen(), out._get_max_seqlen()) == (1, 6)
    weight = encoder.layers[0].linear1.weight
    actual = second_derivatives((out.values() ** 3).sum(), weight)
    want = second_derivatives(sum((encoder(part[None]) ** 3).sum() for part in tokens.split([4, 1, 6])), weight)
    torch.testing.assert_close(actual, want)


def second_derivatives(loss, x):
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad((grad**2).sum(), x)[0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_nested_inputs_keep_their_values(mode):
    encoder = foci.nn.convert(stack())
    nested = torch.nested.as_nested_tensor([rand(n, E, seed=n) for n in (4, 1, 6)], layout=torch.jagged)
    before = copy.deepcopy(nested.values())
    with mode():
        out = encoder(nested)
        assert out.requires_grad == torch.is_grad_enabled()
        rows = torch.cat([encoder(part[None])[0] for part in nested.unbind()])
    torch.testing.assert_close(out.values(), rows)
    assert torch.equal(nested.values(), before)


@pytest.mark.parametrize("causal", [False, True])
def test_batches_of_other_lengths_make_one_known_call(monkeypatch, causal):
    monkeypatch.setattr(call_cache, "_calls", type(call_cache._calls)())
    options = {"mask": torch.nn.Transformer.generate_square_subsequent_mask(9), "is_causal": True} if causal else {}
    encoder = stack(nn=foci.nn)
    for lengths in ((9, 4, 6), (8, 1, 1), (7, 7, 7)):
        padding = torch.arange(9) >= torch.tensor(lengths)[:, None]
        encoder(rand(3, 9, E).requires_grad_(), src_key_padding_mask=padding, **options).sum().backward()
    assert len(call_cache._calls) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_that_end_with_relu(dtype):
    model, x = stack(nn=foci.nn).eval().to(dtype), rand(B, S, E).to(dtype)
    with torch.no_grad():
        out = model(x, src_key_padding_mask=HIDDEN)
    assert torch.equal(out, model(x, src_key_padding_mask=HIDDEN).detach())


def test_sparse_weights_end_with_relu_too():
    model, x = stack(nn=foci.nn).eval(), rand(B, S, E)
    with torch.no_grad():
        want = model(x, src_key_padding_mask=HIDDEN)
        for layer in model.layers:
            layer.linear1.weight = torch.nn.Parameter(layer.linear1.weight.to_sparse_csr())
        torch.testing.assert_close(model(x, src_key_padding_mask=HIDDEN), want)


def test_forward_derivatives_without_a_graph():
    layer, x, tangent = stack(nn=foci.nn).layers[0].eval(), rand(T, E), rand(T, E, seed=1)
    want = torch.func.jvp(layer._ff_block, (x,), (tangent,))[1]
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        out = layer._ff_block(torch.autograd.forward_ad.make_dual(x, tangent))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(out).tangent, want)
