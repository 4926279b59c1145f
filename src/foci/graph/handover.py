"""What is not attention: a graph handed to Inductor where the compiler that it needs is there, else to eager execution.

Both roads go through AOTAutograd and meet the same passes on the forward and the backward graph.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import fx

__all__ = ["FUSED", "Pass", "Rest", "hand_over", "inductor_obstacle", "settings"]

Rest: TypeAlias = Literal["auto", "inductor", "eager"]
Pass: TypeAlias = Callable[..., fx.GraphModule]
"""`(graph_module, example_inputs, *, is_backward) -> graph_module`, on graphs that AOTAutograd made."""

FUSED: Final = "foci_fused"
"""Key in a graph module's meta: it has been through `fuse`."""

_PASSES: Final[tuple[Pass, ...]] = ()


def settings(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings for a mode and options of torch.compile.

    Raises:
        ValueError: for a mode or an option that torch does not have.
    """
    if mode in (None, "default") and not options:
        return {}  # Inductor takes a second to import
    from torch._inductor import config, list_mode_options

    modes = list_mode_options()
    if mode is not None and mode not in modes:
        raise ValueError(f"mode must be one of {', '.join(modes)}, not {mode!r}")
    known = config.get_config_copy()
    given = {name.replace("-", "_"): value for name, value in options.items()}
    for name in given:
        if name not in known:
            raise ValueError(f"options: neither foci nor Inductor has {name!r}; foci's are verify and rest")
    return {**(modes[mode] if mode else {}), **given}


def inductor_obstacle(devices: Iterable[str]) -> str | None:
    """Why Inductor cannot compile for one of these device types here, or None."""
    for device in sorted(set(devices)):
        if device == "cpu":
            from torch._inductor import config

            compiler = next((name for name in reversed(config.cpp.cxx) if name), "g++")
            if shutil.which(compiler) is None:
                return f"Inductor needs a C++ compiler for the CPU: {compiler} was not found"
        elif device == "cuda":
            from torch.utils._triton import has_triton

            if not has_triton():
                return "Inductor needs triton for CUDA devices"
    return None


def hand_over(graph_module: fx.GraphModule, example_inputs: Sequence[Any], rest: Rest, config: Mapping[str, Any]) -> Callable[..., Any]:
    """A function that runs the graph, differentiable like it.

    Args:
        graph_module: it belongs to the callee from here on.
        example_inputs: one for each placeholder.
        rest: who compiles.
        config: Inductor's settings.
    """
    if rest == "auto":
        devices = {t.device.type for t in example_inputs if isinstance(t, torch.Tensor)}
        rest = "eager" if inductor_obstacle(devices) else "inductor"
    graph_module.meta[FUSED] = True
    return _inductor(graph_module, example_inputs, config) if rest == "inductor" else _eager(graph_module, example_inputs)


def _passed(graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, is_backward: bool) -> fx.GraphModule:
    for each in _PASSES:
        graph_module = each(graph_module, example_inputs, is_backward=is_backward)
    return graph_module


def _inductor(graph_module: fx.GraphModule, example_inputs: Sequence[Any], config: Mapping[str, Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    from foci.graph.padding.options import options

    def inner(graph: fx.GraphModule, inputs: Sequence[Any], **others: Any) -> Any:
        return compile_fx_inner(_passed(graph, inputs, is_backward=others.get("is_backward", False)), inputs, **others)

    patches = {**options(), **config}
    compiled: Callable[..., Any] = compile_fx(graph_module, example_inputs, inner_compile=inner, config_patches=patches)  # type: ignore[assignment]
    return compiled


def _eager(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd

    def compiler(is_backward: bool) -> Callable[..., Any]:
        return lambda graph, inputs: make_boxed_func(_passed(graph, inputs, is_backward=is_backward))

    compiled: Callable[..., Any] = aot_autograd(fw_compiler=compiler(False), bw_compiler=compiler(True))(graph_module, example_inputs)
    return compiled
