"""Calls known from before on the CPU: only their addresses are packed anew, and the results are those of a call that is new."""

import contextlib
import weakref

import numpy as np
import pytest
import torch
from cpu_calls import CPU, problem

import foci
from foci import call_cache, masks, scores
from foci.backends.contract import Given, Plan
from foci.backends.cpu import build
from foci.backends.cpu.kernel import CpuKernel
from foci.problem import Cotangents, Formula, Operands, OptionalTensors, Problem, Program
from foci.trace_functions import bind

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))

HEADS, LENGTH, DIM = 3, 43, 16
SLOPES, IDS = torch.rand(HEADS), torch.arange(LENGTH) // 9
OFFSETS = torch.tensor([0, 5, 5, 31, LENGTH], dtype=torch.int32)
KEEP = torch.rand(2, 1, LENGTH, LENGTH) > 0.3
LSE = foci.AuxRequest(lse=True)
BLOCKS = foci.create_block_mask(lambda b, h, i, j: i >= j, 2, HEADS, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
TABLE, LENGTHS = torch.tensor([[2, 0, 5], [4, 1, 3]]), torch.tensor([40, 17])


def varlen(q, k, v, offsets=OFFSETS, **arguments):
    return foci.varlen_attn(q, k, v, offsets, offsets, 26, 26, **arguments)


DENSE = {
    "plain": foci.attention,
    "causal": lambda *t: foci.attention(*t, mask=masks.causal()),
    "scale": lambda *t: foci.attention(*t, scale=0.3),
    "alibi": lambda *t: foci.attention(*t, mask=masks.causal(), score=scores.alibi(SLOPES)),
    "document": lambda *t: foci.attention(*t, mask=lambda b, h, i, j: IDS[i] == IDS[j]),
    "tensor mask": lambda *t: foci.attention(*t, mask=KEEP),
    "dropout": lambda *t: foci.attention(*t, dropout_p=0.2),
    "lse": lambda *t: foci.attention(*t, return_aux=LSE),
    "row max": lambda *t: foci.attention(*t, return_aux=foci.AuxRequest(lse=True, row_max=True)),
    "column sums": lambda *t: foci.attention(*t, return_aux=foci.AuxRequest(column_sums=True)),
    "BlockMask": lambda *t: foci.flex_attention(*t, block_mask=BLOCKS),
    "learned bias": lambda *t: foci.attention(*t[:3], score=lambda s, b, h, i, j, bias=t[3]: s + bias[h, i, j]),
    "learned bias of rows": lambda *t: foci.attention(*t[:3], score=lambda s, b, h, i, j, bias=t[3]: s + bias[h, i, 0], return_aux=LSE),
    "learned bias, lse": lambda *t: foci.attention(*t[:3], score=lambda s, b, h, i, j, bias=t[3]: s + bias[h, i, j], return_aux=LSE),
}
PACKED = {
    "packed": varlen,
    "packed causal": lambda *t: varlen(*t, window_size=(-1, 0)),
    "packed lse": lambda *t: varlen(*t, return_aux=LSE),
    "packed dropout": lambda *t: varlen(*t, dropout_p=0.2),
    "packed bias": lambda *t: varlen(*t[:3], score=lambda s, b, h, i, j, bias=t[3]: s + bias[h, i, j]),
}
PAGED = {
    "paged": lambda q: foci.paged_attention(q, *POOL, TABLE, LENGTHS),
    "paged bias": lambda q, bias: foci.paged_attention(q, *POOL, TABLE, LENGTHS, score=lambda s, b, h, i, j: s + bias[h, i, j]),
}
POOL = [torch.randn(6, HEADS, 16, DIM) for _ in range(2)]
HAS_COLUMNS = ("column sums",)  # another pass over the scores, which is made anew
HAS_ROW_GRADIENTS = ("learned bias of rows", "learned bias, lse")  # their backward is more than one native call


def make_inputs(name, dtype=torch.float32):
    if name in PAGED:
        return [torch.randn(2, HEADS, 7, DIM, dtype=dtype), *([torch.randn(HEADS, LENGTH, 48)] if "bias" in name else [])]
    shape = (LENGTH, HEADS, DIM) if name in PACKED else (2, LENGTH, HEADS, DIM)
    tensors = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    if name in DENSE:
        tensors[1:] = [t.transpose(1, 2) for t in tensors[1:]]
        tensors[0] = tensors[0].transpose(1, 2).contiguous()
    return [*tensors, *([torch.randn(HEADS, LENGTH, LENGTH)] if "bias" in name else [])]


def both_ways(name, inputs, wanted):
    """Results and gradients, from one state of the generator."""
    torch.manual_seed(7)
    leaves = [t.detach().requires_grad_(on) for t, on in zip(inputs, wanted)]
    found = (DENSE | PACKED | PAGED)[name](*leaves)
    results = [found] if isinstance(found, torch.Tensor) else [found[0], *(t for t in found[1] if t is not None)]
    outputs = [t for t in results if t.requires_grad]
    if not outputs:
        return results
    cotangents = [torch.randn_like(t) for t in outputs]
    return [*results, *torch.autograd.grad(outputs, [t for t in leaves if t.requires_grad], cotangents)]


@pytest.fixture
def known(monkeypatch):
    """By direction, whether the last calls were known."""
    call_cache.clear()
    found = []

    def noting(name):
        method = getattr(CpuKernel, name)

        def launch(self, *args):
            tensors = method(self, *args)
            found.append((name, tensors is not None))
            return tensors

        return launch

    for name in ("launch_forward", "launch_backward"):
        monkeypatch.setattr(CpuKernel, name, noting(name))
    with foci.use("cpu"):
        yield found


def directions(name, wanted):
    """What is known of a call that was made before."""
    forward = [("launch_forward", name not in HAS_COLUMNS)]
    if name in HAS_COLUMNS or not any(wanted):
        return forward
    return [*forward, ("launch_backward", name not in HAS_ROW_GRADIENTS or not wanted[-1])]


@pytest.mark.parametrize("wanted", ["all", "none", "first", "last"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in (*DENSE, *PACKED, *PAGED)), *((name, torch.bfloat16) for name in (*DENSE, *PACKED))],
)
def test_a_known_call_is_a_new_one(known, name, dtype, wanted):
    inputs = [make_inputs(name, dtype) for _ in range(3)]
    count = len(inputs[0])
    grads = {"all": [True] * count, "none": [False] * count, "first": [True] + [False] * (count - 1)}
    flags = grads.get(wanted, [False] * (count - 1) + [True])
    both_ways(name, inputs[0], flags)
    assert not any(is_known for _, is_known in known)
    for given in inputs:
        known.clear()
        again = both_ways(name, given, flags)
        assert known == directions(name, flags)
        call_cache.clear()
        anew = both_ways(name, given, flags)
        assert len(again) == len(anew)
        for one, other in zip(again, anew):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert torch.equal(one, other)


