"""Masks that a module keeps in a buffer: read as they are when the graph runs, whatever was done to them since it was made."""

import copy
import math

import pytest
import torch

import foci
from compiled import several
from foci.fusion import Compiler

LENGTHS = (33, 64, 100)
BUFFERS = {
    "float, == 0": (torch.float32, lambda scores, m: scores.masked_fill(m == 0, -math.inf)),
    "bool, logical_not": (torch.bool, lambda scores, m: scores.masked_fill(m.logical_not(), -math.inf)),
    "uint8, where": (torch.uint8, lambda scores, m: torch.where(m.bool(), scores, torch.finfo(scores.dtype).min)),
    "bool, sdpa": (torch.bool, None),
}


class Attention(torch.nn.Module):
    """GPT-2's, as it is most often copied."""

    def __init__(self, kind, size=128, heads=2, width=16):
        super().__init__()
        self.kind, self.heads = kind, heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.register_buffer("bias", torch.ones(size, size, dtype=BUFFERS[kind][0]).tril().view(1, 1, size, size))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        mask, fill = self.bias[:, :, :t, :t], BUFFERS[self.kind][1]
        if fill is None:
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = torch.softmax(fill((q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1))), mask), dim=-1) @ v
        return y.transpose(1, 2).reshape(b, t, c)


def check(model, compiled, length, grad):
    """The compiled module beside the module itself in float64."""
    x = torch.randn(2, length, 16)
    exact = copy.deepcopy(model).double()
    with torch.set_grad_enabled(grad):
        actual, wanted = compiled(x), exact(x.double())
    torch.testing.assert_close(actual.double(), wanted, atol=2e-5, rtol=1e-4)
    if grad:
        cotangent = torch.randn_like(actual)
        for a, b in zip(
            torch.autograd.grad(actual, list(model.parameters()), cotangent),
            torch.autograd.grad(wanted, list(exact.parameters()), cotangent.double()),
        ):
            torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-4)


def diagonal(model):
    model.bias.copy_(torch.ones_like(model.bias).triu())


def window(model):
    model.bias = model.bias * torch.ones_like(model.bias).tril().triu(-10)


def behind_autograd(model):
    model.bias.data = torch.ones_like(model.bias).tril(5)


def moved(model):
    model.double().float()


CHANGES = (diagonal, window, behind_autograd, moved)


# FUSE-02, FUSE-04, FLEX-09
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_is_read_as_it_is(kind, grad):
    torch._dynamo.reset()
    model = Attention(kind)
    with foci.observe() as log:
        compiled = torch.compile(model, backend=Compiler(rest="eager"), dynamic=True)
        for length in several(*LENGTHS):
            check(model, compiled, length, grad)
        for change in CHANGES:
            with torch.no_grad():
                change(model)
            for length in several(*LENGTHS):
                check(model, compiled, length, grad)
    assert log.fusions
    assert all(site.fused for site in log.fusions)


# FUSE-04
def test_each_module_has_its_own_buffer():
    torch._dynamo.reset()
    attend = torch.compile(lambda module, x: module(x), backend=Compiler(rest="eager"), dynamic=True)
    modules = [Attention("float, == 0") for _ in range(3)]
    modules[1].bias.copy_(torch.ones(128, 128).triu())
    modules[2].bias.zero_().add_(torch.eye(128))
    for length in several(*LENGTHS):
        for module in modules:
            check(module, lambda x, module=module: attend(module, x), length, grad=True)


# FUSE-04
def test_inductor_reads_a_buffer_as_it_is():
    torch._dynamo.reset()
    model = Attention("float, == 0")
    compiled = torch.compile(model, backend="foci", dynamic=True)
    for change in (None, diagonal, window):
        if change is not None:
            with torch.no_grad():
                change(model)
        for length in several(*LENGTHS):
            check(model, compiled, length, grad=True)
