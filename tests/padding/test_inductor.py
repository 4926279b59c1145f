"""The passes through Inductor's hooks: the code that it writes has the strides, and no copies."""

import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from machines import machine
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code

import foci
from compiled import several
from foci.padding.options import options

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and not torch.cuda.is_available(), reason="Inductor needs a C++ compiler")

# padded rows of odd length are as slow as misaligned ones, as on GPUs, and copies cost nothing
MACHINE = machine(odd=3.0, bandwidth=1e16)
# odd rows are slow only where they are misaligned
STRIDED = machine(bandwidth=1e16)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def no_caches():
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        yield


def allocations(code):
    """(sizes, strides) of every buffer."""
    matches = re.findall(r"empty_strided_\w+\(\((.*?)\), \((.*?)\), ", code)
    return [tuple(tuple(int(n) for n in part.split(",") if n.strip()) for part in pair) for pair in matches]


def kernels(code):
    """Calls of generated kernels, not of extern ones."""
    call = code[code.index("def call(") :].split("def get_args")[0]
    return len(re.findall(r"^\s+(?:cpp_fused|triton_)\w*(?:\.run)?\(", call, re.M))


@pytest.mark.slow
def test_linear_and_cross_entropy_take_no_kernel_more_than_for_a_good_shape_but_the_copy_of_the_weight():
    layer = torch.nn.Linear(64, 2047, device=DEVICE)
    x, t = torch.randn(256, 64, device=DEVICE, requires_grad=True), torch.randint(0, 2047, (256,), device=DEVICE)

    def loss(x):
        return F.cross_entropy(layer(x), t)

    leaves = (x, layer.weight, layer.bias)
    expected = torch.autograd.grad(loss(x), leaves)
    with foci.observe() as log:
        # one length: it reads the code of one graph
        _, (forward, backward) = run_fw_bw_and_get_code(lambda: torch.compile(loss, options=options(MACHINE))(x))
    for leaf, gradient in zip(leaves, expected):
        torch.testing.assert_close(leaf.grad, gradient, rtol=2e-3, atol=1e-5)
        assert leaf.grad.stride() == gradient.stride()
    buffer_sizes = {sizes for code in (forward, backward) for sizes, _ in allocations(code) if sizes[-1:] in ((2047,), (2048,))}
    assert buffer_sizes == {(256, 2048), (1, 2048), (2048,)}
    assert "(2047, 64), (64, 1), 0)" in backward  # the weight's gradient, cut without a copy
    assert {padding.how for padding in log.paddings} == {"in place", "copied"}

    torch._dynamo.reset()
    layer = torch.nn.Linear(64, 2048, device=DEVICE)
    x = x.detach().requires_grad_()
    _, good = run_fw_bw_and_get_code(lambda: torch.compile(lambda x: F.cross_entropy(layer(x), t), options=options(MACHINE))(x))
    (fewer, products), of_backward = ((kernels(code), code.count("extern_kernels.")) for code in good)
    assert kernels(forward) - fewer in (1, 2)  # the padded weight, and the bias beside it
    assert forward.count("extern_kernels.") == products
    assert (kernels(backward), backward.count("extern_kernels.")) == of_backward


def test_a_cut_product_takes_one_small_kernel_more():
    counts = {}
    for k in (2047, 2048):
        torch._dynamo.reset()
        r, c, b = (torch.randn(*size, device=DEVICE) for size in ((64,), (k,), (k, 16)))
        # one length: it reads the code of one graph
        step = torch.compile(lambda r, c, b: torch.relu(r[:, None] + c) @ b, options=options(machine(odd=3.0, bandwidth=1e12)))
        out, (code,) = run_and_get_code(step, r, c, b)
        torch.testing.assert_close(out, torch.relu(r[:, None] + c) @ b, rtol=2e-3, atol=2e-3)
        counts[k] = kernels(code), code.count("extern_kernels.mm("), len(allocations(code))
    assert counts[2047] == (2, 1, 2)
    assert counts[2048] == (1, 1, 2)


