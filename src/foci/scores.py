"""Scores by name. Each returns a `foci.Score`; combine them with `>>`, first to last.

To add one: a `picklable` function here, its name in `__all__`, and entries in `DEFINITIONS` and `EXAMPLES`. Tensors may be learned: they
receive gradients.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from foci.mask_examples import Definition, ScoreExample, Sizes
from foci.variant import Score, name_with_numbers, picklable

__all__ = ["alibi", "alibi_slopes", "bias", "identity", "relative_position", "softcap", "t5_bias", "temperature"]


def __dir__() -> list[str]:
    return sorted(__all__)


@picklable
def identity() -> Score:
    """The score as it is: the neutral element of `>>`.

    Example:
        >>> identity()
        Score(identity)
    """
    return Score(lambda score, b, h, q_idx, kv_idx: score, name="identity")


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of ALiBi for any number of heads (Press et al., 2022, section 3).

    A power of two gives the geometric sequence from `2 ** (-8 / heads)`; any other number takes the sequence of the
    power of two below it, then every other slope of the one above, as the authors do.

    Raises:
        TypeError: if `heads` is no integer.
        ValueError: if `heads` is under 1.

    Example:
        >>> alibi_slopes(4)
        (0.25, 0.0625, 0.015625, 0.00390625)
    """
    _check_at_least_one("heads", heads)
    power = 1 << (heads.bit_length() - 1)
    regular = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return (*regular, *between)


@picklable
def alibi(slopes: int | Tensor, *, symmetric: bool = False) -> Score:
    """Attention with linear biases: a penalty that grows with the distance, by a slope for each head (Press et al., 2022).

    Args:
        slopes: number of query heads, whose slopes are those of `alibi_slopes`; or floating [Hq], which may be learned.
        symmetric: penalise later keys by their distance too, for encoders; otherwise later keys gain, as the causal
            formula extends.

    Raises:
        TypeError: for a tensor that is not floating, or another type.
        ValueError: for a tensor of another rank, or a number of heads under 1.

    Example:
        >>> alibi(8) >> softcap(30.0)
        Score((alibi >> softcap(30.0)))
    """
    _check_flag("symmetric", symmetric)
    if isinstance(slopes, Tensor):
        learned = slopes
        _check_floating("slopes", learned, ranks=(1,), shape="a number of heads or [Hq]")

        def slope(h: Any) -> Any:
            return learned[h]
    else:
        if isinstance(slopes, bool) or not isinstance(slopes, int):
            raise TypeError(f"slopes must be a number of heads or [Hq], got {type(slopes).__name__}")
        _check_at_least_one("slopes", slopes)
        power = 1 << (slopes.bit_length() - 1)

        def slope(h: Any) -> Any:
            regular = torch.exp2((h + 1) * (-8.0 / power))
            return regular if slopes == power else torch.where(h < power, regular, torch.exp2((2 * (h - power) + 1) * (-4.0 / power)))

    def penalise(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = kv_idx - q_idx
        return score + slope(h) * (-torch.abs(distance) if symmetric else distance)

    return Score(penalise, name="alibi", heads=slopes.shape[0] if isinstance(slopes, Tensor) else slopes)


@picklable
def softcap(cap: float) -> Score:
    """Scores held within (-cap, cap): `cap * tanh(score / cap)` (Bello et al., 2017; Gemma 2, 2024, section 2).

    Args:
        cap: a positive number.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is not positive and finite.

    Example:
        >>> softcap(50.0)
        Score(softcap(50.0))
    """
    _check_positive("cap", cap)
    inverse = 1.0 / cap
    return Score(lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score * inverse), name=name_with_numbers("softcap({})", cap))


