"""Compiling ahead: what will be measured is run once in processes side by side, which fill the caches on disk.

Triton, Inductor and foci's CPU backend keep what they compile by its source, so that the process that measures only loads it.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
from collections.abc import Sequence
from typing import Final, TypeAlias

import torch

from foci.bench.calls import calls_of, peers_of
from foci.bench.cases import CASES, Case, Sizes
from foci.bench.measure import Request

__all__ = ["compile_ahead", "shares"]

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
    case = next(case for case in CASES if case.name == name)
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
