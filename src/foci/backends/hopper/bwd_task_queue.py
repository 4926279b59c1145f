# mypy: ignore-errors
"""Task queue in shared memory for the persistent kernel `bwd_dq_dk_dv`. A slot holds a key tile and the query tiles that it visits.

The producer is one task ahead: finding a task and loading its first queries overlap with the products of the previous task.
"""

from typing import Any, NamedTuple

from foci.backends.hopper.gluon_compat import gl, gluon, mbarrier
from foci.backends.hopper.kernel_args import PackedTask, Task
from foci.backends.hopper.smem import make_barriers
from foci.backends.hopper.task_queue import SLOTS, read_slot, write_slot

__all__ = ["QueryRuns", "RoundQueryRuns", "allocate_task_queue", "has_task", "pop_task", "push_end", "push_task"]

# a slot: task (5), runs of query tiles (7, or 9 with ROUND), packed sequence (4); ROUND is never packed
RUNS_AT = gl.constexpr(5)
SPAN_AT = gl.constexpr(12)
FIELDS = gl.constexpr(16)
# two consumer warpgroups and the two warps of `dq_semaphore.reduce_dq_shares`
READERS = gl.constexpr(4)


class QueryRuns(NamedTuple):
    """Query tiles that a key tile visits: three runs (last place, count), each visited from its last place down. A place is a tile, or an
    index into a list (`dq_semaphore.tile_at`)."""

    row: Any  # of the table
    high_last: Any  # masked tiles at the high end
    high: Any
    full_last: Any  # full tiles
    full: Any
    low_last: Any  # masked tiles at the low end
    low: Any


class RoundQueryRuns(NamedTuple):
    """`QueryRuns` with ROUND: full tiles after the wrap are a fourth run."""

    row: Any
    high_last: Any
    high: Any
    full_last: Any
    full: Any
    low_last: Any
    low: Any
    wrap_last: Any
    wrap: Any


@gluon.jit
def allocate_task_queue():
    """Allocate (slots, one number a line; a "filled" barrier per slot; a "free" barrier per slot, at which every reader arrives)."""
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return slots, make_barriers(SLOTS, 1), make_barriers(SLOTS, READERS)


@gluon.jit
def push_task(queue, n, task, runs):
    """Write the n-th task to its slot."""
    slots, full, free = queue
    first = n % SLOTS * FIELDS
    mbarrier.wait(free.index(n % SLOTS), ((n // SLOTS) & 1) ^ 1)
    for i in gl.static_range(5):
        write_slot(slots, first + i, task[i])
    for i in gl.static_range(len(runs)):
        write_slot(slots, first + RUNS_AT + i, runs[i].to(gl.int32))
    for i in gl.static_range(len(task) - 5):
        write_slot(slots, first + SPAN_AT + i, task[5 + i])
    mbarrier.arrive(full.index(n % SLOTS), count=1)


@gluon.jit
def push_end(queue, n):
    """Write that there is no n-th task."""
    slots, full, free = queue
    mbarrier.wait(free.index(n % SLOTS), ((n // SLOTS) & 1) ^ 1)
    write_slot(slots, n % SLOTS * FIELDS, -1)
    mbarrier.arrive(full.index(n % SLOTS), count=1)


@gluon.jit
def has_task(queue, n, WARPS: gl.constexpr):
    """Wait for the n-th slot; whether it holds a task."""
    slots, full, free = queue
    mbarrier.wait(full.index(n % SLOTS), (n // SLOTS) & 1)
    return read_slot(slots, n % SLOTS * FIELDS, WARPS) >= 0


@gluon.jit
def pop_task(queue, n, c, WARPS: gl.constexpr):
    """Read the n-th task: (`Task` or `PackedTask`, `QueryRuns` or `RoundQueryRuns`)."""
    gl.static_assert(not (c.ROUND and c.JAGGED), "ROUND leaves no room in a slot for a packed sequence")
    slots, full, free = queue
    at = n % SLOTS * FIELDS
    task = ()
    for i in gl.static_range(9 if c.JAGGED else 5):
        task = task + (read_slot(slots, at + (i if i < 5 else SPAN_AT + i - 5), WARPS),)
    # offsets into tables need 64 bits
    runs = (read_slot(slots, at + RUNS_AT, WARPS).to(gl.int64),)
    for i in gl.static_range(1, 9 if c.ROUND else 7):
        runs = runs + (read_slot(slots, at + RUNS_AT + i, WARPS),)
    mbarrier.arrive(free.index(n % SLOTS), count=1)
    if c.JAGGED:
        return PackedTask(*task), QueryRuns(*runs)
    elif c.ROUND:
        return Task(*task), RoundQueryRuns(*runs)
    else:
        return Task(*task), QueryRuns(*runs)
