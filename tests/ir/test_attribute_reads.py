"""Functions that read attributes of objects, and globals: looked up anew at each call, and traced again only if they must be."""

import dataclasses
import functools
import sys
import types

import pytest
import torch
from torch.nn.utils import parametrize

import foci
from foci import trace_functions
from foci.ir.code_reads import read_code
from foci.ir.function_fingerprint import fingerprint

CASES = {}
GAIN, BIAS = 1.0, torch.zeros(2)
SHELF = types.ModuleType("shelf")


def case(make):
    CASES[make.__name__] = make
    return make


# Each makes (function that sets gain and bias, function that returns the score function of a call).


class Bag:
    """An ordinary object."""


class Scored(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Bag()
        self.register_buffer("bias", torch.zeros(2))
        self.gain = 1.0

    def set(self, gain, bias):
        self.gain, self.bias = gain, bias

    def score(self, s, b, h, i, j):
        return s * self.gain + self.bias[h]

    def by_helper(self, s, b, h, i, j):
        return self.scaled(s) + self.bias[h]

    def scaled(self, s):
        return s * self.gain

    def __call__(self):
        return lambda s, b, h, i, j: s * self.gain + self.bias[h]


@case
def module():
    scored = Scored()
    return scored.set, scored


@case
def method():
    scored = Scored()
    return scored.set, lambda: scored.score


@case
def method_that_calls_another():
    scored = Scored()
    return scored.set, lambda: scored.by_helper


@case
def methods_of_two_objects():
    one, other = Scored(), Scored()

    def change(gain, bias):
        one.set(gain, bias)
        other.set(5.0, bias + 1)

    def made():
        first, second = one.score, other.score
        return lambda s, b, h, i, j: first(s, b, h, i, j) + 0 * second(s, b, h, i, j)

    return change, made


@case
def config_of_a_module():
    scored = Scored()

    def change(gain, bias):
        scored.inner = dataclasses.make_dataclass("Config", ["gain"])(gain)
        scored.bias = bias

    return change, lambda: lambda s, b, h, i, j: s * scored.inner.gain + scored.bias[h]


@case
def parameter():
    scored = Scored()
    scored.p = torch.nn.Parameter(torch.zeros(2))

    def change(gain, bias):
        scored.p.data = bias
        scored.gain = gain

    return change, lambda: lambda s, b, h, i, j: s * scored.gain + scored.p[h]


@case
def namespace():
    bag = types.SimpleNamespace()
    return (lambda gain, bias: vars(bag).update(gain=gain, bias=bias)), lambda: lambda s, b, h, i, j: s * bag.gain + bag.bias[h]


@case
def slots():
    class Slotted:
        __slots__ = ("bias", "gain")

    slotted = Slotted()

    def change(gain, bias):
        slotted.gain, slotted.bias = gain, bias

    return change, lambda: lambda s, b, h, i, j: s * slotted.gain + slotted.bias[h]


@case
def attribute_of_a_class():
    class Classed:
        pass

    classed = Classed()

    def change(gain, bias):
        Classed.gain, classed.bias = gain, bias

    return change, lambda: lambda s, b, h, i, j: s * classed.gain + classed.bias[h]


@case
def global_variables():
    return (lambda gain, bias: globals().update(GAIN=gain, BIAS=bias)), lambda: lambda s, b, h, i, j: s * GAIN + BIAS[h]


@case
def attributes_of_a_python_module():
    return (lambda gain, bias: vars(SHELF).update(gain=gain, bias=bias)), lambda: lambda s, b, h, i, j: s * SHELF.gain + SHELF.bias[h]


@case
def global_function():
    return (lambda gain, bias: globals().update(GAIN=gain, BIAS=bias)), lambda: lambda s, b, h, i, j: by_globals(s, h)


def by_globals(s, h):
    return s * GAIN + BIAS[h]


KEPT = tuple(CASES)
COMPUTED = {}


def computed_by(bag):
    return (lambda gain, bias: COMPUTED.update(gain=gain, bias=bias)), lambda: lambda s, b, h, i, j: s * bag.gain + bag.bias[h]


@case
def property_of_a_class():
    values = []

    class Computed:
        gain = property(lambda self: values[0])

    computed = Computed()

    def change(gain, bias):
        values[:], computed.bias = [gain], bias

    return change, lambda: lambda s, b, h, i, j: s * computed.gain + computed.bias[h]


@case
def getattr_of_a_class():
    class Computed:
        def __getattr__(self, name):
            return COMPUTED[name]

    return computed_by(Computed())


@case
def getattribute_of_a_class():
    class Computed:
        gain, bias = 7.0, torch.ones(2)

        def __getattribute__(self, name):
            return COMPUTED[name]

    return computed_by(Computed())


@case
def parametrized():
    scored = Scored()
    scored.p = torch.nn.Parameter(torch.ones(2))

    class Shift(torch.nn.Module):
        bias = torch.zeros(2)

        def forward(self, p):
            return p * 0 + self.bias

    parametrize.register_parametrization(scored, "p", Shift())

    def change(gain, bias):
        scored.gain, Shift.bias = gain, bias

    return change, lambda: lambda s, b, h, i, j: s * scored.gain + scored.p[h]


@case
def either_of_two():
    one, other = Bag(), Bag()

    def change(gain, bias):
        one.gain, other.gain, one.bias, other.use = gain, 9.0, bias, one

    return change, lambda: lambda s, b, h, i, j: s * (one if other.use is one else other).gain + one.bias[h]


@case
def all_arguments_of_a_method():
    class Scorer:
        def score(*args):
            return args[1] * args[0].max + args[0].min[args[3]]  # attributes with names of a symbol's

    scorer = Scorer()

    def change(gain, bias):
        scorer.max, scorer.min = gain, bias

    return change, lambda: scorer.score


@case
def within_a_comprehension():
    bag = Bag()

    def change(gain, bias):
        bag.gain, bag.bias = gain, bias

    return change, lambda: lambda s, b, h, i, j: sum([s * bag.gain * 0.5 for _ in range(2)]) + bag.bias[h]


@pytest.fixture(scope="module")
def tensors():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 2, 12, 8, generator=generator) for _ in range(3))


