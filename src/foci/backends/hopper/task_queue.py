# mypy: ignore-errors
"""Task queue in shared memory for persistent programs. A slot holds a task and which tiles each consumer accumulates.

The producer is one task ahead: it finds the next task and its tiles while consumers multiply. Two slots are in use at a time.
"""

from foci.backends.gpu.tiles import TICKETS, TaskTiles, decode
from foci.backends.hopper.gluon_compat import gl, gluon
from foci.backends.hopper.kernel_args import ConsumerTask, PackedPlace, Place, Segments
from foci.backends.hopper.masking import ROWS
from foci.backends.hopper.smem import FAR

__all__ = [
    "SLOTS",
    "allocate_slots",
    "broadcast_ticket",
    "decode_ticket",
    "fetch_ticket",
    "pop_task",
    "push_end",
    "push_task",
    "pushed_head",
    "read_slot",
    "reset_counter",
    "write_slot",
]

SLOTS = gl.constexpr(2)
# a slot: place (5), run (7), segments and row offset of three consumers (6 each), packed sequence (4)
FIELDS = gl.constexpr(5 + 7 + 3 * 6 + 4)
HEAD = gl.constexpr(2)
SEGMENTS = gl.constexpr(12)
SPAN = gl.constexpr(30)
BROADCAST = gl.constexpr("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;")


@gluon.jit
def allocate_slots():
    """Allocate the slots in shared memory, one number a line."""
    return gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def write_slot(slots, at, value):
    """Write a number to a line, from one warp."""
    slots.index(at).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read_slot(slots, at, WARPS: gl.constexpr = 4):
    """Read the number of a line, in WARPS warps."""
    return gl.max(slots.index(at).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def push_task(slots, n, place, run, segments, half, size, table, c):
    """Write the n-th task. half: -1 for a whole task, else which half of its consumers compute it."""
    first = n % SLOTS * FIELDS
    for i in gl.static_range(5):
        write_slot(slots, first + i, place[i])
    for i in gl.static_range(7):
        write_slot(slots, first + 5 + i, run[i].to(gl.int32))
    for me in gl.static_range(c.CONSUMERS):
        # the first half of a task has all consumers but the last; of a short task, the first half of the consumers that have rows
        second = me // (c.CONSUMERS - 1)
        if table.short_last is not None:
            halves = gl.minimum((decode(size.rows) - place.tile * c.TILE_Q + ROWS - 1) // ROWS, c.CONSUMERS)
            second = gl.where(me < (halves + 1) // 2, 0, 1)
        is_other_half = (half >= 0) & (half != second)
        for i in gl.static_range(4):
            write_slot(slots, first + SEGMENTS + 6 * me + i, gl.where(is_other_half, segments[me].count, segments[me][i]))
        write_slot(slots, first + SEGMENTS + 6 * me + 4, segments[me].narrow)
        write_slot(slots, first + SEGMENTS + 6 * me + 5, gl.where(is_other_half, FAR, 0))
    for i in gl.static_range(len(place) - 5):
        write_slot(slots, first + SPAN + i, place[5 + i])


@gluon.jit
def push_end(slots, n):
    """Write that there is no n-th task."""
    write_slot(slots, n % SLOTS * FIELDS + HEAD, -1)


@gluon.jit
def pushed_head(slots, n):
    """Head of the n-th task; -1 after the last."""
    return read_slot(slots, n % SLOTS * FIELDS + HEAD)


@gluon.jit
def pop_task(me, slots, n, c):
    """Read the n-th task, as consumer `me` computes it."""
    at = n % SLOTS * FIELDS
    place = Place(
        read_slot(slots, at), read_slot(slots, at + 1), read_slot(slots, at + 2), read_slot(slots, at + 3), read_slot(slots, at + 4)
    )
    if c.JAGGED:
        span = at + SPAN
        place = PackedPlace(
            *place, read_slot(slots, span), read_slot(slots, span + 1), read_slot(slots, span + 2), read_slot(slots, span + 3)
        )
    line = read_slot(slots, at + 5)
    if c.MODE == "lists":
        # offsets into tables need 64 bits
        line = line.to(gl.int64)
    full, part = read_slot(slots, at + 7), read_slot(slots, at + 11)
    run = TaskTiles(
        line, read_slot(slots, at + 6), full, read_slot(slots, at + 8), read_slot(slots, at + 9), read_slot(slots, at + 10), part
    )
    segment = at + SEGMENTS + 6 * me
    segments = Segments(
        read_slot(slots, segment),
        read_slot(slots, segment + 1),
        read_slot(slots, segment + 2),
        read_slot(slots, segment + 3),
        full + part,
        read_slot(slots, segment + 4),
    )
    return ConsumerTask(segments, place, run, read_slot(slots, segment + 5))


@gluon.jit
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


@gluon.jit
def fetch_ticket(tickets, PACKED: gl.constexpr):
    """Request the next ticket. Only the first lane gets it; the latency is paid in `broadcast_ticket`, where it is used."""
    text: gl.constexpr = on_first_lane("atom.relaxed.gpu.global.add.u32 $0, [$1], 1", PACKED)
    return gl.inline_asm_elementwise(text, "=r,l", [tickets], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def reset_counter(tickets, c):
    """Zero the ticket counter for the next kernel, after the last request of this one."""
    text: gl.constexpr = on_first_lane("st.relaxed.gpu.global.u32 [$1], $0", c.JAGGED)
    gl.inline_asm_elementwise(text, "=r,l", [tickets], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def broadcast_ticket(ticket):
    """Broadcast a requested ticket to all lanes."""
    return gl.inline_asm_elementwise(BROADCAST, "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1)
