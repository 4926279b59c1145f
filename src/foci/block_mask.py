"""`BlockMask`: which blocks of keys each block of queries needs, as `torch.nn.attention.flex_attention` has it."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from foci import cache_check
from foci.blocks import EMPTY, FULL, PARTIAL, classes_of_lists, to_lists, transpose_lists
from foci.compat.cuda import is_capturing, raw_stream
from foci.compat.torch import is_watched
from foci.errors import ArgumentError
from foci.weak_cache import cache_derived, find_derived, tensor_state

__all__ = ["DEFAULT_BLOCK", "BlockMask", "MaskMod", "as_block", "block_classes", "check_is_block_mask", "from_classes", "noop_mask"]

MaskMod = Callable[..., Any]
Index = int | slice | Tensor

DEFAULT_BLOCK: Final = 128


def noop_mask(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
    """The mask_mod that lets everything attend.

    Example:
        >>> noop_mask(*torch.zeros(4, dtype=torch.int32))
        tensor(True)
    """
    return torch.ones_like(token_q, dtype=torch.bool)


class BlockMask:
    """Which blocks of keys each block of queries needs, as lists, and the mask_mod that decides within partial ones.

    The storage is that of torch's class of the same name: for each block row, `kv_num_blocks` says how many partial
    blocks it has and `kv_indices` which; `full_kv_*` the same for blocks that need no mask_mod; `q_*` and `full_q_*`
    list, for each block column, its rows.

    Args:
        seq_lengths: query and key length.
        kv_num_blocks: int32 [B, Hq, rows].
        kv_indices: int32 [B, Hq, rows, columns]; entries beyond the count are ignored.
        full_kv_num_blocks, full_kv_indices: the same for full blocks, or None.
        q_num_blocks, q_indices, full_q_num_blocks, full_q_indices: the same by column, or None.
        BLOCK_SIZE: queries and keys per block.
        mask_mod: function (b, h, q_idx, kv_idx).

    Raises:
        ValueError: for lists of too few dimensions, or of which only one of a pair is given.

    Example:
        >>> from foci.mask_mods import create_block_mask
        >>> mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 512, 512, device="cpu")
        >>> mask.shape, mask.sparsity()
        ((1, 1, 512, 512), 37.5)
    """

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None,
        full_kv_indices: Tensor | None,
        q_num_blocks: Tensor | None,
        q_indices: Tensor | None,
        full_q_num_blocks: Tensor | None,
        full_q_indices: Tensor | None,
        BLOCK_SIZE: tuple[int, int] = (DEFAULT_BLOCK, DEFAULT_BLOCK),
        mask_mod: MaskMod = noop_mask,
    ) -> None:
        _check_lists("kv", kv_num_blocks, kv_indices)
        _check_lists("full_kv", full_kv_num_blocks, full_kv_indices)
        _check_lists("q", q_num_blocks, q_indices)
        _check_lists("full_q", full_q_num_blocks, full_q_indices)
        self.seq_lengths = seq_lengths
        self.kv_num_blocks = kv_num_blocks
        self.kv_indices = kv_indices
        self.full_kv_num_blocks = full_kv_num_blocks
        self.full_kv_indices = full_kv_indices
        self.q_num_blocks = q_num_blocks
        self.q_indices = q_indices
        self.full_q_num_blocks = full_q_num_blocks
        self.full_q_indices = full_q_indices
        self.BLOCK_SIZE = BLOCK_SIZE
        self.mask_mod = mask_mod

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
    ) -> BlockMask:
        """A block mask from its lists by row; those by column follow from them.

        Args:
            kv_num_blocks: int32 [B, Hq, rows].
            kv_indices: int32 [B, Hq, rows, columns].
            full_kv_num_blocks, full_kv_indices: the same for full blocks.
            BLOCK_SIZE: of queries and keys, or one for both.
            mask_mod: decides within partial blocks; everything attends by default.
            seq_lengths: query and key length; by default what the blocks cover.
            compute_q_blocks: also make the lists by column.

        Raises:
            ValueError: for lists of too few dimensions, or of which only one of a pair is given.

        Example:
            >>> counts, blocks = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
            >>> BlockMask.from_kv_blocks(counts, blocks, BLOCK_SIZE=64).to_dense()
            tensor([[[[1, 0],
                      [0, 1]]]], dtype=torch.int32)
        """
        _check_lists("kv", kv_num_blocks, kv_indices)
        _check_lists("full_kv", full_kv_num_blocks, full_kv_indices)
        _check_entries("kv", kv_num_blocks, kv_indices)
        _check_entries("full_kv", full_kv_num_blocks, full_kv_indices)
        block = as_block(BLOCK_SIZE)
        full: tuple[Tensor | None, Tensor | None] = (full_kv_num_blocks, full_kv_indices)
        by_column = [None] * 4 if not compute_q_blocks else [*_transposed(kv_num_blocks, kv_indices), *_transposed(*full)]
        if seq_lengths is None:
            seq_lengths = (kv_indices.shape[-2] * block[0], kv_indices.shape[-1] * block[1])
        return _assembled(seq_lengths, [kv_num_blocks, kv_indices, *full, *by_column], block, mask_mod or noop_mask)

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch entries, heads, query and key length."""
        return (*self.kv_indices.shape[:-2], *self.seq_lengths)

    def numel(self) -> int:
        """Pairs of positions, attended or not."""
        return math.prod(self.shape)

    def sparsity(self) -> float:
        """Percentage of the blocks that are empty; before torch 2.14, of the area, where blocks that overhang the lengths count whole.

        As the installed torch counts.
        """
        covered = int(self.kv_num_blocks.sum())
        if self.full_kv_num_blocks is not None:
            covered += int(self.full_kv_num_blocks.sum())
        if not _COUNTS_ROWS:
            return 100 * (1 - covered * self.BLOCK_SIZE[0] * self.BLOCK_SIZE[1] / self.numel())
        rows, columns = (-(-n // block) for n, block in zip(self.seq_lengths, self.BLOCK_SIZE, strict=True))
        return 100 * (1 - covered / (math.prod(self.kv_num_blocks.shape[:-1]) * rows * columns))

    def to_dense(self) -> Tensor:
        """int32 [B, Hq, rows, columns]: 1 for each block that is not empty."""
        return (block_classes(self) != EMPTY).to(torch.int32)

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """Lengths, the eight lists, block size and mask_mod; lengths and block size spread out if `flatten`."""
        lists = _lists(self)
        if flatten:
            return (*self.seq_lengths, *lists, *self.BLOCK_SIZE, self.mask_mod)
        return (self.seq_lengths, *lists, self.BLOCK_SIZE, self.mask_mod)

    def to(self, device: torch.device | str) -> BlockMask:
        """The block mask with its lists on another device. What mask_mod captures stays where it is."""
        lists = [None if t is None else t.to(device) for t in _lists(self)]
        return _assembled(self.seq_lengths, lists, self.BLOCK_SIZE, self.mask_mod)

    def expand(self, batch: int, heads: int) -> BlockMask:
        """The block mask for more batch entries or heads where it has one; the lists are shared.

        Raises:
            RuntimeError: if it has another number of them.
        """
        lists = [None if t is None else t.expand(batch, heads, *t.shape[2:]) for t in _lists(self)]
        return _assembled(self.seq_lengths, lists, self.BLOCK_SIZE, self.mask_mod)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> BlockMask:
        """The block mask of some batch entries, heads and block rows; an integer keeps its dimension, with size 1.

        The query length of the result is that of its block rows; before torch 2.14, which does the same, it stays what it was. Rows
        that a tensor chooses count whole. The result has no mask_mod, since coordinates would mean something else: set it anew.

        Raises:
            IndexError: for more than three indices, or one out of range.

        Example:
            >>> from foci.mask_mods import create_block_mask
            >>> mask = create_block_mask(lambda b, h, q, kv: q >= kv, 4, 2, 512, 512, device="cpu")
            >>> mask[1, :, 0:2].kv_indices.shape
            torch.Size([1, 2, 2, 4])
        """
        entries = index if isinstance(index, tuple) else (index,)
        if len(entries) > 3:
            raise IndexError(f"a BlockMask takes at most 3 indices, of batch, heads and block rows; got {len(entries)}")
        cuts = tuple(_kept(entry, n) for entry, n in zip(entries, self.kv_num_blocks.shape))

        def cut(blocks: Tensor | None) -> Tensor | None:
            return None if blocks is None else blocks[cuts]

        return BlockMask.from_kv_blocks(
            self.kv_num_blocks[cuts], self.kv_indices[cuts], cut(self.full_kv_num_blocks), cut(self.full_kv_indices),
            self.BLOCK_SIZE, _sliced_mask_mod, (self._count_queries(cuts), self.seq_lengths[1]), self.q_indices is not None,
        )  # fmt: skip

    def _count_queries(self, cuts: tuple[Any, ...]) -> int:
        """How many queries the chosen block rows have."""
        length, block = self.seq_lengths[0], self.BLOCK_SIZE[0]
        if not _COUNTS_ROWS or len(cuts) < 3:
            return length
        rows = cuts[2]
        if not isinstance(rows, slice):
            return int(self.kv_num_blocks[cuts].shape[-1]) * block
        chosen = range(self.kv_num_blocks.shape[-1])[rows]
        return sum(max(0, min(block, length - row * block)) for row in chosen)

    def adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The block mask of the first queries and keys.

        Raises:
            ValueError: for a length that the blocks do not cover.

        Example:
            >>> from foci.mask_mods import create_block_mask
            >>> mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 512, 512, device="cpu")
            >>> mask.adjust(256, 384).shape
            (1, 1, 256, 384)
        """
        classes = block_classes(self)
        rows, columns = math.ceil(new_q_len / self.BLOCK_SIZE[0]), math.ceil(new_kv_len / self.BLOCK_SIZE[1])
        if rows > classes.shape[-2] or columns > classes.shape[-1]:
            raise ArgumentError(
                f"a BlockMask of lengths {self.seq_lengths} cannot grow to {(new_q_len, new_kv_len)}: create one with create_block_mask"
            )
        return from_classes(
            classes[..., :rows, :columns], (new_q_len, new_kv_len), self.BLOCK_SIZE, self.mask_mod, by_column=self.q_indices is not None,
            apart=self.full_kv_indices is not None,
        )  # fmt: skip

    _adjust = adjust  # torch's name for it

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """A picture in text: `█` where all blocks are needed, `░` where some are, a blank where none is.

        Args:
            grid_size: most rows and columns of the picture, or one for both; -1 for one cell per block.
            limit: how many batch entries and heads are drawn.

        Example:
            >>> from foci.mask_mods import create_block_mask
            >>> mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 384, 384, device="cpu")
            >>> print(mask.to_string().replace(" ", "."))
            (0,.0)
            ██....
            ████..
            ██████
            <BLANKLINE>
        """
        dense = self.to_dense()
        *batch, rows, columns = dense.shape
        most = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
        steps = tuple(1 if m == -1 else max(1, math.ceil(n / m)) for n, m in zip((rows, columns), most))
        pictures = []
        for n, at in enumerate(itertools.product(*map(range, batch))):
            if n == limit:
                pictures.append("...\nTo print more, call BlockMask.to_string(limit=N), or index the BlockMask by batch entry and head.")
                break
            pictures.append(f"{at}\n{_picture(dense[at], steps)}")
        return "\n".join(pictures)

    def __str__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%,\n{self.to_string().strip()}\n)"

    def __repr__(self) -> str:
        shapes = (f"    {name}={None if t is None else tuple(t.shape)},\n" for name, t in zip(_LISTS, _lists(self)))
        mask = getattr(self.mask_mod, "__name__", self.mask_mod)
        sparsity = f"{self.sparsity():.2f}%" if self.numel() else "none"
        rest = f"    BLOCK_SIZE={self.BLOCK_SIZE},\n    shape={self.shape},\n    sparsity={sparsity},\n    mask_mod={mask},\n"
        return f"BlockMask(\n{''.join(shapes)}{rest})"


_COUNTS_ROWS: Final = torch.__version__ >= "2.14"
"""Whether torch's BlockMask counts its blocks, rather than positions, and a slice of it the queries of its rows."""

