"""Launch lists that can be repeated: the compiled kernels of a forward or backward pass, with their arguments.

    Template      launches, and the tensors that they allocate. It holds neither starts, lengths nor number of tokens of packed sequences:
                  arguments that depend on the tokens are `Count`s
    LaunchList    a template bound to sequences and a number of tokens; it launches with the addresses of a call

"role" is the number of a tensor of the pass: inputs first, then what the pass allocates.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from foci.backends.contract import Inputs
from foci.backends.gpu import cuda_driver
from foci.backends.gpu.allocations import New, Parts, Scratch
from foci.backends.gpu.cuda_driver import Kernel, Shape, TensorMap, encode_tiles
from foci.backends.gpu.symbolic_tokens import Count, Tokens
from foci.compat.triton import MapFacts

__all__ = ["Arguments", "Binding", "Launch", "LaunchList", "Maps", "Run", "Sized", "Source", "Template", "sequence_address"]

Source: TypeAlias = Callable[[Any, Tokens, Inputs], Inputs]
"""(sequences, tokens, captured tensors) -> the tensors that a pass reads besides its inputs, such as task records."""


class Binding(NamedTuple):
    """The tensors and numbers that a template is bound to."""

    tokens: Tokens
    kept: Inputs  # tensors from the `Source`s


class Arguments(NamedTuple):
    """Arguments of a launch, with gaps that are filled when it is bound, and at each launch.

    The first three values are the number of programs in each direction, those after it parameters, as `cuda_driver.Launch` takes them.
    """

    values: list[int]
    places: list[tuple[int, int]]  # (index, role): filled with an address at each launch
    maps: list[tuple[int, int, Maps]]  # (index, role, maker): filled with a tensor map at each launch
    late: list[tuple[int, str]]  # (index, expression): filled by binding; `t` are the tokens, `k` the addresses of `Binding.kept`

    def add(self, value: int) -> None:
        """Add a number, which may be a `Count`."""
        if isinstance(value, Count):
            self.add_late(value.text)
        else:
            self.values.append(value)

    def add_late(self, text: str) -> None:
        """Add a gap that binding fills in."""
        self.late.append((len(self.values), text))
        self.values.append(0)

    def add_place(self, role: int) -> None:
        """Add the address of a tensor."""
        self.places.append((len(self.values), role))
        self.values.append(0)

    def add_map(self, role: int, maps: Maps) -> None:
        """Add a tensor map."""
        self.maps.append((len(self.values), role, maps))
        self.values.append(0)

    def binder(self) -> Binder | None:
        """Generate the function that fills in `late` when a template is bound; None if there is nothing to fill in."""
        if not self.late:
            return None
        lines = ["def bind(v, t, k):", "x = v.copy()", *(f"x[{at}] = {text}" for at, text in self.late), "return x"]
        binder: Binder = _generated("bind", "\n    ".join(lines))
        return binder

    def starter(self) -> Starter:
        """Generate the function that makes the function that launches: straight-line code, without a loop."""
        fills = [f"slots[{at - _GRID}] = a[{role}]" for at, role in self.places]
        for n, (at, role, _) in enumerate(self.maps):  # the local name keeps the map alive
            fills.append(f"pointers[{at - _GRID}] = map{n} = known{n}(a[{role}]) or make{n}(a[{role}])")
        finds = "".join(f"(known{n}, make{n}), " for n in range(len(self.maps)))
        lines = [
            "def start(slots, pointers, maps, lock, run, call, recover):",
            "    config, kernel, places, extra = call",
            *([f"    {finds} = [(each.known.get, each) for each in maps]"] if finds else ()),
            "    def launch(a):",
            "        with lock:",
            *(f"            {line}" for line in fills),
            "            error = run(config, kernel, places, extra)",
            "            if error:",
            "                recover(error)",
            "    return launch",
        ]
        starter: Starter = _generated("start", "\n".join(lines))
        return starter


_GRID: Final = 3
Binder: TypeAlias = Callable[[list[int], Tokens, list[int | None]], list[int]]
"""(values, tokens, addresses of `Binding.kept`) -> bound values."""
Run: TypeAlias = Callable[[list[Any]], None]
"""Launches for the addresses of a pass's tensors, by role."""
Starter: TypeAlias = Callable[..., Run]
"""Memory of a launch and what belongs to it (`cuda_driver.Launch`) -> the function that launches."""


@functools.lru_cache(maxsize=1024)
def _generated(name: str, text: str) -> Any:
    namespace: dict[str, Any] = {}
    exec(text, namespace)  # generated here, from numbers and the expressions of `Count`s
    return namespace[name]


def sequence_address(number: int) -> str:
    """Expression of the address of a tensor in `Binding.kept`."""
    return f"k[{number}]"


