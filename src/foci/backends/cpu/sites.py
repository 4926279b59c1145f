"""Gradients of captured tensors: the generated code that accumulates them, and which tasks may add to the same memory.

Each load that is differentiated is a site. It accumulates a vector of keys at a time: a run of elements where its index follows the keys,
one number per row where it does not depend on the key, else element by element.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foci.backends.cpu.codegen import VALUES, is_vector
from foci.backends.cpu.functor import Functor, Span, find_span
from foci.backends.row_gradients import summed_derivatives
from foci.ir.derivative import CaptureDerivative
from foci.ir.emit import emit
from foci.ir.expr import DType, Expr, variable
from foci.ir.ops import cast

__all__ = ["HeadNumbers", "Partition", "add_sites", "find_sites", "partition"]

_ARGUMENTS = "const Call& call, const Row& row, const Col& col, vf s, vf g, int kv, float* const* sinks, Run* runs"
_SMALL = 1 << 22  # bytes of gradients, all copies together, that are always affordable
_LEAST_GROUPS = 16  # groups of tasks, where more would need large copies
_BUDGET = 1 << 28  # bytes of copies beyond which groups are merged even so


@functools.lru_cache(maxsize=1024)
def find_sites(score: Expr, needs_grad: tuple[bool, ...]) -> tuple[CaptureDerivative, ...]:
    """The loads of a score function whose captured tensors want a gradient."""
    return tuple(site for site in summed_derivatives(score) if needs_grad[site.slot])


def add_sites(functor: Functor, sites: Sequence[CaptureDerivative]) -> None:
    """Adds the members that accumulate the sites' gradients."""
    lines: list[str] = ["const vi keys = iota() + kv;"]
    flush: list[str] = []
    for n, site in enumerate(sites):
        span = None if site.axes else find_span(site.slot, site.indices, DType.FLOAT)
        span = None if span is not None and span.divisor else span
        if site.axes:
            lines += _looped(functor, n, site)
            flush.append(f"runs[{n}].flush(sinks[{n}]);")
        elif span is not None:
            lines += _run(functor, n, site, span)
        elif not any(index.variables() & {"kv_idx", "score"} for index in site.indices):
            lines += _weighted(functor, site, (), f"runs[{n}].sum += w;")
            indices = [functor.leaf_text(functor.staged(index)) for index in site.indices]
            flush.append(f"sinks[{n}][dense_offset({', '.join((f'c{site.slot}(call)', *indices))})] += reduce_sum(runs[{n}].sum);")
        else:
            lines += _weighted(functor, site, site.indices, f"scatter(sinks[{n}], runs[{n}], c{site.slot}(call), w{{indices}});")
            flush.append(f"runs[{n}].flush(sinks[{n}]);")
    functor.add(f"static FOCI_INLINE void capture_gradients({_ARGUMENTS})", lines)
    functor.add("static FOCI_INLINE void flush_gradients(const Call& call, const Row& row, float* const* sinks, Run* runs)", flush)


def _weighted(functor: Functor, site: CaptureDerivative, indices: Sequence[Expr], then: str) -> list[str]:
    """A block that computes what a site adds, `w`, zero where no gradient flows, and what `then` does with it."""
    staged = tuple(functor.staged(e) for e in (cast(site.weight, DType.FLOAT), *indices))
    emitted = emit(staged, VALUES)
    weight, *at = emitted.results
    spelled = "".join(f", {text}" for text in at)
    product = f"const vf w = g == 0.0f ? vf{{}} : g * wide({weight});"
    lines = (*functor.reads(staged), *emitted.lines, product, then.replace("{indices}", spelled))
    return ["{", *(f"  {line}" for line in lines), "}"]


def _run(functor: Functor, n: int, site: CaptureDerivative, span: Span) -> list[str]:
    number = functor.gradient_span(span)
    return _weighted(functor, site, (), f"accumulate<{span.step}>(sinks[{n}], row.g{number}, kv, w);")


def _looped(functor: Functor, n: int, site: CaptureDerivative) -> list[str]:
    extents = tuple(functor.staged(extent) for _, extent in site.axes)
    limits = emit(extents, VALUES)
    loops = [
        f"for (int axis{level} = 0; axis{level} < (int)(lane({extent}, 0)); ++axis{level})"
        for (level, _), extent in zip(site.axes, limits.results, strict=True)
    ]
    indices = tuple(functor.staged(index) for index in site.indices)
    if any(is_vector(index) for index in indices) or any(index.free for index in site.indices):
        body = _weighted(functor, site, site.indices, f"scatter(sinks[{n}], runs[{n}], c{site.slot}(call), w{{indices}});")
    else:
        body = _weighted(functor, site, site.indices, f"sinks[{n}][dense_offset(c{site.slot}(call){{indices}})] += reduce_sum(w);")
    return ["{", *(f"  {line}" for line in (*limits.lines, *loops, *body)), "}"]


