"""Interface of a backend: it declines a problem with a reason, estimates its cost, and builds the kernels of a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from foci.backends.row_kernels import RowKernels
from foci.ir.expr import Expr
from foci.problem import Cotangents, Gradients, Operands, OptionalTensors, Problem, Program, Results, Target

__all__ = [
    "Backend",
    "BackwardOfRows",
    "CaptureFacts",
    "ForwardOfRows",
    "Given",
    "Inputs",
    "Kernel",
    "MachineFact",
    "Obstacle",
    "Offsets",
    "Plan",
    "Rejection",
    "Unbuildable",
]

Inputs: TypeAlias = Sequence[Tensor | None]
"""Tensors of a pass, in order."""
Offsets: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""cu_q, cu_kv, q_lengths, kv_lengths."""


@dataclass(frozen=True)
class Plan:
    """A problem given to a backend. `text` is canonical: the key of kernel caches, in memory (but see `Backend.kernel_key`) and on disk."""

    backend: str
    problem: Problem
    target: Target

    @property
    def text(self) -> str:
        """Key of kernel caches: everything in the problem that changes generated code."""
        p = self.problem
        grads = "".join(letter for letter, on in zip("qkv", (p.query_grad, p.key_grad, p.value_grad), strict=True) if on)
        captures = "".join(str(int(on)) for on in p.capture_grads)
        tuned = ";tuned" if p.tuned else ""
        return (
            f"backend={self.backend};device={self.target.device};arch={self.target.arch};dtype={p.dtype};"
            f"D={p.head_dim};Dv={p.value_dim};grads={grads}:{captures}{tuned}\n{p.formula.text}"
        )


class Obstacle(str):
    """A reason to decline that lies in the machine: the problem is one that the backend solves elsewhere, or once the user mends something.

    Args:
        reason: what is wrong, and the cure.
        topic: foci warns once of each topic; by default the reason itself.
    """

    topic: str

    def __new__(cls, reason: str, topic: str = "") -> Obstacle:
        obstacle = super().__new__(cls, reason)
        obstacle.topic = topic or reason
        return obstacle


@dataclass(frozen=True)
class Rejection:
    """A backend that cannot take a problem, and why, in words a user can act on; an `Obstacle` if the machine is why."""

    backend: str
    reason: str


class Unbuildable(RuntimeError):
    """A kernel that cannot be built here, though its backend took the problem: another backend runs it, with a warning. The message is an
    `Obstacle`, or text whose first line is the cause."""

    @property
    def obstacle(self) -> Obstacle:
        """Return the cause that keeps the backend from this machine, if any."""
        message = self.args[0] if self.args else ""
        return message if isinstance(message, Obstacle) else Obstacle(str(message).partition("\n")[0])


