"""Matrix products under one form: two operands whose dimensions carry labels, as in Einstein's summation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from torch import fx

from foci.fusion.fx_utils import Call, as_call, fixed_number, is_tensor, is_written, node_rank, node_shape, same_size, single
from foci.ir.rule import Rule, by_name

__all__ = ["RULES", "Label", "Product", "as_product"]

Label = str | None
"""Name of a dimension; None for one of size 1 that is broadcast."""


@dataclass(frozen=True)
class Product:
    """`out = beta * addend + alpha * sum over labels that out lacks of left * right`.

    Attributes:
        node: the node that makes it.
        operands: left and right.
        labels: those of each operand's dimensions.
        out: those of the result's dimensions.
    """

    node: fx.Node
    operands: tuple[fx.Node, fx.Node]
    labels: tuple[tuple[Label, ...], tuple[Label, ...]]
    out: tuple[str, ...]
    addend: fx.Node | None = None
    alpha: Any = 1
    beta: Any = 1

    def only(self, side: int) -> tuple[str, ...]:
        """Labels of the result that one operand alone has: rows of the left, columns of the right."""
        other = self.labels[1 - side]
        return tuple(name for name in self.out if name in self.labels[side] and name not in other)

    @property
    def summed(self) -> tuple[str, ...]:
        """Labels that both operands have and the result has not."""
        return tuple(name for name in self.labels[0] if name is not None and name in self.labels[1] and name not in self.out)

    @property
    def shared(self) -> tuple[str, ...]:
        """Labels of the result that are no operand's alone: batch and heads."""
        alone = {*self.only(0), *self.only(1)}
        return tuple(name for name in self.out if name not in alone)


Reader: TypeAlias = Callable[[fx.Node, Call], Product | None]


def as_product(node: fx.Node) -> Product | None:
    """The product a node makes, or None."""
    call = as_call(node)
    if call is None or not is_tensor(node) or call.in_place:
        return None
    read = _PRODUCTS.get(call.name)
    return None if read is None else read(node, call)


def _tensors(*nodes: Any) -> bool:
    return all(is_tensor(n) for n in nodes)


def _matmul(node: fx.Node, call: Call) -> Product | None:
    left = call.argument(0, "input")
    right = call.argument(1, "other", call.kwargs.get("mat2"))
    if not _tensors(left, right) or min(node_rank(left), node_rank(right)) < 2:
        return None
    labels, out = _matrix_labels(node, left, right)
    return Product(node, (left, right), labels, out)


def _matrix_labels(node: fx.Node, left: fx.Node, right: fx.Node) -> tuple[tuple[tuple[Label, ...], tuple[Label, ...]], tuple[str, ...]]:
    lead = node_rank(node) - 2
    names = [f"b{n}" for n in range(lead)]

    def leading(operand: fx.Node) -> list[Label]:
        sizes, node_sizes = node_shape(operand)[:-2], node_shape(node)[:-2]
        skipped = lead - len(sizes)
        return [None if same_size(n, 1) and not same_size(node_sizes[skipped + i], 1) else names[skipped + i] for i, n in enumerate(sizes)]

    left_labels: tuple[Label, ...] = (*leading(left), "m", "k")
    right_labels: tuple[Label, ...] = (*leading(right), "k", "n")
    return (left_labels, right_labels), (*names, "m", "n")


def _baddbmm(node: fx.Node, call: Call) -> Product | None:
    addend = call.argument(0, "input")
    left = call.argument(1, "batch1", call.kwargs.get("mat1"))
    right = call.argument(2, "batch2", call.kwargs.get("mat2"))
    if not _tensors(addend, left, right):
        return None
    alpha, beta = (fixed_number(call.kwargs.get(name, 1)) for name in ("alpha", "beta"))
    labels, out = _matrix_labels(node, left, right)
    return None if alpha is None or beta is None else Product(node, (left, right), labels, out, addend, alpha, beta)


