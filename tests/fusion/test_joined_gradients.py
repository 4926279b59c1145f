"""Gradients of query, key and value that are read side by side are made so, and only those."""

import shutil

import pytest
import torch
from torch._inductor.utils import fresh_cache, run_and_get_code

import foci
from compiled import several
from foci.operator import op_impl

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and not torch.cuda.is_available(), reason="Inductor needs a C++ compiler")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIM = 16


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    with fresh_cache():
        yield


class Attention(torch.nn.Module):
    """`order`: of query, key and value in the rows of one product; `flat`: batch and heads are one dimension of the products."""

    def __init__(self, heads=(4, 4, 4), order=(0, 1, 2), watched=False, flat=False):
        super().__init__()
        self.heads, self.order, self.watched, self.flat = heads, order, watched, flat
        self.together = torch.nn.Linear(DIM, DIM * sum(heads))

    def forward(self, x):
        parts = self.together(x).split([DIM * self.heads[n] for n in self.order], dim=-1)
        q, k, v = (parts[self.order.index(n)].unflatten(-1, (-1, DIM)).transpose(1, 2) for n in range(3))
        groups = self.heads[0] // self.heads[1]
        keys, values = (t.repeat_interleave(groups, 1) for t in (k, v)) if groups > 1 else (k, v)
        if self.flat:
            scores = torch.bmm(q.reshape(-1, *q.shape[2:]), k.mT.reshape(-1, DIM, x.shape[1])) / DIM**0.5
            return (torch.softmax(scores.view(*q.shape[:3], -1), dim=-1) @ v,)
        out = torch.softmax(q @ keys.mT / DIM**0.5, dim=-1) @ values
        return (out, k) if self.watched else (out,)


CASES = {
    "side by side": ({}, True),
    "side by side, keys turned and flattened": ({"flat": True}, True),
    "grouped heads": ({"heads": (4, 2, 2)}, True),
    "keys first": ({"order": (1, 0, 2)}, False),
    "a gradient besides": ({"watched": True}, False),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_who_reads_gradients_side_by_side(name, batch):
    arguments, is_joined = CASES[name]
    model = Attention(**arguments).to(DEVICE)
    x = torch.randn(batch, 64, DIM, device=DEVICE, requires_grad=True)
    leaves = (x, *model.parameters())
    wanted = torch.autograd.grad(sum(t.square().sum() for t in model(x)), leaves)

    def step():
        torch.autograd.backward(sum(t.square().sum() for t in compiled(x)))

    # one length: it reads the code of one graph
    compiled = foci.compile(model)
    _, codes = run_and_get_code(step)
    backward = codes[-1]
    assert ("BackwardRows(fixed=True)" in backward) == is_joined
    assert ("Backward(fixed=True)" in backward) != is_joined
    for leaf, gradient in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-4, atol=1e-4)
        assert leaf.grad.stride() == gradient.stride()


def test_symbolic_sizes_are_left():
    model = Attention().to(DEVICE)
    compiled = foci.compile(model, dynamic=True)
    for length in several(64, 96, 80):
        x = torch.randn(2, length, DIM, device=DEVICE, requires_grad=True)
        (gradient,) = torch.autograd.grad(compiled(x)[0].sum(), x)
        (wanted,) = torch.autograd.grad(model(x)[0].sum(), x)
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)


def test_rows_are_the_gradients_side_by_side():
    q, k, v = (torch.randn(2, 4, 64, DIM, device=DEVICE) for _ in range(3))
    line = "layout=dense;outputs=;dropout=0;blocks= | captures  | %0 = var[score] float | %1 = const[True] bool | return %0 %1"
    args = (q, k, v, [], *[None] * 7, [], [], 0.25, 0.0, 0, 0, line, "*")
    out, lse, *_ = op_impl.results(*args)
    arguments = (torch.randn_like(out), None, None, None, out, lse, "111", *args)
    rows = torch.ops.foci.attention_backward_rows(*arguments)
    torch.testing.assert_close(rows, torch.cat([t.transpose(1, 2).flatten(2) for t in op_impl.gradients(*arguments)], 2), rtol=0, atol=0)
    assert rows.is_contiguous()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ops.foci.attention_backward_rows(*arguments)
    assert (fake.shape, fake.stride(), fake.dtype) == (rows.shape, rows.stride(), rows.dtype)
