"""Writes: those of a tensor that the graph made itself become operations, and every other one stays."""

# FUSE-03

import inspect

import pytest
import torch
import torch.nn.functional as F
from spelling_harness import dynamo_graph_of, graph_of

from compiled import several
from foci.fusion import functionalize
from foci.fusion.fake_values import with_values
from foci.fusion.functionalize import ROUNDING_RULES, WRITE_RULES, without_writes
from foci.fusion.fx_utils import as_call

X = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0))
ROWS = torch.tensor([2, 0, 1, 2])
RULES = (*WRITE_RULES, *ROUNDING_RULES)


def names(module):
    return [str(n.target) for n in module.graph.nodes if n.op == "call_method"]


def writing(text):
    """A function that runs the statements of a row and reads `y` after them, and its tensors."""
    space = {"torch": torch, "F": F}
    tensors = {"x": X.clone(), "rows": ROWS} if "rows" in text else {"x": X.clone()}
    exec("\n    ".join([f"def function({', '.join(tensors)}):", "mask = x > 0", "y = x * 2", *text.split("; "), "return y * 1"]), space)
    return space["function"], list(tensors.values())


def calls(module):
    return [(node, call) for node in module.graph.nodes if (call := as_call(node)) is not None]


def writes(module):
    return [call.name for _, call in calls(module) if call.in_place or call.name == "setitem"]


def without(module, tensors):
    without_writes(module.graph, with_values(module, tensors))
    module.graph.lint()
    module.recompile()
    return module


@pytest.mark.parametrize(("rule", "text"), [pytest.param(rule, text, id=text) for rule in RULES for text in rule.examples])
def test_a_write_is_an_operation(rule, text):
    function, tensors = writing(text)
    module = dynamo_graph_of(function, *tensors)
    read = writes(module) if rule in ROUNDING_RULES else [functionalize._form(node, call) for node, call in calls(module)]
    assert set(read) & set(rule.names)
    without(module, tensors)
    assert not writes(module)
    assert ("to" in [call.name for _, call in calls(module)]) == (rule in ROUNDING_RULES)
    function, tensors = writing(text)
    actual, expected = module(*tensors)[0], function(*tensors)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("text", [text for rule in RULES for text in rule.counterexamples])
def test_a_write_that_is_no_operation_stays(text):
    function, tensors = writing(text)
    module = dynamo_graph_of(function, *tensors)
    before = module.code
    assert writes(module)
    assert without(module, tensors).code == before


def test_a_write_of_a_value_of_its_own_is_an_operation():
    def function(x):
        y = x * 2
        y.masked_fill_(x > 0, 0.0)
        return y + 1

    module = graph_of(function, X)
    without_writes(module.graph, None)
    module.recompile()
    assert names(module) == ["masked_fill"]
    torch.testing.assert_close(module(X), function(X))


@pytest.mark.parametrize("name", ["add_", "sub_", "mul_", "div_"])
def test_a_write_rounds_to_the_dtype_that_is_written(name):
    def function(x):
        y = (x * 2).half()
        z = getattr(y, name)(x.exp())
        return y + z

    module = graph_of(function, X)
    without_writes(module.graph, None)
    module.recompile()
    assert names(module) == ["half", "exp", name[:-1], "to"]
    actual, expected = module(X), function(X)
    assert actual.dtype == torch.float16
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kind", ["an input", "a view read later", "another dtype"])
def test_a_write_that_somebody_may_see_stays(kind):
    def function(x):
        if kind == "an input":
            return x.mul_(2) + 1
        y = x * 2
        if kind == "another dtype":
            return y.half().pow_(y) + 1
        view = y.view(24, 6)
        y.mul_(2)
        return view + 1

    module = graph_of(function, X.clone())
    without_writes(module.graph, None)
    assert [n for n in names(module) if n.endswith("_")], module.code


OTHER_DTYPES = {
    "a comparison with a number": lambda x: (x * 2).gt_(0.0) + 1,
    "a comparison with a tensor": lambda x: (x * 2).eq_(x) + 1,
    "a negation": lambda x: (x * 2).logical_not_() + 1,
    "a wider bound, by name": lambda x: (x * 2).half().clamp_(min=x) + 1,
    "a wider bound, by position": lambda x: (x * 2).half().clamp_(x) + 1,
}


# FUSE-04
@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_a_write_keeps_the_dtype_that_is_written(name):
    function = OTHER_DTYPES[name]
    module = graph_of(function, X)
    without_writes(module.graph, None)
    module.recompile()
    actual, expected = module(X.clone()), function(X)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def flagged():
    """Functions of torch.nn.functional that may be asked to write their input, with arguments up to the flag."""
    for name, function in vars(F).items():
        if callable(function) and not name.startswith("_"):
            try:
                parameters = [*inspect.signature(function).parameters.values()]
            except ValueError:
                continue
            if "inplace" in [parameter.name for parameter in parameters]:
                yield name, [0.25 if p.default is p.empty else p.default for p in parameters[1:-1]]


# FUSE-04
@pytest.mark.parametrize(("name", "arguments"), [pytest.param(*row, id=row[0]) for row in flagged()])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_function_that_is_asked_to_write_is_seen_to(name, arguments, by_name):
    """By name and, as `torch.nn.LeakyReLU` and others ask, by position."""
    arguments = [False if argument is True else argument for argument in arguments]  # without dropout

    def function(x):
        y = x * 2
        getattr(F, name)(y, *arguments, *(() if by_name else (True,)), **({"inplace": True} if by_name else {}))
        return y + 1

    x = X[0] if name == "dropout1d" else X
    module = dynamo_graph_of(function, x.clone())
    assert len(writes(module)) == 1
    without(module, [x.clone()])
    torch.testing.assert_close(module(x.clone())[0], function(x.clone()), rtol=0, atol=0)


# FUSE-04
@pytest.mark.parametrize("module", [torch.nn.LeakyReLU(0.2, True), torch.nn.ELU(1.0, True), torch.nn.Hardtanh(-1.0, 1.0, True)])
def test_scores_that_a_module_writes_are_those_that_attend(module):
    def attend(query, key, value):
        scores = query @ key.mT
        module(scores)
        return scores.softmax(-1) @ value

    compiled = torch.compile(attend, backend="foci")
    for length in several(16, 24, 33):
        tensors = [torch.randn(2, 3, length, 8) for _ in range(3)]
        torch.testing.assert_close(compiled(*tensors), attend(*tensors), atol=1e-5, rtol=1e-5)


def test_to_ask_for_a_dtype_draws_no_random_number():
    module = graph_of(lambda x: F.dropout(x * 2, 0.5, inplace=True) + 1, X)
    state = torch.get_rng_state()
    without_writes(module.graph, None)
    assert torch.equal(state, torch.get_rng_state())
