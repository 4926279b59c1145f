"""Builds the launch list of a forward or backward pass, so that a later call of the same geometry runs it without the host's work.

Launches depend on shapes, strides, numbers and the plan, not on addresses. A `LaunchBuilder` compiles kernels and keeps them with their
arguments, as a `foci.backends.gpu.launch_list.Template`, which the first call and every later one run.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from foci.backends.contract import Inputs
from foci.backends.gpu.allocations import Joint, New
from foci.backends.gpu.compiling import Waiting, after_launches, compile_and_launch, launch_waiting, waiting
from foci.backends.gpu.launch_list import Arguments, Launch, LaunchList, Maps, Source, Template, sequence_address
from foci.backends.gpu.load_kernel import SCRATCH, Loaded, bits, compile_and_load
from foci.backends.gpu.stream_state import current_stream, has_launch_hooks, tensor_addresses
from foci.backends.gpu.symbolic_tokens import Count, Tokens
from foci.compat.triton import MapFacts

__all__ = ["LaunchBuilder", "plain_arguments"]


def _defaults(function: Any, count: int) -> tuple[Any, ...]:
    """Defaults of the parameters after the first `count` ones, of which a kernel may take some."""
    return tuple(parameter.default for parameter in list(function.signature.parameters.values())[count:])


_CONSTANTS: Final = frozenset((int, float, bool, str, type(None), tl.constexpr))


def _plain(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(int, numbers))


class _UnknownTensor(Exception):
    """An argument is neither a tensor of the pass nor one given to `LaunchBuilder.keep`."""


Find: TypeAlias = Callable[[Tensor], int | str]
"""A tensor -> its role, or the expression of its address where binding fills it in."""


def make_launch(loaded: Loaded, grid: tuple[int, ...], stream: int, args: Sequence[Any], find: Find, *, between: bool = False) -> Launch:
    """Make a launch.

    Args:
        loaded: the kernel.
        grid: number of programs in up to three directions.
        stream: of the launch.
        args: all arguments, as Triton takes them; integers may be `Count`s.
        find: finds the tensors among them.
        between: see `Launch`.

    Raises:
        Exception: that `find` raises.
    """
    arguments, facts = Arguments([], [], [], []), loaded.facts
    for n in (*grid, 1, 1)[:3]:
        arguments.add(n)
    _add_all(arguments, args, facts.signature, iter(facts.maps), find)
    arguments.values.extend(SCRATCH)
    return Launch(loaded.kernel, loaded.shape, stream, arguments, between=between)


def _add_all(arguments: Arguments, args: Sequence[Any], kinds: Sequence[Any], maps: Iterator[MapFacts], find: Find) -> None:
    """Add the parameters that arguments of these types become, as `load_kernel` counts them."""
    for arg, kind in zip(args, kinds, strict=True):
        if kind == "constexpr":
            continue
        if isinstance(kind, tuple):
            _add_all(arguments, arg, kind, maps, find)
        elif kind.startswith("tensordesc"):
            role = find(arg.base)
            if isinstance(role, str):
                raise _UnknownTensor  # its address is not among those of a call
            arguments.add_map(role, Maps(next(maps), arg.shape, arg.strides))
            for n in (*arg.shape, *arg.strides):
                arguments.add(n)
        elif isinstance(arg, Tensor):
            role = find(arg)
            arguments.add_late(role) if isinstance(role, str) else arguments.add_place(role)
        else:
            arguments.add(arg if isinstance(arg, int) else bits(kind, arg))


class _Pending(NamedTuple):
    """A launch in numbers and tensors. It is needed only if the rest of the pass turns out not to be repeatable."""

    function: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


class LaunchBuilder:
    """Builds the launch list of a pass, and runs it once, on the tensors that it was built with.

    Nothing is launched before `finish`: the first run launches what every later run does. A pass that cannot be repeated is launched
    kernel by kernel.

    Args:
        inputs: the input tensors of the pass; None for an absent one.
        stream: the result of `current_stream`; None for a pass that cannot be repeated.

    Attributes:
        is_ahead: whether kernels are only compiled, for a pass to come (`precompile`).
    """

    is_ahead = False

    def __init__(self, inputs: Inputs, stream: int | None) -> None:
        self._stream = stream
        self._tensors: list[Tensor | None] = list(inputs)
        self._has_input = tuple([t is not None for t in inputs])
        self._made: list[New] = []
        self._kept: list[Tensor | None] = []
        self._sources: list[Source | None] = []
        self._launches: list[Launch] | None = None if stream is None else []
        self._pending: list[_Pending] = []
        self._built: LaunchList | None = None

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
        """Allocate an uninitialised tensor on the device of `like`; each run allocates its own."""
        new = New(tuple(shape), tuple(strides), dtype, like.device)
        tensor = torch.empty_strided(_plain(shape), _plain(strides), dtype=dtype, device=like.device)
        self._made.append(new)
        self._tensors.append(tensor)
        return tensor

    def parts(self, sizes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]], dtype: torch.dtype, like: Tensor) -> list[Tensor]:
        """Allocate uninitialised tensors [B, H, S, D] whose rows are side by side in one allocation; to be called before `empty`."""
        assert not self._made, "parts are made first"
        starts = itertools.accumulate((int(heads) * int(width) for _, heads, _, width in sizes), initial=0)
        self._made += [
            New(tuple(size), tuple(steps), dtype, like.device, at) for size, steps, at in zip(sizes, strides, starts, strict=False)
        ]
        tensors = Joint([(_plain(new.size), _plain(new.stride), new.offset or 0) for new in self._made], dtype, like.device).maker()()
        self._tensors += tensors
        return tensors

    def keep(self, tensors: Inputs, source: Source | None = None) -> None:
        """Keep tensors that every run reads. `source` finds them for other sequences; without it, the launches are never rebound."""
        self._kept += tensors
        self._sources.append(source)

    def another(self, inputs: Inputs, stream: int | None) -> LaunchBuilder:
        """Return a builder for launches that precede the pass and make a launch list of their own."""
        return LaunchBuilder(inputs, stream)

    def forget(self) -> None:
        """Build no launch list: the pass does something that cannot be repeated."""
        self._launch_pending()

    def add(self, function: Any, grid: tuple[int, ...], *args: Any, between: bool = False, **options: Any) -> None:
        """Add a launch. Within `compile_in_parallel` it waits until all kernels are compiled. `between`: see `Launch`."""
        plain, queue = plain_arguments(args), waiting()
        run = functools.partial(self._add, _Pending(function, _plain(grid), plain, options), grid, args, between)
        launch = Waiting(function, plain, options, run)
        if queue is None:
            launch_waiting([launch])
        else:
            queue.append(launch)

    def _add(self, launch: _Pending, grid: tuple[int, ...], args: tuple[Any, ...], between: bool) -> None:
        repeatable_launch = None if self._launches is None else self._make_repeatable(launch, grid, args, between=between)
        if self._launches is None or repeatable_launch is None:
            self._launch_pending()
            self._launch_once(launch)
            return
        self._pending.append(launch)
        self._launches.append(repeatable_launch)

    def _make_repeatable(self, launch: _Pending, grid: tuple[int, ...], args: tuple[Any, ...], *, between: bool) -> Launch | None:
        """The launch as it is repeated: the loaded kernel, with places for tensors and `Count`s among grid and arguments. None if it
        cannot be."""
        loaded = compile_and_load(*launch)
        if loaded is None or self._stream is None:
            return None
        try:
            return make_launch(loaded, grid, self._stream, (*args, *_defaults(launch.function, len(args))), self._find, between=between)
        except _UnknownTensor:
            return None

    def _launch_pending(self) -> None:
        """Launch what waits, each by itself, and build no launch list."""
        self._launches = None
        while self._pending:
            self._launch_once(self._pending.pop(0))

    def _launch_once(self, launch: _Pending) -> None:
        """Launch a kernel on these tensors, through Triton where its launches are watched."""
        tensors: list[Tensor] = []

        def find(tensor: Tensor) -> int:
            tensors.append(tensor)
            return len(tensors) - 1

        function, grid, args, options = launch
        loaded = None if has_launch_hooks() else compile_and_load(*launch)
        if loaded is None:
            compile_and_launch(*launch)
            return
        stream = current_stream(next(_iterate_tensors(args)))
        once = make_launch(loaded, grid, stream, (*args, *_defaults(function, len(args))), find)
        once.bound((0, 0), [], once.maps)(tensor_addresses(tensors))

    def finish(self, tokens: Tokens) -> None:
        """Run the launches on the tensors that they were built with, once all kernels are compiled."""
        after_launches(functools.partial(self._run, (int(tokens[0]), int(tokens[1]))))

    def _run(self, tokens: Tokens) -> None:
        if not self._launches:
            self._launch_pending()
            return
        self._pending.clear()
        self._built = Template(self._has_input, self._launches, self._made, self._kept, self._sources).as_built(tokens)
        self._built.launch(tensor_addresses(self._tensors))

    @property
    def built(self) -> LaunchList | None:
        """The launch list of a finished pass; None if it cannot be repeated."""
        queue = waiting()
        if queue:
            launch_waiting(queue)
        return self._built

    def _find(self, tensor: Tensor) -> int | str:
        """See `Find`."""
        role = next((role for role, candidate in enumerate(self._tensors) if candidate is tensor), None)
        if role is not None:
            return role
        number = next((n for n, kept in enumerate(self._kept) if kept is tensor), None)
        if number is None:
            raise _UnknownTensor
        return sequence_address(number)


def _iterate_tensors(args: tuple[Any, ...]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, tuple):
            yield from _iterate_tensors(arg)
        elif _is_descriptor(arg):
            yield arg.base


def _is_descriptor(arg: Any) -> bool:
    return isinstance(arg, TensorDescriptor) or type(arg).__name__ == "TensorDescriptor"  # Gluon has its own class


def plain_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace `Count`s by their numbers, since Triton only takes integers."""
    return tuple(map(_plain_one, args))


def _plain_one(arg: Any) -> Any:
    if type(arg) in _CONSTANTS:
        return arg
    if isinstance(arg, Count):
        return int(arg)
    if isinstance(arg, tuple):
        plain_parts = plain_arguments(arg)
        if all(map(operator.is_, plain_parts, arg)):
            return arg  # `Waiting.kind` knows a configuration by its identity
        return type(arg)(*plain_parts) if hasattr(arg, "_fields") else plain_parts
    if _is_descriptor(arg) and any(isinstance(n, Count) for n in arg.shape):
        plain = copy.copy(arg)
        plain.shape = list(map(int, arg.shape))
        return plain
    return arg
