"""A compiled function beside itself, at several values of each number and length.

Dynamo writes the first value of a number or a length into the graph, makes it a symbol at the second, and keeps that graph for all that
follow: only the third value shows whether the symbol was taken for what it is.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

FEWEST = 3


def check_variety(calls: Sequence[tuple[Any, ...]]) -> None:
    """Fails unless something differs between the calls, and each number and each length that does has at least three values."""
    seen: dict[str, list[Any]] = {}
    for call in calls:
        for name, value in _numbers(call):
            seen.setdefault(name, []).append(value)
    counts = {name: len(set(values)) for name, values in seen.items()}
    changing = {name: n for name, n in counts.items() if n > 1}
    few = {name: sorted(set(seen[name])) for name, n in changing.items() if n < FEWEST}
    assert changing, f"each number and length has one value in all {len(calls)} calls: {sorted(counts)}"
    assert not few, f"fewer than {FEWEST} values: {few}"
    fixed = [name for name, n in counts.items() if n == 1 and "." not in name]
    assert not fixed, f"numbers with one value in all calls: {fixed}; close over what is no argument"


def several(*values: Any) -> tuple[Any, ...]:
    """The numbers or lengths with which a test calls a compiled function, one after the other."""
    assert len(set(values)) >= FEWEST, f"fewer than {FEWEST} values: {values}"
    return values


def _numbers(call: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Numbers among the arguments, and the sizes of tensors."""
    for position, arg in enumerate(call):
        if isinstance(arg, torch.Tensor):
            yield from ((f"argument {position}.size({dim})", n) for dim, n in enumerate(arg.shape))
        elif isinstance(arg, (int, float)) and not isinstance(arg, bool):
            yield f"argument {position}", arg
        elif isinstance(arg, (tuple, list)):
            yield from ((f"argument {position}: {name}", value) for name, value in _numbers(arg))


def compare(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], compiled: Callable[..., Any] | None = None, *,
    reference: Callable[..., Any] | None = None, gradients: bool = True, tolerance: float = 2e-5, **options: Any,
) -> Callable[..., Any]:  # fmt: skip
    """Runs a compiled function and its reference on every call: the same results, and the same gradients of what requires them.

    Args:
        function: a function or a module.
        calls: the arguments of each call, of which numbers and lengths take at least three values.
        compiled: the compiled form; by default `torch.compile(function, **options)`.
        reference: what it is compared with; by default the function as it runs eagerly.
        gradients: whether gradients are compared too.
        tolerance: absolute and relative, of results; of gradients ten times as much.

    Returns:
        The compiled form.
    """
    check_variety(calls)
    compiled = torch.compile(function, **options) if compiled is None else compiled
    parameters = tuple(function.parameters()) if isinstance(function, torch.nn.Module) else ()
    for call in calls:
        got, want = (_tensors(f(*call)) for f in (compiled, reference or function))
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
        leaves = [t for t in (*_tensors(call), *parameters) if t.requires_grad]
        if gradients and leaves:
            grads = [_gradients(outputs, leaves) for outputs in (got, want)]
            torch.testing.assert_close(*grads, atol=10 * tolerance, rtol=10 * tolerance)
    return compiled


def resize(args: Sequence[Any], sizes: dict[int, int], *, batch: tuple[int, int] = (0, 0)) -> list[Any]:
    """The arguments with other lengths, as a further call of a compiled function takes them.

    Every dim of a size in `sizes` gets the size beside it, a first dim of size `batch[0]` gets `batch[1]`, and so do numbers that are
    lengths. Strides keep their order, and what requires a gradient still does. Finite floating values are drawn; positions go on
    counting; all others (masks, indices, infinities) are repeated from the start, so that no row of a mask loses its keys.
    """
    return [_resize(arg, sizes, batch, seed) for seed, arg in enumerate(args)]


def _resize(arg: Any, sizes: dict[int, int], batch: tuple[int, int], seed: int) -> Any:
    if isinstance(arg, (tuple, list)):
        return type(arg)(resize(arg, sizes, batch=batch))
    if not isinstance(arg, torch.Tensor):
        return sizes.get(arg, arg) if type(arg) is int else arg
    old = arg.detach()
    shape = [batch[1] if dim == 0 and n == batch[0] and arg.ndim > 1 else sizes.get(n, n) for dim, n in enumerate(old.shape)]
    if old.ndim == 1 and not old.is_floating_point() and torch.equal(old, torch.arange(len(old), dtype=old.dtype)):
        return torch.arange(*shape, dtype=old.dtype)
    if old.is_floating_point() and old.isfinite().all():
        values = torch.randn(shape, generator=torch.Generator().manual_seed(100 + seed)).to(old)
    else:
        values = old
        for dim, n in enumerate(shape):
            values = values.index_select(dim, torch.arange(n) % old.shape[dim])
    order = sorted(range(old.ndim), key=old.stride, reverse=True)
    stored = values.permute(order).contiguous().permute([order.index(dim) for dim in range(old.ndim)])
    spread = stored[tuple(slice(0, 1) if old.stride(dim) == 0 else slice(None) for dim in range(old.ndim))].expand(shape)
    return spread.requires_grad_(arg.requires_grad)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def _gradients(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Of the outputs times numbers that are the same for each run."""
    flowing = [t for t in outputs if t.requires_grad]
    weights = [torch.randn(t.shape, generator=torch.Generator().manual_seed(n)).to(t) for n, t in enumerate(flowing)]
    return torch.autograd.grad(flowing, leaves, weights, allow_unused=True)
