"""What foci.nn.MultiheadAttention has beyond torch.nn's: grouped heads, rotary embedding, masks, scores, windows, row statistics."""

import pytest
import torch
from attention_pairs import B, E, H, L, S, pair
from twins import rand

import foci
import foci.nn


def test_row_statistics():
    _, ours = pair(batch_first=True)
    x = rand(B, L, E)
    out, aux = ours(x, x, x, return_aux=foci.AuxRequest(lse=True, column_sums=True))
    full, weights = ours(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(out, full)
    torch.testing.assert_close(aux.column_sums, weights.sum(2))
    assert aux.lse.shape == (B, H, L) and aux.weights is None
    assert ours(x[0], x[0], x[0], return_aux=foci.AuxRequest(lse=True))[1].lse.shape == (H, L)


# MOD-01
@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 10}, {"bias": False}, {"add_bias_kv": True}], ids=str)
def test_grouped_heads(options):
    torch.manual_seed(0)
    grouped = foci.nn.MultiheadAttention(16, 4, num_kv_heads=2, batch_first=True, dtype=torch.float64, **options)
    ungrouped = foci.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64, **options)

    def repeated(t, dim=0):  # rows of each key head, for each of its query heads
        return t.unflatten(dim, (2, 4)).repeat_interleave(2, dim=dim).flatten(dim, dim + 1)

    state = grouped.state_dict()
    for name in ("k_proj_weight", "v_proj_weight"):
        if name in state:
            state[name] = repeated(state[name])
    for name in ("in_proj_weight", "in_proj_bias"):
        if name in state:
            q, k, v = state[name].split([16, 8, 8])
            state[name] = torch.cat((q, repeated(k), repeated(v)))
    for name in ("bias_k", "bias_v"):
        if name in state:
            state[name] = repeated(state[name], 2)
    ungrouped.load_state_dict(state)
    inputs = (rand(B, L, 16), rand(B, S, options.get("kdim", 16)), rand(B, S, options.get("vdim", 16)))
    for ours, theirs in zip(grouped(*inputs), ungrouped(*inputs)):
        torch.testing.assert_close(ours, theirs)


# MOD-01
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_by_complex_numbers(interleaved):
    rotary = foci.nn.RotaryEmbedding(6, base=100.0, interleaved=interleaved)
    x, positions = rand(2, 3, 5, 8), torch.tensor([0, 1, 4, 9, 2])
    turned = x[..., :6]
    parts = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :3], turned[..., 3:])
    speeds = torch.tensor([100.0 ** (-2 * i / 6) for i in range(3)], dtype=torch.float64)
    z = torch.complex(*(p.contiguous() for p in parts)) * torch.exp(1j * positions[:, None] * speeds)
    want = torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
    torch.testing.assert_close(rotary(x, positions), torch.cat((want, x[..., 6:]), -1))
    assert not rotary.state_dict()
    with pytest.raises(ValueError, match="positive and even"):
        foci.nn.RotaryEmbedding(5)


# MOD-01
def test_rotary_depends_on_distance_alone():
    torch.manual_seed(0)
    ours = foci.nn.MultiheadAttention(E, H, batch_first=True, rotary=foci.nn.RotaryEmbedding(4), dtype=torch.float64)
    x = rand(1, 6, E)
    shifted = torch.cat((rand(1, 3, E, seed=1), x), 1)
    hidden = torch.zeros(1, 9, dtype=torch.bool)
    hidden[:, :3] = True
    torch.testing.assert_close(ours(shifted, shifted, shifted, key_padding_mask=hidden)[0][:, 3:], ours(x, x, x)[0])
    plain = foci.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    plain.load_state_dict(ours.state_dict())
    assert not torch.allclose(plain(x, x, x)[0], ours(x, x, x)[0])


class Slopes(torch.nn.Module):
    """A learned ALiBi."""

    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.5, 0.25, 0.1], dtype=torch.float64))

    def forward(self):
        return foci.scores.alibi(self.slopes)


def test_mask_and_score_variants():
    ours = foci.nn.MultiheadAttention(
        E, H, batch_first=True, dtype=torch.float64, mask=foci.masks.causal(), score=lambda s, b, h, q, kv: s - 0.1 * (q - kv)
    )
    plain = foci.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    plain.load_state_dict(ours.state_dict())
    x, at = rand(B, L, E), torch.arange(L, dtype=torch.float64)
    bias = (-0.1 * (at[:, None] - at)).masked_fill(at[:, None] < at, -torch.inf)
    for one, other in zip(ours(x, x, x), plain(x, x, x, attn_mask=bias)):
        torch.testing.assert_close(one, other)


def test_a_learned_score():
    ours = foci.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, score=Slopes())
    assert "score.slopes" in ours.state_dict()
    x = rand(B, L, E)
    ours(x, x, x, need_weights=False)[0].square().sum().backward()
    assert ours.score.slopes.grad.abs().min() > 0


def test_sliding_window():
    ours = foci.nn.SlidingWindowAttention(E, H, left=2, right=1, batch_first=True, device="cpu", dtype=torch.float64)
    x = rand(B, 8, E)
    _, weights = ours(x, x, x)
    distance = torch.arange(8)[:, None] - torch.arange(8)
    assert torch.equal(weights[0] > 0, (distance <= 2) & (distance >= -1))
