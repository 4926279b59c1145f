"""Planning on devices that need not exist; what explain, observe and the no-viable-backend error say."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foci
from foci.backends.contract import Backend
from foci.planner import choose, find_target, row_kernels
from foci.problem import Formula, Layout, Outputs, Problem, Target
from foci.trace_functions import bind
from foci.variant import PLAIN

CPU = torch.device("cpu")
TARGETS = {
    "sm_80": Target("cuda", 80, frozenset({"triton"})),
    "sm_90": Target("cuda", 90, frozenset({"triton"})),
    "cuda without triton": Target("cuda", 90),
    "cpu": Target("cpu", 0, frozenset({"avx2"})),
    "cpu with a compiler": Target("cpu", 0, frozenset({"avx512", "cxx"})),
    "elsewhere": Target("elsewhere"),
}


def variant_of(score=None, mask=None):
    return bind(score, mask, CPU).variant


SOFTCAP = variant_of(foci.scores.softcap(20.0).function, foci.masks.causal().function)
CAUSAL = variant_of(None, foci.masks.causal().function)


def problem(variant=PLAIN, *, dtype=torch.bfloat16, layout=Layout.DENSE, outputs=None, dropout=False, grads=False, **sizes):
    parts = {"head_dim": 64, "value_dim": 64, "q_heads": 8, "kv_heads": 8, "batch": 4, "q_len": 1024, "kv_len": 1024} | sizes
    formula = Formula(variant, layout, outputs or Outputs(), dropout)
    return Problem(formula, dtype, **parts, query_grad=grads, key_grad=grads, value_grad=grads)


PROBLEMS = {
    "plain": problem(),
    "causal": problem(CAUSAL),
    "causal training": problem(CAUSAL, grads=True),
    "softcap": problem(SOFTCAP),
    "softcap training": problem(SOFTCAP, grads=True),
    "float64": problem(dtype=torch.float64),
    "float32": problem(dtype=torch.float32),
    "jagged": problem(CAUSAL, layout=Layout.JAGGED),
    "dropout": problem(dropout=True, grads=True),
    "grouped": problem(kv_heads=2),
    "odd head dim": problem(head_dim=7, value_dim=5),
    "weights": problem(outputs=Outputs(weights=True)),
    "weights of a jagged call": problem(outputs=Outputs(weights=True), layout=Layout.JAGGED),
    "decode": problem(q_len=1, kv_len=65536),
}


# SDPA-15
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_problem_is_planned_or_explained(name, target):
    decision = choose(PROBLEMS[name], TARGETS[target])
    assert [v.backend for v in decision.verdicts] == list(foci.backends.names())
    for verdict in decision.verdicts:
        assert (verdict.reason is None) != (verdict.cost == float("inf"))
        assert verdict.reason is None or (len(verdict.reason) > 10 and not verdict.reason.endswith("."))
    if name == "weights of a jagged call":
        assert decision.plan is None and len(decision.rejections) == len(foci.backends.names())
    else:
        assert decision.plan is not None
        chosen = next(v for v in decision.verdicts if v.backend == decision.plan.backend)
        assert chosen.cost == min(v.cost for v in decision.verdicts)
    assert choose(PROBLEMS[name], TARGETS[target]) == decision  # pure
    assert decision.table().count("\n") == len(decision.verdicts) - 1


IMPORTED = """
import sys, torch, foci
from foci.planner import choose
from foci.problem import Target
q = torch.randn(1, 2, 16, 8)
with foci.observe() as log:
    foci.attention(q, q, q)
    foci.nn.MultiheadAttention(16, 2, batch_first=True)(*[torch.randn(1, 4, 16)] * 3)