def test_offsets_that_numpy_changed_are_other_sequences(known):
    shared = np.array([0, 20, LENGTH], dtype=np.int32)
    offsets = torch.from_numpy(shared)
    q, k, v = make_inputs("packed")
    for end in (20, 17, 17, 26):
        shared[1] = end
        out = varlen(q, k, v, offsets)
        for part in (slice(0, end), slice(end, LENGTH)):
            batch = [t[part].transpose(0, 1)[None].double() for t in (q, k, v)]
            weights = torch.softmax(batch[0] @ batch[1].mT / DIM**0.5, -1)
            torch.testing.assert_close(out[part].double(), (weights @ batch[2])[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    assert [is_known for _, is_known in known] == [False, False, True, False]
    shared[1] = LENGTH + 1
    with pytest.raises(ValueError, match="cu_seq_q"):
        varlen(q, k, v, offsets)


def test_offsets_that_numpy_changed_before_a_backward_are_checked(known):
    shared = np.array([0, 20, LENGTH])
    offsets = torch.from_numpy(shared)
    leaves = [t.requires_grad_() for t in make_inputs("packed")]
    outs = [varlen(*leaves, offsets) for _ in range(2)]
    outs[0].sum().backward()
    shared[1:] = 1 << 40
    with pytest.raises(ValueError, match="cu_seq_q"):
        outs[1].sum().backward()


@pytest.mark.parametrize("early", [(LENGTH - 3, LENGTH), (LENGTH, LENGTH - 3), (LENGTH - 3, LENGTH - 3)])
def test_tokens_of_no_sequence_are_zeros_and_said_each_time(known, early):
    q_offsets, kv_offsets = (torch.tensor([0, 20, end]) for end in early)
    inputs = make_inputs("packed")
    for _ in range(3):
        leaves = [t.clone().requires_grad_() for t in inputs]
        with pytest.warns(UserWarning, match="before the last"):
            out = foci.varlen_attn(*leaves, q_offsets, kv_offsets, 26, 26)
        gradients = torch.autograd.grad(out.sum(), leaves)
        for tensor, end in zip((out, *gradients), (early[0], early[0], early[1], early[1]), strict=True):
            assert torch.equal(tensor[end:], torch.zeros(LENGTH - end, HEADS, DIM))
            assert tensor[:end].abs().sum() > 0


def test_no_sequence_at_all(known):
    leaves = [t.requires_grad_() for t in make_inputs("packed")]
    for _ in range(2):
        with pytest.warns(UserWarning, match="before the last"):
            out = varlen(*leaves, torch.tensor([0]))
        for tensor in (out, *torch.autograd.grad(out.sum(), leaves)):
            assert not tensor.any()


def test_sequences_that_do_not_fill_their_span_and_a_gradient_of_lse_are_known(known):
    used = torch.tensor([4, 0, 20, 9], dtype=torch.int32)
    for is_known in (False, True):
        leaves = [t.requires_grad_() for t in make_inputs("packed")]
        known.clear()
        out, lse = varlen(*leaves, seqused_k=used, return_aux=LSE)
        gradients = torch.autograd.grad((out.sum(), lse[:, 5:].sum()), leaves)
        assert known == [("launch_forward", is_known), ("launch_backward", is_known)]
        assert not gradients[1][4:5].any()
        assert gradients[1][:4].any()


def test_sequences_of_the_last_call_alone_are_kept(known):
    """Of each program: offsets that differ at each step of a training take no more memory."""
    spans = [torch.tensor([0, end, LENGTH]) for end in range(17, 27)]
    for offsets in spans:
        leaves = [t.requires_grad_() for t in make_inputs("packed")]
        varlen(*leaves, offsets).sum().backward()
    (program,) = (call.outline.program for call in call_cache._calls.values())
    assert len(program.launches) == 2


def test_other_values_and_threads_are_the_same_call(known):
    inputs, threads = make_inputs("plain"), torch.get_num_threads()
    large = [t.repeat(1, 2, 8, 1) for t in inputs]
    ids = torch.arange(8 * LENGTH) // 9
    mask = foci.Mask(lambda b, h, i, j: ids[i] == ids[j])
    expected = [foci.attention(*large, mask=mask, score=scores.alibi(SLOPES.repeat(2)))]
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            expected.append(foci.attention(*large, mask=mask, score=scores.alibi(SLOPES.repeat(2))))
    finally:
        torch.set_num_threads(threads)
    assert [is_known for _, is_known in known] == [False, True, True, True]
    assert all(torch.equal(expected[0], other) for other in expected[1:])


def test_gradients_are_for_tensors_that_lie_as_they_did(known):
    inputs = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in make_inputs("plain")]
    none, copies = contextlib.nullcontext(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.contiguous())
    cotangent = torch.randn(inputs[0].shape)

    def gradients(hooks, cotangent):
        leaves = [t.detach().requires_grad_() for t in inputs]
        with hooks:
            out = foci.attention(*leaves)
        found = torch.autograd.grad(out, leaves, cotangent)
        return found, known[-1]

    expected, last = gradients(none, cotangent)
    assert last == ("launch_backward", False)
    wide = cotangent.transpose(1, 2).contiguous().transpose(1, 2)
    for hooks, given, is_known in ((none, cotangent, True), (copies, cotangent, False), (none, wide, False), (copies, wide, False),
                                   (none, wide, True), (copies, cotangent, True)):  # fmt: skip
        found, last = gradients(hooks, given)
        assert last == ("launch_backward", is_known)
        assert all(map(torch.equal, expected, found))


def test_gradients_with_a_block_mask_that_lies_otherwise(known):
    """It is saved as query, key and value are."""
    inputs, cotangent = make_inputs("BlockMask"), torch.randn(2, HEADS, LENGTH, DIM)
    turned = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.mT.contiguous().mT if t.dtype == torch.int8 else t)
    found = []
    for hooks in (contextlib.nullcontext(), turned, contextlib.nullcontext(), turned):
        leaves = [t.detach().requires_grad_() for t in inputs]
        with hooks:
            out = DENSE["BlockMask"](*leaves)
        found.append(torch.autograd.grad(out, leaves, cotangent))
    assert all(map(torch.equal, found[0] * 3, [t for each in found[1:] for t in each]))


