"""Inductor lowering of foci's operators: its code calls `foci.operator.compiled_call` directly, not through the dispatcher."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch._inductor import config, ir
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

__all__ = ["register"]

_PLACES: Final[Mapping[Any, str]] = {
    torch.ops.foci.attention.default: "Forward",
    torch.ops.foci.attention_backward.default: "Backward",
    torch.ops.foci.attention_backward_rows.default: "BackwardRows",
}


@functools.cache
def register() -> None:
    """Once a process."""
    for target in _PLACES:
        register_lowering(target, type_promotion_kind=None)(_lowering(target))


def _lowering(target: Any) -> Callable[..., Any]:
    through_the_dispatcher = fallback_handler(target)  # type: ignore[no-untyped-call]

    def lower(*args: Any, **kwargs: Any) -> Any:
        # a graph compiled without foci's passes may be found in Inductor's cache by another version of foci
        if V.graph.cpp_wrapper or kwargs or not _is_by_foci():
            return through_the_dispatcher(*args, **kwargs)
        return pytree.tree_map(_for_lowering, DirectCall.create(target, *args))

    return lower


def _is_by_foci() -> bool:
    """Whether the key of Inductor's cache holds foci's code: by the `uuid` of a pass, unless it ran before the cache was asked."""
    is_late = getattr(config, "pre_grad_pass_timing", "early") != "early"
    passes = (config.post_grad_custom_pre_pass, *([config.pre_grad_custom_pass] if is_late else []))
    return any(type(custom_pass).__module__.partition(".")[0] == "foci" for custom_pass in passes)


def _for_lowering(x: Any) -> Any:
    return ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x


class DirectCall(ir.FallbackKernel):
    """A call of one of the operators by a function that the code has for this place."""

    def codegen(self, wrapper: Any) -> None:
        """Gives the place its function."""
        outermost = wrapper
        while hasattr(outermost, "parent_wrapper"):
            outermost = outermost.parent_wrapper
        name, kind = f"foci_{self.get_name()}", _PLACES[self.op_overload]
        outermost.add_import_once(f"from foci.operator.compiled_call import {kind}")
        outermost.add_import_once(f"{name} = {kind}(fixed={self._is_fixed()})")
        self.python_kernel_name = name
        super().codegen(wrapper)

    def _is_fixed(self) -> bool:
        """Whether every size, stride and number is the same in each call."""
        tensors: Any = self.inputs
        sizes = (n for t in tensors for n in (*t.get_size(), *t.get_stride()))
        return all(map(_is_plain, (*pytree.tree_leaves(self.constant_args), *sizes)))


def _is_plain(value: Any) -> bool:
    """Whether a value is a number or a string in each call. A symbol is a sympy expression, or a SymInt, SymFloat or SymBool of torch."""
    return type(value) in _PLAIN or not getattr(value, "free_symbols", True)


_PLAIN: Final = frozenset((bool, int, float, str, type(None)))
