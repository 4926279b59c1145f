"""Self-check: kernels under a release of Triton that foci was not tested with are compared with the plain formula before they run.

The first plan of each kind of problem starts a process (`foci.check_kernels`) that runs a small problem of that kind twice by the backend
and compares both results with `reference`. The check has its own process because a wrong kernel or compiler may end the process that runs
it, and because the caller may be capturing a CUDA graph or tracing fake tensors. The verdict is stored on disk with all that it depends on.
Tested releases are never checked.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch

from foci.backends import disk
from foci.backends.contract import Obstacle, Plan, Unbuildable
from foci.backends.problem_class import score_kind
from foci.code_fingerprint import code_fingerprint
from foci.compat.triton import release, untested_release
from foci.ir.expr import const
from foci.problem import Problem, Target

__all__ = [
    "ENABLED",
    "Device",
    "Kind",
    "SelfCheck",
    "Verdict",
    "check",
    "describe_check",
    "find_failure",
    "is_needed",
    "run_in_process",
]

ENABLED: Final = os.environ.get("FOCI_SELF_CHECK", "1") != "0"
"""The environment variable FOCI_SELF_CHECK=0 runs kernels under any release unchecked, as the check's own process does."""

LENGTHS: Final = ((1, 1), (128, 100), (1024, 700), (2048, 1300), (4096, 2500), (1 << 62, 4300))
"""(largest length, length that the check uses for it): schedules differ by the length, up to 8192."""

LIMIT: Final = 600
"""Seconds after which a check counts as failed."""


@dataclass(frozen=True)
class Kind:
    """The problems that one check stands for.

    Attributes:
        backend: the backend whose kernels are checked.
        variant: the kind of mask and score, a word of `foci.backends.problem_class.score_kind`, or "prefix" for a mask that keeps
            the first keys of a row but is not the causal one.
        layout, dtype: names.
        head_dim, value_dim: D and Dv.
        q_len, kv_len: of the small problem.
        is_grouped: whether several query heads share a key head.
        has_dropout, has_backward: whether the call has dropout, and a backward pass.
        has_blocks: whether the caller gives a block mask.
        is_learned: whether captured tensors require gradients.
        aux: auxiliary outputs beside the logsumexp, separated by commas.
    """

    backend: str
    variant: str
    layout: str
    dtype: str
    head_dim: int
    value_dim: int
    q_len: int
    kv_len: int
    is_grouped: bool
    has_dropout: bool
    has_blocks: bool
    has_backward: bool
    is_learned: bool
    aux: str

    @staticmethod
    def of(backend: str, problem: Problem) -> Kind:
        """The kind of a problem."""
        formula, word = problem.formula, score_kind(problem)
        if word == "full" and formula.block_size is None and problem.variant.mask != const(True):
            word = "prefix"
        aux = ",".join(name for name, on in vars(formula.outputs).items() if on and name != "lse")
        return Kind(
            backend, word, formula.layout.value, str(problem.dtype).removeprefix("torch."), problem.head_dim, problem.value_dim,
            _length(problem.q_len), _length(max(problem.kv_len, 129)), problem.q_heads != problem.kv_heads, formula.dropout,
            formula.block_size is not None, problem.needs_backward, any(problem.capture_grads), aux,
        )  # fmt: skip

    @property
    def text(self) -> str:
        """The kind in a few words, for `explain`."""
        parts = [self.variant, self.layout, self.dtype, f"D {self.head_dim}", f"Dv {self.value_dim}", f"{self.q_len} x {self.kv_len}"]
        named = {
            "shared heads": self.is_grouped, "dropout": self.has_dropout, "block mask": self.has_blocks,
            "learned captures": self.is_learned, "forward and backward": self.has_backward,
        }  # fmt: skip
        return ", ".join([*parts, *(name for name, on in named.items() if on), *filter(None, [self.aux])])


def _length(length: int) -> int:
    return next(small for most, small in LENGTHS if length <= most)


class Verdict(NamedTuple):
    """The outcome of a check: the failure, None if there is none, and whether another check would come to the same verdict."""

    failure: str | None
    is_final: bool = True


class Device(NamedTuple):
    """A GPU of this process."""

    number: int
    name: str


def device_for(target: Target) -> Device | None:
    """The GPU of this machine that a target describes, the current one if possible; None if there is none."""
    if target.device != "cuda" or untested_release(target.features) != ".".join(map(str, release())) or not torch.cuda.is_available():
        return None
    devices = sorted(range(torch.cuda.device_count()), key=lambda index: index != torch.cuda.current_device())
    indices = (index for index in devices if torch.cuda.get_device_capability(index) == divmod(target.arch, 10))
    index = next(indices, None)
    return None if index is None else Device(index, torch.cuda.get_device_name(index))


_CHILD: Final = """
import json, os, sys
answer = os.dup(1)
os.dup2(2, 1)
sys.path[:] = json.loads(sys.argv[1])
from foci import check_kernels
os.write(answer, check_kernels.answer(sys.stdin.read(), sys.argv[2]).encode())
"""


