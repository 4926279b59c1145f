"""Gradients of biases and tables on the CPU: how many copies tasks sum into, and what they come to."""

import math

import pytest
import torch
from cpu_calls import attention, qkv

import foci
from foci.backends.cpu import build
from foci.backends.cpu.sites import HeadNumbers, find_sites, partition
from foci.trace_functions import bind

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))


def test_private_gradients_only_where_tasks_meet():
    bias, slopes = torch.zeros(2, 64, 64), torch.zeros(2)
    full = bind(lambda s, b, h, q, k: s + bias[h, q, k], None, torch.device("cpu")).variant.score
    by_head = bind(lambda s, b, h, q, k: s * slopes[h], None, torch.device("cpu")).variant.score
    numbers = HeadNumbers(2, ())
    assert partition(find_sites(full, (True,)), (bias,), (1, 2, 4), numbers).copies == ((1, 1, 1),)
    assert partition(find_sites(full, (True,)), (bias,), (3, 2, 4), numbers).copies == ((3, 1, 1),)
    assert partition(find_sites(by_head, (True,)), (slopes,), (1, 2, 1), numbers).copies == ((1, 1, 1),)
    assert partition(find_sites(by_head, (True,)), (slopes,), (1, 2, 4), numbers).copies == ((1, 1, 4),)


# SDPA-04
@pytest.mark.parametrize(
    ("rows", "entries", "copies"),
    [(8, 16, (1, 1, 1)), (9, 17, (1, 1, 1)), (7, 32, (2, 8, 1)), (1, 32, (2, 8, 1)), (8, 15, (2, 8, 1)), (9, 16, (2, 8, 1))],
)
def test_a_bias_of_merged_batch_and_heads_has_no_copies_where_no_two_meet(rows, entries, copies):
    """Rows of fewer than 8 heads overlap; an index beyond the last entry reads the last entry, as others do."""
    bias = torch.zeros(entries, 8, 8)
    bound = bind(lambda s, b, h, q, k: s + bias[b * rows + h, q, k], None, torch.device("cpu"))
    sites = find_sites(bound.variant.score, (True,))
    assert partition(sites, (bias,), (2, 8, 4), HeadNumbers(8, bound.ints)).copies == (copies,)


# SDPA-04
def test_the_rows_of_a_merged_bias_are_those_of_each_call(monkeypatch):
    """They are a number of the call, not of its kernel, which all these calls share. Equal calls share the partition too."""
    copies = []

    def record(*arguments):
        copies.append(partition(*arguments).copies[0])
        return partition(*arguments)

    monkeypatch.setattr("foci.backends.cpu.passes.partition", record)
    tensors, bias = qkv(3, 4, 20, 8), torch.randn(12, 20, 20, requires_grad=True)
    for rows in (4, 3, 4):
        attention(*tensors, score=lambda s, b, h, q, k, rows=rows: s + bias[b * rows + h, q, k]).sum().backward()
    assert copies == [(1, 1, 1), (3, 4, 1)]


# SDPA-04
@pytest.mark.parametrize("rows", [4, 3])
def test_gradients_of_a_bias_of_merged_batch_and_heads(rows):
    """With 4 heads, rows of 4 are apart and rows of 3 meet: head 3 of an entry reads what head 0 of the next one does."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, 4, 130, 16)
    bias = torch.randn(12, 130, 130, requires_grad=True)
    with foci.use("cpu"):
        out = foci.attention(q, k, v, score=lambda s, b, h, i, j: s + bias[b * rows + h, i, j])
    out.square().sum().backward()
    at = torch.arange(3)[:, None] * rows + torch.arange(4)
    exact = bias.detach().double().requires_grad_()
    weights = torch.softmax(q.double() @ k.double().mT / 4 + exact[at], -1)
    (weights @ v.double()).square().sum().backward()
    torch.testing.assert_close(bias.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


# SDPA-04
@pytest.mark.parametrize(
    ("heads", "length", "sizes", "parts", "copies"),
    [
        (8, 512, (2, 8, 1), (2, 8, 1), 2),
        (8, 512, (64, 8, 1), (2, 8, 1), 2),
        (1, 512, (2, 8, 1), (2, 8, 1), 16),  # shared by all: as many as threads may need
        (1, 512, (64, 16, 1), (1, 16, 1), 16),
        (1, 2048, (8, 8, 2), (1, 8, 2), 8),  # each split has keys of its own
        (1, 16384, (8, 8, 8), (1, 1, 8), 1),
    ],
)
def test_a_large_shared_bias_has_few_copies_of_its_gradient(heads, length, sizes, parts, copies):
    bias = torch.zeros(1).expand(heads, length, length)
    shared = bind(lambda s, b, h, q, k: s + (bias[h, q, k] if heads > 1 else bias[0, q, k]), None, torch.device("cpu")).variant.score
    split = partition(find_sites(shared, (True,)), (bias,), sizes, HeadNumbers(sizes[1], ()))
    assert split.parts == parts
    assert math.prod(split.copies[0]) == copies


# SDPA-04, SDPA-16
@pytest.mark.parametrize("shape", [(3, 700, 700), (1, 700, 700), (5, 3, 300, 300)])
def test_gradients_of_a_large_shared_bias(shape):
    torch.manual_seed(0)
    bias, tensors = torch.randn(shape), qkv(5, 3, shape[-1], 8)
    before = torch.get_num_threads()
    try:
        grads = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            leaf = bias.clone().requires_grad_()
            attention(*tensors, bias=leaf).pow(2).sum().backward()
            grads.append(leaf.grad)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(grads[0], other) for other in grads[1:])
    query, key, value = (t.double() for t in tensors)
    leaf = bias.double().requires_grad_()
    ((query @ key.mT * 8**-0.5 + leaf).softmax(-1) @ value).pow(2).sum().backward()
    torch.testing.assert_close(grads[0].double(), leaf.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("kv_len", "bound"), [(1500, 3e-5), (37, 5e-6)])
def test_many_keys_that_read_one_element(kv_len, bound):
    """The ends of a table of distances meet most pairs: float32 keeps the digits of their sum."""
    torch.manual_seed(3)
    query, key, value = torch.randn(1, 2, 1500, 16), torch.randn(1, 2, kv_len, 16), torch.randn(1, 2, kv_len, 16)
    grads = []
    for dtype, backend in ((torch.float32, "cpu"), (torch.float64, "reference")):
        table = torch.zeros(2, 13, dtype=dtype, requires_grad=True)
        with foci.use(backend):
            out = foci.attention(query.to(dtype), key.to(dtype), value.to(dtype), score=foci.scores.relative_position(table))
        (out * torch.linspace(-1, 1, 16).to(dtype)).sum().backward()
        grads.append(table.grad.double())
    assert (grads[0] - grads[1]).abs().max() < bound * grads[1].abs().max()
