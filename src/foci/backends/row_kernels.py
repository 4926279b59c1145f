"""Interface of row-wise kernels, which a backend may offer besides attention: layer norms, and column sums for gradients of biases."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = ["Backward", "Column", "Name", "Norm", "RowKernels", "Rows", "Sums"]

Name: TypeAlias = int
"""Number by which the caller refers to a norm or a sum."""


class Norm(NamedTuple):
    """A layer norm in a layer's backward.

    Attributes:
        name: of the norm.
        sums: names of the column sums that it computes: gradients of scale and shift and, third, of the columns of its result, if needed.
        adds: whether another gradient is added to its result.
        of_sum: whether its input is a sum, such as a residual connection.
        scales, shifts: whether it has a scale, and a shift.
    """

    name: Name
    sums: tuple[Name, ...]
    adds: bool
    of_sum: bool
    scales: bool
    shifts: bool


class Column(NamedTuple):
    """Column sums of a gradient that no norm computes.

    Attributes:
        name: of the sums.
        width: how many columns there are.
        kind: activation whose derivative is applied first: 0 none, 1 relu, 2 gelu.
    """

    name: Name
    width: int
    kind: int


class Sums(Protocol):
    """One backward pass of a layer: the row-wise steps between its matrix products. Tensors are [T, ...]."""

    def is_left(self, name: Name, /) -> bool:
        """Whether `columns` computes the sums of this name."""
        ...

    def norm(self, name: Name, dy: Tensor, x: Tensor, scale: Tensor | None, stats: Tensor, which: int, added: Tensor | None, /) -> Tensor:
        """Compute the gradient of a norm's x and add `added` to it. The result overwrites dy unless the caller of the pass gave dy.

        Args:
            name: of the norm.
            dy, x, added: [T, E].
            scale: [E].
            stats: from `Rows.norm`; those of norm `which` are read.
        """
        ...

    def columns(self, name: Name, dy: Tensor, before: Tensor | None = None, /) -> None:
        """Sum the columns of dy. If the sums have an activation, dy is first replaced by the gradient of its argument.

        Args:
            name: of the sums.
            dy: [T, width].
            before: [T, width], the output of relu, or the input of gelu.
        """
        ...

    def finish(self) -> list[tuple[Name, Tensor]]:
        """Return all sums with their names, in the dtype of the layer."""
        ...


class Backward(Protocol):
    """Kernels of a layer's backward; equal layers share them."""

    def begin(self, rows: Rows, /) -> None:
        """Start compiling the kernels in the background, the forward's first, once on a device."""
        ...

    def of(self, dy: Tensor, /) -> Sums | None:
        """Begin a pass for a gradient [T, E] of the layer's result; None if kernels cannot be launched for it."""
        ...


class Rows(Protocol):
    """Device and stream on which the kernels of a pass are launched."""

    @property
    def kernels(self) -> RowKernels:
        """The kernels that this launches."""
        ...

    @property
    def device(self) -> int:
        """Index of the device."""
        ...

    @property
    def is_captured(self) -> bool:
        """Whether launches are captured in a CUDA graph."""
        ...

    def begin_norms(self, dtype: torch.dtype, width: int, keeps: bool, scales: bool, shifts: bool, /) -> None:
        """Start compiling the kernel of norms of sums, without statistics, in the background, once on a device.

        Args:
            dtype: of the rows.
            width: elements of a row.
            keeps: whether the sum is stored.
            scales, shifts: whether there is a scale, and a shift.
        """
        ...

    def norm(
        self, x: Tensor, added: Tensor | None, scale: Tensor | None, shift: Tensor | None, eps: float, stats: Tensor | None = None,
        which: int = 0, /, *, keeps: bool,
    ) -> Tensor | None:  # fmt: skip
        """Compute the layer norm of x, or of x + added, rounded. With `added`, the sum overwrites x if `keeps`, else the norm does.

        Args:
            x: [T, E]; with `added` it is overwritten.
            added: [T, E].
            scale, shift: [E].
            eps: as torch's.
            stats: [2, 2, T] float32, filled with mean and reciprocal standard deviation at norm `which`, 0 or 1.

        Returns:
            [T, E]; None, with nothing done, if kernels do not support the layout of a tensor.
        """
        ...


class RowKernels(Hashable, Protocol):
    """A backend's kernels over rows."""

    def place(self, x: Tensor, /) -> Rows | None:
        """Return where to launch kernels for x [T, E]; None if they cannot be launched for it."""
        ...

    def backward(self, dtype: torch.dtype, width: int, norms: Sequence[Norm], columns: Sequence[Column], /) -> Backward:
        """Return the kernels of layers with these norms, from the layer's end to its beginning, and other column sums."""
        ...