class Launch:
    """A launch of a kernel.

    Args:
        kernel: a loaded one.
        shape: of its launches.
        stream: of the launch.
        arguments: its grid and parameters.

    Attributes:
        maps: makers of its tensor maps.
        between: it only writes rows that belong to no sequence.
    """

    __slots__ = ("_bind", "_kernel", "_shape", "_start", "_stream", "_values", "between", "maps")

    def __init__(self, kernel: Kernel, shape: Shape, stream: int, arguments: Arguments, *, between: bool) -> None:
        self._kernel, self._shape, self._stream, self.between = kernel, shape, stream, between
        self._values, self._bind, self._start = arguments.values, arguments.binder(), arguments.starter()
        self.maps = [maps for _, _, maps in arguments.maps]

    def bound(self, tokens: Tokens, kept: list[int | None], maps: Sequence[Maps]) -> Run:
        """Return the function that launches for a number of tokens, sequences at these addresses, and makers of maps bound to them."""
        values = self._values if self._bind is None else self._bind(self._values, tokens, kept)
        if 0 in values[:_GRID]:
            return _nothing
        memory = cuda_driver.Launch(self._kernel, self._shape, values[:_GRID], self._stream, values[_GRID:])
        return self._start(memory.slots, memory.pointers, maps, memory.lock, *memory.call, memory.recover)


def _nothing(addresses: list[Any]) -> None:
    """The launch of no programs."""


class Maps:
    """Tensor maps of a tensor, made once for each of its addresses.

    Args:
        facts: how the kernel reads tiles.
        shape, strides: of the tensor, in elements; lengths may be `Count`s.

    Attributes:
        known: maps by address.
    """

    def __init__(self, facts: MapFacts, shape: Sequence[int], strides: Sequence[int]) -> None:
        self._facts, self._shape, self._strides = facts, (*shape,), strides
        self._of_others: OrderedDict[tuple[int, ...], Maps] = OrderedDict()
        self.known: dict[int, TensorMap] = {}

    def __call__(self, address: int) -> TensorMap:
        """The map for a tensor at an address that is not known."""
        if len(self.known) >= _MAPS:
            self.known.clear()
        dtype, item_bytes, tile, swizzle = self._facts
        made = self.known[address] = encode_tiles(address, dtype, item_bytes, self._shape, self._strides, tile, swizzle)
        return made

    def bound(self, tokens: Tokens) -> Maps:
        """The maker for another number of tokens: this one, if maps do not depend on it."""
        if not any(isinstance(n, Count) for n in self._shape):
            return self
        shape = tuple([n.of(tokens) if isinstance(n, Count) else n for n in self._shape])
        maps = self._of_others.get(shape)
        if maps is None:
            maps = self._of_others[shape] = type(self)(self._facts, shape, self._strides)
            if len(self._of_others) > _SHAPES:
                self._of_others.popitem(last=False)
        return maps


_MAPS: Final = 256
_SHAPES: Final = 64


class Template:
    """A launch list that can be repeated once it is bound to sequences. A dense one is bound to the tensors that it was built with.

    Args:
        has_input: for each input whether it is a tensor, and not None, in every call.
        launches: in the order in which they run.
        news: the tensors that the pass allocates.
        kept: the tensors of `sources` in the call that built it.
        sources: functions that return the tensors it reads besides its inputs.
        results: number of `news` that it returns, all by default; the rest share one scratch allocation.
    """

    __slots__ = ("_has_input", "_kept", "_results", "_sized", "_sources", "launches", "makers", "news", "parts", "runner", "scratch")

    def __init__(
        self, has_input: tuple[bool, ...], launches: list[Launch], news: Sequence[New], kept: Inputs, sources: Sequence[Source | None],
        results: int | None = None,
    ) -> None:  # fmt: skip
        self._has_input = has_input
        self.launches = launches
        self.news = news
        self.parts = Parts.of(news[:results])
        self.makers = [new.maker() for new in news[:results] if new.offset is None]
        self.scratch = None if results is None else Scratch.of(news[results:])
        self._kept: Inputs = kept
        self._sources = sources
        self._results = results
        self._sized: OrderedDict[Tokens, Sized] = OrderedDict()
        self.runner = self._make_runner()

    def _make_runner(self) -> Callable[..., Callable[..., list[Tensor]]]:
        """Generate the function that makes `LaunchList.run` of what is bound: straight-line code, as every call runs it."""
        joint = 0 if self.parts is None else len(self.parts.layouts)
        results = [f"r{n}" for n in range(joint + len(self.makers))]
        addresses = "".join(f"{each}.data_ptr(), " for each in results)
        inputs = "".join(f"t{n}, " for n in range(len(self._has_input)))
        input_addresses = "".join(f"t{n}.data_ptr(), " if is_tensor else "None, " for n, is_tensor in enumerate(self._has_input))
        makes = "".join(f"make{n}, " for n in range(len(self.makers)))
        launches = "".join(f"launch{n}, " for n in range(len(self.launches)))
        lines = [
            "def bind(parts, makes, scratch, launches):",
            *([f"    {makes} = makes"] if makes else ()),
            *([f"    {launches} = launches"] if launches else ()),
            *(["    allocate, offsets = scratch"] if self.scratch is not None else ()),
            "    def run(inputs, a=None):",
            *([f"        {', '.join(results[:joint])}, = parts()"] if joint else ()),
            *(f"        {result} = make{n}()" for n, result in enumerate(results[joint:])),
            "        if a is None:",
            f"            {inputs} = inputs" if inputs else "            pass",
            f"            a = [{input_addresses}{addresses}]",
            "        else:",
            f"            a += ({addresses})",
            *(["        buffer = allocate()", "        start = buffer.data_ptr()", "        a += [start + offset for offset in offsets]"]
              if self.scratch is not None else ()),
            *(f"        launch{n}(a)" for n in range(len(self.launches))),
            f"        return [{', '.join(results)}]",
            "    return run",
        ]  # fmt: skip
        runner: Callable[..., Callable[..., list[Tensor]]] = _generated("bind", "\n".join(lines))
        return runner

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
        return Template(self._has_input, self.launches, news, self._kept, self._sources, count)

    def unbound(self) -> Template | None:
        """Return the template for any sequences; None if it reads a tensor for which it has no `Source`."""
        if None in self._sources:
            return None
        return Template(self._has_input, self.launches, self.news, (), self._sources, self._results)

    def anywhere(self) -> Template | None:
        """`unbound`; this template if it is that already."""
        return self if not self._kept and None not in self._sources else self.unbound()

    def as_built(self, tokens: Tokens) -> LaunchList:
        """Bind to the sequences that it was built with."""
        rows, columns = map(int, tokens)  # plain integers: arithmetic on `Count`s would slow each run down
        return LaunchList(self, Binding((rows, columns), self._kept))

    def bound(self, sequences: Any, tokens: Tokens, captures: Inputs) -> LaunchList:
        """Bind to other sequences."""
        rows, columns = map(int, tokens)
        kept = [t for source in self._sources if source is not None for t in source(sequences, (rows, columns), captures)]
        return LaunchList(self, Binding((rows, columns), kept))


