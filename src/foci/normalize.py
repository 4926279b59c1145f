"""What users may pass as mask, score and bias, brought to functions and block classes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from foci import masks, scores
from foci.block_mask import block_classes, check_is_block_mask
from foci.core import Function
from foci.errors import ArgumentError, DtypeError
from foci.jagged import count_heads, is_nested, padded_sizes
from foci.prepare import describe
from foci.problem import OUT_ALONE, Outputs
from foci.variant import Mask, Score, check_heads, check_is_made, check_length

__all__ = [
    "FlexAuxRequest",
    "LseRequest",
    "MaskLike",
    "ScoreLike",
    "broadcast",
    "causal_bias",
    "check_outputs",
    "check_sink",
    "lower_right_form",
    "mask_parts",
    "refuse_arguments",
    "score_parts",
    "with_strict_signature",
]

_Callable = TypeVar("_Callable", bound=Callable[..., Any])

MaskLike: TypeAlias = Mask | Callable[..., Any] | Tensor | Any | None
ScoreLike: TypeAlias = Score | Callable[..., Any] | None


class LseRequest(Protocol):
    """The type of return_aux of `varlen_attn`: torch's AuxRequest, `foci.AuxRequest`, or whatever has this flag."""

    @property
    def lse(self) -> bool: ...


class FlexAuxRequest(LseRequest, Protocol):
    """The type of return_aux of `flex_attention`: torch's AuxRequest, or whatever has these flags."""

    @property
    def max_scores(self) -> bool: ...


_ELSEWHERE: Final[Mapping[str, str]] = {
    "attn_mask": "write mask= for a bool tensor, bias= for one that is added to the scores",
    "attn_bias": "write bias=",
    "block_mask": "write mask=",
    "causal": "write mask=foci.masks.causal()",
    "dropout": "write dropout_p=",
    "enable_gqa": "leave it out: query heads are grouped over key heads whenever there are more of them",
    "is_causal": "write mask=foci.masks.causal()",
    "return_lse": "write return_aux=foci.AuxRequest(lse=True)",
    "score_mod": "write score=",
    "sm_scale": "write scale=",
    "softmax_scale": "write scale=",
    "window_size": "write mask=foci.masks.window(left, right)",
}
"""Arguments of other attention functions, and what `foci.attention` has instead."""
_BY_NAME: Final = ("mask", "score", "bias", "sink", "scale", "dropout_p", "return_aux")


def refuse_arguments(name: str, positional: tuple[Any, ...], unknown: Mapping[str, Any]) -> None:
    """Refuses what `foci.attention` and `foci.explain` do not take, and says how it is written.

    Raises:
        TypeError: if there is anything.
    """
    if positional:
        first = positional[0]
        is_bias = isinstance(first, Tensor) and first.dtype != torch.bool
        meant = "score" if isinstance(first, Score) else "bias" if is_bias else "mask"
        raise TypeError(
            f"{name} takes query, key and value by position and everything else by name; got {type(first).__name__} in fourth place: "
            f"write {meant}=..."
        )
    for argument, value in unknown.items():
        near = difflib.get_close_matches(argument, _BY_NAME, n=1)
        instead = _ELSEWHERE.get(argument) or (f"did you mean {near[0]}=?" if near else f"there are {', '.join(_BY_NAME)}")
        said = repr(value) if isinstance(value, bool | int | float | str | tuple | None) else type(value).__name__
        raise TypeError(f"{name} has no argument {argument}= (got {said}): {instead}")


