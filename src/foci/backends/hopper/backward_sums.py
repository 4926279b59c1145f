# mypy: ignore-errors
"""dq from the float32 sums that `backward_fused` leaves: scaled, rounded, and put in the order of rows."""

import triton
import triton.language as tl

from foci.backends.triton.tiles import number, sequence


@triton.jit
def finish_query_gradient(sums, turns, dq, size, spans, slots, scale, c):
    """One tile of queries of one head. A tile that no key visits has no sums, and zeros for a gradient.

    Args:
        sums: float32, a slot of [2, 64, 64] to a tile, in the order of `backward_fused.add_share`.
        turns: int32, how many tiles of keys have added to a slot, after one other number.
        dq: [B, Hq, Sq, D], contiguous.
    """
    heads = number(size.heads)
    task = tl.program_id(0) // heads
    h = tl.program_id(0) - task * heads
    memory_b = task // number(size.tasks)
    tile = task - memory_b * number(size.tasks)
    b = memory_b
    if c.JAGGED:
        b = tl.load(spans.tasks + 2 * task)
        tile = tl.load(spans.tasks + 2 * task + 1)
        memory_b = 0
        if b < 0:
            return
    q_start, q_len, kv_start, kv_len = sequence(spans, size, b, c)
    slot = (memory_b * heads + h) * number(slots) + tile
    if c.JAGGED:
        slot += q_start // 64 + b
    is_there = tl.load(turns + 1 + slot) > 0
    rows = tile * 64 + tl.arange(0, 64)
    head = (memory_b * heads + h).to(tl.int64) * number(size.rows) + q_start
    for half in tl.static_range(2):
        at = sums + (slot.to(tl.int64) * 2 + half) * 4096 + tl.arange(0, 4096)
        held = tl.load(at, mask=is_there, other=0.0)
        share = held.reshape(8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, 64) * scale
        cols = half * 64 + tl.arange(0, 64)
        inside = (rows < q_len)[:, None] & (cols < c.D)[None, :]
        tl.store(dq + (head + rows)[:, None] * c.D + cols[None, :], share.to(dq.dtype.element_ty), mask=inside)
