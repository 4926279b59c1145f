"""The custom operators `foci::attention` and `foci::attention_backward`: fakes, autograd to any order, batching rules.

Registers them with `torch.library`; `foci.compat.library` registers their derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from foci.compat.library import register_autograd
from foci.environment import Allowed
from foci.operator import op_impl
from foci.operator.op_schema import OPTIONAL, Flat, call_backward, formula_kernel, name_cotangents, unflatten
from foci.problem import Formula, Layout, Operands, Results, accumulation_dtype, gradient_strides
from foci.spec import Needs

_OPTIONAL: Final = slice(4, 4 + len(OPTIONAL))
"""Where the optional tensors are among the arguments of the operator."""
_BEHIND: Final = slice(11, 11 + len(OPTIONAL))
"""The same for the backward operator."""

_OPERANDS: Final = (
    "Tensor query, Tensor key, Tensor value, Tensor[] captures, Tensor? seed, Tensor? blocks, Tensor? cu_q, Tensor? cu_kv, "
    "Tensor? q_lengths, Tensor? kv_lengths, Tensor? page_table, SymInt[] ints, float[] floats, float scale, float dropout_p, "
    "SymInt max_q, SymInt max_kv, str formula, str allowed"
)
_GIVEN: Final = "Tensor grad_out, Tensor? grad_lse, Tensor? grad_columns, Tensor? grad_weights, Tensor out, Tensor lse, str needs"
_SCHEMAS: Final = {
    "attention": f"({_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "attention_backward": f"({_GIVEN}, {_OPERANDS}) -> Tensor[]",
    "attention_backward_rows": f"({_GIVEN}, {_OPERANDS}) -> Tensor",
}


def _attention_fake(*args: Any) -> Flat:
    formula, operands, _ = unflatten(args)
    query, key = operands.query, operands.key
    rows, asked, acc = query.shape[:3], formula.outputs, accumulation_dtype(query.dtype)
    width = operands.value.shape[3]
    kv_len = key.shape[2] if formula.layout is not Layout.PAGED else operands.max_kv

    def maybe(wanted: bool, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return query.new_empty(tuple(shape) if wanted else (0,), dtype=dtype if wanted else query.dtype)

    return (
        query.new_empty_strided((*rows, width), gradient_strides((*rows, width), heads_in_rows=_heads_lie_in_rows(query))),
        query.new_empty(tuple(rows), dtype=acc),
        maybe(asked.row_max, rows, acc),
        maybe(asked.column_sums, (query.shape[0], query.shape[1], kv_len), acc),
        maybe(asked.weights, (*rows, key.shape[2]), query.dtype),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Flat) -> None:
    ctx.set_materialize_grads(False)
    ctx.captured = len(inputs[3])
    ctx.present = [x is not None for x in inputs[_OPTIONAL]]
    ctx.numbers = inputs[_OPTIONAL.stop :]
    ctx.save_for_backward(*inputs[:3], *inputs[3], *(x for x in inputs[_OPTIONAL] if x is not None), output[0], output[1])


class _Saved(NamedTuple):
    """A call of the forward, as its backward finds it again."""

    formula: Formula
    operands: Operands
    allowed: Allowed
    out: Tensor
    lse: Tensor


def _restore(ctx: Any) -> _Saved:
    *saved, out, lse = ctx.saved_tensors
    rest = iter(saved[3 + ctx.captured :])
    optional = [next(rest) if present else None for present in ctx.present]
    formula, operands, allowed = unflatten((*saved[:3], saved[3 : 3 + ctx.captured], *optional, *ctx.numbers))
    return _Saved(formula, operands, allowed, out, lse)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    call = _restore(ctx)
    wanted = ctx.needs_input_grad
    captures = wanted[3] if isinstance(wanted[3], (list, tuple)) else [wanted[3]] * ctx.captured
    needs: Needs = (wanted[0], wanted[1], wanted[2], tuple(captures))
    cotangents = name_cotangents(grads, call.out, call.formula.outputs)
    gradients = call_backward(call.formula, call.operands, Results(call.out, call.lse), cotangents, needs, call.allowed)
    return (gradients.query, gradients.key, gradients.value, list(gradients.captures), *_no_gradients(ctx.numbers))


def _no_gradients(numbers: Sequence[Any]) -> tuple[Any, ...]:
    """For the arguments after the captures, in the structure torch wants: an empty list is one of tensors, any other none."""
    return (*[None] * len(OPTIONAL), *([] if isinstance(n, (list, tuple)) and not n else None for n in numbers))


def _backward_fake(*args: Any) -> list[Tensor]:
    needs, tensors, captures = args[6], args[7:10], args[10]
    strides = [gradient_strides(t.shape, heads_in_rows=_heads_lie_in_rows(t)) for t in tensors]
    grads = [t.new_empty_strided(t.shape, s) for flag, t, s in zip(needs, tensors, strides, strict=False) if flag == "1"]
    grads += [
        torch.empty_like(t, memory_format=torch.contiguous_format) for flag, t in zip(needs[3:], captures, strict=True) if flag == "1"
    ]
    return grads


def _rows_fake(*args: Any) -> Tensor:
    query, key, value = args[7:10]
    return query.new_empty((query.shape[0], query.shape[2], sum(t.shape[1] * t.shape[3] for t in (query, key, value))))  # type: ignore[no-any-return]


def _heads_lie_in_rows(tensor: Tensor) -> bool:
    """Where sizes are symbols, a dim of unknown size is taken for longer than one."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(tensor.stride(1) < tensor.stride(2)))


