"""Mask functions, combined, and made into masks and block masks, as `torch.nn.attention.flex_attention` does it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from foci.block_mask import DEFAULT_BLOCK, BlockMask, MaskMod, as_block, from_classes, noop_mask
from foci.blocks import PARTIAL, Extent, classify
from foci.errors import ArgumentError
from foci.ir.eager import Env, evaluate
from foci.trace_functions import bind
from foci.variant import check_is_made, check_length

__all__ = ["and_masks", "create_block_mask", "create_mask", "noop_mask", "or_masks"]

_PAIRS_AT_ONCE: Final = 1 << 22
_NOT_IN_GRAPHS: Final = "which blocks a mask needs is found from values of tensors: make block masks outside, or pass the mask itself"


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
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
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
        compute_dq_write_order, dq_kv_order: order the work of torch's own backward kernel; change nothing here.

    Raises:
        TypeError: if mask_mod is no function of four arguments, or TraceError, if it leaves the language.
        ValueError: for sizes that make no sense, or lengths that mask_mod is not for.

    Example:
        >>> document = torch.arange(512) // 100
        >>> mask = create_block_mask(lambda b, h, q, kv: document[q] == document[kv], None, None, 512, 512, device="cpu")
        >>> mask.kv_num_blocks
        tensor([[[2, 3, 3, 2]]], dtype=torch.int32)
    """
    block, sizes = as_block(BLOCK_SIZE), _extent(B, H, Q_LEN, KV_LEN)
    block_mask: BlockMask = _block_mask(mask_mod, sizes, block, _device(device), apart=separate_full_blocks)
    return block_mask


@torch.compiler.disable(reason=_NOT_IN_GRAPHS)  # type: ignore[untyped-decorator, no-untyped-call]
def _block_mask(mask_mod: MaskMod, sizes: Extent, block: tuple[int, int], device: torch.device, *, apart: bool) -> BlockMask:
    check_is_made("mask_mod", mask_mod)
    if _arguments(mask_mod) != 4:
        raise TypeError(f"mask_mod must be a function (b, h, q_idx, kv_idx), got {mask_mod!r}")
    check_length(mask_mod, sizes.Sq, sizes.Skv, "got")
    bound = bind(None, mask_mod, device)
    classes = classify(
        bound.variant.mask,
        sizes=sizes,
        block=block,
        captures=bound.captures,
        ints=bound.ints,
        floats=bound.floats,
        exact=True,
        device=device,
    )
    _demote_overhang(classes, (sizes.Sq, sizes.Skv), block)
    block_mask = from_classes(classes, (sizes.Sq, sizes.Skv), block, mask_mod, by_column=True, apart=apart)
    return block_mask.expand(sizes.B, sizes.Hq)


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
    mask: Tensor = _mask(mod_fn, _extent(B, H, Q_LEN, KV_LEN), _device(device))
    return mask


@torch.compiler.disable(reason=_NOT_IN_GRAPHS)  # type: ignore[untyped-decorator, no-untyped-call]
def _mask(mod_fn: Callable[..., Any], sizes: Extent, device: torch.device) -> Tensor:
    check_is_made("mod_fn", mod_fn)
    count = _arguments(mod_fn)
    if count not in (4, 5):
        raise TypeError(f"mod_fn must be a function (b, h, q_idx, kv_idx) or (score, b, h, q_idx, kv_idx), got {mod_fn!r}")
    bound = bind(mod_fn, None, device) if count == 5 else bind(None, mod_fn, device)
    b, h, q_idx, kv_idx = (torch.arange(n, device=device, dtype=torch.int32) for n in (sizes.B, sizes.Hq, sizes.Sq, sizes.Skv))
    result = torch.empty(sizes.B, sizes.Hq, sizes.Sq, sizes.Skv, dtype=torch.bool, device=device)
    lengths = {name: torch.tensor(n, device=device, dtype=torch.int32) for name, n in (("q_len", sizes.Sq), ("kv_len", sizes.Skv))}
    step = max(1, _PAIRS_AT_ONCE // max(1, sizes.B * sizes.Hq * sizes.Skv))
    for rows in torch.split(torch.arange(sizes.Sq, device=device), step):
        variables = {
            "score": torch.zeros((), device=device),
            "b": b[:, None, None, None],
            "h": h[:, None, None],
            "q_idx": q_idx[rows, None],
            "kv_idx": kv_idx,
        }
        env = Env(variables | lengths, bound.captures, bound.ints, bound.floats)
        score, attend = evaluate((bound.variant.score, bound.variant.mask), env)
        result[:, :, rows] = attend & ~torch.isneginf(score)
    return result


def _arguments(function: Any) -> int:
    """How many arguments without defaults a function takes."""
    if not callable(function):
        return 0
    parameters = inspect.signature(function).parameters.values()
    return sum(p.default is inspect.Parameter.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _extent(batch: int | None, heads: int | None, q_len: int, kv_len: int) -> Extent:
    sizes = Extent(1 if batch is None else batch, 1 if heads is None else heads, q_len, kv_len)
    for name, size in (("B", sizes.B), ("H", sizes.Hq), ("Q_LEN", q_len), ("KV_LEN", kv_len)):
        if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
            raise TypeError(f"{name} must be an integer, got {size!r} of type {type(size).__name__}")
        if size < 0:
            raise ArgumentError(f"{name} must not be negative, got {size}")
    return sizes


@functools.cache
def _accelerator() -> torch.device:
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _device(device: torch.device | str | int | None) -> torch.device:
    return _accelerator() if device is None else torch.device(device)
