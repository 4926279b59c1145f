"""Compiles the rest of a fused graph: with Inductor and foci's padding if Inductor's compiler is available, else eagerly."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeAlias, get_origin

import torch
from torch import fx

from foci.compat import inductor as compat

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
    modes, types = compat.modes(), compat.setting_types()
    if modes is None or types is None:
        raise ValueError(
            f"mode and options must be left out with torch {torch.__version__}: it lacks the names of torch._inductor by which foci hands "
            "them to Inductor (`foci env` lists them)"
        )
    if mode is not None and mode not in modes:
        raise ValueError(f"mode must be one of {', '.join(modes)}, not {mode!r}")
    for name in options:
        if not isinstance(name, str):
            raise TypeError(f"options: a name must be a str; got {type(name).__name__}")
    named_options = {name.replace("-", "_"): value for name, value in options.items()}
    for name, value in named_options.items():
        if name not in types:
            raise ValueError(f"options: neither foci nor Inductor has {name!r}; foci's are verify and rest")
        kind = types[name]
        if get_origin(kind) is None and not isinstance(value, kind):
            raise TypeError(f"options: {name!r} must be {kind.__name__}; got {type(value).__name__}")
    return {**(modes[mode] if mode else {}), **named_options}


def inductor_obstacle(devices: Iterable[str]) -> str | None:
    """Why Inductor cannot compile for one of these device types here, or None."""
    for device in sorted(set(devices)):
        if device == "cpu":
            compiler = compat.cpp_compiler()
            if shutil.which(compiler) is None:
                return f"Inductor needs a C++ compiler for the CPU: {compiler} was not found"
        elif device == "cuda" and not compat.has_triton():
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
        compat.start_workers()


def hand_over(graph_module: fx.GraphModule, example_inputs: Sequence[Any], inductor: Mapping[str, Any] | None) -> Callable[..., Any]:
    """A function that runs the graph, differentiable like it.

    Args:
        graph_module: it belongs to the callee from here on.
        example_inputs: one for each placeholder.
        inductor: its settings where it compiles the graph; None where the graph runs as it is.
    """
    graph_module.meta[FUSED] = True
    return compat.compile_eagerly(graph_module, example_inputs) if inductor is None else _inductor(graph_module, example_inputs, inductor)


def _inductor(graph_module: fx.GraphModule, example_inputs: Sequence[Any], config: Mapping[str, Any]) -> Callable[..., Any]:
    from foci.fusion import inductor_lowering
    from foci.padding.options import options

    inductor_lowering.register()
    patches = {**options(), **_without_partitions(config), **config}
    with _uncollected():
        # a backward graph is compiled later, in the first step
        return compat.compile_with_inductor(graph_module, example_inputs, patches, around=_uncollected())


def _without_partitions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options that skip Inductor's search for graph partitions, unless CUDA graphs are recorded."""
    recorded = config.get("triton.cudagraphs", compat.setting("triton.cudagraphs"))
    by_others = compat.setting("cudagraph_policy") is not None or compat.setting("custom_should_partition_ops")
    if recorded or by_others:
        return {}
    return compat.known_settings({"graph_partition": False}, without="lets Inductor look for partitions that nobody records")


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
