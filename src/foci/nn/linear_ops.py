"""Products of linear layers outside of autograd, by the library that is fast on the device."""

from __future__ import annotations

import functools
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from foci.compat.aten import MKLDNN_LINEAR, Absent, is_mkldnn_enabled, linear_with_relu
from foci.compat.torch import count_function_modes, is_any_autocast_enabled, is_forward_ad_open, is_jit_tracing
from foci.operator import is_plain_eager

__all__ = ["linear", "linear_relu"]

_ENDS_WITH_RELU: Final = frozenset(("cpu", "cuda"))
_WORTH: Final = 1 << 27
"""Multiplications for each thread from which on oneDNN was the faster; smaller ones gain less than their copy takes."""
_STEPS: Final = 8
"""Numbers of rows between a power of two and the next for which oneDNN is asked: it keeps half a megabyte for each number that it has
met, and almost every batch has another one."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias: `F.linear`, but for large products where nobody learns or looks on, whose library is chosen here."""
    if not torch.compiler.is_compiling() and x.is_cpu and _suits_onednn(x, weight, bias):
        return _by_onednn(x, weight, bias, relu=False)
    return F.linear(x, weight, bias)


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """relu(x weight^T + bias) of [T, E] outside of autograd: on a GPU the product itself ends with it, on the CPU it writes in place."""
    if x.is_cpu and _suits_onednn(x, weight, bias):
        return _by_onednn(x, weight, bias, relu=True)
    if bias is None or x.device.type not in _ENDS_WITH_RELU:
        return torch.relu(F.linear(x, weight, bias))
    return linear_with_relu(x, weight, bias)


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool) -> Tensor:
    """Most rows by oneDNN, the last few by torch's own product. oneDNN's own relu makes zeros of NaN, so that it is not used."""
    rows = x.view(-1, x.shape[-1])
    total, most = rows.shape[0], _rounded_down(rows.shape[0])
    first: Tensor = MKLDNN_LINEAR(rows[:most], weight, bias, "none", [], None)
    if most == total:
        return (first.relu_() if relu else first).view(*x.shape[:-1], -1)
    out = x.new_empty((total, weight.shape[0]))
    begun, rest = out[:most], out[most:]
    if bias is None:
        torch.mm(rows[most:], weight.t(), out=rest)
    else:
        torch.addmm(bias, rows[most:], weight.t(), out=rest)
    if relu:
        torch.clamp_min(first, 0.0, out=begun)
        rest.relu_()
    else:
        begun.copy_(first)
    return out.view(*x.shape[:-1], -1)


def _rounded_down(rows: int) -> int:
    step = max(1, (1 << rows.bit_length() - 1) // _STEPS)
    return rows // step * step


def _suits_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product is `F.linear`'s of plain float32 matrices, nothing else would notice, and oneDNN is the faster."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return (
        not torch.is_grad_enabled()
        and _is_onednn_faster()
        and is_mkldnn_enabled()
        and is_plain_eager(tensors)
        and not _is_seen()
        and all(t.dtype == torch.float32 and t.layout == torch.strided and not t.is_nested and t.is_contiguous() for t in tensors)
        and weight.dim() == 2
        and x.dim() > 1
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and x.numel() * weight.shape[0] >= _WORTH * torch.get_num_threads()
    )


def _is_seen() -> bool:
    return is_forward_ad_open() or is_any_autocast_enabled() or is_jit_tracing() or count_function_modes() > 0


@functools.cache
def _is_onednn_faster() -> bool:
    """Whether products in float32 are slower by MKL, which `F.linear` calls: so it is on processors of AMD with AVX-512, where MKL
    has the kernels of smaller ones."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_both and torch.backends.cpu.get_cpu_capability() == "AVX512" and _vendor() == "AuthenticAMD" and _has_operator()


def _has_operator() -> bool:
    return not isinstance(MKLDNN_LINEAR, Absent)


def _vendor() -> str:
    """Who made the processor, where Linux tells."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")
    except OSError:
        return ""
