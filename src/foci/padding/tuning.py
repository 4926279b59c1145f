"""Products measured with aligned and misaligned strides: the rows of a device's table."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from foci.padding.gemm_times import ROLES, Kind, Row, Shape, Table
from foci.padding.strides import round_up

__all__ = ["SHAPES", "SMALL_SHAPES", "count_rows", "device_name", "family", "tune"]

# Large vocabularies, squares, tall and flat ones, and the batched products of attention.
SHAPES: Final = (
    Shape(1, 8192, 30528, 768),
    Shape(1, 8192, 768, 30528),
    Shape(1, 30528, 768, 8192),
    Shape(1, 4096, 4096, 4096),
    Shape(1, 8192, 1024, 1024),
    Shape(1, 2048, 2048, 2048),
    Shape(1, 1024, 1024, 1024),
    Shape(1, 512, 512, 512),
    Shape(1, 256, 8192, 4096),
    Shape(1, 256, 512, 65536),
    Shape(96, 1024, 1024, 64),
    Shape(96, 1024, 64, 1024),
    Shape(96, 256, 256, 64),
)

SMALL_SHAPES: Final = (
    Shape(1, 1024, 4096, 768),
    Shape(1, 1024, 1024, 1024),
    Shape(1, 512, 512, 512),
    Shape(1, 256, 2048, 1024),
    Shape(24, 256, 256, 64),
    Shape(24, 256, 64, 256),
)
"""For CPUs."""

# By kind, the alignments in bytes that are measured: of 16-byte loads, what is missing.
_ALIGNMENTS: Final = {"float16": (2, 4, 8), "bfloat16": (2, 4, 8), "float32": (4, 8), "tf32": (4, 8), "float64": (8,)}


def count_rows(kinds: tuple[Kind, ...], shapes: tuple[Shape, ...]) -> int:
    """How many rows `tune` measures."""
    return len(shapes) * len(ROLES) * sum(len(_ALIGNMENTS[kind]) for kind in kinds)


def tune(
    device: torch.device,
    kinds: tuple[Kind, ...],
    *,
    shapes: tuple[Shape, ...] = SHAPES,
    repeats: int = 5,
    step: Callable[[], object] = lambda: None,
) -> Table:
    """Measures what misaligned strides cost on a device.

    Args:
        device: to measure on.
        kinds: of arithmetic.
        shapes: of products, whose odd dims are taken a few elements smaller.
        repeats: of each measurement; the median counts.
        step: called after each row.

    Returns:
        A table with a row for each kind, shape, role and alignment, and the device's speed of copying and multiplying.
    """
    rows: list[Row] = []
    for kind in kinds:
        for shape in shapes:
            for row in _rows(device, kind, shape, repeats):
                rows.append(row)
                step()
    peaks = {kind: max(row.shape.flops / row.aligned for row in rows if row.kind == kind) for kind in kinds}
    return Table(
        device_name(device), family(device), torch.__version__, peaks, _bandwidth(device, repeats), _launch(device, repeats), tuple(rows)
    )


def device_name(device: torch.device) -> str:
    """Return what a table is found by: a GPU's name, or the instruction set of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


def family(device: torch.device) -> str:
    """Devices of one family stand in for each other."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    return device_name(device)


def _rows(device: torch.device, kind: Kind, shape: Shape, repeats: int) -> Iterator[Row]:
    dtype = _kind_dtype(kind)
    with _arithmetic(kind):
        good = _product(device, dtype, shape)
        for role in ROLES:
            for alignment in _ALIGNMENTS[kind]:
                odd = shape.shrunk(role, alignment // dtype.itemsize)
                calls = [good, *(_product(device, dtype, odd, role, tight=tight) for tight in (False, True))]
                yield Row(kind, role, alignment, shape, *_seconds(calls, device, repeats))


def _kind_dtype(kind: Kind) -> torch.dtype:
    """Return the dtype of the matrices in products of this kind."""
    dtype: torch.dtype = torch.float32 if kind == "tf32" else getattr(torch, kind)
    return dtype


@contextlib.contextmanager
def _arithmetic(kind: Kind) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _product(device: torch.device, dtype: torch.dtype, shape: Shape, role: str = "", *, tight: bool = False) -> Callable[[], object]:
    """A call in which all rows start at aligned addresses, but for those of the matrix `role` where it is tight."""

    def matrix(name: str, rows: int, columns: int) -> Tensor:
        stride = columns if tight and name == role else round_up(columns, 64 // dtype.itemsize)
        storage = torch.empty(shape.batch * rows * stride, device=device, dtype=dtype).normal_()
        return storage.as_strided((shape.batch, rows, columns), (rows * stride, stride, 1))

    b, m, n, k = shape.batch, shape.m, shape.n, shape.k
    left = matrix("at", k, m).mT if role == "at" else matrix("a", m, k)
    right = matrix("bt", n, k).mT if role == "bt" else matrix("b", k, n)
    out = matrix("out", m, n)
    if b == 1:
        left, right, out = left[0], right[0], out[0]
        return lambda: torch.mm(left, right, out=out)
    return lambda: torch.bmm(left, right, out=out)


def _bandwidth(device: torch.device, repeats: int) -> float:
    size = 2**29 if device.type == "cuda" else 2**27
    source, target = (torch.empty(size, device=device, dtype=torch.uint8).fill_(1) for _ in range(2))
    return 2 * size / _seconds([lambda: target.copy_(source)], device, repeats)[0]


def _launch(device: torch.device, repeats: int) -> float:
    small = torch.zeros(16, device=device)
    return _seconds([lambda: small.add_(1)], device, repeats)[0]


def _seconds(calls: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> list[float]:
    """Time each call, in turn, so that a slow moment falls on all alike: the median on a GPU, the least on a CPU that others share."""
    timers = [_on_cuda(call) if device.type == "cuda" else _on_cpu(call) for call in calls]
    times = [[timer() for timer in timers] for _ in range(repeats)]
    typical = statistics.median if device.type == "cuda" else min
    return [typical(column) for column in zip(*times)]


def _on_cpu(call: Callable[[], object]) -> Callable[[], float]:
    # a single thread's own time, where others want the core too
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def timer() -> float:
        start = clock()
        call()
        return clock() - start

    timer()
    return timer


def _on_cuda(call: Callable[[], object], calls: int = 4) -> Callable[[], float]:
    """From a captured graph: no time of the host in it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()

    def timer() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / calls

    timer()
    return timer
