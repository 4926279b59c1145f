"""Calls that differ in one thing: what a cache of calls must tell apart."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import foci
from foci import call_cache, core, execution, masks, operator, trace_functions, weak_cache
from foci.backends.contract import Backend, Kernel
from foci.operator import compiled_call
from foci.operator.op_schema import flatten, unpack_results


@dataclass(frozen=True)
class Call:
    """A call by its parts.

    Attributes:
        views: how query, key, value and the captured tensor lie in memory; keys of `VIEWS`.
        alias: which of query, key and value are one tensor: "qk", "qv", "kv", "qkv", or none of them.
        requires_grad: of query, key, value and the captured tensor.
        grad_mode: a key of `GRAD_MODES`.
        number: what the score function multiplies or divides by.
        offsets, longest, used: of packed sequences, and how many keys of each are attended to, where not all are.
        page_size: of paged keys, of which a row has `kv_len`.
        index_dtype: of the tensors that say where sequences or pages lie.
        environment: a key of `ENVIRONMENTS`.
    """

    layout: str = "dense"
    dtype: torch.dtype = torch.float32
    batch: int = 2
    q_heads: int = 4
    kv_heads: int = 4
    q_len: int = 24
    kv_len: int = 24
    head_dim: int = 16
    value_dim: int = 16
    views: tuple[str, str, str, str] = ("plain",) * 4
    alias: str = ""
    requires_grad: tuple[bool, bool, bool, bool] = (True, True, True, False)
    grad_mode: str = "on"
    scale: float | None = None
    dropout_p: float = 0.0
    score: str = "none"
    number: float = 2.0
    capture_dtype: torch.dtype = torch.float32
    mask: str = "none"
    window: int = 5
    block_size: int = 8
    outputs: tuple[str, ...] = ()
    offsets: tuple[int, ...] = (0, 9, 9, 24)
    index_dtype: torch.dtype = torch.int64
    longest: int = 15
    used: tuple[int, ...] = ()
    page_size: int = 8
    environment: str = "plain"

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if value != getattr(BASE, name)) or "base"


BASE = Call()


def _draw(shape: tuple[int, ...], view: str, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape; `view` says how it lies in memory."""

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes).to(dtype)

    if view == "transposed":
        first, heads, length, width = shape
        return draw(first, length, heads, width).transpose(1, 2)
    if view == "strided":
        return draw(*shape[:-1], 2 * shape[-1])[..., ::2]
    if view == "offset":
        return draw(math.prod(shape) + 1)[1:].view(shape)
    if view == "repeated":
        return draw(1, *shape[1:]).expand(shape)
    return torch._neg_view(draw(*shape)) if view == "negated" else draw(*shape)


VIEWS = ("plain", "transposed", "strided", "offset", "repeated", "negated")


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class _Copy(Backend):
    """A backend of the user's own: another's kernels under another name, with twice its results."""

    name = "twice"

    def reject(self, problem: Any, target: Any, /) -> str | None:
        return None

    def cost(self, problem: Any, target: Any, /) -> float:
        return 0.0

    def build(self, plan: Any, /) -> Any:
        kernel = foci.backends.load("blocked").build(plan)

        class Twice(Kernel):
            def forward(self, operands: Any, /) -> Any:
                results = kernel.forward(operands)
                return replace(results, out=results.out * 2)

            def backward(self, operands: Any, results: Any, cotangents: Any, /) -> Any:
                return kernel.backward(operands, replace(results, out=results.out / 2), replace(cotangents, out=cotangents.out * 2))

        return Twice()


@contextlib.contextmanager
def _registered() -> Iterator[None]:
    foci.register_backend(_Copy())
    try:
        yield
    finally:
        foci.unregister_backend("twice")


