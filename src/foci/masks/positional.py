"""Masks that are functions of positions alone: causal, windows, block diffusion."""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from torch import Tensor

from foci.mask_examples import Definition, MaskExample, Sizes
from foci.variant import Mask, kv_len, name_with_numbers, picklable, q_len

__all__ = [
    "block_diffusion",
    "causal",
    "causal_lower_right",
    "dilated_window",
    "everything",
    "global_window",
    "inverse_causal",
    "window",
]

Align = Literal["upper_left", "lower_right"]


@picklable
def everything() -> Mask:
    """Every query attends every key: the neutral element of `&`.

    Example:
        >>> everything().name
        'everything'
    """
    return Mask(lambda b, h, q_idx, kv_idx: torch.ones_like(q_idx, dtype=torch.bool), name="everything")


@picklable
def causal() -> Mask:
    """Keys up to the query's own position, aligned to the upper left: `q_idx >= kv_idx` (Vaswani et al., 2017).

    This is torch's `is_causal`: query 0 attends to key 0 alone, also where there are more keys than queries. A decoding step, whose
    last query attends to every key, needs `causal_lower_right`; a few queries over more keys give a warning that says so.

    Example:
        >>> causal().name
        'causal'
    """
    mask = Mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, name="causal")
    mask.lower_right_form = "foci.masks.causal_lower_right()"
    return mask


@picklable
def inverse_causal() -> Mask:
    """Keys from the query's own position on: `q_idx <= kv_idx`.

    Example:
        >>> inverse_causal().name
        'inverse_causal'
    """
    return Mask(lambda b, h, q_idx, kv_idx: q_idx <= kv_idx, name="inverse_causal")


@picklable
def causal_lower_right() -> Mask:
    """Causal with the last query at the last key, as decoding with a KV cache wants it.

    In jagged layout the alignment is that of each sequence.

    Example:
        >>> causal_lower_right().name
        'causal_lower_right'
    """
    return Mask(lambda b, h, q_idx, kv_idx: q_idx + (kv_len() - q_len()) >= kv_idx, name="causal_lower_right")


