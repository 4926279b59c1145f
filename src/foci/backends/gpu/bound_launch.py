"""Launch lists bound to everything but the addresses of their tensors, for the layers of a model.

The calls of a model's layers differ in addresses alone, so a bound launch skips all look-ups. If query, key and value are side by side in
the rows of one tensor, it takes those rows and returns rows, and no tensors are made for query, key, value and their gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foci.backends.contract import BackwardOfRows, ForwardOfRows, Inputs, Offsets
from foci.backends.gpu.launch_list import LaunchList, Sized
from foci.backends.gpu.stream_state import allocator_on, free_stream_on
from foci.backends.gpu.tile_tables import sequences_at
from foci.weak_cache import tensor_state

__all__ = ["bind_backward", "bind_forward"]


class _Kind(NamedTuple):
    """Shape, dtype and device of a contiguous tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> _Kind | None:
        """The kind of a tensor; None if it is not contiguous or does not begin at a multiple of 16 bytes."""
        return _Kind(tensor.shape, tensor.dtype, tensor.device) if tensor.is_contiguous() and not tensor.data_ptr() & 15 else None

    def of_rows(self, rows: Tensor) -> _Kind | None:
        """The kind of rows that differ from this one in their number alone; None for others."""
        if rows.shape == self.shape:
            return self if self.has(rows) else None
        kind = self._replace(shape=torch.Size((rows.shape[0], *self.shape[1:])))
        return kind if kind.has(rows) else None

    def has(self, tensor: Tensor) -> bool:
        """Whether a contiguous tensor is of this kind; its address is not checked."""
        shape, dtype, device = self
        return tensor.shape == shape and tensor.dtype is dtype and tensor.is_contiguous() and tensor.device == device


class _Surroundings:
    """Stream and sequences that a launch list is bound to."""

    __slots__ = ("_device", "_ends", "stream")

    def __init__(self, device: int, stream: int, ends: tuple[Tensor, ...]) -> None:
        self._device, self.stream = device, stream
        self._ends = [(t, tensor_state(t)) for t in ends]

    def moved(self, offsets: Tensor) -> _Surroundings | None:
        """Return the surroundings with other sequences: as many, with one set of offsets. None if there were two sets, or if launches must
        go through Triton."""
        (of, _), *other_ends = self._ends
        if other_ends or offsets.shape != of.shape or offsets.dtype != of.dtype or offsets.device != of.device or offsets.is_inference():
            return None
        return _Surroundings(self._device, self.stream, (offsets,)) if free_stream_on(self._device) == self.stream else None

    def are_same(self) -> bool:
        """Whether stream and offsets are unchanged, and launches may still bypass Triton."""
        for t, state in self._ends:
            if tensor_state(t) != state:
                return False
        return free_stream_on(self._device) == self.stream


def _surroundings(tensor: Tensor, offsets: Offsets | None) -> _Surroundings | None:
    device = tensor.get_device() if tensor.is_cuda else -1
    stream, ends = free_stream_on(device), {id(t): t for t in offsets or () if t is not None}
    if stream is None or any(t.is_inference() for t in ends.values()):
        return None
    return _Surroundings(device, stream, tuple(ends.values()))


def _find_parts(rows: Tensor, inputs: Inputs) -> tuple[int, int, int] | None:
    """Byte offsets of query, key and value in the rows; None if they are not inside the first row, at multiples of 16 bytes."""
    start, size = rows.data_ptr(), rows.shape[1] * rows.element_size()
    query, key, value = [-1 if t is None else t.data_ptr() - start for t in inputs[:3]]
    return (query, key, value) if min(query, key, value) >= 0 and max(query, key, value) < size and not (query | key | value) & 15 else None


class _Results(NamedTuple):
    """Size, strides and dtype of out and lse, both contiguous."""

    out: tuple[tuple[int, int], tuple[int, int], torch.dtype]
    lse: tuple[tuple[int, int], tuple[int, int], torch.dtype]


