"""A point of the grid as somebody would write it: the tensors of a turn, and the call by each name.

A call is a function `call(q, k, v, inputs, numbers)`: `inputs` holds tensors and block masks, `numbers` Python numbers. Functions that
attention takes are made inside, so that torch.compile sees them close over inputs and numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from grid import BLOCK_FORMS, DEVICE, FLEX_NAMES, SDPA_NAMES
from grid_functions import CAPTURES, MASKS, SCORES, Captured, Extent, Numbers, Position, draw_captures
from torch import Tensor
from torch.nn.attention import bias as torch_bias
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention import varlen as torch_varlen

import foci

Call = Callable[[Any, Any, Any, dict[str, Any], Numbers], Any]

# Queries, keys and block sizes of three turns. No number and no length stays the same, but for the one query.
SHAPES: dict[str, tuple[tuple[int, int, Any], ...]] = {
    "odd": ((33, 57, (8, 16)), (21, 30, (8, 16)), (57, 35, (16, 8))),
    "one block": ((16, 16, 16), (32, 32, 32), (24, 24, 24)),
    "one query": ((1, 37, 16), (1, 50, 16), (1, 64, 32)),
    "square": ((48, 48, 16), (64, 64, 16), (32, 32, 16)),
    "long": ((130, 257, 128), (200, 140, 64), (128, 256, 64)),
}
NUMBERS = ((0.3, 5, 4.0), (0.2, 9, 2.5), (-0.4, 3, 6.0))  # scale, width and cap of three turns
PAGE = 8


class Turn(NamedTuple):
    """One call of a point.

    Attributes:
        lengths: queries and keys of each sequence.
        numbers: what functions close over.
        block_size: of block masks.
        leaves: query [Tq, Hq, D], key [Tkv, Hkv, D] and value [Tkv, Hkv, Dv] of all tokens, and floating captures, by name.
        fixed: captures of integers and bools, by name.
    """

    lengths: list[tuple[int, int]]
    numbers: Numbers
    block_size: Any
    leaves: dict[str, Tensor]
    fixed: dict[str, Tensor]

    @property
    def captured(self) -> Captured:
        return {**self.leaves, **self.fixed}


def lengths_of(layout: str, q_len: int, kv_len: int) -> list[tuple[int, int]]:
    """Queries and keys of each sequence: empty ones among them where sequences have lengths of their own."""
    if layout == "dense":
        return [(q_len, kv_len)] * 2
    if layout == "paged":
        return [(q_len, kv_len), (q_len, 1), (q_len, 0), (q_len, kv_len - 5)]
    return [(q_len, kv_len), (0, 5), (q_len, 0), ((q_len + 1) // 2, kv_len - 7)]


def capture_names(point: Any) -> tuple[str, ...]:
    names = (*SCORES[point.score].captures, *MASKS[point.mask].captures, *(("sink",) if point.sink else ()))
    return tuple(dict.fromkeys(names))


def make_turn(point: Any, number: int) -> Turn:
    """The tensors of a turn; the leaves are in the point's dtype and do not require grad yet."""
    generator = torch.Generator().manual_seed(100 * number + sum(repr(point).encode()))
    q_len, kv_len, block_size = SHAPES[point.shape][number]
    lengths = lengths_of(point.layout, q_len, kv_len)
    (q_heads, kv_heads), (head_dim, value_dim) = point.heads, point.widths
    q_tokens, kv_tokens = (sum(pair[side] for pair in lengths) for side in (0, 1))
    shapes = {"query": (q_tokens, q_heads, head_dim), "key": (kv_tokens, kv_heads, head_dim), "value": (kv_tokens, kv_heads, value_dim)}
    drawn = {name: torch.randn(shape, generator=generator).to(DEVICE, point.dtype) for name, shape in shapes.items()}
    extent = Extent(len(lengths), q_heads, max(n for n, _ in lengths), max(n for _, n in lengths))
    wide = point.dtype if point.name in SDPA_NAMES else torch.promote_types(point.dtype, torch.float32)
    captured = {name: t.to(DEVICE) for name, t in draw_captures(capture_names(point), extent, wide, generator).items()}
    floating = {name: t for name, t in captured.items() if t.is_floating_point()}
    fixed = {name: t for name, t in captured.items() if name not in floating}
    numbers = Numbers(*NUMBERS[number], extent.q_len, extent.kv_len)
    return Turn(lengths, numbers, block_size, {**drawn, **floating}, fixed)


