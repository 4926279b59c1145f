"""Cache of launch lists: their keys, where they are stored, and how a kernel repeats one.

A launch list ("pass") is built at the first call with a key, and run at this and every later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
from torch import Tensor

from foci.backends.contract import BackwardOfRows, Fixed, ForwardOfRows, Given, Inputs, Offsets, Strides
from foci.backends.gpu.bound_launch import bind_backward, bind_forward, fix
from foci.backends.gpu.launch_list import LaunchList, Template
from foci.backends.gpu.stream_state import current_stream, free_stream, tensor_addresses
from foci.backends.gpu.symbolic_tokens import Tokens
from foci.backends.gpu.tensor_descriptors import without_overlap
from foci.backends.gpu.tile_tables import Sequences, sequences_at
from foci.problem import Geometry, Operands
from foci.weak_cache import WeakCache, tensor_state

if TYPE_CHECKING:
    from foci.backends.gpu.passes import PassBuilder

__all__ = ["KnownPasses", "find_pass", "keep_pass", "source_of_places"]

Key: TypeAlias = tuple[object, ...]

_templates: Final[WeakCache[Template]] = WeakCache(1024)
"""Launch lists of packed calls, for any sequences."""


def source_of_places(sequences: Sequences, tokens: Tokens, captures: Inputs) -> Inputs:
    """The `Source` of starts and lengths."""
    return sequences.tensors


def find_pass(key: Key, sequences: Sequences, tokens: Tokens, captures: Inputs) -> LaunchList | None:
    """Find the launch list of a key: one of these sequences, else one of other sequences bound to these; None if there is none."""
    if sequences.q_start is None:
        return sequences.launch_lists.find(key)
    found = sequences.launch_lists.find((key, *tokens))
    if found is None and (template := _templates.find((key, sequences.form))) is not None:
        found = template.bound(sequences, tokens, captures)
        sequences.launch_lists.add((key, *tokens), (), found)
    return found


def keep_pass(key: Key, sequences: Sequences, read: tuple[Tensor, ...], made: LaunchList) -> None:
    """Store a launch list for `find_pass`; also for other sequences, if it depends on them by their starts and lengths alone."""
    if sequences.q_start is None:
        sequences.launch_lists.add(key, read, made)
        return
    sequences.launch_lists.add((key, *made.tokens), read, made)
    if min(made.tokens) > 1:  # strides of a single token say nothing
        _templates.add((key, sequences.form), (), made.template.unbound())


class KnownPasses:
    """Launch lists of one kernel, under two keys. The geometry of a call is enough to repeat one without checking operands. `pass_key`
    holds everything that determines one, for operands that were checked."""

    def __init__(self, builder: PassBuilder) -> None:
        self.builder = builder
        self.mask_slots, self.wanted, self.learns = builder.mask_slots, builder.wanted, builder.learns
        self.results = 3 if builder.problem.formula.outputs.row_max else 2
        self.gradients = sum(self.wanted)

    def forward_again(self, geometry: Geometry, inputs: Inputs, offsets: Offsets | None, /, others: int = 1) -> list[Tensor] | None:
        """See `foci.backends.contract.Repeating`. `others`: number of inputs that follow the captured tensors."""
        found = self._known_forward(geometry, inputs, offsets, others)
        return None if found is None else found.run(inputs)[: self.results]

    def bind_forward(
        self, geometry: Geometry, rows: Tensor, inputs: Inputs, offsets: Offsets | None, /, *, whole: bool = False, out_alone: bool = False
    ) -> ForwardOfRows | None:
        """See `foci.backends.contract.Binding`."""
        found = self._known_forward(geometry, inputs, offsets, 1)
        return None if found is None else bind_forward(found, rows, inputs, offsets, whole=whole, out_alone=out_alone)

    def _known_forward(self, geometry: Geometry, inputs: Inputs, offsets: Offsets | None, others: int) -> LaunchList | None:
        query, key = inputs[0], inputs[1]
        assert query is not None
        assert key is not None
        stream = free_stream(query)
        if stream is None:
            return None
        sequences, captures = sequences_at(query, offsets, stream), inputs[3:-others]
        read = self._versions(captures) if self.mask_slots else ()
        if read is None:
            return None
        return find_pass((geometry, stream, (), read), sequences, _tokens_at(geometry, query, key), captures)

    def backward_again(self, geometry: Geometry, inputs: Inputs, offsets: Offsets | None, given: Given, /) -> list[Tensor] | None:
        """See `foci.backends.contract.Repeating`."""
        given, found, places = self._known_backward(geometry, inputs, offsets, given)
        return None if found is None else found.run((*inputs, *given), places)[: self.gradients]

    def bind_backward(
        self, geometry: Geometry, rows: Tensor, inputs: Inputs, offsets: Offsets | None, given: Given, /
    ) -> BackwardOfRows | None:
        """See `foci.backends.contract.Binding`."""
        _, found, _ = self._known_backward(geometry, inputs, offsets, given)
        return None if found is None or given.dlse is not None else bind_backward(found, rows, inputs, offsets, given[:3])

    def fix_forward(self, geometry: Geometry, inputs: Inputs, strides: Strides, /) -> Fixed | None:
        """See `foci.backends.contract.Binding`."""
        return self._fixed(self._known_forward(geometry, inputs, None, 1), inputs, strides)

    def fix_backward(self, geometry: Geometry, inputs: Inputs, given: Given, strides: Strides, /) -> Fixed | None:
        """See `foci.backends.contract.Binding`."""
        known, found, _ = self._known_backward(geometry, inputs, None, given)
        return self._fixed(found, inputs, strides) if known is given else None  # a gradient laid out anew is another tensor

    def _fixed(self, found: LaunchList | None, inputs: Inputs, strides: Strides) -> Fixed | None:
        query = inputs[0]
        assert query is not None
        return None if found is None or self.mask_slots else fix(found, query, strides)

    def _known_backward(
        self, geometry: Geometry, inputs: Inputs, offsets: Offsets | None, given: Given
    ) -> tuple[Given, LaunchList | None, list[int | None]]:
        """Return (`given` with a dout that kernels can read, launch list or None, addresses of all tensors)."""
        query, key = inputs[0], inputs[1]
        assert query is not None
        assert key is not None
        stream = None if self.learns or not _is_ready(given) else free_stream(query)
        if stream is None:
            return given, None, []
        if 0 in given.dout.stride():
            given = given._replace(dout=without_overlap(given.dout, given.out))
        read = self._versions(inputs[3:-1]) if self.mask_slots else ()
        tensors = (*inputs, *given)
        places = tensor_addresses(tensors)
        # a saved tensor may have been unpacked as another tensor with the same values, at an unaligned address
        if read is None or not _are_aligned(places):
            return given, None, []
        known = (geometry, stream, _strides_of(inputs, given), read)
        return given, find_pass(known, sequences_at(query, offsets, stream), _tokens_at(geometry, query, key), inputs[3:-1]), places

    def know(self, operands: Operands, sequences: Sequences, found: LaunchList, given: Given | None = None) -> None:
        """Store a launch list by the geometry of the operands, if they have one."""
        geometry = operands.geometry
        if geometry is None:
            return
        if operands.blocks is not None:
            return  # `forward_again` and `backward_again` get no block mask
        count = self.results
        strides: Key = ()
        if given is not None:
            inputs = (operands.query, operands.key, operands.value, *operands.captures, operands.seed)
            count, strides = self.gradients, _strides_of(inputs, given, packed=geometry.packed)
        key = (geometry, current_stream(operands.query), strides, self._versions(operands.captures))
        keep_pass(key, sequences, self.builder.read_by_masks(operands), found.returning(count, packed=geometry.packed))

    def _read(self, captures: Inputs) -> tuple[Tensor, ...]:
        """The tensors that the mask captures."""
        read = (captures[slot] for slot in self.mask_slots)
        return tuple(t for t in read if t is not None)

    def _versions(self, captures: Inputs) -> Key | None:
        """`tensor_state` of the tensors that the mask captures; None if one has no version."""
        read = self._read(captures)
        return None if any(t.is_inference() for t in read) else tuple(map(tensor_state, read))

    def pass_key(self, operands: Operands, packed: Inputs, others: Inputs) -> Key | None:
        """Everything that determines a launch list, except addresses and, in a packed call, the number of tokens of the `packed` tensors.
        None if the launch must not be repeated."""
        query, key, value, blocks = operands.query, operands.key, operands.value, operands.blocks
        stream = free_stream(query)
        if stream is None or (blocks is not None and (operands.geometry is None or self.learns)):
            return None
        tensors = [t for t in (*packed, *others) if t is not None]
        # a tensor in two places of a launch list would stand for both
        if not _are_aligned(tensor_addresses(tensors)) or len(set(map(id, tensors))) < len(tensors) - 3 + len(
            {id(query), id(key), id(value)}
        ):
            return None
        read = self._versions(operands.captures)
        if read is None or (blocks is not None and blocks.is_inference()):
            return None
        if blocks is not None:
            read = (*read, tensor_state(blocks))
        how = _lie if operands.cu_q is None else _lie_packed
        return (
            self, query.get_device(), stream, read, query is key, key is value, query is value, operands.scale, operands.dropout_p,
            operands.ints, operands.floats, operands.max_q, operands.max_kv, operands.geometry is not None and operands.geometry.joined,
            *map(how, packed), *map(_lie, others),
        )  # fmt: skip


def _tokens_at(geometry: Geometry, query: Tensor, key: Tensor) -> Tokens:
    """Queries and keys of a head, of tensors [B, H, S, D], or packed [T, H, D]."""
    return (query.shape[0], key.shape[0]) if geometry.packed else (query.shape[2], key.shape[2])


def _lie(tensor: Tensor | None) -> object:
    """What a launch depends on besides a tensor's address: shape and strides."""
    return None if tensor is None else (tensor.shape, tensor.stride())


