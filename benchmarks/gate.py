"""Whether a change made foci slower: two commits measured on this machine in turns, a table of ratios, exit code 1 beyond 5 %.

    python benchmarks/gate.py [BASE] [HEAD] [--device cuda] [--cases WORD ...] [--rounds N] [--limit 0.05] [--report]

BASE and HEAD are commits, tags or folders that hold `src/foci`. Without HEAD it is this checkout as it lies; without BASE it is the last tag
before HEAD, or else the commit before it. Each side is a process of its own with caches of its own, and both run the cases of this file.
They take turns, case by case and round by round, so that a slow moment of the machine falls on both. A case that looks slower is measured
again in new processes, and counts only if both measurements say so. --report prints the table and exits with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Side(NamedTuple):
    """One of the two commits."""

    name: str
    tree: Path


class Line(NamedTuple):
    """What was measured of a case: seconds of each round, of both sides in the same order; empty where a side cannot run it."""

    case: str
    base: list[float]
    head: list[float]

    @property
    def ratios(self) -> list[float]:
        return [head / base for base, head in zip(self.base, self.head, strict=True)]


# ---- judgement ----


def is_slower(line: Line, limit: float) -> bool:
    """Whether the median of the rounds' ratios is beyond the limit, and three rounds in four are slower at all: one number alone may be
    noise."""
    if len(line.ratios) < 2:
        return False
    return statistics.median(line.ratios) > 1 + limit and statistics.quantiles(line.ratios, n=4)[0] > 1


def format_time(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    median = statistics.median(seconds)
    unit, factor = next((u, f) for u, f, least in (("s", 1, 1), ("ms", 1e3, 1e-3), ("us", 1e6, 0)) if median >= least)
    return f"{median * factor:.3g} {unit}"


def format_table(lines: Sequence[Line], slower: set[str], names: tuple[str, str]) -> str:
    """Rows of case, time of each side, ratio and verdict."""
    rows = [("case", *names, "ratio", "")]
    for line in lines:
        ratio = f"{statistics.median(line.ratios):.3f}" if line.ratios else "-"
        verdict = "SLOWER" if line.case in slower else "" if line.ratios else "not compared, see above"
        rows.append((line.case, format_time(line.base), format_time(line.head), ratio, verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        "  ".join(word.ljust(w) if i in (0, 4) else word.rjust(w) for i, (word, w) in enumerate(zip(row, widths))).rstrip() for row in rows
    )


# ---- the two sides ----


def git(*arguments: str) -> str:
    ran = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise SystemExit(f"git {' '.join(arguments)}: {ran.stderr.strip()}")
    return ran.stdout.strip()


def choose_base(head: str | None) -> str:
    """The last tag before a commit, else the commit before it."""
    before = f"{head or 'HEAD'}^"
    tag = subprocess.run(["git", "-C", str(ROOT), "describe", "--tags", "--abbrev=0", before], capture_output=True, text=True, check=False)
    return tag.stdout.strip() if tag.returncode == 0 else before


@contextlib.contextmanager
def checked_out(name: str | None, scratch: Path) -> Iterator[Side]:
    """A side with its files: a folder as it is, a commit in a worktree that is removed in the end."""
    if name is None or (Path(name) / "src" / "foci").is_dir():
        yield Side(Path(name).resolve().name if name else "this checkout", Path(name or ROOT).resolve())
        return
    commit = git("rev-parse", "--short", "--verify", f"{name}^{{commit}}")
    tree = scratch / commit
    git("worktree", "add", "--detach", str(tree), commit)
    try:
        yield Side(name if name.startswith(commit) else f"{name} ({commit})", tree)
    finally:
        git("worktree", "remove", "--force", str(tree))


class Worker:
    """A process that measures one side on request."""

    def __init__(self, side: Side, device: str, scratch: Path) -> None:
        self.side = side
        caches = tempfile.mkdtemp(dir=scratch)
        environment = {
            **os.environ,
            "PYTHONPATH": str(side.tree / "src"),
            "FOCI_CACHE_DIR": f"{caches}/foci",
            "TRITON_CACHE_DIR": f"{caches}/triton",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(Path(__file__).with_name("gate_cases.py")), device, str(side.tree / "src")]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *question: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process that measures {self.side.name} ended")
        return json.loads(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


def measure(sides: tuple[Side, Side], device: str, words: Sequence[str], rounds: int, scratch: Path) -> list[Line]:
    """All cases whose name holds one of the words, the sides in turns."""
    with Worker(sides[0], device, scratch) as base, Worker(sides[1], device, scratch) as head:
        for worker in (base, head):  # both compile at once: only what follows is measured
            worker.ask("prepare", list(words))
        ready = (base.answer(), head.answer())
        lines = []
        for case in ready[0]:
            runs = all(names[case] is None for names in ready)
            for worker, names in zip((base, head), ready, strict=True):
                if names[case] is not None:
                    print(f"{case}: not on {worker.side.name}: {names[case]}", file=sys.stderr)
            lines.append(measure_case(case, base, head, rounds) if runs else Line(case, [], []))
    return lines


def measure_case(case: str, base: Worker, head: Worker, rounds: int) -> Line:
    """Rounds of one case; who comes first changes from round to round."""
    line = Line(case, [], [])
    for number in range(max(3, rounds // 4) if case.startswith("first call") else rounds):
        turns = [(base, line.base), (head, line.head)]
        for worker, seconds in turns if number % 2 else reversed(turns):
            worker.ask("measure", case)
            seconds.append(worker.answer())
    return line


def confirm(lines: Sequence[Line], again: Sequence[Line], limit: float) -> tuple[list[Line], set[str]]:
    """The lines with what was measured again joined to them, and the cases that both measurements call slower."""
    second = {line.case: line for line in again}
    slower = {line.case for line in lines if is_slower(line, limit) and line.case in second and is_slower(second[line.case], limit)}
    joined = [
        line._replace(base=line.base + second[line.case].base, head=line.head + second[line.case].head) if line.case in second else line
        for line in lines
    ]
    return joined, slower


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?")
    parser.add_argument("head", nargs="?")
    parser.add_argument("--device", default=None, help="cpu or cuda; cuda where there is one")
    parser.add_argument("--cases", nargs="+", default=[""], metavar="WORD", help="cases whose name holds one of these words")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--limit", type=float, default=0.05, help="how much slower a case may be")
    parser.add_argument("--report", action="store_true", help="exit with 0 whatever was measured")
    options = parser.parse_args(arguments)
    device = options.device
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foci-gate-")))
        base = stack.enter_context(checked_out(options.base or choose_base(options.head), scratch))
        head = stack.enter_context(checked_out(options.head, scratch))
        print(f"speed of {head.name} beside {base.name}, on {device}, in turns", flush=True)
        lines = measure((base, head), device, options.cases, options.rounds, scratch)
        suspects = [line.case for line in lines if is_slower(line, options.limit)]
        again = measure((base, head), device, suspects, options.rounds, scratch) if suspects else []
        lines, slower = confirm(lines, again, options.limit)
    print(format_table(lines, slower, (base.name, head.name)))
    print(f"{len(slower)} of {len(lines)} cases are more than {options.limit:.0%} slower")
    return 0 if options.report else int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
