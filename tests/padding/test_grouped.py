"""Products with a matrix of misaligned rows, read where it lies."""

import weakref

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from foci.padding import Machine, find_table, pad
from foci.padding.grouped import bytes_read_by_rows, bytes_written_by_rows, mm_by_rows, mm_into_rows, split_rows
from foci.padding.padding_autograd import grow_dims

DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


# PAD-04
@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(70, 600), st.integers(1, 9), st.integers(0, 9), DTYPES)
def test_equals_the_product(blocks, k, n, gap, dtype):
    torch.manual_seed(0)
    a, b = torch.randn(8 * blocks, k + gap).to(dtype)[:, :k], torch.randn(k, n).to(dtype)
    groups = split_rows(8 * blocks, k, dtype.itemsize, a.stride(0))
    if groups is None:
        assert k < 16 * 8 + 7 * 8
        return
    expected = a.double() @ b.double()
    scale = float(a.double().abs().matmul(b.double().abs()).max())
    assert (mm_by_rows(a, b).double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps * scale


@given(st.integers(1, 64), st.integers(1, 5000), st.sampled_from([2, 4, 8]))
def test_groups_are_aligned_and_within_the_matrix(blocks, k, itemsize):
    groups = split_rows(8 * blocks, k, itemsize)
    if groups is None:
        return
    for row in range(8):
        first = row * k + row % groups.count * groups.skip
        assert first * itemsize % 16 == 0
        assert row % groups.count * groups.skip + groups.width <= k
    assert groups.width * itemsize % 16 == 0


# PAD-04
@pytest.mark.parametrize("column", [0, 5, 500, 1021])
def test_what_is_not_finite_stays_in_its_row(column):
    a, b = torch.randn(64, 1022), torch.randn(1022, 8)
    a[9, column], a[33, column] = float("inf"), float("nan")
    finite = mm_by_rows(a, b).isfinite().all(1)
    assert [row for row in range(64) if not finite[row]] == [9, 33]


class Memory(TorchDispatchMode):
    """Counts the bytes of tensors that live."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        storage = out.untyped_storage()
        if all(storage._cdata != x.untyped_storage()._cdata for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)):
            self._add(storage.nbytes())
            weakref.finalize(storage, self._add, -storage.nbytes())
        return out

    def _add(self, count):
        self.live += count
        self.peak = max(self.peak, self.live)


@pytest.mark.parametrize("biased", [None, False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_is_what_is_said(biased, dtype):
    m, k, n = (64, 1023, 40) if biased is None else (64, 40, 1023)
    a, b, bias = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype).t(), torch.randn(n).to(dtype) if biased else None
    with Memory() as memory:
        out = mm_by_rows(a, b.contiguous()) if biased is None else mm_into_rows(a, b, bias)
    said = bytes_read_by_rows(m, k, n, dtype.itemsize) if biased is None else bytes_written_by_rows(m, k, n, dtype.itemsize, biased=biased)
    copied = b.nbytes if biased is None else 0
    assert memory.peak - copied - out.nbytes == said


@pytest.mark.parametrize("biased", [None, False, True])
def test_onednn_stays_as_it_is(biased):
    a, b, bias = torch.randn(64, 1023).bfloat16(), torch.randn(1023, 1023).bfloat16(), torch.randn(1023).bfloat16() if biased else None
    before = torch.backends.mkldnn.enabled
    assert before
    try:
        mm_by_rows(a, b[:, :40].contiguous()) if biased is None else mm_into_rows(a, b, bias)
        assert torch.backends.mkldnn.enabled
    finally:
        torch.backends.mkldnn.enabled = before


def test_rows_that_make_no_groups():
    with pytest.raises(ValueError, match="groups of equal misalignment"):
        mm_by_rows(torch.randn(7, 1023), torch.randn(1023, 8))
    with pytest.raises(ValueError, match="groups of equal misalignment"):
        mm_into_rows(torch.randn(7, 8), torch.randn(8, 1023))


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(70, 600), st.booleans(), DTYPES)
def test_a_result_of_misaligned_rows_equals_the_product(blocks, k, n, biased, dtype):
    torch.manual_seed(0)
    a, b, bias = torch.randn(8 * blocks, k).to(dtype), torch.randn(n, k).to(dtype).t(), torch.randn(n).to(dtype) if biased else None
    if split_rows(8 * blocks, n, dtype.itemsize) is None:
        assert n < 16 * 8 + 7 * 8
        return
    out = mm_into_rows(a, b, bias)
    assert out.is_contiguous()
    expected = a.double() @ b.double() + (0 if bias is None else bias.double())
    scale = float(a.double().abs().matmul(b.double().abs()).max()) + (0 if bias is None else float(bias.abs().max()))
    assert (out.double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps * scale


def test_infinities_of_factors_and_bias_stay_in_their_rows_and_columns():
    a, b, bias = torch.randn(64, 8), torch.randn(1022, 8).t(), torch.randn(1022)
    a[9, 3], bias[1021], bias[2] = float("inf"), float("nan"), float("-inf")
    finite = mm_into_rows(a, b, bias).isfinite()
    assert [row for row in range(64) if not finite[row].any()] == [9]
    assert [column for column in range(1022) if not finite[0, column]] == [2, 1021]


def logits(x, w, bias):
    return torch.nn.functional.linear(x, w, bias)


def largest(x, w, bias):
    return torch.nn.functional.linear(x, w, bias).amax(-1)


@pytest.mark.parametrize(("rows", "function", "by_rows"), [(8192, logits, True), (4, logits, False), (8192, largest, False)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_result_that_leaves_the_graph_is_written_where_it_lies(rows, function, by_rows, biased):
    with FakeTensorMode():
        x, w, bias = (torch.empty(sizes, dtype=torch.bfloat16, device="cuda") for sizes in ((rows, 768), (30523, 768), (30523,)))
        graph = make_fx(function)(x, w, bias if biased else None)
        on = Machine("NVIDIA H200", 16, True, find_table("NVIDIA H200", "sm_90"))
        grown = grow_dims(graph.graph, on)
        done = pad(graph, (), on)
    targets = [node.target for node in graph.graph.nodes]
    assert (torch.ops.foci.mm_into_rows.default in targets) is by_rows
    assert ("by rows" in {padding.how for padding in done.paddings}) is by_rows
    assert not by_rows or done.paddings[0].bytes == bytes_written_by_rows(rows, 768, 30523, 2, biased=biased)
    assert ("copied" in {padding.how for padding in grown}) is not by_rows
    assert (grown == ()) is by_rows
    (out,) = (node.args[0].meta["val"] for node in graph.graph.nodes if node.op == "output")
    assert out.is_contiguous()
