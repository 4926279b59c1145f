"""A call as one hashable value: everything that its kernels and their launches may depend on, but for the values in its tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from foci.environment import Allowed, Environment, read_environment
from foci.ir.function_fingerprint import Fingerprint, shared
from foci.prepare import Extras
from foci.problem import make_tuple

__all__ = ["NO_NEEDS", "CallSpec", "Needs", "find_alignment", "find_needs", "spec_of_functions", "spec_of_operator"]

Needs: TypeAlias = tuple[bool, bool, bool, tuple[bool, ...]]
"""Whether query, key, value and each captured tensor want a gradient."""
NO_NEEDS: Final = (False, False, False)

_OPTIONAL_TENSOR: Final = frozenset((Tensor, type(None)))
_REAL: Final = (float, int)


class CallSpec(NamedTuple):
    """Two calls with equal specs run the same launches, on other addresses.

    How many tokens packed tensors hold is left out, unless a tensor holds one token: then its strides mean nothing.

    Attributes:
        function: what becomes of scores. Of a call that was not traced yet the fingerprints of its functions, with the numbers they
            read; of an operator's call the formula as text, with its numbers.
        outputs: which auxiliary outputs are asked for; None where the formula holds it.
        scale: as in `foci.prepare.Extras`; a zero as text (`_exact`).
        dropout_p, max_q, max_kv, exact_lengths: as in `foci.prepare.Extras`.
        shapes, strides, dtypes, devices: of query, key and value.
        alignment: the lowest four bits of the addresses of query, key and value together, and of the other tensors together.
        aliases: whether query is key, key is value, query is value.
        captures: of the tensors that functions read: strides, where the fingerprints hold the rest, or shape, strides and dtype.
        block_mask: shape and strides of the classes of blocks, and the size of a block.
        sequences: shape and dtype of cu_q, cu_kv, q_lengths and kv_lengths.
        pages: shape, strides and dtype of page table and lengths.
        has_seed: whether a dropout seed is given.
        requires_grad: of query, key, value and each captured tensor, where gradients are recorded; of an operator's backward, as its
            argument says.
        is_joined: gradients of query, key and value are wanted in rows of one tensor.
        warning: what to say of a mask that is aligned to the upper left.
        environment: the state around the call.
    """

    function: Hashable
    outputs: Hashable
    scale: float | str | None
    dropout_p: float
    max_q: int
    max_kv: int
    exact_lengths: bool
    shapes: Hashable
    strides: Hashable
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    devices: tuple[torch.device, torch.device, torch.device]
    alignment: tuple[int, int]
    aliases: tuple[bool, bool, bool]
    captures: Hashable
    block_mask: Hashable
    sequences: Hashable
    pages: Hashable
    has_seed: bool
    requires_grad: Hashable
    is_joined: bool
    warning: str
    environment: Environment


def spec_of_functions(
    tensors: tuple[Tensor, Tensor, Tensor],
    functions: tuple[Fingerprint, Fingerprint],
    extras: Extras,
    allowed: Allowed,
    *,
    needs_all: bool,
) -> CallSpec | None:
    """The spec of an eager call; None for one that must be prepared each time, as its operands are not the tensors that it was given.

    Args:
        tensors: query, key and value; packed ones are [T, H, D].
        functions: the fingerprints of score and mask.
        extras: everything else.
        allowed: backends that the call may use.
        needs_all: gradients of query, key and value, and of these alone, are wanted, whatever the tensors say.
    """
    e, (query, key, value), (score, mask) = extras, tensors, functions
    if e.part is not None or query.is_neg() or key.is_neg() or value.is_neg() or not query.size(-1):
        return None
    if type(e.dropout_p) not in _REAL or not (e.scale is None or type(e.scale) in _REAL):
        return None  # `prepare` says what is wrong with other numbers
    environment = read_environment(allowed, query.device)
    if environment.autocast is not None and not query.dtype == key.dtype == value.dtype == environment.autocast:
        return None
    closed = score.tensors + mask.tensors if score.tensors or mask.tensors else ()
    closed_strides: Hashable = ()
    common: Hashable = ()
    address_bits = 0  # all addresses but those of query, key and value, by bitwise or
    if closed:
        for tensor in closed:
            if tensor.is_neg():
                return None
            address_bits |= tensor.data_ptr()
        closed_strides = tuple([t.stride() for t in closed])
        if score.tensors and mask.tensors:
            common = shared(score, mask)
    blocks = pages = sequences = None
    if e.blocks is not None:
        blocks, address_bits = (e.blocks.shape, e.blocks.stride(), e.blocks.device, e.block_size), address_bits | e.blocks.data_ptr()
    if e.cu_q is None:
        shapes: Hashable = (query.shape, key.shape, value.shape)
        strides: Hashable = (query.stride(), key.stride(), value.stride())
    else:
        if not _OPTIONAL_TENSOR.issuperset(map(type, (e.cu_q, e.cu_kv, e.q_lengths, e.kv_lengths))):
            return None
        sequences = _describe_sequences(e.cu_q, e.cu_kv, e.q_lengths, e.kv_lengths)
        shapes, strides = _describe_packed(query, key, value)
    if e.page_table is not None and e.kv_lengths is not None:
        pages, address_bits = _describe_pages(e.page_table, e.kv_lengths), address_bits | e.page_table.data_ptr() | e.kv_lengths.data_ptr()
    requires_grad: Hashable = needs_all
    if not needs_all and torch.is_grad_enabled():
        requires_grad = (query.requires_grad, key.requires_grad, value.requires_grad, *[t.requires_grad for t in closed])
    o = e.outputs
    spec: CallSpec = make_tuple(CallSpec, (
        (score.structure, *score.numbers, mask.structure, *mask.numbers, common), (o.lse, o.row_max, o.column_sums, o.weights),
        None if e.scale is None else _exact(e.scale), e.dropout_p, e.max_q, e.max_kv, e.exact_lengths, shapes, strides,
        (query.dtype, key.dtype, value.dtype), (query.device, key.device, value.device),
        ((query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15, address_bits & 15), (query is key, key is value, query is value),
        closed_strides, blocks, sequences, pages, e.dropout_p > 0, requires_grad, False, e.lower_right_form, environment,
    ))  # fmt: skip
    return spec


def spec_of_operator(args: Sequence[Any], allowed: Allowed, requires_grad: Hashable = "", *, is_joined: bool = False) -> CallSpec:
    """The spec of the flat arguments of `foci::attention`.

    Args:
        args: the arguments (`foci.operator.op_schema.flatten`).
        allowed: backends that the call may use.
        requires_grad: of a backward, the letter 1 for each gradient that is wanted; of a call outside of the dispatcher its `Needs`.
        is_joined: of a backward, whether its gradients are wanted in rows of one tensor.
    """
    query, key, value, captures, seed, blocks, *lengths, page_table, ints, floats, scale, dropout_p, max_q, max_kv, line, _ = args
    block_mask = None if blocks is None else (blocks.shape, blocks.stride())
    pages = None if page_table is None else _describe_pages(page_table, lengths[3])
    sequences = None
    is_packed = lengths[0] is not None
    if is_packed:
        sequences = _describe_sequences(*lengths)
    shapes, strides = _describe_packed(query, key, value) if is_packed else _describe_dense(query, key, value)
    return CallSpec(
        (line, *ints, *map(_exact, floats)), None, _exact(scale), dropout_p, max_q, max_kv, True, shapes, strides,
        (query.dtype, key.dtype, value.dtype), (query.device, key.device, value.device),
        find_alignment(args), (query is key, key is value, query is value),
        tuple([(t.shape, t.stride(), t.dtype) for t in captures]), block_mask, sequences, pages, seed is not None, requires_grad, is_joined,
        "", read_environment(allowed, query.device),
    )  # fmt: skip


def find_alignment(args: Sequence[Any]) -> tuple[int, int]:
    """`CallSpec.alignment` of the flat arguments of `foci::attention`, of which those up to the page table count."""
    query, key, value, captures, _, blocks, _, _, _, lengths, page_table = args[:11]
    others = 0
    for tensor in captures:
        others |= tensor.data_ptr()
    if blocks is not None:
        others |= blocks.data_ptr()
    if page_table is not None:
        others |= page_table.data_ptr() | lengths.data_ptr()
    return (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15, others & 15


def find_needs(tensors: Sequence[Tensor]) -> Needs:
    """Which of query, key, value and captures, in this order, want a gradient."""
    if not torch.is_grad_enabled():
        return (*NO_NEEDS, (False,) * (len(tensors) - 3))
    return (tensors[0].requires_grad, tensors[1].requires_grad, tensors[2].requires_grad, tuple([t.requires_grad for t in tensors[3:]]))


def _exact(number: float | None) -> float | str | None:
    """The number, or a zero as text: 0.0 == -0.0 would make two calls one."""
    return repr(number) if number == 0 else number


def _describe_dense(query: Tensor, key: Tensor, value: Tensor) -> tuple[Hashable, Hashable]:
    return (query.shape, key.shape, value.shape), (query.stride(), key.stride(), value.stride())


def _describe_packed(query: Tensor, key: Tensor, value: Tensor) -> tuple[Hashable, Hashable]:
    """Shapes and strides of [T, H, D] or [1, H, T, D] for any number of tokens."""
    dims = query.dim()
    if dims == 4:
        (_, q_heads, queries, q_width), (_, kv_heads, keys, k_width), (_, v_heads, values, v_width) = query.shape, key.shape, value.shape
        strides = (query.stride()[1:], key.stride()[1:], value.stride()[1:])
    elif dims == key.dim() == value.dim() == 3:
        (queries, q_heads, q_width), (keys, kv_heads, k_width), (values, v_heads, v_width) = query.shape, key.shape, value.shape
        strides = (query.stride(), key.stride(), value.stride())
    else:
        return _describe_dense(query, key, value)
    counts = (queries > 1 and keys > 1 and values > 1) or (queries, keys, values)
    return (dims, counts, queries == keys, keys == values, q_heads, q_width, kv_heads, k_width, v_heads, v_width), strides


def _describe_sequences(cu_q: Tensor, cu_kv: Tensor | None, q_lengths: Tensor | None, kv_lengths: Tensor | None) -> Hashable:
    """Shapes and dtypes; keys that are packed by the same tensor as queries have None."""
    cu_kv_spec = None if cu_kv is cu_q else _describe(cu_kv)
    if q_lengths is None and kv_lengths is None:
        return _describe(cu_q), cu_kv_spec
    return _describe(cu_q), cu_kv_spec, _describe(q_lengths), _describe(kv_lengths)


def _describe(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def _describe_pages(page_table: Tensor, lengths: Tensor) -> Hashable:
    table = (page_table.shape, page_table.stride(), page_table.dtype, page_table.device)
    return (*table, lengths.shape, lengths.stride(), lengths.dtype, lengths.device)
