"""Passes noted once and run again: the second call of one geometry launches at once, with nothing worked out anew.

What a pass launches depends on shapes, strides, numbers and the plan, not on addresses. A `Recorder` runs a pass as it is
written and notes the compiled kernels with their arguments, as a `Template`; a `Recording` runs them again through Triton's
own launchers, with the addresses of another call. Of packed sequences neither where they lie nor how many tokens there are
is part of a template: numbers that follow from the tokens are `Count`s, found anew when it is bound to other sequences.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from foci.backends.contract import Inputs
from foci.backends.triton.arguments import Config, Strides
from foci.backends.triton.compiling import RELEASE, Waiting, launch_waiting, waiting
from foci.backends.triton.counts import Count, Tokens, row_of

__all__ = [
    "Kept", "Recorder", "Recording", "Source", "Template", "free_stream", "is_for_graphs", "places_of", "plain_arguments", "stream_of",
]  # fmt: skip

Source: TypeAlias = Callable[[Any, Tokens, Inputs], Inputs]
"""What a pass reads of sequences besides its inputs: the tensors, of the sequences, the tokens and the captured tensors."""


def places_of(tensors: Inputs) -> list[int | None]:
    """Addresses."""
    return [None if t is None else t.data_ptr() for t in tensors]


def stream_of(tensor: Tensor) -> int:
    """The stream that work on the tensor's device goes to."""
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if tensor.is_cuda else 0


def free_stream(tensor: Tensor) -> int | None:
    """The stream, if launches may go around Triton: the tensor is on the current device, nobody watches, and no CUDA graph is made, which
    outlives what is kept. Else None.
    """
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a chain of hooks, in older releases one or None
        return None
    if not tensor.is_cuda:
        return 0
    device = tensor.get_device()
    if device != torch._C._cuda_getDevice() or torch._C._cuda_isCurrentStreamCapturing():
        return None
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return None if _is_of_graphs(device, stream) else stream


def is_for_graphs(tensor: Tensor) -> bool:
    """Whether what is allocated now belongs to CUDA graphs: one is captured, or about to be."""
    if not tensor.is_cuda:
        return False
    device = tensor.get_device()
    return torch._C._cuda_isCurrentStreamCapturing() or _is_of_graphs(device, torch._C._cuda_getCurrentRawStream(device))


def _is_of_graphs(device: int, stream: int) -> bool:
    """Whether Inductor captures on this stream. It first runs there what it will capture, in the memory of its graphs, and lets nothing
    stay in that but results.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees") if stream else None  # the default stream is not its own
    manager = None if trees is None else trees.get_manager(device, create_if_none_exists=False)
    return manager is not None and manager.stream.cuda_stream == stream


class _Binding(NamedTuple):
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

    def bound(self, binding: _Binding) -> Tiles:
        """These tiles of other tokens."""
        shape = self.rest["shape"]
        if not any(isinstance(n, Count) for n in shape):
            return self
        return self._replace(rest={**self.rest, "shape": [n.of(binding.tokens) if isinstance(n, Count) else n for n in shape]})


class _Arguments(NamedTuple):
    """Arguments without their addresses: `places` (index, tensor of the pass), `tiles` likewise for descriptors, with what makes
    one of a tensor and its address, `parts` for tuples with addresses inside, and `late` for what binding finds."""

    values: list[Any]
    places: list[tuple[int, int]]
    tiles: list[tuple[int, int, Any]]
    parts: list[tuple[int, _Arguments]]
    late: list[tuple[int, Callable[[_Binding], Any]]]

    def after(self, head: tuple[Any, ...]) -> _Arguments:
        """These arguments behind others."""
        by, (values, places, tiles, parts, late) = len(head), self
        return _Arguments(
            [*head, *values], [(at + by, role) for at, role in places], [(at + by, role, made) for at, role, made in tiles],
            [(at + by, part) for at, part in parts], [*_counts(head), *((at + by, find) for at, find in late)],
        )  # fmt: skip

    def bound(self, binding: _Binding) -> _Arguments:
        """These arguments with nothing late."""
        if not (self.late or self.tiles or self.parts):
            return self
        values = self.values.copy()
        for at, find in self.late:
            values[at] = find(binding)
        tiles = [(at, role, made.bound(binding)) for at, role, made in self.tiles]
        return _Arguments(values, self.places, tiles, [(at, part.bound(binding)) for at, part in self.parts], [])


def _counts(values: Sequence[Any]) -> list[tuple[int, Callable[[_Binding], Any]]]:
    """Those that binding finds anew."""
    return [(at, functools.partial(_counted, n.of)) for at, n in enumerate(values) if isinstance(n, Count)]


def _counted(of: Callable[[Tokens], int], binding: _Binding) -> int:
    return of(binding.tokens)


def _address(number: int, binding: _Binding) -> int:
    tensor = binding.kept[number]
    assert tensor is not None, "read when it was recorded"
    return tensor.data_ptr()


def _part(part: _Arguments, binding: _Binding) -> tuple[Any, ...]:
    values = part.values.copy()
    for at, find in part.late:
        values[at] = find(binding)
    return tuple(values)


class _Launch(NamedTuple):
    """A compiled kernel's launcher, and all it takes."""

    run: Callable[..., None]
    arguments: _Arguments


