"""From a user's arguments to a formula and operands: everything is checked here, once, before anything runs."""

from __future__ import annotations

import functools
import math
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from foci.environment import autocast_dtype
from foci.errors import ArgumentError, DtypeError
from foci.ir import expr as ir
from foci.ir.expr import DType, Expr
from foci.ir.ops import apply
from foci.ir.rewrite import substitute
from foci.ir.user_lines import user_frame
from foci.problem import Formula, Layout, Operands, Outputs
from foci.trace_functions import Bound, bind
from foci.variant import Variant

__all__ = [
    "Extras",
    "Part",
    "alignment_note",
    "are_flags",
    "check_inputs",
    "check_integers",
    "check_is_flag",
    "check_is_tensor",
    "check_offsets",
    "check_room",
    "check_tensors",
    "describe",
    "draw_seed",
    "prepare",
]

_SYMBOLIC: Final = (torch.SymInt, torch.SymFloat)
_NUMBERS: Final = (numbers.Real, *_SYMBOLIC)
_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Part(NamedTuple):
    """Where the query's heads and rows lie in a whole that several devices share; `queries` counts its rows, None for those here."""

    first_head: int = 0
    first_query: int = 0
    queries: int | None = None


class Extras(NamedTuple):
    """The arguments of a call besides query, key, value and the functions.

    `honour_sdp_flags`: torch's own switches for scaled_dot_product_attention restrict the backends. `sink`: [Hq], a logit
    per head without a value. `exact_lengths`: max_q and max_kv are lengths, not bounds on them. `part`: functions are told indices
    in a whole. `lower_right_form`: as of a `Mask`. The others are as `Formula` and `Operands` have them.
    """

    outputs: Outputs
    scale: float | None = None
    dropout_p: float = 0.0
    blocks: Tensor | None = None
    block_size: tuple[int, int] | None = None
    cu_q: Tensor | None = None
    cu_kv: Tensor | None = None
    q_lengths: Tensor | None = None
    kv_lengths: Tensor | None = None
    page_table: Tensor | None = None
    max_q: int = 0
    max_kv: int = 0
    honour_sdp_flags: bool = False
    sink: Tensor | None = None
    exact_lengths: bool = True
    part: Part | None = None
    lower_right_form: str = ""


_FEW_QUERIES: Final = 16
"""So many queries over more keys may be a decoding step."""
_warned_of_alignment = False


