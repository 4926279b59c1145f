"""Expressions as text: a canonical form that reads back exactly, and an infix form for people.

The canonical form has one line per distinct node, operands before users, and a last line with the results::

    %0 = var[q_idx] i32
    %1 = var[kv_idx] i32
    %2 = le bool %1 %0
    return %2

It depends on the expressions alone, never on addresses or hash seeds, so it is the key of every cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from foci.ir.expr import DType, Expr, Payload, node
from foci.ir.ops import OPS

__all__ = ["from_text", "to_infix", "to_text"]

_BOOLS: Final = {"False": False, "True": True}


def to_text(exprs: Sequence[Expr]) -> str:
    """The canonical text of `exprs`, shared nodes once.

    Example:
        >>> from foci.ir.expr import variable
        >>> from foci.ir.ops import apply
        >>> print(to_text([apply("le", variable("kv_idx"), variable("q_idx"))]))
        %0 = var[kv_idx] i32
        %1 = var[q_idx] i32
        %2 = le bool %0 %1
        return %2
    """
    names: dict[Expr, str] = {}
    lines = []
    for root in exprs:
        for expr in root.walk():
            if expr not in names:
                operands = "".join(f" {names[arg]}" for arg in expr.args)
                lines.append(f"%{len(names)} = {expr.op}{_payload_text(expr)} {expr.dtype.value}{operands}")
                names[expr] = f"%{len(names)}"
    return "\n".join([*lines, " ".join(["return", *(names[e] for e in exprs)])])


def _payload_text(expr: Expr) -> str:
    value = expr.value
    if value is None:
        return ""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return f"[{value!r}]" if isinstance(value, float) else f"[{value}]"


def _slot_and_dim(text: str) -> Payload:
    slot, dim = text.split(",")
    return int(slot), int(dim)


def _kind_and_level(text: str) -> Payload:
    kind, level = text.split(",")
    return kind, int(level)


_PAYLOADS: Final[Mapping[str, Callable[[str], Payload]]] = {
    "var": str,
    "param": int,
    "axis": int,
    "size": _slot_and_dim,
    "load": int,
    "reduce": _kind_and_level,
    "cast": str,
    "round_to": str,
}

_CONSTS: Final[Mapping[DType, Callable[[str], Payload]]] = {
    DType.BOOL: _BOOLS.__getitem__,
    DType.INT32: int,
    DType.INT64: int,
    DType.FLOAT: float,
}


def from_text(text: str) -> tuple[Expr, ...]:
    """The expressions that `to_text` wrote.

    Raises:
        ValueError: for text that `to_text` does not write, with the line.
    """
    nodes: dict[str, Expr] = {}
    lines = text.splitlines()
    for line in lines[:-1]:
        try:
            name, expr = _parse_line(line, nodes)
        except (KeyError, ValueError) as error:
            raise ValueError(f"not a line of an expression: {line!r}") from error
        nodes[name] = expr
    head, *results = lines[-1].split(" ") if lines else [""]
    if head != "return" or any(name not in nodes for name in results):
        raise ValueError(f"expected a last line 'return %i ...' of known nodes, got {lines[-1] if lines else ''!r}")
    return tuple(nodes[name] for name in results)


def _parse_line(line: str, nodes: Mapping[str, Expr]) -> tuple[str, Expr]:
    name, equals, head, dtype_text, *operands = line.split(" ")
    op, bracket, payload = head.partition("[")
    if equals != "=" or not name.startswith("%") or (bracket and not payload.endswith("]")):
        raise ValueError(line)
    dtype = DType(dtype_text)
    args = tuple(nodes[operand] for operand in operands)
    if op in OPS:
        if bracket:
            raise ValueError(line)
        return name, node(op, args, dtype)
    read = _CONSTS[dtype] if op == "const" else _PAYLOADS[op]
    value = read(payload[:-1])
    return name, node(op, args, dtype, value)


# Infix -------------------------------------------------------------------------------------------------------------

_ATOM: Final = 100
_INFIX: Final[Mapping[str, tuple[int, str]]] = {
    "or": (2, "|"), "xor": (3, "^"), "and": (4, "&"),
    "eq": (1, "=="), "ne": (1, "!="), "lt": (1, "<"), "le": (1, "<="),
    "shl": (5, "<<"), "shr": (5, ">>"),
    "add": (6, "+"), "sub": (6, "-"),
    "mul": (7, "*"), "div": (7, "/"), "floordiv": (7, "//"), "mod": (7, "%"),
    "pow": (9, "**"),
}  # fmt: skip
_PREFIX: Final[Mapping[str, tuple[int, str]]] = {"neg": (8, "-"), "not": (8, "~")}
_LONGEST: Final = 1500


def to_infix(expr: Expr) -> str:
    """`expr` as a person would write it; captured tensors are c0, c1 ..., run-time numbers i0, f0 ...

    An expression whose text would be very long names its shared parts: `t0 = ...; t1 = ...; result`.

    Example:
        >>> from foci.ir.expr import variable
        >>> from foci.ir.ops import apply
        >>> to_infix(apply("mul", apply("add", variable("q_idx"), 1), 2))
        '(q_idx + 1) * 2'
    """
    nodes = list(expr.walk())
    lengths: dict[Expr, int] = {}
    for e in nodes:
        lengths[e] = 4 + sum(lengths[arg] for arg in e.args)
    if lengths[expr] <= _LONGEST:
        return _infix(nodes, {})[expr][1]
    uses: dict[Expr, int] = {}
    for e in nodes:
        for arg in e.args:
            uses[arg] = uses.get(arg, 0) + 1
    shared = [e for e in nodes if e.args and uses.get(e, 0) > 1]
    names = {e: f"t{i}" for i, e in enumerate(shared)}
    texts = _infix(nodes, names)
    return "; ".join([*(f"{names[e]} = {texts[e][1]}" for e in shared), texts[expr][1]])


def _infix(nodes: Sequence[Expr], names: Mapping[Expr, str]) -> dict[Expr, tuple[int, str]]:
    texts: dict[Expr, tuple[int, str]] = {}

    def part(arg: Expr, binding: int) -> str:
        if arg in names:
            return names[arg]
        precedence, text = texts[arg]
        return text if precedence >= binding else f"({text})"

    for e in nodes:
        texts[e] = _infix_node(e, part)
    return texts


def _infix_node(e: Expr, part: Callable[[Expr, int], str]) -> tuple[int, str]:
    if e.op in _INFIX:
        binding, sign = _INFIX[e.op]
        # comparisons do not chain, and ** binds to the right: both sides in parentheses when equal
        left = binding + (e.op == "pow" or binding == 1)
        return binding, f"{part(e.args[0], left)} {sign} {part(e.args[1], binding + 1)}"
    if e.op in _PREFIX:
        binding, sign = _PREFIX[e.op]
        return binding, f"{sign}{part(e.args[0], binding)}"
    operands = ", ".join(part(arg, 0) for arg in e.args)
    if e.op == "load":
        return _ATOM, f"c{e.value}[{operands}]" if e.args else f"c{e.value}"
    if e.op == "reduce":
        assert isinstance(e.value, tuple)
        kind, level = e.value
        return _ATOM, f"{kind}({part(e.args[0], 0)} for r{level} in range({part(e.args[1], 0)}))"
    if e.op == "const":
        text = str(e.value)
        return (8 if text.startswith("-") else _ATOM), text
    leaf = _LEAVES.get(e.op)
    if leaf is not None:
        return _ATOM, leaf(e)
    name = {"i32": "int", "i64": "int64"}.get(str(e.value), str(e.value)) if e.op in ("cast", "round_to") else e.op
    return _ATOM, f"{name}({operands})"


def _size_infix(e: Expr) -> str:
    assert isinstance(e.value, tuple)
    return f"c{e.value[0]}.shape[{e.value[1]}]"


_LEAVES: Final[Mapping[str, Callable[[Expr], str]]] = {
    "var": lambda e: str(e.value),
    "param": lambda e: f"{'i' if e.dtype.is_integer else 'f'}{e.value}",
    "axis": lambda e: f"r{e.value}",
    "size": _size_infix,
}
