"""Forward and backward of calls that differ in the addresses of their tensors alone: packed once, run for each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch import Tensor

from foci.backends.contract import Given, Inputs
from foci.backends.cpu.native_call import Addresses, Entry, NativeCall, OtherStrides, Tasks
from foci.backends.cpu.sites import HeadNumbers, find_sites, partition
from foci.compat.cuda import allocator_on
from foci.problem import Operands, OptionalTensors, Problem, gradient_strides, result_strides

__all__ = ["BackwardPass", "ForwardPass", "OffsetValues"]

Form: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of a tensor."""
OffsetValues: TypeAlias = tuple[object, ...]
"""Number of queries and keys, and the values of cu_q, cu_kv, q_lengths and kv_lengths; nothing for the dense layout."""
_MOST_SPLITS: Final = 8  # the sums of dQ of more cost what their balance gains
_allocate: Final = allocator_on(torch.device("cpu"))


class ForwardPass:
    """The forward of calls that differ in addresses alone.

    Args:
        entry: the native code.
        operands: of one of the calls, as tensors [B, H, S, D].
        offset_values: of the calls.
        has_row_max: whether row maxima are asked for.

    Attributes:
        call: arguments of native code.
        geometry: what the native code reads besides addresses.
        is_packed: results are [T, H, D] and [H, T].
        offset_values: of the calls.
    """

    __slots__ = ("_entry", "_has_gaps", "_makers", "call", "geometry", "is_packed", "offset_values")

    def __init__(self, entry: Entry, operands: Operands, offset_values: OffsetValues, *, has_row_max: bool) -> None:
        query, width = operands.query, operands.value.shape[3]
        b, h, s, _ = query.shape
        strides = result_strides(query.shape, query.stride(), width)
        self._entry = entry
        self.call = NativeCall(operands)
        self.geometry = self.call.geometry(OtherStrides(strides))
        self.is_packed = operands.program is not None and operands.program.packed
        self.offset_values = offset_values
        self._has_gaps = self.call.has_gaps(of_keys=False)
        out: Form = (b, h, s, width), strides
        rows: Form = (b, h, s), (h * s, s, 1)
        if self.is_packed:
            out, rows = _packed(out), ((h, s), (s, 1))
        self._makers = [functools.partial(_allocate, *out, query.dtype)]
        self._makers += [functools.partial(_allocate, *rows, torch.float32)] * (1 + has_row_max)

    def run(self, tensors: Inputs, optional: OptionalTensors) -> list[Tensor]:
        """Return out, lse, and row maxima if they are asked for, of query, key, value and captured tensors."""
        results = [make() for make in self._makers]
        if self._has_gaps:
            for n, tensor in enumerate(results):
                tensor.fill_(-torch.inf if n else 0.0)
        row_max = results[2].data_ptr() if len(results) > 2 else 0
        addresses = Addresses(results[0].data_ptr(), lse=results[1].data_ptr(), row_max=row_max)
        self.call.run(self._entry, self.geometry, tensors, optional, addresses)
        return results


