# mypy: ignore-errors
"""Layouts of tiles in shared memory and registers, the same for every kernel.

A tile [rows, width] in shared memory is swizzled over its width, as TMA writes and wgmma reads it. A warpgroup holds 64 rows of a product.

Gluon tensors have powers of two as sizes. Another width is split into a sum of powers of two, and the tile into as many pieces: a product
that sums over the width accumulates piece by piece, a product with the width as columns is one product per piece.
"""

from foci.backends.hopper.gluon_compat import gl, gluon
from foci.backends.hopper.widths import width_pieces

__all__ = ["mma_layout", "operand_layout", "piece", "pieces", "smem_layout", "tma_columns"]


pieces = gluon.constexpr_function(width_pieces)


@gluon.constexpr_function
def piece(width, i):
    """The i-th of `pieces(width)`."""
    return pieces(width)[i]


@gluon.constexpr_function
def tma_columns(width):
    """Columns of one TMA box: a tensor has one descriptor, so those of the narrowest piece."""
    return width & -width


@gluon.constexpr_function
def smem_layout(rows, width, rank=2):
    """Shared-memory layout of a [rows, width] tile of 16-bit values, with leading dimensions of 1 up to `rank`."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=rank)


@gluon.constexpr_function
def mma_layout(columns):
    """Register layout of a [64 n, columns] product of one warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def operand_layout(columns):
    """Register layout of a left wgmma operand, converted from a product with so many columns."""
    return gl.DotOperandLayout(operand_index=0, parent=mma_layout(columns), k_width=2)
