"""Batches without their padding: which positions hold tokens, found once, and the way there and back."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from foci.compat.nested import (
    KINDS,
    LearnedNested,
    inner_values,
    known_extremes,
    length_extremes,
    nested_like,
    ragged_dim,
    strided_sizes,
)  # fmt: skip
from foci.compat.torch import disabled_torch_function_subclass, is_watched
from foci.nn.padding_mask_scan import find_tokens
from foci.weak_cache import tensor_state

__all__ = [
    "Packing",
    "Pair",
    "append_rows",
    "check_same_sequences",
    "clear_padding",
    "is_jagged",
    "is_nested",
    "is_readable",
    "pack_batch",
    "pack_mask",
    "pack_nested",
    "pack_pair",
    "pack_whole",
    "restore_batch",
    "round_bound",
]


class _Gather(torch.autograd.Function):
    """Rows of a tensor, each at most once; the backward pass writes them back instead of adding."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.total = rows.shape[0]
        return rows.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return _scattered(grad, indices, ctx.total), None


class _Nest(torch.autograd.Function):
    """Tokens as a NestedTensor with the sequences of another: torch's own view passes the dispatcher three times."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, like: tuple[Any]) -> Tensor:
        """`like` is in a tuple, as autograd asks a NestedTensor among its arguments several questions."""
        ctx.set_materialize_grads(False)  # torch has no zeros like a NestedTensor whose lengths are symbols
        return nested_like(tokens, like[0], LearnedNested)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        return (grad.values() if torch.is_grad_enabled() else inner_values(grad)), None  # only values() is differentiable


_nest: Final[Any] = super(torch.autograd.Function, _Nest).apply
"""`_Nest.apply` less what serves torch.func alone, which `is_readable` excludes."""


def _scattered(rows: Tensor, indices: Tensor, total: int) -> Tensor:
    return rows.new_zeros((total, *rows.shape[1:])).index_copy_(0, indices, rows)


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the tokens of a padded batch are. Modules of `foci.nn` take it, and hand it on, in place of a padding mask.

    Made of offsets, the longest sequence and the shape alone, it says where sequences lie among tokens that are packed already;
    `padded` pads these, as `pack` and `pad` are for a batch whose every row is a token.

    Attributes:
        offsets: int64 [B + 1], first token of each sequence among all tokens, and the end of the last.
        longest: tokens of the longest sequence.
        shape: (B, S), the padded batch.
        indices: int64 [T], row of each token in the padded tensor with its first two dims merged; None if every row is one.
        columns: int64 [T], position of each token in its padded row; None if that is its place within the sequence.
        starts: int64 [B], first position of each row, where tokens lie side by side; else None.
        bias: [T], what a floating padding mask adds to each key's scores; None for nothing.
        nested: the NestedTensor that the batch was, None for a padded tensor.
        whole: the same without gaps between its sequences, where it is of jagged layout.
        values: the tokens of that.
        batch_first: whether the padded tensor is [B, S, E], else [S, B, E].

    Example:
        >>> import torch, foci.nn
        >>> padding = torch.tensor([[False, False, True], [False, True, True]])
        >>> packing = foci.nn.Packing.from_mask(padding)
        >>> packing.pack(torch.arange(6.0).view(2, 3, 1)).flatten()
        tensor([0., 1., 3.])
        >>> packing.pad(torch.ones(3, 1))[..., 0]
        tensor([[1., 1., 0.],
                [1., 0., 0.]])
    """

    offsets: Tensor
    longest: int
    shape: tuple[int, int]
    indices: Tensor | None = None
    columns: Tensor | None = None
    starts: Tensor | None = None
    bias: Tensor | None = None
    nested: Tensor | None = None
    whole: Tensor | None = None
    values: Tensor | None = None
    batch_first: bool = True
    _counted: tuple[int, tuple[int, int, int]] | None = field(default=None, init=False, repr=False)
    """How many tokens the mask has that it was made from, and the state of the offsets that say so; no copy with other offsets has it."""

    @staticmethod
    def from_mask(padding: Tensor, *, batch_first: bool = True) -> Packing:
        """The packing that an encoder finds for a padding mask, to be found once for several modules. Reads the device once.

        Args:
            padding: [B, S], bool, true where there is padding; or floating, -inf where there is padding, added to the scores of
                the key elsewhere.
            batch_first: whether the tensors to pack are [B, S, E], else [S, B, E].

        Raises:
            TypeError: for something that is no tensor.
            AssertionError: for a mask of another dtype or number of dims.
        """
        if not isinstance(padding, Tensor):
            raise TypeError(f"padding must be a tensor; got {type(padding).__name__}")
        if padding.dim() != 2 or not (padding.dtype == torch.bool or padding.is_floating_point()):
            raise AssertionError(f"padding must be bool or floating, [batch, length]; got {padding.dtype}, {list(padding.shape)}")
        packing = pack_mask(padding, batch_first=batch_first)
        return pack_whole(padding if batch_first else padding.T, batch_first=batch_first) if packing is None else packing

    def is_whole(self, tokens: int) -> bool:
        """Whether so many rows are known to be the tokens of its sequences, no more and no less."""
        return self._counted is not None and self._counted == (tokens, tensor_state(self.offsets))

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.shape[0]

    @functools.cached_property
    def lengths(self) -> Tensor:
        """int64 [B], tokens of each sequence."""
        return self.offsets.diff()

    def sequence_ids(self, tokens: int) -> Tensor:
        """int64 [T], the sequence of each token; B for those behind the last."""
        ends = self.offsets[1:]
        return torch.searchsorted(ends, torch.arange(tokens, device=ends.device, dtype=ends.dtype), right=True)

    def positions(self, tokens: int) -> Tensor:
        """int64 [T], position of each token in its padded row."""
        if self.columns is not None:
            return self.columns
        return torch.arange(tokens, device=self.offsets.device) - self.offsets[self.sequence_ids(tokens)]

    def pack(self, padded: Tensor) -> Tensor:
        """The tokens of a tensor of this batch: [T, ...] of [B, S, ...], of [S, B, ...] or of a NestedTensor."""
        if self.values is not None and padded is self.nested:
            return self.values
        if is_nested(padded):
            return _nested_values(padded)
        sizes = [*self.shape] if self.batch_first else [*self.shape][::-1]
        if [*padded.shape[:2]] != sizes:
            raise ValueError(f"the batch to pack must be {sizes} and features; got {[*padded.shape]}")
        rows = padded.flatten(0, 1)
        if self.indices is None:
            return rows
        if not (rows.requires_grad and torch.is_grad_enabled()):
            return rows.index_select(0, self.indices)
        gathered: Tensor = _Gather.apply(rows, self.indices)  # type: ignore[no-untyped-call]
        return gathered

    def pad(self, tokens: Tensor) -> Tensor:
        """The inverse of `pack`: zeros where no token is, or a NestedTensor if the batch was one."""
        if self.nested is not None:
            return self._nest(tokens)
        rows = self.shape[0] * self.shape[1] if self.indices is None else self.indices.shape[0]
        if tokens.shape[0] != rows:
            raise ValueError(f"tokens to pad must be {rows} rows, of {self.batch} sequences; got {list(tokens.shape)}")
        if self.indices is not None:
            tokens = _scattered(tokens, self.indices, self.shape[0] * self.shape[1])
        return tokens.view(*(self.shape if self.batch_first else self.shape[::-1]), *tokens.shape[1:])

    def places(self, tokens: int) -> Tensor:
        """int64 [T], row of each token in [B * S] padded ones, whatever batch_first; B * S for those behind the last sequence."""
        length = self.shape[1]
        return (self.sequence_ids(tokens) * length + self.positions(tokens)).clamp_max(self.batch * length)

    def spread(self, tokens: Tensor) -> Tensor:
        """[B, S, ...] of [T, ...], each where `positions` says, whatever the batch was; zeros elsewhere."""
        rows = self.batch * self.shape[1]
        return torch.unflatten(_scattered(tokens, self.places(tokens.shape[0]), rows + 1)[:rows], 0, self.shape)

    def gathered(self, spread: Tensor, tokens: int) -> Tensor:
        """The inverse of `spread`; zeros for tokens behind the last sequence."""
        rows = spread.flatten(0, 1)
        return torch.cat((rows, rows.new_zeros((1, *rows.shape[1:])))).index_select(0, self.places(tokens))

    def padded(self, tokens: Tensor) -> Tensor:
        """[B, longest, ...] of [T, ...], zeros behind the end of each sequence."""
        ids = self.sequence_ids(tokens.shape[0])
        places = torch.arange(tokens.shape[0], device=tokens.device) - self.offsets[ids] + ids * self.longest
        return torch.unflatten(_scattered(tokens, places, self.batch * self.longest), 0, (self.batch, self.longest))

    def within(self, length: int) -> Packing:
        """Return the packing, of sequences that are no longer than this, if it is not known how long they are."""
        if self.whole is None or known_extremes(self.whole)[0] is not None:
            return self
        return Packing(self.offsets, length, (self.shape[0], length), nested=self.nested, whole=self.whole, values=self.values)

    def _nest(self, tokens: Tensor) -> Tensor:
        like: Any = self.whole
        if like is None:
            parts = torch.split(tokens, self.lengths.tolist())
            return torch.nested.as_nested_tensor(list(parts), layout=torch.strided)
        if is_readable(tokens):
            needs_grad = torch.is_grad_enabled() and tokens.requires_grad
            nested: Tensor = _nest(tokens, (like,)) if needs_grad else nested_like(tokens, like)
            return nested
        longest, shortest = known_extremes(like)
        return torch.nested.nested_tensor_from_jagged(tokens, offsets=self.offsets, min_seqlen=shortest, max_seqlen=longest)