def learns(point: Any, name: str) -> bool:
    """Whether a leaf requires grad."""
    if name not in ("query", "key", "value"):
        return CAPTURES[name].learned and point.learns in ("everything", "captures")
    if point.layout == "paged" and name != "query":
        return False  # pages take no gradient
    return point.learns == "everything" or point.learns == name


# ---- masks and scores ----


def score_function(point: Any, inputs: Captured, numbers: Numbers) -> Any:
    kind = SCORES[point.score]
    if point.score == "none":
        return None
    return kind.make(inputs, numbers) if kind.named is None else kind.named(inputs, numbers)


def mask_function(point: Any, inputs: Captured, numbers: Numbers, lengths: tuple[int, int] | None = None) -> Callable[..., Any]:
    """The mask as a function (b, h, q_idx, kv_idx); without `lengths`, those of the sequence at hand."""
    attends = MASKS[point.mask].attends
    if lengths is None:
        return lambda b, h, i, j: attends(Position(b, h, i, j, foci.q_len, foci.kv_len), inputs, numbers)
    q_len, kv_len = lengths
    return lambda b, h, i, j: attends(Position(b, h, i, j, lambda: q_len, lambda: kv_len), inputs, numbers)


def made_outside(point: Any, turn: Turn) -> dict[str, Any]:
    """Masks that are made before the call: a bool tensor, a block mask, or torch's CausalBias, which Dynamo does not construct."""
    batch, heads, q_len, kv_len = len(turn.lengths), point.heads[0], turn.numbers.max_q, turn.numbers.max_kv
    reads = MASKS[point.mask].reads
    if point.name in ("patched sdpa", "graph sdpa") and point.form == "named" and MASKS[point.mask].is_causal == "lower right":
        return {"mask": torch_bias.causal_lower_right(q_len, kv_len)}
    if point.form == "tensor" and MASKS[point.mask].added is None:
        h, i, j = (torch.arange(n, device=DEVICE) for n in (heads, q_len, kv_len))
        of_each = [
            mask_function(point, turn.fixed, turn.numbers, lengths)(torch.tensor(b, device=DEVICE), h[:, None, None], i[:, None], j)
            for b, lengths in enumerate(turn.lengths)
        ]
        mask = torch.stack([t.expand(heads, q_len, kv_len) for t in of_each])
        mask = mask if "h" in reads else mask[:, :1]
        return {"mask": mask if "b" in reads or point.layout == "nested" else mask[0] if "h" in reads else mask[0, 0]}
    if point.form in BLOCK_FORMS:
        function = mask_function(point, turn.fixed, turn.numbers, (q_len, kv_len))
        create = foci.create_block_mask if point.form == "block mask" else torch_flex.create_block_mask
        sizes = (batch if "b" in reads else None, heads if "h" in reads else None, q_len, kv_len)
        return {"mask": create(function, *sizes, device=DEVICE, BLOCK_SIZE=turn.block_size)}
    return {}


def mask_argument(point: Any, inputs: dict[str, Any], numbers: Numbers) -> Any:
    """What a call passes as its mask, None where there is none to pass or it is added."""
    if point.form == "none" or MASKS[point.mask].added is not None:
        return None
    if point.form == "function":
        return mask_function(point, inputs, numbers)
    if point.form == "named":
        return MASKS[point.mask].named(inputs, numbers)
    return inputs["mask"]


# ---- calls by name ----


class _Lse:
    lse = True
    max_scores = False


