"""The problems of the conformance suite: every example at some size, dtype and layout, and every corner at least once."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foci import masks, scores
from foci.mask_examples import Sizes
from foci.problem import Cotangents, Formula, Layout, Operands, Outputs, Problem, bucket
from foci.trace_functions import Bound, bind

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)
NO_OUTPUTS = Outputs()
EVERYTHING = Outputs(lse=True, row_max=True, column_sums=True, weights=True)
ROWS = Outputs(lse=True, row_max=True, column_sums=True)

SQUARE = Sizes(B=2, Hq=4, Hkv=2, Sq=40, Skv=40, D=16)
WIDE = Sizes(B=2, Hq=6, Hkv=2, Sq=33, Skv=57, D=24)
TALL = Sizes(B=1, Hq=3, Hkv=3, Sq=61, Skv=29, D=9)
TWELVE = Sizes(B=1, Hq=12, Hkv=4, Sq=33, Skv=57, D=8)
if os.environ.get("TRITON_INTERPRET") == "1":  # its tiles are 16 by 16, and each is a second: two of queries, three of keys
    WIDE, TWELVE = replace(WIDE, Hq=4, Sq=21, Skv=37), replace(TWELVE, Sq=21, Skv=37)
LARGE = Sizes(B=2, Hq=4, Hkv=1, Sq=530, Skv=700, D=16)  # several tiles and runs
LENGTHS = ((23, 40), (0, 5), (40, 0), (7, 33))  # of queries and keys of four sequences, two of them half empty


def nothing(bound: Sizes, device: torch.device) -> tuple[None, None]:
    return None, None


@dataclass(frozen=True)
class Case:
    """One problem with its tensors in the making.

    Attributes:
        name: of the test.
        functions: makes score and mask function of the sizes on a device.
        sizes, value_dim: Dv is D where it is 0.
        memory: how query, key and value lie in memory: contiguous, packed, transposed, expanded, offset.
        spans: jagged only: whether sequences leave room behind them.
        fill: multiplies query and key.
    """

    name: str
    functions: Callable = nothing
    sizes: Sizes = WIDE
    value_dim: int = 0
    dtype: torch.dtype = FLOAT32
    layout: Layout = Layout.DENSE
    outputs: Outputs = NO_OUTPUTS
    dropout_p: float | None = None
    scale: float = 0.3
    memory: str = "contiguous"
    block_size: tuple[int, int] | None = None
    spans: bool = False
    fill: float = 1.0
    wants: tuple[bool, bool, bool] = (True, True, True)

    @property
    def id(self) -> str:
        return f"{self.name}-{self.layout.value}-{str(self.dtype).removeprefix('torch.')}"


@functools.lru_cache(maxsize=4)
def bound(case: Case, device: str) -> Bound:
    score, mask = case.functions(case.sizes, torch.device(device))
    bound_functions = bind(score, mask, torch.device(device), case.block_size)
    captures = (c.to(case.dtype) if c.is_floating_point() else c for c in bound_functions.captures)
    return replace(bound_functions, captures=tuple(c.detach().clone() for c in captures))


def problem(case: Case, device: str) -> Problem:
    """The problem the case poses."""
    variant, s = bound(case, device).variant, case.sizes
    formula = Formula(variant, case.layout, case.outputs, case.dropout_p is not None, case.block_size)
    grads = tuple(c.dtype.is_floating_point for c in variant.captures)
    lengths = (s.B, s.Sq, s.Skv) if case.layout is Layout.DENSE else (len(LENGTHS), 40, 40)
    batch, q_len, kv_len = (bucket(n) for n in lengths)
    dtypes = tuple(case.dtype if c.dtype.is_floating_point else c.dtype for c in variant.captures)
    captured = tuple(replace(c, dtype=d) for c, d in zip(variant.captures, dtypes))
    formula = replace(formula, variant=replace(variant, captures=captured))
    aligned = case.memory not in ("transposed", "expanded")
    return Problem(formula, case.dtype, s.D, case.value_dim or s.D, s.Hq, s.Hkv, batch, q_len, kv_len, *case.wants, grads, aligned=aligned)


def operands(case: Case, device: str) -> Operands:
    """The tensors of the case, the same at each call."""
    s, bound_functions = case.sizes, bound(case, device)
    generator = torch.Generator().manual_seed(len(case.name) + sum(case.name.encode()))
    draw = functools.partial(torch.randn, generator=generator)
    width = case.value_dim or s.D
    lengths = (s.Sq, s.Skv) if case.layout is Layout.DENSE else (_offsets(0, case.spans)[-1], _offsets(1, case.spans)[-1])
    batch, (q_len, kv_len) = s.B if case.layout is Layout.DENSE else 1, lengths
    shapes = ((batch, s.Hq, q_len, s.D), (batch, s.Hkv, kv_len, s.D), (batch, s.Hkv, kv_len, width))
    query, key, value = _MEMORY[case.memory](shapes, lambda shape: draw(shape).to(device=device, dtype=case.dtype))
    query, key = query * case.fill if case.fill != 1 else query, key * case.fill if case.fill != 1 else key
    more = {}
    if case.dropout_p is not None:
        more |= {"seed": torch.tensor([0x1234567887654321], device=device), "dropout_p": case.dropout_p}
    if case.block_size is not None:
        grid = (-(-q_len // case.block_size[0]), -(-kv_len // case.block_size[1]))
        more["blocks"] = torch.randint(0, 3, (s.B, s.Hq, *grid), generator=generator, dtype=torch.int8).to(device)
    if case.layout is Layout.JAGGED:
        more |= {"max_q": 40, "max_kv": 40}
        for i, name in enumerate(("q", "kv")):
            more[f"cu_{name}"] = torch.tensor(_offsets(i, case.spans), device=device)
            if case.spans:
                more[f"{name}_lengths"] = torch.tensor([pair[i] for pair in LENGTHS], device=device)
    return Operands(query, key, value, bound_functions.captures, bound_functions.ints, bound_functions.floats, case.scale, **more)


def _offsets(i: int, spans: bool) -> list[int]:
    at = [0]
    for pair in LENGTHS:
        at.append(at[-1] + pair[i] + 3 * spans)
    return at


def cotangents(case: Case, results) -> Cotangents:
    """Gradients that flow into the results, the same at each call."""
    generator = torch.Generator().manual_seed(7)

    def like(t: Tensor | None, asked: bool) -> Tensor | None:
        return torch.randn(t.shape, generator=generator).to(t) if t is not None and asked else None

    asked = case.outputs
    columns, weights = like(results.column_sums, asked.column_sums), like(results.weights, asked.weights)
    return Cotangents(like(results.out, True), like(results.lse, asked.lse), columns, weights)


def _contiguous(shapes, draw):
    return tuple(draw(shape) for shape in shapes)


def _packed(shapes, draw):
    # [B, S, (Hq + 2 Hkv), D], as one projection writes it; lengths and widths are equal
    (batch, q_heads, length, width), (_, kv_heads, _, _), _ = shapes
    packed = draw((batch, length, q_heads + 2 * kv_heads, width)).transpose(1, 2)
    return packed[:, :q_heads], packed[:, q_heads : q_heads + kv_heads], packed[:, q_heads + kv_heads :]


def _transposed(shapes, draw):
    return tuple(draw((*shape[:2], shape[3], shape[2])).mT for shape in shapes)


def _expanded(shapes, draw):
    query, key, value = shapes
    return draw(query), draw((1, 1, *key[2:])).expand(key), draw((value[0], 1, *value[2:])).expand(value)


def _offset(shapes, draw):
    return tuple(draw((*shape[:2], 2 * shape[2] + 1, shape[3]))[:, :, 1::2] for shape in shapes)


_MEMORY = {"contiguous": _contiguous, "packed": _packed, "transposed": _transposed, "expanded": _expanded, "offset": _offset}


# The cases ---------------------------------------------------------------------------------------------------------


def functions(score=None, mask=None):
    """A maker of functions that capture nothing."""
    return lambda sizes, device: (score, mask)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def some_rows(b, h, q_idx, kv_idx):
    return (q_idx % 3 != 1) & (kv_idx <= q_idx)


def near(b, h, q_idx, kv_idx):
    return abs(q_idx - kv_idx) < 6 + h


CAUSAL, PLAIN = functions(mask=causal), functions()


def _from_examples() -> Iterator[Case]:
    """Every example densely and jagged, with dtypes, sizes and value dims in turn."""
    for i, example in enumerate(masks.EXAMPLES):
        sizes = [s for s in (SQUARE, WIDE, TALL, TWELVE) if example.fits(s)]
        build = _mask_builder(example)
        chosen = sizes[i % len(sizes)]
        yield Case(f"mask-{example.name}", build, chosen, (0, 13)[i % 2], DTYPES[i % 4])
        if example.fits(_jagged_sizes()):
            yield Case(f"mask-{example.name}", build, _jagged_sizes(), (11, 0)[i % 2], DTYPES[(i + 1) % 4], Layout.JAGGED)
    for i, example in enumerate(scores.EXAMPLES):
        build = _score_builder(example)
        sizes = [s for s in (SQUARE, WIDE, TALL, TWELVE) if example.fits(s)]
        yield Case(f"score-{example.name}", build, sizes[i % len(sizes)], (0, 13)[i % 2], DTYPES[i % 4], outputs=Outputs(lse=True))
        yield Case(f"score-{example.name}", build, sizes[-1], 0, DTYPES[(i + 2) % 4], outputs=ROWS)
        if example.fits(_jagged_sizes()):
            yield Case(f"score-{example.name}", build, _jagged_sizes(), 0, DTYPES[(i + 1) % 4], Layout.JAGGED)
        if example.fits(LARGE):
            yield Case(f"large-{example.name}", _score_builder(example, causal), LARGE, 0, FLOAT32)


def _jagged_sizes() -> Sizes:
    return replace(SQUARE, B=len(LENGTHS))


def _mask_builder(example):
    return lambda sizes, device: (None, example.build(sizes, device))


def _score_builder(example, mask=None):
    return lambda sizes, device: (example.build(sizes, device, FLOAT32), mask)


def _corners() -> Iterator[Case]:
    for dtype in DTYPES:
        for name, build in (("plain", PLAIN), ("causal", CAUSAL)):
            for size, sizes in (("square", SQUARE), ("wide", WIDE), ("tall", TALL), ("large", LARGE)):
                yield Case(f"{name}-{size}", build, sizes, dtype=dtype)
    for memory in _MEMORY:
        for dtype, build in ((FLOAT32, CAUSAL), (BFLOAT16, PLAIN)):
            yield Case(f"memory-{memory}", build, SQUARE, dtype=dtype, memory=memory)
    for dtype in DTYPES:
        yield Case("empty-rows", functions(mask=some_rows), WIDE, 5, dtype, outputs=EVERYTHING)
        yield Case("empty-rows-large", functions(mask=some_rows), LARGE, 5, dtype, outputs=EVERYTHING)
        yield Case("all-empty", functions(mask=lambda b, h, q_idx, kv_idx: q_idx < 0), WIDE, 0, dtype, outputs=EVERYTHING)
        yield Case("outputs", PLAIN, WIDE, 7, dtype, outputs=EVERYTHING)
        yield Case("outputs", CAUSAL, _jagged_sizes(), 7, dtype, Layout.JAGGED, outputs=ROWS)
    for dtype in DTYPES:
        yield Case("distance", functions(mask=near), WIDE, 5, dtype, outputs=EVERYTHING)
    yield Case("distance", functions(mask=near), LARGE, 0, BFLOAT16)
    yield Case("distance", functions(mask=near), _jagged_sizes(), 5, FLOAT32, Layout.JAGGED)
    for p in (0.0, 0.3, 1.0):
        yield Case(f"dropout-{p}", CAUSAL, WIDE, 7, FLOAT32, dropout_p=p, outputs=EVERYTHING)
        yield Case(f"dropout-{p}-large", functions(lambda s, *_: s.tanh(), causal), LARGE, 0, BFLOAT16, dropout_p=p)
        yield Case(f"dropout-{p}", PLAIN, _jagged_sizes(), 0, FLOAT32, Layout.JAGGED, dropout_p=p)
    for scale in (-0.7, 1e-6, 0.0):
        yield Case(f"scale-{scale:g}", PLAIN, WIDE, dtype=FLOAT32, scale=scale)
        yield Case(f"scale-{scale:g}-causal", CAUSAL, WIDE, dtype=BFLOAT16, scale=scale)
        yield Case(f"scale-{scale:g}-function", functions(lambda s, *_: s.sin()), WIDE, dtype=FLOAT64, scale=scale)
    # One weight of each row is 1: gradients of query and key are rounding, whatever the formula.
    yield Case("scale-1e4", functions(mask=some_rows), WIDE, dtype=FLOAT32, scale=1e4, wants=(False, False, True))
    yield Case("scale-1e4-plain", PLAIN, WIDE, dtype=FLOAT32, scale=1e4, wants=(False, False, False))
    yield Case("extreme", PLAIN, SQUARE, dtype=BFLOAT16, fill=133120.0, wants=(False, False, False))
    for block in ((16, 16), (128, 128), (96, 200), (7, 300)):
        yield Case(f"blocks-{block[0]}x{block[1]}", CAUSAL, LARGE, 0, FLOAT32, block_size=block)
        yield Case(f"blocks-{block[0]}x{block[1]}-full", functions(lambda s, *_: s * 2), WIDE, 9, BFLOAT16, block_size=block)
    excluding = functions(lambda s, b, h, q_idx, kv_idx: torch.where(q_idx - kv_idx < 100, s, -torch.inf), causal)  # in full blocks too
    yield Case("blocks-excluded", excluding, LARGE, 0, FLOAT32, block_size=(32, 16), outputs=ROWS)
    yield Case("blocks-excluded", excluding, LARGE, 0, BFLOAT16, block_size=(128, 128))
    for wants in ((True, False, False), (False, True, False), (False, False, True)):
        letters = "".join(letter for letter, on in zip("qkv", wants) if on)
        yield Case(f"only-{letters}", CAUSAL, WIDE, dtype=FLOAT32, wants=wants)
    yield Case("spans", CAUSAL, _jagged_sizes(), 11, FLOAT32, Layout.JAGGED, spans=True, outputs=ROWS)
    yield Case("one-query", PLAIN, Sizes(3, 8, 2, 1, 1700, 32), dtype=BFLOAT16)
    for queries in (3, 16):  # steps that decode several tokens
        yield Case(f"{queries}-queries", functions(mask=masks.causal_lower_right()), Sizes(2, 8, 2, queries, 1700, 32), dtype=FLOAT16)
    yield Case("head-dim-512", CAUSAL, Sizes(1, 2, 1, 20, 21, 512), 300, FLOAT16)
    yield Case("head-dim-1", CAUSAL, Sizes(1, 2, 1, 20, 21, 1), 1, FLOAT32)
    nobody = {"batch": Sizes(0, 2, 1, 5, 5, 8), "queries": Sizes(2, 2, 1, 0, 5, 8), "keys": Sizes(2, 2, 1, 5, 0, 8)}
    for name, sizes in nobody.items():
        yield Case(f"no-{name}", CAUSAL, sizes, dtype=FLOAT32)
        yield Case(f"no-{name}-outputs", functions(lambda s, *_: s + 1), sizes, dtype=BFLOAT16, outputs=EVERYTHING)


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class Tensors:
    """What functions capture: head [Hq], rows [B, Hq, Sq, 6], columns [B, Skv, 6], table [Sq, Skv], far [Sq + Skv]."""

    head: Tensor
    rows: Tensor
    columns: Tensor
    table: Tensor
    far: Tensor
    sizes: Sizes


def captured(make):
    """A maker of functions from one of `Tensors`."""

    def build(s: Sizes, device: torch.device):
        shapes = ((s.Hq,), (s.B, s.Hq, s.Sq, 6), (s.B, s.Skv, 6), (s.Sq, s.Skv), (s.Sq + s.Skv,))
        return make(Tensors(*(_draw(*shape).to(device) for shape in shapes), s))

    return build


def _head_scale(t):
    return lambda score, b, h, q, kv: score * t.head[h] + t.head[0] * kv * 0.01, causal


def _dot(t):
    return lambda score, b, h, q, kv: score + torch.dot(t.rows[b, h, q], t.columns[b, kv]), None


def _dot_tanh(t):
    return lambda score, b, h, q, kv: score * torch.tanh(torch.dot(t.rows[b, h, q], t.columns[b, kv])), causal


def _row_sum(t):
    return lambda score, b, h, q, kv: score + t.columns[b].sum(-1)[kv] * t.rows[b, h, q, 1], None


def _transposed_table(t):
    return lambda score, b, h, q, kv: score + t.table.mT[kv, q].exp(), causal


def _diagonal(t):
    return lambda score, b, h, q, kv: score + t.far[q - kv + t.sizes.Skv], causal


def _twice(t):
    return lambda score, b, h, q, kv: score + t.far[q] * t.far[kv], None


def _wrapped(t):
    return lambda score, b, h, q, kv: score + t.far[-1 - kv // 2], None


def _ignores_score(t):
    return lambda score, b, h, q, kv: t.head[h] * (q - kv) * 0.1, causal


def _singular(t):
    # minus infinity, or nothing, where it is masked
    return lambda score, b, h, q, kv: score - (q - kv + t.head[h] * 0 + 1.0).log(), causal


_CAPTURES = (_head_scale, _dot, _dot_tanh, _row_sum, _transposed_table, _diagonal, _twice, _wrapped, _ignores_score, _singular)


def _captures() -> Iterator[Case]:
    for i, make in enumerate(_CAPTURES):
        name, build = make.__name__.strip("_").replace("_", "-"), captured(make)
        yield Case(f"captured-{name}", build, (SQUARE, WIDE)[i % 2], 0, DTYPES[i % 4], outputs=Outputs(lse=True))
        yield Case(f"captured-{name}-large", build, LARGE, 0, FLOAT32)
        yield Case(f"captured-{name}", build, _jagged_sizes(), 0, (FLOAT32, BFLOAT16)[i % 2], Layout.JAGGED)


def _captures_under_blocks() -> Iterator[Case]:
    for i, make in enumerate((_head_scale, _dot, _transposed_table, _diagonal)):
        name, build = make.__name__.strip("_").replace("_", "-"), captured(make)
        yield Case(f"captured-{name}-blocks", build, WIDE, 0, (FLOAT32, BFLOAT16)[i % 2], block_size=(16, 32))
    yield Case("captured-diagonal-blocks-large", captured(_diagonal), LARGE, 0, FLOAT32, block_size=(128, 64))


def _captures_with_outputs() -> Iterator[Case]:
    # what flows into the weights reaches captured tensors too
    yield Case("captured-dot-outputs", captured(_dot), WIDE, 0, FLOAT16, outputs=EVERYTHING)
    yield Case("captured-diagonal-outputs", captured(_diagonal), _jagged_sizes(), 0, BFLOAT16, Layout.JAGGED, outputs=ROWS)


def all_cases() -> list[Case]:
    return [*_from_examples(), *_corners(), *_captures(), *_captures_under_blocks(), *_captures_with_outputs()]
