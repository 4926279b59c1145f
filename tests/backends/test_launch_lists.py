"""Each call launches the kernels recorded in `golden/launches_sm_*.txt`: at the first call and later ones, eager and compiled.

After a change that is meant to launch something else, record them anew and read the difference:

    python tests/backends/record_launches.py && git diff tests/backends/golden

The PTX of a part of them is recorded likewise, by `record_ptx.py`.
"""

import os

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="needs a Triton with Gluon")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

from launch_calls import CASES, FIXED, make_call, make_inputs
from launch_recorder import recording_launches, run
from record_launches import ARCHS, PINNED, golden_path, read
from record_ptx import COMMON, hashes
from record_ptx import golden_path as ptx_path

import foci
from foci.backends.gpu import stream_state
from foci.compat.triton import release

pytestmark = pytest.mark.skipif(release() != PINNED, reason="launches are kept of the pinned Triton alone")
COMPILED = ("plain", "causal", "window", "alibi", "dropout", "lse", "document")
COMPILED_CASES = [name for name, case in CASES.items() if case.kind in COMPILED and case.sizes == (4, 8, 8, 512, 512, 64, 64)]


@pytest.fixture(params=ARCHS, ids="sm_{}".format)
def arch(request):
    return request.param


@pytest.fixture(scope="module")
def golden():
    return {arch: read(golden_path(arch)) for arch in ARCHS}


def launches(monkeypatch, arch, name, *calls):
    """Passes of the case's call by each of these functions, one after the other."""
    torch._dynamo.reset()
    case = CASES[name]
    with recording_launches(monkeypatch, arch) as log, foci.use(*ARCHS[arch]):
        call = make_call(case)
        return [run(log, wrap(call), make_inputs(case), FIXED) for wrap in calls]


def itself(call):
    return call


@pytest.mark.parametrize("case", CASES)
def test_launches_are_those_recorded(case, arch, golden, monkeypatch):
    first, second = launches(monkeypatch, arch, case, itself, itself)
    assert first.lines() == golden[arch][case]
    assert second.without_tables() == first.without_tables()


@pytest.mark.parametrize("case", COMPILED_CASES)
def test_a_compiled_call_launches_what_the_eager_one_does(case, arch, monkeypatch):
    # one length: launches of one call are compared, and they depend on its lengths
    eager, compiled = launches(monkeypatch, arch, case, itself, lambda call: torch.compile(call, backend="aot_eager", fullgraph=True))
    assert compiled.without_tables() == eager.without_tables()


# As a CUDA graph is captured, or a profiler watches, Triton launches every kernel.
@pytest.mark.parametrize("case", COMPILED_CASES)
def test_a_call_that_may_not_be_replayed_launches_the_same(case, arch, monkeypatch):
    monkeypatch.setattr(stream_state, "has_launch_hooks", lambda: True)
    first, second = launches(monkeypatch, arch, case, itself, itself)
    assert second.without_tables() == first.without_tables()


@pytest.mark.slow
@pytest.mark.parametrize("case", COMMON)
def test_ptx_is_that_recorded(case, arch, request, monkeypatch):
    if request.config.getoption("--sample") > 1:
        pytest.skip("compiles for 20 s; make test-all runs it")
    assert hashes(monkeypatch, arch, case, {}) == read(ptx_path(arch))[case]
