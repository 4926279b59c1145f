"""A call after another one launches on a GPU what it launches alone, whatever they differ in."""

import os

import pytest

pytest.importorskip("triton.experimental.gluon", reason="needs a Triton with Gluon")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

from launch_recorder import Place, recording_launches
from launch_recorder import run as run_recorded
from record_launches import ARCHS

from changed_calls import BASES, ENVIRONMENTS, GRAD_MODES, attend, changes, enter, for_a_gpu, make_inputs
from foci import execution
from foci.problem import is_aligned

# The kernels are stand-ins for those of a GPU: nothing else can run here.
ELSEWHERE = ("reference", "registered", "autocast", "tuned")
CASES = [
    pytest.param(base, changed, door, id=f"{base}: {changed}, {door}")
    for base in BASES
    for changed in changes(base)
    for door in ("eager", "operator", "place")
    if changed.environment not in ELSEWHERE
]


@pytest.fixture(autouse=True)
def aligned_as_on_a_gpu(monkeypatch):
    """Whether tensors are aligned is not asked of those on the CPU."""
    monkeypatch.setattr(execution, "_is_aligned", lambda *tensors: all(map(is_aligned, tensors)))


def launches(log, call, arch):
    with ENVIRONMENTS[call.environment](ARCHS[arch]), GRAD_MODES[call.grad_mode]():
        inputs = make_inputs(call)
        passes = run_recorded(log, lambda *tensors: attend(call, *tensors), inputs, [])
    return [[launch._replace(arguments=alike(launch.arguments)) for launch in one] for one in passes.without_tables()]


def alike(value):
    """Arguments with one word for each tensor that is none of the four inputs: the allocator decides which of them lie in freed memory."""
    if (isinstance(value, Place) and value.tensor > 3) or (isinstance(value, str) and value.startswith("temporary")):
        return "new tensor"
    return tuple(map(alike, value)) if isinstance(value, tuple) else value


# FLEX-09, FLEX-10
@pytest.mark.parametrize("arch", ARCHS, ids="sm_{}".format)
@pytest.mark.parametrize(("base", "changed", "door"), CASES)
def test_a_call_launches_what_it_launches_alone(base, changed, door, arch, monkeypatch):
    calls, alone = [for_a_gpu(BASES[base]), for_a_gpu(changed)], []
    for call in calls:
        with recording_launches(monkeypatch, arch) as log, monkeypatch.context() as patch:
            enter(patch, door)
            alone.append(launches(log, call, arch))
    with recording_launches(monkeypatch, arch) as log:
        enter(monkeypatch, door)
        for n in (0, 0, 1, 1, 0):
            assert launches(log, calls[n], arch) == alone[n]
