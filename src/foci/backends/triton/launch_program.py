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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from foci.backends.contract import Inputs
from foci.backends.triton.stream_state import allocator_on, tensor_addresses
from foci.backends.triton.symbolic_tokens import Count, Tokens, row_function

__all__ = [
    "Arguments",
    "Binding",
    "Joint",
    "Launch",
    "Maps",
    "New",
    "Recording",
    "Sized",
    "Source",
    "Template",
    "Tiles",
    "late_counts",
    "sequence_address",
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

    @property
    def varies(self) -> bool:
        """Whether they follow from the tokens."""
        return any(isinstance(n, Count) for n in self.rest["shape"])

    def bound(self, tokens: Tokens) -> Tiles:
        """These tiles of other tokens."""
        if not self.varies:
            return self
        shape = [n.of(tokens) if isinstance(n, Count) else n for n in self.rest["shape"]]
        return self._replace(rest={**self.rest, "shape": shape})


class Arguments(NamedTuple):
    """Arguments without their addresses: `places` (index, tensor of the pass), `tiles` likewise for descriptors, with what makes
    one of a tensor and its address, `late` for what binding finds, by expressions of `t`, the tokens, and `k`, the addresses of what is
    kept, and `parts` for tuples with any of these inside."""

    values: list[Any]
    places: list[tuple[int, int]]
    tiles: list[tuple[int, int, Any]]
    parts: list[tuple[int, Arguments]]
    late: list[tuple[int, str]]

    @property
    def is_constant(self) -> bool:
        """Whether nothing is to be put in."""
        return not (self.places or self.tiles or self.parts or self.late)

    def after(self, head: tuple[Any, ...]) -> Arguments:
        """These arguments behind others."""
        by, (values, places, tiles, parts, late) = len(head), self
        return Arguments(
            [*head, *values], [(at + by, role) for at, role in places], [(at + by, role, made) for at, role, made in tiles],
            [(at + by, part) for at, part in parts], [*late_counts(head), *((at + by, text) for at, text in late)],
        )  # fmt: skip

    def filler(self) -> Filler:
        """What puts addresses in, for each launch: straight code."""
        return _filler(_code("fill(v, m, a, o)", self._filled("v", itertools.count())))

    def binder(self) -> Binder | None:
        """What puts in what binding finds, once for a recording; None where that is nothing."""
        found = self._bound("v")
        return _binder(_code("bind(v, t, k)", found)) if found else None

    def _filled(self, own: str, makers: Iterator[int]) -> dict[int, str]:
        """Expressions of what has addresses in it, by `m`, the `makers`, `a`, addresses, and `o`, tensors if there are any."""
        found = {at: f"a[{role}]" for at, role in self.places}
        for (at, role, _), n in zip(self.tiles, makers, strict=False):
            found[at] = f"m[{n}].known.get(a[{role}]) or described(m[{n}], a[{role}], o and o[{role}])"
        for at, part in self.parts:
            if inner := part._filled(f"{own}[{at}]", makers):
                found[at] = part._tuple(f"{own}[{at}]", inner)
        return found

    def _bound(self, own: str) -> dict[int, str]:
        """Expressions of what binding finds."""
        found = dict(self.late)
        for at, part in self.parts:
            if inner := part._bound(f"{own}[{at}]"):
                found[at] = part._tuple(f"{own}[{at}]", inner)
        return found

    def _tuple(self, own: str, found: dict[int, str]) -> str:
        return f"({', '.join(({n: f'{own}[{n}]' for n in range(len(self.values))} | found).values())},)"

    def makers(self) -> list[Any]:
        """What makes descriptors, in the order of `filler`."""
        return [made for _, _, made in self.tiles] + [made for _, part in self.parts for made in part.makers()]


Filler: TypeAlias = Callable[[list[Any], list[Any], list[int | None], list[Any] | None], list[Any]]
"""Arguments of a launch, by those that are bound, what makes descriptors, addresses, and tensors where there are any."""
Binder: TypeAlias = Callable[[list[Any], Tokens, list[int | None]], list[Any]]
"""Arguments that are bound, by those that are not, tokens, and addresses of what is kept."""


def _code(head: str, found: dict[int, str]) -> str:
    return "\n    ".join([f"def {head}:", "x = v.copy()", *(f"x[{at}] = {text}" for at, text in found.items()), "return x"])


@functools.lru_cache(maxsize=1024)
def _filler(text: str) -> Filler:
    found: dict[str, Any] = {"described": _describe_tensor}
    exec(text, found)  # text made here, of numbers alone
    fill: Filler = found["fill"]
    return fill


@functools.lru_cache(maxsize=1024)
def _binder(text: str) -> Binder:
    found: dict[str, Any] = {}
    exec(text, found)  # likewise, and of what `Count`s say
    bind: Binder = found["bind"]
    return bind


def _describe_tensor(made: Any, address: int, tensor: Any) -> Any:
    return made(_Place(address) if tensor is None else tensor, address)


def late_counts(values: Sequence[Any]) -> list[tuple[int, str]]:
    """Those that binding finds anew."""
    return [(at, n.text) for at, n in enumerate(values) if isinstance(n, Count)]


def sequence_address(number: int) -> str:
    """Where the tensor of that number lies, of those that are read of the sequences."""
    return f"k[{number}]"


class Launch(NamedTuple):
    """A compiled kernel's launcher, and all it takes; `between`: it writes where no sequence lies; `compiled`: the kernel, which is held
    because Triton 3.8 and later unload it with its object."""

    run: Callable[..., None]
    arguments: Arguments
    between: bool = False
    compiled: Any = None


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

    def maker(self) -> Callable[[Tokens], functools.partial[Tensor]]:
        """What allocates it, by how many tokens there are."""
        allocate, dtype = allocator_on(self.device), self.dtype
        if not any(isinstance(n, Count) for n in (*self.size, *self.stride)):
            known = functools.partial(allocate, self.size, self.stride, dtype)
            return lambda tokens: known
        size, stride = row_function(self.size), row_function(self.stride)
        return lambda tokens: functools.partial(allocate, size(tokens), stride(tokens), dtype)

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
        self.varies = tiles.varies
        self._of_others: OrderedDict[tuple[int, ...], Maps] = OrderedDict()
        self.known: dict[int, Any] = {}

    def __call__(self, base: Any, address: Any) -> Any:
        if len(self.known) >= _MAPS:
            self.known.clear()
        found = self.known[address] = self._make(self._tiles(base, address), self._metadata)[0]
        return found

    def bound(self, tokens: Tokens) -> Maps:
        """The maps of other tokens: these, where the number of tokens is no part of them; else those of as many, wherever they lie."""
        if not self.varies:
            return self
        tiles = self._tiles.bound(tokens)
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

    __slots__ = ("_kept", "_results", "_sized", "_sources", "_ways", "launches", "made", "makers", "parts", "scratch")

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
        self._sized: OrderedDict[Tokens, Sized] = OrderedDict()
        self._ways: list[_Way] | None = None

    def ways(self) -> list[_Way]:
        """How its launches are bound."""
        if self._ways is None:
            self._ways = [_Way.of(launch) for launch in self.launches]
        return self._ways

    def sized(self, tokens: Tokens) -> Sized:
        """What follows from how many tokens there are, for calls of as many."""
        found = self._sized.get(tokens)
        if found is None:
            found = self._sized[tokens] = Sized(self, tokens)
            if len(self._sized) > _SHAPES:
                self._sized.popitem(last=False)
        return found

    def returning(self, count: int, *, packed: bool) -> Template:
        """The same, of which the first `count` tensors made are wanted, and come packed, as `foci.problem.Geometry` says, if that is asked.
        The others are parts of one allocation."""
        made = [new.packed if packed and n < count else new for n, new in enumerate(self.made)]
        return self._with_ways(Template(self.launches, made, self._kept, self._sources, count))

    def unbound(self) -> Template | None:
        """The same, of any sequences; None where some of what it reads is of those alone that it was recorded with."""
        if None in self._sources:
            return None
        return self._with_ways(Template(self.launches, self.made, (), self._sources, self._results))

    def anywhere(self) -> Template | None:
        """`unbound`, which this may be already."""
        return self if not self._kept and None not in self._sources else self.unbound()

    def _with_ways(self, other: Template) -> Template:
        """Another of the same launches, with what was found of them."""
        other._ways = self._ways
        return other

    def as_recorded(self, tokens: Tokens) -> Recording:
        """Bound to the sequences that it was recorded with."""
        rows, columns = map(int, tokens)  # plain ones, as each run counts with what follows from them
        return Recording(self, Binding((rows, columns), self._kept))

    def bound(self, sequences: Any, tokens: Tokens, captures: Inputs) -> Recording:
        """Bound to other sequences."""
        rows, columns = map(int, tokens)
        kept = [t for source in self._sources if source is not None for t in source(sequences, (rows, columns), captures)]
        return Recording(self, Binding((rows, columns), kept))


class _Way(NamedTuple):
    """A launch's launcher, what puts addresses in its arguments, and what binding finds, these, and what makes descriptors."""

    run: Callable[..., None]
    fill: Filler
    bind: Binder | None
    values: list[Any]
    makers: list[Any]
    varies: bool
    between: bool

    @staticmethod
    def of(launch: Launch) -> _Way:
        run, given, between, _ = launch
        makers = given.makers()
        return _Way(run, given.filler(), given.binder(), given.values, makers, any(made.varies for made in makers), between)

    def makers_of(self, tokens: Tokens) -> list[Any]:
        return [made.bound(tokens) for made in self.makers] if self.varies else self.makers


class _Parts(NamedTuple):
    """The first tensors, where they are parts of one allocation: each one's size and strides, by how many tokens there are, and offset."""

    found: list[tuple[Callable[[Tokens], tuple[int, ...]], Callable[[Tokens], tuple[int, ...]], int]]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(made: Sequence[New]) -> _Parts | None:
        found = [(row_function(new.size), row_function(new.stride), new.offset) for new in made if new.offset is not None]
        return _Parts(found, made[0].dtype, made[0].device) if found else None

    def at(self, tokens: Tokens) -> Joint:
        """What allocates them."""
        return Joint([(size(tokens), stride(tokens), at) for size, stride, at in self.found], self.dtype, self.device)


class Joint(NamedTuple):
    """Tensors of these sizes, strides and offsets that are allocated in one piece."""

    parts: Sequence[tuple[tuple[int, ...], tuple[int, ...], int]]
    dtype: torch.dtype
    device: torch.device

    def maker(self) -> Callable[[], list[Tensor]]:
        """What allocates them."""
        last = max(at + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) for size, stride, at in self.parts)
        allocate = functools.partial(torch.empty, (last + 1,), dtype=self.dtype, device=self.device)

        def make() -> list[Tensor]:
            whole = allocate()
            return [whole.as_strided(*part) for part in self.parts]

        return make


