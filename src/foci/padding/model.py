"""What a product costs, aligned and misaligned, by a roofline and the nearest measurement; and so whether padding pays."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from foci.padding.gemm_times import Fault, Kind, Role, Shape, Table, find_table
from foci.padding.strides import LOAD
from foci.padding.tuning import device_name, family

__all__ = ["Machine", "describe_machine", "is_profitable_to_pad", "seconds"]

MARGIN: Final = 0.03
"""Of a product's time: less is within the error of the measurements."""

_KINDS: Final[Mapping[torch.dtype, Kind]] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}


@dataclass(frozen=True)
class Machine:
    """A device as decisions see it: nothing of it is measured while compiling.

    Attributes:
        name: the device's.
        load: bytes that rows must be a multiple of for products to be fast.
        tf32: whether products of float32 may round to tf32.
        table: measurements; None where there are none.

    Example:
        >>> Machine("NVIDIA H200", 16, True, find_table("NVIDIA H200", "sm_90")).kind(torch.float32)
        'tf32'
    """

    name: str
    load: int
    tf32: bool
    table: Table | None

    def kind(self, dtype: torch.dtype) -> Kind | None:
        """Return the kind of arithmetic in products of a dtype, or None if no table knows it."""
        kind = _KINDS.get(dtype)
        return "tf32" if kind == "float32" and self.tf32 else kind


def describe_machine(device: torch.device) -> Machine:
    """The device as it is now, settings for tf32 included."""
    tf32 = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return _machine(device_name(device), family(device), tf32)


@functools.cache
def _machine(name: str, kin: str, tf32: bool) -> Machine:
    return Machine(name, LOAD, tf32, find_table(name, kin))


def seconds(table: Table, kind: Kind, shape: Shape, faults: Mapping[Role, Fault]) -> float | None:
    """Estimate the seconds of one product, or None where nothing like it was measured.

    A roofline carries the time of the nearest measurement over to this shape; the worst of the faults decides.

    Args:
        table: of the device.
        kind: of arithmetic.
        shape: of the product.
        faults: of its matrices.
    """
    return _seconds(table, kind, shape, frozenset(faults.items()))


@functools.lru_cache(maxsize=4096)  # a model's layers ask the same
def _seconds(table: Table, kind: Kind, shape: Shape, faults: frozenset[tuple[Role, Fault]]) -> float | None:
    rows = [(table.nearest(kind, shape, (role, fault.alignment)), fault.padded) for role, fault in faults]
    base = table.nearest(kind, shape)
    if base is None or any(row is None for row, _ in rows):
        return None
    slowdown = max((row.slowdown(padded) for row, padded in rows if row is not None), default=1.0)
    return _roofline(table, kind, shape) * base.aligned / _roofline(table, kind, base.shape) * slowdown


def _roofline(table: Table, kind: Kind, shape: Shape) -> float:
    itemsize = 8 if kind == "float64" else 4 if kind in ("float32", "tf32") else 2
    return max(shape.flops / table.peaks[kind], shape.elements * itemsize / table.bandwidth, table.launch)


def is_profitable_to_pad(before: float, after: float, cost: float) -> bool:
    """Whether products get faster by more than what padding costs, and by more than measurements can tell.

    Args:
        before, after: seconds of the products that read or write the tensor.
        cost: seconds of the copies.

    Example:
        >>> is_profitable_to_pad(1.6e-3, 0.6e-3, 0.2e-3), is_profitable_to_pad(1e-3, 0.99e-3, 0.0)
        (True, False)
    """
    return before - after - cost > MARGIN * before
