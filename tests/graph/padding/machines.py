"""Devices that need not be there."""

import itertools

from foci.graph.padding import Machine
from foci.graph.padding.tables import KINDS, ROLES, Row, Shape, Table

SHAPES = (Shape(1, 8192, 32768, 1024), Shape(1, 1024, 1024, 1024), Shape(1, 128, 128, 128), Shape(64, 1024, 1024, 64))


def machine(slowdown: float = 3.0, *, bandwidth: float = 4e12, tf32: bool = True) -> Machine:
    """One on which every misaligned matrix makes a product slower by as much."""
    peak = 1e14
    rows = tuple(
        Row(kind, role, alignment, shape, shape.flops / peak, slowdown * shape.flops / peak)
        for kind, role, alignment, shape in itertools.product(KINDS, ROLES, (1, 2, 4, 8), SHAPES)
    )
    table = Table("simulated", "simulated", "none", dict.fromkeys(KINDS, peak), bandwidth, 1e-9, rows)
    return Machine("simulated", 16, tf32, table)
