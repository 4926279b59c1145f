"""C++ code generation from expressions: for scalars and vectors alike, and for intervals.

An operation is a function of `functions.h`, overloaded for scalars and for vectors of the native width. A scalar that
meets a vector is widened first. Over intervals each value is a `Range` of `interval.h`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from foci.ir.emit import OpSpelling, Reduction, Spelling, UnsupportedOperation
from foci.ir.expr import DType, Expr, node
from foci.ir.interval import EXACT_OPS, is_whole
from foci.ir.ops import OPS

__all__ = ["COLUMN", "INTERVALS", "ROW", "SPAN", "VALUES", "is_vector", "leaf", "scalar_type", "vector_type"]

ROW: Final = "row.v"
COLUMN: Final = "col.v"
SPAN: Final = "span"
"""Prefixes of the names of precomputed values: fields of the row and of the column, and captured elements that were read."""

_SCALARS: Final = {DType.BOOL: "bool", DType.INT32: "int32_t", DType.INT64: "int64_t", DType.FLOAT: "float"}
_VECTORS: Final = {DType.BOOL: "vb", DType.INT32: "vi", DType.INT64: "vl", DType.FLOAT: "vf"}


def scalar_type(dtype: DType) -> str:
    """The C++ type of one value."""
    return _SCALARS[dtype]


def vector_type(dtype: DType) -> str:
    """The C++ type of a register of values."""
    return _VECTORS[dtype]


def leaf(kind: str, number: int, dtype: DType) -> Expr:
    """A variable that stands for a value computed before; `kind` is ROW, COLUMN or SPAN."""
    return node("var", (), dtype, f"{kind}{number}")


_OF_KEYS: Final = ("score", "kv_idx", COLUMN, SPAN)


def is_vector(expr: Expr) -> bool:
    """Whether the value differs between the keys of a vector."""
    return any(name.startswith(_OF_KEYS) for name in expr.variable_names)


def _widened(args: Sequence[Expr], operands: Sequence[str]) -> tuple[str, ...]:
    vectors = [is_vector(arg) for arg in args]
    if not any(vectors):
        return tuple(operands)
    return tuple(text if vector else f"wide({text})" for text, vector in zip(operands, vectors, strict=True))


_FUNCTIONS: Final = {
    **{name: name for name in (
        "add", "sub", "mul", "div", "fmod", "sign", "floor", "ceil", "round", "trunc", "exp", "exp2", "expm1", "log", "log2", "log1p",
        "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "sigmoid", "erf", "eq", "ne",
        "lt", "le",
    )},
    "floordiv": "floor_divide", "mod": "floor_modulo", "pow": "power", "min": "least", "max": "greatest", "abs": "absolute",
    "neg": "negative", "and": "bit_and", "or": "bit_or", "xor": "bit_xor", "not": "bit_not", "shl": "shift_left",
    "shr": "shift_right", "where": "choose", "isnan": "is_nan", "isinf": "is_inf",
}  # fmt: skip
"""The functions of `functions.h`, by operation. An operation without one is decomposed."""


def _call(name: str) -> OpSpelling:
    def spell(e: Expr, operands: tuple[str, ...]) -> str:
        return f"{name}({', '.join(_widened(e.args, operands))})"

    return spell


def _by_power_of_two(name: str, shifted: str) -> OpSpelling:
    plain = _call(name)

    def spell(e: Expr, operands: tuple[str, ...]) -> str:
        divisor = e.args[1]
        if e.dtype.is_integer and divisor.op == "const" and isinstance(divisor.value, int):
            bits = divisor.value.bit_length() - 1
            if divisor.value > 0 and divisor.value == 1 << bits and bits < 31:
                return f"{shifted}<{bits}>({operands[0]})"
        assert not isinstance(plain, str)
        return plain(e, operands)

    return spell


_OPS: Final[dict[str, OpSpelling]] = {
    **{name: _call(function) for name, function in _FUNCTIONS.items()},
    "floordiv": _by_power_of_two("floor_divide", "divide_power"),
    "mod": _by_power_of_two("floor_modulo", "modulo_power"),
}


def _const(e: Expr) -> str:
    if e.dtype is DType.BOOL:
        return "true" if e.value else "false"
    assert isinstance(e.value, (int, float))
    if e.dtype is DType.FLOAT:
        return _float(float(e.value))
    return f"({_SCALARS[e.dtype]})({int(e.value) + 1}ll - 1)"  # the least integer has no literal


def _float(value: float) -> str:
    if math.isnan(value):
        return '__builtin_nanf("")'
    if abs(value) >= 3.4028235677973366e38:  # rounds to infinity in float32
        return "__builtin_inff()" if value > 0 else "-__builtin_inff()"
    return f"{value.hex()}f"


_VARIABLES: Final = {"score": "s", "b": "b", "h": "h", "q_idx": "q", "kv_idx": "keys", "q_len": "q_len", "kv_len": "kv_len"}


def _param(e: Expr) -> str:
    if e.dtype is DType.FLOAT:
        return f"(float)call.floats[{e.value}]"
    return f"({_SCALARS[e.dtype]})call.ints[{e.value}]"


def _size(e: Expr) -> str:
    assert isinstance(e.value, tuple)
    slot, dim = e.value
    return f"(int32_t)c{slot}(call).size[{dim}]"


def _load(e: Expr, indices: tuple[str, ...]) -> str:
    function = "gather" if is_vector(e) else "element"
    return f"{function}({', '.join((f'c{e.value}(call)', *indices))})"


_CASTS: Final = {DType.BOOL: "to_bool", DType.INT32: "to_i32", DType.INT64: "to_i64", DType.FLOAT: "to_float"}


def _cast(e: Expr, operand: str) -> str:
    return f"round_{e.value}({operand})" if e.op == "round_to" else f"{_CASTS[e.dtype]}({operand})"


def _limit(dtype: DType, sign: int) -> str:
    """The greatest value of a type, or for a negative sign the least."""
    if dtype is DType.FLOAT:
        return "-__builtin_inff()" if sign < 0 else "__builtin_inff()"
    bits = 31 if dtype is DType.INT32 else 63
    return f"({_SCALARS[dtype]})INT{bits + 1}_{'MIN' if sign < 0 else 'MAX'}"


_COMBINE: Final[dict[str, tuple[str, Callable[[DType], str]]]] = {
    "sum": ("add", lambda dtype: f"({_SCALARS[dtype]})0"),
    "max": ("greatest", lambda dtype: _limit(dtype, -1)),
    "min": ("least", lambda dtype: _limit(dtype, 1)),
    "any": ("bit_or", lambda dtype: "false"),
    "all": ("bit_and", lambda dtype: "true"),
}


def _reduce(loop: Reduction) -> tuple[str, ...]:
    body, extent = loop.expr.args
    if is_vector(extent):
        raise UnsupportedOperation("the CPU backend has no reduction whose length differs between keys")
    function, neutral = _COMBINE[loop.kind]
    start, result = neutral(loop.expr.dtype), loop.result
    if is_vector(loop.expr):
        start = f"wide({start})"
        result = result if is_vector(body) else f"wide({result})"
    return (
        f"auto {loop.name} = {start};",
        f"for (int {loop.axis} = 0; {loop.axis} < (int){loop.extent}; ++{loop.axis}) {{",
        *(f"  {line}" for line in loop.body),
        f"  {loop.name} = {function}({loop.name}, {result});",
        "}",
    )


VALUES: Final = Spelling(
    ops=_OPS,
    const=_const,
    var=lambda e: _VARIABLES.get(str(e.value), str(e.value)),
    param=_param,
    axis=lambda e: f"axis{e.value}",
    size=_size,
    load=_load,
    cast=_cast,
    reduce=_reduce,
    assign=lambda e, name, text: f"const {(_VECTORS if is_vector(e) else _SCALARS)[e.dtype]} {name} = {text};",
)


# Intervals ---------------------------------------------------------------------------------------------------------

_MONOTONE: Final = ("add", "sub", "mul", "div", "floor", "ceil", "trunc", "round", "sign", "lt", "le", "eq", "ne")
_RENAMED: Final = {
    "neg": "negative", "abs": "absolute", "floordiv": "floor_divide", "mod": "floor_modulo", "min": "minimum", "max": "maximum",
    "where": "choose", "isnan": "truth", "isinf": "truth", "sin": "unit", "cos": "unit",
}  # fmt: skip
_LOGIC: Final = {"and": "both", "or": "either", "xor": "ne", "not": "opposite"}


def _interval_call(name: str) -> OpSpelling:
    def spell(e: Expr, operands: tuple[str, ...]) -> str:
        function = _RENAMED.get(name, name if name in _MONOTONE else "unknown")
        if name in _LOGIC:
            function = _LOGIC[name] if e.dtype is DType.BOOL else "unknown"
        if name == "le" and e.args[0].dtype is DType.FLOAT:
            function = "float_le"
        return _settled(e, f"interval::{function}({', '.join(operands)})")

    return spell


_WRAPS: Final = {DType.INT32: "in_32_bits", DType.INT64: "in_64_bits"}


def _settled(e: Expr, text: str) -> str:
    """The spelled range, with what rounding and wrapping do to the operation's result."""
    between_positions = e.op == "sub" and all(arg.op == "var" for arg in e.args)
    if e.dtype is DType.BOOL or e.op in EXACT_OPS or between_positions:
        return text
    return f"interval::{_WRAPS.get(e.dtype) or ('whole' if is_whole(e) else 'rounded')}({text})"


