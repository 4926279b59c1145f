"""About 200 calls whose launches are kept: score and mask kinds, head dims, lengths, dtypes, layouts and ways to give a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import foci
from foci import masks, scores

SLOPES = torch.rand(16)
DOCUMENTS = torch.arange(1 << 14) // 300
LENGTHS = (100, 57, 0, 343)  # of packed sequences
OFFSETS = torch.tensor([0, 100, 157, 157, 500])
SINK = torch.zeros(8)
PAGE_TABLE = torch.zeros(4, 64, dtype=torch.int64)
PAGE_LENGTHS = torch.full((4,), 900)


class Kind(NamedTuple):
    """A score and mask by name; `options` go to the call as they are."""

    score: Any = None
    mask: Any = None
    options: dict[str, Any] = {}


def by_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


def excludes(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(q_idx - kv_idx < 300, score, -torch.inf)


KINDS = {
    "plain": Kind(),
    "causal": Kind(mask=masks.causal()),
    "causal lower right": Kind(mask=masks.causal_lower_right()),
    "window": Kind(mask=masks.window(128)),
    "causal window": Kind(mask=masks.window(256, 0)),
    "document": Kind(mask=by_document),
    "causal document": Kind(mask=masks.causal() & by_document),
    "by head": Kind(mask=lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 64 * (h + 1)),
    "alibi": Kind(score=lambda s, b, h, q_idx, kv_idx: s + SLOPES[h] * (kv_idx - q_idx), mask=masks.causal()),
    "alibi lower right": Kind(score=lambda s, b, h, q_idx, kv_idx: s + SLOPES[h] * kv_idx, mask=masks.causal_lower_right()),
    "softcap": Kind(score=scores.softcap(20.0), mask=masks.causal()),
    "excluding score": Kind(score=excludes),
    "sink": Kind(mask=masks.causal(), options={"sink": SINK}),
    "dropout": Kind(mask=masks.causal(), options={"dropout_p": 0.1}),
    "lse": Kind(options={"return_aux": foci.AuxRequest(lse=True)}),
    "row_max": Kind(mask=masks.causal(), options={"return_aux": foci.AuxRequest(lse=True, row_max=True)}),
    "scale": Kind(options={"scale": 0.3}),
}


class Case(NamedTuple):
    """One call. Sizes are B, Hq, Hkv, Sq, Skv, D, Dv."""

    name: str
    kind: str
    sizes: tuple[int, int, int, int, int, int, int]
    layout: str = "dense"  # dense, [B, S, H, D] memory, varlen, paged, nested
    dtype: torch.dtype = torch.bfloat16
    form: str = "attention"  # attention, bias, learned bias, tensor, block mask, torch block mask, sdpa
    requires_grad: tuple[bool, bool, bool] = (True, True, True)


def sizes(batch: int, heads: int, length: int, dim: int, *, kv_heads: int = 0, kv_length: int = 0, value_dim: int = 0) -> Any:
    return (batch, heads, kv_heads or heads, length, kv_length or length, dim, value_dim or dim)


def make_cases() -> list[Case]:
    cases: list[Case] = []

    def add(kind: str, of: Any, **options: Any) -> None:
        words = "x".join(map(str, of))
        extra = " ".join(str(value).removeprefix("torch.") for value in options.values())
        cases.append(Case(f"{kind}, {words}" + (f", {extra}" if extra else ""), kind, of, **options))

    for kind in KINDS:
        for dim in (64, 128):
            for batch, length in ((4, 512), (2, 4096)):
                add(kind, sizes(batch, 8, length, dim))
    for dim, value_dim in ((16, 16), (32, 32), (72, 72), (80, 64), (96, 96), (128, 64), (192, 128), (192, 192), (256, 256)):
        for kind in ("plain", "causal"):
            add(kind, sizes(2, 8, 1000, dim, value_dim=value_dim))
    for kind in ("plain", "causal", "alibi", "window"):
        add(kind, sizes(2, 8, 1000, 64), dtype=torch.float16)
        add(kind, sizes(2, 8, 1000, 64), dtype=torch.float32)
        add(kind, sizes(2, 8, 1000, 128, kv_heads=2))
        add(kind, sizes(2, 8, 1000, 128), layout="rows of heads")
        add(kind, sizes(16, 8, 200, 64))
    for kind in ("plain", "causal", "window", "document", "alibi", "softcap", "dropout", "lse"):
        for dim in (64, 128):
            add(kind, sizes(4, 8, 500, dim), layout="varlen")
        add(kind, sizes(4, 8, 343, 64), layout="nested")
    for kind in ("plain", "causal lower right", "alibi lower right", "lse"):
        for q_len, kv_heads in ((1, 8), (1, 1), (4, 2), (16, 8)):
            add(kind, sizes(4, 8, q_len, 128, kv_heads=kv_heads, kv_length=4096), requires_grad=(False, False, False))
        add(kind, sizes(4, 8, 1, 128, kv_heads=2, kv_length=1024), layout="paged", requires_grad=(False, False, False))
    add("plain", sizes(4, 8, 128, 64, kv_length=4096))
    add("plain", sizes(4, 8, 1000, 64, kv_length=100))
    for requires in ((True, False, False), (False, True, True), (False, False, True), (False, False, False)):
        for kind in ("plain", "causal"):
            add(kind, sizes(2, 8, 1000, 128), requires_grad=requires)
    for form in ("bias", "learned bias", "tensor", "block mask", "torch block mask", "sdpa"):
        for dim in (64, 128):
            add("causal" if "block" in form else "plain", sizes(2, 8, 1024, dim), form=form)
            add("softcap" if "block" in form else "plain", sizes(2, 8, 4096, dim), form=form)
    return cases


CASES = {case.name: case for case in make_cases()}


def make_inputs(case: Case) -> list[Tensor]:
    """Query, key and value, and the bias where it is learned."""
    batch, q_heads, kv_heads, q_len, kv_len, dim, value_dim = case.sizes
    shapes = ((q_heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, value_dim))
    tensors = []
    for n, (heads, length, width) in enumerate(shapes):
        if case.layout == "varlen":
            tensor = torch.zeros(length, heads, width, dtype=case.dtype)
        elif case.layout == "paged" and n:
            tensor = torch.zeros(300, heads, 64, width, dtype=case.dtype)
        elif case.layout == "nested":
            values = torch.zeros(sum(LENGTHS), heads, width, dtype=case.dtype)
            tensor = torch.nested.nested_tensor_from_jagged(values, OFFSETS, max_seqlen=max(LENGTHS), min_seqlen=0).transpose(1, 2)
        elif case.layout == "rows of heads":
            tensor = torch.zeros(batch, length, heads, width, dtype=case.dtype).transpose(1, 2)
        else:
            tensor = torch.zeros(batch, heads, length, width, dtype=case.dtype)
        tensors.append(tensor.detach().requires_grad_(case.requires_grad[n]))
    if "bias" in case.form:
        tensors.append(torch.zeros(1, q_heads, q_len, kv_len, dtype=case.dtype).requires_grad_(case.form == "learned bias"))
    return tensors


def make_call(case: Case) -> Callable[..., Any]:
    """The call of query, key, value and bias. Functions and block masks are made once: later calls are given the same."""
    kind = KINDS[case.kind]
    options: dict[str, Any] = {"mask": kind.mask, "score": kind.score, **kind.options}
    q_len, kv_len = case.sizes[3:5]
    if case.layout == "varlen":
        return lambda q, k, v: foci.varlen_attn(q, k, v, OFFSETS, OFFSETS, max(LENGTHS), max(LENGTHS), **options)
    if case.layout == "paged":
        return lambda q, k, v: foci.paged_attention(q, k, v, PAGE_TABLE, PAGE_LENGTHS, max_kv=1024, **options)
    if "bias" in case.form:
        return lambda q, k, v, bias: foci.attention(q, k, v, bias=bias, **options)
    if case.form == "tensor":
        keep = torch.ones(case.sizes[0], 1, 1, kv_len, dtype=torch.bool)
        return lambda q, k, v: foci.attention(q, k, v, **options | {"mask": keep})
    if "block mask" in case.form:
        create = torch_flex.create_block_mask if "torch" in case.form else foci.create_block_mask
        block_mask = create(lambda b, h, i, j: i >= j, None, None, q_len, kv_len, device="cpu")
        return lambda q, k, v: foci.flex_attention(q, k, v, score_mod=kind.score, block_mask=block_mask)
    if case.form == "sdpa":

        def patched(q: Tensor, k: Tensor, v: Tensor) -> Any:
            with foci.patch():
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return patched
    return lambda q, k, v: foci.attention(q, k, v, **options)


FIXED = [SLOPES, DOCUMENTS, OFFSETS, SINK, PAGE_TABLE, PAGE_LENGTHS]
