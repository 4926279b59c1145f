"""`foci.scaled_dot_product_attention` against torch's math path, forward and backward: ranks, heads, scales, dtypes, autocast."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from by_formula import BACKENDS, check, math_path, use
from drawn import rand

import foci

SHAPES = [
    ((5, 8), (7, 8), (7, 6)),
    ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)),
    ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
    ((1, 2, 1, 2, 3, 4), (1, 2, 1, 2, 5, 4), (1, 2, 1, 2, 5, 4)),
    # leading dims broadcast
    ((2, 1, 5, 8), (1, 3, 7, 8), (2, 3, 7, 4)),
    ((2, 3, 5, 8), (7, 8), (3, 7, 8)),
    ((5, 8), (2, 3, 7, 8), (3, 7, 8)),
    ((3, 5, 8), (1, 7, 8), (2, 3, 7, 8)),
    ((2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 8)),
    ((2, 1, 3, 5, 8), (4, 1, 7, 8), (1, 1, 1, 7, 8)),
    ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    ((2, 4, 5, 8), (4, 2, 8), (4, 2, 8)),
    ((2, 4, 5, 8), (2, 1, 7, 8), (2, 4, 7, 8)),
]


# SDPA-01, SDPA-02
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_dims_and_broadcasting(shapes, backend):
    check(*(rand(*s, seed=n) for n, s in enumerate(shapes)), backend=backend)


# SDPA-01, SDPA-05
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 5), (5, 9), (9, 5), (1, 6), (6, 1), (300, 260)], ids=str)
def test_lengths_and_causal(lengths, is_causal, dtype):
    q, kv = lengths
    check(
        rand(1, 2, q, 8, dtype=dtype), rand(1, 2, kv, 8, dtype=dtype, seed=1), rand(1, 2, kv, 8, dtype=dtype, seed=2), is_causal=is_causal
    )


# SDPA-11
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (6, 3), (4, 4)], ids=str)
@pytest.mark.parametrize("dims", [3, 4, 5])
def test_grouped_heads(dims, heads, backend):
    lead = {3: (), 4: (2,), 5: (2, 2)}[dims]
    check(
        rand(*lead, heads[0], 5, 8), rand(*lead, heads[1], 7, 8, seed=1), rand(*lead, heads[1], 7, 4, seed=2), backend=backend, is_causal=True, enable_gqa=True,
    )  # fmt: skip


# SDPA-11
def test_grouped_heads_differ_for_key_and_value():
    check(rand(2, 6, 5, 8), rand(2, 3, 7, 8, seed=1), rand(2, 2, 7, 8, seed=2), enable_gqa=True)
    check(rand(2, 6, 5, 8), rand(2, 1, 7, 8, seed=1), rand(2, 6, 7, 8, seed=2), enable_gqa=True)


# SDPA-07
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [None, 1.0, 0.3, -0.7, 1e-8, 1e4, -1e4, 0.0, 2])
def test_scale(scale, backend):
    check(rand(1, 2, 5, 8), rand(1, 2, 7, 8, seed=1), rand(1, 2, 7, 8, seed=2), backend=backend, scale=scale)


# SDPA-10
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("widths", [(1, 1), (3, 5), (7, 1), (1, 9), (33, 64), (129, 17), (512, 257)], ids=str)
def test_head_dims(widths, backend):
    check(rand(1, 2, 5, widths[0]), rand(1, 2, 7, widths[0], seed=1), rand(1, 2, 7, widths[1], seed=2), backend=backend)


# SDPA-14
@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_values(backend):
    q = torch.full((1, 1, 8, 64), 133120.0, dtype=torch.bfloat16, requires_grad=True)
    v = torch.randn(1, 1, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    with use(backend):
        out = foci.scaled_dot_product_attention(q, q, v)
        out.float().sum().backward()
    assert bool(out.isfinite().all()) and bool(v.grad.isfinite().all())
    torch.testing.assert_close(out.float(), v.detach().float().mean(2, keepdim=True).expand_as(out), atol=2e-2, rtol=2e-2)


# SDPA-09, SDPA-20
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype, backend):
    exact = [rand(2, 4, n, 16, seed=n) for n in (33, 40, 40)]
    q, k, v = (t.to(dtype).requires_grad_() for t in exact)
    floor = torch.finfo(dtype).eps
    with use(backend):
        out = foci.scaled_dot_product_attention(q, k, v, is_causal=True)
        _, aux = foci.attention(q, k, v, return_aux=foci.AuxRequest(lse=True))
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert out.dtype == dtype and aux.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    plain = math_path(*inputs, is_causal=True)
    plain_grads = torch.autograd.grad(plain, inputs, torch.ones_like(plain))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    truth = math_path(*wide, is_causal=True)
    truth_grads = torch.autograd.grad(truth, wide, torch.ones_like(truth))
    half = dtype in (torch.float16, torch.bfloat16)
    factors = (1.1, 2.5, 4, 4) if half else (10, 10, 10, 10)
    for factor, got, formula, true in zip(factors, (out, *grads), (plain, *plain_grads), (truth, *truth_grads), strict=True):
        assert got.dtype == dtype
        allowed = factor * (formula.double() - true).abs().max() + 4 * floor * true.abs().max()
        assert (got.double() - true).abs().max() <= allowed


# SDPA-09
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float16, torch.float16),
        (torch.float32, torch.float32, torch.float64),
        (torch.bfloat16, torch.float16, torch.bfloat16),
    ],
    ids=str,
)
def test_mixed_dtypes_are_refused(dtypes):
    tensors = [torch.randn(1, 2, 4, 8).to(d) for d in dtypes]
    names = ".*".join(f"{n} {str(d).removeprefix('torch.')}" for n, d in zip(("query", "key", "value"), dtypes, strict=True))
    with pytest.raises(ValueError, match=f"one dtype; got {names}"):
        foci.scaled_dot_product_attention(*tensors)


# SDPA-16
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strict", [False, True])
def test_repeatable_gradients(strict, backend):
    q, k, v = (torch.randn(2, 4, 65, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(4, 1, 65, requires_grad=True)

    def run():
        with use(backend):
            out = foci.scaled_dot_product_attention(q, k, v, bias)
            return out, *torch.autograd.grad(out, (q, k, v, bias), torch.ones_like(out))

    torch.use_deterministic_algorithms(strict)
    try:
        first, second = run(), run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# SDPA-17
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", dtype=dtype):
        out, wanted = foci.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v)
        wide = foci.scaled_dot_product_attention(q.double(), k.double(), v.double())
        mixed = foci.scaled_dot_product_attention(q, k.bfloat16(), v.half())
    assert out.dtype == wanted.dtype == mixed.dtype == dtype and wide.dtype == torch.float64
    torch.testing.assert_close(out, wanted, atol=2e-2, rtol=2e-2)
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32
    with torch.autocast("cpu", enabled=False):
        assert foci.scaled_dot_product_attention(q, k, v).dtype == torch.float32


def test_inputs_are_left_alone():
    tensors = [torch.randn(1, 2, 16, 8) for _ in range(3)]
    mask = torch.randn(16, 16)
    copies = [t.clone() for t in (*tensors, mask)]
    for backend in BACKENDS:
        with use(backend):
            foci.scaled_dot_product_attention(*tensors, mask)
    assert all(torch.equal(a, b) for a, b in zip((*tensors, mask), copies, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    with mode():
        out = foci.scaled_dot_product_attention(q, q, q)
    assert not out.requires_grad
    torch.testing.assert_close(out, math_path(q, q, q).detach())


def test_ordinary_use_warns_of_nothing():
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        foci.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


# SDPA-20
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend):
    q, k, v = (rand(1, 2, n, 3, seed=n).requires_grad_() for n in (3, 4, 4))
    bias = rand(2, 1, 4).requires_grad_()
    with use(backend):
        assert torch.autograd.gradcheck(lambda *t: foci.scaled_dot_product_attention(*t), (q, k, v, bias))
        assert torch.autograd.gradcheck(lambda *t: foci.scaled_dot_product_attention(*t, is_causal=True), (q, k, v))


# SDPA-01
@pytest.mark.parametrize("entry", ["sdpa", "attention", "flex", "varlen", "nested", "compiled"])
def test_no_head_dim_gives_equal_weights(entry):
    """Products of no numbers are 0, as in torch: a score function and a mask see zeros, gradients of query and key are empty."""
    q, k = torch.zeros(2, 4, 5, 0, requires_grad=True), torch.zeros(2, 4, 5, 0, requires_grad=True)
    v = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    means = torch.cumsum(v, 2) / torch.arange(1, 6)[:, None]  # of the keys up to the query
    causal, offsets = foci.masks.causal(), torch.tensor([0, 5, 10])
    packed = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
    nested = [torch.nested.nested_tensor_from_jagged(t, offsets, min_seqlen=5, max_seqlen=5).transpose(1, 2) for t in packed]
    out = {
        "sdpa": lambda: foci.scaled_dot_product_attention(q, k, v, is_causal=True),
        "attention": lambda: foci.attention(q, k, v, mask=causal),
        "flex": lambda: foci.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf)),
        "varlen": lambda: foci.varlen_attn(*packed, offsets, offsets, 5, 5, mask=causal).view(2, 5, 4, 8).transpose(1, 2),
        "nested": lambda: torch.stack(foci.attention(*nested, mask=causal).unbind()),
        # one length: the head dim is what is special here
        "compiled": lambda: torch.compile(lambda *t: foci.attention(*t, mask=causal), fullgraph=True, backend="aot_eager")(q, k, v),
    }[entry]()
    torch.testing.assert_close(out, means)
    gradients = torch.autograd.grad(out.sin().sum(), (q, k, v))
    assert [tuple(g.shape) for g in gradients[:2]] == [(2, 4, 5, 0)] * 2
    torch.testing.assert_close(gradients[2], torch.autograd.grad(means.sin().sum(), v)[0])
    with torch.no_grad():  # torch 2.12 gives zeros here, other releases what stands below
        torch.testing.assert_close(foci.scaled_dot_product_attention(q, k, v), v.mean(2, keepdim=True).expand_as(v))
