"""Which weights the Hopper kernels drop, bit by bit: those that `foci.dropout` says."""

# SDPA-08

from dataclasses import replace

import pytest
import torch
from posed import kernel_of, posed

from foci.dropout import keep
from foci.problem import Cotangents

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"),
]


def shifted(rows, dim, start):
    """[rows, dim] with ones where the row is `start` and the column."""
    return (torch.arange(rows, device="cuda")[:, None] == start + torch.arange(dim, device="cuda")).to(torch.bfloat16)


def expected(operands, p):
    """bool [B, H, Sq, Skv]."""
    batch, heads, rows, keys = *operands.query.shape[:3], operands.key.shape[2]
    sizes = (batch, heads, rows, keys)
    at = [torch.arange(n, device="cuda").view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(sizes)]
    return keep(operands.seed, p, *at)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_forward_drops_what_it_should(dim, p):
    asked, operands = posed(rows=200, keys=600, dim=dim, dropout=p)
    operands = replace(operands, query=torch.zeros_like(operands.query))
    kernel, right = kernel_of("hopper", asked), expected(operands, p)
    for start in range(0, 600, dim):
        value = shifted(600, dim, start).expand(operands.value.shape).contiguous()
        out = kernel.forward(replace(operands, value=value)).out
        keep_mask = out[..., : 600 - start] > 0
        assert torch.equal(keep_mask, right[..., start : start + dim])


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_single_kernel_of_the_backward_drops_the_same(dim, p):
    asked, operands = posed(rows=600, keys=200, dim=dim, dropout=p, grads=(True, True, True))
    operands = replace(operands, query=torch.zeros_like(operands.query))
    kernel, right = kernel_of("hopper", asked), expected(operands, p)
    assert kernel.backward_pass.fused is not None
    results = kernel.forward(operands)
    for start in range(0, 600, dim):
        dout = shifted(600, dim, start).expand(results.out.shape).contiguous()
        keep_mask = kernel.backward(operands, results, Cotangents(dout)).value[..., : 600 - start] > 0
        assert torch.equal(keep_mask.transpose(-1, -2), right[..., start : start + dim, :])
