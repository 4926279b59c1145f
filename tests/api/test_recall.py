"""Calls known from before give what they gave, of the tensors and functions at hand."""

import pytest
import torch
from torch.nn.attention import flex_attention

import foci
from foci import call_cache, masks
from foci.backends.contract import Backend, Kernel
from foci.problem import Results

GEOMETRY = (2, 4, 24, 8)


def tensors(*, grad=False, batch=2):
    return tuple(torch.randn(batch, *GEOMETRY[1:]).requires_grad_(grad) for _ in range(3))


def reference(q, k, v, **options):
    with foci.use("reference"):
        return foci.attention(q, k, v, **options)


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(call_cache, "_calls", type(call_cache._calls)())


@pytest.mark.parametrize("grad", [False, True])
def test_other_tensors_captures_and_numbers(grad):
    for number in (2.0, 2.0, 3.0):
        q, k, v = tensors(grad=grad)
        slopes = torch.rand(4, requires_grad=grad)
        options = {
            "mask": foci.masks.window(5),
            "score": lambda s, b, h, i, j, slopes=slopes, number=number: s * number + slopes[h] * (i - j),
            "scale": 0.3,
        }
        got, want = foci.attention(q, k, v, **options), reference(q, k, v, **options)
        torch.testing.assert_close(got, want)
        if grad:
            weights = torch.randn_like(got)
            inputs = (q, k, v, slopes)
            actual, sought = (torch.autograd.grad(out, inputs, weights) for out in (got, want))
            torch.testing.assert_close(actual, sought, rtol=1e-4, atol=1e-4)
    known = [call for call in call_cache._calls.values() if call.outline.chosen.decision.plan.backend != "reference"]
    assert len(known) == 2  # one for each number


def test_calls_that_differ_are_told_apart():
    q, k, v = tensors()
    first = foci.attention(q, k, v)
    assert foci.attention(q, k, v, mask=masks.causal()).ne(first).any()
    assert foci.attention(q, k, v, scale=0.1).ne(first).any()
    with foci.use("reference"), foci.observe() as log:
        foci.attention(q, k, v)
    assert log.calls[0].backend == "reference"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert foci.attention(q, k, v).dtype == torch.bfloat16
    with torch.no_grad():
        leaves = tensors(grad=True)
        assert not foci.attention(*leaves).requires_grad
    assert foci.attention(*leaves).requires_grad
    wide = torch.randn(2, 4, 24, 16)[..., ::2]
    torch.testing.assert_close(foci.attention(wide, k, v), reference(wide, k, v))


def test_a_batch_that_is_repeated_is_not_taken_for_one_that_is_not():
    q, (k, v) = tensors()[0], tensors(batch=1)[:2]
    for _ in range(2):
        torch.testing.assert_close(foci.attention(q, k, v), reference(q, k, v))


def test_dropout_draws_anew():
    q, k, v = tensors(grad=True)
    outs = [foci.attention(q, k, v, dropout_p=0.5) for _ in range(3)]
    assert outs[1].ne(outs[0]).any()
    assert outs[2].ne(outs[1]).any()
    assert len(call_cache._calls) == 1
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        got = foci.attention(q, k, v, dropout_p=0.5)
        torch.manual_seed(seed)
        want = reference(q, k, v, dropout_p=0.5)
        torch.testing.assert_close(got, want)
        weights = torch.randn_like(got)
        actual, sought = (torch.autograd.grad(out, (q, k, v), weights) for out in (got, want))
        torch.testing.assert_close(actual, sought, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="dropout_p"):
        foci.attention(q, k, v, dropout_p=1.5)


# SDPA-17
def test_autocast_casts_what_it_has_to_and_knows_the_rest():
    wide, half = tensors(), tuple(t.bfloat16() for t in tensors())
    plain = foci.attention(*half)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(foci.attention(*half), plain)
            assert foci.attention(*wide).dtype == torch.bfloat16
            assert foci.attention(half[0], *wide[1:]).dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.float16):
            assert foci.attention(*half).dtype == torch.float16
        assert foci.attention(*wide).dtype == torch.float32
    # in half precision, with and without autocast, in full, and cast to either half precision
    assert len(call_cache._calls) == 5


