"""Builds the launch list of a forward or backward pass, so that a later call of the same geometry runs it without the host's work.

Launches depend on shapes, strides, numbers and the plan, not on addresses. A `LaunchBuilder` compiles kernels and keeps them with their
arguments, as a `foci.backends.gpu.launch_list.Template`, which the first call and every later one run.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from foci.backends.contract import Inputs
from foci.backends.gpu.allocations import Joint, New
from foci.backends.gpu.compiling import Waiting, after_launches, compile_and_launch, compile_and_load, launch_waiting, waiting
from foci.backends.gpu.launch_list import (
    Arguments,
    Launch,
    LaunchList,
    Maps,
    Source,
    Template,
    Tiles,
    late_counts,
    sequence_address,
)
from foci.backends.gpu.stream_state import tensor_addresses
from foci.backends.gpu.symbolic_tokens import Count, Tokens
from foci.compat.triton import find_bottom

__all__ = ["LaunchBuilder", "plain_arguments"]


def _defaults(function: Any, count: int) -> tuple[Any, ...]:
    """Defaults of the parameters after the first `count` ones: a launcher takes all arguments."""
    return tuple(parameter.default for parameter in list(function.signature.parameters.values())[count:])


_UNWATCHED: Final = (None, None, None)
"""A launcher's arguments for launch hooks: none."""
_CONSTANTS: Final = frozenset((int, float, bool, str, type(None), tl.constexpr))


def _plain(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(int, numbers))


class _UnknownTensor(Exception):
    """An argument is neither a tensor of the pass nor one given to `LaunchBuilder.keep`."""


def direct(compiled: Any, place: tuple[Any, ...], noted: Arguments) -> Launch | None:
    """Make a launch that calls the C function under Triton's launcher; None if this release's is unknown. A tensor descriptor becomes
    what that function takes: a TMA descriptor, lengths and strides.
    """
    bottom = find_bottom(compiled)
    if bottom is None or len(bottom.metadata) != len(noted.tiles) or None in bottom.metadata:
        return None
    values: list[Any] = []
    moved: dict[int, int] = {}
    tiles: list[tuple[int, int, Any]] = []
    described = {at: (role, maker, facts) for (at, role, maker), facts in zip(noted.tiles, bottom.metadata, strict=True)}
    for at, value in enumerate(noted.values):
        moved[at] = len(values)
        if at in described:
            role, maker, facts = described[at]
            tiles.append((moved[at], role, Maps(maker, bottom.make_map, facts)))
            values += [None, *maker.rest["shape"], *maker.rest["strides"]]
        else:
            values.append(value)
    late = [*late_counts(values), *((moved[at], text) for at, text in noted.late)]
    places, parts = [(moved[at], role) for at, role in noted.places], [(moved[at], part) for at, part in noted.parts]
    arguments = Arguments(values, places, tiles, parts, late)
    if bottom.are_packed:
        arguments = Arguments([tuple(values)], [], [], [] if arguments.is_constant else [(0, arguments)], [])
    return Launch(bottom.run, arguments.after((*place, *bottom.settings)), compiled=compiled)


class _Pending(NamedTuple):
    """A launch through Triton, in numbers and tensors. It is needed only if the rest of the pass turns out not to be repeatable."""

    function: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


class LaunchBuilder:
    """Builds the launch list of a pass, and runs it once, on the tensors that it was built with.

    Nothing is launched before `finish`: the first run launches what every later run does. A pass that cannot be repeated is launched
    through Triton instead, kernel by kernel.

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
        repeatable_launch = None if self._launches is None else self._make_repeatable(launch, grid, args)
        if self._launches is None or repeatable_launch is None:
            self._launch_pending()
            compile_and_launch(*launch)
            return
        self._pending.append(launch)
        self._launches.append(repeatable_launch._replace(between=between))

    def _make_repeatable(self, launch: _Pending, grid: tuple[int, ...], args: tuple[Any, ...]) -> Launch | None:
        """The launch as it is repeated: the compiled kernel, with places for tensors and `Count`s among grid and arguments. None if it
        cannot be."""
        compiled = compile_and_load(*launch)
        if compiled is None:
            return None
        try:
            noted = self._noted((*args, *_defaults(launch.function, len(args))))
        except _UnknownTensor:
            return None
        place = (*(*grid, 1, 1)[:3], self._stream, compiled.function)
        arguments = noted.after((*place, compiled.packed_metadata, *_UNWATCHED))
        return direct(compiled, place, noted) or Launch(compiled.run, arguments, compiled=compiled)

    def _launch_pending(self) -> None:
        """Launch what waits through Triton, and build no launch list."""
        self._launches = None
        while self._pending:
            compile_and_launch(*self._pending.pop(0))

    def finish(self, tokens: Tokens) -> None:
        """Run the launches on the tensors that they were built with, once all kernels are compiled."""
        after_launches(functools.partial(self._run, (int(tokens[0]), int(tokens[1]))))

    def _run(self, tokens: Tokens) -> None:
        if not self._launches:
            self._launch_pending()
            return
        self._pending.clear()
        self._built = Template(self._launches, self._made, self._kept, self._sources).as_built(tokens)
        self._built.launch(tensor_addresses(self._tensors), list(self._tensors))

    @property
    def built(self) -> LaunchList | None:
        """The launch list of a finished pass; None if it cannot be repeated."""
        queue = waiting()
        if queue:
            launch_waiting(queue)
        return self._built

    def _noted(self, args: tuple[Any, ...]) -> Arguments:
        noted = Arguments(list(args), [], [], [], late_counts(args))
        for at, arg in enumerate(args):
            if type(arg) in _CONSTANTS:
                continue
            if isinstance(arg, Tensor):
                role, number = self._role(arg), next((n for n, tensor in enumerate(self._kept) if tensor is arg), None)
                if role is not None:
                    noted.places.append((at, role))
                elif number is not None:
                    noted.late.append((at, sequence_address(number)))
                else:
                    raise _UnknownTensor
                noted.values[at] = None  # do not keep the tensor alive
            elif _is_descriptor(arg):
                rest = {name: value for name, value in vars(arg).items() if name != "base"}
                role = self._role(arg.base)
                if role is None:
                    raise _UnknownTensor
                noted.tiles.append((at, role, Tiles(type(arg), rest)))
                noted.values[at] = None
            elif isinstance(arg, tuple):
                inner = self._noted(arg)
                noted.values[at] = tuple(inner.values)  # a plain one: launchers take longer to read a named one
                if not inner.is_constant:
                    noted.parts.append((at, inner))
        return noted

    def _role(self, tensor: Tensor) -> int | None:
        return next((role for role, candidate in enumerate(self._tensors) if candidate is tensor), None)


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
