"""What the operators run: calls through the dispatcher, as compiled code makes them.

Such code calls with one formula, one set of numbers and one geometry again and again. What was decided for it once is found by one
look; a kernel that keeps its launches then gets its tensors alone, as in eager calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from foci import cache_check, call_cache
from foci.backends.contract import Given
from foci.environment import Environment, allowed_backends
from foci.execution import choose_kernel, launch_backward, run_backward
from foci.operator.autograd import Outline, forward_now, make_outline
from foci.operator.op_schema import Flat, pack_results, unflatten
from foci.prepare import check_room
from foci.problem import Cotangents, Formula, Layout, Operands, OptionalTensors, Program, Results, gradient_strides, result_strides
from foci.spec import NO_NEEDS, CallSpec, Needs, spec_of_operator

__all__ = [
    "Known", "backward", "backward_known", "backward_rows", "backward_rows_known", "compare", "forward", "forward_known",
    "gradient_rows", "gradients", "results",
]  # fmt: skip

Strides: TypeAlias = tuple[int, ...]


class Known(NamedTuple):
    """A call but for its tensors, and the strides that the operator's outputs are promised to have; None where they depend on how many
    tokens are packed.
    """

    outline: Outline
    strides: list[Strides] | None


def results(*args: Any) -> Flat:
    """Attention of the flat arguments of the operator.

    Raises:
        NoViableBackend: if no backend accepts the problem.
    """
    return pack_results(forward(forward_known(args), args))


def gradients(*args: Any) -> list[Tensor]:
    """Gradients, of the flat arguments of the operator's backward.

    Raises:
        NoViableBackend: if no backend accepts the problem.
    """
    return backward(backward_known(args), args)


def gradient_rows(*args: Any) -> Tensor:
    """Gradients of query, key and value side by side in rows [B, S, E], of the same arguments, dense and with as many queries as keys.

    Raises:
        NoViableBackend: if no backend accepts the problem.
    """
    return backward_rows(backward_rows_known(args), args)


def forward_known(args: Sequence[Any]) -> Known:
    """Return what is known of a call of `results`.

    Raises:
        NoViableBackend: if no backend accepts the problem.
    """
    # What nobody restricted while the graph was made, `use` around its run may.
    allowed = allowed_backends() if args[-1] == "*" else _names(args[-1])
    spec = spec_of_operator(args, allowed)
    return _recalled(spec, lambda: _forward_known(args, spec.environment))


def backward_known(args: Sequence[Any]) -> Known:
    """Return what is known of a call of `gradients`.

    Raises:
        NoViableBackend: if no backend accepts the problem.
    """
    return _backward_recalled(args, joined=False)


def backward_rows_known(args: Sequence[Any]) -> Known:
    """Return what is known of a call of `gradient_rows`.

    Raises:
        NoViableBackend: if no backend accepts the problem.
    """
    return _backward_recalled(args, joined=True)


def _backward_recalled(args: Sequence[Any], *, joined: bool) -> Known:
    needs, *operands = args[6:]
    allowed = None if operands[-1] == "*" else _names(operands[-1])
    spec = spec_of_operator(operands, allowed, needs, is_joined=joined)
    return _recalled(spec, lambda: _backward_known(operands, spec.environment, needs, joined=joined))


def _recalled(spec: CallSpec, build: Callable[[], Known]) -> Known:
    known: Known | None = call_cache.recall(spec)
    if known is None:
        known = build()
        call_cache.keep(spec, known)
    elif cache_check.ENABLED:
        compare(known, build())
    return known


def forward(known: Known, args: tuple[Any, ...]) -> Results:
    """Attention of the flat arguments of the operator, with the strides that its output is promised to have."""
    outline, strides = known
    outputs = forward_now(outline, (*args[:3], *args[3]), OptionalTensors(*args[4:11]))
    out = _with_strides(outputs.out, (strides or _forward_strides(args))[0])
    return outputs if out is outputs.out else replace(outputs, out=out)


def backward(known: Known, arguments: tuple[Any, ...]) -> list[Tensor]:
    """Compute the gradients of query, key, value and captured tensors whose letter is 1, of the flat arguments of the operator's
    backward."""
    strides = known.strides or _backward_strides(arguments[7:], arguments[6])
    return [_with_strides(t, s) for t, s in zip(_found(known, arguments), strides, strict=True)]


def backward_rows(known: Known, arguments: tuple[Any, ...]) -> Tensor:
    """Compute the gradients of query, key and value in rows of one tensor."""
    grad_inputs = _found(known, arguments)
    (b, _, s, _), width = grad_inputs[0].shape, sum([t.shape[1] * t.shape[3] for t in grad_inputs])
    address, strides = grad_inputs[0].data_ptr(), (s * width, width, 1)
    for t in grad_inputs:
        _, h, _, d = t.shape
        # of one row alone, gradients may be neighbours without being parts of one tensor
        if t.stride() != (strides[0], d, width, 1) or t.data_ptr() != address or s < 2:
            return torch.cat([t.transpose(1, 2).flatten(2) for t in grad_inputs], 2)
        address += h * d * t.element_size()
    return grad_inputs[0].as_strided((b, s, width), strides)


def _found(known: Known, arguments: tuple[Any, ...]) -> list[Tensor]:
    """As the kernel makes them."""
    (grad_out, grad_lse, grad_columns, grad_weights, out, lse, _), args = arguments[:7], arguments[7:]
    outline, tensors, optional = known.outline, (*args[:3], *args[3]), OptionalTensors(*args[4:11])
    grad_inputs: Sequence[Tensor | None] | None = None
    if outline.program is not None and grad_columns is None and grad_weights is None:
        grad_inputs = launch_backward(outline.chosen, outline.program, tensors, optional, Given(out, lse, grad_out, grad_lse))
    if grad_inputs is None:
        cotangents = Cotangents(grad_out, grad_lse, grad_columns, grad_weights)
        g = run_backward(outline.chosen, outline.operands(tensors, optional), Results(out, lse), cotangents)
        grad_inputs = (g.query, g.key, g.value, *g.captures)
    return [t for t in grad_inputs if t is not None]


def _names(allowed: str) -> tuple[str, ...]:
    return tuple([name for name in allowed.split(",") if name])


def compare(cached: Known, rebuilt: Known) -> None:
    """Compare what is known of a call with the same, built anew.

    Raises:
        StaleCacheError: if they differ.
    """
    cache_check.compare("the cache of operator calls", *({**k.outline.comparable(), "strides": k.strides} for k in (cached, rebuilt)))


def _forward_known(args: Sequence[Any], environment: Environment) -> Known:
    outline = _outline(args, environment, (*NO_NEEDS, (False,) * len(args[3])))
    return Known(outline, None if args[6] is not None else _forward_strides(args))


def _backward_known(args: Sequence[Any], environment: Environment, needs: str, *, joined: bool) -> Known:
    wanted = [flag == "1" for flag in needs]
    outline = _outline(args, environment, (wanted[0], wanted[1], wanted[2], tuple(wanted[3:])), joined=joined)
    if joined:
        s, width = args[0].shape[2], sum(t.shape[1] * t.shape[3] for t in args[:3])
        return Known(outline, [(s * width, width, 1)])
    return Known(outline, None if args[6] is not None else _backward_strides(args, needs))


def _forward_strides(args: Sequence[Any]) -> list[Strides]:
    return [result_strides(args[0].shape, args[0].stride(), args[2].shape[3])]


def _backward_strides(args: Sequence[Any], needs: str) -> list[Strides]:
    strides = [gradient_strides(t.shape, heads_in_rows=t.stride(1) < t.stride(2)) for t in args[:3]]
    strides += [torch.empty(t.shape, device="meta").stride() for t in args[3]]
    return [s for s, flag in zip(strides, needs, strict=True) if flag == "1"]


def _outline(args: Sequence[Any], environment: Environment, needs: Needs, *, joined: bool = False) -> Outline:
    formula, operands, _ = unflatten(args)
    _check_room(formula, operands)
    chosen = choose_kernel(formula, operands, needs, environment)
    # compiled code computes a new block mask at each call
    return make_outline(chosen, operands, program=Program(joined=joined) if operands.blocks is None else None)


def _check_room(formula: Formula, operands: Operands) -> None:
    """Check again what could not be told while lengths were symbols."""
    o = operands
    lengths = {"b": o.query.shape[0] if o.cu_q is None else o.cu_q.shape[0] - 1, "h": o.query.shape[1]}
    if formula.layout is Layout.DENSE:
        lengths |= {"q_idx": o.query.shape[2], "kv_idx": o.key.shape[2]}
    check_room(formula.variant, o.captures, lengths)


def _with_strides(tensor: Tensor, strides: Strides) -> Tensor:
    """The tensor, or a copy with these strides."""
    current_strides = tensor.stride()
    if current_strides == strides or all(a == b or n == 1 for a, b, n in zip(current_strides, strides, tensor.shape, strict=True)):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
