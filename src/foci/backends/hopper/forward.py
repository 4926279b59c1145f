# mypy: ignore-errors
"""Forward attention for sm_90: one producer warp loads tiles by TMA; two or three consumer warpgroups of 64 query rows compute.

Shah, Bikshandi, Zhang, Thakkar, Ramani and Dao, "FlashAttention-3" (2024).

    B, Hq, Hkv       batch entries, query heads, key/value heads
    Sq, Skv, D, Dv   queries, keys, head dim of q and k, head dim of v
    q, out           [B, Hq, Sq, D], [B, Hq, Sq, Dv]     TMA descriptors of [64 rows, D] boxes
    k, v             [B, Hkv, Skv, D], [B, Hkv, Skv, Dv] TMA descriptors of [TILE_KV, D] boxes
    lse, row_max     [B, Hq, Sq] float32                 pointers; row_max may be None
    S, P             [64, TILE_KV]                       one consumer's scores and weights, in registers
    acc, row_sum     [64, Dv], a sum per row and thread  float32, in registers
    row_state        running row max, see `foci.backends.hopper.online_softmax`
    c                `foci.backends.hopper.config.Config`, all constexpr

Packed sequences have B = 1 in memory and find their first row and length in `spans`.

Named tuples of this file and of `foci.backends.hopper.kernel_args`:

    place            `Place` or `PackedPlace` of a task
    run, steps       the tiles of keys that a task visits (`TaskTiles`); (first, end) of some of them, as places in the run
    consumer_task    what a consumer computes: place, run, its `Segments` of the run
    kv_ring          `KVRing` in shared memory; `base` is the number of tiles of the tasks before
    row_ctx          `RowContext` of a consumer's rows
    state            `SoftmaxState`: acc, row_state, row_sum and pending weights

Overlapped consumers begin the next tile's Q K^T before they finish a tile's P V (C2: two of them, 240 registers a thread). The others
compute one step after another and overlap with another warpgroup (N3: three consumers, 160 registers), with another program on the SM (N2,
104 registers), or, where tasks are short, with nothing (N2, 240 registers).

A task is one tile of queries of a head. A persistent program takes task after task. Its K/V ring goes on from one task to the next: the
producer loads the next task's queries and first keys while consumers finish the previous task. It announces tasks in a queue in shared
memory (`foci.backends.hopper.task_queue`).
"""

from typing import Any, NamedTuple

