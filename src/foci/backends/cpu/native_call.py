"""Arguments of native calls: what the calls of one geometry share is packed once, their addresses at each call."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch

from foci import dropout
from foci.backends.contract import Inputs
from foci.problem import Operands, OptionalTensors

__all__ = ["Addresses", "Entry", "NativeCall", "OtherStrides", "Tasks"]

Entry: TypeAlias = Callable[[bytes, bytes, int], int]
"""(`NativeCall.geometry`, `NativeCall.addresses`, number of threads) -> 0, or another number where memory ran out."""
_CALL: Final = struct.Struct(f"<{'8x4q' * 8}40x7q72x2d2q8x4q2q24x")  # an x is a byte of zero: addresses, threads, classes
_ADDRESSES: Final = 18
_NO_STRIDES: Final = (0, 0, 0, 0)
_SERIAL_WORK: Final = 1 << 21  # multiplications below which waking threads costs more than it gains

_threads_after_fork: int | None = None


def _after_fork() -> None:
    # The threads of libgomp's pool do not survive a fork, and it does not notice: a child stays with one.
    global _threads_after_fork
    _threads_after_fork = 1


os.register_at_fork(after_in_child=_after_fork)


class Sizes(NamedTuple):
    """Sizes of a call, in the order of the native structure."""

    batch: int  # entries, or sequences
    q_heads: int
    kv_heads: int
    q_len: int  # queries of an entry, or of the longest sequence
    kv_len: int
    q_tokens: int  # rows of contiguous outputs: queries of an entry, or of all sequences
    kv_tokens: int


class OtherStrides(NamedTuple):
    """Strides of the tensors [B, H, S, D] besides query, key and value, in the order of the native structure; zeros for absent ones."""

    out: Sequence[int]
    grad_out: Sequence[int] = _NO_STRIDES
    grad_query: Sequence[int] = _NO_STRIDES
    grad_key: Sequence[int] = _NO_STRIDES
    grad_value: Sequence[int] = _NO_STRIDES


class Addresses(NamedTuple):
    """Addresses of what a call has besides query, key, value and captured tensors, in the order of the native structure; 0 for what it has
    not. From `lse` on they are of contiguous float32 tensors with one number a row or column.
    """

    out: int
    grad_out: int = 0
    grad_query: int = 0
    grad_key: int = 0
    grad_value: int = 0
    lse: int = 0  # [B, Hq, Sq]
    row_max: int = 0  # [B, Hq, Sq]; receives minus the gradient of lse where grad_column_sums is given
    column_sums: int = 0  # [B, Hq, Skv]
    grad_lse: int = 0
    grad_column_sums: int = 0


class Tasks(NamedTuple):
    """How a backward's tasks are split and grouped: the parts of the keys, then `foci.backends.cpu.sites.Partition.parts`."""

    splits: int = 1
    batch_parts: int = 1
    head_parts: int = 1
    split_parts: int = 1


_ONE_TASK: Final = Tasks()


