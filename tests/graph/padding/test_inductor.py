"""The passes through Inductor's hooks: the code that it writes has the strides, and no copies."""

import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from machines import machine
from torch._inductor import config
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code

import foci
from foci.graph.padding.options import options

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and not torch.cuda.is_available(), reason="Inductor needs a C++ compiler")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def no_caches():
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        yield


def allocations(code):
    """(sizes, strides) of every buffer."""
    found = re.findall(r"empty_strided_\w+\(\((.*?)\), \((.*?)\), ", code)
    return [tuple(tuple(int(n) for n in part.split(",") if n.strip()) for part in pair) for pair in found]


def kernels(code):
    """Calls of generated kernels, not of extern ones."""
    call = code[code.index("def call(") :].split("def get_args")[0]
    return len(re.findall(r"^\s+(?:cpp_fused|triton_)\w*(?:\.run)?\(", call, re.M))


def test_linear_and_cross_entropy():
    layer = torch.nn.Linear(64, 2047, device=DEVICE)
    x, t = torch.randn(256, 64, device=DEVICE, requires_grad=True), torch.randint(0, 2047, (256,), device=DEVICE)

    def loss(x):
        return F.cross_entropy(layer(x), t)

    leaves = (x, layer.weight, layer.bias)
    expected = torch.autograd.grad(loss(x), leaves)
    with foci.observe() as log:
        _, (forward, backward) = run_fw_bw_and_get_code(lambda: torch.compile(loss, options=options(machine()))(x))
    for leaf, gradient in zip(leaves, expected):
        torch.testing.assert_close(leaf.grad, gradient, rtol=2e-3, atol=1e-5)
        assert leaf.grad.stride() == gradient.stride()
    for code in (forward, backward):
        logits = {strides for sizes, strides in allocations(code) if sizes == (256, 2047)}
        assert logits <= {(2048, 1)}
        assert "extern_kernels.addmm" not in code
    assert "extern_kernels.mm(" in forward
    assert re.search(r"\(256, 2047\), \(2048, 1\)", backward)
    assert [padding.how for padding in log.paddings] == ["in place", "in place"]


def test_no_kernel_more_than_for_a_good_shape():
    def step(x, w, v):
        return torch.softmax(x @ w, 1) @ v

    counts = []
    for n in (2047, 2048):
        torch._dynamo.reset()
        x, w, v = (torch.randn(*size, device=DEVICE) for size in ((128, 64), (64, n), (n, 64)))
        w = torch.randn(64, 2048, device=DEVICE)[:, :n]  # aligned from outside
        out, (code,) = run_and_get_code(torch.compile(step, options=options(machine())), x, w, v)
        torch.testing.assert_close(out, step(x, w, v), rtol=2e-3, atol=1e-3)
        assert all(strides == (2048, 1) for sizes, strides in allocations(code) if sizes == (128, n))
        counts.append((kernels(code), code.count("extern_kernels.mm(")))
    assert counts[0] == counts[1]


def test_batched_products_concatenation_and_views():
    def step(q, k, v, w):
        weights = torch.softmax(q @ k.mT, -1)
        return torch.cat([weights @ v, weights], -1).flatten(0, 1) @ w

    q, k, v, w = (torch.randn(*size, device=DEVICE) for size in ((4, 1023, 16), (4, 1023, 16), (4, 1023, 16), (1039, 32)))
    out, (code,) = run_and_get_code(torch.compile(step, options=options(machine())), q, k, v, w)
    torch.testing.assert_close(out, step(q, k, v, w), rtol=2e-3, atol=1e-3)
    assert {strides for sizes, strides in allocations(code) if sizes == (4, 1023, 1023)} == {(1023 * 1024, 1024, 1)}
    (cat,) = {strides for sizes, strides in allocations(code) if sizes == (4, 1023, 1039)}
    assert cat == (1023 * cat[1], cat[1], 1)
    assert cat[1] % 4 == 0


@pytest.mark.parametrize("which", ["rows", "columns"])
def test_a_symbolic_size(which):
    def step(x, w):
        return torch.softmax(x @ w, 1) @ w.t()

    called = torch.compile(step, options=options(machine()))
    codes = []
    for size in (100, 229):
        x = torch.randn(size if which == "rows" else 64, 64, device=DEVICE)
        w = torch.randn(64, 2047 if which == "rows" else 1900 + size + 1, device=DEVICE)[:, : 2047 if which == "rows" else 1900 + size]
        torch._dynamo.mark_dynamic(*((x, 0) if which == "rows" else (w, 1)))
        out, code = run_and_get_code(called, x, w)
        torch.testing.assert_close(out, step(x, w), rtol=2e-3, atol=1e-3)
        codes += code
    assert len(codes) == 1


def test_what_the_user_sees_keeps_its_strides():
    def both(x, w, b):
        logits = F.linear(x, w, b)
        return logits, logits.logsumexp(1)

    inputs = (torch.randn(256, 64, device=DEVICE), torch.randn(2047, 64, device=DEVICE), torch.randn(2047, device=DEVICE))
    got = torch.compile(both, options=options(machine()))(*inputs)
    for mine, theirs in zip(got, both(*inputs)):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=1e-3)
        assert mine.stride() == theirs.stride()


def test_memory_is_what_the_report_says():
    def step(x, w):
        return torch.softmax(x @ w, 1).sum(0)

    x, w = torch.randn(256, 64, device=DEVICE), torch.randn(64, 2048, device=DEVICE)[:, :2047]
    taken = []
    for settings in (None, options(machine())):
        torch._dynamo.reset()
        with foci.observe() as log, config.patch(comprehensive_padding=False):
            _, (code,) = run_and_get_code(torch.compile(step, options=settings), x, w)
        taken.append(
            sum((sizes[0] - 1) * strides[0] + sizes[-1] for sizes, strides in allocations(code) if len(sizes) == 2 and sizes[1] == 2047)
        )
    assert (taken[1] - taken[0]) * 4 == sum(padding.bytes for padding in log.paddings)


@pytest.mark.gpu
def test_by_rows_on_a_gpu():
    a, b = torch.randn(1024, 2046, device="cuda", dtype=torch.float16), torch.randn(2046, 256, device="cuda", dtype=torch.float16)
    with foci.observe() as log:
        out = torch.compile(torch.mm, options=options(machine()))(a, b)
    assert [padding.how for padding in log.paddings] == ["by rows"]
    torch.testing.assert_close(out, a @ b, rtol=2e-3, atol=0.2)
