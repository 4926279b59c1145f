"""What every benchmark shares: interleaved timing, peak memory, and the facts that make a number mean something."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pages import RESULTS

import foci


def facts(device: str = "cpu") -> dict[str, object]:
    """Machine, versions, commit and day."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    name = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "foci": foci.__version__,
        "commit": commit,
        "date": dt.date.today().isoformat(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as info:
        line = next((line for line in info if line.startswith("model name")), ": unknown")
    return f"{line.split(':')[1].strip()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    seconds: float = 2.0,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each call, all in turns, so that a slow moment of the machine falls on every function alike.

    Each round has an order of its own, drawn as in every run: who follows a call that leaves caches cold or memory taken reads high.
    At least `rounds` rounds after a warm-up, more until `seconds` have passed. `time.thread_time` as clock, for a single thread on the
    CPU, leaves out what other programs take.
    """
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    orders, start = random.Random(0), time.perf_counter()
    while len(next(iter(times.values()))) < rounds or time.perf_counter() - start < seconds:
        for name in orders.sample(list(functions), len(functions)):
            begin = clock()
            functions[name]()
            times[name].append(clock() - begin)
    return times


def in_turns(calls: Mapping[str, Callable[[], object]], *, rounds: int = 6, each: int = 3, ahead: int = 0) -> dict[str, float]:
    """Milliseconds of each call on a GPU, medians of events: each several times in a row, all in turns, so that a warm card is slow
    for all alike. Each round has an order of its own, drawn as in every run: what the card did before leaves it more or less power,
    up to 8 % of a rate. The first time of each row is not counted. Before each other time the device spins for `ahead` cycles, so that
    it waits for nothing that the host calls."""
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    orders = random.Random(0)
    for _ in range(rounds):
        for name in orders.sample(list(calls), len(calls)):
            call = calls[name]
            call()
            for _ in range(each):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if ahead:
                    torch.cuda._sleep(ahead)
                begin.record()
                call()
                end.record()
                marks[name].append((begin, end))
        torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in marks.items()}


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def ratio(times: Mapping[str, list[float]], peer: str, ours: str) -> float:
    """Median over the rounds of peer / ours: how many times faster ours is."""
    return statistics.median(p / o for p, o in zip(times[peer], times[ours], strict=True))


def reset_peak() -> float:
    """Resident megabytes now; the peak counts from here (Linux)."""
    with open("/proc/self/clear_refs", "w") as clear_refs:
        clear_refs.write("5")
    return status("VmRSS")


def status(field: str) -> float:
    """Megabytes of a field of /proc/self/status: VmRSS is the resident set, VmHWM the largest since the last reset."""
    with open("/proc/self/status") as lines:
        line = next(line for line in lines if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e6


def write(name: str, rows: list[dict[str, Any]], *, quiet: bool = False) -> None:
    """Prints the rows and keeps them as benchmarks/results/NAME.jsonl, or in the folder OUT, in place of an earlier run's."""
    folder = Path(os.environ.get("OUT", RESULTS))
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(row) for row in rows]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    if not quiet:
        print("\n".join(lines))
