"""The backward pass's kernels, compiled while the forward pass is compiled, launched and followed by whatever comes between."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foci.backends.contract import Given, Inputs
from foci.backends.triton.compiling import is_new, launch_ahead
from foci.backends.triton.recorder import Recorder, plain_arguments
from foci.backends.triton.stream_state import free_stream
from foci.backends.triton.triton_cache_key import fill_cache_keys
from foci.problem import Operands, Results

if TYPE_CHECKING:
    from foci.backends.triton.kernel import TritonKernel
    from foci.backends.triton.tile_tables import Sequences

__all__ = ["foresee"]


class _Foreseen(Recorder):
    """Of a pass to come: what it makes takes no memory, nothing is launched, and nothing is kept."""

    is_ahead = True

    def __init__(self) -> None:
        super().__init__((), None)

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
        """A tensor without memory, which kernels take for an aligned one."""
        return torch.empty_strided(tuple(map(int, shape)), tuple(map(int, strides)), dtype=dtype, device="meta")

    def another(self, inputs: Inputs, stream: int | None) -> Recorder:
        """Another of the kind."""
        return _Foreseen()

    def launch(self, function: Any, grid: tuple[int, ...], *args: Any, between: bool = False, **options: Any) -> None:
        """Notes what will be launched."""
        plain = plain_arguments(args)
        fill_cache_keys((function, *plain))
        launch_ahead(function, plain, options)


def foresee(kernel: TritonKernel, operands: Operands, sequences: Sequences, results: Results) -> None:
    """Has the kernels compiled that the backward pass of a forward pass will launch, where the latter brings new ones.

    Called within `compile_in_parallel`. Of packed sequences or block masks, and where captured tensors learn or schedules are timed, the
    backward pass begins to compile when it comes; so does what it needs besides where gradients of more than the output come.
    """
    is_empty = 0 in (results.out.numel(), operands.key.shape[2])
    is_other = kernel.learns or kernel.problem.tuned or operands.cu_q is not None or operands.blocks is not None
    if kernel.gradients == 0 or not kernel.foresees or is_empty or is_other or free_stream(operands.query) is None or not is_new():
        return
    given = Given(results.out, results.lse, results.out, None)
    # what goes wrong here goes wrong in the backward pass, where somebody asked for it
    with suppress(Exception):
        kernel._backward(operands, given, sequences, _Foreseen(), None)