class BackwardPass:
    """The backward of calls that differ in addresses alone.

    Args:
        entry: the native code.
        problem: which gradients are asked for.
        operands: of one of the calls, as tensors [B, H, S, D].
        bwd_args: its other arguments.
        offset_values: of the calls.

    Attributes:
        call: arguments of native code.
        is_packed: gradients of query, key and value are [T, H, D].
        offset_values: of the calls.
    """

    __slots__ = ("_entry", "_fills", "_geometry", "_make_gradients", "_sums", "call", "is_packed", "offset_values")

    def __init__(self, entry: Entry, problem: Problem, operands: Operands, bwd_args: Given, offset_values: OffsetValues) -> None:
        self._entry = entry
        self.offset_values = offset_values
        self.call = NativeCall(operands)
        self.is_packed = operands.program is not None and operands.program.packed
        needs_grad = (problem.query_grad, problem.key_grad, problem.value_grad)
        self._fills = [on and self.call.has_gaps(of_keys=of_keys) for on, of_keys in zip(needs_grad, (False, True, True), strict=True)]
        sizes = self.call.sizes
        # parts of the keys, each with a dQ of its own: up to 64 tasks in all, by the sizes alone, so that threads do not matter
        splits = max(1, min(-(-64 // max(1, sizes.batch * sizes.kv_heads)), sizes.kv_len // 512, _MOST_SPLITS))
        numbers = HeadNumbers(sizes.q_heads, operands.ints)
        self._sums = CaptureSums(problem, operands.captures, (sizes.batch, sizes.kv_heads, splits), numbers)
        layouts, self._make_gradients = _gradients(operands, needs_grad)
        strides = OtherStrides(bwd_args.out.stride(), bwd_args.dout.stride(), *(strides for _, strides in layouts))
        self._geometry = self.call.geometry(strides, Tasks(splits, *self._sums.parts))

    def run(
        self, tensors: Inputs, optional: OptionalTensors, bwd_args: Given, grad_column_sums: Tensor | None = None
    ) -> list[Tensor | None]:
        """Return the gradients of query, key, value and captured tensors, None for those that are not asked for.

        Args:
            tensors: query, key, value and captured tensors.
            optional: the call's other tensors.
            bwd_args: out, lse and their gradients; those of rows are float32 and contiguous.
            grad_column_sums: likewise, for one call alone; its part of the gradient of lse is in `bwd_args`.
        """
        gradients = self._make_gradients()
        for gradient, is_filled in zip(gradients, self._fills, strict=True):
            if gradient is not None and is_filled:
                gradient.zero_()
        sums = self._sums.make()
        out, lse, dout, dlse = bwd_args
        dq, dk, dv = map(_address, gradients)
        addresses = Addresses(
            out.data_ptr(), dout.data_ptr(), dq, dk, dv, lse.data_ptr(), grad_lse=_address(dlse),
            grad_column_sums=_address(grad_column_sums),
        )  # fmt: skip
        self.call.run(self._entry, self._geometry, tensors, optional, addresses, self._sums.entries(sums))
        return [*gradients, *self._sums.totals(sums, tensors[3:])]


class CaptureSums:
    """Gradients of captured tensors while they are summed: float32, one copy per group of tasks that needs its own.

    Args:
        problem: which are asked for.
        captures: the captured tensors, whose sizes count.
        sizes: number of batch entries, of heads of keys, and of splits.
        numbers: of the call.

    Attributes:
        parts: `foci.backends.cpu.sites.Partition.parts`.
    """

    __slots__ = ("_shapes", "_sites", "_wanted", "parts")

    def __init__(self, problem: Problem, captures: tuple[Tensor, ...], sizes: tuple[int, int, int], numbers: HeadNumbers) -> None:
        self._wanted = problem.capture_grads
        self._sites = find_sites(problem.variant.score, problem.capture_grads)
        groups = partition(self._sites, captures, sizes, numbers)
        self.parts = groups.parts
        self._shapes = {site.slot: (*groups.copies[site.slot], *captures[site.slot].shape) for site in self._sites}

    def make(self) -> dict[int, Tensor]:
        """Return zeros to sum in, by slot."""
        return {slot: torch.zeros(shape, dtype=torch.float32, device="cpu") for slot, shape in self._shapes.items()}

    def entries(self, sums: dict[int, Tensor]) -> list[int]:
        """For each site, the address that it adds to, and the strides of the copies of batch entries, heads and splits."""
        entries: list[int] = []
        for site in self._sites:
            to = sums[site.slot]
            entries += (to.data_ptr(), *(stride if n > 1 else 0 for stride, n in zip(to.stride()[:3], to.shape[:3], strict=True)))
        return entries

    def totals(self, sums: dict[int, Tensor], captures: Inputs) -> list[Tensor | None]:
        """Return the gradients in the tensors' dtypes; zeros for one that is never read, None for one that is not asked for."""
        totals: list[Tensor | None] = []
        for slot, is_wanted in enumerate(self._wanted):
            tensor = captures[slot]
            assert tensor is not None
            total = sums.get(slot)
            totals.append(None if not is_wanted else torch.zeros_like(tensor) if total is None else _total(total).to(tensor.dtype))
        return totals


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _total(sums: Tensor) -> Tensor:
    """The sum of its copies, in memory of its own."""
    copies = sums.flatten(0, 2)
    return copies[0] if len(copies) == 1 else copies.sum(0)


def _gradients(operands: Operands, wanted: tuple[bool, bool, bool]) -> tuple[list[Form], Callable[[], list[Tensor | None]]]:
    """How the gradients of query, key and value lie as [B, H, S, D], and the function that allocates them, None for those not asked for.

    Each has heads within rows, or rows within heads, as its tensor; a joined call gets parts of the rows of one tensor. Those of a packed
    call are [T, H, D].
    """
    tensors, program, dtype = operands.tensors[:3], operands.program, operands.query.dtype
    if program is not None and program.joined and all(wanted):
        b, _, s, _ = operands.query.shape
        widths = [t.shape[1] * t.shape[3] for t in tensors]
        total = sum(widths)
        parts: list[Form] = [((*t.shape,), (s * total, t.shape[3], total, 1)) for t in tensors]
        starts = [0, widths[0], widths[0] + widths[1]]

        def make_joined() -> list[Tensor | None]:
            rows = _allocate((b, s, total), (s * total, total, 1), dtype)
            return [rows.as_strided(*part, start) for part, start in zip(parts, starts, strict=True)]

        return parts, make_joined
    layouts: list[Form] = [((*t.shape,), gradient_strides(t.shape, heads_in_rows=t.stride(1) < t.stride(2))) for t in tensors]
    of_program = [_packed(each) for each in layouts] if program is not None and program.packed else layouts
    makers = [functools.partial(_allocate, *each, dtype) if on else None for each, on in zip(of_program, wanted, strict=True)]
    return layouts, lambda: [None if make is None else make() for make in makers]


def _packed(form: Form) -> Form:
    """[1, H, T, D] as [T, H, D]."""
    (_, heads, tokens, width), (_, head, row, last) = form
    return (tokens, heads, width), (row, head, last)
