"""Kernels under a release of Triton that foci was not tested with check themselves before they run."""

import os
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import foci
from foci import cache_check, call_cache, execution, masks, planner
from foci.backends import blocked, disk, hopper, self_check
from foci.backends import triton as triton_backend
from foci.backends.contract import Backend, Kernel, Obstacle, Plan, Unbuildable
from foci.backends.self_check import Device, Kind, SelfCheck, Verdict, run_in_process
from foci.check_kernels import _Posed, judge
from foci.compat.triton import TESTED
from foci.problem import Formula, Layout, Problem, Target
from foci.trace_functions import bind

UNSEEN = Target("cuda", 90, frozenset({"triton", "triton-3.99"}))
H200 = Target("cuda", 90, frozenset({"triton", "triton-3.6"}))
KIND = Kind("blocked", "causal", "dense", "float32", 16, 24, 100, 700, True, False, False, True, False, "")


def problem(mask=None, score=None, layout=Layout.DENSE, **rest):
    bound = bind(score, mask, torch.device("cpu"))
    asked = Problem(Formula(bound.variant, layout), torch.bfloat16, 128, 128, 16, 16, 2, 8192, 8192)
    return replace(asked, capture_grads=(False,) * len(bound.captures), **rest)


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """installed(verdict): a machine with a GPU and an unseen release, whose checks give this verdict; the list of kinds checked."""

    def install(verdict, release="3.99.0"):
        kinds = []

        def run(kind, device):
            kinds.append(kind)
            if isinstance(verdict, BaseException):
                raise verdict
            return verdict

        monkeypatch.setattr(self_check, "_triton", lambda: release)
        monkeypatch.setattr(self_check, "_self_check", SelfCheck(run, lambda target: Device(0, "NVIDIA H100"), tmp_path))
        return kinds

    return install


# NOW-02
def test_a_kind_is_checked_once_and_its_plans_compile(installed):
    kinds = installed(Verdict(None))
    for length in (8192, 16384):  # of one kind
        plan = Plan("hopper", problem(masks.causal(), q_len=length, kv_len=length), UNSEEN)
        assert hopper.BACKEND.reject(plan.problem, UNSEEN) is None
        assert hopper.BACKEND.build(plan) is not None
    assert [kind.text for kind in kinds] == ["causal, dense, bfloat16, D 128, Dv 128, 4300 x 4300"]
    hopper.BACKEND.build(Plan("hopper", problem(masks.causal(), q_len=1024), UNSEEN))
    triton_backend.BACKEND.build(Plan("triton", problem(masks.causal()), UNSEEN))
    assert [(kind.backend, kind.q_len) for kind in kinds[1:]] == [("hopper", 700), ("triton", 4300)]


# NOW-02
@pytest.mark.parametrize("backend", [hopper.BACKEND, triton_backend.BACKEND], ids=lambda backend: backend.name)
def test_tested_releases_are_never_checked(installed, backend):
    kinds = installed(Verdict("out wrong"))
    for major, minor in TESTED:
        target = Target("cuda", 90, frozenset({"triton", f"triton-{major}.{minor}"}))
        assert backend.reject(problem(), target) is None
        assert backend.build(Plan(backend.name, problem(), target)) is not None
        assert "not tested" not in backend.note(problem(), target)
    assert kinds == []


# NOW-02
@pytest.mark.parametrize("is_final", [True, False])
def test_a_failure_is_a_reason_with_its_cause(installed, is_final):
    kinds = installed(Verdict("out, gradient of key wrong", is_final))
    asked = problem(masks.window(100), query_grad=True, key_grad=True, value_grad=True)
    assert hopper.BACKEND.reject(asked, UNSEEN) is None, "nothing runs before a plan is compiled"
    with pytest.raises(Unbuildable) as raised:
        hopper.BACKEND.build(Plan("hopper", asked, UNSEEN))
    said = str(raised.value)
    assert ("fails its self-check" in said) == is_final
    for words in ("Triton 3.99.0", "out, gradient of key wrong", "window", "forward and backward"):
        assert words in said
    reason = hopper.BACKEND.reject(asked, UNSEEN)
    assert reason == said
    assert isinstance(reason, Obstacle)
    assert len(kinds) == 1
    assert hopper.BACKEND.reject(problem(masks.causal()), UNSEEN) is None, "other kinds are not known to fail"


