"""A backend that foci has never heard of, from outside, through the public registry alone."""

# SDPA-18

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass, field

import pytest
import torch

import foci
from foci import execution
from foci.backends.contract import Backend, Kernel, Obstacle, Plan
from foci.planner import choose
from foci.problem import Cotangents, Formula, Gradients, Layout, Operands, Problem, Results, Target
from foci.variant import PLAIN


@dataclass
class Accelerator(Backend):
    """Plain attention by two products and a softmax, as a vendor would write it for a device of its own.

    It takes the device kind that torch leaves to third parties, and the CPU, where it can be run here.
    """

    name: str = "acme"
    devices: tuple[str, ...] = ("privateuseone", "cpu")
    seconds: float = 1e-9
    compiled: list[Plan] = field(default_factory=list)

    def reject(self, problem: Problem, target: Target, /) -> str | None:
        if target.device not in self.devices:
            return f"acme runs on {' and '.join(self.devices)}, not on {target.device}"
        if not problem.variant.is_plain or problem.formula.dropout or problem.formula.layout is not Layout.DENSE:
            return "acme computes plain dense attention only"
        if problem.q_heads != problem.kv_heads:
            return "acme wants as many key heads as query heads"
        return None

    def cost(self, problem: Problem, target: Target, /) -> float:
        return self.seconds

    def build(self, plan: Plan, /) -> AcmeKernel:
        self.compiled.append(plan)
        return AcmeKernel()


class AcmeKernel(Kernel):
    def forward(self, operands: Operands, /) -> Results:
        scores = operands.scale * operands.query @ operands.key.mT
        lse = scores.logsumexp(-1)
        out = torch.exp(scores - lse[..., None]) @ operands.value
        return Results(out.transpose(1, 2).contiguous().transpose(1, 2), lse)

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        query, key, value = operands.query, operands.key, operands.value
        weights = torch.exp(operands.scale * query @ key.mT - results.lse[..., None])
        delta = (cotangents.out * results.out).sum(-1, keepdim=True)
        if cotangents.lse is not None:
            delta = delta - cotangents.lse[..., None]
        grad_scores = operands.scale * weights * (cotangents.out @ value.mT - delta)
        return Gradients(grad_scores @ key, grad_scores.mT @ query, weights.mT @ cotangents.out)


@pytest.fixture
def acme():
    backend = Accelerator()
    foci.register_backend(backend)
    yield backend
    foci.unregister_backend("acme")


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 10, 8, generator=generator, requires_grad=True) for _ in range(3)]


def test_it_runs_forward_and_backward_and_is_named(acme):
    query, key, value = tensors()
    with foci.observe() as log:
        out = foci.attention(query, key, value)
        out.square().sum().backward()
    assert [call.backend for call in log.calls + log.backward_calls] == ["acme", "acme"]
    with foci.use("reference"):
        again = [t.detach().requires_grad_() for t in (query, key, value)]
        expected = foci.attention(*again)
        expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close([t.grad for t in (query, key, value)], [t.grad for t in again])


def test_what_it_declines_goes_elsewhere_with_its_reason(acme):
    with foci.observe() as log:
        foci.attention(*tensors(), mask=foci.masks.window(3))
    (call,) = log.calls
    assert call.backend != "acme"
    assert ("acme", "acme computes plain dense attention only") in [(r.backend, r.reason) for r in call.rejections]


def test_explain_lists_it(acme):
    chosen = foci.explain(*tensors())
    assert chosen.backend == "acme"
    assert "acme computes plain dense attention only" in str(foci.explain(*tensors(), mask=foci.masks.window(3)))


def test_use_admits_it_alone_or_leaves_it_out(acme):
    with foci.use("acme"), foci.observe() as log:
        foci.attention(*tensors())
        with pytest.raises(foci.NoViableBackend, match="acme computes plain dense attention only"):
            foci.attention(*tensors(), mask=foci.masks.causal())
    assert [call.backend for call in log.calls] == ["acme"]
    with foci.use("reference"), foci.observe() as log:
        foci.attention(*tensors())
    assert [call.backend for call in log.calls] == ["reference"]


