"""Accessors of torch.fx nodes: the operation under one name, shape and dtype, the user's source line.

`torch.add(x, y)`, `x.add(y)`, `x + y` and `aten.add.Tensor` all have the name "add". So has `x.add_(y)`, which a flag marks as in place.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from foci.compat.fx import storage_identity
from foci.compat.torch import is_transformed as is_functorch_tensor
from foci.fusion.declared_writes import declared_writes

__all__ = [
    "CASTS",
    "Call",
    "Size",
    "as_call",
    "example_tensor",
    "example_value",
    "fixed_number",
    "inplace_position",
    "is_half",
    "is_tensor",
    "is_transformed",
    "is_written",
    "mark_no_grad",
    "mark_written",
    "needs_grad",
    "node_device",
    "node_dtype",
    "node_rank",
    "node_shape",
    "pad_arguments",
    "reads_only_shape",
    "runs_without_gradients",
    "same_size",
    "single",
    "size_hint",
    "source_location",
    "storage_id",
]

Size: TypeAlias = int | torch.SymInt

# Spellings whose own name is not the operation's.
_ALIASES: Final[Mapping[str, str]] = {
    "truediv": "div", "true_divide": "div", "divide": "div", "itruediv": "div", "idiv": "div", "iadd": "add", "isub": "sub",
    "subtract": "sub", "imul": "mul", "multiply": "mul", "iand": "and", "ior": "or", "ixor": "xor", "and_": "and", "or_": "or",
    "inv": "invert",
    "bmm": "matmul", "mm": "matmul", "rmatmul": "matmul", "__matmul__": "matmul", "_unsafe_view": "reshape", "_reshape_alias": "reshape",
    "view_copy": "view", "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim", "_softmax": "softmax",
    "special_softmax": "softmax", "_to_copy": "to", "concat": "cat", "concatenate": "cat", "native_dropout": "dropout",
    "_native_dropout": "dropout", "constant_pad_nd": "pad", "special_exp2": "exp2", "expand_copy": "expand", "t_copy": "t",
}  # fmt: skip
# Parameters that people give by name; of other operations the first two.
_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "pow": ("input", "exponent"), "float_power": ("input", "exponent"), "masked_fill": ("input", "mask", "value"),
    "where": ("condition", "input", "other"),
}  # fmt: skip
_TWO: Final = ("input", "other")
_ATTRIBUTES: Final[Mapping[str, str]] = {"T": "t", "mT": "adjoint", "H": "adjoint", "mH": "adjoint", "data": "detach"}
_IN_PLACE_OPERATORS: Final = frozenset((
    "iadd", "isub", "imul", "itruediv", "idiv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift",
))  # fmt: skip
_STRIP: Final = re.compile(r"^__r?(\w+?)__$")

CASTS: Final = frozenset((
    "to", "type", "float", "double", "half", "bfloat16", "long", "int", "short", "bool", "type_as", "convert_element_type",
))  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A node's operation by name, and its operands by position; `in_place` if the operation writes an argument."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    in_place: bool = False

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


def as_call(node: fx.Node) -> Call | None:
    """The operation of a node that calls one; None for placeholders, attributes, submodules and the output."""
    if node.op == "call_method":
        raw = str(node.target)
    elif node.op == "call_function":
        target = node.target
        packet = getattr(target, "overloadpacket", None)
        raw = str(getattr(packet if packet is not None else target, "__name__", target))
    else:
        return None
    reflected = raw in ("__rsub__", "__rtruediv__", "__rdiv__", "__rpow__", "__rmatmul__", "__rfloordiv__", "__rmod__")
    name = _STRIP.sub(r"\1", raw)
    in_place = name in _IN_PLACE_OPERATORS or (raw.endswith("_") and not raw.endswith("__") and raw not in ("and_", "or_"))
    name = name.rstrip("_") if in_place and name not in _IN_PLACE_OPERATORS else name
    args = tuple(reversed(node.args)) if reflected and len(node.args) == 2 else tuple(node.args)
    if raw == "getattr" and str(args[1]) in _ATTRIBUTES:
        name, args = _ATTRIBUTES[str(args[1])], args[:1]
    if raw == "rsub" and len(node.args) >= 2:
        name, args = "sub", (args[1], args[0], *args[2:])
    name, named = _ALIASES.get(name, name), dict(node.kwargs)
    flag = inplace_position(node.target)
    if flag is not None and len(args) > flag:
        named["inplace"], args = args[flag], args[:flag]
    for parameter in _PARAMETERS.get(name, _TWO)[len(args) :]:
        if parameter not in named:
            break
        args += (named.pop(parameter),)
    return Call(name, args, named, in_place or named.get("inplace") is True or _writes(node) or bool(declared_writes(node)))


@functools.cache
def inplace_position(target: Any) -> int | None:
    """Position of the last parameter of a function of `torch.nn.functional` that asks it to write its input; None for any other target.
    Modules such as `torch.nn.LeakyReLU` give it by position."""
    function: Any = getattr(torch.nn.functional, getattr(target, "__name__", ""), None)
    if function is None or function is not target:
        return None
    try:
        parameters = list(inspect.signature(function).parameters)
    except ValueError:  # of a builtin that has none
        return None
    return len(parameters) - 1 if parameters[-1:] == ["inplace"] else None


def _writes(node: fx.Node) -> bool:
    return "out" in node.kwargs and node.kwargs["out"] is not None


def example_value(arg: Any) -> Any:
    """Example value of a node; any other argument is returned as it is."""
    if isinstance(arg, fx.Node):
        value = arg.meta.get("example_value")
        return arg.meta.get("val") if value is None else value
    return arg


def fixed_number(arg: Any) -> Any:
    """`example_value`, a real number that Dynamo left open as itself: a guard fixes its value, as the kernel's. None for a tensor."""
    value = example_value(arg)
    if isinstance(value, Tensor):
        return None
    return float(value) if isinstance(value, torch.SymFloat) else value


