"""Runs the contract tests on each release of torch that foci supports, each in an environment of its own: `make matrix`.

The table of releases is `src/foci/compat/releases.py`. Environments are kept below .matrix/, so a second run installs nothing.
"""

import argparse
import hashlib
import os
import runpy
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".matrix"
RELEASES = runpy.run_path(str(ROOT / "src/foci/compat/releases.py"))["RELEASES"]

QUICK = (
    "tests/compat",
    "tests/conformance/test_conformance.py",
    "tests/api/test_sdpa.py",
    "tests/api/test_sdpa_masks.py",
    "tests/api/test_sdpa_sizes.py",
    "tests/fusion/test_handover.py",
    "tests/test_readme.py",
)
"""What follows a dependency most closely: private names, every backend, torch's own functions, Inductor, the pages."""

CONTRACT = (
    *QUICK,
    "tests/conformance/test_grid.py",
    "tests/conformance/test_scores_with_masks.py",
    "tests/api",
    "tests/fusion/test_compiler.py",
    "tests/fusion/test_recognise.py",
    "tests/fusion/test_spellings.py",
    "tests/padding",
    "tests/integrations",
    "tests/nn/test_transformer.py",
    "tests/nn/test_nested_outputs.py",
    "tests/test_cli.py",
    "tests/test_docstrings.py",
)
"""What a user can see of foci."""


@dataclass(frozen=True)
class Outcome:
    """Of one release's tests."""

    release: tuple[str, str]
    verdict: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0

    @property
    def total(self):
        """How many tests ran or were skipped."""
        return self.passed + self.failed + self.skipped


def chosen(names):
    """The releases that words name: versions of torch, "oldest" and "newest"; all for no word. Raises ValueError for other words."""
    known = {release.torch: release for release in RELEASES} | {"oldest": RELEASES[0], "newest": RELEASES[-1]}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"RELEASES has {', '.join(unknown)}; it can have {', '.join(known)}")
    return list(dict.fromkeys(known[name] for name in names)) or list(RELEASES)


def environment_of(release):
    """The environment variables of everything that runs for a release: its caches lie in its folder, and no constraint of this machine
    forbids a release that is named exactly."""
    caches = {
        name: str(FOLDER / release.torch / "cache" / name) for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    }
    left_out = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FOCI_WITHOUT")}
    return left_out | caches | {"PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def constraints():
    """The pins of constraints.txt, but for torch and Triton."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith(("torch==", "triton=="))) + "\n"


def install(release):
    """Makes the environment of a release where there is none for it yet; its interpreter."""
    folder = FOLDER / release.torch
    python, stamp, pins = folder / "bin" / "python", folder / ".installed", folder / "constraints.txt"
    wanted = "\n".join((sys.version, *release, (ROOT / "pyproject.toml").read_text(encoding="utf-8"), constraints()))
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return python
    venv.create(folder, with_pip=True, clear=True)
    pins.write_text(constraints(), encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    # torch comes first and alone: where the machine's pip offers a build without CUDA packages, that is the one it takes
    steps = ([f"torch=={release.torch}"], [f"torch=={release.torch}", f"triton=={release.triton}", "-c", str(pins), "-e", ".[demo,test]"])
    for step in steps:
        subprocess.run([*pip, *step], cwd=ROOT, env=environment_of(release), check=True)
    check = f"import torch, triton; assert (torch.__version__.split('+')[0], triton.__version__) == {tuple(release)!r}"
    subprocess.run([str(python), "-c", check], env=environment_of(release), check=True)
    stamp.write_text(digest)
    return python


def test(release, python, files, pytest_options):
    """Runs test files in a release's environment."""
    report, began = FOLDER / release.torch / "report.xml", time.monotonic()
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *files, *pytest_options]
    done = subprocess.run(command, cwd=ROOT, env=environment_of(release) | {"OMP_NUM_THREADS": "1"})
    seconds = time.monotonic() - began
    if not report.exists():
        return Outcome(release, f"pytest ended with {done.returncode}", seconds=seconds)
    suite = ET.parse(report).getroot().find("testsuite")
    total, failed, errors, skipped = (int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped"))
    failed += errors
    verdict = "passed" if done.returncode == 0 and total else "failed"
    return Outcome(release, verdict, total - failed - skipped, failed, skipped, seconds)


def summary(outcomes):
    """A line for each release: counts of its tests, dashes where none ran, and the verdict."""
    rows = [("torch", "triton", "passed", "failed", "skipped", "seconds", "verdict")]
    for o in outcomes:
        counts = [str(n) if o.total else "-" for n in (o.passed, o.failed, o.skipped)]
        rows.append((*o.release, *counts, f"{o.seconds:.0f}" if o.seconds else "-", o.verdict))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)) + f"  {row[-1]}" for row in rows)


def run(release, files, pytest_options):
    """Installs and tests one release; a release that pip cannot install is an outcome like others."""
    print(f"== torch {release.torch}, triton {release.triton}", flush=True)
    try:
        python = install(release)
    except subprocess.CalledProcessError as error:
        return Outcome(release, f"not installed: exit code {error.returncode}")
    return test(release, python, files, pytest_options) if files else Outcome(release, "installed")


def main(words):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--releases", default="", help="versions of torch, 'oldest' or 'newest', with spaces between; all if empty")
    parser.add_argument(
        "--only", choices=["install", "quick"], help="install: make the environments and test nothing; quick: run fewer tests"
    )
    options, pytest_options = parser.parse_known_args(words)
    try:
        releases = chosen(options.releases.split())
    except ValueError as error:
        parser.error(str(error))
    files = {"install": (), "quick": QUICK, None: CONTRACT}[options.only]
    outcomes = [run(release, files, pytest_options) for release in releases]
    print(summary(outcomes), flush=True)
    return 0 if all(outcome.verdict in ("passed", "installed") for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