class _Scratch(NamedTuple):
    """One allocation for all that nobody reads but the pass: by how many tokens there are, its lines, and those before each tensor."""

    lines: Callable[[Tokens], tuple[int, ...]]
    device: torch.device

    @staticmethod
    def of(made: Sequence[New]) -> _Scratch | None:
        return _Scratch(row_function(list(itertools.accumulate(new.lines for new in made))), made[0].device) if made else None

    def at(self, tokens: Tokens) -> tuple[functools.partial[Tensor], list[int]]:
        """What allocates it, and where in it each tensor lies."""
        ends = [_LINE * lines for lines in self.lines(tokens)]
        return functools.partial(allocator_on(self.device), (ends[-1],), (1,), torch.uint8), [0, *ends[:-1]]


_LINE: Final = 512
"""Bytes that the allocator's own tensors are aligned to."""


class _Place(NamedTuple):
    """What stands for a tensor where its address is all that is asked."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class Sized:
    """What of a pass follows from how many tokens there are.

    Attributes:
        joint, parts: what it allocates in one piece, before the rest, and what allocates that.
        makes: what allocates the rest of what is wanted.
        scratch: what allocates the others, and where in it each lies.
        makers: of descriptors, of each launch.
        makes_rows: what `foci.backends.triton.bound_launch` has found of it.
    """

    __slots__ = ("joint", "makers", "makes", "makes_rows", "parts", "scratch")

    def __init__(self, template: Template, tokens: Tokens) -> None:
        self.joint = None if template.parts is None else template.parts.at(tokens)
        self.parts = None if self.joint is None else self.joint.maker()
        self.makes = [make(tokens) for make in template.makers]
        self.scratch = None if template.scratch is None else template.scratch.at(tokens)
        self.makers = [way.makers_of(tokens) for way in template.ways()]
        self.makes_rows: Any = None

    @property
    def news(self) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
        """Sizes, strides and dtypes of what a run allocates and returns, but for what is `joint`."""
        return [make.args for make in self.makes]

    @property
    def takes_places(self) -> bool:
        """Whether addresses are all that its launches take of tensors: where Triton's Python makes descriptors, it takes tensors."""
        return all(isinstance(made, Maps) for makers in self.makers for made in makers)