class Sized:
    """The parts of a launch list that depend on the number of tokens.

    Attributes:
        joint, parts: the first tensors if they share one allocation, and the function that allocates them; else None.
        makes: functions that allocate the other results.
        scratch: (function that allocates the scratch memory, byte offset of each tensor), or None.
        maps: makers of tensor maps, for each launch.
        makes_rows: cache of `foci.backends.gpu.bound_launch`.
    """

    __slots__ = ("joint", "makes", "makes_rows", "maps", "parts", "scratch")

    def __init__(self, template: Template, tokens: Tokens) -> None:
        self.joint = None if template.parts is None else template.parts.at(tokens)
        self.parts = None if self.joint is None else self.joint.maker()
        self.makes = [make(tokens) for make in template.makers]
        self.scratch = None if template.scratch is None else template.scratch.at(tokens)
        self.maps = [[maps.bound(tokens) for maps in launch.maps] for launch in template.launches]
        self.makes_rows: Any = None

    @property
    def news(self) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
        """Sizes, strides and dtypes of the results that are not `joint`."""
        return [make.args for make in self.makes]


class LaunchList:
    """A template bound to sequences: launches that can be repeated.

    Attributes:
        template: the template.
        sized: what depends on the number of tokens.
        run: function of inputs of the same geometry, alignment and stream, and optionally of a list of their addresses, which it extends.
            It launches and returns the results, in order.
    """

    __slots__ = ("_binding", "_launches", "run", "sized", "template")

    def __init__(self, template: Template, binding: Binding) -> None:
        self.template = template
        self._binding = binding  # keeps tensors alive whose addresses are in the arguments
        self.sized = sized = template.sized(binding.tokens)
        kept = [None if t is None else t.data_ptr() for t in binding.kept]
        self._launches = [launch.bound(binding.tokens, kept, maps) for launch, maps in zip(template.launches, sized.maps, strict=True)]
        self.run = template.runner(sized.parts, sized.makes, sized.scratch, self._launches)

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

    def of_whole(self) -> Run | None:
        """Return a function that launches for addresses of inputs and results, without the kernels that fill gaps; None if there are no
        such kernels."""
        launches = [run for run, launch in zip(self._launches, self.template.launches, strict=True) if not launch.between]
        if len(launches) == len(self._launches) or self.sized.scratch is not None:
            return None

        def launch(addresses: list[int | None]) -> None:
            for run in launches:
                run(addresses)

        return launch

    def launch(self, addresses: list[int | None]) -> None:
        """Launch for addresses of inputs and results, with scratch memory from the allocator."""
        if self.sized.scratch is not None:
            allocate, offsets = self.sized.scratch
            buffer = allocate()  # lives until all is launched
            start = buffer.data_ptr()
            addresses += [start + offset for offset in offsets]
        for run in self._launches:
            run(addresses)
