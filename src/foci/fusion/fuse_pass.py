"""Fuse pass: recognises the attentions of a torch graph and replaces each by foci's operator.

Every softmax whose result reaches a matrix product is a site. The nodes above it decide: `foci.fusion.match` reads the attention from the
second product backward, `foci.fusion.masking` separates its scores into score and mask, `foci.fusion.lower` emits the operator. If a step
fails, its reason is what the report prints.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from torch import fx

from foci.compat.fake import FakeTensorMode
from foci.compat.fx import lazy_graph_module
from foci.fusion.alias_analysis import Writes, check_exclusive
from foci.fusion.composite_views import open_views
from foci.fusion.concat_scores import join_products
from foci.fusion.decompose_composites import name_sizes, open_composites
from foci.fusion.emit import Emitter, Sizes
from foci.fusion.fake_values import with_values
from foci.fusion.functionalize import without_writes
from foci.fusion.functions import open_functions, softmaxes_in
from foci.fusion.fusion_report import Fused, Kind, Site
from foci.fusion.fx_utils import as_call, example_value, is_transformed, needs_grad, node_rank, reads_only_shape, source_location
from foci.fusion.grad_mode import correct_gradients, starts_with_gradients
from foci.fusion.indices import NeedsSplit, NoRule
from foci.fusion.lower import Prepared, lower, prepare
from foci.fusion.manual_softmax import without_softmaxes_by_hand
from foci.fusion.match import Naming, path_to, read
from foci.fusion.nested import find_body
from foci.fusion.products import Product, as_product
from foci.fusion.replacing import erase, erase_dead, fitting
from foci.fusion.sdpa_flex_calls import is_flex, is_sdpa, lower_flex, prepare_sdpa
from foci.fusion.weights import BETWEEN, Softmax, as_softmax
from foci.ir.trace import TraceError

__all__ = ["fuse"]


def fuse(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Fused:
    """The graph with every attention in it as one call of foci's operator.

    Args:
        graph_module: Dynamo's graph, before autograd is applied. It is not changed.
        example_inputs: a tensor, fake tensor or SymInt for each placeholder; only shapes, dtypes, strides and devices are read.

    Returns:
        The graph and its sites, in the order of the graph. Nothing is compiled.

    Raises:
        TypeError: for anything but a graph module and a list or tuple.
        ValueError: for example inputs that are not the graph's.

    Example:
        >>> import torch
        >>> graph = fx.symbolic_trace(lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1), -1) @ v)
        >>> fuse(graph, [torch.randn(1, 4, 256, 16)] * 3).sites[0].variant
        'score'
    """
    _check(graph_module, example_inputs)
    module = _copied(graph_module)
    sites = _fuse_copy(module, with_values(module, example_inputs))
    return Fused(module, tuple(sites))


def _check(graph_module: Any, example_inputs: Any) -> None:
    if not isinstance(graph_module, fx.GraphModule):
        raise TypeError(f"graph_module must be a torch.fx.GraphModule; got {type(graph_module).__name__}")
    if not isinstance(example_inputs, (list, tuple)):
        raise TypeError(f"example_inputs must be a list or tuple of values; got {type(example_inputs).__name__}")
    inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    least = sum(not node.args for node in inputs)  # one with a default may be left out
    if not least <= len(example_inputs) <= len(inputs):
        names = ", ".join(node.name for node in inputs)
        raise ValueError(f"example_inputs must be one for each of the graph's inputs: {names}; got {len(example_inputs)}")


def _fuse_copy(module: fx.GraphModule, mode: FakeTensorMode | None, *, grad_enabled: bool = True) -> list[Site]:
    """Fuses what a module of our own has, bodies of its operators included."""
    sites: list[Site] = []
    bodies: dict[str, str] = {}
    graph = module.graph
    opened = open_composites(graph, mode)
    open_functions(module, mode)
    open_views(graph, mode)
    correct_gradients(graph, enabled=grad_enabled)
    name_sizes(graph)
    without_writes(graph, mode)
    erase_dead(graph)
    sizes = Sizes(graph)
    without_softmaxes_by_hand(graph, sizes, mode)
    writes = Writes.of(graph)
    for node in list(graph.nodes):
        body = find_body(module, node)
        if body is not None:
            sites += _fuse_body(module, node, body, bodies)
            continue
        sites += _sites_in_function(module, node)
        site = _site(graph, node, writes, sizes, mode)
        if site is not None:
            sites.append(replace(site, kind="mha") if node in opened else site)
    graph.lint()
    module.recompile()
    return sites


def _fuse_body(module: fx.GraphModule, node: fx.Node, body: fx.GraphModule, known: dict[str, str]) -> list[Site]:
    """Fuses the body that `node` names, under another name: the original is someone else's. `known`: names done before."""
    name, sites = str(node.target), []
    inputs = [example_value(n) for n in body.graph.nodes if n.op == "placeholder"]
    if name not in known and all(value is not None for value in inputs):
        copied = _copied(body)
        grad_enabled = all(map(starts_with_gradients, node.users))
        sites = _fuse_copy(copied, with_values(copied, inputs), grad_enabled=grad_enabled)
        known[name] = f"foci_{name.replace('.', '_')}" if any(site.fused for site in sites) else name
        if known[name] != name:
            module.add_module(known[name], copied)
    node.target = known.get(name, name)
    return sites