# FLEX-09
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_call(name, tensors):
    q, k, v = tensors
    change, score = CASES[name]()
    for n, gain in enumerate((1.0, 3.0, 0.5, 3.0, 2)):
        bias = torch.tensor([0.0, float(n)])
        change(gain, bias)
        want = ((q.double() @ k.double().mT) * 8**-0.5 * gain + bias.double()[:, None, None]).softmax(-1) @ v.double()
        for _ in range(2):
            got = foci.attention(q, k, v, score=score())
            torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", KEPT)
def test_what_can_be_looked_up_is_traced_once(name, tensors, monkeypatch):
    change, score = CASES[name]()
    change(2.0, torch.ones(2))
    foci.attention(*tensors, score=score())
    monkeypatch.setattr(trace_functions, "_traced", lambda *_, **__: pytest.fail("traced again"))
    monkeypatch.setattr(trace_functions.cache_check, "ENABLED", False)
    foci.attention(*tensors, score=score())
    change(2.0, torch.zeros(2))
    foci.attention(*tensors, score=score())


@pytest.mark.parametrize("name", [name for name in CASES if name not in KEPT])
def test_what_may_run_code_has_no_key(name):
    change, score = CASES[name]()
    change(2.0, torch.ones(2))
    if name not in ("either_of_two", "within_a_comprehension") or sys.version_info < (3, 12):
        assert fingerprint(score()) is None


def test_gradients_of_what_a_module_holds(tensors):
    q, k, v = tensors
    scored = Scored()
    for n in range(3):
        scored.bias = torch.nn.Parameter(torch.randn(2)) if n == 0 else scored.bias
        reference = scored.bias.detach().double().requires_grad_()
        scored.bias.grad = None
        foci.attention(q, k, v, score=scored.score).square().sum().backward()
        scores = (q.double() @ k.double().mT) * 8**-0.5 + reference[:, None, None] * 1.0
        (scores.softmax(-1) @ v.double()).square().sum().backward()
        torch.testing.assert_close(scored.bias.grad.double(), reference.grad, atol=1e-5, rtol=1e-5)


