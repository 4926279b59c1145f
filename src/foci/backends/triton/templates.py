"""Passes run again: launches with their arguments, once for a geometry, and bound to sequences and addresses.

A `Template` is what a pass launches, of which neither where packed sequences lie nor how many tokens there are is part: numbers that
follow from the tokens are `Count`s, found anew when it is bound to other sequences. A `Recording` runs through Triton's own launchers, with
the addresses of a call.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from foci.backends.contract import Inputs
from foci.backends.triton.counts import Count, Tokens, row_of
from foci.backends.triton.surroundings import places_of

__all__ = [
    "Arguments",
    "Binding",
    "Launch",
    "Maps",
    "New",
    "Recording",
    "Source",
    "Template",
    "Tiles",
    "address_of",
    "in_one",
    "late_counts",
    "part_of",
]

Source: TypeAlias = Callable[[Any, Tokens, Inputs], Inputs]
"""What a pass reads of sequences besides its inputs: the tensors, of the sequences, the tokens and the captured tensors."""


class Binding(NamedTuple):
    """What a template is bound to: how many tokens there are, and what it reads of their sequences."""

    tokens: Tokens
    kept: Inputs


class Tiles(NamedTuple):
    """A tensor descriptor but for its base: makes one of a tensor."""

    kind: type
    rest: dict[str, Any]
    known: Mapping[int, Any] = types.MappingProxyType({})
    """By address: none is kept, as a descriptor holds its tensor."""

    def __call__(self, base: Any, address: Any) -> Any:
        made: Any = object.__new__(self.kind)  # checked when it was recorded
        made.__dict__ = {"base": base, **self.rest}
        return made

    def bound(self, binding: Binding) -> Tiles:
        """These tiles of other tokens."""
        shape = self.rest["shape"]
        if not any(isinstance(n, Count) for n in shape):
            return self
        return self._replace(rest={**self.rest, "shape": [n.of(binding.tokens) if isinstance(n, Count) else n for n in shape]})


class Arguments(NamedTuple):
    """Arguments without their addresses: `places` (index, tensor of the pass), `tiles` likewise for descriptors, with what makes
    one of a tensor and its address, `parts` for tuples with addresses inside, and `late` for what binding finds."""

    values: list[Any]
    places: list[tuple[int, int]]
    tiles: list[tuple[int, int, Any]]
    parts: list[tuple[int, Arguments]]
    late: list[tuple[int, Callable[[Binding], Any]]]

    def after(self, head: tuple[Any, ...]) -> Arguments:
        """These arguments behind others."""
        by, (values, places, tiles, parts, late) = len(head), self
        return Arguments(
            [*head, *values], [(at + by, role) for at, role in places], [(at + by, role, made) for at, role, made in tiles],
            [(at + by, part) for at, part in parts], [*late_counts(head), *((at + by, find) for at, find in late)],
        )  # fmt: skip

    def bound(self, binding: Binding) -> Arguments:
        """These arguments with nothing late."""
        if not (self.late or self.tiles or self.parts):
            return self
        values = self.values.copy()
        for at, find in self.late:
            values[at] = find(binding)
        tiles = [(at, role, made.bound(binding)) for at, role, made in self.tiles]
        return Arguments(values, self.places, tiles, [(at, part.bound(binding)) for at, part in self.parts], [])


def late_counts(values: Sequence[Any]) -> list[tuple[int, Callable[[Binding], Any]]]:
    """Those that binding finds anew."""
    return [(at, functools.partial(_counted, n.of)) for at, n in enumerate(values) if isinstance(n, Count)]


def _counted(of: Callable[[Tokens], int], binding: Binding) -> int:
    return of(binding.tokens)


def address_of(number: int, binding: Binding) -> int:
    """Where the tensor of that number lies, of those that are read of the sequences."""
    tensor = binding.kept[number]
    assert tensor is not None, "read when it was recorded"
    return tensor.data_ptr()


def part_of(part: Arguments, binding: Binding) -> tuple[Any, ...]:
    """A tuple among arguments, with what binding finds."""
    values = part.values.copy()
    for at, find in part.late:
        values[at] = find(binding)
    return tuple(values)


class Launch(NamedTuple):
    """A compiled kernel's launcher, and all it takes."""

    run: Callable[..., None]
    arguments: Arguments


