# mypy: ignore-errors
"""Kernels that zero counters, and rows of packed tensors that belong to no sequence (-inf in their lse and row max).

Both use programmatic dependent launch: they start while the previous kernel ends, and wait for it before they write.
"""

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foci.backends.gpu.math import INTERPRETED
from foci.backends.gpu.tiles import PackedRows, clear_gaps, decode, fill_gaps, widest_gap
from foci.compat.jit import triton_jit


@triton_jit
def wait_for_previous_kernel():
    """Wait until the previous kernel on the stream has ended and its writes are visible; let the next kernel start."""
    if not INTERPRETED:
        gdc_wait()
        gdc_launch_dependents()


@triton_jit
def zero_counters(counters, count):
    """Write `count` zeros."""
    wait_for_previous_kernel()
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(counters + at, tl.zeros([1024], tl.int32), mask=at < decode(count))


@triton_jit
def zero_fill_gaps(out, lse, row_max, strides, size, spans, c):
    """Fill rows outside all sequences; one program per head. Usually there are none, and the first loop shows it."""
    h = tl.program_id(0)
    rows, count = decode(size.rows), decode(spans.sequences)
    widest = 0
    for first in range(0, count + 1, 128):
        widest = tl.maximum(widest, widest_gap(spans.q_start, spans.q_length, count, first, rows, 128))
    # the sequences' spans are older than the kernel that this one follows, so reading them needs no wait
    wait_for_previous_kernel()
    if widest > 0:
        packed = PackedRows(spans.q_start, spans.q_length, spans.sequences, rows)
        clear_gaps(out, strides, packed, h * 0, h, c, 16, c.DV, c.DV_PAD)
        fill_gaps(lse + h.to(tl.int64) * rows, packed, float("-inf"), 128)
        if row_max is not None:
            fill_gaps(row_max + h.to(tl.int64) * rows, packed, float("-inf"), 128)
