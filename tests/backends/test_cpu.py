"""The CPU backend's own promises: building and caching, threads, determinism, strides, tails. Results: tests/conformance."""

import ctypes
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import foci
from foci import backends
from foci.backends.contract import Plan
from foci.backends.cpu import BACKEND, build
from foci.backends.cpu.sites import HeadNumbers, find_sites, partition
from foci.backends.cpu.source import backward_source, forward_source
from foci.planner import choose, target_of
from foci.problem import Cotangents, Formula, Operands, Outputs, Problem, Program, Target
from foci.trace_functions import bind

CPU = target_of(torch.device("cpu"))

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))


def problem(score=None, mask=None, dtype=torch.float32, **changes):
    variant = bind(score, mask, torch.device("cpu")).variant
    sizes = {"head_dim": 16, "value_dim": 16, "q_heads": 2, "kv_heads": 2, "batch": 1, "q_len": 64, "kv_len": 64}
    formula = Formula(variant, **{name: changes.pop(name) for name in ("outputs", "dropout", "block_size") if name in changes})
    return Problem(formula, dtype, **{**sizes, **changes})


def attention(*tensors, **arguments):
    with foci.use("cpu"):
        return foci.attention(*tensors, **arguments)


def exact(*tensors, **arguments):
    with foci.use("reference"):
        return foci.attention(*(t.double() for t in tensors), **arguments)


def qkv(B=1, H=2, S=64, D=16, dtype=torch.float32):
    return tuple(torch.randn(B, H, S, D, dtype=dtype) for _ in range(3))


# What it takes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "target", "words"),
    [
        (lambda: problem(dtype=torch.float64), CPU, "float64"),
        (lambda: problem(outputs=Outputs(weights=True)), CPU, "weights"),
        (lambda: problem(head_dim=5000), CPU, "4096"),
        (lambda: problem(), Target("cuda", 90), "cuda"),
        (lambda: problem(), Target("cpu", 0, frozenset({"avx512"})), "compiler"),
    ],
)
def test_says_why_not(asked, target, words):
    assert words in BACKEND.reject(asked(), target)


def test_is_chosen_over_the_other_backends():
    asked = problem(mask=lambda b, h, q, k: q >= k, q_len=2048, kv_len=2048, head_dim=64, value_dim=64)
    assert choose(asked, CPU).plan.backend == "cpu"


def test_attention_over_channels_has_a_kernel():
    """XCiT's: scores between features, the tokens are the head dim."""
    asked = problem(q_len=48, kv_len=48, head_dim=784, value_dim=784, batch=4, q_heads=8, kv_heads=8)
    assert choose(asked, CPU).plan.backend == "cpu"


def test_info_names_compiler_flags_and_cache():
    info = BACKEND.facts()
    assert re.search(r"\d+\.\d+", info["compiler"].value)
    assert "-O2" in info["flags"].value
    assert info["cache"].value


# Sources ---------------------------------------------------------------------------------------------------------------


# FLEX-10
def test_lengths_and_numbers_are_not_in_the_source():
    def windowed(n):
        return problem(mask=lambda b, h, q, k: (q >= k) & (q - k < n), q_len=n, kv_len=n)

    assert forward_source(windowed(128)) == forward_source(windowed(1000))
    assert backward_source(windowed(128)) == backward_source(windowed(1000))


def test_row_and_column_values_leave_the_inner_loop():
    slopes, ids = torch.rand(2), torch.arange(64) // 7
    source = forward_source(problem(lambda s, b, h, q, k: s + slopes[h] * 2, lambda b, h, q, k: ids[q] == ids[k]))
    score = source[source.index("vf score(") : source.index("vb mask(")]
    mask = source[source.index("vb mask(") : source.index("Class classify(")]
    assert "c0(call)" not in score + mask
    assert "c1(call)" not in score + mask


def test_only_what_requires_grad_is_computed():
    source = backward_source(problem(query_grad=False, key_grad=True, value_grad=False))
    assert "GRAD_Q = false, GRAD_K = true, GRAD_V = false" in source


