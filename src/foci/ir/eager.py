"""Expressions evaluated by torch: the spelling, and functions compiled from it once.

Every value is a tensor that broadcasts against the others, so one call evaluates whole tiles. Numbers that are known
without tensors (constants, parameters, sizes) stay Python numbers as long as torch takes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from foci.ir.emit import OpSpelling, Reduction, Spelling, emit
from foci.ir.expr import DType, Expr, axis
from foci.ir.ops import LEAVES, OPS
from foci.ir.rewrite import reduction

__all__ = ["SPELLING", "Env", "evaluate", "source"]


@dataclass(frozen=True, eq=False)
class Env:
    """Values of everything that an expression reads.

    Attributes:
        variables: values of `score`, coordinates and lengths: tensors that broadcast against each other, such as
            b [B, 1, 1, 1], h [1, H, 1, 1], q_idx [1, 1, Q, 1], kv_idx [1, 1, 1, K], score [B, H, Q, K].
        captures: the captured tensors, by slot.
        ints, floats: the run-time numbers, by slot.
        dtype: what FLOAT is: float32, or float64 for float64 problems.
        axes: values of axes that no reduction of the expression binds, by level.
    """

    variables: Mapping[str, Tensor]
    captures: Sequence[Tensor] = ()
    ints: Sequence[int] = ()
    floats: Sequence[float] = ()
    dtype: torch.dtype = torch.float32
    axes: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Device of the variables, on which results are."""
        for tensor in (*self.variables.values(), *self.axes.values(), *self.captures):
            return tensor.device
        return torch.device("cpu")


def evaluate(exprs: Sequence[Expr], env: Env) -> tuple[Tensor, ...]:
    """Values of `exprs`: each in the broadcast shape of what it reads, which may be smaller than the whole tile.

    Differentiable by autograd in `score` and in captured tensors.

    Example:
        >>> from foci.ir.expr import variable
        >>> from foci.ir.ops import apply
        >>> causal = apply("le", variable("kv_idx"), variable("q_idx"))
        >>> evaluate([causal], Env({"q_idx": torch.arange(2)[:, None], "kv_idx": torch.arange(2)}))
        (tensor([[ True, False],
                [ True,  True]]),)
    """
    return _compiled(tuple(exprs))(env)


def source(exprs: Sequence[Expr]) -> str:
    """The Python function that `evaluate` runs."""
    emitted = emit(exprs, SPELLING)
    results = [f"{_tensor(e, text)}.to(env.device)" if _is_number(e) else text for e, text in zip(exprs, emitted.results, strict=True)]
    leaves = {leaf for e in exprs for leaf in e.walk() if leaf.op in _SETUP}
    bound = {leaf for e in exprs for leaf in e.walk() if leaf.op == "axis"} - {axis(n) for e in exprs for n in e.free}
    setup = sorted({_SETUP[leaf.op](leaf) for leaf in leaves - bound})
    lines = [*setup, "dtype = env.dtype", *emitted.lines, f"return ({''.join(f'{r}, ' for r in results).rstrip()})"]
    return "\n".join(["def function(env):", *(f"    {line}" for line in lines), ""])


@functools.lru_cache(maxsize=1024)
def _compiled(exprs: tuple[Expr, ...]) -> Callable[[Env], tuple[Tensor, ...]]:
    space: dict[str, Any] = {"torch": torch, "extended": _extended, "inside": _inside}
    exec(compile(source(exprs), "<foci expression>", "exec"), space)
    function: Callable[[Env], tuple[Tensor, ...]] = space["function"]
    return function


def _extended(body: Tensor, extent: int) -> Tensor:
    """A body that does not read its axis, repeated over it."""
    return body.expand(*body.shape[:-1], extent)


def _inside(index: Tensor, tensor: Tensor, dim: int) -> Tensor:
    return index.clamp(-tensor.shape[dim], tensor.shape[dim] - 1)


# Spelling ----------------------------------------------------------------------------------------------------------

_DTYPES: Final[Mapping[DType, str]] = {
    DType.BOOL: "torch.bool",
    DType.INT32: "torch.int32",
    DType.INT64: "torch.int64",
    DType.FLOAT: "dtype",
}

_SETUP: Final[Mapping[str, Callable[[Expr], str]]] = {
    "var": lambda e: f'{e.value} = env.variables["{e.value}"]',
    "axis": lambda e: f"r{e.value} = env.axes[{e.value}]",
    "load": lambda e: f"c{e.value} = env.captures[{e.value}]",
    "size": lambda e: f"c{_slot(e)} = env.captures[{_slot(e)}]",
    "param": lambda e: "ints = env.ints" if e.dtype.is_integer else "floats = env.floats",
}


def _slot(e: Expr) -> int:
    assert isinstance(e.value, tuple)
    assert isinstance(e.value[0], int)
    return e.value[0]


def _is_number(e: Expr) -> bool:
    """Whether the value is a Python number at run time."""
    return e.op in ("const", "param", "size")


def _tensor(e: Expr, text: str) -> str:
    return f"torch.full((), {text}, dtype={_DTYPES[e.dtype]}, device='cpu')"