def test_the_planner_chooses_it_for_its_own_device(acme):
    problem = Problem(Formula(PLAIN), torch.float32, 8, 8, 3, 3, 2, 16, 16)
    decision = choose(problem, Target("privateuseone"))
    assert decision.plan is not None
    assert decision.plan.backend == "acme"
    elsewhere = choose(problem, Target("cuda", 90))
    assert ("acme", "acme runs on privateuseone and cpu, not on cuda") in [(r.backend, r.reason) for r in elsewhere.rejections]


def test_cost_decides(acme):
    acme.seconds = 1e9
    assert foci.explain(*tensors()).backend != "acme"


def test_one_kernel_for_all_lengths(acme):
    for length in (3, 17, 100, 5):
        foci.attention(*(torch.randn(1, 3, length, 8) for _ in range(3)))
    assert len({plan.text for plan in acme.compiled}) == len(acme.compiled) == 1


def test_it_runs_in_a_compiled_graph(acme):
    torch._dynamo.reset()
    # one length: it asks which backend runs
    compiled = torch.compile(foci.attention, backend="aot_eager", fullgraph=True)
    query, key, value = tensors()
    with foci.observe() as log:
        out = compiled(query, key, value)
        out.sum().backward()
    assert [call.backend for call in log.calls + log.backward_calls] == ["acme", "acme"]
    torch.testing.assert_close(out, foci.attention(query, key, value))


def test_it_is_gone_after_unregistering():
    foci.register_backend(Accelerator())
    foci.attention(*tensors())
    foci.unregister_backend("acme")
    with foci.observe() as log:
        foci.attention(*tensors())
    assert log.calls[0].backend != "acme"
    with pytest.raises(ValueError, match="no backend 'acme'"), foci.use("acme"):
        pass


def test_registering_checks(acme):
    with pytest.raises(ValueError, match="a backend 'acme' exists already"):
        foci.register_backend(Accelerator())
    with pytest.raises(TypeError, match="derives from foci.backends.contract.Backend; got an object of Partial, which lacks build"):
        foci.register_backend(type("Partial", (), {"name": "partial", "reject": None, "cost": None})())
    with pytest.raises(TypeError, match="must be an object .*; got the class Accelerator"):
        foci.register_backend(Accelerator)
    with pytest.raises(TypeError, match="name must be a string; that of Accelerator is 3"):
        foci.register_backend(Accelerator(name=3))
    with pytest.raises(TypeError, match="abstract method.*build"):
        type("Derived", (Backend,), {"name": "derived", "reject": None, "cost": None})()


def test_what_a_backend_need_not_have_has_a_default(acme):
    query, key, value = tensors()
    plan = foci.explain(query, key, value).decision.plan
    assert acme.note(plan.problem, plan.target) == ""
    assert acme.kernel_key(plan) == plan.text
    assert acme.row_kernels(plan.target) is None
    assert acme.features() == frozenset()
    assert acme.facts() == {}


def test_an_obstacle_is_warned_of_once_for_each_topic(acme, monkeypatch):
    monkeypatch.setattr(execution, "_warned", set())
    reasons = iter([Obstacle("no driver; install it"), "too long", Obstacle("old driver", "drivers"), Obstacle("older driver", "drivers")])
    monkeypatch.setattr(acme, "reject", lambda problem, target: next(reasons))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (3, 8, 20, 50):
            with foci.use("acme", "reference"):
                foci.attention(*(torch.randn(1, 3, length, 8) for _ in range(3)))
    instead = "foci runs its backend 'reference' instead of 'acme', which would be faster"
    assert [str(w.message) for w in caught] == [f"{instead}: no driver; install it", f"{instead}: old driver"]


def test_an_obstacle_goes_into_another_process_as_it_is():
    again = pickle.loads(pickle.dumps(Obstacle("no driver", "drivers")))
    assert isinstance(again, Obstacle)
    assert (again, again.topic) == ("no driver", "drivers")