def test_gradients_of_a_batch_of_cotangents_outside_of_which_the_graph_was_made(known):
    leaves, cotangents = [t.requires_grad_() for t in make_inputs("plain")], torch.randn(3, 2, HEADS, LENGTH, DIM)
    for _ in range(2):
        out = foci.attention(*leaves)
        batch = torch.func.vmap(lambda c, out=out: torch.autograd.grad(out, leaves, c, retain_graph=True))(cotangents)
        for n, cotangent in enumerate(cotangents):
            for one, other in zip(batch, torch.autograd.grad(out, leaves, cotangent, retain_graph=True), strict=True):
                torch.testing.assert_close(one[n], other)


def test_gradients_of_captured_tensors_hold_no_more_memory_than_their_own():
    q, k, v = torch.randn(3, 8, 2, 1024, 16)
    bias = torch.zeros(1024, 1024, requires_grad=True)
    with foci.use("cpu"):
        foci.attention(q, k, v, score=lambda s, b, h, i, j: s + bias[i, j]).sum().backward()
    assert bias.grad.untyped_storage().nbytes() == bias.nbytes


def test_a_packed_call_keeps_no_tensor_alive(known):
    for _ in range(3):
        q, k, v = (t.requires_grad_() for t in make_inputs("packed"))
        slopes, offsets = SLOPES.clone(), OFFSETS.long()
        out = foci.varlen_attn(q, k, v, offsets, offsets, 26, 26, score=scores.alibi(slopes))
        out.sum().backward()
        refs = [weakref.ref(t) for t in (q, k, v, slopes, offsets, out, q.grad)]
        del q, k, v, slopes, offsets, out
        assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.parametrize("joined", [False, True])
