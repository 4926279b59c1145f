"""What the operators run: calls through the dispatcher, as compiled code makes them.

Such code calls with one formula, one set of numbers and one geometry again and again. What was decided for it once is found by one
look; a kernel that is `Repeating` then gets its tensors alone, as in eager calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from foci import backends, cache_check
from foci.backends.contract import Fixed, Given
from foci.context import allowed_backends, is_tuning
from foci.execution import Allowed, Needs, backward_again, choose_kernel, run_backward
from foci.operator.autograd import Outline, forward_now
from foci.operator.op_schema import NO_NEEDS, Flat, pack_results, unflatten
from foci.problem import Cotangents, Geometry, Results, gradient_strides, result_strides

__all__ = [
    "Known", "backward", "backward_known", "backward_rows", "compare", "fix_backward", "fix_forward", "forward", "forward_known",
    "gradient_rows", "gradients", "results",
]  # fmt: skip

_CAPACITY: Final = 1024
Strides: TypeAlias = tuple[int, ...]


class Known(NamedTuple):
    """A call but for its tensors, and the strides that the operator's outputs are promised to have; None where they depend on how many
    tokens are packed.
    """

    outline: Outline
    strides: list[Strides] | None


_known: OrderedDict[tuple[Any, ...], Known] = OrderedDict()
"""By what determines a pass; backward passes besides by the gradients they want."""


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
    return backward_rows(backward_known(args, joined=True), args)


def forward_known(args: Sequence[Any]) -> Known:
    """What is known of a call of `results`.

    Raises:
        NoViableBackend: if no backend accepts the problem.
    """
    # What nobody restricted while the graph was made, `use` around its run may.
    allowed = allowed_backends() if args[-1] == "*" else _names(args[-1])
    signature = _signature(args, allowed)
    known = _known.get(signature)
    if known is None:
        return _keep(signature, _forward_known(args, allowed))
    if cache_check.ENABLED:
        compare(known, _forward_known(args, allowed))
    return known


def backward_known(args: Sequence[Any], *, joined: bool = False) -> Known:
    """What is known of a call of `gradients`, or of `gradient_rows`.

    Raises:
        NoViableBackend: if no backend accepts the problem.
    """
    needs, *operands = args[6:]
    allowed = None if operands[-1] == "*" else _names(operands[-1])
    signature = (needs, joined, *_signature(operands, allowed))
    known = _known.get(signature)
    if known is None:
        return _keep(signature, _backward_known(operands, allowed, needs, joined=joined))
    if cache_check.ENABLED:
        compare(known, _backward_known(operands, allowed, needs, joined=joined))
    return known


def forward(known: Known, args: tuple[Any, ...]) -> Results:
    """Attention of the flat arguments of the operator, with the strides that its output is promised to have."""
    outline, strides = known
    found = forward_now(outline, (*args[:3], *args[3]), args[4:11])
    out = _lying(found.out, (strides or _forward_strides(args))[0])
    return found if out is found.out else replace(found, out=out)


def backward(known: Known, arguments: tuple[Any, ...]) -> list[Tensor]:
    """Those gradients of query, key, value and captured tensors whose letter is 1, of the flat arguments of the operator's backward."""
    strides = known.strides or _backward_strides(arguments[7:], arguments[6])
    return [_lying(t, s) for t, s in zip(_found(known, arguments), strides, strict=True)]


def backward_rows(known: Known, arguments: tuple[Any, ...]) -> Tensor:
    """Those of query, key and value, likewise, in rows."""
    made = _found(known, arguments)
    (b, _, s, _), width = made[0].shape, sum(t.shape[1] * t.shape[3] for t in made)
    at, storages = made[0].storage_offset(), {t.untyped_storage().data_ptr() for t in made}
    strides = (s * width, width, 1)
    for t in made:
        _, h, _, d = t.shape
        if len(storages) > 1 or t.storage_offset() != at or t.stride() != (strides[0], d, width, 1):
            return torch.cat([t.transpose(1, 2).flatten(2) for t in made], 2)
        at += h * d
    return made[0].as_strided((b, s, width), strides)


def _found(known: Known, arguments: tuple[Any, ...]) -> list[Tensor]:
    """As the kernel makes them."""
    (grad_out, grad_lse, grad_columns, grad_weights, out, lse, _), args = arguments[:7], arguments[7:]
    outline = known.outline
    tensors = (*args[:3], *args[3])
    made: Sequence[Tensor | None] | None = None
    if outline.geometry is not None and grad_columns is None and grad_weights is None:
        offsets = None if args[6] is None else args[6:10]
        made = backward_again(outline.chosen, outline.geometry, (*tensors, args[4]), offsets, Given(out, lse, grad_out, grad_lse))
    if made is None:
        cotangents = Cotangents(grad_out, grad_lse, grad_columns, grad_weights)
        found = run_backward(outline.chosen, outline.operands(tensors, args[4:11]), Results(out, lse), cotangents)
        made = (found.query, found.key, found.value, *found.captures)
    return [t for t in made if t is not None]