def _linear(node: fx.Node, call: Call) -> Product | None:
    left, right = call.argument(0, "input"), call.argument(1, "weight")
    if not _tensors(left, right) or node_rank(right) != 2 or node_rank(left) < 2 or call.argument(2, "bias") is not None:
        return None
    names = [f"m{n}" for n in range(node_rank(left) - 1)]
    return Product(node, (left, right), ((*names, "k"), ("n", "k")), (*names, "n"))


def _inner(node: fx.Node, call: Call) -> Product | None:
    left, right = call.argument(0, "input"), call.argument(1, "other")
    if not _tensors(left, right) or min(node_rank(left), node_rank(right)) < 2:
        return None
    rows, columns = ([f"{side}{n}" for n in range(node_rank(t) - 1)] for side, t in (("m", left), ("n", right)))
    return Product(node, (left, right), ((*rows, "k"), (*columns, "k")), (*rows, *columns))


def _tensordot(node: fx.Node, call: Call) -> Product | None:
    left, right, dims = call.argument(0, "a"), call.argument(1, "b"), call.argument(2, "dims", 2)
    if not _tensors(left, right):
        return None
    ranks = node_rank(left), node_rank(right)
    if isinstance(dims, int):
        dims = (tuple(range(ranks[0] - dims, ranks[0])), tuple(range(dims)))
    if not isinstance(dims, (list, tuple)) or not all(isinstance(d, (list, tuple)) and d for d in dims):
        return None
    summed = [[d % rank for d in axes] for axes, rank in zip(dims, ranks, strict=True)]
    labels = tuple(
        tuple(f"k{axes.index(n)}" if n in axes else f"{side}{n}" for n in range(rank))
        for side, axes, rank in zip("mn", summed, ranks, strict=True)
    )
    out = tuple(name for names in labels for name in names if not name.startswith("k"))
    return Product(node, (left, right), (labels[0], labels[1]), out)


def _summed_products(node: fx.Node, call: Call) -> Product | None:
    """(a * b).sum(dim) of operands that are broadcast to each other: each has a dimension that the other lacks."""
    dim, source = single(call.argument(1, "dim", call.kwargs.get("axis"))), call.argument(0, "input")
    inner = as_call(source) if is_tensor(source) else None
    if inner is None or inner.name != "mul" or inner.in_place or is_written(source) or not isinstance(dim, int):
        return None
    if call.argument(2, "keepdim", False) or call.argument(3, "dtype") is not None or len(inner.args) != 2 or not _tensors(*inner.args):
        return None
    left, right = inner.args
    sizes_of_product = node_shape(source)

    def named(operand: fx.Node) -> tuple[Label, ...]:
        skipped = len(sizes_of_product) - node_rank(operand)
        sizes = enumerate(node_shape(operand), skipped)
        return tuple(None if same_size(n, 1) and not same_size(sizes_of_product[i], 1) else f"d{i}" for i, n in sizes)

    summed = f"d{dim % len(sizes_of_product)}"
    product = Product(
        node, (left, right), (named(left), named(right)), tuple(f"d{i}" for i in range(len(sizes_of_product)) if f"d{i}" != summed)
    )
    is_outer = bool(product.only(0)) and bool(product.only(1))
    return product if is_outer and product.summed == (summed,) else None


def _einsum(node: fx.Node, call: Call) -> Product | None:
    text, operands = call.args[0], call.args[1:]
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(text, str) or len(operands) != 2 or not _tensors(*operands):
        return None
    text = text.replace(" ", "")
    inputs, arrow, result = text.partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2 or any(len(set(t.replace(".", ""))) != len(t.replace(".", "")) for t in (*terms, result)):
        return None
    extra = max(node_rank(o) - len(t.replace("...", "")) if "..." in t else 0 for o, t in zip(operands, terms, strict=True))
    dots = [f"_{n}" for n in range(extra)]

    def expanded(term: str, width: int) -> list[str]:
        before, ellipsis, after = term.partition("...")
        return [*before, *(dots[extra - width :] if ellipsis else []), *after]

    names = [expanded(t, node_rank(o) - len(t.replace("...", ""))) for o, t in zip(operands, terms, strict=True)]
    out = expanded(result, extra)
    sizes = dict(zip(out, node_shape(node), strict=True))
    labels = tuple(
        tuple(
            None if same_size(n, 1) and name in sizes and not same_size(sizes[name], 1) else name
            for name, n in zip(term, node_shape(o), strict=True)
        )
        for term, o in zip(names, operands, strict=True)
    )
    one_sided = [n for side in (0, 1) for n in names[side] if n not in names[1 - side] and n not in out]
    return None if one_sided else Product(node, (operands[0], operands[1]), (labels[0], labels[1]), tuple(out))


