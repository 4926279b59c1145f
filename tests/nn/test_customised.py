"""Subclasses, layers and attention of others' making, conversion, copies; variants and extra keys in packed layers."""

import copy
import pickle
import warnings

import pytest
import torch
from twins import FF, B, E, H, S, T, as_float, outcome, padding, quiet, rand, same, stacks

import foci
import foci.nn
from undefined import Undefined


class Doubled(foci.nn.TransformerEncoderLayer):
    """A forward of its own around torch's."""

    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        assert src.dim() == 3
        return 2 * super().forward(src, src_mask, src_key_padding_mask, is_causal)


class Gated(foci.nn.TransformerEncoderLayer):
    """A block of its own that works on tokens."""

    takes_tokens = True

    def _ff_block(self, x):
        assert x.dim() == 2
        return super()._ff_block(x) * torch.sigmoid(x)


class GatedPadded(foci.nn.TransformerEncoderLayer):
    """A block of its own that may not know of packed tokens."""

    def _ff_block(self, x):
        assert x.dim() == 3
        return super()._ff_block(x)


class Scaled(foci.nn.MultiheadAttention):
    """An attention with a forward of its own."""

    def forward(self, query, key, value, **kwargs):
        out, weights = super().forward(query, key, value, **kwargs)
        return 0.5 * out, weights


# MOD-07
def test_subclasses():
    hidden, x = padding("right"), rand(B, S, E)
    encoder = foci.nn.TransformerEncoder(Doubled(E, H, FF, 0.0, batch_first=True, dtype=torch.float64), 2)
    plain = foci.nn.TransformerEncoder(foci.nn.TransformerEncoderLayer(E, H, FF, 0.0, batch_first=True, dtype=torch.float64), 2)
    plain.load_state_dict(encoder.state_dict())
    with pytest.warns(UserWarning, match="Doubled has a forward of its own; set takes_tokens = True"):
        out = encoder(x, src_key_padding_mask=hidden)
    want = 2 * plain.layers[1](2 * plain.layers[0](x, src_key_padding_mask=hidden), src_key_padding_mask=hidden)
    torch.testing.assert_close(out, want)
    layer = GatedPadded(E, H, FF, 0.0, batch_first=True, dtype=torch.float64)
    assert (layer(x, src_key_padding_mask=hidden)[hidden] == 0).all()
    gated = foci.nn.TransformerEncoder(Gated(E, H, FF, 0.0, batch_first=True, dtype=torch.float64), 2)
    assert (gated(x, src_key_padding_mask=hidden)[hidden] == 0).all()