def _setup_double(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.needs = inputs[6]
    ctx.cotangents = [x is not None for x in inputs[1:4]]
    ctx.captured = len(inputs[10])
    ctx.present = [x is not None for x in inputs[_BEHIND]]
    ctx.numbers = inputs[_BEHIND.stop :]
    optional = (x for x in (*inputs[_BEHIND], *inputs[1:4]) if x is not None)
    ctx.save_for_backward(*inputs[7:10], *inputs[10], *optional, inputs[0])


def _double_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    """Second derivatives: differentiates the gradient of the plain formula, which saves what torch operations save."""
    *saved, grad_out = ctx.saved_tensors
    count = 3 + ctx.captured
    rest = iter(saved[count:])
    optional = [next(rest) if present else None for present in ctx.present]
    aux_grads = [next(rest) if present else None for present in ctx.cotangents]
    formula, operands, _ = unflatten((*saved[:3], saved[3:count], *optional, *ctx.numbers))
    first = _second_order(formula, operands, [grad_out, *aux_grads], [flag == "1" for flag in ctx.needs], grads)
    by_tensor, by_cotangent = first[:count], first[count:]
    return (*by_cotangent, None, None, None, *by_tensor[:3], list(by_tensor[3:]), *_no_gradients(ctx.numbers))


def _second_order(
    formula: Formula, operands: Operands, cotangents: Sequence[Tensor | None], needs: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        tensors = [_leaf(t, create_graph) for t in (operands.query, operands.key, operands.value, *operands.captures)]
        flowing = [None if c is None else _leaf(c, create_graph) for c in cotangents]
        results = formula_kernel(
            formula, replace(operands, query=tensors[0], key=tensors[1], value=tensors[2], captures=tuple(tensors[3:]))
        )
        outputs = (results.out, results.lse, results.column_sums, results.weights)
        used = [(o, c) for o, c in zip(outputs, flowing, strict=True) if o is not None and c is not None and o.requires_grad]
        inputs = [t for t, need in zip(tensors, needs, strict=True) if need]
        first = torch.autograd.grad([o for o, _ in used], inputs, [c for _, c in used], create_graph=True, allow_unused=True)
        pairs = [(f, g) for f, g in zip(first, grads, strict=True) if f is not None and g is not None and f.requires_grad]
        wrt = [t for t in (*tensors, *flowing) if t is not None and t.requires_grad]
        second = iter(
            torch.autograd.grad([f for f, _ in pairs], wrt, [g for _, g in pairs], create_graph=create_graph, allow_unused=True)
            if pairs
            else [None] * len(wrt)
        )
    return [next(second) if t is not None and t.requires_grad else None for t in (*tensors, *flowing)]


def _leaf(tensor: Tensor, create_graph: bool) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.view_as(tensor) if create_graph and tensor.requires_grad else tensor.detach().requires_grad_()


def _unbatched(args: Sequence[Any], in_dims: Sequence[Any], n: int) -> list[Any]:
    """Entry `n` of every batched tensor."""

    def pick(arg: Any, dim: Any) -> Any:
        if isinstance(arg, (list, tuple)) and isinstance(dim, (list, tuple)):
            return [pick(a, d) for a, d in zip(arg, dim, strict=True)]
        return arg.select(dim, n) if isinstance(arg, Tensor) and isinstance(dim, int) else arg

    return [pick(a, d) for a, d in zip(args, in_dims, strict=True)]


def _fold(args: Sequence[Any], in_dims: Sequence[Any], size: int) -> tuple[Any, Any] | None:
    """Batching by a larger B, where nothing in the call knows the batch index or a batch of its own."""
    *_, line, _allowed = args
    formula = Formula.parse(line)
    reads_batch = "b" in formula.variant.score.variables() | formula.variant.mask.variables()
    captures_batched = any(d is not None for d in in_dims[3]) if isinstance(in_dims[3], (list, tuple)) else in_dims[3] is not None
    if reads_batch or captures_batched or formula.dropout or formula.layout is not Layout.DENSE or args[5] is not None:
        return None

    def widen(t: Tensor, dim: int | None) -> Tensor:
        t = t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
        return t.flatten(0, 1)

    outputs = torch.ops.foci.attention(*(widen(t, d) for t, d in zip(args[:3], in_dims[:3], strict=True)), *args[3:])
    # an output nobody asked for is empty, whatever the batch
    split = [o.unflatten(0, (size, -1)) if o.dim() > 1 else o for o in outputs]
    return tuple(split), tuple(0 if o.dim() > 1 else None for o in outputs)


def _stacked(op: Callable[..., Any], info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
    each = [op(*_unbatched(args, in_dims, n)) for n in range(info.batch_size)]
    outputs = [torch.stack(parts) for parts in zip(*each, strict=True)]
    return outputs, [0] * len(outputs)


def _attention_vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
    folded = _fold(args, in_dims, info.batch_size) if info.batch_size else None
    if folded is not None:
        return folded
    outputs, dims = _stacked(torch.ops.foci.attention, info, in_dims, args)
    return tuple(outputs), tuple(dims)


def _backward_vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
    return _stacked(torch.ops.foci.attention_backward, info, in_dims, args)


# as they were when the graph was made: what runs was chosen for those strides
_TAGS: Final = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library: Final = torch.library.Library("foci", "FRAGMENT")  # type: ignore[no-untyped-call]


def _register(name: str, run: Callable[..., Any], fake: Callable[..., Any], derivative: tuple[Any, Any], vmap: Callable[..., Any]) -> None:
    """Not by `torch.library.custom_op`, whose checks of each call cost more than finding the kernel."""
    _library.define(name + _SCHEMAS[name], tags=_TAGS)  # type: ignore[no-untyped-call]
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    qualified_name = f"foci::{name}"
    torch.library.register_fake(qualified_name, fake, lib=_library)
    register_autograd(_library, name, run, *derivative)
    torch.library.register_vmap(qualified_name, vmap, lib=_library)


_register("attention", op_impl.results, _attention_fake, (_backward, _setup), _attention_vmap)
_register("attention_backward", op_impl.gradients, _backward_fake, (_double_backward, _setup_double), _backward_vmap)

# graphs hold it where autograd has had its turn
_library.define("attention_backward_rows" + _SCHEMAS["attention_backward_rows"], tags=_TAGS)  # type: ignore[no-untyped-call]
_library.impl("attention_backward_rows", op_impl.gradient_rows, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("foci::attention_backward_rows", _rows_fake, lib=_library)