def _lie_packed(tensor: Tensor | None) -> object:
    """`_lie` of [1, H, T, D] without T. Row statistics [1, H, T] are contiguous, so nothing is left of them."""
    if tensor is None or tensor.dim() == 3:
        return tensor is None
    return tensor.shape[1], tensor.shape[3], tensor.stride()[1:]


def _strides_of(inputs: Inputs, given: Given, *, packed: bool = False) -> Key:
    """Strides of a backward pass's arguments. `packed`: tensors are [1, H, T, D]; return the strides of [T, H, D]."""
    found = [None if t is None else t.stride() for t in (given.out, given.dout, *inputs)]
    if packed:
        found[:5] = [(s[2], s[1], s[3]) for s in found[:5] if s is not None]
    elif given.out.dim() == 4 and given.out.shape[0] == 1:  # a step along one entry may depend on how many tokens it has
        found[:5] = [s[1:] for s in found[:5] if s is not None]
    return (given.dlse is None, *found)


def _is_ready(given: Given) -> bool:
    """Whether row statistics have the layout and dtype that kernels read."""
    lse, dlse = given.lse, given.dlse
    return lse.is_contiguous() and (dlse is None or (dlse.dtype == torch.float32 and dlse.is_contiguous()))


def _are_aligned(places: Sequence[int | None]) -> bool:
    """Whether all addresses are multiples of 16 bytes, for which kernels are compiled."""
    address = 0
    for place in places:
        address |= place or 0
    return address & 15 == 0
