# mypy: ignore-errors
"""Task queue in shared memory for the kernel of all gradients (`bwd_dq_dk_dv`). A slot says where a tile of keys is, and which tiles of
queries visit it.

Programs take task after task. The producer is one ahead, so that what it takes to find a task, and its first queries, come beside the
products of the task before.
"""

from foci.backends.hopper.gluon_compat import gl, gluon, mbarrier
from foci.backends.hopper.smem import make_barriers
from foci.backends.hopper.task_queue import SLOTS, read_slot, write_slot

__all__ = ["allocate_task_queue", "has_task", "pop_task", "push_end", "push_task"]

# place, runs of queries, and where a packed sequence lies; what goes round is not packed, and has two numbers more of runs
RUNS = gl.constexpr(5)
SPAN = gl.constexpr(12)
FIELDS = gl.constexpr(16)
# two warpgroups and two warps that add
READERS = gl.constexpr(4)


@gluon.jit
def allocate_task_queue():
    """(slots, one number a line; barriers of filled slots; barriers of slots that every reader has read)."""
    slots = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return slots, make_barriers(SLOTS, 1), make_barriers(SLOTS, READERS)


@gluon.jit
def push_task(queue, n, place, runs):
    """Writes the n-th task into its slot."""
    slots, full, free = queue
    first = n % SLOTS * FIELDS
    mbarrier.wait(free.index(n % SLOTS), ((n // SLOTS) & 1) ^ 1)
    for i in gl.static_range(5):
        write_slot(slots, first + i, place[i])
    for i in gl.static_range(len(runs)):
        write_slot(slots, first + RUNS + i, runs[i].to(gl.int32))
    for i in gl.static_range(len(place) - 5):
        write_slot(slots, first + SPAN + i, place[5 + i])
    mbarrier.arrive(full.index(n % SLOTS), count=1)


@gluon.jit
def push_end(queue, n):
    """Writes that there is no n-th task."""
    slots, full, free = queue
    mbarrier.wait(free.index(n % SLOTS), ((n // SLOTS) & 1) ^ 1)
    write_slot(slots, n % SLOTS * FIELDS, -1)
    mbarrier.arrive(full.index(n % SLOTS), count=1)


@gluon.jit
def has_task(queue, n, WARPS: gl.constexpr):
    """Whether there is an n-th task, which is waited for."""
    slots, full, free = queue
    mbarrier.wait(full.index(n % SLOTS), (n // SLOTS) & 1)
    return read_slot(slots, n % SLOTS * FIELDS, WARPS) >= 0


@gluon.jit
def pop_task(queue, n, c, WARPS: gl.constexpr):
    """(place, runs of queries) of the n-th task."""
    gl.static_assert(not (c.ROUND and c.JAGGED), "what goes round leaves no room for where a sequence lies")
    slots, full, free = queue
    at = n % SLOTS * FIELDS
    place = ()
    for i in gl.static_range(9 if c.JAGGED else 5):
        place = place + (read_slot(slots, at + (i if i < 5 else SPAN + i - 5), WARPS),)
    # entries of a table are found in 64 bits
    runs = (read_slot(slots, at + RUNS, WARPS).to(gl.int64),)
    for i in gl.static_range(1, 9 if c.ROUND else 7):
        runs = runs + (read_slot(slots, at + RUNS + i, WARPS),)
    mbarrier.arrive(free.index(n % SLOTS), count=1)
    return place, runs
