"""A case as calls: foci's, and those of each peer that can do it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import foci
from foci.cli.bench.cases import Asked, Case, Sizes, sequence_lengths

__all__ = ["PEERS", "Calls", "list_peers", "make_calls"]

_BACKENDS: Final = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PEERS: Final = ("SDPA", "flash", "cuDNN", "efficient", "math", "flex", "varlen", "nested")
"""SDPA is torch's own choice; flash, cuDNN, efficient and math are its backends; flex is FlexAttention compiled; varlen is torch's
attention of packed sequences; nested is SDPA of NestedTensors."""
_PAGE: Final = 256
_flexes: Final[weakref.WeakKeyDictionary[Asked, Callable[..., Tensor]]] = weakref.WeakKeyDictionary()
"""Of what was asked of FlexAttention, kept as long as that is."""


@dataclass(frozen=True, eq=False)
class Calls:
    """A forward and, where there is one, a backward pass."""

    forward: Callable[[], Any]
    backward: Callable[[], Any] | None


def list_peers(case: Case, asked: Asked, device: torch.device) -> tuple[str, ...]:
    """The peers that can do a case on a kind of device, worth the while."""
    is_gpu = device.type == "cuda"
    if case.layout == "jagged":
        return ("varlen", "nested") if is_gpu else ("nested",)
    if case.layout == "paged":
        return ()
    peers: tuple[str, ...] = ()
    if asked.has_sdpa:
        # flash takes no mask; where there is none, efficient is behind the others
        peers = (("cuDNN", "efficient") if asked.attn_mask is not None else ("flash", "cuDNN")) if is_gpu else ("SDPA",)
    has_functions = asked.mask is not None or asked.score is not None
    return (*peers, "flex") if is_gpu and has_functions and case.trains and asked.attn_mask is None else peers


def make_calls(name: str, case: Case, asked: Asked, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Calls:
    """Calls of "foci" or a peer."""
    if case.layout == "jagged":
        return _jagged(name, asked, sizes, device, dtype)
    inputs = _inputs(sizes, device, dtype, grad=case.trains)
    if case.layout == "paged":
        return Calls(_paged(inputs, sizes), None)
    run = _ours(asked) if name == "foci" else _flex(asked, sizes, device) if name == "flex" else _sdpa(name, asked, sizes)
    learned = (asked.attn_mask,) if asked.attn_mask is not None and asked.attn_mask.requires_grad else ()
    return _both(run, inputs, learned, trains=case.trains)


def _inputs(sizes: Sizes, device: torch.device, dtype: torch.dtype, *, grad: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(1)
    shapes = ((sizes.heads, sizes.q_len), (sizes.kv_heads, sizes.kv_len), (sizes.kv_heads, sizes.kv_len))
    draw = functools.partial(torch.randn, generator=generator, device=device, dtype=dtype)
    return tuple(draw(sizes.batch, heads, length, sizes.dim).requires_grad_(grad) for heads, length in shapes)


def _both(run: Callable[..., Tensor], inputs: tuple[Tensor, ...], learned: tuple[Tensor, ...], *, trains: bool) -> Calls:
    detached = tuple(t.detach() for t in inputs)

    def forward() -> Tensor:
        with torch.no_grad():
            return run(*detached)

    if not trains:
        return Calls(forward, None)
    out = run(*inputs)
    grad = torch.randn_like(out)
    return Calls(forward, lambda: torch.autograd.grad(out, (*inputs, *learned), grad, retain_graph=True))


def _ours(asked: Asked) -> Callable[..., Tensor]:
    mask = None if asked.mask is None else foci.Mask(asked.mask)
    score = None if asked.score is None else foci.Score(asked.score)
    return functools.partial(foci.attention, mask=mask, score=score, dropout_p=asked.dropout_p)


def _sdpa(name: str, asked: Asked, sizes: Sizes) -> Callable[..., Tensor]:
    options: dict[str, Any] = {"dropout_p": asked.dropout_p, "is_causal": asked.is_causal, "enable_gqa": sizes.heads != sizes.kv_heads}
    if asked.attn_mask is not None:
        options["attn_mask"] = asked.attn_mask
    if name == "SDPA":
        return functools.partial(F.scaled_dot_product_attention, **options)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(_BACKENDS[name]):
            return F.scaled_dot_product_attention(query, key, value, **options)

    return run


def _flex(asked: Asked, sizes: Sizes, device: torch.device) -> Callable[..., Tensor]:
    """FlexAttention compiled, once for what is asked."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    flex_call = _flexes.get(asked)
    if flex_call is None:

        def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
            return flex_attention(query, key, value, **options)

        # Dynamo counts by code what it compiles, and stops at a limit: each case has its own
        attend.__code__ = attend.__code__.replace()
        blocks = None if asked.mask is None else create_block_mask(asked.mask, None, None, sizes.q_len, sizes.kv_len, device)
        compiled = torch.compile(attend, dynamic=False)
        flex_call = functools.partial(compiled, score_mod=asked.score, block_mask=blocks, enable_gqa=sizes.heads != sizes.kv_heads)
        _flexes[asked] = flex_call
    return flex_call