def test_private_gradients_only_where_tasks_meet():
    bias, slopes = torch.zeros(2, 64, 64), torch.zeros(2)
    full = bind(lambda s, b, h, q, k: s + bias[h, q, k], None, torch.device("cpu")).variant.score
    by_head = bind(lambda s, b, h, q, k: s * slopes[h], None, torch.device("cpu")).variant.score
    numbers = HeadNumbers(2, ())
    assert partition(find_sites(full, (True,)), (bias,), (1, 2, 4), numbers).copies == ((1, 1, 1),)
    assert partition(find_sites(full, (True,)), (bias,), (3, 2, 4), numbers).copies == ((3, 1, 1),)
    assert partition(find_sites(by_head, (True,)), (slopes,), (1, 2, 1), numbers).copies == ((1, 1, 1),)
    assert partition(find_sites(by_head, (True,)), (slopes,), (1, 2, 4), numbers).copies == ((1, 1, 4),)


# SDPA-04
@pytest.mark.parametrize(
    ("rows", "entries", "copies"),
    [(8, 16, (1, 1, 1)), (9, 17, (1, 1, 1)), (7, 32, (2, 8, 1)), (1, 32, (2, 8, 1)), (8, 15, (2, 8, 1)), (9, 16, (2, 8, 1))],
)
def test_a_bias_of_merged_batch_and_heads_has_no_copies_where_no_two_meet(rows, entries, copies):
    """Rows of fewer than 8 heads overlap; an index beyond the last entry reads the last entry, as others do."""
    bias = torch.zeros(entries, 8, 8)
    bound = bind(lambda s, b, h, q, k: s + bias[b * rows + h, q, k], None, torch.device("cpu"))
    sites = find_sites(bound.variant.score, (True,))
    assert partition(sites, (bias,), (2, 8, 4), HeadNumbers(8, bound.ints)).copies == (copies,)


# SDPA-04
def test_the_rows_of_a_merged_bias_are_those_of_each_call(monkeypatch):
    """They are a number of the call, not of its kernel, which all these calls share."""
    copies = []

    def record(*arguments):
        copies.append(partition(*arguments).copies[0])
        return partition(*arguments)

    monkeypatch.setattr("foci.backends.cpu.kernel.partition", record)
    tensors, bias = qkv(3, 4, 20, 8), torch.randn(12, 20, 20, requires_grad=True)
    for rows in (4, 3, 4):
        attention(*tensors, score=lambda s, b, h, q, k, rows=rows: s + bias[b * rows + h, q, k]).sum().backward()
    assert copies == [(1, 1, 1), (3, 4, 1), (1, 1, 1)]


# SDPA-04
@pytest.mark.parametrize("rows", [4, 3])
def test_gradients_of_a_bias_of_merged_batch_and_heads(rows):
    """With 4 heads, rows of 4 are apart and rows of 3 meet: head 3 of an entry reads what head 0 of the next one does."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, 4, 130, 16)
    bias = torch.randn(12, 130, 130, requires_grad=True)
    with foci.use("cpu"):
        out = foci.attention(q, k, v, score=lambda s, b, h, i, j: s + bias[b * rows + h, i, j])
    out.square().sum().backward()
    at = torch.arange(3)[:, None] * rows + torch.arange(4)
    exact = bias.detach().double().requires_grad_()
    weights = torch.softmax(q.double() @ k.double().mT / 4 + exact[at], -1)
    (weights @ v.double()).square().sum().backward()
    torch.testing.assert_close(bias.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


# SDPA-04
@pytest.mark.parametrize(
    ("heads", "length", "sizes", "parts", "copies"),
    [
        (8, 512, (2, 8, 1), (2, 8, 1), 2),
        (8, 512, (64, 8, 1), (2, 8, 1), 2),
        (1, 512, (2, 8, 1), (2, 8, 1), 16),  # shared by all: as many as threads may need
        (1, 512, (64, 16, 1), (1, 16, 1), 16),
        (1, 2048, (8, 8, 2), (1, 8, 2), 8),  # each split has keys of its own
        (1, 16384, (8, 8, 8), (1, 1, 8), 1),
    ],
)
def test_a_large_shared_bias_has_few_copies_of_its_gradient(heads, length, sizes, parts, copies):
    bias = torch.zeros(1).expand(heads, length, length)
    shared = bind(lambda s, b, h, q, k: s + (bias[h, q, k] if heads > 1 else bias[0, q, k]), None, torch.device("cpu")).variant.score
    found = partition(find_sites(shared, (True,)), (bias,), sizes, HeadNumbers(sizes[1], ()))
    assert found.parts == parts
    assert math.prod(found.copies[0]) == copies


# SDPA-04, SDPA-16
@pytest.mark.parametrize("shape", [(3, 700, 700), (1, 700, 700), (5, 3, 300, 300)])
def test_gradients_of_a_large_shared_bias(shape):
    torch.manual_seed(0)
    bias, tensors = torch.randn(shape), qkv(5, 3, shape[-1], 8)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            leaf = bias.clone().requires_grad_()
            attention(*tensors, bias=leaf).pow(2).sum().backward()
            found.append(leaf.grad)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])
    query, key, value = (t.double() for t in tensors)
    leaf = bias.double().requires_grad_()
    ((query @ key.mT * 8**-0.5 + leaf).softmax(-1) @ value).pow(2).sum().backward()
    torch.testing.assert_close(found[0].double(), leaf.grad, atol=1e-6, rtol=1e-4)


def test_tanh_is_close_everywhere():
    source = """
