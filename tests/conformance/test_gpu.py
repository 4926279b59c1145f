"""What a GPU alone shows of the operator and the kernels: tracers, autocast, graphs, streams, odd and huge sizes."""

from __future__ import annotations

import pytest
import torch

import foci
from foci import masks, scores
from foci.operator.op_schema import flatten
from foci.prepare import Extras, prepare
from foci.problem import Outputs

pytestmark = pytest.mark.gpu

BACKENDS = ["triton", *(["hopper"] if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else [])]
HALF = torch.bfloat16


def inputs(b=2, hq=4, hkv=2, sq=130, skv=200, d=64, dv=None, dtype=HALF, grad=True):
    generator = torch.Generator("cuda").manual_seed(b + hq + sq + d)
    shapes = ((b, hq, sq, d), (b, hkv, skv, d), (b, hkv, skv, dv or d))
    return tuple(torch.randn(shape, device="cuda", dtype=dtype, generator=generator).requires_grad_(grad) for shape in shapes)


def slopes(heads=4):
    return torch.linspace(0.1, 0.6, heads, device="cuda")


VARIANTS = {
    "plain": dict,
    "causal": lambda: {"mask": masks.causal()},
    "window softcap": lambda: {"mask": masks.window(33), "score": scores.softcap(20.0)},
    "learned alibi": lambda: {"mask": masks.causal(), "score": alibi(slopes().requires_grad_())},
    "documents": lambda: {"mask": masks.document(torch.arange(200, device="cuda") // 37)},
    "dropout": lambda: {"dropout_p": 0.3},
}


def alibi(learned):
    return foci.Score(lambda s, b, h, q, kv: s + learned[h] * (kv - q))


def run(options, tensors):
    """Output, and the gradients of query, key and value."""
    out = foci.attention(*tensors, **options)
    return out, *torch.autograd.grad(out.float().sin().sum(), tensors)


def close(actual, wanted, dtype=HALF):
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 6e-3, torch.float32: 3e-4}[dtype]
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance * max(1.0, float(b.float().abs().max())))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend, name):
    options = VARIANTS[name]()
    mask, score = options.get("mask"), options.get("score")
    extras = Extras(Outputs(lse=True), dropout_p=options.get("dropout_p", 0.0))
    functions = (None if score is None else score.function, None if mask is None else mask.function)
    formula, operands = prepare(inputs(sq=40, skv=200, dtype=HALF if backend == "hopper" else torch.float32), *functions, extras)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.foci.attention.default, flatten(formula, operands, (backend,)), test_utils=checks)


