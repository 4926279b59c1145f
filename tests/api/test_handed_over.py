"""What a backend is handed: memory of the caller, neither copied nor read on the way; by backends that note their operands."""

import pytest
import torch
from packed import nested

import foci
from foci import execution
from foci.backends.contract import Backend, Kernel
from foci.operator import op_impl
from foci.operator.compiled_call import Forward
from foci.operator.op_schema import flatten
from foci.prepare import Extras, prepare
from foci.problem import Gradients, Outputs, Results, bucket, empty_out, is_aligned


class Noting(Backend, Kernel):
    """The reference, and what it was given."""

    name = "noting"

    def __init__(self):
        self.forwards, self.backwards = [], []

    def reject(self, problem, target):
        return None

    def cost(self, problem, target):
        return 0.0

    def build(self, plan):
        self.kernel = foci.backends.load("reference").build(plan)
        return self

    def forward(self, operands):
        self.forwards.append(operands)
        return self.kernel.forward(operands)

    def backward(self, operands, results, cotangents):
        self.backwards.append((operands, cotangents))
        return self.kernel.backward(operands, results, cotangents)


class Cut(Noting):
    """One that cuts work up by what its plan says of lengths and heads."""

    def kernel_key(self, plan):
        return plan

    def build(self, plan):
        return CutKernel(plan, self)


class CutKernel(Kernel):
    def __init__(self, plan, backend):
        self.problem, self.backend, self.kernel = plan.problem, backend, foci.backends.load("reference").build(plan)

    def forward(self, operands):
        self.backend.forwards.append((operands, self.problem))
        return self.kernel.forward(operands)

    def backward(self, operands, results, cotangents):
        self.backend.backwards.append((operands, self.problem))
        return self.kernel.backward(operands, results, cotangents)


class Unread(Backend, Kernel):
    """For a device whose tensors hold nothing that could be read."""

    name = "unread"

    def reject(self, problem, target):
        return None if target.device == "meta" else "only the device without memory"

    def cost(self, problem, target):
        return 0.0

    def build(self, plan):
        return self

    def forward(self, operands):
        query = operands.query
        return Results(empty_out(query, operands.value), query.new_empty(query.shape[:3], dtype=torch.float32))

    def backward(self, operands, results, cotangents):
        return Gradients(*(torch.empty_like(t) for t in (operands.query, operands.key, operands.value)))


@pytest.fixture(params=[Noting])
def registered(request):
    backend = request.param()
    foci.register_backend(backend)
    yield backend
    foci.unregister_backend(backend.name)


def same_memory(one, other):
    return one.data_ptr() == other.data_ptr() and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.parametrize("registered", [Cut], indirect=True)
def test_each_kernel_is_of_the_lengths_and_heads_it_is_given(registered):
    for q_heads, kv_heads, length in ((4, 4, 200), (4, 4, 30), (4, 2, 30), (2, 2, 30), (4, 4, 190)):
        q, k = (torch.randn(2, heads, length, 8, requires_grad=True) for heads in (q_heads, kv_heads))
        foci.attention(q, k, k).sum().backward()
    assert len(registered.forwards) == len(registered.backwards) == 5
    for operands, problem in (*registered.forwards, *registered.backwards):
        assert (problem.q_heads, problem.kv_heads) == (operands.query.shape[1], operands.key.shape[1])
        assert problem.kv_len == bucket(operands.key.shape[2])


def moved(tensor, *, by):
    """A copy that begins so many elements behind a multiple of 16 bytes."""
    storage = torch.empty(tensor.numel() + 16, dtype=tensor.dtype)
    start = -storage.data_ptr() // storage.itemsize % 4 + by
    view = storage[start : start + tensor.numel()].view(tensor.shape)
    assert view.data_ptr() % 16 == by * tensor.itemsize
    return view.copy_(tensor)


def by_eager(q, k, v, table):
    foci.attention(q, k, v, score=lambda s, b, h, i, j: s + table[h])


def by_operator(q, k, v, table):
    op_impl.results(*flat_arguments(q, k, v, table))


