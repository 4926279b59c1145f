"""What the CPU backend takes, builds and promises: sources, processes, threads, digits. Results: tests/conformance."""

import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cpu_calls import CPU, attention, gradients, problem, qkv

import foci
from foci.backends.cpu import BACKEND, build
from foci.backends.cpu.source import backward_source, forward_source
from foci.planner import choose
from foci.problem import Outputs, Target

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))


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
    actual = torch.empty_like(x)
    build.load(source).run(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(actual.data_ptr()), ctypes.c_long(x.numel()))
    exact = torch.tanh(x.double())
    assert ((actual.double() - exact).abs() <= 4e-7 * exact.abs())[~x.isnan()].all()
    assert actual[x.isnan()].isnan().all()
    assert actual.nan_to_num().abs().max() <= 1


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
    actual = torch.empty_like(x)
    build.load(source).run(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(actual.data_ptr()), ctypes.c_long(x.numel()))
    exact, normal = torch.exp2(x.double()), x > -126
    assert ((actual.double() - exact).abs() <= 2e-7 * exact)[normal].all()
    assert (actual <= 2.0**-126)[x <= -126].all()
    assert actual[-16:][[0, 1, 2, 4, 5, 7, 8, 14]].tolist() == [1, 1, 0, 0, 0, 0.5, 0.25, 0]
    assert actual[x.isnan()].isnan().all()
    assert actual[~x.isnan()].max() == 1


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


def test_one_libgomp():
    attention(*qkv())
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    program = "import torch, foci\nwith foci.use('cpu'): foci.attention(*(torch.randn(1, 2, 64, 16) for _ in range(3)))\nprint(open('/proc/self/maps').read())"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {line.split()[-1] for line in ran.stdout.splitlines() if "libgomp" in line}
    assert len(loaded) == 1


# SDPA-16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_does_not_change_a_bit(dtype):
    tensors = qkv(2, 4, 700, 32, dtype)
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            runs.append(gradients(tensors, mask=foci.masks.causal()))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


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
