"""What `foci kernels` prints."""

from __future__ import annotations

from rich.table import Table

from foci import kernel_packs
from foci.kernel_packs import Built

__all__ = ["describe_built", "table_of_packs"]


def describe_built(built: Built) -> str:
    """One line on a pack that was written."""
    return f"{built.path}: {built.kernels} kernels, {_mib(built.path.stat().st_size)}"


def table_of_packs() -> Table:
    """A row for each pack in which kernels are looked up."""
    table = Table("pack", "kernels", "size", "compiled for")
    for pack in kernel_packs.installed():
        facts = ", ".join(f"{name} {value}" if name != "arch" else value for name, value in pack.facts.items())
        table.add_row(str(pack.path), str(len(pack.names)), _mib(pack.path.stat().st_size), facts)
    return table


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