@picklable
def temperature(value: float | Tensor) -> Score:
    """Scores divided by a temperature.

    Args:
        value: a positive number, or floating [Hq], one for each head, which may be learned.

    Raises:
        TypeError: for a tensor that is not floating, or another type.
        ValueError: for a tensor of another rank, or a number that is not positive and finite.

    Example:
        >>> temperature(2.0)
        Score(temperature)
    """
    if isinstance(value, Tensor):
        each = value
        _check_floating("value", each, ranks=(1,), shape="a number or [Hq]")
        return Score(lambda score, b, h, q_idx, kv_idx: score / each[h], name="temperature", heads=each.shape[0])
    _check_positive("value", value)
    inverse = 1.0 / value
    return Score(lambda score, b, h, q_idx, kv_idx: score * inverse, name="temperature")


@picklable
def bias(values: Tensor) -> Score:
    """A tensor added to the scores.

    Args:
        values: floating, 1 to 4 dims that broadcast to [B, Hq, Sq, Skv]; may be learned.

    Raises:
        TypeError: for another dtype.
        ValueError: for another rank.

    Example:
        >>> bias(torch.zeros(8, 1, 512))
        Score(bias)
    """
    _check_floating("values", values, ranks=(1, 2, 3, 4), shape="broadcastable to [B, Hq, Sq, Skv], of 1 to 4 dims")
    rank = values.dim()

    def add(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        coordinates = (b, h, q_idx, kv_idx)[4 - rank :]
        return score + values[tuple(0 if n == 1 else at for n, at in zip(values.shape, coordinates, strict=True))]

    return Score(add, name="bias")


@picklable
def relative_position(table: Tensor) -> Score:
    """A bias by the distance from query to key, which is held within the table (Shaw et al., 2018, equation 4).

    Args:
        table: floating [2 * k + 1] or [Hq, 2 * k + 1], of distances -k to k; may be learned.

    Raises:
        TypeError: for another dtype.
        ValueError: for another rank or an even number of distances.

    Example:
        >>> relative_position(torch.zeros(8, 2 * 16 + 1))
        Score(relative_position)
    """
    _check_floating("table", table, ranks=(1, 2), shape="[2 * k + 1] or [Hq, 2 * k + 1]")
    if table.shape[-1] % 2 == 0:
        raise ValueError(f"table must have an odd number of distances, -k to k, got shape {list(table.shape)}")
    reach = table.shape[-1] // 2
    by_head = table.dim() == 2

    def add(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        at = torch.clamp(kv_idx - q_idx, -reach, reach) + reach
        return score + (table[h, at] if by_head else table[at])

    return Score(add, name="relative_position", heads=table.shape[0] if by_head else None)


@picklable
def t5_bias(table: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> Score:
    """A bias by the bucket of the distance: one for each small distance, then logarithmic (Raffel et al., 2020, section 2.1).

    Args:
        table: floating [num_buckets, Hq]; may be learned.
        bidirectional: half the buckets are for later keys; otherwise later keys share the bucket of distance 0.
        max_distance: distances from here on share the last bucket.

    Raises:
        TypeError: for another dtype, or a distance that is no integer.
        ValueError: for another rank, or fewer buckets or distances than the scheme needs.

    Example:
        >>> t5_bias(torch.zeros(32, 8))
        Score(t5_bias)
    """
    _check_floating("table", table, ranks=(2,), shape="[num_buckets, Hq]")
    _check_flag("bidirectional", bidirectional)
    _check_at_least_one("max_distance", max_distance)
    least = 4 if bidirectional else 2
    if table.shape[0] < least:
        raise ValueError(f"table must have at least {least} buckets, got shape {list(table.shape)}")
    if max_distance <= table.shape[0] // least:
        raise ValueError(f"max_distance must exceed the {table.shape[0] // least} exact distances, got {max_distance}")
    distances = torch.arange(-max_distance, max_distance + 1, device=table.device)
    buckets = _t5_buckets(distances, table.shape[0], bidirectional, max_distance)

    def add(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        at = torch.clamp(kv_idx - q_idx, -max_distance, max_distance) + max_distance
        return score + table[buckets[at], h]

    return Score(add, name="t5_bias", heads=table.shape[1])


def _t5_buckets(distances: Tensor, count: int, bidirectional: bool, max_distance: int) -> Tensor:
    # In float32 and in this order: a distance that falls on an edge must fall as in the models trained so.
    later = torch.zeros_like(distances)
    if bidirectional:
        count //= 2
        later = torch.where(distances > 0, count, 0)
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    exact = count // 2
    grown = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (count - exact)
    far = (exact + grown.to(torch.int64)).clamp(max=count - 1)
    return later + torch.where(distances < exact, distances, far)


def _check_at_least_one(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {type(value).__name__}")


def _check_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}")


def _check_floating(name: str, tensor: Tensor, *, ranks: tuple[int, ...], shape: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor {shape}, got {type(tensor).__name__}")
    if tensor.dim() not in ranks:
        raise ValueError(f"{name} must be {shape}, got shape {list(tensor.shape)}")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be floating, got {tensor.dtype}")


def _distance(sizes: Sizes, like: Tensor) -> Tensor:
    _, _, q, kv = sizes.positions(like.device)
    return kv - q


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _alibi_formula(scores: Tensor, sizes: Sizes) -> Tensor:
    # The authors' recipe, head by head.
    def recipe(n: int) -> list[float]:
        if n & (n - 1) == 0:
            start = 2.0 ** (-(2.0 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        below = 2 ** math.floor(math.log2(n))
        return recipe(below) + recipe(2 * below)[0::2][: n - below]

    slopes = torch.tensor(recipe(sizes.Hq), dtype=scores.dtype, device=scores.device)
    return scores + slopes[:, None, None] * _distance(sizes, scores)


def _t5_formula(scores: Tensor, sizes: Sizes, table: Tensor, bidirectional: bool) -> Tensor:
    bucket = [[_t5_bucket(kv - q, table.shape[0], bidirectional) for kv in range(sizes.Skv)] for q in range(sizes.Sq)]
    return scores + table[torch.tensor(bucket, dtype=torch.int64, device=table.device).view(sizes.Sq, sizes.Skv)].permute(2, 0, 1)


def _t5_bucket(distance: int, count: int, bidirectional: bool) -> int:
    # One distance at a time, from the paper's words, with the furthest bucket from distance 20 on.
    first = 0
    if bidirectional:
        count //= 2
        first = count if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = count // 2
    if distance < exact:
        return first + distance
    return first + min(count - 1, exact + int(math.log(distance / exact) / math.log(20 / exact) * (count - exact) + 1e-6))


def _softcap_then_bias(sizes: Sizes, values: Tensor) -> Score:
    return softcap(2.0) >> bias(values)


_T5: Final = ("Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer (Raffel et al., 2020)", "1910.10683")
DEFINITIONS: Final = {
    "identity": Definition("score"),
    "alibi": Definition(
        "score + slopes[h] * (-abs(kv_idx - q_idx) if symmetric else kv_idx - q_idx)",
        (),
        "For a number of heads the slopes are `alibi_slopes(heads)`.",
        "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation (Press et al., 2022)",
        "2108.12409",
    ),
    "softcap": Definition(
        "cap * tanh(score / cap)", (), "", "Gemma 2: Improving Open Language Models at a Practical Size (Gemma Team, 2024)", "2408.00118"
    ),
    "temperature": Definition("score / value[h]", (), "A number is the temperature of each head."),
    "bias": Definition("score + values[b, h, q_idx, kv_idx]", (), "`values` broadcasts."),
    "relative_position": Definition(
        "score + table[h, clamp(kv_idx - q_idx, -k, k) + k]",
        (),
        "`table` has `2 * k + 1` distances; without a head dim all heads share them.",
        "Self-Attention with Relative Position Representations (Shaw et al., 2018)",
        "1803.02155",
    ),
    "t5_bias": Definition(
        "score + table[bucket(kv_idx - q_idx), h]",
        (),
        "Small distances have a bucket each, larger ones share buckets that grow logarithmically up to `max_distance`. "
        "With `bidirectional=True` half of the buckets are for later keys.",
        *_T5,
    ),
}

EXAMPLES: Final = (
    ScoreExample("identity", "scores as they are", lambda s: identity(), lambda x, s: x),
    ScoreExample("alibi", "a penalty that grows with the distance", lambda s: alibi(s.Hq), _alibi_formula),
    ScoreExample(
        "alibi_twelve",
        "ALiBi for a number of heads that is no power of two",
        lambda s: alibi(12),
        _alibi_formula,
        fits=lambda s: s.Hq == 12,
    ),
    ScoreExample(
        "alibi_learned",
        "ALiBi with learned slopes, to both sides",
        lambda s, m: alibi(m, symmetric=True),
        lambda x, s, m: x - m[:, None, None] * _distance(s, x).abs(),
        lambda s: (_normal(s.Hq).abs(),),
    ),
    ScoreExample("softcap", "scores held within bounds", lambda s: softcap(1.5), lambda x, s: 1.5 * torch.tanh(x / 1.5)),
    ScoreExample("temperature", "scores divided by a number", lambda s: temperature(0.7), lambda x, s: x / 0.7),
    ScoreExample(
        "temperature_learned",
        "scores divided by a number of each head",
        lambda s, t: temperature(t),
        lambda x, s, t: x / t[:, None, None],
        lambda s: (_normal(s.Hq).abs() + 0.5,),
    ),
    ScoreExample("bias", "a learned matrix", lambda s, v: bias(v), lambda x, s, v: x + v, lambda s: (_normal(s.Sq, s.Skv),)),
    ScoreExample("bias_keys", "a learned vector over the keys", lambda s, v: bias(v), lambda x, s, v: x + v, lambda s: (_normal(s.Skv),)),
    ScoreExample(
        "bias_heads", "a learned row for each head", lambda s, v: bias(v), lambda x, s, v: x + v, lambda s: (_normal(s.Hq, 1, s.Skv),)
    ),
    ScoreExample(
        "bias_batch",
        "a learned matrix for each batch entry",
        lambda s, v: bias(v),
        lambda x, s, v: x + v,
        lambda s: (_normal(s.B, 1, s.Sq, s.Skv),),
    ),
    ScoreExample(
        "relative_position",
        "a learned bias by clamped distance",
        lambda s, t: relative_position(t),
        lambda x, s, t: x + t[_distance(s, x).clamp(-6, 6) + 6],
        lambda s: (_normal(13),),
    ),
    ScoreExample(
        "relative_position_heads",
        "a learned bias by clamped distance and head",
        lambda s, t: relative_position(t),
        lambda x, s, t: x + t[:, _distance(s, x).clamp(-6, 6) + 6],
        lambda s: (_normal(s.Hq, 13),),
    ),
    ScoreExample(
        "t5",
        "T5's buckets to both sides",
        lambda s, t: t5_bias(t, max_distance=20),
        lambda x, s, t: _t5_formula(x, s, t, True),
        lambda s: (_normal(16, s.Hq),),
    ),
    ScoreExample(
        "t5_causal",
        "T5's buckets of earlier keys",
        lambda s, t: t5_bias(t, bidirectional=False, max_distance=20),
        lambda x, s, t: _t5_formula(x, s, t, False),
        lambda s: (_normal(16, s.Hq),),
    ),
    ScoreExample(
        "composed",
        "a cap, then a bias",
        _softcap_then_bias,
        lambda x, s, v: 2.0 * torch.tanh(x / 2.0) + v,
        lambda s: (_normal(s.Sq, s.Skv),),
    ),
    ScoreExample(
        "function",
        "any function",
        lambda s: Score(lambda score, b, h, q_idx, kv_idx: score * (1.0 + 0.1 * h)),
        lambda x, s: x * (1.0 + 0.1 * s.positions(x.device)[1].to(x.dtype)),
    ),
)
