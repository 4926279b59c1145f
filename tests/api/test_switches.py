"""Which backends a call may take, and what is told of those that ran."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import foci
from foci.backends.contract import Backend, Kernel


# SDPA-15
def test_torch_switches():
    q = torch.randn(1, 2, 16, 8)

    def ran():
        with foci.observe() as log:
            foci.scaled_dot_product_attention(q, q, q)
        return log.calls[0].backend

    assert ran() != "reference"
    with sdpa_kernel(SDPBackend.MATH):
        assert ran() == "reference"
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        assert ran() != "reference"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert ran() != "reference"
    with sdpa_kernel(SDPBackend.ERROR), pytest.raises(foci.NoViableBackend, match="no backend may be used here") as caught:
        ran()
    for name in foci.backends.names():
        assert name in str(caught.value)
    with sdpa_kernel(SDPBackend.MATH), foci.use("blocked"), pytest.raises(foci.NoViableBackend):
        ran()
    with sdpa_kernel(SDPBackend.MATH), foci.observe() as log:
        foci.attention(q, q, q)  # foci's own entry point is not torch's
    assert log.calls[0].backend != "reference"


# SDPA-15
def test_global_flags():
    q = torch.randn(1, 2, 16, 8)
    switches = torch.backends.cuda
    kept = (switches.flash_sdp_enabled(), switches.mem_efficient_sdp_enabled(), switches.cudnn_sdp_enabled())
    switches.enable_flash_sdp(False)
    switches.enable_mem_efficient_sdp(False)
    switches.enable_cudnn_sdp(False)
    try:
        with foci.observe() as log:
            foci.scaled_dot_product_attention(q, q, q)
        assert log.calls[0].backend == "reference"
    finally:
        switches.enable_flash_sdp(kept[0])
        switches.enable_mem_efficient_sdp(kept[1])
        switches.enable_cudnn_sdp(kept[2])


# SDPA-15
def test_observed_calls():
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    with foci.observe() as outer:
        with foci.observe() as inner:
            foci.scaled_dot_product_attention(q, q, q).sum().backward()
        foci.attention(q, q, q, mask=foci.masks.window(4))
    assert len(inner.calls) == 1 and len(inner.backward_calls) == 1
    assert len(outer.calls) == 2 and len(outer.backward_calls) == 1
    assert outer.calls[1].problem.variant.text != outer.calls[0].problem.variant.text
    assert any(r.backend == "aten" and "mask function" in r.reason for r in outer.calls[1].rejections)


# SDPA-18
def test_a_backend_for_another_device(monkeypatch):
    from foci.problem import Target

    class Elsewhere(Backend):
        name = "elsewhere"

        def reject(self, problem, target):
            return None if target.device == "meta" else "only the made-up device"

        def cost(self, problem, target):
            return 1e-9

        def build(self, plan):
            class Empty(Kernel):
                def forward(self, operands):
                    from foci.problem import Results, empty_out

                    q = operands.query
                    return Results(empty_out(q, operands.value), q.new_empty(q.shape[:3]))

                def backward(self, operands, results, cotangents):
                    raise AssertionError

            return Empty()

    foci.register_backend(Elsewhere())
    try:
        q = torch.randn(1, 2, 16, 8, device="meta")
        assert foci.explain(q, q, q).backend == "elsewhere"
        assert foci.scaled_dot_product_attention(q, q, q).device.type == "meta"
        assert foci.explain(*[torch.randn(1, 2, 16, 8)] * 3).decision.target == foci.planner.find_target(torch.device("cpu"))
        assert "only the made-up device" in str(foci.explain(*[torch.randn(1, 2, 16, 8)] * 3))
        assert Target("meta") == foci.explain(q, q, q).decision.target
    finally:
        foci.unregister_backend("elsewhere")
    assert "elsewhere" not in foci.backends.names()