assert not any(name.startswith("foci.backends.hopper") for name in sys.modules)
assert ("hopper", "needs tensors on cuda, not on cpu") in [(one.backend, one.reason) for one in log.calls[0].rejections]
assert ("cpu", "needs tensors on cpu, not on cuda") in [
    (one.backend, one.reason) for one in choose(log.calls[0].problem, Target("cuda", 90, frozenset({"triton", "triton-3.6"}))).rejections
]
"""


def test_a_backend_of_another_device_is_not_imported():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


NEVER_ASKED = [
    (name, key) for key, target in TARGETS.items() for name in foci.backends.names() if name not in foci.backends.names_on(target.device)
]


@pytest.mark.parametrize(("name", "target"), NEVER_ASKED)
def test_a_backend_that_is_not_asked_would_have_declined(name, target):
    assert foci.backends.load(name).reject(PROBLEMS["plain"], TARGETS[target])


def test_backends_that_are_not_asked():
    assert {(name, TARGETS[target].device) for name, target in NEVER_ASKED} == {
        ("cpu", "cuda"), ("cpu", "elsewhere"), ("hopper", "cpu"), ("hopper", "elsewhere"),
    }  # fmt: skip


@pytest.mark.parametrize("target", ["cpu", "elsewhere"])
def test_plain_torch_takes_what_native_kernels_do_not(target):
    assert choose(PROBLEMS["softcap"], TARGETS[target]).plan.backend in ("blocked", "reference")
    assert choose(PROBLEMS["softcap"], TARGETS[target], ["reference"]).plan.backend == "reference"


def test_reference_only_for_small_problems():
    for target in TARGETS.values():
        for name in ("softcap", "softcap training", "jagged", "dropout"):
            assert choose(PROBLEMS[name], target).plan.backend != "reference", (name, target)


# SDPA-15
def test_restricted_choice():
    decision = choose(PROBLEMS["softcap"], TARGETS["sm_90"], ("aten",))
    assert decision.plan is None
    reasons = {r.backend: r.reason for r in decision.rejections}
    assert set(reasons) == set(foci.backends.names())
    assert "score function" in reasons["aten"] and reasons["blocked"] == "only aten may be used here"
    nothing = choose(PROBLEMS["plain"], TARGETS["cpu"], ())
    assert {r.reason for r in nothing.rejections} == {"no backend may be used here"}
    with pytest.raises(ValueError, match="no backend 'nonsense'; there are"):
        choose(PROBLEMS["plain"], TARGETS["cpu"], ("nonsense",))
    error = foci.NoViableBackend(decision)
    assert error.decision is decision
    assert str(error).startswith("no viable backend for this attention:\n") and decision.table() in str(error)


SNAPSHOT = """backend=reference;device=cuda;arch=90;dtype=torch.bfloat16;D=64;Dv=64;grads=qkv:
layout=dense;outputs=lse,column_sums;dropout=1;blocks=64x128
captures \n"""


def test_text_of_a_plan():
    formula = Formula(CAUSAL, Layout.DENSE, Outputs(lse=True, column_sums=True), True, (64, 128))
    sizes = {"head_dim": 64, "value_dim": 64, "q_heads": 8, "kv_heads": 8, "batch": 4, "q_len": 1024, "kv_len": 1024}
    asked = Problem(formula, torch.bfloat16, **sizes, query_grad=True, key_grad=True, value_grad=True)
    plan = choose(asked, TARGETS["sm_90"], ("reference",)).plan
    assert plan.text.startswith(SNAPSHOT)
    assert "kv_idx" in plan.text and "q_idx" in plan.text
    for other in ({"q_len": 2048}, {"kv_len": 64}, {"batch": 1}):  # lengths are not part of it
        again = choose(
            Problem(formula, torch.bfloat16, **(sizes | other), query_grad=True, key_grad=True, value_grad=True),
            TARGETS["sm_90"],
            ("reference",),
        )
        assert again.plan.text == plan.text
    for other in ({"head_dim": 128}, {"value_dim": 32}):
        again = choose(
            Problem(formula, torch.bfloat16, **(sizes | other), query_grad=True, key_grad=True, value_grad=True),
            TARGETS["sm_90"],
            ("reference",),
        )
        assert again.plan.text != plan.text


PROGRAM = """
import torch, foci
from foci.planner import choose
from foci.problem import Formula, Problem, Target
from foci.trace_functions import bind
table, ids = torch.randn(4), torch.zeros(9, dtype=torch.int64)
score = lambda s, b, h, q, kv: (s * table[h] + 0.37 * (q - kv)).tanh() * 30
mask = lambda b, h, q, kv: ((q >= kv) | (kv < 7)) & (ids[q] == ids[kv]) & (ids[b] != 3)
variant = bind(score, mask, torch.device("cpu")).variant
problem = Problem(Formula(variant), torch.float32, 64, 64, 4, 4, 1, 16, 16, True, True, True, (True, False))
for target in (Target("cuda", 90, frozenset({"triton"})), Target("cpu", 0, frozenset({"avx2", "cxx"}))):
    decision = choose(problem, target)
    print(decision.plan.text)
    print(decision.table())
