"""Places in compiled code that call attention: what they launch; launches by stand-ins."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernel_stand_ins import VARIANTS, operands_of, placed
from triton import knobs

import foci
from foci.operator import op_impl
from foci.operator.compiled_call import Backward, BackwardRows, Forward
from foci.operator.op_schema import flatten
from foci.problem import Formula, Outputs
from foci.trace_functions import bind

VARIANTS = {**VARIANTS, "row_max": (None, None, {})}


def arguments(name):
    """Of the operator, in tensors of their own."""
    score, mask, how = VARIANTS[name]
    bound = bind(score, mask, torch.device("cpu"))
    operands = operands_of(bound, **how)
    return flatten(Formula(bound.variant, outputs=Outputs(row_max=name == "row_max"), dropout="seed" in how), operands, None)


def backward_inputs(args, dlse=None):
    """Of the backward operator, but for its operands."""
    out, lse, *_ = op_impl.results(*args)
    return (torch.zeros_like(out), dlse and torch.zeros_like(lse), None, None, out, lse, "1110"[: 3 + len(args[3])])


def known(name, place, dlse=None):
    """A place that has run, and its arguments in other tensors."""
    place = (kind := place)(fixed=True)
    for _ in range(2):
        args = arguments(name)
        args = args if kind is Forward else (*backward_inputs(args, dlse), *args)
        place(*args)
    return place, args


def tensors_of(*args):
    tensors = []
    for arg in args:
        tensors += tensors_of(*arg) if isinstance(arg, (tuple, list)) else [arg] if isinstance(arg, torch.Tensor) else []
    return tensors


def noted(log, run):
    """What is launched, and what comes of it."""
    del log[:]
    results = run()
    return log[:], results


@pytest.mark.parametrize("kind", [Forward, Backward])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("decode", "split")])
def test_a_place_launches_what_a_call_does(launched, name, kind):
    worked_out, log = launched
    place, args = known(name, kind)
    del worked_out[:]
    called, actual = noted(log, lambda: place(*args))
    wanted, expected = noted(log, lambda: op_impl.results(*args) if kind is Forward else op_impl.gradients(*args))
    assert placed(called, tensors_of(args, actual)) == placed(wanted, tensors_of(args, expected))
    assert called
    assert not worked_out
    if kind is Forward:
        assert [t is None for t in actual] == [False, False, name != "row_max", True, True]
    for one, other in zip(actual, expected, strict=True):
        assert one is None or (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize("name", ["plain", "causal", "dropout"])
def test_rows_of_gradients_are_launched_where_they_lie(launched, name):
    worked_out, log = launched
    place, args = known(name, BackwardRows)
    del worked_out[:]
    called, rows = noted(log, lambda: place(*args))
    assert not worked_out
    assert (rows.shape, rows.stride()) == ((2, 256, 3 * 256), (256 * 3 * 256, 3 * 256, 1))
    called = placed(called, tensors_of(args, rows))
    (number,) = {part[0] for part in flat_pairs(called) if part[1] == 512}
    assert {(number, 0), (number, 512), (number, 1024)} <= set(flat_pairs(called))
    _, apart = noted(log, lambda: op_impl.gradients(*args))  # is another pass
    assert len({t.untyped_storage().data_ptr() for t in apart}) == 3
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
    called, gradients = noted(launched[1], lambda: place(*args))
    assert args[1].data_ptr() in flat(called)
    assert len(gradients) == 3


def flat(value):
    return [part for each in value for part in flat(each)] if isinstance(value, (tuple, list)) else [value]


@pytest.mark.parametrize("kind", [Forward, Backward])
def test_a_place_remembers_its_last_call_alone(launched, kind):
    place, args = known("causal", kind)
    last, at = place._last, 0 if kind is Forward else 7
    place(*args)
    assert place._last is last
    apart = torch.zeros(args[at].numel() + 4, dtype=args[at].dtype)[4:].as_strided(args[at].shape, args[at].stride())
    place(*args[:at], apart, *args[at + 1 :])
    assert place._last is not last  # its address is no multiple of 16
    last = place._last
    with foci.use("reference"):
        place(*args)
    assert (place._last.known.outline.chosen.decision.plan.backend == "reference") == (
        kind is Forward
    )  # a backward is by whom its forward was
    with foci.observe() as log:
        place(*args)
    assert len(log.calls) + len(log.backward_calls) == 1


def test_whoever_watches_launches_is_told_of_them(launched):
    worked_out, log = launched
    place, args = known("causal", Forward)

    def watch(metadata):
        pass

    knobs.runtime.launch_enter_hook.add(watch)
    try:
        del worked_out[:]
        called, _ = noted(log, lambda: place(*args))
    finally:
        knobs.runtime.launch_enter_hook.remove(watch)
    assert not called
    assert [entry.is_launch for entry in worked_out] == [True, True]


def test_one_tensor_in_two_places_has_a_pass_of_its_own(launched):
    place, args = known("plain", Forward)
    called, _ = noted(launched[1], lambda: place(args[0], args[0], *args[2:]))
    assert args[1].data_ptr() not in flat(called)
    called, _ = noted(launched[1], lambda: place(*args))
    assert args[1].data_ptr() in flat(called)