def test_masks_and_biases_given_as_tensors_are_known():
    for _ in range(3):
        q, k, v = tensors(grad=True)
        keep, bias = torch.rand(2, 1, 24, 24) > 0.3, torch.randn(4, 1, 24, requires_grad=True)
        got, want = foci.attention(q, k, v, mask=keep, bias=bias), reference(q, k, v, mask=keep, bias=bias)
        torch.testing.assert_close(got, want)
        weights = torch.randn_like(got)
        actual, sought = (torch.autograd.grad(out, (q, k, v, bias), weights) for out in (got, want))
        torch.testing.assert_close(actual, sought, rtol=1e-4, atol=1e-4)
    assert len(call_cache._calls) == 2  # by either backend


NUMBER = 2.0


# FLEX-09
def test_functions_that_read_more_are_traced_at_each_call(monkeypatch):
    q, k, v = tensors()

    def inner(score, b, h, i, j):
        return sum(score * n for n in (NUMBER,))

    def imports(score, b, h, i, j):
        import random

        return score * random.random()

    first = foci.attention(q, k, v, score=inner)
    monkeypatch.setitem(globals(), "NUMBER", 3.0)
    torch.testing.assert_close(foci.attention(q, k, v, score=inner), reference(q, k, v, scale=3 / 8**0.5))
    torch.testing.assert_close(first, reference(q, k, v, scale=2 / 8**0.5))
    assert foci.attention(q, k, v, score=imports).ne(foci.attention(q, k, v, score=imports)).any()


# FLEX-09
@pytest.mark.parametrize(
    "read", [lambda t: t[0], lambda t: t.sum(), lambda t: float(t[1]), lambda t: t.exp()[1]], ids=["item", "sum", "float", "exp"]
)
def test_values_that_a_function_reads_are_those_of_now(read):
    q, k, v = tensors()
    table = torch.tensor([2.0, 3.0])

    def function(score, b, h, i, j):
        return score * read(table)

    for _ in range(3):
        for _ in range(2):
            torch.testing.assert_close(foci.attention(q, k, v, score=function), reference(q, k, v, scale=float(read(table)) / 8**0.5))
        table *= 0.9


def test_a_bias_of_one_number_may_be_learned_or_not():
    q, k, v = tensors()
    for grad in (False, True, False):
        bias = torch.randn(1, requires_grad=grad)
        out, aux = foci.attention(q, k, v, bias=bias, return_aux=foci.AuxRequest(lse=True))
        assert out.requires_grad == grad
        torch.testing.assert_close(aux.lse, reference(q, k, v, return_aux=foci.AuxRequest(lse=True))[1].lse + bias)


# FLEX-09
def test_functions_that_ask_what_may_change_are_asked_again():
    q, k, v = tensors()

    def helper():
        """Has an attribute."""

    def by_attribute(score, b, h, i, j):
        return score * helper.factor

    def by_state(score, b, h, i, j):
        return score * (2.0 if torch.is_grad_enabled() else 3.0)

    table = torch.ones(4)

    def by_version(score, b, h, i, j):
        return score * (1.0 + table._version)

    for factor in (2.0, 3.0):
        helper.factor = factor
        for _ in range(2):
            torch.testing.assert_close(foci.attention(q, k, v, score=by_attribute), reference(q, k, v, scale=factor / 8**0.5))
        with torch.set_grad_enabled(factor == 2.0):
            torch.testing.assert_close(foci.attention(q, k, v, score=by_state), reference(q, k, v, scale=factor / 8**0.5))
        table.add_(1)
        torch.testing.assert_close(foci.attention(q, k, v, score=by_version), reference(q, k, v, scale=factor / 8**0.5))


# FLEX-09
def test_zeros_of_either_sign_are_two_numbers():
    q, k, v = tensors()
    for zero in (0.0, -0.0, 0.0):
        out = foci.attention(q, k, v, mask=lambda b, h, i, j, zero=zero: 1 / ((i + 1) * zero) > 0)
        assert out.any() == (str(zero) == "0.0")


