"""Elements of a graph's tensors as expressions: pulled from the result, so that only what an attention needs is read.

Asked for the element of a node at an index, a view moves the index, a pointwise operation asks its operands and applies the
word of the language that has its name, a constructor (`arange`, `tril`, `full`) knows its element, and anything else is
captured: the node's tensor, read at that index. So a causal mask made of two aranges becomes `kv_idx <= q_idx`, and what
nobody can read becomes a captured tensor of whatever shape it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx

from foci.fusion.constructors import MAKERS, as_held
from foci.fusion.fx_utils import (
    CASTS,
    Call,
    Size,
    as_call,
    example_tensor,
    fixed_number,
    is_tensor,
    is_written,
    node_shape,
    reads_only_shape,
    source_location,
)
from foci.fusion.indices import Index, NoRule, broadcast_index, combine_digits, symbolic_expression
from foci.fusion.is_binary import is_truth
from foci.fusion.materialise import Materialise
from foci.fusion.narrow import may_wrap
from foci.fusion.views import VIEWS, step
from foci.ir import expr as ir
from foci.ir.expr import DType, Expr
from foci.ir.ops import OPS, apply, cast
from foci.ir.torch_functions import TORCH_FUNCTIONS
from foci.ir.trace import Symbol, TraceError, Tracer, element_dtype

__all__ = ["PASSED", "Lift", "stops_gradient"]

# Cheap enough to be evaluated once per score.
POINTWISE: Final = frozenset((
    "add", "sub", "rsub", "mul", "div", "neg", "negative", "abs", "absolute", "sign", "eq", "ne", "lt", "le", "gt", "ge", "less",
    "less_equal", "greater", "greater_equal", "not_equal", "and", "or", "xor", "bitwise_and", "bitwise_or", "bitwise_xor",
    "bitwise_not", "invert", "logical_and", "logical_or", "logical_xor", "logical_not", "not", "where", "masked_fill", "clamp",
    "clip", "clamp_min", "clamp_max", "maximum", "minimum", "max", "min", "floor_divide", "floordiv", "remainder", "mod", "square",
    "reciprocal", "relu", "addcmul", "lerp", "positive", "pos", "isinf", "isnan", "isfinite", "floor", "ceil", "round", "trunc",
    "rpow",
))  # fmt: skip
# Worth a word only where the score itself takes part; of other values the result is captured, as exact as it was.
_OF_SCORES: Final = frozenset((
    *(name for name in OPS if name in TORCH_FUNCTIONS and name not in POINTWISE), "float_power", "gelu", "silu", "softplus", "logsigmoid",
    "leaky_relu", "elu", "softsign", "hardtanh", "relu6", "logaddexp", "hypot", "addcdiv", "tanhshrink", "erfc",
))  # fmt: skip

# What a search upward from a softmax may pass on its way to the product.
PASSED: Final = frozenset(
    {
        *VIEWS, *CASTS, *POINTWISE, *_OF_SCORES, "detach", "dropout", "cat", "hstack", "vstack", "row_stack", "pad", "tril", "triu", "amax",
        "amin", "mean", "logsumexp",
    }
)  # fmt: skip


class Lift:
    """Reads elements of one graph as expressions.

    Args:
        device: of the attention.
        score: called with each product that may be the score and the index asked for; gives the expression, or None where
            the node is an ordinary value.
        on_path: the nodes that depend on the score, which may not be captured.
        grad: gradients will be asked for.

    Attributes:
        tracer: holds the captured example tensors and the symbolic numbers.
        leaves: the captured nodes, by slot.
        copied: those of them that are read from a contiguous copy.
        prices: of values as tensors and as expressions; where there are none, whatever can be read becomes an expression.
    """

    def __init__(
        self, device: torch.device, score: Callable[[fx.Node, Index], Expr | None], on_path: frozenset[fx.Node], *, grad: bool
    ) -> None:
        self.tracer = Tracer(device)
        self.leaves: dict[int, fx.Node] = {}
        self.copied: set[fx.Node] = set()
        self._score, self.on_path, self._grad = score, on_path, grad
        self.prices: Materialise | None = None
        self._slots: dict[fx.Node, int] = {}
        self._numbers: dict[object, Expr] = {}
        self._seen: dict[tuple[fx.Node, Index], Expr] = {}

    def number(self, size: Size) -> Expr:
        """A size as a constant or a run-time number."""
        if isinstance(size, int):
            return ir.const(size)
        key = symbolic_expression(size)
        if key not in self._numbers:
            self._numbers[key] = self.tracer.symbol(size).expr
        return self._numbers[key]

    def element(self, node: fx.Node, index: Index) -> Expr:
        """The element of `node` at `index`.

        Raises:
            NoRule: where a node that depends on the score is outside the language.
        """
        key = (node, index)
        value = self._seen.get(key)
        if value is None:
            value = self._seen[key] = self._element(node, index)
        return value

    def _element(self, node: fx.Node, index: Index) -> Expr:
        score = self._score(node, index)
        if score is not None:
            return score
        tensor = example_tensor(node)
        assert tensor is not None
        if self._grad and stops_gradient(node):
            if node in self.on_path:
                raise NoRule(f"no gradient flows through {node.name}")
            return self.captured(node, index)
        try:
            value = self._computed(node, index)
        except (NoRule, TraceError, TypeError) as error:
            if node in self.on_path:
                raise error if isinstance(error, NoRule) else NoRule(str(error)) from error
            value = None
        if value is None:
            if node in self.on_path:
                call = as_call(node)
                raise NoRule(f"{call.name if call else node.name} is outside the expression language")
            return self.captured(node, index)
        kind = element_dtype(tensor.dtype)
        value = value if value.dtype is kind or {value.dtype, kind} <= {DType.INT32, DType.INT64} else cast(value, kind)
        if self.prices is not None and node not in self.on_path:
            indices = tuple(combine_digits(d, self.number) for d in index)
            choice = self.prices.choose(node, value, indices, self.leaves, self.copied)
            if choice == "copy":
                self.copied.add(node)
            if choice != "inline":
                return self.captured(node, index)
        return value

    def captured(self, node: fx.Node, index: Index) -> Expr:
        """The node's tensor, read at `index`."""
        tensor = example_tensor(node)
        assert tensor is not None
        if node not in self._slots:
            self._slots[node] = self.tracer.slot(tensor)
            self.leaves[self._slots[node]] = node
        return ir.load(self._slots[node], tuple(combine_digits(d, self.number) for d in index), element_dtype(tensor.dtype))

    def _computed(self, node: fx.Node, index: Index) -> Expr | None:
        call = as_call(node)
        if call is None:
            return None
        if call.name in ("gather", "embedding", "index_select", "take_along_dim", "getitem") and self._gathers_gradient(node, call):
            return None
        moved = step(node, index, self.number, self.element)
        if moved is not None:
            return self.element(*moved)
        if is_written(node):
            raise NoRule(f"{node.name} is written in place ({source_location(node)})")
        if may_wrap(node, call):
            return None
        if call.name in MAKERS:
            return MAKERS[call.name](self, node, call, index)
        if call.name == "dropout":
            if call.argument(2, "training", True) is False or fixed_number(call.argument(1, "p", 0.5)) == 0.0:
                return self.element(call.args[0], index)
            raise NoRule("the scores go through a dropout")
        if call.name in CASTS or call.name == "detach":
            return self._cast(node, call, index)
        if call.name == "log" and node not in self.on_path and is_truth(call.argument(0, "input")):
            return self._logarithm(call.argument(0, "input"), index)
        if call.name in POINTWISE or (call.name in _OF_SCORES and self._worthwhile(node)):
            return self._pointwise(call, index)
        return None

    def _gathers_gradient(self, node: fx.Node, call: Call) -> bool:
        """A gather whose gradient is a scatter into a table: torch's own, of the gathered values, is the better one."""
        tensor = example_tensor(node)
        if node in self.on_path or tensor is None or not tensor.requires_grad:
            return False
        if call.name == "getitem":
            entries = call.args[1] if isinstance(call.args[1], (tuple, list)) else (call.args[1],)
            return any(is_tensor(e) for e in entries)
        return True

    def _worthwhile(self, node: fx.Node) -> bool:
        tensor = example_tensor(node)
        return node in self.on_path or (
            tensor is not None and tensor.dim() == 0 and not any(is_tensor(a) and node_shape(a) for a in node.all_input_nodes)
        )

    def _cast(self, node: fx.Node, call: Call, index: Index) -> Expr:
        """A cast to a floating type keeps the value: scores are in the accumulation type, constants round as written."""
        source, target = call.args[0], example_tensor(node)
        assert target is not None
        value = self.element(source, index)
        if target.dtype.is_floating_point and value.dtype is DType.FLOAT:
            return _rounded(value, target.dtype)
        if target.dtype in (torch.int32, torch.int64) and value.dtype.is_integer:
            return value
        return cast(value, element_dtype(target.dtype))

    def _logarithm(self, truth: fx.Node, index: Index) -> Expr:
        """Logarithm of a value that is 0 or 1, which makes a mask to add."""
        value = self.element(truth, broadcast_index(index, node_shape(truth)))
        is_kept = value if value.dtype is DType.BOOL else apply("ne", value, cast(ir.const(False), value.dtype))
        return apply("where", is_kept, 0.0, -math.inf)

    def _pointwise(self, call: Call, index: Index) -> Expr | None:
        if call.name in ("max", "min") and not (len(call.args) == 2 and is_tensor(call.args[1])):
            return None  # a reduction

        def operand(arg: Any) -> Any:
            if is_tensor(arg):
                return Symbol(self.tracer, self.element(arg, broadcast_index(index, node_shape(arg))))
            value = fixed_number(arg)
            return Symbol(self.tracer, self.number(value)) if isinstance(value, torch.SymInt) else value

        args, kwargs = [operand(a) for a in call.args], {k: operand(v) for k, v in call.kwargs.items() if k not in ("out", "inplace")}
        if call.name == "where" and len(args) == 3 and is_tensor(call.args[0]) and _is_method_where(call):
            args = [args[1], args[0], args[2]]
        if not any(isinstance(a, Symbol) for a in (*args, *kwargs.values())):
            return None
        if "input" in kwargs:
            args.insert(0, kwargs.pop("input"))
        if call.name in ("mul", "square", "pow"):
            args = [_widened(a) for a in args]
        result = TORCH_FUNCTIONS[call.name](*args, **kwargs)
        return result.expr if isinstance(result, Symbol) else None