class New(NamedTuple):
    """A tensor that each run allocates; with an offset, a part of one allocation with those that follow and have one too."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int | None = None

    @property
    def packed(self) -> New:
        """[1, H, T, ...] as [T, H, D], and [1, H, T] as [H, T]."""
        (_, *size), (_, *stride) = self.size, self.stride
        if len(size) == 3:
            size[:2], stride[:2] = size[1::-1], stride[1::-1]
        return self._replace(size=tuple(size), stride=tuple(stride))

    def maker(self) -> Callable[[Tokens], Callable[[], Tensor]]:
        """What allocates it, by how many tokens there are."""
        allocate = functools.partial(torch.empty_strided, dtype=self.dtype, device=self.device)
        if not any(isinstance(n, Count) for n in (*self.size, *self.stride)):
            known = functools.partial(allocate, self.size, self.stride)
            return lambda tokens: known
        size, stride = row_of(self.size), row_of(self.stride)
        return lambda tokens: functools.partial(allocate, size(tokens), stride(tokens))

    @property
    def lines(self) -> int:
        """Of `_LINE` bytes, from its first element to its last."""
        if 0 in self.size:
            return 0
        span = 1
        for n, step in zip(self.size, self.stride, strict=True):
            span = (n - 1) * step + span  # in this order, as a `Count` says how it follows
        return (span * self.dtype.itemsize + (_LINE - 1)) // _LINE


class Maps:
    """The copy engine's maps of tiles by the address of what they lie in: the same for as long as the geometry is."""

    def __init__(self, tiles: Tiles, make: Callable[..., list[Any]], metadata: Any) -> None:
        self._tiles, self._make, self._metadata = tiles, make, metadata
        self._varies = any(isinstance(n, Count) for n in tiles.rest["shape"])
        self._of_others: OrderedDict[tuple[int, ...], Maps] = OrderedDict()
        self.known: dict[int, Any] = {}

    def __call__(self, base: Any, address: Any) -> Any:
        if len(self.known) >= _MAPS:
            self.known.clear()
        found = self.known[address] = self._make(self._tiles(base, address), self._metadata)[0]
        return found

    def bound(self, binding: Binding) -> Maps:
        """The maps of other tokens: these, where the number of tokens is no part of them; else those of as many, wherever they lie."""
        if not self._varies:
            return self
        tiles = self._tiles.bound(binding)
        shape = tuple(tiles.rest["shape"])
        found = self._of_others.get(shape)
        if found is None:
            found = self._of_others[shape] = Maps(tiles, self._make, self._metadata)
            if len(self._of_others) > _SHAPES:
                self._of_others.popitem(last=False)
        return found


_MAPS: Final = 256
_SHAPES: Final = 64


class Template:
    """A pass that can be run again, once it is bound to sequences; dense, to what it was recorded with."""

    __slots__ = ("_kept", "_results", "_sources", "launches", "made", "makers", "parts", "scratch")

    def __init__(
        self, launches: list[Launch], made: Sequence[New], kept: Inputs, sources: Sequence[Source | None], results: int | None = None
    ) -> None:
        self.launches = launches
        self.made = made
        self.parts = _Parts.of(made[:results])
        self.makers = [new.maker() for new in made[:results] if new.offset is None]
        self.scratch = None if results is None else _Scratch.of(made[results:])
        self._kept: Inputs = kept
        self._sources = sources
        self._results = results

    def returning(self, count: int, *, packed: bool) -> Template:
        """The same, of which the first `count` tensors made are wanted, and come packed, as `foci.problem.Geometry` says, if that is asked.
        The others are parts of one allocation."""
        made = [new.packed if packed and n < count else new for n, new in enumerate(self.made)]
        return Template(self.launches, made, self._kept, self._sources, count)

    def unbound(self) -> Template | None:
        """The same, of any sequences; None where some of what it reads is of those alone that it was recorded with."""
        return None if None in self._sources else Template(self.launches, self.made, (), self._sources, self._results)

    def as_recorded(self, tokens: Tokens) -> Recording:
        """Bound to the sequences that it was recorded with."""
        rows, columns = map(int, tokens)  # plain ones, as each run counts with what follows from them
        return Recording(self, Binding((rows, columns), self._kept))

    def bound(self, sequences: Any, tokens: Tokens, captures: Inputs) -> Recording:
        """Bound to other sequences."""
        rows, columns = map(int, tokens)
        kept = [t for source in self._sources if source is not None for t in source(sequences, (rows, columns), captures)]
        return Recording(self, Binding((rows, columns), kept))