def with_strict_signature(function: _Callable) -> _Callable:
    """The function, whose signature hides the parameters that are there to be refused."""
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def score_parts(score: ScoreLike, bias: Tensor | None, query: Tensor, key: Tensor, *, heads: int | None = None) -> Function:
    """Score function and bias as one function, or None. `heads`: how many query heads there are, where query is not [B, Hq, Sq, D].

    Raises:
        TypeError: for a score that is no function, or a bias that is no floating tensor.
        ValueError: for a score of another number of heads, or a bias of a wrong shape or device.
    """
    if score is None and bias is None:
        return None
    if isinstance(score, Score):
        if score.heads is not None:
            _check_score_heads(score, query, heads)
        function: Function = score.function
    else:
        function = _check_score_function(score)
    if bias is None:
        return function
    if not isinstance(bias, Tensor):
        raise TypeError(f"bias must be a floating tensor; got {type(bias).__name__}")
    if bias.dtype.itemsize == 1 and bias.is_floating_point():
        raise DtypeError(f"bias must be float16, bfloat16, float32 or float64; got {describe(bias)}: give bias.to(torch.bfloat16)")
    if not bias.is_floating_point():
        raise DtypeError(f"bias must be a floating tensor; got {describe(bias)}; a bool tensor goes into mask=")
    added = scores.bias(broadcast("bias", bias, query, key))
    return added.function if function is None else (Score(function) >> added).function


def _check_score_function(score: Any) -> Function:
    """The score, which is a function or None.

    Raises:
        TypeError: for anything else, with what it is taken for.
    """
    if score is scores.alibi_slopes or (isinstance(score, tuple) and all(isinstance(slope, float) for slope in score)):
        raise TypeError(
            "score must be a foci.Score; got the slopes of ALiBi, one number for each head: write foci.scores.alibi(heads), or "
            "foci.scores.alibi(torch.tensor(slopes)) for slopes of your own"
        )
    if score is not None and not callable(score):
        raise TypeError(f"score must be a foci.Score or a function (score, b, h, q_idx, kv_idx) -> score; got {type(score).__name__}")
    if isinstance(score, Mask):
        raise TypeError("score is a Mask: pass it as mask=")
    check_is_made("score", score)
    function: Function = score
    return function


def _check_score_heads(score: Score, query: Tensor, heads: int | None) -> None:
    if heads is None and query.layout is torch.jagged:
        heads = count_heads(query)
    elif heads is None and query.dim() == 4 and not query.is_nested:  # others are refused by the check of shapes
        heads = query.size(1)
    if heads is not None:
        check_heads(score, heads)


def mask_parts(
    mask: MaskLike, query: Tensor, key: Tensor, *, name: str = "mask", holds_many: bool = False
) -> tuple[Function, Tensor | None, tuple[int, int] | None]:
    """Any mask, the argument `name`, as a function, block classes and a block size; each may be None.

    `holds_many`: query and key are packed or paged sequences, whose lengths theirs do not tell.

    Raises:
        TypeError: for a mask of an unknown type.
        ValueError: for a mask of a wrong shape or device.
    """
    if mask is None:
        return None, None, None
    if isinstance(mask, Mask):
        if mask.length is not None and not holds_many and not is_nested(query, key) and query.dim() == key.dim() == 4:
            check_length(mask, query.shape[2], key.shape[2], "query and key have")
        return mask.function, None, None
    if isinstance(mask, Tensor):
        return _tensor_mask(mask, query, key, name), None, None
    if isinstance(mask, Score):
        raise TypeError(f"{name} is a Score: pass it as score=")
    if hasattr(mask, "kv_num_blocks"):
        block_mask: Any = mask
        check_is_block_mask(name, block_mask)
        return block_mask.mask_mod, block_classes(block_mask), block_mask.BLOCK_SIZE
    if callable(mask):
        check_is_made(name, mask)
        return mask, None, None
    raise TypeError(
        f"{name} must be a foci.Mask, a function (b, h, q_idx, kv_idx) -> bool, a bool tensor, a BlockMask or a CausalBias; "
        f"got {type(mask).__name__}"
    )


def lower_right_form(mask: Any) -> str:
    """As of a `Mask`; empty for any other mask."""
    return mask.lower_right_form if isinstance(mask, Mask) else ""


def _tensor_mask(mask: Tensor, query: Tensor, key: Tensor, name: str) -> Function:
    causal = causal_bias(mask, query, key)
    if causal is not None:
        return causal.function
    if mask.dtype != torch.bool:
        raise DtypeError(f"{name} must be bool, true where the query attends; got {describe(mask)}; an additive one goes into bias=")
    return masks.dense(broadcast(name, mask, query, key)).function