def run_in_process(kind: Kind, device: str, code: str = _CHILD, limit: float = LIMIT) -> Verdict:
    """Runs the check in a process of its own and returns its verdict, also where the process crashes or hangs."""
    if not sys.executable:
        return Verdict("there is no Python to start", is_final=False)
    command = [sys.executable, "-c", code, json.dumps(sys.path), device]
    environment = {**os.environ, "FOCI_SELF_CHECK": "0"}
    try:
        done = subprocess.run(command, input=json.dumps(asdict(kind)), capture_output=True, text=True, timeout=limit, env=environment)
    except subprocess.TimeoutExpired:
        return Verdict(f"it did not end within {limit:g} s")
    except OSError as error:
        return Verdict(f"no process could be started ({error})", is_final=False)
    if done.returncode == 0:
        return Verdict(*json.loads(done.stdout))
    if done.returncode < 0:
        by_others = done.returncode in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL)
        return Verdict(f"its process ended by {signal.Signals(-done.returncode).name}", is_final=not by_others)
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return Verdict(f"its process ended with status {done.returncode}{': ' + said[-1].strip() if said else ''}")


class SelfCheck:
    """Verdicts, in memory and on disk.

    Args:
        run: the check of a kind on a device, "cuda:0" for example.
        find_device: the GPU that a target describes.
        directory: where verdicts are kept; None for the user's folder.
    """

    def __init__(
        self,
        run: Callable[[Kind, str], Verdict] = run_in_process,
        find_device: Callable[[Target], Device | None] = device_for,
        directory: Path | None = None,
    ) -> None:
        self._run, self._find_device, self._directory = run, find_device, directory
        self._verdicts: dict[str, Verdict] = {}
        self._turns = threading.Lock()

    def known(self, kind: Kind, target: Target) -> Verdict | None:
        """The stored verdict, or None. Runs nothing."""
        device = self._find_device(target)
        return None if device is None else self._known(_key(kind, device))

    def verdict(self, kind: Kind, target: Target) -> Verdict:
        """The stored verdict, or that of a check that runs now."""
        device = self._find_device(target)
        if device is None:
            return Verdict("this machine has no such GPU, or another release of Triton", is_final=False)
        key = _key(kind, device)
        with self._turns:
            verdict = self._known(key)
            if verdict is None:
                try:
                    verdict = self._run(kind, f"cuda:{device.number}")
                except Exception as error:  # of the checker, not of the kernels
                    verdict = Verdict(f"{type(error).__name__}: {error}", is_final=False)
                self._verdicts[key] = verdict
                if verdict.is_final:
                    self._keep(key, verdict)
        return verdict

    def _path(self, key: str) -> Path | None:
        folder = disk.cache_directory("self_check") if self._directory is None else self._directory
        return None if folder is None else folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"

    def _known(self, key: str) -> Verdict | None:
        if key not in self._verdicts:
            path = self._path(key)
            content = None if path is None else disk.read_private(path)
            if content is None:
                return None
            try:
                record = json.loads(content)
                failure = record["failure"] if record["key"] == key else 0
            except (ValueError, TypeError, KeyError):
                return None
            if not (failure is None or isinstance(failure, str)):
                return None
            self._verdicts[key] = Verdict(failure)
        return self._verdicts[key]

    def _keep(self, key: str, verdict: Verdict) -> None:
        path = self._path(key)
        if path is not None:
            try:
                disk.write_atomically(path, json.dumps({"key": key, "failure": verdict.failure}, indent=1).encode())
            except OSError:
                return  # the next process checks again


def _key(kind: Kind, device: Device) -> str:
    """The key of a stored verdict: everything it depends on."""
    return "\n".join((f"triton {_triton()}", f"torch {torch.__version__}", device.name, code_fingerprint(), json.dumps(asdict(kind))))


def _triton() -> str:
    return importlib.metadata.version("triton")


# ---- what backends ask ----

_self_check: SelfCheck = SelfCheck()


def is_needed(target: Target) -> bool:
    """Whether kernels for a target must be checked before they run."""
    return ENABLED and untested_release(target.features) is not None


def find_failure(backend: str, problem: Problem, target: Target) -> Obstacle | None:
    """Why a stored verdict forbids a backend's kernels; None if they may run, or if there is no verdict yet."""
    if not is_needed(target):
        return None
    kind = Kind.of(backend, problem)
    verdict = _self_check.known(kind, target)
    return None if verdict is None else _reason(kind, verdict)


def check(plan: Plan) -> None:
    """Checks the kernels of a plan, unless a verdict is stored.

    Raises:
        Unbuildable: if they are wrong, do not compile, or could not be checked.
    """
    if not is_needed(plan.target):
        return
    kind = Kind.of(plan.backend, plan.problem)
    reason = _reason(kind, _self_check.verdict(kind, plan.target))
    if reason is not None:
        raise Unbuildable(reason)


def _reason(kind: Kind, verdict: Verdict) -> Obstacle | None:
    if verdict.failure is None:
        return None
    what = "fails its self-check" if verdict.is_final else "could not check itself"
    reason = f"{what} with Triton {_triton()}, which foci was not tested with: {verdict.failure} ({kind.text})"
    return Obstacle(reason, topic=f"checks of {kind.backend}")  # each failure is of one kind of problem; the first is warned of


def describe_check(target: Target) -> str:
    """The note of `explain` for kernels that are checked before they run; empty under tested releases."""
    if not is_needed(target):
        return ""
    return f"not tested with Triton {untested_release(target.features)}: the first call checks its kernels in another process; "
