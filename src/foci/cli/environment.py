"""What `foci env` prints: the facts on which the planner and its backends depend, for a report of a problem."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from rich.table import Column, Table
from rich.text import Text

from foci import backends
from foci.cli.explanation import Question, explain_question, verdicts_table
from foci.compat import inductor, releases
from foci.compat.lookup import NAMES

__all__ = ["backends_table", "facts_table", "missing_names"]

_PACKAGES = ("foci", "torch", "triton", "numpy", "transformers", "matplotlib")


class Fact(NamedTuple):
    """A row of the table."""

    name: str
    value: str
    tested: str = ""
    """Whether the tests ran with this, by `foci.compat.releases`; empty where foci does not depend on it."""


def facts_table() -> Table:
    """Versions, devices, threads and compilers, and whether each is one that was tested."""
    table = Table("", Column("here", overflow="fold"), "tested?")  # a report of a problem needs the end of a long value too
    for fact in (*_versions(), *_machine(), *_of_backends()):
        is_fine = fact.tested in (releases.TESTED, releases.SUPPORTED)
        table.add_row(fact.name, fact.value, Text(fact.tested, "green" if is_fine else "yellow"))
    return table


def missing_names() -> list[str]:
    """Return what foci does for want of private names of its dependencies, each followed by a line for every name that is missing."""
    _import_names()
    missing = [name for name in NAMES.values() if not name.is_found]
    lines = []
    for without in dict.fromkeys(name.without for name in missing):
        lines += [f"foci {without}. Missing:", *(f"  {name.path}" for name in missing if name.without == without)]
    return lines


def _import_names() -> None:
    """Loads what looks up private names when it is imported."""
    for module in ("foci.fusion", "foci.nn", "foci.torch_compile", "foci.integrations.patch", "foci.dynamo_hop", "foci.compat.lowering"):
        importlib.import_module(module)
    if torch.distributed.is_available():
        importlib.import_module("foci.distributed")
    inductor.note_names()


def _versions() -> Iterator[Fact]:
    yield Fact("python", platform.python_version(), releases.describe_release("python", platform.python_version(), torch.__version__))
    for name in _PACKAGES:
        try:
            # torch's own word has the build behind the version
            version = torch.__version__ if name == "torch" else importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Fact(name, "not installed", "no GPU kernels without it: pip install 'foci[gpu]'" if name == "triton" else "")
        else:
            is_tested = name in ("torch", "triton")
            yield Fact(name, version, releases.describe_release(name, version, torch.__version__) if is_tested else "")


def _machine() -> Iterator[Fact]:
    yield Fact("system", platform.platform(), releases.describe_system(platform.system(), platform.machine()))
    yield Fact("processor", f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} logical cores")
    yield Fact("threads", f"{torch.get_num_threads()} (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')})")
    if not torch.cuda.is_available():
        yield Fact("cuda", "no device" if torch.version.cuda else "not in this build of torch")
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        value = f"{torch.cuda.get_device_name(index)}, sm_{capability[0]}{capability[1]}, CUDA {torch.version.cuda}"
        yield Fact(f"cuda:{index}", value, releases.describe_capability(capability))


def _of_backends() -> Iterator[Fact]:
    for name in backends.names():
        for fact, value_and_tested in backends.load(name).facts().items():
            yield Fact(f"{name} backend, {fact}", *value_and_tested)


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
    table = verdicts_table(explain_question(asked).decision)
    table.title = f"backends, for causal attention [1, 8, 1024, 64] in {asked.dtype} on {asked.device}, training"
    return table
