# mypy: ignore-errors
"""Functions that generated code calls where Triton's differ from torch's."""

import triton
import triton.language as tl

from foci.compat.jit import triton_jit

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton_jit
def floor_divide(a, b):
    """Integer division toward minus infinity; Triton's rounds toward zero."""
    quotient = a // b
    rest = a - quotient * b
    return quotient - ((rest != 0) & ((rest < 0) != (b < 0))).to(tl.int32)


@triton_jit
def floor_modulo(a, b):
    """Remainder with the sign of the divisor."""
    rest = a % b
    return rest + tl.where((rest != 0) & ((rest < 0) != (b < 0)), b, 0)


@triton_jit
def wrap(index, size):
    """Convert a torch index to an offset: negative indices count from the end; out-of-range ones are clamped."""
    return tl.minimum(tl.maximum(tl.where(index < 0, index + size, index), 0), size - 1)


@triton_jit
def tanh(x):
    """Accurate to float32 rounding: a series near zero, exponentials elsewhere."""
    t = tl.exp2(-2.8853900817779268 * tl.abs(x))
    far = (1.0 - t) / (1.0 + t)
    y = x * x
    near = 1.0 + y * (-0.3333333333 + y * (0.1333333333 + y * (-0.0539682540 + y * (0.0218694885 - y * 0.0088632355))))
    return tl.where(tl.abs(x) < 0.25, x * near, tl.where(x < 0, -far, far))


@triton_jit
def tanh_half(x):
    """Accurate to half-precision rounding: one instruction, relative error 2^-11."""
    if INTERPRETED:
        return tanh(x)
    else:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton_jit
def atan(x):
    """Minimax polynomial on [0, 1] (Abramowitz and Stegun 4.4.49), error 2e-8."""
    a = tl.abs(x)
    z = tl.where(a > 1.0, 1.0 / a, a)
    y = z * z
    p = -0.0161657367 + y * 0.0028662257
    p = -0.0752896400 + y * (0.0429096138 + y * p)
    p = -0.1420889944 + y * (0.1065626393 + y * p)
    p = 1.0 + y * (-0.3333314528 + y * (0.1999355085 + y * p))
    r = tl.where(a > 1.0, 1.5707963267948966 - z * p, z * p)
    return tl.where(x < 0, -r, r)