def test_explain_says_that_a_release_was_not_tested_and_then_what_failed(installed):
    installed(Verdict("CompilationError: no such layout"))
    asked = problem(masks.causal())
    before = planner.choose(asked, UNSEEN)
    assert before.plan.backend == "hopper"
    assert "not tested with Triton 3.99: the first call checks its kernels" in before.table()
    with pytest.raises(Unbuildable):
        hopper.BACKEND.build(before.plan)
    after = planner.choose(asked, UNSEEN)
    assert after.plan.backend == "triton"
    assert "no: fails its self-check with Triton 3.99.0, which foci was not tested with: CompilationError: no such layout" in after.table()


# NOW-02
def test_verdicts_are_kept_and_hold_for_one_release_and_kind(installed, monkeypatch):
    for verdict in (Verdict("out wrong"), Verdict(None)):
        kinds = installed(verdict, f"3.99.{int(verdict.failure is None)}")
        asked = problem(masks.causal())
        for _ in range(2):
            kind = Kind.of("hopper", asked)
            assert self_check._self_check.verdict(kind, UNSEEN) == verdict
            monkeypatch.setattr(self_check._self_check, "_verdicts", {})  # as in the next process
        assert len(kinds) == 1
        assert (hopper.BACKEND.reject(asked, UNSEEN) is None) == (verdict.failure is None)
    changes = {
        "Triton": lambda: monkeypatch.setattr(self_check, "_triton", lambda: "3.99.7"),
        "foci": lambda: monkeypatch.setattr(self_check, "code_fingerprint", lambda: "another"),
        "torch": lambda: monkeypatch.setattr(torch, "__version__", "2.99.0"),
        "GPU": lambda: monkeypatch.setattr(self_check._self_check, "_find_device", lambda target: Device(0, "NVIDIA H200")),
    }
    for name, change in changes.items():
        kinds = installed(Verdict(None), "3.99.0")
        change()
        self_check._self_check.verdict(kind, UNSEEN)
        assert len(kinds) == 1, name
        self_check._self_check.verdict(kind, UNSEEN)
        assert len(kinds) == 1, name


def test_what_is_not_final_is_not_kept(installed, tmp_path):
    installed(Verdict("CUDA out of memory", is_final=False))
    self_check._self_check.verdict(KIND, UNSEEN)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"key": "another", "failure": null}', b"\xff"])
def test_a_file_that_is_not_its_own_counts_as_none(installed, tmp_path, content):
    kinds = installed(Verdict(None))
    self_check._self_check.verdict(KIND, UNSEEN)
    (file,) = tmp_path.iterdir()
    disk.write_atomically(file, content)
    self_check._self_check._verdicts.clear()
    self_check._self_check.verdict(KIND, UNSEEN)
    assert len(kinds) == 2