def _attention(point: Any) -> Call:
    aux = foci.AuxRequest(lse=True) if point.lse else None
    added = MASKS[point.mask].added

    def call(q, k, v, inputs, numbers):
        options = {"mask": mask_argument(point, inputs, numbers), "score": score_function(point, inputs, numbers), "return_aux": aux}
        if added is not None:
            options["bias"] = inputs[added]
        if point.sink:
            options["sink"] = inputs["sink"]
        options |= {"scale": numbers.scale, "dropout_p": point.dropout}
        if point.layout == "varlen":
            lengths = (inputs["cu_q"], inputs["cu_kv"], numbers.max_q, numbers.max_kv)
            return foci.varlen_attn(q, k, v, *lengths, enable_gqa=True, **options)
        if point.layout == "paged":
            pages = (inputs["page_table"], inputs["kv_lengths"])
            return foci.paged_attention(q, k, v, *pages, max_kv=numbers.max_kv, **options)
        return foci.attention(q, k, v, **options)

    return call


def _flex(point: Any) -> Call:
    def call(q, k, v, inputs, numbers):
        score, mask = score_function(point, inputs, numbers), mask_argument(point, inputs, numbers)
        attend = foci.flex_attention if point.name == "flex" else torch_flex.flex_attention
        return attend(q, k, v, score_mod=score, block_mask=mask, scale=numbers.scale, enable_gqa=True, return_lse=point.lse)

    return call


def _sdpa(point: Any) -> Call:
    added, is_causal = MASKS[point.mask].added, MASKS[point.mask].is_causal

    def call(q, k, v, inputs, numbers):
        options = {"dropout_p": point.dropout, "scale": numbers.scale, "enable_gqa": True}
        if point.name == "sdpa":
            mask = inputs[added] if added else mask_argument(point, inputs, numbers)
            return foci.scaled_dot_product_attention(q, k, v, mask, **options)
        if point.form == "named" and is_causal == "upper left":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        mask = inputs["mask"] if point.form == "named" else inputs[added] if added else mask_argument(point, inputs, numbers)
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    return call


def _varlen(point: Any) -> Call:
    window = MASKS[point.mask].window
    aux = torch_varlen.AuxRequest(lse=True) if point.lse else None

    def call(q, k, v, inputs, numbers):
        lengths = (inputs["cu_q"], inputs["cu_kv"], numbers.max_q, numbers.max_kv)
        options = {} if point.mask == "none" else {"window_size": window(numbers)}
        return torch_varlen.varlen_attn(q, k, v, *lengths, scale=numbers.scale, enable_gqa=True, return_aux=aux, **options)

    return call


def _written(point: Any) -> Call:
    """Attention in plain torch. Rows without keys are kept from the softmax, which would make them NaN."""
    added = MASKS[point.mask].added
    groups = point.heads[0] // point.heads[1]

    def call(q, k, v, inputs, numbers):
        k, v = (t[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (k, v))
        b, h, i, j = (torch.arange(n, device=q.device) for n in (*q.shape[:3], k.shape[2]))
        at = (b[:, None, None, None], h[:, None, None], i[:, None], j)
        scores = (q @ k.transpose(-2, -1)) * numbers.scale
        if point.score != "none":
            scores = score_function(point, inputs, numbers)(scores.to(torch.promote_types(q.dtype, torch.float32)), *at)
        if added is not None:
            scores = scores + inputs[added]
        if point.form == "function":
            scores = scores.masked_fill(~mask_function(point, inputs, numbers, (q.shape[2], k.shape[2]))(*at), -torch.inf)
        elif point.form == "tensor" and added is None:
            scores = torch.where(inputs["mask"], scores, -torch.inf)
        if point.sink:
            scores = torch.cat([scores, inputs["sink"][:, None, None].expand(*scores.shape[:-1], 1)], -1)
        return _softmax(scores)[..., : k.shape[2]].to(q.dtype) @ v

    return call


def _softmax(scores: Tensor) -> Tensor:
    some = (scores > -torch.inf).any(-1, keepdim=True)
    return torch.where(some, torch.softmax(torch.where(some, scores, 0.0), -1), 0.0)


def make_call(point: Any) -> Call:
    """The call by the point's name."""
    if point.name == "graph written":
        return _written(point)
    if point.name == "patched varlen":
        return _varlen(point)
    if point.name in FLEX_NAMES:
        return _flex(point)
    return _sdpa(point) if point.name in SDPA_NAMES else _attention(point)


# ---- layouts ----


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=DEVICE)


