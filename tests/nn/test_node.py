"""Layers give what their modules give, derivatives of every order included: by autograd's own nodes, and as one node."""

import copy
import warnings

import pytest
import torch
from padded_stacks import PADDING, S, by_modules, model, outcome, source
from torch.utils.checkpoint import checkpoint

import foci
import foci.nn
from foci import call_cache
from foci.nn import fused_encoder, layer_autograd

GROUPS = torch.arange(S) // 2


@pytest.fixture(autouse=True, params=["own nodes", "one node"])
def nodes(request, monkeypatch):
    """By either way; as one node where it may be."""
    if request.param == "own nodes":
        yield
        return
    calls = []

    def note(*args):
        calls.append(args)
        return layer_autograd.compute_layer_saving(*args)

    monkeypatch.setattr(fused_encoder, "_AS_NODES", {"cpu"})
    monkeypatch.setattr(fused_encoder, "compute_layer_saving", note)
    yield
    assert bool(calls) == ("captured" not in request.node.name)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
def test_as_its_modules(taken, monkeypatch, norm_first, activation, dropout, bias):
    encoder = model(dropout=dropout, activation=activation, norm_first=norm_first, bias=bias)
    for grad in (True, False):
        x = source(grad=grad)
        actual, sought = outcome(encoder, x), by_modules(monkeypatch, encoder, x)
        torch.testing.assert_close(actual, sought, rtol=1e-5, atol=1e-6)
    assert taken == [True] * 2


@pytest.mark.parametrize("frozen", ["linear1.weight", "in_proj_bias", "norm", "out_proj", "layers.0"])
def test_parameters_that_do_not_learn(taken, monkeypatch, frozen):
    encoder = model()
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_(frozen not in name)
    for grad in (True, False):
        x = source(grad=grad)
        torch.testing.assert_close(outcome(encoder, x), by_modules(monkeypatch, encoder, x), rtol=1e-5, atol=1e-6)
    assert taken == [True, True]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_second_derivatives(taken, monkeypatch, norm_first, dropout):
    encoder, x = model(norm_first=norm_first, activation="gelu", dropout=dropout, dtype=torch.float64), source(torch.float64)

    def twice():
        torch.manual_seed(1)
        out = encoder(x, src_key_padding_mask=PADDING)
        wanted = [x, *encoder.parameters()]
        first = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), wanted)]

    actual = twice()
    assert taken == [True]
    with monkeypatch.context() as patch:
        patch.setattr("foci.nn.encoder.noted", lambda *_: None)
        torch.testing.assert_close(actual, twice())


def test_many_cotangents_at_once(taken):
    encoder, x = model(dtype=torch.float64), source(torch.float64)
    out = encoder(x, src_key_padding_mask=PADDING)
    many = torch.randn(2, *out.shape, dtype=out.dtype)
    together = torch.autograd.grad(out, x, many, is_grads_batched=True, retain_graph=True)[0]
    apart = [torch.autograd.grad(out, x, one, retain_graph=True)[0] for one in many]
    torch.testing.assert_close(together, torch.stack(apart))
    assert taken == [True]


@pytest.mark.parametrize(
    "options",
    [{"mask": foci.masks.window(3)}, {"num_kv_heads": 2}, {"mask": lambda b, h, i, j, ids=GROUPS: ids[i] >= ids[j]}],
    ids=["window", "grouped", "captured"],
)
def test_attention_of_other_kinds(taken, monkeypatch, options):
    encoder, x = model(**options), source()
    torch.testing.assert_close(outcome(encoder, x), by_modules(monkeypatch, encoder, x), rtol=1e-5, atol=1e-6)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(S)
    for kwargs in ({"mask": causal, "is_causal": True}, {"mask": causal}, {"mask": causal == -torch.inf}):
        torch.testing.assert_close(outcome(encoder, x, **kwargs), by_modules(monkeypatch, encoder, x, **kwargs), rtol=1e-5, atol=1e-6)
    assert all(taken)