class _Parts(NamedTuple):
    """The first tensors, where they are parts of one allocation: each one's size and strides, by how many tokens there are, and offset."""

    found: list[tuple[Callable[[Tokens], tuple[int, ...]], Callable[[Tokens], tuple[int, ...]], int]]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(made: Sequence[New]) -> _Parts | None:
        found = [(row_of(new.size), row_of(new.stride), new.offset) for new in made if new.offset is not None]
        return _Parts(found, made[0].dtype, made[0].device) if found else None

    def at(self, tokens: Tokens) -> Callable[[], list[Tensor]]:
        """What allocates them."""
        return in_one([(size(tokens), stride(tokens), at) for size, stride, at in self.found], self.dtype, self.device)


def in_one(
    parts: Sequence[tuple[tuple[int, ...], tuple[int, ...], int]], dtype: torch.dtype, device: torch.device
) -> Callable[[], list[Tensor]]:
    """What allocates tensors of these sizes, strides and offsets in one piece."""
    ends = [at + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) for size, stride, at in parts]
    allocate = functools.partial(torch.empty, (max(ends),), dtype=dtype, device=device)

    def make() -> list[Tensor]:
        whole = allocate()
        return [whole.as_strided(*part) for part in parts]

    return make


class _Scratch(NamedTuple):
    """One allocation for all that nobody reads but the pass: by how many tokens there are, its lines, and those before each tensor."""

    lines: Callable[[Tokens], tuple[int, ...]]
    device: torch.device

    @staticmethod
    def of(made: Sequence[New]) -> _Scratch | None:
        return _Scratch(row_of(list(itertools.accumulate(new.lines for new in made))), made[0].device) if made else None

    def at(self, tokens: Tokens) -> tuple[Callable[[], Tensor], list[int]]:
        """What allocates it, and where in it each tensor lies."""
        ends = [_LINE * lines for lines in self.lines(tokens)]
        return functools.partial(torch.empty, (ends[-1],), dtype=torch.uint8, device=self.device), [0, *ends[:-1]]


_LINE: Final = 512
"""Bytes that the allocator's own tensors are aligned to."""


class _Place(NamedTuple):
    """What stands for a tensor where its address is all that is asked."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class Recording:
    """A pass that can be run again.

    Attributes:
        template: what it is a binding of.
        tokens: how many there are, where they are packed.
    """

    __slots__ = ("_binding", "_launches", "_makes", "_parts", "_scratch", "template")

    def __init__(self, template: Template, binding: Binding) -> None:
        self.template = template
        self._binding = binding  # holds what the arguments hold the addresses of
        self._launches = [(run, arguments.bound(binding)) for run, arguments in template.launches]
        self._parts = None if template.parts is None else template.parts.at(binding.tokens)
        self._makes = [make(binding.tokens) for make in template.makers]
        self._scratch = None if template.scratch is None else template.scratch.at(binding.tokens)

    @property
    def tokens(self) -> Tokens:
        """How many queries and keys there are, where they are packed."""
        return self._binding.tokens

    def returning(self, count: int, *, packed: bool) -> Recording:
        """The same with `Template.returning`."""
        return Recording(self.template.returning(count, packed=packed), self._binding)

    def run(self, inputs: Inputs, places: list[int | None] | None = None) -> list[Tensor]:
        """Launches with other tensors of the same geometry, alignment and stream, at these places if they are known; returns what the
        pass allocated, in order, as far as it is wanted.
        """
        made = [make() for make in self._makes]
        if self._parts is not None:
            made[:0] = self._parts()
        tensors: list[Any] = [*inputs, *made]
        addresses = places_of(tensors) if places is None else places + [t.data_ptr() for t in made]
        if self._scratch is not None:
            allocate, offsets = self._scratch
            whole = allocate()  # lives until all is launched
            start = whole.data_ptr()
            scratch = [start + offset for offset in offsets]
            addresses += scratch
            tensors += map(_Place, scratch)
        for run, arguments in self._launches:
            run(*_filled(arguments, tensors, addresses))
        return made


def _filled(arguments: Arguments, tensors: list[Any], addresses: list[int | None]) -> list[Any]:
    values, places, tiles, parts, _ = arguments
    args = values.copy()
    for at, role in places:
        args[at] = addresses[role]
    for at, role, made in tiles:
        found = made.known.get(addresses[role])
        args[at] = made(tensors[role], addresses[role]) if found is None else found
    for at, inner in parts:
        args[at] = tuple(_filled(inner, tensors, addresses))
    return args
