"""Which tiles the CPU backend skips, and where it asks no mask: read from the values of tensors, at each call."""

import ctypes

import pytest
import torch

import foci
from foci.backends.cpu import build
from foci.backends.cpu.native_call import Addresses, NativeCall, OtherStrides
from foci.backends.cpu.source import forward_source
from foci.problem import Formula, Operands, Problem
from foci.trace_functions import bind

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))

ENTRY = """
extern "C" __attribute__((visibility("default"))) int foci_classes(const foci::Call* geometry, const foci::Addresses* at, uint8_t* to) {
  using namespace foci;
  const Call given = bound(geometry, at, 1);
  const Classified<Plan> classified(given);
  const Call& call = classified.call;
  const int halves = (int)Classified<Plan>::halves(call), panels = (int)Classified<Plan>::panels(call);
  for (int b = 0; b < call.batch; ++b)
    for (int h = 0; h < call.q_heads; ++h)
      for (int i = 0; i < halves; ++i)
        for (int j = 0; j < panels; ++j)
          *to++ = classify<Plan>(call, {b, h, h, i * HALF, min_int((i + 1) * HALF, (int)call.q_len) - 1, j * PANEL,
                                        min_int((j + 1) * PANEL, (int)call.kv_len) - 1, (int)call.q_len, (int)call.kv_len});
  return call.classes ? 1 : 0;
}
extern "C" __attribute__((visibility("default"))) int foci_panel() { return foci::PANEL; }
"""
EMPTY, PARTIAL, FULL = 0, 1, 2
HALF = 32


