"""What a backend may offer besides attention: kernels over the rows of tokens, for what a layer computes between its products."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from foci.problem import Target

__all__ = ["Backward", "Column", "Name", "Norm", "RowKernels", "Rows", "Rowwise", "Sums"]

Name: TypeAlias = int
"""What the caller calls a norm or a sum by."""


class Norm(NamedTuple):
    """A norm of a layer, as its backward knows it.

    Attributes:
        name: of the norm.
        sums: the names of what it sums: the gradients of its scale and shift and, third, the columns of its result, if they are wanted.
        adds: whether another gradient is added to its result.
        of_sum: whether it is of a sum.
        scales, shifts: whether it has a scale, and a shift.
    """

    name: Name
    sums: tuple[Name, ...]
    adds: bool
    of_sum: bool
    scales: bool
    shifts: bool


class Column(NamedTuple):
    """Sums of the columns of a gradient that no norm leaves.

    Attributes:
        name: of the sums.
        width: how many columns there are.
        kind: 0, or of the activation behind which the gradient is: 1 relu, 2 gelu.
    """

    name: Name
    width: int
    kind: int


class Sums(Protocol):
    """A layer's backward between its products, and what it sums over the rows. Tensors are [T, ...]."""

    def is_left(self, name: Name, /) -> bool:
        """Whether sums of that name are left by `columns`."""
        ...

    def norm(self, name: Name, dy: Tensor, x: Tensor, scale: Tensor | None, stats: Tensor, which: int, added: Tensor | None, /) -> Tensor:
        """The gradient of a norm's x, written over dy, unless that was given; `added` is added to it.

        Args:
            name: of the norm.
            dy, x, added: [T, E].
            scale: [E].
            stats: as `Rows.norm` left them, of norm `which`.
        """
        ...

    def columns(self, name: Name, dy: Tensor, before: Tensor | None = None, /) -> None:
        """Sums the columns of dy; behind an activation dy is replaced by the gradient of its argument first.

        Args:
            name: of the sums.
            dy: [T, width].
            before: likewise, what relu gave, or what gelu was given.
        """
        ...

    def finish(self) -> list[tuple[Name, Tensor]]:
        """All sums by name, in the dtype of the layer."""
        ...


class Backward(Protocol):
    """What a layer's backward sums; layers that are alike share it."""

    def begin(self, rows: Rows, /) -> None:
        """Has its kernels compiled beside what follows, those of the forward first, once on a device."""
        ...

    def of(self, dy: Tensor, /) -> Sums | None:
        """The pass for a gradient [T, E] of the layer's result; None where it cannot be launched."""
        ...


class Rows(Protocol):
    """Where the kernels of a pass are launched."""

    @property
    def kernels(self) -> RowKernels:
        """Those that are launched."""
        ...

    @property
    def device(self) -> int:
        """Its index."""
        ...

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph is made of what is launched."""
        ...

    def begin_norms(self, dtype: torch.dtype, width: int, keeps: bool, scales: bool, shifts: bool, /) -> None:
        """Has the kernel of norms of sums, without statistics, compiled beside what follows, once on a device.

        Args:
            dtype: of the rows.
            width: of each.
            keeps: whether the sum is kept.
            scales, shifts: whether there is a scale, and a shift.
        """
        ...

    def norm(
        self, x: Tensor, added: Tensor | None, scale: Tensor | None, shift: Tensor | None, eps: float, stats: Tensor | None = None,
        which: int = 0, /, *, keeps: bool,
    ) -> Tensor | None:  # fmt: skip
        """The layer norm of x, or of x + added, which is rounded first, and written over x: the sum with `keeps`, else its norm.

        Args:
            x: [T, E], nobody else's where something is added.
            added: [T, E].
            scale, shift: [E].
            eps: as torch's.
            stats: [2, 2, T] float32, for means and reciprocal spreads, those of norm `which`, 0 or 1.

        Returns:
            [T, E]; None, with nothing done, where tensors lie as kernels do not read them.
        """
        ...


class RowKernels(Hashable, Protocol):
    """A backend's kernels over rows."""

    def place(self, x: Tensor, /) -> Rows | None:
        """For passes over x [T, E] and what is computed of it; None where kernels cannot be launched for it."""
        ...

    def backward(self, dtype: torch.dtype, width: int, norms: Sequence[Norm], columns: Sequence[Column], /) -> Backward:
        """For layers of that dtype and width whose norms and other sums are these, norms from the layer's end to its beginning."""
        ...


@runtime_checkable
class Rowwise(Protocol):
    """A backend that has kernels over rows."""

    def row_kernels(self, target: Target, /) -> RowKernels | None:
        """Those for a target, or None."""
        ...