def alignment_note(query: Tensor, key: Tensor, extras: Extras) -> str | None:
    """Return what to say of a mask that is aligned to the upper left where there are more keys than queries; None where there is
    nothing."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if extras.page_table is not None:
        kv_len = extras.max_kv
    elif extras.cu_q is not None:
        q_len, kv_len = extras.max_q, extras.max_kv
    if not extras.lower_right_form or not (isinstance(q_len, int) and isinstance(kv_len, int)) or not 0 < q_len < kv_len:
        return None
    return (
        f"the mask is aligned to the upper left corner, as torch's is_causal is: query i stands at key i, so {q_len} queries stand at the "
        f"first {q_len} of {kv_len} keys. If they are the last ones, as in a decoding step, write {extras.lower_right_form}"
    )


def _warn_of_alignment(query: Tensor, key: Tensor, extras: Extras) -> None:
    """Once in a process, at the user's line."""
    global _warned_of_alignment
    few = 1 if extras.page_table is not None else _FEW_QUERIES  # how long rows of pages are is not known here
    queries = query.shape[2] if extras.cu_q is None else extras.max_q
    if _warned_of_alignment or not isinstance(queries, int) or queries > few:
        return
    note, frame = alignment_note(query, key, extras), user_frame()
    if note is not None:
        _warned_of_alignment = True
        at = ("<unknown>", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        warnings.warn_explicit(note, UserWarning, *at)


def prepare(
    tensors: tuple[Tensor, Tensor, Tensor], score: Callable[..., Any] | None, mask: Callable[..., Any] | None, extras: Extras
) -> tuple[Formula, Operands]:
    """Checks the arguments and states the problem.

    Args:
        tensors: query [B, Hq, Sq, D], key [B, Hkv, Skv, D], value [B, Hkv, Skv, Dv]; [1, H, T, D] when jagged; key and
            value [pages, Hkv, page size, D] when paged.
        score, mask: the user's functions.
        extras: the rest.

    Raises:
        TypeError: for arguments of a wrong type or dtype.
        ValueError: for arguments of a wrong shape, device or value.
    """
    query, key, value = (t.resolve_neg() for t in _autocast(*tensors))
    check_tensors(query, key, value)
    if query.shape[3] == 0:  # products of no numbers: zero, as those of a zero
        query, key = torch.nn.functional.pad(query, (0, 1)), torch.nn.functional.pad(key, (0, 1))
    if extras.page_table is None:
        query, key, value = _broadcast_batch(query, key, value)
    if extras.lower_right_form:
        _warn_of_alignment(query, key, extras)
    dropout_p = _checked_dropout(extras.dropout_p)
    bound = bind(score, mask, query.device, extras.block_size)
    _check_captures(bound, query, key, extras)
    if extras.part is not None:
        bound = _in_whole(bound, extras.part)
    if extras.blocks is not None:
        _check_blocks(extras.blocks, extras.block_size, query, key)
    _check_numbers(bound, query)
    formula = _formula(bound.variant, _layout(extras), extras.outputs, bound.block_size, dropout=bool(dropout_p > 0))
    captures = tuple(t.resolve_neg() for t in bound.captures)
    operands = Operands(
        query, key, value, captures, bound.ints, bound.floats, _checked_scale(extras.scale, query), dropout_p,
        seed=draw_seed(query.device) if dropout_p > 0 else None, blocks=extras.blocks, cu_q=extras.cu_q, cu_kv=extras.cu_kv,
        q_lengths=extras.q_lengths, kv_lengths=extras.kv_lengths, page_table=extras.page_table, max_q=extras.max_q, max_kv=extras.max_kv,
    )  # fmt: skip
    return formula, operands


def _in_whole(bound: Bound, part: Part) -> Bound:
    """Return what was bound, told heads, rows and their number in a whole instead of here."""
    variant, names = _variant_in_whole(bound.variant, len(bound.ints), has_more_rows=part.queries is not None)
    numbers: dict[str, Any] = {"h": part.first_head, "q_idx": part.first_query, "q_len": part.queries}
    return replace(bound, variant=variant, ints=(*bound.ints, *(numbers[name] for name in names)))


@functools.lru_cache(maxsize=256)
def _variant_in_whole(variant: Variant, count: int, *, has_more_rows: bool) -> tuple[Variant, tuple[str, ...]]:
    """The variant with run-time numbers, from slot `count` on, added to h and q_idx and in place of q_len; which of these it reads."""
    read = variant.score.variables() | variant.mask.variables()
    names = tuple(name for name in (("h", "q_idx", "q_len") if has_more_rows else ("h",)) if name in read)
    told: dict[Expr, Expr] = {}
    for slot, name in enumerate(names, count):
        variable, number = ir.variable(name), ir.param(slot, DType.INT32)
        told[variable] = number if name == "q_len" else apply("add", variable, number)
    return replace(variant, score=substitute(variant.score, told), mask=substitute(variant.mask, told)), names


def _layout(extras: Extras) -> Layout:
    if extras.page_table is not None:
        return Layout.PAGED
    return Layout.DENSE if extras.cu_q is None else Layout.JAGGED


@functools.lru_cache(maxsize=1024)
def _formula(variant: Variant, layout: Layout, outputs: Outputs, block_size: tuple[int, int] | None, *, dropout: bool) -> Formula:
    return Formula(variant, layout, outputs, dropout, block_size)


def describe(tensor: Tensor) -> str:
    """Dtype, shape and device, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """torch's rule for scaled_dot_product_attention: every floating operand but float64 takes the autocast dtype."""
    dtype = autocast_dtype(query.device.type if isinstance(query, Tensor) else "cpu")
    if dtype is None:
        return query, key, value
    eligible = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.dtype in eligible else t for t in (query, key, value))  # type: ignore[return-value]


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Checks dims, dtypes, devices and sizes of query [B, Hq, Sq, D], key [B, Hkv, Skv, D] and value [B, Hkv, Skv, Dv].

    Raises:
        TypeError: for a dtype that is not taken.
        ValueError: for anything else.
    """
    q, k, v = query.shape, key.shape, value.shape
    if not len(q) == len(k) == len(v) == 4:
        named = {"query": query, "key": key, "value": value}
        name, bad = next((n, t) for n, t in named.items() if t.dim() != 4)
        raise ArgumentError(f"{name} must have 4 dimensions [batch, heads, length, head dim]; got {describe(bad)}")
    if not (query.dtype == key.dtype == value.dtype and query.device == key.device == value.device):
        what = "dtype" if not query.dtype == key.dtype == value.dtype else "device"
        raise ArgumentError(f"query, key and value must have one {what}; got {_three(query, key, value)}")
    if query.dtype not in _DTYPES:
        raise DtypeError(
            f"query, key and value must be float16, bfloat16, float32 or float64; got {str(query.dtype).removeprefix('torch.')}"
        )
    if q[3] != k[3]:
        raise ArgumentError(f"query and key must have one head dim; got {q[3]} and {k[3]} ({_three(query, key, value)})")
    if k[2] != v[2]:
        raise ArgumentError(f"key and value must have one length; got {k[2]} and {v[2]} ({_three(query, key, value)})")
    if k[1] != v[1]:
        raise ArgumentError(f"key and value must have one number of heads; got {k[1]} and {v[1]} ({_three(query, key, value)})")
    if q[1] != k[1] and (k[1] == 0 or q[1] % k[1] != 0):
        raise ArgumentError(f"the number of query heads must be a multiple of the number of key heads; got {q[1]} and {k[1]}")


def _three(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {describe(query)}, key {describe(key)}, value {describe(value)}"


def _broadcast_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (query.shape[0], key.shape[0], value.shape[0])
    if sizes[0] == sizes[1] == sizes[2]:
        return query, key, value
    batch = next((n for n in sizes if n != 1), 1)
    if any(n not in (1, batch) for n in sizes):
        raise ArgumentError(f"the batch sizes of query, key and value must be equal or 1; got {', '.join(map(str, sizes))}")
    return tuple(t.expand(batch, *t.shape[1:]) for t in (query, key, value))  # type: ignore[return-value]


def _checked_dropout(dropout_p: Any) -> float:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, _NUMBERS):
        raise TypeError(f"dropout_p must be a number from 0 to 1; got {type(dropout_p).__name__}")
    probability = _number(dropout_p)
    if not 0.0 <= probability <= 1.0:
        raise ArgumentError(f"dropout_p must be from 0 to 1; got {probability}")
    return probability


def _checked_scale(scale: Any, query: Tensor) -> float:
    if scale is None:
        return 1.0 / math.sqrt(query.shape[-1])
    if isinstance(scale, bool) or not isinstance(scale, _NUMBERS):
        raise TypeError(f"scale must be a number or None (1 / sqrt(head dim)); got {type(scale).__name__}")
    number = _number(scale)
    if isinstance(scale, _SYMBOLIC):
        return number
    if not math.isfinite(number):
        raise ArgumentError(f"scale must be finite; got {number}")
    if query.dtype != torch.float64:
        if abs(number) > _LARGEST:
            raise ArgumentError(f"scale must be a number of float32, in which scores are computed: at most {_LARGEST:.6g}; got {scale}")
        if abs(number) < _SMALLEST:
            return 0.0  # as float32 has it
    return number


_LARGEST: Final = torch.finfo(torch.float32).max
_SMALLEST: Final = 2.0**-149


def _check_numbers(bound: Bound, query: Tensor) -> None:
    """Refuses numbers of functions that are finite, and infinite in the accumulation type."""
    if query.dtype == torch.float64:
        return
    for number in bound.floats:
        if isinstance(number, float) and _LARGEST < abs(number) < math.inf:
            raise ArgumentError(
                f"score or mask holds the number {number:g}, which is beyond float32, in which scores are computed: write "
                f"{'-' if number < 0 else ''}math.inf, or a number up to {_LARGEST:.6g}"
            )


def _number(value: Any) -> float:
    """A float, infinite where an integer is too large for one; a symbolic one stays symbolic."""
    if isinstance(value, torch.SymFloat):
        return value  # type: ignore[return-value]
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def draw_seed(device: torch.device) -> Tensor:
    """One 63-bit number of torch's default generator of the device: reproducible by torch.manual_seed."""
    return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=512)
