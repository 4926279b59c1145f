"""`make matrix`: which releases it chooses, what it runs, and what its exit code says."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import matrix
from foci.compat import releases
from foci.compat import triton as triton_compat

ROOT = Path(matrix.__file__).parents[1]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


# ---- one table of releases ----


# NOW-01
def test_the_table_agrees_with_the_pins_and_the_project():
    project = tomllib.loads(read("pyproject.toml"))["project"]
    oldest, newest, pythons = releases.RELEASES[0], releases.RELEASES[-1], tuple(releases.PYTHONS)
    assert f"torch>={oldest.torch.rsplit('.', 1)[0]}" in project["dependencies"]
    assert project["requires-python"] == f">={pythons[0]},<3.{releases.parse_minor(pythons[-1])[1] + 1}"
    of_python = [line.rsplit(" ", 1)[1] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert tuple(of_python) == pythons
    assert f"triton>={oldest.triton.rsplit('.', 1)[0]};" in project["optional-dependencies"]["gpu"][0]
    pins = dict(line.split("==") for line in read("constraints.txt").splitlines() if "==" in line)
    assert (pins["torch"], pins["triton"]) in releases.RELEASES
    assert f"NEWEST := {newest.triton}\n" in read("Makefile")
    assert tuple(sorted({releases.parse_minor(each.triton) for each in releases.RELEASES})) == triton_compat.TESTED


# NOW-01
def test_this_environment_is_in_the_table():
    import torch
    import triton

    assert releases.describe_release("torch", torch.__version__, torch.__version__) == releases.TESTED
    assert releases.describe_release("triton", triton.__version__, torch.__version__) == releases.TESTED


# ---- which releases run ----


def test_words_name_releases():
    assert matrix.chosen([]) == list(releases.RELEASES)
    assert matrix.chosen(["newest", "2.11.0", "oldest"]) == [releases.RELEASES[-1], releases.RELEASES[0]]
    with pytest.raises(ValueError, match=r"RELEASES has 1\.0; it can have 2\.11\.0, .*, oldest, newest"):
        matrix.chosen(["2.11.0", "1.0"])


# NOW-04
def test_ci_runs_the_oldest_and_the_newest_beside_the_pinned_one():
    steps = read(".ci/run")
    assert 'make matrix-quick RELEASES="oldest newest"' in steps
    assert "make test" in steps


def test_every_contract_file_exists():
    assert set(matrix.QUICK) < set(matrix.CONTRACT)
    assert [name for name in matrix.CONTRACT if not (ROOT / name).exists()] == []


# ---- what a run does ----


@pytest.fixture
def of_this_environment(monkeypatch, tmp_path):
    """A matrix whose environments are the one at hand."""
    monkeypatch.setattr(matrix, "FOLDER", tmp_path)

    def install(release):
        (tmp_path / release.torch).mkdir(exist_ok=True)
        if release.torch == "2.12.1":
            raise subprocess.CalledProcessError(1, "pip")
        return sys.executable

    monkeypatch.setattr(matrix, "install", install)
    return tmp_path


# NOW-04
def test_exit_code_and_summary_say_which_release_failed(of_this_environment, monkeypatch, capfd):
    contract = of_this_environment / "test_contract.py"
    contract.write_text(
        "import os, pytest\n"
        "def test_passes(): pass\n"
        "def test_fails_on_the_newest(): assert '2.15.0' not in os.environ['XDG_CACHE_HOME']\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
    )
    monkeypatch.setattr(matrix, "CONTRACT", (str(contract),))
    quiet = ["-c", str(of_this_environment / "none.ini"), "--rootdir", str(of_this_environment)]
    (of_this_environment / "none.ini").write_text("[pytest]\n")
    assert matrix.main(["--releases", "oldest", *quiet]) == 0
    assert matrix.main(["--releases", "oldest 2.12.1 newest", *quiet]) == 1
    *_, head, oldest, between, newest = capfd.readouterr().out.strip().splitlines()
    assert head.split() == ["torch", "triton", "passed", "failed", "skipped", "seconds", "verdict"]
    assert oldest.split()[:5] == ["2.11.0", "3.6.0", "2", "0", "1"] and oldest.endswith("  passed")
    assert between.split()[:6] == ["2.12.1", "3.7.1", "-", "-", "-", "-"] and between.endswith("  not installed: exit code 1")
    assert newest.split()[:5] == ["2.15.0", "3.9.0", "1", "1", "1"] and newest.endswith("  failed")
    assert len({line.index(word) for line, word in ((head, "verdict"), (oldest, "passed"), (between, "not"), (newest, "failed"))}) == 1


def test_no_tests_at_all_are_a_failure(of_this_environment, monkeypatch, capfd):
    monkeypatch.setattr(matrix, "CONTRACT", (str(of_this_environment / "absent.py"),))
    assert matrix.main(["--releases", "oldest"]) == 1


def test_installing_alone(of_this_environment, capfd):
    assert matrix.main(["--only", "install", "--releases", "newest"]) == 0
    assert "installed" in capfd.readouterr().out


def test_an_environment_is_made_once(monkeypatch, tmp_path):
    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    ran = []
    monkeypatch.setattr(matrix.subprocess, "run", lambda command, **options: ran.append((command, options)))
    monkeypatch.setattr(matrix.venv, "create", lambda folder, **options: folder.mkdir(exist_ok=True))
    release = releases.RELEASES[-1]
    for _ in range(2):
        assert matrix.install(release) == tmp_path / release.torch / "bin" / "python"
    alone, install, check = (command for command, _ in ran)
    assert alone[-1] == f"torch=={release.torch}"
    assert f"triton=={release.triton}" in install and ".[demo,test]" in install
    assert "assert" in check[-1]
    assert all(options["env"]["PIP_CONSTRAINT"] == "/dev/null" and "PYTHONPATH" not in options["env"] for _, options in ran)
    pins = (tmp_path / release.torch / "constraints.txt").read_text()
    assert "torch==" not in pins and "numpy==" in pins
    monkeypatch.setattr(matrix, "constraints", lambda: "numpy==0\n")
    matrix.install(release)
    assert len(ran) == 6
