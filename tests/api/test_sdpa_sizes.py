"""`foci.scaled_dot_product_attention` of nothing, of many entries, of long tensors and of any strides."""

import os

import pytest
import torch
from by_formula import BACKENDS, check, math_path, use
from drawn import rand

import foci
from foci.backends.cpu import build


def packed():
    return rand(2, 6, 3, 4, 8).unbind(2)


STRIDES = {
    "last stride not 1": lambda: tuple(rand(2, 4, 8, 6, seed=n).mT for n in range(3)),
    "packed": lambda: tuple(t.transpose(1, 2) for t in packed()),
    "every second": lambda: tuple(rand(2, 4, 12, 16, seed=n)[:, :, ::2, ::2] for n in range(3)),
    "zero strides on key and value": lambda: (
        rand(2, 4, 6, 8),
        rand(1, 1, 6, 8, seed=1).expand(2, 4, 6, 8),
        rand(2, 1, 1, 8, seed=2).expand(2, 4, 6, 8),
    ),
    "storage offsets": lambda: tuple(rand(3, 5, 7, 9, seed=n)[1:, 1:, 1:, 1:] for n in range(3)),
    "odd strides of singletons": lambda: tuple(torch.as_strided(rand(48, seed=n), (1, 1, 6, 8), (5, 3, 8, 1)) for n in range(3)),
    "[B, S, H, D]": lambda: tuple(rand(2, 6, 4, 8, seed=n).transpose(1, 2) for n in range(3)),
    "flipped": lambda: tuple(rand(2, 4, 6, 8, seed=n).flip(-2) for n in range(3)),
}


# SDPA-12
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", STRIDES)
def test_strides(name, backend):
    tensors = STRIDES[name]()
    with use(backend):
        check(*tensors, backend=backend)
        check(*tensors, backend=backend, is_causal=True)
        # the very views, not detached copies of them
        torch.testing.assert_close(foci.scaled_dot_product_attention(*tensors), math_path(*tensors))


# SDPA-12
def test_gradient_of_a_packed_projection():
    x = rand(2, 6, 96).requires_grad_()

    def attend(function):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in x.chunk(3, dim=-1))
        return torch.autograd.grad(function(q, k, v, is_causal=True).square().sum(), x)

    torch.testing.assert_close(attend(foci.scaled_dot_product_attention), attend(math_path))


# SDPA-13
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "sizes",
    [(0, 2, 3, 4, 8, 8), (2, 0, 3, 4, 8, 8), (2, 2, 0, 4, 8, 8), (2, 2, 3, 0, 8, 8), (0, 0, 0, 0, 8, 8), (2, 2, 3, 4, 8, 0)],
    ids=str,
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_sizes(sizes, is_causal, backend):
    b, h, sq, skv, d, dv = sizes
    q, k, v = (t.requires_grad_() for t in (rand(b, h, sq, d), rand(b, h, skv, d), rand(b, h, skv, dv)))
    with use(backend):
        out = foci.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        _, aux = foci.attention(q, k, v, return_aux=foci.AuxRequest(lse=True, row_max=True, column_sums=True))
    assert out.shape == (b, h, sq, dv)
    assert not out.any()
    assert aux.lse.shape == (b, h, sq) and aux.row_max.shape == (b, h, sq) and aux.column_sums.shape == (b, h, skv)
    if skv == 0:
        assert bool((aux.lse == -torch.inf).all())
    out.sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad.shape == tensor.shape
        assert not tensor.grad.any()


# SDPA-13
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_batch_entries_and_heads(backend):
    q, k, v = (torch.randn(65537, 1, 2, 2, requires_grad=True) for _ in range(3))
    with use(backend):
        out = foci.scaled_dot_product_attention(q, k, v)
        out.sum().backward()
    torch.testing.assert_close(out, math_path(q, k, v))
    q, k, v = (torch.randn(1, 65540, 1, 2) for _ in range(3))
    with use(backend):
        torch.testing.assert_close(foci.scaled_dot_product_attention(q, k, v), v)


OPTIONS = {
    "bool mask": lambda s, t: {"attn_mask": torch.ones(s[3], s[4], dtype=torch.bool)},
    "float mask": lambda s, t: {"attn_mask": t(s[0], s[1], s[3], s[4])},
    "dropout": lambda s, t: {"dropout_p": 0.4},
}