_LISTS: Final = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


def _lists(block_mask: Any) -> list[Tensor | None]:
    return [getattr(block_mask, name) for name in _LISTS]


def _assembled(lengths: tuple[int, int], lists: Sequence[Tensor | None], block: tuple[int, int], mask_mod: MaskMod) -> BlockMask:
    counts, indices, *rest = lists
    if counts is None or indices is None:
        raise ArgumentError("kv_num_blocks and kv_indices must be given")
    return BlockMask(lengths, counts, indices, rest[0], rest[1], rest[2], rest[3], rest[4], rest[5], block, mask_mod)


def _transposed(counts: Tensor | None, indices: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if counts is None or indices is None else transpose_lists(counts, indices)


def _check_lists(name: str, counts: Tensor | None, indices: Tensor | None) -> None:
    if (counts is None) != (indices is None):
        raise ArgumentError(f"{name}_num_blocks and {name}_indices must be given together")
    if counts is None or indices is None:
        if name == "kv":
            raise ArgumentError("kv_num_blocks and kv_indices must be given")
        return
    if indices.dim() < 2 or counts.shape != indices.shape[:-1]:
        shapes = f"{list(indices.shape)} and {list(counts.shape)}"
        raise ArgumentError(f"{name}_indices must be [..., rows, columns] and {name}_num_blocks [..., rows]; got {shapes}")


def _check_entries(name: str, counts: Tensor | None, indices: Tensor | None) -> None:
    if counts is None or indices is None:
        return
    for what, tensor in ((f"{name}_num_blocks", counts), (f"{name}_indices", indices)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{what} must be int32 or int64; got {tensor.dtype}")
    if type(counts) is Tensor and counts.device.type == "cpu" and counts.numel() and not torch.compiler.is_compiling():
        low, high = counts.min().item(), counts.max().item()
        if low < 0 or high > indices.shape[-1]:
            raise ArgumentError(
                f"{name}_num_blocks must be from 0 to the {indices.shape[-1]} columns of {name}_indices; got {low} to {high}"
            )


def as_block(size: int | tuple[int, int]) -> tuple[int, int]:
    """A block size given as one or two numbers, as two.

    Raises:
        TypeError: for anything but one or two integers.
        ValueError: for a size under 1.
    """
    block = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(block) != 2 or any(isinstance(n, bool) or not isinstance(n, (int, torch.SymInt)) for n in block):
        raise TypeError(f"BLOCK_SIZE must be an integer or two, of queries and of keys; got {size!r}")
    if min(block) < 1:
        raise ArgumentError(f"BLOCK_SIZE must be at least 1, got {size}")
    return block


def _kept(entry: Index, size: int) -> slice | Tensor:
    if not isinstance(entry, int):
        return entry
    if not -size <= entry < size:
        raise IndexError(f"index {entry} is out of range for a dimension of size {size} of the BlockMask")
    at = entry % size
    return slice(at, at + 1)


def _picture(dense: Tensor, steps: tuple[int, ...]) -> str:
    lines = []
    for rows in torch.split(dense, steps[0], 0):
        shares = [float(cell.float().mean()) for cell in torch.split(rows, steps[1], 1)]
        lines.append("".join(("█" if share == 1 else " " if share == 0 else "░") * 2 for share in shares) + "\n")
    return "".join(lines)


def _sliced_mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> NoReturn:
    raise RuntimeError(
        "this BlockMask was made by slicing another and has no mask_mod: its coordinates would start anew. "
        "Set sliced.mask_mod, with the offsets you want, from the mask_mod of the BlockMask that was sliced"
    )


def check_is_block_mask(name: str, block_mask: Any) -> None:
    """Refuse what is no BlockMask, given as the argument `name`.

    Raises:
        TypeError: for anything but one of foci or of torch.

    Example:
        >>> from torch.nn.attention.flex_attention import create_block_mask as create
        >>> check_is_block_mask("block_mask", create(lambda b, h, q, kv: q >= kv, None, None, 256, 256, device="cpu"))
    """
    if isinstance(block_mask, BlockMask):
        return
    torch_module = sys.modules.get("torch.nn.attention.flex_attention")  # an instance exists only if it was imported
    if torch_module is None or not isinstance(block_mask, torch_module.BlockMask):
        raise TypeError(f"{name} must be a BlockMask of foci or of torch, got {type(block_mask).__name__}")


def block_classes(block_mask: Any) -> Tensor:
    """int8 [B, Hq, rows, columns]: the class of each block (`foci.blocks.EMPTY`, `PARTIAL`, `FULL`) of a BlockMask of foci or of torch.

    Raises:
        ValueError: for lists of too few dimensions, or of which only one of a pair is given.

    Example:
        >>> from foci.mask_mods import create_block_mask
        >>> block_classes(create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 256, 256, device="cpu"))
        tensor([[[[1, 0],
                  [2, 1]]]], dtype=torch.int8)
    """
    b = block_mask
    lists = (b.kv_num_blocks, b.kv_indices, b.full_kv_num_blocks, b.full_kv_indices)
    key = _key(lists)
    if key is None:
        return _classes(lists)
    classes: Tensor | None = find_derived("block classes", key)
    if classes is None:
        classes = _classes(lists)
        cache_derived("block classes", key, tuple([t for t in lists if t is not None]), classes)
    elif cache_check.ENABLED:
        cache_check.compare_tensors("the cache of block classes", classes, _classes(lists))
    return classes


def _classes(lists: tuple[Tensor, Tensor, Tensor | None, Tensor | None]) -> Tensor:
    _check_lists("kv", *lists[:2])
    _check_lists("full_kv", *lists[2:])
    return classes_of_lists(*lists)


def _key(lists: Sequence[Tensor | None]) -> tuple[int, ...] | None:
    """Return the cache key of a BlockMask's lists: identity, version and address of each, and the current stream. None if a list is not a
    plain tensor with a version, or while tracing or capturing."""
    if torch.compiler.is_compiling() or is_watched():
        return None
    key = [0]
    for tensor in lists:
        if tensor is not None:
            if type(tensor) is not Tensor or tensor.is_inference():
                return None
            key += tensor_state(tensor)
    first = lists[0]
    if first is not None and first.is_cuda:
        if is_capturing():
            return None
        key[0] = raw_stream(first.get_device())
    return tuple(key)


def from_classes(
    classes: Tensor, lengths: tuple[int, int], block: tuple[int, int], mask_mod: MaskMod, *, by_column: bool, apart: bool
) -> BlockMask:
    """A block mask from int8 classes [B, Hq, rows, columns]; full blocks `apart`, and lists `by_column` too, on request."""
    none = (None, None)
    full = to_lists(classes == FULL) if apart else none
    part = to_lists(classes == PARTIAL if apart else classes != EMPTY)
    turned = classes.transpose(-1, -2)
    full_q = to_lists(turned == FULL) if apart and by_column else none
    part_q = to_lists(turned == PARTIAL if apart else turned != EMPTY) if by_column else none
    return _assembled(lengths, [*part, *full, *part_q, *full_q], block, mask_mod)
