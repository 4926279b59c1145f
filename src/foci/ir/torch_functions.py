"""The words of the language: what each torch function means on symbols.

Words are found by the name torch gives the function, so `torch.add`, `Tensor.add`, `x + y` and an fx node are one word.
A word is built of rows of the op table; to teach the language a function that such rows express is to add one entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from foci.ir import expr as ir
from foci.ir.elementwise import elementwise, pointwise
from foci.ir.expr import DType, Expr
from foci.ir.narrow import is_narrow, wrap
from foci.ir.ops import OPS, apply, cast, round_to
from foci.ir.rewrite import substitute
from foci.ir.trace import Symbol, TraceError, element_dtype
from foci.ir.user_lines import complaint

__all__ = ["TORCH_FUNCTIONS"]

TorchFunction = Callable[..., Any]


def _op(name: str) -> TorchFunction:
    def word(*args: Any) -> Symbol:
        return pointwise(name, *args)

    return word


def _current_tracer(*values: Any) -> Any:
    return next(v.tracer for v in values if isinstance(v, Symbol))


def _add(a: Any, b: Any, *, alpha: Any = 1) -> Symbol:
    return _arithmetic("add", a, b if alpha == 1 else _arithmetic("mul", b, alpha))


def _sub(a: Any, b: Any, *, alpha: Any = 1) -> Symbol:
    return _arithmetic("sub", a, b if alpha == 1 else _arithmetic("mul", b, alpha))


def _arithmetic(name: str, a: Any, b: Any) -> Symbol:
    def build(x: Expr, y: Expr) -> Expr:
        if x.dtype is y.dtype is DType.BOOL and name in ("add", "mul"):
            return apply("or" if name == "add" else "and", x, y)  # torch's sum and product of booleans
        return apply(name, x, y)

    return elementwise(build, a, b)


def _pow(a: Any, b: Any) -> Symbol:
    if isinstance(b, int) and not isinstance(b, bool) and 0 < b <= 4 and isinstance(a, Symbol):
        result = a
        for _ in range(b - 1):
            result = _arithmetic("mul", result, a)
        return result
    if not isinstance(b, float):
        _refuse_narrow("torch.pow", a, b)
    return pointwise("pow", a, b)


def _div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode == "floor":
        return pointwise("floordiv", a, b)
    quotient = pointwise("div", a, b)
    if rounding_mode is None:
        return quotient
    _refuse_narrow("torch.div(rounding_mode='trunc')", a, b)
    truncated = pointwise("trunc", quotient)
    kinds = [s.expr.dtype for s in map(quotient.tracer.symbol, (a, b))]
    return truncated if DType.FLOAT in kinds else _cast(truncated, DType.INT64 if DType.INT64 in kinds else DType.INT32)


def _refuse_narrow(what: str, *values: Any) -> None:
    """An error for what torch computes in 8 or 16 bits, and the language does not."""
    for value in values:
        if isinstance(value, (Symbol, Tensor)) and is_narrow(value.dtype):
            raise TraceError(complaint(f"{what} of {value.dtype}", "capture tensor.int()"))


def _whole(name: str) -> TorchFunction:
    """A rounding: of integers nothing."""

    def word(x: Any, *args: Any) -> Symbol:
        return x if isinstance(x, Symbol) and x.expr.dtype.is_integer else pointwise(name, x, *args)

    return word


def _cast(x: Symbol, dtype: DType) -> Symbol:
    return Symbol(x.tracer, cast(x.expr, dtype), x.axes)


def _to_dtype(x: Symbol, dtype: torch.dtype) -> Symbol:
    kind = element_dtype(dtype)
    if dtype in (torch.float16, torch.bfloat16):
        return Symbol(x.tracer, round_to(x.expr, dtype), x.axes)
    if is_narrow(dtype) and x.expr.dtype is DType.FLOAT:
        raise TraceError(complaint(f"a cast to {dtype}", "use torch.int32 or torch.int64"))
    if dtype == x.dtype:
        return x
    return Symbol(x.tracer, wrap(cast(x.expr, kind), dtype), x.axes, dtype)


def _move(kind: str) -> TorchFunction:
    """`x.cuda()` and `x.cpu()`."""

    def word(x: Symbol, *args: Any, **kwargs: Any) -> Symbol:
        _check_stays(x, kind)
        return x

    return word


def _check_stays(x: Symbol, device: Any) -> None:
    if str(device).partition(":")[0] != x.device.type:
        raise TraceError(complaint(f"a move to {device}", f"leave it out: scores are on {x.device}, as the query"))


def _to(x: Symbol, *args: Any, **kwargs: Any) -> Symbol:
    for value in (*args, kwargs.get("device")):
        if isinstance(value, (str, torch.device)):
            _check_stays(x, value)
    for value in (*args, kwargs.get("dtype"), kwargs.get("other")):
        if isinstance(value, torch.dtype):
            return _to_dtype(x, value)
        if isinstance(value, (Tensor, Symbol)):
            return _to_dtype(x, value.dtype)
    return x


def _type_as(x: Symbol, other: Any) -> Symbol:
    return _to_dtype(x, other.dtype)


def _as(dtype: torch.dtype) -> TorchFunction:
    return lambda x, *args, **kwargs: _to_dtype(x, dtype)


def _same(x: Symbol, *args: Any, **kwargs: Any) -> Symbol:
    return x


def _flip(name: str) -> TorchFunction:
    return lambda a, b: pointwise(name, b, a)


def _logical(name: str) -> TorchFunction:
    def word(*values: Any) -> Symbol:
        tracer = _current_tracer(*values)
        return pointwise(name, *(_cast(tracer.symbol(v), DType.BOOL) for v in values))

    return word


def _bitwise_not(x: Symbol) -> Symbol:
    if x.expr.dtype is DType.BOOL:
        return pointwise("not", x)
    if x.expr.dtype is DType.FLOAT:
        raise TraceError(complaint("~ of a float", "compare first"))
    return _arithmetic("sub", -1, x)


def _where(condition: Any, a: Any, b: Any) -> Symbol:
    return pointwise("where", condition, a, b)


def _masked_fill(x: Any, mask: Any, value: Any) -> Symbol:
    return pointwise("where", mask, value, x)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Symbol:
    # Comparisons keep NaN and give torch's gradient at the bounds.
    if min is not None:
        x = _where(pointwise("lt", x, min), min, x)
    if max is not None:
        x = _where(pointwise("lt", max, x), max, x)
    return x  # type: ignore[no-any-return]


def _round(x: Any, *, decimals: int = 0) -> Symbol:
    return _whole("round")(x) if not decimals else pointwise("div", pointwise("round", x * 10.0**decimals), 10.0**decimals)


def _nan_to_num(x: Symbol, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Symbol:
    if x.expr.dtype is not DType.FLOAT:
        return x
    # By selection: what is replaced has gradient zero.
    limits = torch.finfo(x.dtype)
    finite = _where(pointwise("eq", x, -math.inf), limits.min if neginf is None else neginf, x)
    finite = _where(pointwise("eq", x, math.inf), limits.max if posinf is None else posinf, finite)
    return _where(pointwise("isnan", x), 0.0 if nan is None else nan, finite)


def _relu(x: Any, inplace: bool = False) -> Symbol:
    return _where(pointwise("le", x, 0), 0, x)


def _silu(x: Any, inplace: bool = False) -> Symbol:
    return _arithmetic("mul", x, pointwise("sigmoid", x))


def _gelu(x: Any, approximate: str = "none") -> Symbol:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1.0 + pointwise("tanh", inner))  # type: ignore[no-any-return]
    return 0.5 * x * (1.0 + pointwise("erf", x * math.sqrt(0.5)))  # type: ignore[no-any-return]


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Symbol:
    scaled = x * beta
    return _where(pointwise("lt", threshold, scaled), x, pointwise("log1p", pointwise("exp", scaled)) / beta)


def _logsigmoid(x: Any) -> Symbol:
    # log(sigmoid(x)) = min(x, 0) - log1p(exp(-|x|)), which never overflows.
    return _where(pointwise("lt", x, 0), x, 0.0) - pointwise("log1p", pointwise("exp", -pointwise("abs", x)))  # type: ignore[no-any-return]


def _leaky_relu(x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Symbol:
    return _where(pointwise("lt", 0, x), x, x * negative_slope)


def _elu(x: Any, alpha: float = 1.0, inplace: bool = False) -> Symbol:
    return _where(pointwise("lt", 0, x), x, alpha * pointwise("expm1", x))


def _logaddexp(a: Any, b: Any) -> Symbol:
    return pointwise("max", a, b) + pointwise("log1p", pointwise("exp", -pointwise("abs", a - b)))  # type: ignore[no-any-return]


def _like(value: float | None) -> TorchFunction:
    def word(x: Symbol, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Symbol:
        number = value if value is not None else (args[0] if args else kwargs["fill_value"])
        symbol = x.tracer.symbol(number)
        return _to_dtype(symbol, dtype or x.dtype)

    return word


def _new(value: float | None) -> TorchFunction:
    def word(x: Symbol, shape: Any = (), *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Symbol:
        if tuple(shape):
            raise TraceError(complaint("the creation of a tensor with dimensions", "create it outside the function"))
        number = value if value is not None else (args[0] if args else kwargs["fill_value"])
        return _to_dtype(x.tracer.symbol(number), dtype or x.dtype)

    return word


def _new_tensor(x: Symbol, data: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Symbol:
    symbol = x.tracer.symbol(data)
    return symbol if dtype is None else _to_dtype(symbol, dtype)


def _index(tensor: Any, indices: Any) -> Symbol:
    entries = tuple(slice(None) if entry is None else entry for entry in indices)
    return _current_tracer(tensor, *entries).index(tensor, entries)  # type: ignore[no-any-return]


def _getitem(tensor: Any, index: Any) -> Symbol:
    entries = index if isinstance(index, tuple) else (index,)
    return _current_tracer(tensor, *entries).index(tensor, entries)  # type: ignore[no-any-return]


def _select(tensor: Any, dim: int, index: Any) -> Symbol:
    entries: list[Any] = [slice(None)] * tensor.ndim
    entries[dim] = index
    return _getitem(tensor, tuple(entries))


def _index_select(tensor: Any, dim: int, index: Any) -> Symbol:
    return _select(tensor, dim, index)


def _embedding(input: Any, weight: Any, *args: Any, **kwargs: Any) -> Symbol:
    if isinstance(weight, Symbol) or not isinstance(weight, Tensor):
        input, weight = weight, input  # aten's order is (weight, indices)
    return _getitem(weight, (input,))


def _close(kind: str, body: Symbol, position: int) -> Symbol:
    """Binds one free axis of `body` by a reduction."""
    axis = body.axes[position]
    level = body.expr.levels
    bound = substitute(body.expr, {axis.index: ir.axis(level)})
    rest = tuple(a for n, a in enumerate(body.axes) if n != position % len(body.axes))
    return Symbol(body.tracer, ir.reduce(kind, level, bound, axis.extent), rest, body.narrow if kind in ("max", "min") else None)


def _reduction(kind: str) -> TorchFunction:
    def word(x: Symbol, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Symbol:
        dim = kwargs.get("axis", dim)
        if kind == "sum" and not x.expr.dtype.is_integer and x.expr.dtype is not DType.FLOAT:
            x = _cast(x, DType.INT64)
        elif kind in ("any", "all"):
            x = _cast(x, DType.BOOL)
        if dtype is not None:
            x = _to_dtype(x, dtype)
        if keepdim:
            raise TraceError(complaint("keepdim=True", "the reduced number broadcasts by itself"))
        dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else list(dim)
        for position in sorted((d % max(x.ndim, 1) for d in dims), reverse=True):
            if x.ndim:
                x = _close(kind, x, position)
        return x

    return word


def _mean(x: Symbol, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Symbol:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    count = Symbol(x.tracer, ir.const(1.0))
    for d in dims:
        count = count * Symbol(x.tracer, x.axes[d].extent)
    return TORCH_FUNCTIONS["sum"](_cast(x, DType.FLOAT), dim, keepdim) / count  # type: ignore[no-any-return]


def _extremum(binary: str) -> TorchFunction:
    """`max` and `min`: of two operands, of a whole row, or along a dimension (values only)."""
    reduction = _reduction(binary)

    def word(x: Any, other: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", other if isinstance(other, int) and isinstance(x, Symbol) and x.ndim else None)
        if other is not None and dim is None:
            return pointwise(binary, x, other)
        if dim is None:
            return reduction(x)
        return _Extremum(reduction(x, dim, keepdim))

    return word


class _Extremum:
    """Result of `row.max(dim)`: only the values; the language has no indices."""

    def __init__(self, values: Symbol) -> None:
        self.values = values

    def __getitem__(self, position: int) -> Symbol:
        if position == 0:
            return self.values
        return self.indices

    @property
    def indices(self) -> Symbol:
        raise TraceError(complaint("the position of a maximum (argmax)"))


def _dot(a: Any, b: Any, **kwargs: Any) -> Symbol:
    tracer = _current_tracer(a, b)
    product = _arithmetic("mul", tracer.symbol(a), tracer.symbol(b))
    total = _reduction("sum")(product, -1)
    return total if product.narrow is None else Symbol(tracer, wrap(total.expr, product.narrow), total.axes, product.narrow)


def _matmul(a: Any, b: Any) -> Symbol:
    tracer = _current_tracer(a, b)
    x, y = tracer.symbol(a), tracer.symbol(b)
    if y.ndim == 1:
        return _dot(x, y)
    if (x.ndim, y.ndim) == (1, 2):
        return _dot(Symbol(tracer, y.expr, (y.axes[1], y.axes[0]), y.narrow), x)
    raise TraceError(complaint(f"a product of rows of shapes {list(x.shape)} and {list(y.shape)}", "use vectors, or a matrix and a vector"))


def _norm(x: Symbol, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Symbol:
    if ord not in (2, 2.0, "fro"):
        raise TraceError(complaint(f"a norm of order {ord}", "only the Euclidean norm"))
    return pointwise("sqrt", TORCH_FUNCTIONS["sum"](x * x, dim, keepdim))


def _isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Symbol:
    tracer = _current_tracer(elements, test_elements)
    x, row = tracer.symbol(elements), tracer.symbol(test_elements)
    if x.ndim:
        raise TraceError(complaint("torch.isin of a row", "compare and use any()"))
    is_equal = row == x
    for _ in range(row.ndim):
        is_equal = _reduction("any")(is_equal, -1)
    return _bitwise_not(is_equal) if invert else is_equal


def _bucketize(values: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Symbol:
    tracer = _current_tracer(values, boundaries)
    x, edges = tracer.symbol(values), tracer.symbol(boundaries)
    below = edges <= x if right else edges < x
    return _reduction("sum")(_cast(below, DType.INT32 if out_int32 else DType.INT64), -1)  # type: ignore[no-any-return]


def _unsqueeze(x: Symbol, dim: int) -> Symbol:
    at = dim % (x.ndim + 1)
    return Symbol(x.tracer, x.expr, (*x.axes[:at], x.tracer.fresh_axis(ir.const(1), 1), *x.axes[at:]), x.narrow)


def _squeeze(x: Symbol, dim: Any = None) -> Symbol:
    dims = set(range(x.ndim)) if dim is None else {d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)}
    gone = {n for n in dims if x.axes[n].length == 1}
    expr = substitute(x.expr, {x.axes[n].index: ir.const(0) for n in gone})
    return Symbol(x.tracer, expr, tuple(a for n, a in enumerate(x.axes) if n not in gone), x.narrow)


def _reshape(x: Symbol, *shape: Any) -> Symbol:
    new_shape = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else list(shape)
    if new_shape in (list(x.shape), [] if x.ndim == 0 else None) or (x.ndim == 1 and new_shape == [-1]):
        return x
    raise TraceError(
        complaint(f"a reshape of a row from {list(x.shape)} to {new_shape}", "reshape the captured tensor outside the function")
    )


TORCH_FUNCTIONS: Final[dict[str, TorchFunction]] = {
    **{name: _op(name) for name in OPS if hasattr(torch, name)},
    "floor": _whole("floor"), "ceil": _whole("ceil"), "trunc": _whole("trunc"), "fix": _whole("trunc"),
    "negative": _op("neg"), "absolute": _op("abs"), "sgn": _op("sign"), "expit": _op("sigmoid"),
    "arcsin": _op("asin"), "arccos": _op("acos"), "arctan": _op("atan"), "arctan2": _op("atan2"),
    "round": _round,
    "add": _add, "radd": _add, "sub": _sub, "subtract": _sub, "rsub": lambda a, b, *, alpha=1: _sub(b, a, alpha=alpha),
    "mul": lambda a, b: _arithmetic("mul", a, b), "multiply": lambda a, b: _arithmetic("mul", a, b),
    "div": _div, "divide": _div, "true_divide": _div, "truediv": _div, "rdiv": lambda a, b: _div(b, a),
    "rtruediv": lambda a, b: _div(b, a),
    "floor_divide": _op("floordiv"), "floordiv": _op("floordiv"), "rfloordiv": _flip("floordiv"),
    "remainder": _op("mod"), "mod": _op("mod"), "rmod": _flip("mod"),
    "pow": _pow, "rpow": lambda a, b: _pow(b, a), "float_power": lambda a, b: pointwise("pow", a, b),
    "square": lambda x: x * x, "reciprocal": lambda x: 1.0 / x, "frac": lambda x: x - pointwise("trunc", x),
    "addcmul": lambda x, a, b, *, value=1: x + value * (a * b), "addcdiv": lambda x, a, b, *, value=1: x + value * (a / b),
    "lerp": lambda a, b, weight: a + weight * (b - a), "hypot": lambda a, b: pointwise("sqrt", a * a + b * b),
    "log10": lambda x: pointwise("log", x) / math.log(10), "logaddexp": _logaddexp,
    "gt": _flip("lt"), "ge": _flip("le"), "greater": _flip("lt"), "greater_equal": _flip("le"), "less": _op("lt"),
    "less_equal": _op("le"),
    "not_equal": _op("ne"), "isfinite": lambda x: _bitwise_not(pointwise("isnan", x) | pointwise("isinf", x)),
    "maximum": _op("max"), "minimum": _op("min"), "fmax": _op("max"), "fmin": _op("min"),
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("xor"), "logical_not": _logical("not"),
    "bitwise_and": _op("and"), "bitwise_or": _op("or"), "bitwise_xor": _op("xor"), "bitwise_not": _bitwise_not, "invert": _bitwise_not,
    "and": _op("and"), "or": _op("or"), "xor": _op("xor"), "and_": _op("and"), "or_": _op("or"), "inv": _bitwise_not,
    "bitwise_left_shift": _op("shl"), "bitwise_right_shift": _op("shr"), "lshift": _op("shl"), "rshift": _op("shr"),
    "where": _where, "masked_fill": _masked_fill, "nan_to_num": _nan_to_num, "clamp": _clamp, "clip": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min), "clamp_max": lambda x, max: _clamp(x, None, max),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0, inplace=False: _clamp(x, min_val, max_val),
    "relu6": lambda x, inplace=False: _clamp(x, 0.0, 6.0),
    "relu": _relu, "silu": _silu, "gelu": _gelu, "softplus": _softplus, "logsigmoid": _logsigmoid, "log_sigmoid": _logsigmoid,
    "leaky_relu": _leaky_relu, "elu": _elu, "softsign": lambda x: x / (1.0 + pointwise("abs", x)),
    "tanhshrink": lambda x: x - pointwise("tanh", x),
    "erfc": lambda x: 1.0 - pointwise("erf", x), "deg2rad": lambda x: x * (math.pi / 180), "rad2deg": lambda x: x * (180 / math.pi),
    "to": _to, "_to_copy": _to, "convert_element_type": _to, "type": _to, "type_as": _type_as,
    "float": _as(torch.float32), "double": _as(torch.float64), "half": _as(torch.float16), "bfloat16": _as(torch.bfloat16),
    "int": _as(torch.int32), "long": _as(torch.int64), "bool": _as(torch.bool),
    "clone": _same, "contiguous": _same, "pos": _same, "positive": _same, "cpu": _move("cpu"), "cuda": _move("cuda"), "alias": _same,
    "zeros_like": _like(0), "ones_like": _like(1), "full_like": _like(None), "new_zeros": _new(0), "new_ones": _new(1),
    "new_full": _new(None),
    "new_tensor": _new_tensor, "scalar_tensor": lambda x, **kwargs: x,
    "getitem": _getitem, "index": _index, "mod_index": _index, "apply": _index, "select": _select, "index_select": _index_select,
    "embedding": _embedding,
    "sum": _reduction("sum"), "amax": _reduction("max"), "amin": _reduction("min"), "any": _reduction("any"), "all": _reduction("all"),
    "mean": _mean, "max": _extremum("max"), "min": _extremum("min"),
    "dot": _dot, "vdot": _dot, "inner": _dot, "vecdot": _dot, "linalg_vecdot": _dot, "matmul": _matmul, "mv": _matmul,
    "rmatmul": lambda a, b: _matmul(b, a),
    "norm": _norm, "vector_norm": _norm, "linalg_vector_norm": _norm, "isin": _isin,
    "bucketize": _bucketize, "searchsorted": lambda edges, values, *, out_int32=False, right=False, side=None, sorter=None: _bucketize(
        values, edges, out_int32=out_int32, right=right or side == "right"),
    "unsqueeze": _unsqueeze, "squeeze": _squeeze, "view": _reshape, "reshape": _reshape,
}  # fmt: skip
