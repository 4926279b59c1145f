"""The models that padding is for: at their own sizes no product is left with bad rows, at small ones nothing changes for the user."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from machines import Recorder, check_values, machine
from test_passes import run_both
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from foci.padding import Machine, find_table, pad, padding_autograd
from foci.padding.padding_autograd import grow_dims
from foci.padding.reading import fake_value, find_products

H200 = Machine("NVIDIA H200", 16, True, find_table("NVIDIA H200", "sm_90"))


def linear(rows, k, vocabulary, dtype):
    target = torch.randint(0, vocabulary, (rows,))
    inputs = [torch.randn(*sizes, dtype=dtype, requires_grad=True) for sizes in ((rows, k), (vocabulary, k), (vocabulary,))]
    return lambda x, w, b: F.cross_entropy(F.linear(x, w, b).float(), target), inputs


def language_model(vocabulary, width, batch, length, dtype):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=1,
        num_attention_heads=width // 64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForMaskedLM(config)
    names, ids = [name for name, _ in model.named_parameters()], torch.randint(0, vocabulary, (batch, length))

    def loss(*parameters):
        return torch.func.functional_call(model, dict(zip(names, parameters)), (), {"input_ids": ids, "labels": ids}).loss

    return loss, [parameter.detach().to(dtype).requires_grad_() for parameter in model.parameters()]


def recommender(rows, items, widths, dtype):
    sizes = (items, *widths, items)
    layers = nn.Sequential(*(layer for k, n in itertools.pairwise(sizes) for layer in (nn.Linear(k, n, dtype=dtype), nn.SELU())))
    names, ratings = [name for name, _ in layers.named_parameters()], torch.rand(rows, items, dtype=dtype)

    def loss(*parameters):
        return F.mse_loss(torch.func.functional_call(layers, dict(zip(names, parameters)), ratings).float(), ratings.float())

    return loss, list(layers.parameters())


def chunked(heads, chunks, window, dtype):
    """Each chunk of queries with its own keys and one more, as global attention adds it: 2 * window + 1."""
    inputs = [torch.randn(heads, chunks, n, 64, dtype=dtype, requires_grad=True) for n in (window, 2 * window + 1, 2 * window + 1)]

    def attend(q, k, v):
        weights = torch.softmax(q @ k.mT / 8, -1, dtype=torch.float32).to(v.dtype)
        return (weights @ v).float().square().mean()

    return attend, inputs


def attention(heads, length, dim, dtype):
    inputs = [torch.randn(heads, length, dim, dtype=dtype, requires_grad=True) for _ in range(3)]
    return lambda q, k, v: (torch.softmax(q @ k.mT / dim**0.5, -1) @ v).float().square().mean(), inputs


def convolution(channels, height, width, layout, dtype):
    weight = torch.randn(channels, channels, 3, 3, dtype=dtype, requires_grad=True)
    x = torch.randn(1, channels, height, width, dtype=dtype).to(memory_format=layout).requires_grad_()
    return lambda x, w: F.conv2d(F.gelu(x), w, padding=1).float().square().mean(), [x, weight]


def produced(m, k, n, dtype):
    inputs = [torch.randn(*sizes, dtype=dtype) for sizes in ((m,), (k,), (k, n))]
    return lambda rows, columns, b: torch.relu(rows[:, None] + columns) @ b, inputs


# name: what makes it, its own sizes, small ones
CASES = {
    "linear-bf16": (linear, (8192, 768, 30523, torch.bfloat16), (64, 64, 1023, torch.float32)),
    "linear-tf32": (linear, (8192, 768, 30523, torch.float32), (64, 33, 2047, torch.float32)),
    "language model": (language_model, (30522, 768, 16, 512, torch.bfloat16), (1022, 64, 2, 8, torch.float32)),
    "recommender": (
        recommender,
        (1024, 197951, (512, 512, 1024, 512, 512), torch.bfloat16),
        (32, 2047, (64, 64, 128, 64, 64), torch.float32),
    ),
    "chunks": (chunked, (48, 16, 256, torch.bfloat16), (2, 3, 64, torch.float32)),
    "head dim 16": (attention, (192, 511, 16, torch.bfloat16), (2, 127, 16, torch.float32)),
    "product": (produced, (8192, 30522, 768, torch.float16), (64, 1022, 64, torch.float32)),
}


def traced(function, inputs):
    """The graph of a function and its gradients."""

    def both(*leaves):
        out = function(*leaves)
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        return (out, *(torch.autograd.grad(out, trained) if trained else ()))

    return make_fx(both, decomposition_table=select_decomp_table())(*inputs)


def rows(graph):
    """Of each matrix of a product: (its name, role, bytes that its rows' starts and lengths are multiples of)."""
    return [(str(p), m.role, min(m.alignment, m.extent)) for p in find_products(graph, 16) for m in p.matrices]


# PAD-05
@pytest.mark.parametrize("case", CASES)
def test_no_product_has_bad_rows(case):
    make, sizes, _ = CASES[case]
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = traced(*make(*sizes))
    assert min(bytes for _, _, bytes in rows(graph.graph)) < 16
    before = [(value.shape, value.stride()) for node in graph.graph.output_node().args[0] if (value := fake_value(node)) is not None]
    assert before
    paddings = [*grow_dims(graph.graph, H200), *pad(graph, (), H200).paddings]
    assert [row for row in rows(graph.graph) if row[2] < 16] == []
    assert any(padding.how for padding in paddings)
    after = [(value.shape, value.stride()) for node in graph.graph.output_node().args[0] if (value := fake_value(node)) is not None]
    assert before == after


@pytest.mark.parametrize("case", ["linear-bf16", "chunks", "head dim 16", "product"])
def test_values_of_new_nodes_are_those_of_fake_tensors(case):
    make, sizes, _ = CASES[case]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        graph = traced(*make(*sizes)).graph
    before = set(graph.nodes)
    grow_dims(graph, H200)
    new_nodes = [node for node in graph.nodes if node not in before]
    assert len(new_nodes) > 10
    assert all(node.meta["val"].fake_mode is mode for node in new_nodes)
    check_values(new_nodes)


def test_each_operation_is_looked_at_once(monkeypatch):
    seen = []
    relations_of = padding_autograd.dim_relations
    monkeypatch.setattr(padding_autograd, "dim_relations", lambda node: seen.append(node) or relations_of(node))
    make, sizes, _ = CASES["head dim 16"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = traced(*make(*sizes)).graph
    assert grow_dims(graph, H200)
    assert seen
    assert len(seen) == len(set(seen))


# PAD-05
@pytest.mark.parametrize("case", CASES)
def test_nothing_changes_for_the_user(case):
    torch.manual_seed(0)
    make, _, sizes = CASES[case]
    function, inputs = make(*sizes)
    # rows of the targets; parameters of a model have no other sizes
    fixed = {64} if make is linear else {n for x in inputs for n in x.shape} if make in (language_model, recommender) else ()
    run_both(function, *inputs, recorder=Recorder(machine(odd=3.0, bandwidth=1e16), grow=True), fixed=fixed)


# PAD-05
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_of_odd_width_stays_as_it_is(layout):
    with FakeTensorMode():
        graph = traced(*convolution(128, 640, 959, layout, torch.float16))
    code = graph.code
    assert grow_dims(graph.graph, H200) == ()
    assert pad(graph, (), H200).paddings == ()
    graph.recompile()
    assert graph.code == code
