# mypy: ignore-errors
"""Gradients that flow into the weights themselves: of their column sums, and of returned weights.

With g the sum of both, the gradient of a score gains p * (g - sum_j p g): g is added to dp before delta is subtracted.
"""

import triton.language as tl

from foci.backends.gpu.tiles import decode
from foci.compat.jit import triton_jit

__all__ = ["with_flow"]


@triton_jit
def with_flow(dp, numbers, b, h, memory_b, q_idx, kv_idx, q_len, kv_len):
    """Add to dp of a tile the gradients of its weights, see `kernel_args.Numbers`."""
    if (numbers.flow_columns is not None) or (numbers.flow_weights is not None):
        heads, rows, keys = numbers.flow_counts
        line = (memory_b * decode(heads) + h).to(tl.int64)
        if numbers.flow_columns is not None:
            start = kv_len * 0
            if numbers.flow_start is not None:
                start = tl.load(numbers.flow_start + b)
            dp += tl.load(numbers.flow_columns + line * decode(keys) + start + kv_idx, mask=kv_idx < kv_len, other=0.0)
        if numbers.flow_weights is not None:
            at = (line * decode(rows) + q_idx) * decode(keys) + kv_idx
            dp += tl.load(numbers.flow_weights + at, mask=(q_idx < q_len) & (kv_idx < kv_len), other=0.0)
    return dp
