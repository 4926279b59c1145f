"""Graphs of ATen operations, rewritten so that products read and write aligned rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from foci.compat.fake import tracing_metadata
from foci.padding.choose_padding import Verdict, decide
from foci.padding.grouped import bytes_read_by_rows, bytes_written_by_rows
from foci.padding.legality import Fix, How
from foci.padding.model import Machine, describe_machine
from foci.padding.operators import OPERATORS
from foci.padding.reading import (
    VIEWS,
    Matrix,
    Origin,
    Product,
    chain_to,
    fake_value,
    find_base,
    find_origin,
    find_products,
    hints,
    meta_like,
    source_location,
)
from foci.padding.report import Padding
from foci.padding.strides import LOAD, pad_strides, padding_bytes

__all__ = ["Padded", "default_machine", "note_outputs", "pad", "visible_outputs"]

aten = torch.ops.aten

_LEAVES: Final = "foci_leaves"
"""Key in a node's meta: the graph of both passes returns it, or a view of it."""


@dataclass(frozen=True)
class Padded:
    """A graph with padded strides.

    Attributes:
        graph_module: the one that was given.
        paddings: what became of each misaligned matrix.
    """

    graph_module: fx.GraphModule
    paddings: tuple[Padding, ...]


def pad(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any] = (),
    machine: Machine | None = None,
    *,
    visible: Iterable[fx.Node] | None = None,
) -> Padded:
    """Gives matrices of products aligned rows, in place, wherever that is legal and pays.

    Sizes stay, and so do the strides of all that a user sees. The graph then holds operators `foci::padded`, `foci::padded_mm` and
    so on, which Inductor lowers without copies.

    Args:
        graph_module: a forward or a backward graph of AOTAutograd, without mutations but of its inputs, with fake tensors
            in `meta["val"]`.
        example_inputs: one for each placeholder, or none; their strides count, as those of the nodes may be older.
        machine: to decide for; by default the device of the first product.
        visible: outputs whose strides somebody may look at; by default `visible_outputs`.

    Returns:
        The graph and a report.

    Example:
        >>> import torch
        >>> from foci.padding import Machine, find_table, pad
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> x, w = torch.randn(4096, 64), torch.randn(64, 4099)[:, :4096]
        >>> graph = make_fx(torch.mm, tracing_mode="fake")(x, w)
        >>> done = pad(graph, (), Machine("NVIDIA H200", 16, True, find_table("NVIDIA H200", "sm_90")))
        >>> [padding.how for padding in done.paddings]
        ['copied']
    """
    graph = graph_module.graph
    _refresh_inputs(graph, example_inputs)
    machine = machine or default_machine(graph)
    if machine is None:
        return Padded(graph_module, ())
    products = list(find_products(graph, machine.load))
    outputs = visible_outputs(graph) if visible is None else frozenset(visible)
    verdicts, by_rows = decide(products, outputs, machine)
    paddings = tuple(_entry(verdict) for verdict in verdicts)
    for verdict in verdicts:
        if verdict.fix is not None and verdict.fix.only is None:
            _REWRITES[verdict.fix.how](graph, verdict.fix, products)
    for node, fix in by_rows.items():
        _by_rows(node, fix)
    if any(verdict.fix for verdict in verdicts):
        graph.lint()
        graph_module.recompile()
    return Padded(graph_module, paddings)


def _refresh_inputs(graph: fx.Graph, example_inputs: Sequence[Any]) -> None:
    """Strides of a backward graph's inputs are those that the compiled forward graph saved them with."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, example in zip(placeholders, example_inputs):
        value = fake_value(node)
        if value is not None and isinstance(example, Tensor) and hints(value.stride()) != hints(example.stride()):
            node.meta["val"] = value.as_strided(value.shape, example.stride())
            _refresh_views(node)


def _refresh_views(node: fx.Node) -> None:
    for reader in node.users:
        if reader.target not in VIEWS or fake_value(reader) is None:
            continue
        arguments, keywords = fx.map_arg((reader.args, reader.kwargs), lambda n: n.meta["val"])
        reader.meta["val"] = reader.target(*arguments, **keywords)  # type: ignore[operator]
        _refresh_views(reader)


def default_machine(graph: fx.Graph) -> Machine | None:
    """The device of a graph's first product; None where there is none, or it is no GPU and no CPU."""
    for product in find_products(graph, LOAD):
        value = fake_value(product.node)
        assert value is not None
        return describe_machine(value.device) if value.device.type in ("cuda", "cpu") else None
    return None