@contextlib.contextmanager
def _within(*contexts: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


ENVIRONMENTS: dict[str, Callable[[tuple[str, ...]], contextlib.AbstractContextManager[Any]]] = {
    "plain": lambda backends: foci.use(*backends),
    "reference": lambda backends: foci.use("reference"),
    "registered": lambda backends: _registered(),
    "deterministic": lambda backends: _within(foci.use(*backends), _deterministic()),
    "tuned": lambda backends: foci.use(*backends, tune=True),
    "autocast": lambda backends: _within(foci.use(*backends), torch.autocast("cpu", dtype=torch.bfloat16)),
}
GRAD_MODES = {"on": torch.enable_grad, "off": torch.no_grad, "inference": torch.inference_mode}


def _score(call: Call, slopes: Tensor, query: Tensor) -> Any:
    number = call.number
    return {
        "none": None,
        "times": lambda s, b, h, i, j: s * number,
        "over": lambda s, b, h, i, j: s + torch.where(1.0 / (i * number) > 0, 1.0, -1.0),
        "slopes": lambda s, b, h, i, j: s + slopes[h] * (i - j),
        "query": lambda s, b, h, i, j: s + query[b, h, i, 0],
        "excludes": lambda s, b, h, i, j: torch.where(i - j < number, s, -torch.inf),
    }[call.score]


@functools.cache
def _block_mask(reach: int, q_len: int, kv_len: int, block_size: int, *, is_inference: bool) -> Any:
    """One object for equal calls: what is made of its lists is kept."""
    return foci.create_block_mask(lambda b, h, i, j: i - j < reach, None, None, q_len, kv_len, device="cpu", BLOCK_SIZE=block_size)


def _mask(call: Call, slopes: Tensor) -> Any:
    window = call.window
    if "blocks" in call.mask:
        reach = window if call.mask == "blocks" else window * 9
        return _block_mask(reach, call.q_len, call.kv_len, call.block_size, is_inference=torch.is_inference_mode_enabled())
    return {
        "none": None,
        "causal": masks.causal(),
        "causal_lower_right": masks.causal_lower_right(),
        "window": masks.window(window),
        "slopes": lambda b, h, i, j: slopes[h] * i >= j * 0.1,
        "tensor": torch.arange(call.q_len)[:, None] - torch.arange(call.kv_len) < window,
    }[call.mask]


Result = tuple[list[Tensor | None], list[str]]


def make_inputs(call: Call) -> list[Tensor]:
    """Query, key, value and the tensor that functions may close over, each time of the same numbers."""
    torch.manual_seed(7)
    tokens, sizes = call.offsets[-1], list(_sizes(call).values())
    if call.layout == "packed":
        tensors = [_packed((tokens, heads, width), view, call.dtype) for (heads, _, width), view in zip(sizes, call.views, strict=False)]
    else:
        tensors = [_draw((call.batch, *size), view, call.dtype) for size, view in zip(sizes, call.views, strict=False)]
    if call.layout == "paged":
        tensors[1:] = [_in_pages(t, call.page_size) for t in tensors[1:]]
    tensors.append(_draw((call.q_heads,), call.views[3], call.capture_dtype))
    *operands, slopes = (t.requires_grad_(on) for t, on in zip(tensors, call.requires_grad, strict=True))
    named = dict(zip("qkv", operands, strict=True))
    for name in call.alias:
        named[name] = named[call.alias[0]]
    return [*named.values(), slopes]


def _sizes(call: Call) -> dict[str, tuple[int, int, int]]:
    """[H, S, D] of query, key and value."""
    return {
        "q": (call.q_heads, call.q_len, call.head_dim),
        "k": (call.kv_heads, call.kv_len, call.head_dim),
        "v": (call.kv_heads, call.kv_len, call.value_dim),
    }


def run(call: Call, backends: tuple[str, ...] = ("blocked",)) -> Result:
    """Results and gradients of a call, and the backends that ran."""
    environment = ENVIRONMENTS[call.environment]
    inputs = make_inputs(call)
    with environment(backends), GRAD_MODES[call.grad_mode](), foci.observe() as log:
        results = _flat(attend(call, *inputs))
    leaves = list({id(t): t for t in inputs if t.requires_grad}.values())
    differentiable = [t for t in results if t is not None and t.requires_grad]
    gradients: list[Tensor | None] = []
    if leaves and differentiable:
        with environment(backends), foci.observe() as log_backward:
            gradients += torch.autograd.grad(differentiable, leaves, [torch.ones_like(t) for t in differentiable], allow_unused=True)
        log.backward_calls += log_backward.backward_calls
    return [*results, *gradients], [c.backend for c in (*log.calls, *log.backward_calls)]


def _packed(shape: tuple[int, ...], view: str, dtype: torch.dtype) -> Tensor:
    tokens, heads, width = shape
    return _draw((1, heads, tokens, width), "transposed" if view == "plain" else view, dtype)[0].transpose(0, 1)


def _in_pages(rows: Tensor, size: int) -> Tensor:
    """[B * S / size, H, size, D] of [B, H, S, D]."""
    batch, heads, length, width = rows.shape
    return rows.reshape(batch, heads, length // size, size, width).transpose(1, 2).flatten(0, 1).contiguous()


def attend(call: Call, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Any:
    """The call."""
    score, mask = _score(call, slopes, query), _mask(call, slopes)
    if call.layout == "packed":
        offsets = torch.tensor(call.offsets, dtype=call.index_dtype)
        used = torch.tensor(call.used, dtype=call.index_dtype) if call.used else None
        aux = foci.AuxRequest(lse=True) if call.outputs else None
        return foci.varlen_attn(
            query, key, value, offsets, offsets, call.longest, call.longest, score=score, mask=mask, scale=call.scale,
            dropout_p=call.dropout_p, return_aux=aux, enable_gqa=True, seqused_k=used,
        )  # fmt: skip
    aux = foci.AuxRequest(**dict.fromkeys(call.outputs, True)) if call.outputs else None
    if call.layout == "paged":
        pages = call.kv_len // call.page_size
        table = torch.arange(call.batch * pages, dtype=call.index_dtype).flip(0).view(call.batch, pages)
        lengths = torch.full((call.batch,), call.kv_len - 3, dtype=call.index_dtype)
        return foci.paged_attention(
            query, key, value, table, lengths, score=score, mask=mask, scale=call.scale, dropout_p=call.dropout_p, return_aux=aux
        )
    return foci.attention(query, key, value, score=score, mask=mask, scale=call.scale, dropout_p=call.dropout_p, return_aux=aux)


def _flat(value: Any) -> list[Tensor | None]:
    if value is None or isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in _flat(part)]


class _Placed(torch.autograd.Function):
    """A call by places of compiled code."""

    @staticmethod
    def forward(ctx: Any, places: Any, flat: tuple[Any, ...], *tensors: Tensor) -> Any:
        results = places[0](*flat)
        ctx.places, ctx.flat, ctx.count = places, flat, len(tensors)
        ctx.needs = "".join(str(int(on)) for on in ctx.needs_input_grad[2:])
        ctx.save_for_backward(results[0], results[1])
        ctx.set_materialize_grads(False)
        padded = [results[0].new_empty(0) if t is None else t for t in results]
        ctx.mark_non_differentiable(padded[2])
        return tuple(padded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        out, lse = ctx.saved_tensors
        grads_of = (torch.zeros_like(out) if grads[0] is None else grads[0], grads[1], grads[3], grads[4])
        gradients = iter(ctx.places[1](*grads_of, out, lse, ctx.needs, *ctx.flat))
        return (None, None, *[next(gradients) if flag == "1" else None for flag in ctx.needs])


CACHES: tuple[tuple[Any, str, Callable[[], Any]], ...] = (
    (call_cache, "_calls", OrderedDict),
    (execution, "_plans", OrderedDict),
    (trace_functions, "_traces", OrderedDict),
    (weak_cache, "_derived", weak_cache.make_store),
)
"""What calls leave for later ones: module, name, and how an empty one is made. A wrong entry found here would make the call that is run
alone as wrong as the one it is compared with."""
DOORS = ("eager", "operator", "place", "fixed place")


def enter(monkeypatch: Any, door: str) -> None:
    """Empties `CACHES`; calls go one way into the library from here on, whatever their entry point.

    Args:
        monkeypatch: pytest's.
        door: eager, operator, place of compiled code, or a place where sizes, strides and dtypes are fixed.
    """
    for module, name, make_empty in CACHES:
        monkeypatch.setattr(module, name, make_empty())
    if door == "eager":
        return
    for module in (core, operator):
        monkeypatch.setattr(module, "is_plain_eager", lambda tensors: False)
    if door == "operator":
        return
    places = compiled_call.Forward(fixed=door == "fixed place"), compiled_call.Backward(fixed=door == "fixed place")

    def by_place(formula: Any, operands: Any, allowed: Any) -> Any:
        flat = flatten(formula, operands, allowed)
        tensors = (operands.query, operands.key, operands.value, *operands.captures)
        return unpack_results(formula, _Placed.apply(places, flat, *tensors))

    monkeypatch.setattr(core, "attend", by_place)


BASES = {
    "plain": BASE,
    "slopes": replace(BASE, score="slopes", mask="causal"),
    "window": replace(BASE, mask="window", score="times"),
    "blocks": replace(BASE, mask="blocks"),
    "tensor": replace(BASE, mask="tensor", kv_heads=2),
    "packed": replace(BASE, layout="packed", mask="causal"),
    "dropout": replace(BASE, dropout_p=0.3),
    "paged": replace(BASE, layout="paged", q_len=2, requires_grad=(False,) * 4),
}

_ALWAYS: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16},
    {"dtype": torch.float64},
    {"kv_heads": 2},
    {"kv_heads": 1},
    {"q_heads": 8},
    {"head_dim": 8},
    {"value_dim": 8},
    *({"views": tuple(view if n == place else "plain" for n in range(4))} for view in VIEWS[1:] for place in range(3)),
    *({"alias": names} for names in ("qk", "qv", "kv", "qkv")),
    *({"requires_grad": tuple(n != place for n in range(3)) + (False,)} for place in range(3)),
    {"requires_grad": (False,) * 4},
    {"grad_mode": "off"},
    {"grad_mode": "inference"},
    {"scale": 0.3},
    {"scale": 0.0},
    {"dropout_p": 0.5},
    {"score": "times"},
    {"score": "over"},
    {"score": "slopes"},
    {"mask": "causal"},
    {"mask": "window"},
    {"mask": "causal_lower_right"},
    {"outputs": ("lse",)},
    *({"environment": name} for name in ENVIRONMENTS if name != "plain"),
]
_CHANGES: dict[str, list[dict[str, Any]]] = {
    "dense": [
        {"batch": 3},
        {"batch": 1},
        {"q_len": 17},
        {"kv_len": 17},
        {"q_len": 1},
        {"mask": "tensor"},
        {"mask": "blocks"},
        {"score": "query"},
        {"outputs": ("weights",)},
        {"outputs": ("row_max",)},
        {"outputs": ("column_sums",)},
        {"outputs": ("lse", "weights")},
        {"layout": "paged", "requires_grad": (False,) * 4},
    ],
    "paged": [{"batch": 3}, {"kv_len": 16}, {"page_size": 4}, {"index_dtype": torch.int32}, {"q_len": 1}],
    "packed": [
        {"offsets": (0, 15, 24)},
        {"offsets": (0, 1, 1, 1)},
        {"offsets": (0, 0, 12, 27)},
        {"index_dtype": torch.int32},
        {"used": (4, 0, 9)},
        {"longest": 24},
    ],
    "slopes": [
        {"views": ("plain", "plain", "plain", "strided")},
        {"views": ("plain", "plain", "plain", "offset")},
        {"views": ("plain", "plain", "plain", "negated")},
        {"capture_dtype": torch.bfloat16},
        {"requires_grad": (True,) * 4},
        {"requires_grad": (False, False, False, True)},
        {"mask": "slopes"},
    ],
    "window": [{"number": 3.0}, {"window": 7}, {"score": "excludes"}, {"score": "over", "number": -0.0}, {"score": "over", "number": 0.0}],
    "blocks": [
        {"window": 7},
        {"block_size": 16},
        {"mask": "many blocks"},
        {"score": "excludes"},
        {"score": "slopes"},
        {"score": "slopes", "requires_grad": (True,) * 4},
    ],
    "tensor": [{"window": 7}],
}


def changes(base: str) -> list[Call]:
    """The base with one thing changed, each thing once."""
    call = BASES[base]
    different = [*_ALWAYS, *_CHANGES[call.layout], *(_CHANGES.get(base, []) if base != call.layout else [])]
    changed = [replace(call, **change) for change in different]
    return [c for c in changed if c != call and _is_valid(c)]


def _is_valid(call: Call) -> bool:
    """Whether foci takes such a call."""
    sizes = _sizes(call)
    if len({sizes[name] for name in call.alias}) > 1:
        return False  # one tensor has one shape
    if call.layout != "paged":
        return True
    # Pages are contiguous tensors of their own; calls of them take no gradients and no masks that hold lengths as numbers.
    has_pages_alone = not call.alias and call.views[1:3] == ("plain", "plain")
    return has_pages_alone and not any(call.requires_grad) and call.mask not in ("tensor", "blocks", "many blocks")


def for_a_gpu(call: Call) -> Call:
    """The call at sizes and in a dtype that GPU kernels take."""
    return replace(
        call, dtype=torch.bfloat16 if call.dtype == torch.float32 else torch.float16, q_len=call.q_len * 16, kv_len=call.kv_len * 16,
        head_dim=call.head_dim * 4, value_dim=call.value_dim * 4, window=call.window * 16, block_size=call.block_size * 16,
        offsets=tuple(n * 16 for n in call.offsets), longest=call.longest * 16, used=tuple(n * 16 for n in call.used),
        page_size=call.page_size * 8,
    )  # fmt: skip