#include "foci/functions.h"
using namespace foci;
extern "C" __attribute__((visibility("default"))) void run(const float* from, float* to, long count) {
  for (long i = 0; i < count; i += WIDTH) store(to + i, tanh(load<vf>(from + i)));
}
"""
    x = torch.cat(
        (torch.linspace(-12, 12, 1 << 20), torch.logspace(-30, 1, 1 << 16), torch.tensor([0.0, torch.inf, -torch.inf] + [torch.nan] * 13))
    )
    found = torch.empty_like(x)
    build.load(source).run(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(found.data_ptr()), ctypes.c_long(x.numel()))
    exact = torch.tanh(x.double())
    assert ((found.double() - exact).abs() <= 4e-7 * exact.abs())[~x.isnan()].all()
    assert found[x.isnan()].isnan().all()
    assert found.nan_to_num().abs().max() <= 1


def test_the_exponential_of_the_softmax():
    source = """
#include "foci/functions.h"
using namespace foci;
extern "C" __attribute__((visibility("default"))) void run(const float* from, float* to, long count) {
  for (long i = 0; i < count; i += WIDTH) store(to + i, exp2_negative(load<vf>(from + i)));
}
"""
    special = torch.tensor(
        [0.0, -0.0, -torch.inf, torch.nan, -1e30, -200.0, -126.0, -1.0, -2.0, -64.0, -1e-30, -1e-8, -0.5, -1.5, -3e38, -127.0]
    )
    x = torch.cat((torch.linspace(-125, 0, 1 << 20), -torch.logspace(-30, 2, 1 << 16), special))
    found = torch.empty_like(x)
    build.load(source).run(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(found.data_ptr()), ctypes.c_long(x.numel()))
    exact, normal = torch.exp2(x.double()), x > -126
    assert ((found.double() - exact).abs() <= 2e-7 * exact)[normal].all()
    assert (found <= 2.0**-126)[x <= -126].all()
    assert found[-16:][[0, 1, 2, 4, 5, 7, 8, 14]].tolist() == [1, 1, 0, 0, 0, 0.5, 0.25, 0]
    assert found[x.isnan()].isnan().all()
    assert found[~x.isnan()].max() == 1


# FLEX-08
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, foci.masks.causal()])
def test_logsumexp_has_the_digits_of_float32(dtype, mask):
    torch.manual_seed(0)
    q, k, v = qkv(1, 4, 500, 64, dtype)
    _, aux = attention(q, k, v, mask=mask, return_aux=foci.AuxRequest(lse=True))
    scores = q.double() @ k.double().mT / 8
    if mask is not None:
        scores = scores.masked_fill(torch.ones(500, 500, dtype=torch.bool).triu(1), -torch.inf)
    error = aux.lse.double() - scores.logsumexp(-1)
    assert error.abs().max() < 2e-6
    assert error.mean().abs() < 2e-7


# Running -----------------------------------------------------------------------------------------------------------------


def test_one_libgomp():
    attention(*qkv())
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    program = "import torch, foci\nwith foci.use('cpu'): foci.attention(*(torch.randn(1, 2, 64, 16) for _ in range(3)))\nprint(open('/proc/self/maps').read())"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {line.split()[-1] for line in ran.stdout.splitlines() if "libgomp" in line}
    assert len(loaded) == 1


def gradients(tensors, **arguments):
    leaves = tuple(t.clone().requires_grad_() for t in tensors)
    out = attention(*leaves, **arguments)
    return (out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out)))


# SDPA-16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_does_not_change_a_bit(dtype):
    tensors = qkv(2, 4, 700, 32, dtype)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(gradients(tensors, mask=foci.masks.causal()))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_runs_in_a_forked_child():
    tensors = qkv(2, 4, 700, 32)
    expected = attention(*tensors).numpy().tobytes()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        same = attention(*tensors).numpy().tobytes() == expected  # torch's own operations may hang in here
        os.write(writer, b"1" if same else b"0")
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 1) == b"1"
    os.waitpid(child, 0)


def test_a_child_loads_kernels_though_a_thread_did_when_it_was_forked():
    source = forward_source(problem())
    build.load(source)
    reader, writer = os.pipe()
    with build._loading:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            build.load(source)
            os.write(writer, b"1")
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 1) == b"1"
    os.waitpid(child, 0)


# SDPA-12
def test_odd_strides():
    base = torch.randn(3, 130, 2, 80)
    q = base[..., ::2].transpose(1, 2)
    k = base.transpose(1, 2)[..., 40:]
    v = base[:1, :, :1, 40:].transpose(1, 2).expand(3, 2, 130, 40)
    torch.testing.assert_close(attention(q, k, v), exact(q, k, v).float(), atol=2e-6, rtol=0)


# SDPA-12
@pytest.mark.parametrize(
    ("heads", "q_len", "kv_len", "D", "Dv"), [((2, 2), 48, 48, 40, 40), ((4, 2), 37, 133, 17, 33), ((2, 1), 200, 70, 48, 24)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_transposed_tensors(heads, q_len, kv_len, D, Dv, dtype, causal):
    """Neighbours in memory are neighbours along the tokens: channels of an image, or attention over channels. Around them lies NaN."""

    def transposed(heads, length, width):
        around = torch.full((2, heads, width + 2, length + 2), torch.nan, dtype=dtype)
        return around[:, :, 1:-1, 1:-1].copy_(torch.randn(2, heads, width, length)).mT

    shapes = ((heads[0], q_len, D), (heads[1], kv_len, D), (heads[1], kv_len, Dv), (heads[0], q_len, Dv))
    query, key, value, grad_out = (transposed(*shape) for shape in shapes)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    out = attention(*leaves, mask=foci.masks.causal() if causal else None)
    got = (out, *torch.autograd.grad(out, leaves, grad_out))
    q, k, v = (t.detach().double().requires_grad_() for t in leaves)
    groups = heads[0] // heads[1]
    scores = q @ k.repeat_interleave(groups, 1).mT / math.sqrt(D)
    if causal:
        scores = scores.masked_fill(torch.ones(q_len, kv_len, dtype=torch.bool).triu(1), -math.inf)
    exact_out = torch.softmax(scores, -1) @ v.repeat_interleave(groups, 1)
    expected = (exact_out, *torch.autograd.grad(exact_out, (q, k, v), grad_out.double()))
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("heads_in_rows", [True, False])
def test_gradients_lie_as_the_tensors_do(heads_in_rows):
    rows = torch.randn(2, 3, 70, 48, requires_grad=True)
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) if heads_in_rows else t for t in rows.split(16, 3))
    found = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    expected = torch.autograd.grad(exact(q, k, v).sum(), (q, k, v))
    for gradient, right in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, right.float(), atol=2e-6, rtol=1e-5)
        assert gradient.transpose(1, 2).is_contiguous() is heads_in_rows
        assert gradient.is_contiguous() is not heads_in_rows


def test_gradients_side_by_side_have_the_bits_of_those_apart():
    asked = problem(q_heads=4, query_grad=True, key_grad=True, value_grad=True)
    kernel = BACKEND.build(Plan("cpu", asked, CPU))
    q, k, v = torch.randn(2, 4, 70, 16), *qkv(2, 2, 70)[:2]
    operands = Operands(q, k, v, scale=0.25)
    results = kernel.forward(operands)
    given = results, Cotangents(torch.randn_like(results.out))
    apart = kernel.backward(operands, *given)
    together = kernel.backward(replace(operands, program=Program(joined=True)), *given)
    for name in ("query", "key", "value"):
        gradient = getattr(together, name)
        assert torch.equal(gradient, getattr(apart, name))
        assert gradient.stride()[1:] == (16, 128, 1)
    assert together.query.untyped_storage().data_ptr() == together.value.untyped_storage().data_ptr()


# SDPA-10
@pytest.mark.parametrize("D", [1, 3, 17, 512, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_head_dim(D, dtype):
    tensors = qkv(1, 2, 70, D, dtype)
    tolerance = 5e-6 if dtype is torch.float32 else 3e-2
    found = gradients(tensors)
    with foci.use("reference"):
        leaves = tuple(t.double().requires_grad_() for t in tensors)
        out = foci.attention(*leaves)
        expected = (out, *torch.autograd.grad(out, leaves, torch.ones_like(out)))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=tolerance)


# SDPA-10
@pytest.mark.parametrize("D", [1, 16, 24, 48, 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_read_to_their_last_column_alone(D, dtype):
    """The elements beside a row are NaN, and so would be whatever used them."""
    wide = torch.full((3, 1, 2, 45, 96), torch.nan, dtype=dtype)
    wide[..., :D] = torch.randn(3, 1, 2, 45, D)
    rows = [t.requires_grad_() for t in wide[..., :D].unbind(0)]
    out = attention(*rows)
    got = (out, *torch.autograd.grad(out, rows, torch.ones_like(out)))
    q, k, v = (t.detach().double().requires_grad_() for t in rows)
    exact_out = torch.softmax(q @ k.mT / math.sqrt(D), -1) @ v
    expected = (exact_out, *torch.autograd.grad(exact_out, (q, k, v), torch.ones_like(exact_out)))
    tolerance = 5e-6 if dtype is torch.float32 else 3e-2
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_captured_integers_of_every_dtype_and_stride(dtype):
    q, k, v = qkv(2, 2, 100, 16)
    ids = (torch.arange(400).reshape(2, 200) // 9 % 3).to(dtype)[:, ::2]
    mask = foci.Mask(lambda b, h, q, k: ids[b, q] == ids[b, k])
    torch.testing.assert_close(attention(q, k, v, mask=mask), exact(q, k, v, mask=mask).float(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_captured_numbers_of_every_dtype_and_stride(dtype):
    q, k, v = qkv(2, 2, 100, 16)
    table = torch.randn(2, 230).to(dtype).t()
    score = foci.Score(lambda s, b, h, q, k: s + table[q - k + 110, h])
    torch.testing.assert_close(attention(q, k, v, score=score), exact(q, k, v, score=score).float(), atol=3e-6, rtol=0)


def test_loads_stop_at_the_end_of_a_tensor():
    page = 4096 // 4
    q, k, v = qkv(1, 1, 50, 16)
    memory = torch.full((6 * page,), torch.nan)
    bias = memory[page : page + 50 * 50].view(50, 50)  # NaN on either side
    bias.normal_()
    score = foci.Score(lambda s, b, h, q, k: s + bias[q, k])
    assert torch.isfinite(attention(q, k, v, score=score)).all()


@pytest.mark.parametrize("arch", ["x86-64-v3", "x86-64"])
def test_narrower_instruction_sets(arch):
    """AVX2, and what every x86-64 has: in a process of its own, for the flags are part of everything cached."""
    program = """
