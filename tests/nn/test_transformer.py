"""foci.nn's encoder, decoder and Transformer against torch.nn's; padding; hooks; subclasses; conversion; compile and export."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F

import foci
import foci.nn

B, S, T, E, H, FF = 3, 6, 5, 8, 2, 12


def rand(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + sum(shape)))


def twins(theirs, ours):
    """Both with the same parameters, none of them at a special value."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * 0.4)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def quiet(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's encoder warns of its own limits
        return make()


def layers(kind, **options):
    options = {"dropout": 0.0, "dtype": torch.float64, **options}
    name = f"Transformer{kind}Layer"
    return twins(*(getattr(nn, name)(E, H, FF, **options) for nn in (torch.nn, foci.nn)))


def stacks(kind, depth=2, **options):
    options = {"dropout": 0.0, "dtype": torch.float64, **options}

    def make(nn):
        layer = getattr(nn, f"Transformer{kind}Layer")(E, H, FF, **options)
        return getattr(nn, f"Transformer{kind}")(layer, depth, torch.nn.LayerNorm(E, dtype=torch.float64))

    return twins(*(quiet(lambda nn=nn: make(nn)) for nn in (torch.nn, foci.nn)))


PADDINGS = {
    "right": [[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]],
    "left": [[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]],
    "holes": [[0, 1, 0, 0, 1, 0], [1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]],
    "trailing columns": [[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]],
    "none": [[0] * 6] * 3,
}


def padding(name, length=S):
    return torch.tensor(PADDINGS[name], dtype=torch.bool)[:, :length]