def by_place():
    place = Forward(fixed=True)
    return lambda q, k, v, table: place(*flat_arguments(q, k, v, table))


def flat_arguments(q, k, v, table):
    formula, operands = prepare((q, k, v), lambda s, b, h, i, j: s + table[h], None, Extras(Outputs()))
    return flatten(formula, operands, None)


@pytest.mark.parametrize("registered", [Cut], indirect=True)
@pytest.mark.parametrize("way", [by_eager, by_operator, by_place()], ids=["eager", "operator", "place"])
def test_a_captured_tensor_that_lies_oddly_is_not_taken_for_a_query_that_does(registered, way, monkeypatch):
    monkeypatch.setattr(execution, "_is_aligned", lambda *tensors: all(map(is_aligned, tensors)))  # as on a GPU
    q, k, v, table = *(moved(torch.randn(1, 4, 12, 8), by=0) for _ in range(3)), moved(torch.randn(4), by=0)
    odd_q, odd_table = moved(q, by=1), moved(table, by=1)
    for inputs in ((q, odd_table), (odd_q, table), (q, table), (odd_q, odd_table), (q, odd_table)):
        for _ in range(2):
            way(inputs[0], k, v, inputs[1])
            assert registered.forwards[-1][1].aligned == (inputs[0] is q)


# SDPA-11, SDPA-12
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads_of_a_packed_projection_are_not_copied(registered, kv_heads):
    packed = torch.randn(2, 5, 4 + 2 * kv_heads, 8, requires_grad=True)
    query, key, value = (t.transpose(1, 2) for t in packed.split((4, kv_heads, kv_heads), 2))
    foci.scaled_dot_product_attention(query, key, value, enable_gqa=True).sum().backward()
    for operands in (registered.forwards[0], registered.backwards[0][0]):
        assert operands.key.shape == operands.value.shape == (2, kv_heads, 5, 8)
        for tensor, handed in zip((query, key, value), (operands.query, operands.key, operands.value), strict=True):
            assert same_memory(tensor, handed)
            assert handed.stride() == tensor.stride()


# JAG-06
def test_transposed_nested_tensors_are_not_copied(registered):
    values, query = nested((3, 0, 5), 4, 8, dtype=torch.float32)
    rows, key = nested((2, 4, 1), 4, 8, dtype=torch.float32)
    foci.attention(query, key, key).values().sum().backward()
    for operands in (registered.forwards[0], registered.backwards[0][0]):
        assert same_memory(operands.query, values)
        assert same_memory(operands.key, rows)
        assert same_memory(operands.value, rows)
        assert operands.query.shape == (1, 4, 8, 8)
        assert operands.query.stride()[1:] == (8, 32, 1)  # heads lie side by side, as in the packed tokens


# FLEX-08
def test_gradients_of_the_logsumexp_alone_need_no_gradient_of_the_output(registered):
    query, key, value = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (5, 7, 7))
    _, lse = foci.flex_attention(query, key, value, return_lse=True)
    grads = torch.autograd.grad(lse.sum(), (query, key, value), allow_unused=True)
    ((_, cotangents),) = registered.backwards
    assert cotangents.out is None or not cotangents.out.any()
    assert grads[2] is None or not grads[2].any()
    scores = query @ key.mT / 8**0.5
    torch.testing.assert_close(grads[:2], torch.autograd.grad(scores.logsumexp(-1).sum(), (query, key)))


OFFSETS = [torch.tensor([0, 3, 8]).to("meta"), torch.tensor([0, 4, 11]).to("meta")]
OPTIONS = {
    "plain": {},
    "mask": {"mask": foci.masks.causal()},
    "score": {"score": foci.scores.softcap(2.0)},
    "dropout": {"dropout_p": 0.4},
    "logsumexp": {"return_aux": foci.AuxRequest(lse=True)},
}


def unreadable(tokens):
    return torch.randn(tokens, 4, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)