def classes(q_len, kv_len, *, score=None, mask=None, batch=2, heads=4):
    """The classes that a kernel goes by, and whether heads share them."""
    bound = bind(score, mask, torch.device("cpu"))
    problem = Problem(Formula(bound.variant), torch.float32, 16, 16, heads, heads, batch, 64, 64)
    library = build.load(forward_source(problem) + ENTRY)
    q, k = torch.zeros(batch, heads, q_len, 16), torch.zeros(batch, heads, kv_len, 16)
    operands = Operands(q, k, k, bound.captures, bound.ints, bound.floats)
    call = NativeCall(operands)
    panel = library.foci_panel()
    table = torch.empty(batch, heads, -(-q_len // HALF), -(-kv_len // panel), dtype=torch.uint8)
    geometry = call.geometry(OtherStrides(q.stride()))
    addresses = call.addresses(operands.tensors, operands.optional, Addresses(q.data_ptr()))
    return table, bool(library.foci_classes(geometry, addresses, ctypes.c_void_p(table.data_ptr()))), panel


def by_hand(keep, panel):
    """The class of each panel of keys and half of a tile of a mask [B, H, Sq, Skv], element by element."""
    batch, heads, q_len, kv_len = keep.shape
    table = torch.empty(batch, heads, -(-q_len // HALF), -(-kv_len // panel), dtype=torch.uint8)
    for i in range(table.shape[2]):
        for j in range(table.shape[3]):
            part = keep[:, :, HALF * i : HALF * (i + 1), panel * j : panel * (j + 1)].flatten(2)
            table[:, :, i, j] = torch.where(part.all(-1), FULL, torch.where(part.any(-1), PARTIAL, EMPTY))
    return table


def patches(*shape):
    """True and false in squares, some with holes: classes of every kind."""
    *lead, q, kv = shape
    squares = torch.rand(*lead, q // 48 + 1, kv // 48 + 1) < 0.6
    keep = squares.repeat_interleave(48, -2).repeat_interleave(48, -1)[..., :q, :kv].clone()
    keep[..., q // 2 :, kv // 3 : kv // 2] ^= torch.rand(*lead, q - q // 2, kv // 2 - kv // 3) < 0.01
    return keep


LENGTHS = [(256, 1024), (97, 700), (1, 1500), (515, 33)]
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64, torch.float16, torch.bfloat16,
]  # fmt: skip


# FLEX-05
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_classes_are_those_of_the_values(dtype):
    q, kv = 97, 700
    keep = patches(q, kv)
    buffer = keep.to(dtype) * (1 if dtype is torch.bool else 3)
    actual, is_shared, panel = classes(q, kv, mask=lambda b, h, i, j: buffer[i, j] != 0)
    assert is_shared
    torch.testing.assert_close(actual, by_hand(keep.expand(2, 4, q, kv), panel))
    assert {EMPTY, PARTIAL, FULL} <= set(actual.unique().tolist())


# FLEX-05
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_classes_at_every_length(lengths):
    keep = patches(*lengths)
    actual, _, panel = classes(*lengths, mask=lambda b, h, i, j: keep[i, j])
    torch.testing.assert_close(actual, by_hand(keep.expand(2, 4, *lengths), panel))


STRIDES = {
    "one for all": lambda q, kv: patches(1, 1, q, kv),
    "one a batch entry": lambda q, kv: patches(2, 1, q, kv),
    "one a head": lambda q, kv: patches(1, 4, q, kv),
    "one each": lambda q, kv: patches(2, 4, q, kv),
    "expanded": lambda q, kv: patches(2, 1, q, kv).expand(2, 4, q, kv),
    "keys apart": lambda q, kv: patches(2, 1, kv, q).transpose(2, 3),
    "a part of a larger one": lambda q, kv: patches(1, 1, q + 40, kv + 70)[:, :, 7 : q + 7, 70:],
    "every other key": lambda q, kv: patches(1, 1, q, 2 * kv)[..., ::2],
    "keys alone": lambda q, kv: patches(2, 1, 1, kv),
    "queries alone": lambda q, kv: patches(1, 1, q, 1),
}


# FLEX-05, SDPA-03
@pytest.mark.parametrize("name", STRIDES)
def test_classes_of_masks_of_every_shape_and_stride(name):
    q, kv = 129, 610
    keep = STRIDES[name](q, kv)
    actual, is_shared, panel = classes(q, kv, mask=foci.masks.dense(keep).function)
    torch.testing.assert_close(actual, by_hand(keep.expand(2, 4, q, kv), panel))
    assert is_shared is (name != "one each")


def test_classes_of_a_mask_that_depends_on_the_head_itself():
    keep = patches(160, 640)
    # at the edge of a panel on every machine: where both parts of a mask are partial, the class of their tile is partial too
    actual, is_shared, panel = classes(160, 640, mask=lambda b, h, i, j: keep[i, j] & (j >= 128 * h))
    wanted = keep & (torch.arange(640) >= 128 * torch.arange(4)[:, None, None])
    torch.testing.assert_close(actual, by_hand(wanted.expand(2, 4, 160, 640), panel))
    assert is_shared  # by the two batch entries


# SDPA-03
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_tiles_that_a_bias_empties_are_empty(dtype):
    q, kv = 200, 900
    keep = torch.ones(q, kv, dtype=torch.bool).tril() & (torch.arange(kv) > 40)
    bias = torch.randn(q, kv).to(dtype).masked_fill(~keep, -torch.inf)
    actual, is_shared, panel = classes(q, kv, score=lambda s, b, h, i, j: s + 0.5 * bias[i, j])
    assert is_shared
    torch.testing.assert_close(actual == EMPTY, by_hand(keep.expand(2, 4, q, kv), panel) == EMPTY)


@pytest.mark.parametrize("fill", [torch.nan, torch.inf, -3e38])
def test_tiles_of_other_numbers_are_not_empty(fill):
    bias = torch.full((64, 128), -torch.inf)
    bias[40, 70] = fill
    actual, _, panel = classes(64, 128, score=lambda s, b, h, i, j: s + bias[i, j])
    assert (actual[:, :, 1, 70 // panel] != EMPTY).all()


def test_nan_decides_nothing():
    buffer = torch.ones(64, 128)
    buffer[3, 100] = torch.nan
    actual, _, panel = classes(64, 128, mask=lambda b, h, i, j: buffer[i, j] > 0)
    assert (actual[:, :, 0, 100 // panel] == PARTIAL).all()
    assert (actual[:, :, 1] == FULL).all()


def exact(q, k, v, keep):
    """Attention in float64, by hand; rows that attend to nothing give zeros."""
    q, k, v = (t.double() for t in (q, k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~keep, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights @ v


# FLEX-09, SDPA-03
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32], ids=str)
def test_a_buffer_that_changes_is_read_anew(dtype):
    """Written in place, behind a version counter's back, and replaced: forward and backward see what it holds when they run."""
    q, k, v = (torch.randn(2, 4, 150, 16, requires_grad=True) for _ in range(3))
    gradient = torch.randn(2, 4, 150, 16)
    buffer = torch.ones(150, 150, dtype=dtype)
    mask = lambda b, h, i, j: buffer[i, j] != 0

    def check():
        with foci.use("cpu"):
            out = foci.attention(q, k, v, mask=mask)
        results = (out, *torch.autograd.grad(out, (q, k, v), gradient))
        wanted = exact(q, k, v, buffer != 0)
        for a, b in zip(results, (wanted, *torch.autograd.grad(wanted, (q, k, v), gradient.double())), strict=True):
            torch.testing.assert_close(a.double(), b.double(), atol=2e-5, rtol=1e-4)

    check()
    for change in (torch.tril, torch.triu, lambda t: torch.zeros_like(t)):
        buffer.copy_(change(torch.ones_like(buffer)))
        check()
    buffer.data.copy_(patches(150, 150))
    check()
    buffer = patches(150, 150).to(dtype)
    check()


# SDPA-03
def test_what_a_bias_excludes_costs_nothing_of_the_result():
    q, k, v = (torch.randn(2, 4, 200, 24, requires_grad=True) for _ in range(3))
    keep = patches(2, 1, 200, 200)
    keep[0, :, 70:140] = False
    bias = torch.randn(2, 1, 200, 200).masked_fill(~keep, -torch.inf)
    out, aux = foci.attention(q, k, v, bias=bias, return_aux=foci.AuxRequest(lse=True))
    scores = q.double() @ k.double().mT / 24**0.5 + bias
    wanted = torch.softmax(scores, -1).nan_to_num(0.0) @ v.double()
    torch.testing.assert_close(out.double(), wanted, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(aux.lse.double(), torch.logsumexp(scores, -1), atol=1e-5, rtol=1e-5)
    gradient = torch.randn_like(out)
    expected = exact_gradients(q, k, v, bias, gradient)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), gradient), expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=3e-5, rtol=1e-4)


def exact_gradients(q, k, v, bias, gradient):
    leaves = tuple(t.detach().double().requires_grad_() for t in (q, k, v))
    scores = leaves[0] @ leaves[1].mT / q.shape[-1] ** 0.5
    some = (bias > -torch.inf).any(-1, keepdim=True).expand(scores.shape)
    weights = torch.softmax(torch.where(some, scores + bias, 0.0), -1).masked_fill(~some, 0.0)
    return torch.autograd.grad(weights @ leaves[2], leaves, gradient.double())
