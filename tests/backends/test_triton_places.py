"""Passes of places in compiled code, whose tensors differ in their addresses alone; launches by stand-ins."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernel_stand_ins import VARIANTS, operands_of, placed
from triton import knobs

import foci
from foci.backends.gpu import bound_launch
from foci.operator import compiled_call, op_impl
from foci.operator.compiled_call import Backward, BackwardRows, Forward
from foci.operator.op_schema import flatten
from foci.problem import Formula, Outputs
from foci.trace_functions import bind

FIXED = ("plain", "causal", "alibi", "dropout", "row_max")
VARIANTS = {**VARIANTS, "row_max": (None, None, {})}


def arguments(name):
    """Of the operator, in tensors of their own."""
    score, mask, how = VARIANTS[name]
    found = bind(score, mask, torch.device("cpu"))
    operands = operands_of(found, **how)
    return flatten(Formula(found.variant, outputs=Outputs(row_max=name == "row_max"), dropout="seed" in how), operands, None)


def given(args, dlse=None):
    """Of the backward operator, but for its operands."""
    out, lse, *_ = op_impl.results(*args)
    return (torch.zeros_like(out), dlse and torch.zeros_like(lse), None, None, out, lse, "1110"[: 3 + len(args[3])])


def known(name, place, dlse=None):
    """A place that has run, and its arguments in other tensors."""
    place = (kind := place)(fixed=True)
    for _ in range(2):
        args = arguments(name)
        args = args if kind is Forward else (*given(args, dlse), *args)
        place(*args)
    return place, args


def tensors_of(*args):
    found = []
    for arg in args:
        found += tensors_of(*arg) if isinstance(arg, (tuple, list)) else [arg] if isinstance(arg, torch.Tensor) else []
    return found


@pytest.mark.parametrize("kind", [Forward, Backward])
@pytest.mark.parametrize("name", FIXED)
def test_a_place_launches_what_a_call_does(launched, name, kind):
    worked_out, log = launched
    place, args = known(name, kind)
    assert place._last.run is not None
    del worked_out[:], log[:]
    made = place(*args)
    fixed = placed(log, tensors_of(args, made))
    del log[:]
    wanted = op_impl.results(*args) if kind is Forward else op_impl.gradients(*args)
    assert fixed == placed(log, tensors_of(args, wanted))
    assert fixed
    assert not worked_out
    if kind is Forward:
        assert [t is None for t in made] == [False, False, name != "row_max", True, True]
    for one, other in zip(made, wanted, strict=True):
        assert one is None or (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize("name", ["plain", "causal", "dropout"])
def test_rows_of_gradients_are_launched_where_they_lie(launched, name):
    worked_out, log = launched
    place, args = known(name, BackwardRows)
    assert place._last.run is not None
    del worked_out[:], log[:]
    made = place(*args)
    fixed = placed(log, tensors_of(args, made))
    del log[:]
    wanted = op_impl.gradient_rows(*args)
    assert fixed == placed(log, tensors_of(args, wanted))
    assert not worked_out
    assert (made.shape, made.stride()) == (wanted.shape, wanted.stride()) == ((2, 256, 3 * 256), (256 * 3 * 256, 3 * 256, 1))
    (number,) = {part[0] for part in flat_pairs(fixed) if part[1] == 512}
    assert {(number, 0), (number, 512), (number, 1024)} <= set(flat_pairs(fixed))
    del log[:]
    apart = op_impl.gradients(*args)  # is another pass
    assert len({t.data_ptr() for t in apart}) == 3
    assert all(t.is_contiguous() or t.transpose(1, 2).is_contiguous() for t in apart)


def flat_pairs(value):
    """(number of a tensor, bytes from its beginning), wherever `placed` has them."""
    if not isinstance(value, (tuple, list)):
        return []
    if isinstance(value, tuple) and len(value) == 2 and all(type(part) is int for part in value):
        return [value]
    return [pair for each in value for pair in flat_pairs(each)]


def test_the_gradient_of_lse_has_its_place(launched):
    place, args = known("plain", Backward, dlse=True)
    assert place._last.run is not None
    del launched[1][:]
    made = place(*args)
    assert args[1].data_ptr() in flat(launched[1])
    assert len(made) == 3


def flat(value):
    return [part for each in value for part in flat(each)] if isinstance(value, (tuple, list)) else [value]


@pytest.mark.parametrize("kind", [Forward, Backward])
@pytest.mark.parametrize("name", ["document", "jagged"])
def test_others_are_looked_up(launched, name, kind):
    place, _ = known(name, kind)
    assert place._last.run is None


@pytest.mark.parametrize("kind", [Forward, Backward])
def test_what_changed_is_noticed(launched, kind, monkeypatch):
    place, args = known("causal", kind)
    run, at = place._last.run, 0 if kind is Forward else 7
    tensors = tensors_of(args[:3]) + [None] if kind is Forward else [*args[7:10], None, args[4], args[5], args[0], None]
    assert run(tensors) is not None
    moved = torch.zeros(args[at].numel() + 4, dtype=args[at].dtype)[4:].as_strided(args[at].shape, args[at].stride())
    assert run([moved, *tensors[1:]]) is None
    with monkeypatch.context() as patch:
        patch.setattr(bound_launch, "free_stream_on", lambda device: None)
        assert run(tensors) is None
        place(*args)
        assert place._last.run is run  # for when nobody captures
    with monkeypatch.context() as patch:
        patch.setattr(bound_launch, "free_stream_on", lambda device: 7)
        assert run(tensors) is None

    def watch(metadata):
        pass

    knobs.runtime.launch_enter_hook.add(watch)
    try:
        assert run(tensors) is None
    finally:
        knobs.runtime.launch_enter_hook.remove(watch)
    with foci.observe() as log:
        place(*args)
    assert len(log.calls) + len(log.backward_calls) == 1
    with foci.use("reference"):
        place(*args)
    assert (place._last.run is None) == (kind is Forward)  # a backward is by whom its forward was asked of


def test_one_tensor_in_two_places_has_a_pass_of_its_own(launched):
    place, args = known("plain", Forward)
    run = place._last.run
    del launched[1][:]
    place(args[0], args[0], *args[2:])
    assert place._last.run is not run
    assert args[1].data_ptr() not in flat(launched[1])
    del launched[1][:]
    place(*args)
    assert args[1].data_ptr() in flat(launched[1])


def test_a_pass_that_never_comes_is_not_asked_for_always(launched, monkeypatch):
    asked = []
    monkeypatch.setattr(op_impl, "fix_forward", lambda *given: asked.append(given))
    place, args = known("plain", Forward)
    for _ in range(8):
        place(*args)
    assert len(asked) == compiled_call._TRIES


def test_strides_other_than_promised_are_not_fixed(launched):
    _, args = known("plain", Forward)
    found = op_impl.forward_known(args)
    assert op_impl.fix_forward(found, args) is not None
    strides = [tuple(2 * n for n in found.strides[0])]
    assert op_impl.fix_forward(found._replace(strides=strides), args) is None
