"""Inductor's settings, and how a graph is handed to it. Importing this module does not import Inductor, which takes a second."""

from __future__ import annotations

import contextlib
import importlib.util
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import fx

from foci.compat.lookup import find

__all__ = [
    "compile_eagerly", "compile_with_inductor", "cpp_compiler", "has_triton", "known_settings", "modes", "note_names", "process_pool",
    "setting", "setting_types", "start_workers", "with_pre_grad_pass",
]  # fmt: skip

_ABSENT: Final = object()
_CONFIG: Final = "torch._inductor.config"
_ASYNC_COMPILE: Final = "torch._inductor.async_compile"
_NO_OPTIONS: Final = "takes no mode and no options of Inductor with the backend foci"
_IN_THREADS: Final = "compiles the kernels of a graph in threads of its own process, not in Inductor's processes, which is slower"
_LOOKS_AGAIN: Final = "has Dynamo look at a fused graph again, at its first call, to hand it to Inductor"
_WITHOUT: Final[Mapping[str, str]] = {
    _CONFIG: "compiles graphs with Inductor's own settings",
    f"{_CONFIG}.get_config_copy": _NO_OPTIONS,
    f"{_CONFIG}.get_type": _NO_OPTIONS,
    f"{_CONFIG}.patch": "reports the graphs alone that the backend foci compiles",
    "torch._inductor.list_mode_options": _NO_OPTIONS,
    f"{_ASYNC_COMPILE}.maybe_warm_pool": "lets Inductor start its processes when it needs them",
    f"{_ASYNC_COMPILE}.get_compile_threads": _IN_THREADS,
    f"{_ASYNC_COMPILE}.AsyncCompile.use_process_pool": _IN_THREADS,
    f"{_ASYNC_COMPILE}.AsyncCompile.process_pool": _IN_THREADS,
    "torch._inductor.compile_fx.compile_fx": _LOOKS_AGAIN,
    "torch._inductor.compile_fx.compile_fx_inner": _LOOKS_AGAIN,
    "torch._dynamo.backends.common.aot_autograd": "has autograd record what Inductor does not compile",
    "torch.utils._triton.has_triton": "looks whether Triton is installed, not whether it works",
}
"""What foci does without each name. Releases 2.11 to 2.15 have them all."""


def _look_up(path: str) -> Any:
    return find(path, without=_WITHOUT[path])


def note_names() -> None:
    """Looks up every name of this module now, not at its first use, so that the list of missing names is complete."""
    for path in _WITHOUT:
        _look_up(path)


def _has_setting(name: str, *, without: str, seen: tuple[str, str] = ("2.11", "2.15")) -> bool:
    return find(f"{_CONFIG}.{name}", _ABSENT, without=without, seen=seen) is not _ABSENT


# ---- settings ----


def setting(name: str, default: Any = None) -> Any:
    """The present value of one of Inductor's settings, such as "triton.cudagraphs"; `default` where there is no such setting."""
    try:
        return operator.attrgetter(name)(_look_up(_CONFIG))
    except AttributeError:
        return default


def setting_types() -> Mapping[str, Any] | None:
    """The type of each setting, by name; None where torch does not tell."""
    copy, type_of = _look_up(f"{_CONFIG}.get_config_copy"), _look_up(f"{_CONFIG}.get_type")
    return None if copy is None or type_of is None else {name: type_of(name) for name in copy()}


def modes() -> Mapping[str, Mapping[str, Any]] | None:
    """The settings of each mode of torch.compile; None where torch does not tell."""
    list_modes = _look_up("torch._inductor.list_mode_options")
    return None if list_modes is None else list_modes()


def known_settings(settings: Mapping[str, Any], *, without: str) -> dict[str, Any]:
    """Return those settings that the installed release has."""
    return {name: value for name, value in settings.items() if _has_setting(name, without=without)}


def with_pre_grad_pass(run: Any) -> AbstractContextManager[Any]:
    """A context in which Inductor runs a pass on each graph before autograd is applied, also where its cache has the compiled graph."""
    patch = _look_up(f"{_CONFIG}.patch")
    if patch is None or not _has_setting("pre_grad_custom_pass", without=_WITHOUT[f"{_CONFIG}.patch"]):
        return contextlib.nullcontext()
    early = {} if setting("pre_grad_pass_timing") is None else {"pre_grad_pass_timing": "early"}
    context: AbstractContextManager[Any] = patch(pre_grad_custom_pass=run, **early)
    return context


# ---- compilers ----


def cpp_compiler() -> str:
    """The C++ compiler that Inductor's settings name."""
    names: Sequence[str | None] = setting("cpp.cxx", (os.environ.get("CXX"),))
    return next((name for name in reversed(names) if name), "g++")


def has_triton() -> bool:
    """Whether Inductor can compile for CUDA devices."""
    torch_has_triton = _look_up("torch.utils._triton.has_triton")
    return importlib.util.find_spec("triton") is not None if torch_has_triton is None else bool(torch_has_triton())


def start_workers() -> None:
    """Starts the processes in which Inductor compiles kernels for GPUs. Otherwise Inductor starts them later."""
    start = _look_up(f"{_ASYNC_COMPILE}.maybe_warm_pool")
    if start is not None:
        start()


def process_pool(threads: int | None, fewest: int) -> Callable[..., Future[Any]] | None:
    """A function that submits work to Inductor's compile processes; None where there are fewer than `fewest`, or they have not started.

    Args:
        threads: the setting `compile_threads` of this graph; None for Inductor's default.
        fewest: the smallest number of processes that is worth using.
    """
    if _ASYNC_COMPILE not in sys.modules:
        return None
    names = ("get_compile_threads", "AsyncCompile.use_process_pool", "AsyncCompile.process_pool")
    count_threads, has_started, pool = (_look_up(f"{_ASYNC_COMPILE}.{name}") for name in names)
    if count_threads is None or has_started is None or pool is None:
        return None
    with contextlib.suppress(Exception):  # the pool may be closed
        if (threads or count_threads()) >= fewest and has_started():
            submit: Callable[..., Future[Any]] = pool().submit
            return submit
    return None


# ---- graphs ----


def compile_with_inductor(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Mapping[str, Any],
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """A function that runs the graph as Inductor compiles it.

    Args:
        graph_module: Dynamo's.
        example_inputs: one for each placeholder.
        settings: those that differ from Inductor's own.
        around: a decorator of what compiles a forward or a backward graph.
    """
    compile_fx, compile_inner = map(_look_up, ("torch._inductor.compile_fx.compile_fx", "torch._inductor.compile_fx.compile_fx_inner"))
    if compile_fx is None or compile_inner is None:
        return torch.compile(graph_module, backend="inductor", options=dict(settings) or None)
    compiled: Callable[..., Any] = compile_fx(
        graph_module, example_inputs, inner_compile=around(compile_inner), config_patches=dict(settings)
    )
    return compiled


def compile_eagerly(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A function that runs the graph by torch's kernels. Its gradients are a graph made beforehand, where torch has `aot_autograd`."""
    aot_autograd = _look_up("torch._dynamo.backends.common.aot_autograd")
    if aot_autograd is None:
        return graph_module
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]

    def as_it_is(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        boxed: Callable[..., Any] = make_boxed_func(graph)
        return boxed

    compiled: Callable[..., Any] = aot_autograd(fw_compiler=as_it_is)(graph_module, example_inputs)
    return compiled
