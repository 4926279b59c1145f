"""What is asked, free of tensors (`Formula`, `Problem`, `Target`), and the tensors it is asked of (`Operands`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple, TypeVar, dataclass_transform

import torch
from torch import Tensor

from foci.variant import Variant
from foci.weak_cache import WeakCache

__all__ = [
    "OUT_ALONE",
    "Cotangents",
    "Formula",
    "Gradients",
    "Layout",
    "Operands",
    "OptionalTensors",
    "Outputs",
    "Problem",
    "Program",
    "Results",
    "Target",
    "accumulation_dtype",
    "bucket",
    "empty_out",
    "gradient_strides",
    "is_aligned",
    "lay_out",
    "make_tuple",
    "record",
    "result_strides",
]

_NEWLINE: Final = " | "  # of a formula in one line; nothing in a formula's text has a bar
_PROMISE: Final = "strides=query"
"""What the operators promise of their outputs. Inductor keeps compiled code on disk by an operator's arguments and asserts the strides it
saw when compiling: another promise must be another argument."""
_Record = TypeVar("_Record")


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def record(cls: type[_Record]) -> type[_Record]:
    """A dataclass, compared by identity, that a type checker takes for frozen. At run time it is not: a frozen one sets its fields
    through a function each, and a call makes several of these.
    """
    return dataclass(eq=False)(cls)


make_tuple: Final[Any] = tuple.__new__
"""make_tuple(cls, fields) is cls(*fields) of a named tuple. The class's own constructor is a Python function that takes twice as long,
which counts for those that each call of attention makes."""


class Layout(Enum):
    """Where a row's keys lie.

    DENSE: query [B, Hq, Sq, D]. JAGGED: sequences packed along one token dimension, query [1, Hq, T, D], with
    cumulative lengths beside it. PAGED: query as in DENSE; keys and values lie in pages of a pool, in the order that a
    page table gives for each batch entry.
    """

    DENSE = "dense"
    JAGGED = "jagged"
    PAGED = "paged"


@dataclass(frozen=True)
class Outputs:
    """Which auxiliary outputs a call asks for: `foci.AuxRequest`. What each is, `foci.AuxOutput` says.

    Raises:
        TypeError: for anything but True or False.

    Example:
        >>> Outputs(lse=True)
        Outputs(lse=True, row_max=False, column_sums=False, weights=False)
    """

    lse: bool = False
    row_max: bool = False
    column_sums: bool = False
    weights: bool = False

    def __post_init__(self) -> None:
        for name in ("lse", "row_max", "column_sums", "weights"):  # Dynamo of torch 2.11 traces neither vars() nor dataclasses.fields()
            asked = getattr(self, name)
            if not isinstance(asked, bool):
                raise TypeError(f"{name} must be True or False; got {type(asked).__name__}")


OUT_ALONE: Final = Outputs()


@dataclass(frozen=True)
class Formula:
    """The computation, whatever the sizes, dtypes and devices.

    `block_size` is (q, kv) of a block mask that the caller gave, or None. `text` is canonical and reads back with
    `Formula.parse`, so that a formula travels through operators, graphs and files as a string.
    """

    variant: Variant
    layout: Layout = Layout.DENSE
    outputs: Outputs = field(default_factory=Outputs)
    dropout: bool = False
    block_size: tuple[int, int] | None = None

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.variant, self.layout, self.outputs, self.dropout, self.block_size))

    def __hash__(self) -> int:
        return self._hash  # asked for at every call

    @functools.cached_property
    def text(self) -> str:
        """All of it, as `parse` reads it back."""
        asked = ",".join(name for name, on in vars(self.outputs).items() if on)
        blocks = "x".join(map(str, self.block_size or ()))
        head = f"layout={self.layout.value};outputs={asked};dropout={int(self.dropout)};blocks={blocks}"
        return f"{head}\n{self.variant.text}"

    @functools.cached_property
    def line(self) -> str:
        """The text in one line, as an operator's argument: Inductor writes arguments into comments of its code."""
        return f"{_PROMISE};{self.text}".replace("\n", _NEWLINE)

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Formula:
        """The formula that a text was made of."""
        head, _, variant = text.replace(_NEWLINE, "\n").partition("\n")
        parts = dict(item.split("=", 1) for item in head.split(";"))
        q, _, kv = parts["blocks"].partition("x")
        return Formula(
            variant=Variant.parse(variant),
            layout=Layout(parts["layout"]),
            outputs=Outputs(**{name: True for name in parts["outputs"].split(",") if name}),
            dropout=parts["dropout"] == "1",
            block_size=(int(q), int(kv)) if q else None,
        )


