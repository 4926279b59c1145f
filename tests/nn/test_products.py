"""Which library computes a linear layer's product on the CPU, and that nothing but speed depends on it."""

import contextlib
from unittest import mock

import pytest
import torch
from onlookers import Calling, Dispatching
from torch.nn import functional as F

import foci.nn
from foci.nn import linear_ops

ROWS, WIDE, OUT = 24, 40, 56
needs_operator = pytest.mark.skipif(not linear_ops._has_operator(), reason="torch without oneDNN")


@pytest.fixture
def chosen(monkeypatch):
    """As on a processor where oneDNN is the faster, at any size."""
    monkeypatch.setattr(linear_ops, "_is_onednn_faster", lambda: True)
    monkeypatch.setattr(linear_ops, "_WORTH", 1)


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def by_onednn(function):
    """What a function returns, and whether oneDNN was called."""
    with mock.patch.object(linear_ops, "_by_onednn", wraps=linear_ops._by_onednn) as spy:
        out = function()
    return out, spy.called


@needs_operator
@pytest.mark.parametrize("shape", [(ROWS, WIDE), (ROWS + 1, WIDE), (3, ROWS, WIDE), (3, ROWS + 1, WIDE)])
@pytest.mark.parametrize("bias", [None, rand(OUT)], ids=["without bias", "with bias"])
def test_product(chosen, shape, bias):
    x, weight = rand(*shape), rand(OUT, WIDE)
    with torch.no_grad():
        out, called = by_onednn(lambda: linear_ops.linear(x, weight, bias))
    assert called
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@needs_operator
@pytest.mark.parametrize("rows", [ROWS, ROWS + 1])
def test_relu_keeps_nan(chosen, rows):
    x, weight, bias = rand(rows, WIDE), rand(OUT, WIDE), rand(OUT)
    x[3, 5] = x[-1, 2] = torch.nan
    with torch.no_grad():
        out, called = by_onednn(lambda: linear_ops.linear_relu(x, weight, bias))
    assert called and out[[3, -1]].isnan().all() and not out[4:-1].isnan().any()
    torch.testing.assert_close(out, F.linear(x, weight, bias).relu(), equal_nan=True)


class Own(torch.Tensor):
    pass


# context of a call, and what becomes of its operands
LEFT_ALONE = {
    "gradients": (contextlib.nullcontext, lambda t: t.requires_grad_()),
    "double": (torch.no_grad, lambda t: t.double()),
    "bfloat16": (torch.no_grad, lambda t: t.bfloat16()),
    "turned": (torch.no_grad, lambda t: t.T.contiguous().T),
    "subclass": (torch.no_grad, lambda t: t.as_subclass(Own)),
    "forward derivatives": (torch.autograd.forward_ad.dual_level, lambda t: t),
    "disabled by the user": (lambda: torch.backends.mkldnn.flags(enabled=False), lambda t: t),
    "looked at": (Dispatching, lambda t: t),
    "heard": (Calling, lambda t: t),
}


@pytest.mark.parametrize("why", list(LEFT_ALONE))
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_left_to_torch(chosen, why):
    context, change = LEFT_ALONE[why]
    x, weight = change(rand(ROWS, WIDE)), change(rand(OUT, WIDE))
    with torch.set_grad_enabled(why == "gradients"), context():
        (out, called), want = by_onednn(lambda: linear_ops.linear(x, weight, None)), F.linear(x, weight)
    assert not called and torch.equal(out, want)


def test_autocast_is_left_to_torch(chosen):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert linear_ops.linear(rand(ROWS, WIDE), rand(OUT, WIDE), None).dtype == torch.bfloat16


def test_traced_graphs_have_torchs_operator(chosen):
    with torch.no_grad():
        traced = torch.jit.trace(lambda x, weight: linear_ops.linear(x, weight, None), (rand(ROWS, WIDE), rand(OUT, WIDE)))
    assert "aten::linear" in str(traced.graph) and "mkldnn" not in str(traced.graph)


def test_errors_are_torchs(chosen):
    for x, weight, bias in ((rand(ROWS, OUT), rand(OUT, WIDE), None), (rand(ROWS, WIDE), rand(OUT, WIDE), rand(WIDE))):
        with torch.no_grad(), pytest.raises(RuntimeError) as want:
            F.linear(x, weight, bias)
        with torch.no_grad(), pytest.raises(RuntimeError) as got:
            linear_ops.linear(x, weight, bias)
        assert str(got.value) == str(want.value)


def test_few_numbers_of_rows():
    rounded_counts = {linear_ops._rounded_down(rows) for rows in range(256, 4096)}
    assert len(rounded_counts) == 4 * linear_ops._STEPS
    assert all(7 * rows < 8 * linear_ops._rounded_down(rows) <= 8 * rows for rows in range(1, 5000))


@needs_operator
def test_small_products_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(linear_ops, "_is_onednn_faster", lambda: True)
    threads = torch.get_num_threads()
    with torch.no_grad():
        for rows, large in ((linear_ops._WORTH * threads // 1024**2, True), (linear_ops._WORTH * threads // 1024**2 - 1, False)):
            assert by_onednn(lambda n=rows: linear_ops.linear(rand(n, 1024), rand(1024, 1024), None))[1] == large


@pytest.mark.parametrize(
    ("vendor", "width", "faster"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False), ("", "AVX512", False)],
)
def test_where_onednn_is_faster(monkeypatch, vendor, width, faster):
    monkeypatch.setattr(linear_ops, "_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: width)
    for library in (torch.backends.mkl, torch.backends.mkldnn):
        monkeypatch.setattr(library, "is_available", lambda: True)
    assert linear_ops._is_onednn_faster.__wrapped__() == (faster and linear_ops._has_operator())


@needs_operator
def test_training_and_evaluation_agree(chosen):
    torch.manual_seed(0)
    layer = foci.nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
    encoder = foci.nn.TransformerEncoder(layer, 2)
    x, hidden = rand(3, 20, 64), torch.arange(20) >= torch.tensor([20, 7, 12])[:, None]
    want = encoder(x, src_key_padding_mask=hidden).detach()
    with torch.no_grad():
        out, called = by_onednn(lambda: encoder.eval()(x, src_key_padding_mask=hidden))
    assert called
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
