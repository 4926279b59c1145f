# mypy: ignore-errors
"""Task queue in shared memory of persistent programs: the producer pushes tasks, and consumers read them from slots.

The producer is one task ahead: finding a task and loading its first tiles overlap with the products of the previous task. Two slots are in
use at a time, each with a "filled" and a "free" barrier. A slot is a row of numbers, one a line:

    forward    place (5), run of key tiles (7), segments and row offset of three consumers (6 each), packed sequence (4)
    backward   task (5), runs of query tiles (7, or 9 with ROUND), packed sequence (4); ROUND is never packed
"""

from typing import Any, NamedTuple

from foci.backends.gpu.tiles import TICKETS, TaskTiles, decode
from foci.backends.hopper.gluon_compat import gl, gluon, mbarrier
from foci.backends.hopper.kernel_args import ConsumerTask, PackedPlace, PackedTask, Place, Segments, Task
from foci.backends.hopper.masking import ROWS
from foci.backends.hopper.smem import FAR, make_barriers
from foci.compat.gluon import gluon_jit

__all__ = [
    "SLOTS",
    "QueryRuns",
    "RoundQueryRuns",
    "allocate_queue",
    "allocate_slots",
    "broadcast_ticket",
    "decode_ticket",
    "fetch_ticket",
    "has_task",
    "pop_key_task",
    "pop_task",
    "push_end",
    "push_key_task",
    "push_last",
    "push_task",
    "pushed_head",
    "reset_counter",
]

SLOTS = gl.constexpr(2)
BROADCAST = gl.constexpr("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;")

# lines of a slot of the forward
FIELDS = gl.constexpr(5 + 7 + 3 * 6 + 4)
HEAD = gl.constexpr(2)
SEGMENTS = gl.constexpr(12)
SPAN = gl.constexpr(30)

# lines of a slot of the backward
KEY_FIELDS = gl.constexpr(16)
KEY_RUNS = gl.constexpr(5)
KEY_SPAN = gl.constexpr(12)
# of the backward: two consumer warpgroups and the two warps of `dq_semaphore.reduce_dq_shares`
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


# ---- slots ----