def _direct_indices(variant: Variant) -> tuple[tuple[int, int, str], ...]:
    """(slot, dim, variable) of each captured dimension that a bare coordinate indexes."""
    loads = (e for root in (variant.score, variant.mask) for e in root.walk() if e.op == "load")
    return tuple((int(str(e.value)), dim, str(index.value)) for e in loads for dim, index in enumerate(e.args) if index.op == "var")


def _check_captures(bound: Bound, query: Tensor, key: Tensor, extras: Extras) -> None:
    for slot, tensor in enumerate(bound.captures):
        if tensor.device != query.device:
            raise ArgumentError(f"captured tensor {slot}, {describe(tensor)}, must be on the query's device, {query.device}")
    if extras.cu_q is None:
        part = extras.part or Part()
        lengths = {"b": query.shape[0], "h": part.first_head + query.shape[1], "q_idx": part.first_query + query.shape[2]}
        if extras.page_table is None:
            lengths["kv_idx"] = key.shape[2]
    else:
        lengths = {"b": extras.cu_q.shape[0] - 1, "h": query.shape[1]}
        if extras.exact_lengths:
            lengths |= {"q_idx": extras.max_q, "kv_idx": extras.max_kv}
    check_room(bound.variant, bound.captures, lengths)


def check_room(variant: Variant, captures: Sequence[Tensor], lengths: Mapping[str, int]) -> None:
    """Checks that captured tensors have an entry for each value of the coordinates that index them.

    Args:
        variant: the functions.
        captures: the captured tensors, by slot.
        lengths: how far each coordinate runs, of those that are known.

    Raises:
        ValueError: if one is too short.
    """
    for slot, dim, name in _direct_indices(variant):
        size = captures[slot].shape[dim]
        if isinstance(size, int) and isinstance(lengths.get(name), int) and size < lengths[name]:
            raise ArgumentError(
                f"captured tensor {slot}, {describe(captures[slot])}, is indexed by {name} in dimension {dim}: "
                f"{name} runs to {lengths[name]}, so that dimension must have at least {lengths[name]} entries"
            )


