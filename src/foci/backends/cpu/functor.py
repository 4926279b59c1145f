"""The generated part of a kernel: score, derivative and mask as one small C++ struct.

What depends on the batch entry, head and query alone is computed once per row (`Row`), what depends on the key alone
once per column of a tile (`Col`), and captured elements that follow the keys are read as contiguous runs (`Span`). Only
what is left is computed for every score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from foci.backends.cpu.codegen import COLUMN, ROW, SPAN, VALUES, leaf, scalar_type, vector_type
from foci.ir.emit import emit
from foci.ir.expr import DType, Expr, const, node, variable
from foci.ir.ops import apply
from foci.ir.rewrite import substitute
from foci.variant import Capture

__all__ = ["ELEMENT_TYPES", "Functor"]

ELEMENT_TYPES: Mapping[torch.dtype, str] = {
    torch.float32: "float", torch.float64: "double", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "int64_t",
    torch.int32: "int32_t", torch.int16: "int16_t", torch.int8: "int8_t", torch.uint8: "uint8_t", torch.bool: "bool",
}  # fmt: skip

_ROW_ARGUMENTS = "const Call& call, int b, int h, int q, int q_len, int kv_len"


def _capture_offsets(captures: Sequence[Capture]) -> tuple[int, ...]:
    """Offset of each captured tensor's entry (address, sizes, strides) in the launcher's array."""
    offsets, at = [], 0
    for capture in captures:
        offsets.append(at)
        at += 1 + 2 * max(capture.rank, 1)
    return tuple(offsets)


def _key_step(index: Expr) -> int | None:
    """Step of an index from key to key: 1, -1, or 0 if it does not depend on the key; None for any other dependence."""
    if not index.variables() & {"kv_idx", "score"}:
        return 0
    if index.op == "var":
        return 1 if index.value == "kv_idx" else None
    if index.op == "cast" and index.dtype.is_integer and index.args[0].dtype.is_integer:
        return _key_step(index.args[0])
    if index.op == "neg":
        step = _key_step(index.args[0])
        return None if step is None else -step
    if index.op in ("add", "sub") and index.dtype.is_integer:
        left, right = _key_step(index.args[0]), _key_step(index.args[1])
        if left is None or right is None:
            return None
        step = left + right if index.op == "add" else left - right
        return step if step in (1, -1) else None
    return None


@dataclass(frozen=True)
class Span:
    """Captured elements that follow the keys: along dimension `dim` from index `start` on, elsewhere at `fixed_indices`.

    With a `divisor`, the index is the key's divided by it, and a vector of keys meets one element.
    """

    slot: int
    dim: int
    step: int
    start: Expr
    fixed_indices: tuple[Expr, ...]
    dtype: DType
    divisor: int = 0

    def read(self, source: str) -> str:
        """The spelled vector of elements at key `kv`."""
        if self.divisor:
            return f"wide(read_one({source}, kv / {self.divisor}))"
        return f"read<{self.step}>({source}, kv)"


_WIDEST = 16  # keys of a vector, at most


def _key_divisor(index: Expr) -> int:
    """The n of an index `kv_idx // n` that is the same for all keys of any aligned vector, else 0."""
    if index.op == "cast" and index.dtype.is_integer:
        return _key_divisor(index.args[0])
    if index.op != "floordiv" or index.args[0] is not variable("kv_idx") or index.args[1].op != "const":
        return 0
    divisor = index.args[1].value
    return divisor if isinstance(divisor, int) and divisor > 0 and divisor % _WIDEST == 0 else 0


def find_span(slot: int, indices: Sequence[Expr], dtype: DType) -> Span | None:
    """The span that these indices read, if exactly one of them follows the keys."""
    if any(index.free for index in indices):
        return None
    steps = [_key_step(index) for index in indices]
    moving = [dim for dim, step in enumerate(steps) if step != 0]
    if len(moving) != 1:
        return None
    dim = moving[0]
    if steps[dim] is None:
        divisor, zeros = _key_divisor(indices[dim]), tuple(const(0) if n == dim else index for n, index in enumerate(indices))
        return Span(slot, dim, 0, const(0), zeros, dtype, divisor) if divisor else None
    start = substitute(indices[dim], {variable("kv_idx"): const(0)})
    fixed_indices = tuple(const(0) if n == dim else index for n, index in enumerate(indices))
    return Span(slot, dim, steps[dim] or 0, start, fixed_indices, dtype)


@dataclass(eq=False)
class Functor:
    """Collects what the functions of one kernel need, then writes the struct's members.

    `captures` are the tensors that expressions load, by slot.
    """

    captures: tuple[Capture, ...]
    rows: dict[Expr, int] = field(default_factory=dict)
    columns: dict[Expr, int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    gradient_spans: list[Span] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    _span_numbers: dict[Expr, int] = field(default_factory=dict)

    # Staging -------------------------------------------------------------------------------------------------------

    def row_value(self, expr: Expr) -> Expr:
        """A value of the row, as a leaf; constants stay."""
        if expr.op == "const":
            return expr
        number = self.rows.setdefault(expr, len(self.rows))
        return leaf(ROW, number, expr.dtype)

    def row_span(self, load: Expr, span: Span) -> Expr:
        """A variable for what a captured row holds over a span of positions, read once."""
        number = self._span_numbers.get(load)
        if number is None:
            number = self._span_numbers[load] = len(self.spans)
            self.spans.append(span)
        return leaf(SPAN, number, load.dtype)

    def staged(self, expr: Expr) -> Expr:
        """Replace what does not belong to the innermost loop by leaves."""
        done: dict[Expr, Expr] = {}

        def place(e: Expr) -> Expr:
            if e not in done:
                done[e] = self._placed(e, place)
            return done[e]

        return place(expr)

    def _placed(self, e: Expr, place: Callable[[Expr], Expr]) -> Expr:
        if e.op in ("const", "axis"):
            return e
        variables = e.variables()
        if e.op == "div" and "score" in e.args[0].variables() and not _is_inner(e.args[1]):
            return node("mul", (place(e.args[0]), place(apply("div", 1.0, e.args[1]))), e.dtype)  # divided once a row
        if not e.free:
            if not variables & {"kv_idx", "score"}:
                return self.row_value(e)
            if not variables & {"score", "h", "q_idx"} and e.op != "var":
                number = self.columns.setdefault(e, len(self.columns))
                return leaf(COLUMN, number, e.dtype)
            if e.op == "load":
                assert isinstance(e.value, int)
                span = find_span(e.value, e.args, e.dtype)
                if span is not None:
                    return self.row_span(e, span)
        return node(e.op, tuple(place(arg) for arg in e.args), e.dtype, e.value)

    def gradient_span(self, span: Span) -> int:
        """Number of the row's field that says where a gradient's run of elements is."""
        self.gradient_spans.append(span)
        return len(self.gradient_spans) - 1

    def leaf_text(self, placed: Expr) -> str:
        """The spelling of a value of the row, staged."""
        return VALUES.const(placed) if placed.op == "const" else VALUES.var(placed)

    # Writing -------------------------------------------------------------------------------------------------------

    def function(self, signature: str, exprs: Sequence[Expr], result: str) -> None:
        """Adds a member that computes `exprs` from the row, the column and the score; `result` formats their values."""
        staged = tuple(self.staged(e) for e in exprs)
        emitted = emit(staged, VALUES)
        self.add(signature, ("const vi keys = iota() + kv;", *self.reads(staged), *emitted.lines, result.format(*emitted.results)))

    def add(self, signature: str, lines: Sequence[str]) -> None:
        """Adds a member."""
        self.members.append(_member(signature, lines))

    def reads(self, exprs: Sequence[Expr]) -> tuple[str, ...]:
        """Reads of the spans that staged expressions use."""
        numbers = {int(name.removeprefix(SPAN)) for e in exprs for name in e.variable_names if name.startswith(SPAN)}
        return tuple(f"const {vector_type(self.spans[n].dtype)} {SPAN}{n} = {self.spans[n].read(f'row.s{n}')};" for n in sorted(numbers))

    def text(self) -> str:
        """All members: accessors of captured tensors, `Row`, `Col`, and the functions that were added."""
        accessors = [
            f"static FOCI_INLINE const Captured<{ELEMENT_TYPES[c.dtype]}, {c.rank}>& c{n}(const Call& call) {{ "
            f"return *(const Captured<{ELEMENT_TYPES[c.dtype]}, {c.rank}>*)(call.captures + {offset}); }}"
            for n, (c, offset) in enumerate(zip(self.captures, _capture_offsets(self.captures), strict=True))
        ]
        return "\n".join([*accessors, *self._column(), *self._row(), self._fetch(), *self.members])

    def _fetch(self) -> str:
        """The member that asks for what a row reads of a panel of keys."""
        lines = [f"fetch<{s.step}>(row.s{n}, kv);" for n, s in enumerate(self.spans) if s.step]
        return _member("static FOCI_INLINE void fetch_captures(const Row& row, int kv)", lines)

    def _row(self) -> list[str]:
        fields = [f"{scalar_type(e.dtype)} v{n};" for e, n in self.rows.items()]
        fields += [f"Span<{ELEMENT_TYPES[self.captures[s.slot].dtype]}> s{n};" for n, s in enumerate(self.spans)]
        fields += [f"Span<float> g{n};" for n in range(len(self.gradient_spans))]
        runs = [("s", "span", n, s) for n, s in enumerate(self.spans)] + [
            ("g", "dense_span", n, s) for n, s in enumerate(self.gradient_spans)
        ]
        roots = [*self.rows, *(e for _, _, _, s in runs for e in (s.start, *s.fixed_indices))]
        emitted = emit(roots, VALUES)
        results = iter(emitted.results)
        lines = ["Row row;", *emitted.lines, *(f"{ROW}{n} = {next(results)};" for n in self.rows.values())]
        for letter, function, n, s in runs:
            start, fixed_indices = next(results), [next(results) for _ in s.fixed_indices]
            lines.append(f"row.{letter}{n} = {function}<{s.dim}>({', '.join((f'c{s.slot}(call)', start, *fixed_indices))});")
        return [_struct("Row", fields), _member(f"static FOCI_INLINE Row row({_ROW_ARGUMENTS})", (*lines, "return row;"))]

    def _column(self) -> list[str]:
        fields = [f"{vector_type(e.dtype)} v{n};" for e, n in self.columns.items()]
        spans: list[Span] = []
        values = emit(tuple(_column_spans(e, spans) for e in self.columns), VALUES)
        lines = (
            *("Col col;", "const vi keys = iota() + kv;"),
            *(_column_reads(spans) if spans else ()),
            *values.lines,
            *(f"{COLUMN}{n} = {text};" for n, text in zip(self.columns.values(), values.results, strict=True)),
            "return col;",
        )
        signature = "static FOCI_INLINE Col col(const Call& call, int b, int kv, int q_len, int kv_len)"
        return [_struct("Col", fields), _member(signature, lines)]


def _is_inner(expr: Expr) -> bool:
    """Whether a value differs within a row."""
    return bool(expr.free or expr.variables() & {"kv_idx", "score"})


def _column_spans(expr: Expr, spans: list[Span]) -> Expr:
    """Replace runs of captured elements in a column's expression by leaves."""
    replaced: dict[Expr, Expr] = {}
    for e in expr.walk():
        if e.op == "load":
            assert isinstance(e.value, int)
            span = find_span(e.value, e.args, e.dtype)
            if span is not None:
                replaced[e] = leaf(SPAN, len(spans), e.dtype)
                spans.append(span)
    return substitute(expr, replaced) if replaced else expr


def _column_reads(spans: Sequence[Span]) -> list[str]:
    """Reads of a column's runs, in a block of their own: they number their values as what follows does."""
    emitted = emit([e for s in spans for e in (s.start, *s.fixed_indices)], VALUES)
    results = iter(emitted.results)
    reads = []
    for n, s in enumerate(spans):
        start, fixed_indices = next(results), [next(results) for _ in s.fixed_indices]
        source = f"span<{s.dim}>({', '.join((f'c{s.slot}(call)', start, *fixed_indices))})"
        reads.append(f"{SPAN}{n} = {s.read(source)};")
    declared = (f"{vector_type(s.dtype)} {SPAN}{n};" for n, s in enumerate(spans))
    return [*declared, "{", *(f"  {line}" for line in (*emitted.lines, *reads)), "}"]


def _struct(name: str, fields: Sequence[str]) -> str:
    return "\n".join([f"struct {name} {{", *(f"  {line}" for line in fields), "};"])


def _member(signature: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{signature} {{", *(f"  {line}" for line in lines), "}"])
