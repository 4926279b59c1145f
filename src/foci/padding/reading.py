"""A graph of ATen operations, read: its products, where their matrices come from, and who else reads those."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, fx

from foci.compat.aten import LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, SOFTMAX, SOFTMAX_BACKWARD, TO_COPY, UNSAFE_VIEW, OpOverload
from foci.compat.fx import tree_map
from foci.padding.gemm_times import Fault, Role, Shape
from foci.padding.strides import known

__all__ = [
    "VIEWS",
    "Matrix",
    "Origin",
    "Product",
    "chain_to",
    "fake_value",
    "find_base",
    "find_origin",
    "find_products",
    "hints",
    "meta_like",
    "replayed",
    "source_location",
]

aten = torch.ops.aten
prims = torch.ops.prims

VIEWS: Final = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        UNSAFE_VIEW,
    }
)
"""Operations that may leave a tensor where it lies."""

_RESHAPES: Final = frozenset({aten.reshape.default, aten.view.default, UNSAFE_VIEW})

# Besides whatever is tagged pointwise: what a compiler writes as loops of its own, into any strides.
_LOOPS: Final = frozenset(
    {
        LOG_SOFTMAX,
        LOG_SOFTMAX_BACKWARD,
        SOFTMAX,
        SOFTMAX_BACKWARD,
        TO_COPY,
        aten.amax.default,
        aten.amin.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.copy_.default,
        aten.embedding.default,
        aten.flip.default,
        aten.full.default,
        aten.full_like.default,
        aten.gather.default,
        aten.index.Tensor,
        aten.index_select.default,
        aten.mean.dim,
        aten.repeat.default,
        aten.select_scatter.default,
        aten.slice_scatter.default,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.tril.default,
        aten.triu.default,
        aten.var_mean.correction,
        prims.convert_element_type.default,
        prims.iota.default,
    }
)

# By operation: where its two matrices stand among the arguments.
_PRODUCTS: Final[Mapping[Any, tuple[int, int]]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
}


class Origin(Enum):
    """Who writes a tensor."""

    INPUT = "an input of the graph"
    CONSTANT = "a constant"
    PRODUCT = "a product"
    LOOP = "a generated loop"
    CAT = "a concatenation"
    OTHER = "another kernel"


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix that a product reads or writes, batched perhaps.

    Attributes:
        node: the operand, a view perhaps.
        base: the tensor that it is a view of.
        role: in the product.
        alignment: bytes that all its strides are multiples of, at most `load`.
        extent: bytes that the length of its rows is a multiple of, at most `load`.
        inner: the dim along its rows, of `node`.
    """

    node: fx.Node
    base: fx.Node
    role: Role
    alignment: int
    extent: int
    inner: int

    def fault(self, load: int, *, mended: bool = False) -> Fault | None:
        """Return what is wrong with it; with aligned strides, if they are mended."""
        strides = load if mended else self.alignment
        worst = min(strides, self.extent)
        return Fault(worst, strides == load) if worst < load else None


@dataclass(frozen=True, eq=False)
class Product:
    """[batch, M, K] @ [batch, K, N], symbolic sizes at their hints."""

    node: fx.Node
    shape: Shape
    dtype: torch.dtype
    matrices: tuple[Matrix, ...]

    def __str__(self) -> str:
        batch, m, n, k = (self.shape.batch, self.shape.m, self.shape.n, self.shape.k)
        front = [] if self.node.target in (aten.mm.default, aten.addmm.default) else [batch]
        return f"{self.node.target.__name__.split('.')[0]} {[*front, m, k]} @ {[*front, k, n]}"  # type: ignore[union-attr]


