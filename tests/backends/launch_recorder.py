"""Record which kernels a call would launch on a GPU, without a GPU: stand-ins take the place of the Triton kernels.

Tensors stay on the CPU and are never computed on. A launch is its kernel, its grid and a digest of its arguments and options; pointers
count by the tensor that they point into and the distance from its start, so that two runs compare equal.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from kernel_stand_ins import Function, forget_launches, is_address, plan_for_a_gpu, replace_hopper_kernels, replace_kernels
from torch import Tensor
from triton.runtime.jit import JITFunction

from foci.compat.triton import release

RELEASE = ".".join(map(str, release()))
# kernels whose results are kept for later calls of the same mask
TABLE_KERNELS = frozenset(
    {
        *("classify_tiles", "list_tiles", "assign_tasks", "place_sequences", "mark_tiles", "rank_tiles"),
        *("pack_masks", "pack_queries", "mark_keys", "cover_keys", "order_tasks"),
    }
)


class Launch(NamedTuple):
    """A launch: kernel's name, grid, and arguments with pointers replaced by (tensor, distance)."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.kernel}[{','.join(map(str, self.grid))}]"


class Log(NamedTuple):
    """Launches in order, and what was compiled for them."""

    launched: list[Any]
    compiled: list[Any]

    def take(self) -> list[Any]:
        """All launches so far; empties the log."""
        taken = [*self.launched]
        self.launched.clear()
        self.compiled.clear()
        return taken


def note_launches(function: JITFunction, log: Log) -> Any:
    """A stand-in for a kernel that notes its launches, through Triton or not."""
    return Function(function, log.launched, log.launched, log.compiled)


@contextlib.contextmanager
def recording_launches(monkeypatch: Any, arch: int, stand_in: Callable[[JITFunction, Log], Any] = note_launches) -> Iterator[Log]:
    """Plan calls of CPU tensors for a GPU of this compute capability, with a stand-in for each kernel; by default they are recorded."""
    log = Log([], [])
    with monkeypatch.context() as patch:
        for replace in (replace_kernels, replace_hopper_kernels):
            replace(patch, lambda function: stand_in(function, log))
        plan_for_a_gpu(patch, arch, f"triton-{RELEASE}")
        forget_launches(patch)
        yield log


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.values(), value.offsets()] if value.is_nested else [value]
    return [t for part in value for t in tensors_in(part)] if isinstance(value, tuple | list) else []


class Place(NamedTuple):
    """An address within a tensor that the caller knows, by the tensor's number."""

    tensor: int
    distance: int

    def __repr__(self) -> str:
        return repr(tuple(self))  # as digests have it


class Temporary(NamedTuple):
    """An address within a tensor that only the pass knows."""

    address: int


def normalize(raw: Sequence[Any], tensors: Sequence[Tensor]) -> list[Launch]:
    """Launches with pointers as (number of the tensor, distance), or as `Temporary`."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        if isinstance(value, JITFunction):
            return describe_function(value)
        if not is_address(value):
            return value
        inside = [Place(n, value - t.data_ptr()) for n, t in enumerate(tensors) if 0 <= value - t.data_ptr() < max(_bytes_from(t), 1)]
        return inside[0] if inside else Temporary(value)

    return [Launch(kernel, grid, plain(arguments)) for kernel, grid, arguments in raw]


def _bytes_from(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its memory, which one of repeated rows has fewer of than `nbytes`."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size())


def describe_function(function: JITFunction) -> str:
    """A generated function by a number for its text."""
    return f"function {hashlib.sha256(function.src.encode()).hexdigest()[:12]}"


def number_temporaries(launches: Sequence[Launch]) -> list[Launch]:
    """Addresses that only the pass knows as numbers, in the order in which launches are first given them."""
    numbers: dict[Temporary, str] = {}

    def numbered(value: Any) -> Any:
        if isinstance(value, Temporary):
            return numbers.setdefault(value, f"temporary {len(numbers)}")
        if isinstance(value, Place):
            return value
        return tuple(map(numbered, value)) if isinstance(value, tuple) else value

    return [launch._replace(arguments=numbered(launch.arguments)) for launch in launches]


def digest(launches: Sequence[Launch]) -> str:
    """A number for the grids and arguments of launches. Kernels' names are left out: renaming a kernel does not change it."""
    text = repr([(launch.grid, launch.arguments) for launch in number_temporaries(launches)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Passes(NamedTuple):
    """Launches of a call's forward and backward."""

    forward: list[Launch]
    backward: list[Launch]

    def without_tables(self) -> Passes:
        """The launches of a call whose mask tables are already built."""
        return Passes(*map(_without_tables, self))

    def lines(self) -> list[str]:
        """Kernels and grids of each pass, then the digest of its arguments."""
        return [" ".join([*map(str, launches), digest(launches)]) for launches in self if launches]


def _without_tables(launches: Sequence[Launch]) -> list[Launch]:
    """Without the kernels that make tables, and without `zero_counters` where the next kernel makes a table of the counters."""
    following = [*(launch.kernel for launch in launches[1:]), ""]
    return number_temporaries(
        [
            launch
            for launch, after in zip(launches, following, strict=False)
            if launch.kernel not in TABLE_KERNELS and not (launch.kernel == "zero_counters" and after in TABLE_KERNELS)
        ]
    )


def run(log: Log, call: Callable[..., Any], inputs: Sequence[Tensor], fixed: Sequence[Tensor]) -> Passes:
    """Run a call and its backward; `fixed` are the tensors that it reads besides its inputs."""
    log.take()
    result = call(*inputs)
    forward, outputs = log.take(), tensors_in(result if isinstance(result, tuple) else [result])
    named = [*tensors_in(list(inputs)), *fixed, *outputs]
    forward = normalize(forward, named)  # before what it freed is allocated anew
    if not any(t.requires_grad for t in inputs):
        return Passes(forward, [])
    results = [t for t in results_of(result) if t.requires_grad]
    cotangents = [torch.zeros_like(t) for t in results]
    gradients = torch.autograd.grad(results, [t for t in inputs if t.requires_grad], cotangents, allow_unused=True)
    return Passes(forward, normalize(log.take(), [*named, *tensors_in([*cotangents, *gradients])]))


def results_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in results_of(part)] if isinstance(value, tuple | list) else []
