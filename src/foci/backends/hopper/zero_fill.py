# mypy: ignore-errors
"""What goes with other kernels: numbers that become zeros; of packed tensors, zeros in rows that belong to no sequence, and -inf for their
statistics. Both may begin while the kernel before them ends, and wait for it."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foci.backends.triton.math import INTERPRETED
from foci.backends.triton.tiles import clear_gaps, decode, fill_gaps, widest_gap


@triton.jit
def wait_for_previous_kernel():
    """Waits until the kernel before on the stream has ended and what it wrote can be read, and lets the next begin up to where it waits."""
    if not INTERPRETED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def zero_counters(turns, count):
    """Zeros."""
    wait_for_previous_kernel()
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(turns + at, tl.zeros([1024], tl.int32), mask=at < decode(count))


@triton.jit
def zero_fill_gaps(out, lse, row_max, strides, size, spans, c):
    """One program for each head, which most often finds at one look nothing to do."""
    h = tl.program_id(0)
    rows, count = decode(size.rows), decode(spans.sequences)
    widest = 0
    for first in range(0, count + 1, 128):
        widest = tl.maximum(widest, widest_gap(spans.q_start, spans.q_length, count, first, rows, 128))
    # where sequences lie is known since before the kernel that this one follows
    wait_for_previous_kernel()
    if widest > 0:
        clear_gaps(out, strides, spans.q_start, spans.q_length, spans, h * 0, h, rows, c, 16, c.DV, c.DV_PAD)
        fill_gaps(lse + h.to(tl.int64) * rows, spans.q_start, spans.q_length, spans, rows, float("-inf"), 128)
        if row_max is not None:
            fill_gaps(row_max + h.to(tl.int64) * rows, spans.q_start, spans.q_length, spans, rows, float("-inf"), 128)
