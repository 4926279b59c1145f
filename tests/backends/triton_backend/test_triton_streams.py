"""Tiles of packed sequences by descriptors: what lies beyond a sequence is nobody's, and reads as zeros."""

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl  # noqa: E402

from foci.backends.gpu.kernel_args import table_config  # noqa: E402
from foci.backends.gpu.tensor_descriptors import stream_operand  # noqa: E402
from foci.backends.gpu.tiles import HeadRows, load_streamed_tile  # noqa: E402

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu"
pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or the interpreter"),
    pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0), reason="needs sm_90"),
]


@triton.jit
def read_tile(source, out, h, start, first, length, c, EDGE: tl.constexpr):
    tile = load_streamed_tile(source, None, HeadRows(0, h, start, length), first, c, EDGE, 16, 32, 32)
    tl.store(out + tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :], tile)


@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_rows_beyond_a_sequence_read_as_zeros(heads, is_transposed, edge):
    lengths = [5, 0, 40, 16, 1]
    total = sum(lengths)
    shape = (1, total, heads, 32) if is_transposed else (1, heads, total, 32)
    packed = torch.randn(shape, device=DEVICE).half()
    packed = packed.transpose(1, 2) if is_transposed else packed
    config = table_config(16, 16, is_packed=True)._replace(DESCRIPTORS=tl.constexpr(True))
    out = torch.full((16, 32), torch.nan, device=DEVICE, dtype=torch.float16)
    for i, length in enumerate(lengths):
        start = sum(lengths[:i])
        for h in range(heads):
            for first in range(0, length, 16):
                read_tile[(1,)](stream_operand(config, 16, total, packed), out, h, start, first, length, config, edge)
                wanted = torch.zeros_like(out)
                sequence_rows = packed[0, h, start + first : start + min(first + 16, length)]
                wanted[: sequence_rows.shape[0]] = sequence_rows
                assert torch.equal(out, wanted), (i, h, first)