def bucket(length: int) -> int:
    """The power of two at or above `length`, so that plans count lengths by their size only."""
    return 1 << max(0, length - 1).bit_length()


def gradient_strides(shape: Sequence[int], *, heads_in_rows: bool) -> tuple[int, ...]:
    """Return strides of the gradient of a [B, H, S, D] tensor: without gaps, heads within rows or rows within heads as in the tensor, so
    that what comes before takes it as it is."""
    _, h, s, d = shape
    return (h * s * d, d, h * d, 1) if heads_in_rows else (h * s * d, s * d, d, 1)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: the type of scores, sums and logsumexp."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_aligned(tensor: Tensor) -> bool:
    """Whether the last dimension is contiguous, other strides are positive, and all of them and the address multiples of 16 bytes."""
    b, h, s, _ = tensor.shape
    b_stride, h_stride, s_stride, last = tensor.stride()
    unit = 16 // tensor.element_size()
    x, y, z = b_stride if b > 1 else unit, h_stride if h > 1 else unit, s_stride if s > 1 else unit
    return last == 1 and x > 0 and y > 0 and z > 0 and (x | y | z) % unit == 0 and tensor.data_ptr() & 15 == 0


def result_strides(shape: Sequence[int], strides: Sequence[int], width: int) -> tuple[int, ...]:
    """Return strides of the output of a query [B, H, S, D] with these strides, its values `width` wide: without gaps, heads within rows or
    rows within heads as in the query: torch's attention functions keep its order of dimensions too."""
    return gradient_strides((*shape[:3], width), heads_in_rows=strides[1] < strides[2])


def empty_out(query: Tensor, value: Tensor) -> Tensor:
    """An uninitialised result [B, Hq, Sq, Dv], laid out by `result_strides`."""
    width = value.shape[-1]
    return query.new_empty_strided((*query.shape[:3], width), result_strides(query.shape, query.stride(), width))


def lay_out(out: Tensor, query: Tensor) -> Tensor:
    """An output [B, Hq, Sq, Dv] that lies as `empty_out` does; differentiable."""
    return out.transpose(1, 2).contiguous().transpose(1, 2) if query.stride(1) < query.stride(2) else out.contiguous()


