"""The custom operators `foci::attention` and `foci::attention_backward`, with their fakes, autograd and batching rules.

The only module that knows `torch.library`. Plain eager calls take a shorter way around the dispatcher through
`_Attention`, with the same kernels and the same derivatives; everything that traces, exports or transforms sees the
operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from foci.context import allowed_backends
from foci.execution import Allowed, Needs, as_written, run_backward, run_forward
from foci.problem import Cotangents, Formula, Gradients, Layout, Operands, Results, accumulation_dtype, empty_out
from foci.problem import Outputs as Asked

__all__ = ["attend"]

Outputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_OPTIONAL: Final = ("seed", "blocks", "cu_q", "cu_kv", "q_lengths", "kv_lengths")
_Kind: Final = torch._C._functorch.TransformType
_PLAIN: Final = (Tensor, torch.nn.Parameter)
_NO_NEEDS: Final[tuple[bool, bool, bool]] = (False, False, False)


def attend(formula: Formula, operands: Operands, allowed: Allowed) -> Results:
    """Attention, differentiable in query, key, value and captured tensors to any order and in every mode.

    Raises:
        NoViableBackend: if no backend accepts the problem.
    """
    tensors = (operands.query, operands.key, operands.value, *operands.captures)
    transforms = _transforms()
    if _has_forward_gradient(tensors) or _Kind.Jvp in transforms:
        return _formula_kernel(formula, operands)
    if _Kind.Grad in transforms:
        call = _Call(formula, operands, allowed)
        return _results(formula, _Transformed.apply(call, *call.tensors()))  # type: ignore[no-untyped-call]
    if not _is_plain_eager(tensors):
        return _results(formula, torch.ops.foci.attention(*_flatten(formula, operands, allowed)))
    needs: Needs = (*_NO_NEEDS, (False,) * len(operands.captures))
    if torch.is_grad_enabled():
        needs = (tensors[0].requires_grad, tensors[1].requires_grad, tensors[2].requires_grad, tuple(t.requires_grad for t in tensors[3:]))
        if any(needs[:3]) or any(needs[3]):
            return _results(formula, _Attention.apply(formula, operands, needs, allowed, *tensors))  # type: ignore[no-untyped-call]
    return run_forward(formula, operands, needs, allowed)


def _is_plain_eager(tensors: Sequence[Tensor]) -> bool:
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.compiler.is_compiling()
        and all(type(t) in _PLAIN for t in tensors)
    )


def _transforms() -> list[Any]:
    """Kinds of the torch.func transforms that are open."""
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack() is None:
        return []
    return [level.key() for level in functorch.get_interpreter_stack() or ()]


def _has_forward_gradient(tensors: Sequence[Tensor]) -> bool:
    return torch.autograd.forward_ad._current_level >= 0 and any(
        torch.autograd.forward_ad.unpack_dual(t).tangent is not None  # type: ignore[no-untyped-call]
        for t in tensors
        if t.is_floating_point()
    )


def _formula_kernel(formula: Formula, operands: Operands) -> Results:
    """The formula in plain differentiable torch operations: forward-mode AD and second derivatives go through it."""
    from foci.backends.blocked import differentiable
    from foci.backends.reference import formula as plain

    if torch._guards.detect_fake_mode([operands.query]) is not None:
        return plain(operands, formula)  # a graph is made: there are no values to find tiles by, and sizes may be symbols
    with as_written(operands.query):
        return differentiable(operands, formula)


def _results(formula: Formula, outputs: Sequence[Tensor]) -> Results:
    asked = formula.outputs
    out, lse, row_max, column_sums, weights = outputs
    return Results(
        out=out,
        lse=lse,
        row_max=row_max.detach() if asked.row_max else None,
        column_sums=column_sums if asked.column_sums else None,
        weights=weights if asked.weights else None,
    )


def _outputs(results: Results) -> Outputs:
    none = functools.partial(results.out.new_empty, (0,))
    return (
        results.out,
        results.lse.contiguous(),
        none() if results.row_max is None else results.row_max.contiguous(),
        none() if results.column_sums is None else results.column_sums.contiguous(),
        none() if results.weights is None else results.weights.contiguous(),
    )


def _flatten(formula: Formula, operands: Operands, allowed: Allowed) -> tuple[Any, ...]:
    """The arguments of the operator. `_unflatten` is its inverse."""
    o = operands
    return (
        o.query, o.key, o.value, list(o.captures), *(getattr(o, name) for name in _OPTIONAL), list(o.ints), list(o.floats),
        o.scale, o.dropout_p, o.max_q, o.max_kv, formula.text, "*" if allowed is None else ",".join(allowed),
    )  # fmt: skip


def _unflatten(args: Sequence[Any]) -> tuple[Formula, Operands, Allowed]:
    query, key, value, captures, *optional, ints, floats, scale, dropout_p, max_q, max_kv, formula, allowed = args
    numbers = (tuple(ints), tuple(floats), scale, dropout_p)
    operands = Operands(query, key, value, tuple(captures), *numbers, *optional, max_q, max_kv)  # type: ignore[call-arg]
    return Formula.parse(formula), operands, None if allowed == "*" else tuple(name for name in allowed.split(",") if name)


@torch.library.custom_op("foci::attention", mutates_args=())
def _attention_op(
    query: Tensor, key: Tensor, value: Tensor, captures: Sequence[Tensor], seed: Tensor | None, blocks: Tensor | None, cu_q: Tensor | None,
    cu_kv: Tensor | None, q_lengths: Tensor | None, kv_lengths: Tensor | None, ints: Sequence[int], floats: Sequence[float], scale: float,
    dropout_p: float, max_q: int, max_kv: int, formula: str, allowed: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    args = list(locals().values())
    plan_formula, operands, names = _unflatten(args)
    # What nobody restricted while the graph was made, `use` around its run may.
    allowed_now = allowed_backends() if names is None else names
    return _own(run_forward(plan_formula, operands, (*_NO_NEEDS, (False,) * len(captures)), allowed_now))


def _own(results: Results) -> Outputs:
    """Outputs with the strides the fake promises."""
    outputs = _outputs(results)
    out = outputs[0]
    if not out.transpose(1, 2).is_contiguous():
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return (out, *outputs[1:])


@_attention_op.register_fake
def _attention_fake(*args: Any) -> Outputs:
    formula, operands, _ = _unflatten(args)
    query, key = operands.query, operands.key
    rows, asked, acc = query.shape[:3], formula.outputs, accumulation_dtype(query.dtype)

    def maybe(wanted: bool, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return query.new_empty(tuple(shape) if wanted else (0,), dtype=dtype if wanted else query.dtype)

    return (
        empty_out(query, operands.value),
        query.new_empty(tuple(rows), dtype=acc),
        maybe(asked.row_max, rows, acc),
        maybe(asked.column_sums, (query.shape[0], query.shape[1], key.shape[2]), acc),
        maybe(asked.weights, (*rows, key.shape[2]), query.dtype),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    ctx.set_materialize_grads(False)
    ctx.captured = len(inputs[3])
    ctx.present = [x is not None for x in inputs[4:10]]
    ctx.numbers = inputs[10:]
    ctx.save_for_backward(*inputs[:3], *inputs[3], *(x for x in inputs[4:10] if x is not None), output[0], output[1])


def _restore(ctx: Any) -> tuple[Formula, Operands, Allowed, Tensor, Tensor]:
    *saved, out, lse = ctx.saved_tensors
    rest = iter(saved[3 + ctx.captured :])
    optional = [next(rest) if present else None for present in ctx.present]
    formula, operands, allowed = _unflatten((*saved[:3], saved[3 : 3 + ctx.captured], *optional, *ctx.numbers))
    return formula, operands, allowed, out, lse


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    formula, operands, allowed, out, lse = _restore(ctx)
    wanted = ctx.needs_input_grad
    captures = wanted[3] if isinstance(wanted[3], (list, tuple)) else [wanted[3]] * ctx.captured
    needs: Needs = (wanted[0], wanted[1], wanted[2], tuple(captures))
    gradients = _call_backward(formula, operands, Results(out, lse), _cotangents(grads, out, formula.outputs), needs, allowed)
    return (gradients.query, gradients.key, gradients.value, list(gradients.captures), *_no_gradients(ctx.numbers))


def _no_gradients(numbers: Sequence[Any]) -> tuple[Any, ...]:
    """For the arguments after the captures, in the structure torch wants: an empty list is one of tensors, any other none."""
    return (*[None] * len(_OPTIONAL), *([] if isinstance(n, (list, tuple)) and not n else None for n in numbers))


_attention_op.register_autograd(_backward, setup_context=_setup)


def _cotangents(grads: Sequence[Tensor | None], out: Tensor, asked: Asked) -> Cotangents:
    grad_out, grad_lse, _, grad_columns, grad_weights = grads
    return Cotangents(
        torch.zeros_like(out) if grad_out is None else grad_out,
        grad_lse,
        grad_columns if asked.column_sums else None,  # an empty tensor stands for what nobody asked for
        grad_weights if asked.weights else None,
    )


def _call_backward(
    formula: Formula, operands: Operands, results: Results, cotangents: Cotangents, needs: Needs, allowed: Allowed
) -> Gradients:
    c = cotangents
    text = "".join(str(int(n)) for n in (*needs[:3], *needs[3]))
    flat = _flatten(formula, operands, allowed)
    grads = iter(torch.ops.foci.attention_backward(c.out, c.lse, c.column_sums, c.weights, results.out, results.lse, text, *flat))
    return _gradients([next(grads) if need else None for need in (*needs[:3], *needs[3])])


def _gradients(grads: Sequence[Tensor | None]) -> Gradients:
    return Gradients(grads[0], grads[1], grads[2], tuple(grads[3:]))


@torch.library.custom_op("foci::attention_backward", mutates_args=())
def _backward_op(
    grad_out: Tensor, grad_lse: Tensor | None, grad_columns: Tensor | None, grad_weights: Tensor | None, out: Tensor, lse: Tensor,
    needs: str, query: Tensor, key: Tensor, value: Tensor, captures: Sequence[Tensor], seed: Tensor | None, blocks: Tensor | None,
    cu_q: Tensor | None, cu_kv: Tensor | None, q_lengths: Tensor | None, kv_lengths: Tensor | None, ints: Sequence[int],
    floats: Sequence[float], scale: float, dropout_p: float, max_q: int, max_kv: int, formula: str, allowed: str,
) -> list[Tensor]:  # fmt: skip
    args = list(locals().values())[7:]
    plan_formula, operands, names = _unflatten(args)
    wanted = [flag == "1" for flag in needs]
    cotangents = Cotangents(grad_out, grad_lse, grad_columns, grad_weights)
    needed: Needs = (wanted[0], wanted[1], wanted[2], tuple(wanted[3:]))
    gradients = run_backward(plan_formula, operands, Results(out, lse), cotangents, needed, names)
    return [g.contiguous() for g in (gradients.query, gradients.key, gradients.value, *gradients.captures) if g is not None]


@_backward_op.register_fake
def _backward_fake(*args: Any) -> list[Tensor]:
    tensors = (*args[7:10], *args[10])
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for flag, t in zip(args[6], tensors, strict=True) if flag == "1"]


def _setup_double(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.needs = inputs[6]
    ctx.cotangents = [x is not None for x in inputs[1:4]]
    ctx.captured = len(inputs[10])
    ctx.present = [x is not None for x in inputs[11:17]]
    ctx.numbers = inputs[17:]
    optional = (x for x in (*inputs[11:17], *inputs[1:4]) if x is not None)
    ctx.save_for_backward(*inputs[7:10], *inputs[10], *optional, inputs[0], inputs[5])


def _double_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    """Second derivatives: differentiates the gradient of the plain formula, which saves what torch operations save."""
    *saved, grad_out, _ = ctx.saved_tensors
    count = 3 + ctx.captured
    rest = iter(saved[count:])
    optional = [next(rest) if present else None for present in ctx.present]
    others = [next(rest) if present else None for present in ctx.cotangents]
    formula, operands, _ = _unflatten((*saved[:3], saved[3:count], *optional, *ctx.numbers))
    first = _second_order(formula, operands, [grad_out, *others], [flag == "1" for flag in ctx.needs], grads)
    by_tensor, by_cotangent = first[:count], first[count:]
    return (*by_cotangent, None, None, None, *by_tensor[:3], list(by_tensor[3:]), *_no_gradients(ctx.numbers))


def _second_order(
    formula: Formula, operands: Operands, cotangents: Sequence[Tensor | None], needs: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        tensors = [_leaf(t, create_graph) for t in (operands.query, operands.key, operands.value, *operands.captures)]
        flowing = [None if c is None else _leaf(c, create_graph) for c in cotangents]
        results = _formula_kernel(
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


_backward_op.register_autograd(_double_backward, setup_context=_setup_double)


class _Attention(torch.autograd.Function):
    """The eager way: no dispatcher, the same kernels."""

    @staticmethod
    def forward(ctx: Any, formula: Formula, operands: Operands, needs: Needs, allowed: Allowed, *tensors: Tensor) -> Outputs:
        ctx.set_materialize_grads(False)
        outputs = _outputs(run_forward(formula, operands, needs, allowed))
        optional = [getattr(operands, name) for name in _OPTIONAL]
        ctx.call = (formula, needs, allowed, [o is not None for o in optional])
        ctx.numbers = (operands.ints, operands.floats, operands.scale, operands.dropout_p)
        ctx.longest = (operands.max_q, operands.max_kv)
        ctx.save_for_backward(*tensors, *(o for o in optional if o is not None), outputs[0], outputs[1])
        ctx.mark_non_differentiable(outputs[2])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        formula, needs, allowed, present = ctx.call
        *saved, out, lse = ctx.saved_tensors
        count = 3 + len(needs[3])
        rest = iter(saved[count:])
        optional = (next(rest) if p else None for p in present)
        operands = Operands(*saved[:3], tuple(saved[3:count]), *ctx.numbers, *optional, *ctx.longest)  # type: ignore[call-arg]
        if _is_batched(grads):
            g = _formula_backward(formula, operands, grads, needs)
        else:
            run = _call_backward if torch.is_grad_enabled() else run_backward
            g = run(formula, operands, Results(out, lse), _cotangents(grads, out, formula.outputs), needs, allowed)
        return (None, None, None, None, g.query, g.key, g.value, *g.captures)


@dataclass(frozen=True, eq=False)
class _Call:
    """A call under torch.func, whose transforms see only the arguments of their own level: all tensors apart from the rest."""

    formula: Formula
    operands: Operands
    allowed: Allowed

    def tensors(self) -> list[Tensor]:
        """Query, key, value, captured tensors, and the optional ones that are there."""
        o = self.operands
        optional = [getattr(o, name) for name in _OPTIONAL]
        return [o.query, o.key, o.value, *o.captures, *(t for t in optional if t is not None)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Operands:
        """The operands of these tensors, ordered as `tensors` has them."""
        count = 3 + len(self.operands.captures)
        rest = iter(tensors[count:])
        optional: dict[str, Any] = {name: next(rest) for name in _OPTIONAL if getattr(self.operands, name) is not None}
        query, key, value, *captures = tensors[:count]
        return replace(self.operands, query=query, key=key, value=value, captures=tuple(captures), **optional)


class _Transformed(torch.autograd.Function):
    """Attention under torch.func's grad, vjp and jacrev, which custom operators do not take part in."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> Outputs:
        return tuple(torch.ops.foci.attention(*_flatten(call.formula, call.with_tensors(tensors), call.allowed)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
        ctx.call = inputs[0]
        ctx.save_for_backward(*inputs[1:], output[0], output[1])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        needs = "".join(str(int(need)) for need in ctx.needs_input_grad[1 : 4 + len(call.operands.captures)])
        *tensors, out, lse = ctx.saved_tensors
        found = iter(_TransformedBackward.apply(call, needs, grads[0], grads[1], grads[3], grads[4], out, lse, *tensors))  # type: ignore[no-untyped-call]
        return (None, *(next(found) if flag == "1" else None for flag in needs), *[None] * (len(tensors) - len(needs)))


class _TransformedBackward(torch.autograd.Function):
    """The gradient of `_Transformed`, with a derivative of its own: that of the plain formula's gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, needs: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        grad_out, grad_lse, grad_columns, grad_weights, out, lse, *inputs = tensors
        asked = call.formula.outputs
        others = (grad_lse, grad_columns if asked.column_sums else None, grad_weights if asked.weights else None)
        flat = _flatten(call.formula, call.with_tensors(inputs), call.allowed)
        return tuple(torch.ops.foci.attention_backward(grad_out, *others, out, lse, needs, *flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, ctx.wanted = inputs[:2]
        ctx.save_for_backward(*inputs[2:6], *inputs[8:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        count = 7 + len(ctx.call.operands.captures)  # cotangents, query, key, value, captures
        varied = [n for n in range(count) if saved[n].is_floating_point()]

        def first(*some: Tensor) -> tuple[Tensor, ...]:
            tensors = list(saved)
            for n, tensor in zip(varied, some, strict=True):
                tensors[n] = tensor
            return _formula_gradient(ctx.call, ctx.wanted, tensors)

        pull = torch.func.vjp(first, *(saved[n] for n in varied))[1]
        found = dict(zip(varied, pull(tuple(grads)), strict=True))
        every = [found.get(n) for n in range(len(saved))]
        return (None, None, *every[:4], None, None, *every[4:])


def _formula_gradient(call: _Call, needs: str, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of the plain formula for cotangents of out, lse, column sums and weights, by torch.func alone."""
    cotangents, inputs = tensors[:4], list(tensors[4:])
    wanted = [n for n, flag in enumerate(needs) if flag == "1"]
    asked = call.formula.outputs
    present = (True, True, asked.column_sums, asked.weights)

    def formula(*some: Tensor) -> tuple[Tensor, ...]:
        for n, tensor in zip(wanted, some, strict=True):
            inputs[n] = tensor
        results = _formula_kernel(call.formula, call.with_tensors(inputs))
        outputs = (results.out, results.lse, results.column_sums, results.weights)
        return tuple(o for o, on in zip(outputs, present, strict=True) if on and o is not None)

    pull = torch.func.vjp(formula, *(inputs[n] for n in wanted))[1]
    gradients: tuple[Tensor, ...] = pull(tuple(c for c, on in zip(cotangents, present, strict=True) if on))
    return gradients


def _is_batched(tensors: Sequence[Tensor | None]) -> bool:
    return any(t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors)


def _formula_backward(formula: Formula, operands: Operands, grads: Sequence[Tensor | None], needs: Needs) -> Gradients:
    """Gradients for a whole batch of cotangents (`is_grads_batched`), whose tensors no kernel can read."""
    flags = (*needs[:3], *needs[3])
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(on) for t, on in zip((operands.query, operands.key, operands.value, *operands.captures), flags)]
        results = _formula_kernel(formula, replace(operands, query=leaves[0], key=leaves[1], value=leaves[2], captures=tuple(leaves[3:])))
    outputs = (results.out, results.lse, None, results.column_sums, results.weights)
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o is not None and g is not None and o.requires_grad]
    wanted = [leaf for leaf, on in zip(leaves, flags) if on]
    found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return _gradients([next(found) if on else None for on in flags])


def _unbatched(args: Sequence[Any], in_dims: Sequence[Any], n: int) -> list[Any]:
    """Entry `n` of every batched tensor."""

    def pick(arg: Any, dim: Any) -> Any:
        if isinstance(arg, (list, tuple)) and isinstance(dim, (list, tuple)):
            return [pick(a, d) for a, d in zip(arg, dim, strict=True)]
        return arg.select(dim, n) if isinstance(arg, Tensor) and isinstance(dim, int) else arg

    return [pick(a, d) for a, d in zip(args, in_dims, strict=True)]


def _fold(args: Sequence[Any], in_dims: Sequence[Any], size: int) -> tuple[Any, Any] | None:
    """Batching by a larger B, where nothing in the call knows the batch index or a batch of its own."""
    formula = Formula.parse(args[16])
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


@_attention_op.register_vmap
def _attention_vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
    folded = _fold(args, in_dims, info.batch_size) if info.batch_size else None
    if folded is not None:
        return folded
    outputs, dims = _stacked(torch.ops.foci.attention, info, in_dims, args)
    return tuple(outputs), tuple(dims)


@_backward_op.register_vmap
def _backward_vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
    return _stacked(torch.ops.foci.attention_backward, info, in_dims, args)