# Examples are of `a` [2, 3, 4, 6] and `b` [2, 3, 5, 6].
RULES: Final[tuple[Rule[Reader], ...]] = (
    Rule(("matmul",), "rows of the left by columns of the right, for each batch entry", _matmul,
         ("torch.matmul(a, b.mT)", "a @ b.mT", "torch.bmm(a[0], b[0].mT)"), ("a[0, 0] @ b[0, 0, 0]", "torch.mv(a[0, 0], b[0, 0, 0])")),
    Rule(("baddbmm", "addmm"), "a multiple of a product, added to a multiple of a tensor", _baddbmm,
         ("torch.baddbmm(a[0] @ b[0].mT, a[0], b[0].mT, beta=0, alpha=0.5)",
          "torch.addmm(a[0, 0, :1, :1], a[0, 0], b[0, 0].t(), beta=0.5, alpha=2)"), ("torch.addbmm(a[0, 0] @ b[0, 0].mT, a[0], b[0].mT)",)),
    Rule(("inner",), "a sum over both last dimensions", _inner, ("torch.inner(a[0, 0][None], b[0, 0])",),
         ("torch.inner(a[0, 0], b[0, 0, 0])",)),
    Rule(("tensordot",), "a sum over the dimensions that are named", _tensordot,
         ("torch.tensordot(a[0, 0].t(), b[0, 0], ([0], [1]))", "torch.tensordot(a[0, 0], b[0, 0].t(), 1)",
          "torch.tensordot(a[0, 0].view(4, 2, 3), b[0, 0].view(5, 2, 3), ([1, 2], [1, 2]))"), ("torch.tensordot(a[0, 0], b[0, 0], 0)",)),
    Rule(("sum",), "a sum of products of tensors that are broadcast to each other", _summed_products,
         ("(a[0, 0][:, None] * b[0, 0][None]).sum(-1)", "(a[0, 0].t()[:, :, None] * b[0, 0].t()[:, None]).sum(0)"),
         ("(a * a).sum(-1)", "(a[0, 0][:, None] * b[0, 0][None]).sum(-1, keepdim=True)", "(a[0, 0][:, None] * b[0, 0][None]).sum()",
          "(a[0, 0][:, None] * b[0, 0][None]).sum((0, 2))", "(a[0, 0][:, None] * b[0, 0][None]).sum(0)",
          "(a[0, 0][:, None] + b[0, 0][None]).sum(-1)")),
    Rule(("linear",), "rows by the rows of a weight, without a bias", _linear, ("F.linear(a[0, 0], b[0, 0])", "F.linear(a, b[0, 0])"),
         ("F.linear(a, b[0, 0], b[0, 0, :, 0])",)),
    Rule(("einsum",), "two operands, by the labels of the equation", _einsum,
         ('torch.einsum("bhqd,bhkd->bhqk", a, b)', 'torch.einsum("...qd, ...kd -> ...qk", a, b)', 'torch.einsum("bhqd,bhkd->bqkh", a, b)'),
         ('torch.einsum("bhqd,bhqd,bhqd->bhq", a, a, a)', 'torch.einsum("bhqd,bhkd->bhq", a, b)')),
)  # fmt: skip

_PRODUCTS: Final[Mapping[str, Reader]] = by_name(RULES)