class _New(NamedTuple):
    """A tensor that each run allocates."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def packed(self) -> _New:
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


def _defaults(function: Any, given: int) -> tuple[Any, ...]:
    """Of the parameters after those that are given: a launcher wants them all."""
    return tuple(parameter.default for parameter in list(function.signature.parameters.values())[given:])


_UNWATCHED: Final = (None, None, None)
"""What a launcher takes for those who watch it."""
_NUMBERS_ALONE: Final = frozenset((int, float, bool, str, type(None), Config, Strides))


class _UnknownTensor(Exception):
    """An argument that is no tensor of the pass, nor one that is kept."""


class _Maps:
    """The copy engine's maps of tiles by the address of what they lie in: the same for as long as the geometry is."""

    def __init__(self, tiles: Tiles, make: Callable[..., list[Any]], metadata: Any) -> None:
        self._tiles, self._make, self._metadata = tiles, make, metadata
        self._varies = any(isinstance(n, Count) for n in tiles.rest["shape"])
        self._of_others: OrderedDict[tuple[int, ...], _Maps] = OrderedDict()
        self.known: dict[int, Any] = {}

    def __call__(self, base: Any, address: Any) -> Any:
        if len(self.known) >= _MAPS:
            self.known.clear()
        found = self.known[address] = self._make(self._tiles(base, address), self._metadata)[0]
        return found

    def bound(self, binding: _Binding) -> _Maps:
        """The maps of other tokens: these, where the number of tokens is no part of them; else those of as many, wherever they lie."""
        if not self._varies:
            return self
        tiles = self._tiles.bound(binding)
        shape = tuple(tiles.rest["shape"])
        found = self._of_others.get(shape)
        if found is None:
            found = self._of_others[shape] = _Maps(tiles, self._make, self._metadata)
            if len(self._of_others) > _SHAPES:
                self._of_others.popitem(last=False)
        return found


_MAPS: Final = 256
_SHAPES: Final = 64


def direct(compiled: Any, place: tuple[Any, ...], noted: _Arguments) -> _Launch | None:
    """A launch by the compiled function at the bottom of Triton's launcher, which Python around it doubles the cost of.

    Only where that is as it is in Triton 3.6; else None. Arguments that describe tiles become a map, lengths and strides.
    """
    launcher = compiled.run
    bottom: Any = getattr(launcher, "launch", None)
    metadata: list[Any] = []
    if isinstance(bottom, types.FunctionType) and bottom.__closure__:
        around = dict(zip(bottom.__code__.co_freevars, (cell.cell_contents for cell in bottom.__closure__), strict=True))
        bottom, metadata = around.get("launcher"), list(around.get("tensordesc_meta") or ())
    plain = callable(bottom) and not (launcher.global_scratch_size or launcher.profile_scratch_size)
    if not plain or RELEASE != (3, 6) or len(metadata) != len(noted.tiles) or None in metadata:
        return None
    from triton.backends.nvidia.driver import make_tensordesc_arg

    values: list[Any] = []
    moved: dict[int, int] = {}
    tiles: list[tuple[int, int, Any]] = []
    described = {at: (role, made, facts) for (at, role, made), facts in zip(noted.tiles, metadata, strict=True)}
    for at, value in enumerate(noted.values):
        moved[at] = len(values)
        if at in described:
            role, made, facts = described[at]
            tiles.append((moved[at], role, _Maps(made, make_tensordesc_arg, facts)))
            values += [None, *made.rest["shape"], *made.rest["strides"]]
        else:
            values.append(value)
    late = [*_counts(values), *((moved[at], find) for at, find in noted.late)]
    places, parts = [(moved[at], role) for at, role in noted.places], [(moved[at], part) for at, part in noted.parts]
    arguments = _Arguments(values, places, tiles, parts, late)
    settings = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)  # and no scratch memory
    return _Launch(bottom, arguments.after((*place, *settings, compiled.packed_metadata, *_UNWATCHED)))


