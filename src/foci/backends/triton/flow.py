# mypy: ignore-errors
"""Gradients that flow into the weights themselves: of their column sums, and of the weights where they were returned.

With g the sum of both, the gradient of a score gains p (g - sum_j p g): g joins dp before delta is taken off.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from foci.backends.triton.tiles import number

__all__ = ["Flow", "with_flow"]


class Flow(NamedTuple):
    """`columns`: float32 [B, Hq, Skv], or [1, Hq, Tkv] jagged, with `kv_start` the first key of each sequence. `weights`: float32
    [B, Hq, Sq, Skv]. Each contiguous or None; `heads`, `rows` and `keys` are Hq, Sq and Skv or Tkv, encoded."""

    columns: Any
    weights: Any
    kv_start: Any
    heads: int
    rows: int
    keys: int


@triton.jit
def with_flow(dp, flow, b, h, memory_b, q_idx, kv_idx, q_len, kv_len):
    """dp of a tile, with what flows into its weights."""
    if flow is None:
        return dp
    else:
        line = (memory_b * number(flow.heads) + h).to(tl.int64)
        if flow.columns is not None:
            start = kv_len * 0
            if flow.kv_start is not None:
                start = tl.load(flow.kv_start + b)
            dp += tl.load(flow.columns + line * number(flow.keys) + start + kv_idx, mask=kv_idx < kv_len, other=0.0)
        if flow.weights is not None:
            at = (line * number(flow.rows) + q_idx) * number(flow.keys) + kv_idx
            dp += tl.load(flow.weights + at, mask=(q_idx < q_len) & (kv_idx < kv_len), other=0.0)
        return dp
