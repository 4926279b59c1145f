"""Writes whose name does not say so: by a list, `out=`, running statistics, a custom operator or the body of another."""

# FUSE-04

import pytest
import torch
from test_mutated import check

from foci.fusion.alias_analysis import written_nodes


@torch.library.custom_op("foci_tests::double_second", mutates_args={"y"})
def double_second(x: torch.Tensor, y: torch.Tensor) -> None:
    y.mul_(2.0)


@double_second.register_fake
def _(x, y):
    return None


@torch.library.custom_op("foci_tests::double_all", mutates_args={"tensors"})
def double_all(tensors: list[torch.Tensor]) -> None:
    torch._foreach_mul_(tensors, 2.0)


@double_all.register_fake
def _(tensors):
    return None


CHECKPOINT = "torch.utils.checkpoint.checkpoint"
BESIDE = "torch.zeros(6, 6, dtype=torch.long)"
WRITES = (
    "torch._foreach_zero_([w])",
    "torch._foreach_mul_([q, w], 2.0)",
    "torch._foreach_add_(self=[w], scalar=1.0)",
    f"torch.sort(torch.arange(36.0).view(6, 6), out=(w, {BESIDE}))",
    f"torch.topk(torch.arange(36.0).view(6, 6), 6, out=(w, {BESIDE}))",
    f"torch.ops.aten.max.dim_max(torch.arange(216.0).view(6, 6, 6), 0, max=w, max_values={BESIDE})",
    "torch.ops.foci_tests.double_second(q, w)",
    "torch.ops.foci_tests.double_second.default(q, y=w)",
    "torch.ops.foci_tests.double_all([q, w])",
    "torch.nn.functional.batch_norm(q[0, 0].mT, w[0], torch.ones(6), training=True)",
    "torch.nn.functional.batch_norm(q[0, 0].mT, torch.zeros(6), w[0], None, None, True)",
    "torch.nn.functional.instance_norm(q[0].mT, w[0], torch.ones(6))",
    "torch.batch_norm(q[0, 0].mT, None, None, w[0], torch.ones(6), True, 0.1, 1e-5, False)",
    "torch.nn.functional.embedding(torch.arange(6), w, max_norm=0.1)",
    "torch.nn.functional.embedding(torch.arange(6), w, None, 0.1)",
    f"{CHECKPOINT}(lambda t: t.mul_(2.0), w, use_reentrant=False)",
    f"{CHECKPOINT}(lambda t: t[0].zero_() + 1, w, use_reentrant=False)",
)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", ["m", "w"])
def test_a_write_between_scores_and_values(write, name):
    lines = ("w = m" if name == "m" else "w = m.clone()", "p = (q @ k.mT * 0.3 + w).softmax(-1)", write, "o = p @ v", "return o, w * 1.0")
    check("def program(q, k, v, m):\n" + "".join(f"    {line}\n" for line in lines), learn=False)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_of_the_scores(write):
    lines = ("w = (q @ k.mT * 0.3)[0, 0]", "e = w.exp()", write, "p = e / w.exp().sum(-1, keepdim=True)", "o = p @ v", "return o, w")
    check("def program(q, k, v, m):\n" + "".join(f"    {line}\n" for line in lines), learn=False)


def test_a_table_that_is_renormalised_is_written_before_it_is_read():
    lines = (
        "w = m.clone()",
        "b = torch.nn.functional.embedding(torch.arange(6), w, max_norm=0.1)",
        "o = (q @ k.mT * 0.3 + b).softmax(-1) @ v",
        "return o, w",
    )
    check("def program(q, k, v, m):\n" + "".join(f"    {line}\n" for line in lines), learn=False)


@pytest.mark.parametrize(
    "beside",
    [
        "x = torch.nn.functional.batch_norm(q[0, 0].mT, m[0].detach(), torch.ones(6), training=False).sum()",
        "x = torch.nn.functional.embedding(torch.arange(6), m).sum()",
        f"x = {CHECKPOINT}(lambda t: (t * 2).mul_(3.0).sum(), m, use_reentrant=False)",
        "x = torch._foreach_mul([m], 2.0)[0].sum()",
        "x = torch.ops.aten.sort(m)[0].sum()",
    ],
)
def test_what_writes_nothing_of_others_leaves_the_attention(beside):
    lines = ("p = (q @ k.mT * 0.3 + m).softmax(-1)", beside, "o = p @ v + x", "return (o,)")
    sites = check("def program(q, k, v, m):\n" + "".join(f"    {line}\n" for line in lines), learn=True)
    assert [site.fused for site in sites] == [True]


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (lambda graph, x, y: graph.call_function(torch.add, (x, y)), ()),
        (lambda graph, x, y: graph.call_function(torch.add, (x, y), {"out": y}), ("y",)),
        (lambda graph, x, y: graph.call_function(torch.ops.aten.sort, (x,)), ()),
        (lambda graph, x, y: graph.call_function(torch.ops.aten.mul_, (x, y)), ("x",)),
        (lambda graph, x, y: graph.call_function(torch.ops.aten.rrelu_with_noise.default, (x, y)), ("y",)),
        (lambda graph, x, y: graph.call_function(torch.nn.functional.relu, (x,), {"inplace": True}), ("x",)),
        (lambda graph, x, y: graph.call_method("add_", (x, y)), ("x",)),
        (lambda graph, x, y: graph.call_function(torch._foreach_add_, ([x, y], 1)), ("x", "y")),
    ],
)
def test_written_nodes(call, written):
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert tuple(node.name for node in written_nodes(call(graph, x, y))) == written
