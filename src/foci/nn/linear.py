"""A linear layer whose storage is padded, so that its products have good sizes whatever its own are."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from foci.compat.torch import are_transforms_open
from foci.environment import autocast_dtype
from foci.nn.fx_leaf import is_traced, leaf
from foci.padding import describe_machine, is_profitable_to_pad
from foci.padding.gemm_times import Fault, Role, Shape
from foci.padding.grouped import mm_into_rows, split_rows
from foci.padding.model import seconds
from foci.padding.strides import LOAD, round_up

__all__ = ["PaddedLinear", "pad_storage"]


class PaddedLinear(torch.nn.Linear):
    """`torch.nn.Linear`, at the speed of the next good size on devices where its own is bad.

    The parameters keep their shapes, in the state dict too; only the memory behind them is padded, with zeros. Eager calls
    multiply the padded memory where that pays, by the measurements of the device. On GPUs their result is contiguous if the
    number of rows is a multiple of eight; else its rows are as far apart as good rows are long. Compiled calls are those of
    `torch.nn.Linear`: `foci.padding` does the rest.

    Where rows of `in_features` elements are no multiple of 16 bytes the weight has gaps between rows, so `weight.view(-1)` is
    torch's error, and so is `torch.nn.utils.parameters_to_vector`, which calls it: use `reshape`, as in
    `torch.cat([p.reshape(-1) for p in layer.parameters()])`. `vector_to_parameters` works; the layer is then a plain
    `torch.nn.Linear` until its state is loaded or it is moved.

    Args:
        in_features, out_features, bias, device, dtype: as torch.nn.Linear's.

    Raises:
        ValueError: by the step of an optimizer with `fused=True`, where rows of `in_features` elements are no multiple of 16 bytes:
            it would overlook the gaps between them.

    Shapes: input `[..., in_features]`, output `[..., out_features]`.

    Example:
        >>> import torch, foci.nn
        >>> layer = foci.nn.PaddedLinear(64, 1023)
        >>> layer.weight.shape, layer(torch.randn(2, 64)).shape
        (torch.Size([1023, 64]), torch.Size([2, 1023]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        pad_storage(self)

    def forward(self, input: Tensor) -> Tensor:
        """`torch.nn.Linear`'s result, through the padded storage where that pays."""
        if is_traced(input):
            return leaf(self, input)  # type: ignore[no-any-return]
        is_padded = not (torch.compiler.is_compiling() or are_transforms_open()) and _is_stored(self)
        if not (is_padded and _is_usual(self, input) and _pays(self, input)):
            return F.linear(input, self.weight, self.bias)
        result: Tensor = _padded_linear(input, self.weight, self.bias)
        return result

    def _apply(self, fn: Any, recurse: bool = True) -> PaddedLinear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        pad_storage(self)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # copies and pickles come without what was behind their parameters
        pad_storage(self)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        pad_storage(self)


def pad_storage(layer: torch.nn.Linear) -> None:
    """Gives a layer's parameters padded memory, in place, where their sizes are bad. They stay the same objects."""
    for parameter in (layer.weight, layer.bias):
        if parameter is None or parameter.device.type == "meta" or not parameter.is_floating_point():
            continue
        sizes = _good_sizes(parameter)
        if sizes != tuple(parameter.shape) and not _has_storage(parameter):
            storage = parameter.new_zeros(sizes)
            within = storage[tuple(slice(size) for size in parameter.shape)]
            with torch.no_grad():
                within.copy_(parameter)
            parameter.data = within
            parameter._foci_storage = _memory(parameter)  # type: ignore[attr-defined]
            if not parameter.is_contiguous():
                _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    """Once a process, when the first rows with gaps between them are made."""
    register_optimizer_step_pre_hook(_refuse_fused)


def _refuse_fused(optimizer: Any, arguments: Any, keywords: Any) -> None:
    """Fused optimizers take every parameter for dense memory: on CPUs torch does not check it, and writes elsewhere."""
    for group in optimizer.param_groups:
        if group.get("fused") and any(not p.is_contiguous() and _has_storage(p) for p in group["params"]):
            raise ValueError(
                "fused must be False or None for a PaddedLinear whose in_features is no multiple of 16 bytes: "
                "its weight has gaps between rows, which fused optimizers overlook"
            )


def _good_sizes(parameter: Tensor) -> tuple[int, ...]:
    return tuple(round_up(size, LOAD // parameter.element_size()) for size in parameter.shape)


def _has_storage(parameter: Tensor) -> bool:
    """Whether the padding is still behind a parameter: memory that somebody else gave it may hold anything."""
    padded = getattr(parameter, "_foci_storage", None)
    return padded is not None and padded == _memory(parameter) and parameter.stride() == _strides(parameter)


def _memory(parameter: Tensor) -> tuple[int, int]:
    """Where a parameter lies, and bytes of the storage: what was freed may be given away again, in other pieces."""
    return parameter.data_ptr(), parameter.untyped_storage().nbytes()


def _strides(parameter: Tensor) -> tuple[int, ...]:
    return torch.empty(_good_sizes(parameter), device="meta").stride()


def _is_stored(layer: PaddedLinear) -> bool:
    parameters = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    return all(_good_sizes(p) == tuple(p.shape) or _has_storage(p) for p in parameters)


def _is_usual(layer: PaddedLinear, input: Tensor) -> bool:
    """Whether `F.linear` takes the input. It says what is wrong with any other, which padded storage might hide."""
    is_cast = autocast_dtype(input.device.type) is not None
    is_of_size = input.dim() > 0 and input.shape[-1] == layer.in_features
    return is_of_size and input.device == layer.weight.device and (is_cast or input.dtype == layer.weight.dtype)


def _pays(layer: PaddedLinear, input: Tensor) -> bool:
    dtype = autocast_dtype(input.device.type) or input.dtype
    rows = input.numel() // max(1, layer.in_features)
    return _is_faster(rows, layer.in_features, layer.out_features, dtype, describe_machine(input.device))


@functools.lru_cache(maxsize=1024)
def _is_faster(rows: int, k: int, n: int, dtype: torch.dtype, machine: Any) -> bool:
    """Whether the product, with copies of what comes from outside, is faster with good sizes."""
    kind = machine.kind(dtype)
    if machine.table is None or kind is None or rows == 0:
        return False
    faults: dict[Role, Fault] = {}
    copied = 0
    read: tuple[Role, ...] = ("a", "bt")
    written: tuple[Role, ...] = ("out",)
    for roles, length in ((read, k), (written, n)):
        alignment = dtype.itemsize
        while alignment < LOAD and length * dtype.itemsize % (2 * alignment) == 0:
            alignment *= 2
        if alignment < LOAD:
            faults.update(dict.fromkeys(roles, Fault(alignment, padded=False)))
            copied += 2 * rows * length * dtype.itemsize
    shape = Shape(1, rows, n, k)
    before, after = (seconds(machine.table, kind, shape, role_faults) for role_faults in (faults, {}))
    return before is not None and after is not None and is_profitable_to_pad(before, after, copied / machine.table.bandwidth)


def _whole(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return parameter.as_strided(_good_sizes(parameter), _strides(parameter)).to(dtype)


def _grown(x: Tensor, columns: int) -> Tensor:
    """With columns of zeros behind it, its rows aligned."""
    size = x.shape[-1]
    if columns == size:
        return x
    if x.requires_grad and torch.is_grad_enabled():
        return F.pad(x, (0, columns - size))
    out = x.new_empty((*x.shape[:-1], columns))  # F.pad would write all of it twice
    out[..., :size], out[..., size:] = x, 0
    return out


def _is_written_by_rows(rows: Tensor, columns: int) -> bool:
    """Whether a result can be written where it lies: whoever reads it would copy rows that lie apart, as softmax does."""
    return rows.is_cuda and split_rows(rows.shape[0], columns, rows.element_size()) is not None


class _PaddedLinear(torch.autograd.Function):
    """x W^T + b on padded memory. Backward is made of differentiable operations, so second derivatives go through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype, ctx.bias = dtype, None if bias is None else bias.dtype
        padded_weight = _whole(weight, dtype)
        rows = _grown(x.reshape(-1, x.shape[-1]).to(dtype), padded_weight.shape[1])
        sizes, columns = (*x.shape[:-1], weight.shape[0]), padded_weight.shape[0]
        if columns != weight.shape[0] and _is_written_by_rows(rows, weight.shape[0]):
            columns = weight.shape[0]
            out = mm_into_rows(rows, padded_weight[:columns].t(), None if bias is None else bias.to(dtype))
        else:
            out = rows @ padded_weight.t() if bias is None else torch.addmm(_whole(bias, dtype), rows, padded_weight.t())
        strides = torch.empty((*x.shape[:-1], columns), device="meta").stride()
        # no view: writing to it in place would be an error
        return out.new_empty(0).set_(out.untyped_storage(), 0, sizes, strides)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        padded_weight = _grown_weight(weight, ctx.dtype)
        rows = _grown(x.reshape(-1, x.shape[-1]).to(ctx.dtype), padded_weight.shape[1])
        gradient = _grown(gradients[0].reshape(-1, weight.shape[0]).to(ctx.dtype), padded_weight.shape[0])
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ padded_weight)[:, : x.shape[-1]].reshape(x.shape).to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (gradient.t() @ rows)[: weight.shape[0], : weight.shape[1]].to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0)[: weight.shape[0]].to(ctx.bias)
        return of_x, of_weight, of_bias, None


def _grown_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The padded memory itself, but where a derivative of it is asked for."""
    if not torch.is_grad_enabled() and _has_storage(weight):
        return _whole(weight, dtype)
    rows, columns = _good_sizes(weight)
    return F.pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0])).to(dtype)


def _padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = autocast_dtype(x.device.type) or x.dtype
    result: Tensor = _PaddedLinear.apply(x, weight, bias, dtype)  # type: ignore[no-untyped-call]
    return result
