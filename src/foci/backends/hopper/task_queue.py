# mypy: ignore-errors
"""Task queue in shared memory for persistent programs. A slot says where a task is, and which tiles each consumer accumulates.

The producer runs ahead of the consumers, so that it finds the next task and its tiles while they multiply. Two slots are in use
at a time.
"""

from foci.backends.hopper.gluon_compat import gl, gluon
from foci.backends.hopper.masking import ROWS
from foci.backends.hopper.smem import FAR
from foci.backends.triton.tiles import TICKETS, decode

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
# place, run, for each of three consumers what is its own of the cuts, and where a packed sequence lies
FIELDS = gl.constexpr(5 + 7 + 3 * 6 + 4)
HEAD = gl.constexpr(2)
OWN = gl.constexpr(12)
SPAN = gl.constexpr(30)
ANSWER = gl.constexpr("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;")


@gluon.jit
def allocate_slots():
    """The slots in shared memory, one number a line."""
    return gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def write_slot(slots, at, value):
    """Puts a number in a line, by one warp."""
    slots.index(at).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read_slot(slots, at, WARPS: gl.constexpr = 4):
    """The number of a line, to so many warps."""
    return gl.max(slots.index(at).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def push_task(slots, n, place, run, cuts, half, size, table, c):
    """The n-th task, or a half of it."""
    first = n % SLOTS * FIELDS
    for i in gl.static_range(5):
        write_slot(slots, first + i, place[i])
    for i in gl.static_range(7):
        write_slot(slots, first + 5 + i, run[i].to(gl.int32))
    for me in gl.static_range(c.CONSUMERS):
        # of a halved task the first half has all consumers but the last; of a short one, of those that have rows
        second = me // (c.CONSUMERS - 1)
        if table.late is not None:
            there = gl.minimum((decode(size.rows) - place[4] * c.TILE_Q + ROWS - 1) // ROWS, c.CONSUMERS)
            second = gl.where(me < (there + 1) // 2, 0, 1)
        other = (half >= 0) & (half != second)
        for i in gl.static_range(4):
            write_slot(slots, first + OWN + 6 * me + i, gl.where(other, cuts[me][4], cuts[me][i]))
        write_slot(slots, first + OWN + 6 * me + 4, cuts[me][5])
        write_slot(slots, first + OWN + 6 * me + 5, gl.where(other, FAR, 0))
    for i in gl.static_range(len(place) - 5):
        write_slot(slots, first + SPAN + i, place[5 + i])


@gluon.jit
def push_end(slots, n):
    """Writes that there is no n-th task."""
    write_slot(slots, n % SLOTS * FIELDS + HEAD, -1)


@gluon.jit
def pushed_head(slots, n):
    """The head of the n-th task; -1 behind the last."""
    return read_slot(slots, n % SLOTS * FIELDS + HEAD)


@gluon.jit
def pop_task(me, slots, n, c):
    """(place, run, the consumer's cuts, how far beyond are its rows) of the n-th task."""
    at = n % SLOTS * FIELDS
    place = (read_slot(slots, at), read_slot(slots, at + 1), read_slot(slots, at + 2), read_slot(slots, at + 3), read_slot(slots, at + 4))
    if c.JAGGED:
        lies = at + SPAN
        place = place + (read_slot(slots, lies), read_slot(slots, lies + 1), read_slot(slots, lies + 2), read_slot(slots, lies + 3))
    line = read_slot(slots, at + 5)
    if c.MODE == "lists":
        # entries of a table are found in 64 bits
        line = line.to(gl.int64)
    full, part = read_slot(slots, at + 7), read_slot(slots, at + 11)
    run = (line, read_slot(slots, at + 6), full, read_slot(slots, at + 8), read_slot(slots, at + 9), read_slot(slots, at + 10), part)
    own = at + OWN + 6 * me
    cuts = (
        read_slot(slots, own),
        read_slot(slots, own + 1),
        read_slot(slots, own + 2),
        read_slot(slots, own + 3),
        full + part,
        read_slot(slots, own + 4),
    )
    return place, run, cuts, read_slot(slots, own + 5)


@gluon.jit
def decode_ticket(ticket, tickets, table):
    """(task of a ticket, which half of its consumers work on it): the last tasks, `table.halved` of them, have two tickets each."""
    halved = decode(table.halved)
    whole = tickets - 2 * halved
    over = ticket - whole
    return gl.where(over < 0, ticket, whole + over // 2), gl.where(over < 0, -1, over % 2)


@gluon.constexpr_function
def on_first_lane(instruction, packed):
    """What the first lane does with tickets; those of packed sequences lie within the table of tasks."""
    head = "{ .reg .pred first; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.u32 $0, 0;"
    return f"{head} @first {instruction.replace('[$1]', f'[$1+{4 * TICKETS.value if packed else 0}]')}; }}"


@gluon.jit
def fetch_ticket(tickets, PACKED: gl.constexpr):
    """Asks for the next ticket. Only the first lane has it, and waits for it only where it is used: `broadcast_ticket`."""
    text: gl.constexpr = on_first_lane("atom.relaxed.gpu.global.add.u32 $0, [$1], 1", PACKED)
    return gl.inline_asm_elementwise(text, "=r,l", [tickets], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def reset_counter(tickets, c):
    """For the next kernel, behind the last ticket that anybody asks for."""
    text: gl.constexpr = on_first_lane("st.relaxed.gpu.global.u32 [$1], $0", c.JAGGED)
    gl.inline_asm_elementwise(text, "=r,l", [tickets], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def broadcast_ticket(asked):
    """The ticket that was asked for, to all lanes."""
    return gl.inline_asm_elementwise(ANSWER, "=r,r", [asked], dtype=gl.int32, is_pure=False, pack=1)
