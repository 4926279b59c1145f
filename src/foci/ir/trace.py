"""Python function -> expression: the user's function runs once on symbols that record what it does.

A `Symbol` stands for a number, or for a row of a captured tensor (`bias[b]`): an expression together with the axes that
are still free. Element-wise functions broadcast axes as torch does, indexing substitutes them, reductions bind them.
Functions of ordinary tensors alone, `table.exp()`, run as usual: their result is what gets captured.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foci.compat.fake import is_making_fakes
from foci.compat.torch import disabled_torch_function, enabled_torch_function, has_tangent, is_transformed
from foci.ir import expr as ir
from foci.ir.expr import DType, Expr
from foci.ir.narrow import is_narrow
from foci.ir.ops import as_expr, cast
from foci.ir.random_calls import draws_random_numbers
from foci.ir.user_lines import PYTHON_ERRORS, closed_over, complaint, definition, find_location

__all__ = [
    "CONSTRUCTORS",
    "GEOMETRY",
    "NUMBERS",
    "SYMBOLIC_BASE",
    "Axis",
    "Symbol",
    "TraceError",
    "Tracer",
    "element_dtype",
    "is_numpy_number",
    "length_symbol",
]

SYMBOLIC_BASE: Final = 1_000_000
"""Slots of `param` from here on stand for symbolic integers until `foci.trace_functions` numbers them."""

_DTYPES: Final = {
    torch.bool: DType.BOOL,
    torch.uint8: DType.INT32,
    torch.int8: DType.INT32,
    torch.int16: DType.INT32,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
    torch.float16: DType.FLOAT,
    torch.bfloat16: DType.FLOAT,
    torch.float32: DType.FLOAT,
    torch.float64: DType.FLOAT,
}
_TORCH_DTYPES: Final = {DType.BOOL: torch.bool, DType.INT32: torch.int32, DType.INT64: torch.int64, DType.FLOAT: torch.float32}
NUMBERS: Final = (bool, int, float, torch.SymInt, torch.SymFloat)


class TraceError(TypeError):
    """A score or mask function does something the expression language has no word for."""


def element_dtype(dtype: torch.dtype) -> DType:
    """The kind of number that elements of a captured tensor become.

    Raises:
        TypeError: for complex and other dtypes that cannot be captured.
    """
    if dtype not in _DTYPES:
        raise TypeError(f"a captured tensor has dtype {dtype}; it must be one of {', '.join(str(d) for d in _DTYPES)}")
    return _DTYPES[dtype]


@dataclass(frozen=True)
class Axis:
    """A free dimension of a row: its placeholder in the expression, its length as an expression and as a number."""

    index: Expr
    extent: Expr
    length: int


def _operator(name: str, *, reflected: bool = False) -> Callable[..., Any]:
    """The method of a Python operator: a word of the vocabulary."""

    def method(self: Symbol, *operands: Any) -> Any:
        from foci.ir.torch_functions import TORCH_FUNCTIONS

        return TORCH_FUNCTIONS[name](*operands, self) if reflected else TORCH_FUNCTIONS[name](self, *operands)

    return method


class Symbol:
    """Value that a score or mask function computes with. Behaves like a 0-d tensor, or like a row of a captured one.

    Attributes:
        tracer: of the function.
        expr: its value.
        axes: its dimensions.
        narrow: torch's dtype of integers of 8 or 16 bits, whose arithmetic wraps; None for all others, which `expr` knows.
    """

    __slots__ = ("axes", "expr", "narrow", "tracer")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tracer: Tracer, expr: Expr, axes: tuple[Axis, ...] = (), narrow: torch.dtype | None = None) -> None:
        self.tracer = tracer
        self.expr = expr
        self.axes = axes
        self.narrow = narrow if is_narrow(narrow) else None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        from foci.ir.torch_functions import TORCH_FUNCTIONS

        if name not in TORCH_FUNCTIONS:
            raise TraceError(complaint(f"Tensor.{name}"))
        if name == "where":  # the method's first argument is what torch.where has second
            return lambda condition, other: _spoken(name, TORCH_FUNCTIONS[name], (condition, self, other), {})
        return lambda *args, **kwargs: _spoken(name, TORCH_FUNCTIONS[name], (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Symbol:
        return self.tracer.index(self, index)

    __add__, __radd__ = _operator("add"), _operator("add", reflected=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", reflected=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", reflected=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", reflected=True)
    __floordiv__, __rfloordiv__ = _operator("floor_divide"), _operator("floor_divide", reflected=True)
    __mod__, __rmod__ = _operator("remainder"), _operator("remainder", reflected=True)
    __pow__, __rpow__ = _operator("pow"), _operator("pow", reflected=True)
    __and__, __rand__ = _operator("bitwise_and"), _operator("bitwise_and", reflected=True)
    __or__, __ror__ = _operator("bitwise_or"), _operator("bitwise_or", reflected=True)
    __xor__, __rxor__ = _operator("bitwise_xor"), _operator("bitwise_xor", reflected=True)
    __lshift__, __rlshift__ = _operator("bitwise_left_shift"), _operator("bitwise_left_shift", reflected=True)
    __rshift__, __rrshift__ = _operator("bitwise_right_shift"), _operator("bitwise_right_shift", reflected=True)
    __matmul__, __rmatmul__ = _operator("matmul"), _operator("matmul", reflected=True)
    __eq__ = _operator("eq")
    __ne__ = _operator("ne")
    __lt__ = _operator("lt")
    __le__ = _operator("le")
    __gt__ = _operator("gt")
    __ge__ = _operator("ge")
    __neg__ = _operator("neg")
    __abs__ = _operator("abs")
    __invert__ = _operator("bitwise_not")
    __pos__ = _operator("clone")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that torch would have."""
        return self.narrow or _TORCH_DTYPES[self.expr.dtype]

    @property
    def device(self) -> torch.device:
        """Device of the call."""
        return self.tracer.device

    @property
    def shape(self) -> torch.Size:
        """The lengths of the axes that are still free."""
        return torch.Size([axis.length for axis in self.axes])

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.axes)

    @property
    def requires_grad(self) -> bool:
        """False: gradients are derived, not recorded."""
        return False

    def dim(self) -> int:
        """Number of dimensions, as `ndim`."""
        return len(self.axes)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or its length in one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def __bool__(self) -> bool:
        raise TraceError(
            complaint("a Python `if`, `and`, `or`, `not`, `min` or `max`", "use torch.where, &, |, ~, torch.minimum, torch.maximum")
        )

    def __iter__(self) -> Any:
        raise TraceError(complaint("iteration"))

    def __index__(self) -> int:
        raise TraceError(complaint("a conversion to a Python integer", "index a tensor with the symbol instead"))

    __array_ufunc__ = None  # NumPy's numbers leave arithmetic to the symbol

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TraceError(complaint("a NumPy array", "capture a tensor, as of torch.from_numpy"))

    def __float__(self) -> float:
        raise TraceError(complaint("a conversion to a Python number (the math module)", "use the function of torch of that name"))

    __int__ = __index__

    def __repr__(self) -> str:
        return f"Symbol({self.expr!r}{', shape=' + str(list(self.shape)) if self.axes else ''})"


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return [value]