# SDPA-13
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(0, 4, 2, 3, 4), (2, 0, 0, 3, 4), (2, 4, 2, 0, 4), (2, 4, 2, 3, 0)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_empty_sizes_with_masks_and_grouped_heads(name, sizes, backend):
    b, q_heads, kv_heads, sq, skv = sizes
    learned = [torch.randn(*shape, requires_grad=True) for shape in ((b, q_heads, sq, 8), (b, kv_heads, skv, 8), (b, kv_heads, skv, 6))]

    def leaf(*shape):
        learned.append(torch.randn(*shape, requires_grad=True))
        return learned[-1]

    options = OPTIONS[name](sizes, leaf)
    with use(backend):
        out = foci.scaled_dot_product_attention(*learned[:3], **options, enable_gqa=True)
    assert out.shape == (b, q_heads, sq, 6)
    assert not out.any()
    for tensor, gradient in zip(learned, torch.autograd.grad(out.sum(), learned, materialize_grads=True)):
        assert gradient.shape == tensor.shape
        assert not gradient.any()


# SDPA-13
@pytest.mark.parametrize(
    "backend", ["reference", "blocked", "cpu", "aten", *(["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]
)
@pytest.mark.parametrize("far", ["batch", "heads", "rows"])
def test_tensors_over_more_than_two_to_the_31_elements(far, backend):
    """Of which few are used, so that the others take no memory."""
    if backend == "cpu" and build.obstacle() is not None:
        pytest.skip(str(build.obstacle()))
    sizes, most = (2, 2, 20, 16), 2**31
    strides = {"batch": (most, 320, 16, 1), "heads": (320, most, 16, 1), "rows": (320, 640, most // 19 + 16, 1)}[far]
    storage = torch.empty(most + 10000, dtype=torch.float16)
    views = [storage.as_strided(sizes, strides, 1280 * n) for n in range(3)]
    assert sum((size - 1) * stride for size, stride in zip(sizes, strides)) > most
    near = [torch.randn(sizes).half().requires_grad_() for _ in views]
    for view, tensor in zip(views, near):
        view.copy_(tensor.detach())
    runs = []
    with foci.use(backend):
        for operands in (near, [view.requires_grad_() for view in views]):
            out = foci.scaled_dot_product_attention(*operands, is_causal=True)
            runs.append((out, *torch.autograd.grad(out.float().square().sum(), operands)))
    torch.testing.assert_close(*runs, rtol=0, atol=0)


def test_memory_layout_of_the_result():
    q = torch.randn(2, 4, 6, 8)
    rows = torch.randn(2, 6, 4, 8).transpose(1, 2)
    for backend in BACKENDS:
        with use(backend):
            assert foci.scaled_dot_product_attention(q, q, q).is_contiguous()
            assert foci.scaled_dot_product_attention(rows, q, q).transpose(1, 2).is_contiguous()


OPPOSITE = {
    "query": lambda f, q, k, v, m: foci.attention(f(q), k, v),
    "key": lambda f, q, k, v, m: foci.attention(q, f(k), v),
    "value": lambda f, q, k, v, m: foci.attention(q, k, f(v)),
    "bias": lambda f, q, k, v, m: foci.attention(q, k, v, bias=f(m)),
    "made in a function": lambda f, q, k, v, m: foci.attention(q, k, v, score=lambda s, b, h, i, j: s + f(m)[i, j]),
    "gradient": lambda f, q, k, v, m: torch.autograd.grad(foci.attention(q, k, v), (q, k, v), f(m[0, 0].expand(1, 2, 5, 5)))[0],
    "packed": lambda f, q, k, v, m: foci.varlen_attn(f(q[0]), k[0], v[0], torch.tensor([0, 2]), None, 2, 2),
}


@pytest.mark.parametrize("name", OPPOSITE)
def test_views_that_stand_for_their_opposite(name):
    q, k, v = (rand(1, 2, 5, 5, dtype=torch.float32, seed=n).requires_grad_() for n in range(3))
    bias = rand(5, 5, dtype=torch.float32)
    for _ in range(2):  # the second call is known
        actual = OPPOSITE[name](torch._neg_view, q, k, v, bias)
        torch.testing.assert_close(actual, OPPOSITE[name](torch.neg, q, k, v, bias))