def laid_out(tensor: Tensor, memory: str) -> Tensor:
    """[B, S, H, D] as [B, H, S, D]: rows of heads, heads of rows, or elements two apart."""
    if memory == "apart":
        return tensor[..., None].expand(*tensor.shape, 2).contiguous()[..., 0].transpose(1, 2)
    return tensor.transpose(1, 2).contiguous() if memory == "heads" else tensor.transpose(1, 2)


def arguments(point: Any, turn: Turn) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Query, key and value in the point's layout, and the inputs of a call."""
    tensors = [turn.leaves[name] for name in ("query", "key", "value")]
    q_lengths, kv_lengths = ([pair[side] for pair in turn.lengths] for side in (0, 1))
    inputs = {name: t for name, t in turn.captured.items() if name not in ("query", "key", "value")} | made_outside(point, turn)
    if point.layout == "varlen":
        query, key, value = tensors if point.memory == "rows" else (t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors)
        return query, key, value, inputs | {"cu_q": offsets(q_lengths), "cu_kv": offsets(kv_lengths)}
    if point.layout == "nested":
        cu_q, cu_kv = offsets(q_lengths), offsets(kv_lengths)
        query, key, value = (
            torch.nested.nested_tensor_from_jagged(t, cu, min_seqlen=min(n), max_seqlen=max(n)).transpose(1, 2)
            for t, cu, n in zip(tensors, (cu_q, cu_kv, cu_kv), (q_lengths, kv_lengths, kv_lengths), strict=True)
        )
        return query, key, value, inputs
    query = laid_out(tensors[0].unflatten(0, (len(turn.lengths), -1)), point.memory)
    if point.layout == "paged":
        (key, table), (value, _) = (_pages(t.detach(), kv_lengths) for t in tensors[1:])
        return query, key, value, inputs | {"page_table": table, "kv_lengths": torch.tensor(kv_lengths, device=DEVICE)}
    key, value = (laid_out(t.unflatten(0, (len(turn.lengths), -1)), point.memory) for t in tensors[1:])
    return query, key, value, inputs


def _pages(tokens: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """A pool [pages, Hkv, page size, D] in which pages lie in another order and NaN is where no token is, and its table."""
    count = -(-max(lengths) // PAGE)
    table = torch.arange(len(lengths) * count, device=DEVICE).flip(0).view(len(lengths), count)
    pool = tokens.new_full((table.numel(), PAGE, *tokens.shape[1:]), torch.nan)
    for row, part in zip(table, tokens.split(lengths), strict=True):
        for n in range(len(part)):
            pool[row[n // PAGE], n % PAGE] = part[n]
    return pool.transpose(1, 2).contiguous(), table


def tokens_of(point: Any, result: Any) -> tuple[Tensor, Tensor | None]:
    """Out [Tq, Hq, Dv] and lse [Tq, Hq] of what a call returned."""
    out, aux = result if isinstance(result, tuple) else (result, None)
    lse = getattr(aux, "lse", aux)
    if point.layout == "varlen":
        return out, None if lse is None else lse.mT
    flat = (lambda t: t.transpose(1, 2).values()) if point.layout == "nested" else (lambda t: t.transpose(1, 2).flatten(0, 1))
    return flat(out), None if lse is None else flat(lse)


def compiled(point: Any, call: Call) -> Call:
    """The call as the point's way runs it."""
    if point.way == "eager":
        return call
    torch._dynamo.reset()
    # one length: test_grid.py makes three turns, of which no number and no length is alike
    return torch.compile(call, backend=point.way, fullgraph=True)