def _copied(graph_module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, copies))
    module = lazy_graph_module(graph_module, graph)  # nobody runs its code: where Dynamo's is not generated, neither is this
    module.meta = dict(graph_module.meta)
    # by these compilers know parameters, which they need not check in each call, nor copy for CUDA graphs
    _hand_on("_param_name_to_source", graph_module, module)
    for node, copy in copies.items():
        _hand_on("_dynamo_source", node, copy)
    return module


def _hand_on(name: str, source: Any, to: Any) -> None:
    if hasattr(source, name):
        setattr(to, name, getattr(source, name))


def _site(graph: fx.Graph, node: fx.Node, writes: Writes, sizes: Sizes, mode: FakeTensorMode | None) -> Site | None:
    """Handle a node that may be, or end in, an attention; None if it is none."""
    if is_sdpa(node):
        return _call_site(node, "sdpa", lambda: _replace_sdpa(graph, node, mode, sizes, writes))
    if is_flex(node):
        return _call_site(node, "flex", lambda: _replace_flex(graph, node, mode, sizes))
    softmax = as_softmax(node)
    return None if softmax is None else _softmax_site(graph, softmax, writes, sizes, mode)


def _sites_in_function(module: fx.GraphModule, node: fx.Node) -> Iterator[Site]:
    """Attentions of which an autograd.Function that a node calls has at least the softmax."""
    reason = "the softmax is in an autograd.Function with a backward of its own"
    for softmax in softmaxes_in(module, node):
        if any(_find_products(_below(start)) for start in (softmax, *node.users)):
            yield Site(False, source_location(softmax), "", reason, "matmul-softmax-matmul")


def _call_site(node: fx.Node, kind: Kind, replace: Callable[[], str]) -> Site:
    location = source_location(node)
    try:
        return Site(True, location, replace(), None, kind)
    except Exception as obstacle:
        return Site(False, location, "", _reason(obstacle), kind)


def _reason(obstacle: Exception) -> str:
    """Reason for the report. An unexpected error must not stop a program that runs without fusion."""
    return str(obstacle) if isinstance(obstacle, (NoRule, TraceError)) else f"{type(obstacle).__name__}: {obstacle}"


def _replace_sdpa(graph: fx.Graph, node: fx.Node, mode: FakeTensorMode | None, sizes: Sizes, writes: Writes) -> str:
    prepared = prepare_sdpa(node)
    writes.check_unwritten(_operands(prepared), node)
    return _replace(graph, prepared, mode, sizes, writes)


def _replace_flex(graph: fx.Graph, node: fx.Node, mode: FakeTensorMode | None, sizes: Sizes) -> str:
    before = node.prev
    try:
        variant, results = lower_flex(node, Emitter(graph, node, mode, sizes))
    except Exception:
        _erase_between(graph, before, node)
        raise
    for user in list(node.users):
        result = results[user.args[1]]  # type: ignore[index]
        if result is not None:
            user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(node)
    return variant


