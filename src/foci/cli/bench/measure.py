"""Times and rates of a case, foci and its peers in one run."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import foci
from foci.cli.bench.calls import Calls, list_peers, make_calls
from foci.cli.bench.cases import Asked, Case, Sizes, sequence_lengths
from foci.mask_mods import create_mask

__all__ = ["Line", "Request", "describe_case", "facts", "failed", "list_sides", "measure"]


@dataclass(frozen=True)
class Request:
    """A request to `measure`.

    Attributes:
        device, dtype: of the tensors.
        seconds: spent on each pass of each side, at least.
        peers: those to consider; None for all that fit.
        backward: whether backward passes are measured.
    """

    device: torch.device
    dtype: torch.dtype
    seconds: float = 0.3
    peers: tuple[str, ...] | None = None
    backward: bool = True


@dataclass(frozen=True)
class Line:
    """One side of one case. Rates count the attended pairs alone, a backward pass 2.5 forward passes; of a decode, the keys and
    values that are read. None where there is nothing to say.

    Attributes:
        case, sizes, dtype: what was measured.
        who: foci, or a peer.
        backend: the backend that foci took.
        forward_ms, backward_ms: medians.
        forward_rate, backward_rate: in `unit`.
        peak_mb: what a forward and a backward pass take beside their inputs, on a GPU.
        error: why there are no times.
    """

    case: str
    sizes: str
    dtype: str
    who: str
    backend: str | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    forward_rate: float | None = None
    backward_rate: float | None = None
    unit: str = "TFLOP/s"
    peak_mb: float | None = None
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Without what there is not."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def facts(device: torch.device) -> dict[str, Any]:
    """Return machine, versions, commit and day: what makes a number mean something."""
    machine_facts: dict[str, Any] = {
        "device": _device_name(device), "threads": torch.get_num_threads(), "python": platform.python_version(),
        "date": dt.date.today().isoformat(),
    }  # fmt: skip
    for package in ("torch", "triton", "foci"):
        try:
            machine_facts[package] = torch.__version__ if package == "torch" else importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine_facts.setdefault("foci", foci.__version__)
    root = Path(foci.__file__).parent
    ran = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if ran.returncode == 0:
        machine_facts["commit"] = ran.stdout.strip()
    return machine_facts


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    named = "CPU"
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            named = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), named)
    return f"{named}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def describe_case(case: Case, square: Sizes, request: Request) -> tuple[str, str, str]:
    """Return what a line begins with: case, sizes, dtype."""
    return case.name, str(case.fit(square)), str(request.dtype).removeprefix("torch.")


def list_sides(case: Case, asked: Asked, request: Request) -> tuple[str, ...]:
    """foci, and the peers that are asked for and can do a case."""
    return ("foci", *(n for n in list_peers(case, asked, request.device) if request.peers is None or n in request.peers))


def failed(about: tuple[str, str, str], who: str, error: Exception) -> Line:
    """The line of a side that raised."""
    return Line(*about, who, error=f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}")


def measure(case: Case, square: Sizes, request: Request, asked: Asked | None = None) -> Iterator[Line]:
    """Lines of foci and of each peer, the calls of all of them taken in turn.

    Args:
        case: what to measure.
        square: sizes that the case makes its own of.
        request: where and how.
        asked: what the case builds of these sizes, where it was built before.
    """
    sizes, device = case.fit(square), request.device
    asked = case.build(sizes, device, request.dtype) if asked is None else asked
    names = list_sides(case, asked, request)
    about = describe_case(case, square, request)
    calls_by_name: dict[str, Calls] = {}
    for name in names:
        try:
            calls = make_calls(name, case, asked, sizes, device, request.dtype)
            calls.forward()
            if calls.backward is not None and request.backward:
                calls.backward()
            calls_by_name[name] = calls
        except Exception as error:
            # a peer that cannot do this here, for whatever reason, is a line of the table
            yield failed(about, name, error)
    passes = {name: calls.backward for name, calls in calls_by_name.items() if calls.backward is not None and request.backward}
    forward = _medians({name: calls.forward for name, calls in calls_by_name.items()}, request)
    backward = _medians(passes, request)
    work, unit = _work(case, asked, sizes, request)
    for name, calls in calls_by_name.items():
        forward_ms, backward_ms = forward[name], backward.get(name)
        yield Line(
            *about, name, backend=_backend(calls) if name == "foci" else None, forward_ms=forward_ms, backward_ms=backward_ms,
            forward_rate=work / forward_ms, backward_rate=None if backward_ms is None else 2.5 * work / backward_ms, unit=unit,
            peak_mb=_peak(calls, request),
        )  # fmt: skip


def _backend(calls: Calls) -> str:
    with foci.observe() as log:
        calls.forward()
    return log.calls[0].backend


def _medians(functions: dict[str, Callable[[], Any]], request: Request) -> dict[str, float]:
    """Milliseconds, the functions taken in turn, so that a slow moment of the machine falls on all alike."""
    timed = _gpu_ms if request.device.type == "cuda" else _cpu_ms
    repeats = {name: max(1, min(20, int(2.0 / max(1e-3, timed(function, 1))))) for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    start = time.perf_counter()
    while functions and (len(next(iter(times.values()))) < 5 or time.perf_counter() - start < request.seconds * len(functions)):
        for name, function in functions.items():
            times[name].append(timed(function, repeats[name]))
    return {name: statistics.median(samples) for name, samples in times.items()}


def _cpu_ms(function: Callable[[], Any], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    return 1e3 * (time.perf_counter() - begin) / repeats


def _gpu_ms(function: Callable[[], Any], repeats: int) -> float:
    """By events, around calls enough that the device is not out of work; the caches are flushed by the calls of the others."""
    start, stop = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    function()
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        function()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / repeats


def _work(case: Case, asked: Asked, sizes: Sizes, request: Request) -> tuple[float, str]:
    """Return what a forward pass does in units whose count by milliseconds is the rate: flops of the attended pairs, or, of a decode, the
    bytes of keys and values; in millions or, on a GPU, in thousands of millions."""
    scale, prefix = (1e9, "T") if request.device.type == "cuda" else (1e6, "G")
    if not case.trains:
        elements = 2.0 * sizes.batch * sizes.kv_heads * sizes.kv_len * sizes.dim
        return elements * request.dtype.itemsize / scale, f"{prefix}B/s"
    pairs = float(sizes.batch * sizes.q_len * sizes.kv_len)
    if case.layout == "jagged":
        pairs = float(sum(n * n for n in sequence_lengths(sizes))) * (0.5 if asked.is_causal else 1.0)
    elif asked.is_causal:
        pairs /= 2
    elif asked.mask is not None:
        pairs *= _density(asked.mask, sizes, request.device)
    return 4.0 * sizes.heads * sizes.dim * pairs / scale, f"{prefix}FLOP/s"


def _density(mask: Callable[..., Any], sizes: Sizes, device: torch.device) -> float:
    """Share of the pairs that a mask keeps, the same in every head."""
    kept: Sequence[float] = [
        create_mask(lambda b, h, q, kv, row=row: mask(row, h, q, kv), 1, 1, sizes.q_len, sizes.kv_len, device=device).float().mean().item()
        for row in range(sizes.batch)
    ]
    return sum(kept) / len(kept)


def _peak(calls: Calls, request: Request) -> float | None:
    if request.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    calls.forward()
    if calls.backward is not None and request.backward:
        calls.backward()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