def is_jagged(tensor: Tensor) -> bool:
    """Whether it is a NestedTensor of jagged layout: by its type, as every question put to one goes through Python."""
    if torch.compiler.is_compiling():
        return tensor.is_nested and tensor.layout == torch.jagged
    return type(tensor) in KINDS


def is_nested(tensor: Tensor) -> bool:
    """Whether it is a NestedTensor of any layout."""
    return is_jagged(tensor) or tensor.is_nested


class Pair(NamedTuple):
    """Packings of queries and of keys, where they differ."""

    query: Packing
    key: Packing


def is_readable(tensor: Tensor) -> bool:
    """Whether Python may look at the values: not while a graph is made, a CUDA graph captured or a transform applied."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type != "meta"
        and not is_watched()
        and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def pack_mask(padding: Tensor, *, batch_first: bool) -> Packing | None:
    """The packing of a padding mask; None if it masks nothing and adds nothing. Reads the device once.

    Args:
        padding: [B, S], bool, true where there is padding; or floating, -inf where there is padding, added to the scores
            of the key elsewhere.
        batch_first: whether the tensors to pack are [B, S, E], else [S, B, E].
    """
    places = find_tokens(padding, batch_first=batch_first)
    if places is None:
        return None
    offsets, longest, indices, columns, starts, bias = places
    batch, length = padding.shape
    packing = Packing(offsets, longest, (batch, length), indices, columns, starts, bias, batch_first=batch_first)
    if not offsets.is_inference():
        object.__setattr__(packing, "_counted", (indices.shape[0], tensor_state(offsets)))
    return packing


def pack_whole(tensor: Tensor, *, batch_first: bool) -> Packing:
    """The packing of a batch [B, S, ...] or [S, B, ...] without padding."""
    batch, length = tensor.shape[:2] if batch_first else (tensor.shape[1], tensor.shape[0])
    offsets = torch.arange(batch + 1, device=tensor.device) * length
    indices = None
    if not batch_first:
        indices = torch.arange(batch * length, device=tensor.device).view(length, batch).T.flatten()
    return Packing(offsets, length, (batch, length), indices, batch_first=batch_first)


def pack_nested(tensor: Tensor) -> Packing:
    """The packing of a NestedTensor [B, ragged, E] of jagged or strided layout.

    Raises:
        ValueError: for another number of dims, or another ragged dim.
    """
    jagged, nested = is_jagged(tensor), cast(Any, tensor)
    dims = inner_values(nested).dim() + 1 if type(tensor) in KINDS and not torch.compiler.is_compiling() else nested.dim()
    if dims != 3 or (jagged and ragged_dim(nested) != 1):
        raise ValueError(f"a nested input must be [batch, ragged length, features]; got {dims} dimensions")
    if not jagged:
        sizes = strided_sizes(tensor)[:, 0]
        offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(tensor.device)
        longest = int(sizes.max()) if sizes.numel() else 0
        return Packing(offsets, longest, (tensor.size(0), longest), nested=tensor)
    contiguous: Any = _without_gaps(tensor)
    values, offsets = _values(contiguous), contiguous.offsets()
    if is_readable(values):
        known = length_extremes(contiguous)[0]  # now both are known to contiguous, and to what is nested like it
    else:
        known = known_extremes(contiguous)[0]
    longest = values.shape[0] if known is None else known  # the number of all tokens is a bound
    return Packing(offsets, longest, (offsets.shape[0] - 1, longest), nested=tensor, whole=contiguous, values=values)


def check_same_sequences(key: Tensor, value: Tensor, packing: Packing) -> None:
    """Checks that a value has the sequences of a key that is packed; not where they lie in tensors of their own on a GPU: nobody waits to
    know.

    Raises:
        ValueError: for others, or a dense one beside a nested one.
    """
    if is_nested(key) != is_nested(value):
        nested, dense = ("key", "value") if is_nested(key) else ("value", "key")
        raise ValueError(f"Expected key and value to be nested together; got a nested {nested} and a dense {dense}")
    if not is_nested(key):
        if key.shape[:2] != value.shape[:2]:
            raise AssertionError(f"key's sequence and batch dims {key.shape[:2]} do not match value's {value.shape[:2]}")
        return
    other = pack_nested(value)
    if packing.offsets is other.offsets or not (is_readable(packing.offsets) and packing.offsets.device.type == "cpu"):
        return
    if not torch.equal(packing.offsets, other.offsets):
        lengths = [p.lengths.tolist() for p in (packing, other)]
        raise ValueError(f"key and value must have the same sequences; got lengths {lengths[0]} and {lengths[1]}")


def _without_gaps(jagged: Any) -> Any:
    return jagged.contiguous() if jagged.lengths() is not None else jagged


def _values(nested: Any) -> Tensor:
    """Return the tokens; `values` takes a while, and only autograd needs it."""
    eager = not torch.compiler.is_compiling() and is_readable(inner_values(nested))
    values: Tensor = inner_values(nested) if eager and not (torch.is_grad_enabled() and _needs_grad(nested)) else nested.values()
    return values


def _needs_grad(nested: Tensor) -> bool:
    with disabled_torch_function_subclass():
        return nested.requires_grad


def _nested_values(tensor: Tensor) -> Tensor:
    return _values(_without_gaps(tensor)) if is_jagged(tensor) else torch.cat(tensor.unbind())


def clear_padding(tensor: Tensor, padding: Tensor | None, *, batch_first: bool) -> Tensor:
    """Zeros where a padding mask [B, S] (or [S], for [S, E]) says that there is padding."""
    if padding is None:
        return tensor
    where = padding == -torch.inf if padding.is_floating_point() else padding
    if where.dim() == 2 and not batch_first:
        where = where.T
    return tensor.masked_fill(where.unsqueeze(-1), 0.0)


def pack_batch(x: Tensor, padding: Any, *, batch_first: bool, may_pack: bool = True) -> tuple[Tensor, Any]:
    """A batch as layers compute with it, and what stands for its padding mask.

    Tokens [T, E] with their `Packing` where values may be read and there is padding to leave out; the batch as it is, with
    None, where there is none; else the batch with zeros for padding, with the mask.

    Args:
        x: [B, S, E], [S, B, E], [S, E], a NestedTensor [B, ragged, E] or, with a `Packing`, tokens [T, E].
        padding: None, a bool or floating mask [B, S] or [S], or the `Packing` of tokens.
        batch_first: whether a padded batch is [B, S, E].
        may_pack: false leaves x padded, or nested.

    Raises:
        ValueError: for a nested x with a mask, or a `Packing` where tokens are not taken.
        AssertionError: for a mask of another shape, in torch's words.
    """
    if isinstance(padding, Packing):
        if x.dim() != 2 or not may_pack:
            padded = "enable_nested_tensor=False, layers with methods or an attention of their own and a cache take padded batches only"
            why = padded if x.dim() == 2 else f"got {x.dim()} dimensions"
            raise ValueError(f"a Packing comes with tokens [tokens, features] and layers that take them; {why}")
        if not isinstance(padding.offsets, Tensor) or padding.offsets.shape[0] != padding.batch + 1:
            got = list(padding.offsets.shape) if isinstance(padding.offsets, Tensor) else type(padding.offsets).__name__
            raise ValueError(f"offsets of a Packing of {padding.batch} sequences must be a tensor [{padding.batch + 1}]; got {got}")
        return x, padding
    if is_nested(x):
        if padding is not None:
            raise ValueError("a nested input takes no padding mask: its offsets say where each sequence ends")
        if not may_pack:
            return x, None
        packing = pack_nested(x)
        return packing.pack(x), packing
    if padding is None:
        return x, None
    sizes = x.shape[: x.dim() - 1] if batch_first or x.dim() == 2 else (x.shape[1], x.shape[0])
    if tuple(padding.shape) != tuple(sizes):
        raise AssertionError(f"Expected key_padded_mask.shape to be {tuple(sizes)}, but got {tuple(padding.shape)}")
    if x.dim() == 3 and is_readable(padding) and is_readable(x):
        packed = pack_mask(padding, batch_first=batch_first)
        if packed is None:
            return x, None
        if may_pack:
            return packed.pack(x), packed
    return clear_padding(x, padding, batch_first=batch_first), padding


def restore_batch(x: Tensor, padding: Any, *, batch_first: bool, input_padding: Any = None) -> Tensor:
    """Undoes `pack_batch`: the batch in its first layout, with zeros for padding. Tokens stay tokens where `input_padding` is a packing."""
    if isinstance(input_padding, Packing):
        return x
    if isinstance(padding, Packing):
        return padding.pad(x)
    return clear_padding(x, padding, batch_first=batch_first)


def pack_pair(target: tuple[Tensor, Any], memory: tuple[Tensor, Any], *, batch_first: bool) -> tuple[tuple[Tensor, Any], ...]:
    """Both with a `Packing`, or neither: one without padding is packed whole beside one that is packed."""
    packed = [isinstance(padding, Packing) for _, padding in (target, memory)]
    if packed[0] == packed[1]:
        return target, memory

    def pack_dense(x: Tensor) -> tuple[Tensor, Packing]:
        packing = pack_whole(x, batch_first=batch_first)
        return packing.pack(x), packing

    return (target, pack_dense(memory[0])) if packed[0] else (pack_dense(target[0]), memory)


def round_bound(longest: int) -> int:
    """A length, or somewhat more: batches whose longest sequences differ by little have one bound, and so one known call."""
    step = max(64, 1 << max(0, longest - 1).bit_length() >> 4)
    return -(-longest // step) * step


def append_rows(tokens: Tensor, extra: Tensor, packing: Packing) -> Tensor:
    """[T, H, D] with the same [n, H, D] behind each sequence."""
    count, total = extra.shape[0], tokens.shape[0]
    places = torch.arange(total, device=tokens.device) + count * packing.sequence_ids(total)
    ends = packing.offsets[1:, None] + count * torch.arange(packing.batch, device=tokens.device)[:, None]
    behind = (ends + torch.arange(count, device=tokens.device)).flatten()
    both = torch.cat((tokens, extra.repeat(packing.batch, 1, 1)))
    order = torch.empty_like(torch.cat((places, behind))).scatter_(
        0, torch.cat((places, behind)), torch.arange(both.shape[0], device=both.device)
    )
    return both.index_select(0, order)
