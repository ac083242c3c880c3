"""The Hadamard rotation as a product with a matrix of signs, made in registers, on the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hadamard_signs(row, column, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """The +-1 matrix ``(-1) ** popcount(row & column)``, zero outside the diagonal blocks of order BLOCK.

    ``row`` and ``column`` are index vectors; BLOCK is a power of two up to 65536. The rotation is this times BLOCK ** -0.5.
    """
    same = row[:, None] & column[None, :] & (BLOCK - 1)
    if BLOCK > 256:
        same = same ^ (same >> 8)
    if BLOCK > 16:
        same = same ^ (same >> 4)
    # Bit n of 0x6996 is the parity of the four-bit number n.
    sign = 1 - 2 * ((0x6996 >> (same & 15)) & 1)
    in_block = (row // BLOCK)[:, None] == (column // BLOCK)[None, :]
    return tl.where(in_block, sign, 0).to(DTYPE)


@triton.jit
def split(x):
    """float32 as a sum of three bfloat16 numbers, exactly (8 + 8 + 8 bits)."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