def _interval_var(e: Expr) -> str:
    name = str(e.value)
    if name in ("b", "q_len", "kv_len"):
        return f"interval::point(r.{name})"
    stem = _VARIABLES[name] if name != "kv_idx" else "kv"
    return f"Range{{(double)r.{stem}0, (double)r.{stem}1}}"


def _interval_cast(e: Expr, operand: str) -> str:
    if e.op == "round_to":
        return f"interval::unknown({operand})"
    return _settled(e, operand) if e.dtype is DType.FLOAT else f"interval::{_CASTS[e.dtype]}({operand})"


def _interval_reduce(loop: Reduction) -> tuple[str, ...]:
    combine = {"any": "either", "all": "both"}.get(loop.kind)
    if combine is None:
        return (f"const Range {loop.name} = interval::unknown();",)
    start = "{0, 0}" if loop.kind == "any" else "{1, 1}"
    return (
        f"Range {loop.name} = {start};",
        f"const Range {loop.name}_extent = {loop.extent};",
        f"if ({loop.name}_extent.hi > 64) {loop.name} = {{0, 1}};",  # too long to walk for every tile
        f"else for (int i = 0; i < {loop.name}_extent.hi; ++i) {{",
        f"  const Range {loop.axis} = interval::point(i);",
        *(f"  {line}" for line in loop.body),
        f"  {loop.name} = interval::{combine}({loop.name}, {loop.result});",
        "}",
        f"if ({loop.name}_extent.lo != {loop.name}_extent.hi) {loop.name} = {{0, 1}};",
    )


INTERVALS: Final = Spelling(
    ops={name: _interval_call(name) for name in OPS},
    const=lambda e: f"interval::point({_const(e)})",
    var=_interval_var,
    param=lambda e: f"interval::point({_param(e)})",
    axis=lambda e: f"axis{e.value}",
    size=lambda e: f"interval::point({_size(e)})",
    load=lambda e, indices: f"interval::element({', '.join((f'c{e.value}(call)', *indices))})",
    cast=_interval_cast,
    reduce=_interval_reduce,
    assign=lambda e, name, text: f"const Range {name} = {text};",
)
