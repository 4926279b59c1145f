"""Processes side by side, as compiling takes far longer than measuring.

On a GPU each case is compiled and run once by the process that will measure it; when all processes are through, and the GPU has nothing
else to do, the cases are measured one at a time. On a CPU what will be measured is run once ahead: foci's CPU backend keeps what it
compiles by its source, so that the process that measures only loads it.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final, TypeAlias

import torch

from foci.cli.bench.calls import make_calls
from foci.cli.bench.cases import CASES, Asked, Case, Sizes
from foci.cli.bench.measure import Line, Request, describe_case, failed, list_sides, measure

__all__ = ["compile_ahead", "dealt", "measure_beside", "shares"]

_COMPILED: Final = ("foci", "flex")
"""Those who compile; the other peers are libraries."""
_TINY: Final = Sizes(1, 1, 1, 64, 64, 16)

_Share: TypeAlias = list[tuple[str, str]]


def compile_ahead(cases: Sequence[Case], square: Sizes, request: Request, jobs: int) -> None:
    """Runs each case once for each who compiles, in `jobs` processes.

    What fails there fails again where it is measured, and is reported there.

    Args:
        cases, square, request: as `foci.cli.bench.measure` takes them, one case at a time; the cases are some of `foci.cli.bench.CASES`.
        jobs: processes; none for less than 1.
    """
    spawned = multiprocessing.get_context("spawn")
    parts = [share for share in shares(cases, request, jobs) if share]
    processes = [spawned.Process(target=_run, args=(share, square, request), daemon=True) for share in parts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def measure_beside(cases: Sequence[Case], square: Sizes, request: Request, jobs: int) -> Iterator[list[Line]]:
    """Lines of each case, in order, from `jobs` processes that compile side by side.

    Nothing is timed before every process has run its cases once, or has ended; then one case is timed after the other. The cases of a
    process that ended without an answer are lines that say so.

    Args:
        cases, square, request: as `compile_ahead` takes them.
        jobs: processes, at least 1.
    """
    spawned = multiprocessing.get_context("spawn")
    workers: dict[str, _Worker] = {}
    try:
        for share in dealt(cases, request, jobs):
            here, there = spawned.Pipe()
            process = spawned.Process(target=_serve, args=(there, share, square, request))
            workers.update(dict.fromkeys(share, _Worker(process, here)))
            process.start()
            there.close()  # else a process that is gone would be waited for
        for worker in dict.fromkeys(workers.values()):
            worker.answer()
        for case in cases:
            outcome = workers[case.name].read_lines(case.name)
            yield [Line(*describe_case(case, square, request), "foci", error=outcome)] if isinstance(outcome, str) else outcome
    finally:
        for worker in dict.fromkeys(workers.values()):
            worker.end()


@dataclass(frozen=True, eq=False)
class _Worker:
    """A process that measures, and the line to it."""

    process: BaseProcess
    line: Connection

    def answer(self) -> list[Line] | None:
        """Return what it says next: None that its cases have run, or the lines of a case; None too if it has ended."""
        with contextlib.suppress(EOFError, OSError):
            lines: list[Line] | None = self.line.recv()
            return lines
        return None

    def read_lines(self, name: str) -> list[Line] | str:
        """Lines of a case of its own, or why there are none."""
        with contextlib.suppress(OSError):
            self.line.send(name)
        lines = self.answer()
        if lines is not None:
            return lines
        self.process.join(10.0)
        return f"the process that measures it ended, exit code {self.process.exitcode}"

    def end(self) -> None:
        """Ends it, whatever it does."""
        self.line.close()
        if self.process.pid is not None:
            self.process.terminate()
            self.process.join()


def dealt(cases: Sequence[Case], request: Request, jobs: int) -> list[list[str]]:
    """Names of the cases of each of at most `jobs` processes, dealt in turn: first those that FlexAttention compiles, the slowest."""

    def is_quick(case: Case) -> bool:
        return "flex" not in list_sides(case, case.build(_TINY, torch.device("cpu"), request.dtype), request)

    names = [case.name for case in sorted(cases, key=is_quick)]
    return [names[i::jobs] for i in range(min(jobs, len(names)))]


def _serve(line: Connection, share: Sequence[str], square: Sizes, request: Request) -> None:
    """A process that measures: runs its cases once, says so, and then measures those whose names come, until the line is closed."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    asked: dict[str, Asked] = {}
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(EOFError):
        for name in share:
            # what fails fails again where it is measured
            with contextlib.suppress(Exception):
                asked[name] = _prepared(name, square, request)
        line.send(None)
        while True:
            name = line.recv()
            try:
                lines = list(measure(_case(name), square, request, asked.pop(name, None)))
            except Exception as error:
                lines = [failed(describe_case(_case(name), square, request), "foci", error)]
            line.send(lines)
            _release(request.device)


def _prepared(name: str, square: Sizes, request: Request) -> Asked:
    """Return what a case asks for, after all its sides have run it once."""
    case = _case(name)
    asked = case.build(case.fit(square), request.device, request.dtype)
    for who in list_sides(case, asked, request):
        with contextlib.suppress(Exception):
            _once(case, who, asked, square, request)
        _release(request.device)
    return asked


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def shares(cases: Sequence[Case], request: Request, jobs: int) -> list[_Share]:
    """(case, who) for each of `jobs` processes: those of FlexAttention, which take longest, first."""
    wanted = {"foci", *(_COMPILED if request.peers is None else request.peers)}
    units: _Share = [(case.name, who) for who in reversed(_COMPILED) if who in wanted for case in cases]
    return [units[i::jobs] for i in range(jobs)]


def _run(share: _Share, square: Sizes, request: Request) -> None:
    """One process: quiet, and alone on its core."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    for name, who in share:
        with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
            case = _case(name)
            asked = case.build(case.fit(square), request.device, request.dtype)
            if who in list_sides(case, asked, request):
                _once(case, who, asked, square, request)
                _release(request.device)


def _once(case: Case, who: str, asked: Asked, square: Sizes, request: Request) -> None:
    calls = make_calls(who, case, asked, case.fit(square), request.device, request.dtype)
    calls.forward()
    if calls.backward is not None and request.backward:
        calls.backward()


def _release(device: torch.device) -> None:
    """Gives memory that is no longer used to the other processes."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
