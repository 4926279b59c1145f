"""The generated grid: what combines, what cannot be written, and what foci refuses.

A point has one value of each dimension. A point that no rule forbids runs and is compared with `dense_reference`. `UNWRITTEN` holds the
combinations for which an interface has no words; `REFUSED` those that can be written and must raise. Nothing else is left out.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, make_dataclass
from typing import Any

import torch
from covering import Row, Rule, Table
from grid_functions import CAPTURES, MASKS, SCORES

import foci

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRAPH_NAMES = ("graph sdpa", "graph flex", "graph written")  # plain torch that torch.compile(backend="foci") reads
SDPA_NAMES = ("sdpa", "patched sdpa", "graph sdpa")
FLEX_NAMES = ("flex", "patched flex", "graph flex")
BLOCK_FORMS = ("block mask", "torch block mask")

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "score": tuple(SCORES),
    "mask": tuple(MASKS),
    # how the mask is given
    "form": ("none", "function", "named", "tensor", *BLOCK_FORMS),
    # by which name attention is called; "attention" is foci.attention, foci.varlen_attn or foci.paged_attention
    "name": ("attention", *SDPA_NAMES, *FLEX_NAMES, "patched varlen", "graph written"),
    "layout": ("dense", "varlen", "nested", "paged"),
    # eager, or the backend of torch.compile
    "way": ("eager", "aot_eager", "inductor", "foci"),
    "backend": ("blocked", "reference", "cpu", "aten", None) if DEVICE == "cpu" else ("blocked", "reference", "triton", None),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "shape": ("odd", "one block", "one query", "square", "long"),
    "heads": ((4, 2), (3, 1), (2, 2)),  # query and key heads
    "widths": ((16, 16), (9, 13), (24, 8)),  # D and Dv
    "memory": ("rows", "heads", "apart"),
    "learns": ("everything", "nothing", "captures", "query"),
    "sink": (False, True),
    "dropout": (0.0, 0.3),
    "lse": (False, True),
}

Point = make_dataclass("Point", list(DIMENSIONS), frozen=True)


def point_of(row: Row) -> Any:
    return Point(**row)


def point_id(point: Any) -> str:
    """The name of a point in pytest's list."""
    words = [getattr(point, name) for name in DIMENSIONS if name not in ("sink", "dropout", "lse")]
    words += [name for name in ("sink", "dropout", "lse") if getattr(point, name)]
    texts = ("x".join(map(str, word)) if isinstance(word, tuple) else str(word).removeprefix("torch.") for word in words)
    return "-".join(text.replace(" ", "_").replace("'", "") for text in texts)


def learned_captures(score: str, mask: str, sink: bool) -> tuple[str, ...]:
    """Names of the floating tensors beside query, key and value that get a gradient."""
    names = (*SCORES[score].captures, *MASKS[mask].captures, *(("sink",) if sink else ()))
    return tuple(name for name in names if CAPTURES[name].learned)


def _is_unwritable_form(mask: str, form: str) -> bool:
    kind = MASKS[mask]
    if mask == "none" or kind.added is not None:
        return form != ("none" if mask == "none" else "tensor")
    return form == "none" or (form == "named" and kind.named is None and kind.window is None)


def _is_unwritable_layout(name: str, layout: str) -> bool:
    if name == "attention":
        return False
    if name == "patched varlen":
        return layout != "varlen"
    # torch's own flex_attention and scaled_dot_product_attention of NestedTensors do not trace with fake tensors (torch 2.13)
    return layout not in (("dense",) if name in GRAPH_NAMES else ("dense", "nested"))


def _has_no_words_for_mask(mask: str, form: str, name: str) -> bool:
    kind = MASKS[mask]
    if form == "none" or name in ("attention", "flex", "sdpa"):
        return form == "named" and kind.named is None
    if name in ("patched flex", "graph flex"):
        return form != "torch block mask"
    if name == "patched varlen":
        return form != "named" or kind.window is None
    if name == "graph written":
        return form not in ("function", "tensor")
    return form != "tensor" and not (form == "named" and kind.is_causal)  # torch's scaled_dot_product_attention


def _has_no_words_for_bias(mask: str, name: str, layout: str) -> bool:
    return MASKS[mask].added is not None and (name in FLEX_NAMES or layout in ("varlen", "paged"))


UNWRITTEN = (
    Rule("this mask is not given in this form", ("mask", "form"), _is_unwritable_form),
    Rule("this name has no such layout", ("name", "layout"), _is_unwritable_layout),
    Rule("this name takes no such mask", ("mask", "form", "name"), _has_no_words_for_mask),
    Rule("this name takes no tensor that is added to the scores", ("mask", "name", "layout"), _has_no_words_for_bias),
    Rule(
        "this name takes no score function",
        ("score", "name"),
        lambda score, name: score != "none" and (name in SDPA_NAMES or name == "patched varlen"),
    ),
    Rule(
        "torch's flex_attention takes functions",
        ("score", "name"),
        lambda score, name: SCORES[score].is_named and name in ("patched flex", *GRAPH_NAMES),
    ),
    Rule(
        "this name takes no sink",
        ("sink", "name", "layout"),
        lambda sink, name, layout: sink and (name not in ("attention", "graph written") or layout == "varlen"),
    ),
    Rule(
        "this name takes no dropout",
        ("dropout", "name"),
        lambda dropout, name: dropout and (name in FLEX_NAMES or name in ("patched varlen", "graph written")),
    ),
    Rule("this name returns no logsumexp", ("lse", "name"), lambda lse, name: lse and (name in SDPA_NAMES or name == "graph written")),
    Rule("plain torch becomes foci's by its own backend alone", ("name", "way"), lambda name, way: name in GRAPH_NAMES and way != "foci"),
    Rule(
        "there is nothing to learn but query, key and value",
        ("learns", "score", "mask", "sink"),
        lambda learns, score, mask, sink: learns == "captures" and not learned_captures(score, mask, sink),
    ),
    Rule(
        "torch's flex_attention neither trains nor returns its logsumexp on the CPU: Dynamo refuses before a backend sees the graph",
        ("name", "learns", "lse"),
        lambda name, learns, lse: name == "graph flex" and DEVICE == "cpu" and (learns != "nothing" or lse),
    ),
    Rule(
        "a graph is not bound to a backend that cannot take it: it stays as it was",
        ("name", "backend", "dtype"),
        lambda name, backend, dtype: name in GRAPH_NAMES and (backend == "aten" or (backend == "cpu" and dtype == torch.float64)),
    ),
)


