"""What misaligned strides cost on a device, as measured: shipped with foci, extended by `foci tune`."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from foci.backends.disk import cache_root

__all__ = ["KINDS", "ROLES", "Fault", "Kind", "Role", "Row", "Shape", "Table", "extend", "find_table", "folder", "read", "write"]

Kind: TypeAlias = Literal["float16", "bfloat16", "float32", "tf32", "float64"]
"""Of arithmetic: the dtype, and tf32 where float32 products may use it."""
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

Role: TypeAlias = Literal["a", "at", "b", "bt", "out"]
"""Which matrix of [M, K] @ [K, N]: `at` and `bt` are the transposes of matrices that lie row by row."""
ROLES: Final[tuple[Role, ...]] = get_args(Role)

# The dim whose length is the stride of a role's rows.
_INNER: Final[Mapping[Role, str]] = {"a": "k", "at": "m", "b": "n", "bt": "k", "out": "n"}


@dataclass(frozen=True)
class Shape:
    """[batch, M, K] @ [batch, K, N]."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Return the flops of the product: a multiplication and an addition for each pair."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def elements(self) -> int:
        """Return the elements of the three matrices."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    def shrunk(self, role: Role, by: int) -> Shape:
        """Return the shape with a role's inner dim smaller."""
        name = _INNER[role]
        return replace(self, **{name: getattr(self, name) - by})

    def distance(self, other: Shape) -> float:
        """How unlike two shapes are: of the logarithms of their sizes."""
        pairs = ((self.batch, other.batch), (self.m, other.m), (self.n, other.n), (self.k, other.k))
        return math.sqrt(sum(math.log2(max(1, x) / max(1, y)) ** 2 for x, y in pairs))


@dataclass(frozen=True)
class Fault:
    """A misalignment of a matrix.

    Attributes:
        alignment: bytes that the length of its rows is a multiple of.
        padded: whether the rows start at aligned addresses all the same.
    """

    alignment: int
    padded: bool


@dataclass(frozen=True)
class Row:
    """One measurement: seconds of a product in which one matrix may have a fault.

    Attributes:
        kind: of arithmetic.
        role: the matrix.
        alignment: bytes that the length of its rows is a multiple of.
        shape: of the product, without the fault.
        aligned: without the fault.
        padded: with rows of odd length that start at aligned addresses.
        misaligned: with rows of odd length side by side.
    """

    kind: Kind
    role: Role
    alignment: int
    shape: Shape
    aligned: float
    padded: float
    misaligned: float

    def slowdown(self, padded: bool) -> float:
        """Return how many times as long the fault makes the product."""
        return max(1.0, (self.padded if padded else self.misaligned) / self.aligned)


@dataclass(frozen=True, eq=False)
class Table:
    """The measured times of a device.

    Attributes:
        device: its name.
        family: of devices that are much alike.
        torch: the version that measured.
        peaks: flops a second, by kind of arithmetic.
        bandwidth: bytes a second that a copy reads and writes.
        launch: seconds of a kernel that does nothing.
        rows: measurements.
    """

    device: str
    family: str
    torch: str
    peaks: Mapping[Kind, float]
    bandwidth: float
    launch: float
    rows: tuple[Row, ...]

    def nearest(self, kind: Kind, shape: Shape, fault: tuple[Role, int] | None = None) -> Row | None:
        """The measurement of the shape most like this one: of a role and an alignment, or of any where only the aligned time counts."""
        return min(self._by_fault.get((kind, fault), ()), key=lambda row: (row.shape.distance(shape), str(row.shape)), default=None)

    @functools.cached_property
    def _by_fault(self) -> dict[tuple[Kind, tuple[Role, int] | None], list[Row]]:
        rows_by_fault: dict[tuple[Kind, tuple[Role, int] | None], list[Row]] = {}
        seen: set[tuple[Kind, Shape]] = set()
        for row in self.rows:
            rows_by_fault.setdefault((row.kind, (row.role, row.alignment)), []).append(row)
            if (row.kind, row.shape) not in seen:
                seen.add((row.kind, row.shape))
                rows_by_fault.setdefault((row.kind, None), []).append(row)
        return rows_by_fault

    def extended(self, by: Table) -> Table:
        """With another's rows and peaks in place of its own where both have them."""
        taken = {(row.kind, row.role, row.alignment, row.shape) for row in by.rows}
        kept = tuple(row for row in self.rows if (row.kind, row.role, row.alignment, row.shape) not in taken)
        return replace(by, peaks={**self.peaks, **by.peaks}, rows=kept + by.rows)


def folder() -> Path:
    """Where `foci tune` writes."""
    return cache_root() / "padding"


def _file_name(device: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in device.lower()) + ".json"


def read(path: Path) -> Table:
    """A table from a file.

    Raises:
        ValueError: for a file that holds none.
    """
    try:
        data = json.loads(path.read_text())
        rows = tuple(Row(kind, role, alignment, Shape(*shape), *times) for kind, role, alignment, shape, *times in data.pop("rows"))
        return Table(**data, rows=rows)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no table of measurements: {error}") from error


def write(table: Table, path: Path) -> None:
    """A row to a line, so that two tables can be compared by eye."""
    rows = [
        json.dumps([row.kind, row.role, row.alignment, [row.shape.batch, row.shape.m, row.shape.n, row.shape.k], *_times(row)])
        for row in table.rows
    ]
    head = {name: getattr(table, name) for name in ("device", "family", "torch", "peaks", "bandwidth", "launch")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head)[:-1] + ', "rows": [\n' + ",\n".join(rows) + "\n]}\n")


def extend(table: Table, path: Path | None = None) -> Path:
    """Writes a table over what a file holds of the same measurements; by default where `find_table` looks for it.

    Returns:
        The file.
    """
    path = path or folder() / _file_name(table.device)
    write(read(path).extended(table) if path.exists() else table, path)
    return path


def _times(row: Row) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in (row.aligned, row.padded, row.misaligned))


@functools.cache
def find_table(device: str, family: str) -> Table | None:
    """Return what is known of a device: the shipped table, extended by what `foci tune` wrote.

    A device that nobody measured goes by a shipped one of its family; None if there is none. Read once: two compilations in
    one process decide alike.

    Example:
        >>> find_table("NVIDIA H200", "sm_90").device
        'NVIDIA H200'
    """
    shipped = Path(__file__).parent / "tables"
    paths = [path for path in (shipped / _file_name(device), folder() / _file_name(device)) if path.exists()]
    if paths:
        return functools.reduce(Table.extended, map(read, paths))
    return next((table for table in map(read, sorted(shipped.glob("*.json"))) if table.family == family), None)