# MOD-07
def test_another_attention_in_a_layer():
    hidden, x = padding("right"), rand(B, S, E)
    layer = foci.nn.TransformerEncoderLayer(E, H, FF, 0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn = Scaled(E, H, batch_first=True, dtype=torch.float64)
    encoder = foci.nn.TransformerEncoder(layer, 2)
    with pytest.warns(UserWarning, match="has an attention that is not foci.nn.MultiheadAttention"):
        out = encoder(x, src_key_padding_mask=hidden)
    assert (out[hidden] == 0).all()
    rows = [encoder(x[n : n + 1, ~hidden[n]]) for n in range(B)]
    for n in range(B):
        torch.testing.assert_close(out[n, ~hidden[n]], rows[n][0])


class Wrapper(torch.nn.Module):
    """A third party's layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.self_attn = layer, layer.self_attn

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


# MOD-07
def test_foreign_layers():
    hidden, x = padding("right"), rand(B, S, E)
    theirs, ours = stacks("Encoder", batch_first=True)
    wrapped = foci.nn.TransformerEncoder(Wrapper(ours.layers[0]), 0, ours.norm)
    wrapped.layers.extend(Wrapper(layer) for layer in ours.layers)
    with pytest.warns(UserWarning, match="its layers are Wrapper"):
        out = wrapped(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(out, ours(x, src_key_padding_mask=hidden))
    mixed = foci.nn.TransformerEncoder(theirs.layers[0], 2, theirs.norm)
    with pytest.warns(UserWarning, match="its layers are TransformerEncoderLayer"):
        assert mixed(x, src_key_padding_mask=hidden).shape == x.shape


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
def test_foci_layers_in_torch_encoder():
    theirs, ours = stacks("Encoder", batch_first=True)
    mixed = torch.nn.TransformerEncoder(ours.layers[0], 2, ours.norm)
    mixed.load_state_dict(ours.state_dict())
    hidden, x = padding("right"), rand(B, S, E)
    for training in (True, False):
        mixed.train(training)
        with torch.no_grad():
            out = mixed(x, src_key_padding_mask=hidden)
        torch.testing.assert_close(out[~hidden], ours(x, src_key_padding_mask=hidden)[~hidden])


def test_convert():
    model = quiet(lambda: torch.nn.ModuleDict({
        "transformer": torch.nn.Transformer(E, H, 1, 1, FF, 0.0, batch_first=True, dtype=torch.float64),
        "attention": torch.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64),
        "own": OwnLayer(E, H, FF, 0.0, batch_first=True, dtype=torch.float64),
    }))  # fmt: skip
    x, hidden = rand(B, S, E), padding("right")
    before = model["transformer"](x, x), model["attention"](x, x, x)[0], model["own"](x)
    parameters, modules = list(model.parameters()), list(model.modules())
    called = []
    model["transformer"].encoder.layers[0].linear1.register_forward_hook(lambda *args: called.append(args))
    assert foci.nn.convert(model) is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    left = {type(m) for m in model.modules() if type(m).__module__.startswith("torch.nn")}
    assert not {kind for kind in left if kind.__name__.startswith(("Transformer", "Multihead"))}
    after = model["transformer"](x, x), model["attention"](x, x, x)[0], model["own"](x)
    for one, other in zip(before, after):
        torch.testing.assert_close(one, other)
    assert called and type(model["own"]) is OwnLayer and type(model["own"].self_attn) is foci.nn.MultiheadAttention
    assert (model["transformer"].encoder(x, src_key_padding_mask=hidden)[hidden] == 0).all()


class OwnLayer(torch.nn.TransformerEncoderLayer):
    def forward(self, src, *args, **kwargs):
        return super().forward(src, *args, **kwargs) + src


def test_copies_and_pickles():
    x, hidden = rand(B, S, E), padding("holes")
    ours = stacks("Encoder", batch_first=True)[1]
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(copied(x, src_key_padding_mask=hidden), ours(x, src_key_padding_mask=hidden))


@pytest.mark.parametrize("name", ["right", "left", "holes"])
def test_variants_in_packed_layers(name):
    """Positions that functions are given are those in the padded batch, packed or not."""
    hidden, x = padding(name), rand(B, S, E)
    rotary = foci.nn.RotaryEmbedding(4)
    layer = foci.nn.TransformerEncoderLayer(E, H, FF, 0.0, batch_first=True, dtype=torch.float64, num_kv_heads=1, rotary=rotary)
    encoder = foci.nn.TransformerEncoder(
        layer, 2, masks=[foci.masks.window(1, 2), None], scores=[None, lambda s, b, h, q, kv: s - 0.1 * q * kv]
    )
    packed = encoder(x, src_key_padding_mask=hidden)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foci.nn.packing.is_readable", lambda tensor: False)  # as while a graph is made
        padded = encoder(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(packed, padded)
    with pytest.raises(ValueError, match="masks must hold one mask or None for each of 2 layers; got 1"):
        foci.nn.TransformerEncoder(layer, 2, masks=[None])


@pytest.mark.parametrize("options", [{"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("mask", [False, True])
def test_extra_keys_in_packed_layers(options, mask):
    theirs, ours = stacks("Encoder", batch_first=True)
    for stack, nn in ((theirs, torch.nn), (ours, foci.nn)):
        for n, layer in enumerate(stack.layers):
            torch.manual_seed(n)
            layer.self_attn = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **options)
    hidden = padding("holes")
    same(theirs.train(), ours, [rand(B, S, E)], ~hidden, src_key_padding_mask=as_float(hidden), mask=rand(S, S, seed=2) if mask else None)


class GatedDecoder(foci.nn.TransformerDecoderLayer):
    """A block of its own, which may not know of packed tokens."""

    def _ff_block(self, x):
        assert x.dim() == 3
        return super()._ff_block(x) * torch.sigmoid(x)


# MOD-07
def test_decoder_subclass():
    torch.manual_seed(0)
    decoder = foci.nn.TransformerDecoder(GatedDecoder(E, H, FF, 0.0, batch_first=True, dtype=torch.float64), 2)
    target, memory, hidden = rand(B, T, E), rand(B, S, E), padding("right")
    with pytest.warns(UserWarning, match="GatedDecoder has a _ff_block of its own"):
        out = decoder(target, memory, memory_key_padding_mask=hidden)
    for n in range(B):
        torch.testing.assert_close(out[n : n + 1], decoder(target[n : n + 1], memory[n : n + 1, ~hidden[n]]))


# MOD-07
@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_an_activation_that_is_a_module_survives_copies(kind):
    torch.manual_seed(0)
    layer = getattr(foci.nn, f"Transformer{kind}Layer")(E, H, FF, 0.0, activation=torch.nn.PReLU(init=-2.0), batch_first=True).double()
    x = (rand(B, S, E),) * (1 if kind == "Encoder" else 2)
    stack = getattr(foci.nn, f"Transformer{kind}")(layer, 1)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), stack):
        torch.testing.assert_close(copied(*x), layer(*x))
        copied(*x).sum().backward()
        assert next(p for n, p in copied.named_parameters() if "activation" in n).grad is not None
    state = {name: value for name, value in vars(layer).items() if name != "activation"}
    state["_modules"] = {name: part for name, part in layer._modules.items() if name != "activation"}
    layer.__setstate__(state)  # what versions of torch without the choice have pickled
    assert layer.activation is torch.nn.functional.relu


def test_a_converted_decoder_keeps_the_activation_that_torch_made_of_it():
    theirs = quiet(lambda: torch.nn.Transformer(E, H, 1, 1, FF, 0.0, torch.nn.GELU(), batch_first=True, dtype=torch.float64))
    ours = foci.nn.convert(copy.deepcopy(theirs))
    same(theirs, ours, (rand(B, S, E), rand(B, T, E)))
    same(theirs, copy.deepcopy(ours), (rand(B, S, E), rand(B, T, E)))


def checkpointed(layer):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(layer)


def compiled(layer):
    # one length: the tests ask whether a wrapped layer's own code runs
    return torch.compile(layer, backend="eager")


def compiled_in_place(layer):
    layer.compile(backend="eager")
    return layer


@pytest.mark.parametrize("wrap", [checkpointed, compiled, lambda layer: checkpointed(compiled(layer)), compiled_in_place])
@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_wrapped_layers_are_given_tokens(kind, wrap):
    torch._dynamo.reset()
    _, ours = stacks(kind, batch_first=True)
    inputs, hidden = (rand(B, S, E),) * (1 if kind == "Encoder" else 2), padding("right")
    options = {"src_key_padding_mask" if kind == "Encoder" else "tgt_key_padding_mask": hidden}
    want = outcome(ours, inputs, ~hidden, **options)
    for n, layer in enumerate(ours.layers):
        ours.layers[n] = wrap(layer)
    with warnings.catch_warnings(), foci.observe() as log:
        warnings.filterwarnings("error", message=".*hands padded batches")
        actual = outcome(ours, inputs, ~hidden, **options)
    assert {call.problem.formula.layout.value for call in log.calls} == {"jagged"}
    torch.testing.assert_close(actual, want)


def test_a_wrapped_subclass_is_given_padded_batches():
    encoder = foci.nn.TransformerEncoder(Doubled(E, H, FF, 0.0, batch_first=True, dtype=torch.float64), 1)
    encoder.layers[0] = checkpointed(encoder.layers[0])
    with pytest.warns(UserWarning, match="Doubled has a forward of its own"):
        encoder(rand(B, S, E), src_key_padding_mask=padding("right"))


def test_undefined_gradients_of_a_nested_output():
    _, ours = stacks("Encoder", batch_first=True)
    values = rand(8, E).requires_grad_()
    nested = torch.nested.nested_tensor_from_jagged(values, offsets=torch.tensor([0, 3, 8]))
    (grad,) = torch.autograd.grad(Undefined.apply(ours(nested)).values().sum() + values.sum(), values)
    torch.testing.assert_close(grad, torch.ones_like(values))


def test_a_hook_that_asks_for_weights_gets_those_of_the_padded_batch():
    encoder = foci.nn.TransformerEncoder(foci.nn.TransformerEncoderLayer(E, H, FF, 0.0, batch_first=True), 2)
    x, padding, seen = torch.randn(B, S, E), torch.arange(S) >= torch.tensor([[S], [2], [3]]), []
    want = encoder(x, src_key_padding_mask=padding)
    for layer in encoder.layers:
        ask = {"need_weights": True, "average_attn_weights": False}
        layer.self_attn.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs | ask), with_kwargs=True)
        layer.self_attn.register_forward_hook(lambda module, args, result: seen.append(result[1]))
    torch.testing.assert_close(encoder(x, src_key_padding_mask=padding), want)
    assert [weights.shape for weights in seen] == [(B, H, S, S)] * 2
    torch.testing.assert_close(seen[1].sum((1, 3)), H * (~padding).float())
