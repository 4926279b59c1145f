# mypy: ignore-errors
"""How consumers tell the producer that keys, values or queries may be overwritten.

By an mbarrier, at which one thread arrives for all of a warpgroup, which meets before; or, where NUMBERED, by a barrier of the
multiprocessor, which each warp reaches by itself. Triton has 0, 1 and one for each partition of warps, from 2 on.
"""

from foci.backends.hopper.gluon_compat import gl, gluon, mbarrier

__all__ = [
    "drain_barriers",
    "launch_dependents",
    "release_query_tile",
    "release_stage",
    "wait_kernel_before",
    "wait_query_tile",
    "wait_stage",
]

KEYS = gl.constexpr(5)


@gluon.jit
def wait_kernel_before():
    """Waits until the kernel before it on the stream has ended and what it wrote can be read."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def launch_dependents():
    """The next kernel may begin where multiprocessors are free, up to where it waits."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _reached(word, threads):
    return f"bar.{word} $1, {threads}; mov.u32 $0, 0;"


@gluon.constexpr_function
def _reached_if(threads):
    return f"{{ .reg .pred now; setp.ne.s32 now, $2, 0; @now bar.arrive $1, {threads}; mov.u32 $0, 0; }}"


@gluon.jit
def _reach(WORD: gl.constexpr, which, THREADS: gl.constexpr):
    gl.inline_asm_elementwise(_reached(WORD, THREADS), "=r,r", [gl.to_tensor(which)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release_stage(which, stage, c, VALUES: gl.constexpr):
    """A consumer has no more need of the keys, or values, of a stage."""
    if c.NUMBERED:
        _reach("arrive", KEYS + VALUES * c.STAGES + stage, 32 + 128 * c.CONSUMERS)
    else:
        mbarrier.arrive(which.index(stage), count=1)


@gluon.jit
def wait_stage(which, i, c, VALUES: gl.constexpr):
    """The producer waits for the stage of its i-th tile, from the second time on."""
    stage = i % c.STAGES
    if not c.NUMBERED:
        mbarrier.wait(which.index(stage), ((i // c.STAGES) & 1) ^ 1)
    elif i >= c.STAGES:
        _reach("sync", KEYS + VALUES * c.STAGES + stage, 32 + 128 * c.CONSUMERS)


@gluon.jit
def release_query_tile(which, me, now, c):
    """The same of a consumer's queries, if it is so now."""
    if c.NUMBERED:
        number = gl.to_tensor(KEYS + 2 * c.STAGES + me)
        text: gl.constexpr = _reached_if(160)
        gl.inline_asm_elementwise(text, "=r,r,r", [number, gl.to_tensor(now).to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)
    elif now:
        mbarrier.arrive(which.index(me), count=1)


@gluon.jit
def wait_query_tile(which, ME: gl.constexpr, turn, c):
    if not c.NUMBERED:
        mbarrier.wait(which.index(ME), (turn & 1) ^ 1)
    elif turn > 0:
        _reach("sync", KEYS + 2 * c.STAGES + ME, 160)


@gluon.jit
def drain_barriers(k_free, v_free, q_free, count, turn, c):
    """Behind the last of so many tiles and turns: no barrier is left half reached."""
    if c.NUMBERED:
        for i in range(count, count + c.STAGES):
            wait_stage(k_free, i, c, 0)
            wait_stage(v_free, i, c, 1)
        if c.PERSISTENT:
            for me in gl.static_range(c.CONSUMERS):
                wait_query_tile(q_free, me, turn, c)
