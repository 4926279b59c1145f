"""The Hopper backward on a GPU: one kernel and several give the gradients of float64, the same bits each time."""

from dataclasses import replace

import pytest
import torch
from posed import assert_exact, exact, kernel_of, posed

import foci
from foci import masks, scores
from foci.backends.hopper import backward_schedules
from foci.problem import Cotangents, Program

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"),
]

ALL = (True, True, True)
FEW = {"batch": 8, "heads": 8}
SHARED = {"batch": 2, "heads": 8}
LENGTHS = [300, 1, 0, 128, 515, 64]
CASES = {
    "plain": {"rows": 1024},
    "many heads": {"rows": 512, "batch": 12, "heads": 12, "dim": 64},
    "many heads, odd lengths": {"rows": 517, "keys": 389, "batch": 4, "heads": 12},
    "one wave": {"rows": 1000, "batch": 1, "heads": 16},
    "one wave, D 64": {"rows": 4096, "keys": 4000, "batch": 1, "heads": 4, "dim": 64},
    "one wave, grouped heads": {"rows": 1000, "keys": 1300, "heads": 12, "kv_heads": 4},
    "few heads, more keys": {"rows": 150, "keys": 1100},
    "few heads, one tile of queries, D 64": {"rows": 70, "keys": 2000, "dim": 64},
    "one wave, dropout": {"dropout": 0.2, "rows": 1000, "keys": 900},
    "many heads, causal": {"mask": masks.causal(), "rows": 400, "keys": 500, "batch": 12, "heads": 12},
    "many heads, window, D 64": {"mask": masks.window(90), "rows": 500, "batch": 12, "heads": 12, "dim": 64},
    "many heads, document": {
        "mask": foci.Mask(lambda b, h, q, k: (q * q // 7000) == (k * k // 7000)),
        "rows": 500,
        "batch": 6,
        "heads": 12,
    },
    "many heads, jagged, D 64": {"lengths": [300, 1, 0, 128, 515, 64] * 6, "heads": 12, "dim": 64},
    "many heads, grouped": {"rows": 500, "batch": 4, "heads": 16, "kv_heads": 4},
    "many heads, grouped, causal": {"mask": masks.causal(), "rows": 500, "batch": 4, "heads": 16, "kv_heads": 4},
    "long, causal, D 64": {"mask": masks.causal(), "rows": 2500, "heads": 12, "dim": 64},
    "odd lengths": {"rows": 517, "keys": 389},
    "causal, more keys": {"mask": masks.causal(), "rows": 389, "keys": 517},
    "causal, more rows": {"mask": masks.causal(), "rows": 517, "keys": 130},
    "grouped heads": {"rows": 1024, "heads": 8, "kv_heads": 2},
    "grouped heads, causal": {"mask": masks.causal(), "rows": 1024, "heads": 8, "kv_heads": 2},
    "D 64": {"mask": masks.causal(), "dim": 64, "rows": 700},
    "D 32": {"dim": 32, "rows": 517, "keys": 389},
    "D 32, jagged, causal": {"dim": 32, "lengths": LENGTHS, "mask": masks.causal()},
    "D 16, window": {"dim": 16, "rows": 700, "mask": masks.window(90)},
    "D 80, float16": {"dim": 80, "dtype": torch.float16},
    "alibi": {"mask": masks.causal(), "score": scores.alibi(4), "rows": 700},
    "alibi, D 64": {"mask": masks.causal(), "score": scores.alibi(4), "rows": 389, "keys": 517, "dim": 64},
    "alibi to both sides": {"score": foci.Score(lambda s, b, h, q, k: s + (k - q) * (h + 1) / 50), "rows": 517, "keys": 389},
    "bias for each key": {
        "score": foci.Score(lambda s, b, h, q, k: s + torch.arange(600, device=q.device)[k] / 300),
        "rows": 500,
        "keys": 600,
    },
    "softcap": {"mask": masks.causal(), "score": scores.softcap(20.0), "rows": 700},
    "softcap, D 64": {"score": scores.softcap(20.0), "mask": masks.causal(), "rows": 700, "dim": 64},
    "softcap, grouped heads": {"score": scores.softcap(20.0), "rows": 517, "keys": 389, "heads": 8, "kv_heads": 2},
    "softcap, jagged, causal": {"score": scores.softcap(20.0), "lengths": LENGTHS, "mask": masks.causal()},
    "softcap, window": {"score": scores.softcap(20.0), "mask": foci.Mask(lambda b, h, q, k: (q >= k) & (q - k < 100)), "rows": 900},
    "distances scaled": {"score": foci.Score(lambda s, b, h, q, k: s * (1 + (q - k) / 1000)), "rows": 517, "keys": 389},
    "dropout": {"dropout": 0.2, "rows": 300},
    "dropout, more keys, D 64": {"dropout": 0.5, "rows": 389, "keys": 517, "dim": 64},
    "dropout, D 32, causal": {"dropout": 0.2, "rows": 389, "dim": 32, "mask": masks.causal()},
    "dropout, grouped heads, causal": {"dropout": 0.2, "mask": masks.causal(), "rows": 517, "keys": 389, "heads": 8, "kv_heads": 2},
    "dropout, jagged, causal": {"dropout": 0.2, "lengths": LENGTHS, "mask": masks.causal()},
    "dropout, window": {"dropout": 0.2, "mask": foci.Mask(lambda b, h, q, k: (q >= k) & (q - k < 100)), "rows": 900},
    "dropout, document, alibi": {
        "dropout": 0.2,
        "mask": foci.Mask(lambda b, h, q, k: (q * q // 7000) == (k * k // 7000)),
        "score": scores.alibi(4),
        "rows": 900,
        "dim": 64,
    },
    "everything dropped": {"dropout": 1.0, "rows": 300},
    "dropout, D 256": {"dropout": 0.2, "dim": 256, "rows": 300},
    "jagged": {"lengths": LENGTHS},
    "jagged, causal": {"lengths": LENGTHS, "mask": masks.causal()},
    "jagged, window": {"lengths": LENGTHS, "mask": masks.window(150)},
    "jagged, window, grouped, D 64": {"lengths": LENGTHS, "mask": masks.window(40, 90), "kv_heads": 2, "dim": 64},
    "jagged, window, softcap, D 64": {"lengths": LENGTHS, "mask": masks.window(150), "score": scores.softcap(2.0), "dim": 64},
    "jagged, window, alibi": {"lengths": LENGTHS, "mask": masks.window(150), "score": scores.alibi(4)},
    "jagged, window, dropout": {"lengths": LENGTHS, "mask": masks.window(150), "dropout": 0.2},
    "jagged, causal, D 64": {"lengths": LENGTHS, "mask": masks.causal(), "dim": 64},
    "negative scale": {"scale": -0.1, "mask": masks.causal()},
    "window": {"mask": foci.Mask(lambda b, h, q, k: (q >= k) & (q - k < 100)), "rows": 900},
    "window, D 64": {"mask": foci.Mask(lambda b, h, q, k: (q >= k) & (q - k < 300)), "dim": 64, "rows": 900, "keys": 950},
    "window of later keys, grouped heads": {
        "mask": foci.Mask(lambda b, h, q, k: (k >= q + 70) & (k - q < 500)),
        "rows": 700,
        "keys": 1000,
        "heads": 8,
        "kv_heads": 2,
    },
    "distance": {"mask": foci.Mask(lambda b, h, q, k: abs(q - k) <= 100), "rows": 900, "keys": 950},
    "distance for each batch entry": {"mask": foci.Mask(lambda b, h, q, k: abs(q - k) < 60 + 200 * b), "rows": 700, "dim": 64},
    "document": {"mask": foci.Mask(lambda b, h, q, k: (q * q // 7000) == (k * k // 7000)), "rows": 900},
    "document, D 64": {"mask": foci.Mask(lambda b, h, q, k: (q * q // 7000) == (k * k // 7000)), "rows": 900, "dim": 64},
    "stripes": {"mask": foci.Mask(lambda b, h, q, k: (q // 64 + k // 128) % 3 != 0), "rows": 960},
    "by head": {"mask": foci.Mask(lambda b, h, q, k: (abs(q - k) * (h + 1)) < 500), "rows": 700},
    "D 256": {"mask": masks.causal(), "dim": 256, "rows": 500, "keys": 300},
    "D 256, grouped heads": {"dim": 256, "heads": 8, "kv_heads": 2, "rows": 300},
    "D 256, jagged, causal": {"dim": 256, "lengths": LENGTHS, "mask": masks.causal()},
    "D 256, softcap": {"dim": 256, "score": scores.softcap(20.0), "rows": 300, "keys": 400},
    "D 256, Dv 64": {"dim": 256, "value_dim": 64, "rows": 300},
    "D 96": {"dim": 96, "rows": 517, "keys": 389},
    "D 96, grouped heads, causal": {"mask": masks.causal(), "dim": 96, "rows": 700, "heads": 8, "kv_heads": 2},
    "D 96, jagged, causal": {"dim": 96, "lengths": LENGTHS, "mask": masks.causal()},
    "D 96, window": {"mask": foci.Mask(lambda b, h, q, k: (q >= k) & (q - k < 100)), "dim": 96, "rows": 900},
    "D 72, Dv 96, alibi": {"mask": masks.causal(), "score": scores.alibi(4), "dim": 72, "value_dim": 96, "rows": 700},
    "D 192": {"dim": 192, "rows": 389, "keys": 517},
    "D 192, Dv 128, grouped heads, causal": {
        "mask": masks.causal(),
        "dim": 192,
        "value_dim": 128,
        "rows": 700,
        "heads": 8,
        "kv_heads": 2,
    },
    "D 192, Dv 128": {"dim": 192, "value_dim": 128, "rows": 517, "keys": 389},
    "D 192, Dv 128, grouped heads": {"dim": 192, "value_dim": 128, "rows": 333, "keys": 700, "heads": 8, "kv_heads": 4},
    "D 192, Dv 128, causal": {"dim": 192, "value_dim": 128, "mask": masks.causal(), "rows": 1100},
    "D 192, Dv 128, causal, more keys": {"dim": 192, "value_dim": 128, "mask": masks.causal(), "rows": 389, "keys": 517},
    "D 192, Dv 128, causal, more rows": {"dim": 192, "value_dim": 128, "mask": masks.causal(), "rows": 517, "keys": 130},
    "D 192, Dv 128, causal, softcap": {
        "dim": 192,
        "value_dim": 128,
        "mask": masks.causal(),
        "score": scores.softcap(20.0),
        "rows": 700,
    },
    "D 192, Dv 128, window": {"dim": 192, "value_dim": 128, "mask": masks.window(100), "rows": 700},
    "D 192, Dv 128, jagged, causal": {"dim": 192, "value_dim": 128, "lengths": LENGTHS, "mask": masks.causal()},
    "D 136, Dv 192, softcap, float16": {
        "dim": 136,
        "value_dim": 192,
        "score": scores.softcap(20.0),
        "rows": 300,
        "keys": 400,
        "dtype": torch.float16,
    },
    "D 64, Dv 128": {"dim": 64, "value_dim": 128},
    "D 16": {"dim": 16},
    "few queries": {**FEW, "rows": 128, "keys": 1024},
    "few queries, odd keys": {**FEW, "rows": 100, "keys": 517},
    "few queries, keys of one tile and a half": {**FEW, "rows": 128, "keys": 257, "dim": 64},
    "few queries, many heads, D 64": {"batch": 20, "heads": 16, "rows": 128, "keys": 1024, "dim": 64},
    "few queries, D 64": {**FEW, "rows": 64, "keys": 1000, "dim": 64},
    "few queries, D 32, one": {**FEW, "rows": 1, "keys": 4096, "dim": 32},
    "few queries, D 16, float16": {**FEW, "rows": 77, "keys": 700, "dim": 16, "dtype": torch.float16},
    "few queries, D 96": {**FEW, "rows": 65, "keys": 640, "dim": 96},
    "few queries, D 72, Dv 80": {**FEW, "rows": 128, "keys": 513, "dim": 72, "value_dim": 80},
    "few queries, softcap": {**FEW, "rows": 128, "keys": 600, "score": scores.softcap(20.0)},
    "few queries, softcap, D 64": {**FEW, "rows": 30, "keys": 600, "dim": 64, "score": scores.softcap(2.0)},
    "few queries, alibi": {**FEW, "rows": 100, "keys": 999, "dim": 64, "score": scores.alibi(8)},
    "few queries, bias for each key": {
        **FEW,
        "rows": 128,
        "keys": 600,
        "score": foci.Score(lambda s, b, h, q, k: s + torch.arange(600, device=q.device)[k] / 300),
    },
    # whose slope is NaN where a product is 0, as those of rows and keys that are not there are
    "few queries, both signs": {
        **FEW,
        "rows": 70,
        "keys": 600,
        "dim": 64,
        "score": foci.Score(lambda s, b, h, q, k: (s * s).sqrt() + s / 2),
    },
    "few queries, float16, negative scale": {**FEW, "rows": 128, "keys": 777, "dtype": torch.float16, "scale": -0.1},
    "few queries, shared keys": {**SHARED, "rows": 128, "keys": 4096},
    "few queries, shared keys, D 64": {**SHARED, "rows": 64, "keys": 4000, "dim": 64},
    "few queries, shared keys, D 64, many": {"batch": 2, "heads": 20, "rows": 100, "keys": 1999, "dim": 64},
    "few queries, shared keys, D 16, float16": {**SHARED, "rows": 1, "keys": 5555, "dim": 16, "dtype": torch.float16},
    "few queries, shared keys, D 96, softcap": {**SHARED, "rows": 77, "keys": 4097, "dim": 96, "score": scores.softcap(20.0)},
    "few queries, shared keys, D 72, Dv 80": {**SHARED, "rows": 128, "keys": 2111, "dim": 72, "value_dim": 80},
    "few queries, shared keys, alibi": {**SHARED, "rows": 100, "keys": 3333, "score": scores.alibi(8)},
    "few queries, shared keys, both signs": {
        **SHARED,
        "rows": 70,
        "keys": 2600,
        "dim": 64,
        "score": foci.Score(lambda s, b, h, q, k: (s * s).sqrt() + s / 2),
    },
    "few queries, shared keys, one head": {"batch": 1, "heads": 1, "rows": 30, "keys": 40000, "dim": 64},
    "D 24, grouped heads, causal": {"mask": masks.causal(), "dim": 24, "rows": 300, "heads": 8, "kv_heads": 2},
}


WAYS = {
    "short_q": {},
    "fused": {"ds_tiles": None, "short_q": None},
    "ds_tiles": {"fused": None, "short_q": None},
    "apart": {"fused": None, "ds_tiles": None, "short_q": None},
}
"""What a kernel lacks so that it takes one way."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_float64(name, way):
    torch.manual_seed(0)
    asked, operands = posed(grads=ALL, **CASES[name])
    kernel = kernel_of("hopper", asked)
    if getattr(kernel.backward_pass, way, True) is None:
        pytest.skip("takes other ways")
    for other, lacking in WAYS[way].items():
        setattr(kernel.backward_pass, other, lacking)
    results = kernel.forward(operands)
    dout = torch.randn_like(results.out)
    assert_exact(kernel.backward(operands, results, Cotangents(dout)), asked, operands, dout)


# SDPA-16
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "one wave",
        "few heads, more keys",
        "many heads",
        "many heads, causal",
        "many heads, jagged, D 64",
        "grouped heads",
        "jagged",
        "jagged, causal, D 64",
        "window",
        "document",
        "D 96",
        "D 192",
        "D 256",
        "few queries",
        "few queries, many heads, D 64",
        "few queries, shared keys",
        "few queries, shared keys, D 64, many",
    ],
)
def test_gradients_have_the_same_bits_each_time(name):
    asked, operands = posed(grads=ALL, **{"rows": 2048, "heads": 16, **CASES[name]})
    kernel = kernel_of("hopper", asked)
    results = kernel.forward(operands)
    dout = torch.randn_like(results.out)
    first = kernel.backward(operands, results, Cotangents(dout))
    for _ in range(40):
        again = kernel.backward(operands, results, Cotangents(dout))
        for part in ("query", "key", "value"):
            assert torch.equal(getattr(first, part), getattr(again, part)), part


@pytest.mark.parametrize("name", ["one wave", "one wave, grouped heads"])
def test_programs_that_all_run_at_once_do_so_beside_others_and_in_a_graph(name):
    asked, operands = posed(grads=ALL, **CASES[name])
    kernel = kernel_of("hopper", asked)
    results = kernel.forward(operands)
    dout = torch.randn_like(results.out)
    first = kernel.backward(operands, results, Cotangents(dout))
    torch.cuda.synchronize()
    streams, runs = [torch.cuda.Stream() for _ in range(3)], []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                runs.append(kernel.backward(operands, results, Cotangents(dout)))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runs.append(kernel.backward(operands, results, Cotangents(dout)))
    graph.replay()
    graph.replay()
    for again in runs:
        for part in ("query", "key", "value"):
            assert torch.equal(getattr(first, part), getattr(again, part)), part


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("D 136", "D 192", "D 256"))])
def test_heads_whose_gradients_of_scores_are_kept_come_in_chunks(name, monkeypatch):
    monkeypatch.setattr(backward_schedules, "DS_SCRATCH_BYTES", 3 << 20)
    monkeypatch.setattr(backward_schedules, "DS_CHUNK_PROGRAMS", 1)
    asked, operands = posed(grads=ALL, **CASES[name])
    kernel = kernel_of("hopper", asked)
    if kernel.backward_pass.ds_tiles is None:
        pytest.skip("keeps none")
    results = kernel.forward(operands)
    dout = torch.randn_like(results.out)
    right, first = exact(asked, operands, dout), None
    for _ in range(10):
        # what is kept lies where this lay
        nans = [torch.full((1 << 22,), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(8)]
        del nans
        gradients = kernel.backward(operands, results, Cotangents(dout))
        first = first or gradients
        for part in ("query", "key", "value"):
            a, b = getattr(gradients, part), getattr(right, part)
            assert (a.double() - b).norm() <= 8e-3 * b.norm() + 1e-6, part
            assert torch.equal(a, getattr(first, part)), part
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = kernel.backward(operands, results, Cotangents(dout))
    graph.replay()
    graph.replay()
    for part in ("query", "key", "value"):
        assert torch.equal(getattr(gradients, part), getattr(first, part)), part


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["full", "causal"])
def test_calls_of_one_formula_with_other_heads_and_lengths(mask, dim):
    torch.manual_seed(0)
    for length in (700, 300):
        for heads, kv_heads in ((8, 8), (8, 2), (4, 4)):
            q = torch.randn(2, heads, length, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            k, v = (torch.randn(2, kv_heads, length, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
            weights = torch.randn_like(q)
            with foci.use("hopper"):
                out = foci.attention(q, k, v, mask=mask)
                gradients = torch.autograd.grad(out, (q, k, v), weights)
            wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
            with foci.use("reference"):
                right = torch.autograd.grad(foci.attention(*wide, mask=mask), wide, weights.double())
            for part, a, b in zip(("query", "key", "value"), gradients, right, strict=True):
                assert (a.double() - b).norm() <= 8e-3 * b.norm() + 1e-6, (part, length, heads, kv_heads)


@pytest.mark.parametrize("first", [0.0, 0.5])
def test_dropout_and_none_by_turns_under_one_mask(first):
    """Their calls share the table of tiles, over which those without dropout move tiles."""
    torch.manual_seed(0)
    owners = (torch.arange(4096, device="cuda") % 7 == 0).cumsum(0) // 40
    mask = foci.Mask(lambda b, h, q, k: owners[q] == owners[k])
    q, k, v = (torch.randn(2, 16, 4096, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    weights = torch.randn_like(q)
    for dropout_p in (first, 0.5 - first) * 2:
        runs = []
        for backend in ("hopper", "triton"):  # which drop the same
            torch.manual_seed(1)
            with foci.use(backend):
                out = foci.attention(q, k, v, mask=mask, dropout_p=dropout_p)
                runs.append((out, *torch.autograd.grad(out, (q, k, v), weights)))
        for part, a, b in zip(("out", "query", "key", "value"), *runs, strict=True):
            assert (a.double() - b.double()).norm() <= 1e-2 * b.double().norm(), (part, dropout_p)


@pytest.mark.parametrize("rows", [64, 100])
@pytest.mark.parametrize("dim", [64, 128])
def test_few_queries_that_lie_apart_and_lengths_by_turns(dim, rows):
    """Heads lie within rows, keys and values side by side; one plan takes other lengths of as many bits."""
    torch.manual_seed(0)
    kernel = None
    for keys in (1000, 600, 1000):
        asked, operands = posed(grads=ALL, **FEW, rows=rows, keys=keys, dim=dim)
        joined = torch.randn(8, keys, 2, 8, dim, device="cuda", dtype=torch.bfloat16)
        key, value = (joined[:, :, i].transpose(1, 2) for i in range(2))
        query = operands.query.transpose(1, 2).contiguous().transpose(1, 2)
        operands = replace(operands, query=query, key=key, value=value)
        kernel = kernel or kernel_of("hopper", asked)
        assert kernel.backward_pass.short_q is not None
        results = kernel.forward(operands)
        dout = torch.randn_like(results.out)
        assert_exact(kernel.backward(operands, results, Cotangents(dout)), asked, operands, dout)


@pytest.mark.parametrize("grads", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)])
def test_only_what_requires_grad_is_computed(grads):
    asked, operands = posed(rows=300, grads=grads)
    kernel = kernel_of("hopper", asked)
    results = kernel.forward(operands)
    dout = torch.randn_like(results.out)
    gradients, right = kernel.backward(operands, results, Cotangents(dout)), exact(asked, operands, dout)
    for on, part in zip(grads, ("query", "key", "value"), strict=True):
        a, b = getattr(gradients, part), getattr(right, part)
        assert (a is not None) == on
        if on:
            assert (a.double() - b).norm() <= 8e-3 * b.norm()


def test_a_cotangent_of_one_number_spread_over_a_tensor():
    asked, operands = posed(rows=300, grads=ALL)
    kernel = kernel_of("hopper", asked)
    results = kernel.forward(operands)
    dout = torch.ones((), device="cuda", dtype=results.out.dtype).expand(results.out.shape)
    gradients, right = kernel.backward(operands, results, Cotangents(dout)), exact(asked, operands, dout)
    assert (gradients.value.double() - right.value).norm() <= 8e-3 * right.value.norm()


@pytest.mark.parametrize("name", ["plain", "causal, D 64", "grouped heads, causal", "D 192", "dropout, D 64", "D 64, Dv 128"])
def test_gradients_side_by_side_have_the_bits_of_those_apart(name):
    case = {"causal, D 64": {"mask": masks.causal(), "dim": 64}, "dropout, D 64": {"dropout": 0.2, "dim": 64}, **CASES}[name]
    asked, operands = posed(grads=ALL, **{**case, "rows": 700, "keys": 700})
    kernel = kernel_of("hopper", asked)
    results = kernel.forward(operands)
    dout = torch.randn_like(results.out)
    apart = kernel.backward(operands, results, Cotangents(dout))
    for _ in range(2):
        joined = kernel.backward(replace(operands, program=Program(joined=True)), results, Cotangents(dout))
        step = sum(t.shape[1] * t.shape[3] for t in (joined.query, joined.key, joined.value))
        for part in ("query", "key", "value"):
            assert torch.equal(getattr(apart, part), getattr(joined, part)), part
            assert getattr(joined, part).stride(2) == step
