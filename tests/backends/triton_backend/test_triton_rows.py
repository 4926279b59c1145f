"""Norms of sums, derivatives and sums of columns between a layer's products, against torch's operations in float64."""

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

import foci.nn  # noqa: E402
from foci.backends.gpu import layernorm, layernorm_kernels  # noqa: E402
from foci.backends.gpu.layernorm import Backward, Rows  # noqa: E402
from foci.backends.row_kernels import Column, Norm  # noqa: E402
from foci.nn import fused_encoder  # noqa: E402
from foci.nn.fused_rowwise import layer_rows  # noqa: E402

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu"
runs = [
    pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or the interpreter"),
    *([] if DEVICE == "cpu" else [pytest.mark.gpu]),
]
ERRORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 4e-2 if IS_INTERPRETED else 1e-2}  # the interpreter cuts bfloat16 off
NORM, FIRST, BIAS = 10, 4, 3


def rand(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def assert_close(actual, sought):
    scale = float(sought.abs().max().clamp(min=1e-3))
    assert float((actual.double() - sought).abs().max()) <= scale * ERRORS[actual.dtype]


def normed(x, scale, shift):
    return torch.nn.functional.layer_norm(x.double(), x.shape[1:], *(None if t is None else t.double() for t in (scale, shift)))


class TestRows:
    pytestmark = runs

    @pytest.mark.parametrize("dtype", ERRORS, ids=str)
    @pytest.mark.parametrize("count, width", [(1, 24), (7, 768), (77, 33)])
    @pytest.mark.parametrize("has", [True, False], ids=["scaled", "bare"])
    def test_norm_of_a_sum(self, dtype, count, width, has):
        x, y = rand(count, width, dtype=dtype), rand(width, count, dtype=dtype).T.contiguous()
        total, stats = x + y, torch.empty(2, 2, count, device=DEVICE)
        scale, shift = (rand(width, dtype=dtype), rand(width, dtype=dtype) + 1) if has else (None, None)
        place = Rows.of(x)
        kept = x.clone()
        out = place.norm(kept, y, scale, shift, 1e-5, stats, 1, keeps=True)
        assert_close(kept, total.double())
        assert_close(out, normed(kept, scale, shift))
        apart = kept.double() - kept.double().mean(1, keepdim=True)
        if dtype != torch.bfloat16 or not IS_INTERPRETED:
            assert_close(stats[1, 0], kept.double().mean(1))
            assert_close(stats[1, 1], (apart.square().mean(1) + 1e-5).rsqrt())
        inside = x.clone()
        assert place.norm(inside, y, scale, shift, 1e-5, keeps=False) is inside
        # compiled apart, so that additions and products may be joined otherwise
        ulp = torch.finfo(dtype).eps * float(out.abs().max())
        torch.testing.assert_close(inside, out, rtol=0, atol=(4 if dtype == torch.float32 else 1) * ulp)
        alone = place.norm(kept, None, scale, shift, 1e-5, keeps=False)
        assert_close(alone, normed(kept, scale, shift))

    @pytest.mark.parametrize("dtype", ERRORS, ids=str)
    @pytest.mark.parametrize("count, width, hidden", [(1, 24, 48), (77, 33, 301), (300, 256, 512)])
    @pytest.mark.parametrize("kind", [1, 2])
    def test_derivatives_and_their_sums(self, dtype, count, width, hidden, kind):
        x, dy, added = rand(count, width, dtype=dtype), rand(count, width, dtype=dtype).flip(0), rand(count, width, dtype=dtype).flip(1)
        scale, dh, h = rand(width, dtype=dtype), rand(count, hidden, dtype=dtype), rand(count, hidden, dtype=dtype).flip(0)
        mean, spread = x.double().mean(1), (x.double().var(1, correction=0) + 1e-5).rsqrt()
        stats = torch.stack([mean, spread])[None].repeat(2, 1, 1).float()
        apart = (x.double() - mean[:, None]) * spread[:, None]
        sums = Backward(
            dtype, width, [Norm(NORM, (NORM, NORM + 1, BIAS), True, True, True, True)], [Column(FIRST, hidden, kind), Column(1, hidden, 0)]
        ).of(dy)
        weighed = dy.double() * scale.double()
        inner = weighed - weighed.mean(1, keepdim=True) - apart * (weighed * apart).mean(1, keepdim=True)
        dx = sums.norm(NORM, dy.clone(), x, scale, stats, 1, added)
        assert_close(dx, inner * spread[:, None] + added.double())
        sums.columns(1, dh)
        before = h.double().requires_grad_()
        behind = torch.relu(before) if kind == 1 else torch.nn.functional.gelu(before)
        (sought,) = torch.autograd.grad(behind, before, dh.double())
        actual = dh.clone()
        sums.columns(FIRST, actual, h.relu() if kind == 1 else h)
        assert_close(actual, sought)
        by_name = dict(sums.finish())
        assert by_name.keys() == {NORM, NORM + 1, BIAS, FIRST, 1}
        expected = {NORM: dy.double() * apart, NORM + 1: dy.double(), BIAS: dx.double(), FIRST: actual.double(), 1: dh.double()}
        for name, terms in expected.items():
            assert_close(by_name[name], terms.sum(0))
            assert by_name[name].data_ptr() % 16 == 0

    def test_rows_that_lie_otherwise(self):
        x, wide = rand(5, 32, dtype=torch.float32), rand(5, 64, dtype=torch.float32)
        place = Rows.of(x)
        assert place.norm(x, wide[:, :32], None, None, 1e-5, keeps=True) is None
        assert place.norm(x, None, wide.flatten()[1:33], None, 1e-5, keeps=False) is None
        assert place.norm(wide[:, 32:], None, None, None, 1e-5, keeps=False) is None
        sums = Backward(torch.float32, 32, [], [Column(1, 32, 0)]).of(x)
        sums.columns(1, wide[:, 1:33])
        ((_, actual),) = sums.finish()
        assert_close(actual, wide[:, 1:33].double().sum(0))
        assert Rows.of(x.double()) is None
        assert Rows.of(x.new_empty(1, 10000)) is None

    @pytest.mark.parametrize("drop", [0.0, 0.3])
    @pytest.mark.parametrize("norm_first", [False, True])
    def test_layers_of_24_features(self, monkeypatch, norm_first, drop):
        monkeypatch.setattr(fused_encoder, "_AS_NODES", frozenset((DEVICE,)))
        torch.manual_seed(0)
        layer = foci.nn.TransformerEncoderLayer(24, 2, 40, drop, "gelu", batch_first=True, norm_first=norm_first)  # relu has a step
        layer.self_attn.dropout = 0.0
        model = foci.nn.TransformerEncoder(layer, 2).to(DEVICE)
        packing = foci.nn.Packing(torch.tensor([0, 3, 12], device=DEVICE), 9, (2, 9))
        taken = []

        def run(by_rows):
            def place(*args, **options):
                rows = layer_rows(*args, **options) if by_rows else None
                taken.append(rows is not None)
                return rows

            monkeypatch.setattr(fused_encoder, "layer_rows", place)
            torch.manual_seed(1)
            x = rand(12, 24, dtype=torch.float32).requires_grad_()
            out = model(x, src_key_padding_mask=packing)
            return out, *torch.autograd.grad(out, (x, *model.parameters()), rand(12, 24, dtype=torch.float32).flip(0))

        for actual, sought in zip(run(by_rows=True), run(by_rows=False), strict=True):
            assert_close(actual.detach(), sought.detach().double())
        assert taken == [True, False]


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile_without_spills(arch, stand_in):
    from triton.runtime.jit import MockTensor

    kernels = stand_in({layernorm_kernels: ("norm_sum", "norm_gradient", "column_sums", "finish_sums")}, arch)
    for cached in (layernorm._norm_sum, layernorm._norm_gradient, layernorm._column_sums, layernorm._finish):
        cached.cache_clear()
    half, single = torch.bfloat16, torch.float32
    for kernel in (
        layernorm._norm_sum(half, 768, True, True, True, True, True)[0], layernorm._norm_gradient(half, 768, 3, True, True)[0],
        layernorm._norm_gradient(half, 8192, 3, True, True)[0], layernorm._norm_gradient(single, 1024, 3, True, True)[0], layernorm._column_sums(half, 8, 2), layernorm._finish(half),
    ):  # fmt: skip
        kernel._function[(1,)](*map(MockTensor.wrap_dtype, kernel._example), **kernel._options)
    for cached in (layernorm._norm_sum, layernorm._norm_gradient, layernorm._column_sums, layernorm._finish):
        cached.cache_clear()
    assert [one.name for one in kernels] == ["norm_sum", *["norm_gradient"] * 3, "column_sums", "finish_sums"]
    for one in kernels:
        assert not one.stack, one.name
        assert "ld.global.v4" in one.ptx or "v4.b32" in one.ptx, one.name