@picklable
def window(left: int | None, right: int | None = 0, *, align: Align = "upper_left") -> Mask:
    """Keys from `left` positions before the query to `right` positions after it (Beltagy et al., 2020, section 3.1).

    Args:
        left: how many earlier keys are attended; None for all.
        right: how many later keys are attended; None for all.
        align: "upper_left" compares positions as they are, "lower_right" puts the last query at the last key.

    Raises:
        ValueError: for a negative size or another `align`.
        TypeError: for a size that is no integer.

    Example:
        >>> window(128).name
        'window(128, 0)'
    """
    _check_reach("left", left)
    _check_reach("right", right)
    if align not in ("upper_left", "lower_right"):
        raise ValueError(f"align must be 'upper_left' or 'lower_right', got {align!r}")
    lower_right = align == "lower_right"

    def attend(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx - kv_idx
        if lower_right:
            distance = distance + (kv_len() - q_len())
        inside = torch.ones_like(q_idx, dtype=torch.bool)
        if left is not None:
            inside = inside & (distance <= left)
        if right is not None:
            inside = inside & (distance >= -right)
        return inside

    mask = Mask(attend, name=name_with_numbers("window({}, {}, lower_right)" if lower_right else "window({}, {})", left, right))
    mask.lower_right_form = "" if lower_right else name_with_numbers('foci.masks.window({}, {}, align="lower_right")', left, right)
    return mask


@picklable
def dilated_window(left: int, right: int = 0, *, dilation: int) -> Mask:
    """Every `dilation`-th key, `left` of them before the query and `right` after it (Beltagy et al., 2020, section 3.1).

    Args:
        left: how many earlier keys are attended.
        right: how many later keys are attended.
        dilation: the step between attended keys, at least 1.

    Raises:
        ValueError: for a negative size or a dilation under 1.
        TypeError: for a size that is no integer.

    Example:
        >>> dilated_window(4, 4, dilation=2).name
        'dilated_window(4, 4, dilation=2)'
    """
    _check_size("left", left)
    _check_size("right", right)
    _check_at_least_one("dilation", dilation)

    def attend(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx - kv_idx
        return (distance <= left * dilation) & (distance >= -right * dilation) & (distance % dilation == 0)

    return Mask(attend, name=name_with_numbers("dilated_window({}, {}, dilation={})", left, right, dilation))


@picklable
def global_window(left: int, right: int, global_tokens: int | Tensor) -> Mask:
    """A window, and tokens that attend everything and that everything attends (Beltagy et al., 2020, section 3.1).

    Args:
        left: how many earlier keys are attended.
        right: how many later keys are attended.
        global_tokens: how many tokens at the start are global, or bool [S] or [B, S], True for a global token.

    Raises:
        ValueError: for a negative size or a tensor of another rank.
        TypeError: for a size that is no integer, or a tensor of another dtype.

    Example:
        >>> global_window(64, 64, 1).name
        'global_window(64, 64)'
    """
    near = window(left, right).function
    if isinstance(global_tokens, Tensor):
        tokens = global_tokens
        check_tensor("global_tokens", tokens, dtypes=(torch.bool,), ranks=(1, 2), shape="[S] or [B, S]")
        batched = tokens.dim() == 2

        def attend(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            row = tokens[b] if batched else tokens
            return row[q_idx] | row[kv_idx] | near(b, h, q_idx, kv_idx)
    else:
        _check_size("global_tokens", global_tokens)

        def attend(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (q_idx < global_tokens) | (kv_idx < global_tokens) | near(b, h, q_idx, kv_idx)

    return Mask(attend, name=name_with_numbers("global_window({}, {})", left, right))


@picklable
def block_diffusion(length: int, *, block: int) -> Mask:
    """Block discrete diffusion: a noisy half, then a clean half, each `length` long (Arriola et al., 2025, section 3.2).

    A noisy block attends itself and the clean blocks before it; a clean block attends clean blocks up to itself.

    Args:
        length: of the noisy half and of the clean half; the sequence is twice as long.
        block: tokens per block.

    Raises:
        ValueError: for a size under 1.
        TypeError: for a size that is no integer.

    Example:
        >>> block_diffusion(1024, block=16).name
        'block_diffusion(1024, block=16)'
    """
    _check_at_least_one("length", length)
    _check_at_least_one("block", block)

    def attend(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_clean, kv_clean = q_idx >= length, kv_idx >= length
        q_block = torch.where(q_clean, q_idx - length, q_idx) // block
        kv_block = torch.where(kv_clean, kv_idx - length, kv_idx) // block
        own_noise = ~q_clean & ~kv_clean & (q_block == kv_block)
        clean_past = ~q_clean & kv_clean & (kv_block < q_block)
        clean_causal = q_clean & kv_clean & (kv_block <= q_block)
        return own_noise | clean_past | clean_causal

    return Mask(attend, name=name_with_numbers("block_diffusion({}, block={})", length, block), length=2 * length)


def _check_reach(name: str, size: int | None) -> None:
    if size is not None:
        _check_size(name, size)


def _check_size(name: str, size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer, got {size!r} of type {type(size).__name__}")
    if size < 0:
        raise ValueError(f"{name} must not be negative, got {size}")


def _check_at_least_one(name: str, size: int) -> None:
    _check_size(name, size)
    if size < 1:
        raise ValueError(f"{name} must be at least 1, got {size}")


def check_tensor(name: str, tensor: Tensor, *, dtypes: tuple[torch.dtype, ...], ranks: tuple[int, ...], shape: str) -> None:
    """Refuse a tensor argument of another rank or dtype, naming it.

    Raises:
        TypeError: for something that is no tensor, or of another dtype.
        ValueError: for another number of dimensions.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor {shape}, got {type(tensor).__name__}")
    if tensor.dim() not in ranks:
        raise ValueError(f"{name} must be {shape}, got shape {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {tensor.dtype}")


def _grid(sizes: Sizes) -> tuple[Tensor, Tensor]:
    return torch.arange(sizes.Sq)[:, None], torch.arange(sizes.Skv)


def _global_ids(sizes: Sizes) -> tuple[Tensor, ...]:
    return (torch.arange(max(sizes.Sq, sizes.Skv)).remainder(11) == 3,)


def _global_formula(sizes: Sizes, tokens: Tensor) -> Tensor:
    attend = torch.ones(sizes.Sq, sizes.Skv, dtype=torch.bool, device=tokens.device).triu(-4).tril(2)
    attend[tokens[: sizes.Sq]] = True
    attend[:, tokens[: sizes.Skv]] = True
    return attend


def _block_diffusion_formula(sizes: Sizes) -> Tensor:
    n, block = sizes.Sq // 2, 4
    of = torch.arange(n) // block
    top = torch.cat([of[:, None] == of, of[:, None] > of], dim=1)
    bottom = torch.cat([torch.zeros(n, n, dtype=torch.bool), of[:, None] >= of], dim=1)
    return torch.cat([top, bottom])


def _band(sizes: Sizes, low: int, high: int) -> Tensor:
    return torch.ones(sizes.Sq, sizes.Skv, dtype=torch.bool).triu(low).tril(high)


_LONGFORMER: Final = ("Longformer: The Long-Document Transformer (Beltagy et al., 2020)", "2004.05150")
DEFINITIONS: Final = {
    "everything": Definition("True"),
    "causal": Definition("kv_idx <= q_idx", (), "", "Attention Is All You Need (Vaswani et al., 2017)", "1706.03762"),
    "causal_lower_right": Definition("kv_idx <= q_idx + kv_len - q_len", (), "The same as `causal()` where queries and keys are as many."),
    "inverse_causal": Definition("q_idx <= kv_idx"),
    "window": Definition(
        "(q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)",
        (),
        'With `align="lower_right"`, `q_idx + kv_len - q_len` takes the place of `q_idx`.',
        *_LONGFORMER,
    ),
    "dilated_window": Definition(
        "(-left * dilation <= d) & (d <= right * dilation) & (d % dilation == 0)", (("d", "kv_idx - q_idx"),), "", *_LONGFORMER
    ),
    "global_window": Definition(
        "is_global(q_idx) | is_global(kv_idx) | (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)",
        (),
        "`is_global(i)` is `i < global_tokens` for a number and `global_tokens[i]` for a bool tensor.",
        *_LONGFORMER,
    ),
    "block_diffusion": Definition(
        "q_noisy & kv_noisy & (q_block == kv_block) | q_noisy & ~kv_noisy & (kv_block < q_block) "
        "| ~q_noisy & ~kv_noisy & (kv_block <= q_block)",
        (
            ("q_noisy", "q_idx < length"),
            ("kv_noisy", "kv_idx < length"),
            ("q_block", "q_idx % length // block"),
            ("kv_block", "kv_idx % length // block"),
        ),
        "",
        "Block Diffusion (Arriola et al., 2025)",
        "2503.09573",
    ),
}

EXAMPLES: Final = (
    MaskExample("everything", "no mask at all", lambda s: everything(), lambda s: torch.ones(s.Sq, s.Skv, dtype=torch.bool)),
    MaskExample("causal", "keys up to the query, aligned to the upper left", lambda s: causal(), lambda s: _band(s, -s.Sq, 0)),
    MaskExample("inverse_causal", "keys from the query on", lambda s: inverse_causal(), lambda s: _band(s, 0, s.Skv)),
    MaskExample(
        "causal_lower_right",
        "causal, the last query at the last key",
        lambda s: causal_lower_right(),
        lambda s: _band(s, -s.Sq, s.Skv - s.Sq),
    ),
    MaskExample("window_left", "a causal sliding window", lambda s: window(7), lambda s: _band(s, -7, 0)),
    MaskExample("window_both", "a window to both sides", lambda s: window(5, 3), lambda s: _band(s, -5, 3)),
    MaskExample("window_open", "all earlier keys and two later ones", lambda s: window(None, 2), lambda s: _band(s, -s.Sq, 2)),
    MaskExample(
        "window_lower_right",
        "a sliding window, the last query at the last key",
        lambda s: window(7, align="lower_right"),
        lambda s: _band(s, s.Skv - s.Sq - 7, s.Skv - s.Sq),
    ),
    MaskExample(
        "dilated_window",
        "every third key within reach",
        lambda s: dilated_window(4, 2, dilation=3),
        lambda s: sum((_band(s, -3 * i, -3 * i) for i in range(-2, 5)), torch.zeros(s.Sq, s.Skv, dtype=torch.bool)),
    ),
    MaskExample(
        "global_window_first",
        "a window, and two leading tokens seen by all",
        lambda s: global_window(6, 6, 2),
        lambda s: _band(s, -6, 6) | (_grid(s)[0] < 2) | (_grid(s)[1] < 2),
    ),
    MaskExample(
        "global_window", "Longformer: a window and chosen global tokens", lambda s, t: global_window(4, 2, t), _global_formula, _global_ids
    ),
    MaskExample(
        "block_diffusion",
        "a noisy half that sees the clean past",
        lambda s: block_diffusion(s.Sq // 2, block=4),
        _block_diffusion_formula,
        fits=lambda s: s.Sq == s.Skv and s.Sq % 2 == 0 and s.Sq > 0,
    ),
)
