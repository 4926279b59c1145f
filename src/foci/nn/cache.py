"""Keys and values of earlier tokens, for decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["KVCache", "LayerCache", "Memory", "Pages", "Stored", "check_cache"]


@dataclass(frozen=True, eq=False)
class Stored:
    """The keys and values that a layer attends to after `LayerCache.append`.

    Attributes:
        key, value: [B, Hkv, S, D], the new tokens included; with `pages`, pools [pages, Hkv, page size, D].
        start: number of tokens before the new ones, where it is the same in every row.
        positions: int64 [B, n], position of each new token; None where that is `start` plus its index.
    """

    key: Tensor
    value: Tensor
    start: int
    positions: Tensor | None
    pages: Pages | None = None

    def in_one_piece(self) -> tuple[Tensor, Tensor]:
        """Key and value as [B, Hkv, S, D]."""
        if self.pages is None:
            return self.key, self.value
        return self.pages.gather(self.key), self.pages.gather(self.value)


@dataclass(frozen=True, eq=False)
class Pages:
    """Where a row's tokens lie in a pool.

    Attributes:
        table: int64 [B, pages of a row].
        lengths: int64 [B], tokens of each row.
        longest: a bound of them.
    """

    table: Tensor
    lengths: Tensor
    longest: int

    def gather(self, pool: Tensor) -> Tensor:
        """[B, Hkv, longest, D]."""
        count = -(-self.longest // pool.shape[2])
        pages = pool[self.table[:, :count]]  # [B, count, Hkv, page size, D]
        return pages.transpose(1, 2).flatten(2, 3)[:, :, : self.longest]


@dataclass(eq=False)
class Memory:
    """Keys and values of an encoder's output, projected once."""

    key: Tensor | None = None
    value: Tensor | None = None


class _Buffer(Protocol):
    """Where keys or values are kept."""

    def write(self, start: int, new: Tensor) -> None:
        """Stores [B, Hkv, n, D] from position `start` on."""
        ...

    def scatter(self, positions: Tensor, new: Tensor, stop: int) -> None:
        """Stores each token at its position, [B, n]; positions reach to `stop`, and -1 is nowhere."""
        ...

    def read(self, stop: int) -> Tensor:
        """[B, Hkv, stop, D], or the whole pool of pages."""
        ...

    def pages(self, stop: int, counts: Tensor | None) -> Pages | None:
        """Where in the pool the tokens before `stop`, or the first `counts` [B] of each row, lie."""
        ...

    def select(self, rows: Tensor) -> None:
        """Keeps these rows of the batch, in this order."""
        ...

    def holds(self) -> tuple[int, torch.dtype]:
        """Rows, and their dtype."""
        ...


class _Static:
    """One tensor [B, Hkv, max_length + 1, D]; the last place takes what is to go nowhere."""

    def __init__(self, like: Tensor, max_length: int) -> None:
        batch, heads, _, dim = like.shape
        self.data = like.new_zeros((batch, heads, max_length + 1, dim))

    def write(self, start: int, new: Tensor) -> None:
        self.data[:, :, start : start + new.shape[2]] = new

    def scatter(self, positions: Tensor, new: Tensor, stop: int) -> None:
        places = torch.where(positions < 0, self.data.shape[2] - 1, positions)
        self.data.scatter_(2, places[:, None, :, None].expand_as(new), new)

    def read(self, stop: int) -> Tensor:
        return self.data[:, :, :stop]

    def pages(self, stop: int, counts: Tensor | None) -> Pages | None:
        return None

    def select(self, rows: Tensor) -> None:
        self.data = self.data.index_select(0, rows)

    def holds(self) -> tuple[int, torch.dtype]:
        return self.data.shape[0], self.data.dtype