class Recording:
    """A pass that can be run again.

    Attributes:
        template: what it is a binding of.
        sized: what of it follows from the tokens.
        tokens: how many there are, where they are packed.
    """

    __slots__ = ("_binding", "_launches", "sized", "template")

    def __init__(self, template: Template, binding: Binding) -> None:
        self.template = template
        self._binding = binding  # holds what the arguments hold the addresses of
        self.sized = sized = template.sized(binding.tokens)
        kept = [None if t is None else t.data_ptr() for t in binding.kept]
        self._launches = [
            (way.run, way.fill, way.values if way.bind is None else way.bind(way.values, binding.tokens, kept), makers)
            for way, makers in zip(template.ways(), sized.makers, strict=True)
        ]

    @property
    def tokens(self) -> Tokens:
        """How many queries and keys there are, where they are packed."""
        return self._binding.tokens

    @property
    def scratch(self) -> tuple[int, list[int]]:
        """Bytes of what a run allocates and nobody reads, and where in them each tensor lies."""
        found = self.sized.scratch
        return (0, []) if found is None else (found[0].args[0][0], found[1])

    def returning(self, count: int, *, packed: bool) -> Recording:
        """The same with `Template.returning`."""
        return Recording(self.template.returning(count, packed=packed), self._binding)

    def run(self, inputs: Inputs, places: list[int | None] | None = None) -> list[Tensor]:
        """Launches with other tensors of the same geometry, alignment and stream, at these places if they are known; returns what the
        pass allocated, in order, as far as it is wanted.
        """
        made = [make() for make in self.sized.makes]
        if self.sized.parts is not None:
            made[:0] = self.sized.parts()
        tensors: list[Any] = [*inputs, *made]
        self.launch(tensor_addresses(tensors) if places is None else places + [t.data_ptr() for t in made], tensors)
        return made

    def of_whole(self) -> Callable[[list[int | None]], None] | None:
        """What launches where every row is of a sequence, for inputs and results at these places; None where that is `launch`."""
        launches = [launch for launch, way in zip(self._launches, self.template.ways(), strict=True) if not way.between]
        if len(launches) == len(self._launches) or self.sized.scratch is not None or not self.sized.takes_places:
            return None

        def launch(addresses: list[int | None]) -> None:
            for run, fill, values, makers in launches:
                run(*fill(values, makers, addresses, None))

        return launch

    def launch(self, addresses: list[int | None], tensors: list[Any] | None = None) -> None:
        """Launches for inputs, and what `run` would allocate, at these places; the tensors may lack where `Sized.takes_places`."""
        if self.sized.scratch is not None:
            allocate, offsets = self.sized.scratch
            whole = allocate()  # lives until all is launched
            start = whole.data_ptr()
            scratch = [start + offset for offset in offsets]
            addresses += scratch
            if tensors is not None:
                tensors += map(_Place, scratch)
        self.launch_at(addresses, tensors)

    def launch_at(self, addresses: list[int | None], tensors: list[Any] | None = None) -> None:
        """Launches for inputs, results and scratch at these places."""
        for run, fill, values, makers in self._launches:
            run(*fill(values, makers, addresses, tensors))
