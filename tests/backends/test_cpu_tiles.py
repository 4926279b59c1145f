"""Which tiles the CPU's kernels compute, as masks and callers' blocks decide."""

import pytest
import torch
from cpu_calls import CPU, attention, exact, qkv

import foci
from foci import backends
from foci.backends.contract import Plan
from foci.backends.cpu import build
from foci.problem import Formula, Operands, Problem
from foci.trace_functions import bind

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))


def test_caller_blocks_decide_where_tiles_straddle_heads():
    torch.manual_seed(0)
    q, k, v = qkv(2, 4, 130, 16)
    formula = Formula(bind(None, lambda b, h, q, k: q >= k, torch.device("cpu")).variant, block_size=(64, 64))
    blocks = torch.randint(0, 3, (2, 4, 3, 3), dtype=torch.int8)
    asked = Problem(formula, torch.float32, 16, 16, 4, 4, 2, 256, 256)
    operands = Operands(q, k, v, scale=0.25, blocks=blocks)
    actual, expected = (backends.load(name).build(Plan(name, asked, CPU)).forward(operands).out for name in ("cpu", "reference"))
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_of_a_tile_meet_different_keys(dtype):
    """Holes within a half, keys that one half meets later, runs longer than one pass over the keys, rows without keys."""
    torch.manual_seed(0)
    shape = (1, 2, 1500, 24)
    q, k, v = (torch.randn(shape, dtype=dtype) for _ in range(3))
    squares = torch.rand(47, 47) < 0.8
    squares[:, 40:] &= torch.rand(47, 7) < 0.2
    squares[9] = False
    masks = (
        lambda b, h, q, k: squares[q // 32, k // 32],
        lambda b, h, q, k: (k < 320) | (k >= 640 + 192 * (q // 32 % 2)),  # one half comes late to the second run
        lambda b, h, q, k: (q >= k) & (q - k < 700),
        foci.masks.causal(),
    )
    near, far = (3e-6, 1e-5) if dtype is torch.float32 else (3e-2, 1e-3)
    asked = foci.AuxRequest(lse=True, column_sums=True)
    for mask in masks:
        out, aux = attention(q, k, v, mask=mask, return_aux=asked)
        expected, expected_aux = exact(q, k, v, mask=mask, return_aux=asked)
        torch.testing.assert_close(out.double(), expected, atol=near, rtol=near)
        torch.testing.assert_close(aux.lse.double(), expected_aux.lse.double(), atol=far, rtol=far)
        torch.testing.assert_close(aux.column_sums.double(), expected_aux.column_sums.double(), atol=10 * far, rtol=10 * far)


# Masks that real arithmetic decides otherwise than the device's does.
TENTH = torch.tensor(0.1).item()
ABOVE = torch.tensor(63 * TENTH).item()  # what float32 makes of the product
ENDLESS, MISSING, ZERO = torch.full((256,), -torch.inf), torch.full((256,), torch.nan), torch.zeros(256)
SECONDS = 1_700_000_000 + torch.arange(256)
LARGE = 2**60 + torch.arange(256) // 32
DELICATE = {
    "a product that float32 rounds": lambda b, h, q, k: q * TENTH < ABOVE,
    "zero times infinity": lambda b, h, q, k: ENDLESS[k] * ZERO[q] > -1,
    "nan against infinity": lambda b, h, q, k: MISSING[k] <= torch.inf,
    "the lesser of nan and a number": lambda b, h, q, k: torch.minimum(MISSING[k], ZERO[q]) <= 1,
    "the size of nan": lambda b, h, q, k: MISSING[k].abs() >= 0,
    "the sine of infinity": lambda b, h, q, k: ENDLESS[k].sin() <= 1.5,
    "seconds as float32": lambda b, h, q, k: SECONDS[q].float() - SECONDS[k].float() < 33.0,
    "integers that float64 rounds": lambda b, h, q, k: LARGE[q] == LARGE[k],
    "a hash that wraps": lambda b, h, q, k: (h * 1103515245 + 12345) % 10 < 5,
}


@pytest.mark.parametrize("name", DELICATE)
def test_tiles_are_decided_as_single_scores_are(name):
    q, k, v = qkv(1, 8, 256, 16)
    with foci.use("reference"):
        expected = foci.attention(q, k, v, mask=DELICATE[name])
    torch.testing.assert_close(attention(q, k, v, mask=DELICATE[name]), expected, atol=2e-6, rtol=0)
