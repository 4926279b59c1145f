"""The Triton backend on a GPU: what only a device shows. Accuracy is in benchmarks/gpu_check.py, which this runs."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

import foci
from foci import masks, scores
from foci.backends.compile_priority import wait_for_background
from foci.backends.contract import Plan
from foci.problem import Cotangents, Formula, Operands, Outputs, Problem, bucket
from foci.trace_functions import bind

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[3]


def kernel_and_operands(score=None, mask=None, shape=(2, 4, 1000, 64), dtype=torch.bfloat16):
    from foci.backends.triton import BACKEND
    from foci.planner import find_target

    b, h, s, d = shape
    device = torch.device("cuda")
    q, k, v = (torch.randn(b, h, s, d, device=device, dtype=dtype) for _ in range(3))
    bound = bind(score, mask, device)
    operands = Operands(q, k, v, bound.captures, bound.ints, bound.floats, 1 / math.sqrt(d))
    formula = Formula(bound.variant, outputs=Outputs(lse=True))
    problem = Problem(formula, dtype, d, d, h, h, bucket(b), bucket(s), bucket(s), True, True, True, tuple(False for _ in bound.captures))
    target = find_target(device)
    assert BACKEND.reject(problem, target) is None
    return BACKEND.build(Plan("triton", problem, target)), operands


def compiled_kernels():
    from foci.backends.gpu import backward, forward, mend, row_stats, tile_table_kernels

    jitted = (
        forward.attention_forward,
        backward.attention_query_gradient,
        backward.attention_key_gradient,
        row_stats.prepare_rows,
        mend.mend_rows,
        mend.mend_gradients,
        tile_table_kernels.list_tiles,
    )
    wait_for_background()  # of calls that other tests made
    return sum(len(cache[0]) for function in jitted for cache in function.device_caches.values())


# FLEX-10
def test_new_lengths_batches_values_and_lambdas_compile_nothing():
    def once(length, batch, heads, window):
        slopes = torch.rand(heads, device="cuda")
        score = foci.Score(lambda s, b, h, q, k: s + slopes[h] * (k - q))
        mask = foci.Mask(lambda b, h, q, k: (q >= k) & (q - k < window))
        kernel, operands = kernel_and_operands(score, mask, (batch, heads, length, 64))
        results = kernel.forward(operands)
        kernel.backward(operands, results, Cotangents(torch.randn_like(results.out)))

    once(1000, 2, 4, 100)
    before = compiled_kernels()
    for length, batch, heads, window in ((1001, 1, 1, 5), (16, 3, 5, 16), (2048, 16, 8, 2000), (77, 1, 2, 33), (1, 1, 1, 3)):
        once(length, batch, heads, window)
    assert compiled_kernels() == before


# SDPA-21
def test_a_cuda_graph_replays_with_new_inputs():
    kernel, operands = kernel_and_operands(scores.alibi(4), masks.causal())
    kernel.forward(operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel.forward(operands)
    operands.query.copy_(torch.randn_like(operands.query))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured.out, kernel.forward(operands).out)


def test_two_streams_do_not_disturb_each_other():
    pairs = [kernel_and_operands(None, masks.causal()) for _ in range(2)]
    alone = [kernel.forward(operands).out.clone() for kernel, operands in pairs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in pairs]
    for _ in range(10):
        together = []
        for stream, (kernel, operands) in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                together.append(kernel.forward(operands).out)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


# SDPA-16
def test_gradients_repeat_bit_for_bit():
    kernel, operands = kernel_and_operands(scores.softcap(20.0), masks.causal())
    results = kernel.forward(operands)
    dout = torch.randn_like(results.out)
    first = kernel.backward(operands, results, Cotangents(dout))
    for _ in range(20):
        again = kernel.backward(operands, results, Cotangents(dout))
        assert torch.equal(first.query, again.query)
        assert torch.equal(first.key, again.key)
        assert torch.equal(first.value, again.value)


def test_a_mask_tensor_changed_in_place_is_seen():
    ids = (torch.arange(1000, device="cuda") // 100).int()
    kernel, operands = kernel_and_operands(None, foci.Mask(lambda b, h, q, k: ids[q] == ids[k]))
    before = kernel.forward(operands).out
    ids.zero_()
    kernel_all, operands_all = kernel_and_operands(None, None)
    after = kernel.forward(operands).out
    plain = kernel_all.forward(Operands(operands.query, operands.key, operands.value, scale=operands_all.scale)).out
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, plain, atol=1e-2, rtol=1e-2)


def test_memory_grows_with_length_not_with_its_square():
    for score, mask in ((None, None), (scores.alibi(4), masks.causal())):
        kernel, operands = kernel_and_operands(score, mask, (1, 4, 16384, 64))
        kernel.forward(operands)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = kernel.forward(operands)
        kernel.backward(operands, results, Cotangents(torch.ones_like(results.out)))
        used = torch.cuda.max_memory_allocated() - before
        assert used < 16 * operands.query.nbytes, used


@pytest.mark.slow
def test_every_case_is_within_the_error_budget():
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "benchmarks" / "gpu_check.py")
    check = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["gpu_check"] = check
    spec.loader.exec_module(check)
    failed = [case.name for case in check.cases() if not check.run(case)]
    assert not failed


# JAG-03
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["all", "causal"])
def test_what_lies_behind_a_sequence_reaches_nothing(dim, mask):
    # a tile that overhangs a sequence's end copies the next one's rows, or tokens of none
    lengths, spans = [100, 1, 257, 64], [128, 1, 300, 100]
    start = torch.tensor([0, *spans], device="cuda").cumsum(0)
    q, k, v = (torch.full((sum(spans), 2, dim), math.nan, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for n, length in enumerate(lengths):
        for t in (q, k, v):
            t[start[n] : start[n] + length] = torch.randn(length, 2, dim, device="cuda")
    narrowed = [
        torch.nested.nested_tensor_from_jagged(t, start, lengths=torch.tensor(lengths, device="cuda")).transpose(1, 2) for t in (q, k, v)
    ]
    with foci.use("triton"):
        out = foci.attention(*narrowed, mask=mask)
    for n, length in enumerate(lengths):
        ours = [t[start[n] : start[n] + length].transpose(0, 1)[None].double() for t in (q, k, v)]
        exact = torch.nn.functional.scaled_dot_product_attention(*ours, is_causal=mask is not None)[0].transpose(0, 1)
        actual = out.values().transpose(0, 1)[start[n] : start[n] + length]
        torch.testing.assert_close(actual.double(), exact, rtol=0, atol=0.02)
