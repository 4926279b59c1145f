"""Linear layers on padded memory are linear layers."""

import copy
import ctypes
import io

import pytest
import torch

import foci.nn
from foci.nn import linear


@pytest.fixture
def padded(monkeypatch):
    """Padding pays, everywhere."""
    monkeypatch.setattr(linear, "_pays", lambda layer, input: True)


def pair(k, n, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    theirs = torch.nn.Linear(k, n, bias, dtype=dtype)
    mine = foci.nn.PaddedLinear(k, n, bias, dtype=dtype)
    mine.load_state_dict(theirs.state_dict())
    return mine, theirs


def compare(mine, theirs, x):
    """Results and gradients."""
    results = []
    for layer in (mine, theirs):
        layer_input = x.clone().requires_grad_()
        out = layer(layer_input)
        gradients = torch.autograd.grad(out.sin().sum(), (layer_input, *layer.parameters()))
        results.append((out, *gradients))
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected)
        assert got.shape == expected.shape


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(64, 1023), (33, 64), (33, 1023), (64, 64), (1, 1)])
def test_values_and_gradients(sizes, bias):
    compare(*pair(*sizes, bias), torch.randn(2, 5, sizes[0]))


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(64, 1023), (33, 1022)])
def test_results_written_where_they_lie(monkeypatch, sizes, bias):
    monkeypatch.setattr(linear, "_is_written_by_rows", lambda rows, columns: True)
    mine, theirs = pair(*sizes, bias)
    compare(mine, theirs, torch.randn(2, 8, sizes[0]))
    out = mine(torch.randn(2, 8, sizes[0]))
    assert out.is_contiguous()
    out.mul_(2).sum().backward()  # it may be written to


@pytest.mark.gpu
@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [64, 65])
def test_on_a_gpu(rows, bias):
    mine, theirs = (layer.to("cuda", torch.bfloat16) for layer in pair(64, 30523, bias))
    x = torch.randn(rows * 63, 64, device="cuda", dtype=torch.bfloat16)
    out, expected = mine(x), theirs(x)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    gradients = (torch.autograd.grad(y.float().sin().sum(), tuple(layer.parameters())) for y, layer in ((out, mine), (expected, theirs)))
    for got, wanted in zip(*gradients):
        torch.testing.assert_close(got, wanted, rtol=5e-2, atol=0.5)


@pytest.mark.usefixtures("padded")
def test_rows_are_as_far_apart_as_good_ones():
    mine, _ = pair(64, 1023)
    assert mine(torch.randn(2, 3, 64)).stride() == (3 * 1024, 1024, 1)
    assert mine.weight.shape == (1023, 64)
    assert mine.weight.grad_fn is None
    mine(torch.randn(3, 64)).mul_(2).sum().backward()  # its result may be written to
    assert mine.weight.grad.shape == (1023, 64)


@pytest.mark.usefixtures("padded")
def test_training_leaves_zeros_behind():
    mine, theirs = pair(33, 127)
    x = torch.randn(16, 33)
    for layer in (mine, theirs):
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            optimizer.step()
    for got, expected in zip(mine.parameters(), theirs.parameters()):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    padded_weight = mine.weight.as_strided((128, 36), (36, 1))
    assert not padded_weight[127:].any()
    assert not padded_weight[:, 33:].any()


OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fused_optimizers_train_rows_without_gaps(optimizer):
    layers = pair(32, 127)
    x = torch.randn(16, 32)
    for layer in layers:
        fused = optimizer(layer.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            fused.zero_grad()
            layer(x).square().mean().backward()
            fused.step()
    for got, expected in zip(*(layer.parameters() for layer in layers)):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fused_optimizers_refuse_rows_with_gaps(optimizer):
    layer, _ = pair(33, 127)
    before = layer.weight.detach().clone()
    fused = optimizer([torch.nn.Parameter(torch.zeros(3)), *layer.parameters()], lr=0.1, fused=True)
    layer(torch.randn(16, 33)).square().mean().backward()
    with pytest.raises(ValueError, match="fused"):
        fused.step()
    torch.testing.assert_close(layer.weight, before, rtol=0, atol=0)


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda layer: layer.double().float(),
        lambda layer: torch.load(_saved(layer), weights_only=False),
        lambda layer: layer.load_state_dict(torch.load(_saved(layer.state_dict())), assign=True) and layer,
    ],
    ids=["deepcopy", "dtype and back", "saved", "assigned"],
)
def test_copies_are_padded_too(copied):
    mine, theirs = pair(33, 127)
    other = copied(mine)
    assert linear._is_stored(other)
    x = torch.randn(4, 33)
    torch.testing.assert_close(other(x), theirs(x))


def _saved(what):
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return file


