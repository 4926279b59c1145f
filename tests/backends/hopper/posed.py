"""Problems of random tensors for the tests on a GPU, and what they come to in float64."""

import math
from dataclasses import replace

import torch

from foci import backends
from foci.backends.contract import Plan
from foci.planner import find_target
from foci.problem import Cotangents, Formula, Layout, Operands, Outputs, Problem, bucket
from foci.trace_functions import bind


def posed(
    batch=2,
    heads=4,
    kv_heads=None,
    rows=1000,
    keys=None,
    dim=128,
    value_dim=None,
    dtype=torch.bfloat16,
    lengths=None,
    score=None,
    mask=None,
    dropout=0.0,
    scale=None,
    grads=(False, False, False),
):
    """(problem, operands). `lengths`: packed sequences. `grads`: of query, key and value."""
    keys, kv_heads, value_dim = keys or rows, kv_heads or heads, value_dim or dim
    packed, sizes = {}, (batch, rows, keys)
    if lengths is not None:
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device="cuda")
        packed = {"cu_q": cu, "cu_kv": cu, "max_q": max(lengths), "max_kv": max(lengths)}
        sizes = (len(lengths), max(lengths), max(lengths))
        batch, rows, keys = 1, sum(lengths), sum(lengths)
    shapes = ((batch, heads, rows, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim))
    query, key, value = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    bound = bind(score, mask, torch.device("cuda"))
    seed = torch.tensor([1234567], device="cuda") if dropout else None
    scale = 1 / math.sqrt(dim) if scale is None else scale
    operands = Operands(query, key, value, bound.captures, bound.ints, bound.floats, scale, dropout, seed, **packed)
    layout = Layout.DENSE if lengths is None else Layout.JAGGED
    formula = Formula(bound.variant, layout, Outputs(lse=True, row_max=not any(grads)), dropout > 0)
    wanted = (*grads, tuple(False for _ in bound.captures))
    return Problem(formula, dtype, dim, value_dim, heads, kv_heads, *map(bucket, sizes), *wanted), operands


def kernel_of(name, asked):
    """A backend's kernel for a problem, with a backward of its own, ahead or not."""
    plan = Plan(name, asked, find_target(torch.device("cuda")))
    if name == "hopper":
        from foci.backends.hopper.kernel import build_kernel

        return build_kernel(plan, own_backward=True)
    return backends.load(name).build(plan)


def exact(asked, operands, dout=None):
    """The results in float64, or the gradients where that of `out` is given."""
    tensors = {name: getattr(operands, name).double() for name in ("query", "key", "value")}
    captures = tuple(t.double() if t.is_floating_point() else t for t in operands.captures)
    operands = replace(operands, **tensors, captures=captures)
    kernel = kernel_of("reference", replace(asked, dtype=torch.float64))
    results = kernel.forward(operands)
    return results if dout is None else kernel.backward(operands, results, Cotangents(dout.double()))


def assert_exact(actual, asked, operands, dout):
    """Gradients of query, key and value are those of float64, but for rounding."""
    right = exact(asked, operands, dout)
    for part in ("query", "key", "value"):
        a, b = getattr(actual, part).double(), getattr(right, part)
        assert (a - b).norm() <= 8e-3 * b.norm() + 1e-6, part
