"""Calls through the dispatcher, as compiled code makes them: known from before, laid out as promised."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import foci
from foci import cache_check, call_cache
from foci.operator import op_impl

ATTENTION = torch.ops.foci.attention.default
BACKWARD = torch.ops.foci.attention_backward.default

counts_work = pytest.mark.skipif(cache_check.ENABLED, reason="counts work that FOCI_CHECK_CACHE=1 repeats")


class Passed(TorchDispatchMode):
    """Arguments of the operators that are called inside."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (ATTENTION, BACKWARD):
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def fused(batch=2, length=6, heads=2, width=4):
    """Query, key and value as views of one product, as models make them."""
    qkv = torch.randn(batch, length, 3, heads, width)
    return [t.transpose(1, 2) for t in qkv.unbind(2)]


def calls_of(*tensors, **options):
    leaves = [t.requires_grad_() for t in tensors]
    with Passed() as passed:
        out = foci.attention(*leaves, **options)
        out.backward(torch.randn_like(out))
    return passed.calls


@pytest.fixture
def planned(monkeypatch):
    """How often a kernel was chosen."""
    counted = []
    choose = op_impl.choose_kernel
    monkeypatch.setattr(op_impl, "choose_kernel", lambda *args: counted.append(args) or choose(*args))
    call_cache._calls.clear()
    return counted


def changed(args, at, value):
    return (*args[:at], value, *args[at + 1 :])


@counts_work
@pytest.mark.parametrize("options", [{}, {"mask": foci.masks.causal()}, {"dropout_p": 0.5}], ids=["plain", "causal", "dropout"])
def test_a_call_is_planned_once(planned, options):
    (_, forward), (_, backward) = calls_of(*fused(), **options)
    planned.clear()
    with torch.no_grad():
        wanted = ATTENTION(*forward)[0]
        for _ in range(2):
            query, key, value = (t.clone() if t.is_contiguous() else t.detach() for t in forward[:3])
            torch.testing.assert_close(ATTENTION(query, key, value, *forward[3:])[0], wanted, rtol=0, atol=0)
            BACKWARD(*backward)
    assert not planned


@pytest.mark.parametrize(
    "at, value", [(13, 0.7), (0, torch.randn(2, 2, 6, 4)), (1, torch.randn(2, 2, 9, 4))], ids=["scale", "strides", "length"]
)
def test_another_call_is_planned_anew(planned, at, value):
    (_, forward), _ = calls_of(*fused())
    planned.clear()
    args = changed(forward, at, value)
    if at == 1:
        args = changed(args, 2, torch.randn(2, 2, 9, 4))
    with torch.no_grad():
        actual = ATTENTION(*args)[0]
    q, k, v = (t.double() for t in args[:3])
    wanted = torch.softmax(q @ k.mT * args[13], -1) @ v
    torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-5)
    assert len(planned) == 1


def test_use_around_the_run_chooses_the_backend():
    (_, forward), _ = calls_of(*fused())
    for name in ("reference", "blocked", "reference"):
        with foci.use(name), foci.observe() as log, torch.no_grad():
            ATTENTION(*forward)
        assert [call.backend for call in log.calls] == [name]


@pytest.mark.parametrize("heads_in_rows", [True, False])
def test_gradients_lie_as_the_tensors_do(heads_in_rows):
    tensors = fused() if heads_in_rows else [t.contiguous() for t in fused()]
    _, (_, backward) = calls_of(*tensors)
    wanted = (48, 4, 8, 1) if heads_in_rows else (48, 24, 4, 1)
    assert [g.stride() for g in BACKWARD(*backward)] == [wanted] * 3
    torch.library.opcheck(BACKWARD, tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in backward))


def test_a_gradient_laid_out_otherwise_is_copied():
    tensor = torch.randn(2, 3, 4, 5)
    moved = op_impl._with_strides(tensor, (60, 5, 15, 1))
    assert moved.stride() == (60, 5, 15, 1)
    assert torch.equal(moved, tensor)
    assert op_impl._with_strides(tensor, tensor.stride()) is tensor
    one = torch.randn(1, 3, 4, 5)
    assert op_impl._with_strides(one, (7, 20, 5, 1)) is one  # nobody steps along one entry


def packed(*lengths):
    """Query, key and value [1, H, T, D] as views of one product, and where sequences begin."""
    qkv = torch.randn(sum(lengths), 3, 2, 4)
    return [t.transpose(0, 1).unsqueeze(0) for t in qkv.unbind(1)], torch.tensor([0, *lengths]).cumsum(0)


@counts_work
@pytest.mark.parametrize("lengths", [(4, 9), (1, 12), (13, 0)], ids=str)
def test_packed_calls_are_planned_once_for_any_number_of_tokens(planned, lengths):
    leaves = [t.requires_grad_() for t in torch.randn(3, 5, 2, 4).unbind(0)]
    offsets = torch.tensor([0, 2, 5])
    with Passed() as passed:
        foci.varlen_attn(*leaves, offsets, offsets, 16, 16).sum().backward()
    (_, forward), (_, backward) = passed.calls
    tensors, starts = packed(*lengths)
    tensors = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    args = (*tensors, *forward[3:6], starts, starts, *forward[8:])
    planned.clear()
    with torch.no_grad():
        out, lse, *_ = ATTENTION(*args)
        gradients = BACKWARD(torch.ones_like(out), None, None, None, out, lse, "111", *args)
    assert not planned
    q, k, v = (t.double().requires_grad_() for t in tensors)
    parts = [[t[:, :, a:b] for t in (q, k, v)] for a, b in itertools.pairwise(starts.tolist())]
    wanted = torch.cat([torch.softmax(q @ k.mT / 2, -1) @ v for q, k, v in parts], 2)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    for actual, expected in zip(gradients, torch.autograd.grad(wanted.sum(), (q, k, v)), strict=True):
        assert actual.stride()[1:] == (4, 8, 1)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_one_packed_token_is_a_call_of_its_own(planned):
    tensors, starts = packed(5)
    flat = [t[0].transpose(0, 1) for t in tensors]
    with Passed() as passed:
        foci.varlen_attn(*flat, starts, starts, 16, 16)
    ((_, args),) = passed.calls
    one, begin = packed(1)
    planned.clear()
    out = ATTENTION(*one, *args[3:6], begin, begin, *args[8:])[0]
    assert len(planned) == 1
    torch.testing.assert_close(out, one[2].expand_as(out))