class Given(NamedTuple):
    """Arguments of a backward pass besides the operands: results of the forward, and their gradients."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None = None


class Kernel(Protocol):
    """A plan made runnable; a class to derive from. Pure: the same operands give the same bits. Operands without a key or a row never come
    here.

    Some kernels keep the launches that the first call with a program built (`Operands.program`). The other methods run them again
    from tensors alone, without the checks and arithmetic on the host that are a good part of a small call's time, and give what `forward`
    and `backward` would, in the layout that the program says. They return None where there is nothing to run again: by default always.
    """

    def forward(self, operands: Operands, /) -> Results:
        """Attention of the operands."""
        ...

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        """Gradients of the operands; `results` holds `out` and `lse` of the forward."""
        ...

    def launch_forward(self, program: Program, tensors: Inputs, optional: OptionalTensors, /) -> list[Tensor] | None:
        """Run the forward of a program again.

        Args:
            program: of the call.
            tensors: query, key, value and captured tensors.
            optional: the call's other tensors.

        Returns:
            out, lse, and row_max if the problem asks for it.
        """
        return None

    def launch_backward(self, program: Program, tensors: Inputs, optional: OptionalTensors, bwd_args: Given, /) -> list[Tensor] | None:
        """Run the backward of a program again; `bwd_args` holds the backward's other arguments.

        Returns:
            The gradients of query, key, value and captured tensors that the problem asks for.
        """
        return None

    def bind_forward(
        self, program: Program, rows: Tensor, tensors: Inputs, optional: OptionalTensors, /, *, no_padding: bool = False,
        out_alone: bool = False,
    ) -> ForwardOfRows | None:  # fmt: skip
        """Bind `launch_forward` to what the layers of a model share in one step: sequences and stream. Calls that capture tensors, drop
        weights or read pages are never bound.

        Args:
            program: of the call.
            rows: [T, E]. The bound launch takes rows of the same shape, dtype and device; it checks them, and returns None if anything has
                changed.
            tensors: query, key and value, views of the rows.
            optional: where sequences lie.
            no_padding: every row belongs to a sequence, so there are no gaps to fill.
            out_alone: the caller does not read lse; all calls may write it to one tensor.
        """
        return None

    def bind_backward(
        self, program: Program, rows: Tensor, tensors: Inputs, optional: OptionalTensors, bwd_args: Given, /
    ) -> BackwardOfRows | None:
        """Bind `launch_backward` to rows [T, E], as `bind_forward`."""
        return None

    def precompile(self, calls: Iterable[tuple[Kernel, Operands]], /) -> None:
        """Compile ahead what calls of other lengths, and their backward, would launch; by default nothing, as most kernels have one code.

        Args:
            calls: each with its kernel, which the planner chose for it, and operands without memory, in the order in which to compile.
        """
        return


class ForwardOfRows(Protocol):
    """A forward launch bound to everything but the rows."""

    def __call__(self, rows: Tensor, /) -> tuple[Tensor, Tensor] | None:
        """Return out [T, Hq * Dv] and lse [Hq, T]. `rows` [T, E] hold query, key and value side by side."""
        ...

    def moved(self, rows: Tensor, offsets: Tensor, /) -> ForwardOfRows | None:
        """Rebind to other sequences: the same number of them, any number of rows, one set of offsets for queries and keys. None if
        `Kernel.bind_forward` must bind again."""
        ...


class BackwardOfRows(Protocol):
    """A backward launch bound to everything but the rows."""

    def __call__(self, rows: Tensor, out: Tensor, lse: Tensor, gradient: Tensor, /) -> Tensor | None:
        """Return the gradient of `rows`, given out, lse and the gradient of out."""
        ...

    def moved(self, rows: Tensor, offsets: Tensor, /) -> BackwardOfRows | None:
        """Rebind to other sequences, as `ForwardOfRows.moved`."""
        ...


class CaptureFacts(NamedTuple):
    """Facts about a captured tensor on which the cost of reading it depends.

    Attributes:
        unit_dim: the dimension whose elements are neighbours in memory; -1 where there is none.
        wants_grad: whether its gradient is wanted.
    """

    unit_dim: int
    wants_grad: bool = False


class MachineFact(NamedTuple):
    """A fact that a backend found on this machine."""

    value: str
    tested: str = ""
    """Whether foci was tested with it or supports it, in words of `foci.compat.releases`; empty where that does not matter."""


class Backend(ABC):
    """One way to compute attention: the class that every backend derives from. Register an instance with `foci.register_backend`.

    A backend has a `name`, `reject`, `cost` and `build`. The other methods have defaults that do for most backends.
    """

    name: str

    @abstractmethod
    def reject(self, problem: Problem, target: Target, /) -> str | None:
        """Why this backend cannot solve the problem on the target, or None if it can. Pure: no tensors, no device.

        If the reason is an `Obstacle`, foci warns when it then runs a slower backend.
        """

    @abstractmethod
    def cost(self, problem: Problem, target: Target, /) -> float:
        """Estimated seconds of a call; the planner takes the least."""

    def note(self, problem: Problem, target: Target, /) -> str:
        """Describe in a few words, for `explain`, which kernels would run, and why."""
        return ""

    @abstractmethod
    def build(self, plan: Plan, /) -> Kernel:
        """A kernel for every problem with this plan's `kernel_key`.

        Raises:
            Unbuildable: if it cannot be built here. A kernel's own methods may raise that too, for what they build when first asked for.
        """

    def kernel_key(self, plan: Plan, /) -> Hashable:
        """Key of the plan's kernel in memory: the plan's text, unless kernels also depend on lengths or numbers of heads."""
        return plan.text

    def row_kernels(self, target: Target, /) -> RowKernels | None:
        """Kernels for what a transformer layer computes between its products, or None."""
        return None

    def seconds_per_score(self, score: Expr, facts: tuple[CaptureFacts, ...], target: Target, /, *, needs_backward: bool) -> float | None:
        """Estimate the seconds that a score function adds to each score, if a bias tensor that was computed before may be faster.

        None where that never is, and for another device's target.
        """
        return None

    def features(self) -> frozenset[str]:
        """Return what this machine has, besides a device, that the backend needs: a compiler, say. Part of `Target.features` on the CPU."""
        return frozenset()

    def facts(self) -> Mapping[str, MachineFact]:
        """Return what the backend found on this machine, by name; `foci env` prints it."""
        return {}
