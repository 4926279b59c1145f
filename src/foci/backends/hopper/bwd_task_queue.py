# mypy: ignore-errors
"""Tasks of the kernel of all gradients, which its producer posts in shared memory: where a tile of keys is, and which tiles of queries
visit it.

Programs take task after task. The producer is one ahead, so that what it takes to find a task, and its first queries, come beside the
products of the task before.
"""

from foci.backends.hopper.gluon_compat import gl, gluon, mbarrier
from foci.backends.hopper.smem import make_barriers
from foci.backends.hopper.task_queue import POSTS, read_slot, write_slot

__all__ = ["allocate_task_queue", "has_task", "pop_task", "push_end", "push_task"]

# place, runs of queries, and where a packed sequence lies; what goes round is not packed, and has two numbers more of runs
RUNS = gl.constexpr(5)
SPAN = gl.constexpr(12)
FIELDS = gl.constexpr(16)
# two warpgroups and two warps that add
READERS = gl.constexpr(4)


@gluon.jit
def allocate_task_queue():
    """(posts, a number to each line; barriers of those that are there; of those that all have read)."""
    posts = gl.allocate_shared_memory(gl.int32, [POSTS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return posts, make_barriers(POSTS, 1), make_barriers(POSTS, READERS)


@gluon.jit
def push_task(posted, n, place, runs):
    """The n-th task."""
    posts, full, free = posted
    first = n % POSTS * FIELDS
    mbarrier.wait(free.index(n % POSTS), ((n // POSTS) & 1) ^ 1)
    for i in gl.static_range(5):
        write_slot(posts, first + i, place[i])
    for i in gl.static_range(len(runs)):
        write_slot(posts, first + RUNS + i, runs[i].to(gl.int32))
    for i in gl.static_range(len(place) - 5):
        write_slot(posts, first + SPAN + i, place[5 + i])
    mbarrier.arrive(full.index(n % POSTS), count=1)


@gluon.jit
def push_end(posted, n):
    """That there is no n-th task."""
    posts, full, free = posted
    mbarrier.wait(free.index(n % POSTS), ((n // POSTS) & 1) ^ 1)
    write_slot(posts, n % POSTS * FIELDS, -1)
    mbarrier.arrive(full.index(n % POSTS), count=1)


@gluon.jit
def has_task(posted, n, WARPS: gl.constexpr):
    """Whether there is an n-th task, which is waited for."""
    posts, full, free = posted
    mbarrier.wait(full.index(n % POSTS), (n // POSTS) & 1)
    return read_slot(posts, n % POSTS * FIELDS, WARPS) >= 0


@gluon.jit
def pop_task(posted, n, c, WARPS: gl.constexpr):
    """(place, runs of queries) of the n-th task."""
    gl.static_assert(not (c.ROUND and c.JAGGED), "what goes round leaves no room for where a sequence lies")
    posts, full, free = posted
    at = n % POSTS * FIELDS
    place = ()
    for i in gl.static_range(9 if c.JAGGED else 5):
        place = place + (read_slot(posts, at + (i if i < 5 else SPAN + i - 5), WARPS),)
    # entries of a table are found in 64 bits
    runs = (read_slot(posts, at + RUNS, WARPS).to(gl.int64),)
    for i in gl.static_range(1, 9 if c.ROUND else 7):
        runs = runs + (read_slot(posts, at + RUNS + i, WARPS),)
    mbarrier.arrive(free.index(n % POSTS), count=1)
    return place, runs