def _dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from foci.ir.torch_functions import TORCH_FUNCTIONS

    name = str(getattr(func, "_opname", None) or getattr(func, "__name__", func))
    packet = getattr(func, "overloadpacket", None)
    if packet is not None:
        name = packet.__name__
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        name = name[1:] if name in ("rmul", "rand", "ror", "rxor") else name
    word = TORCH_FUNCTIONS.get(name) or TORCH_FUNCTIONS.get(name.removeprefix("special_"))
    if word is None:
        raise TraceError(complaint(f"torch.{name}"))
    if func is Tensor.where:
        args = (args[1], args[0], *args[2:])
    return _spoken(name, word, args, kwargs)


def _spoken(name: str, word: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The word's meaning; arguments that it does not know are an error of the user's function."""
    try:
        return word(*args, **kwargs)
    except TypeError as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(complaint(f"torch.{name} with these arguments ({error})", "leave out what is not computed with")) from error


class _Record(TorchFunctionMode):
    """Sees every torch call while a function is traced, so that indexing an ordinary tensor with a symbol works."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = _leaves(args) + _leaves(list(kwargs.values()))
        if any(isinstance(leaf, Symbol) for leaf in leaves):
            return _dispatch(func, args, kwargs)
        active = _local.active
        if active and draws_random_numbers(func, args, kwargs):
            raise TraceError(complaint(f"torch.{func.__name__}, a random number,", "draw it outside and capture the tensor"))
        try:
            result = func(*args, **kwargs)
        except IndexError as error:
            if not active:
                raise
            raise TraceError(complaint(str(error), "use an index within the dimension")) from error
        if active and not _is_the_same_each_time(func, result, leaves):
            active[-1].reads_values = True
        return result


GEOMETRY: Final = frozenset(("__get__", "__len__", "dim", "is_floating_point", "ndimension", "numel", "promote_types", "size"))
"""Names of what asks for nothing but shapes and dtypes. Tracing itself calls `promote_types`."""
CONSTRUCTORS: Final = frozenset(("arange", "full", "ones", "scalar_tensor", "tensor", "zeros"))


def _is_the_same_each_time(func: Callable[..., Any], result: Any, leaves: list[Any]) -> bool:
    """Whether a call without symbols says nothing but what the shapes and dtypes of tensors say, or makes a tensor of numbers."""
    name = getattr(func, "__name__", "")
    if name in GEOMETRY:
        return not isinstance(result, bool) or name == "is_floating_point"
    return name in CONSTRUCTORS and not any(isinstance(leaf, Tensor) for leaf in leaves)


class _Local(threading.local):
    """The tracers at work in a thread, the innermost last."""

    def __init__(self) -> None:
        self.active: list[Tracer] = []


_local = _Local()


def length_symbol(name: str) -> Any:
    """The length `q_len` or `kv_len` of the current sequence, inside a function that is being traced.

    Raises:
        RuntimeError: outside a score or mask function.
    """
    active = _local.active
    if active:
        return Symbol(active[-1], ir.variable(name))
    if is_making_fakes():
        return torch.zeros((), dtype=torch.int32)  # torch.compile only looks at the shape
    raise RuntimeError(f"{name}() has a value only inside a score or mask function that foci runs")


class Tracer:
    """Traces functions into expressions over one list of captured tensors.

    Attributes:
        tensors: captured tensors by slot.
        symbolic: symbolic integers by slot less `SYMBOLIC_BASE`.
        reads_values: whether a function may have read what a tensor holds: what was traced is not what the next trace would be.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: list[Tensor] = []
        self.symbolic: list[Any] = []
        self.reads_values = False
        self._slots: dict[int, int] = {}
        self._fresh = 0

    def trace(self, function: Callable[..., Any], variables: Sequence[str]) -> Expr:
        """The expression `function` computes of the variables.

        Raises:
            TraceError: for an operation outside the language, with the operation and the user's file and line.
        """
        _local.active.append(self)
        try:
            # whoever calls may have turned off what symbols stand on
            with enabled_torch_function(), _Record():
                result = function(*(Symbol(self, ir.variable(name)) for name in variables))
                while isinstance(result, (tuple, list)) and len(result) == 1:
                    result = result[0]
                symbol = self._returned(function, result)
        except TypeError as error:
            if isinstance(error, TraceError):
                raise
            for said, what, instead in PYTHON_ERRORS:
                if said in str(error):
                    raise TraceError(complaint(what, instead, find_location(error.__traceback__))) from error
            if _takes(function, len(variables)):
                raise
            kind = "score" if variables[0] == "score" else "mask"
            raise TraceError(
                f"{definition(function)}a {kind} function takes ({', '.join(variables)}); {_name(function)} does not: {error}"
            ) from error
        finally:
            _local.active.pop()
        if symbol.axes:
            raise TraceError(
                f"{definition(function)}{_name(function)} returned a row of shape {list(symbol.shape)}; it must return one number for each "
                f"pair of positions: index what it closes over, such as {closed_over(function)}[{variables[-3]}], or sum it"
            )
        return symbol.expr

    def _returned(self, function: Callable[..., Any], result: Any) -> Symbol:
        if not isinstance(result, (Symbol, Tensor, *NUMBERS)) and not is_numpy_number(result):
            raise TraceError(
                f"{definition(function)}{_name(function)} returned {type(result).__name__}; "
                "it must return one number for each pair of positions"
            )
        return self.symbol(result)

    def symbol(self, value: Any) -> Symbol:
        """A number, a tensor or a symbol as a symbol.

        Raises:
            TraceError: for anything else.
        """
        if isinstance(value, Symbol):
            return value
        if isinstance(value, (bool, int, float)):
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                raise TraceError(complaint(f"the integer {value:.6g}", "write a number of 64 bits, or a float"))
            return Symbol(self, ir.const(value))
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            self.symbolic.append(value)
            kind = DType.INT32 if isinstance(value, torch.SymInt) else DType.FLOAT
            return Symbol(self, ir.param(SYMBOLIC_BASE + len(self.symbolic) - 1, kind))
        if isinstance(value, Tensor):
            with disabled_torch_function():
                number = value.item() if _is_plain_number(value) else None
            if number is not None:
                return Symbol(self, cast(as_expr(number), element_dtype(value.dtype)), narrow=value.dtype)
            return self.index(value, ())
        if is_numpy_number(value):
            return Symbol(self, ir.const(value.item()))
        raise TraceError(complaint(f"a value of type {type(value).__name__}"))

    def fresh_axis(self, extent: Expr, length: int) -> Axis:
        """An axis that no other expression has."""
        self._fresh += 1
        return Axis(ir.axis(-self._fresh), extent, length)

    def slot(self, tensor: Tensor) -> int:
        """The slot of a captured tensor, a new one the first time it is seen."""
        number = self._slots.get(id(tensor))
        if number is None:
            number = self._slots[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return number

    def index(self, source: Tensor | Symbol, index: Any) -> Symbol:
        """`source[index]` with torch's rules for integers, rows, slices, `...` and `None`."""
        from foci.ir.indexing import index_symbol

        with disabled_torch_function():
            return index_symbol(self, source, index if isinstance(index, tuple) else (index,))


def _is_plain_number(tensor: Tensor) -> bool:
    # Read on the host at once: a scalar the function itself made, or a constant. Never a traced or learned one.
    return (
        type(tensor) is Tensor
        and tensor.dim() == 0
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not is_transformed(tensor)
        and not has_tangent(tensor)
        and not is_making_fakes()
    )


def is_numpy_number(value: Any) -> bool:
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and isinstance(value.item(), (bool, int, float))


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a builtin has no signature
        return True
    return True


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