def note_outputs(joint: fx.Graph) -> None:
    """Marks what leaves a graph of both passes, before it is cut in two: a gradient may be computed by the forward pass and saved."""
    for node in joint.output_node().all_input_nodes:
        for seen in (*chain_to(node, find_base(node)), find_base(node)):
            seen.meta[_LEAVES] = True


def visible_outputs(graph: fx.Graph) -> frozenset[fx.Node]:
    """Outputs that leave the compiled function: all, but what a forward graph saves for the backward graph to compute with."""
    returned: Any = graph.output_node().args[0]
    outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
    leaving = range(len(outputs))
    metadata = tracing_metadata()  # where torch does not tell, everything leaves
    if metadata is not None and not any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes):
        # what was saved comes last; an output that aliases another is made from it, strides and all, after the graph has run
        leaving = range(metadata.num_forward_returns)
    nodes = [(index, node) for index, node in enumerate(outputs) if isinstance(node, fx.Node)]
    return frozenset(node for index, node in nodes if index in leaving or _LEAVES in node.meta)


# -- rewriting ---------------------------------------------------------------------------------------------------------------


def _swap(node: fx.Node, target: Any, arguments: Sequence[Any]) -> fx.Node:
    """Another operation in a node's place, with a value of its own."""
    graph = node.graph
    with graph.inserting_before(node):
        padded = graph.call_function(target, tuple(arguments))
    _describe(padded, node)
    node.replace_all_uses_with(padded)
    graph.erase_node(node)
    _refresh_views(padded)
    return padded


def _by_rows(product: fx.Node, fix: Fix) -> None:
    if fix.base is not product:
        _swap(product, OPERATORS["mm_by_rows"], product.args)
        return
    *bias, a, b = product.args
    _swap(product, OPERATORS["mm_into_rows"], (a, b, bias[0] if bias else None))


def _describe(node: fx.Node, like: fx.Node) -> None:
    node.meta = meta_like(like)
    arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    node.meta["val"] = node.target(*arguments, **keywords)  # type: ignore[operator]


def _grow(fix: Fix) -> tuple[int, int]:
    return fix.alignment, fix.smallest


def _in_place(graph: fx.Graph, fix: Fix, products: Sequence[Product]) -> None:
    """Whoever writes the tensor writes it in padded strides, and there is no other."""
    base = fix.base
    if base.target in _WRITERS:
        _swap(base, OPERATORS[_WRITERS[base.target]], (*_writer_arguments(base), *_grow(fix)))
        return
    with graph.inserting_after(base):
        padded = graph.call_function(OPERATORS["padded"], (base, *_grow(fix)))
    _describe(padded, base)
    base.replace_all_uses_with(padded, delete_user_cb=lambda reader: reader is not padded)
    _refresh_views(padded)


_WRITERS: Final[Mapping[Any, str]] = {aten.mm.default: "padded_mm", aten.bmm.default: "padded_bmm", aten.cat.default: "padded_cat"}


def _writer_arguments(node: fx.Node) -> tuple[Any, ...]:
    if node.target is not aten.cat.default:
        return tuple(node.args)
    value = fake_value(node)
    assert value is not None
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return (node.args[0], dim % value.dim())  # type: ignore[operator]


def _written_twice(graph: fx.Graph, fix: Fix, products: Sequence[Product]) -> None:
    """Products read and write padded strides; whoever may look at strides gets the usual ones."""
    base = fix.base
    if base.target not in _WRITERS:
        _copied(graph, fix, products)
        return
    value = fake_value(base)
    usual = graph.call_function(aten.clone.default, (base,), {"memory_format": torch.contiguous_format})
    readers = [matrix for product in products for matrix in product.matrices if matrix.base is base and matrix.node is not base]
    direct = [product.node for product in products if base in product.node.all_input_nodes]
    base.append(usual)
    usual.meta = dict(base.meta)
    usual.meta["val"] = value
    loops = {reader for reader in base.users if reader is not usual and find_origin(reader) is not Origin.OTHER}
    keep = {*direct, *loops} if not readers else set(direct)
    base.replace_all_uses_with(usual, delete_user_cb=lambda reader: reader is not usual and reader not in keep)
    padded = _swap(base, OPERATORS[_WRITERS[base.target]], (*_writer_arguments(base), *_grow(fix)))
    for matrix in readers:
        _reread(graph, matrix, products, chain_to(matrix.node, usual), padded)


