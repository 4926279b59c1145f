"""Norms, derivatives and sums of columns of a transformer layer, host side: launches that take as little as one can.

In training a layer of packed tokens launched some forty kernels, and waited for the host. The kernels of `layernorm_kernels` do several
operations at once, and are launched by NVIDIA's driver: a kernel is compiled for a dtype and a width, and how many rows there are is a
number that it is given. Nothing is kept of a call, so that CUDA graphs may be made of it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.backends import row_kernels as contract
from foci.backends.gpu import layernorm_kernels as kernels
from foci.backends.gpu.compiling import Turn, Waiting, compile_in_parallel, launch_ahead, launch_waiting
from foci.backends.gpu.cuda_driver import Launch
from foci.backends.gpu.load_kernel import SCRATCH, bits, compile_and_load
from foci.backends.gpu.stream_state import allocator_on, has_launch_hooks
from foci.backends.row_kernels import Column, Name, Norm, RowKernels
from foci.compat.cuda import current_device, is_capturing, raw_stream
from foci.compat.triton import COMPILE_OPTIONS

__all__ = ["ROW_KERNELS", "Backward", "Rows", "Sums"]

_DTYPES: Final = frozenset((torch.float16, torch.bfloat16, torch.float32))
_WIDEST: Final = 8192
"""Widest row that a program holds."""
_INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
_SLOT: Final = 128
"""Number of columns of a sum is rounded up to a multiple of this."""
_FORWARD: Final = (1024, 1024)
"""Fewest elements of a program of a norm, and elements of each of its warps."""
_BACKWARD: Final = (4096, 1024)
"""The same for the gradient of a norm."""
_MOST_ROWS: Final = 32
"""Most rows that a program holds at once."""
_LINES: Final = (256, 64)
"""Most programs that store column sums of a norm, and most parts into which rows are split for other column sums."""
_PART: Final = (8, 256)
"""Rows and columns of a tile of other column sums."""


class _Kernel:
    """A Triton function with its constants, compiled when it is first launched on a device.

    Args:
        function: takes pointers and numbers, then constants.
        pointers: the dtype of each.
        numbers: an example of each.
        constants: by name, in the function's order.
        warps: of a program.
    """

    def __init__(
        self, function: Any, pointers: tuple[torch.dtype, ...], numbers: tuple[float, ...], constants: Mapping[str, Any], warps: int
    ) -> None:
        self._function, self._example = function, (*pointers, *numbers)
        self._options = {**constants, "num_warps": warps}
        self._known: dict[int, Launch] = {}
        self._turns = threading.Lock()

    def is_known(self, device: int) -> bool:
        """Whether the kernel was launched on a device before."""
        return device in self._known

    def begin(self) -> None:
        """Start compiling it in the background, within `compile_in_parallel`."""
        if not _INTERPRETED:
            launch_ahead(self._function, self._example, self._options, Turn.FORWARD)

    def launch(self, device: int, stream: int, programs: int, tensors: Sequence[Tensor], numbers: tuple[float, ...]) -> None:
        """Launch with contiguous tensors whose addresses are multiples of 16."""
        if not self.launch_known(device, stream, programs, *[t.data_ptr() for t in tensors], *numbers):
            self.launch_first(device, stream, programs, (*tensors, *numbers))

    def launch_known(self, device: int, stream: int, programs: int, *arguments: float) -> bool:
        """Launch with addresses and numbers; False, with nothing done, if the kernel was not launched on the device before."""
        known = self._known.get(device)
        if known is None:
            return False
        values = [bits("fp32", value) if isinstance(value, float) else value for value in arguments]
        with known.lock:
            known.move(programs, stream, values)
            known.run()
        return True

    def launch_first(self, device: int, stream: int, programs: int, arguments: tuple[Any, ...]) -> None:
        """Compile the kernel, and launch it; through Triton where that must launch it."""

        def run() -> None:
            loaded = None if _INTERPRETED else compile_and_load(self._function, (programs,), arguments, self._options)
            if loaded is None:
                self._function[(programs,)](*arguments, **COMPILE_OPTIONS, **self._options)
                return
            places = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
            self._known[device] = Launch(loaded.kernel, loaded.shape, (programs, 1, 1), stream, [*[0 for _ in places], *SCRATCH])
            self.launch_known(device, stream, programs, *places)

        with self._turns:
            launch_waiting([Waiting(self._function, arguments, self._options, run)])


def _block(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _tile(width: int, least: int, of_warp: int, most_warps: int) -> tuple[int, int, int]:
    """(padded columns, rows, warps) of a program that holds entire rows."""
    block = _block(width)
    rows = min(_MOST_ROWS, max(1, least // block))
    return block, rows, min(most_warps, max(1, rows * block // of_warp))


@functools.lru_cache(maxsize=64)
def _norm_sum(dtype: torch.dtype, width: int, *options: bool) -> tuple[_Kernel, int]:
    """(kernel, rows of a program). `options`: ADDS, KEEPS, LEARNS, SCALES, SHIFTS."""
    block, tile, warps = _tile(width, *_FORWARD, 8)
    config = kernels.NormConfig(*map(tl.constexpr, (width, block, tile, *options)))
    stats = torch.float32 if config.LEARNS.value else dtype
    return _Kernel(kernels.norm_sum, (*(dtype,) * 5, stats), (1, 0, 1e-5), {"c": config}, warps), tile


@functools.lru_cache(maxsize=64)
def _norm_gradient(dtype: torch.dtype, width: int, sums: int, adds: bool, scales: bool) -> tuple[_Kernel, int]:
    block, tile, warps = _tile(width, *_BACKWARD, 16)
    config = kernels.GradientConfig(*map(tl.constexpr, (width, block, tile, sums, adds, scales)))
    pointers = (*(dtype,) * 3, torch.float32, *(dtype,) * 2, torch.float32)
    return _Kernel(kernels.norm_gradient, pointers, (1, 0, 1, 0), {"c": config}, warps), tile


@functools.lru_cache(maxsize=64)
def _column_sums(dtype: torch.dtype, unit: int, kind: int) -> _Kernel:
    config = kernels.ColumnConfig(*map(tl.constexpr, (unit, *_PART, kind)))
    return _Kernel(kernels.column_sums, (dtype, dtype, torch.float32), (0, 1, 1, 1, 1, 0), {"c": config}, 4)


@functools.lru_cache(maxsize=8)
def _finish(dtype: torch.dtype) -> _Kernel:
    return _Kernel(kernels.finish_sums, (torch.float32, dtype), (1, 1, 0, 1, 1), {"CHUNK": 128, "BLOCK": 32}, 4)


class _ColumnSums(NamedTuple):
    """How the sums of the columns of one gradient are computed."""

    kernel: _Kernel
    kind: int  # as in `foci.backends.row_kernels.Column`
    units: int  # of columns that are loaded together
    blocks: int  # programs along the columns
    first: int  # first slot of the line of a part


class Backward:
    """Kernels of a layer's backward, and where they store partial column sums: a line of 128-column slots for each program of a norm, and
    for each part of the rows of the other sums."""

    def __init__(self, dtype: torch.dtype, width: int, norms: Sequence[Norm], columns: Sequence[Column]) -> None:
        self.dtype, self.width = dtype, width
        self.norms: dict[Name, tuple[_Kernel, int, int]] = {}
        self.columns: dict[Name, _ColumnSums] = {}
        self._begun: set[int] = set()
        sums: list[tuple[Name, int]] = []
        slots = 0
        for norm in norms:
            self.norms[norm.name] = (*_norm_gradient(dtype, width, len(norm.sums), norm.adds, norm.scales), slots)
            sums += [(name, width) for name in norm.sums]
            slots += len(norm.sums) * _slots(width)
        self.slots = [slots, 0]
        for name, of, kind in columns:
            unit = next(n for n in (8, 4, 2, 1) if of % n == 0)
            self.columns[name] = _ColumnSums(_column_sums(dtype, unit, kind), kind, of // unit, -(-of // _PART[1]), self.slots[1])
            sums.append((name, of))
            self.slots[1] += _slots(of)
        self.sizes: list[int] = []
        self.parts: list[tuple[Name, int]] = []
        for name, of in sums:
            self.parts.append((name, len(self.sizes)))
            self.sizes.append(of)
            if of % _SLOT:
                self.sizes.append(_SLOT - of % _SLOT)
        self.start = _LINES[0] * self.slots[0]
        self.size = _SLOT * (self.start + _LINES[1] * self.slots[1])
        self._kernels = [*(kernel for kernel, *_ in self.norms.values()), *(sums.kernel for sums in self.columns.values())]
        self._kernels += [_finish(dtype)] * bool(sums)
        self._forward = [_norm_sum(dtype, width, norm.of_sum, norm.of_sum, True, norm.scales, norm.shifts)[0] for norm in norms]

    def begin(self, rows: contract.Rows, /) -> None:
        """See `foci.backends.row_kernels.Backward`."""
        if rows.device in self._begun or rows.is_captured:
            return
        self._begun.add(rows.device)
        with compile_in_parallel():
            for kernel in (*self._forward, *self._kernels):
                kernel.begin()

    def of(self, dy: Tensor, /) -> Sums | None:
        """See `foci.backends.row_kernels.Backward`."""
        rows = Rows.of(dy)
        if rows is None or (rows.is_captured and not all(kernel.is_known(rows.device) for kernel in self._kernels)):
            return None
        return Sums(self, rows, dy)


def _slots(columns: int) -> int:
    return -(-columns // _SLOT)


@functools.lru_cache(maxsize=64)
def _begin_norms(device: int, dtype: torch.dtype, width: int, keeps: bool, scales: bool, shifts: bool) -> None:
    """Once on a device."""
    with compile_in_parallel():
        _norm_sum(dtype, width, True, keeps, False, scales, shifts)[0].begin()


class Rows(NamedTuple):
    """Device and stream on which kernels are launched."""

    kernels: RowKernels
    device: int
    stream: int
    is_captured: bool

    @staticmethod
    def of(x: Tensor) -> Rows | None:
        """Where to launch kernels for x [T, E]; None if they cannot be launched for it."""
        if x.dtype not in _DTYPES or x.shape[1] > _WIDEST or has_launch_hooks():
            return None
        if _INTERPRETED or not x.is_cuda:
            return Rows(ROW_KERNELS, -1, 0, False) if _INTERPRETED and x.is_cpu else None
        device = x.get_device()
        if device != current_device():
            return None
        return Rows(ROW_KERNELS, device, raw_stream(device), is_capturing())

    def begin_norms(self, dtype: torch.dtype, width: int, keeps: bool, scales: bool, shifts: bool, /) -> None:
        """See `foci.backends.row_kernels.Rows`."""
        if not self.is_captured:
            _begin_norms(self.device, dtype, width, keeps, scales, shifts)

    def norm(
        self, x: Tensor, added: Tensor | None, scale: Tensor | None, shift: Tensor | None, eps: float, stats: Tensor | None = None,
        which: int = 0, /, *, keeps: bool,
    ) -> Tensor | None:  # fmt: skip
        """See `foci.backends.row_kernels.Rows`."""
        (rows, width), adds = x.shape, added is not None
        kernel, tile = _norm_sum(x.dtype, width, adds, keeps and adds, stats is not None, scale is not None, shift is not None)
        at = x.data_ptr()
        of_added = at if added is None else added.data_ptr()
        of_scale = at if scale is None else scale.data_ptr()
        of_shift = at if shift is None else shift.data_ptr()
        lies = (
            not (at | of_added | of_scale | of_shift) & 15
            and x.is_contiguous()
            and (added is None or added.is_contiguous())
            and (scale is None or scale.is_contiguous())
            and (shift is None or shift.is_contiguous())
        )
        if not lies or (self.is_captured and not kernel.is_known(self.device)):
            return None
        out = x if adds and not keeps else allocator_on(x.device)((rows, width), (width, 1), x.dtype)
        programs, of_stats = -(-rows // tile), at if stats is None else stats.data_ptr()
        places = (at, of_added, of_scale, of_shift, out.data_ptr(), of_stats)
        if not kernel.launch_known(self.device, self.stream, programs, *places, rows, which, float(eps)):
            inputs = x, x if added is None else added, x if scale is None else scale, x if shift is None else shift
            outputs = out, out if stats is None else stats
            kernel.launch_first(self.device, self.stream, programs, (*inputs, *outputs, rows, which, float(eps)))
        return out


class Sums:
    """See `foci.backends.row_kernels.Sums`."""

    __slots__ = ("_backward", "_empty", "_grad_out", "_partial", "_place", "_programs", "_rows")

    def __init__(self, backward: Backward, place: Rows, grad_out: Tensor) -> None:
        self._backward, self._place, self._grad_out = backward, place, grad_out
        self._rows = grad_out.shape[0]
        self._programs = [0, min(_LINES[1], -(-self._rows // _PART[0]))]
        self._empty = allocator_on(grad_out.device)
        self._partial = self._empty((max(1, backward.size),), (1,), torch.float32)

    def is_left(self, name: Name, /) -> bool:
        """Whether `columns` computes the sums of this name."""
        return name in self._backward.columns

    def norm(self, name: Name, dy: Tensor, x: Tensor, scale: Tensor | None, stats: Tensor, which: int, added: Tensor | None, /) -> Tensor:
        """See `foci.backends.row_kernels.Sums`."""
        kernel, tile, first = self._backward.norms[name]
        dx = self._empty((self._rows, x.shape[1]), (x.shape[1], 1), x.dtype) if dy is self._grad_out else dy
        dy, added = _even(dy), None if added is None else _even(added)
        programs = self._programs[0] = min(_LINES[0], -(-self._rows // tile))
        tensors = (dy, x, x if scale is None else scale, stats, dy if added is None else added, dx, self._partial)
        kernel.launch(self._place.device, self._place.stream, programs, tensors, (self._rows, which, self._backward.slots[0], first))
        return dx

    def columns(self, name: Name, dy: Tensor, before: Tensor | None = None, /) -> None:
        """See `foci.backends.row_kernels.Sums`."""
        sums = self._backward.columns[name]
        assert (before is not None) == bool(sums.kind)
        dy = dy if sums.kind else _even(dy)
        backward, parts = self._backward, self._programs[1]
        numbers = (backward.start, self._rows, sums.units, sums.blocks, backward.slots[1], sums.first)
        tensors = (dy, dy if before is None else before, self._partial)
        sums.kernel.launch(self._place.device, self._place.stream, sums.blocks * parts, tensors, numbers)

    def finish(self) -> list[tuple[Name, Tensor]]:
        """All sums by name, in the dtype of the layer."""
        backward = self._backward
        if not backward.sizes:
            return []
        (norm_slots, column_slots), (programs, parts) = backward.slots, self._programs
        out = self._empty(((norm_slots + column_slots) * _SLOT,), (1,), self._grad_out.dtype)
        blocks = (norm_slots + column_slots) * (_SLOT // 32)
        numbers = (norm_slots, programs, backward.start, column_slots, parts)
        _finish(backward.dtype).launch(self._place.device, self._place.stream, blocks, (self._partial, out), numbers)
        sums = out.unsafe_split_with_sizes(backward.sizes)
        return [(name, sums[at]) for name, at in backward.parts]


class _RowKernels:
    """See `foci.backends.row_kernels.RowKernels`."""

    place = staticmethod(Rows.of)
    backward = staticmethod(Backward)


ROW_KERNELS: Final = _RowKernels()


def _even(t: Tensor) -> Tensor:
    """As kernels read tensors: a copy of those that lie otherwise."""
    return t if t.is_contiguous() and not t.data_ptr() & 15 else t.clone(memory_format=torch.contiguous_format)
