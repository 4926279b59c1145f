"""Triton code generation from expressions: a table of operations, which `triton_codegen` adapts to the layouts of captured tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from foci.ir.emit import OpSpelling, Reduction, Spelling
from foci.ir.expr import DType, Expr

__all__ = ["TensorLayout", "triton_codegen"]


@dataclass(frozen=True)
class TensorLayout:
    """Layout of a captured tensor."""

    rank: int
    contiguous: bool  # the last dimension is contiguous
    aligned: bool  # the other strides are multiples of 8 elements, and passed in units of 8
    first: int  # where its sizes and strides begin in `Environment`


_TYPES: Final[Mapping[DType, str]] = {DType.BOOL: "tl.int1", DType.INT32: "tl.int32", DType.INT64: "tl.int64", DType.FLOAT: "tl.float32"}


def _by_type(integer: str, floating: str) -> OpSpelling:
    return lambda e, operands: (floating if e.args[0].dtype is DType.FLOAT else integer).format(*operands)


def _power_of_two(e: Expr) -> int | None:
    value = e.args[1].value if e.args[1].op == "const" else None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0 and value & (value - 1) == 0 and e.dtype.is_integer:
        return value.bit_length() - 1
    return None


def _floordiv(e: Expr, operands: tuple[str, ...]) -> str:
    shift = _power_of_two(e)
    if shift is not None:
        return f"({operands[0]} >> {shift})"
    name = "tl.floor({0} / {1})" if e.dtype is DType.FLOAT else "floor_divide({0}, {1})"
    return name.format(*operands)


def _mod(e: Expr, operands: tuple[str, ...]) -> str:
    shift = _power_of_two(e)
    if shift is not None:
        return f"({operands[0]} & {(1 << shift) - 1})"
    if e.dtype is DType.FLOAT:
        return "({0} - tl.floor({0} / {1}) * {1})".format(*operands)
    return "floor_modulo({0}, {1})".format(*operands)


def _not(e: Expr, operands: tuple[str, ...]) -> str:
    return f"({operands[0]} == 0)" if e.dtype is DType.BOOL else f"(~{operands[0]})"


_OPS: Final[dict[str, OpSpelling]] = {
    "neg": "(-{0})",
    "abs": "tl.abs({0})",
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "floordiv": _floordiv,
    "mod": _mod,
    "fmod": _by_type("({0} % {1})", "({0} % {1})"),
    "min": _by_type("tl.minimum({0}, {1})", "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"),
    "max": _by_type("tl.maximum({0}, {1})", "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"),
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "atan": "atan({0})",
    "tanh": "tanh({0})",
    "sigmoid": "tl.sigmoid({0})",
    "erf": "tl.erf({0})",
    "isnan": "({0} != {0})",
    "eq": "({0} == {1})",
    "ne": "({0} != {1})",
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
    "xor": "({0} ^ {1})",
    "not": _not,
    "shl": "({0} << {1})",
    "shr": "({0} >> {1})",
    "where": "tl.where({0}, {1}, {2})",
}

_STARTS: Final[Mapping[str, str]] = {"sum": "0", "any": "False", "all": "True", "max": "", "min": ""}
_STEPS: Final[Mapping[str, str]] = {
    "sum": "{0} + {1}",
    "any": "{0} | {1}",
    "all": "{0} & {1}",
    "max": "tl.maximum({0}, {1})",
    "min": "tl.minimum({0}, {1})",
}


def _const(e: Expr) -> str:
    value = e.value
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    text = repr(value)
    return f"({text})" if text.startswith("-") else text


def _param(e: Expr) -> str:
    return f"tl.cast(env.ints[{e.value}] >> 2, {_TYPES[e.dtype]})" if e.dtype.is_integer else f"env.floats[{e.value}]"


def _cast(e: Expr, operand: str) -> str:
    if e.op == "round_to":
        return f"tl.cast(tl.cast({operand}, tl.{e.value}), tl.float32)"
    if e.dtype is DType.BOOL:
        return f"({operand} != 0)"
    return f"tl.cast({operand}, {_TYPES[e.dtype]})"


def _reduce(r: Reduction) -> Sequence[str]:
    """Code of a reduction. The first element is computed before the loop and fixes shape and type; an empty range gives the start value."""
    body = r.expr.args[0]
    start = _STARTS[r.kind] or {"max": 'float("-inf")', "min": 'float("inf")'}[r.kind]
    if r.kind in ("max", "min") and body.dtype is not DType.FLOAT:
        start = "-2147483648" if r.kind == "max" else "2147483647"
    return (
        f"{r.axis} = {r.extent} * 0",
        *r.body,
        f"{r.name} = tl.where({r.extent} > 0, {r.result}, {start})",
        f"for {r.axis}_ in range(1, {r.extent}):",
        f"    {r.axis} = {r.axis}_",
        *(f"    {line}" for line in r.body),
        f"    {r.name} = {_STEPS[r.kind].format(r.name, r.result)}",
    )


def triton_codegen(layouts: tuple[TensorLayout, ...], *, half: bool) -> Spelling:
    """Build the table for the Triton code generator.

    Args:
        layouts: layout of each captured tensor.
        half: whether half precision's rounding is enough for transcendental functions.
    """

    def size(e: Expr) -> str:
        assert isinstance(e.value, tuple)
        return f"(env.sizes[{layouts[int(e.value[0])].first + int(e.value[1])}] >> 2)"

    def offset(index: Expr, text: str, layout: TensorLayout, dim: int) -> str:
        at = layout.first + dim
        is_direct = index.op == "var" or (index.op == "const" and isinstance(index.value, int) and index.value == 0)
        if index.op == "const" and index.value == 0:
            return ""
        if not is_direct:
            text = f"wrap({text}, env.sizes[{at}] >> 2)"
        if dim == layout.rank - 1 and layout.contiguous:
            return f" + {text}"
        unit = " * 8" if layout.aligned else ""
        return f" + tl.cast({text}, tl.int64) * ((env.strides[{at}] >> 2){unit})"

    def load(e: Expr, indices: tuple[str, ...]) -> str:
        slot = int(str(e.value))
        offsets = "".join(offset(index, text, layouts[slot], dim) for dim, (index, text) in enumerate(zip(e.args, indices, strict=True)))
        text = f"tl.load(env.captures[{slot}]{offsets})"
        return f"({text} != 0)" if e.dtype is DType.BOOL else f"tl.cast({text}, {_TYPES[e.dtype]})"

    return Spelling(
        ops=_OPS | {"tanh": "tanh_half({0})"} if half else _OPS,
        const=_const,
        var=lambda e: str(e.value),
        param=_param,
        axis=lambda e: f"r{e.value}",
        size=size,
        load=load,
        cast=_cast,
        reduce=_reduce,
        assign=lambda e, name, text: f"{name} = {text}",
        inline_depth=3,
    )