def causal_bias(mask: Any, query: Tensor, key: Tensor) -> Mask | None:
    """torch's CausalBias as a mask, None for anything else.

    Raises:
        ValueError: if it is for other lengths.
    """
    if not (hasattr(mask, "variant") and hasattr(mask, "seq_len_q")):
        return None
    got, wanted = (mask.seq_len_q, mask.seq_len_kv), (query.shape[-2], key.shape[-2])
    if not is_nested(query, key) and got != wanted:
        raise ArgumentError(f"the causal bias is for lengths {got[0]} x {got[1]}; query and key have {wanted[0]} x {wanted[1]}")
    return masks.causal() if mask.variant.name == "UPPER_LEFT" else masks.causal_lower_right()


def broadcast(name: str, tensor: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The tensor, of one dimension at least, which broadcasts to [B, Hq, Sq, Skv].

    Raises:
        TypeError: if it is nested.
        ValueError: if it does not, or is on another device.
    """
    if not tensor.is_nested and tensor.layout is not torch.strided:
        raise DtypeError(f"{name} must be a dense tensor; got layout {tensor.layout}: give {name}.to_dense()")
    if tensor.is_nested:
        raise TypeError(f"{name} must be a dense tensor; got a NestedTensor: give nested queries and keys a mask or score function")
    if tensor.device != query.device:
        raise ArgumentError(f"{name} must be on the query's device, {query.device}; got {describe(tensor)}")
    if tensor.dim() == 0:
        return tensor.reshape(1)
    if tensor.dim() > 4:
        raise ArgumentError(f"{name} must broadcast to [batch, heads, queries, keys]; got {describe(tensor)}")
    if is_nested(query, key):
        wanted = padded_sizes(query, key)
        if wanted is not None and any(n != 1 and (n < w if at < 2 else n != w) for at, (n, w) in enumerate(_from_behind(tensor, wanted))):
            raise ArgumentError(
                f"{name} must broadcast to [batch, heads, longest queries, longest keys] = {list(wanted)}, or have room for longer ones; "
                f"got {describe(tensor)}"
            )
        return tensor
    if not query.dim() == key.dim() == 4:
        return tensor  # reported by the shape check of query and key
    wanted = (max(query.shape[0], key.shape[0]), query.shape[1], query.shape[2], key.shape[2])
    if any(n not in (1, w) for n, w in _from_behind(tensor, wanted)):
        raise ArgumentError(f"{name} must broadcast to [batch, heads, queries, keys] = {list(wanted)}; got {describe(tensor)}")
    return tensor


def _from_behind(tensor: Tensor, wanted: tuple[int, ...]) -> list[tuple[int, int]]:
    """Each dimension's size and the wanted one, the last first."""
    return list(zip(reversed(tensor.shape), reversed(wanted), strict=False))


_WITH_LSE: Final = Outputs(lse=True)


def check_outputs(return_aux: Any, sink: Any) -> Outputs:
    """The auxiliary outputs that a call needs: those asked for, and the logsumexp for a sink, which is differentiated.

    Raises:
        TypeError: for anything but an AuxRequest or None.
    """
    if return_aux is None:
        return OUT_ALONE if sink is None else _WITH_LSE
    if not isinstance(return_aux, Outputs):
        raise TypeError(f"return_aux must be a foci.AuxRequest; got {type(return_aux).__name__}")
    return return_aux if sink is None else replace(return_aux, lse=True)


def check_sink(sink: Any, query: Tensor) -> Tensor | None:
    """The sink, if there is one.

    Raises:
        TypeError: for anything but a tensor or None.
        ValueError: for a wrong shape or device.
    """
    if sink is None:
        return None
    if not isinstance(sink, Tensor):
        raise TypeError(f"sink must be a tensor; got {type(sink).__name__}")
    if query.dim() < 3 or (query.is_nested and query.layout != torch.jagged):
        return sink  # reported by the shape check of the query
    heads = count_heads(query)
    if not sink.is_floating_point() or list(sink.shape) != [heads]:
        raise ArgumentError(f"sink must be a floating tensor with one logit per query head, [{heads}]; got {describe(sink)}")
    if sink.device != query.device:
        raise ArgumentError(f"sink must be on the query's device, {query.device}; got {describe(sink)}")
    return sink