def fake_value(node: Any) -> Tensor | None:
    """The fake tensor that stands for a node's value; None for anything but one strided tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) and value.layout is torch.strided else None


def meta_like(node: fx.Node) -> dict[str, Any]:
    """Return what is noted of a node, but for its value: for another that takes its place."""
    return {name: value for name, value in node.meta.items() if name not in ("val", "tensor_meta", "eager_input_vals")}


def hints(values: Sequence[Any]) -> tuple[int, ...]:
    """Sizes or strides, symbolic ones at their hints."""
    return tuple(known(value) for value in values)


def find_base(node: fx.Node) -> fx.Node:
    """Return what a node is a view of, itself perhaps."""
    while node.target in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def chain_to(node: fx.Node, base: fx.Node) -> list[fx.Node]:
    """The views that lead from the base to the node, in their order."""
    chain: list[fx.Node] = []
    while node is not base:
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return chain[::-1]


def replayed(sizes: Sequence[int], strides: Sequence[int], chain: Sequence[fx.Node]) -> Tensor | None:
    """A tensor without memory, as the views see it; None if one of them would have to copy.

    Args:
        sizes, strides: of the base.
        chain: the views, from the base on.
    """
    value = torch.empty_strided(tuple(sizes), tuple(strides), device="meta")
    for node in chain:
        target: Callable[..., Any] = aten.view.default if node.target in _RESHAPES else node.target  # type: ignore[assignment]
        arguments = fx.map_arg(node.args[1:], lambda arg: known(arg.meta["val"]))  # symbolic sizes are nodes
        arguments = tree_map(lambda leaf: known(leaf) if isinstance(leaf, torch.SymInt) else leaf, arguments)
        try:
            value = target(value, *arguments, **node.kwargs)
        except RuntimeError:
            return None
    return value


def find_origin(node: fx.Node) -> Origin:
    """Who writes a base."""
    by_op = {"placeholder": Origin.INPUT, "get_attr": Origin.CONSTANT}
    if node.op in by_op:
        return by_op[node.op]
    if node.target in _PRODUCTS:
        return Origin.PRODUCT
    if node.target is aten.cat.default:
        return Origin.CAT
    loop = node.target in _LOOPS or (isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags)
    return Origin.LOOP if loop else Origin.OTHER


def _divisor(length: int, load: int) -> int:
    """The largest power of two, up to `load`, that divides a length in bytes."""
    while length % load:
        load //= 2
    return load


def _alignment(strides: Sequence[int], sizes: Sequence[int], itemsize: int, load: int) -> int:
    """Return the alignment of every stride but the innermost."""
    return min((_divisor(stride * itemsize, load) for stride, size in zip(strides, sizes) if size > 1 and stride > 1), default=load)


def as_matrix(node: fx.Node, side: str, load: int) -> Matrix | None:
    """How a product sees an operand or its result; None for rows of which neither the elements nor they lie side by side."""
    value = fake_value(node)
    if value is None:
        return None
    sizes, strides = hints(value.shape), hints(value.stride())
    rows, columns = strides[-2:]
    if columns == 1 or sizes[-1] == 1:
        role: Role = "out" if side == "out" else "a" if side == "left" else "b"
    elif rows == 1 or sizes[-2] == 1:
        role = "at" if side == "left" else "bt"
    else:
        return None
    inner = len(sizes) - (2 if role in ("at", "bt") else 1)
    length = sizes[inner] * value.dtype.itemsize
    extent = load if length < load else _divisor(length, load)  # in a vector, or almost one, there is nothing to gain
    return Matrix(node, find_base(node), role, _alignment(strides, sizes, value.dtype.itemsize, load), extent, inner)


def find_products(graph: fx.Graph, load: int) -> Iterator[Product]:
    """Every product of floating-point matrices, with all that could be said of its matrices.

    Args:
        graph: whose nodes carry fake tensors.
        load: bytes that aligned rows are multiples of.
    """
    for node in graph.nodes:
        places = _PRODUCTS.get(node.target)
        value = fake_value(node)
        if places is None or value is None or not value.dtype.is_floating_point:
            continue
        left, right = (node.args[place] for place in places)
        matrices = [as_matrix(left, "left", load), as_matrix(right, "right", load), as_matrix(node, "out", load)]
        a = fake_value(left)
        if a is None or any(matrix is None for matrix in matrices):
            continue
        sizes, k = hints(value.shape), hints(a.shape)[-1]
        shape = Shape(sizes[0] if len(sizes) == 3 else 1, sizes[-2], sizes[-1], k)
        if min(shape.batch, shape.m, shape.n, shape.k) > 0:
            yield Product(node, shape, a.dtype, tuple(matrix for matrix in matrices if matrix is not None))


def source_location(node: fx.Node) -> str | None:
    """The line of the user's code that a node came from."""
    lines = [line for line in str(node.meta.get("stack_trace", "")).splitlines() if line.lstrip().startswith("File ")]
    if not lines:
        return None
    parts = lines[-1].strip().split('"')
    line = parts[2].split("line ")[1].split(",")[0] if len(parts) > 2 and "line " in parts[2] else "?"
    return f"{parts[1]}:{line}"