def test_padded_strides_without_a_copy():
    def step(x, w, v):
        return torch.softmax(x @ w, 1) @ v

    counts = []
    for n in (2047, 2048):
        torch._dynamo.reset()
        x, v = torch.randn(128, 64, device=DEVICE), torch.randn(n, 64, device=DEVICE)
        w = torch.randn(64, 2048, device=DEVICE)[:, :n]  # aligned from outside
        # one length: it reads the code of one graph
        out, (code,) = run_and_get_code(torch.compile(step, options={**options(STRIDED), "joint_custom_pre_pass": None}), x, w, v)
        torch.testing.assert_close(out, step(x, w, v), rtol=2e-3, atol=1e-3)
        assert all(strides == (2048, 1) for sizes, strides in allocations(code) if sizes == (128, n))
        counts.append((kernels(code), code.count("extern_kernels.mm(")))
    assert counts[0] == counts[1]


# PAD-03
def test_batched_products_concatenation_and_views():
    def step(q, k, v, w):
        weights = torch.softmax(q @ k.mT, -1)
        return torch.cat([weights @ v, weights], -1).flatten(0, 1) @ w

    q, k, v, w = (torch.randn(*size, device=DEVICE) for size in ((4, 1023, 16), (4, 1023, 16), (4, 1023, 16), (1039, 32)))
    settings = {**options(STRIDED), "joint_custom_pre_pass": None}
    # one length: it reads the code of one graph
    out, (code,) = run_and_get_code(torch.compile(step, options=settings), q, k, v, w)
    torch.testing.assert_close(out, step(q, k, v, w), rtol=2e-3, atol=1e-3)
    assert {strides for sizes, strides in allocations(code) if sizes == (4, 1023, 1023)} == {(1023 * 1024, 1024, 1)}
    (cat,) = {strides for sizes, strides in allocations(code) if sizes == (4, 1023, 1039)}
    assert cat == (1023 * cat[1], cat[1], 1)
    assert cat[1] % 4 == 0


