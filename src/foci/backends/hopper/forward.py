# mypy: ignore-errors
"""Forward: a producer warp copies tiles, consumer warpgroups of 64 rows each multiply them and keep an online softmax.

Shah, Bikshandi, Zhang, Thakkar, Ramani and Dao, "FlashAttention-3" (2024). Each stage of keys and of values has one barrier for
"filled" and one for "free" (`foci.backends.hopper.barriers`).

Overlapped consumers multiply scores of a tile while they finish the one before (C2, two of them, 240 registers a thread);
the others do one thing after the other and leave the overlap to a third warpgroup (N3, 160 registers a thread), to another program on the
multiprocessor (N2, two of them, 104 registers a thread), or, where tasks are short, to none (N2, 240 registers).

A program has one task, a tile of queries of a head. Persistent programs take one after another, the next that none has taken
or every so-manieth: stages of keys and of values go on from one task to the next, of which the queries come with its first keys,
while consumers finish the one before. The producer puts each task into a queue (`foci.backends.hopper.task_queue`).
"""

from foci.backends.hopper.barriers import (
    drain_barriers,
    launch_dependents,
    release_query_tile,
    release_stage,
    wait_kernel_before,
    wait_query_tile,
    wait_stage,
)
from foci.backends.hopper.dropout import apply_dropout, drop_bits, load_dropout_params
from foci.backends.hopper.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    specialize,
    thread_barrier,
    tma,
    warpgroup_mma_wait,
)
from foci.backends.hopper.layouts import mma_layout, operand_layout, pieces, tma_columns
from foci.backends.hopper.masking import BOTH, LOWER, ROWS, SOME, UPPER, WHOLE, affine_terms, load_tile_bits, tile_scores
from foci.backends.hopper.mma import begin_pv, begin_scores, wait_accumulators, zero_accumulators
from foci.backends.hopper.online_softmax import init_row_state, rescales_acc, row_max_of_state
from foci.backends.hopper.smem import (
    allocate_tiles,
    first_key,
    load_pieces,
    make_barriers,
    sequence_span,
    step_to_tile,
    store_pieces,
    tile_pieces,
)
from foci.backends.hopper.softmax import (
    by_thread,
    pack_weights,
    rescale_acc,
    round_weights_in_place,
    scale_rows,
    softmax_tile,
    unpack_weights,
)
from foci.backends.hopper.task_queue import (
    SLOTS,
    allocate_slots,
    broadcast_ticket,
    decode_ticket,
    fetch_ticket,
    pop_task,
    push_end,
    push_task,
    pushed_head,
    reset_counter,
)
from foci.backends.hopper.tile_scheduler import find_task, plan_tiles
from foci.backends.triton.tiles import LN2, LOG2E, decode


@gluon.jit
def begin_qk(q, keys, stage, tile, at, env, c, score: gl.constexpr):
    """Begins q . k of a stage, on top of what a line adds."""
    if c.LINE:
        raw = affine_terms(tile, at, env, c, score)
    else:
        raw = gl.zeros([ROWS, c.TILE_KV], gl.float32, mma_layout(c.TILE_KV))
    return begin_scores(q, tile_pieces(keys, stage), raw, c.LINE)


@gluon.jit
def queries_in_registers(tile, c):
    """The pieces of a tile of queries, in registers as a product takes them: shared memory is then read for keys alone."""
    parts = ()
    for i in gl.static_range(len(tile)):
        parts = parts + (tile[i].load(operand_layout(c.TILE_KV)),)
    # copies that come over what was read
    fence_async_shared()
    return parts


@gluon.constexpr_function
def writes_over(width, out_width, is_persistent):
    """Whether a consumer writes its rows of the result where its queries were: wide heads leave no room, and a single task needs none."""
    fits = pieces(width)[: len(pieces(out_width))] == pieces(out_width)
    return fits and min(64, tma_columns(width)) == min(64, tma_columns(out_width)) and (width > 128 or not is_persistent)


