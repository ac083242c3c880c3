"""The Hadamard rotation as a product with a matrix of signs, made in registers, on the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hadamard_signs(row, column, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """The +-1 matrix ``(-1) ** popcount(row & column)``, zero outside the diagonal blocks of order BLOCK.

    ``row`` and ``column`` are index vectors; BLOCK is a power of two up to 512. The rotation is this times BLOCK **
    -0.5.
    """
    same = row[:, None] & column[None, :] & (BLOCK - 1)
    if BLOCK > 256:
        same = same ^ (same >> 8)
    if BLOCK > 16:
        same = same ^ (same >> 4)
    # Bit n of 0x6996 is the parity of the four-bit number n. The numbers are made from their bits: conversions are
    # slow.
    odd = (0x6996 >> (same & 15)) & 1
    if DTYPE == tl.float32:  # noqa: SIM300
        signs = (1 - 2 * odd).to(tl.float32)
    elif DTYPE == tl.float16:  # noqa: SIM300
        signs = ((odd << 15) | 0x3C00).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        signs = ((odd << 15) | 0x3F80).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if row.shape[0] > BLOCK or column.shape[0] > BLOCK:
        signs = tl.where((row // BLOCK)[:, None] == (column // BLOCK)[None, :], signs, 0.0).to(DTYPE)
    return signs


@triton.jit
def split(x):
    """float32 as a sum of three bfloat16 numbers, exactly (8 + 8 + 8 bits)."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
