"""Attention inside of graphs is right where torch lacks the names by which foci registers its operators and its backend."""

# NOW-03

import pytest
from without import run_without

WRITTEN_OUT = """
import torch, foci, foci.torch_compile

def written_out(q, k, v, slope):
    bias = slope * (torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])) ** 2
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 - bias, -1) @ v

def with_foci(q, k, v, slope):
    return foci.attention(q, k, v, score=lambda s, b, h, i, j: s - slope * (i - j) ** 2)

def leaves(length=9):
    sizes = (2, 3, length, 8), (2, 3, length + 2, 8), (2, 3, length + 2, 6)
    tensors = [torch.randn(size, dtype=torch.float64) for size in sizes]
    return [t.requires_grad_() for t in (*tensors, torch.tensor(0.05, dtype=torch.float64))]

torch.manual_seed(0)
"""

OPERATORS = (
    WRITTEN_OUT
    + """
def gradients(function, inputs):
    first = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
    return first, torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

from torch.fx.experimental.proxy_tensor import make_fx
inputs = leaves()
graph = make_fx(with_foci)(*inputs)  # calls the operator through the dispatcher, whoever runs it
assert any(node.target is torch.ops.foci.attention.default for node in graph.graph.nodes)
torch.testing.assert_close(gradients(graph, inputs), gradients(written_out, inputs))
with torch.no_grad():
    torch.testing.assert_close(graph(*inputs), written_out(*inputs))
compiled = torch.compile(with_foci, backend="aot_eager", fullgraph=True)
for length in (9, 5, 12):
    inputs = leaves(length)
    for found, want in zip(torch.autograd.grad(compiled(*inputs).sum(), inputs), torch.autograd.grad(written_out(*inputs).sum(), inputs)):
        torch.testing.assert_close(found, want)
batched = [torch.stack([t, t + 1]) for t in leaves()[:3]]
found = torch.vmap(lambda q, k, v: with_foci(q, k, v, torch.tensor(0.1, dtype=torch.float64)))(*batched)
torch.testing.assert_close(found[1], written_out(*(t[1] for t in batched), 0.1))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "prefix"),
    [("", "torch._library."), ("torch._library.*,torch._C._any_requires_grad,torch._C._after_ADInplaceOrView_keyset", "torch._library.")],
    ids=["private", "public"],
)
def test_derivatives_of_operators(without, prefix):
    run_without(without, OPERATORS + f"assert_found({prefix!r}, {not without})\n")


BACKEND = """
import importlib.metadata, torch, foci, foci.torch_compile

def attend(x):
    return torch.softmax(x @ x.mT / 3, -1) @ x

x = torch.randn(2, 3, 20, 8)
is_installed = "foci" in importlib.metadata.entry_points(group="torch_dynamo_backends").names
for backend in [foci.torch_compile.backend, *(["foci"] if is_installed else [])]:
    torch.compiler.reset()
    with foci.observe() as log:
        compiled = torch.compile(attend, backend=backend, options={"rest": "eager"}, fullgraph=True)
        torch.testing.assert_close(compiled(x), attend(x))
    assert [site.fused for site in log.fusions] == [True]
assert_found("torch._dynamo.backends.registry._", False)
"""


@pytest.mark.parametrize("without", ["torch._dynamo.backends.registry.*", "torch._dynamo.backends.registry._*"])
def test_the_backend_is_given_as_a_function_or_found_by_its_entry_point(without):
    run_without(without, BACKEND)


FUNCTIONS = (
    WRITTEN_OUT
    + """
def model(q, k, v, slope):
    return with_foci(q * 2, k, v, slope).tanh() + foci.attention(q, k, v, mask=foci.masks.window(3, 1))

def model_written_out(q, k, v, slope):
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill((distance > 3) | (distance < -1), -torch.inf)
    return written_out(q * 2, k, v, slope).tanh() + torch.softmax(scores, -1) @ v

compiled = torch.compile(model, backend=foci.torch_compile.backend, options={"rest": "eager"})
for length in (9, 5, 12):
    inputs = leaves(length)
    torch.testing.assert_close(compiled(*inputs), model_written_out(*inputs))
    found, want = (torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (compiled, model_written_out))
    torch.testing.assert_close(found, want)
x = torch.randn(12, 3, 8)
offsets = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
packed = torch.compile(lambda x: foci.varlen_attn(x, x, x, offsets, offsets, 6, 6), backend="aot_eager")
torch.testing.assert_close(packed(x), foci.varlen_attn(x, x, x, offsets, offsets, 6, 6))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "without",
    ["", "torch._dynamo.variables.higher_order_ops.*", "torch._ops.HigherOrderOperator"],
    ids=["private", "public", "no operators of functions"],
)
def test_attention_with_functions_under_dynamo(without):
    refused = """
try:
    torch.compile(with_foci, backend="aot_eager", fullgraph=True)(*leaves())
except torch._dynamo.exc.Unsupported as error:
    assert "this release of torch lacks them; `foci env` lists them" in str(error), error
else:
    raise AssertionError("a graph that holds attention without Dynamo's names")
"""
    code = FUNCTIONS + (refused if without else "torch.compile(with_foci, backend='aot_eager', fullgraph=True)(*leaves())\n")
    run_without(without, code + (f"assert_found({without.removesuffix('*')!r}, False)\n" if without else ""))
