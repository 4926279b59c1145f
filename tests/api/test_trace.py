"""Tracing: what a function captures and how, and every word of the language against torch on real tensors."""

import functools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import foci
from foci.ir.eager import Env, evaluate
from foci.ir.torch_functions import TORCH_FUNCTIONS
from foci.trace_functions import bind

CPU = torch.device("cpu")
SCORE_VALUES = torch.linspace(-2.7, 2.9, 24, dtype=torch.float64).view(1, 1, 4, 6)
AT = {
    "b": torch.arange(1).view(-1, 1, 1, 1),
    "h": torch.arange(1).view(1, -1, 1, 1),
    "q_idx": torch.arange(4).view(-1, 1),
    "kv_idx": torch.arange(6),
}
TABLE = torch.linspace(-1.5, 2.0, 12, dtype=torch.float64)
MATRIX = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).view(6, 4)
INTS = torch.tensor([3, -7, 5, 2, -1, 4, 6, -2, 9, 1, 0, 8])
EDGES = torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
GENERATOR = torch.Generator().manual_seed(0)
DROPOUT = torch.nn.Dropout(0.5)


def traced(function):
    """The function's values over a tile, through its expression in float64."""
    bound = bind(lambda *at: function(*at).double(), None, CPU)
    lengths = {"q_len": torch.tensor(4), "kv_len": torch.tensor(6)}
    env = Env(AT | lengths | {"score": SCORE_VALUES}, bound.captures, bound.ints, bound.floats, torch.float64)
    (value,) = evaluate((bound.variant.score,), env)
    return value.expand(1, 1, 4, 6)


def eager(function):
    """The same by running the function on tensors, one pair of positions at a time."""
    rows = [
        [torch.as_tensor(function(SCORE_VALUES[0, 0, i, j], *(torch.tensor(n) for n in (0, 0, i, j)))) for j in range(6)] for i in range(4)
    ]
    return torch.stack([torch.stack([v.double() for v in row]) for row in rows]).view(1, 1, 4, 6)


def check(function):
    torch.testing.assert_close(traced(function), eager(function), atol=1e-6, rtol=1e-6, equal_nan=True)


def unary(name, argument=lambda s: s):
    return lambda s, b, h, q, kv: getattr(torch, name)(argument(s))


def method(name, *args, of=lambda s, q, kv: s, **kwargs):
    return lambda s, b, h, q, kv: getattr(of(s, q, kv), name)(*args, **kwargs)


def number(s, q, kv):
    return s


def position(s, q, kv):
    return q - kv


def row(s, q, kv):
    return MATRIX[kv]


unit = lambda s: s / 3
positive = lambda s: s * s + 0.1

