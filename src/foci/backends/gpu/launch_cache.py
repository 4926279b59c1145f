"""Launch lists of a program: their keys, and how a kernel finds, binds and repeats one.

The launch list of a pass is built by the first call of a program, and run by this and every later one. It lives as long as the program, the
sequences and the tensors whose values it depends on.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from foci.backends.contract import BackwardOfRows, ForwardOfRows, Given, Inputs, Offsets
from foci.backends.gpu.bound_launch import bind_backward, bind_forward
from foci.backends.gpu.launch_list import LaunchList
from foci.backends.gpu.stream_state import free_stream, tensor_addresses
from foci.backends.gpu.symbolic_tokens import Tokens
from foci.backends.gpu.tensor_descriptors import without_overlap
from foci.backends.gpu.tile_tables import Sequences, find_sequences, offset_tensors, offsets_state
from foci.problem import Operands, OptionalTensors, Program
from foci.weak_cache import tensor_state

if TYPE_CHECKING:
    from foci.backends.gpu.passes import PassBuilder

__all__ = ["RepeatablePasses", "find_pass", "keep_pass", "source_of_places"]

Key: TypeAlias = tuple[object, ...]


def source_of_places(sequences: Sequences, tokens: Tokens, captures: Inputs) -> Inputs:
    """The `Source` of starts and lengths."""
    return sequences.tensors


def find_pass(key: Key, stream: int, program: Program, tensors: Inputs, offsets: Offsets | None) -> LaunchList | None:
    """Find the launch list of a program by its key: one of these sequences, else one of other sequences bound to these; None if there is
    none."""
    if offsets is None:
        return program.launches.find(key)
    tokens, state = _count(program, tensors), offsets_state(offsets)
    known = (key, state, *tokens)
    launch_list = None if state is None else program.launches.find(known)
    if launch_list is None:
        sequences = find_sequences(offsets, state, stream)
        template = program.launches.find((key, sequences.form))
        if template is not None:
            launch_list = template.bound(sequences, tokens, tensors[3:])
            if state is not None:
                program.launches.add(known, (sequences, *offset_tensors(offsets)), launch_list)
    return launch_list


def keep_pass(
    key: Key, sequences: Sequences, program: Program, offsets: Offsets | None, read: tuple[Tensor, ...], launch_list: LaunchList
) -> None:
    """Store a launch list for `find_pass`; also for other sequences, if it depends on them by their starts and lengths alone."""
    if offsets is None:
        program.launches.add(key, read, launch_list)
        return
    state = offsets_state(offsets)
    if state is not None:
        program.launches.add((key, state, *launch_list.tokens), (sequences, *offset_tensors(offsets), *read), launch_list)
    if min(launch_list.tokens) > 1:  # strides of a single token say nothing
        program.launches.add((key, sequences.form), (), launch_list.template.unbound())


class RepeatablePasses:
    """Repeats the passes of one kernel. A launch list is kept for the program of a call, and by what may differ between two calls of one
    program: the stream, values that masks read, and how a backward's arguments lie."""

    def __init__(self, builder: PassBuilder) -> None:
        self.builder = builder
        self.mask_slots, self.wanted, self.needs_capture_grads = builder.mask_slots, builder.wanted, builder.needs_capture_grads
        self.results = 3 if builder.problem.formula.outputs.row_max else 2
        self.gradients = sum(self.wanted)

    def launch_forward(self, program: Program, tensors: Inputs, optional: OptionalTensors, /) -> list[Tensor] | None:
        """See `foci.backends.contract.Kernel`."""
        launch_list = self._find_forward(program, tensors, optional)
        return None if launch_list is None else launch_list.run(_forward_inputs(tensors, optional))

    def bind_forward(
        self, program: Program, rows: Tensor, tensors: Inputs, optional: OptionalTensors, /, *, no_padding: bool = False,
        out_alone: bool = False,
    ) -> ForwardOfRows | None:  # fmt: skip
        """See `foci.backends.contract.Kernel`."""
        launch_list = self._find_forward(program, tensors, optional)
        if launch_list is None:
            return None
        return bind_forward(launch_list, rows, tensors, optional.offsets, no_padding=no_padding, out_alone=out_alone)

    def _find_forward(self, program: Program, tensors: Inputs, optional: OptionalTensors) -> LaunchList | None:
        query = tensors[0]
        assert query is not None
        stream = free_stream(query)
        read = None if stream is None else self._states(tensors[3:], optional.blocks)
        if stream is None or read is None:
            return None
        return find_pass((self, stream, (), read), stream, program, tensors, optional.offsets)

    def launch_backward(self, program: Program, tensors: Inputs, optional: OptionalTensors, bwd_args: Given, /) -> list[Tensor] | None:
        """See `foci.backends.contract.Kernel`."""
        bwd_args, launch_list, addresses = self._find_backward(program, tensors, optional, bwd_args)
        return None if launch_list is None else launch_list.run((*tensors, optional.seed, *bwd_args), addresses)

    def bind_backward(
        self, program: Program, rows: Tensor, tensors: Inputs, optional: OptionalTensors, bwd_args: Given, /
    ) -> BackwardOfRows | None:
        """See `foci.backends.contract.Kernel`."""
        _, launch_list, _ = self._find_backward(program, tensors, optional, bwd_args)
        return (
            None
            if launch_list is None or bwd_args.dlse is not None
            else bind_backward(launch_list, rows, tensors, optional.offsets, bwd_args[:3])
        )

    def _find_backward(
        self, program: Program, tensors: Inputs, optional: OptionalTensors, bwd_args: Given
    ) -> tuple[Given, LaunchList | None, list[int | None]]:
        """Return (`bwd_args` with a dout that kernels can read, launch list or None, addresses of all tensors)."""
        query = tensors[0]
        assert query is not None
        stream = free_stream(query) if _is_ready(bwd_args) else None
        read = None if stream is None else self._states(tensors[3:], optional.blocks)
        if stream is None or read is None:
            return bwd_args, None, []
        if 0 in bwd_args.dout.stride():
            bwd_args = bwd_args._replace(dout=without_overlap(bwd_args.dout, bwd_args.out))
        addresses = tensor_addresses((*tensors, optional.seed, *bwd_args))
        # a saved tensor may have been unpacked as another tensor with the same values, at an unaligned address
        if not _are_aligned(addresses):
            return bwd_args, None, []
        key = (self, stream, _read_strides(tensors, bwd_args, is_dense=optional.cu_q is None), read)
        return bwd_args, find_pass(key, stream, program, tensors, optional.offsets), addresses

    def pass_key(self, operands: Operands, bwd_args: Given | None = None) -> Key | None:
        """The key by which the launch list of a pass is kept; None if it must not be repeated, or the call has no program.

        Args:
            operands: the call.
            bwd_args: a backward's other arguments.
        """
        o, program = operands, operands.program
        stream = None if program is None else free_stream(o.query)
        read = None if stream is None else self._states(o.captures, o.blocks)
        if program is None or read is None:
            return None
        tensors = (o.query, o.key, o.value, *o.captures)
        every = [t for t in (*tensors, o.seed, o.kv_lengths, o.page_table, *(bwd_args or ())) if t is not None]
        # a tensor in two places of a launch list would stand for both
        if not _are_aligned(tensor_addresses(every)) or len({*map(id, every)}) < len(every) - 3 + len({*map(id, tensors[:3])}):
            return None
        if bwd_args is None:
            return self, stream, (), read
        return self, stream, _read_strides(tensors, bwd_args, is_dense=o.cu_q is None, packed=program.packed), read

    def keep(self, key: Key, operands: Operands, sequences: Sequences, built: LaunchList, count: int) -> None:
        """Keep the launch list of a pass, which returns the first `count` of the tensors that it allocates."""
        program = operands.program
        assert program is not None, "a call without a program has no key"
        offsets = operands.optional.offsets
        keep_pass(key, sequences, program, offsets, self.builder.read_by_masks(operands), built.returning(count, packed=program.packed))

    def _states(self, captures: Inputs, blocks: Tensor | None) -> Key | None:
        """`tensor_state` of the tensors whose values decide which tiles are visited; None if one has no version."""
        if blocks is None and not self.mask_slots:
            return ()
        states = []
        for tensor in (*[captures[slot] for slot in self.mask_slots], blocks):
            if tensor is None:
                continue
            if tensor.is_inference():
                return None
            states.append(tensor_state(tensor))
        return tuple(states)


