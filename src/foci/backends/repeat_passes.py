"""A kernel's passes to time, as `foci.attention` runs them after its first call: no launch is built anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from foci.backends.contract import Given, Kernel
from foci.problem import Cotangents, Operands, Program, Results

__all__ = ["repeat_backward", "repeat_forward"]


def repeat_forward(operands: Operands, kernel: Kernel) -> Callable[[], object]:
    """Run the forward pass once; return a function that repeats it."""
    program = Program()
    call = replace(operands, program=program)
    kernel.forward(call)
    return lambda: kernel.launch_forward(program, call.tensors, call.optional) or kernel.forward(call)


def repeat_backward(operands: Operands, results: Results, cotangents: Cotangents, kernel: Kernel) -> Callable[[], object]:
    """Run the backward pass once; return a function that repeats it."""
    program, bwd_args = Program(), Given(results.out, results.lse, cotangents.out, cotangents.lse)
    call = replace(operands, program=program)
    kernel.backward(call, results, cotangents)
    return lambda: kernel.launch_backward(program, call.tensors, call.optional, bwd_args) or kernel.backward(call, results, cotangents)