def test_a_global_that_is_none_is_a_value(monkeypatch):
    function = lambda s, b, h, i, j: s if LIMIT is None else s * 2
    none = fingerprint(function).structure
    assert (type(None), None) in none
    monkeypatch.setitem(globals(), "LIMIT", 3)
    assert fingerprint(function).structure != none


LIMIT = None


def test_what_code_reads():
    one, other = Bag(), Bag()
    read = read_code((lambda s, h: s.clamp(-1, 1) * one.config.gain + other.bias[h].item() + GAIN).__code__)
    assert read.cells == {"one": {("config", "gain")}, "other": {("bias",)}}
    assert read.globals == {"GAIN": {()}} and read.first == {("clamp",)} and read.attributes == {"item"}
    within = read_code((lambda s: (lambda t: t * one.gain)(s)).__code__)
    assert within.cells == {"one": {()}} and within.attributes == {"gain"}


def test_code_that_changes_things_is_not_read():
    def imports(s):
        import math

        return s * math.pi

    def sets(s):
        Bag.last = s
        return s

    def declares(s):
        global GAIN
        GAIN = 2.0
        return s

    assert [read_code(function.__code__) for function in (imports, sets, declares)] == [None] * 3


# -- what two calls may not share


def outcomes(tensors, *functions):
    return [foci.attention(*tensors, score=function) for function in functions]


# FLEX-09
def test_a_method_is_not_its_function(tensors):
    class Scorer:
        def score(self, *args):
            return args[0] * 2.0 + args[-1] * 0.1

        def default(self, s, b=0, h=0, i=0, j=0):
            return s * 2.0 + j * 0.1

    for name in ("score", "default"):
        bound, unbound = outcomes(tensors, getattr(Scorer(), name), getattr(Scorer, name))
        assert not torch.equal(bound, unbound), name


def test_a_function_in_the_clothes_of_focis(tensors):
    @functools.wraps(foci.masks.causal)
    def local(s, j):
        return s + GAIN * j

    results = []
    for gain in (0.0, 1.0):
        globals()["GAIN"] = gain
        SHELF.helper = local
        results += outcomes(tensors, lambda s, b, h, i, j: SHELF.helper(s, j))
    assert not torch.equal(*results)


def test_a_closure_variable_that_the_function_writes(tensors):
    n = 0

    def score(s, b, h, i, j):
        nonlocal n
        n = (n + 1) % 2
        return s * (n + 1) + j * n

    one, two, three = outcomes(tensors, score, score, score)
    assert not torch.equal(one, two)
    assert torch.equal(one, three)


def test_a_builtin_that_somebody_replaced(tensors, monkeypatch):
    score = lambda s, b, h, i, j: s * divmod(5, 2)[0] + j
    before = outcomes(tensors, score)[0]
    monkeypatch.setattr("builtins.divmod", lambda *_: (5, 0))
    assert not torch.equal(before, outcomes(tensors, score)[0])


def test_the_default_dtype_of_new_tensors(tensors):
    score = lambda s, b, h, i, j: s + torch.tensor(1 / 3) * j
    torch.set_default_dtype(torch.float16)
    try:
        rounded = outcomes(tensors, score)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert not torch.equal(rounded, outcomes(tensors, score)[0])


def test_identity_of_values_that_are_equal(tensors):
    bag = Bag()
    results = []
    for mode in ("wide", "wider"[:4]):
        bag.mode = mode
        results += outcomes(tensors, lambda s, b, h, i, j: s * 2 + j if bag.mode is WIDE else s)
    assert not torch.equal(*results)


WIDE = "wide"


def test_attributes_that_a_metaclass_computes_for_the_class(tensors):
    class Meta(type):
        gain = property(lambda cls: pytest.fail("asked"))

    class Classed(metaclass=Meta):
        pass

    classed = Classed()
    results = []
    for gain in (1.0, 2.0):
        vars(classed)["gain"] = gain
        results += outcomes(tensors, lambda s, b, h, i, j: s * classed.gain + j)
    assert not torch.equal(*results)