class _Paged:
    """Pages [pages, Hkv, page_size, D] and a table int64 [B, pages of a row]; page 0 takes what is to go nowhere."""

    def __init__(self, like: Tensor, page_size: int) -> None:
        batch, heads, _, dim = like.shape
        self.page_size = page_size
        self.pool = like.new_zeros((1, heads, page_size, dim))
        self.table = torch.zeros((batch, 0), dtype=torch.int64, device=like.device)
        self.used = 1

    def write(self, start: int, new: Tensor) -> None:
        positions = torch.arange(start, start + new.shape[2], device=new.device).expand(new.shape[0], -1)
        self.scatter(positions, new, start + new.shape[2])

    def scatter(self, positions: Tensor, new: Tensor, stop: int) -> None:
        self._grow(-(-stop // self.page_size))
        known = positions.clamp_min(0)
        pages = torch.where(positions < 0, 0, self.table.gather(1, known // self.page_size))
        self.pool[pages, :, known % self.page_size] = new.transpose(1, 2)

    def read(self, stop: int) -> Tensor:
        return self.pool

    def pages(self, stop: int, counts: Tensor | None) -> Pages | None:
        lengths = torch.full((self.table.shape[0],), stop, device=self.table.device) if counts is None else counts
        return Pages(self.table, lengths, stop)

    def select(self, rows: Tensor) -> None:
        # rows may be chosen twice, and then write apart from each other: every row gets pages of its own
        table = self.table.index_select(0, rows)
        self.pool = torch.cat((self.pool[:1], self.pool[table.flatten()]))
        self.used = self.pool.shape[0]
        self.table = torch.arange(1, self.used, device=table.device).view(table.shape)

    def holds(self) -> tuple[int, torch.dtype]:
        return self.table.shape[0], self.pool.dtype

    def _grow(self, count: int) -> None:
        batch, have = self.table.shape
        if count <= have:
            return
        needed = self.used + batch * (count - have)
        if needed > self.pool.shape[0]:
            more = max(needed, 2 * self.pool.shape[0]) - self.pool.shape[0]
            self.pool = torch.cat((self.pool, self.pool.new_zeros((more, *self.pool.shape[1:]))))
        added = torch.arange(self.used, needed, device=self.table.device).view(batch, count - have)
        self.table = torch.cat((self.table, added), dim=1)
        self.used = needed


class LayerCache:
    """The part of a `KVCache` that one layer fills.

    Attributes:
        longest: tokens of the longest row, or a bound on it.
        counts: int64 [B], tokens of each row where they differ; else None.
        memory: keys and values of an encoder's output, for a decoder layer.
    """

    def __init__(self, max_length: int, page_size: int | None) -> None:
        self.max_length = max_length
        self.page_size = page_size
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.longest = 0
        self.counts: Tensor | None = None
        self.memory = Memory()
        self._buffers: tuple[_Buffer, _Buffer] | None = None

    def append(self, key: Tensor, value: Tensor, padding: Tensor | None) -> Stored:
        """Stores new tokens.

        Args:
            key, value: [B, Hkv, n, D].
            padding: bool [B, n], true for what is no token and is not stored; or None.

        Raises:
            ValueError: if they do not fit, or come in another batch size or dtype.
        """
        new, start = key.shape[2], self.longest
        if start + new > self.max_length:
            raise ValueError(f"the cache holds {self.max_length} tokens; {start} are there and {new} are to be added")
        if self._buffers is None:
            self._buffers = (self._buffer(key), self._buffer(value))
        buffers, positions = self._buffers, None
        rows, dtype = buffers[0].holds()
        if (key.shape[0], key.dtype) != (rows, dtype):
            raise ValueError(f"the cache holds {rows} rows of {dtype}; {key.shape[0]} of {key.dtype} are to be added")
        stop = start + new
        with torch.no_grad():
            if padding is None and self.counts is None:
                for buffer, tokens in zip(buffers, (key, value), strict=True):
                    buffer.write(start, tokens.detach())
            else:
                keep, counts, positions = self._coming(key.shape[0], new, padding, key.device)
                for buffer, tokens in zip(buffers, (key, value), strict=True):
                    buffer.scatter(torch.where(keep, positions, -1), tokens.detach(), stop)
                self.counts = counts + keep.sum(1)
                positions = positions.clamp_min(0)
        self.longest = stop
        # keys and values grow by the same pages: one table serves both
        return Stored(buffers[0].read(stop), buffers[1].read(stop), start, positions, buffers[0].pages(stop, self.counts))

    def select(self, rows: Tensor) -> None:
        """Keeps these rows of the batch, in this order."""
        if self._buffers is not None:
            for buffer in self._buffers:
                buffer.select(rows)
        self.counts = None if self.counts is None else self.counts[rows]
        if self.memory.key is not None and self.memory.value is not None:
            self.memory = Memory(self.memory.key[rows], self.memory.value[rows])

    def positions(self, batch: int, new: int, padding: Tensor | None, device: torch.device) -> Tensor:
        """Positions that the next `append` will give to new tokens: int64 [n], or [B, n] where rows differ."""
        if padding is None and self.counts is None:
            return torch.arange(self.longest, self.longest + new, device=device)
        return self._coming(batch, new, padding, device)[2].clamp_min(0)

    def _coming(self, batch: int, new: int, padding: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Which of the new tokens are stored, bool [B, n]; how many tokens rows have, [B]; and the places that the new ones take."""
        keep = torch.ones((batch, new), dtype=torch.bool, device=device) if padding is None else ~padding
        counts = torch.full((batch,), self.longest, device=device) if self.counts is None else self.counts
        return keep, counts, counts[:, None] + keep.long().cumsum(1) - 1

    def _buffer(self, like: Tensor) -> Any:
        return _Static(like, self.max_length) if self.page_size is None else _Paged(like, self.page_size)


class KVCache:
    """Keys and values of the tokens that a model has seen, one `LayerCache` for each layer.

    Given to `TransformerEncoder` or `TransformerDecoder` as `cache=`, and `cache[n]` to a layer, it makes them attend to all
    tokens so far: each call adds the tokens it is given, and each of them sees those before it and itself. Rows may have
    different lengths: a padding mask, on any side, leaves tokens out. No gradient flows through a cache, and a backward pass comes before
    the next call, which writes to what it would read.

    Static, it is one tensor of `max_length` for each layer, and attention reads it in place. Paged (Kwon et al., 2023), it
    grows by pages of `page_size` tokens, which attention reads through a page table (`foci.paged_attention`).

    Args:
        num_layers: layers of the model.
        max_length: largest number of tokens of a row.
        page_size: tokens of a page; None for a static cache.

    Raises:
        TypeError: for sizes that are no integers.
        ValueError: for sizes that are not positive.

    Example:
        >>> import torch, foci.nn
        >>> layer = foci.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> model = foci.nn.TransformerEncoder(layer, 2).eval()
        >>> cache = foci.nn.KVCache(num_layers=2, max_length=64)
        >>> prompt, token = torch.randn(3, 10, 32), torch.randn(3, 1, 32)
        >>> model(prompt, cache=cache).shape, model(token, cache=cache).shape, cache.length
        (torch.Size([3, 10, 32]), torch.Size([3, 1, 32]), 11)
    """

    def __init__(self, num_layers: int, max_length: int, *, page_size: int | None = None) -> None:
        for name, size in (("num_layers", num_layers), ("max_length", max_length), ("page_size", page_size)):
            if name == "page_size" and size is None:
                continue
            if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
                raise TypeError(f"{name} must be an integer; got {type(size).__name__}")
            if size < 1:
                raise ValueError(f"{name} must be at least 1; got {size}")
        self.layers = tuple(LayerCache(max_length, page_size) for _ in range(num_layers))

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    @property
    def length(self) -> int:
        """Tokens of the longest row, or a bound on it where rows were padded."""
        return self.layers[0].longest

    @property
    def lengths(self) -> Tensor | None:
        """int64 [B], tokens of each row; None where all have `length`."""
        return self.layers[0].counts

    def reset(self) -> None:
        """Forgets every token."""
        for layer in self.layers:
            layer.reset()

    def select(self, rows: Tensor) -> None:
        """Keeps these rows of the batch, in this order: what beam search and finished rows need.

        Args:
            rows: int32 or int64 [new batch], of the present rows; one may appear twice.

        Raises:
            TypeError: for rows that are something else.
        """
        if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
            got = f"{rows.dtype}{list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
            raise TypeError(f"rows must be an int32 or int64 tensor of one dimension; got {got}")
        for layer in self.layers:
            layer.select(rows)


def check_cache(cache: Any, layers: int) -> None:
    """Checks what a stack of layers was given as `cache`.

    Raises:
        TypeError: for anything but a KVCache or None.
        ValueError: for one of another number of layers, or whose layers hold different numbers of tokens.
    """
    if cache is None:
        return
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be a foci.nn.KVCache; got {type(cache).__name__}")
    if len(cache) != layers:
        raise ValueError(f"cache must be made for the {layers} layers of the model, KVCache(num_layers={layers}, ...); it has {len(cache)}")
    held = [layer.longest for layer in cache.layers]
    if any(count != held[0] for count in held):
        raise ValueError(f"the layers of cache must hold the same tokens; they hold {held}, as a call ended halfway: reset it")