@gluon_jit
def allocate_slots(LINES: gl.constexpr = FIELDS):
    """Allocate the slots in shared memory, LINES numbers each."""
    return gl.allocate_shared_memory(gl.int32, [SLOTS * LINES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon_jit
def write_slot(slots, at, numbers):
    """Write numbers to successive lines, from one warp."""
    for i in gl.static_range(len(numbers)):
        slots.index(at + i).store(gl.full([1], numbers[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon_jit
def read_slot(slots, at, COUNT: gl.constexpr, WARPS: gl.constexpr = 4):
    """Read COUNT successive numbers, in WARPS warps."""
    numbers = ()
    for i in gl.static_range(COUNT):
        numbers = numbers + (gl.max(slots.index(at + i).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0),)
    return numbers


# ---- tasks of the forward, which waits for the barriers itself ----


@gluon_jit
def push_task(slots, n, place, run, segments, half, size, table, c):
    """Write the n-th task. half: -1 for a whole task, else which half of its consumers compute it."""
    first = n % SLOTS * FIELDS
    write_slot(slots, first, place[:5])
    write_slot(slots, first + 5, run)
    for me in gl.static_range(c.CONSUMERS):
        # the first half of a task has all consumers but the last; of a short task, the first half of the consumers that have rows
        second = me // (c.CONSUMERS - 1)
        if table.short_last is not None:
            halves = gl.minimum((decode(size.rows) - place.tile * c.TILE_Q + ROWS - 1) // ROWS, c.CONSUMERS)
            second = gl.where(me < (halves + 1) // 2, 0, 1)
        is_other_half = (half >= 0) & (half != second)
        at = first + SEGMENTS + 6 * me
        for i in gl.static_range(4):
            write_slot(slots, at + i, (gl.where(is_other_half, segments[me].count, segments[me][i]),))
        write_slot(slots, at + 4, (segments[me].narrow,))
        write_slot(slots, at + 5, (gl.where(is_other_half, FAR, 0),))
    write_slot(slots, first + SPAN, place[5:])


@gluon_jit
def push_end(slots, n):
    """Write that there is no n-th task."""
    write_slot(slots, n % SLOTS * FIELDS + HEAD, (-1,))


@gluon_jit
def pushed_head(slots, n):
    """Head of the n-th task; -1 after the last."""
    return read_slot(slots, n % SLOTS * FIELDS + HEAD, 1)[0]


@gluon_jit
def pop_task(me, slots, n, c):
    """Read the n-th task, as consumer `me` computes it."""
    at = n % SLOTS * FIELDS
    place = Place(*read_slot(slots, at, 5))
    if c.JAGGED:
        place = PackedPlace(*place, *read_slot(slots, at + SPAN, 4))
    row = read_slot(slots, at + 5, 1)[0]
    if c.MODE == "lists":
        # offsets into tables need 64 bits
        row = row.to(gl.int64)
    full, part = read_slot(slots, at + 7, 1)[0], read_slot(slots, at + 11, 1)[0]
    run = TaskTiles(row, *read_slot(slots, at + 6, 1), full, *read_slot(slots, at + 8, 3), part)
    segment = at + SEGMENTS + 6 * me
    segments = Segments(*read_slot(slots, segment, 4), full + part, *read_slot(slots, segment + 4, 1))
    return ConsumerTask(segments, place, run, *read_slot(slots, segment + 5, 1))


# ---- tasks of the backward ----


@gluon_jit
def allocate_queue():
    """Allocate (slots, a "filled" barrier per slot, a "free" barrier per slot, at which every reader arrives)."""
    return allocate_slots(KEY_FIELDS), make_barriers(SLOTS, 1), make_barriers(SLOTS, READERS)


@gluon_jit
def push_key_task(queue, n, task, runs):
    """Push the n-th task: a key tile and the query tiles that it visits."""
    slots, full, free = queue
    first = n % SLOTS * KEY_FIELDS
    mbarrier.wait(free.index(n % SLOTS), ((n // SLOTS) & 1) ^ 1)
    write_slot(slots, first, task[:5])
    write_slot(slots, first + KEY_RUNS, runs)
    write_slot(slots, first + KEY_SPAN, task[5:])
    mbarrier.arrive(full.index(n % SLOTS), count=1)


@gluon_jit
def push_last(queue, n):
    """Push that there is no n-th task."""
    slots, full, free = queue
    mbarrier.wait(free.index(n % SLOTS), ((n // SLOTS) & 1) ^ 1)
    write_slot(slots, n % SLOTS * KEY_FIELDS, (-1,))
    mbarrier.arrive(full.index(n % SLOTS), count=1)


@gluon_jit
def has_task(queue, n, WARPS: gl.constexpr):
    """Wait for the n-th slot; whether it holds a task."""
    slots, full, free = queue
    mbarrier.wait(full.index(n % SLOTS), (n // SLOTS) & 1)
    return read_slot(slots, n % SLOTS * KEY_FIELDS, 1, WARPS)[0] >= 0


@gluon_jit
def pop_key_task(queue, n, c, WARPS: gl.constexpr):
    """Read the n-th task: (`Task` or `PackedTask`, `QueryRuns` or `RoundQueryRuns`)."""
    gl.static_assert(not (c.ROUND and c.JAGGED), "ROUND leaves no room in a slot for a packed sequence")
    slots, full, free = queue
    at = n % SLOTS * KEY_FIELDS
    task = read_slot(slots, at, 5, WARPS)
    if c.JAGGED:
        task = task + read_slot(slots, at + KEY_SPAN, 4, WARPS)
    runs = read_slot(slots, at + KEY_RUNS, 9 if c.ROUND else 7, WARPS)
    # offsets into tables need 64 bits
    runs = (runs[0].to(gl.int64),) + runs[1:]
    mbarrier.arrive(free.index(n % SLOTS), count=1)
    if c.JAGGED:
        return PackedTask(*task), QueryRuns(*runs)
    elif c.ROUND:
        return Task(*task), RoundQueryRuns(*runs)
    else:
        return Task(*task), QueryRuns(*runs)


# ---- tickets: numbers of tasks, from a counter in device memory ----


@gluon_jit
def decode_ticket(ticket, tickets, table):
    """(task, half) of a ticket. The last `table.halved` tasks have two tickets each, one for each half of their consumers."""
    halved = decode(table.halved)
    unhalved = tickets - 2 * halved
    over = ticket - unhalved
    return gl.where(over < 0, ticket, unhalved + over // 2), gl.where(over < 0, -1, over % 2)


@gluon.constexpr_function
def on_first_lane(instruction, packed):
    """PTX of an instruction on the ticket counter by the first lane; packed, the counter is inside the task table."""
    head = "{ .reg .pred first; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.u32 $0, 0;"
    return f"{head} @first {instruction.replace('[$1]', f'[$1+{4 * TICKETS.value if packed else 0}]')}; }}"


@gluon_jit
def fetch_ticket(tickets, PACKED: gl.constexpr):
    """Request the next ticket. Only the first lane gets it; the latency is paid in `broadcast_ticket`, where it is used."""
    text: gl.constexpr = on_first_lane("atom.relaxed.gpu.global.add.u32 $0, [$1], 1", PACKED)
    return gl.inline_asm_elementwise(text, "=r,l", [tickets], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def reset_counter(tickets, c):
    """Zero the ticket counter for the next kernel, after the last request of this one."""
    text: gl.constexpr = on_first_lane("st.relaxed.gpu.global.u32 [$1], $0", c.JAGGED)
    gl.inline_asm_elementwise(text, "=r,l", [tickets], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def broadcast_ticket(ticket):
    """Broadcast a requested ticket to all lanes."""
    return gl.inline_asm_elementwise(BROADCAST, "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1)