class _Forward:
    """A forward pass for rows of one kind, for one stream and set of sequences.

    `kept`: where the caller does not read lse, the one tensor that every call writes it to.
    """

    __slots__ = ("_around", "_empty", "_kept", "_kind", "_launch", "_launch_list", "_no_padding", "_parts", "_results")

    def __init__(
        self, launch_list: LaunchList, kind: _Kind, around: _Surroundings, parts: tuple[int, int, int], kept: Tensor | None, *,
        no_padding: bool,
    ) -> None:  # fmt: skip
        self._launch_list, self._kind, self._around, self._parts, self._kept, self._no_padding = (
            launch_list, kind, around, parts, kept, no_padding,
        )  # fmt: skip
        self._results: _Results = launch_list.sized.makes_rows
        self._empty = allocator_on(kind.device)
        self._launch = (launch_list.of_whole() if no_padding else None) or launch_list.launch

    def __call__(self, rows: Tensor, /) -> tuple[Tensor, Tensor] | None:
        start, kind, kept = rows.data_ptr(), self._kind, self._kept
        if start & 15 or not kind.has(rows) or not self._around.are_same():
            return None
        (q, k, v), (of_out, of_lse), empty = self._parts, self._results, self._empty
        out = empty(*of_out)
        lse = empty(*of_lse) if kept is None else kept
        self._launch([start + q, start + k, start + v, None, out.data_ptr(), lse.data_ptr()])
        return out, lse

    def moved(self, rows: Tensor, offsets: Tensor, /) -> _Forward | None:
        """See `foci.backends.contract.ForwardOfRows`."""
        kind, around = self._kind.of_rows(rows), self._around.moved(offsets)
        launch_list = None if kind is None or around is None else _moved(self._launch_list, around, offsets, rows.shape[0])
        if kind is None or around is None or launch_list is None or not _knows_results(launch_list):
            return None
        kept = self._kept
        if kept is not None and kind is not self._kind:
            kept = self._empty(*launch_list.sized.makes_rows.lse)
        return _Forward(launch_list, kind, around, self._parts, kept, no_padding=self._no_padding)


def bind_forward(
    launch_list: LaunchList, rows: Tensor, inputs: Inputs, offsets: Offsets | None, *, no_padding: bool, out_alone: bool
) -> ForwardOfRows | None:
    """Bind a forward launch list, built for views of rows [T, E], to any such rows. None if it depends on more than addresses, or its
    results are not contiguous. `no_padding`, `out_alone`: see `foci.backends.contract.Binding`."""
    kind, around, parts = _Kind.of(rows), _surroundings(rows, offsets), _find_parts(rows, inputs)
    if kind is None or around is None or parts is None or not _knows_results(launch_list):
        return None
    results: _Results = launch_list.sized.makes_rows
    kept = allocator_on(kind.device)(*results.lse) if out_alone else None
    return _Forward(launch_list, kind, around, parts, kept, no_padding=no_padding)


def _moved(launch_list: LaunchList, around: _Surroundings, offsets: Tensor, tokens: int) -> LaunchList | None:
    """Bind a launch list without captured tensors to other sequences; None if it cannot be bound to others."""
    template = launch_list.template.anywhere() if min(tokens, *launch_list.tokens) > 1 else None  # strides of a single token say nothing
    if template is None:
        return None
    return template.bound(sequences_at(offsets, (offsets, offsets, None, None), around.stream), (tokens, tokens), ())


def _knows_results(launch_list: LaunchList) -> bool:
    sized = launch_list.sized
    if sized.makes_rows is None:
        sized.makes_rows = _find_results(sized) or False
    return sized.makes_rows is not False


def _find_results(sized: Sized) -> _Results | None:
    news = sized.news
    if sized.joint is not None or len(news) != 2:
        return None
    (size, stride, dtype), (lse, lse_stride, lse_dtype) = news
    if len(size) != 3 or stride != (size[1] * size[2], size[2], 1) or lse_stride != (lse[1], 1) or lse_dtype != torch.float32:
        return None
    width = size[1] * size[2]
    return _Results(((size[0], width), (width, 1), dtype), ((lse[0], lse[1]), (lse[1], 1), lse_dtype))


