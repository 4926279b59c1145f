"""benchmarks/gate.py: what it calls slower, and that it finds a commit that is."""

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATH = ROOT / "benchmarks" / "gate.py"


@pytest.fixture(scope="module")
def gate():
    spec = importlib.util.spec_from_file_location("gate", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line(gate, factor, noise, seed=0, rounds=24):
    """Rounds whose moments are slow for both sides alike, and noise that is each side's own."""
    draw = random.Random(seed)
    base, head = [], []
    for _ in range(rounds):
        moment = draw.choice((1.0, 1.0, 1.7))
        base.append(moment * draw.uniform(1, 1 + noise))
        head.append(moment * draw.uniform(1, 1 + noise) * factor)
    return gate.Line("case", base, head)


def test_noise_is_not_slower_and_a_tenth_is(gate):
    for seed in range(200):
        assert not gate.is_slower(line(gate, 1.0, 0.08, seed), 0.05)
        assert not gate.is_slower(line(gate, 0.8, 0.08, seed), 0.05)
        assert gate.is_slower(line(gate, 1.12, 0.05, seed), 0.05)


def test_one_bad_moment_of_one_side_is_not_slower(gate):
    good = line(gate, 1.0, 0.01)
    assert not gate.is_slower(good._replace(head=[*good.head[:-5], *(10 * t for t in good.head[-5:])]), 0.05)


def test_a_case_is_slower_only_if_both_measurements_say_so(gate):
    slow, even = line(gate, 1.2, 0.02), line(gate, 1.0, 0.02)
    joined, slower = gate.confirm([slow], [even], 0.05)
    assert slower == set()
    assert joined[0].base == slow.base + even.base
    assert gate.confirm([slow], [line(gate, 1.2, 0.02, 1)], 0.05)[1] == {"case"}
    assert gate.confirm([even], [], 0.05) == ([even], set())


def test_the_table_says_what_ran_and_what_is_slower(gate):
    lines = [gate.Line("a", [1e-6, 1e-6], [2e-6, 2e-6]), gate.Line("b", [2e-3] * 3, [1e-3] * 3), gate.Line("c", [], [])]
    rows = gate.format_table(lines, {"a"}, ("v1", "v2")).splitlines()
    assert [row.split() for row in rows] == [
        ["case", "v1", "v2", "ratio"],
        ["a", "1", "us", "2", "us", "2.000", "SLOWER"],
        ["b", "2", "ms", "1", "ms", "0.500"],
        ["c", "-", "-", "-", "not", "compared,", "see", "above"],
    ]


@pytest.mark.slow
def test_a_slower_tree_is_found(gate, tmp_path, capfd):
    shutil.copytree(ROOT / "src" / "foci", tmp_path / "slow" / "src" / "foci", ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "slow" / "src" / "foci" / "__init__.py", "a") as file:
        file.write(
            "\n_attention = attention\n\n\ndef attention(*args, **kwargs):\n    sum(range(5000))\n    return _attention(*args, **kwargs)\n"
        )
    chosen = ["--device", "cpu", "--rounds", "6", "--cases", "host cost, plain"]
    assert gate.main([str(ROOT), str(tmp_path / "slow"), *chosen]) == 1
    screen = capfd.readouterr().out
    assert "SLOWER" in screen
    assert "1 of 1 cases are more than 5% slower" in screen


def test_every_case_but_the_kernels_runs():
    """What a case says when it cannot run is no number, and the table would only say that it was not compared."""
    script = PATH.with_name("gate_cases.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    question = json.dumps(["prepare", ["host cost", "first call"]])
    done = subprocess.run(
        [sys.executable, str(script), "cpu", str(ROOT / "src")], env=environment, input=question, capture_output=True, text=True, check=True
    )
    answers = json.loads(done.stdout)
    assert len(answers) == 8
    assert {name: error for name, error in answers.items() if error is not None} == {}
