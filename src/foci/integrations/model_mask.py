"""The mask that transformers' models carry from layer to layer: an expression, with the manners of a [B, 1, Sq, Skv] tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from foci.compat.fx import tree_map
from foci.mask_mods import create_mask
from foci.variant import Mask

__all__ = ["ModelMask"]

_ROWS: Final = slice(None)
_ARITHMETIC: Final = frozenset(
    f"{prefix}{name}"
    for name in ("add", "sub", "mul", "div", "truediv", "matmul", "baddbmm", "float", "half", "double", "bfloat16")
    for prefix in ("", "r", "i")
)
"""What is done with masks that are numbers to add; this one is true where a query attends."""


class ModelMask(Mask):
    """Which keys each query of a model attends to, never written out.

    Models ask a mask for its shape, move it, make it contiguous and cut it to the keys that there are: all of this stays
    an expression. Whatever else they compute with it is computed with the bool tensor that it stands for, with a warning,
    as that costs [B, 1, Sq, Skv] memory. Arithmetic is an error: a model that adds its mask to scores of its own does not
    attend through foci, and would add truth values.

    Args:
        function: (b, h, q_idx, kv_idx) -> bool, true where the query attends; None if it does everywhere.
        shape: (B, 1, Sq, Skv).
        device: of what the function captures.

    Example:
        >>> import torch
        >>> from foci.integrations.model_mask import ModelMask
        >>> mask = ModelMask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, (2, 1, 8, 12), torch.device("cpu"))
        >>> mask[:, :, :, :10].shape
        torch.Size([2, 1, 8, 10])
    """

    dtype = torch.bool
    is_nested = False

    def __init__(self, function: Callable[..., Any] | None, shape: tuple[Any, ...], device: torch.device) -> None:
        super().__init__(_everywhere if function is None else function, name="transformers")
        self.everywhere = function is None
        self.lengths = shape
        self.device = device

    @property
    def shape(self) -> torch.Size:
        """As of the tensor that it stands for."""
        return torch.Size(self.lengths)

    @property
    def ndim(self) -> int:
        """As of the tensor that it stands for."""
        return len(self.lengths)

    def dim(self) -> int:
        """4, as for the tensor."""
        return len(self.lengths)

    def size(self, dim: int | None = None) -> Any:
        """Shape, or one dimension of it, as for a tensor."""
        return self.shape if dim is None else self.lengths[dim]

    def contiguous(self, *args: Any, **kwargs: Any) -> ModelMask:
        """Itself: there is nothing in memory."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself, on its own device and as bool; else the bool tensor, moved or cast."""
        asked = (*args, *kwargs.values())
        if all(_is_already(self, wanted) for wanted in asked):
            return self
        floating = any(isinstance(a, (torch.dtype, Tensor)) and getattr(a, "dtype", a).is_floating_point for a in asked)
        return self._written_out("float" if floating else "to").to(*args, **kwargs)

    def to_tensor(self) -> Tensor:
        """bool [B, 1, Sq, Skv], true where the query attends."""
        batch, _, q_len, kv_len = self.lengths
        return create_mask(self.function, batch, None, q_len, kv_len, self.device)

    def broadcast(self, queries: Any) -> ModelMask:
        """A mask of one query for this many, as a tensor broadcasts; any other as it is."""
        function = self.function
        if self.lengths[2] != 1 or queries == 1:
            return self
        first = None if self.everywhere else lambda b, h, q_idx, kv_idx: function(b, h, q_idx * 0, kv_idx)
        return ModelMask(first, (*self.lengths[:2], queries, self.lengths[3]), self.device)

    def __getitem__(self, index: Any) -> Any:
        """Fewer keys, counted from the first, are a mask again; any other part is a part of the tensor."""
        entries = index if isinstance(index, tuple) else (index,)
        if len(entries) == 4 and all(e == _ROWS for e in entries[:3]) and isinstance(entries[3], slice):
            cut = entries[3]
            if cut.start in (None, 0) and cut.step in (None, 1) and (cut.stop is None or cut.stop >= 0):
                kept = self.lengths[3] if cut.stop is None or cut.stop > self.lengths[3] else cut.stop
                return ModelMask(None if self.everywhere else self.function, (*self.lengths[:3], kept), self.device)
        return self._written_out("indexing")[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"a mask has no attribute {name!r}")
        return getattr(self._written_out(name), name)

    def __and__(self, other: Any) -> Any:
        """Both masks, one of a model again if both are."""
        return self._written_out("and") & other if isinstance(other, Tensor) else self._combined(super().__and__(other), other)

    def __or__(self, other: Any) -> Any:
        """Either mask, one of a model again if both are."""
        return self._written_out("or") | other if isinstance(other, Tensor) else self._combined(super().__or__(other), other)

    def __eq__(self, other: object) -> Any:
        """Where the bool tensor equals a number or a tensor; whether it is another mask."""
        return self._written_out("eq") == other if isinstance(other, (int, float, Tensor)) else self is other

    def __ne__(self, other: object) -> Any:
        """The opposite of ==."""
        return self._written_out("ne") != other if isinstance(other, (int, float, Tensor)) else self is not other

    __hash__ = Mask.__hash__

    def __invert__(self) -> ModelMask:
        """True where the query does not attend."""
        return ModelMask(super().__invert__().function, self.lengths, self.device)

    def _combined(self, mask: Mask, other: Any) -> Mask:
        is_of_model = isinstance(other, ModelMask) and other.lengths == self.lengths
        return ModelMask(mask.function, self.lengths, self.device) if is_of_model else mask

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", str(function))
        positional, named = tree_map(lambda a: a._written_out(name) if isinstance(a, ModelMask) else a, (args, kwargs or {}))
        return function(*positional, **named)

    def _written_out(self, name: str) -> Tensor:
        if name.strip("_") in _ARITHMETIC:
            # not a TypeError: Tensor.__add__ takes one for "ask the other operand"
            raise ValueError(
                f"the model computes scores of its own with its attention mask ({name.strip('_')}): it does not attend through "
                'attn_implementation="foci"; load it with "eager"'
            )
        warnings.warn(
            f"the model computes with its attention mask ({name}), which is therefore written out as a bool tensor {list(self.lengths)}",
            stacklevel=3,
        )
        return self.to_tensor()


def _everywhere(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.ones_like(q_idx, dtype=torch.bool)


def _is_already(mask: ModelMask, wanted: Any) -> bool:
    """Whether an argument of `Tensor.to` asks for nothing new."""
    if wanted is None or isinstance(wanted, (bool, torch.memory_format)):
        return True
    if isinstance(wanted, torch.dtype):
        return wanted == torch.bool
    if isinstance(wanted, Tensor):
        return wanted.dtype == torch.bool and _is_already(mask, wanted.device)
    if not isinstance(wanted, (str, int, torch.device)):
        return False
    device = torch.device(wanted)
    return device.type == mask.device.type and device.index in (None, mask.device.index)