# PAD-03
def test_both_passes_of_a_softmax_write_padded_rows():
    def step(q, k, v):
        return torch.softmax(q @ k.mT, -1) @ v

    leaves = [torch.randn(2, 1023, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
    expected = torch.autograd.grad(step(*leaves).sum(), leaves)
    settings = {**options(STRIDED), "joint_custom_pre_pass": None}
    # one length: it reads the code of one graph
    _, codes = run_fw_bw_and_get_code(lambda: torch.compile(step, options=settings)(*leaves))
    assert len(codes) == 2
    for code in codes:
        assert {strides for sizes, strides in allocations(code) if sizes == (2, 1023, 1023)} == {(1023 * 1024, 1024, 1)}
    for leaf, gradient in zip(leaves, expected):
        torch.testing.assert_close(leaf.grad, gradient, rtol=2e-3, atol=1e-4)


# PAD-06
@pytest.mark.parametrize("which", ["rows", "columns"])
def test_a_symbolic_size(which):
    def step(x, w):
        return torch.softmax(x @ w, 1) @ w.t()

    called = torch.compile(step, options=options(STRIDED))
    counters.clear()
    paddings = []
    for size in several(100, 229, 64):
        n = 2047 if which == "rows" else 1901 + size * 2
        x, w = torch.randn(size if which == "rows" else 64, 64, device=DEVICE), torch.randn(64, n, device=DEVICE)
        torch._dynamo.mark_dynamic(*((x, 0) if which == "rows" else (w, 1)))
        with foci.observe() as log:
            torch.testing.assert_close(called(x, w), step(x, w), rtol=2e-3, atol=1e-3)
        paddings += log.paddings
    assert counters["stats"]["unique_graphs"] == 1
    assert "in place" in {padding.how for padding in paddings}


# PAD-03
def test_what_the_user_sees_keeps_its_strides():
    def both(x, w, b):
        logits = F.linear(x, w, b)
        return logits, logits.logsumexp(1)

    inputs = (torch.randn(256, 64, device=DEVICE), torch.randn(2047, 64, device=DEVICE), torch.randn(2047, device=DEVICE))
    # one length: strides through Inductor; test_passes.py has several sizes
    got = torch.compile(both, options=options(MACHINE))(*inputs)
    for mine, theirs in zip(got, both(*inputs)):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=1e-3)
        assert mine.stride() == theirs.stride()


def test_memory_is_what_the_report_says():
    def step(x, w):
        return torch.softmax(x @ w, 1).sum(0)

    x, w = torch.randn(256, 64, device=DEVICE), torch.randn(64, 2048, device=DEVICE)[:, :2047]
    taken = []
    for settings in ({"shape_padding": False}, {**options(STRIDED), "joint_custom_pre_pass": None}):
        torch._dynamo.reset()
        with foci.observe() as log, config.patch(comprehensive_padding=False):
            # one length: it reads the code of one graph
            _, (code,) = run_and_get_code(torch.compile(step, options=settings), x, w)
        logits = [strides for sizes, strides in allocations(code) if sizes == (256, 2047)]
        taken.append(255 * logits[0][0] + 2047)
    assert (taken[1] - taken[0]) * 4 == sum(padding.bytes for padding in log.paddings)


@pytest.mark.gpu
def test_by_rows_on_a_gpu():
    a, b = torch.randn(1024, 2046, device="cuda", dtype=torch.float16), torch.randn(2046, 256, device="cuda", dtype=torch.float16)
    with foci.observe() as log:
        # one length: which kernel a GPU takes depends on it
        out = torch.compile(torch.mm, options=options(machine(odd=3.0, bandwidth=1e12)))(a, b)
    assert "by rows" in {padding.how for padding in log.paddings}
    torch.testing.assert_close(out, a @ b, rtol=2e-3, atol=0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
def test_into_rows_on_a_gpu(biased):
    x, w = torch.randn(1024, 64, device="cuda", dtype=torch.bfloat16), torch.randn(2047, 64, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(2047, device="cuda", dtype=torch.bfloat16) if biased else None
    with foci.observe() as log:
        # one length: which kernel a GPU takes depends on it
        out = torch.compile(F.linear, options=options(machine(1000.0, odd=1000.0)))(x, w, bias)
    assert "by rows" in {padding.how for padding in log.paddings}
    assert out.is_contiguous()
    torch.testing.assert_close(out, F.linear(x, w, bias), rtol=2e-2, atol=0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(256, 64, 2047), (1024, 2046, 256)], ids=["grown", "by rows"])
def test_cuda_graphs(sizes):
    m, k, n = sizes
    layer = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.float16)
    settings = {**options(machine(odd=3.0, bandwidth=1e12)), "triton.cudagraphs": True}
    # one length: a CUDA graph has one
    called = torch.compile(lambda x: F.linear(x, layer.weight.view(n, k)).float().logsumexp(1), options=settings)
    for _ in range(4):  # warm-up, recording, replays
        x = torch.randn(m, k, device="cuda", dtype=torch.float16)
        with foci.observe(), torch.no_grad():
            torch.testing.assert_close(called(x).clone(), F.linear(x, layer.weight).float().logsumexp(1), rtol=1e-2, atol=1e-2)
    called(x).sum().backward()
    expected = torch.autograd.grad(F.linear(x, layer.weight).float().logsumexp(1).sum(), layer.weight)[0]
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-2, atol=1e-2)


def test_frozen_weights_are_padded_while_compiling():
    counts = []
    for n in (2047, 2048):
        model = torch.nn.Sequential(torch.nn.Linear(64, n), torch.nn.Tanh(), torch.nn.Linear(n, 64)).to(DEVICE).eval()
        x = torch.randn(128, 64, device=DEVICE)
        torch._dynamo.reset()
        with config.patch(freezing=True), torch.no_grad():
            # one length: it reads the code of one graph
            out, (code,) = run_and_get_code(torch.compile(model, options=options(MACHINE)), x)
        torch.testing.assert_close(out, model(x), rtol=2e-3, atol=1e-3)
        counts.append(kernels(code))
        assert "2047" not in code[code.index("def call(") :].split("def get_args")[0]
    assert counts[0] == counts[1]
