"""Launch lists that can be repeated: the compiled kernels of a forward or backward pass, with their arguments.

    Template      launches, and the tensors that they allocate. It holds neither starts, lengths nor number of tokens of packed sequences:
                  arguments that depend on the tokens are `Count`s
    LaunchList    a template bound to sequences and a number of tokens; it launches with the addresses of a call

"role" is the number of a tensor of the pass: inputs first, then what the pass allocates.
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
from foci.backends.gpu.allocations import New, Parts, Scratch
from foci.backends.gpu.stream_state import tensor_addresses
from foci.backends.gpu.symbolic_tokens import Count, Tokens

__all__ = [
    "Arguments",
    "Binding",
    "Launch",
    "LaunchList",
    "Maps",
    "Sized",
    "Source",
    "Template",
    "Tiles",
    "late_counts",
    "sequence_address",
]

Source: TypeAlias = Callable[[Any, Tokens, Inputs], Inputs]
"""(sequences, tokens, captured tensors) -> the tensors that a pass reads besides its inputs, such as task records."""


class Binding(NamedTuple):
    """The tensors and numbers that a template is bound to."""

    tokens: Tokens
    kept: Inputs  # tensors from the `Source`s


class Tiles(NamedTuple):
    """A tensor descriptor without its base. Called with a base, it makes the descriptor."""

    kind: type
    rest: dict[str, Any]
    known: Mapping[int, Any] = types.MappingProxyType({})
    """Always empty, for the interface of `Maps`: a cached descriptor would keep its tensor alive."""

    def __call__(self, base: Any, address: Any) -> Any:
        descriptor: Any = object.__new__(self.kind)  # checked when the list was built
        descriptor.__dict__ = {"base": base, **self.rest}
        return descriptor

    @property
    def varies(self) -> bool:
        """Whether the shape depends on the number of tokens."""
        return any(isinstance(n, Count) for n in self.rest["shape"])

    def bound(self, tokens: Tokens) -> Tiles:
        """Return the tiles for another number of tokens."""
        if not self.varies:
            return self
        shape = [n.of(tokens) if isinstance(n, Count) else n for n in self.rest["shape"]]
        return self._replace(rest={**self.rest, "shape": shape})


class Arguments(NamedTuple):
    """Arguments of a launch, with gaps that are filled when it is bound, and at each launch."""

    values: list[Any]
    places: list[tuple[int, int]]  # (index, role): filled with an address at each launch
    tiles: list[tuple[int, int, Any]]  # (index, role, `Tiles` or `Maps`): filled with a descriptor at each launch
    parts: list[tuple[int, Arguments]]  # (index, arguments): tuples that have gaps themselves
    late: list[tuple[int, str]]  # (index, expression): filled by binding; `t` are the tokens, `k` the addresses of `Binding.kept`

    @property
    def is_constant(self) -> bool:
        """Whether there are no gaps."""
        return not (self.places or self.tiles or self.parts or self.late)

    def after(self, head: tuple[Any, ...]) -> Arguments:
        """Put `head` before these arguments."""
        by, (values, places, tiles, parts, late) = len(head), self
        return Arguments(
            [*head, *values], [(at + by, role) for at, role in places], [(at + by, role, maker) for at, role, maker in tiles],
            [(at + by, part) for at, part in parts], [*late_counts(head), *((at + by, text) for at, text in late)],
        )  # fmt: skip

    def filler(self) -> Filler:
        """Generate the function that fills in addresses at each launch: straight-line code, without a loop."""
        return _filler(_code("fill(v, m, a, o)", self._filled("v", itertools.count())))

    def binder(self) -> Binder | None:
        """Generate the function that fills in `late` when a template is bound; None if there is nothing to fill in."""
        exprs = self._bound("v")
        return _binder(_code("bind(v, t, k)", exprs)) if exprs else None

    def _filled(self, prefix: str, makers: Iterator[int]) -> dict[int, str]:
        """Expressions of arguments with addresses, by index, over `m`, the `makers`, `a`, the addresses, and `o`, the tensors or None."""
        exprs = {at: f"a[{role}]" for at, role in self.places}
        for (at, role, _), n in zip(self.tiles, makers, strict=False):
            exprs[at] = f"m[{n}].known.get(a[{role}]) or described(m[{n}], a[{role}], o and o[{role}])"
        for at, part in self.parts:
            if inner := part._filled(f"{prefix}[{at}]", makers):
                exprs[at] = part._tuple(f"{prefix}[{at}]", inner)
        return exprs

    def _bound(self, prefix: str) -> dict[int, str]:
        """Expressions of arguments that binding fills in, by index."""
        exprs = dict(self.late)
        for at, part in self.parts:
            if inner := part._bound(f"{prefix}[{at}]"):
                exprs[at] = part._tuple(f"{prefix}[{at}]", inner)
        return exprs

    def _tuple(self, prefix: str, exprs: dict[int, str]) -> str:
        return f"({', '.join(({n: f'{prefix}[{n}]' for n in range(len(self.values))} | exprs).values())},)"

    def makers(self) -> list[Any]:
        """`Tiles` and `Maps`, in the order in which `filler` numbers them."""
        return [maker for _, _, maker in self.tiles] + [maker for _, part in self.parts for maker in part.makers()]


Filler: TypeAlias = Callable[[list[Any], list[Any], list[int | None], list[Any] | None], list[Any]]
"""(bound arguments, makers of descriptors, addresses, tensors or None) -> arguments of a launch."""
Binder: TypeAlias = Callable[[list[Any], Tokens, list[int | None]], list[Any]]
"""(arguments, tokens, addresses of `Binding.kept`) -> bound arguments."""


def _code(head: str, exprs: dict[int, str]) -> str:
    return "\n    ".join([f"def {head}:", "x = v.copy()", *(f"x[{at}] = {text}" for at, text in exprs.items()), "return x"])


@functools.lru_cache(maxsize=1024)
def _filler(text: str) -> Filler:
    namespace: dict[str, Any] = {"described": _describe_tensor}
    exec(text, namespace)  # generated here, from numbers alone
    fill: Filler = namespace["fill"]
    return fill


@functools.lru_cache(maxsize=1024)
def _binder(text: str) -> Binder:
    namespace: dict[str, Any] = {}
    exec(text, namespace)  # generated here, from numbers and the expressions of `Count`s
    bind: Binder = namespace["bind"]
    return bind


def _describe_tensor(maker: Any, address: int, tensor: Any) -> Any:
    return maker(_Place(address) if tensor is None else tensor, address)


def late_counts(values: Sequence[Any]) -> list[tuple[int, str]]:
    """`Arguments.late` of the `Count`s among values."""
    return [(at, n.text) for at, n in enumerate(values) if isinstance(n, Count)]


def sequence_address(number: int) -> str:
    """Expression of the address of a tensor in `Binding.kept`."""
    return f"k[{number}]"


class Launch(NamedTuple):
    """A launch of a compiled kernel."""

    run: Callable[..., None]  # the kernel's launcher
    arguments: Arguments
    between: bool = False  # it only writes rows that belong to no sequence
    compiled: Any = None  # keeps the kernel alive: Triton 3.8 and later unload it with its object


class Maps:
    """Cache of TMA descriptors by the base address of the tensor; all else of them is fixed by the geometry."""

    def __init__(self, tiles: Tiles, make: Callable[..., list[Any]], metadata: Any) -> None:
        self._tiles, self._make, self._metadata = tiles, make, metadata
        self.varies = tiles.varies
        self._of_others: OrderedDict[tuple[int, ...], Maps] = OrderedDict()
        self.known: dict[int, Any] = {}

    def __call__(self, base: Any, address: Any) -> Any:
        if len(self.known) >= _MAPS:
            self.known.clear()
        descriptor = self.known[address] = self._make(self._tiles(base, address), self._metadata)[0]
        return descriptor

    def bound(self, tokens: Tokens) -> Maps:
        """The cache for another number of tokens: this one, if the descriptors do not depend on it."""
        if not self.varies:
            return self
        tiles = self._tiles.bound(tokens)
        shape = tuple(tiles.rest["shape"])
        maps = self._of_others.get(shape)
        if maps is None:
            maps = self._of_others[shape] = Maps(tiles, self._make, self._metadata)
            if len(self._of_others) > _SHAPES:
                self._of_others.popitem(last=False)
        return maps


_MAPS: Final = 256
_SHAPES: Final = 64


class Template:
    """A launch list that can be repeated once it is bound to sequences. A dense one is bound to the tensors that it was built with."""

    __slots__ = ("_kept", "_results", "_sized", "_sources", "_ways", "launches", "makers", "news", "parts", "scratch")

    def __init__(
        self, launches: list[Launch], news: Sequence[New], kept: Inputs, sources: Sequence[Source | None], results: int | None = None
    ) -> None:
        self.launches = launches
        self.news = news
        self.parts = Parts.of(news[:results])
        self.makers = [new.maker() for new in news[:results] if new.offset is None]
        self.scratch = None if results is None else Scratch.of(news[results:])
        self._kept: Inputs = kept
        self._sources = sources
        self._results = results
        self._sized: OrderedDict[Tokens, Sized] = OrderedDict()
        self._ways: list[_Way] | None = None

    def ways(self) -> list[_Way]:
        """The launches, with the functions that fill in their arguments."""
        if self._ways is None:
            self._ways = [_Way.of(launch) for launch in self.launches]
        return self._ways

    def sized(self, tokens: Tokens) -> Sized:
        """Return what depends on the number of tokens, cached by it."""
        sized = self._sized.get(tokens)
        if sized is None:
            sized = self._sized[tokens] = Sized(self, tokens)
            if len(self._sized) > _SHAPES:
                self._sized.popitem(last=False)
        return sized

    def returning(self, count: int, *, packed: bool) -> Template:
        """Return the template with only the first `count` of the tensors that it allocates, as `New.packed` if `packed`. The others share
        one scratch allocation."""
        news = [new.packed if packed and n < count else new for n, new in enumerate(self.news)]
        return self._with_ways(Template(self.launches, news, self._kept, self._sources, count))

    def unbound(self) -> Template | None:
        """Return the template for any sequences; None if it reads a tensor for which it has no `Source`."""
        if None in self._sources:
            return None
        return self._with_ways(Template(self.launches, self.news, (), self._sources, self._results))

    def anywhere(self) -> Template | None:
        """`unbound`; this template if it is that already."""
        return self if not self._kept and None not in self._sources else self.unbound()

    def _with_ways(self, other: Template) -> Template:
        """Let another template of the same launches share their generated functions."""
        other._ways = self._ways
        return other

    def as_built(self, tokens: Tokens) -> LaunchList:
        """Bind to the sequences that it was built with."""
        rows, columns = map(int, tokens)  # plain integers: arithmetic on `Count`s would slow each run down
        return LaunchList(self, Binding((rows, columns), self._kept))

    def bound(self, sequences: Any, tokens: Tokens, captures: Inputs) -> LaunchList:
        """Bind to other sequences."""
        rows, columns = map(int, tokens)
        kept = [t for source in self._sources if source is not None for t in source(sequences, (rows, columns), captures)]
        return LaunchList(self, Binding((rows, columns), kept))


class _Way(NamedTuple):
    """A launch, with the functions that fill in its arguments."""

    run: Callable[..., None]
    fill: Filler
    bind: Binder | None
    values: list[Any]
    makers: list[Any]  # of descriptors
    varies: bool  # descriptors depend on the number of tokens
    between: bool  # see `Launch`

    @staticmethod
    def of(launch: Launch) -> _Way:
        run, arguments, between, _ = launch
        makers = arguments.makers()
        return _Way(run, arguments.filler(), arguments.binder(), arguments.values, makers, any(maker.varies for maker in makers), between)

    def find_makers(self, tokens: Tokens) -> list[Any]:
        return [maker.bound(tokens) for maker in self.makers] if self.varies else self.makers


class _Place(NamedTuple):
    """Stands in for a tensor of which only the address is read."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class Sized:
    """The parts of a launch list that depend on the number of tokens.

    Attributes:
        joint, parts: the first tensors if they share one allocation, and the function that allocates them; else None.
        makes: functions that allocate the other results.
        scratch: (function that allocates the scratch memory, byte offset of each tensor), or None.
        makers: makers of descriptors, for each launch.
        makes_rows: cache of `foci.backends.gpu.bound_launch`.
    """

    __slots__ = ("joint", "makers", "makes", "makes_rows", "parts", "scratch")

    def __init__(self, template: Template, tokens: Tokens) -> None:
        self.joint = None if template.parts is None else template.parts.at(tokens)
        self.parts = None if self.joint is None else self.joint.maker()
        self.makes = [make(tokens) for make in template.makers]
        self.scratch = None if template.scratch is None else template.scratch.at(tokens)
        self.makers = [way.find_makers(tokens) for way in template.ways()]
        self.makes_rows: Any = None

    @property
    def news(self) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
        """Sizes, strides and dtypes of the results that are not `joint`."""
        return [make.args for make in self.makes]

    @property
    def takes_places(self) -> bool:
        """Whether launches need only the addresses of tensors. They need the tensors where Triton's launcher makes descriptors."""
        return all(isinstance(maker, Maps) for makers in self.makers for maker in makers)