def _softmax_site(graph: fx.Graph, softmax: Softmax, writes: Writes, sizes: Sizes, mode: FakeTensorMode | None) -> Site | None:
    """Handle one softmax, first with sums of products in its scores joined into one product, else with the scores as they are."""
    above, passed = path_to(softmax.source)
    if len(above) > 1 and _find_products(_below(softmax.node)):
        joined = join_products(graph, sorted(passed, key=lambda n: writes.position.get(n, -1), reverse=True), sizes, mode)
        for each in joined:
            writes.add(each.new_nodes, each.old)
        source = next((each.new_nodes[-1] for each in joined if each.old is softmax.source), softmax.source)
        site = _spelled_site(graph, replace(softmax, source=source), writes, sizes, mode) if joined else None
        fused = site is not None and site.fused
        for each in joined:
            (each.keep if fused else each.undo)(graph)
        if fused:
            return site
    return _spelled_site(graph, softmax, writes, sizes, mode)


def _spelled_site(graph: fx.Graph, softmax: Softmax, writes: Writes, sizes: Sizes, mode: FakeTensorMode | None) -> Site | None:
    """Handle one softmax; None if it is no attention."""
    below = _below(softmax.node)
    seconds = _find_products(below)
    above, passed = path_to(softmax.source)
    location = source_location(softmax.node)
    if not above:
        feeds = any(product.shared for product, _ in seconds) or (not seconds and _outsider(below) is not None)
        hidden = _hidden_above(softmax.source, passed) if feeds else None
        return None if hidden is None else Site(False, location, "", f"the scores go through `{hidden}`", "matmul-softmax-matmul")
    if not seconds:
        passed_through = _outsider(below) if any(_is_score_like(n) for n in above) else None
        reason = f"the weights go through `{passed_through}` before the product with the values"
        return None if passed_through is None else Site(False, location, "", reason, "matmul-softmax-matmul")
    reason = ""
    for second, side in seconds:
        for node in above[:_MOST_CANDIDATES]:
            first = as_product(node)
            assert first is not None
            try:
                prepared = _prepared(second, side, softmax, below, first, passed, writes)
                variant = _replace(graph, prepared, mode, sizes, writes)
            except Exception as obstacle:
                reason = reason or _mixed_reason(first) or _reason(obstacle)
                continue
            return Site(True, location, variant, None, "matmul-softmax-matmul")
    return Site(False, location, "", reason, "matmul-softmax-matmul")


def _mixed_reason(product: Product) -> str:
    """Reason why a product of scores, such as one that mixes heads, is not fused; "" if it is an ordinary product."""
    above = [node for operand in product.operands for node in path_to(operand)[0]]
    call = as_call(product.node)
    if call is None or not any(map(_is_score_like, above)):
        return ""
    return f"the scores go through `{call.name}` between the product with the keys and the softmax"


_MOST_CANDIDATES: Final = 8
_MOST_SPLITS: Final = 16


def _below(softmax: fx.Node) -> frozenset[fx.Node]:
    """The softmax and what it becomes on its way to products."""
    reached, stack = {softmax}, [softmax]
    while stack:
        for user in stack.pop().users:
            call = as_call(user)
            if call is not None and call.name in BETWEEN and user not in reached and not reads_only_shape(user):
                reached.add(user)
                stack.append(user)
    return frozenset(reached)


_NEAR: Final = 24


def _near(start: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[tuple[fx.Node, str]]:
    """The calls near `start`, breadth first, each with the name of the one in `start` that led there."""
    frontier = deque((node, call.name) for node in start if (call := as_call(node)) is not None)
    seen: set[fx.Node] = set()
    while frontier and len(seen) < _NEAR:
        node, through = frontier.popleft()
        if node in seen or as_call(node) is None:
            continue
        seen.add(node)
        yield node, through
        frontier.extend((following, through) for following in onward(node))


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if not reads_only_shape(user)]


def _outsider(below: frozenset[fx.Node]) -> str | None:
    """The operation that stands between a softmax and a product near below it, where no attention has one."""
    start = [user for node in below for user in _readers(node) if user not in below]
    for node, through in _near(start, _readers):
        product = as_product(node)
        if product is not None and product.shared:
            return None if node in start else through
    return None


