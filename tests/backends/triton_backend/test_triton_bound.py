"""Passes bound for the layers of a batch, whose query, key and value are parts of the rows of one tensor; launches by stand-ins."""

import pytest
import torch

import foci

pytest.importorskip("triton", reason="Triton is not installed")

from kernel_stand_ins import Function, placed, replace_hopper_kernels
from triton import knobs

from foci import masks, planner
from foci.dispatch import PackedCall, Passes, _side_by_side
from foci.nn.layer_ops import Attention, Heads
from foci.prepare import Extras
from foci.problem import OptionalTensors, Outputs, Target

LENGTHS = [0, 56, 256]
HEADS = {"as many": Heads(4, 4, 64), "grouped": Heads(4, 2, 64)}


def attention(offsets, mask=None):
    return Attention(None, mask, Extras(Outputs(), **spans(offsets)))


def spans(offsets):
    return {"cu_q": offsets, "cu_kv": offsets, "max_q": 200, "max_kv": 200}


def rows_of(heads, seed=0):
    width = (heads.query + 2 * heads.key) * heads.width
    return torch.randn(LENGTHS[-1], width, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def known(heads, mask=None, offsets=None):
    """A call that is known, rows, what its forward found, and a gradient."""
    offsets = torch.tensor(LENGTHS) if offsets is None else offsets
    call, rows = attention(offsets, mask).learning(heads, rows_of(heads)), rows_of(heads)
    for _ in range(2):
        results = call.forward_rows(rows, heads)
        gradient = torch.zeros_like(results[0])
        call.backward_rows(rows, results, gradient, heads)
    return call, rows, results, gradient


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", [None, masks.causal().function], ids=["plain", "causal"])
def test_a_bound_pass_launches_what_a_call_does(launched, heads, mask):
    heads = HEADS[heads]
    worked_out, log = launched
    call, *_ = known(heads, mask)
    assert call.passes.forward is not None
    assert call.passes.backward is not None
    rows = rows_of(heads, 1)
    del worked_out[:], log[:]
    results = call.forward_rows(rows, heads)
    forward = placed(log, (rows, *results))
    del log[:]
    out, lse = call.forward(heads.split(rows))
    assert forward == placed(log, (rows, out, lse))
    assert results[0].shape == out.flatten(1).shape
    assert results[1].shape == lse.shape
    gradient = torch.zeros_like(results[0])
    del log[:]
    grad_rows = call.backward_rows(rows, results, gradient, heads)
    assert grad_rows.shape == rows.shape
    tensors = (rows, *results, gradient)
    launched_bound = placed(log, (*tensors, grad_rows))
    del log[:]
    parts = call.backward(heads.split(rows), (heads.of_queries(results[0]), results[1]), heads.of_queries(gradient))
    assert launched_bound == placed(log, (*tensors, _side_by_side(parts)))
    assert not worked_out


def test_layers_of_a_batch_share_what_is_bound(launched):
    heads = HEADS["as many"]
    call, *_ = known(heads)
    passes = call.passes.forward, call.passes.backward
    for seed in range(3):
        rows = rows_of(heads, seed)
        results = call.forward_rows(rows, heads)
        call.backward_rows(rows, results, torch.zeros_like(results[0]), heads)
    assert passes == (call.passes.forward, call.passes.backward)


OTHERS = {
    "other rows": lambda rows: rows[:-1],
    "a gap": lambda rows: torch.zeros(rows.shape[0], 2 * rows.shape[1], dtype=rows.dtype)[:, : rows.shape[1]],
    "another dtype": lambda rows: rows.to(torch.float16),
    "another place": lambda rows: torch.zeros(rows.numel() + 4, dtype=rows.dtype)[4:].view(rows.shape),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_tensors_are_none_of_a_bound_pass(launched, other):
    heads = HEADS["as many"]
    call, rows, results, gradient = known(heads)
    forward, backward = call.passes.forward, call.passes.backward
    changed = OTHERS[other]
    assert forward(changed(rows)) is None
    assert backward(changed(rows), *results, gradient) is None
    assert backward(rows, changed(results[0]), results[1], gradient) is None
    assert backward(rows, *results, changed(gradient)) is None
    assert forward(rows) is not None
    assert backward(rows, *results, gradient) is not None


@pytest.mark.parametrize("is_moved", [False, True])
def test_sequences_that_changed_are_looked_at_again(launched, is_moved):
    heads, offsets = HEADS["as many"], torch.tensor(LENGTHS)
    call, rows, results, gradient = known(heads, offsets=offsets)
    if is_moved:
        offsets.data = torch.tensor([LENGTHS[0], 100, *LENGTHS[2:]])
    else:
        offsets[1] = 100
    assert call.passes.forward(rows) is None
    assert call.passes.backward(rows, *results, gradient) is None
    del launched[1][:]
    call.forward_rows(rows, heads)
    assert "place_sequences" in {name for name, *_ in launched[1]}


def test_whoever_watches_launches_is_told_of_them(launched):
    heads = HEADS["as many"]
    call, rows, results, gradient = known(heads)

    def watch(metadata):
        pass

    knobs.runtime.launch_enter_hook.add(watch)
    try:
        assert call.passes.forward(rows) is None
        assert call.passes.backward(rows, *results, gradient) is None
    finally:
        knobs.runtime.launch_enter_hook.remove(watch)
    with foci.observe() as log:
        call.forward_rows(rows, heads)
        call.backward_rows(rows, results, gradient, heads)
    assert len(log.calls) == 1
    assert len(log.backward_calls) == 1


@pytest.fixture
def hopper(launched, monkeypatch):
    replace_hopper_kernels(monkeypatch, lambda function: Function(function, *launched))
    monkeypatch.setitem(planner._targets, torch.device("cpu"), Target("cuda", 90, frozenset({"triton", "triton-3.6"})))
    monkeypatch.setattr("foci.backends.hopper.forward_pass.count_sms", lambda device: 4)
    with foci.use("hopper"):
        yield launched[1]


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("no_padding", [False, True])
def test_rows_that_are_tokens_all_leave_nothing_to_fill(hopper, no_padding, needs_grad):
    heads, count = HEADS["as many"], 70
    attend = Attention(None, None, Extras(Outputs(), **spans(torch.tensor(LENGTHS))), no_padding=no_padding)
    call = attend.learning(heads, rows_of(heads)) if needs_grad else None

    def run():
        rows = rows_of(heads)
        return call.forward_rows(rows, heads) if needs_grad else (attend(heads, rows),)

    early = [run() for _ in range(2)]  # kept, so that no address is used twice
    del hopper[:]
    runs = [run() for _ in range(count)]
    names = ["attention_forward"] if no_padding else ["attention_forward", "zero_fill_gaps"]
    assert [name for name, *_ in hopper] == names * count
    taken = [args for name, _, args in hopper if name == "attention_forward"]
    assert [args[3][0] for args in taken] == [out.data_ptr() for out, *_ in runs]
    assert not {args[3][0] for args in taken} & {out.data_ptr() for out, *_ in early}
    assert len({args[4] for args in taken}) == (count if needs_grad else 1)
    assert not needs_grad or [args[4] for args in taken] == [lse.data_ptr() for _, lse in runs]
    # in the table of tasks
    assert {args[6][2][7] for args in taken} == {args[6][1][0] for args in taken}


def test_captured_tensors_that_learn_are_known_to_autograd(launched):
    heads, slopes = HEADS["as many"], torch.ones(4, requires_grad=True)
    alibi = Attention(lambda score, b, h, i, j: score + slopes[h] * (j - i), None, Extras(Outputs(), **spans(torch.tensor(LENGTHS))))
    with torch.enable_grad():
        for seed in range(3):
            assert alibi(heads, rows_of(heads, seed)).grad_fn is not None
    assert alibi.captures_learn


def test_offsets_without_versions_and_dropout_are_not_bound(launched):
    heads = HEADS["as many"]
    with torch.inference_mode():
        offsets = torch.tensor(LENGTHS)
    call, *_ = known(heads, offsets=offsets)
    assert call.passes.forward is None
    assert call.passes.backward is None
    offsets = torch.tensor(LENGTHS)
    drops = Extras(Outputs(), dropout_p=0.5, **spans(offsets))
    rows = rows_of(heads)
    for _ in range(3):
        call = PackedCall.of(heads.split(rows), None, None, drops, needs_grad=True)
        call.forward_rows(rows, heads)
        assert call.passes.forward is None


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [LENGTHS[-1], 180, 300])
def test_a_pass_moved_to_other_sequences_launches_what_one_bound_anew_does(launched, heads, tokens):
    heads, log = HEADS[heads], launched[1]
    call, *_ = known(heads)
    other_offsets, rows = torch.tensor([0, 100, tokens]), rows_of(heads, 1).repeat(2, 1)[:tokens].contiguous()

    def run(call):
        del log[:]
        results = call.forward_rows(rows, heads)
        forward = placed(log, (rows, *results))  # before a tensor is allocated where a temporary one lay
        del log[:]
        gradient = torch.zeros_like(results[0])
        grad_rows = call.backward_rows(rows, results, gradient, heads)
        return forward + placed(log, (rows, *results, gradient, grad_rows))

    moved = call.moved(other_offsets)
    passes = moved.passes
    launches = run(moved)
    assert passes.forward is not None
    assert passes.backward is not None
    assert {"place_sequences", "assign_tasks"} <= {name for name, *_ in launches}
    copy = other_offsets.clone()
    assert launches == run(call._replace(optional=OptionalTensors(cu_q=copy, cu_kv=copy), passes=Passes()))
    assert run(moved) == [launch for launch in launches if launch[0] not in ("place_sequences", "assign_tasks")]


@pytest.mark.parametrize("other", ["a token", "a gap", "fewer sequences", "of another dtype"])
def test_a_pass_is_not_moved_to_what_differs_in_more(launched, other):
    heads = HEADS["as many"]
    call, rows, results, gradient = known(heads)
    forward, backward = call.passes.forward, call.passes.backward
    offsets = torch.tensor(LENGTHS)
    if other in ("a token", "a gap"):
        changed_rows = rows[:1] if other == "a token" else OTHERS["a gap"](rows)
        assert forward.moved(changed_rows, offsets) is None
        assert backward.moved(changed_rows, offsets) is None
    elif other == "fewer sequences":
        assert forward.moved(rows, offsets[1:].clone()) is None
        assert backward.moved(rows, offsets[1:].clone()) is None
    else:
        assert forward.moved(rows, offsets.int()) is None
        assert backward.moved(rows, offsets.int()) is None
    assert forward.moved(rows, offsets)(rows) is not None
    assert backward.moved(rows, offsets)(rows, *results, gradient) is not None