@pytest.mark.usefixtures("padded")
def test_memory_that_is_not_its_own_is_not_read():
    mine, theirs = pair(33, 127)
    foreign = torch.full((200 * 36,), float("nan"))
    foreign.as_strided((127, 33), (36, 1)).copy_(mine.weight)
    mine.weight.data = foreign.as_strided((127, 33), (36, 1))
    x = torch.randn(4, 33)
    torch.testing.assert_close(mine(x), theirs(x))


@pytest.mark.usefixtures("padded")
def test_memory_that_was_freed_and_given_away_again_is_not_read():
    """There, others' tensors of the parameter's own size have its strides too: columns are of a good size, rows are not."""
    layer, x = foci.nn.PaddedLinear(64, 1023), torch.randn(9, 64)
    storage = layer.weight.untyped_storage()
    assert storage.nbytes() == 4 * 64 * 1024
    again = (ctypes.c_char * (4 * 64 * 1023)).from_address(storage.data_ptr())
    layer.weight.data = torch.frombuffer(again, dtype=torch.float32).view(1023, 64)
    assert layer.weight.data_ptr() == storage.data_ptr()
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    layer(x).sum().backward()


def test_state_dicts_are_those_of_torch():
    mine, theirs = pair(33, 127)
    assert {name: value.shape for name, value in mine.state_dict().items()} == {name: v.shape for name, v in theirs.state_dict().items()}
    theirs.load_state_dict(mine.state_dict())


@pytest.mark.usefixtures("padded")
def test_autocast():
    mine, theirs = pair(64, 127)
    x = torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        out = mine(x)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, theirs(x))
    out.float().sum().backward()
    assert mine.weight.grad.dtype == torch.float32


@pytest.mark.usefixtures("padded")
def test_second_derivatives():
    mine, _ = pair(5, 3, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(
        lambda x, w: linear._PaddedLinear.apply(x, w, None, torch.float64),
        (torch.randn(4, 5, dtype=torch.float64, requires_grad=True), mine.weight),
    )


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize(
    "given",
    [
        torch.randn(4, 32),
        torch.randn(4, 34),
        torch.randn(4, 33).half(),
        torch.randn(4, 33).double(),
        torch.ones(4, 33, dtype=torch.int64),
        torch.ones(()),
    ],
    ids=lambda t: f"{t.dtype} {[*t.shape]}",
)
def test_inputs_that_linear_refuses_are_refused(given):
    """Padded storage would take some of them."""
    layer, exact = foci.nn.PaddedLinear(33, 127), torch.nn.Linear(33, 127)
    messages = []
    for each in (layer, exact):
        with pytest.raises(RuntimeError) as caught:
            each(given)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_under_transforms():
    mine, theirs = pair(33, 127)
    x = torch.randn(4, 33)
    torch.testing.assert_close(torch.func.vmap(mine)(x), theirs(x))


def test_convert():
    model = torch.nn.Sequential(torch.nn.Embedding(1023, 64), torch.nn.Linear(64, 1023))
    model[1].weight = model[0].weight
    weight = model[0].weight
    assert foci.nn.convert(model, padding=True) is model
    assert type(model[1]) is foci.nn.PaddedLinear
    assert model[1].weight is weight is model[0].weight
    assert linear._is_stored(model[1])
    assert type(foci.nn.convert(torch.nn.Linear(2, 3))) is torch.nn.Linear


def test_whether_it_pays_is_measured():
    from foci.padding import Machine, find_table

    h200 = Machine("NVIDIA H200", 16, True, find_table("NVIDIA H200", "sm_90"))
    assert linear._is_faster(8192, 768, 30523, torch.bfloat16, h200)
    assert not linear._is_faster(8192, 768, 30528, torch.bfloat16, h200)
    assert not linear._is_faster(8192, 768, 30523, torch.bfloat16, Machine("unknown", 16, True, None))


@pytest.mark.usefixtures("padded")
def test_parameters_become_a_vector_by_reshape_and_back():
    mine, theirs = pair(33, 1023)
    with pytest.raises(RuntimeError, match="reshape"):
        torch.nn.utils.parameters_to_vector(mine.parameters())
    vector = torch.cat([p.reshape(-1) for p in mine.parameters()])
    assert torch.equal(vector, torch.nn.utils.parameters_to_vector(theirs.parameters()))
    vector.sin().sum().backward()
    torch.testing.assert_close(mine.weight.grad, theirs.weight.cos())
    for layer in (mine, theirs):
        torch.nn.utils.vector_to_parameters(2 * vector.detach(), layer.parameters())
    assert mine.weight.is_contiguous()
    compare(mine, theirs, torch.randn(2, 33))
    mine.load_state_dict(mine.state_dict())
    assert not mine.weight.is_contiguous()
    compare(mine, theirs, torch.randn(2, 33))