class NativeCall:
    """Calls whose operands differ in their addresses alone.

    Args:
        operands: of one of them.

    Attributes:
        sizes: of the calls.
    """

    __slots__ = ("_capture_shapes", "_is_small", "_numbers", "_offset_addresses", "_offsets", "_run_time_numbers", "_strides", "sizes")

    def __init__(self, operands: Operands) -> None:
        o = operands
        given = (None,) * 4 if o.cu_q is None else (o.cu_q, o.cu_kv, o.q_lengths, o.kv_lengths)
        # copies: the caller's may change
        self._offsets = [None if t is None else t.to(torch.int64, copy=True, memory_format=torch.contiguous_format) for t in given]
        self._offset_addresses = [0 if t is None else t.data_ptr() for t in self._offsets]
        self.sizes = _find_sizes(o)
        batch, q_heads, _, q_len, kv_len, _, _ = self.sizes
        self._is_small = batch * q_heads * q_len * kv_len * o.query.shape[3] < _SERIAL_WORK
        captures = o.captures if o.blocks is None else (*o.captures, o.blocks)
        self._capture_shapes = [(*(t.shape or (1,)), *(t.stride() or (0,))) for t in captures]
        keep_scale, threshold = 1.0, 0
        if o.dropout_p:
            keep_scale, threshold = 1.0 / (1.0 - o.dropout_p) if o.dropout_p < 1 else 0.0, dropout.threshold(o.dropout_p)
        self._numbers = (o.scale, keep_scale, threshold, int(o.dropout_p >= 1))
        self._run_time_numbers = (o.ints, o.floats)
        self._strides = [*o.query.stride(), *o.key.stride(), *o.value.stride()]

    def has_gaps(self, *, of_keys: bool) -> bool:
        """Whether tokens of a jagged batch belong to no sequence, so that no kernel writes them."""
        offsets = self._offsets[of_keys]
        if offsets is None:
            return False
        return self._offsets[2 + of_keys] is not None or int(offsets[0]) != 0 or self.ends_early(of_keys=of_keys)

    def ends_early(self, *, of_keys: bool) -> bool:
        """Whether the last sequence of a jagged batch ends before the last token."""
        offsets = self._offsets[of_keys]
        return offsets is not None and int(offsets[-1]) != (self.sizes.kv_tokens if of_keys else self.sizes.q_tokens)

    def geometry(self, others: OtherStrides, tasks: Tasks = _ONE_TASK) -> bytes:
        """Pack the `foci::Call`, which has no addresses, and what lies behind it. `tasks` are a backward's."""
        strides = (*self._strides, *itertools.chain.from_iterable(others))
        ints, floats = self._run_time_numbers
        capture_numbers = sum(1 + len(shape) for shape in self._capture_shapes)
        packed = _CALL.pack(*strides, *self.sizes, *self._numbers, *tasks, capture_numbers, len(ints))
        return packed + struct.pack(f"<{len(ints)}q{len(floats)}d", *ints, *floats)

    def run(
        self, entry: Entry, geometry: bytes, tensors: Inputs, optional: OptionalTensors, others: Addresses, gradients: Sequence[int] = ()
    ) -> None:
        """Run native code.

        Args:
            entry: the code.
            geometry: from `geometry`.
            tensors, optional, others, gradients: as `addresses` takes them.

        Raises:
            MemoryError: if it cannot allocate its working memory.
        """
        threads = 1 if self._is_small else _threads_after_fork or torch.get_num_threads()
        if entry(geometry, self.addresses(tensors, optional, others, gradients), threads):
            raise MemoryError("the CPU backend could not allocate its working memory")

    def addresses(self, tensors: Inputs, optional: OptionalTensors, others: Addresses, gradients: Sequence[int] = ()) -> bytes:
        """Pack the `foci::Addresses` of a call, and what lies behind them.

        Args:
            tensors: query, key, value and captured tensors.
            optional: seed and classes of blocks. Offsets are those of `operands`.
            others: the addresses of the other tensors.
            gradients: four numbers for each `CaptureDerivative` of a backward, see `foci::Call::gradients`.
        """
        query, key, value, *captures = tensors
        assert query is not None
        assert key is not None
        assert value is not None
        seed, blocks = optional.seed, optional.blocks
        numbers: list[int] = []
        if self._capture_shapes:
            if blocks is not None:
                captures.append(blocks)
            for tensor, shape in zip(captures, self._capture_shapes, strict=True):
                assert tensor is not None
                numbers += (tensor.data_ptr(), *shape)
        count = _ADDRESSES + len(numbers) + len(gradients)
        return struct.pack(
            f"<{count}q", query.data_ptr(), key.data_ptr(), value.data_ptr(), *others, *self._offset_addresses,
            0 if seed is None else seed.data_ptr(), *numbers, *gradients,
        )  # fmt: skip


def _find_sizes(o: Operands) -> Sizes:
    batch, q_heads, q_tokens, _ = o.query.shape
    kv_heads, kv_tokens = o.key.shape[1:3]
    q_len, kv_len = q_tokens, kv_tokens
    if o.cu_q is not None:
        batch, q_len, kv_len = o.cu_q.shape[0] - 1, o.max_q, o.max_kv
    return Sizes(batch, q_heads, kv_heads, q_len, kv_len, q_tokens, kv_tokens)
