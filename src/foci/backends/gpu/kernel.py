"""A plan made runnable: one forward and one backward pass, whose launches are repeated where a call is known."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from foci.backends.contract import Given, Kernel, Unbuildable
from foci.backends.gpu.allocate import no_gradients
from foci.backends.gpu.aux_outputs import WeightCotangents, add_aux_outputs, add_weight_cotangents, weight_cotangents
from foci.backends.gpu.captured_grad import find_query_tile_bias
from foci.backends.gpu.compiling import Turn, compile_in_parallel
from foci.backends.gpu.launch_builder import LaunchBuilder
from foci.backends.gpu.launch_cache import RepeatablePasses
from foci.backends.gpu.passes import PassBuilder
from foci.backends.gpu.precompile import (
    PrecompileBuilder,
    meta_sequences,
    precompile_backward,
    precompile_other_lengths,
    precompile_packed,
)
from foci.backends.gpu.schedules import Schedule
from foci.backends.gpu.stream_state import current_stream
from foci.backends.gpu.symbolic_tokens import count_tokens
from foci.backends.gpu.tensor_descriptors import without_overlap
from foci.backends.gpu.tile_tables import Sequences, operand_sequences
from foci.backends.row_gradients import add_row_gradients
from foci.compat.cuda import current_device
from foci.problem import Cotangents, Gradients, Operands, Results

__all__ = ["BackwardPass", "ForwardPass", "GpuKernel", "is_elsewhere"]


class ForwardPass(Protocol):
    """Launches of a forward."""

    def build(self, operands: Operands, sequences: Sequences, launches: LaunchBuilder, /) -> Results:
        """Allocate the results and add the launches."""
        ...

    def of_other_lengths(self) -> Iterable[ForwardPass]:
        """Forwards that the problem's calls of other lengths may take; those that compile in a moment are left out."""
        ...


class BackwardPass(Protocol):
    """Launches of a backward."""

    def build(
        self, operands: Operands, bwd_args: Given, sequences: Sequences, launches: LaunchBuilder, flow: WeightCotangents | None, /
    ) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
        """Allocate the gradients and add the launches.

        Returns:
            (the needed ones of dq, dk and dv; gradients of captured tensors, none if no captured tensor requires grad).
        """
        ...


class GpuKernel(RepeatablePasses, Kernel):
    """Forward and backward of a plan, by any two passes: a backend chooses them."""

    def __init__(self, builder: PassBuilder, forward: ForwardPass, backward: BackwardPass) -> None:
        super().__init__(builder)
        self.forward_pass = forward
        self.backward_pass = backward

    @property
    def schedules(self) -> dict[str, Schedule]:
        """Schedules by kernel, see `PassBuilder.schedule`."""
        return self.builder.schedules

    def forward(self, operands: Operands, /) -> Results:
        """Attention of the operands."""
        if is_elsewhere(operands.query):
            with torch.cuda.device(operands.query.device):
                return self.forward(operands)
        inputs = (*operands.tensors, operands.seed)
        precompile_packed(self, operands)
        sequences, asked = operand_sequences(operands), self.builder.problem.formula.outputs
        if asked.column_sums or asked.weights:
            return add_aux_outputs(
                self.builder, operands, sequences, self.forward_pass.build(operands, sequences, LaunchBuilder(inputs, None))
            )
        key = self.pass_key(operands)
        launches = LaunchBuilder(inputs, None if key is None else current_stream(operands.query))
        with compile_in_parallel():
            results = self.forward_pass.build(operands, sequences, launches)
            launches.finish(count_tokens(operands))
            precompile_other_lengths(self, operands)  # before: what is added last compiles first
            precompile_backward(self, operands, results)
        if key is not None and (built := launches.built) is not None:
            self.keep(key, operands, sequences, built, self.results)
        return results

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        """Gradients of the operands."""
        if is_elsewhere(operands.query):
            with torch.cuda.device(operands.query.device):
                return self.backward(operands, results, cotangents)
        if 0 in (operands.query.numel(), operands.key.shape[2], operands.value.numel()):
            return no_gradients(operands, self.builder.problem)
        sequences = operand_sequences(operands)
        grad_lse, flow = cotangents.lse, weight_cotangents(operands, cotangents, sequences)
        if flow is not None:
            cotangents = add_weight_cotangents(self.builder, operands, sequences, results, cotangents, flow)
        dlse = None if cotangents.lse is None else cotangents.lse.to(torch.float32).contiguous()
        bwd_args = Given(results.out, results.lse.contiguous(), without_overlap(cotangents.out, results.out), dlse)
        key = self.pass_key(operands, bwd_args) if self._is_all_launches(operands, flow) else None
        inputs = (*operands.tensors, operands.seed, *bwd_args)
        launches = LaunchBuilder(inputs, None if key is None else current_stream(operands.query))
        with nullcontext() if self.needs_capture_grads else compile_in_parallel():
            grads, captures = self.backward_pass.build(operands, bwd_args, sequences, launches, flow)
            launches.finish(count_tokens(operands))
        if key is not None and (built := launches.built) is not None:
            self.keep(key, operands, sequences, built, self.gradients + self.needs_capture_grads)
        rest = iter(grads)
        dq, dk, dv = (next(rest) if on else None for on in self.wanted)
        gradients = Gradients(dq, dk, dv, captures or (None,) * len(operands.captures))
        return add_row_gradients(gradients, self.builder.problem, operands, results.lse, grad_lse)

    def precompile(self, calls: Iterable[tuple[Kernel, Operands]], /) -> None:
        """See `foci.backends.contract.Kernel`. Operands have query, key, value and offsets on the device "meta"."""
        with compile_in_parallel():
            for kernel, operands in calls:
                if not isinstance(kernel, GpuKernel):
                    continue
                try:
                    kernel._build_ahead(operands)
                except Unbuildable:  # a call of these lengths says so
                    continue
                except Exception as error:  # one text for all lengths, which Python shows once
                    warnings.warn(
                        "foci cannot compile some kernels for other lengths ahead, so the first call that needs them waits: "
                        f"{type(error).__name__}: {error}",
                        RuntimeWarning,
                        stacklevel=2,
                    )

    def _build_ahead(self, operands: Operands) -> None:
        sequences = meta_sequences(operands)
        self.build_backward_ahead(operands, sequences, self.forward_pass.build(operands, sequences, PrecompileBuilder(Turn.FORWARD)))

    def build_backward_ahead(self, operands: Operands, sequences: Sequences, results: Results) -> None:
        """Compile ahead the kernels of a backward, if the problem has one. Tensors are on the device "meta"."""
        if self.gradients or self.needs_capture_grads:
            # gradients of captured tensors are summed by torch's operations, which take no memory on the device "meta"
            wanted = self.builder.problem.capture_grads
            captures = tuple(t.to("meta") if on else t for t, on in zip(operands.captures, wanted, strict=True))
            bwd_args = Given(results.out, results.lse, results.out, None)
            self.backward_pass.build(replace(operands, captures=captures), bwd_args, sequences, PrecompileBuilder(Turn.BACKWARD), None)

    def _is_all_launches(self, operands: Operands, flow: WeightCotangents | None) -> bool:
        """Whether a launch list holds all of a backward: most gradients of captured tensors take torch operations between launches."""
        if flow is not None or not self.needs_capture_grads:
            return flow is None
        is_one = self.builder.problem.capture_grads.count(True) == 1 and operands.cu_q is None
        return is_one and find_query_tile_bias(self.builder, operands) is not None


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether the tensor is on another GPU than the current one, on which Triton launches."""
    return tensor.is_cuda and tensor.get_device() != current_device()
