"""Attention whose sequence, or whose heads, are spread over the ranks of a process group."""

from __future__ import annotations

from typing import Final, Literal, overload

import torch.distributed as dist
from torch import Tensor

from foci.api import AuxOutput, AuxRequest, returned
from foci.compat.distributed import all_gather_autograd
from foci.dispatch import run
from foci.errors import ArgumentError
from foci.normalize import MaskLike, ScoreLike, check_outputs, check_sink, mask_parts, score_parts
from foci.prepare import Extras, Part, check_inputs, check_tensors

__all__ = ["attention"]

_SHARDS: Final = ("sequence", "heads")


def __dir__() -> list[str]:
    return sorted(__all__)


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    shards: Literal["sequence", "heads"],
    group: dist.ProcessGroup | None = None,
    mask: MaskLike = None,
    score: ScoreLike = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    return_aux: None = None,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    shards: Literal["sequence", "heads"],
    group: dist.ProcessGroup | None = None,
    mask: MaskLike = None,
    score: ScoreLike = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    shards: Literal["sequence", "heads"],
    group: dist.ProcessGroup | None = None,
    mask: MaskLike = None,
    score: ScoreLike = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    shards: Literal["sequence", "heads"],
    group: dist.ProcessGroup | None = None,
    mask: MaskLike = None,
    score: ScoreLike = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """`foci.attention` of which every rank of a group holds a part, and computes the rows of its own queries.

    Functions are told the indices, and `foci.q_len()` and `foci.kv_len()` the lengths, of the whole.

    With shards="sequence" (context parallelism) rank r of n has positions r * S / n to (r + 1) * S / n of query, key and value. Keys
    and values are gathered, their gradients summed and scattered, as any mask may want any key (Grattafiori et al., "The Llama 3
    herd of models", 2024, section 3.3.2); scores never are. With shards="heads" (tensor parallelism; Shoeybi et al.,
    "Megatron-LM", 2019, section 3) it has heads r * H / n to (r + 1) * H / n, and nothing is sent.

    Gradients of captured tensors and of the sink are those of this rank's rows: their sum over the group is the gradient.

    Args:
        query: this rank's part: [B, Hq, Sq / n, D] or [B, Hq / n, Sq, D]; the same shape on every rank.
        key: [B, Hkv, Skv / n, D] or [B, Hkv / n, Skv, D].
        value: [B, Hkv, Skv / n, Dv] or [B, Hkv / n, Skv, Dv].
        shards: which dimension the ranks share.
        group: whose ranks they are; all by default.
        mask: a `foci.Mask` or a function (b, h, q_idx, kv_idx) -> bool.
        score: as in `foci.attention`.
        sink: [query heads of this rank].
        scale: 1 / sqrt(D) by default.
        return_aux: lse, row_max and weights of this rank's rows; weights are [B, heads, rows, Skv]. `column_sums` with
            shards="heads" alone, as each is a sum over all ranks' rows otherwise.

    Returns:
        This rank's part of the output, as query lies, with Dv; with `return_aux`, that and an `AuxOutput`.

    Raises:
        TypeError, ValueError: for wrong arguments, before anything is sent.
        RuntimeError: without a process group.

    Example:
        >>> import foci, foci.distributed, torch
        >>> torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
        >>> part = torch.randn(1, 4, 128, 32)
        >>> foci.distributed.attention(part, part, part, shards="sequence", mask=foci.masks.causal()).shape
        torch.Size([1, 4, 128, 32])
        >>> torch.distributed.destroy_process_group()
    """
    check_inputs(query, key, value)
    _check(query, key, value, shards, mask)
    outputs = check_outputs(return_aux, sink)
    if outputs.column_sums and shards == "sequence":
        raise ArgumentError('column_sums of shards="sequence" are sums over the rows of all ranks; ask for weights or row_max')
    mask_function = mask_parts(mask, query, key, holds_many=True)[0]
    sink, group = check_sink(sink, query), _group(group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    score_function = score_parts(score, None, query, key, heads=query.shape[1] * (ranks if shards == "heads" else 1))
    if shards == "heads":
        part = Part(first_head=rank * query.shape[1])
    else:
        part = Part(first_query=rank * query.shape[2], queries=ranks * query.shape[2])
        key, value = _gathered(key, group), _gathered(value, group)
    extras = Extras(outputs, scale=scale, sink=sink, part=part)
    return returned(run((query, key, value), score_function, mask_function, extras), return_aux)


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, H, S, D] of all ranks' [B, H, S / n, D]. Positions go first: parts of an outermost dim join without a copy."""
    return all_gather_autograd(part.movedim(2, 0).contiguous(), group).movedim(0, 2)


def _check(query: Tensor, key: Tensor, value: Tensor, shards: str, mask: MaskLike) -> None:
    if shards not in _SHARDS:
        raise ArgumentError(f"shards must be 'sequence' or 'heads'; got {shards!r}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.is_nested:
            raise TypeError(f"{name} must be a dense tensor; got a NestedTensor: give packed documents a mask")
        if hasattr(tensor, "placements"):
            raise TypeError(f"{name} must be this rank's part as an ordinary tensor; got a DTensor: pass {name}.to_local()")
    check_tensors(query, key, value)
    if isinstance(mask, Tensor) or hasattr(mask, "kv_num_blocks"):
        raise TypeError(f"mask must be a foci.Mask or a function, of indices in the whole; got {type(mask).__name__}")


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("foci.distributed needs a process group: call torch.distributed.init_process_group first")
    if group is None:
        world = dist.group.WORLD
        assert world is not None
        return world
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup; got {type(group).__name__}")
    return group
