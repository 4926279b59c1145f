"""Fixtures of tests that launch nothing: kernels compile, or are noted, where they would be launched."""

import pytest
from stand_ins import StandIn


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """stand_in({module: names of its kernels}, arch): the list that fills with `Compiled` as they would be launched. With
    is_read_only Triton reads their Python and compiles no further, a small part of the time."""

    def put(kernels, arch, *, is_read_only=False):
        compiled_kernels = []
        for module, names in kernels.items():
            for name in names:
                monkeypatch.setattr(
                    module, name, StandIn(getattr(module, name), arch, compiled_kernels, tmp_path / "kernel.cubin", is_read_only)
                )
        return compiled_kernels

    return put


@pytest.fixture
def logs(monkeypatch):
    """Launches as they were worked out, and as they were launched again, by stand-ins for kernels."""
    from kernel_stand_ins import put_stand_ins

    return put_stand_ins(monkeypatch)


@pytest.fixture
def launched(logs, monkeypatch):
    """`logs` of calls that are planned for a GPU, without gradients."""
    import torch
    from kernel_stand_ins import plan_for_a_gpu

    plan_for_a_gpu(monkeypatch)
    with torch.no_grad():
        yield logs


@pytest.fixture
def calls(logs, monkeypatch):
    """Calls of foci as on a GPU; notes which passes were known, by direction."""
    from collections import OrderedDict

    import torch

    import foci
    from foci import call_cache, execution, planner
    from foci.backends.gpu import kernel
    from foci.problem import Target

    monkeypatch.setitem(planner._targets, torch.device("cpu"), Target("cuda", 90, frozenset({"triton"})))
    for module, name in ((execution, "_plans"), (call_cache, "_calls")):
        monkeypatch.setattr(module, name, OrderedDict())
    known = []
    for name in ("launch_forward", "launch_backward"):
        method = getattr(kernel.GpuKernel, name)

        def again(self, *args, name=name, method=method):
            tensors = method(self, *args)
            known.append((name, tensors is not None))
            return tensors

        monkeypatch.setattr(kernel.GpuKernel, name, again)
    with foci.use("triton"):
        yield known
