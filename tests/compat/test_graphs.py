"""What foci.compat does for graphs by private names, beside what it does by public means."""

# NOW-03

import dataclasses

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from without import load_without

from foci.compat import aten, fake
from foci.compat import fx as compat

public_fx = load_without("fx", "torch.*")
public_fake = load_without("fake", "torch.*")
public_aten = load_without("aten", "torch.*")


@pytest.mark.parametrize("module", [fake, public_fake], ids=["private", "public"])
def test_fake_tensors(module):
    assert module.FakeTensor is fake.FakeTensor and module.FakeTensorMode is fake.FakeTensorMode
    mode = fake.FakeTensorMode()
    inside = mode.from_tensor(torch.ones(2, 3))
    assert module.is_fake_tensor(inside) and not module.is_fake_tensor(torch.ones(2))
    assert module.detect_fake_mode([1, torch.ones(2)]) is None and not module.is_making_fakes()
    assert module.detect_fake_mode([torch.ones(2), inside]) is mode
    with mode:
        assert module.is_making_fakes() and module.detect_fake_mode() is mode
        assert module.real_values(lambda: torch.full((), 3.5).item()) == 3.5
    assert not module.has_symbols(inside)


@pytest.mark.parametrize("module", [fake, public_fake], ids=["private", "public"])
def test_symbolic_sizes_are_seen(module):
    seen = []

    def function(x):
        seen.append(module.has_symbols(x))
        return x * 2

    make_fx(function, tracing_mode="symbolic")(torch.ones(5, 7))
    make_fx(function, tracing_mode="fake")(torch.ones(5, 7))
    assert seen == [True, False]


def test_without_names_fake_tensors_are_made_by_their_mode():
    assert public_fake.below_dispatch() is None and public_fake.tracing_metadata() is None
    with public_fake.python_dispatcher():
        pass
    with fake.below_dispatch():
        assert torch.empty((2, 3), device="meta").shape == (2, 3)


@pytest.mark.parametrize("module", [compat, public_fx], ids=["private", "public"])
def test_trees(module):
    tree = {"a": [1, (2, 3)], "b": torch.Size([4])}
    assert sorted(module.tree_leaves({"a": [1, (2, 3)]})) == [1, 2, 3]
    assert module.tree_map(lambda n: n + 1, [1, (2, {"c": 3})]) == [2, (3, {"c": 4})]
    assert len(module.tree_leaves(tree)) == 4


@pytest.mark.parametrize("module", [compat, public_fx], ids=["private", "public"])
def test_nodes_and_modules(module):
    graph = fx.Graph()
    x = graph.placeholder("x")
    dead = graph.call_function(torch.neg, (x,))
    graph.output(graph.call_function(torch.sin, (x,)))
    assert not module.is_erased(dead)
    graph.erase_node(dead)
    assert module.is_erased(dead) and not module.is_erased(x)
    graph_module = module.lazy_graph_module(torch.nn.Module(), graph)
    torch.testing.assert_close(graph_module(torch.ones(2)), torch.ones(2).sin())
    assert module.is_higher_order(torch.ops.higher_order.cond) and not module.is_higher_order(torch.ops.aten.sin.default)
    assert not module.is_higher_order(torch.sin)


def test_nodes_are_renamed_where_torch_can():
    for module, name in ((compat, "y"), (public_fx, "x")):
        node = fx.Graph().placeholder("x")
        module.rename(node, "y")
        assert node.name == name


@pytest.mark.parametrize("shape", [(2, 3, 4), (5,), (), (2, 0, 3)])
def test_strides(shape):
    assert tuple(compat.contiguous_strides(shape)) == public_fx.contiguous_strides(shape)


@pytest.mark.parametrize("module", [compat, public_fx], ids=["private", "public"])
def test_memory_of_views(module):
    x, other = torch.zeros(4), torch.zeros(4)
    same, apart = module.storage_identity(x[1:].view(3, 1)), module.storage_identity(other)
    assert module.storage_identity(x) == same != apart


def test_a_view_knows_its_base_where_torch_tells():
    x = torch.zeros(4)
    assert compat.base_of_view(x[1:]) is x and compat.base_of_view(x) is None
    assert public_fx.base_of_view(x[1:]) is None


def test_composed_views_stay_where_torch_tells_no_schemas(monkeypatch):
    from foci.fusion import composite_views

    def opened():
        graph = fx.Graph()
        x = graph.placeholder("x")
        turned = graph.call_function(torch.ops.aten.mT.default, (x,))
        for node, value in ((x, torch.ones(2, 3)), (turned, torch.ones(3, 2))):
            node.meta["example_value"] = value
        graph.output(turned)
        composite_views.open_views(graph, None)
        return [node.target for node in graph.nodes if node.op == "call_function"]

    assert torch.ops.aten.mT.default not in opened()
    monkeypatch.setattr(composite_views, "read_schema", public_aten.read_schema)
    assert opened() == [torch.ops.aten.mT.default]


def test_products_with_relu():
    x, weight, bias = torch.randn(5, 3), torch.randn(4, 3), torch.randn(4)
    want = torch.relu(x @ weight.T + bias)
    for module in (aten, public_aten):
        torch.testing.assert_close(module.linear_with_relu(x, weight, bias), want)
    assert aten.is_mkldnn_enabled() is public_aten.is_mkldnn_enabled()


def test_an_absent_operator_is_in_no_graph_and_says_what_it_is():
    assert public_aten.SOFTMAX != public_aten.LOG_SOFTMAX
    with pytest.raises(NotImplementedError, match=r"torch\.ops\.aten\._softmax\.default is missing in torch"):
        public_aten.SOFTMAX(torch.ones(2), 0, False)
    assert public_aten.read_schema(torch.ops.aten.add.Tensor) is None
    assert aten.read_schema(torch.ops.aten.add_.Tensor).is_mutable


def test_the_backend_aten_declines_where_its_operator_is_absent(monkeypatch):
    import foci
    from foci.backends import aten as backend

    def rejected():
        planned = foci.explain(*torch.randn(3, 1, 2, 16, 8).unbind(0))
        return str(planned)

    assert "has no" not in rejected()
    ops = tuple(dataclasses.replace(op, needs=(aten.Absent("torch.ops.aten._gone"),)) for op in backend._OPS)
    monkeypatch.setattr(backend, "_OPS", ops)
    assert f"torch {torch.__version__} has no torch.ops.aten._gone" in rejected()
