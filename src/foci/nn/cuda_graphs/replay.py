"""A function of packed tensors and a module's parameters, recorded forward and backward, as one node of autograd."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foci.compat.cuda import copy_all
from foci.nn.cuda_graphs.buckets import Bucket
from foci.nn.cuda_graphs.graphs import Engine, Made, Recorded
from foci.nn.packing import Packing

__all__ = ["Batch", "Compute", "Place", "Recordings"]

Compute: TypeAlias = Callable[[Sequence[Tensor], Sequence[Packing], Sequence[Tensor]], Tensor]
"""[T, E] of packed tensors [T, E], their packings, and other tensors."""


class Place(NamedTuple):
    """Where a module keeps a parameter."""

    parameters: dict[str, Any]
    name: str
    parameter: Tensor


class Batch(NamedTuple):
    """The inputs of a recorded function; the first of the packed tensors says how many rows the output has."""

    tokens: tuple[Tensor, ...]
    packings: tuple[Packing, ...]
    seats: tuple[Bucket, ...]
    masks: tuple[Tensor, ...]

    def make(self) -> list[Tensor]:
        """Tensors that this batch, and any other of these seats, is copied into."""
        buffers = [t for s, x, p in zip(self.seats, self.tokens, self.packings, strict=True) for t in s.make(x, p)]
        return buffers + [torch.empty_like(t, memory_format=torch.contiguous_format) for t in self.masks]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copies the batch into them."""
        at = 0
        for seat, tokens, packing in zip(self.seats, self.tokens, self.packings, strict=True):
            seat.fill(tensors[at : at + seat.width], tokens, packing)
            at += seat.width
        for into, tensor in zip(tensors[at:], self.masks, strict=True):
            into.copy_(tensor)


@contextlib.contextmanager
def _swapped(places: Sequence[Place], stand_ins: dict[int, Tensor]) -> Iterator[None]:
    """The module with other tensors of the same memory for its parameters, which have hooks and a place in other graphs."""
    for place in places:
        place.parameters[place.name] = stand_ins[id(place.parameter)]
    try:
        yield
    finally:
        for place in places:
            place.parameters[place.name] = place.parameter


