"""Compiles the rest of a fused graph: with Inductor and foci's padding if Inductor's compiler is available, else eagerly."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeAlias, get_origin

import torch
from torch import fx

__all__ = ["FUSED", "Rest", "hand_over", "inductor_obstacle", "is_inductor", "settings", "start_workers"]

Rest: TypeAlias = Literal["auto", "inductor", "eager"]
FUSED: Final = "foci_fused"
"""Key in a graph module's meta: it has been through `fuse`."""


def settings(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings for a mode and options of torch.compile.

    Raises:
        TypeError: for an option of another type than torch's, or whose name is no str.
        ValueError: for a mode or an option that torch does not have.
    """
    if mode in (None, "default") and not options:
        return {}  # Inductor takes a second to import
    from torch._inductor import config, list_mode_options

    modes = list_mode_options()
    if mode is not None and mode not in modes:
        raise ValueError(f"mode must be one of {', '.join(modes)}, not {mode!r}")
    defaults = config.get_config_copy()
    for name in options:
        if not isinstance(name, str):
            raise TypeError(f"options: a name must be a str; got {type(name).__name__}")
    named_options = {name.replace("-", "_"): value for name, value in options.items()}
    for name, value in named_options.items():
        if name not in defaults:
            raise ValueError(f"options: neither foci nor Inductor has {name!r}; foci's are verify and rest")
        kind = config.get_type(name)  # type: ignore[attr-defined]
        if get_origin(kind) is None and not isinstance(value, kind):
            raise TypeError(f"options: {name!r} must be {kind.__name__}; got {type(value).__name__}")
    return {**(modes[mode] if mode else {}), **named_options}


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


def is_inductor(rest: Rest, example_inputs: Sequence[Any]) -> bool:
    """Whether Inductor compiles the graph; else it runs eagerly."""
    if rest == "auto":
        return inductor_obstacle({t.device.type for t in example_inputs if isinstance(t, torch.Tensor)}) is None
    return rest == "inductor"


def start_workers(example_inputs: Sequence[Any], config: Mapping[str, Any]) -> None:
    """Starts the processes in which Inductor compiles kernels for GPUs, as its own backend does before anything else: they take
    seconds to be ready. Inductor starts them later where a release of torch has no such function.

    Args:
        example_inputs: one for each placeholder of the graph that Inductor is to compile.
        config: its settings.
    """
    if config.get("compile_threads", 2) > 1 and any(isinstance(t, torch.Tensor) and t.device.type == "cuda" for t in example_inputs):
        from torch._inductor import async_compile

        if hasattr(async_compile, "maybe_warm_pool"):
            async_compile.maybe_warm_pool()


def hand_over(graph_module: fx.GraphModule, example_inputs: Sequence[Any], inductor: Mapping[str, Any] | None) -> Callable[..., Any]:
    """A function that runs the graph, differentiable like it.

    Args:
        graph_module: it belongs to the callee from here on.
        example_inputs: one for each placeholder.
        inductor: its settings where it compiles the graph; None where the graph runs as it is.
    """
    graph_module.meta[FUSED] = True
    return _eager(graph_module, example_inputs) if inductor is None else _inductor(graph_module, example_inputs, inductor)


def _inductor(graph_module: fx.GraphModule, example_inputs: Sequence[Any], config: Mapping[str, Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    from foci.fusion import inductor_lowering
    from foci.padding.options import options

    inductor_lowering.register()
    patches = {**options(), **_without_partitions(config), **config}
    with _uncollected():
        # a backward graph is compiled later, in the first step
        made = compile_fx(graph_module, example_inputs, inner_compile=_uncollected()(compile_fx_inner), config_patches=patches)
    compiled: Callable[..., Any] = made  # type: ignore[assignment]
    return compiled


def _without_partitions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options that skip Inductor's search for graph partitions, unless CUDA graphs are recorded."""
    from torch._inductor import config as defaults

    recorded = config.get("triton.cudagraphs", defaults.triton.cudagraphs)
    by_others = getattr(defaults, "cudagraph_policy", None) is not None or getattr(defaults, "custom_should_partition_ops", None)
    return {} if recorded or by_others else {"graph_partition": False}


@contextmanager
def _uncollected() -> Iterator[None]:
    """Inside, Python does not look for garbage: a graph is made of what stays, which the collector would go through again and again."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _eager(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd

    def as_it_is(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        boxed: Callable[..., Any] = make_boxed_func(graph)
        return boxed

    compiled: Callable[..., Any] = aot_autograd(fw_compiler=as_it_is)(graph_module, example_inputs)
    return compiled
