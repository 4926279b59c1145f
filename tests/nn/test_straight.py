"""Layers are computed from their parameters where nobody can tell, and are called as modules where somebody can."""

import contextlib
import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.utils.parametrize
import torch.nn.utils.prune
from onlookers import Calling, Dispatching
from padded_stacks import PADDING, E, H, S, by_modules, model, outcome, source

import foci
import foci.nn
from compiled import resize, several
from foci.dispatch import _side_by_side
from foci.nn import fused_encoder


@pytest.mark.parametrize("grad", [True, False])
def test_autocast(taken, monkeypatch, grad):
    encoder, x = model(), source(grad=grad)
    encoder.requires_grad_(grad)

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = encoder(x, src_key_padding_mask=PADDING)
        return [out, *torch.autograd.grad(out.float().sum(), [x, *encoder.parameters()])] if grad else [out]

    out = run()
    assert taken == [True]
    with monkeypatch.context() as patch:
        patch.setattr("foci.nn.encoder.noted", lambda *_: None)
        torch.testing.assert_close(out, run(), rtol=0, atol=0)


class Slopes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.arange(float(H)))
        self.calls = 0

    def forward(self):
        self.calls += 1
        table = self.table
        return lambda score, b, h, i, j: score + table[h] * (i - j)


def test_learned_scores(taken, monkeypatch):
    slopes = Slopes()
    encoder, x = model(score=slopes), source()
    assert len([name for name, _ in encoder.named_parameters() if "table" in name]) == 2
    actual = outcome(encoder, x)
    assert [layer.self_attn.score.calls for layer in encoder.layers] == [1, 1]
    torch.testing.assert_close(actual, by_modules(monkeypatch, encoder, x), rtol=1e-5, atol=1e-6)
    assert taken == [True]


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("where", ["score", "mask"])
def test_what_is_captured_learns_beside_frozen_parameters(taken, monkeypatch, activation, where):
    slopes, bias = Slopes(), torch.zeros(S, S, requires_grad=True)
    encoder, x = model(score=slopes if where == "score" else None, activation=activation), source(grad=False)
    encoder.requires_grad_(requires_grad=False)
    leaves = [layer.self_attn.score.table.requires_grad_() for layer in encoder.layers] if where == "score" else [bias]

    def run():
        out = encoder(x, mask=bias if where == "mask" else None, src_key_padding_mask=PADDING)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    here = run()
    assert taken == [True]
    with monkeypatch.context() as patch:
        patch.setattr("foci.nn.encoder.noted", lambda *_: None)
        torch.testing.assert_close(here, run(), rtol=1e-5, atol=1e-6)


def test_rows_are_known_to_be_tokens_where_a_mask_says_so(monkeypatch):
    seen = []
    attention_class = fused_encoder.Attention

    def attention(*args, no_padding):
        seen.append(no_padding)
        return attention_class(*args, no_padding=no_padding)

    monkeypatch.setattr(fused_encoder, "Attention", attention)
    monkeypatch.setattr(fused_encoder.Stack, "_attentions", lambda *_: {})
    encoder, x = model(), source(grad=False)
    packing = foci.nn.Packing.from_mask(PADDING)
    tokens = packing.pack(x)
    told = foci.nn.Packing(packing.offsets, packing.longest, packing.shape, packing.indices)
    more = torch.cat((tokens, tokens))
    for inputs, padding in ((x, PADDING), (tokens, packing), (more, packing), (tokens, told), (tokens, copy.deepcopy(packing))):
        encoder(inputs, src_key_padding_mask=padding)
    assert seen == [True, True, False, False, False]
    packing.offsets[-1] -= 1
    encoder(tokens, src_key_padding_mask=packing)
    encoder(x, src_key_padding_mask=PADDING)
    assert seen[5:] == [False, True]


@pytest.mark.parametrize("needs_grad", [True, False])
def test_what_a_call_found_serves_the_next_of_its_form(monkeypatch, needs_grad):
    reads = []
    inner = fused_encoder._read_attention
    monkeypatch.setattr(fused_encoder, "_read_attention", lambda *args, **more: reads.append(inner(*args, **more)) or reads[-1])
    encoder, x = model(), source(grad=False)
    turned, fewer = PADDING.roll(1, 0), PADDING | (torch.arange(S) >= S - 1)
    masks = [PADDING, PADDING, turned, PADDING, fewer, turned]

    def run():
        with contextlib.nullcontext() if needs_grad else torch.no_grad():
            return [encoder(x, src_key_padding_mask=mask) for mask in masks]

    actual, first = run(), len(reads)
    assert first < len(masks)
    with monkeypatch.context() as patch:
        patch.setattr(fused_encoder.Stack, "_attentions", lambda *_: {})
        want = run()
    assert len(reads) - first == len(masks)
    assert all(map(torch.equal, actual, want))