"""


def test_plans_are_the_same_in_every_process():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "12345")
    ]
    assert runs[0] == runs[1]
    assert "captures float32:1 int64:1" in runs[0]


# Round trips -------------------------------------------------------------------------------------------------------

TABLES = (torch.zeros(4), torch.zeros(4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.float16), torch.zeros(5, dtype=torch.bool))


@st.composite
def numbers(draw, depth=3):
    """A function of (score, b, h, q, kv) that returns a number."""
    if depth == 0 or draw(st.booleans()):
        leaf = draw(st.sampled_from(["score", "b", "h", "q", "kv", "number", "table", "ids", "matrix"]))
        value = draw(st.one_of(st.integers(-5, 5), st.floats(-3, 3)))
        return {
            "score": lambda s, b, h, q, kv: s, "b": lambda s, b, h, q, kv: b, "h": lambda s, b, h, q, kv: h, "q": lambda s, b, h, q, kv: q,
            "kv": lambda s, b, h, q, kv: kv, "number": lambda s, b, h, q, kv: torch.zeros_like(s) + value, "table": lambda s, b, h, q, kv: TABLES[0][h],
            "ids": lambda s, b, h, q, kv: TABLES[1][kv], "matrix": lambda s, b, h, q, kv: TABLES[2][h, b].sin(),
        }[leaf]  # fmt: skip
    left, right = draw(numbers(depth=depth - 1)), draw(numbers(depth=depth - 1))
    combine = draw(st.sampled_from([
        torch.add, torch.sub, torch.mul, torch.maximum, lambda x, y: torch.where(x > y, x, y * 2), lambda x, y: (x * 0.3).tanh() - y,
        lambda x, y: x + TABLES[2][0].sum(-1) * y, lambda x, y: torch.where(TABLES[3][0 * x.to(torch.int64)], x, y),
    ]))  # fmt: skip
    return lambda *args: combine(left(*args), right(*args))


@settings(max_examples=60, deadline=None)
@given(
    score=numbers(), pair=st.tuples(numbers(depth=2), numbers(depth=2)), layout=st.sampled_from(Layout), outputs=st.builds(Outputs, *[st.booleans()] * 4),
    dropout=st.booleans(), block=st.none() | st.tuples(st.integers(1, 512), st.integers(1, 512)),
)  # fmt: skip
def test_formulas_read_back(score, pair, layout, outputs, dropout, block):
    zero = lambda b, h, q, kv: (0.5 * b, b, h, q, kv)
    mask = lambda *at: pair[0](*zero(*at)) <= pair[1](*zero(*at))
    formula = Formula(variant_of(score, mask), layout, outputs, dropout, block)
    again = Formula.parse(formula.text)
    assert again == formula and again.text == formula.text
    assert Formula.parse(formula.line) == Formula.parse(formula.text) == formula and "\n" not in formula.line
    assert formula.line.startswith("strides=query;")  # what outputs promise is part of Inductor's cache key
    assert again.variant.score is formula.variant.score and again.variant.mask is formula.variant.mask


# What people read --------------------------------------------------------------------------------------------------


# SDPA-15
def test_explanation():
    q = torch.randn(2, 8, 100, 64)
    k = torch.randn(2, 2, 300, 64)
    explanation = foci.explain(q, k, k, mask=foci.masks.window(16), score=foci.scores.softcap(30.0))
    text = str(explanation)
    lines = text.splitlines()
    assert lines[0] == "attention on cpu: float32, 8 query heads on 2, head dim 64, value dim 64"
    assert lines[1] == "dense, batch <= 2, queries <= 128, keys <= 512"
    assert "tanh" in lines[2] and "kv_idx" in lines[2]
    assert [line.split()[0] for line in lines[3:-1]] == list(foci.backends.names())
    assert lines[-1] == f"note: {explanation.notes[0]}"
    assert sum("chosen, about" in line for line in lines) == 1
    assert explanation.backend in foci.backends.names()
    with foci.use("aten"):
        nothing = foci.explain(q, k, k, mask=foci.masks.window(16))
    assert nothing.backend is None and "chosen" not in str(nothing)


# SDPA-15
def test_explain_agrees_with_observe():
    q = torch.randn(1, 2, 40, 8, requires_grad=True)
    with foci.use("aten", "blocked", "reference"):
        for kwargs in ({}, {"mask": foci.masks.causal()}, {"score": foci.scores.alibi(2)}, {"dropout_p": 0.1}, {"sink": torch.zeros(2)}):
            explanation = foci.explain(q, q, q, **kwargs)
            with foci.observe() as log:
                foci.attention(q, q, q, **kwargs)
            assert [call.backend for call in log.calls] == [explanation.backend]
            assert log.calls[0].problem == explanation.decision.problem
            assert log.calls[0].rejections == explanation.decision.rejections


def test_logs_close_after_errors():
    with pytest.raises(ZeroDivisionError), foci.observe():
        raise ZeroDivisionError
    from foci.context import observers

    assert not observers()
    with pytest.raises(ZeroDivisionError), foci.use("reference"):
        raise ZeroDivisionError
    from foci.context import allowed_backends

    assert allowed_backends() is None


# SDPA-15
def test_use_belongs_to_a_thread():
    import threading

    from foci.context import allowed_backends

    seen = []
    with foci.use("reference"):
        thread = threading.Thread(target=lambda: seen.append(allowed_backends()))
        thread.start()
        thread.join()
        with foci.use("blocked"):
            assert allowed_backends() == ("blocked",)
        assert allowed_backends() == ("reference",)
    assert seen == [None]


def test_this_machine():
    target = find_target(CPU)
    assert target.device == "cpu" and target.arch == 0 and target.features
    assert find_target(torch.device("meta")) == Target("meta")


class Fast(Backend):
    name = "fast"

    def reject(self, problem, target):
        return None

    def cost(self, problem, target):
        return 0.0

    def build(self, plan):
        return foci.backends.load("reference").build(plan)


# SDPA-18
def test_registered_backends_come_first():
    q = torch.randn(1, 2, 16, 8)
    before = foci.explain(q, q, q).backend
    foci.attention(q, q, q)  # a decision is cached
    foci.register_backend(Fast())
    try:
        assert foci.backends.names()[0] == "fast"
        with foci.observe() as log:
            foci.attention(q, q, q)
        assert log.calls[0].backend == "fast"
    finally:
        foci.unregister_backend("fast")
    with foci.observe() as log:
        foci.attention(q, q, q)
    assert log.calls[0].backend == before


class Rows(Fast):
    name = "rows"
    kernels = object()

    def row_kernels(self, target):
        return self.kernels if target.device == "cpu" else None


def test_row_kernels_of_the_first_allowed_backend_that_has_them():
    before = row_kernels(CPU)
    foci.register_backend(Fast())
    foci.register_backend(Rows())
    try:
        assert row_kernels(CPU) is row_kernels(CPU, ("fast", "rows")) is Rows.kernels
        assert row_kernels(CPU, ("fast", "reference")) is row_kernels(CPU, ()) is None
        assert row_kernels(torch.device("meta")) is None
    finally:
        foci.unregister_backend("fast")
        foci.unregister_backend("rows")
    assert row_kernels(CPU) is before


@pytest.mark.parametrize("name", ["triton", "hopper"])
@pytest.mark.parametrize(("target", "has"), [("sm_80", True), ("sm_90", True), ("cuda without triton", False), ("elsewhere", False)])
def test_row_kernels_of_triton(name, target, has):
    pytest.importorskip("triton")
    assert (foci.backends.load(name).row_kernels(TARGETS[target]) is not None) is has
