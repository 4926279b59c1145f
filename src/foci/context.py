"""What surrounds a call: which backends may run (`use`) and who watches (`observe`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from foci import backends
from foci.backends.contract import Rejection
from foci.ir.text import to_infix
from foci.problem import Layout, Problem

__all__ = ["Call", "Log", "allowed_backends", "hidden", "is_tuning", "observe", "observers", "use"]


@dataclass(frozen=True)
class Call:
    """One attention call that ran.

    Attributes:
        problem: what was asked.
        backend: name of the backend that ran.
        rejections: the backends that declined, with their reasons.
    """

    problem: Problem
    backend: str
    rejections: tuple[Rejection, ...]

    def __str__(self) -> str:
        """One line. Lengths and the batch are rounded up to a power of two, as in `problem`."""
        p = self.problem
        heads = f"{p.q_heads} heads" if p.q_heads == p.kv_heads else f"{p.q_heads} query heads, {p.kv_heads} key heads"
        dims = f"head dim {p.head_dim}" if p.head_dim == p.value_dim else f"head dims {p.head_dim} and {p.value_dim}"
        what = "sequences" if p.formula.layout is Layout.JAGGED else "batch"
        sizes = f"{what} <= {p.batch}, {heads}, queries <= {p.q_len}, keys <= {p.kv_len}, {dims}, {str(p.dtype).removeprefix('torch.')}"
        training = ", training" if p.needs_backward else ""
        return f"{self.backend}: {p.formula.layout.value}, {sizes}{training}: {to_infix(p.variant.score)} where {to_infix(p.variant.mask)}"

    def __repr__(self) -> str:
        return f"<Call {self}>"


@dataclass
class Log:
    """A record of what happened inside `observe`, in order.

    Attributes:
        calls: forward calls.
        backward_calls: their backward passes.
        fusions: attention sites that the graph compiler found, as `foci.fusion.Site`: `fused`, `location`, `variant`, `reason`.
        paddings: products that the graph compiler looked at.
    """

    calls: list[Call] = field(default_factory=list)
    backward_calls: list[Call] = field(default_factory=list)
    fusions: list[Any] = field(default_factory=list)
    paddings: list[Any] = field(default_factory=list)


# Logs are process-wide: the autograd engine and compiled code run kernels on threads of their own.
_logs: list[Log] = []


class _Local(threading.local):
    """State of each thread. A context variable would do as well, but torch.compile neither reads nor guards one."""

    allowed: tuple[str, ...] | None = None
    is_hidden: bool = False


_local = _Local()


# How many `use(tune=True)` are open; process-wide, as the autograd engine runs backward passes on threads of its own.
_tuning = 0


def is_tuning() -> bool:
    """Whether backends may time their choices."""
    return _tuning > 0


def observers() -> list[Log]:
    """The logs that are open and are told of what this thread does."""
    return [] if _logs and _local.is_hidden else _logs


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Inside, what this thread runs is no call of the user's: no log is told of it."""
    before, _local.is_hidden = _local.is_hidden, True
    try:
        yield
    finally:
        _local.is_hidden = before


def allowed_backends() -> tuple[str, ...] | None:
    """Names that `use` allows here, or None for all."""
    return _local.allowed


@contextlib.contextmanager
def observe() -> Iterator[Log]:
    """Records every attention call of the process while it is open.

    Yields:
        A `Log`, whose `calls` have the problem, the backend that ran and why others did not.

    Example:
        >>> import foci, torch
        >>> q = torch.randn(1, 2, 16, 8)
        >>> with foci.observe() as log:
        ...     _ = foci.attention(q, q, q, mask=foci.masks.window(4))
        >>> len(log.calls), log.calls[0].problem.head_dim
        (1, 8)
        >>> print(str(log.calls[0]).partition(": ")[2])
        dense, batch <= 1, 2 heads, queries <= 16, keys <= 16, head dim 8, float32: score where (kv_idx <= q_idx) & (q_idx - kv_idx <= i0)
    """
    log = Log()
    _logs.append(log)
    try:
        yield log
    finally:
        # by identity: two logs with equal contents are two logs
        del _logs[next(n for n, other in enumerate(_logs) if other is log)]


@contextlib.contextmanager
def use(*names: str, tune: bool = False) -> Iterator[None]:
    """Restricts calls that this thread makes inside to the named backends; their backward passes are bound by it wherever they run.

    Args:
        names: of backends; a call that none of them accepts raises `NoViableBackend`. With `tune` alone, all are allowed.
        tune: enables autotuning in the whole process: on the first call of each problem kind inside the context, the backend benchmarks
            its configurations and caches the winner on disk, by device, formula and version. Without it nothing is timed, and a
            cached winner is used only inside such a context. The Triton backend tunes tiles, warps and stages.

    Raises:
        TypeError: for a `tune` that is neither True nor False.
        ValueError: for a name that no backend has.

    Example:
        >>> import foci, torch
        >>> q = torch.randn(1, 2, 16, 8)
        >>> with foci.use("blocked"):
        ...     out = foci.attention(q, q, q)
        >>> with foci.use(tune=True):
        ...     out = foci.attention(q, q, q)
    """
    global _tuning
    if not isinstance(tune, bool):
        raise TypeError(f"tune must be True or False; got {type(tune).__name__}")
    for name in names:
        if name not in backends.names():
            raise ValueError(f"no backend {name!r}; there are {', '.join(backends.names())}")
    before = _local.allowed
    if names or not tune:
        _local.allowed = names
    _tuning += tune
    try:
        yield
    finally:
        _local.allowed = before
        _tuning -= tune