def test_what_a_call_found_is_not_for_what_else_has_changed(monkeypatch):
    reads = []
    inner = fused_encoder._read_attention
    monkeypatch.setattr(fused_encoder, "_read_attention", lambda *args, **more: reads.append(1) or inner(*args, **more))
    encoder, x = model(), source(grad=False)
    encoder(x, src_key_padding_mask=PADDING)
    encoder(x, src_key_padding_mask=PADDING)
    assert len(reads) == 1
    with foci.use("reference"):
        encoder(x, src_key_padding_mask=PADDING)
    assert len(reads) == 2
    floating = torch.zeros(PADDING.shape).masked_fill(PADDING, -torch.inf)
    floating[0, 0] = 1.0
    encoder(x, src_key_padding_mask=floating)
    assert len(reads) == 3
    packing = foci.nn.Packing.from_mask(PADDING)
    tokens = packing.pack(x)
    encoder(tokens, src_key_padding_mask=packing)
    known = encoder(tokens, src_key_padding_mask=packing)
    packing.offsets[1] -= 1
    other = encoder(tokens, src_key_padding_mask=packing)
    with monkeypatch.context() as patch:
        patch.setattr(fused_encoder.Stack, "_attentions", lambda *_: {})
        assert torch.equal(other, encoder(tokens, src_key_padding_mask=packing))
    assert not torch.equal(other, known)