@gluon.jit
def release_queries(q_free, me, now, c):
    """After the last product with them, those of the next task may come, unless the result is to be there first, or registers held them."""
    if c.PERSISTENT and not c.HELD and not writes_over(c.D_PAD, c.DV_PAD, True):
        release_query_tile(q_free, me, now, c)


@gluon.jit
def accumulate_in_turn(
    me, acc, kept, total, q, q_free, bars, at, cuts, low, high, run, table, odds, env, c,
    score: gl.constexpr, mask: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Folds the tiles low .. high of a consumer, one step after the other."""
    keys, values, k_full, k_free, v_full, v_free, base = bars
    start, first, second, end, count, narrow = cuts
    for i in range(low, high):
        stage = (base + i) % c.STAGES
        phase = ((base + i) // c.STAGES) & 1
        tile = step_to_tile(table, run, i, c)
        marks = load_tile_bits(table, run, i, at, c, MASKED)
        mbarrier.wait(k_full.index(stage), phase)
        raw = begin_qk(q, keys, stage, tile, at, env, c, score)
        drops = drop_bits(tile, at, odds, c)
        raw = warpgroup_mma_wait(0, deps=[raw])
        release_stage(k_free, stage, c, 0)
        release_queries(q_free, me, i == end - 1, c)
        x = tile_scores(raw, tile, marks, (i < first) | (i >= second), at, env, c, score, mask, MASKED)
        p, acc, alpha, kept, total = softmax_tile(x, acc, kept, total, at[7], c)
        if not rescales_acc(acc, c.TILE_KV):
            acc = rescale_acc(acc, alpha)
        # before the wait: between exponentials
        p = round_weights_in_place(apply_dropout(p, drops, c), keys[0].dtype, c)
        mbarrier.wait(v_full.index(stage), phase)
        acc = wait_accumulators(begin_pv(p, tile_pieces(values, stage), acc))
        release_stage(v_free, stage, c, 1)
    return acc, kept, total


@gluon.jit
def accumulate_overlapped(
    me, acc, p, kept, total, q, q_free, bars, at, cuts, low, high, run, table, odds, env, c,
    score: gl.constexpr, mask: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Folds the tiles low .. high, each one's scores beside the values of the tile before it, which have been waited for.

    `p`: the packed weights of that tile.
    """
    keys, values, k_full, k_free, v_full, v_free, base = bars
    start, first, second, end, count, narrow = cuts
    for i in range(low, high):
        stage = (base + i) % c.STAGES
        before = (base + i - 1) % c.STAGES
        tile = step_to_tile(table, run, i, c)
        marks = load_tile_bits(table, run, i, at, c, MASKED)
        mbarrier.wait(k_full.index(stage), ((base + i) // c.STAGES) & 1)
        raw = begin_qk(q, keys, stage, tile, at, env, c, score)
        acc = begin_pv(unpack_weights(p, keys[0].dtype), tile_pieces(values, before), acc)
        drops = drop_bits(tile, at, odds, c)
        raw = warpgroup_mma_wait(len(acc), deps=[raw])
        release_stage(k_free, stage, c, 0)
        release_queries(q_free, me, i == end - 1, c)
        x = tile_scores(raw, tile, marks, (i < first) | (i >= second), at, env, c, score, mask, MASKED)
        weights, none, alpha, kept, total = softmax_tile(x, (), kept, total, at[7], c)
        weights = apply_dropout(weights, drops, c)
        if c.EARLY:
            weights = pack_weights(weights, keys[0].dtype, c, PURE=False)
        # the branches of this wait keep the exponentials before that for the product: else ptxas moves them behind it
        mbarrier.wait(v_full.index(stage), ((base + i) // c.STAGES) & 1)
        acc = wait_accumulators(acc)
        release_stage(v_free, before, c, 1)
        acc = rescale_acc(acc, alpha)
        if c.EARLY:
            p = weights
        else:
            p = pack_weights(weights, keys[0].dtype, c)
    return acc, p, kept, total


@gluon.jit
def skip_tiles(bars, low, high, c):
    """Lets tiles go by that no row of this consumer attends to."""
    keys, values, k_full, k_free, v_full, v_free, base = bars
    for i in range(low, high):
        stage = (base + i) % c.STAGES
        phase = ((base + i) // c.STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        release_stage(k_free, stage, c, 0)
        mbarrier.wait(v_full.index(stage), phase)
        release_stage(v_free, stage, c, 1)


@gluon.jit
def accumulate_tiles(me, acc, kept, total, q, q_free, bars, at, cuts, run, table, odds, env, c, score: gl.constexpr, mask: gl.constexpr):
    """Folds a consumer's tiles: partial ones up to `first`, full ones up to `second`, partial ones again; others pass."""
    start, first, second, end, count, narrow = cuts
    skip_tiles(bars, 0, start, c)
    if not c.OVERLAPPED:
        if c.JOINED:
            acc, kept, total = accumulate_in_turn(
                me, acc, kept, total, q, q_free, bars, at, cuts, start, end, run, table, odds, env, c, score, mask, SOME
            )
        else:
            acc, kept, total = accumulate_in_turn(
                me, acc, kept, total, q, q_free, bars, at, cuts, start, first, run, table, odds, env, c, score, mask, UPPER
            )
            acc, kept, total = accumulate_in_turn(
                me, acc, kept, total, q, q_free, bars, at, cuts, first, second, run, table, odds, env, c, score, mask, WHOLE
            )
            if c.LOW:
                acc, kept, total = accumulate_in_turn(
                    me, acc, kept, total, q, q_free, bars, at, cuts, second, end, run, table, odds, env, c, score, mask, LOWER
                )
    elif end > start:
        keys, values, k_full, k_free, v_full, v_free, base = bars
        tile = step_to_tile(table, run, start, c)
        marks = load_tile_bits(table, run, start, at, c, BOTH)
        stage = (base + start) % c.STAGES
        mbarrier.wait(k_full.index(stage), ((base + start) // c.STAGES) & 1)
        raw = warpgroup_mma_wait(0, deps=[begin_qk(q, keys, stage, tile, at, env, c, score)])
        release_stage(k_free, stage, c, 0)
        release_queries(q_free, me, start == end - 1, c)
        # a full tile may be treated as a partial one
        x = tile_scores(raw, tile, marks, True, at, env, c, score, mask, BOTH)
        p, none, alpha, kept, total = softmax_tile(x, (), kept, total, at[7], c)
        p = pack_weights(apply_dropout(p, drop_bits(tile, at, odds, c), c), keys[0].dtype, c)
        mbarrier.wait(v_full.index(stage), ((base + start) // c.STAGES) & 1)
        next = start + 1
        if c.JOINED:
            acc, p, kept, total = accumulate_overlapped(
                me, acc, p, kept, total, q, q_free, bars, at, cuts, next, end, run, table, odds, env, c, score, mask, SOME
            )
        else:
            acc, p, kept, total = accumulate_overlapped(
                me, acc, p, kept, total, q, q_free, bars, at, cuts, next, first, run, table, odds, env, c, score, mask, UPPER
            )
            low = gl.maximum(first, next)
            acc, p, kept, total = accumulate_overlapped(
                me, acc, p, kept, total, q, q_free, bars, at, cuts, low, second, run, table, odds, env, c, score, mask, WHOLE
            )
            if c.LOW:
                low = gl.maximum(second, next)
                acc, p, kept, total = accumulate_overlapped(
                    me, acc, p, kept, total, q, q_free, bars, at, cuts, low, end, run, table, odds, env, c, score, mask, LOWER
                )
        stage = (base + end - 1) % c.STAGES
        acc = wait_accumulators(begin_pv(unpack_weights(p, keys[0].dtype), tile_pieces(values, stage), acc))
        release_stage(v_free, stage, c, 1)
    skip_tiles(bars, end, count, c)
    return acc, kept, total


@gluon.jit
def consume(
    me, cuts, turn, away, q_tiles, q_full, q_free, bars, place, run, spans, out, out_buffers, lse, row_max, size, table,
    numbers, env, c, pre: gl.constexpr, score: gl.constexpr, mask: gl.constexpr, bounds: gl.constexpr,
):  # fmt: skip
    """One consumer: 64 rows of the program's tile, `away` beyond all rows where another program has them."""
    b, memory_b, h, task, block = place[:5]
    q_start, q_len, kv_start, kv_len = sequence_span(place, spans, size, c)
    first = block * c.TILE_Q + me * ROWS + away
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, mma_layout(c.TILE_KV)))
    q_idx = gl.minimum(rows, q_len - 1)[:, None]
    aux = pre(b, h, q_idx, q_len, kv_len, numbers.scale, env)
    factor = gl.to_tensor(LOG2E * (numbers.scale if c.PLAIN else aux[0]))
    low, high = bounds(b, h, q_idx, q_len, kv_len, env)
    low, high = gl.max(low, 1), gl.max(high, 1)
    at = (b, h, q_idx, q_len, kv_len, first, aux, factor, low, high, cuts[5])
    acc = zero_accumulators(ROWS, c.DV_PAD)
    total = by_thread(gl.zeros([ROWS, c.TILE_KV], gl.float32, mma_layout(c.TILE_KV)))
    kept = init_row_state(c.TILE_KV)
    # without keys no queries come
    if cuts[4] > 0:
        mbarrier.wait(q_full.index(me), turn & 1)
    rows_of_q = tile_pieces(q_tiles, me)
    if c.HELD:
        rows_of_q = queries_in_registers(rows_of_q, c)
        if c.PERSISTENT:
            release_query_tile(q_free, me, cuts[4] > 0, c)
    odds = load_dropout_params(numbers, c)
    acc, kept, total = accumulate_tiles(me, acc, kept, total, rows_of_q, q_free, bars, at, cuts, run, table, odds, env, c, score, mask)
    release_queries(q_free, me, (cuts[4] > 0) & (cuts[3] <= cuts[0]), c)
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, mma_layout(c.TILE_KV)))
    head = (memory_b * decode(size.heads) + h).to(gl.int64) * decode(size.rows) + q_start
    natural = row_max_of_state(kept, c.TILE_KV) * (factor * LN2)
    gl.store(lse + head + rows, gl.where(total == 0.0, float("-inf"), natural + gl.log(total)), mask=rows < q_len)
    if row_max is not None:
        gl.store(row_max + head + rows, gl.where(total == 0.0, float("-inf"), natural), mask=rows < q_len)
    weight = gl.where(total == 0.0, 0.0, 1.0 / total)
    if c.DROPOUT:
        weight = weight * numbers.keep_factor
    OVER: gl.constexpr = writes_over(c.D_PAD, c.DV_PAD, c.PERSISTENT)
    if c.PERSISTENT and not OVER:
        # until the rows of the task before have left
        tma.store_wait(0)
        thread_barrier()
    store_pieces(out, memory_b, h, first, q_start, q_len, tile_pieces(out_buffers, me), scale_rows(acc, weight), c.JAGGED)
    if OVER or not c.PERSISTENT:
        tma.store_wait(0)
    if OVER and c.PERSISTENT:  # noqa: SIM102  the same
        if cuts[4] > 0:
            thread_barrier()
            release_query_tile(q_free, me, True, c)


@gluon.jit
def load_queries(turn, q, q_tiles, q_full, q_free, place, q_start, q_len, c):
    """The rows of all consumers."""
    b, memory_b, h, task, tile = place[:5]
    first = tile * c.TILE_Q
    for n in gl.static_range(c.CONSUMERS):
        wait_query_tile(q_free, n, turn, c)
        mbarrier.expect(q_full.index(n), ROWS * c.D_PAD * 2)
        load_pieces(q, memory_b, h, first + n * ROWS, q_start, q_len, q_full.index(n), tile_pieces(q_tiles, n), c.JAGGED)


@gluon.jit
def produce(turn, q, k, v, q_tiles, q_full, q_free, bars, place, run, spans, size, table, c):
    """The producer: keys and values tile by tile, and the queries with the first of them."""
    b, memory_b, h, task, tile = place[:5]
    q_start, q_len, kv_start, kv_len = sequence_span(place, spans, size, c)
    keys, values, k_full, k_free, v_full, v_free, base = bars
    kv_h = h // decode(size.group)
    for i in range(run[2] + run[6]):
        here = first_key(step_to_tile(table, run, i, c), c)
        stage = (base + i) % c.STAGES
        wait_stage(k_free, base + i, c, 0)
        mbarrier.expect(k_full.index(stage), c.TILE_KV * c.D_PAD * 2)
        load_pieces(k, memory_b, kv_h, here, kv_start, kv_len, k_full.index(stage), tile_pieces(keys, stage), c.JAGGED)
        if i == 0:
            load_queries(turn, q, q_tiles, q_full, q_free, place, q_start, q_len, c)
        wait_stage(v_free, base + i, c, 1)
        mbarrier.expect(v_full.index(stage), c.TILE_KV * c.DV_PAD * 2)
        load_pieces(v, memory_b, kv_h, here, kv_start, kv_len, v_full.index(stage), tile_pieces(values, stage), c.JAGGED)
    if not c.PERSISTENT:
        drain_barriers(k_free, v_free, q_free, run[2] + run[6], 0, c)


@gluon.jit
def produce_all(q, k, v, q_tiles, q_full, q_free, rings, queue, spans, size, table, env, c, bounds: gl.constexpr):
    """The producer of a program that takes task after task: it copies for the next one while consumers finish the one before."""
    keys, values, k_full, k_free, v_full, v_free = rings
    slots, slot_full, slot_free = queue
    programs = gl.num_programs(0)
    ticket = gl.program_id(0)
    ends = 2 * programs
    turn = 0
    base = 0
    n = 0
    tickets = decode(size.batch) * decode(size.heads) * decode(size.tasks) + decode(table.halved)
    wait_kernel_before()
    launch_dependents()
    while ticket < tickets:
        task, half = decode_ticket(ticket, tickets, table)
        place = find_task(task, size, spans, table, c)
        asked = ticket * 0
        if table.tickets is not None:  # noqa: SIM102  known when the kernel is compiled
            if tickets > programs:
                asked = fetch_ticket(table.tickets, c.JAGGED)
        if place[0] >= 0:
            run, cuts = plan_tiles(place, spans, size, table, env, c, bounds, 1)
            mbarrier.wait(slot_free.index(n % SLOTS), ((n // SLOTS) & 1) ^ 1)
            push_task(slots, n, place, run, cuts, half, size, table, c)
            mbarrier.arrive(slot_full.index(n % SLOTS), count=1)
            bars = (keys, values, k_full, k_free, v_full, v_free, base)
            produce(turn, q, k, v, q_tiles, q_full, q_free, bars, place, run, spans, size, table, c)
            count = run[2] + run[6]
            base += count
            turn += gl.minimum(count, 1)
            n += 1
        if table.tickets is None:
            if c.TURNING:
                # two rounds that follow each other, counted from both ends
                ticket = ends - 1 - ticket
                ends += 2 * programs
            else:
                ticket += programs
        elif tickets > programs:
            ticket = programs + broadcast_ticket(asked)
            if c.JAGGED:  # noqa: SIM102  known when the kernel is compiled
                # each program asks once in vain
                if ticket == programs + tickets - 1:
                    reset_counter(table.tickets, c)
        else:
            ticket = tickets
    mbarrier.wait(slot_free.index(n % SLOTS), ((n // SLOTS) & 1) ^ 1)
    push_end(slots, n)
    mbarrier.arrive(slot_full.index(n % SLOTS), count=1)
    drain_barriers(k_free, v_free, q_free, base, turn, c)


@gluon.jit
def consume_all(
    me, q_tiles, q_full, q_free, rings, queue, spans, out, outs, lse, row_max, size, table, numbers, env, c,
    pre: gl.constexpr, score: gl.constexpr, mask: gl.constexpr, bounds: gl.constexpr,
):  # fmt: skip
    """One consumer of such a program."""
    keys, values, k_full, k_free, v_full, v_free = rings
    slots, slot_full, slot_free = queue
    turn = 0
    base = 0
    n = 0
    mbarrier.wait(slot_full.index(0), 0)
    while pushed_head(slots, n) >= 0:
        place, run, cuts, away = pop_task(me, slots, n, c)
        mbarrier.arrive(slot_free.index(n % SLOTS), count=1)
        bars = (keys, values, k_full, k_free, v_full, v_free, base)
        consume(
            me, cuts, turn, away, q_tiles, q_full, q_free, bars, place, run, spans, out, outs, lse, row_max, size, table, numbers,
            env, c, pre, score, mask, bounds,
        )  # fmt: skip
        base += cuts[4]
        turn += gl.minimum(cuts[4], 1)
        n += 1
        mbarrier.wait(slot_full.index(n % SLOTS), (n // SLOTS) & 1)
    tma.store_wait(0)


@gluon.jit
def attention_forward(
    q, k, v, out, lse, row_max, size, spans, table, numbers, env, c,
    pre: gl.constexpr, score: gl.constexpr, mask: gl.constexpr, bounds: gl.constexpr,
):  # fmt: skip
    """Attention of one tile of queries. Shapes as in `foci.problem.Operands` and `Results`; q, k, v and out are descriptors."""
    if not c.PERSISTENT:
        place = find_task(gl.program_id(0), size, spans, table, c)
        if place[0] < 0:
            return
        run, cuts = plan_tiles(place, spans, size, table, env, c, bounds, 4)
    q_tiles = allocate_tiles(q.dtype, c.CONSUMERS, ROWS, c.D_PAD)
    keys = allocate_tiles(k.dtype, c.STAGES, c.TILE_KV, c.D_PAD)
    values = allocate_tiles(v.dtype, c.STAGES, c.TILE_KV, c.DV_PAD)
    outs = q_tiles
    if not writes_over(c.D_PAD, c.DV_PAD, c.PERSISTENT):
        outs = allocate_tiles(q.dtype, c.CONSUMERS, ROWS, c.DV_PAD)
    q_full = make_barriers(c.CONSUMERS, 1)
    q_free = q_full
    if not c.NUMBERED:
        q_free = make_barriers(c.CONSUMERS, 1)
    k_full = make_barriers(c.STAGES, 1)
    k_free = k_full
    if not c.NUMBERED:
        k_free = make_barriers(c.STAGES, c.CONSUMERS)
    v_full = make_barriers(c.STAGES, 1)
    v_free = v_full
    if not c.NUMBERED:
        v_free = make_barriers(c.STAGES, c.CONSUMERS)
    rings = (keys, values, k_full, k_free, v_full, v_free)
    bars = (keys, values, k_full, k_free, v_full, v_free, 0)
    queue = ()
    if c.PERSISTENT:
        queue = (allocate_slots(), make_barriers(SLOTS, 1), make_barriers(SLOTS, c.CONSUMERS))
    fence_async_shared()
    if c.PERSISTENT:
        specialize(
            c.CONSUMERS, consume_all, ((), (), ()),
            (q_tiles, q_full, q_free, rings, queue, spans, out, outs, lse, row_max, size, table, numbers, env, c,
             pre, score, mask, bounds),
            produce_all, (q, k, v, q_tiles, q_full, q_free, rings, queue, spans, size, table, env, c, bounds), c.REGISTERS,
        )  # fmt: skip
    else:
        specialize(
            c.CONSUMERS, consume, ((cuts[0],), (cuts[1],), (cuts[2],)),
            (0, 0, q_tiles, q_full, q_free, bars, place, run, spans, out, outs, lse, row_max, size, table, numbers, env, c,
             pre, score, mask, bounds),
            produce, (0, q, k, v, q_tiles, q_full, q_free, bars, place, run, spans, size, table, c), c.REGISTERS,
        )  # fmt: skip
