"""foci.nn's encoder, decoder and Transformer against torch.nn's; padding; hooks; subclasses; conversion; compile and export."""

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from twins import FF, PADDINGS, B, E, H, S, T, as_float, layers, padding, quiet, rand, same, stacks, twins

import foci
import foci.nn

CONSTRUCTIONS = [
    {},
    {"norm_first": True},
    {"activation": "gelu", "bias": False},
    {"activation": F.silu, "layer_norm_eps": 1e-2},
    {"activation": torch.nn.GELU(approximate="tanh"), "norm_first": True, "bias": False},
]


# MOD-01, MOD-07
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


# MOD-05
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


# MOD-04
def test_one_semantics():
    _, ours = stacks("Encoder", batch_first=True)
    x, hidden = rand(B, S, E), padding("left")
    train = ours.train()(x, src_key_padding_mask=hidden)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x, src_key_padding_mask=hidden), train, rtol=0, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(ours.eval()(x, src_key_padding_mask=hidden), train, rtol=0, atol=0)


# MOD-05, MOD-07
def test_padding_is_not_computed():
    _, ours = stacks("Encoder", batch_first=True)
    hidden = padding("trailing columns")
    tokens = int((~hidden).sum())
    shapes = {}
    for name, module in ours.named_modules():
        module.register_forward_hook(lambda m, args, out, name=name: shapes.update({name: (args[0], out)}))
    out = ours(rand(B, S, E).requires_grad_(), src_key_padding_mask=hidden)
    out.sum().backward()
    # torch.nn.MultiheadAttention reads the parameters of its out_proj and does not call it
    called = {name for name, m in ours.named_modules() if not isinstance(m, torch.nn.ModuleList) and not name.endswith("out_proj")}
    assert set(shapes) == called
    for name, (layer_input, result) in shapes.items():
        if name:
            result = result[0] if isinstance(result, tuple) else result
            assert layer_input.shape[0] == result.shape[0] == tokens, name
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


# MOD-06
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


# MOD-06
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


# MOD-05
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


# MOD-01
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
        kwargs = {"tgt_key_padding_mask": hidden[0], "memory_key_padding_mask": hidden[1]}
        same(theirs, ours, [target, memory], rows, **kwargs)
        kwargs["memory_mask"] = rand(T, S, seed=3)
        if pads[0] != "left":  # torch's first rows have no key then
            kwargs["tgt_mask"] = causal
        if hidden[0] is None and hidden[1] is None:
            same(theirs, ours, [target[0], memory[1]] if batch_first else [target[:, 0], memory[:, 1]], memory_mask=kwargs["memory_mask"])
        same(
            theirs, ours, [target, memory], rows, **{k: v if v is None or v.dtype != torch.bool else as_float(v) for k, v in kwargs.items()}
        )


# MOD-05
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


# MOD-05
def test_decoder_nested():
    _, ours = stacks("Decoder", batch_first=True)
    target, memory = (torch.nested.nested_tensor([rand(n, E, seed=n) for n in ns], layout=torch.jagged) for ns in ((2, 5, 1), (4, 1, 6)))
    out = ours(target, memory)
    for t, m, o in zip(target.unbind(), memory.unbind(), out.unbind()):
        torch.testing.assert_close(o, ours(t, m))


# MOD-01, MOD-08
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


# MOD-05
def test_transformer_nested():
    ours = foci.nn.Transformer(E, H, 1, 1, FF, 0.0, batch_first=True)
    src, tgt = (
        torch.nested.nested_tensor([rand(n, E, dtype=torch.float32, seed=n) for n in ns], layout=torch.jagged) for ns in ((2, 5), (4, 1))
    )
    for s, t, o in zip(src.unbind(), tgt.unbind(), ours(src, tgt).unbind()):
        torch.testing.assert_close(o, ours(s, t))


# MOD-01
@pytest.mark.parametrize("norm_first", [False, True])
def test_initialisation(norm_first):
    states = []
    for nn in (torch.nn, foci.nn):
        torch.manual_seed(5)
        states.append(quiet(lambda nn=nn: nn.Transformer(E, H, 2, 1, FF, norm_first=norm_first)).state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


MODULES = (
    "MultiheadAttention",
    "TransformerEncoderLayer",
    "TransformerEncoder",
    "TransformerDecoderLayer",
    "TransformerDecoder",
    "Transformer",
)


# MOD-01
@pytest.mark.parametrize("method", ["__init__", "forward"])
@pytest.mark.parametrize("name", MODULES)
def test_arguments_are_torchs_and_ours_come_after(name, method):
    theirs, ours = (inspect.signature(getattr(getattr(nn, name), method)).parameters for nn in (torch.nn, foci.nn))
    assert list(ours)[: len(theirs)] == list(theirs)
    for argument in theirs:
        assert (ours[argument].kind, ours[argument].default) == (theirs[argument].kind, theirs[argument].default), argument
    assert all(ours[argument].default is not inspect.Parameter.empty for argument in list(ours)[len(theirs) :])


# MOD-07
def test_wrong_activation():
    for kind in ("Encoder", "Decoder"):
        with pytest.raises(RuntimeError, match="activation should be relu/gelu, not tanh"):
            getattr(foci.nn, f"Transformer{kind}Layer")(E, H, activation="tanh")


# MOD-07
def test_no_warning_on_ordinary_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"batch_first": True}, {}, {"norm_first": True}, {"activation": F.silu}, {"bias": False}):
            encoder = foci.nn.TransformerEncoder(foci.nn.TransformerEncoderLayer(E, 1, FF, **options), 2)
            x = rand(B, S, E, dtype=torch.float32)
            for module in (encoder.train(), encoder.eval()):
                module(x if options.get("batch_first") else x.transpose(0, 1), src_key_padding_mask=padding("right"))
        foci.nn.Transformer(E, H, 1, 1, FF)


# MOD-03
def test_causal_masks_are_detected():
    _, ours = stacks("Encoder", batch_first=True)
    x = rand(B, S, E)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    almost = causal.clone()
    almost[3, 1] = -0.5
    for mask, detected in ((causal, True), (causal == -torch.inf, True), (almost, False), (causal.float(), True)):
        with foci.observe() as log:
            actual = ours(x, mask=mask)
        assert all(bool(c.problem.variant.captures) is not detected for c in log.calls)
        written = torch.zeros_like(mask, dtype=torch.float64).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask.double()
        torch.testing.assert_close(actual, ours(x, mask=written, is_causal=False))
    with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
        ours(x, is_causal=True)


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
    gradients = [torch.autograd.grad((m(x, src_key_padding_mask=pad)[rows] * weights).sum(), pad)[0][rows] for m in (theirs.train(), ours)]
    torch.testing.assert_close(gradients[1], gradients[0])