def _paged(inputs: tuple[Tensor, ...], sizes: Sizes) -> Callable[[], Tensor]:
    """Return the call with keys and values in pages, in an order that is not that of memory."""
    query, *dense = inputs
    count = -(-sizes.kv_len // _PAGE)
    order = torch.randperm(sizes.batch * count, generator=torch.Generator().manual_seed(2)).to(query.device)
    pools = [query.new_empty((sizes.batch * count, sizes.kv_heads, _PAGE, sizes.dim)) for _ in dense]
    for pool, t in zip(pools, dense, strict=True):
        full_pages = F.pad(t, (0, 0, 0, count * _PAGE - sizes.kv_len)).transpose(1, 2)
        pool[order] = full_pages.reshape(sizes.batch * count, _PAGE, sizes.kv_heads, sizes.dim).transpose(1, 2)
    table = order.to(torch.int32).view(sizes.batch, count)
    lengths = torch.full((sizes.batch,), sizes.kv_len, dtype=torch.int32, device=query.device)
    return lambda: foci.paged_attention(query, pools[0], pools[1], table, lengths, max_kv=sizes.kv_len)


def _jagged(name: str, asked: Asked, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Calls:
    lengths = sequence_lengths(sizes)
    generator = torch.Generator(device).manual_seed(1)
    shapes = [(sum(lengths), heads, sizes.dim) for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]
    inputs = tuple(torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_() for shape in shapes)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    if name == "nested":
        return _both(
            functools.partial(_nested, offsets=offsets, bounds=(min(lengths), max(lengths)), is_causal=asked.is_causal),
            inputs,
            (),
            trains=True,
        )
    cu, longest = offsets.to(torch.int32), max(lengths)
    run: Callable[..., Any] = functools.partial(foci.varlen_attn, mask=asked.mask, score=asked.score)
    if name == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        run = functools.partial(varlen_attn, window_size=(-1, 0) if asked.is_causal else (-1, -1))
    return _both(lambda q, k, v: run(q, k, v, cu, cu, longest, longest), inputs, (), trains=True)


def _nested(q: Tensor, k: Tensor, v: Tensor, *, offsets: Tensor, bounds: tuple[int, int], is_causal: bool) -> Tensor:
    """SDPA of NestedTensors, its result as packed tokens."""
    low, high = bounds
    nest = functools.partial(torch.nested.nested_tensor_from_jagged, offsets=offsets, min_seqlen=low, max_seqlen=high)
    heads = (nest(t).transpose(1, 2) for t in (q, k, v))
    out: Tensor = F.scaled_dot_product_attention(next(heads), next(heads), next(heads), is_causal=is_causal).transpose(1, 2).values()
    return out