import torch, foci
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 150, 40, requires_grad=True) for _ in range(3))
score = foci.scores.softcap(3.0)
def run(name, dtype):
    with foci.use(name):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        out = foci.attention(*leaves, mask=foci.masks.causal(), score=score)
        return (out, *torch.autograd.grad(out.sum(), leaves))
for a, b in zip(run("cpu", torch.float32), run("reference", torch.float64)):
    torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "FOCI_CPU_ARCH": arch}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_tokens_of_no_sequence_get_zeros():
    tokens = torch.randn(20, 2, 16, requires_grad=True)
    offsets = torch.tensor([2, 9, 9, 15], dtype=torch.int32)
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # empty tensors start as NaN
    try:
        with foci.use("cpu"):
            out = foci.varlen_attn(tokens, tokens, tokens, offsets, offsets, 7, 7)
        (grad,) = torch.autograd.grad(out.sum(), tokens)
    finally:
        torch.use_deterministic_algorithms(was)
    for found in (out, grad):
        assert not found[:2].any()
        assert not found[15:].any()
        assert found[2:15].isfinite().all()


def test_caller_blocks_decide_where_tiles_straddle_heads():
    torch.manual_seed(0)
    q, k, v = qkv(2, 4, 130, 16)
    formula = Formula(bind(None, lambda b, h, q, k: q >= k, torch.device("cpu")).variant, block_size=(64, 64))
    blocks = torch.randint(0, 3, (2, 4, 3, 3), dtype=torch.int8)
    asked = Problem(formula, torch.float32, 16, 16, 4, 4, 2, 256, 256)
    operands = Operands(q, k, v, scale=0.25, blocks=blocks)
    found, expected = (backends.load(name).build(Plan(name, asked, CPU)).forward(operands).out for name in ("cpu", "reference"))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_of_a_tile_meet_different_keys(dtype):
    """Holes within a half, keys that one half meets later, runs longer than one pass over the keys, rows without keys."""
    torch.manual_seed(0)
    shape = (1, 2, 1500, 24)
    q, k, v = (torch.randn(shape, dtype=dtype) for _ in range(3))
    squares = torch.rand(47, 47) < 0.8
    squares[:, 40:] &= torch.rand(47, 7) < 0.2
    squares[9] = False
    masks = (
        lambda b, h, q, k: squares[q // 32, k // 32],
        lambda b, h, q, k: (k < 320) | (k >= 640 + 192 * (q // 32 % 2)),  # one half comes late to the second run
        lambda b, h, q, k: (q >= k) & (q - k < 700),
        foci.masks.causal(),
    )
    near, far = (3e-6, 1e-5) if dtype is torch.float32 else (3e-2, 1e-3)
    asked = foci.AuxRequest(lse=True, column_sums=True)
    for mask in masks:
        out, aux = attention(q, k, v, mask=mask, return_aux=asked)
        expected, expected_aux = exact(q, k, v, mask=mask, return_aux=asked)
        torch.testing.assert_close(out.double(), expected, atol=near, rtol=near)
        torch.testing.assert_close(aux.lse.double(), expected_aux.lse.double(), atol=far, rtol=far)
        torch.testing.assert_close(aux.column_sums.double(), expected_aux.column_sums.double(), atol=10 * far, rtol=10 * far)


# Masks that real arithmetic decides otherwise than the device's does.
TENTH = torch.tensor(0.1).item()
ABOVE = torch.tensor(63 * TENTH).item()  # what float32 makes of the product
ENDLESS, MISSING, ZERO = torch.full((256,), -torch.inf), torch.full((256,), torch.nan), torch.zeros(256)
SECONDS = 1_700_000_000 + torch.arange(256)
LARGE = 2**60 + torch.arange(256) // 32
DELICATE = {
    "a product that float32 rounds": lambda b, h, q, k: q * TENTH < ABOVE,
    "zero times infinity": lambda b, h, q, k: ENDLESS[k] * ZERO[q] > -1,
    "nan against infinity": lambda b, h, q, k: MISSING[k] <= torch.inf,
    "the lesser of nan and a number": lambda b, h, q, k: torch.minimum(MISSING[k], ZERO[q]) <= 1,
    "the size of nan": lambda b, h, q, k: MISSING[k].abs() >= 0,
    "the sine of infinity": lambda b, h, q, k: ENDLESS[k].sin() <= 1.5,
    "seconds as float32": lambda b, h, q, k: SECONDS[q].float() - SECONDS[k].float() < 33.0,
    "integers that float64 rounds": lambda b, h, q, k: LARGE[q] == LARGE[k],
    "a hash that wraps": lambda b, h, q, k: (h * 1103515245 + 12345) % 10 < 5,
}


@pytest.mark.parametrize("name", DELICATE)
def test_tiles_are_decided_as_single_scores_are(name):
    q, k, v = qkv(1, 8, 256, 16)
    with foci.use("reference"):
        expected = foci.attention(q, k, v, mask=DELICATE[name])
    torch.testing.assert_close(attention(q, k, v, mask=DELICATE[name]), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(("kv_len", "bound"), [(1500, 3e-5), (37, 5e-6)])
def test_many_keys_that_read_one_element(kv_len, bound):
    """The ends of a table of distances meet most pairs: float32 keeps the digits of their sum."""
    torch.manual_seed(3)
    query, key, value = torch.randn(1, 2, 1500, 16), torch.randn(1, 2, kv_len, 16), torch.randn(1, 2, kv_len, 16)
    found = []
    for dtype, backend in ((torch.float32, "cpu"), (torch.float64, "reference")):
        table = torch.zeros(2, 13, dtype=dtype, requires_grad=True)
        with foci.use(backend):
            out = foci.attention(query.to(dtype), key.to(dtype), value.to(dtype), score=foci.scores.relative_position(table))
        (out * torch.linspace(-1, 1, 16).to(dtype)).sum().backward()
        found.append(table.grad.double())
    assert (found[0] - found[1]).abs().max() < bound * found[1].abs().max()