def test_a_program_keeps_no_tensor_alive(joined):
    q, k, v, out, cotangent = (torch.randn(2, 64, HEADS, DIM).transpose(1, 2) for _ in range(5))
    program, kernel = Program(joined=joined), CpuKernel(Plan("cpu", problem(query_grad=True, key_grad=True, value_grad=True), CPU))
    operands = Operands(q, k, v, program=program)
    results = kernel.forward(operands)
    gradients = kernel.backward(operands, results, Cotangents(cotangent))
    again = kernel.launch_backward(program, (q, k, v), OptionalTensors(), Given(results.out, results.lse, cotangent))
    assert [t.stride() for t in again] == [t.stride() for t in (gradients.query, gradients.key, gradients.value)]
    assert joined == (gradients.query.untyped_storage().data_ptr() == gradients.key.untyped_storage().data_ptr())
    assert kernel.launch_forward(program, (q, k, v), OptionalTensors()) is not None
    refs = [weakref.ref(t) for t in (q, k, v, out, cotangent, results.out, results.lse, gradients.query, again[0])]
    del q, k, v, out, cotangent, operands, results, gradients, again
    assert [ref() for ref in refs] == [None] * len(refs)


def test_sums_of_gradients_lie_on_the_cpu_whatever_the_default_device():
    """As in compiled code, which runs inside `torch.device`."""
    bias = torch.randn(HEADS, LENGTH, LENGTH)
    bound = bind(lambda s, b, h, i, j: s + bias[h, i, j], None, torch.device("cpu"))
    asked = Problem(Formula(bound.variant), torch.float32, DIM, DIM, HEADS, HEADS, 2, 64, 64, capture_grads=(True,))
    kernel, operands = CpuKernel(Plan("cpu", asked, CPU)), Operands(*make_inputs("plain"), captures=bound.captures)
    gradients = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            results = kernel.forward(operands)
            gradients += kernel.backward(operands, results, Cotangents(results.out)).captures
    assert torch.equal(*gradients)