def single(dim: Any) -> Any:
    """The one of a list of one; anything else as it is."""
    return dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim


def pad_arguments(call: Call) -> tuple[Any, Any]:
    """Mode and value of a `pad`: ATen's has no mode."""
    mode, fill = call.argument(2, "mode", "constant"), call.argument(3, "value")
    return ("constant", mode) if isinstance(mode, (int, float)) else (mode, fill)


def example_tensor(arg: Any) -> Tensor | None:
    """The example tensor of a node that makes one, else None."""
    value = example_value(arg) if isinstance(arg, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def storage_id(node: fx.Node) -> int | None:
    """Identity of the storage of a node's tensor, shared by its views; None if the example has none."""
    tensor = example_tensor(node)
    try:
        return None if tensor is None else storage_identity(tensor)
    except (NotImplementedError, RuntimeError):
        return None


_WRITTEN: Final = "foci_written"


def mark_written(node: fx.Node) -> None:
    """Mark that the graph writes the node's storage: its operation alone no longer determines its elements."""
    node.meta[_WRITTEN] = True


def is_written(node: fx.Node) -> bool:
    """Whether the node was marked as written in place."""
    return _WRITTEN in node.meta


_NO_GRAD: Final = "foci_no_grad"


def mark_no_grad(node: fx.Node) -> None:
    """Mark that the node runs with gradients off."""
    node.meta[_NO_GRAD] = True


def runs_without_gradients(node: fx.Node) -> bool:
    """Whether the node was marked as one that runs with gradients off."""
    return _NO_GRAD in node.meta


def node_dtype(node: fx.Node) -> torch.dtype:
    """Dtype of a node that makes a tensor."""
    tensor = example_tensor(node)
    assert tensor is not None, node
    return tensor.dtype


def node_device(node: fx.Node) -> torch.device:
    """Device of a node that makes a tensor."""
    tensor = example_tensor(node)
    assert tensor is not None, node
    return tensor.device


def needs_grad(node: fx.Node) -> bool:
    """Whether a node makes a tensor that gradients are asked of."""
    tensor = example_tensor(node)
    return tensor is not None and tensor.requires_grad


def is_tensor(arg: Any) -> bool:
    """Whether an argument is a node that makes a tensor."""
    return example_tensor(arg) is not None


def node_shape(node: fx.Node) -> tuple[Size, ...]:
    """The sizes of a node that makes a tensor."""
    tensor = example_tensor(node)
    assert tensor is not None, node
    return tuple(tensor.shape)


def node_rank(node: fx.Node) -> int:
    """The number of dims of a node that makes a tensor."""
    return len(node_shape(node))


def same_size(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for every value of their symbols; asks without adding a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(statically_known_true(a == b))


def size_hint(size: Size) -> int:
    """A size of the example inputs; asks without adding a guard."""
    return size if isinstance(size, int) else int(size.node.hint)


def is_half(dtype: torch.dtype) -> bool:
    """Whether a dtype has 16 bits."""
    return dtype in (torch.float16, torch.bfloat16)


_SHAPE_READERS: Final = frozenset((
    "size", "shape", "dim", "ndim", "numel", "device", "dtype", "is_contiguous", "stride", "element_size", "get_device", "zeros_like",
    "ones_like", "empty_like", "full_like", "rand_like", "new_zeros", "new_ones", "new_full", "new_empty", "requires_grad",
))  # fmt: skip


def is_transformed(node: fx.Node) -> bool:
    """Whether a node's tensor is one of a transform of torch.func, which lacks dimensions that its elements have."""
    tensor = example_tensor(node)
    return tensor is not None and is_functorch_tensor(tensor)


def reads_only_shape(node: fx.Node) -> bool:
    """Whether a user of a tensor reads its shape, dtype or device, never its values."""
    call = as_call(node)
    if call is None:
        return False
    name = str(call.args[1]) if call.name == "getattr" and len(call.args) > 1 else call.name
    return name in _SHAPE_READERS or name.startswith("sym_")


_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+)')


def source_location(node: fx.Node) -> str:
    """ "file.py:line" of the innermost frame of the node's stack trace that is not torch's own; "" where there is none."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or node.stack_trace or "")
    user_frames = [(path, line) for path, line in frames if "/torch/" not in path and not path.startswith("<")]
    return "{}:{}".format(*(user_frames or frames)[-1]) if frames else ""