class _Graphed:
    """A bucket: forward and, where gradients are wanted, backward."""

    def __init__(self, engine: Engine, pool: Any, compute: Compute, batch: Batch, places: Sequence[Place], *, needs_grad: bool) -> None:
        self._compute, self._places, self._seats = compute, places, batch.seats
        self._needs_grad = needs_grad
        self._wanted = [needs_grad and t.requires_grad for t in batch.tokens]
        self._device = batch.tokens[0].device
        with torch.inference_mode(mode=False), torch.no_grad():
            self._record(engine, pool, batch)

    def _record(self, engine: Engine, pool: Any, batch: Batch) -> None:
        samples = batch.make()
        batch.fill(samples)
        state: list[Any] = []  # of autograd, between forward and backward

        def forward(tensors: list[Tensor]) -> Made:
            state[:] = self._forward(tensors)
            return [state[0].detach()]

        def backward(gradients: list[Tensor]) -> Made:
            out, leaves = state
            return list(torch.autograd.grad(out, leaves, gradients, allow_unused=True))

        like: list[Tensor] = []

        def both() -> None:
            forward(samples)
            like[:] = [torch.zeros_like(state[0], memory_format=torch.contiguous_format)]
            if self._needs_grad:
                backward(like)

        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            engine.warm_up(both)  # draws no number of the caller's
        self._one: Recorded = engine.record(pool, samples, forward)
        self._two: Recorded | None = engine.record(pool, like, backward) if self._needs_grad else None
        state.clear()

    def _forward(self, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The output, and what gradients are wanted of: packed tensors, then parameters."""
        at, tokens, packings = 0, [], []
        for seat, wanted in zip(self._seats, self._wanted, strict=True):
            tokens.append(tensors[at].detach().requires_grad_(wanted))
            packings.append(seat.packing(tensors[at : at + seat.width]))
            at += seat.width
        stand_ins = {
            id(p.parameter): p.parameter.detach().requires_grad_(self._needs_grad and p.parameter.requires_grad) for p in self._places
        }
        as_called = (
            torch.inference_mode(mode=False),
            torch.set_grad_enabled(self._needs_grad),
            torch.autocast(self._device.type, enabled=False),
        )
        with as_called[0], as_called[1], as_called[2], _swapped(self._places, stand_ins):
            out = self._compute(tokens, packings, tensors[at:])
        return out, [t for t in (*tokens, *stand_ins.values()) if t.requires_grad]

    def forward(self, batch: Batch) -> Tensor:
        """The output's rows."""
        batch.fill(self._one.inputs)
        self._one.replay()
        (out,) = self._one.outputs
        assert out is not None
        return out[: batch.tokens[0].shape[0]].clone()

    def backward(self, gradient: Tensor, counts: Sequence[int]) -> list[Tensor | None]:
        """Gradients of the packed tensors, those of so many rows that want them, and of parameters."""
        assert self._two is not None
        (into,) = self._two.inputs
        rows = gradient.shape[0]
        into[:rows].copy_(gradient)
        into[rows:].zero_()
        self._two.replay()
        grads = [None if t is None else torch.empty_like(t) for t in self._two.outputs]
        pairs = [(new, t) for new, t in zip(grads, self._two.outputs, strict=True) if new is not None and t is not None]
        copy_all([new for new, _ in pairs], [t for _, t in pairs])
        rest = iter(grads)
        tokens = [next(rest) if wanted else None for wanted in self._wanted]
        return [None if t is None else t[:count] for t, count in zip(tokens, counts, strict=True)] + list(rest)


class _PendingBackward:
    """Says, for as long as it lives, that a forward waits for its backward."""


@dataclass(eq=False)
class _StreamPool:
    """Memory, and what is recorded in it. Of all that, one thing at a time may wait for its backward."""

    pool: Any
    lease: weakref.ref[_PendingBackward] | None = None
    graphs: OrderedDict[object, _Graphed] = field(default_factory=OrderedDict)

    @property
    def is_free(self) -> bool:
        return self.lease is None or self.lease() is None


class Recordings:
    """Functions recorded by what they depend on, as many at most as `limit` says.

    Each way of working has lanes of its own: inference, whose output is copied at once, needs one; so does training, unless a
    forward is called before the last one's backward, which then stays as it is: the new one is recorded in another lane.
    """

    def __init__(self, engine: Engine, limit: int) -> None:
        self._engine, self._limit = engine, limit
        self._lanes: dict[object, list[_StreamPool]] = {}

    def clear(self) -> None:
        """Forgets all. What waits for its backward still has it."""
        self._lanes.clear()

    @property
    def keys(self) -> list[object]:
        """Return what is recorded."""
        return [key for lanes in self._lanes.values() for lane in lanes for key in lane.graphs]

    def run(
        self, where: object, key: object, compute: Compute, batch: Batch, places: Sequence[Place], learning: Sequence[Tensor], *,
        needs_grad: bool,
    ) -> Tensor:  # fmt: skip
        """The function of a batch, recorded if it is not known by the key.

        Args:
            where: device and stream, as memory is written in the order of one stream.
            key: all that the function depends on but for the batch's values.
            compute: the function.
            batch: what it is computed of.
            places: the parameters that it reads.
            learning: those that require grad, each once, in that order; none where no gradients are wanted.
            needs_grad: whether gradients are wanted, of tokens and parameters that require them.
        """
        lanes = self._lanes.setdefault((where, needs_grad), [])
        lane = next((lane for lane in lanes if lane.is_free), None)
        if lane is None:
            lane = _StreamPool(self._engine.pool())
            lanes.append(lane)
        graphed = lane.graphs.get(key)
        if graphed is None:
            graphed = lane.graphs[key] = _Graphed(self._engine, lane.pool, compute, batch, places, needs_grad=needs_grad)
            while len(lane.graphs) > self._limit:
                lane.graphs.popitem(last=False)
        lane.graphs.move_to_end(key)
        if not needs_grad:
            return graphed.forward(batch)
        lease = _PendingBackward()
        lane.lease = weakref.ref(lease)
        output: Tensor = _apply(graphed, lease, batch.packings, batch.seats, batch.masks, *batch.tokens, *learning)
        return output


class _Replayed(torch.autograd.Function):
    """A recorded forward and backward."""

    @staticmethod
    def forward(ctx: Any, graphed: _Graphed, lease: _PendingBackward, packings: Any, seats: Any, masks: Any, *tensors: Tensor) -> Tensor:
        ctx.graphed, ctx.lease = graphed, lease
        tokens = tensors[: len(seats)]
        ctx.counts = [t.shape[0] for t in tokens]
        return graphed.forward(Batch(tokens, packings, seats, masks))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if ctx.lease is None:
            raise RuntimeError(
                "a CUDA-graph-captured module supports one backward per forward (retain_graph=True has no effect); call "
                "foci.nn.release(module) to run it eagerly"
            )
        ctx.lease = None
        return (None, None, None, None, None, *ctx.graphed.backward(gradient, ctx.counts))


_apply: Final[Any] = super(torch.autograd.Function, _Replayed).apply
"""`_Replayed.apply` less what serves torch.func alone, under which nothing is captured."""
