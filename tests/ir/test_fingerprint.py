"""What may be remembered of a function: nothing that it reads may be missing from its key."""

import math
import types

import pytest
import torch

import foci
from foci.ir.function_fingerprint import fingerprint
from foci.mask_examples import Sizes

GAIN = 1.0


def weight():
    return torch.arange(4.0)


def tensors():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 2, 12, 8, generator=generator) for _ in range(3))


def by_attribute(w):
    return lambda s, b, h, i, j: s * w.gain + w[h]


def by_getattr(w):
    return lambda s, b, h, i, j: s * getattr(w, "gain", 1.0) + w[h]


def by_vars(w):
    return lambda s, b, h, i, j: s * vars(w)["gain"] + w[h]


def by_dict(w):
    return lambda s, b, h, i, j: s * w.__dict__["gain"] + w[h]


def by_name_of_a_method(w):
    w.max = w.gain  # hides the method
    return lambda s, b, h, i, j: s * w.max + w[h]


def by_identity(w):
    lookup = gain_of
    return lambda s, b, h, i, j: s * lookup(id(w)) + w[h]


def gain_of(key):
    return globals()["KNOWN"][key]


KNOWN = {}


def by_a_function(w):
    def gain_of(tensor):
        return tensor.gain

    return lambda s, b, h, i, j: s * gain_of(w) + w[h]


def by_parameter(w):
    parameter = torch.nn.Parameter(w)
    parameter.gain = w.gain
    return lambda s, b, h, i, j: s * parameter.gain + parameter[h]


READERS = [by_attribute, by_getattr, by_vars, by_dict, by_name_of_a_method, by_identity, by_a_function, by_parameter]


# FLEX-09
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_attributes_of_tensors_are_read_anew(reader):
    q, k, v = tensors()
    for gain in (1.0, 3.0, 0.5):
        w = weight()
        w.gain = gain
        KNOWN[id(w)] = gain
        got = foci.flex_attention(q, k, v, score_mod=reader(w))
        scores = (q.double() @ k.double().mT) * 8**-0.5 * gain + w.double()[:2, None, None]
        torch.testing.assert_close(got.double(), scores.softmax(-1) @ v.double(), atol=1e-5, rtol=1e-5)


def by_globals():
    return lambda s, b, h, i, j: s * globals()["GAIN"]


def by_eval():
    return lambda s, b, h, i, j: s * eval("GAIN")


def by_exec():
    def score(s, b, h, i, j):
        namespace = {}
        exec("gain = GAIN", globals(), namespace)
        return s * namespace["gain"]

    return score


def by_global():
    return lambda s, b, h, i, j: s * GAIN


def by_attribute_of_torch():
    return lambda s, b, h, i, j: s * torch.gain


def by_module_of_torch():
    return lambda s, b, h, i, j: s * float(torch.os.environ["GAIN"])


@pytest.mark.parametrize("reader", [by_globals, by_eval, by_exec, by_global, by_attribute_of_torch, by_module_of_torch])
def test_globals_are_read_anew(reader, monkeypatch):
    q, k, v = tensors()
    score = reader()
    for gain in (1.0, 3.0, 0.5):
        monkeypatch.setitem(globals(), "GAIN", gain)
        monkeypatch.setattr(torch, "gain", gain, raising=False)
        monkeypatch.setenv("GAIN", str(gain))
        got = foci.flex_attention(q, k, v, score_mod=score)
        scores = (q.double() @ k.double().mT) * 8**-0.5 * gain
        torch.testing.assert_close(got.double(), scores.softmax(-1) @ v.double(), atol=1e-5, rtol=1e-5)


def test_attributes_that_nobody_reads_cost_nothing():
    w = weight()
    w._is_initialized = True  # as libraries mark parameters
    assert fingerprint(lambda s, b, h, i, j: s + w[h]) is not None


def own_function(w):
    return lambda s, b, h, i, j: s + w[h]


REMEMBERED = {
    "captured": lambda w: lambda s, b, h, i, j: s + w[h] * (i - j),
    "shape": lambda w: lambda s, b, h, i, j: s + w[h % w.shape[0]] * len(w) * w.size(0) / w.numel(),
    "torch": lambda w: lambda s, b, h, i, j: torch.where(i >= j, torch.nn.functional.silu(s), -torch.inf),
    "math": lambda w: lambda s, b, h, i, j: s * math.log2(8) + math.pi,
    "methods": lambda w: lambda s, b, h, i, j: s.clamp(-3, 3).tanh().masked_fill(i < j, float("-inf")).to(torch.float32),
    "constant": lambda w: lambda s, b, h, i, j: s * torch.tensor(3.0),
    "builtins": lambda w: lambda s, b, h, i, j: sum(s * float(n) for n in range(3)) + min(1, 2) + abs(s),
    "function": lambda w, add=lambda s, h: s + h: lambda s, b, h, i, j: add(s, h),
}


@pytest.mark.parametrize("name", REMEMBERED)
def test_what_is_remembered(name):
    assert fingerprint(REMEMBERED[name](weight())) is not None


@pytest.mark.parametrize("module", [foci.masks, foci.scores], ids=lambda module: module.__name__)
def test_focis_own_functions_are_remembered(module):
    sizes, cpu = Sizes(B=2, Hq=4, Hkv=2, Sq=40, Skv=40, D=16), torch.device("cpu")
    for example in module.EXAMPLES:
        mod = example.build(sizes, cpu) if module is foci.masks else example.build(sizes, cpu, torch.float32)
        assert fingerprint(mod.function) is not None, example.name


def test_functions_that_close_over_themselves():
    q, k, v = tensors()

    def causal(b, h, i, j):
        causal.calls = 1
        return i >= j

    def even(depth, i, j):
        return i >= j if depth == 0 else odd(depth - 1, i, j)

    def odd(depth, i, j):
        return i >= j if depth == 0 else even(depth - 1, i, j)

    hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
    want = ((q.double() @ k.double().mT) * 8**-0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v.double()
    for mask in (causal, lambda b, h, i, j: even(3, i, j)):
        torch.testing.assert_close(foci.attention(q, k, v, mask=mask).double(), want, atol=1e-5, rtol=1e-5)
    assert fingerprint(lambda b, h, i, j: even(3, i, j)) is not None


def test_which_function_is_closed_over_twice_is_part_of_the_key():
    def compose(first, second):
        return lambda s, b, h, i, j: second(first(s))

    double, triple = (lambda s, n=n: s * n for n in (2, 3))
    keys = {str(fingerprint(compose(*pair)).structure) for pair in ((double, double), (double, triple), (triple, double))}
    assert len(keys) == 2  # numbers are apart


def test_a_function_of_no_module():
    function = types.FunctionType(compile("lambda s, b, h, i, j: helper(s)", "f", "eval").co_consts[0], {"helper": None})
    helper = types.FunctionType((lambda s: s).__code__, {})
    helper.__module__ = None
    assert fingerprint(function) == fingerprint(function)  # a global that is None
    without = fingerprint(function).structure
    function.__globals__["helper"] = helper
    assert fingerprint(function).structure != without
