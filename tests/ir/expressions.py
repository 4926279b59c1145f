"""Random expressions for property tests, and an environment that every one of them can be evaluated in.

Captured tensors: c0 float [H], c1 float [B, Q], c2 int32 [Q], c3 bool [B, K], c4 float [K, R], c5 int64 [B, R].
Values stay moderate, divisors away from zero, so that results differ only where a rule is wrong.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from foci.ir.eager import Env
from foci.ir.expr import DType, Expr, axis, const, load, reduce, size, variable
from foci.ir.ops import apply, cast, round_to
from foci.ir.rewrite import canonical_levels

B, H, Q, K, R = 2, 3, 6, 5, 4
SCORE, BATCH, HEAD, ROW, COLUMN = (variable(name) for name in ("score", "b", "h", "q_idx", "kv_idx"))

OWN = 900  # above every level inside
FLOAT_ROW = load(4, (COLUMN, axis(OWN)), DType.FLOAT)
INT_ROW = load(5, (BATCH, axis(OWN)), DType.INT64)

UNARY_FLOAT = ("neg", "abs", "sign", "floor", "ceil", "round", "trunc", "sin", "cos", "atan", "tanh", "sigmoid", "erf")
BINARY_FLOAT = ("add", "sub", "mul", "min", "max")
BINARY_INT = ("add", "sub", "min", "max", "and", "or", "xor")
COMPARISONS = ("eq", "ne", "lt", "le")


def environment(seed: int = 0, dtype: torch.dtype = torch.float64) -> Env:
    make = torch.Generator().manual_seed(seed)
    variables = {
        "score": torch.randn(B, H, Q, K, generator=make, dtype=dtype),
        "b": torch.arange(B, dtype=torch.int32)[:, None, None, None],
        "h": torch.arange(H, dtype=torch.int32)[:, None, None],
        "q_idx": torch.arange(Q, dtype=torch.int32)[:, None],
        "kv_idx": torch.arange(K, dtype=torch.int32),
        "q_len": torch.tensor(Q, dtype=torch.int32),
        "kv_len": torch.tensor(K, dtype=torch.int32),
    }
    captures = (
        torch.randn(H, generator=make, dtype=dtype),
        torch.randn(B, Q, generator=make, dtype=dtype),
        torch.randint(-5, 6, (Q,), generator=make, dtype=torch.int32),
        torch.rand(B, K, generator=make) < 0.5,
        torch.randn(K, R, generator=make, dtype=dtype),
        torch.randint(0, Q, (B, R), generator=make),
    )
    return Env(variables, captures, ints=(3, 7), floats=(0.75, -1.5), dtype=dtype)


LOADS = {
    "h": load(0, (HEAD,), DType.FLOAT),
    "bq": load(1, (BATCH, ROW), DType.FLOAT),
    "int": load(2, (ROW,), DType.INT32),
    "bool": load(3, (BATCH, COLUMN), DType.BOOL),
    "wide": load(5, (BATCH, const(1)), DType.INT64),
}


def _float_leaves() -> st.SearchStrategy[Expr]:
    numbers = st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, 3.25, -0.7])
    return st.one_of(st.sampled_from([SCORE, SCORE, LOADS["h"], LOADS["bq"]]), numbers.map(const))


def _int_leaves() -> st.SearchStrategy[Expr]:
    return st.one_of(st.sampled_from([BATCH, HEAD, ROW, COLUMN, LOADS["int"], LOADS["wide"], size(4, 1)]), st.integers(-4, 4).map(const))


def _positive(e: Expr) -> Expr:
    return apply("add", apply("abs", e), 1)


def floats(depth: int = 3) -> st.SearchStrategy[Expr]:
    """FLOAT expressions."""
    if depth == 0:
        return _float_leaves()
    f, i, t = floats(depth - 1), ints(depth - 1), bools(depth - 1)
    return st.one_of(
        _float_leaves(),
        st.builds(apply, st.sampled_from(UNARY_FLOAT), f),
        st.builds(apply, st.sampled_from(BINARY_FLOAT), f, f),
        st.builds(lambda a, b: apply("div", a, _positive(b)), f, f),
        st.builds(lambda a, n: apply("div", a, n), f, st.sampled_from([2.0, -4.0, 3.0])),
        st.builds(lambda a, n: apply("pow", _positive(a), n), f, st.sampled_from([0.0, 1.0, 2.0, -1.0, 3.0])),
        st.builds(apply, st.just("where"), t, f, f),
        st.builds(lambda a: cast(a, DType.FLOAT), st.one_of(i, t)),
        st.builds(lambda a: round_to(a, torch.float16), f),
        st.builds(lambda kind, a: row_reduction(kind, apply("mul", a, FLOAT_ROW)), st.sampled_from(["sum", "max", "min"]), f),
    )  # fmt: skip


def ints(depth: int = 3) -> st.SearchStrategy[Expr]:
    """INT32 and INT64 expressions."""
    if depth == 0:
        return _int_leaves()
    i, t = ints(depth - 1), bools(depth - 1)
    return st.one_of(
        _int_leaves(),
        st.builds(apply, st.sampled_from(["neg", "abs", "sign", "not"]), i),
        st.builds(apply, st.sampled_from(BINARY_INT), i, i),
        st.builds(lambda a, n: apply("mul", a, n), i, st.integers(-3, 3)),
        st.builds(lambda op, a, n: apply(op, a, n), st.sampled_from(["floordiv", "mod", "fmod"]), i, st.sampled_from([1, 2, 3, 4, -2])),
        st.builds(lambda op, a, n: apply(op, a, n), st.sampled_from(["shl", "shr"]), i, st.integers(0, 3)),
        st.builds(apply, st.just("where"), t, i, i),
        st.builds(lambda a, dtype: cast(a, dtype), st.one_of(i, t), st.sampled_from([DType.INT32, DType.INT64])),
    )


def bools(depth: int = 3) -> st.SearchStrategy[Expr]:
    """BOOL expressions."""
    if depth == 0:
        return st.one_of(st.booleans().map(const), st.just(LOADS["bool"]))
    f, i, t = floats(depth - 1), ints(depth - 1), bools(depth - 1)
    return st.one_of(
        st.just(LOADS["bool"]),
        st.builds(apply, st.sampled_from(COMPARISONS), i, i),
        st.builds(apply, st.sampled_from(COMPARISONS), f, f),
        st.builds(apply, st.sampled_from(COMPARISONS), t, t),
        st.builds(apply, st.sampled_from(["and", "or", "xor"]), t, t),
        st.builds(apply, st.just("not"), t),
        st.builds(apply, st.just("where"), t, t, t),
        st.builds(lambda a: cast(a, DType.BOOL), st.one_of(i, t)),
        st.builds(lambda kind, a: row_reduction(kind, apply("eq", a, INT_ROW)), st.sampled_from(["any", "all"]), i),
    )  # fmt: skip


def row_reduction(kind: str, body: Expr) -> Expr:
    """The reduction of `body` over R, where body may hold reductions already; the axis is `OWN` in `body`."""
    return canonical_levels(reduce(kind, OWN, body, size(4, 1)))


def anything(depth: int = 3) -> st.SearchStrategy[Expr]:
    return st.one_of(floats(depth), ints(depth), bools(depth))
