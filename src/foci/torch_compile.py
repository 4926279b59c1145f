"""The name "foci" for torch.compile, also where the package is on the path without being installed.

An installed foci has an entry point. Registering by hand needs Dynamo, which takes ten times as long to import as all of foci:
so it waits until somebody imports Dynamo.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import fx

from foci.compat.dynamo import BACKENDS, register_backend

__all__ = ["backend", "register"]


def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The backend of `torch.compile(model, backend="foci")`. `foci.fusion.compiler.Compiler` tells what it does and takes.

    Args:
        graph_module: Dynamo's graph.
        example_inputs: one for each of its placeholders.
        options: `mode` and `options` of torch.compile.
    """
    from foci.fusion.compiler import Compiler

    return Compiler()(graph_module, example_inputs, **options)


def register() -> None:
    """Registers the backend now, or as soon as Dynamo is imported."""
    loaded = sys.modules.get(BACKENDS)
    if loaded is not None:
        register_backend(loaded, "foci", backend)
    else:
        sys.meta_path.insert(0, _AfterDynamo())


class _AfterDynamo(MetaPathFinder):
    """Finds nothing itself: sees the import of Dynamo's registry go by, and leaves."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != BACKENDS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register_backend(module, "foci", backend)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
