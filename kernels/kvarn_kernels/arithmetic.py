"""Exact float32 building blocks that every kernel shares."""

from __future__ import annotations

import triton
import triton.language as tl

# Where the interpreter runs a kernel, as triton.jit decides: it knows no inline assembly, and its fma rounds twice.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Adding and subtracting 1.5 * 2**23 leaves a float32 of magnitude below 2**22 rounded to the nearest integer, ties to
# even.
_ROUNDER = tl.constexpr(12582912.0)

SMALLEST_SCALE = tl.constexpr(2.0**-24)  # the smallest positive float16
LARGEST = tl.constexpr(65504.0)
INFINITY_BITS = tl.constexpr(0x7F800000)  # of float32
LOG2E = tl.constexpr(1.4426950408889634)


@triton.constexpr_function
def centre(bits):
    """By how much a stored code exceeds the code of the grid: see ``kvarn_hf/method/rounding.py``."""
    return 128 if bits == 8 else 0


@triton.jit
def round_half_even(x):
    """Nearest integer, ties to even, of float32 values below 2**22."""
    return (x + _ROUNDER) - _ROUNDER


@triton.jit
def small_integers(x, OFFSET: tl.constexpr):
    """Integers ``x + OFFSET`` from 0 to 255, of ``x`` in float32, as int32: from the bits of their sum with
    1.5 * 2**23, since conversions are slow."""
    return (x + (_ROUNDER + OFFSET)).to(tl.int32, bitcast=True) & 255


@triton.jit
def quotient(x, divisor, inverse):
    """``x / divisor``, correctly rounded, given ``inverse = 1 / divisor``: one Newton step instead of a division."""
    if INTERPRETED:
        return x / divisor
    approximate = x * inverse
    return tl.fma(tl.fma(-approximate, divisor, x), inverse, approximate)


@triton.jit
def reciprocal(x):
    """``1 / x`` of normal float32 values, to the last bit or so, in one instruction."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def inverse_root(x):
    """``x ** -0.5`` of normal float32 values, to the last bit or so, in one instruction; infinity for zero."""
    if INTERPRETED:
        return tl.where(x > 0, tl.rsqrt(tl.where(x > 0, x, 1.0)), float("inf"))
    return tl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def saturated(x, factor, addend):
    """``x * factor + addend``, clamped to [0, 1] by the same instruction; all of one shape."""
    if INTERPRETED:
        return clamp(x * factor + addend, 0.0, 1.0)
    return tl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, factor, addend], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def exponent_of(x):
    """``floor(log2(x))`` of non-negative float32 values, clamped to [-100, 100]; 0 for zero."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.where(x > 0, tl.minimum(tl.maximum(exponent, -100), 100), 0)


@triton.jit
def power_of_two(exponent):
    """``2.0 ** exponent`` for int32 exponents from -126 to 127, without a special function."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def clamp(x, low, high):
    """``min(max(x, low), high)``."""
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def half(x):
    """Rounded to what float16 can hold."""
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def half_scale(x):
    """Rounded to a positive float16."""
    return tl.maximum(half(x), SMALLEST_SCALE)


@triton.jit
def positive(scale):
    """A constant row has no span; its codes are all zero and any positive scale is right."""
    return tl.where(scale > 0, scale, 1.0)


@triton.jit
def inside(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, outside: tl.constexpr):
    """``x``, with ``outside`` in the rows from ROWS and the columns from COLUMNS on, which only pad it to a power of
    two."""
    if x.shape[0] != ROWS:
        x = tl.where((tl.arange(0, x.shape[0]) < ROWS)[:, None], x, outside)
    if x.shape[1] != COLUMNS:
        x = tl.where((tl.arange(0, x.shape[1]) < COLUMNS)[None, :], x, outside)
    return x


@triton.jit
def inside_vector(x, COUNT: tl.constexpr, outside: tl.constexpr):
    """``x``, with ``outside`` from COUNT on."""
    if x.shape[0] != COUNT:
        x = tl.where(tl.arange(0, x.shape[0]) < COUNT, x, outside)
    return x