# SDPA-21, FLEX-01
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["causal", "window softcap", "learned alibi"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_as_eager(backend, name, compiler):
    options, tensors = VARIANTS[name](), inputs()

    def model(q, k, v):
        return foci.attention(q * 1.5, k, v, **options).cos()

    # one length: the grid has the lengths; this has the variants
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    with foci.use(backend), foci.observe() as log:
        wanted, actual = model(*tensors), compiled(*tensors)
        gradients = [torch.autograd.grad(out.float().sum(), tensors) for out in (actual, wanted)]
    assert {call.backend for call in log.calls} == {backend}
    close((actual, *gradients[0]), (wanted, *gradients[1]))
    torch._dynamo.reset()


# SDPA-17
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_casts_as_torch_does(backend):
    tensors = inputs(dtype=torch.float32, hkv=4, sq=200)
    with torch.autocast("cuda", dtype=torch.float16), foci.use(backend), foci.observe() as log:
        actual = foci.scaled_dot_product_attention(*tensors, is_causal=True)
        wanted = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
        gradients = [torch.autograd.grad(out.float().sum(), tensors) for out in (actual, wanted)]
    assert actual.dtype == wanted.dtype == torch.float16
    assert log.calls[0].problem.dtype == torch.float16
    assert all(g.dtype == torch.float32 for g in gradients[0])
    close((actual, *gradients[0]), (wanted, *gradients[1]), torch.float16)


# SDPA-21
@pytest.mark.parametrize("name", ["plain", "causal", "window softcap", "learned alibi", "documents"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_of_both_passes_replays_with_new_inputs(backend, name):
    options, tensors, new_inputs = VARIANTS[name](), inputs(), inputs(grad=False)
    with foci.use(backend):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run(options, tensors)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(options, tensors)
        with torch.no_grad():
            for t, other in zip(tensors, new_inputs):
                t.copy_(other * 0.7)
        graph.replay()
        torch.cuda.synchronize()
        wanted = run(options, tensors)
    assert all(torch.equal(a, b) for a, b in zip(captured, wanted))


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_streams(backend):
    calls = [(VARIANTS[name](), inputs(sq=n, skv=200)) for name, n in (("causal", 130), ("window softcap", 130))]
    with foci.use(backend):
        alone = [run(*call) for call in calls]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in calls]
        for _ in range(20):
            together = []
            for stream, call in zip(streams, calls):
                with torch.cuda.stream(stream):
                    together.append(run(*call))
            torch.cuda.synchronize()
            for actual, wanted in zip(together, alone):
                assert all(torch.equal(a, b) for a, b in zip(actual, wanted))


# SDPA-10
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("sq", "skv", "d", "dv"),
    [
        (1, 1, 64, 64),
        (17, 33, 8, 8),
        (63, 65, 40, 40),
        (65, 63, 72, 24),
        (127, 129, 80, 96),
        (255, 257, 100, 52),
        (31, 1025, 160, 160),
        (129, 300, 200, 72),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_sizes(backend, sq, skv, d, dv, dtype):
    if backend == "hopper" and (dtype == torch.float32 or (d | dv) % 8):
        pytest.skip("declined in words: see tests/backends/hopper/test_planning.py")
    tensors = inputs(1, 4, 2, sq, skv, d, dv, dtype)
    options = {"mask": masks.causal_lower_right(), "score": scores.softcap(15.0)}
    with foci.use(backend):
        actual = run(options, tensors)
    with foci.use("reference"):
        close(actual, run(options, tensors), dtype)


# SDPA-13
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_heads(backend):
    tensors = inputs(70000, 1, 1, 16, 16, 32)
    with foci.use(backend):
        full = run({"mask": masks.causal()}, tensors)
        last = run({"mask": masks.causal()}, tuple(t[-5:].detach().requires_grad_() for t in tensors))
    for a, b in zip(full, last):
        assert torch.equal(a[-5:], b)


# SDPA-13
@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_more_than_two_to_the_31_elements(backend):
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    options, shape = {"mask": masks.window(64)}, (9, 32, 32, 65536, 65536, 128)
    tensors = inputs(*shape)
    assert tensors[0].numel() > 2**31
    with foci.use(backend):
        out = foci.attention(*tensors, **options)
        grad = torch.full_like(out, 0.5)
        full = (out, *torch.autograd.grad(out, tensors, grad))
        part = tuple(t[-1:, -1:].detach().requires_grad_() for t in tensors)
        out = foci.attention(*part, **options)
        last = (out, *torch.autograd.grad(out, part, torch.full_like(out, 0.5)))
    for a, b in zip(full, last):
        assert torch.equal(a[-1:, -1:], b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_sequences_against_a_window_of_them(backend):
    """A causal row depends on nothing behind it: the first rows of a long sequence are those of a short one."""
    tensors = inputs(1, 2, 1, 30000, 30000, 128, grad=False)
    with foci.use(backend):
        full = foci.attention(*tensors, mask=masks.causal())
        first = foci.attention(*(t[:, :, :777] for t in tensors), mask=masks.causal())
    close((full[:, :, :777],), (first,))


# SDPA-16
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_repeats_over_many_runs(backend, name):
    options, tensors = VARIANTS[name](), inputs(sq=200)
    with foci.use(backend):
        torch.manual_seed(1)
        first = run(options, tensors)
        for _ in range(10):
            torch.manual_seed(1)
            assert all(torch.equal(a, b) for a, b in zip(first, run(options, tensors)))