# Who may write where -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Partition:
    """Groups of the backward's tasks, as the kernel's `Partition` runs them: the tasks of a group run in order.

    Attributes:
        parts: number of groups by batch entry, by kv head and by split of the keys; a task's are its own, modulo these.
        copies: for each captured tensor, the copies of its gradient along the same axes: 1 where no two groups touch one element.
    """

    parts: tuple[int, int, int]
    copies: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class HeadNumbers:
    """Numbers of a call that say whether `b * n + h` is an index of its own for each batch entry and head: n is at least `q_heads`.

    Attributes:
        q_heads: number of query heads.
        ints: the call's run-time numbers, by slot of `param`; n may be one.
    """

    q_heads: int
    ints: tuple[int, ...]


def _owned_axes(sites: Sequence[CaptureDerivative], slot: int, shape: Sequence[int], batch: int, numbers: HeadNumbers) -> tuple[bool, ...]:
    """Whether each element of a captured tensor belongs to one batch entry, one head, one key."""
    owners = [
        {name for index, size in zip(site.indices, shape, strict=True) for name in _determined(index, size, batch, numbers)}
        for site in sites
        if site.slot == slot
    ]
    return tuple(all(name in one for one in owners) for name in ("b", "h", "kv_idx"))


def _determined(index: Expr, size: int, batch: int, numbers: HeadNumbers) -> tuple[str, ...]:
    """The variables whose values follow from the index of a dimension: of one that is a variable, and of `b * n + h`."""
    if index.op == "var":
        return (str(index.value),)  # `prepare.check_room` has checked that the dimension has an entry for each value
    if index.op != "add":
        return ()
    for head, rows in (index.args, index.args[::-1]):
        if head is variable("h") and rows.op == "mul":
            for entry, factor in (rows.args, rows.args[::-1]):
                n = _number(factor, numbers.ints)
                # indices beyond the dimension all read its last entry
                if entry is variable("b") and n >= numbers.q_heads and (batch - 1) * n + numbers.q_heads <= size:
                    return ("b", "h")
    return ()


def _number(e: Expr, ints: tuple[int, ...]) -> int:
    """The value of a constant or of a run-time number, 0 for anything else."""
    if not isinstance(e.value, int) or e.dtype not in (DType.INT32, DType.INT64):
        return 0
    return e.value if e.op == "const" else ints[e.value] if e.op == "param" and e.value < len(ints) else 0


def partition(
    sites: Sequence[CaptureDerivative], captures: Sequence[Tensor], sizes: tuple[int, int, int], numbers: HeadNumbers
) -> Partition:
    """Groups tasks so that no two groups write to the same memory, by the sizes alone: threads do not change the order of sums.

    Every task is a group of its own where the private copies of gradients that this takes are small. Else groups are joined, those
    first that save most, while there are enough of them for the threads of a machine.

    Args:
        sites: what is differentiated.
        captures: the captured tensors, by slot.
        sizes: number of batch entries, kv heads and splits.
        numbers: of the call.
    """
    wanted = {site.slot for site in sites}
    owned = {slot: _owned_axes(sites, slot, captures[slot].shape, sizes[0], numbers) for slot in wanted}

    def count_copies(slot: int, parts: Sequence[int]) -> tuple[int, int, int]:
        b, h, s = (1 if is_owned else n for is_owned, n in zip(owned[slot], parts, strict=True))
        return b, h, s

    def count_bytes(parts: Sequence[int]) -> int:
        return sum(4 * captures[slot].numel() * math.prod(count_copies(slot, parts)) for slot in wanted)

    parts = sizes
    while count_bytes(parts) > _SMALL:
        halved = [tuple(-(-n // 2) if i == axis else n for i, n in enumerate(parts)) for axis in range(3)]
        b, h, s = min(halved, key=count_bytes)
        if count_bytes((b, h, s)) == count_bytes(parts) or (b * h * s < _LEAST_GROUPS and count_bytes(parts) <= _BUDGET):
            break
        parts = b, h, s
    return Partition(parts, tuple(count_copies(slot, parts) if slot in wanted else (1, 1, 1) for slot in range(len(captures))))
