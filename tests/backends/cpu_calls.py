"""Problems and calls for the tests of the CPU backend."""

import torch

import foci
from foci.planner import find_target
from foci.problem import Formula, Problem
from foci.trace_functions import bind

CPU = find_target(torch.device("cpu"))


def problem(score=None, mask=None, dtype=torch.float32, **changes):
    variant = bind(score, mask, torch.device("cpu")).variant
    sizes = {"head_dim": 16, "value_dim": 16, "q_heads": 2, "kv_heads": 2, "batch": 1, "q_len": 64, "kv_len": 64}
    formula = Formula(variant, **{name: changes.pop(name) for name in ("outputs", "dropout", "block_size") if name in changes})
    return Problem(formula, dtype, **{**sizes, **changes})


def attention(*tensors, **arguments):
    with foci.use("cpu"):
        return foci.attention(*tensors, **arguments)


def exact(*tensors, **arguments):
    with foci.use("reference"):
        return foci.attention(*(t.double() for t in tensors), **arguments)


def qkv(B=1, H=2, S=64, D=16, dtype=torch.float32):
    return tuple(torch.randn(B, H, S, D, dtype=dtype) for _ in range(3))


def gradients(tensors, **arguments):
    leaves = tuple(t.clone().requires_grad_() for t in tensors)
    out = attention(*leaves, **arguments)
    return (out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out)))