class Louder(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Weight(torch.nn.Parameter):
    """A parameter of another class."""


class Marked(torch.Tensor):
    """A tensor of another class."""


class OwnBlock(foci.nn.TransformerEncoderLayer):
    takes_tokens = True

    def _ff_block(self, x):
        return 3 * super()._ff_block(x)


class OwnAttention(foci.nn.MultiheadAttention):
    def _project(self, *tensors):
        return super()._project(*tensors)


PARTS = ("linear1", "linear2", "norm1", "norm2", "dropout", "dropout1", "dropout2", "self_attn", "self_attn.out_proj")


def part_of(encoder, name):
    return encoder.layers[0].get_submodule(name)


def hang(way, name):
    """Something that hangs on a part."""

    def change(encoder):
        part = part_of(encoder, name)
        if way == "forward":
            forward = type(part).forward
            part.forward = lambda *args, **kwargs: forward(part, *args, **kwargs)
        elif way == "_compiled_call_impl":
            part._compiled_call_impl = type(part)._call_impl.__get__(part)
        else:
            getattr(part, f"register_{way}")(lambda *_: None)

    return change


def replace(name, **attributes):
    def change(encoder):
        for key, value in attributes.items():
            setattr(part_of(encoder, name), key, value)

    return change


def sparse(encoder):
    part = part_of(encoder, "linear1")
    part.weight = torch.nn.Parameter(part.weight.detach().to_sparse_csr(), requires_grad=False)


def subclass_of_a_parameter(encoder):
    part = part_of(encoder, "linear1")
    part.weight = Weight(part.weight.detach())


def parametrized(encoder):
    torch.nn.utils.parametrize.register_parametrization(part_of(encoder, "linear1"), "weight", torch.nn.Identity())


def parametrized_bias(encoder):
    torch.nn.utils.parametrize.register_parametrization(part_of(encoder, "norm2"), "bias", torch.nn.Identity())


def pruned(encoder):
    torch.nn.utils.prune.identity(part_of(encoder, "linear2"), "weight")


def hooks_of_another_dict(encoder):
    part = part_of(encoder, "linear1")
    part._forward_hooks = type(part._forward_hooks)()  # as some remove all hooks
    part.register_forward_hook(lambda _, __, out: out * 0.5)


def parameters_of_another_dict(encoder):
    part = part_of(encoder, "linear1")
    part.__setstate__(copy.deepcopy(vars(torch.nn.Linear(part.in_features, part.out_features))))


def rotary(encoder):
    encoder.layers[0].self_attn.rotary = foci.nn.RotaryEmbedding(E // H)


def key_of_its_own(encoder):
    attention = encoder.layers[0].self_attn
    attention.bias_k, attention.bias_v = (torch.nn.Parameter(torch.ones(1, 1, E)) for _ in range(2))


CHANGES = {
    **{f"{way} {name}": hang(way, name) for name in PARTS for way in ("forward_hook", "forward_pre_hook", "full_backward_hook")},
    **{f"{way} {name}": hang(way, name) for name in PARTS for way in ("full_backward_pre_hook", "forward", "_compiled_call_impl")},
    **{f"dropout of {p}": replace("dropout1", p=p) for p in (1.0, 1)},
    "dropout in place": replace("dropout2", inplace=True, p=0.0),
    "another class": replace("linear2", __class__=Louder),
    "another class of attention": replace("self_attn", __class__=OwnAttention),
    "another class of layer": lambda encoder: setattr(encoder.layers[0], "__class__", OwnBlock),
    "another activation": lambda encoder: setattr(encoder.layers[0], "activation", torch.tanh),
    "a module as activation": lambda encoder: setattr(encoder.layers[0], "activation", torch.nn.ReLU()),
    "a module in place of a norm": lambda encoder: setattr(encoder.layers[0], "norm1", torch.nn.Identity()),
    "a norm without weights": lambda encoder: setattr(encoder.layers[0], "norm1", torch.nn.LayerNorm(E, elementwise_affine=False)),
    "sparse weights": sparse,
    "a parameter of another class": subclass_of_a_parameter,
    "a parametrization": parametrized,
    "a parametrization of a bias": parametrized_bias,
    "a pruned weight": pruned,
    "hooks of another dictionary": hooks_of_another_dict,
    "parameters of another dictionary": parameters_of_another_dict,
    "rotary positions": rotary,
    "a bias taken away": replace("linear1", bias=None),
    "biases taken away": lambda encoder: [
        replace(name, bias=None)(encoder) for name in ("linear1", "linear2", "norm1", "self_attn.out_proj")
    ],
    "a key of its own": key_of_its_own,
}


@pytest.mark.parametrize("later", [False, True], ids=["from the first", "later"])
@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.filterwarnings("ignore")
def test_layers_that_are_called_as_modules(taken, monkeypatch, change, later):
    """The first layer is; the second, of which nothing is said, is computed straight."""
    encoder = model()
    if later:
        encoder(source(), src_key_padding_mask=PADDING)
        assert taken == [True]
    CHANGES[change](encoder)
    taken.clear()
    x = source()
    actual = outcome(encoder, x)
    assert taken in ([False, False, True], [False, True], [True], [False, True, True]), (
        "the stack, then its layers; the first of them, or both, perhaps not even asked; or each by itself"
    )
    torch.testing.assert_close(actual, by_modules(monkeypatch, encoder, x), rtol=1e-5, atol=1e-6)


def forward_gradients(layer, x, packing):
    with torch.autograd.forward_ad.dual_level():
        out = layer(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), None, packing)
        assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None
        return out


def dispatch_mode(layer, x, packing):
    with Dispatching():
        return layer(x, None, packing)


def function_mode(layer, x, packing):
    with Calling():
        return layer(x, None, packing)


def gradient_transform(layer, x, packing):
    return torch.func.grad(lambda x: layer(x, None, packing).sum())(x)


def vectorized(layer, x, packing):
    with contextlib.suppress(RuntimeError):  # tokens have no batch
        torch.func.vmap(lambda x: layer(x, None, packing))(x[None])


def global_hook(layer, x, packing):
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        return layer(x, None, packing)
    finally:
        handle.remove()


def another_class(layer, x, packing):
    return layer(x.as_subclass(Marked), None, packing)


def no_tokens(layer, x, packing):
    none = foci.nn.Packing(torch.zeros(3, dtype=torch.int64), 0, (2, 4))
    return layer(x[:0], None, none)


CALLS = (
    forward_gradients, dispatch_mode, function_mode, gradient_transform, vectorized, global_hook, another_class,
    no_tokens,
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_are_of_modules(taken, call):
    layer, packing = model().layers[0], foci.nn.Packing.from_mask(PADDING)
    x = packing.pack(source(grad=False))
    call(layer, x, packing)
    assert not any(taken)
    layer(x, None, packing)
    assert taken[-1]


def test_compiled_layers(taken):
    layer, packing = model().layers[0], foci.nn.Packing.from_mask(PADDING)
    x = packing.pack(source(grad=False))
    # one length: the packing that the function closes over has one number of tokens
    compiled = torch.compile(lambda x: layer(x, None, packing), backend="eager")
    torch.testing.assert_close(compiled(x), layer(x, None, packing), rtol=1e-5, atol=1e-6)
    assert taken == [True]


def test_norms_of_another_dtype(taken):
    layer, packing = model(dtype=torch.bfloat16).layers[0], foci.nn.Packing.from_mask(PADDING)
    layer.norm1.float()
    assert layer(packing.pack(source(torch.bfloat16)), None, packing).dtype == torch.bfloat16
    assert taken == [False]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}, {"dropout": 0.3}, {"bias": False}], ids=str)
