"""Which kernels calls of a GPU launch, and how many programs of them, by stand-ins on the CPU."""

from dataclasses import replace

import pytest
import torch
from kernel_stand_ins import VARIANTS, build_attention, operands_of

from foci import masks
from foci.backends.contract import Plan
from foci.backends.gpu.functions import capture_layouts, environment_numbers
from foci.backends.gpu.kernel_args import encode, encode_strides
from foci.backends.gpu.tensor_descriptors import describe_layout
from foci.backends.triton import paged
from foci.problem import Cotangents, Formula, Layout, Operands, Outputs, Problem, Target
from foci.trace_functions import bind

PLAIN = bind(None, None, torch.device("cpu"))
H200 = Target("cuda", 90, frozenset({"triton"}))


def tensors(batch, q_heads, kv_heads, q_len, kv_len, dim=64):
    return [
        torch.zeros(batch, heads, n, dim, dtype=torch.bfloat16) for heads, n in ((q_heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    ]


def names(log):
    return [name for name, *_ in log]


def programs(log, name):
    """Of the one launch of a kernel."""
    ((x, y, z),) = [grid for kernel, grid, _ in log if kernel == name]
    return x * y * z


# FLEX-14
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("q_len", [1, 2, 7, 16])
def test_few_queries_of_many_keys_split_the_keys(logs, q_len, group):
    bound = bind(None, masks.causal_lower_right(), torch.device("cpu"))
    operands = Operands(*tensors(2, 2 * group, 2, q_len, 4096), bound.captures, bound.ints, bound.floats, 0.125)
    build_attention(operands, bound.variant).forward(operands)
    kernels = [name for name in names(logs[0]) if name.startswith(("attention", "combine"))]
    assert kernels == ["attention_decode", "combine_splits"]
    assert programs(logs[0], "attention_decode") >= 4 * 2 * 2  # for two sequences of two heads of keys


# FLEX-14
@pytest.mark.parametrize("q_len", [1, 2, 7, 16, 64, 256])
def test_few_queries_read_pages_where_they_lie_and_split_them(logs, q_len, monkeypatch):
    bound = bind(None, masks.causal_lower_right(), torch.device("cpu"))
    query, key, value = tensors(3, 4, 2, q_len, 64)
    pools = [torch.zeros(200, *pool.shape[1:], dtype=pool.dtype) for pool in (key, value)]
    lengths, table = torch.full((3,), 4000), torch.zeros(3, 64, dtype=torch.int64)
    operands = Operands(query, *pools, bound.captures, bound.ints, bound.floats, 0.125, kv_lengths=lengths, page_table=table, max_kv=4096)
    asked = Problem(
        Formula(bound.variant, Layout.PAGED), query.dtype, 64, 64, 4, 2, 3, q_len, 4096, False, False, False, (False,) * len(bound.captures)
    )
    kernel = paged.PagedKernel(Plan("triton", asked, H200))
    monkeypatch.setattr(kernel, "gathered", None)
    kernel.forward(operands)
    decode = next(entry for entry in logs[0] if entry[0] == "attention_decode")
    assert "combine_splits" in names(logs[0])
    assert programs(logs[0], "attention_decode") >= 4 * 3 * 2
    for tensor in (*pools, lengths, table):
        assert str(tensor.data_ptr()) in str(decode[2])


# SDPA-13
@pytest.mark.parametrize("name", ["plain", "causal", "dropout"])
def test_more_heads_than_the_lesser_dims_of_a_grid_hold(logs, name):
    score, mask, options = VARIANTS[name]
    bound = bind(score, mask, torch.device("cpu"))
    like = operands_of(bound, **options)
    for q_len, kv_len in ((16, 16), (1, 1024)):
        operand_tensors = [t[:1, :1].expand(70000, 1, -1, -1) for t in tensors(1, 1, 1, q_len, kv_len, 16)]
        operands = replace(like, query=operand_tensors[0], key=operand_tensors[1], value=operand_tensors[2])
        attention = build_attention(operands, bound.variant, outputs=Outputs(lse=True), dropout=name == "dropout")
        results = attention.forward(operands)
        if kv_len == 16:
            attention.backward(operands, results, Cotangents(torch.empty_like(results.out)))
    assert {"attention_forward", "attention_decode", "attention_query_gradient", "attention_key_gradient"} <= set(names(logs[0]))
    for kernel, (x, y, z), _ in logs[0]:
        assert x < 2**31, kernel
        assert max(y, z) <= 65535, kernel
    assert max(grid[0] for _, grid, _ in logs[0]) >= 70000


EMPTY = {
    "batch": (0, 2, 2, 3, 4),
    "heads": (2, 0, 0, 3, 4),
    "queries": (2, 2, 1, 0, 4),
    "keys": (2, 2, 1, 3, 0),
    "keys of one query": (2, 4, 1, 1, 0),
    "all": (0, 0, 0, 0, 0),
}


# SDPA-13
@pytest.mark.parametrize("name", EMPTY)
def test_nothing_to_attend_to_launches_nothing(logs, name):
    inputs = tensors(*EMPTY[name])
    operands = Operands(*inputs, PLAIN.captures, PLAIN.ints, PLAIN.floats, 0.125)
    attention = build_attention(replace(operands, query=tensors(1, 1, 1, 1, 1)[0]), PLAIN.variant, outputs=Outputs(lse=True, row_max=True))
    results = attention.forward(operands)
    assert results.out.shape == inputs[0].shape
    assert not results.out.any()
    assert bool((results.lse == -torch.inf).all() and (results.row_max == -torch.inf).all())
    gradients = attention.backward(operands, results, Cotangents(torch.ones_like(results.out)))
    for tensor, gradient in zip(inputs, (gradients.query, gradients.key, gradients.value), strict=True):
        assert gradient.shape == tensor.shape
        assert not gradient.any()
    assert logs == ([], [])


def counted(name, value, like):
    """What a kernel makes of an encoded stride, in the bits that Triton gives it."""
    bits = 32 if value < 2**31 else 64
    product = (value >> 2) * (8 if like else 1)
    assert product < 1 << (bits - 1), (name, product)
    return product


# SDPA-13
@pytest.mark.parametrize("stride", [2**31 - 8, 2**31, 3 * 2**30, 2**32 - 8, 2**32, 2**34])
def test_strides_of_more_than_two_to_the_31_elements_are_told_in_bits_enough(stride):
    tensor = torch.empty_strided((2, 2, 16, 64), (stride, 64, 128, 1), dtype=torch.bfloat16, device="meta")
    layout = describe_layout(tensor)
    told = encode_strides(layout.strides, 8 if layout.is_aligned else 1)
    assert counted("operand", told.b, layout.is_aligned) == stride
    lies = capture_layouts([tensor])
    assert counted("captured", encode(environment_numbers([tensor], lies)[1][0]), lies[0].aligned) == stride
    assert layout.is_aligned == lies[0].aligned == (not 2**31 <= stride < 2**32)
