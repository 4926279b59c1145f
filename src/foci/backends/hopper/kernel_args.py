"""Named tuples that kernels pass on to their device functions. Those of one kernel alone are beside it.

On Triton 3.7 a tuple that a jitted function binds to a local variable loses its constexpr fields: they become tensors, and functions fail.
So a tuple that holds functions is built inside the call that it is passed to. A field is not called `values` or `type`: Triton's tuples
have these. A parameter of a kernel is not called `params`: the function in which Triton binds arguments has a variable of that name.
"""

from typing import Any, NamedTuple

from foci.backends.gpu.tiles import Place

__all__ = [
    "BackwardFunctions",
    "BackwardParams",
    "ConsumerTask",
    "ForwardFunctions",
    "ForwardParams",
    "KeyBounds",
    "PackedPlace",
    "PackedTask",
    "Place",
    "Position",
    "RowContext",
    "Segments",
    "Task",
    "VisitRun",
]


class PackedPlace(NamedTuple):
    """A `Place` of the forward, and the packed sequence that it is in."""

    b: Any
    memory_b: Any
    h: Any
    task: Any
    tile: Any
    q_start: Any
    q_len: Any
    kv_start: Any
    kv_len: Any


class Task(NamedTuple):
    """Place of a task of the backward: a tile of queries or of keys.

    `Place` has the last two fields in the other order, in which a slot of the forward's queue holds them.
    """

    b: Any
    memory_b: Any
    h: Any  # query head of a tile of queries, key head of a tile of keys
    tile: Any
    index: Any  # number of the task in its head


class PackedTask(NamedTuple):
    """A `Task`, and the packed sequence that it is in."""

    b: Any
    memory_b: Any
    h: Any
    tile: Any
    index: Any
    q_start: Any
    q_len: Any
    kv_start: Any
    kv_len: Any


class VisitRun(NamedTuple):
    """A run of full or of partial tiles that a task of the backward visits: of keys for a tile of queries, of queries for one of keys."""

    row: Any  # of the tile table
    first: Any
    before: Any  # tiles before a gap
    gap: Any
    count: Any


class KeyBounds(NamedTuple):
    """Tiles of keys that some rows attend to."""

    start: Any  # first tile
    full_start: Any  # first tile that all rows attend to
    full_end: Any  # tile after the last of these
    end: Any  # tile after the last
    narrow: Any  # as in `Segments`


class Segments(NamedTuple):
    """Which tiles of a run one consumer accumulates, as places in the run."""

    start: Any  # it skips tiles before this one
    full_begin: Any  # masks those up to this one
    full_end: Any  # does not mask those up to this one
    end: Any  # masks those up to this one
    count: Any  # and skips those up to this one
    narrow: Any  # 1 where one tile may hold both a row's first key and a row's last


class ConsumerTask(NamedTuple):
    """A task as one consumer of the forward computes it."""

    segments: Any  # `Segments`
    place: Any  # `Place` or `PackedPlace`
    run: Any  # `gpu.tiles.TaskTiles`; within bounds, `row` is the tile after the last, and all tiles are partial
    row_offset: Any  # moves the consumer's rows past the sequence if another program computes them


class RowContext(NamedTuple):
    """A consumer's 64 rows, as masks, scores and dropout of the forward see them."""

    b: Any
    h: Any
    q_idx: Any  # [64, 1], at most q_len - 1
    q_len: Any
    kv_len: Any
    first: Any  # first row
    aux: Any  # from the function `pre`
    factor: Any  # of scores in the exponent of base 2
    low: Any  # first key of each row, where the mask has bounds
    high: Any  # last key of each row
    narrow: Any  # `Segments.narrow`
    dropout: Any  # from `dropout.load_dropout_params`


class ForwardParams(NamedTuple):
    """Arguments of the forward besides its tensors."""

    size: Any  # `foci.backends.gpu.kernel_args.Size`
    spans: Any  # `foci.backends.gpu.kernel_args.Spans`
    table: Any  # `config.MaskedTable`
    numbers: Any  # `foci.backends.gpu.kernel_args.Numbers`
    env: Any  # `foci.backends.gpu.kernel_args.Environment`


class ForwardFunctions(NamedTuple):
    """Generated functions, all constexpr (`foci.backends.hopper.functions`)."""

    pre: Any
    score: Any  # or `line`, if scores are affine
    mask: Any
    bounds: Any


class BackwardParams(NamedTuple):
    """Arguments of the backward besides its tensors; fields are those of `ForwardParams`."""

    size: Any
    spans: Any
    table: Any
    scale: Any
    env: Any
    found_nan: Any  # see `bwd_tile_math.report_nan`


class BackwardFunctions(NamedTuple):
    """Generated functions, all constexpr."""

    pre: Any
    both: Any  # or `line`, where the fused kernel has affine scores
    mask: Any


class Position(NamedTuple):
    """A tile of pairs of queries and keys, as mask and score functions see it."""

    b: Any
    h: Any
    q_idx: Any  # broadcasts with kv_idx to the tile
    kv_idx: Any
    q_len: Any
    kv_len: Any
    tile: Any  # as the tile table has it, perhaps FORCED
    aux: Any  # from the function `pre`