def outcome(module, inputs, rows, **kwargs):
    """Output at `rows` (bool, of the output's first two dims) and every gradient of a loss on them."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = module(*leaves, **kwargs)
    picked = out if rows is None else out[rows]
    grads = torch.autograd.grad((picked * rand(*picked.shape, seed=9)).sum(), [*leaves, *module.parameters()])
    return out, picked, grads


def same(theirs, ours, inputs, rows=None, **kwargs):
    """Same outputs at `rows`, same gradients; zeros elsewhere."""
    (_, expected, their_grads), (out, got, our_grads) = (outcome(m, inputs, rows, **kwargs) for m in (theirs, ours))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(our_grads, their_grads)
    if rows is not None:
        assert out.shape == (*rows.shape, E)
        assert (out[~rows] == 0).all()


CONSTRUCTIONS = [
    {},
    {"norm_first": True},
    {"activation": "gelu", "bias": False},
    {"activation": F.silu, "layer_norm_eps": 1e-2},
    {"activation": torch.nn.GELU(approximate="tanh"), "norm_first": True, "bias": False},
]


@pytest.mark.parametrize("options", CONSTRUCTIONS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_encoder(options, batch_first, training):
    causal = torch.nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    for theirs, ours in (layers("Encoder", batch_first=batch_first, **options), stacks("Encoder", batch_first=batch_first, **options)):
        theirs.train(training), ours.train(training)
        mask_name = "mask" if hasattr(ours, "layers") else "src_mask"
        x = rand(B, S, E) if batch_first else rand(S, B, E)
        same(theirs, ours, [x])
        same(theirs, ours, [rand(S, E)])
        same(theirs, ours, [x], **{mask_name: causal})
        for name in ("right", "holes"):
            hidden = padding(name)
            rows = ~hidden if batch_first else ~hidden.T
            same(theirs, ours, [x], rows, src_key_padding_mask=hidden)


@pytest.mark.parametrize("name", PADDINGS)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("mask", [None, "causal", "bool", "float", "3-D"])
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_encoder_masks(name, kind, mask):
    theirs, ours = stacks("Encoder", batch_first=True)
    hidden = padding(name)
    pad = hidden if kind == "bool" else rand(B, S, seed=4).masked_fill(hidden, -torch.inf)
    blocked = rand(S, S, seed=5) > 0.7
    attn_mask = {
        None: None,
        "causal": torch.nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64),
        "bool": blocked,
        "float": rand(S, S, seed=6).masked_fill(blocked, -torch.inf),
        "3-D": rand(B * H, S, S, seed=7),
    }[mask]
    scores = torch.zeros(B, 1, S, S, dtype=torch.float64).masked_fill(hidden[:, None, None], -torch.inf)
    if attn_mask is not None:
        extra = torch.zeros(S, S, dtype=torch.float64).masked_fill(blocked, -torch.inf) if mask == "bool" else attn_mask
        scores = scores + (extra.unflatten(0, (B, H)) if mask == "3-D" else extra)
    rows = ~hidden
    x = rand(B, S, E)
    dead = (scores == -torch.inf).all(-1).any(1) & rows
    if not dead.any():
        same(theirs, ours, [x], rows, mask=attn_mask, src_key_padding_mask=pad)
        return
    # rows without a key are NaN in torch, and so is all that they reach: one by one, those it does not reach
    out = ours(x, mask=attn_mask, src_key_padding_mask=pad)
    assert out.isfinite().all() and (out[hidden] == 0).all()
    expected = theirs(x, mask=attn_mask, src_key_padding_mask=pad)
    fine = rows & expected.isfinite().all(-1)
    torch.testing.assert_close(out[fine], expected[fine])


def test_one_semantics():
    _, ours = stacks("Encoder", batch_first=True)
    x, hidden = rand(B, S, E), padding("left")
    train = ours.train()(x, src_key_padding_mask=hidden)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x, src_key_padding_mask=hidden), train, rtol=0, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(ours.eval()(x, src_key_padding_mask=hidden), train, rtol=0, atol=0)


def test_padding_is_not_computed():
    _, ours = stacks("Encoder", batch_first=True)
    hidden = padding("trailing columns")
    tokens = int((~hidden).sum())
    shapes = {}
    for name, module in ours.named_modules():
        module.register_forward_hook(lambda m, args, out, name=name: shapes.update({name: (args[0], out)}))
    out = ours(rand(B, S, E).requires_grad_(), src_key_padding_mask=hidden)
    out.sum().backward()
    assert set(shapes) == {name for name, m in ours.named_modules() if not isinstance(m, torch.nn.ModuleList)}
    for name, (given, result) in shapes.items():
        if name:
            result = result[0] if isinstance(result, tuple) else result
            assert given.shape[0] == result.shape[0] == tokens, name
    assert out.shape == (B, S, E)


def test_layers_may_be_given_padded_batches():
    _, packed = stacks("Encoder", batch_first=True)
    layer = foci.nn.TransformerEncoderLayer(E, H, FF, 0.0, batch_first=True, dtype=torch.float64)
    padded = foci.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(E, dtype=torch.float64), enable_nested_tensor=False)
    padded.load_state_dict(packed.state_dict())
    seen = []
    padded.layers[1].register_forward_hook(lambda m, args, out: seen.append(out.shape))
    x, hidden = rand(B, S, E), padding("holes")
    torch.testing.assert_close(padded(x, src_key_padding_mask=hidden), packed(x, src_key_padding_mask=hidden))
    assert seen == [(B, S, E)]


@pytest.mark.parametrize("name", ["right", "holes"])
def test_what_is_in_the_padding_does_not_matter(name):
    hidden = padding(name)
    x = rand(B, S, E)
    poisoned = x.masked_fill(hidden[..., None], torch.nan).requires_grad_()
    clean = x.masked_fill(hidden[..., None], 0.0).requires_grad_()
    for module in (layers("Encoder", batch_first=True)[1], stacks("Encoder", batch_first=True)[1]):
        outs = [module(t, src_key_padding_mask=hidden) for t in (poisoned, clean)]
        torch.testing.assert_close(outs[0], outs[1])
        torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), t)[0] for o, t in zip(outs, (poisoned, clean))))


def test_an_all_masked_row_is_safe():
    hidden = padding("right").clone()
    hidden[1] = True
    for module in (layers("Encoder", batch_first=True)[1], stacks("Encoder", batch_first=True)[1]):
        x = rand(B, S, E).requires_grad_()
        out = module(x, src_key_padding_mask=hidden)
        assert out.isfinite().all() and (out[1] == 0).all()
        grads = torch.autograd.grad(out.sum(), [x, *module.parameters()])
        assert all(g.isfinite().all() for g in grads)
        everything = module(x, src_key_padding_mask=torch.ones_like(hidden))
        assert (everything == 0).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.int32])
@pytest.mark.parametrize("training", [False, True])
def test_masks_of_other_dtypes_are_refused(dtype, training):
    x, bad = rand(B, S, E), torch.zeros(B, S, dtype=dtype)
    for module in (layers("Encoder", batch_first=True)[1], stacks("Encoder", batch_first=True)[1]):
        with pytest.raises(AssertionError, match="only bool and floating types of src_key_padding_mask are supported"):
            module.train(training)(x, src_key_padding_mask=bad)
    for module in (layers("Decoder", batch_first=True)[1], stacks("Decoder", batch_first=True)[1]):
        with pytest.raises(AssertionError, match="only bool and floating types of memory_key_padding_mask are supported"):
            module.train(training)(x, x, memory_key_padding_mask=bad)


def test_a_padding_mask_of_another_shape():
    for shape in ((B, S + 1), (B + 1, S), (S,)):
        with pytest.raises(AssertionError, match="Expected key_padded_mask.shape"):
            stacks("Encoder", batch_first=True)[1](rand(B, S, E), src_key_padding_mask=torch.zeros(shape, dtype=torch.bool))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested(layout):
    hidden = padding("right")
    x = rand(B, S, E)
    parts = [x[n, ~hidden[n]] for n in range(B)]
    for module in (layers("Encoder", batch_first=True)[1], stacks("Encoder", batch_first=True)[1]):
        dense = module(x, src_key_padding_mask=hidden)
        leaves = [p.detach().requires_grad_() for p in parts]
        out = module(torch.nested.as_nested_tensor(leaves, layout=layout))
        assert out.is_nested and out.layout == layout
        for n, part in enumerate(out.unbind()):
            torch.testing.assert_close(part, dense[n, ~hidden[n]])
        torch.autograd.grad(sum(p.sum() for p in out.unbind()), leaves)
    with pytest.raises(ValueError, match="takes no padding mask"):
        module(torch.nested.as_nested_tensor(parts, layout=layout), src_key_padding_mask=hidden)


@pytest.mark.parametrize("options", CONSTRUCTIONS[:3])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("pads", [(None, None), ("right", None), (None, "holes"), ("left", "right")], ids=str)
def test_decoder(options, batch_first, pads):
    target = rand(B, T, E) if batch_first else rand(T, B, E)
    memory = rand(B, S, E, seed=1) if batch_first else rand(S, B, E, seed=1)
    hidden = [None if name is None else padding(name, n) for name, n in zip(pads, (T, S))]
    if pads[0] == "left":
        hidden[0] = torch.tensor([[1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 0, 0]], dtype=torch.bool)
    rows = None if hidden[0] is None else ~hidden[0] if batch_first else ~hidden[0].T
    causal = torch.nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    for theirs, ours in (layers("Decoder", batch_first=batch_first, **options), stacks("Decoder", batch_first=batch_first, **options)):
        given = {"tgt_key_padding_mask": hidden[0], "memory_key_padding_mask": hidden[1]}
        same(theirs, ours, [target, memory], rows, **given)
        given["memory_mask"] = rand(T, S, seed=3)
        if pads[0] != "left":  # torch's first rows have no key then
            given["tgt_mask"] = causal
        if hidden[0] is None and hidden[1] is None:
            same(theirs, ours, [target[0], memory[1]] if batch_first else [target[:, 0], memory[:, 1]], memory_mask=given["memory_mask"])
        same(
            theirs, ours, [target, memory], rows, **{k: v if v is None or v.dtype != torch.bool else as_float(v) for k, v in given.items()}
        )


def as_float(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


def test_decoder_computes_no_padding():
    _, ours = stacks("Decoder", batch_first=True)
    hidden, memory_hidden = padding("right", T), padding("holes")
    counts = {name: set() for name, _ in ours.named_modules()}
    for name, module in ours.named_modules():
        module.register_forward_pre_hook(lambda m, args, name=name: counts[name].add(args[0].shape[0]) if args else None)
    ours(rand(B, T, E), rand(B, S, E), tgt_key_padding_mask=hidden, memory_key_padding_mask=memory_hidden)
    seen = set().union(*(shapes for name, shapes in counts.items() if name))
    assert seen == {int((~hidden).sum())}
    with foci.observe() as log:
        ours(rand(B, T, E), rand(B, S, E), memory_key_padding_mask=memory_hidden)
    assert {call.problem.formula.layout.value for call in log.calls} == {"jagged"}


def test_decoder_nested():
    _, ours = stacks("Decoder", batch_first=True)
    target, memory = (torch.nested.nested_tensor([rand(n, E, seed=n) for n in ns], layout=torch.jagged) for ns in ((2, 5, 1), (4, 1, 6)))
    out = ours(target, memory)
    for t, m, o in zip(target.unbind(), memory.unbind(), out.unbind()):
        torch.testing.assert_close(o, ours(t, m))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_transformer(batch_first, padded):
    options = {"d_model": E, "nhead": H, "num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": FF, "dropout": 0.0}
    options |= {"batch_first": batch_first, "dtype": torch.float64}
    theirs, ours = twins(*(quiet(lambda nn=nn: nn.Transformer(**options)) for nn in (torch.nn, foci.nn)))
    src, tgt = (rand(B, S, E), rand(B, T, E, seed=1)) if batch_first else (rand(S, B, E), rand(T, B, E, seed=1))
    causal = ours.generate_square_subsequent_mask(T, dtype=torch.float64)
    assert torch.equal(causal, torch.nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64))
    kwargs, rows = {"tgt_mask": causal}, None
    if padded:
        hidden, target_hidden = padding("right"), as_float(padding("right", T))
        kwargs |= {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden, "tgt_key_padding_mask": target_hidden}
        rows = (target_hidden == 0) if batch_first else (target_hidden == 0).T
    same(theirs, ours, [src, tgt], rows, **kwargs)
    if not padded:
        same(theirs, ours, [src[0], tgt[0]] if batch_first else [src[:, 0], tgt[:, 0]])
    with pytest.raises(RuntimeError, match="the batch number of src and tgt must be equal"):
        ours(src, torch.cat((tgt, tgt), 0 if batch_first else 1))
    with pytest.raises(RuntimeError, match="the feature number of src and tgt must be equal to d_model"):
        ours(src[..., 1:], tgt)


def test_transformer_nested():
    ours = foci.nn.Transformer(E, H, 1, 1, FF, 0.0, batch_first=True)
    src, tgt = (
        torch.nested.nested_tensor([rand(n, E, dtype=torch.float32, seed=n) for n in ns], layout=torch.jagged) for ns in ((2, 5), (4, 1))
    )
    for s, t, o in zip(src.unbind(), tgt.unbind(), ours(src, tgt).unbind()):
        torch.testing.assert_close(o, ours(s, t))


@pytest.mark.parametrize("norm_first", [False, True])
def test_initialisation(norm_first):
    states = []
    for nn in (torch.nn, foci.nn):
        torch.manual_seed(5)
        states.append(quiet(lambda nn=nn: nn.Transformer(E, H, 2, 1, FF, norm_first=norm_first)).state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_wrong_activation():
    for kind in ("Encoder", "Decoder"):
        with pytest.raises(RuntimeError, match="activation should be relu/gelu, not tanh"):
            getattr(foci.nn, f"Transformer{kind}Layer")(E, H, activation="tanh")


def test_no_warning_on_ordinary_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"batch_first": True}, {}, {"norm_first": True}, {"activation": F.silu}, {"bias": False}):
            encoder = foci.nn.TransformerEncoder(foci.nn.TransformerEncoderLayer(E, 1, FF, **options), 2)
            x = rand(B, S, E, dtype=torch.float32)
            for module in (encoder.train(), encoder.eval()):
                module(x if options.get("batch_first") else x.transpose(0, 1), src_key_padding_mask=padding("right"))
        foci.nn.Transformer(E, H, 1, 1, FF)


def test_causal_masks_are_detected():
    _, ours = stacks("Encoder", batch_first=True)
    x = rand(B, S, E)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    almost = causal.clone()
    almost[3, 1] = -0.5
    for mask, detected in ((causal, True), (causal == -torch.inf, True), (almost, False), (causal.float(), True)):
        with foci.observe() as log:
            found = ours(x, mask=mask)
        assert all(bool(c.problem.variant.captures) is not detected for c in log.calls)
        written = torch.zeros_like(mask, dtype=torch.float64).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask.double()
        torch.testing.assert_close(found, ours(x, mask=written, is_causal=False))
    with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
        ours(x, is_causal=True)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype):
    exact, ours = stacks("Encoder", batch_first=True)
    theirs = copy.deepcopy(exact).to(dtype).train()
    exact.load_state_dict(theirs.state_dict())
    ours = ours.to(dtype)
    ours.load_state_dict(theirs.state_dict())
    x, hidden = rand(B, S, E).to(dtype), padding("right")
    want, they, we = (
        m(x.to(t), src_key_padding_mask=hidden)[~hidden].double()
        for m, t in ((exact.train(), torch.float64), (theirs, dtype), (ours, dtype))
    )
    assert (we - want).abs().max() <= 2 * (they - want).abs().max() + 8 * torch.finfo(dtype).eps * want.abs().max()


def test_autocast():
    _, ours = stacks("Encoder", batch_first=True)
    ours = ours.float()
    x, hidden = rand(B, S, E, dtype=torch.float32), padding("right")
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(out.float(), ours(x, src_key_padding_mask=hidden), rtol=0.1, atol=0.1)


def test_activation_checkpointing():
    _, ours = stacks("Encoder", batch_first=True)
    x, hidden = rand(B, S, E).requires_grad_(), padding("right")
    plain = torch.autograd.grad(ours(x, src_key_padding_mask=hidden).square().sum(), x)[0]
    again = torch.utils.checkpoint.checkpoint(lambda t: ours(t, src_key_padding_mask=hidden), x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.square().sum(), x)[0], plain)


def test_second_derivatives():
    ours = layers("Encoder", batch_first=True, activation=F.silu)[1]
    hidden = padding("right")
    x = rand(B, S, E).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: ours(t, src_key_padding_mask=hidden), x)
    (first,) = torch.autograd.grad(ours(x, src_key_padding_mask=hidden).square().sum(), x, create_graph=True)
    second = torch.autograd.grad(first.square().sum(), x)[0]
    step = 1e-5 * rand(B, S, E, seed=3)
    values = []
    for sign in (1, -1):
        moved = (x.detach() + sign * step).requires_grad_()
        (g,) = torch.autograd.grad(ours(moved, src_key_padding_mask=hidden).square().sum(), moved)
        values.append(g.square().sum())
    torch.testing.assert_close((second * 2 * step).sum(), values[0] - values[1], rtol=1e-4, atol=1e-9)


def test_vmap():
    ours = stacks("Encoder", batch_first=True)[1]
    x, hidden = rand(2, B, S, E), padding("right")
    out = torch.func.vmap(lambda t: ours(t, src_key_padding_mask=hidden))(x)
    torch.testing.assert_close(out, torch.stack([ours(t, src_key_padding_mask=hidden) for t in x]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    torch._dynamo.reset()
    _, ours = stacks("Encoder", 1, batch_first=True)
    compiled = torch.compile(ours, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    causal = torch.nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    for hidden in (padding("right"), padding("holes")):
        x = rand(B, S, E).requires_grad_()
        for kwargs in ({"src_key_padding_mask": hidden}, {"src_key_padding_mask": hidden, "mask": causal})[: 1 if dynamic else 2]:
            expected, got = (m(x, **kwargs) for m in (ours, compiled))
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), x)[0] for o in (got, expected)))


def test_compile_decoder():
    torch._dynamo.reset()
    _, ours = stacks("Decoder", 1, batch_first=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    args = (rand(B, T, E), rand(B, S, E))
    kwargs = {"tgt_key_padding_mask": padding("right", T), "memory_key_padding_mask": padding("holes")}
    torch.testing.assert_close(compiled(*args, **kwargs), ours(*args, **kwargs))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    _, ours = stacks("Encoder", batch_first=True)
    args = (rand(B, S, E), None, padding("right"))
    program = torch.export.export(ours.eval(), args, strict=strict)
    torch.testing.assert_close(program.module()(*args), ours(*args))


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::DeprecationWarning")
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_scripting(batch_first, norm_first, tmp_path):
    hidden, causal = padding("right"), torch.nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    x = rand(B, S, E) if batch_first else rand(S, B, E)
    encoder = stacks("Encoder", batch_first=batch_first, norm_first=norm_first)[1]
    scripted = torch.jit.script(encoder)
    for kwargs in (
        {},
        {"src_key_padding_mask": hidden},
        {"src_key_padding_mask": as_float(hidden), "mask": causal},
        {"mask": causal == -torch.inf},
    ):
        leaf = x.detach().requires_grad_()
        expected, got = encoder(leaf, **kwargs), scripted(leaf, **kwargs)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), leaf)[0] for o in (got, expected)))
    torch.jit.save(scripted, tmp_path / "encoder.pt")
    torch.testing.assert_close(
        torch.jit.load(tmp_path / "encoder.pt")(x, src_key_padding_mask=hidden), encoder(x, src_key_padding_mask=hidden)
    )
    decoder = stacks("Decoder", batch_first=batch_first, norm_first=norm_first)[1]
    kwargs = {"tgt_mask": causal, "tgt_key_padding_mask": as_float(hidden), "memory_key_padding_mask": padding("holes")}
    torch.testing.assert_close(torch.jit.script(decoder)(x, x, **kwargs), decoder(x, x, **kwargs))
    model = foci.nn.Transformer(E, H, 1, 1, FF, 0.0, batch_first=batch_first, dtype=torch.float64)
    torch.testing.assert_close(torch.jit.script(model)(x, x, src_key_padding_mask=hidden), model(x, x, src_key_padding_mask=hidden))


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"bias": False, "num_kv_heads": 1}, {"kdim": 4, "vdim": 6}], ids=str)
def test_scripting_attention(options):
    ours = foci.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **options)
    scripted = torch.jit.script(ours)
    inputs = (rand(B, S, E), rand(B, S, options.get("kdim", E)), rand(B, S, options.get("vdim", E)))
    for kwargs in ({}, {"average_attn_weights": False}, {"attn_mask": rand(B * H, S, S)}, {"key_padding_mask": padding("holes")}):
        for got, expected in zip(scripted(*inputs, **kwargs), ours(*inputs, **kwargs)):
            torch.testing.assert_close(got, expected)
    torch.testing.assert_close(scripted(*(t[0] for t in inputs))[1], ours(*(t[0] for t in inputs))[1])
    assert scripted(*inputs, need_weights=False)[1] is None
    with pytest.raises(torch.jit.Error, match="only bool and floating types of key_padding_mask are supported"):
        scripted(*inputs, key_padding_mask=torch.zeros(B, S, dtype=torch.uint8))


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::DeprecationWarning")
def test_scripting_refuses_python_variants():
    with pytest.raises(RuntimeError, match="mask"):
        torch.jit.script(foci.nn.MultiheadAttention(E, H, mask=foci.masks.causal()))
    zero = torch.jit.script(foci.nn.MultiheadAttention(E, H, add_zero_attn=True))
    x = rand(S, B, E, dtype=torch.float32)
    with pytest.raises(torch.jit.Error, match="takes no mask, score, rotary, add_bias_kv or add_zero_attn"):
        zero(x, x, x)


def test_compile_nested():
    torch._dynamo.reset()
    _, ours = stacks("Encoder", 1, batch_first=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for lengths in ((2, 5, 3), (4, 1, 2), (7, 2, 2)):
        parts = [rand(n, E, seed=n).requires_grad_() for n in lengths]
        out, want = (m(torch.nested.as_nested_tensor(parts, layout=torch.jagged)) for m in (compiled, ours))
        assert out.is_nested
        torch.testing.assert_close(out.values(), want.values())
        torch.testing.assert_close(*(torch.autograd.grad(o.values().square().sum(), parts) for o in (out, want)))


def test_compiled_layers_in_a_packed_encoder():
    torch._dynamo.reset()
    _, ours = stacks("Encoder", batch_first=True)
    compiled = copy.deepcopy(ours)
    for layer in compiled.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for name in ("right", "holes"):
        x, hidden = rand(B, S, E), padding(name)
        torch.testing.assert_close(compiled(x, src_key_padding_mask=hidden), ours(x, src_key_padding_mask=hidden))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_unbatched_padding(kind):
    theirs, ours = (m.train() for m in stacks("Encoder"))
    hidden = padding("holes")[0]
    same(theirs, ours, [rand(S, E)], ~hidden, src_key_padding_mask=hidden if kind == "bool" else as_float(hidden))


def test_empty_batches():
    _, ours = stacks("Encoder", batch_first=True)
    assert ours(rand(0, S, E), src_key_padding_mask=torch.zeros(0, S, dtype=torch.bool)).shape == (0, S, E)
    assert ours(rand(B, 0, E), src_key_padding_mask=torch.zeros(B, 0, dtype=torch.bool)).shape == (B, 0, E)


def test_gradient_of_a_floating_padding_mask():
    theirs, ours = stacks("Encoder", 1, batch_first=True)
    pad = as_float(padding("right")).masked_fill(~padding("right"), 0.3).requires_grad_()
    x, rows = rand(B, S, E), ~padding("right")
    weights = rand(int(rows.sum()), E, seed=9)
    found = [torch.autograd.grad((m(x, src_key_padding_mask=pad)[rows] * weights).sum(), pad)[0][rows] for m in (theirs.train(), ours)]
    torch.testing.assert_close(found[1], found[0])


class GatedDecoder(foci.nn.TransformerDecoderLayer):
    """A block of its own, which may not know of packed tokens."""

    def _ff_block(self, x):
        assert x.dim() == 3
        return super()._ff_block(x) * torch.sigmoid(x)


def test_decoder_subclass():
    torch.manual_seed(0)
    decoder = foci.nn.TransformerDecoder(GatedDecoder(E, H, FF, 0.0, batch_first=True, dtype=torch.float64), 2)
    target, memory, hidden = rand(B, T, E), rand(B, S, E), padding("right")
    with pytest.warns(UserWarning, match="GatedDecoder has a _ff_block of its own"):
        out = decoder(target, memory, memory_key_padding_mask=hidden)
    for n in range(B):
        torch.testing.assert_close(out[n : n + 1], decoder(target[n : n + 1], memory[n : n + 1, ~hidden[n]]))