class Recorder:
    """Runs a pass and notes it.

    Args:
        inputs: the tensors a pass is given, each object once; None where it lacks one.
        stream: what `stream_of` gives; None to note nothing.

    Attributes:
        is_ahead: whether the pass is one to come, of which nothing is kept.
    """

    is_ahead = False

    def __init__(self, inputs: Inputs, stream: int | None) -> None:
        self._stream = stream
        self._tensors: list[Tensor | None] = list(inputs)
        self._made: list[_New] = []
        self._kept: list[Tensor | None] = []
        self._sources: list[Source | None] = []
        self._launches: list[_Launch] | None = None if stream is None else []

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
        """An uninitialised tensor on the device of `like`, allocated anew in each run."""
        new = _New(tuple(shape), tuple(strides), dtype, like.device)
        made = torch.empty_strided(tuple(map(int, shape)), tuple(map(int, strides)), dtype=dtype, device=like.device)
        self._made.append(new)
        self._tensors.append(made)
        return made

    def keep(self, tensors: Inputs, source: Source | None = None) -> None:
        """Tensors that every run reads as they are now; with a source, which finds them for other sequences."""
        self._kept += tensors
        self._sources.append(source)

    def another(self, inputs: Inputs, stream: int | None) -> Recorder:
        """One of what comes before the pass, a pass of its own."""
        return Recorder(inputs, stream)

    def forget(self) -> None:
        """What the pass does besides cannot be repeated: nothing is recorded."""
        self._launches = None

    def launch(self, function: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launches as Triton does, which compiles what it has to; later, within `side_by_side`."""
        plain, queue = plain_arguments(args), waiting()
        run = functools.partial(self._launch, function, grid, args, plain, options)
        if queue is None:
            run()
        else:
            queue.append(Waiting(function, plain, options, run))

    def _launch(self, function: Any, grid: tuple[int, ...], args: tuple[Any, ...], plain: tuple[Any, ...], options: Any) -> None:
        compiled = function[tuple(map(int, grid))](*plain, **options)
        if self._launches is None or not hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
            self._launches = None
            return
        try:
            noted = self._noted((*args, *_defaults(function, len(args))))
        except _UnknownTensor:
            self._launches = None
            return
        place = (*(*grid, 1, 1)[:3], self._stream, compiled.function)
        self._launches.append(
            direct(compiled, place, noted) or _Launch(compiled.run, noted.after((*place, compiled.packed_metadata, *_UNWATCHED)))
        )

    def template(self) -> Template | None:
        """What was noted, None if it cannot be run again."""
        queue = waiting()
        if queue:
            launch_waiting(queue)
        return None if not self._launches else Template(self._launches, self._made, self._kept, self._sources)

    def _noted(self, args: tuple[Any, ...]) -> _Arguments:
        noted = _Arguments(list(args), [], [], [], _counts(args))
        for at, arg in enumerate(args):
            if type(arg) in _NUMBERS_ALONE:
                continue
            if isinstance(arg, Tensor):
                role, number = self._role(arg), next((n for n, own in enumerate(self._kept) if own is arg), None)
                if role is not None:
                    noted.places.append((at, role))
                elif number is not None:
                    noted.late.append((at, functools.partial(_address, number)))
                else:
                    raise _UnknownTensor
                noted.values[at] = None  # kept alive by nobody
            elif _is_descriptor(arg):
                rest = {name: value for name, value in vars(arg).items() if name != "base"}
                role = self._role(arg.base)
                if role is None:
                    raise _UnknownTensor
                noted.tiles.append((at, role, Tiles(type(arg), rest)))
                noted.values[at] = None
            elif isinstance(arg, tuple):
                inner = self._noted(arg)
                noted.values[at] = tuple(inner.values)
                if inner.places or inner.parts:
                    noted.parts.append((at, inner))
                elif inner.late:
                    noted.late.append((at, functools.partial(_part, inner)))
        return noted

    def _role(self, tensor: Tensor) -> int | None:
        return next((role for role, own in enumerate(self._tensors) if own is tensor), None)


def _is_descriptor(arg: Any) -> bool:
    return isinstance(arg, TensorDescriptor) or type(arg).__name__ == "TensorDescriptor"  # Gluon has one of its own


def plain_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with numbers for `Count`s, which Triton does not know."""
    return tuple(map(_plain_one, args))


def _plain_one(arg: Any) -> Any:
    if type(arg) in _NUMBERS_ALONE:
        return arg
    if isinstance(arg, Count):
        return int(arg)
    if isinstance(arg, tuple):
        return type(arg)(*plain_arguments(arg)) if hasattr(arg, "_fields") else plain_arguments(arg)
    if _is_descriptor(arg) and any(isinstance(n, Count) for n in arg.shape):
        plain = copy.copy(arg)
        plain.shape = list(map(int, arg.shape))
        return plain
    return arg


class Template:
    """A pass that can be run again, once it is bound to sequences; dense, to what it was recorded with."""

    __slots__ = ("_kept", "_sources", "launches", "made", "makers", "scratch")

    def __init__(
        self, launches: list[_Launch], made: Sequence[_New], kept: Inputs, sources: Sequence[Source | None], results: int | None = None
    ) -> None:
        self.launches = launches
        self.made = made
        self.makers = [new.maker() for new in made[:results]]
        self.scratch = None if results is None else _Scratch.of(made[results:])
        self._kept: Inputs = kept
        self._sources = sources

    def returning(self, count: int, *, packed: bool) -> Template:
        """The same, of which the first `count` tensors made are wanted, and come packed, as `foci.problem.Geometry` says, if that is asked.
        The others are parts of one allocation."""
        made = [new.packed if packed and n < count else new for n, new in enumerate(self.made)]
        return Template(self.launches, made, self._kept, self._sources, count)

    def unbound(self) -> Template | None:
        """The same, of any sequences; None where some of what it reads is of those alone that it was recorded with."""
        return None if None in self._sources else Template(self.launches, self.made, (), self._sources, len(self.makers))

    def as_recorded(self, tokens: Tokens) -> Recording:
        """Bound to the sequences that it was recorded with."""
        return Recording(self, _Binding(tokens, self._kept))

    def bound(self, sequences: Any, tokens: Tokens, captures: Inputs) -> Recording:
        """Bound to other sequences."""
        kept = [t for source in self._sources if source is not None for t in source(sequences, tokens, captures)]
        return Recording(self, _Binding(tokens, kept))


class _Scratch(NamedTuple):
    """One allocation for all that nobody reads but the pass: by how many tokens there are, its lines, and those before each tensor."""

    lines: Callable[[Tokens], tuple[int, ...]]
    device: torch.device

    @staticmethod
    def of(made: Sequence[_New]) -> _Scratch | None:
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

    __slots__ = ("_binding", "_launches", "_makes", "_scratch", "template")

    def __init__(self, template: Template, binding: _Binding) -> None:
        self.template = template
        self._binding = binding  # holds what the arguments hold the addresses of
        self._launches = [(run, arguments.bound(binding)) for run, arguments in template.launches]
        self._makes = [make(binding.tokens) for make in template.makers]
        self._scratch = None if template.scratch is None else template.scratch.at(binding.tokens)

    @property
    def tokens(self) -> Tokens:
        return self._binding.tokens

    def returning(self, count: int, *, packed: bool) -> Recording:
        """The same with `Template.returning`."""
        return Recording(self.template.returning(count, packed=packed), self._binding)

    def run(self, inputs: Inputs, places: list[int | None] | None = None) -> list[Tensor]:
        """Launches with other tensors of the same geometry, alignment and stream, at these places if they are known; returns what the
        pass allocated, in order, as far as it is wanted.
        """
        made = [make() for make in self._makes]
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


def _filled(arguments: _Arguments, tensors: list[Any], addresses: list[int | None]) -> list[Any]:
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


_Value = TypeVar("_Value")


class Kept(Generic[_Value]):
    """The last things found, each good for as long as the tensors live that it was found from."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._found: OrderedDict[tuple[object, ...], tuple[tuple[weakref.ref[Tensor], ...], _Value]] = OrderedDict()

    def find(self, key: tuple[object, ...]) -> _Value | None:
        """What has that key. Keys hold the identity and version of what was read, which are those of a live tensor only."""
        found = self._found.get(key)
        return found[1] if found is not None and all(ref() is not None for ref in found[0]) else None

    def add(self, key: tuple[object, ...], read: tuple[Tensor, ...], value: _Value | None) -> None:
        """Keeps a value found from `read`; what was found from tensors that are gone, goes, and the oldest where there are many."""
        if value is None:
            return
        if read:
            # copied first: backward passes come from threads of their own
            for dead in [other for other, (refs, _) in list(self._found.items()) if any(ref() is None for ref in refs)]:
                self._found.pop(dead, None)
        self._found[key] = tuple(map(weakref.ref, read)), value
        if len(self._found) > self._capacity:
            self._found.popitem(last=False)