# What to trace for a word; a list for several uses of it.
USES = {
    **{name: unary(name) for name in ["neg", "negative", "abs", "absolute", "sign", "sgn", "floor", "ceil", "trunc", "fix", "exp", "exp2", "expm1", "sin", "cos", "tan", "sinh", "cosh", "tanh", "sigmoid", "erf", "erfc", "atan", "arctan", "isnan", "isinf", "isfinite", "square", "frac", "relu", "deg2rad", "rad2deg", "round", "positive"]},
    **{name: unary(name, positive) for name in ["log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal"]},
    **{name: unary(name, unit) for name in ["asin", "acos", "arcsin", "arccos"]},
    "expit": lambda s, b, h, q, kv: torch.special.expit(s),
    **{name: (lambda name: lambda s, b, h, q, kv: getattr(torch, name)(s, MATRIX[kv, q]))(name) for name in ["add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "maximum", "minimum", "fmax", "fmin", "eq", "ne", "not_equal", "lt", "less", "le", "less_equal", "gt", "greater", "ge", "greater_equal", "atan2", "arctan2", "hypot", "logaddexp", "fmod", "remainder", "floor_divide", "float_power"] if name != "float_power"},
    "float_power": lambda s, b, h, q, kv: torch.float_power(s * s + 0.5, 1.5),
    "pow": [lambda s, b, h, q, kv: torch.pow(s * s + 0.5, 1.5), lambda s, b, h, q, kv: s**2 + 2.0**s, lambda s, b, h, q, kv: (q + 1) ** 3],
    "radd": lambda s, b, h, q, kv: 2 + s, "rsub": [lambda s, b, h, q, kv: 2 - s, lambda s, b, h, q, kv: torch.rsub(s, 3, alpha=2)],
    "rdiv": lambda s, b, h, q, kv: 2 / (s + 5), "rtruediv": lambda s, b, h, q, kv: 1.5 / (q + 1), "truediv": lambda s, b, h, q, kv: s / (kv + 1),
    "floordiv": [lambda s, b, h, q, kv: (q - kv) // 3, lambda s, b, h, q, kv: torch.div(q - kv, 2, rounding_mode="floor"),
                 lambda s, b, h, q, kv: torch.div(q - kv, 2, rounding_mode="trunc"), lambda s, b, h, q, kv: torch.div(s, 0.7, rounding_mode="trunc")],
    "rfloordiv": lambda s, b, h, q, kv: 7 // (q + 1), "mod": lambda s, b, h, q, kv: (q - kv) % 3, "rmod": lambda s, b, h, q, kv: 7 % (q + 2),
    "rpow": lambda s, b, h, q, kv: 2.0 ** s,
    "addcmul": lambda s, b, h, q, kv: torch.addcmul(s, s, MATRIX[kv, q], value=0.5),
    "addcdiv": lambda s, b, h, q, kv: torch.addcdiv(s, s, MATRIX[kv, q] + 3, value=0.5),
    "lerp": lambda s, b, h, q, kv: torch.lerp(s, MATRIX[kv, q], 0.3),
    "min": [lambda s, b, h, q, kv: torch.min(s, MATRIX[kv, q]), lambda s, b, h, q, kv: MATRIX[kv].min(), lambda s, b, h, q, kv: MATRIX[kv].min(-1)[0]],
    "max": [lambda s, b, h, q, kv: torch.max(s, MATRIX[kv, q]), lambda s, b, h, q, kv: MATRIX[kv].max(), lambda s, b, h, q, kv: MATRIX[kv].max(dim=0).values],
    **{name: (lambda name: lambda s, b, h, q, kv: torch.where(getattr(torch, name)(q > kv, kv > 2), s, -s))(name)
       for name in ("logical_and", "logical_or", "logical_xor")},
    "logical_not": lambda s, b, h, q, kv: torch.where(torch.logical_not(q), s, -s),
    **{name: (lambda name: lambda s, b, h, q, kv: getattr(torch, name)(q + 5, kv))(name) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    "bitwise_not": lambda s, b, h, q, kv: torch.bitwise_not(q - kv), "invert": lambda s, b, h, q, kv: ~(q + 1), "inv": lambda s, b, h, q, kv: torch.where(~(q > kv), s, 0),
    "and": lambda s, b, h, q, kv: q & 3, "or": lambda s, b, h, q, kv: 5 | kv, "xor": lambda s, b, h, q, kv: q ^ kv,
    "and_": lambda s, b, h, q, kv: torch.where((q > 1).__and__(kv > 1), s, 0), "or_": lambda s, b, h, q, kv: torch.where((q > 1).__or__(kv > 1), s, 0),
    "bitwise_left_shift": lambda s, b, h, q, kv: torch.bitwise_left_shift(q, 2), "bitwise_right_shift": lambda s, b, h, q, kv: torch.bitwise_right_shift(kv, 1),
    "lshift": lambda s, b, h, q, kv: q << 3, "rshift": lambda s, b, h, q, kv: (q - kv) >> 1,
    "where": [lambda s, b, h, q, kv: torch.where(q > kv, s, 0.5), lambda s, b, h, q, kv: s.where(s > 0, -1.0)],
    "masked_fill": lambda s, b, h, q, kv: s.masked_fill(q > kv, 7.0),
    "clamp": [lambda s, b, h, q, kv: s.clamp(-1, 1), lambda s, b, h, q, kv: torch.clamp(q - kv, max=2), lambda s, b, h, q, kv: s.clamp(min=0.3)],
    "nan_to_num": [
        lambda s, b, h, q, kv: torch.nan_to_num(s.log()), lambda s, b, h, q, kv: (s / (q - 1)).nan_to_num(0.5, 3.0, -4.0) + q.nan_to_num(),
        lambda s, b, h, q, kv: torch.nan_to_num((q - kv) / 0 * s.sign(), nan=-1.0, posinf=7.0, neginf=TABLE[q])],
    "clip": lambda s, b, h, q, kv: torch.clip(s, -0.2, 0.9), "clamp_min": lambda s, b, h, q, kv: s.clamp_min(0.1), "clamp_max": lambda s, b, h, q, kv: s.clamp_max(0.1),
    **{name: (lambda name: lambda s, b, h, q, kv: getattr(F, name)(s))(name) for name in (
        "hardtanh", "relu6", "silu", "gelu", "softplus", "logsigmoid", "leaky_relu", "elu", "softsign", "tanhshrink")},
    "log_sigmoid": lambda s, b, h, q, kv: F.logsigmoid(s * 30),
    "to": [lambda s, b, h, q, kv: (q - kv).to(torch.float64) / 2, lambda s, b, h, q, kv: s.to(torch.int64), lambda s, b, h, q, kv: q.to(s) * 0.5],
    "type": lambda s, b, h, q, kv: q.type(torch.float64) / 3, "type_as": lambda s, b, h, q, kv: q.type_as(s) / 3,
    "float": lambda s, b, h, q, kv: q.float() / 3, "double": lambda s, b, h, q, kv: q.double() / 3, "half": lambda s, b, h, q, kv: s.half(),
    "bfloat16": lambda s, b, h, q, kv: s.bfloat16(), "int": lambda s, b, h, q, kv: s.int(), "long": lambda s, b, h, q, kv: s.long(),
    "bool": lambda s, b, h, q, kv: torch.where(q.bool(), s, -s),
    **{name: method(name) for name in ("clone", "contiguous", "cpu")},
    "pos": lambda s, b, h, q, kv: +s,
    "zeros_like": lambda s, b, h, q, kv: torch.zeros_like(s) + s, "ones_like": lambda s, b, h, q, kv: torch.where(torch.ones_like(q, dtype=torch.bool), s, 0),
    "full_like": lambda s, b, h, q, kv: torch.full_like(s, 0.25), "new_zeros": lambda s, b, h, q, kv: s.new_zeros(()) + q, "new_ones": lambda s, b, h, q, kv: s.new_ones(()) * q,
    "new_full": lambda s, b, h, q, kv: s.new_full((), 1.5), "new_tensor": lambda s, b, h, q, kv: s.new_tensor(2.5),
    "getitem": [lambda s, b, h, q, kv: TABLE[q + kv], lambda s, b, h, q, kv: MATRIX[kv][q], lambda s, b, h, q, kv: MATRIX[..., q][kv], lambda s, b, h, q, kv: TABLE[-1 - q]],
    "select": lambda s, b, h, q, kv: MATRIX.select(0, 2)[q],
    "index_select": lambda s, b, h, q, kv: torch.index_select(TABLE, 0, kv).sum(), "embedding": lambda s, b, h, q, kv: F.embedding(kv, MATRIX).sum(-1),
    "sum": [lambda s, b, h, q, kv: MATRIX[kv].sum(), lambda s, b, h, q, kv: MATRIX.sum(0)[q], lambda s, b, h, q, kv: (INTS[:4] > kv).sum()],
    "amax": method("amax", -1, of=row), "amin": method("amin", -1, of=row), "mean": method("mean", of=row),
    "any": lambda s, b, h, q, kv: torch.where((kv == INTS).any(), s, 0), "all": lambda s, b, h, q, kv: torch.where((MATRIX[kv] < 0.5).all(-1), s, 0),
    "dot": lambda s, b, h, q, kv: torch.dot(MATRIX[q], MATRIX[kv]), "vdot": lambda s, b, h, q, kv: torch.vdot(MATRIX[q], MATRIX[kv]),
    "inner": lambda s, b, h, q, kv: torch.inner(MATRIX[q], MATRIX[kv]), "vecdot": lambda s, b, h, q, kv: torch.linalg.vecdot(MATRIX[q], MATRIX[kv]),
    "linalg_vecdot": lambda s, b, h, q, kv: torch.linalg.vecdot(MATRIX[q], MATRIX[kv], dim=-1),
    "matmul": lambda s, b, h, q, kv: MATRIX[q] @ MATRIX[kv], "mv": lambda s, b, h, q, kv: torch.mv(MATRIX, MATRIX[kv])[q],
    "rmatmul": lambda s, b, h, q, kv: (MATRIX[:4] @ MATRIX[kv])[q],
    "norm": lambda s, b, h, q, kv: MATRIX[kv].norm(), "vector_norm": lambda s, b, h, q, kv: torch.linalg.vector_norm(MATRIX[kv]),
    "linalg_vector_norm": lambda s, b, h, q, kv: torch.linalg.vector_norm(MATRIX[kv], dim=-1),
    "isin": lambda s, b, h, q, kv: torch.where(torch.isin(kv, INTS), s, 0),
    "bucketize": [lambda s, b, h, q, kv: torch.bucketize(s, EDGES), lambda s, b, h, q, kv: torch.bucketize(s, EDGES, right=True)],
    "searchsorted": lambda s, b, h, q, kv: torch.searchsorted(EDGES, s, side="right"),
    "unsqueeze": lambda s, b, h, q, kv: (MATRIX[kv].unsqueeze(0) * 2).sum(), "squeeze": lambda s, b, h, q, kv: MATRIX[kv].unsqueeze(0).squeeze(0)[q],
    "view": lambda s, b, h, q, kv: MATRIX[kv].view(-1).sum(), "reshape": lambda s, b, h, q, kv: MATRIX[kv].reshape(4)[q],
}  # fmt: skip
# Names that only graphs have: fx and aten spell these words so, and no function of torch does.
GRAPH_ONLY = {"_to_copy", "convert_element_type", "cuda", "alias", "scalar_tensor", "index", "mod_index", "apply"}


# FLEX-02
@pytest.mark.parametrize("name", sorted(USES))
def test_word(name):
    for function in USES[name] if isinstance(USES[name], list) else [USES[name]]:
        check(function)


def test_every_word_is_tested():
    assert set(USES) | GRAPH_ONLY >= set(TORCH_FUNCTIONS)
    assert set(TORCH_FUNCTIONS) >= GRAPH_ONLY


# Where captures hide -----------------------------------------------------------------------------------------------


class Nested:
    def __init__(self):
        self.tables = {"first": [TABLE, MATRIX]}

    @property
    def matrix(self):
        return self.tables["first"][1]

    def score(self, s, b, h, q, kv):
        return s * self.matrix[kv, q]

    def __call__(self, s, b, h, q, kv):
        return self.score(s, b, h, q, kv) + self.tables["first"][0][kv]


def keyword_only(s, b, h, q, kv, *, table, factor=2):
    return s * factor + table[kv]


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) * 2

    return wrapper


HIDDEN = {
    "closure": (lambda table: lambda s, b, h, q, kv: s + table[kv])(TABLE),
    "default": lambda s, b, h, q, kv, table=TABLE: s + table[kv],
    "partial": functools.partial(keyword_only, table=TABLE, factor=3),
    "object": Nested(),
    "bound method": Nested().score,
    "decorator": decorated(lambda s, b, h, q, kv: s + TABLE[kv]),
    "computed": lambda s, b, h, q, kv: s + (TABLE.exp() * 2 + 1)[kv],
    "sliced": lambda s, b, h, q, kv: s + TABLE[2:9][kv] + MATRIX[1:, ::2][q, 0],
    "chained": lambda s, b, h, q, kv: MATRIX[INTS[INTS[q].abs() % 4].abs() % 6][INTS[kv].abs() % 4],
    "python loop": lambda s, b, h, q, kv: functools.reduce(lambda total, n: total + TABLE[n] * s**n, range(4), 0 * s),
    "python numbers": lambda s, b, h, q, kv: s * math.pi if len(TABLE) == 12 else s,
    "tensor of one number": lambda s, b, h, q, kv: s * torch.tensor(0.5, dtype=torch.float64) + torch.tensor([1, 2])[1],
    "negative and none indices": lambda s, b, h, q, kv: MATRIX[-1, q] + MATRIX[None, kv].sum(),
    "dropout outside of training": lambda s, b, h, q, kv: s + F.dropout(TABLE, 0.5, False)[kv] + F.alpha_dropout(TABLE)[q],
    "shape": lambda s, b, h, q, kv: s * TABLE.shape[0] + MATRIX[kv].shape[0],
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_captures(name):
    check(HIDDEN[name])


@pytest.mark.parametrize("number", [np.int64(3), np.int32(-2), np.float32(1.5), np.float64(0.25), np.array(2)], ids=repr)
def test_numbers_of_numpy(number):
    as_python = number.item()
    for of_numpy, of_python in (
        (lambda s, b, h, q, kv: s * number, lambda s, b, h, q, kv: s * as_python),
        (lambda s, b, h, q, kv: number - s, lambda s, b, h, q, kv: as_python - s),
        (lambda s, b, h, q, kv: torch.where(q > number, s, 0.0), lambda s, b, h, q, kv: torch.where(q > as_python, s, 0.0)),
    ):
        torch.testing.assert_close(traced(of_numpy), traced(of_python))


def test_one_capture_for_one_tensor():
    bound = bind(lambda s, b, h, q, kv: s + TABLE[q] * TABLE[kv] + TABLE.sum() * 0 + MATRIX[kv, q], None, CPU)
    assert sum(c is TABLE for c in bound.captures) == 1 and sum(c is MATRIX for c in bound.captures) == 1


# FLEX-10
def test_numbers_are_not_part_of_a_variant():
    def make(window, factor):
        return bind(lambda s, b, h, q, kv: s * factor + (q - kv), lambda b, h, q, kv: q - kv < window, CPU)

    first, second = make(17, 0.3), make(4096, 7.25)
    assert first.variant is second.variant
    assert first.ints != second.ints and first.floats != second.floats
    branch = lambda flag: bind(lambda s, b, h, q, kv: s.sin() if flag else s.cos(), None, CPU).variant
    assert branch(True) is not branch(False) and branch(True) is branch(True)


def test_lengths_of_the_sequence():
    check_values = traced(lambda s, b, h, q, kv: s * 0 + foci.q_len() * 10 + foci.kv_len())
    assert bool((check_values == 46).all())


REFUSED = {
    "in place": (lambda s, b, h, q, kv: s.mul_(2), "Tensor.mul_"),
    "augmented is fine, out is not": (lambda s, b, h, q, kv: torch.add(s, 1, out=s), "out"),
    "item assignment": (lambda s, b, h, q, kv: TABLE.__setitem__(q, 1) or s, "__setitem__|setitem"),
    "sort": (lambda s, b, h, q, kv: MATRIX[kv].sort().values[0], "Tensor.sort"),
    "argmax": (lambda s, b, h, q, kv: MATRIX[kv].argmax() + s, "Tensor.argmax"),
    "random of a symbol": (lambda s, b, h, q, kv: torch.rand_like(s), "torch.rand_like"),
    "random": (lambda s, b, h, q, kv: s + torch.rand(()), "torch.rand, a random number,"),
    "random row": (lambda s, b, h, q, kv: s + torch.randn(6)[kv], "torch.randn, a random number,"),
    "random integers": (lambda s, b, h, q, kv: s * torch.randint(0, 5, ()), "torch.randint, a random number,"),
    "random of a table": (lambda s, b, h, q, kv: s + torch.randn_like(TABLE)[kv], "torch.randn_like, a random number,"),
    "random order": (lambda s, b, h, q, kv: s + torch.randperm(6)[kv], "torch.randperm, a random number,"),
    "random in place": (lambda s, b, h, q, kv: s + torch.empty(6).uniform_()[kv], "torch.uniform_, a random number,"),
    "random by a generator": (lambda s, b, h, q, kv: s + torch.rand((), generator=GENERATOR), "torch.rand, a random number,"),
    "bernoulli": (lambda s, b, h, q, kv: s * torch.bernoulli(EDGES.abs() / 3)[kv % 4], "torch.bernoulli, a random number,"),
    "dropout of a table": (lambda s, b, h, q, kv: s + F.dropout(TABLE)[kv], "torch.dropout, a random number,"),
    "dropout by a module": (lambda s, b, h, q, kv: s + DROPOUT(TABLE)[kv], "torch.dropout, a random number,"),
    "dropout of a score": (lambda s, b, h, q, kv: F.dropout(s, 0.1), "torch.dropout"),
    "loop over a row": (lambda s, b, h, q, kv: sum(x for x in MATRIX[kv]), "iteration"),
    "range": (lambda s, b, h, q, kv: s * len(range(q)), "conversion to a Python integer"),
    "math": (lambda s, b, h, q, kv: math.sqrt(s), "conversion to a Python number"),
    "and": (lambda s, b, h, q, kv: torch.where(q > kv and kv > 2, s, 0), "Python `if`, `and`"),
    "chained comparison": (lambda s, b, h, q, kv: torch.where(0 < q < kv, s, 0), "Python `if`, `and`"),
    "python min": (lambda s, b, h, q, kv: min(s, 1.0), "torch.minimum"),
    "cumsum": (lambda s, b, h, q, kv: MATRIX[kv].cumsum(0)[q], "Tensor.cumsum"),
    "keepdim": (lambda s, b, h, q, kv: MATRIX[kv].sum(0, keepdim=True), "keepdim=True"),
    "rows that do not broadcast": (lambda s, b, h, q, kv: (MATRIX[kv] + TABLE[:3]).sum(), "rows must broadcast"),
}


# FLEX-02
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_operation_and_line(name):
    function, words = REFUSED[name]
    line = function.__code__.co_firstlineno
    with pytest.raises(foci.TraceError, match=rf"test_trace.py:{line}: .*({words})"):
        bind(function, None, CPU)


# FLEX-02
def test_the_line_is_that_of_the_innermost_user_code():
    def inner(s):
        return torch.erfinv(s)

    def outer(s, b, h, q, kv):
        return inner(s) + 1

    with pytest.raises(foci.TraceError, match=rf"test_trace.py:{inner.__code__.co_firstlineno + 1}: .*erfinv"):
        bind(outer, None, CPU)


def test_functions_traced_by_two_threads_at_once():
    """Each waits for the other in the middle of its own."""
    both = threading.Barrier(2, timeout=20)

    def make(table):
        def score(s, b, h, q, kv):
            both.wait()
            s = table[foci.q_len() - 1] + s
            both.wait()
            return s

        return score

    tables = [torch.arange(4.0), torch.arange(6)]
    with ThreadPoolExecutor(2) as pool:
        bounds = list(pool.map(lambda table: bind(make(table), None, CPU), tables))
    for bound, table in zip(bounds, tables, strict=True):
        assert [t is table for t in bound.captures] == [True]
        assert bound.variant.captures[0].dtype == table.dtype


def test_tracing_leaves_nothing_behind():
    with pytest.raises(foci.TraceError):
        bind(lambda s, b, h, q, kv: s.sort(), None, CPU)
    from foci.ir import trace

    assert not trace._local.active
    with pytest.raises(RuntimeError):
        foci.q_len()
