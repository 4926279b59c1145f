"""What foci adds inside of Inductor: passes, and how operators are lowered. Imports Inductor, which takes a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from torch import fx

from foci.compat.fx import tree_leaves, tree_map
from foci.compat.lookup import find

__all__ = ["HAS_LOWERINGS", "CustomGraphPass", "lower", "lower_to_named_call", "lowered", "restrided"]

_LOWERINGS: Final = "calls its operators through the dispatcher in Inductor's code, which is slower, and pads no products there"


class _GraphPass:
    """A pass by its `__call__` and `uuid`."""

    def __call__(self, graph: fx.Graph) -> None:
        raise NotImplementedError


if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass
else:
    CustomGraphPass = find(
        "torch._inductor.custom_graph_pass.CustomGraphPass",
        _GraphPass,
        without="has Inductor compile each fused graph anew, as its cache cannot tell passes apart",
    )

_IR: Final = "torch._inductor.ir"
_patch: Final[Any] = find("torch._inductor.config.patch", without=_LOWERINGS)
_register: Final[Any] = find("torch._inductor.lowering.register_lowering", without=_LOWERINGS)
_table: Final[Any] = find("torch._inductor.lowering.lowerings", without=_LOWERINGS)
_fallback: Final[Any] = find("torch._inductor.lowering.fallback_handler", without=_LOWERINGS)
_virtual: Final[Any] = find("torch._inductor.virtualized.V", without=_LOWERINGS)
_Node: Final[Any] = find(f"{_IR}.IRNode", without=_LOWERINGS)
_FallbackKernel: Final[Any] = find(f"{_IR}.FallbackKernel", without=_LOWERINGS)
_create: Final[Any] = find(f"{_IR}.FallbackKernel.create", without=_LOWERINGS)
_codegen: Final[Any] = find(f"{_IR}.FallbackKernel.codegen", without=_LOWERINGS)
_box: Final[Any] = find(f"{_IR}.TensorBox.create", without=_LOWERINGS)
_require_strides: Final[Any] = find(f"{_IR}.ExternKernel.require_exact_strides", without=_LOWERINGS)

HAS_LOWERINGS: Final = None not in (
    _patch, _register, _table, _fallback, _virtual, _Node, _FallbackKernel, _create, _codegen, _box, _require_strides,
)  # fmt: skip
"""Whether the functions below can be used. Inductor calls an operator without a lowering through the dispatcher."""


def lower(operator: Any, lowering: Callable[..., Any]) -> None:
    """Makes Inductor lower an operator by a function of its arguments, tensors as Inductor has them."""
    _register(operator, type_promotion_kind=None)(lowering)


def lowered(operator: Any, settings: Mapping[str, Any], *args: Any) -> Any:
    """Return what Inductor lowers an operator to, under some settings."""
    with _patch(dict(settings)):
        return _table[operator](*args)


def restrided(x: Any) -> Any:
    """A value in the strides that the node that is being lowered has, symbolic ones included."""
    return _require_strides(x, _virtual.graph.current_node.meta["val"].stride())


# ---- operators called by name ----

_Imports = Callable[[str, bool], Sequence[str]]
_IMPORTS: Final[dict[Any, _Imports]] = {}


def lower_to_named_call(operator: Any, imports: _Imports, may_name: Callable[[], bool]) -> None:
    """Makes Inductor's code call a function, not an operator.

    Args:
        operator: whose results the function gives.
        imports: a function of the name to call, and of whether every size, stride and number is the same in each call. It gives the lines
            at the top of the code that define the name.
        may_name: whether the code that is being made may hold these lines; it calls the operator otherwise.
    """
    _IMPORTS[operator] = imports
    by_operator = _fallback(operator)

    def lowering(*args: Any, **kwargs: Any) -> Any:
        if _virtual.graph.cpp_wrapper or kwargs or not may_name():
            return by_operator(*args, **kwargs)
        return tree_map(lambda x: _box(x) if isinstance(x, _Node) else x, _NamedCall.create(operator, *args))

    lower(operator, lowering)


class _NamedCall(_FallbackKernel or object):  # type: ignore[misc]
    """A call of an operator by a function that the code has for this place."""

    def codegen(self, wrapper: Any) -> None:
        """Gives the place its function."""
        outermost = wrapper
        while hasattr(outermost, "parent_wrapper"):
            outermost = outermost.parent_wrapper
        name = f"foci_{self.get_name()}"
        for line in _IMPORTS[self.op_overload](name, self._is_fixed()):
            outermost.add_import_once(line)
        self.python_kernel_name = name
        super().codegen(wrapper)

    def _is_fixed(self) -> bool:
        """Whether every size, stride and number is the same in each call."""
        sizes = (n for t in self.inputs for n in (*t.get_size(), *t.get_stride()))
        return all(map(_is_plain, (*tree_leaves(self.constant_args), *sizes)))


def _is_plain(value: Any) -> bool:
    """Whether a value is a number or a string in each call. A symbol is a sympy expression, or a SymInt, SymFloat or SymBool of torch."""
    return type(value) in _PLAIN or not getattr(value, "free_symbols", True)


_PLAIN: Final = frozenset((bool, int, float, str, type(None)))
