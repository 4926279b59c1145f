"""Attention of the literature, in its users' words, through `flex_attention`: forward and every gradient."""

import contextlib

import published_distances  # noqa: F401  registers
import published_layouts  # noqa: F401  registers
import published_masks  # noqa: F401  registers
import published_scores  # noqa: F401  registers
import pytest
import torch
from published import REGISTRY, Draw, Published
from torch.nn.attention import flex_attention as torch_flex

import foci

TOLERANCE = {torch.float64: {"rtol": 1e-9, "atol": 1e-9}, torch.float32: {"rtol": 3e-4, "atol": 3e-4}}
CASES = [pytest.param(name, id=name) for name in REGISTRY]


def build(name: str, dtype: torch.dtype, *, learned: bool = True) -> Published:
    return REGISTRY[name][1](Draw(dtype, learned=learned))


def operands(case: Published, dtype: torch.dtype) -> list[torch.Tensor]:
    s = case.shape
    generator = torch.Generator().manual_seed(6)
    sizes = ((s.B, s.H, s.Sq, s.D), (s.B, s.H, s.Skv, s.D), (s.B, s.H, s.Skv, s.D))
    return [torch.randn(*size, generator=generator).to(dtype).requires_grad_() for size in sizes]


def block_mask(case: Published, maker=foci.create_block_mask):
    s = case.shape
    return None if case.mask_mod is None else maker(case.mask_mod, s.B, s.H, s.Sq, s.Skv, device="cpu", BLOCK_SIZE=16)


def dense(case: Published, query, key, value, learned) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp by the formula; zero and -inf for a row that attends nothing."""
    scores = case.formula(query @ key.mT / query.shape[-1] ** 0.5, *learned)
    empty = scores.isneginf().all(-1, keepdim=True)
    lse = scores.masked_fill(empty, 0.0).logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    return (scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)) @ value, lse


def test_there_are_enough_of_them():
    assert len(REGISTRY) >= 36
    assert sum(build(name, torch.float64).score_mod is not None for name in REGISTRY) >= 18
    assert sum(build(name, torch.float64).mask_mod is not None for name in REGISTRY) >= 18
    assert sum(bool(build(name, torch.float64).learned) for name in REGISTRY) >= 18


# FLEX-02
@pytest.mark.parametrize("backend, dtype", [("reference", torch.float64), ("blocked", torch.float64), (None, torch.float32)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(name, backend, dtype):
    case = build(name, dtype)
    inputs = operands(case, dtype)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    learned = [t.detach().double().requires_grad_() for t in case.learned]
    wanted, wanted_lse = dense(case, *exact, learned)
    with contextlib.nullcontext() if backend is None else foci.use(backend):
        out, lse = foci.flex_attention(*inputs, score_mod=case.score_mod, block_mask=block_mask(case), return_lse=True)
    torch.testing.assert_close(out.double(), wanted, **TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), wanted_lse, **TOLERANCE[dtype])

    weight = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    gradients = torch.autograd.grad((out * weight.to(dtype)).sum(), [*inputs, *case.learned])
    expected = torch.autograd.grad((wanted * weight).sum(), [*exact, *learned])
    for part, a, b in zip(("query", "key", "value", *range(len(learned))), gradients, expected):
        torch.testing.assert_close(a.double(), b, **TOLERANCE[dtype], msg=lambda text, part=part: f"gradient of {part}: {text}")


@pytest.mark.parametrize("name", [name for name in REGISTRY if build(name, torch.float64).torch_runs_it])
def test_torch_agrees(name):  # the functions mean the same to torch's own flex_attention
    case = build(name, torch.float64, learned=False)
    inputs = [t.detach() for t in operands(case, torch.float64)]
    theirs = torch_flex.flex_attention(*inputs, score_mod=case.score_mod, block_mask=block_mask(case, torch_flex.create_block_mask))
    ours = foci.flex_attention(*inputs, score_mod=case.score_mod, block_mask=block_mask(case))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # torch computes some functions of coordinates in float32


@pytest.mark.parametrize("name", [name for name in REGISTRY if build(name, torch.float64).mask_mod is not None])
def test_block_masks(name):
    case = build(name, torch.float64)
    s = case.shape
    attend = ~case.formula(torch.zeros(s.B, s.H, s.Sq, s.Skv, dtype=torch.float64), *case.learned).isneginf()
    args = (case.mask_mod, s.B, s.H, s.Sq, s.Skv)
    assert torch.equal(foci.create_mask(*args, device="cpu"), attend.expand(s.B, s.H, s.Sq, s.Skv))
    padded = torch.nn.functional.pad(attend.expand(s.B, s.H, s.Sq, s.Skv), (0, -s.Skv % 16, 0, -s.Sq % 16))
    some = padded.unflatten(-1, (-1, 16)).unflatten(-3, (-1, 16)).any(-1).any(-2)
    assert torch.equal(block_mask(case).to_dense().bool(), some)
