"""GPUs of every architecture, without one: what schedules and costs assume of them, and that foci says so."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import foci
from foci import masks
from foci.backends.gpu import architectures
from foci.backends.gpu.architectures import ARCHITECTURES, find
from foci.backends.gpu.schedules import KINDS, SCHEDULES, schedule_for, shared_bytes
from foci.planner import choose
from foci.problem import Formula, Problem, Target
from foci.trace_functions import bind

GPUS = [arch for arch in ARCHITECTURES if arch]
UNKNOWN = (87, 103, 110, 121)
PROBLEM = Problem(
    Formula(bind(None, masks.causal(), torch.device("cpu")).variant), torch.bfloat16, 128, 128, 16, 16, 2, 4096, 4096, True, True, True
)


def target(arch):
    return Target("cuda", arch, frozenset({"triton", "triton-3.7"}))


@pytest.mark.parametrize("arch", [80, 90])
def test_an_architecture_with_schedules_of_its_own_has_no_note(arch):
    assert any(one == arch for one, *_ in SCHEDULES)
    assert architectures.describe_schedules(arch) == ""
    assert "schedules of" not in choose(PROBLEM, target(arch)).table()


@pytest.mark.parametrize("arch", [arch for arch in GPUS if arch not in (80, 90)])
def test_an_architecture_without_schedules_is_named(arch):
    assert not any(one == arch for one, *_ in SCHEDULES)
    said = {verdict.backend: verdict.reason or verdict.note for verdict in choose(PROBLEM, target(arch)).verdicts}
    assert said["triton"] == f"sm_{arch} has no schedules of its own and takes those of sm_80"
    assert said["hopper"] == "needs an NVIDIA GPU of compute capability 9.0"


@pytest.mark.parametrize("arch", UNKNOWN)
def test_an_unknown_architecture_is_named_and_assumed_to_have_the_least(arch):
    assert arch not in ARCHITECTURES
    assert f"foci knows nothing about sm_{arch}" in choose(PROBLEM, target(arch)).table()
    assert find(arch).shared_bytes == min(row.shared_bytes for row in ARCHITECTURES.values())
    assert find(arch).arch == arch
    for kind in KINDS:
        schedule = schedule_for(kind, arch, (128, 128), 2)
        assert shared_bytes(kind, schedule, (128, 128), 2, scratch=0) <= find(arch).shared_bytes


def test_the_note_stands_beside_others():
    table = choose(replace(PROBLEM, q_len=16), target(120)).table()
    assert "takes those of sm_80; short queries: split-KV" in table


def comparisons_with_numbers(source):
    """Lines that compare an architecture with a number, other than 0, which stands for the interpreter."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = {side.attr if isinstance(side, ast.Attribute) else side.id if isinstance(side, ast.Name) else "" for side in sides}
            if "arch" in names and any(isinstance(side, ast.Constant) and side.value != 0 for side in sides):
                yield node.lineno


NUMBERS = {value for row in ARCHITECTURES.values() if row.arch for value in (row.shared_bytes, row.rate)}


def facts_of_gpus(source):
    """Lines with a number that is a row's."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and node.value in NUMBERS]


def test_no_other_module_of_a_gpu_backend_has_facts_of_an_architecture():
    folder = Path(foci.__file__).parent / "backends"
    for path in (path for name in ("gpu", "hopper", "triton") for path in (folder / name).glob("*.py") if path.name != "architectures.py"):
        source = path.read_text(encoding="utf-8")
        assert [*comparisons_with_numbers(source)] == [], path
        assert facts_of_gpus(source) == [], path


def test_a_fact_of_an_architecture_is_found():
    assert [*comparisons_with_numbers("if target.arch != 90: pass\nif arch == 0: pass\nif 80 <= arch < 90: pass\n")] == [1, 3]
    assert facts_of_gpus("limit = 232448\nrate = 4.5e14\n") == [1, 2]


def test_sms_are_those_of_a_device_or_of_an_h100():
    assert architectures.count_sms(torch.device("cpu")) == 132