@dataclass(frozen=True)
class Refusal(Rule):
    """What can be written and raises.

    Attributes:
        error: type of the exception.
        message: pattern of its message.
    """

    error: type[Exception] = ValueError
    message: str = ""


REFUSED = (
    Refusal(
        "a block mask is made for one length",
        ("form", "layout", "name"),
        lambda form, layout, name: form in BLOCK_FORMS and layout == "nested" and name in ("attention", *FLEX_NAMES),
        ValueError,
        "a block mask is made for one length; give nested tensors a mask function",
    ),
    Refusal(
        "packed sequences have lengths of their own",
        ("form", "layout"),
        lambda form, layout: form in (*BLOCK_FORMS, "tensor") and layout == "varlen",
        TypeError,
        "mask of packed tensors must be a foci.Mask or a function; got",
    ),
    Refusal(
        "paged rows have lengths of their own",
        ("form", "layout"),
        lambda form, layout: form in (*BLOCK_FORMS, "tensor") and layout == "paged",
        TypeError,
        "mask must be a foci.Mask or a function: rows have lengths of their own; got",
    ),
    Refusal(
        "attn_mask is no block mask",
        ("form", "name"),
        lambda form, name: form in BLOCK_FORMS and name == "sdpa",
        TypeError,
        "attn_mask must be a tensor, a foci.Mask or None; got BlockMask",
    ),
    Refusal(
        "C++ kernels compute in float32",
        ("backend", "dtype"),
        lambda backend, dtype: backend == "cpu" and dtype == torch.float64,
        foci.NoViableBackend,
        "cpu.*computes in float32; torch.float64 is left to the blocked and reference backends",
    ),
    Refusal(
        "torch's kernels take no score function",
        ("score", "backend"),
        lambda score, backend: score != "none" and backend == "aten",
        foci.NoViableBackend,
        "aten.*torch's fused kernels take no (score|mask) function",
    ),
    Refusal(
        "torch's kernels take no mask but the causal one",
        ("mask", "form", "backend"),
        lambda mask, form, backend: backend == "aten" and mask not in ("none", "causal") and (mask, form) != ("everything", "named"),
        foci.NoViableBackend,
        "aten.*torch's fused kernels take no (mask|score) function",
    ),
    Refusal(
        "torch's kernels take no mask that is a tensor or has blocks",
        ("form", "backend"),
        lambda form, backend: form in (*BLOCK_FORMS, "tensor") and backend == "aten",
        foci.NoViableBackend,
        "aten.*torch's fused kernels take no (mask function|block mask)",
    ),
    Refusal(
        "torch's kernels take the dense layout",
        ("layout", "backend"),
        lambda layout, backend: layout != "dense" and backend == "aten",
        foci.NoViableBackend,
        "aten.*torch's fused kernels take the dense layout",
    ),
    Refusal(
        "torch's kernels drop other weights",
        ("dropout", "backend"),
        lambda dropout, backend: dropout and backend == "aten",
        foci.NoViableBackend,
        "aten.*torch's fused kernels have a dropout of their own",
    ),
    Refusal(
        "torch's kernels have no gradient of the logsumexp",
        ("lse", "sink", "learns", "backend"),
        lambda lse, sink, learns, backend: (lse or sink) and learns != "nothing" and backend == "aten",
        foci.NoViableBackend,
        "aten.*torch's fused kernels have no gradient of lse",
    ),
    Refusal(
        "torch's kernels take one head dim",
        ("widths", "backend"),
        lambda widths, backend: widths[0] != widths[1] and backend == "aten",
        foci.NoViableBackend,
        "aten.*torch's fused kernels need Dv = D",
    ),
)

CHEAP = ("way", "backend")


def table() -> Table:
    return Table(DIMENSIONS, (*UNWRITTEN, *REFUSED))


PRODUCT = ("score", "mask", "form", "name", "layout")


def eager_product() -> Iterator[Row]:
    """The whole product of what combines, called eagerly; the other dimensions take turns at random. Six rows in ten take the first
    backend, which has nothing to compile, so that the product ends within an hour."""
    rows = table()
    for number, values in enumerate(itertools.product(*(DIMENSIONS[name] for name in PRODUCT))):
        row = dict(zip(PRODUCT, values, strict=True)) | {"way": "eager"}
        if rows.is_allowed(row):
            rng = random.Random(number)
            takes_first = rng.random() < 0.6

            def order(name: str, row: Row, values: list[Any], rng: random.Random = rng, takes_first: bool = takes_first) -> list[Any]:
                return values if name == "backend" and takes_first else rng.sample(values, len(values))

            completed = rows.complete(row, order)
            assert completed is not None, row
            yield {name: completed[name] for name in DIMENSIONS}
