"""Autotuning, on request: candidate schedules that fit into shared memory are timed once, and the fastest is stored on disk.

Triton is imported when something is timed, so that the store and the choice can be tested without it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from foci.backends import disk
from foci.backends.contract import Given, Inputs, Kernel, Plan
from foci.backends.gpu.architectures import find
from foci.backends.gpu.schedules import (
    LIKE,
    SCHEDULES,
    Schedule,
    fit_schedule,
    padded_dim,
    schedule_for,
    scratch_bytes,
    shared_bytes,
    vector_bytes,
)
from foci.backends.repeat_passes import repeat_backward, repeat_forward
from foci.problem import Cotangents, Gradients, Operands, OptionalTensors, Program, Results

__all__ = ["Scheduled", "Store", "TunedKernel", "list_candidates", "tuning_key"]

_MOST: Final = 24
"""Most candidates of one kernel: each costs a compilation."""


class Scheduled(Kernel, Protocol):
    """A kernel whose schedules may be set before it runs."""

    @property
    def schedules(self) -> dict[str, Schedule]:
        """Schedules by kernel; the kernel adds those that it chooses itself."""
        ...


def list_candidates(kind: str, plan: Plan) -> tuple[Schedule, ...]:
    """Candidate schedules of a kernel, the table's own choice first: the table's rows for any head dim, with more and fewer warps and
    stages, if they fit into shared memory by `shared_bytes`."""
    p, arch = plan.problem, plan.target.arch
    dims, itemsize = (padded_dim(p.head_dim), padded_dim(p.value_dim)), p.dtype.itemsize
    read = {"scratch": scratch_bytes(p), "vectors": vector_bytes(p.variant)}
    default = schedule_for(kind, arch, dims, itemsize, **read)
    if default is None or arch == 0:
        return () if default is None else (fit_schedule(default, p.formula.block_size),)
    names = (kind, LIKE.get(kind, kind))
    rows_of = (find(arch).schedules_of, itemsize)
    rows = [row for (one, name, size, _), row in SCHEDULES.items() if (one, size) == rows_of and name in names]
    seeds = [default, *(replace(s, turned=default.turned) for row in rows for s in row)]
    near = [replace(s, warps=w, stages=n) for s in seeds for n in (s.stages, s.stages - 1, s.stages + 1) for w in (s.warps, 12 - s.warps)]
    limit = find(arch).shared_bytes
    fits = [s for s in near if 1 <= s.stages <= 4 and shared_bytes(kind, s, dims, itemsize, **read) <= limit]
    return tuple(dict.fromkeys(fit_schedule(s, p.formula.block_size) for s in (default, *fits)))[:_MOST]


def tuning_key(plan: Plan, device: str) -> str:
    """Key of a stored choice: device, Triton's version, plan."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    return f"{device}\ntriton {version}\n{plan.text}"


@dataclass(frozen=True)
class Store:
    """Choices on disk, one file for each key. An unusable folder or a malformed file counts as empty. `directory` None stores nothing."""

    directory: Path | None

    def _path(self, key: str) -> Path | None:
        return None if self.directory is None else self.directory / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"

    def read(self, key: str) -> dict[str, Schedule]:
        """Schedules by kernel."""
        path = self._path(key)
        data = None if path is None else disk.read_private(path)
        if data is None:
            return {}
        try:
            content = json.loads(data)
            return {kind: _schedule(values) for kind, values in content["schedules"].items()} if content["key"] == key else {}
        except (ValueError, TypeError, KeyError, AttributeError):
            return {}

    def write(self, key: str, schedules: dict[str, Schedule]) -> None:
        """Store schedules, or warn that they cannot be stored."""
        path = self._path(key)
        try:
            if path is not None:
                content = {"key": key, "schedules": {kind: asdict(s) for kind, s in sorted(schedules.items())}}
                disk.write_atomically(path, json.dumps(content, indent=1).encode())
                return
        except OSError:
            pass
        warnings.warn("the schedules found by tuning cannot be kept on disk; set FOCI_CACHE_DIR to a folder of your own", stacklevel=2)