def test_a_checker_that_raises_says_nothing_of_the_kernels(installed, tmp_path):
    installed(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        hopper.BACKEND.build(Plan("hopper", problem(), UNSEEN))
    installed(ValueError("not JSON"))
    with pytest.raises(Unbuildable, match="could not check itself .*ValueError: not JSON"):
        hopper.BACKEND.build(Plan("hopper", problem(), UNSEEN))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def unseen(monkeypatch):
    """Calls of tensors on the CPU are planned for a GPU with an unseen release; nothing is known from before."""
    monkeypatch.setitem(planner._targets, torch.device("cpu"), UNSEEN)
    for module, name in ((execution, "_plans"), (call_cache, "_calls")):
        monkeypatch.setattr(module, name, type(getattr(module, name))())
    monkeypatch.setattr(execution, "_warned", set())


# NOW-02
def test_a_backend_that_alone_is_allowed_and_fails_is_an_error_with_its_cause(installed, unseen):
    installed(Verdict("out wrong"))
    q = torch.randn(1, 2, 16, 64).to(torch.bfloat16)
    for error in (Unbuildable, planner.NoViableBackend):  # as it is found, then as it is known
        with foci.use("hopper"), pytest.raises(error, match="fails its self-check with Triton 3.99.0.*out wrong"):
            foci.attention(q, q, q)


# NOW-02
def test_a_failure_in_a_compiled_call_and_with_caches_that_check_themselves(installed, unseen, monkeypatch):
    kinds = installed(Verdict("out wrong"))
    monkeypatch.setattr(cache_check, "ENABLED", True)
    torch._dynamo.reset()
    # one length: one kind of problem is checked, and lengths belong to it
    attend = torch.compile(lambda q: foci.attention(q, q, q, mask=masks.causal()), backend="aot_eager", fullgraph=True)
    q = torch.randn(1, 2, 64, 64).to(torch.bfloat16)
    with foci.use("hopper", "triton", "blocked"), foci.observe() as log, pytest.warns(UserWarning, match="fails its self-check"):
        outs = [attend(q) for _ in range(3)]
    assert {call.backend for call in log.calls} == {"blocked"}
    assert sorted(kind.backend for kind in kinds) == ["hopper", "triton"]
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), q.double(), q.double(), is_causal=True)
    for out in outs:
        torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)


# NOW-02
def test_kernels_that_are_checked_are_not_tuned(installed):
    installed(Verdict(None))
    asked = problem(masks.causal(), tuned=True)
    kernels = {target: triton_backend.BACKEND.build(Plan("triton", asked, target)) for target in (UNSEEN, H200)}
    assert [type(kernels[target]).__name__ for target in (UNSEEN, H200)] == ["GpuKernel", "TunedKernel"]


# NOW-02
def test_another_backend_runs_with_one_warning_for_each_that_fails(installed, unseen):
    installed(Verdict("out wrong"))
    q = torch.randn(1, 2, 2048, 64).to(torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught, foci.use("hopper", "triton", "blocked"), foci.observe() as log:
        warnings.simplefilter("always")
        for mask in (masks.causal(), masks.window(5), None, masks.causal()):
            out = foci.attention(q, q, q, mask=mask)
    assert [call.backend for call in log.calls] == ["blocked"] * 4
    said = [str(one.message) for one in caught if "self-check" in str(one.message)]
    beginnings = [f"{name!r}, which would be faster: fails its self-check with Triton 3.99.0" for name in ("hopper", "triton")]
    assert sorted(one.partition(" instead of ")[2].partition(", which foci")[0] for one in said) == beginnings
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), q.double(), q.double(), is_causal=True)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)


def test_a_kept_failure_warns_in_the_next_process_too(installed, monkeypatch):
    installed(Verdict("out wrong"))
    with pytest.raises(Unbuildable):
        hopper.BACKEND.build(Plan("hopper", problem(), UNSEEN))
    monkeypatch.setattr(execution, "_warned", set())
    self_check._self_check._verdicts.clear()
    monkeypatch.setattr(triton_backend.BACKEND, "build", lambda plan: blocked.BACKEND.build(plan), raising=False)
    with pytest.warns(UserWarning, match="instead of 'hopper', which would be faster: fails its self-check with Triton 3.99.0"):
        execution._built(planner.choose(problem(), UNSEEN))