def _check_blocks(blocks: Tensor, block_size: tuple[int, int] | None, query: Tensor, key: Tensor) -> None:
    assert block_size is not None
    wanted = [-(-n // size) for n, size in zip((query.shape[2], key.shape[2]), block_size, strict=True)]
    got = list(blocks.shape[-2:])
    if got != wanted:
        raise ArgumentError(
            f"the block mask covers {got[0]} x {got[1]} blocks of {block_size[0]} x {block_size[1]}; "
            f"query length {query.shape[2]} and key length {key.shape[2]} need {wanted[0]} x {wanted[1]}"
        )
    for name, size, limit in (("batch", blocks.shape[0], query.shape[0]), ("heads", blocks.shape[1], query.shape[1])):
        if size not in (1, limit):
            raise ArgumentError(f"the block mask has {size} {name}; it must have 1 or {limit}")
    if blocks.device != query.device:
        raise ArgumentError(f"the block mask is on {blocks.device}; it must be on the query's device, {query.device}")


def check_is_tensor(**named: Any) -> None:
    """Raises a TypeError that names the first argument that is no tensor, or a sparse one."""
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(value).__name__}")
        if type(value) is Tensor and value.layout is not torch.strided:
            raise DtypeError(f"{name} must be a dense tensor; got layout {value.layout}")


def check_inputs(query: Any, key: Any, value: Any) -> None:
    """`check_is_tensor` of query, key and value, which every call asks: most are dense tensors of torch's own class."""
    if not (type(query) is type(key) is type(value) is Tensor and query.layout is key.layout is value.layout is torch.strided):
        check_is_tensor(query=query, key=key, value=value)


def are_flags(one: Any, other: Any = False) -> bool:
    """Whether both are True or False, which every call asks; `check_is_flag` says which is not."""
    return type(one) is type(other) is bool


def check_is_flag(**named: Any) -> None:
    """Raises a TypeError that names the first argument that is neither True nor False."""
    for name, value in named.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False; got {type(value).__name__}")


def check_offsets(name: str, offsets: Any, tokens: Tensor) -> None:
    """Checks the cumulative lengths of packed `tokens`: an integer vector with at least one entry.

    Raises:
        TypeError: for another type or dtype.
        ValueError: for another shape or device.
    """
    check_integers(name, offsets, tokens.device)
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ArgumentError(
            f"{name} must be a vector of cumulative lengths [sequences + 1]; got shape {list(offsets.shape)} for {tokens.shape[0]} tokens"
        )


def check_integers(name: str, tensor: Any, device: torch.device) -> None:
    """Checks that the argument is an integer tensor on the device.

    Raises:
        TypeError: for another type or dtype.
        ValueError: for another device.
    """
    check_is_tensor(**{name: tensor})
    if tensor.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{name} must be int32 or int64; got {tensor.dtype}")
    if tensor.device != device:
        raise ArgumentError(f"{name} must be on the query's device, {device}; got {describe(tensor)}")
