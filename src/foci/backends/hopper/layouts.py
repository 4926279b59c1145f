# mypy: ignore-errors
"""Layouts of tiles in shared memory and in registers, the same for every kernel.

A tile of rows lies in shared memory as TMA writes it and wgmma reads it: swizzled over its width. Products are held by one
warpgroup, 64 rows at a time.

Tensors in registers and tiles have sides of powers of two. A width that is none is the sum of some, and its tile lies in as many
pieces: products over the width sum over them, products that have it as columns are as many products.
"""

from foci.backends.hopper.interface import gl, gluon
from foci.backends.hopper.schedules import pieces_of

__all__ = ["operand", "piece", "pieces", "product", "shared", "unit"]


pieces = gluon.constexpr_function(pieces_of)


@gluon.constexpr_function
def piece(width, i):
    """The i-th of them."""
    return pieces(width)[i]


@gluon.constexpr_function
def unit(width):
    """Columns that one copy brings, by the one descriptor that a tensor has: those of the narrowest piece."""
    return width & -width


@gluon.constexpr_function
def shared(rows, width, rank=2):
    """Of a [rows, width] tile of 16-bit numbers, with leading dimensions of 1 up to `rank`."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=rank)


@gluon.constexpr_function
def product(columns):
    """Of a [64 n, columns] product, n a warpgroup's turns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def operand(columns):
    """Of the left factor of a product when it stays in registers, made from a product of so many columns."""
    return gl.DotOperandLayout(operand_index=0, parent=product(columns), k_width=2)