def _hidden_above(source: fx.Node, passed: frozenset[fx.Node]) -> str | None:
    """The operation between a softmax and a product near above it that no score function has."""
    start = [n for p in passed for n in p.all_input_nodes if n not in passed] if passed else [source]
    above = _near(start, lambda node: node.all_input_nodes)
    return next((through for node, through in above if node not in start and _is_score_like(node)), None)


def _is_score_like(node: fx.Node) -> bool:
    """A product of two activations, not of one with a weight: batch and heads are shared, or both are matrices."""
    product = as_product(node)
    return product is not None and (bool(product.shared) or all(node_rank(o) == 2 for o in product.operands))


def _find_products(below: frozenset[fx.Node]) -> list[tuple[Product, int]]:
    users = {user: None for node in below for user in node.users if user not in below}
    products = [product for user in users if (product := as_product(user)) is not None]
    return [(p, side) for p in products for side in (0, 1) if p.operands[side] in below]


def _prepared(
    second: Product, side: int, softmax: Softmax, below: frozenset[fx.Node], first: Product, passed: frozenset[fx.Node], writes: Writes
) -> Prepared:
    if is_transformed(second.node):
        raise NoRule("it is inside a transform of torch.func, such as vmap")
    between = frozenset(n for n in below if n is softmax.node or _reaches(n, second.node, below))
    naming = Naming(second)
    for _ in range(_MOST_SPLITS):
        try:
            prepared = prepare(read(naming, second, side, softmax, between, first, passed))
        except NeedsSplit as request:
            naming.split(request)
            continue
        match = prepared.match
        check_exclusive(match.inside, second.node, frozenset({second.operands[1 - side]}), match.logsumexps)
        writes.check_unwritten(_operands(prepared), second.node)
        return prepared
    raise NoRule("the dimensions are split and merged in too many ways")


def _operands(prepared: Prepared) -> list[fx.Node]:
    """Nodes that the fused attention reads, at the position of the second product."""
    match, walk = prepared.match, prepared.match.walk
    extra = [pair[0] for pair in (match.sink, walk.added) if pair is not None and isinstance(pair[0], fx.Node)]
    return [prepared.query.node, prepared.key.node, prepared.value.node, *match.lift.leaves.values(), *walk.factors, *extra]


def _reaches(node: fx.Node, product: fx.Node, below: frozenset[fx.Node]) -> bool:
    stack, seen = [node], {node}
    while stack:
        for user in stack.pop().users:
            if user is product:
                return True
            if user in below and user not in seen:
                seen.add(user)
                stack.append(user)
    return False


def _replace(graph: fx.Graph, prepared: Prepared, mode: FakeTensorMode | None, sizes: Sizes, writes: Writes) -> str:
    match = prepared.match
    old = match.node
    before = old.prev
    moved = writes.followers(match.logsumexps, old, _operands(prepared))
    try:
        emitter = Emitter(graph, old, mode, sizes)
        lowered = lower(prepared, emitter)
        new = fitting(graph, _without_more_gradients(emitter, lowered.out, old, _operands(prepared)), old, mode)
    except Exception:
        _erase_between(graph, before, old)
        raise
    old.replace_all_uses_with(new)
    for node, replacement in lowered.logsumexps.items():
        node.replace_all_uses_with(_without_more_gradients(emitter, replacement, node, _operands(prepared)))
        graph.erase_node(node)
    inserted = list(itertools.takewhile(lambda node: node is not before, _upward(old.prev)))
    for node in inserted:
        if not node.users and node is not new:
            graph.erase_node(node)
    for node in reversed(moved):
        old.append(node)
    writes.add((*inserted, *moved), old)
    erase(graph, old, match.inside)
    return str(prepared.bound.variant)


def _without_more_gradients(emitter: Emitter, new: fx.Node, old: fx.Node, operands: Iterable[fx.Node]) -> fx.Node:
    """Detach `new` if `old` carries no gradient although an operand requires one."""
    return new if needs_grad(old) or not any(map(needs_grad, operands)) else emitter.method("detach", new)


def _upward(node: fx.Node) -> Iterator[fx.Node]:
    while True:
        following = node.prev
        yield node
        node = following


def _erase_between(graph: fx.Graph, before: fx.Node, end: fx.Node) -> None:
    while end.prev is not before:
        graph.erase_node(end.prev)
