"""A plan made runnable on the CPU: passes of native code, which the calls of a program share."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from foci.backends.contract import Given, Inputs, Kernel, Plan
from foci.backends.cpu import build
from foci.backends.cpu.native_call import Addresses, Entry, NativeCall, OtherStrides
from foci.backends.cpu.passes import BackwardPass, ForwardPass, OffsetValues
from foci.backends.cpu.source import backward_source, forward_source
from foci.backends.row_gradients import add_row_gradients
from foci.backends.sequences import is_empty, without_keys
from foci.problem import Cotangents, Gradients, Operands, OptionalTensors, Program, Results

__all__ = ["CpuKernel"]


class CpuKernel(Kernel):
    """The native kernels of one plan. The backward is compiled when it is first asked for.

    Calls of a program share a forward, and a backward for each set of strides, for the offsets of the last call. Offsets are compared by
    value: numpy changes memory that it shares without a new version, and offsets that changed must be checked.
    """

    def __init__(self, plan: Plan) -> None:
        self.problem = plan.problem
        self._backward: Entry | None = None
        library = build.load(forward_source(plan.problem))
        self._forward: Entry = library.foci_forward
        self._columns: Entry | None = library.foci_columns if plan.problem.formula.outputs.column_sums else None

    def forward(self, operands: Operands, /) -> Results:
        """Computed by the compiled kernel; without keys, zeros and logsumexp of minus infinity."""
        outputs, o = self.problem.formula.outputs, operands
        if is_empty(o):
            return without_keys(o, outputs)
        forward = ForwardPass(self._forward, o, _read_offsets(o.tensors, o.optional), has_row_max=outputs.row_max)
        # each call warns of offsets that end early
        is_warned_of = forward.call.ends_early(of_keys=False) or forward.call.ends_early(of_keys=True)
        if o.program is not None and self._columns is None and not is_warned_of:
            o.program.launches.add((self,), (), forward)
        out, lse, *most = forward.run(o.tensors, o.optional)
        if forward.is_packed:
            out, lse = out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
        column_sums = None
        if self._columns is not None:
            column_sums = lse.new_zeros((*lse.shape[:2], o.key.shape[2]))
            addresses = Addresses(out.data_ptr(), lse=lse.data_ptr(), column_sums=column_sums.data_ptr())
            forward.call.run(self._columns, forward.geometry, o.tensors, o.optional, addresses)
        return Results(out, lse, most[0] if most else None, column_sums)

    def launch_forward(self, program: Program, tensors: Inputs, optional: OptionalTensors, /) -> list[Tensor] | None:
        """See `foci.backends.contract.Kernel`."""
        forward: ForwardPass | None = program.launches.find((self,))
        if forward is None or (optional.cu_q is not None and forward.offset_values != _read_offsets(tensors, optional)):
            return None
        return forward.run(tensors, optional)

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        """Gradients of the operands."""
        problem, o = self.problem, operands
        if self._backward is None:
            self._backward = build.load(backward_source(problem)).foci_backward
        if is_empty(o):
            return self._zeros(o)
        bwd_args = Given(results.out, results.lse.contiguous(), cotangents.out, _as_rows(cotangents.lse))
        backward = BackwardPass(self._backward, problem, o, bwd_args, _read_offsets(o.tensors, o.optional))
        columns = _as_rows(cotangents.column_sums)
        if columns is not None:
            bwd_args = bwd_args._replace(dlse=self._with_column_sums(backward.call, o, bwd_args, columns))
        if o.program is not None and columns is None and not self._has_row_gradients(cotangents.lse):
            o.program.launches.add((self, *_find_strides(o.tensors, o.optional, bwd_args)), (), backward)
        query, key, value, *captures = backward.run(o.tensors, o.optional, bwd_args, columns)
        if backward.is_packed:
            query, key, value = (None if t is None else t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
        return add_row_gradients(Gradients(query, key, value, tuple(captures)), problem, o, results.lse, cotangents.lse)

    def launch_backward(self, program: Program, tensors: Inputs, optional: OptionalTensors, bwd_args: Given, /) -> list[Tensor] | None:
        """See `foci.backends.contract.Kernel`."""
        if not bwd_args.lse.is_contiguous() or self._has_row_gradients(bwd_args.dlse):
            return None
        backward: BackwardPass | None = program.launches.find((self, *_find_strides(tensors, optional, bwd_args)))
        if backward is None or (optional.cu_q is not None and backward.offset_values != _read_offsets(tensors, optional)):
            return None
        bwd_args = bwd_args._replace(dlse=_as_rows(bwd_args.dlse))
        return [t for t in backward.run(tensors, optional, bwd_args) if t is not None]

    def _has_row_gradients(self, dlse: Tensor | None) -> bool:
        """Whether gradients of captured tensors are computed beside the native call, see `foci.backends.row_gradients`."""
        return dlse is not None and any(self.problem.capture_grads)

    def _with_column_sums(self, call: NativeCall, operands: Operands, bwd_args: Given, columns: Tensor) -> Tensor:
        """The gradient of lse that the kernel takes where column sums have a gradient: what every weight of a row gets is in it."""
        assert self._columns is not None
        lse, dlse = bwd_args.lse, bwd_args.dlse
        dots = torch.zeros_like(lse)
        addresses = Addresses(bwd_args.out.data_ptr(), lse=lse.data_ptr(), row_max=dots.data_ptr(), grad_column_sums=columns.data_ptr())
        call.run(self._columns, call.geometry(OtherStrides(bwd_args.out.stride())), operands.tensors, operands.optional, addresses)
        return dots.neg() if dlse is None else dlse - dots

    def _zeros(self, operands: Operands) -> Gradients:
        p = self.problem
        tensors, needs_grad = (operands.query, operands.key, operands.value), (p.query_grad, p.key_grad, p.value_grad)
        query, key, value = (torch.zeros_like(t) if want else None for t, want in zip(tensors, needs_grad, strict=True))
        captures = tuple(torch.zeros_like(t) if want else None for t, want in zip(operands.captures, p.capture_grads, strict=True))
        return Gradients(query, key, value, captures)


def _as_rows(gradient: Tensor | None) -> Tensor | None:
    """A gradient of a row or column statistic as the native code reads it."""
    return None if gradient is None else gradient.to(torch.float32).contiguous()


def _read_offsets(tensors: Inputs, optional: OptionalTensors) -> OffsetValues:
    """The sequences of a packed call. Query, key and value, the first of `tensors`, are [1, H, T, D] or [T, H, D]."""
    offsets = optional.offsets
    if offsets is None:
        return ()
    query, key = tensors[:2]
    assert query is not None
    assert key is not None
    tokens = -2 if query.dim() == 4 else 0
    return (query.size(tokens), key.size(tokens), *map(_read_values, offsets))


def _read_values(tensor: Tensor | None) -> bytes | None:
    if tensor is None:
        return None
    values = tensor.contiguous()
    return ctypes.string_at(values.data_ptr(), values.nbytes)


def _find_strides(tensors: Inputs, optional: OptionalTensors, bwd_args: Given) -> tuple[object, ...]:
    """Strides of a backward's tensors: saved ones may have been unpacked with others than the program's. Of packed tensors those of
    [T, H, D]."""
    strides = [None if t is None else t.stride() for t in (bwd_args.out, bwd_args.dout, *tensors, optional.blocks)]
    if optional.cu_q is not None and bwd_args.out.dim() == 4:
        strides[:5] = [(s[2], s[1], s[3]) for s in strides[:5] if s is not None]
    return tuple(strides)