def fix_forward(known: Known, args: tuple[Any, ...]) -> Fixed | None:
    """`forward` of query, key, value, captured tensors and seed that are as these but for their addresses, in one row: out, lse, and
    row_max where it is asked for. None where the kernel has no such pass."""
    outline, strides = known
    binding = outline.chosen.binding
    if binding is None or outline.geometry is None or strides is None:
        return None
    _, h, s, _ = args[0].shape
    statistics = [(h * s, s, 1)] * (1 + outline.chosen.formula.outputs.row_max)
    return binding.fix_forward(outline.geometry, (*args[:3], *args[3], args[4]), [*strides, *statistics])


def fix_backward(known: Known, arguments: tuple[Any, ...]) -> Fixed | None:
    """`backward` likewise, of these tensors, out, lse, and the gradients of both: what it returns."""
    (grad_out, grad_lse, grad_columns, grad_weights, out, lse, _), args = arguments[:7], arguments[7:]
    outline, strides = known
    binding = outline.chosen.binding
    if binding is None or outline.geometry is None or strides is None or grad_columns is not None or grad_weights is not None:
        return None
    inputs, given = (*args[:3], *args[3], args[4]), Given(out, lse, grad_out, grad_lse)
    return binding.fix_backward(outline.geometry, inputs, given, strides)


def _names(allowed: str) -> tuple[str, ...]:
    return tuple([name for name in allowed.split(",") if name])


def _signature(args: Sequence[Any], allowed: Allowed) -> tuple[Any, ...]:
    """All that a pass is determined by, but for the values of tensors and the stream, which recordings check themselves."""
    query, key, value, captures, seed, blocks, *lengths, page_table, ints, floats, scale, dropout_p, max_q, max_kv, line, _ = args
    address, others = query.data_ptr() | key.data_ptr() | value.data_ptr(), 0
    captured = None
    if captures:
        captured = tuple([(t.shape, t.stride(), t.dtype) for t in captures])
        for t in captures:
            others |= t.data_ptr()
    shapes: tuple[object, ...] = (query.shape, key.shape, value.shape)
    strides, spans = (query.stride(), key.stride(), value.stride()), None
    if lengths[0] is not None:  # [1, H, T, D]: however many tokens, but for one, whose strides say nothing
        counts = query.shape[2], key.shape[2], value.shape[2]
        shapes = (min(counts) > 1 or counts, counts[1] == counts[2], *[(t.shape[1], t.shape[3]) for t in (query, key, value)])
        strides = strides[0][1:], strides[1][1:], strides[2][1:]
        spans = tuple([None if t is None else (t.shape, t.dtype) for t in lengths])
    pages = None
    if page_table is not None:
        pages = tuple([(t.shape, t.stride(), t.dtype) for t in (lengths[3], page_table)])
        others |= lengths[3].data_ptr() | page_table.data_ptr()
    return (
        line, allowed, shapes, strides, query.dtype, query.device, key.dtype, value.dtype, address & 15, others & 15, query is key,
        key is value, query is value, captured, seed is None, blocks is None, spans, pages, (*ints,), (*floats,), scale, dropout_p, max_q,
        max_kv, backends.changes(), torch.are_deterministic_algorithms_enabled(), is_tuning(),
    )  # fmt: skip


def _keep(signature: tuple[Any, ...], known: Known) -> Known:
    _known[signature] = known
    if len(_known) > _CAPACITY:
        _known.popitem(last=False)
    return known


def compare(cached: Known, rebuilt: Known) -> None:
    """Compare what is known of a call with the same, built anew.

    Raises:
        StaleCacheError: if they differ.
    """
    cache_check.compare("the cache of operator calls", *({**k.outline.comparable(), "strides": k.strides} for k in (cached, rebuilt)))


def _forward_known(args: Sequence[Any], allowed: Allowed) -> Known:
    outline = _outline(args, allowed, (*NO_NEEDS, (False,) * len(args[3])))
    return Known(outline, None if args[6] is not None else _forward_strides(args))


def _backward_known(args: Sequence[Any], allowed: Allowed, needs: str, *, joined: bool) -> Known:
    wanted = [flag == "1" for flag in needs]
    outline = _outline(args, allowed, (wanted[0], wanted[1], wanted[2], tuple(wanted[3:])), joined=joined)
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


def _outline(args: Sequence[Any], allowed: Allowed, needs: Needs, *, joined: bool = False) -> Outline:
    formula, operands, _ = unflatten(args)
    chosen = choose_kernel(formula, operands, needs, allowed)
    # block masks and pages are looked up by value
    geometry = Geometry(joined=joined) if operands.blocks is None and operands.page_table is None else None
    o = operands
    return Outline(chosen, o.ints, o.floats, o.scale, o.dropout_p, o.max_q, o.max_kv, packed=False, geometry=geometry, learns=False)


def _lying(tensor: Tensor, strides: Strides) -> Tensor:
    """The tensor, or a copy with these strides."""
    found = tensor.stride()
    if found == strides or all(a == b or n == 1 for a, b, n in zip(found, strides, tensor.shape, strict=True)):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
