"""Products with a matrix of misaligned rows, read where it lies."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from foci.graph.padding.grouped import groups_of, mm_by_rows

DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(70, 600), st.integers(1, 9), st.integers(0, 9), DTYPES)
def test_equals_the_product(blocks, k, n, gap, dtype):
    torch.manual_seed(0)
    a, b = torch.randn(8 * blocks, k + gap).to(dtype)[:, :k], torch.randn(k, n).to(dtype)
    groups = groups_of(8 * blocks, k, dtype.itemsize, a.stride(0))
    if groups is None:
        assert k < 16 * 8 + 7 * 8
        return
    expected = a.double() @ b.double()
    scale = float(a.double().abs().matmul(b.double().abs()).max())
    assert (mm_by_rows(a, b).double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps * scale


@given(st.integers(1, 64), st.integers(1, 5000), st.sampled_from([2, 4, 8]))
def test_groups_are_aligned_and_within_the_matrix(blocks, k, itemsize):
    groups = groups_of(8 * blocks, k, itemsize)
    if groups is None:
        return
    for row in range(8):
        first = row * k + row % groups.count * groups.skip
        assert first * itemsize % 16 == 0
        assert row % groups.count * groups.skip + groups.width <= k
    assert groups.width * itemsize % 16 == 0


@pytest.mark.parametrize("column", [0, 5, 500, 1021])
def test_what_is_not_finite_stays_in_its_row(column):
    a, b = torch.randn(64, 1022), torch.randn(1022, 8)
    a[9, column], a[33, column] = float("inf"), float("nan")
    finite = mm_by_rows(a, b).isfinite().all(1)
    assert [row for row in range(64) if not finite[row]] == [9, 33]


def test_rows_that_make_no_groups():
    with pytest.raises(ValueError, match="groups of equal misalignment"):
        mm_by_rows(torch.randn(7, 1023), torch.randn(1023, 8))
