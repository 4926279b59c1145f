"""From operands to native code: one packed structure of pointers, strides and sizes, and a call through ctypes."""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from foci import dropout
from foci.backends.contract import Kernel, Plan
from foci.backends.cpu import build
from foci.backends.cpu.sites import HeadNumbers, find_sites, partition
from foci.backends.cpu.source import backward_source, forward_source
from foci.backends.row_gradients import add_row_gradients
from foci.backends.sequences import is_empty, without_keys
from foci.ir.derivative import CaptureDerivative
from foci.problem import Cotangents, Gradients, Operands, Results, empty_out, gradient_strides, make_tuple

__all__ = ["CpuKernel"]

Entry = Callable[[bytes], int]
Tensors = tuple[Tensor | None, ...]
_LAYOUT: Final = struct.Struct("<61q2d10q")
_NOTHING: Final = (0, 0, 0, 0, 0)
_NO_GRADIENTS: Final = (None, None, None, None)
_NO_OFFSETS: Final = (None, None, None, None)
_NO_CLASSES: Final = (0, 0, 0)  # the kernel finds those of the mask itself
_SERIAL_WORK: Final = 1 << 21  # multiplications below which waking threads costs more than it gains
_ADDED_IN_PLACE: Final = 16  # copies of a gradient, at most
_MOST_SPLITS: Final = 8  # the sums of dQ of more cost what their balance gains

_threads_after_fork: int | None = None


def _after_fork() -> None:
    # The threads of libgomp's pool do not survive a fork, and it does not notice: a child stays with one.
    global _threads_after_fork
    _threads_after_fork = 1


os.register_at_fork(after_in_child=_after_fork)


def _described(tensor: Tensor | None) -> tuple[int, ...]:
    return _NOTHING if tensor is None else (tensor.data_ptr(), *tensor.stride())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Sizes(NamedTuple):
    """Sizes of a call, in the order of the native structure."""

    batch: int  # entries, or sequences
    q_heads: int
    kv_heads: int
    q_len: int  # queries of an entry, or of the longest sequence
    kv_len: int
    q_tokens: int  # rows of contiguous outputs: queries of an entry, or of all sequences
    kv_tokens: int


class RowTensors(NamedTuple):
    """Contiguous float32 tensors with one number a row or column, in the order of the native structure; None for absent ones."""

    lse: Tensor | None  # [B, Hq, Sq]
    row_max: Tensor | None = None  # [B, Hq, Sq]; receives minus the gradient of lse where grad_column_sums is given
    column_sums: Tensor | None = None  # [B, Hq, Skv]
    grad_lse: Tensor | None = None
    grad_column_sums: Tensor | None = None


class Arguments:
    """Arguments of a native call. They own the memory that the packed structure points at: keep them until the call returns."""

    def __init__(self, operands: Operands) -> None:
        query, key = operands.query, operands.key
        self.operands = operands
        self.owned: list[object] = []
        self.offsets: Tensors = _NO_OFFSETS
        if operands.cu_q is not None:
            self.offsets = tuple(
                None if t is None else t.to(torch.int64).contiguous()
                for t in (operands.cu_q, operands.cu_kv, operands.q_lengths, operands.kv_lengths)
            )
        tensors = operands.captures if operands.blocks is None else (*operands.captures, operands.blocks)
        entries = [n for t in tensors for n in (t.data_ptr(), *(t.shape or (1,)), *(t.stride() or (0,)))]
        self.captures, self.ints = self._place("q", entries), self._place("q", operands.ints)
        self.floats = self._place("d", operands.floats)
        batch, q_heads, q_tokens, _ = query.shape
        kv_heads, kv_tokens = key.shape[1:3]
        q_len, kv_len = q_tokens, kv_tokens
        if operands.cu_q is not None:
            batch, q_len, kv_len = operands.cu_q.shape[0] - 1, operands.max_q, operands.max_kv
        self.sizes: Sizes = make_tuple(Sizes, (batch, q_heads, kv_heads, q_len, kv_len, q_tokens, kv_tokens))
        self.threads = self._threads()

    def _threads(self) -> int:
        sizes = self.sizes
        if sizes.batch * sizes.q_heads * sizes.q_len * sizes.kv_len * self.operands.query.shape[3] < _SERIAL_WORK:
            return 1
        return _threads_after_fork or torch.get_num_threads()

    def has_gaps(self, *, of_keys: bool) -> bool:
        """Whether tokens of a jagged batch belong to no sequence, so that no kernel writes them."""
        offsets, lengths = self.offsets[of_keys], self.offsets[2 + of_keys]
        if offsets is None:
            return False
        tokens = self.sizes.kv_tokens if of_keys else self.sizes.q_tokens
        return lengths is not None or int(offsets[0]) != 0 or int(offsets[-1]) != tokens

    def _place(self, kind: str, numbers: Sequence[float]) -> int:
        """Store numbers, as int64 for the kind "q" and float64 for "d", and return their address; 0 for no numbers: the kernel reads none
        then."""
        if not numbers:
            return 0
        content = struct.pack(f"<{len(numbers)}{kind}", *numbers)
        self.owned.append(content)
        return ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value or 0

    def packed(
        self, tensors: Tensors, rows: RowTensors, gradients: Sequence[int] = (), tasks: tuple[int, int, int, int] = (1, 1, 1, 1)
    ) -> bytes:
        """The structure: `tensors` are those after query, key and value, `rows` the statistics and their gradients.

        `gradients` says where those of captured tensors go, `tasks` how the backward's tasks are split and grouped.
        """
        o = self.operands
        self.owned += (tensors, rows)
        keep_scale, threshold = 1.0, 0
        if o.dropout_p:
            keep_scale, threshold = 1.0 / (1.0 - o.dropout_p) if o.dropout_p < 1 else 0.0, dropout.threshold(o.dropout_p)
        return _LAYOUT.pack(
            *itertools.chain.from_iterable(map(_described, (o.query, o.key, o.value, *tensors))), *map(_address, rows), *self.sizes,
            *map(_address, self.offsets), self.captures, self._place("q", gradients), self.ints, self.floats, _address(o.seed),
            o.scale, keep_scale, threshold, int(o.dropout_p >= 1), self.threads, *tasks, *_NO_CLASSES,
        )  # fmt: skip


