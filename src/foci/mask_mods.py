"""Mask functions, combined, and made into masks and block masks, as `torch.nn.attention.flex_attention` does it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from foci.binding import bind
from foci.block_mask import BlockMask, MaskMod, as_block, from_classes, noop_mask
from foci.blocks import PARTIAL, Extent, classify
from foci.ir.eager import Env, evaluate

__all__ = ["and_masks", "create_block_mask", "create_mask", "noop_mask", "or_masks"]

_DEFAULT_BLOCK: Final = 128
_PAIRS_AT_ONCE: Final = 1 << 22


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask_mod that attends where all of `mask_mods` do; everything for none of them.

    Raises:
        RuntimeError: if one is not callable.

    Example:
        >>> both = and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: q - kv < 64)
    """
    _check_callable(mask_mods)

    def and_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result = noop_mask(b, h, q_idx, kv_idx)
        for mask in mask_mods:
            result = result & mask(b, h, q_idx, kv_idx)
        return result

    return and_mask


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask_mod that attends where any of `mask_mods` does; nothing for none of them.

    Raises:
        RuntimeError: if one is not callable.

    Example:
        >>> either = or_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: kv < 4)
    """
    _check_callable(mask_mods)

    def or_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result = torch.zeros_like(q_idx, dtype=torch.bool)
        for mask in mask_mods:
            result = result | mask(b, h, q_idx, kv_idx)
        return result

    return or_mask


def _check_callable(mask_mods: tuple[MaskMod, ...]) -> None:
    for n, mask in enumerate(mask_mods):
        if not callable(mask):
            raise RuntimeError(f"mask_mods must be functions (b, h, q_idx, kv_idx); number {n} is of type {type(mask).__name__}")


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | int | None = None,
    BLOCK_SIZE: int | tuple[int, int] = _DEFAULT_BLOCK,
    _compile: bool = False,
    separate_full_blocks: bool = True,
) -> BlockMask:
    """A block mask from a mask function, in O((S / block)^2) time and memory wherever intervals decide.

    Blocks that overhang the lengths are never full, as in torch.

    Args:
        mask_mod: function (b, h, q_idx, kv_idx) that returns whether to attend.
        B, H: batch entries and query heads; None for one that is broadcast.
        Q_LEN, KV_LEN: query and key length.
        device: of the lists and of what mask_mod captures; by default the accelerator, else the CPU.
        BLOCK_SIZE: of queries and keys, or one for both.
        _compile: taken for compatibility; there is nothing to compile.
        separate_full_blocks: list full blocks apart, so that they need no mask_mod.

    Raises:
        TypeError: if mask_mod is no function of four arguments, or TraceError, if it leaves the language.
        ValueError: for sizes that make no sense.

    Example:
        >>> document = torch.arange(512) // 100
        >>> mask = create_block_mask(lambda b, h, q, kv: document[q] == document[kv], None, None, 512, 512, device="cpu")
        >>> mask.kv_num_blocks
        tensor([[[2, 3, 3, 2]]], dtype=torch.int32)
    """
    if _arguments(mask_mod) != 4:
        raise TypeError(f"mask_mod must be a function (b, h, q_idx, kv_idx), got {mask_mod!r}")
    batch, heads, block = 1 if B is None else B, 1 if H is None else H, as_block(BLOCK_SIZE)
    _check_sizes(batch, heads, Q_LEN, KV_LEN)
    at = _device(device)
    bound = bind(None, mask_mod, at)
    classes = classify(
        bound.variant.mask, sizes=Extent(batch, heads, Q_LEN, KV_LEN), block=block, captures=bound.captures, ints=bound.ints,
        floats=bound.floats, exact=True, device=at,
    )  # fmt: skip
    _demote_overhang(classes, (Q_LEN, KV_LEN), block)
    made = from_classes(classes, (Q_LEN, KV_LEN), block, mask_mod, by_column=True, apart=separate_full_blocks)
    return made.expand(batch, heads)


def _demote_overhang(classes: Tensor, lengths: tuple[int, int], block: tuple[int, int]) -> None:
    for dim, length, size in zip((-2, -1), lengths, block):
        if length % size:
            classes.select(dim, -1).clamp_(max=PARTIAL)


def create_mask(
    mod_fn: Callable[..., Any], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: torch.device | str | int | None = None
) -> Tensor:
    """bool [B, H, Q_LEN, KV_LEN]: where a mask function attends, or where a score function does not give -inf.

    Args:
        mod_fn: function (b, h, q_idx, kv_idx) or (score, b, h, q_idx, kv_idx).
        B, H: batch entries and query heads; None for one.
        Q_LEN, KV_LEN: query and key length.
        device: of the mask and of what mod_fn captures; by default the accelerator, else the CPU.

    Raises:
        TypeError: if mod_fn is no function of four or five arguments, or TraceError, if it leaves the language.
        ValueError: for sizes that make no sense.

    Example:
        >>> create_mask(lambda b, h, q, kv: q >= kv, None, None, 2, 2, device="cpu")
        tensor([[[[ True, False],
                  [ True,  True]]]])
    """
    count = _arguments(mod_fn)
    if count not in (4, 5):
        raise TypeError(f"mod_fn must be a function (b, h, q_idx, kv_idx) or (score, b, h, q_idx, kv_idx), got {mod_fn!r}")
    batch, heads = 1 if B is None else B, 1 if H is None else H
    _check_sizes(batch, heads, Q_LEN, KV_LEN)
    at = _device(device)
    bound = bind(mod_fn, None, at) if count == 5 else bind(None, mod_fn, at)
    b, h, q_idx, kv_idx = (torch.arange(n, device=at, dtype=torch.int32) for n in (batch, heads, Q_LEN, KV_LEN))
    result = torch.empty(batch, heads, Q_LEN, KV_LEN, dtype=torch.bool, device=at)
    lengths = {name: torch.tensor(n, device=at, dtype=torch.int32) for name, n in (("q_len", Q_LEN), ("kv_len", KV_LEN))}
    step = max(1, _PAIRS_AT_ONCE // max(1, batch * heads * KV_LEN))
    for rows in torch.split(torch.arange(Q_LEN, device=at), step):
        variables = {
            "score": torch.zeros((), device=at),
            "b": b[:, None, None, None],
            "h": h[:, None, None],
            "q_idx": q_idx[rows, None],
            "kv_idx": kv_idx,
        }
        score, attend = evaluate(
            (bound.variant.score, bound.variant.mask), Env(variables | lengths, bound.captures, bound.ints, bound.floats)
        )
        result[:, :, rows] = attend & ~torch.isneginf(score)
    return result


def _arguments(function: Any) -> int:
    """How many arguments without defaults a function takes."""
    if not callable(function):
        return 0
    parameters = inspect.signature(function).parameters.values()
    return sum(p.default is inspect.Parameter.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _check_sizes(batch: int, heads: int, q_len: int, kv_len: int) -> None:
    for name, size in (("B", batch), ("H", heads), ("Q_LEN", q_len), ("KV_LEN", kv_len)):
        if size < 0:
            raise ValueError(f"{name} must not be negative, got {size}")


@functools.cache
def _accelerator() -> torch.device:
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _device(device: torch.device | str | int | None) -> torch.device:
    return _accelerator() if device is None else torch.device(device)
