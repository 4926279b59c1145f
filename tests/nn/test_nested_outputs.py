"""Nested outputs that learn: a kind of NestedTensor that does what torch's does, whatever is asked of it."""

import copy
import io

import pytest
import torch
from torch.nested._internal.nested_tensor import NestedTensor

import foci.nn
from compiled import several
from foci.compat import nested as kinds

LENGTHS = [7, 3, 5, 9]
CONSUMERS = {
    "values": lambda out: (out.values() ** 2).sum(),
    "product": lambda out: (out * 2).values().square().sum(),
    "pointwise": lambda out: out.sin().values().square().sum(),
    "padded": lambda out: torch.nested.to_padded_tensor(out, 0.0).square().sum(),
    "parts": lambda out: sum(part.square().sum() for part in out.unbind()),
    "norm": lambda out: torch.nn.functional.layer_norm(out, (16,)).values()[:, 0].square().sum(),
    "linear": lambda out: torch.nn.functional.linear(out, torch.ones(4, 16)).values().square().sum(),
    "turned": lambda out: out.transpose(1, 2).transpose(1, 2).values().square().sum(),
    "sum": lambda out: (out + out).values().square().sum(),
    "beside its own": lambda out: (out.detach() * out).values().sum(),
    "heads": lambda out: out.view(len(LENGTHS), -1, 2, 8).values().square().sum(),
    "copy": lambda out: out.clone().values().square().sum(),
    "twice": lambda out: (out.values() * out.values().sum(1, keepdim=True)).sum(),
}


@pytest.fixture
def batch():
    torch.manual_seed(0)
    return torch.nested.nested_tensor([torch.randn(n, 16) for n in LENGTHS], layout=torch.jagged)


@pytest.fixture
def encoder():
    torch.manual_seed(1)
    return foci.nn.TransformerEncoder(foci.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)


def gradients(encoder, batch, consumer):
    encoder.zero_grad()
    consumer(encoder(batch)).backward()
    return [p.grad.clone() for p in encoder.parameters()]


def by_torch(monkeypatch, run):
    """The same through torch's own kind."""
    with monkeypatch.context() as patched:
        patched.setattr(foci.nn.packing, "LearnedNested", NestedTensor)
        return run()


@pytest.mark.parametrize("name", CONSUMERS)
def test_gradients_are_those_through_torchs_own(monkeypatch, encoder, batch, name):
    actual = gradients(encoder, batch, CONSUMERS[name])
    want = by_torch(monkeypatch, lambda: gradients(encoder, batch, CONSUMERS[name]))
    assert all(map(torch.equal, actual, want))


@pytest.mark.parametrize("name", ["values", "padded", "norm", "turned", "beside its own", "copy"])
def test_is_taken_by_compiled_functions(encoder, batch, name):
    torch.compiler.reset()
    consumer = torch.compile(CONSUMERS[name], backend="aot_eager", fullgraph=True)
    for more in several(0, 1, 4):
        parts = [torch.cat([part, part[:more]]) for part in batch.unbind()]
        one_batch = torch.nested.nested_tensor(parts, layout=torch.jagged)
        want, actual = (gradients(encoder, one_batch, function) for function in (CONSUMERS[name], consumer))
        for one, other in zip(actual, want, strict=True):
            torch.testing.assert_close(one, other)


def test_is_of_its_kind_where_it_learns_alone(encoder, batch):
    assert type(encoder(batch)) is kinds.LearnedNested
    with torch.no_grad():
        assert type(encoder(batch)) is NestedTensor


def test_values_are_a_view(encoder, batch):
    out = encoder(batch)
    values = out.values()
    assert values.data_ptr() == out._values.data_ptr()
    assert values._base is out


def test_gradients_of_values_ask_the_output_for_its_size_and_layout_alone(monkeypatch, encoder, batch):
    values = encoder(batch).values()
    asked, answer = [], kinds.LearnedNested.__torch_dispatch__.__func__
    monkeypatch.setattr(kinds.LearnedNested, "__torch_dispatch__", classmethod(lambda *args: asked.append(args[1]) or answer(*args)))
    values.sum().backward()
    assert {str(function) for function in asked} <= {"aten.sym_size.default", "prim.layout.default"}


def test_values_are_not_written_to_where_they_learn(encoder, batch):
    values = encoder(batch).values()
    with pytest.raises(RuntimeError, match="view"):  # torch's own fail in backward
        values.mul_(2)


@pytest.mark.parametrize("keeps", [False, True])
def test_values_learn_through_saved_tensors_hooks_and_twice(encoder, batch, keeps):
    want = gradients(encoder, batch, CONSUMERS["values"])
    encoder.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        loss = CONSUMERS["values"](encoder(batch))
    loss.backward(retain_graph=keeps)
    if keeps:
        encoder.zero_grad()
        loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(encoder.parameters(), want, strict=True))


def test_the_gradient_of_the_output_itself(monkeypatch, encoder, batch):
    def run():
        out = encoder(batch)
        out.retain_grad()
        seen = []
        out.register_hook(lambda g: seen.append(g.values().clone()))
        (out.values() * 3).sum().backward()
        return out.grad.values(), seen[0], out.grad.offsets()

    actual, want = run(), by_torch(monkeypatch, run)
    assert all(map(torch.equal, actual, want))
    assert actual[2] is batch.offsets()


def test_derivatives_of_derivatives(monkeypatch, encoder, batch):
    def run():
        parameters = list(encoder.parameters())
        first = torch.autograd.grad((encoder(batch).values() ** 2).sum(), parameters, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), parameters)

    for one, other in zip(run(), by_torch(monkeypatch, run), strict=True):
        torch.testing.assert_close(one, other)


def test_is_saved_and_copied_as_torchs_own(encoder, batch):
    out = encoder(batch).detach()
    file = io.BytesIO()
    torch.save(out, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is NestedTensor
    assert torch.equal(loaded.values(), out.values())
    assert torch.equal(copy.deepcopy(out).values(), out.values())


def test_goes_into_the_next_module(encoder, batch):
    actual = gradients(encoder, encoder(batch).detach(), CONSUMERS["values"])
    plain = torch.nested.nested_tensor_from_jagged(encoder(batch).values().detach(), batch.offsets())
    want = gradients(encoder, plain, CONSUMERS["values"])
    assert all(map(torch.equal, actual, want))
    twice = gradients(encoder, batch, lambda out: (encoder(out).values() ** 2).sum())
    assert all(torch.isfinite(g).all() for g in twice)