def test_kept_elsewhere_and_computed_again(taken, monkeypatch):
    encoder, x = model(dropout=0.2), source()
    sought = by_modules(monkeypatch, encoder, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        torch.testing.assert_close(outcome(encoder, x), sought, rtol=1e-5, atol=1e-6)

    class Again(torch.nn.Module):
        def forward(self, x, src_key_padding_mask):
            return checkpoint(lambda x: encoder(x, src_key_padding_mask=src_key_padding_mask), x, use_reentrant=False)

        def parameters(self):
            return encoder.parameters()

    torch.testing.assert_close(outcome(Again(), x), sought, rtol=1e-5, atol=1e-6)
    assert all(taken)


def test_a_parameter_changed_in_between_is_an_error():
    encoder, x = model(), source()
    out = encoder(x, src_key_padding_mask=PADDING)
    with torch.no_grad():
        encoder.layers[0].linear2.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def kept(encoder, x):
    """Bytes that autograd keeps for backward, each once, but for parameters."""
    storage_sizes, lasting = {}, {p.data_ptr() for p in encoder.parameters()}

    def pack(t):
        if t.data_ptr() not in lasting:
            storage_sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = encoder(x, src_key_padding_mask=PADDING)
    return sum(storage_sizes.values()), out


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}, {"dropout": 0.3}], ids=str)
def test_no_more_is_kept_for_backward(taken, monkeypatch, options):
    encoder = model(**options)
    as_nodes, out = kept(encoder, source())
    with monkeypatch.context() as patch:
        patch.setattr("foci.nn.encoder.noted", lambda *_: None)
        as_modules, other = kept(encoder, source())
    assert as_nodes <= as_modules
    assert out.shape == other.shape
    assert taken == [True]


def test_what_is_read_is_let_go(taken):
    """Not in a second backward pass of one graph."""
    encoder, x = model(activation="gelu"), source()
    out = encoder(x, src_key_padding_mask=PADDING)
    first = torch.autograd.grad(out.sum(), [x, *encoder.parameters()], retain_graph=True)
    again = torch.autograd.grad(out.sum(), [x, *encoder.parameters()])
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out.sum(), x)


@pytest.mark.parametrize("norm_first", [False, True])
def test_given_gradients_stay_as_they_are(taken, norm_first):
    layer, packing = model(norm_first=norm_first).layers[0], foci.nn.Packing.from_mask(PADDING)
    x = packing.pack(source(grad=False)).requires_grad_()
    dy = torch.randn(x.shape)
    dy_copy = dy.clone()
    layer(x, None, packing).backward(dy)
    assert torch.equal(dy, dy_copy)
    assert taken == [True]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_numerical_derivatives(taken, norm_first, activation):
    torch.manual_seed(0)
    layer = foci.nn.TransformerEncoderLayer(4, 2, 6, 0.0, activation, batch_first=True, norm_first=norm_first, dtype=torch.float64)
    packing = foci.nn.Packing(torch.tensor([0, 3, 5]), 3, (2, 3))
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *_: layer(x, None, packing), (x, *layer.parameters()))
    if activation == "gelu":
        assert torch.autograd.gradgradcheck(lambda *_: layer(x, None, packing), (x, *list(layer.parameters())[:2]))
    assert all(taken)


def test_hooks_of_parameters_and_anomalies(taken):
    encoder, x = model(), source()
    heard = []
    for name, parameter in encoder.named_parameters():
        parameter.register_hook(lambda g, name=name: heard.append(("grad", name)))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: heard.append(("accumulated", name)))
    with torch.autograd.detect_anomaly(check_nan=True), warnings.catch_warnings():
        encoder(x, src_key_padding_mask=PADDING).sum().backward()
    names = [name for name, _ in encoder.named_parameters()]
    assert sorted(heard) == sorted((kind, name) for name in names for kind in ("grad", "accumulated"))
    assert taken == [True]


def test_observers_see_its_attention(taken):
    encoder = copy.deepcopy(model())
    with foci.observe() as log:
        encoder(source(), src_key_padding_mask=PADDING).sum().backward()
    assert taken == [True]
    assert len(log.calls) == len(log.backward_calls) == 2


@pytest.mark.parametrize("causal", [False, True])
def test_batches_of_other_lengths_make_one_known_call(monkeypatch, causal):
    monkeypatch.setattr(call_cache, "_calls", type(call_cache._calls)())
    options = {"mask": torch.nn.Transformer.generate_square_subsequent_mask(S), "is_causal": True} if causal else {}
    encoder = model()
    for lengths in ((9, 4, 6), (8, 1, 1), (7, 7, 7)):
        out = encoder(source(), src_key_padding_mask=torch.arange(S) >= torch.tensor(lengths)[:, None], **options)
        out.sum().backward()
    assert len(call_cache._calls) == 1