# NOW-02
def test_a_forward_that_cannot_be_built_when_it_first_runs_is_another_backends(monkeypatch):
    class Late(Wrong):
        def build(self, plan, /):
            class Broken(Kernel):
                def forward(self, operands, /):
                    raise Unbuildable("Triton 3.99, which foci was not tested with, does not compile attention_forward: no such layout")

            return Broken()

    q = torch.randn(1, 2, 16, 8)
    monkeypatch.setattr(execution, "_warned", set())
    foci.register_backend(Late("out", None))
    try:
        with foci.observe() as log, pytest.warns(UserWarning, match="does not compile attention_forward: no such layout"):
            out = foci.attention(q, q, q)
    finally:
        foci.unregister_backend("wrong")
    assert [call.backend for call in log.calls][-1] != "wrong"
    assert len(log.calls) == 1
    assert [one.reason for one in log.calls[0].rejections if one.backend == "wrong"]
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q))


def test_row_kernels_are_those_of_tested_releases():
    assert triton_backend.BACKEND.row_kernels(UNSEEN) is None
    assert hopper.BACKEND.row_kernels(UNSEEN) is None
    assert triton_backend.BACKEND.row_kernels(H200) is not None


def test_a_target_without_its_gpu_is_planned_and_not_run(monkeypatch, tmp_path):
    monkeypatch.setattr(self_check, "_self_check", SelfCheck(lambda kind, device: pytest.fail("ran"), directory=tmp_path))
    assert hopper.BACKEND.reject(problem(), UNSEEN) is None
    with pytest.raises(Unbuildable, match="could not check itself .* no such GPU"):
        hopper.BACKEND.build(Plan("hopper", problem(), UNSEEN))


def test_the_gpu_is_the_one_of_the_target(monkeypatch):
    capabilities = {0: (8, 0), 1: (9, 0), 2: (9, 0)}
    monkeypatch.setattr(self_check, "release", lambda: (3, 99))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.get)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    for current, expected in ((0, 1), (1, 1), (2, 2)):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert self_check.device_for(UNSEEN) == Device(expected, f"GPU {expected}")
    assert self_check.device_for(replace(UNSEEN, arch=100)) is None
    assert self_check.device_for(Target("cuda", 90, frozenset({"triton", "triton-3.98"}))) is None


# ---- the check itself, on the CPU ----

VARIANTS = ("full", "causal", "prefix", "window", "document", "mask", "added", "score", "pair")
KINDS = [
    *(replace(KIND, variant=variant) for variant in VARIANTS),
    *(replace(KIND, variant=variant, layout="jagged", has_dropout=variant == "causal") for variant in VARIANTS if variant != "mask"),
    *(replace(KIND, variant=variant, is_learned=True) for variant in ("added", "score", "pair")),
    replace(KIND, variant="document", has_blocks=True),
    replace(KIND, variant="pair", has_blocks=True, is_learned=True),
    replace(KIND, variant="prefix", layout="paged", q_len=1, has_backward=False, aux="row_max"),
    replace(KIND, variant="full", has_dropout=True, q_len=1, aux="column_sums,weights"),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.text)
def test_a_small_problem_is_of_its_kind_and_every_backend_takes_it(kind):
    with foci.observe() as log:
        _Posed.of(kind, torch.device("cpu")).run("blocked", torch.float32)
    (call,) = log.calls
    assert Kind.of("blocked", call.problem) == kind
    asked = replace(call.problem, dtype=torch.bfloat16)
    assert triton_backend.BACKEND.reject(asked, H200) is None
    if kind.layout != "paged" and "weights" not in kind.aux and kind.variant != "prefix":
        assert hopper.BACKEND.reject(asked, H200) is None
    assert judge(kind, torch.device("cpu")) == Verdict(None)


class Wrong(Backend):
    """`blocked` with one of its results changed."""

    name = "wrong"

    def __init__(self, part, change):
        self.part, self.change = part, change

    def reject(self, problem, target, /):
        return None

    def cost(self, problem, target, /):
        return 0.0

    def build(self, plan, /):
        kernel, part, change = blocked.BACKEND.build(plan), self.part, self.change

        class Changed(Kernel):
            def forward(self, operands, /):
                results = kernel.forward(operands)
                if hasattr(results, part):
                    change(getattr(results, part))
                return results

            def backward(self, operands, results, cotangents, /):
                gradients = kernel.backward(operands, results, cotangents)
                if hasattr(gradients, part):
                    change(getattr(gradients, part))
                return gradients

        return Changed()