def _forward_inputs(tensors: Inputs, optional: OptionalTensors) -> Inputs:
    """Inputs of a forward's launches, in order; lengths and page table where keys are paged."""
    if optional.page_table is None:
        return (*tensors, optional.seed)
    return (*tensors, optional.seed, optional.kv_lengths, optional.page_table)


def _count(program: Program, tensors: Inputs) -> Tokens:
    """Queries and keys of a head, of tensors [B, H, S, D], or packed [T, H, D]."""
    query, key = tensors[:2]
    assert query is not None
    assert key is not None
    return (query.size(0), key.size(0)) if program.packed else (query.size(2), key.size(2))


def _read_strides(tensors: Inputs, bwd_args: Given, *, is_dense: bool, packed: bool = False) -> Key:
    """Strides of a backward pass's arguments. `packed`: tensors are [1, H, T, D]; return the strides of [T, H, D]."""
    strides = [None if t is None else t.stride() for t in (bwd_args.out, bwd_args.dout, *tensors)]
    if packed:
        strides[:5] = [(s[2], s[1], s[3]) for s in strides[:5] if s is not None]
    elif not is_dense and bwd_args.out.dim() == 4:  # [1, H, T, D]: a step along one entry may depend on how many tokens it has
        strides[:5] = [s[1:] for s in strides[:5] if s is not None]
    return (bwd_args.dlse is None, *strides)


def _is_ready(bwd_args: Given) -> bool:
    """Whether row statistics have the layout and dtype that kernels read."""
    lse, dlse = bwd_args.lse, bwd_args.dlse
    return lse.is_contiguous() and (dlse is None or (dlse.dtype == torch.float32 and dlse.is_contiguous()))


def _are_aligned(places: Sequence[int | None]) -> bool:
    """Whether all addresses are multiples of 16 bytes, for which kernels are compiled."""
    return functools.reduce(operator.or_, filter(None, places), 0) & 15 == 0
