"""The dense problems that a call consists of: one for the whole batch, or one for each sequence of a jagged call."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from foci.ir.expr import LENGTHS
from foci.problem import Formula, Layout, Operands, Outputs, Results, accumulation_dtype, empty_out, lay_out

__all__ = [
    "Sequence",
    "check_pages",
    "check_spans",
    "coordinate",
    "coordinates",
    "is_empty",
    "narrow",
    "pack",
    "sequences",
    "shapeless_weights",
    "without_keys",
]


@dataclass(frozen=True)
class Sequence:
    """Tokens `q` and `kv` (start, stop) that attend to each other, and the number `b` that functions are told.

    In dense layout there is one, of every batch entry, and `b` is None.
    """

    b: int | None
    q: tuple[int, int]
    kv: tuple[int, int]

    @property
    def q_len(self) -> int:
        """Queries of it."""
        return self.q[1] - self.q[0]

    @property
    def kv_len(self) -> int:
        """Return the number of keys of the sequence."""
        return self.kv[1] - self.kv[0]


def sequences(operands: Operands, layout: Layout) -> list[Sequence]:
    """The sequences of a call, in order of their tokens. Reads the offsets on the host."""
    if layout is Layout.DENSE:
        return [Sequence(None, (0, operands.query.shape[2]), (0, operands.key.shape[2]))]
    q, kv = _spans(operands.cu_q, operands.q_lengths), _spans(operands.cu_kv, operands.kv_lengths)
    return [Sequence(n, *spans) for n, spans in enumerate(zip(q, kv, strict=True))]


def shapeless_weights(formula: Formula) -> str | None:
    """Why nobody returns the weights that a formula asks for, or None."""
    if formula.outputs.weights and formula.layout is not Layout.DENSE:
        return f"the weights of a {formula.layout.value} call have no rectangular shape; take the dense layout"
    return None


def check_spans(operands: Operands, *, warns: bool) -> None:
    """Checks that every sequence of a jagged call lies within the tokens, ends before the next, and is no longer than the caller says.
    Warns, if it is to, where the last one ends before the last token. Reads the offsets on the host.

    Raises:
        ValueError: if one does not.
    """
    o = operands
    queries, keys = ("query", o.cu_q, o.q_lengths, o.query, o.max_q), ("key", o.cu_kv, o.kv_lengths, o.key, o.max_kv)
    for name, offsets, lengths, tokens, longest in (queries, keys):
        assert offsets is not None
        for (start, stop), following in zip(_spans(offsets, lengths), offsets.tolist()[1:], strict=True):
            if not 0 <= start <= stop <= following <= tokens.shape[2]:
                raise ValueError(
                    f"the sequences of {name} must follow each other within its {tokens.shape[2]} tokens: cu_seq_{name[0]} must not "
                    f"decrease and not go beyond; got one from {start} to {stop}, the next from {following}"
                )
            if stop - start > longest:
                raise ValueError(
                    f"max_{name[0]} must be the length of the longest sequence of {name}; got {longest}, one has {stop - start}"
                )
        end = int(offsets[-1])
        if warns and end < tokens.shape[2] and not (name == "key" and offsets is o.cu_q):  # said once
            warnings.warn(
                f"cu_seq_{name[0]} ends at {end}, before the last of the {tokens.shape[2]} tokens of {name}: the tokens from {end} on are "
                f"in no sequence; should cu_seq_{name[0]}[-1] be {tokens.shape[2]}?",
                stacklevel=2,
            )


def check_pages(operands: Operands) -> None:
    """Checks that every row of a paged call has a length that its pages hold, and that these are pages of the pool. Reads them on the host.

    Raises:
        ValueError: if one has not.
    """
    o = operands
    assert o.page_table is not None
    assert o.kv_lengths is not None
    pages, page = o.key.shape[0], o.key.shape[2]
    for b, (row, length) in enumerate(zip(o.page_table.tolist(), o.kv_lengths.tolist(), strict=True)):
        if not 0 <= length <= o.max_kv:
            raise ValueError(f"kv_lengths must be from 0 to max_kv, {o.max_kv}; got {length} for row {b}")
        for number in row[: -(-length // page)]:
            if not 0 <= number < pages:
                raise ValueError(f"page_table must hold numbers of the pool's {pages} pages; got {number} for row {b}")


def _spans(offsets: Tensor | None, lengths: Tensor | None) -> list[tuple[int, int]]:
    assert offsets is not None
    at = offsets.tolist()
    if lengths is None:
        return list(itertools.pairwise(at))
    return [(start, start + length) for start, length in zip(at[:-1], lengths.tolist(), strict=True)]


def coordinates(sequence: Sequence, batch: int, heads: int, device: torch.device) -> dict[str, Tensor]:
    """Every variable but the score, as int32 tensors that broadcast to [B, Hq, Sq, Skv]."""
    spans = {"b": (0, batch), "h": (0, heads), "q_idx": (0, sequence.q_len), "kv_idx": (0, sequence.kv_len)}
    return {name: coordinate(name, sequence, spans.get(name, (0, 0)), device) for name in _SHAPES}


def coordinate(name: str, sequence: Sequence, span: tuple[int, int], device: torch.device) -> Tensor:
    """One variable over a span (start, stop) of its values; lengths, and the number of a sequence, have but one."""
    if name == "b" and sequence.b is not None:
        span = (sequence.b, sequence.b + 1)
    elif name in LENGTHS:
        length = sequence.q_len if name == "q_len" else sequence.kv_len
        span = (length, length + 1)
    return torch.arange(*span, dtype=torch.int32, device=device).view(_SHAPES[name])


_SHAPES: Final = {
    "b": (-1, 1, 1, 1),
    "h": (1, -1, 1, 1),
    "q_idx": (1, 1, -1, 1),
    "kv_idx": (1, 1, 1, -1),
    "q_len": (1, 1, 1, 1),
    "kv_len": (1, 1, 1, 1),
}


def is_empty(operands: Operands) -> bool:
    """Whether there is nothing to compute: no entry, head, row, key or width."""
    return 0 in operands.query.shape or 0 in operands.key.shape or 0 in operands.value.shape


def without_keys(operands: Operands, outputs: Outputs) -> Results:
    """Return what queries get that have nothing to attend to: zeros, and -inf for the logarithm of an empty sum."""
    query = operands.query
    acc, rows = accumulation_dtype(query.dtype), query.shape[:3]
    kv_len = operands.key.shape[2] if operands.page_table is None else operands.max_kv
    lse = query.new_full(rows, -torch.inf, dtype=acc)
    return Results(
        out=empty_out(query, operands.value).zero_(),
        lse=lse,
        row_max=torch.full_like(lse, -torch.inf) if outputs.row_max else None,
        column_sums=query.new_zeros((*rows[:2], kv_len), dtype=acc) if outputs.column_sums else None,
        weights=query.new_zeros((*rows, kv_len)) if outputs.weights else None,
    )


def narrow(operands: Operands, sequence: Sequence) -> Operands:
    """The operands with the tokens of one sequence."""
    (q0, q1), (kv0, kv1) = sequence.q, sequence.kv
    query, key, value = operands.query[:, :, q0:q1], operands.key[:, :, kv0:kv1], operands.value[:, :, kv0:kv1]
    return replace(operands, query=query, key=key, value=value)


def pack(operands: Operands, outputs: Outputs, parts: list[tuple[Sequence, Results]]) -> Results:
    """Joins the results of sequences along their tokens, dimension 2 of each, by differentiable functions alone."""
    query, acc = operands.query, accumulation_dtype(operands.query.dtype)
    (_, heads, tokens, _), width = query.shape, operands.value.shape[-1]

    def rows(tensors: list[Tensor | None], fill: float, empty: Tensor) -> Tensor:
        pieces = [(s.q[0], t) for (s, _), t in zip(parts, tensors, strict=True) if t is not None]
        return _join(pieces, tokens, fill, empty)

    out = rows([r.out for _, r in parts], 0.0, query.new_zeros((1, heads, 0, width)))
    nothing = query.new_zeros((1, heads, 0), dtype=acc)
    columns = None
    if outputs.column_sums:
        pieces = [(s.kv[0], r.column_sums) for s, r in parts if r.column_sums is not None]
        columns = _join(pieces, operands.key.shape[2], 0.0, nothing)
    return Results(
        out=lay_out(out, operands.query),
        lse=rows([r.lse for _, r in parts], -torch.inf, nothing),
        row_max=rows([r.row_max for _, r in parts], -torch.inf, nothing) if outputs.row_max else None,
        column_sums=columns,
    )


def _join(pieces: list[tuple[int, Tensor]], tokens: int, fill: float, empty: Tensor) -> Tensor:
    # Tokens of no sequence, between the pieces and after the last, hold `fill`.
    joined, position = [empty], 0
    for start, piece in [*pieces, (tokens, empty)]:
        if start > position:
            joined.append(empty.new_full((*empty.shape[:2], start - position, *empty.shape[3:]), fill))
        joined.append(piece)
        position = max(position, start + piece.shape[2])
    return torch.cat(joined, dim=2)