# JAG-08
@pytest.mark.parametrize("registered", [Unread], indirect=True)
@pytest.mark.parametrize("name", OPTIONS)
def test_no_call_on_nested_tensors_reads_a_number_of_the_device(registered, name):
    """Reading one is an error on this device; elsewhere the host would wait for it."""
    rows = [unreadable(8), unreadable(11)]
    ends = [(3, 5), (4, 7)]
    query, key = (
        torch.nested.nested_tensor_from_jagged(t, o, min_seqlen=low, max_seqlen=high).transpose(1, 2)
        for t, o, (low, high) in zip(rows, OFFSETS, ends, strict=True)
    )
    with pytest.raises(RuntimeError, match="meta"):
        OFFSETS[0].tolist()
    for k in (query, key):
        for _ in range(2):  # the second call is known
            out = foci.attention(query, k, k, **OPTIONS[name])
            out = out[0] if isinstance(out, tuple) else out
            assert out.offsets() is OFFSETS[0]
            assert out._maybe_max_seqlen == 5
            torch.autograd.grad(out.transpose(1, 2).values().sum(), rows[0])


# JAG-08
@pytest.mark.parametrize("registered", [Unread], indirect=True)
def test_no_call_on_packed_tensors_reads_a_number_of_the_device(registered):
    query, key = unreadable(8), unreadable(11)
    for _ in range(2):
        out = foci.varlen_attn(query, key, key, *OFFSETS, 5, 7, window_size=(-1, 0))
        assert out.shape == query.shape
        torch.autograd.grad(out.sum(), (query, key))


def nested_unread(number, *rest, lengths=None):
    """[B, ragged, *rest], of which only the extremes are known to the host."""
    tokens, low, high = ((8, 3, 5), (11, 4, 7))[number]
    values = torch.randn(tokens, *rest, device="meta", requires_grad=True)
    offsets = OFFSETS[number].clone()  # its own, which no other is known to equal
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, min_seqlen=low, max_seqlen=high)


def dense_unread(*sizes):
    return torch.randn(*sizes, device="meta", requires_grad=True)


def one_unread():
    return torch.nested.nested_tensor_from_jagged(
        dense_unread(8, 4, 8), torch.tensor([0, 8]).to("meta"), min_seqlen=8, max_seqlen=8
    ).transpose(1, 2)


UNREAD = {
    "dense query": lambda: (dense_unread(2, 4, 5, 8), *[nested_unread(1, 4, 8).transpose(1, 2)] * 2),
    "dense keys": lambda: (nested_unread(0, 4, 8).transpose(1, 2), *[dense_unread(2, 4, 5, 8)] * 2),
    "keys for all": lambda: (nested_unread(0, 4, 8).transpose(1, 2), *[dense_unread(1, 4, 5, 8)] * 2),
    "one sequence of keys": lambda: (nested_unread(0, 4, 8).transpose(1, 2), one_unread(), one_unread()),
    "offsets of each": lambda: tuple(nested_unread(n, 4, 8).transpose(1, 2) for n in (0, 1, 1)),
    "one head of keys": lambda: (nested_unread(0, 4, 8).transpose(1, 2), *[nested_unread(1, 1, 8).transpose(1, 2)] * 2),
    "narrowed": lambda: (nested_unread(0, 4, 8, lengths=torch.tensor([2, 4]).to("meta")).transpose(1, 2),) * 3,
    "without heads": lambda: (nested_unread(0, 8), *[nested_unread(1, 8)] * 2),
    "ragged before the length": lambda: (nested_unread(0, 4, 8),) * 3,
}


# JAG-08
@pytest.mark.parametrize("registered", [Unread], indirect=True)
@pytest.mark.parametrize("asked", [None, foci.AuxRequest(lse=True)], ids=["out", "logsumexp"])
@pytest.mark.parametrize("name", UNREAD)
def test_no_layout_of_nested_tensors_has_a_number_of_the_device_read(registered, name, asked):
    query, key, value = UNREAD[name]()
    attend = foci.scaled_dot_product_attention if name == "ragged before the length" else foci.attention
    for _ in range(2):
        out = attend(query, key, value, **({} if attend is not foci.attention else {"return_aux": asked}))
        out = out[0] if isinstance(out, tuple) else out
        torch.autograd.grad((out.values() if out.is_nested else out).sum(), (query, key, value))
