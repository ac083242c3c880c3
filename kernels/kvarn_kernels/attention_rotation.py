"""The rotation of a query, and back of an output, in registers: small matrix products and butterflies."""

from __future__ import annotations

import triton
import triton.language as tl

from kvarn_kernels.arithmetic import INTERPRETED
from kvarn_kernels.int8_dot import near_first

_SPLIT_DTYPE = tl.float32 if INTERPRETED else tl.bfloat16  # two of them hold a number of the rotation


@triton.jit
def _butterflies(x, BITS: tl.constexpr):
    """Unscaled Walsh-Hadamard transform over the low ``BITS`` bits of the middle index of x [16, outer, columns]."""
    OUTER: tl.constexpr = x.shape[1]
    COLS: tl.constexpr = x.shape[2]
    for bit in tl.static_range(BITS):
        x = tl.reshape(x, (16, OUTER >> (bit + 1), 2, 1 << bit, COLS))
        a, b = tl.split(tl.permute(x, (0, 1, 3, 4, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 4, 2, 3)), (16, OUTER, COLS))
    return x


@triton.jit
def _parity(x):
    """``popcount(x) % 2`` of numbers below 16."""
    return (x ^ (x >> 1) ^ (x >> 2) ^ (x >> 3)) & 1


@triton.jit
def _product(matrix, x):
    """``matrix @ x`` over the first index of x [16, outer, columns], of which the product takes both 16-bit halves."""
    high = x.to(_SPLIT_DTYPE)
    low = (x - high.to(tl.float32)).to(_SPLIT_DTYPE)
    parts = tl.reshape(tl.join(high, low), (16, x.shape[1] * x.shape[2] * 2))
    high, low = tl.split(tl.reshape(tl.dot(matrix.to(_SPLIT_DTYPE), parts), (16, x.shape[1], x.shape[2], 2)))
    return high + low


@triton.constexpr_function
def block_bits(block):
    """How many index bits a block of the rotation has."""
    return block.bit_length() - 1


@triton.jit
def rotated_query(query_ptr, columns, prescale_ptr, scale, SIDE: tl.constexpr):
    """``scale H (q / prescale)`` as [PADDED, COLS] fp32, H not scaled, four neighbouring channels in neighbouring
    registers.

    Channel bits 0, 2, 3, 4 are transformed by one 16 x 16 matrix product and the others by butterflies: the product
    leaves the query in the layout of an accumulator, which is that of the scores, so that nothing in the loop changes
    layout.
    """
    OUTER: tl.constexpr = SIDE.PADDED // 16
    COLS: tl.constexpr = columns.known.shape[0]
    BLOCK_BITS: tl.constexpr = block_bits(SIDE.BLOCK)
    row = tl.arange(0, 16)  # bit 3: channel bit 0; bits 0 to 2: channel bits 2 to 4
    outer = tl.arange(0, OUTER)  # bit 0: channel bit 1; above: channel bits 5 and up
    channel = ((row & 7) * 4 + (row >> 3))[:, None] + ((outer & 1) * 2 + (outer >> 1) * 32)[None, :]
    inside = channel < SIDE.DIM
    q = tl.load(
        query_ptr + columns.offset[None, None, :] + channel[:, :, None],
        mask=inside[:, :, None] & columns.known[None, None, :],
        other=0.0,
    ).to(tl.float32)
    if prescale_ptr is not None:
        q /= tl.load(prescale_ptr + channel, mask=inside, other=1.0).to(tl.float32)[:, :, None]
    # The channels are multiples of 16, and so is the block.
    bits: tl.constexpr = 0 if BLOCK_BITS == 0 else (11 if BLOCK_BITS == 4 else 15)
    butterflies: tl.constexpr = 0 if BLOCK_BITS == 0 else (1 if BLOCK_BITS < 6 else BLOCK_BITS - 4)
    odd = _parity(row[:, None] & row[None, :] & bits)
    matrix = tl.where(((row[:, None] ^ row[None, :]) & (15 - bits)) == 0, 1.0 - 2.0 * odd.to(tl.float32), 0.0)
    q = _butterflies(_product(matrix, q) * scale, butterflies)
    q = tl.reshape(q, (2, 8, OUTER // 2, 2, COLS))  # [channel bit 0, bits 2 to 4, bits 5 and up, bit 1, column]
    return near_first(tl.reshape(tl.permute(q, (2, 1, 3, 0, 4)), (SIDE.PADDED, COLS)), 4)


@triton.jit
def unrotated(x, SIDE: tl.constexpr):
    """``H x`` of x [PADDED, COLS], as [16, PADDED // 16, COLS]: low four channel bits first.

    These four are transformed by a 16 x 16 matrix product, the others by butterflies between registers of a thread.
    """
    BLOCK_BITS: tl.constexpr = block_bits(SIDE.BLOCK)
    x = tl.permute(tl.reshape(x, (SIDE.PADDED // 16, 16, x.shape[1])), (1, 0, 2))
    if BLOCK_BITS > 0:
        row = tl.arange(0, 16)
        odd = _parity(row[:, None] & row[None, :])
        x = _product((1.0 - 2.0 * odd.to(tl.float32)).to(_SPLIT_DTYPE), x)
        x = _butterflies(x, BLOCK_BITS - 4) * 2.0 ** (-0.5 * BLOCK_BITS)
    return x
