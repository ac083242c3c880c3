"""Products of packed codes and fp32 vectors on the int8 tensor cores: the building blocks of the decode attention.

A vector is written as two int8 digits, x ~ unit (256 high + low), 16 bits of its largest entry: neighbouring columns of
the small operand of an integer matrix product. Codes are the large operand, unpacked by masks, and the sums are exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvarn_kernels.arithmetic import INTERPRETED


class Codes(NamedTuple):
    """Bytes of a tile's codes.

    word : uint8, [rows, columns]; of 3-bit codes the two low bits
    high : the bytes with the high bits of 3-bit codes, in the same order
    shift : [rows], the bit of ``high`` at which a row's begin
    """

    word: Any
    high: Any
    shift: Any


@triton.jit
def exp2(x):
    """``2 ** x`` in one instruction: denormals are flushed, which saves the three that would rescale them."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _greater_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def column_max(x):
    """Largest entry of each column; NaN if there is one."""
    if INTERPRETED:
        return tl.max(x, 0) + 0 * tl.sum(x, 0)  # the interpreter's max passes over NaN
    else:
        return tl.reduce(x, 0, _greater_or_nan)


@triton.jit
def near_first(x, NEAR: tl.constexpr):
    """``x`` [rows, columns], unchanged, with NEAR neighbouring rows in neighbouring registers (a join counts
    fastest)."""
    ROWS: tl.constexpr = x.shape[0]
    COLS: tl.constexpr = x.shape[1]
    if NEAR == 4:
        a, b = tl.split(tl.permute(tl.reshape(x, (ROWS // 4, 2, 2, COLS)), (0, 3, 2, 1)))  # by row bit 1
        a0, a1 = tl.split(a)
        b0, b1 = tl.split(b)
        x = tl.join(tl.join(a0, b0), tl.join(a1, b1))  # [.., COLS, row bit 1, row bit 0]
        return tl.reshape(tl.permute(x, (0, 2, 3, 1)), (ROWS, COLS))
    else:
        return x


@triton.jit
def _to_digits(x, factor):
    """``x * factor`` [rows, columns], at most 32512 in size, rounded: columns (2 i, 2 i + 1) = (high, low) of an int8
    matrix."""
    factor = tl.broadcast_to(factor[None, :], x.shape)
    if INTERPRETED:
        x = x * factor
        whole = (x + tl.where(x >= 0, 0.5, -0.5)).to(tl.int32)
        high = (whole + 128) >> 8
        low = (whole - (high << 8)).to(tl.int8)
        high = high.to(tl.int8)
    else:
        # Added to 1.5 * 2**23 + 128, the rounded number stands in the two low bytes: high as it is, low with its sign
        # bit flipped.
        high, low = tl.inline_asm_elementwise(
            """{
            .reg .f32 a, b, c, d;
            .reg .b32 s, t;
            fma.rn.f32 a, $2, $6, 0f4B400080;
            fma.rn.f32 b, $3, $7, 0f4B400080;
            fma.rn.f32 c, $4, $8, 0f4B400080;
            fma.rn.f32 d, $5, $9, 0f4B400080;
            prmt.b32 s, a, b, 0x5140;
            prmt.b32 t, c, d, 0x5140;
            prmt.b32 $0, s, t, 0x7632;
            prmt.b32 s, s, t, 0x5410;
            xor.b32 $1, s, 0x80808080;
            }""",
            "=&r,=&r,f,f,f,f,f,f,f,f",
            [x, factor],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    return tl.reshape(tl.join(high, low), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def _unpack_2bit(word):
    """Four codes of every byte, as c, 4 c, 16 c and 16 c: most need no shift."""
    if INTERPRETED:
        return (word & 3).to(tl.int8), (word & 12).to(tl.int8), (word & 48).to(tl.int8), ((word >> 2) & 48).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            shr.b32 t, $4, 2;
            and.b32 $0, $4, 0x03030303;
            and.b32 $1, $4, 0x0C0C0C0C;
            and.b32 $2, $4, 0x30303030;
            and.b32 $3, t, 0x30303030;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [word],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )


@triton.jit
def _unpack_4bit(word):
    """Both codes of every byte, as c and 16 (c - 8): one instruction for four codes."""
    if INTERPRETED:
        return (word & 15).to(tl.int8), ((word & 240) ^ 128).to(tl.int8, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            and.b32 $0, $2, 0x0F0F0F0F;
            and.b32 t, $2, 0xF0F0F0F0;
            xor.b32 $1, t, 0x80808080;
            }""",
            "=&r,=&r,r",
            [word],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )


@triton.jit
def _unpack_8bit(word):
    """The code of every byte, which is the byte less 128."""
    if INTERPRETED:
        return (word ^ 128).to(tl.int8, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            "xor.b32 $0, $1, 0x80808080;", "=r,r", [word], dtype=tl.int8, is_pure=True, pack=4
        )


@triton.constexpr_function
def _three_bit_assembly(step):
    """For :func:`_unpack_3bit`: code i's high bit is moved from bit ``step * i`` of its byte to bit 2."""
    lines = ["{", ".reg .b32 h, t, u;", "shr.b32 h, $5, $6;"]
    for i in range(4):
        left = 2 - step * i
        bit = "and.b32 t, h" if left == 0 else f"{'shl' if left > 0 else 'shr'}.b32 t, h, {abs(left)}; and.b32 t, t"
        code = "and.b32 u, $4" if i == 0 else f"shr.b32 u, $4, {2 * i}; and.b32 u, u"
        lines.append(f"{bit}, 0x04040404; {code}, 0x03030303; or.b32 ${i}, t, u;")
    return "\n".join([*lines, "}"])


@triton.jit
def _unpack_3bit(word, high, shift, STEP: tl.constexpr):
    """Four codes: two low bits from ``word``, the high bit of code i at bit ``shift + STEP i`` of ``high``."""
    shift = tl.broadcast_to(shift[:, None], word.shape)
    if INTERPRETED:
        high = (high >> shift.to(tl.uint8)) & 255
        c0 = (word & 3) | ((high & 1) << 2)
        c1 = ((word >> 2) & 3) | (((high >> STEP) & 1) << 2)
        c2 = ((word >> 4) & 3) | (((high >> (2 * STEP)) & 1) << 2)
        c3 = ((word >> 6) & 3) | (((high >> (3 * STEP)) & 1) << 2)
        return c0.to(tl.int8), c1.to(tl.int8), c2.to(tl.int8), c3.to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            _three_bit_assembly(STEP),
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r",
            [word, high, shift],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )


@triton.jit
def _digit_dot(codes, digits, unit, zero):
    """``(codes @ (256 high + low)) * unit + zero``, [rows of codes, columns] fp32; the integer sums are exact."""
    ROWS: tl.constexpr = codes.shape[0]
    COLS: tl.constexpr = digits.shape[1] // 2
    total = tl.dot(codes, digits, out_dtype=tl.int32)
    high, low = tl.split(tl.reshape(total, (ROWS, COLS, 2)))
    return ((high << 8) + low).to(tl.float32) * unit[None, :] + zero[None, :]


@triton.jit
def codes_dot(codes, x, largest, zero, SIDE: tl.constexpr):
    """``c @ x + zero`` for the codes c of a tile, [rows of bytes * codes per byte, columns] fp32.

    Code i of byte row j is row ``i * rows + j`` of the result for keys, ``j * codes per byte + i`` for values.

    Parameters
    ----------
    codes : Codes
        Bytes ``[rows, SIDE.PADDED]`` of keys, ``[rows, tile]`` of values.
    x : [SIDE.PADDED, columns] or [tile, columns], fp32
    largest : [columns], the largest of each column of ``x`` in size, or more; not 0
    zero : [columns]
    """
    LARGEST: tl.constexpr = 32512.0  # of 256 high + low
    digits = _to_digits(x, LARGEST / largest)
    unit = largest * (1.0 / LARGEST)
    total = tl.sum(x, 0)
    ROWS: tl.constexpr = codes.word.shape[0]
    COLS: tl.constexpr = x.shape[1]
    if SIDE.BITS == 8:
        return _digit_dot(_unpack_8bit(codes.word), digits, unit, zero)
    elif SIDE.BITS == 4:
        c0, c1 = _unpack_4bit(codes.word)
        s = tl.join(
            _digit_dot(c0, digits, unit, zero), _digit_dot(c1, digits, unit * 0.0625, zero + 8 * total)
        )  # [ROWS, COLS, 2]
        s = tl.permute(s, (2, 0, 1)) if SIDE.KEYS else tl.permute(s, (0, 2, 1))
        return tl.reshape(s, (2 * ROWS, COLS))
    else:
        if SIDE.BITS == 2:
            c0, c1, c2, c3 = _unpack_2bit(codes.word)
            u1, u2, u3 = unit * 0.25, unit * 0.0625, unit * 0.0625
        else:
            c0, c1, c2, c3 = _unpack_3bit(codes.word, codes.high, codes.shift, 2 if SIDE.KEYS else 1)
            u1, u2, u3 = unit, unit, unit
        s0 = _digit_dot(c0, digits, unit, zero)
        s1 = _digit_dot(c1, digits, u1, zero)
        s2 = _digit_dot(c2, digits, u2, zero)
        s3 = _digit_dot(c3, digits, u3, zero)
        s = tl.join(tl.join(s0, s1), tl.join(s2, s3))  # [ROWS, COLS, i & 1, i >> 1]
        s = tl.permute(s, (3, 2, 0, 1)) if SIDE.KEYS else tl.permute(s, (0, 3, 2, 1))
        return tl.reshape(s, (4 * ROWS, COLS))
