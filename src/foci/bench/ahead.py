"""Processes side by side, as compiling takes far longer than measuring.

On a GPU each case is measured by the process that compiled it, one at a time. On a CPU, whose cores the compilers take, what will be
measured is run once ahead: foci's CPU backend keeps what it compiles by its source, so that the process that measures only loads it.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import Final, TypeAlias

import torch

from foci.bench.calls import calls_of, peers_of
from foci.bench.cases import CASES, Case, Sizes
from foci.bench.measure import Line, Request, measure

__all__ = ["compile_ahead", "measure_beside", "shares"]

_COMPILED: Final = ("foci", "flex")
"""Those who compile; the other peers are libraries."""

_Share: TypeAlias = list[tuple[str, str]]


def compile_ahead(cases: Sequence[Case], square: Sizes, request: Request, jobs: int) -> None:
    """Runs each case once for each who compiles, in `jobs` processes.

    What fails there fails again where it is measured, and is reported there.

    Args:
        cases, square, request: as `foci.bench.measure` takes them, one case at a time; the cases are some of `foci.bench.CASES`.
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
    """Lines of each case, as they come, from `jobs` processes that compile side by side and time one at a time.

    While one times, others may run what they have compiled, once: moments, which fall on all sides of a case alike and which medians
    leave out.

    Args:
        cases, square, request: as `compile_ahead` takes them.
        jobs: processes, at least 1.
    """
    spawned = multiprocessing.get_context("spawn")
    with tempfile.NamedTemporaryFile(prefix="foci-bench-") as lock, ProcessPoolExecutor(jobs, spawned) as pool:
        mine = replace(request, lock=lock.name)
        for done in as_completed([pool.submit(_lines, case.name, square, mine) for case in cases]):
            yield done.result()


def _lines(name: str, square: Sizes, request: Request) -> list[Line]:
    """One case in a process of its own."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    with contextlib.redirect_stderr(io.StringIO()):
        found = list(measure(_case(name), square, request))
    if request.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


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
            _once(name, who, square, request)


def _once(name: str, who: str, square: Sizes, request: Request) -> None:
    case = _case(name)
    sizes = case.fit(square)
    asked = case.build(sizes, request.device, request.dtype)
    if who != "foci" and who not in peers_of(case, asked, request.device):
        return
    calls = calls_of(who, case, asked, sizes, request.device, request.dtype)
    calls.forward()
    if calls.backward is not None and request.backward:
        calls.backward()
    if request.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
