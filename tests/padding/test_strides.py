"""The rule of padded strides."""

# PAD-01

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from foci.padding import pad_strides
from foci.padding.strides import is_channels_last, padding_bytes


@pytest.mark.parametrize(
    ("strides", "sizes", "dtype", "expected"),
    [
        ([2047 * 16, 2047, 1], [2, 16, 2047], torch.float32, (2048 * 16, 2048, 1)),
        ([127 * 32, 127, 1], [2, 32, 127], torch.float32, (127 * 32, 127, 1)),  # small
        ([30523, 1], [8192, 30523], torch.bfloat16, (30528, 1)),
        ([30522, 1], [8192, 30522], torch.float16, (30528, 1)),
        ([1, 2047], [2047, 16], torch.float32, (1, 2048)),  # transposed
        ([2048, 1], [3, 2048], torch.float32, (2048, 1)),  # aligned
        ([1, 1], [2047, 1], torch.float32, (1, 1)),
        ([2047 * 33, 33, 1], [2, 2047, 33], torch.float32, (67552, 33, 1)),  # only the outer stride is large
        ([128 * 640 * 959, 1, 959 * 128, 128], [1, 128, 640, 959], torch.float32, (128 * 640 * 959, 1, 959 * 128, 128)),
        ([128 * 640 * 959, 640 * 959, 959, 1], [1, 128, 640, 959], torch.float32, (128 * 640 * 959, 640 * 959, 959, 1)),
        ([0, 1], [8, 2047], torch.float32, (0, 1)),  # expanded
        ([], [], torch.float32, ()),
    ],
)
def test_cases(strides, sizes, dtype, expected):
    assert pad_strides(strides, sizes, dtype) == expected


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="equally many, not 1 and 2"):
        pad_strides([1], [2, 3], torch.float32)
    with pytest.raises(ValueError, match="alignment"):
        pad_strides([3, 1], [2, 3], torch.float32, alignment=6)


@pytest.mark.parametrize(
    ("strides", "sizes", "keywords", "error", "message"),
    [
        ([-2047, 1], [16, 2047], {}, ValueError, r"strides must be 0 or more, .* not \(-2047, 1\)"),
        ([2047, 1], [16, -1], {}, ValueError, r"sizes must be 0 or more, .* not \(16, -1\)"),
        ([2047.0, 1], [16, 2047], {}, TypeError, r"strides must be integers, .* not \[2047.0, 1\]"),
        (2047, [16, 2047], {}, TypeError, "strides must be integers"),
        ([2047, 1], [16, "2047"], {}, TypeError, "sizes must be integers"),
        ([2047, 1], [16, True], {}, TypeError, "sizes must be integers"),
        ([2047, 1], None, {}, TypeError, "sizes must be integers"),
        ([2047, 1], [16, 2047], {"dtype": "float32"}, TypeError, "dtype must be a torch.dtype"),
        ([2047, 1], [16, 2047], {"alignment": 128.0}, TypeError, "alignment must be an integer"),
        ([2047, 1], [16, 2047], {"smallest": "1024"}, TypeError, "smallest must be an integer"),
        ([2047, 1], [16, 2047], {"smallest": -1}, ValueError, "smallest must be 0 or more"),
    ],
)
def test_bad_strides_and_sizes_are_named(strides, sizes, keywords, error, message):
    with pytest.raises(error, match=message):
        pad_strides(strides, sizes, **{"dtype": torch.float32, **keywords})


@st.composite
def layouts(draw):
    """Dense tensors of any order of dims."""
    sizes = draw(st.lists(st.integers(1, 3000), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(sizes))))
    strides, extent = [0] * len(sizes), 1
    for dim in order:
        strides[dim], extent = extent, extent * sizes[dim]
    return strides, sizes, draw(st.sampled_from([torch.float16, torch.float32, torch.float64]))


@given(layouts(), st.sampled_from([(128, 1024), (16, 1)]))
def test_strides_grow_by_little_and_rows_stay_apart(layout, rule):
    strides, sizes, dtype = layout
    alignment, smallest = rule
    padded = pad_strides(strides, sizes, dtype, alignment=alignment, smallest=smallest)
    assert padded == pad_strides(padded, sizes, dtype, alignment=alignment, smallest=smallest)
    if padded == tuple(strides):
        return
    assert not is_channels_last(strides, sizes)
    dims = sorted((dim for dim in range(len(sizes)) if sizes[dim] > 1), key=lambda dim: strides[dim])
    extent = 1
    for dim in dims:
        assert padded[dim] >= max(extent, strides[dim])
        if strides[dim] >= smallest and dim != dims[0]:
            assert padded[dim] * dtype.itemsize % alignment == 0
        extent = padded[dim] * sizes[dim]
    most = (1 + alignment / dtype.itemsize / smallest) ** len(sizes)
    assert padding_bytes(padded, sizes, dtype) <= (most - 1) * math.prod(sizes) * dtype.itemsize


@pytest.mark.parametrize("sizes", [(2, 64, 7, 5), (1, 3, 640, 959), (2, 8, 3, 5, 7)])
def test_channels_last_is_seen(sizes):
    layout = torch.channels_last if len(sizes) == 4 else torch.channels_last_3d
    x = torch.empty(sizes, device="meta").contiguous(memory_format=layout)
    assert is_channels_last(x.stride(), sizes)
    assert not is_channels_last(torch.empty(sizes, device="meta").stride(), sizes)
    assert pad_strides(x.stride(), sizes, torch.float32) == x.stride()


def test_symbolic_sizes_grow_into_symbolic_strides():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(2047, 2047), static_shapes=False)
    rows, one = pad_strides(x.stride(), x.shape, x.dtype)
    assert one == 1
    assert isinstance(rows, torch.SymInt)
    assert str(rows) != "2048"
