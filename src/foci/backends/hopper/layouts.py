# mypy: ignore-errors
"""Layouts of tiles in shared memory and in registers, the same for every kernel.

A tile of rows lies in shared memory as TMA writes it and wgmma reads it: swizzled over its width. Products are held by one
warpgroup, 64 rows at a time.

Tensors in registers and tiles have sides of powers of two. A width that is none is the sum of some, and its tile lies in as many
pieces: products over the width sum over them, products that have it as columns are as many products.
"""

from foci.backends.hopper.gluon_compat import gl, gluon
from foci.backends.hopper.schedules import width_pieces

__all__ = ["mma_layout", "operand_layout", "piece", "pieces", "smem_layout", "tma_columns"]


pieces = gluon.constexpr_function(width_pieces)


@gluon.constexpr_function
def piece(width, i):
    """The i-th of them."""
    return pieces(width)[i]


@gluon.constexpr_function
def tma_columns(width):
    """Columns that one copy brings, by the one descriptor that a tensor has: those of the narrowest piece."""
    return width & -width


@gluon.constexpr_function
def smem_layout(rows, width, rank=2):
    """Of a [rows, width] tile of 16-bit numbers, with leading dimensions of 1 up to `rank`."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=rank)


@gluon.constexpr_function
def mma_layout(columns):
    """Of a [64 n, columns] product, n a warpgroup's turns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def operand_layout(columns):
    """Of the left factor of a product when it stays in registers, made from a product of so many columns."""
    return gl.DotOperandLayout(operand_index=0, parent=mma_layout(columns), k_width=2)
