"""Dynamo's tables of backends and of operators that take functions. Importing this module does not import Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, Final

from foci.compat.lookup import find

__all__ = ["BACKENDS", "register_backend", "trace_like_flex_attention"]

BACKENDS: Final = "torch._dynamo.backends.registry"
"""The module with the table, whose import foci watches for. An installed foci has an entry point besides, which torch documents."""


def register_backend(registry: ModuleType, name: str, backend: Callable[..., Any]) -> None:
    """Adds a backend to the table, unless an entry point has put it there: maybe right now, with the import of this module.

    Args:
        registry: the module that `BACKENDS` names, which may not be imported to its end yet.
        name: what torch.compile knows the backend by.
        backend: a function of a graph and its example inputs.
    """
    by_entry_point = "has a backend of torch.compile only where it is installed"
    register = find(f"{BACKENDS}.register_backend", without=by_entry_point)
    tables = [find(f"{BACKENDS}.{table}", without=by_entry_point) for table in ("_COMPILER_FNS", "_BACKENDS")]
    if register is not None and all(table is not None and name not in table for table in tables):
        register(backend, name=name)


_OPERATORS: Final = "torch._dynamo.variables.higher_order_ops"


def trace_like_flex_attention(name: str) -> bool:
    """Makes Dynamo trace calls of a higher-order operator as it traces those of flex_attention. False where it cannot.

    Args:
        name: of the operator.
    """
    without = "breaks torch.compile's graph at each attention with functions, which runs between two graphs"
    table = find(f"{_OPERATORS}._hop_name_to_variable_class", without=without)
    variable = find(f"{_OPERATORS}.FlexAttentionHigherOrderVariable", without=without)
    create_node = find(f"{_OPERATORS}.FlexAttentionHigherOrderVariable.create_wrapped_node", without=without)
    speculate = find(f"{_OPERATORS}.speculate_subgraph", without=without)
    if table is None or variable is None or create_node is None or speculate is None:
        return False

    def speculate_with_aliasing(*args: Any, **kwargs: Any) -> Any:
        """Dynamo's `speculate_subgraph`, for functions that may return one of their inputs: foci runs them on symbols, without memory.

        torch 2.14 and later look at the memory of a mask function's example tensors, and find none in those of torch.func's transforms.
        """
        if "supports_aliasing" in kwargs:
            kwargs["supports_aliasing"] = True
        return speculate(*args, **kwargs)

    trace_functions = _with_globals(create_node, speculate_subgraph=speculate_with_aliasing)

    def create_wrapped_node(self: Any, tx: Any, *args: Any) -> Any:
        # Tracing a function ends with a copy of what is known of objects made and changed so far. Objects of the
        # surrounding code still hold the record it is a copy of (torch 2.13: a cache that is filled layer by layer).
        record = tx.output.side_effects
        node = trace_functions(self, tx, *args)
        vars(record).update(vars(tx.output.side_effects))
        tx.output.side_effects = record
        return node

    table[name] = type("AttentionVariable", (variable,), {"create_wrapped_node": create_wrapped_node})
    return True


def _with_globals(function: Any, **replaced: Any) -> Callable[..., Any]:
    """A copy of a function that sees other values under some names of its module."""
    changed = {**function.__globals__, **replaced}
    clone = FunctionType(function.__code__, changed, function.__name__, function.__defaults__, function.__closure__)
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone
