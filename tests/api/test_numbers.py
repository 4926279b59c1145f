"""Numbers that the accumulation type cannot hold, and captured tensors that are too short: the same on every backend."""

import math

import pytest
import torch

import foci

BACKENDS = ("reference", "blocked", "cpu")
Q, K, V = torch.randn(3, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
PLAIN = V.double().mean(2, keepdim=True).expand(V.shape)


# SDPA-07
@pytest.mark.parametrize("backend", [*BACKENDS, "aten"])
@pytest.mark.parametrize("scale", [1e39, -1e300, 10**400, -(10**400), math.inf, math.nan], ids=lambda scale: format(float(str(scale)), "g"))
def test_scales_beyond_float32(backend, scale):
    with foci.use(backend), pytest.raises(ValueError, match="^scale must be "):
        foci.attention(Q, K, V, scale=scale)
    with pytest.raises(ValueError, match="^scale must be "):
        foci.scaled_dot_product_attention(Q, K, V, scale=scale)


# SDPA-07
@pytest.mark.parametrize("backend", [*BACKENDS, "aten"])
@pytest.mark.parametrize("scale", [1e-40, 1e-46, -1e-46, 1e-300, 0.0])
def test_scales_near_zero(backend, scale):
    q = Q.clone().requires_grad_()
    with foci.use(backend):
        out = foci.attention(q, K, V, scale=scale)
        (gradient,) = torch.autograd.grad(out.sum(), q)
    torch.testing.assert_close(out.double(), PLAIN, atol=1e-6, rtol=1e-6)
    assert gradient.abs().max() < 1e-30


def test_float64_holds_more():
    wide = [t.double() for t in (Q, K, V)]
    torch.testing.assert_close(foci.attention(wide[0] * 1e-39, *wide[1:], scale=1e39), foci.attention(*wide, scale=1.0))
    torch.testing.assert_close(
        foci.attention(wide[0] * 1e-39, *wide[1:], scale=1.0, score=lambda s, *_: s * 1e39), foci.attention(*wide, scale=1.0)
    )


# FLEX-02
@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_of_functions(backend):
    with foci.use(backend):
        with pytest.raises(ValueError, match=r"holds the number 1e\+39, which is beyond float32.*math\.inf"):
            foci.attention(Q, K, V, score=lambda s, b, h, i, j: s * 1e39)
        with pytest.raises(ValueError, match=r"holds the number -1e\+39.*write -math\.inf"):
            foci.attention(Q, K, V, score=lambda s, b, h, i, j: torch.where(i >= j, s, -1e39))
        with pytest.raises(TypeError, match=r"test_numbers.py:\d+: the integer 1\.\d+e\+19.*64 bits"):
            foci.attention(Q, K, V, mask=lambda b, h, i, j: i < 2**64)
        out = foci.attention(Q, K, V, score=lambda s, b, h, i, j: s * 1e-46)
        torch.testing.assert_close(out.double(), PLAIN, atol=1e-6, rtol=1e-6)


def test_dropout_of_a_huge_integer():
    with pytest.raises(ValueError, match="^dropout_p must be from 0 to 1; got inf"):
        foci.attention(Q, K, V, dropout_p=10**400)


# FLEX-14
@pytest.mark.parametrize("backend", BACKENDS)
def test_captures_shorter_than_a_paged_row(backend):
    pool, pages = torch.randn(2, 6, 2, 8, 16), torch.tensor([[0, 1, 2], [3, 4, 5]])
    query, table = torch.randn(2, 2, 1, 16), torch.randn(20)

    def call(*lengths):
        score = lambda s, b, h, i, j: s + table[j]
        return foci.paged_attention(query, pool[0], pool[1], pages, torch.tensor(lengths), score=score)

    with foci.use(backend):
        assert call(20, 7).isfinite().all()
        for lengths in ((21, 7), (3, 24)):  # after a call that was right as well
            with pytest.raises(
                ValueError, match=rf"captured tensor 0, float32\[20\] on cpu, is indexed by kv_idx .* runs to {max(lengths)}"
            ):
                call(*lengths)
