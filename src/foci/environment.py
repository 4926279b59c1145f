"""What a call depends on besides its arguments: the only module that reads torch's switches and those of `foci.context`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from foci import backends
from foci.compat.torch import (
    is_any_autocast_enabled,
    is_cudnn_sdp_enabled,
    is_flash_sdp_enabled,
    is_math_sdp_enabled,
    is_mem_efficient_sdp_enabled,
)
from foci.context import allowed_backends, is_tuning
from foci.problem import make_tuple

__all__ = [
    "Allowed",
    "Environment",
    "allowed_backends",
    "allowed_by_torch",
    "autocast_dtype",
    "is_tuning",
    "matmul_precision",
    "read_environment",
]

Allowed = tuple[str, ...] | None
"""Names of the backends that may run; None for all."""


class Environment(NamedTuple):
    """The state of the process and the thread that the choice of a kernel depends on.

    Whether gradients are recorded is not here: a call's own `requires_grad` says it (`foci.spec.CallSpec`). Nor is what only the running
    kernel reads, such as the number of CPU threads and the CUDA stream.

    Attributes:
        allowed: backends that `foci.use`, and for torch's entry point torch's switches, leave.
        registry: how often a backend was registered or taken away.
        deterministic: `torch.use_deterministic_algorithms`.
        tuned: inside `foci.use(tune=True)`.
        autocast: the dtype that autocast gives operands on the call's kind of device, or None where it is off.
    """

    allowed: Allowed
    registry: int
    deterministic: bool
    tuned: bool
    autocast: torch.dtype | None


def read_environment(allowed: Allowed, device: torch.device) -> Environment:
    """The environment of a call on a device, among the backends that it may use."""
    autocast = autocast_dtype(device.type) if is_any_autocast_enabled() else None
    environment: Environment = make_tuple(
        Environment, (allowed, backends.changes(), torch.are_deterministic_algorithms_enabled(), is_tuning(), autocast)
    )
    return environment


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast gives operands on a kind of device; None where it is off, or unknown there."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def allowed_by_torch() -> Allowed:
    """The backends that `foci.use` and torch's `sdpa_kernel` context and global switches leave.

    MATH is the formula, `reference`; every other switch allows the fused backends; no switch at all allows none.
    """
    allowed = allowed_backends()
    has_math = is_math_sdp_enabled()
    if is_flash_sdp_enabled() or is_mem_efficient_sdp_enabled() or is_cudnn_sdp_enabled():
        by_torch = None if has_math else tuple(name for name in backends.names() if name != "reference")
    else:
        by_torch = ("reference",) if has_math else ()
    if by_torch is None or allowed is None:
        return allowed if by_torch is None else by_torch
    return tuple(name for name in by_torch if name in allowed)


def matmul_precision() -> str:
    """torch's precision of float32 matrix products. foci's kernels do not depend on it; products around them, in a CUDA graph, do."""
    return torch.get_float32_matmul_precision()