# FLEX-09
def test_equal_code_with_other_globals_is_another_function():
    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    k, v = torch.cat((k, k), 2), torch.cat((v, v), 2)
    code = compile("def keep(b, h, i, j):\n    return j < length()\n", "<text>", "exec")
    kept = []
    for length in (foci.kv_len, foci.q_len):
        scope = {"length": length, "__name__": "mine"}
        exec(code, scope)
        kept.append(foci.attention(q, k, v, mask=scope["keep"]))
        torch.testing.assert_close(
            kept[-1], reference(q, k[:, :, : 8 if length is foci.kv_len else 4], v[:, :, : 8 if length is foci.kv_len else 4])
        )


def test_the_same_tensor_twice_is_not_taken_for_two():
    q, k, v = tensors()
    for args in ((q, q, q), (q, k, v), (q, k, k), (q, q, v)):
        for _ in range(2):
            torch.testing.assert_close(foci.attention(*args), reference(*args))


# FLEX-09
def test_one_captured_tensor_in_two_places_is_not_taken_for_two():
    def within(one, other):
        return {"score": lambda s, b, h, i, j: s + one[h] * j - other[h] * i * j}

    def between(one, other):
        return {"score": lambda s, b, h, i, j: s + one[h] * j, "mask": lambda b, h, i, j: (j < i) | (other[h] < 0.5)}

    q, k, v = tensors(grad=True)
    one, other = (torch.rand(4, requires_grad=True) for _ in range(2))
    for make in (within, between):
        for pair in ((one, one), (one, other), (other, one), (one, one)):
            for _ in range(2):
                got, want = foci.attention(q, k, v, **make(*pair)), by_formula(q, k, v, make(*pair))
                torch.testing.assert_close(got, want)
                inputs = [q, k, v, *({one} & {*pair}), *({other} & {*pair})]
                actual, sought = (torch.autograd.grad(out.sum(), inputs, materialize_grads=True) for out in (got, want))
                torch.testing.assert_close(actual, sought, rtol=1e-4, atol=1e-4)


def by_formula(q, k, v, functions):
    """Of the tensors [B, H, S, D], without foci."""
    rows, columns, heads = torch.arange(24)[:, None], torch.arange(24)[None], torch.arange(4)[:, None, None]
    scores = functions["score"](q @ k.transpose(2, 3) / q.shape[3] ** 0.5, None, heads, rows, columns)
    if "mask" in functions:
        scores = scores.masked_fill(~functions["mask"](None, heads, rows, columns), -torch.inf)
    return scores.softmax(3).nan_to_num() @ v


def test_gradients_wanted_by_turns():
    q, k, v = tensors()
    for wanted in ((True, False, False), (False, True, True), (True, True, True), (False, False, True)):
        for _ in range(2):
            leaves = [t.clone().requires_grad_(on) for t, on in zip((q, k, v), wanted, strict=True)]
            got, want = foci.attention(*leaves), reference(*leaves)
            inputs = [t for t in leaves if t.requires_grad]
            torch.testing.assert_close(
                torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(want.sum(), inputs), rtol=1e-4, atol=1e-4
            )


def test_tensors_that_come_back_otherwise_than_they_were_saved():
    q, k, v = (torch.randn(2, 24, 4, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    want = torch.autograd.grad(foci.attention(q, k, v).sum(), (q, k, v))
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t.clone()):
            out = foci.attention(q, k, v)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k, v)), want)


def test_packed_calls_of_new_offsets():
    for cut in (5, 9):
        q, k, v = (torch.randn(24, 4, 8, requires_grad=True) for _ in range(3))
        offsets = torch.tensor([0, cut, 24])
        with foci.use("reference"):
            want = foci.varlen_attn(q, k, v, offsets, offsets, 19, 19, window_size=(-1, 0))
        got = foci.varlen_attn(q, k, v, offsets, offsets, 19, 19, window_size=(-1, 0))
        torch.testing.assert_close(got, want)
        weights = torch.randn_like(got)
        torch.testing.assert_close(torch.autograd.grad(got, (q, k, v), weights), torch.autograd.grad(want, (q, k, v), weights))


