"""A layer that is one node of autograd gives what its modules give, derivatives of every order included, and is one only where it may be."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import foci
import foci.nn
from foci import recall
from foci.nn import encoder

B, S, E, H = 3, 9, 32, 4
LENGTHS = torch.tensor([9, 4, 6])
PADDING = torch.arange(S) >= LENGTHS[:, None]
GROUPS = torch.arange(S) // 2


@pytest.fixture
def taken(monkeypatch):
    """Whether each layer that was called was one node."""
    found, as_node = [], encoder.layer_as_node

    def note(*args):
        out = as_node(*args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(encoder, "layer_as_node", note)
    return found


def model(*, dropout=0.0, activation="relu", norm_first=False, bias=True, dtype=torch.float32, layers=2, **options):
    torch.manual_seed(0)
    layer = foci.nn.TransformerEncoderLayer(
        E, H, 48, dropout, activation, batch_first=True, norm_first=norm_first, bias=bias, dtype=dtype, **options
    )
    return foci.nn.TransformerEncoder(layer, layers)


def outcome(encoder, x, **options):
    """Output, and gradients of the input and all parameters."""
    torch.manual_seed(1)
    y = encoder(x, src_key_padding_mask=PADDING, **options)
    wanted = [t for t in (x, *encoder.parameters()) if t.requires_grad]
    weights = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    return [y, *torch.autograd.grad(y, wanted, weights)]


def by_modules(monkeypatch, encoder, x, **options):
    with monkeypatch.context() as patch:
        patch.setattr("foci.nn.encoder.layer_as_node", lambda *_: None)
        return outcome(encoder, x, **options)


def source(dtype=torch.float32, *, grad=True):
    return torch.randn(B, S, E, dtype=dtype, generator=torch.Generator().manual_seed(3)).requires_grad_(grad)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
def test_as_its_modules(taken, monkeypatch, norm_first, activation, dropout, bias):
    encoder = model(dropout=dropout, activation=activation, norm_first=norm_first, bias=bias)
    for grad in (True, False):
        x = source(grad=grad)
        found, sought = outcome(encoder, x), by_modules(monkeypatch, encoder, x)
        torch.testing.assert_close(found, sought, rtol=1e-5, atol=1e-6)
    assert taken == [True] * 4


@pytest.mark.parametrize("frozen", ["linear1.weight", "in_proj_bias", "norm", "out_proj", "layers.0"])
def test_parameters_that_do_not_learn(taken, monkeypatch, frozen):
    encoder = model()
    for name, parameter in encoder.named_parameters():
        parameter.requires_grad_(frozen not in name)
    for grad in (True, False):
        x = source(grad=grad)
        torch.testing.assert_close(outcome(encoder, x), by_modules(monkeypatch, encoder, x), rtol=1e-5, atol=1e-6)
    assert taken == [True, True, frozen != "layers.0", True]  # nothing to learn, no node


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

    found = twice()
    assert taken == [True, True]
    with monkeypatch.context() as patch:
        patch.setattr("foci.nn.encoder.layer_as_node", lambda *_: None)
        torch.testing.assert_close(found, twice())


def test_many_cotangents_at_once(taken):
    encoder, x = model(dtype=torch.float64), source(torch.float64)
    out = encoder(x, src_key_padding_mask=PADDING)
    many = torch.randn(2, *out.shape, dtype=out.dtype)
    together = torch.autograd.grad(out, x, many, is_grads_batched=True, retain_graph=True)[0]
    apart = [torch.autograd.grad(out, x, one, retain_graph=True)[0] for one in many]
    torch.testing.assert_close(together, torch.stack(apart))
    assert taken == [True, True]


@pytest.mark.parametrize(
    "options",
    [{"mask": foci.masks.window(3)}, {"num_kv_heads": 2}, {"mask": lambda b, h, i, j, ids=GROUPS: ids[i] >= ids[j]}],
    ids=["window", "grouped", "captured"],
)
def test_attention_of_other_kinds(taken, monkeypatch, options):
    encoder, x = model(**options), source()
    torch.testing.assert_close(outcome(encoder, x), by_modules(monkeypatch, encoder, x), rtol=1e-5, atol=1e-6)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(S)
    for given in ({"mask": causal, "is_causal": True}, {"mask": causal}, {"mask": causal == -torch.inf}):
        torch.testing.assert_close(outcome(encoder, x, **given), by_modules(monkeypatch, encoder, x, **given), rtol=1e-5, atol=1e-6)
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


def autocast(encoder, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        encoder(x, src_key_padding_mask=PADDING)


def learned_score(encoder, x):
    table = torch.zeros(H, requires_grad=True)
    encoder.layers[1].self_attn.score = encoder.layers[0].self_attn.score = lambda s, b, h, i, j: s + table[h]
    encoder(x, src_key_padding_mask=PADDING)


def other_activation(encoder, x):
    for layer in encoder.layers:
        layer.activation = torch.tanh
    encoder(x, src_key_padding_mask=PADDING)


def forward_gradients(encoder, x):
    import torch.autograd.forward_ad as ad

    packing = foci.nn.Packing.from_mask(PADDING)
    tokens = packing.pack(x.detach())
    with ad.dual_level():
        out = encoder(ad.make_dual(tokens, torch.ones_like(tokens)), src_key_padding_mask=packing)
        assert ad.unpack_dual(out).tangent is not None


def rotary(encoder, x):
    for layer in encoder.layers:
        layer.self_attn.rotary = foci.nn.RotaryEmbedding(E // H)
    encoder(x, src_key_padding_mask=PADDING)


@pytest.mark.parametrize("way", [autocast, learned_score, other_activation, forward_gradients, rotary])
def test_what_is_called_as_modules(taken, way):
    way(model(), source())
    assert not any(taken)


def test_without_gradients_and_without_padding(taken):
    encoder = model()
    with torch.no_grad():
        encoder(source(), src_key_padding_mask=PADDING)
    encoder(source())
    assert not taken


def test_observers_see_its_attention(taken):
    encoder = copy.deepcopy(model())
    with foci.observe() as log:
        encoder(source(), src_key_padding_mask=PADDING).sum().backward()
    assert taken == [True, True]
    assert len(log.calls) == len(log.backward_calls) == 2


@pytest.mark.parametrize("causal", [False, True])
def test_batches_of_other_lengths_make_one_known_call(monkeypatch, causal):
    monkeypatch.setattr(recall, "_known", type(recall._known)())
    options = {"mask": torch.nn.Transformer.generate_square_subsequent_mask(S), "is_causal": True} if causal else {}
    encoder = model()
    for lengths in ((9, 4, 6), (8, 1, 1), (7, 7, 7)):
        out = encoder(source(), src_key_padding_mask=torch.arange(S) >= torch.tensor(lengths)[:, None], **options)
        out.sum().backward()
    assert len(recall._known) == 1