def _copied(graph: fx.Graph, fix: Fix, products: Sequence[Product]) -> None:
    """Products read a padded copy."""
    base = fix.base
    last = base
    while base.op == "placeholder" and last.next.op == "placeholder":
        last = last.next
    with graph.inserting_after(last):
        padded = graph.call_function(OPERATORS["padded"], (base, *_grow(fix)))
    _describe(padded, base)
    for product in products:
        for matrix in product.matrices:
            if matrix.base is base and matrix.role != "out":
                _reread(graph, matrix, products, chain_to(matrix.node, base), padded)


def _reread(graph: fx.Graph, matrix: Matrix, products: Sequence[Product], chain: Sequence[fx.Node], base: fx.Node) -> None:
    """Products read a matrix from another base, through the same views."""
    readers = [p.node for p in products if any(m is matrix for m in p.matrices)]
    current = base
    for view in chain:
        with graph.inserting_before(readers[0]):
            current = graph.call_function(view.target, (current, *view.args[1:]), view.kwargs)  # type: ignore[arg-type]
        _describe(current, view)
    for reader in readers:
        reader.replace_input_with(matrix.node, current)


def _copied_once(graph: fx.Graph, fix: Fix, products: Sequence[Product]) -> None:
    """A constant takes padded strides while compiling."""
    module, base = graph.owning_module, fix.base
    assert module is not None
    value = _attribute(module, str(base.target))
    strides = pad_strides(value.stride(), value.shape, value.dtype, alignment=fix.alignment, smallest=fix.smallest)
    grown = value.new_empty_strided(value.shape, strides).copy_(value)
    name = f"{str(base.target).replace('.', '_')}_padded"
    while hasattr(module, name):
        name += "_"
    module.register_buffer(name, grown)
    with graph.inserting_after(base):
        constant = graph.get_attr(name)
    constant.meta = dict(base.meta)
    fake = fake_value(base)
    assert fake is not None
    constant.meta["val"] = fake.new_empty_strided(fake.shape, strides)
    for product in products:
        for matrix in product.matrices:
            if matrix.base is base:
                _reread(graph, matrix, products, chain_to(matrix.node, base), constant)


def _attribute(module: torch.nn.Module, path: str) -> Tensor:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value.detach()  # type: ignore[no-any-return]


_Rewrite = Callable[[fx.Graph, Fix, Sequence[Product]], None]

_REWRITES: Final[Mapping[How, _Rewrite]] = {
    How.IN_PLACE: _in_place,
    How.WRITTEN_TWICE: _written_twice,
    How.COPIED: _copied,
    How.COPIED_ONCE: _copied_once,
}


# -- report ------------------------------------------------------------------------------------------------------------------


def _entry(verdict: Verdict) -> Padding:
    value = fake_value(verdict.base)
    sizes, strides = (hints(value.shape), hints(value.stride())) if value is not None else ((), ())
    named = tuple(dict.fromkeys(map(str, verdict.products)))
    location = next((place for product in verdict.products if (place := source_location(product.node))), None)
    fix = verdict.fix
    if fix is None or value is None:
        return Padding(verdict.base.name, named, sizes, strides, reason=verdict.reason, location=location)
    taken = _bytes_by_rows(verdict) if fix.how is How.BY_ROWS else padding_bytes(fix.strides, sizes, value.dtype)
    if fix.how in (How.WRITTEN_TWICE, How.COPIED, How.COPIED_ONCE):
        taken += value.dtype.itemsize * int(torch.Size(sizes).numel())
    return Padding(verdict.base.name, named, sizes, strides, fix.strides, fix.how.value, verdict.seconds, taken, location=location)


def _bytes_by_rows(verdict: Verdict) -> int:
    (product,) = verdict.products
    shape, itemsize = product.shape, product.dtype.itemsize
    if verdict.base is not product.node:
        return bytes_read_by_rows(shape.m, shape.k, shape.n, itemsize)
    return bytes_written_by_rows(shape.m, shape.k, shape.n, itemsize, biased=product.node.target is aten.addmm.default)
