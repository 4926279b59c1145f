# mypy: ignore-errors
"""Barriers by which consumers tell the producer that it may overwrite keys, values or queries in shared memory.

Either an mbarrier, at which one thread arrives for its warpgroup after the warpgroup has met; or, with NAMED_BARRIERS, a named barrier
of the SM (`bar.arrive`, `bar.sync`), at which each warp arrives by itself. Triton uses barrier 0, 1 and, from 2 on, one for each
partition of warps, so these begin at 5.
"""

from foci.backends.hopper.gluon_compat import gl, gluon, mbarrier
from foci.backends.hopper.smem import reuses_q_smem
from foci.compat.gluon import gluon_jit

__all__ = [
    "drain_barriers",
    "launch_dependents",
    "release_queries",
    "release_query_tile",
    "release_stage",
    "wait_kernel_before",
    "wait_query_tile",
    "wait_stage",
]

FIRST_BARRIER = gl.constexpr(5)


@gluon_jit
def wait_kernel_before():
    """Programmatic dependent launch: wait until the previous kernel on the stream has ended and its writes are visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def launch_dependents():
    """Programmatic dependent launch: let the next kernel start on free SMs; it runs until `wait_kernel_before`."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _bar_text(word, threads):
    return f"bar.{word} $1, {threads}; mov.u32 $0, 0;"


@gluon.constexpr_function
def _arrive_if_text(threads):
    return f"{{ .reg .pred now; setp.ne.s32 now, $2, 0; @now bar.arrive $1, {threads}; mov.u32 $0, 0; }}"


@gluon_jit
def _bar(OP: gl.constexpr, barrier, THREADS: gl.constexpr):
    gl.inline_asm_elementwise(_bar_text(OP, THREADS), "=r,r", [gl.to_tensor(barrier)], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def release_stage(barrier, stage, c, VALUES: gl.constexpr):
    """Consumer: free the keys, or with VALUES the values, of a stage."""
    if c.NAMED_BARRIERS:
        _bar("arrive", FIRST_BARRIER + VALUES * c.STAGES + stage, 32 + 128 * c.CONSUMERS)
    else:
        mbarrier.arrive(barrier.index(stage), count=1)


@gluon_jit
def wait_stage(barrier, i, c, VALUES: gl.constexpr):
    """Producer: wait until the stage of the i-th tile is free; the first STAGES tiles do not wait."""
    stage = i % c.STAGES
    if not c.NAMED_BARRIERS:
        mbarrier.wait(barrier.index(stage), ((i // c.STAGES) & 1) ^ 1)
    elif i >= c.STAGES:
        _bar("sync", FIRST_BARRIER + VALUES * c.STAGES + stage, 32 + 128 * c.CONSUMERS)


@gluon_jit
def release_query_tile(barrier, me, condition, c):
    """Consumer: free its query tile, if `condition` holds."""
    if c.NAMED_BARRIERS:
        number = gl.to_tensor(FIRST_BARRIER + 2 * c.STAGES + me)
        text: gl.constexpr = _arrive_if_text(160)
        gl.inline_asm_elementwise(text, "=r,r,r", [number, gl.to_tensor(condition).to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)
    elif condition:
        mbarrier.arrive(barrier.index(me), count=1)


@gluon_jit
def release_queries(q_free, me, now, c):
    """After its last Q K^T a consumer frees its query tile, unless the result goes there first, or it was freed once in registers."""
    if c.PERSISTENT and not c.Q_IN_REGISTERS and not reuses_q_smem(c.D_PAD, c.DV_PAD, True):
        release_query_tile(q_free, me, now, c)


@gluon_jit
def wait_query_tile(barrier, ME: gl.constexpr, q_count, c):
    """Producer: wait until a consumer has freed its query tile; `q_count` tiles were loaded before."""
    if not c.NAMED_BARRIERS:
        mbarrier.wait(barrier.index(ME), (q_count & 1) ^ 1)
    elif q_count > 0:
        _bar("sync", FIRST_BARRIER + 2 * c.STAGES + ME, 160)


@gluon_jit
def drain_barriers(k_free, v_free, q_free, count, q_count, c):
    """After the last of `count` tiles and `q_count` query tiles: complete named barriers, so that none stays half arrived at the exit."""
    if c.NAMED_BARRIERS:
        for i in range(count, count + c.STAGES):
            wait_stage(k_free, i, c, 0)
            wait_stage(v_free, i, c, 1)
        if c.PERSISTENT:
            for me in gl.static_range(c.CONSUMERS):
                wait_query_tile(q_free, me, q_count, c)