def _infix(sign: str) -> OpSpelling:
    def spell(e: Expr, operands: tuple[str, ...]) -> str:
        a, b = operands
        if all(_is_number(arg) for arg in e.args):
            a = _tensor(e.args[0], a)
        return f"({a} {sign} {b})"

    return spell


def _call(function: str, *, numbers: Sequence[int] = ()) -> OpSpelling:
    """A call of tensors; operands at the positions `numbers` may be Python numbers too."""

    def spell(e: Expr, operands: tuple[str, ...]) -> str:
        as_is = set(numbers) if not all(_is_number(arg) for arg in e.args) else set()
        spelled = (
            _tensor(arg, text) if _is_number(arg) and i not in as_is else text
            for i, (arg, text) in enumerate(zip(e.args, operands, strict=True))
        )
        return f"{function}({', '.join(spelled)})"

    return spell


def _where(e: Expr, operands: tuple[str, ...]) -> str:
    cond, a, b = operands
    if _is_number(e.args[0]):
        cond = _tensor(e.args[0], cond)
    if _is_number(e.args[1]) and _is_number(e.args[2]):
        a = _tensor(e.args[1], a)
    return f"torch.where({cond}, {a}, {b})"


def _floordiv(e: Expr, operands: tuple[str, ...]) -> str:
    a, b = operands
    if _is_number(e.args[0]):
        a = _tensor(e.args[0], a)
    # autograd has no derivative of // for floats
    return f'torch.div({a}, {b}, rounding_mode="floor")' if e.dtype is DType.FLOAT else f"({a} // {b})"


_OPS: Final[Mapping[str, OpSpelling]] = {
    **{name: _call(f"torch.{name}") for name in OPS if hasattr(torch, name)},
    **{name: _infix(sign) for name, sign in (
        ("add", "+"), ("sub", "-"), ("mul", "*"), ("mod", "%"), ("pow", "**"),
        ("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("and", "&"), ("or", "|"), ("xor", "^"), ("shl", "<<"), ("shr", ">>"),
    )},
    "div": _call("torch.div", numbers=(1,)),  # number / tensor would multiply by the reciprocal, and round twice
    "floordiv": _floordiv,
    "not": _call("torch.bitwise_not"),
    "fmod": _call("torch.fmod", numbers=(1,)),
    "min": _call("torch.minimum"),
    "max": _call("torch.maximum"),
    "where": _where,
}  # fmt: skip


def _const(e: Expr) -> str:
    text = repr(e.value)
    if text.lstrip("-") in ("inf", "nan"):
        return text.replace("inf", "torch.inf").replace("nan", "torch.nan")
    return f"({text})" if text.startswith("-") else text


def _load(e: Expr, indices: tuple[str, ...]) -> str:
    # A computed index may leave the tensor where the mask hides what is read; a coordinate that does is a mistake torch reports.
    pairs = enumerate(zip(e.args, indices, strict=True))
    at = (text if arg.op in LEAVES else f"inside({text}, c{e.value}, {d})" for d, (arg, text) in pairs)
    element = f"c{e.value}[{', '.join(at)}]" if indices else f"c{e.value}"
    return element if e.dtype in (DType.BOOL, DType.INT64) else f"{element}.to({_DTYPES[e.dtype]})"


def _cast(e: Expr, operand: str) -> str:
    if _is_number(e.args[0]):
        operand = _tensor(e.args[0], operand)
    if e.op == "round_to":
        return f"{operand}.to(torch.{e.value}).to(dtype)"
    return f"{operand}.to({_DTYPES[e.dtype]})"


_REDUCERS: Final[Mapping[str, str]] = {"sum": ".sum(-1)", "max": ".amax(-1)", "min": ".amin(-1)", "any": ".any(-1)", "all": ".all(-1)"}


def _reduce(r: Reduction) -> tuple[str, ...]:
    body = r.expr.args[0]
    index = f"{r.axis} = torch.arange({r.extent}, device=env.device)"
    if r.factors:
        # a matrix product where the factors vary over different dimensions: never all products at once
        return (index, *r.body, f'{r.name} = torch.einsum("...r,...r->...", {", ".join(r.factors)})')
    result = f"{_tensor(body, r.result)}[None]" if _is_number(body) else r.result
    if reduction(r.expr)[1] not in body.free:
        result = f"extended({result}, {r.extent})"
    return (index, *r.body, f"{r.name} = {result}{_REDUCERS[r.kind]}")


def _outer(e: Expr, text: str, loops: int) -> str:
    return text if _is_number(e) else f"{text}[{', '.join(['...'] + ['None'] * loops)}]"


SPELLING: Final = Spelling(
    ops=_OPS,
    const=_const,
    var=lambda e: str(e.value),
    param=lambda e: f"{'ints' if e.dtype.is_integer else 'floats'}[{e.value}]",
    axis=lambda e: f"r{e.value}",
    size=lambda e: f"c{_slot(e)}.shape[{e.value[1] if isinstance(e.value, tuple) else 0}]",
    load=_load,
    cast=_cast,
    reduce=_reduce,
    assign=lambda e, name, text: f"{name} = {text}",
    dot=True,
    outer=_outer,
    inline_depth=6,
)