@dataclass(frozen=True)
class Problem:
    """A formula with everything else a backend may depend on. Lengths are buckets (see `bucket`), never exact.

    Attributes:
        formula: what is computed.
        dtype: of query, key and value.
        head_dim, value_dim: D and Dv, exact.
        q_heads, kv_heads: Hq and Hkv, exact.
        batch: bucket of B (dense, paged) or of the number of sequences (jagged).
        q_len, kv_len: buckets of Sq and Skv (dense), of the longest sequence (jagged), of Sq and the longest row (paged).
        query_grad, key_grad, value_grad: which gradients will be asked for.
        capture_grads: the same for each captured tensor.
        deterministic: gradients must be bitwise repeatable, as those of foci's own backends always are.
        aligned: rows of query, key and value are contiguous, their other strides positive, and every row begins at a multiple of
            16 bytes: what a GPU's copy engine asks for.
        tuned: backends that can may time schedules before they settle on one (`foci.use(tune=True)`).
    """

    formula: Formula
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    q_heads: int
    kv_heads: int
    batch: int
    q_len: int
    kv_len: int
    query_grad: bool = False
    key_grad: bool = False
    value_grad: bool = False
    capture_grads: tuple[bool, ...] = ()
    deterministic: bool = False
    aligned: bool = True
    tuned: bool = False

    @property
    def variant(self) -> Variant:
        """Return the formula's variant."""
        return self.formula.variant

    @property
    def needs_backward(self) -> bool:
        """Whether any gradient is asked for."""
        return self.query_grad or self.key_grad or self.value_grad or any(self.capture_grads)

    @property
    def flops(self) -> float:
        """Forward flops if no block is skipped: 2 Sq Skv (D + Dv) for each batch entry and head."""
        pairs = float(self.batch) * self.q_heads * self.q_len * self.kv_len
        return 2.0 * pairs * (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class Target:
    """The device a plan is for, as facts: a planner test can make one up.

    `arch` is the compute capability as an integer (90 for sm_90), 0 elsewhere. `features` are backend-neutral facts:
    `cxx` (a C++ compiler is there, or what one compiled), `triton`, CPU instruction sets such as `avx512f`.
    """

    device: str
    arch: int = 0
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Program:
    """Stands for the calls with one `foci.spec.CallSpec`, and owns their launches: two calls with one program differ in the values and
    addresses of their tensors, and, in the jagged layout, in how many tokens there are.

    Attributes:
        packed: query, key, value and the results are [T, H, D] where they are given without `Operands`, and lse is [H, T].
        joined: gradients of dense query, key and value, as many queries as keys, are wanted side by side in rows [B, S, E], by kernels
            that can.
        launches: launch lists of the calls, which kernels find by what else may differ.
    """

    packed: bool = False
    joined: bool = False
    launches: WeakCache[Any] = field(default_factory=lambda: WeakCache(_LAUNCHES), init=False, repr=False)


_LAUNCHES: Final = 256
"""Launch lists of a program at most: a forward and a backward for each mask whose values decide which tiles are visited, and for each of
the last sequences."""


class OptionalTensors(NamedTuple):
    """The tensors of a call that most calls lack, as `Operands` names them."""

    seed: Tensor | None = None
    blocks: Tensor | None = None
    cu_q: Tensor | None = None
    cu_kv: Tensor | None = None
    q_lengths: Tensor | None = None
    kv_lengths: Tensor | None = None
    page_table: Tensor | None = None

    @property
    def offsets(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] | None:
        """cu_q, cu_kv, q_lengths and kv_lengths of packed sequences; None for other layouts."""
        return None if self.cu_q is None else self[2:6]


@record
class Operands:
    """The tensors and numbers of one call: the only type that holds tensors.

    Attributes:
        query: [B, Hq, Sq, D], or [1, Hq, Tq, D] jagged; any strides.
        key: [B, Hkv, Skv, D], or [1, Hkv, Tkv, D], or paged [pages, Hkv, page size, D].
        value: [B, Hkv, Skv, Dv], or [1, Hkv, Tkv, Dv], or paged [pages, Hkv, page size, Dv].
        captures: the captured tensors, by slot.
        ints, floats: the run-time numbers, by slot of `param`.
        scale: multiplies the products before the score function.
        dropout_p: probability of dropping a weight, in [0, 1].
        seed: int64 [1], present when the formula has dropout.
        blocks: int8 [B or 1, Hq or 1, ceil(Sq / block_q), ceil(Skv / block_kv)] of `foci.blocks` classes, when the
            caller gave a block mask.
        cu_q, cu_kv: int64 or int32 [sequences + 1], jagged only.
        q_lengths, kv_lengths: [sequences], jagged, when sequences do not fill their span; paged: [B] keys of each row.
        page_table: int64 or int32 [B, pages of a row], paged only: the page of the pool that holds keys n * page size and on.
        max_q, max_kv: longest sequence, jagged; max_kv, paged, bounds the rows.
        program: of the call, where its launches may be kept.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    captures: tuple[Tensor, ...] = ()
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    scale: float = 1.0
    dropout_p: float = 0.0
    seed: Tensor | None = None
    blocks: Tensor | None = None
    cu_q: Tensor | None = None
    cu_kv: Tensor | None = None
    q_lengths: Tensor | None = None
    kv_lengths: Tensor | None = None
    page_table: Tensor | None = None
    max_q: int = 0
    max_kv: int = 0
    program: Program | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Query, key, value and captured tensors."""
        return self.query, self.key, self.value, *self.captures

    @property
    def optional(self) -> OptionalTensors:
        """The others, of which most calls have none."""
        return OptionalTensors(self.seed, self.blocks, self.cu_q, self.cu_kv, self.q_lengths, self.kv_lengths, self.page_table)


@record
class Results:
    """The results of a kernel's forward. `acc` below is float32, or float64 for float64 inputs.

    Attributes:
        out: [B, Hq, Sq, Dv] in the query's dtype, laid out in memory by `result_strides`.
        lse: [B, Hq, Sq] acc, natural logarithm, -inf for a row with nothing to attend to.
        row_max: [B, Hq, Sq] acc, largest score of the row, or None when not asked for.
        column_sums: [B, Hq, Skv] acc ([B, Hq, max_kv] paged), weights summed over queries, before dropout, or None.
        weights: [B, Hq, Sq, Skv] in the query's dtype, softmaxed, before dropout, or None (dense layout only).
    """

    out: Tensor
    lse: Tensor
    row_max: Tensor | None = None
    column_sums: Tensor | None = None
    weights: Tensor | None = None


@record
class Cotangents:
    """Gradients that flow into a backward: of `out` always, of the others when someone used them."""

    out: Tensor
    lse: Tensor | None = None
    column_sums: Tensor | None = None
    weights: Tensor | None = None


@record
class Gradients:
    """Gradients that flow out, each in its tensor's shape and dtype; None where the problem did not ask."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    captures: tuple[Tensor | None, ...] = ()
