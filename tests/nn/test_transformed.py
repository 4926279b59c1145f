"""Encoders and decoders under autocast, checkpointing, second derivatives, vmap, torch.compile, export and TorchScript."""

import copy

import pytest
import torch
import torch.nn.functional as F
from twins import FF, B, E, H, S, T, as_float, layers, outcome, padding, rand, stacks

import foci
import foci.nn
from compiled import resize, several


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


# MOD-04
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    torch._dynamo.reset()
    _, ours = stacks("Encoder", 1, batch_first=True)
    compiled = torch.compile(ours, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length, name in several((S, "right"), (S + 3, "holes"), (S + 9, "right")):
        x, hidden = resize((rand(B, S, E).requires_grad_(), padding(name)), {S: length})
        causal = torch.nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)
        for kwargs in ({"src_key_padding_mask": hidden}, {"src_key_padding_mask": hidden, "mask": causal})[: 1 if dynamic else 2]:
            expected, got = (m(x, **kwargs) for m in (ours, compiled))
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), x)[0] for o in (got, expected)))


def test_compile_decoder():
    torch._dynamo.reset()
    _, ours = stacks("Decoder", 1, batch_first=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for more in several(0, 2, 5):
        arguments = rand(B, T, E), rand(B, S, E), padding("right", T), padding("holes")
        *args, target, memory = resize(arguments, {T: T + more, S: S + more})
        kwargs = {"tgt_key_padding_mask": target, "memory_key_padding_mask": memory}
        torch.testing.assert_close(compiled(*args, **kwargs), ours(*args, **kwargs))


COMPILED = {
    "norm first, eval, float32": ({"norm_first": True}, False, torch.float32),
    "gelu, no bias, train, float64": ({"activation": "gelu", "bias": False}, True, torch.float64),
    "module, norm first, train, bfloat16": ({"activation": torch.nn.GELU(approximate="tanh"), "norm_first": True}, True, torch.bfloat16),
}


# MOD-04
@pytest.mark.parametrize("case", COMPILED)
@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_compiled_modules_are_those_of_torch(kind, case):
    torch._dynamo.reset()
    options, training, dtype = COMPILED[case]
    theirs, ours = (m.train(training).to(dtype) for m in stacks(kind, 1, batch_first=True, **options))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    near = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}

    def calls(more):
        arguments = rand(B, S, E).to(dtype), rand(B, T, E).to(dtype), padding("right"), padding("right", T)
        x, memory, hidden, memory_hidden = resize(arguments, {S: S + more, T: T + more})
        causal = torch.nn.Transformer.generate_square_subsequent_mask(S + more, dtype=dtype)
        if kind == "Encoder":
            return ([x], {"mask": causal}, hidden), ([x], {"src_key_padding_mask": hidden}, hidden)
        pads = {"tgt_key_padding_mask": hidden, "memory_key_padding_mask": memory_hidden}
        return ([x, memory], {"tgt_mask": causal}, hidden), ([x, memory], {"tgt_mask": causal, **pads}, hidden)

    for inputs, kwargs, hidden in (call for more in several(0, 2, 5) for call in calls(more)):
        rows = ~hidden if any("padding" in name for name in kwargs) else None
        (_, expected, their_grads), (_, got, our_grads) = (outcome(m, inputs, rows, **kwargs) for m in (theirs, compiled))
        torch.testing.assert_close(got, expected, **near)
        scale = max(float(g.abs().max()) for g in their_grads)
        for one, other in zip(our_grads, their_grads, strict=True):
            torch.testing.assert_close(one / scale, other / scale, **near)


# MOD-08
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    _, ours = stacks("Encoder", batch_first=True)
    args = (rand(B, S, E), None, padding("right"))
    program = torch.export.export(ours.eval(), args, strict=strict)
    torch.testing.assert_close(program.module()(*args), ours(*args))


# MOD-08
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


# MOD-08
@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::DeprecationWarning")
@pytest.mark.parametrize("options", [{"dropout": 0}, {"bias": False, "num_kv_heads": 1}, {"kdim": 4, "vdim": 6}], ids=str)
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
    for lengths in several((2, 5, 3), (4, 1, 2), (7, 2, 2)):
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


@pytest.mark.filterwarnings("ignore")  # torch's of tracing: sizes are compared
@pytest.mark.parametrize("batch_first", [True, False])
def test_tracing(batch_first, tmp_path):
    _, encoder = stacks("Encoder", batch_first=batch_first)
    x, other = (rand(B, S, E, seed=n) if batch_first else rand(S, B, E, seed=n) for n in (0, 1))
    inputs = {"src": x, "src_key_padding_mask": padding("right")}
    traced = torch.jit.trace(encoder, example_kwarg_inputs=inputs, check_trace=False)
    assert str(traced.inlined_graph).count("foci::attention") == len(encoder.layers)
    torch.jit.save(traced, tmp_path / "encoder.pt")
    actual = torch.jit.load(tmp_path / "encoder.pt")(src=other, src_key_padding_mask=padding("holes"))
    torch.testing.assert_close(actual, encoder(other, src_key_padding_mask=padding("holes")))