class CpuKernel(Kernel):
    """The native kernels of one plan. The backward is compiled when it is first asked for."""

    def __init__(self, plan: Plan) -> None:
        self.problem = plan.problem
        self._backward: Entry | None = None
        library = build.load(forward_source(plan.problem))
        self._forward: Entry = library.foci_forward
        self._columns: Entry | None = library.foci_columns if plan.problem.formula.outputs.column_sums else None

    def forward(self, operands: Operands, /) -> Results:
        """Computed by the compiled kernel; without keys, zeros and logsumexp of minus infinity."""
        outputs = self.problem.formula.outputs
        query = operands.query
        if is_empty(operands):
            return without_keys(operands, outputs)
        arguments = Arguments(operands)
        out = empty_out(query, operands.value)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        row_max = torch.empty_like(lse) if outputs.row_max else None
        if arguments.has_gaps(of_keys=False):
            out.zero_()
            lse.fill_(-torch.inf)
            if row_max is not None:
                row_max.fill_(-torch.inf)
        rows: RowTensors = make_tuple(RowTensors, (lse, row_max, None, None, None))
        _check(self._forward(arguments.packed((out, *_NO_GRADIENTS), rows)))
        column_sums = None
        if self._columns is not None:
            column_sums = query.new_zeros((*query.shape[:2], operands.key.shape[2]), dtype=torch.float32)
            _check(self._columns(arguments.packed((out, *_NO_GRADIENTS), RowTensors(lse, column_sums=column_sums))))
        return Results(out, lse, row_max, column_sums)

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        """Gradients of the operands."""
        problem = self.problem
        if self._backward is None:
            self._backward = build.load(backward_source(problem)).foci_backward
        if is_empty(operands):
            return self._zeros(operands)
        arguments = Arguments(operands)
        needs_grad = (problem.query_grad, problem.key_grad, problem.value_grad)
        grads = _gradient_tensors(operands, needs_grad)
        for tensor, of_keys in zip(grads, (False, True, True), strict=True):
            if tensor is not None and arguments.has_gaps(of_keys=of_keys):
                tensor.zero_()
        splits = self._splits(arguments)
        sites = find_sites(problem.variant.score, problem.capture_grads)
        numbers = HeadNumbers(operands.query.shape[1], operands.ints)
        sums = CaptureSums(sites, operands.captures, (arguments.sizes.batch, arguments.sizes.kv_heads, splits), numbers)
        rows = RowTensors(results.lse.contiguous(), None, None, *self._row_gradients(arguments, results, cotangents))
        tasks = (splits, *sums.partition.parts)
        _check(self._backward(arguments.packed((results.out, cotangents.out, *grads), rows, sums.described(), tasks)))
        gradients = Gradients(grads[0], grads[1], grads[2], sums.results(problem.capture_grads))
        return add_row_gradients(gradients, problem, operands, results.lse, cotangents.lse)

    def _zeros(self, operands: Operands) -> Gradients:
        p = self.problem
        tensors, needs_grad = (operands.query, operands.key, operands.value), (p.query_grad, p.key_grad, p.value_grad)
        query, key, value = (torch.zeros_like(t) if want else None for t, want in zip(tensors, needs_grad, strict=True))
        captures = tuple(torch.zeros_like(t) if want else None for t, want in zip(operands.captures, p.capture_grads, strict=True))
        return Gradients(query, key, value, captures)

    def _row_gradients(self, arguments: Arguments, results: Results, cotangents: Cotangents) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of logsumexp and column sums, as the kernel takes them: what every weight of a row gets is in the first."""
        lse = None if cotangents.lse is None else cotangents.lse.to(torch.float32).contiguous()
        if cotangents.column_sums is None:
            return lse, None
        assert self._columns is not None
        columns = cotangents.column_sums.to(torch.float32).contiguous()
        dots = torch.zeros_like(results.lse, memory_format=torch.contiguous_format)
        rows = RowTensors(results.lse.contiguous(), dots, grad_column_sums=columns)
        _check(self._columns(arguments.packed((results.out, *_NO_GRADIENTS), rows)))
        return (dots.neg() if lse is None else lse - dots), columns

    def _splits(self, arguments: Arguments) -> int:
        """Parts of the keys, each with a dQ of its own: up to 64 tasks in all, by the sizes alone, so that threads do not matter."""
        sizes = arguments.sizes
        return max(1, min(-(-64 // (sizes.batch * sizes.kv_heads)), sizes.kv_len // 512, _MOST_SPLITS))


def _gradient_tensors(operands: Operands, needs_grad: tuple[bool, bool, bool]) -> Tensors:
    """Allocate gradients of query, key and value, None where not needed. Each has heads within rows, or rows within heads, as its tensor;
    a joined call gets parts of the rows of one tensor."""
    tensors = (operands.query, operands.key, operands.value)
    widths = [t.shape[1] * t.shape[3] for t in tensors]
    if operands.program is not None and operands.program.joined and all(needs_grad):
        rows = operands.query.new_empty((operands.query.shape[0], operands.query.shape[2], sum(widths)))
        parts = zip(torch.split(rows, widths, 2), tensors, strict=True)
        return tuple(part.view(*part.shape[:2], t.shape[1], t.shape[3]).transpose(1, 2) for part, t in parts)
    return tuple(
        t.new_empty_strided(t.shape, gradient_strides(t.shape, heads_in_rows=t.stride(1) < t.stride(2))) if want else None
        for t, want in zip(tensors, needs_grad, strict=True)
    )


class CaptureSums:
    """Gradients of captured tensors while they are summed: float32, one copy per group of tasks that needs its own."""

    def __init__(
        self, sites: Sequence[CaptureDerivative], captures: tuple[Tensor, ...], sizes: tuple[int, int, int], numbers: HeadNumbers
    ) -> None:
        self.sites, self.captures = sites, captures
        self.partition = partition(sites, captures, sizes, numbers)
        copies = {site.slot: self.partition.copies[site.slot] for site in sites}
        self.sums = {slot: captures[slot].new_zeros((*n, *captures[slot].shape), dtype=torch.float32) for slot, n in copies.items()}

    def described(self) -> list[int]:
        """For each site, the address that it adds to, and the strides of the copies of batch entries, heads and splits."""
        entries: list[int] = []
        for site in self.sites:
            sums = self.sums[site.slot]
            entries += (sums.data_ptr(), *(stride if n > 1 else 0 for stride, n in zip(sums.stride()[:3], sums.shape[:3], strict=True)))
        return entries

    def results(self, needs_grad: tuple[bool, ...]) -> Tensors:
        """The gradients in the tensors' dtypes; zeros for a tensor that needs a gradient but is never read."""
        return tuple(
            None if not want else torch.zeros_like(t) if slot not in self.sums else self._total(slot).to(t.dtype)
            for slot, (t, want) in enumerate(zip(self.captures, needs_grad, strict=True))
        )

    def _total(self, slot: int) -> Tensor:
        copies = self.sums[slot].flatten(0, 2)
        if len(copies) > _ADDED_IN_PLACE:
            return copies.sum(0)
        for other in copies[1:]:
            copies[0] += other  # fresh memory for a sum of large copies costs more than the sum
        return copies[0]


def _check(status: int) -> None:
    if status != 0:
        raise MemoryError("the CPU backend could not allocate its working memory")