class LaunchList:
    """A template bound to sequences: launches that can be repeated.

    Attributes:
        template: the template.
        sized: what depends on the number of tokens.
    """

    __slots__ = ("_binding", "_launches", "sized", "template")

    def __init__(self, template: Template, binding: Binding) -> None:
        self.template = template
        self._binding = binding  # keeps tensors alive whose addresses are in the arguments
        self.sized = sized = template.sized(binding.tokens)
        kept = [None if t is None else t.data_ptr() for t in binding.kept]
        self._launches = [
            (way.run, way.fill, way.values if way.bind is None else way.bind(way.values, binding.tokens, kept), makers)
            for way, makers in zip(template.ways(), sized.makers, strict=True)
        ]

    @property
    def tokens(self) -> Tokens:
        """Number of queries and of keys; packed, of all sequences together."""
        return self._binding.tokens

    @property
    def scratch(self) -> tuple[int, list[int]]:
        """(bytes of the scratch memory, offset of each tensor in it)."""
        scratch = self.sized.scratch
        return (0, []) if scratch is None else (scratch[0].args[0][0], scratch[1])

    def returning(self, count: int, *, packed: bool) -> LaunchList:
        """See `Template.returning`."""
        return LaunchList(self.template.returning(count, packed=packed), self._binding)

    def run(self, inputs: Inputs, places: list[int | None] | None = None) -> list[Tensor]:
        """Launch with other tensors of the same geometry, alignment and stream. Returns the results, in order.

        `places`: addresses of the inputs, if the caller has them.
        """
        results = [make() for make in self.sized.makes]
        if self.sized.parts is not None:
            results[:0] = self.sized.parts()
        tensors: list[Any] = [*inputs, *results]
        self.launch(tensor_addresses(tensors) if places is None else places + [t.data_ptr() for t in results], tensors)
        return results

    def of_whole(self) -> Callable[[list[int | None]], None] | None:
        """Return a function that launches for addresses of inputs and results, without the kernels that fill gaps; None if there are no
        such kernels."""
        launches = [launch for launch, way in zip(self._launches, self.template.ways(), strict=True) if not way.between]
        if len(launches) == len(self._launches) or self.sized.scratch is not None or not self.sized.takes_places:
            return None

        def launch(addresses: list[int | None]) -> None:
            for run, fill, values, makers in launches:
                run(*fill(values, makers, addresses, None))

        return launch

    def launch(self, addresses: list[int | None], tensors: list[Any] | None = None) -> None:
        """Launch for addresses of inputs and results, with scratch memory from the allocator. `tensors` may be None if
        `Sized.takes_places`."""
        if self.sized.scratch is not None:
            allocate, offsets = self.sized.scratch
            buffer = allocate()  # lives until all is launched
            start = buffer.data_ptr()
            scratch = [start + offset for offset in offsets]
            addresses += scratch
            if tensors is not None:
                tensors += map(_Place, scratch)
        for run, fill, values, makers in self._launches:
            run(*fill(values, makers, addresses, tensors))