def _schedule(values: dict[str, Any]) -> Schedule:
    schedule = Schedule(**values)
    for field in fields(Schedule):
        if type(getattr(schedule, field.name)) is not (bool if field.type == "bool" else int):
            raise TypeError(f"{field.name} is {getattr(schedule, field.name)!r}")
    return schedule


Timer = Callable[[Callable[[], object]], float]


def _milliseconds(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=5, rep=30, return_mode="median"))


_Repeat = Callable[[Scheduled], Callable[[], object]]
"""Gives for a kernel the pass to time, without the host's work of a first call."""


class TunedKernel(Kernel):
    """Times the candidates of each kernel at its first launch, unless the store has a choice.

    Args:
        plan: of the kernel.
        make: makes a kernel of a plan.
        store: where choices are kept; the user's folder by default.
        time: milliseconds of a call.
        device: name of the device; that of the first operands by default.
    """

    def __init__(
        self, plan: Plan, make: Callable[[Plan], Scheduled], *, store: Store | None = None, time: Timer = _milliseconds,
        device: str | None = None,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.make = make
        self.kernel = make(plan)
        self.store = Store(disk.cache_directory("triton")) if store is None else store
        self.time = time
        self.device = device
        self.key: str | None = None
        self.chosen: dict[str, Schedule] = {}

    def forward(self, operands: Operands, /) -> Results:
        """Attention of the operands."""
        self._begin(operands)
        results = self.kernel.forward(operands)
        return self.kernel.forward(operands) if self._settle(operands, functools.partial(repeat_forward, operands)) else results

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        """Gradients of the operands."""
        self._begin(operands)
        gradients = self.kernel.backward(operands, results, cotangents)
        repeat = functools.partial(repeat_backward, operands, results, cotangents)
        return self.kernel.backward(operands, results, cotangents) if self._settle(operands, repeat) else gradients

    def launch_forward(self, program: Program, tensors: Inputs, optional: OptionalTensors, /) -> list[Tensor] | None:
        """See `foci.backends.contract.Kernel`. What the chosen kernel has launched was settled then."""
        return self.kernel.launch_forward(program, tensors, optional)

    def launch_backward(self, program: Program, tensors: Inputs, optional: OptionalTensors, bwd_args: Given, /) -> list[Tensor] | None:
        """See `foci.backends.contract.Kernel`."""
        return self.kernel.launch_backward(program, tensors, optional, bwd_args)

    def _begin(self, operands: Operands) -> None:
        """Read the stored choices."""
        if self.key is None:
            self.key = tuning_key(self.plan, self.device or torch.cuda.get_device_name(operands.query.device))
            self.chosen = {kind: s for kind, s in self.store.read(self.key).items() if s in list_candidates(kind, self.plan)}
            self.kernel = self._with(self.chosen)

    def _settle(self, operands: Operands, repeat: _Repeat) -> bool:
        """Tune the kernels that the pass launched and that have no choice yet; return whether there were any."""
        new = [kind for kind in self.kernel.schedules if kind not in self.chosen]
        if not new or (operands.query.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        assert self.key is not None
        for kind in new:
            self.chosen[kind] = self._fastest(kind, repeat)
            self.kernel = self._with(self.chosen)
        # keep what another process stored meanwhile
        self.store.write(self.key, self.store.read(self.key) | self.chosen)
        return True

    def _with(self, schedules: dict[str, Schedule]) -> Scheduled:
        kernel = self.make(self.plan)
        kernel.schedules.update(schedules)
        return kernel

    def _fastest(self, kind: str, repeat: _Repeat) -> Schedule:
        """The candidate with which the entire pass is fastest; the first of equals."""
        other_schedules = {k: s for k, s in self.kernel.schedules.items() if k != kind}

        def seconds(schedule: Schedule) -> float:
            return self.time(repeat(self._with(other_schedules | {kind: schedule})))

        return min(list_candidates(kind, self.plan), key=seconds)
