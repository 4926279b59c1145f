# mypy: ignore-errors
"""Tasks of persistent programs, which the producer posts in shared memory: where a task is, and which tiles each consumer folds.

The producer is ahead of the consumers, so that what it takes to find a task and its tiles passes beside their products. Two posts
are in use at a time.
"""

from foci.backends.hopper.interface import gl, gluon
from foci.backends.hopper.masking import ROWS
from foci.backends.hopper.tiles import FAR
from foci.backends.triton.tiles import TICKETS, number

__all__ = ["POSTS", "answer", "ask", "get", "post", "post_end", "posted_head", "posts_of", "put", "reset", "take", "task_of"]

POSTS = gl.constexpr(2)
# place, run, for each of three consumers what is its own of the cuts, and where a packed sequence lies
FIELDS = gl.constexpr(5 + 7 + 3 * 6 + 4)
HEAD = gl.constexpr(2)
OWN = gl.constexpr(12)
SPAN = gl.constexpr(30)
ANSWER = gl.constexpr("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;")


@gluon.jit
def posts_of():
    """Shared memory of the posts, a number to each line."""
    return gl.allocate_shared_memory(gl.int32, [POSTS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def put(posts, at, value):
    """Puts a number in a line, by one warp."""
    posts.index(at).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def get(posts, at, WARPS: gl.constexpr = 4):
    """The number of a line, to so many warps."""
    return gl.max(posts.index(at).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def post(posts, n, place, run, cuts, half, size, table, c):
    """The n-th task, or a half of it."""
    first = n % POSTS * FIELDS
    for i in gl.static_range(5):
        put(posts, first + i, place[i])
    for i in gl.static_range(7):
        put(posts, first + 5 + i, run[i].to(gl.int32))
    for me in gl.static_range(c.CONSUMERS):
        # of a halved task the first half has all consumers but the last; of a short one, of those that have rows
        second = me // (c.CONSUMERS - 1)
        if table.late is not None:
            there = gl.minimum((number(size.rows) - place[4] * c.TILE_Q + ROWS - 1) // ROWS, c.CONSUMERS)
            second = gl.where(me < (there + 1) // 2, 0, 1)
        other = (half >= 0) & (half != second)
        for i in gl.static_range(4):
            put(posts, first + OWN + 6 * me + i, gl.where(other, cuts[me][4], cuts[me][i]))
        put(posts, first + OWN + 6 * me + 4, cuts[me][5])
        put(posts, first + OWN + 6 * me + 5, gl.where(other, FAR, 0))
    for i in gl.static_range(len(place) - 5):
        put(posts, first + SPAN + i, place[5 + i])


@gluon.jit
def post_end(posts, n):
    """That there is no n-th task."""
    put(posts, n % POSTS * FIELDS + HEAD, -1)


@gluon.jit
def posted_head(posts, n):
    """The head of the n-th task; -1 behind the last."""
    return get(posts, n % POSTS * FIELDS + HEAD)


@gluon.jit
def take(me, posts, n, c):
    """(place, run, the consumer's cuts, how far beyond are its rows) of the n-th task."""
    at = n % POSTS * FIELDS
    place = (get(posts, at), get(posts, at + 1), get(posts, at + 2), get(posts, at + 3), get(posts, at + 4))
    if c.JAGGED:
        lies = at + SPAN
        place = place + (get(posts, lies), get(posts, lies + 1), get(posts, lies + 2), get(posts, lies + 3))
    line = get(posts, at + 5)
    if c.MODE == "lists":
        # entries of a table are found in 64 bits
        line = line.to(gl.int64)
    full, part = get(posts, at + 7), get(posts, at + 11)
    run = (line, get(posts, at + 6), full, get(posts, at + 8), get(posts, at + 9), get(posts, at + 10), part)
    own = at + OWN + 6 * me
    cuts = (get(posts, own), get(posts, own + 1), get(posts, own + 2), get(posts, own + 3), full + part, get(posts, own + 4))
    return place, run, cuts, get(posts, own + 5)


@gluon.jit
def task_of(ticket, tickets, table):
    """(task of a ticket, which half of its consumers work on it): the last tasks, `table.halved` of them, have two tickets each."""
    halved = number(table.halved)
    whole = tickets - 2 * halved
    over = ticket - whole
    return gl.where(over < 0, ticket, whole + over // 2), gl.where(over < 0, -1, over % 2)


@gluon.constexpr_function
def by_first_lane(instruction, packed):
    """What the first lane does with tickets; those of packed sequences lie within the table of tasks."""
    head = "{ .reg .pred first; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.u32 $0, 0;"
    return f"{head} @first {instruction.replace('[$1]', f'[$1+{4 * TICKETS.value if packed else 0}]')}; }}"


@gluon.jit
def ask(tickets, PACKED: gl.constexpr):
    """Asks for the next ticket. Only the first lane has it, and waits for it only where it is used: `answer`."""
    text: gl.constexpr = by_first_lane("atom.relaxed.gpu.global.add.u32 $0, [$1], 1", PACKED)
    return gl.inline_asm_elementwise(text, "=r,l", [tickets], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def reset(tickets, c):
    """For the next kernel, behind the last ticket that anybody asks for."""
    text: gl.constexpr = by_first_lane("st.relaxed.gpu.global.u32 [$1], $0", c.JAGGED)
    gl.inline_asm_elementwise(text, "=r,l", [tickets], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def answer(asked):
    """The ticket that was asked for, to all lanes."""
    return gl.inline_asm_elementwise(ANSWER, "=r,r", [asked], dtype=gl.int32, is_pure=False, pack=1)