def _widened(value: Any) -> Any:
    """An integer that a product could take beyond 32 bits as one of 64."""
    if isinstance(value, Symbol) and value.expr.dtype is DType.INT32 and value.expr.op != "const":
        return Symbol(value.tracer, cast(value.expr, DType.INT64))
    return value


_LIKE_ANOTHER: Final = frozenset((*CASTS, "expand_as", "view_as", "reshape_as"))
"""Operations whose second tensor only gives dtype or shape."""


def stops_gradient(node: fx.Node) -> bool:
    """Whether a gradient would reach the operands but not the result: detached, or computed without gradients."""
    tensor = example_tensor(node)
    if tensor is None or tensor.requires_grad or not tensor.is_floating_point() or reads_only_shape(node):
        return False
    call = as_call(node)
    first = call is not None and call.name in _LIKE_ANOTHER
    return any((t := example_tensor(arg)) is not None and t.requires_grad for arg in node.all_input_nodes[: 1 if first else None])


def _is_method_where(call: Call) -> bool:
    """`x.where(condition, y)` has the condition second."""
    first, second = example_tensor(call.args[0]), example_tensor(call.args[1])
    return first is not None and first.dtype is not torch.bool and second is not None and second.dtype is torch.bool


def _rounded(value: Expr, dtype: torch.dtype) -> Expr:
    """Round constants to `dtype`: the lowest float32 is -inf in float16. Computed values keep their precision."""
    if value.op == "const" and isinstance(value.value, float):
        return ir.const(as_held(value.value, dtype))
    if value.op == "where":
        return apply("where", value.args[0], *(_rounded(arg, dtype) for arg in value.args[1:]))
    return value
