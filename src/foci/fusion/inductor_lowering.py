"""Inductor lowering of foci's operators: its code calls `foci.operator.compiled_call` directly, not through the dispatcher."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from foci.compat.inductor import setting
from foci.compat.lowering import HAS_LOWERINGS, lower_to_named_call

__all__ = ["register"]

_PLACES: Final[Mapping[Any, str]] = {
    torch.ops.foci.attention.default: "Forward",
    torch.ops.foci.attention_backward.default: "Backward",
    torch.ops.foci.attention_backward_rows.default: "BackwardRows",
}


@functools.cache
def register() -> None:
    """Once a process. Where torch lacks what this needs, Inductor's code calls the operators."""
    if HAS_LOWERINGS:
        for target, kind in _PLACES.items():
            lower_to_named_call(target, functools.partial(_imports, kind), _is_by_foci)


def _imports(kind: str, name: str, is_fixed: bool) -> Sequence[str]:
    return f"from foci.operator.compiled_call import {kind}", f"{name} = {kind}(fixed={is_fixed})"


def _is_by_foci() -> bool:
    """Whether the key of Inductor's cache holds foci's code: by the `uuid` of a pass, unless it ran before the cache was asked.

    A graph compiled without foci's passes may be found in Inductor's cache by another version of foci.
    """
    is_late = setting("pre_grad_pass_timing", "early") != "early"
    passes = (setting("post_grad_custom_pre_pass"), *([setting("pre_grad_custom_pass")] if is_late else []))
    return any(type(custom_pass).__module__.partition(".")[0] == "foci" for custom_pass in passes)