from foci.backends.gpu.tiles import LN2, LOG2E, decode
from foci.backends.hopper.barriers import (
    drain_barriers,
    launch_dependents,
    release_queries,
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
    mbarrier,
    specialize,
    thread_barrier,
    tma,
    warpgroup_mma_wait,
)
from foci.backends.hopper.kernel_args import ConsumerTask, RowContext
from foci.backends.hopper.layouts import mma_layout
from foci.backends.hopper.masking import BOTH, IF_PARTIAL, LOWER, ROWS, UNMASKED, UPPER, affine_terms, load_tile_mask_bits, tile_scores
from foci.backends.hopper.mma import begin_pv, begin_scores, wait_accumulators, zero_accumulators
from foci.backends.hopper.online_softmax import init_row_state, read_row_max, rescales_acc
from foci.backends.hopper.smem import (
    KVRing,
    QuerySmem,
    allocate_tiles,
    first_key,
    load_pieces,
    load_q_registers,
    make_barriers,
    reuses_q_smem,
    sequence_span,
    step_to_tile,
    store_pieces,
    tile_pieces,
)
from foci.backends.hopper.softmax import (
    pack_weights,
    rescale_acc,
    round_weights_in_place,
    scale_rows,
    softmax_tile,
    sum_by_thread,
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
from foci.compat.gluon import gluon_jit


class ForwardOutputs(NamedTuple):
    """Results, and the tiles in shared memory from which they are stored."""

    out: Any
    out_tiles: Any
    lse: Any
    row_max: Any


class ConsumerOperands(NamedTuple):
    """Operands of a consumer's products."""

    me: Any  # number of the consumer
    q: Any  # its queries, in shared memory or in registers
    q_free: Any
    kv: Any  # `KVRing`
    base: Any  # tiles of keys of the tasks before


class SoftmaxState(NamedTuple):
    """Online softmax of a consumer's rows, see the legend above."""

    acc: Any
    p: Any  # overlapped: packed weights whose P V has not begun; else empty
    row_state: Any
    row_sum: Any


@gluon_jit
def begin_qk(q, keys, stage, tile, row_ctx, env, c, score: gl.constexpr):
    """Begin S = Q K^T of a stage. An affine score function is the initial value of the accumulator, so that it costs no addition."""
    if c.AFFINE:
        raw = affine_terms(tile, row_ctx, env, c, score)
    else:
        raw = gl.zeros([ROWS, c.TILE_KV], gl.float32, mma_layout(c.TILE_KV))
    return begin_scores(q, tile_pieces(keys, stage), raw, c.AFFINE)


@gluon_jit
def accumulate_in_turn(state, operands, row_ctx, consumer_task, steps, params, c, functions, MASKED: gl.constexpr):
    """Accumulate tiles of keys, each step after the one before."""
    acc, unused, row_state, row_sum = state
    kv, segments, run = operands.kv, consumer_task.segments, consumer_task.run
    for i in range(steps[0], steps[1]):
        stage = (operands.base + i) % c.STAGES
        phase = ((operands.base + i) // c.STAGES) & 1
        tile = step_to_tile(params.table, run, i, c)
        mask_bits = load_tile_mask_bits(params.table, run, i, row_ctx, c, MASKED)
        # S = Q K^T
        mbarrier.wait(kv.k_full.index(stage), phase)
        raw = begin_qk(operands.q, kv.k_tiles, stage, tile, row_ctx, params.env, c, functions.score)
        # random bits of dropout, while the product runs
        drops = drop_bits(tile, row_ctx, c)
        raw = warpgroup_mma_wait(0, deps=[raw])
        release_stage(kv.k_free, stage, c, 0)
        release_queries(operands.q_free, operands.me, i == segments.end - 1, c)
        # score function and mask
        partial = (i < segments.full_begin) | (i >= segments.full_end)
        x = tile_scores(raw, tile, mask_bits, partial, row_ctx, params.env, c, functions.score, functions.mask, MASKED)
        # online softmax
        step = softmax_tile(x, acc, row_state, row_sum, row_ctx.factor, c)
        acc, row_state, row_sum = step.acc, step.row_state, step.row_sum
        if not rescales_acc(acc, c.TILE_KV):
            acc = rescale_acc(acc, step.alpha)
        # rounding before the wait lets it interleave with the exponentials
        p = round_weights_in_place(apply_dropout(step.p, drops, c), kv.k_tiles[0].dtype, c)
        # O += P V
        mbarrier.wait(kv.v_full.index(stage), phase)
        acc = wait_accumulators(begin_pv(p, tile_pieces(kv.v_tiles, stage), acc))
        release_stage(kv.v_free, stage, c, 1)
    return SoftmaxState(acc, (), row_state, row_sum)


@gluon_jit
def accumulate_overlapped(state, operands, row_ctx, consumer_task, steps, params, c, functions, MASKED: gl.constexpr):
    """Accumulate tiles of keys, each one's Q K^T running beside P V of the tile before: `state.p` are weights whose values have
    arrived."""
    acc, p, row_state, row_sum = state
    kv, segments, run = operands.kv, consumer_task.segments, consumer_task.run
    for i in range(steps[0], steps[1]):
        stage = (operands.base + i) % c.STAGES
        prev_stage = (operands.base + i - 1) % c.STAGES
        tile = step_to_tile(params.table, run, i, c)
        mask_bits = load_tile_mask_bits(params.table, run, i, row_ctx, c, MASKED)
        mbarrier.wait(kv.k_full.index(stage), ((operands.base + i) // c.STAGES) & 1)
        # S = Q K^T of this tile, then O += P V of the tile before; both run asynchronously
        raw = begin_qk(operands.q, kv.k_tiles, stage, tile, row_ctx, params.env, c, functions.score)
        acc = begin_pv(unpack_weights(p, kv.k_tiles[0].dtype), tile_pieces(kv.v_tiles, prev_stage), acc)
        drops = drop_bits(tile, row_ctx, c)
        # S is done; P V may still run
        raw = warpgroup_mma_wait(len(acc), deps=[raw])
        release_stage(kv.k_free, stage, c, 0)
        release_queries(operands.q_free, operands.me, i == segments.end - 1, c)
        # score function and mask
        partial = (i < segments.full_begin) | (i >= segments.full_end)
        x = tile_scores(raw, tile, mask_bits, partial, row_ctx, params.env, c, functions.score, functions.mask, MASKED)
        # online softmax; acc is still in use by P V, so it is rescaled below
        step = softmax_tile(x, (), row_state, row_sum, row_ctx.factor, c)
        row_state, row_sum = step.row_state, step.row_sum
        p_next = apply_dropout(step.p, drops, c)
        if c.EARLY_ROUNDING:
            p_next = pack_weights(p_next, kv.k_tiles[0].dtype, c, PURE=False)
        # this wait contains branches, which keep the exponentials before the wait for P V; without it ptxas moves them behind
        mbarrier.wait(kv.v_full.index(stage), ((operands.base + i) // c.STAGES) & 1)
        acc = wait_accumulators(acc)
        release_stage(kv.v_free, prev_stage, c, 1)
        acc = rescale_acc(acc, step.alpha)
        if c.EARLY_ROUNDING:
            p = p_next
        else:
            p = pack_weights(p_next, kv.k_tiles[0].dtype, c)
    return SoftmaxState(acc, p, row_state, row_sum)


@gluon_jit
def skip_tiles(kv_ring, base, low, high, c):
    """Free the stages of tiles that no row of this consumer attends to."""
    for i in range(low, high):
        stage = (base + i) % c.STAGES
        phase = ((base + i) // c.STAGES) & 1
        mbarrier.wait(kv_ring.k_full.index(stage), phase)
        release_stage(kv_ring.k_free, stage, c, 0)
        mbarrier.wait(kv_ring.v_full.index(stage), phase)
        release_stage(kv_ring.v_free, stage, c, 1)


@gluon_jit
def accumulate_tiles(state, operands, row_ctx, consumer_task, params, c, functions):
    """Accumulate a consumer's tiles: partial ones up to `full_begin`, full ones up to `full_end`, partial ones again; skip the others."""
    start, full_begin, full_end, end, count, narrow = consumer_task.segments
    skip_tiles(operands.kv, operands.base, 0, start, c)
    if not c.OVERLAPPED:
        if c.SINGLE_LOOP:
            state = accumulate_in_turn(state, operands, row_ctx, consumer_task, (start, end), params, c, functions, IF_PARTIAL)
        else:
            state = accumulate_in_turn(state, operands, row_ctx, consumer_task, (start, full_begin), params, c, functions, UPPER)
            state = accumulate_in_turn(state, operands, row_ctx, consumer_task, (full_begin, full_end), params, c, functions, UNMASKED)
            if c.LOW:
                state = accumulate_in_turn(state, operands, row_ctx, consumer_task, (full_end, end), params, c, functions, LOWER)
    elif end > start:
        # prologue: S = Q K^T and softmax of the first tile, whose P V the loop begins
        acc, unused, row_state, row_sum = state
        kv, base = operands.kv, operands.base
        tile = step_to_tile(params.table, consumer_task.run, start, c)
        mask_bits = load_tile_mask_bits(params.table, consumer_task.run, start, row_ctx, c, BOTH)
        stage = (base + start) % c.STAGES
        mbarrier.wait(kv.k_full.index(stage), ((base + start) // c.STAGES) & 1)
        raw = warpgroup_mma_wait(0, deps=[begin_qk(operands.q, kv.k_tiles, stage, tile, row_ctx, params.env, c, functions.score)])
        release_stage(kv.k_free, stage, c, 0)
        release_queries(operands.q_free, operands.me, start == end - 1, c)
        # masking a full tile changes nothing
        x = tile_scores(raw, tile, mask_bits, True, row_ctx, params.env, c, functions.score, functions.mask, BOTH)
        softmax = softmax_tile(x, (), row_state, row_sum, row_ctx.factor, c)
        row_state, row_sum = softmax.row_state, softmax.row_sum
        p = pack_weights(apply_dropout(softmax.p, drop_bits(tile, row_ctx, c), c), kv.k_tiles[0].dtype, c)
        mbarrier.wait(kv.v_full.index(stage), ((base + start) // c.STAGES) & 1)
        begun = SoftmaxState(acc, p, row_state, row_sum)
        next = start + 1
        if c.SINGLE_LOOP:
            begun = accumulate_overlapped(begun, operands, row_ctx, consumer_task, (next, end), params, c, functions, IF_PARTIAL)
        else:
            if not c.ONE_PARTIAL:
                begun = accumulate_overlapped(begun, operands, row_ctx, consumer_task, (next, full_begin), params, c, functions, UPPER)
            steps = (gl.maximum(full_begin, next), full_end)
            begun = accumulate_overlapped(begun, operands, row_ctx, consumer_task, steps, params, c, functions, UNMASKED)
            if c.LOW:
                steps = (gl.maximum(full_end, next), end)
                begun = accumulate_overlapped(begun, operands, row_ctx, consumer_task, steps, params, c, functions, LOWER)
        # epilogue: O += P V of the last tile
        acc, p, row_state, row_sum = begun
        stage = (base + end - 1) % c.STAGES
        acc = wait_accumulators(begin_pv(unpack_weights(p, kv.k_tiles[0].dtype), tile_pieces(kv.v_tiles, stage), acc))
        release_stage(kv.v_free, stage, c, 1)
        state = SoftmaxState(acc, (), row_state, row_sum)
    skip_tiles(operands.kv, operands.base, end, count, c)
    return state


@gluon_jit
def consume(me, consumer_task, q_count, base, q_smem, kv_ring, outputs, params, c, functions):
    """Compute one task's 64 rows of a consumer. `q_count` tasks with keys and `base` tiles of keys were computed before."""
    place, segments, numbers = consumer_task.place, consumer_task.segments, params.numbers
    q_start, q_len, kv_start, kv_len = sequence_span(place, params.spans, params.size, c)
    first = place.tile * c.TILE_Q + me * ROWS + consumer_task.row_offset
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, mma_layout(c.TILE_KV)))
    q_idx = gl.minimum(rows, q_len - 1)[:, None]
    aux = functions.pre(place.b, place.h, q_idx, q_len, kv_len, numbers.scale, params.env)
    factor = gl.to_tensor(LOG2E * (numbers.scale if c.PLAIN else aux[0]))
    low, high = functions.bounds(place.b, place.h, q_idx, q_len, kv_len, params.env)
    low, high = gl.max(low, 1), gl.max(high, 1)
    acc = zero_accumulators(ROWS, c.DV_PAD)
    row_sum = sum_by_thread(gl.zeros([ROWS, c.TILE_KV], gl.float32, mma_layout(c.TILE_KV)))
    row_state = init_row_state(c.TILE_KV)
    # the producer loads queries with the first keys: without keys none arrive
    if segments.count > 0:
        mbarrier.wait(q_smem.full.index(me), q_count & 1)
    rows_of_q = tile_pieces(q_smem.tiles, me)
    if c.Q_IN_REGISTERS:
        rows_of_q = load_q_registers(rows_of_q, c)
        if c.PERSISTENT:
            release_query_tile(q_smem.free, me, segments.count > 0, c)
    dropout = load_dropout_params(numbers, c)
    row_ctx = RowContext(place.b, place.h, q_idx, q_len, kv_len, first, aux, factor, low, high, segments.narrow, dropout)
    operands = ConsumerOperands(me, rows_of_q, q_smem.free, kv_ring, base)
    state = SoftmaxState(acc, (), row_state, row_sum)
    acc, unused, row_state, row_sum = accumulate_tiles(state, operands, row_ctx, consumer_task, params, c, functions)
    release_queries(q_smem.free, me, (segments.count > 0) & (segments.end <= segments.start), c)
    # each thread summed its own columns: combine the four lanes of a row
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, mma_layout(c.TILE_KV)))
    head = (place.memory_b * decode(params.size.heads) + place.h).to(gl.int64) * decode(params.size.rows) + q_start
    row_max_nat = read_row_max(row_state, c.TILE_KV) * (factor * LN2)
    gl.store(outputs.lse + head + rows, gl.where(row_sum == 0.0, float("-inf"), row_max_nat + gl.log(row_sum)), mask=rows < q_len)
    if outputs.row_max is not None:
        gl.store(outputs.row_max + head + rows, gl.where(row_sum == 0.0, float("-inf"), row_max_nat), mask=rows < q_len)
    # out = O / row_sum; rows without keys are 0 with lse = -inf
    inv_sum = gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    if c.DROPOUT:
        inv_sum = inv_sum * numbers.keep_factor
    REUSES_Q: gl.constexpr = reuses_q_smem(c.D_PAD, c.DV_PAD, c.PERSISTENT)
    if c.PERSISTENT and not REUSES_Q:
        # the store of the previous task must have read the buffer
        tma.store_wait(0)
        thread_barrier()
    out_tile = tile_pieces(outputs.out_tiles, me)
    store_pieces(outputs.out, place.memory_b, place.h, first, q_start, q_len, out_tile, scale_rows(acc, inv_sum), c.JAGGED)
    if REUSES_Q or not c.PERSISTENT:
        tma.store_wait(0)
    if REUSES_Q and c.PERSISTENT:  # noqa: SIM102  known when the kernel is compiled
        if segments.count > 0:
            thread_barrier()
            release_query_tile(q_smem.free, me, True, c)


@gluon_jit
def load_queries(q_count, q, q_smem, place, q_start, q_len, c):
    """Load the query tiles of all consumers."""
    first = place.tile * c.TILE_Q
    for n in gl.static_range(c.CONSUMERS):
        wait_query_tile(q_smem.free, n, q_count, c)
        full = q_smem.full.index(n)
        mbarrier.expect(full, ROWS * c.D_PAD * 2)
        load_pieces(q, place.memory_b, place.h, first + n * ROWS, q_start, q_len, full, tile_pieces(q_smem.tiles, n), c.JAGGED)


@gluon_jit
def produce(q_count, base, inputs, q_smem, kv_ring, place, run, params, c):
    """Load one task: keys and values tile by tile, and the queries after the first keys. Counts are those of `consume`."""
    q, k, v = inputs
    k_tiles, v_tiles, k_full, k_free, v_full, v_free = kv_ring
    q_start, q_len, kv_start, kv_len = sequence_span(place, params.spans, params.size, c)
    memory_b, kv_h = place.memory_b, place.h // decode(params.size.group)
    for i in range(run.full + run.part):
        key0 = first_key(step_to_tile(params.table, run, i, c), c)
        stage = (base + i) % c.STAGES
        wait_stage(k_free, base + i, c, 0)
        mbarrier.expect(k_full.index(stage), c.TILE_KV * c.D_PAD * 2)
        load_pieces(k, memory_b, kv_h, key0, kv_start, kv_len, k_full.index(stage), tile_pieces(k_tiles, stage), c.JAGGED)
        if i == 0:
            load_queries(q_count, q, q_smem, place, q_start, q_len, c)
        wait_stage(v_free, base + i, c, 1)
        mbarrier.expect(v_full.index(stage), c.TILE_KV * c.DV_PAD * 2)
        load_pieces(v, memory_b, kv_h, key0, kv_start, kv_len, v_full.index(stage), tile_pieces(v_tiles, stage), c.JAGGED)
    if not c.PERSISTENT:
        drain_barriers(k_free, v_free, q_smem.free, run.full + run.part, 0, c)


@gluon_jit
def produce_all(inputs, q_smem, kv_ring, queue, params, c, bounds: gl.constexpr):
    """Producer of a persistent program: it loads for the next task while consumers finish the one before."""
    slots, slot_full, slot_free = queue
    size, table = params.size, params.table
    programs = gl.num_programs(0)
    ticket = gl.program_id(0)
    mirror = 2 * programs
    q_count = 0
    base = 0
    n = 0
    tickets = decode(size.batch) * decode(size.heads) * decode(size.tasks) + decode(table.halved)
    wait_kernel_before()
    launch_dependents()
    while ticket < tickets:
        task, half = decode_ticket(ticket, tickets, table)
        place = find_task(task, size, params.spans, table, c)
        next_ticket = ticket * 0
        if table.tickets is not None:  # noqa: SIM102  known when the kernel is compiled
            if tickets > programs:
                # the answer is needed after this task: its latency is hidden
                next_ticket = fetch_ticket(table.tickets, c.JAGGED)
        if place.b >= 0:
            run, segments = plan_tiles(place, params, c, bounds, 1)
            mbarrier.wait(slot_free.index(n % SLOTS), ((n // SLOTS) & 1) ^ 1)
            push_task(slots, n, place, run, segments, half, size, table, c)
            mbarrier.arrive(slot_full.index(n % SLOTS), count=1)
            produce(q_count, base, inputs, q_smem, kv_ring, place, run, params, c)
            count = run.full + run.part
            base += count
            q_count += gl.minimum(count, 1)
            n += 1
        if table.tickets is None:
            if c.SERPENTINE:
                # every second wave in reverse: tickets of two successive waves add up to `mirror` - 1
                ticket = mirror - 1 - ticket
                mirror += 2 * programs
            else:
                ticket += programs
        elif tickets > programs:
            ticket = programs + broadcast_ticket(next_ticket)
            if c.JAGGED:  # noqa: SIM102  known when the kernel is compiled
                # each program asks once too often, so this is the last request: zero the counter for the next kernel
                if ticket == programs + tickets - 1:
                    reset_counter(table.tickets, c)
        else:
            ticket = tickets
    mbarrier.wait(slot_free.index(n % SLOTS), ((n // SLOTS) & 1) ^ 1)
    # tell consumers to stop
    push_end(slots, n)
    mbarrier.arrive(slot_full.index(n % SLOTS), count=1)
    drain_barriers(kv_ring.k_free, kv_ring.v_free, q_smem.free, base, q_count, c)


@gluon_jit
def consume_all(me, q_smem, kv_ring, queue, outputs, params, c, functions):
    """Consumer of a persistent program: computes tasks from the queue until the producer ends it."""
    slots, slot_full, slot_free = queue
    q_count = 0
    base = 0
    n = 0
    mbarrier.wait(slot_full.index(0), 0)
    while pushed_head(slots, n) >= 0:
        consumer_task = pop_task(me, slots, n, c)
        mbarrier.arrive(slot_free.index(n % SLOTS), count=1)
        consume(me, consumer_task, q_count, base, q_smem, kv_ring, outputs, params, c, functions)
        base += consumer_task.segments.count
        q_count += gl.minimum(consumer_task.segments.count, 1)
        n += 1
        mbarrier.wait(slot_full.index(n % SLOTS), (n // SLOTS) & 1)
    tma.store_wait(0)


@gluon_jit
def attention_forward(q, k, v, out, lse, row_max, call_params, c, functions):
    """Attention of one tile of queries, or of task after task. Shapes are in the legend above."""
    if not c.PERSISTENT:
        place = find_task(gl.program_id(0), call_params.size, call_params.spans, call_params.table, c)
        if place.b < 0:
            return
        run, segments = plan_tiles(place, call_params, c, functions.bounds, 4)
    # shared memory: a query tile per consumer, STAGES tiles of keys and of values, and a result tile per consumer
    q_tiles = allocate_tiles(q.dtype, c.CONSUMERS, ROWS, c.D_PAD)
    k_tiles = allocate_tiles(k.dtype, c.STAGES, c.TILE_KV, c.D_PAD)
    v_tiles = allocate_tiles(v.dtype, c.STAGES, c.TILE_KV, c.DV_PAD)
    out_tiles = q_tiles
    if not reuses_q_smem(c.D_PAD, c.DV_PAD, c.PERSISTENT):
        out_tiles = allocate_tiles(q.dtype, c.CONSUMERS, ROWS, c.DV_PAD)
    # with named barriers only the producer's "filled" side needs mbarriers
    q_full = make_barriers(c.CONSUMERS, 1)
    q_free = q_full
    if not c.NAMED_BARRIERS:
        q_free = make_barriers(c.CONSUMERS, 1)
    k_full = make_barriers(c.STAGES, 1)
    k_free = k_full
    if not c.NAMED_BARRIERS:
        k_free = make_barriers(c.STAGES, c.CONSUMERS)
    v_full = make_barriers(c.STAGES, 1)
    v_free = v_full
    if not c.NAMED_BARRIERS:
        v_free = make_barriers(c.STAGES, c.CONSUMERS)
    q_smem = QuerySmem(q_tiles, q_full, q_free)
    kv_ring = KVRing(k_tiles, v_tiles, k_full, k_free, v_full, v_free)
    queue = ()
    if c.PERSISTENT:
        queue = (allocate_slots(), make_barriers(SLOTS, 1), make_barriers(SLOTS, c.CONSUMERS))
    fence_async_shared()
    if c.PERSISTENT:
        specialize(
            c.CONSUMERS, consume_all, ((), (), ()),
            (q_smem, kv_ring, queue, ForwardOutputs(out, out_tiles, lse, row_max), call_params, c, functions),
            produce_all, ((q, k, v), q_smem, kv_ring, queue, call_params, c, functions.bounds), c.REGISTERS,
        )  # fmt: skip
    else:
        specialize(
            c.CONSUMERS, consume,
            ((ConsumerTask(segments[0], place, run, 0),), (ConsumerTask(segments[1], place, run, 0),),
             (ConsumerTask(segments[2], place, run, 0),)),
            (0, 0, q_smem, kv_ring, ForwardOutputs(out, out_tiles, lse, row_max), call_params, c, functions),
            produce, (0, 0, (q, k, v), q_smem, kv_ring, place, run, call_params, c), c.REGISTERS,
        )  # fmt: skip
