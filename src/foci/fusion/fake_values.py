"""Example values of a graph's nodes: fake tensors and symbolic sizes, made as the compiler that the graph is for would make them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from foci.compat.fake import FakeTensor, FakeTensorMode, detect_fake_mode, python_dispatcher
from foci.fusion.fx_utils import example_value

__all__ = ["making", "with_values"]


@contextlib.contextmanager
def making(mode: FakeTensorMode | None) -> Iterator[None]:
    """Context in which operations produce example values. Some operators take symbolic sizes only through the Python dispatcher."""
    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(python_dispatcher())
        yield


def with_values(module: fx.GraphModule, example_inputs: Sequence[Any]) -> FakeTensorMode | None:
    """Give each node an example value, if one that is read lacks it; return their fake mode.

    Raises:
        ValueError: for inputs that the graph does not take.
    """
    if any(map(_lacks_value, module.graph.nodes)):
        try:
            _propagate(module, example_inputs)
        except Exception as error:
            raise ValueError(f"example_inputs: the graph does not take them: {error}") from error
    values = map(example_value, module.graph.nodes)
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


def _lacks_value(node: fx.Node) -> bool:
    """Whether a node has no value though something is made of it; a write has none, and what opens a context only its end reads."""
    if node.op not in ("call_function", "call_method") or example_value(node) is not None:
        return False
    return any(user.op == "output" or example_value(user) is not None for user in node.users)


def _propagate(module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    mode = detect_fake_mode(list(example_inputs)) or FakeTensorMode(allow_non_fake_inputs=True)
    inputs = [mode.from_tensor(x) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x for x in example_inputs]
    with making(mode):
        _Values(module).run(*inputs)


class _Values(fx.Interpreter):
    """Runs a graph on example values and keeps them."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        n.meta["example_value"] = result
        return result