def test_wrong_arguments_are_told_at_each_call():
    q, k, v = tensors()
    foci.attention(q, k, v, dropout_p=0.0)
    for _ in range(2):
        with pytest.raises(TypeError, match="dropout_p"):
            foci.attention(q, k, v, dropout_p=False)
        with pytest.raises(TypeError, match="scale"):
            foci.attention(q, k, v, scale=True)
        with pytest.raises(ValueError, match="head dim"):
            foci.attention(q, k[..., :4], v)


class Multiplied(Backend, Kernel):
    """A backend that is recognised by its results."""

    name = "multiplied"

    def __init__(self, factor):
        self.factor = factor

    def reject(self, problem, target):
        return None

    def cost(self, problem, target):
        return 0.0

    def build(self, plan):
        return self

    def forward(self, operands):
        return Results(operands.value * self.factor, operands.query.new_zeros(operands.query.shape[:3]))

    def backward(self, operands, results, cotangents):
        raise NotImplementedError


def test_another_backend_of_the_same_name_is_another():
    q, k, v = tensors()
    for factor in (2.0, 3.0):
        foci.register_backend(Multiplied(factor))
        try:
            for _ in range(2):
                torch.testing.assert_close(foci.attention(q, k, v), v * factor)
        finally:
            foci.unregister_backend("multiplied")
    torch.testing.assert_close(foci.attention(q, k, v), reference(q, k, v))


def test_what_is_known_is_bounded(monkeypatch):
    monkeypatch.setattr(call_cache, "_CAPACITY", 4)
    for length in range(1, 12):
        q = torch.randn(1, 1, length, 8)
        foci.attention(q, q, q)
    assert len(call_cache._calls) == 4


@pytest.mark.parametrize("mask", [foci.masks.causal(), foci.masks.window(3), foci.masks.causal() & foci.masks.window(3)], ids=str)
def test_calls_with_a_named_mask_are_kept(monkeypatch, mask):
    """Nothing that tracing itself asks torch counts as a value that the function read."""
    monkeypatch.setattr(call_cache, "_calls", type(call_cache._calls)())
    query = torch.randn(1, 2, 40, 8)
    for _ in range(2):
        foci.attention(query, query, query, mask=mask)
    assert len(call_cache._calls) == 1


# FLEX-09
@pytest.mark.parametrize("library", ["foci", "torch"])
def test_a_block_mask_that_was_written_to_is_read_again(library):
    create = foci.create_block_mask if library == "foci" else flex_attention.create_block_mask
    q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))
    mask = create(lambda b, h, i, j: i >= j, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    rows = torch.arange(64)
    for n in range(3):  # fewer of the lower blocks each time
        mask.kv_num_blocks[..., n] = 0
        keep = (rows[:, None] >= rows) & ((rows[:, None] // 16 > n) | (rows[:, None] // 16 > rows // 16))
        want = reference(q, k, v, mask=keep)
        for _ in range(2):
            torch.testing.assert_close(foci.flex_attention(q, k, v, block_mask=mask), want)
    mask.kv_num_blocks = torch.zeros_like(mask.kv_num_blocks)
    keep = rows[:, None] // 16 > rows // 16
    torch.testing.assert_close(foci.flex_attention(q, k, v, block_mask=mask), reference(q, k, v, mask=keep))


def test_calls_with_a_block_mask_are_known():
    mask = foci.create_block_mask(lambda b, h, i, j: i >= j, None, None, 24, 24, device="cpu", BLOCK_SIZE=8)
    for _ in range(3):
        q, k, v = tensors(grad=True)
        got, want = (foci.flex_attention(q, k, v, block_mask=mask) for _ in range(2))
        assert torch.equal(got, want)
        torch.autograd.grad(got.sum(), (q, k, v))
    assert len(call_cache._calls) == 1
