"""What `foci env` prints: the facts on which the planner and its backends depend, for a report of a problem."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import replace

import torch
from rich.table import Table

from foci import backends
from foci.backends.contract import Informed
from foci.cli.explanation import Question, explanation_of, verdicts_table

__all__ = ["backends_table", "facts_table"]

_PACKAGES = ("foci", "torch", "triton", "numpy", "transformers", "matplotlib")


def facts_table() -> Table:
    """Versions, devices, threads and compilers."""
    table = Table(show_header=False)
    for name, value in (*_versions(), *_machine(), *_of_backends()):
        table.add_row(name, value)
    return table


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for name in _PACKAGES:
        try:
            # torch's own word has the build behind the version
            yield name, torch.__version__ if name == "torch" else importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"


def _machine() -> Iterator[tuple[str, str]]:
    yield "system", platform.platform()
    yield "processor", f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} logical cores"
    yield "threads", f"{torch.get_num_threads()} (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')})"
    if not torch.cuda.is_available():
        yield "cuda", "no device" if torch.version.cuda else "not in this build of torch"
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}, CUDA {torch.version.cuda}"


def _of_backends() -> Iterator[tuple[str, str]]:
    for name in backends.names():
        backend = backends.load(name)
        if isinstance(backend, Informed):
            yield from ((f"{name} backend, {fact}", value) for fact, value in backend.facts().items())


# A problem that every backend knows: what a backend declines here, it declines because of the machine.
_USUAL = Question(
    batch=1,
    q_heads=8,
    kv_heads=8,
    q_len=1024,
    kv_len=1024,
    head_dim=64,
    value_dim=64,
    dtype="float32",
    device="cpu",
    mask="causal",
    score=None,
    dropout_p=0.0,
    train=True,
)


def backends_table() -> Table:
    """Each backend's verdict on training with an ordinary causal problem, on the best device of this machine."""
    asked = replace(_USUAL, device="cuda", dtype="bfloat16") if torch.cuda.is_available() else _USUAL
    table = verdicts_table(explanation_of(asked).decision)
    table.title = f"backends, for causal attention [1, 8, 1024, 64] in {asked.dtype} on {asked.device}, training"
    return table
