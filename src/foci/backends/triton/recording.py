"""Passes noted once and run again: the second call of one geometry launches at once, with nothing worked out anew.

What a pass launches depends on shapes, strides, numbers and the plan, not on addresses. A `Recorder` runs a pass as it is
written and notes the compiled kernels with their arguments; a `Recording` runs them again through Triton's own launchers,
with the addresses of another call.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from foci.backends.triton.arguments import Config, Size, Strides

__all__ = ["Kept", "Recorder", "Recording", "may_replay", "stream_of"]

Inputs: TypeAlias = Sequence[Tensor | None]


def stream_of(tensor: Tensor) -> int:
    """The stream that work on the tensor's device goes to."""
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if tensor.is_cuda else 0


def may_replay(tensor: Tensor) -> bool:
    """Whether launches may go around Triton: nobody watches them, and no CUDA graph is captured, which outlives what is kept."""
    runtime = triton.knobs.runtime
    watched = _calls(runtime.launch_enter_hook) or _calls(runtime.launch_exit_hook)
    return not (watched or (tensor.is_cuda and torch._C._cuda_isCurrentStreamCapturing()))


def _calls(hook: Any) -> Any:
    return getattr(hook, "calls", hook)  # a chain of hooks, in older releases one or None


class _Arguments(NamedTuple):
    """Arguments without their addresses: `places` (index, tensor of the pass), `tiles` likewise for descriptors, with what
    they say besides, and `parts` for tuples with addresses inside."""

    values: list[Any]
    places: list[tuple[int, int]]
    tiles: list[tuple[int, int, type[Any], dict[str, Any]]]
    parts: list[tuple[int, _Arguments]]


class _Launch(NamedTuple):
    """A compiled kernel, what its launcher takes before the arguments, and the arguments."""

    run: Callable[..., None]
    head: tuple[Any, ...]
    arguments: _Arguments


def _defaults(function: Any, given: int) -> tuple[Any, ...]:
    """Of the parameters after those that are given: a launcher wants them all."""
    return tuple(parameter.default for parameter in list(function.signature.parameters.values())[given:])


_NUMBERS_ALONE: Final = (Config, Size, Strides)


class _UnknownTensor(Exception):
    """An argument that is no tensor of the pass, nor one that is kept."""


class Recorder:
    """Runs a pass and notes it.

    Args:
        inputs: the tensors a pass is given, each object once; None where it lacks one.
        stream: what `stream_of` gives; None to note nothing.
    """

    def __init__(self, inputs: Inputs, stream: int | None) -> None:
        self._stream = stream
        self._tensors: list[Tensor | None] = list(inputs)
        self._made: list[dict[str, Any]] = []
        self._kept: dict[int, Tensor] = {}
        self._launches: list[_Launch] | None = None if stream is None else []

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
        """An uninitialised tensor on the device of `like`, allocated anew in each run."""
        wanted: dict[str, Any] = {"size": tuple(shape), "stride": tuple(strides), "dtype": dtype, "device": like.device}
        made = torch.empty_strided(**wanted)
        self._made.append(wanted)
        self._tensors.append(made)
        return made

    def keep(self, tensors: Inputs) -> None:
        """Tensors that every run reads as they are now."""
        self._kept |= {id(t): t for t in tensors if t is not None}

    def forget(self) -> None:
        """What the pass does besides cannot be repeated: nothing is recorded."""
        self._launches = None

    def launch(self, function: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Launches as Triton does, which compiles what it has to."""
        compiled = function[grid](*args, **options)
        if self._launches is None or not hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
            self._launches = None
            return
        try:
            noted = self._noted((*args, *_defaults(function, len(args))))
        except _UnknownTensor:
            self._launches = None
            return
        head = (*(*grid, 1, 1)[:3], self._stream, compiled.function, compiled.packed_metadata, None, None, None)
        self._launches.append(_Launch(compiled.run, head, noted))

    def recording(self) -> Recording | None:
        """What was noted, None if it cannot be run again."""
        return None if not self._launches else Recording(self._launches, self._made, tuple(self._kept.values()))

    def _noted(self, args: tuple[Any, ...]) -> _Arguments:
        noted = _Arguments(list(args), [], [], [])
        for at, arg in enumerate(args):
            if isinstance(arg, Tensor):
                if id(arg) in self._kept:
                    noted.values[at] = arg.data_ptr()
                else:
                    noted.places.append((at, self._role(arg)))
            elif isinstance(arg, TensorDescriptor) or type(arg).__name__ == "TensorDescriptor":  # Gluon has one of its own
                rest = {name: value for name, value in vars(arg).items() if name != "base"}
                noted.tiles.append((at, self._role(arg.base), type(arg), rest))
            elif isinstance(arg, tuple) and not isinstance(arg, _NUMBERS_ALONE):
                inner = self._noted(arg)
                noted.values[at] = tuple(inner.values)
                if inner.places or inner.parts:
                    noted.parts.append((at, inner))
        return noted

    def _role(self, tensor: Tensor) -> int:
        for role, own in enumerate(self._tensors):
            if own is tensor:
                return role
        raise _UnknownTensor


class Recording:
    """A pass that can be run again."""

    __slots__ = ("_kept", "_launches", "_made")

    def __init__(self, launches: list[_Launch], made: list[dict[str, Any]], kept: tuple[Tensor, ...]) -> None:
        self._launches = launches
        self._made = made
        self._kept = kept  # whose addresses the arguments hold

    def run(self, inputs: Inputs) -> list[Tensor]:
        """Launches with other tensors of the same geometry, alignment and stream; returns what the pass allocated, in order."""
        made = [torch.empty_strided(**wanted) for wanted in self._made]
        tensors = [*inputs, *made]
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        for launch in self._launches:
            launch.run(*launch.head, *_filled(launch.arguments, tensors, addresses))
        return made


def _filled(arguments: _Arguments, tensors: list[Tensor | None], addresses: list[int | None]) -> list[Any]:
    args = arguments.values.copy()
    for at, role in arguments.places:
        args[at] = addresses[role]
    for at, role, kind, rest in arguments.tiles:
        tiles = args[at] = object.__new__(kind)  # checked when it was recorded
        tiles.__dict__ = {"base": tensors[role], **rest}
    for at, inner in arguments.parts:
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