def test_without_gradients(taken, monkeypatch, mode, options):
    encoder = model(**options)

    def run():
        torch.manual_seed(1)
        with mode():
            return encoder(source(), src_key_padding_mask=PADDING)

    out = run()
    assert taken == [True]
    assert not out.requires_grad
    with monkeypatch.context() as patch:
        patch.setattr("foci.nn.encoder.noted", lambda *_: None)
        torch.testing.assert_close(out, run(), rtol=1e-5, atol=1e-6)
    encoder.requires_grad_(False)
    again = encoder(source(grad=False), src_key_padding_mask=PADDING)
    assert taken == [True, True]
    assert not again.requires_grad


def test_without_padding(taken):
    model()(source())
    assert not taken


def test_copies_and_pickles(taken):
    """What was noted of a module is of that one."""
    encoder = model()
    want = encoder(source(), src_key_padding_mask=PADDING)
    shallow = copy.copy(encoder)
    for other in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder)), shallow):
        torch.testing.assert_close(other(source(), src_key_padding_mask=PADDING), want, rtol=0, atol=0)
    shallow._modules = dict(shallow._modules, layers=copy.deepcopy(encoder.layers))
    with torch.no_grad():
        shallow.layers[1].norm2.bias.add_(1)
    torch.testing.assert_close(shallow(source(), src_key_padding_mask=PADDING)[~PADDING], want[~PADDING] + 1)
    torch.testing.assert_close(encoder(source(), src_key_padding_mask=PADDING), want, rtol=0, atol=0)
    assert all(taken)


@pytest.mark.filterwarnings("ignore")
def test_graphs_of_what_was_called(taken):
    encoder, x = model().eval(), source(grad=False)
    want = encoder(x, src_key_padding_mask=PADDING).detach()
    compiled = torch.compile(encoder, backend="eager", fullgraph=True)
    exported = torch.export.export(encoder, (x,), {"src_key_padding_mask": PADDING}).module()
    for graph in (compiled, exported, torch.jit.script(encoder)):
        torch.testing.assert_close(graph(x, src_key_padding_mask=PADDING), want, rtol=1e-5, atol=1e-6)
    assert taken == [True]
    for more in several(0, 3, 7)[1:]:
        resized, hidden = resize((x, PADDING), {x.shape[1]: x.shape[1] + more})
        torch.testing.assert_close(
            compiled(resized, src_key_padding_mask=hidden), encoder(resized, src_key_padding_mask=hidden), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("is_stack", [True, False], ids=["stack", "layer"])
def test_what_is_noted_keeps_nothing_alive(taken, is_stack):
    encoder = model()
    module = encoder if is_stack else encoder.layers[0]
    packing = foci.nn.Packing.from_mask(PADDING)
    module(packing.pack(source(grad=False)), src_key_padding_mask=packing)
    parameter = weakref.ref(encoder.layers[0].linear1.weight)
    gc.disable()
    try:
        del encoder, module
        assert parameter() is None
    finally:
        gc.enable()
    assert taken == [True]


@pytest.mark.parametrize("case", ["one", "one row", "apart", "in another order", "a gap"])
def test_rows_side_by_side_are_not_copied(case):
    base = torch.randn(1 if case == "one row" else 5, 9 if case == "a gap" else 8, 3)
    parts = base[:, :8].split((4, 2, 2), 1)
    if case == "apart":
        parts = tuple(t.clone() for t in parts)
    if case == "in another order":
        parts = parts[::-1]
    actual = _side_by_side(parts)
    assert torch.equal(actual, torch.cat(parts, 1).flatten(1))
    assert (actual.data_ptr() == base.data_ptr()) == (case == "one")
