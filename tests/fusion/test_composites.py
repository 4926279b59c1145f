"""Composites: each is opened into what torch makes it of, with equal results; what looks alike stays."""

# FUSE-03

import pytest
import torch
import torch.nn.functional as F
from spelling_harness import dynamo_graph_of, graph_of

from foci.fusion.composite_views import RULE, open_views
from foci.fusion.decompose_composites import COMPOSITE_RULES, SIZE_RULES, name_sizes, open_composites
from foci.fusion.fx_utils import as_call, example_value


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


TOKENS = {
    "x": draw(2, 5, 8), "packed": draw(2, 5, 8), "w": draw(24, 8), "c": draw(24), "o": draw(8, 8), "d": draw(8), "u": draw(16, 8),
    "g": draw(16), "n": draw(8, 16),
}  # fmt: skip
MATRICES = {"x": draw(2, 12), "y": draw(2, 12), "grown": draw(2, 12)}
MATRIX = {"x": draw(4, 6)}


@torch.library.custom_op("foci_tests::multi_head_attention_forward", mutates_args=())
def attention_of_another_library(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("foci_tests::_transformer_encoder_layer_fwd", mutates_args=())
def layer_of_another_library(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


for operator in (attention_of_another_library, layer_of_another_library):
    operator.register_fake(torch.empty_like)


def function_of(text, inputs):
    """The expression of a row, as a function of those inputs that it names, and clones of these, by name."""
    tensors = {name: inputs[name].clone() for name in inputs if name in compile(text, "row", "eval").co_names}
    function = eval(f"lambda {', '.join(tensors)}: {text}", {"torch": torch, "F": F, "similar": torch.ops.foci_tests})
    return function, tensors


def names(module):
    return [call.name for node in module.graph.nodes if (call := as_call(node)) is not None]


def finished(module):
    module.graph.lint()
    module.recompile()
    return module


def examples(rules):
    return [pytest.param(rule, text, id=text) for rule in rules for text in rule.examples]


def counterexamples(rules):
    return [text for rule in rules for text in rule.counterexamples]


@pytest.mark.parametrize(("rule", "text"), examples(COMPOSITE_RULES))
def test_a_composite_is_opened(rule, text):
    function, tensors = function_of(text, TOKENS)
    module = graph_of(function, *tensors.values())
    assert set(names(module)) & set(rule.names)
    opened = open_composites(module.graph, None)
    assert not set(names(finished(module))) & set(rule.names)
    assert opened == {node for node in module.graph.nodes if as_call(node) is not None}
    torch.testing.assert_close(module(*tensors.values()), function(*tensors.values()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", counterexamples(COMPOSITE_RULES))
def test_what_looks_like_a_composite_stays(text):
    function, tensors = function_of(text, TOKENS)
    module = graph_of(function, *tensors.values())
    for node, name in zip(module.graph.find_nodes(op="placeholder"), tensors, strict=True):
        if name == "packed":  # no example value is made of one
            node.meta["example_value"] = torch.nested.nested_tensor([draw(5, 8), draw(3, 8)], layout=torch.jagged)
    before = module.code
    assert open_composites(module.graph, None) == frozenset()
    assert finished(module).code == before


def sized(text):
    function, tensors = function_of(text, MATRICES)
    if "grown" in tensors:
        torch._dynamo.mark_dynamic(tensors["grown"], 0)
    return dynamo_graph_of(function, *tensors.values()), function, tensors


@pytest.mark.parametrize(("rule", "text"), examples(SIZE_RULES))
def test_a_view_like_another_tensor_has_its_sizes(rule, text):
    module, function, tensors = sized(text)
    assert set(names(module)) & set(rule.names)
    name_sizes(module.graph)
    assert not set(names(finished(module))) & set(rule.names)
    assert torch.equal(module(*tensors.values())[0], function(*tensors.values()))


@pytest.mark.parametrize("text", counterexamples(SIZE_RULES))
def test_open_sizes_are_left_to_the_other_tensor(text):
    module, *_ = sized(text)
    before = module.code
    assert set(names(module)) & {name for rule in SIZE_RULES for name in rule.names}
    name_sizes(module.graph)
    assert finished(module).code == before


@pytest.mark.parametrize("text", RULE.examples)
def test_a_view_of_views_is_opened(text):
    function, tensors = function_of(text, MATRIX)
    module = graph_of(function, *tensors.values())
    before = names(module)
    open_views(module.graph, None)
    assert not set(names(finished(module))) & set(before)
    assert torch.equal(module(*tensors.values()), function(*tensors.values()))
    assert all(example_value(node) is not None for node in module.graph.nodes if node.op != "output")


@pytest.mark.parametrize("text", RULE.counterexamples)
def test_what_is_no_view_of_views_stays(text):
    function, tensors = function_of(text, MATRIX)
    module = graph_of(function, *tensors.values())
    before = module.code
    open_views(module.graph, None)
    assert finished(module).code == before


def test_every_row_has_its_parts():
    rules = (*COMPOSITE_RULES, *SIZE_RULES, RULE)
    assert all(rule.names and rule.meaning and rule.examples and rule.counterexamples for rule in rules)
