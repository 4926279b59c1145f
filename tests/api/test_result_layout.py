"""Where results lie in memory: as the query does, which torch's attention functions promise."""

# SDPA-01, FLEX-01

import os

import pytest
import torch
import torch.nn.functional as F

import foci
from compiled import resize, several

B, H, S, D = 2, 4, 12, 8
LAYOUTS = {
    "[B, H, S, D]": lambda t: t.contiguous(),
    "[B, S, H, D]": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a row": lambda t: torch.cat([t.transpose(1, 2)] * 3, -1)[..., D : 2 * D].transpose(1, 2),
    "part of a head": lambda t: torch.cat([t] * 2, -1)[..., :D],
}

APART = ("[B, H, S, D]", "part of a head")  # each head's rows by themselves


def tensors(layout, dtype=torch.float32, heads=H):
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(B, n, S, D, generator=generator, dtype=dtype) for n in (H, heads, heads)]
    return LAYOUTS[layout](operands[0]), operands[1], operands[2]


def order(tensor):
    return sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))


CALLS = {
    "attention": lambda q, k, v: foci.attention(q, k, v),
    "masked": lambda q, k, v: foci.attention(q, k, v, mask=foci.masks.causal(), score=foci.scores.softcap(3.0)),
    "sdpa": lambda q, k, v: foci.scaled_dot_product_attention(q, k, v, is_causal=True),
    "flex": lambda q, k, v: foci.flex_attention(q, k, v),
    "sink": lambda q, k, v: foci.attention(q, k, v, sink=torch.zeros(H)),
    "no keys": lambda q, k, v: foci.attention(q, k[:, :, :0], v[:, :, :0]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_results_lie_as_the_query_does(name, layout):
    q, k, v = tensors(layout)
    out = CALLS[name](q, k, v)
    assert order(out) == order(q) == order(F.scaled_dot_product_attention(q, k, v))
    if layout == "[B, H, S, D]":
        out.view(B * H, S, D)
    elif layout == "[B, S, H, D]":
        out.transpose(1, 2).view(B, S, H * D)
    assert out.numel() == 1 + sum((n - 1) * step for n, step in zip(out.shape, out.stride(), strict=True))  # without gaps


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["aten", "blocked", "cpu", "reference", "triton"])
def test_of_every_backend(backend, layout):
    if backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("on the CPU triton runs in its interpreter: tests/backends/triton_backend/test_triton_interpreted.py")
    q, k, v = tensors(layout)
    with foci.use(backend):
        out = foci.attention(q, k, v)
    assert order(out) == order(q)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_gradients(layout, dynamic):
    """The operator's promise of strides is what it gives, and views of the result stay views."""

    def attend(q, k, v):
        out = foci.attention(q, k, v, mask=foci.masks.causal())
        return out.view(-1, *out.shape[2:]) if layout in APART else out.transpose(1, 2).flatten(2)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for more in several(0, 3, 7):
        inputs, runs = resize(tensors(layout), {S: S + more}), []
        for function in (attend, compiled):
            leaves = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in inputs]
            out = function(*leaves)
            runs.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
        torch.testing.assert_close(runs[0], runs[1], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_packed(transposed):
    rows = torch.randn(2 * S, H, D)
    q = rows.transpose(0, 1).contiguous().transpose(0, 1) if transposed else rows
    offsets = torch.tensor([0, 5, 2 * S])
    out = foci.varlen_attn(q, rows, rows, offsets, offsets, 2 * S, 2 * S)
    assert order(out) == order(q)


def test_nested():
    query = torch.nested.nested_tensor([torch.randn(n, H, D) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)
    out = foci.attention(query, query, query)
    assert order(out.transpose(1, 2).values()) == [0, 1, 2]