def raise_it(tensor):
    raise RuntimeError("PTXAS error: no such instruction\nmore of it")


@pytest.mark.parametrize(
    ("part", "change", "failure"),
    [
        ("out", lambda t: t[0, 0, 3].mul_(1.5), "out"),
        ("out", lambda t: t[0, 0, 3].fill_(float("nan")), "out"),
        ("lse", lambda t: t[0, 0, 3].add_(1.0), "lse"),
        ("key", lambda t: t[0, 0, :16].zero_(), "gradient of key wrong"),
        ("value", lambda t: t.neg_(), "gradient of value wrong"),
        ("query", raise_it, "RuntimeError: PTXAS error: no such instruction"),
    ],
    ids=["row", "nan", "lse", "key", "value", "raises"],
)
def test_wrong_kernels_are_found(part, change, failure):
    foci.register_backend(Wrong(part, change))
    try:
        verdict = judge(replace(KIND, backend="wrong", variant="full"), torch.device("cpu"))
    finally:
        foci.unregister_backend("wrong")
    assert verdict.failure is not None
    assert failure in verdict.failure
    assert "more of it" not in verdict.failure
    assert verdict.is_final


def test_a_full_gpu_says_nothing_of_the_kernels():
    def full(tensor):
        raise torch.OutOfMemoryError("CUDA out of memory")

    foci.register_backend(Wrong("out", full))
    try:
        assert not judge(replace(KIND, backend="wrong"), torch.device("cpu")).is_final
        assert not judge(KIND, torch.device("cuda:7")).is_final, "no such device: the problem cannot be set up"
    finally:
        foci.unregister_backend("wrong")


# NOW-02
def test_the_check_runs_whatever_surrounds_its_caller():
    with FakeTensorMode(), torch.no_grad(), foci.use("reference"):
        assert run_in_process(KIND, "cpu") == Verdict(None)


@pytest.mark.parametrize(
    ("code", "failure", "is_final"),
    [
        ("import os; os.abort()", "its process ended by SIGABRT", True),
        ("import os; os.kill(os.getpid(), 9)", "its process ended by SIGKILL", False),
        ("import sys; print('x', file=sys.stderr); raise ValueError('no such name')", "status 1: ValueError: no such name", True),
        ("import time; time.sleep(60)", "did not end within 2 s", True),
        ("import os; print('[' + '0' * 0 + 'null, ' + str(os.environ['FOCI_SELF_CHECK'] != '0').lower() + ']')", None, False),
    ],
)
def test_a_process_that_dies_is_a_verdict(code, failure, is_final):
    verdict = run_in_process(KIND, "cpu", code, limit=2 if "sleep" in code else 60)
    assert verdict.is_final == is_final
    assert verdict.failure is None if failure is None else failure in verdict.failure


@pytest.mark.parametrize("executable", ["", "/nowhere/python"])
def test_a_process_that_cannot_start_is_no_final_verdict(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    verdict = run_in_process(KIND, "cpu")
    assert verdict.failure is not None
    assert not verdict.is_final


def test_the_environment_turns_checks_off():
    code = (
        "from foci.backends import self_check, hopper\n"
        "from foci.problem import Target\n"
        "unseen = Target('cuda', 90, frozenset({'triton', 'triton-3.99'}))\n"
        "assert not self_check.ENABLED and not self_check.describe_check(unseen)\n"
        "assert self_check.find_failure('hopper', None, unseen) is None\n"
        "from foci.cli.environment import _of_backends\n"
        "assert [fact.value for fact in _of_backends() if fact.name == 'triton backend, self-check'] == ['off (FOCI_SELF_CHECK=0)']\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "FOCI_SELF_CHECK": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