class _Backward:
    """A backward pass, as `_Forward`. `kinds`: of the rows, out, lse and the gradient of out."""

    __slots__ = ("_around", "_empty", "_kinds", "_launch_list", "_of_grad_rows", "_parts", "_steps")

    def __init__(
        self, launch_list: LaunchList, kinds: tuple[_Kind, _Kind, _Kind, _Kind], around: _Surroundings, parts: tuple[int, int, int]
    ) -> None:
        self._launch_list, self._kinds, self._around, self._parts = launch_list, kinds, around, parts
        self._steps: tuple[int, ...] = launch_list.sized.makes_rows
        of_rows = kinds[0]
        self._empty, self._of_grad_rows = allocator_on(of_rows.device), ((*of_rows.shape,), (of_rows.shape[1], 1), of_rows.dtype)

    def __call__(self, rows: Tensor, out: Tensor, lse: Tensor, dout: Tensor, /) -> Tensor | None:
        start, outs, lses, douts = rows.data_ptr(), out.data_ptr(), lse.data_ptr(), dout.data_ptr()
        if (start | outs | lses | douts) & 15 or not self._around.are_same():
            return None
        of_rows, of_out, of_lse, of_dout = self._kinds
        # autograd may pass saved tensors and gradients as other tensors with the same values
        if not (of_rows.has(rows) and of_out.has(out) and of_lse.has(lse) and of_dout.has(dout)):
            return None
        grad_rows = self._empty(*self._of_grad_rows)
        to, (q, k, v), (dq, dk, dv) = grad_rows.data_ptr(), self._parts, self._steps
        self._launch_list.launch([start + q, start + k, start + v, None, outs, lses, douts, None, to + dq, to + dk, to + dv])
        return grad_rows

    def moved(self, rows: Tensor, offsets: Tensor, /) -> _Backward | None:
        """See `foci.backends.contract.BackwardOfRows`."""
        of_rows, of_out, of_lse, of_dout = self._kinds
        kind, around = of_rows.of_rows(rows), self._around.moved(offsets)
        launch_list = None if kind is None or around is None else _moved(self._launch_list, around, offsets, rows.shape[0])
        if kind is None or around is None or launch_list is None or not _knows_steps(launch_list, rows):
            return None
        if kind is of_rows:
            return _Backward(launch_list, self._kinds, around, self._parts)
        out, lse = torch.Size((rows.shape[0], of_out.shape[1])), torch.Size((of_lse.shape[0], rows.shape[0]))
        kinds = (kind, of_out._replace(shape=out), of_lse._replace(shape=lse), of_dout._replace(shape=out))
        return _Backward(launch_list, kinds, around, self._parts)


def bind_backward(
    launch_list: LaunchList, rows: Tensor, inputs: Inputs, offsets: Offsets | None, bwd_args: tuple[Tensor, Tensor, Tensor]
) -> BackwardOfRows | None:
    """Bind a backward launch list, as `bind_forward`. `bwd_args`: out [T, Hq, Dv], lse, and the gradient of out; the bound launch takes out
    and its gradient as [T, Hq * Dv]."""
    kinds, around, parts = [_Kind.of(t.flatten(1)) for t in (rows, *bwd_args)], _surroundings(rows, offsets), _find_parts(rows, inputs)
    of_rows, of_out, of_lse, of_dout = kinds
    if of_rows is None or of_out is None or of_lse is None or of_dout is None:
        return None
    if around is None or parts is None or not _knows_steps(launch_list, rows):
        return None
    return _Backward(launch_list, (of_rows, of_out, of_lse, of_dout), around, parts)


def _knows_steps(launch_list: LaunchList, rows: Tensor) -> bool:
    sized = launch_list.sized
    if sized.makes_rows is None:
        sized.makes_rows = _find_steps(sized, rows) or False
    return sized.makes_rows is not False


def _find_steps(sized: Sized, rows: Tensor) -> tuple[int, ...] | None:
    """Byte offsets of dq, dk and dv in rows like these; None unless they are side by side and fill the rows."""
    parts, width = sized.joint, rows.shape[1]
    if parts is None or len(parts.parts) != 3 or parts.dtype != rows.dtype or sized.news:
        return None
    steps, at = [], 0
    for size, stride, offset in parts.parts:
        if stride != (width, size[2], 1) or offset != at:
            return None
        steps.append(at * parts.dtype.itemsize)
        at += size[1] * size[2]
    return tuple(steps) if at == width else None
