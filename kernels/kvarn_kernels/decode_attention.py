"""Attention of a few new tokens over a packed cache: codes feed the int8 tensor cores, and no scale ever touches a code.

With the rotated query q' = H (q / prescale), and c the codes of one tile::

    score_t  = token_scale_t (sum_d (q'_d channel_scale_d) c_td + sum_d q'_d zero_point_d)
    out_d    = channel_scale_d (sum_t (p_t token_scale_t) c_td + sum_t p_t zero_point_t)

so only the small vectors, q' and p, are scaled. They are written as two int8 digits (x ~ 256 high + low, 16 bits of the
largest entry of that tile), neighbouring columns of the small operand of an integer matrix product, whose sums are exact.

Two launches. :func:`_split_kernel`: every program attends over a slice of the tiles, or of the dense tokens (sinks and tail).
:func:`_combine_kernel`: joins the slices by their log-sum-exp, un-rotates what came from tiles, adds learned sinks.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

from kvarn_kernels.launch_table import Launch, attention_launch

LOG2E = 1.4426950408889634
# Inline assembly does not run in Triton's interpreter, which is how the arithmetic is tested without a GPU.
_ASSEMBLY = os.environ.get("TRITON_INTERPRET", "0") != "1"
_SPLIT_DTYPE = tl.bfloat16 if _ASSEMBLY else tl.float32

_MOST_TOKENS = 16
_MOST_COLUMNS = 8  # query heads x query tokens that one program takes


@triton.jit
def _exp2(x, ASM: tl.constexpr):
    if ASM:  # flushes denormals, which saves the three instructions that would rescale them
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def _greater_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _column_max(x, ASM: tl.constexpr):
    """Largest entry of each column; NaN if there is one."""
    if ASM:
        return tl.reduce(x, 0, _greater_or_nan)
    else:
        return tl.max(x, 0) + 0 * tl.sum(x, 0)  # the interpreter's max passes over NaN


@triton.jit
def _near_first(x, ROWS: tl.constexpr, NEAR: tl.constexpr, COLS: tl.constexpr):
    """``x`` [ROWS, COLS], unchanged, with NEAR neighbouring rows in neighbouring registers (a join counts fastest)."""
    if NEAR == 4:
        a, b = tl.split(tl.permute(tl.reshape(x, (ROWS // 4, 2, 2, COLS)), (0, 3, 2, 1)))  # by row bit 1
        a0, a1 = tl.split(a)
        b0, b1 = tl.split(b)
        x = tl.join(tl.join(a0, b0), tl.join(a1, b1))  # [.., COLS, row bit 1, row bit 0]
        return tl.reshape(tl.permute(x, (0, 2, 3, 1)), (ROWS, COLS))
    else:
        return x


@triton.jit
def _digits(x, factor, ROWS: tl.constexpr, COLS: tl.constexpr, ASM: tl.constexpr):
    """``x * factor``, at most 32512 in size, rounded and written as columns (2 i, 2 i + 1) = (high, low) of an int8 matrix."""
    factor = tl.broadcast_to(factor[None, :], (ROWS, COLS))
    if ASM:
        # Added to 1.5 * 2**23 + 128, the rounded number stands in the two low bytes: high as it is, low with its sign bit flipped.
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
    else:
        x = x * factor
        whole = (x + tl.where(x >= 0, 0.5, -0.5)).to(tl.int32)
        high = (whole + 128) >> 8
        low = (whole - (high << 8)).to(tl.int8)
        high = high.to(tl.int8)
    return tl.reshape(tl.join(high, low), (ROWS, 2 * COLS))


@triton.jit
def _unpack_2bit(word, ASM: tl.constexpr):
    """Four codes of every byte, as c, 4 c, 16 c and 16 c: most need no shift."""
    if ASM:
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
    else:
        return (word & 3).to(tl.int8), (word & 12).to(tl.int8), (word & 48).to(tl.int8), ((word >> 2) & 48).to(tl.int8)


@triton.jit
def _unpack_4bit(word, ASM: tl.constexpr):
    """Both codes of every byte, as c and 16 (c - 8): one instruction for four codes."""
    if ASM:
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
    else:
        return (word & 15).to(tl.int8), ((word & 240) ^ 128).to(tl.int8, bitcast=True)


@triton.jit
def _unpack_8bit(word, ASM: tl.constexpr):
    """The code of every byte, as c - 128."""
    if ASM:
        return tl.inline_asm_elementwise(
            "xor.b32 $0, $1, 0x80808080;", "=r,r", [word], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        return (word ^ 128).to(tl.int8, bitcast=True)


@triton.jit
def _unpack_3bit(word, high, shift, STEP: tl.constexpr, ASM: tl.constexpr):
    """Four codes: two low bits from ``word``, the high bit of code i at bit ``shift + STEP i`` of ``high``."""
    shift = tl.broadcast_to(shift[:, None], word.shape)
    if ASM:
        if STEP == 2:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 h, t, u;
                shr.b32 h, $5, $6;
                shl.b32 t, h, 2; and.b32 t, t, 0x04040404; and.b32 u, $4, 0x03030303; or.b32 $0, t, u;
                and.b32 t, h, 0x04040404; shr.b32 u, $4, 2; and.b32 u, u, 0x03030303; or.b32 $1, t, u;
                shr.b32 t, h, 2; and.b32 t, t, 0x04040404; shr.b32 u, $4, 4; and.b32 u, u, 0x03030303; or.b32 $2, t, u;
                shr.b32 t, h, 4; and.b32 t, t, 0x04040404; shr.b32 u, $4, 6; and.b32 u, u, 0x03030303; or.b32 $3, t, u;
                }""",
                "=&r,=&r,=&r,=&r,r,r,r,r,r,r",
                [word, high, shift],
                dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
                is_pure=True,
                pack=4,
            )
        else:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 h, t, u;
                shr.b32 h, $5, $6;
                shl.b32 t, h, 2; and.b32 t, t, 0x04040404; and.b32 u, $4, 0x03030303; or.b32 $0, t, u;
                shl.b32 t, h, 1; and.b32 t, t, 0x04040404; shr.b32 u, $4, 2; and.b32 u, u, 0x03030303; or.b32 $1, t, u;
                and.b32 t, h, 0x04040404; shr.b32 u, $4, 4; and.b32 u, u, 0x03030303; or.b32 $2, t, u;
                shr.b32 t, h, 1; and.b32 t, t, 0x04040404; shr.b32 u, $4, 6; and.b32 u, u, 0x03030303; or.b32 $3, t, u;
                }""",
                "=&r,=&r,=&r,=&r,r,r,r,r,r,r",
                [word, high, shift],
                dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
                is_pure=True,
                pack=4,
            )
    else:
        high = (high >> shift.to(tl.uint8)) & 255
        c0 = (word & 3) | ((high & 1) << 2)
        c1 = ((word >> 2) & 3) | (((high >> STEP) & 1) << 2)
        c2 = ((word >> 4) & 3) | (((high >> (2 * STEP)) & 1) << 2)
        c3 = ((word >> 6) & 3) | (((high >> (3 * STEP)) & 1) << 2)
        return c0.to(tl.int8), c1.to(tl.int8), c2.to(tl.int8), c3.to(tl.int8)


@triton.jit
def _digit_dot(codes, digits, unit, zero, ROWS: tl.constexpr, COLS: tl.constexpr):
    """``(codes @ (256 high + low)) * unit + zero``, [ROWS, COLS] fp32; the integer sums are exact."""
    total = tl.dot(codes, digits, out_dtype=tl.int32)
    high, low = tl.split(tl.reshape(total, (ROWS, COLS, 2)))
    return ((high << 8) + low).to(tl.float32) * unit[None, :] + zero[None, :]


@triton.jit
def _codes_dot(
    word, high, shift, digits, unit, zero, total,
    BITS: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ASM: tl.constexpr,
):
    """``codes @ x + zero`` for packed codes, x given by its digits times unit, and ``total`` = sum x.

    Returns [ROWS * codes per byte, COLS]: for keys, code i of byte row j is row i * ROWS + j; for values, j * codes per byte + i.
    """
    if BITS == 8:
        return _digit_dot(_unpack_8bit(word, ASM), digits, unit, zero + 128 * total, ROWS, COLS)
    elif BITS == 4:
        c0, c1 = _unpack_4bit(word, ASM)
        s = tl.join(
            _digit_dot(c0, digits, unit, zero, ROWS, COLS),
            _digit_dot(c1, digits, unit * 0.0625, zero + 8 * total, ROWS, COLS),
        )  # [ROWS, COLS, 2]
        s = tl.permute(s, (2, 0, 1)) if KEYS else tl.permute(s, (0, 2, 1))
        return tl.reshape(s, (2 * ROWS, COLS))
    else:
        if BITS == 2:
            c0, c1, c2, c3 = _unpack_2bit(word, ASM)
            u1, u2, u3 = unit * 0.25, unit * 0.0625, unit * 0.0625
        else:
            c0, c1, c2, c3 = _unpack_3bit(word, high, shift, 2 if KEYS else 1, ASM)
            u1, u2, u3 = unit, unit, unit
        s0 = _digit_dot(c0, digits, unit, zero, ROWS, COLS)
        s1 = _digit_dot(c1, digits, u1, zero, ROWS, COLS)
        s2 = _digit_dot(c2, digits, u2, zero, ROWS, COLS)
        s3 = _digit_dot(c3, digits, u3, zero, ROWS, COLS)
        s = tl.join(tl.join(s0, s1), tl.join(s2, s3))  # [ROWS, COLS, i & 1, i >> 1]
        s = tl.permute(s, (3, 2, 0, 1)) if KEYS else tl.permute(s, (0, 3, 2, 1))
        return tl.reshape(s, (4 * ROWS, COLS))


@triton.jit
def _queries(first, h, COLS: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr):
    """Which query head and which of the new tokens each column is, and whether there is one."""
    column = first + tl.arange(0, COLS)
    return column < COLUMNS, h * (COLUMNS // QUERIES) + column // QUERIES, column % QUERIES


@triton.jit
def _bias(
    score, position, column_ok, head, token, length, mask_ptr, stride_m_h, stride_m_q, window, cap,
    QUERIES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr,
):
    """Soft-capped scores (base 2) [TOKENS, COLS], -inf where a query may not see a token. position [TOKENS]."""
    if CAP:  # cap tanh(x / cap), by an exponential that cannot overflow
        small = tl.exp2(-2 * 1.4426950408889634 * tl.abs(score) / cap)
        size = cap * (1 - small) / (1 + small)
        score = tl.where(score < 0, -size, size)
    query_position = length - QUERIES + token
    if CAUSAL:
        score = tl.where(position[:, None] <= query_position[None, :], score, float("-inf"))
    if WINDOW:
        score = tl.where(position[:, None] > (query_position - window)[None, :], score, float("-inf"))
    if MASK > 0:
        where = mask_ptr + (head * stride_m_h + token * stride_m_q)[None, :] + position[:, None]
        known = column_ok[None, :] & (position < length)[:, None]
        if MASK == 1:
            score = tl.where(tl.load(where, mask=known, other=0) != 0, score, float("-inf"))
        else:
            score += tl.load(where, mask=known, other=0.0).to(tl.float32) * 1.4426950408889634
    return score


@triton.jit
def _butterflies(x, OUTER: tl.constexpr, BITS: tl.constexpr, COLS: tl.constexpr):
    """Unscaled Walsh-Hadamard transform over the low ``BITS`` bits of the middle index of x [16, OUTER, COLS]."""
    for bit in tl.static_range(BITS):
        x = tl.reshape(x, (16, OUTER >> (bit + 1), 2, 1 << bit, COLS))
        a, b = tl.split(tl.permute(x, (0, 1, 3, 4, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 4, 2, 3)), (16, OUTER, COLS))
    return x


@triton.jit
def _rotated_query(
    q_ptr, offset, column_ok, prescale_ptr, scale,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_BITS: tl.constexpr, COLS: tl.constexpr, PRESCALE: tl.constexpr,
    SPLIT_DTYPE: tl.constexpr,
):
    """``scale H (q / prescale)`` as [DIM_PAD, COLS] fp32, with four neighbouring channels in a thread's neighbouring registers.

    Channel bits 0, 2, 3, 4 are transformed by one 16 x 16 matrix product and the others by butterflies: the product leaves the
    query in the layout of an accumulator, which is that of the scores, so that nothing in the loop changes layout.
    """
    OUTER: tl.constexpr = DIM_PAD // 16
    row = tl.arange(0, 16)  # bit 3: channel bit 0; bits 0 to 2: channel bits 2 to 4
    outer = tl.arange(0, OUTER)  # bit 0: channel bit 1; above: channel bits 5 and up
    channel = ((row & 7) * 4 + (row >> 3))[:, None] + ((outer & 1) * 2 + (outer >> 1) * 32)[None, :]
    inside = channel < DIM
    q = tl.load(
        q_ptr + offset[None, None, :] + channel[:, :, None], mask=inside[:, :, None] & column_ok[None, None, :], other=0.0
    ).to(tl.float32)
    if PRESCALE:
        q /= tl.load(prescale_ptr + channel, mask=inside, other=1.0).to(tl.float32)[:, :, None]
    if BLOCK_BITS > 0:
        bits: tl.constexpr = 8 | (1 if BLOCK_BITS > 2 else 0) | (2 if BLOCK_BITS > 3 else 0) | (4 if BLOCK_BITS > 4 else 0)
        butterflies: tl.constexpr = 1 if BLOCK_BITS < 6 else BLOCK_BITS - 4
    else:
        bits: tl.constexpr = 0
        butterflies: tl.constexpr = 0
    common = row[:, None] & row[None, :] & bits
    odd = (common ^ (common >> 1) ^ (common >> 2) ^ (common >> 3)) & 1
    matrix = tl.where(((row[:, None] ^ row[None, :]) & (15 - bits)) == 0, 1.0 - 2.0 * odd.to(tl.float32), 0.0)
    high = q.to(SPLIT_DTYPE)
    low = (q - high.to(tl.float32)).to(SPLIT_DTYPE)
    parts = tl.reshape(tl.join(high, low), (16, OUTER * COLS * 2))
    rotated = tl.reshape(tl.dot(matrix.to(SPLIT_DTYPE), parts), (16, OUTER, COLS, 2))
    high, low = tl.split(rotated)
    q = _butterflies((high + low) * scale, OUTER, butterflies, COLS)
    q = tl.reshape(q, (2, 8, OUTER // 2, 2, COLS))  # [channel bit 0, bits 2 to 4, bits 5 and up, bit 1, column]
    return _near_first(tl.reshape(tl.permute(q, (2, 1, 3, 0, 4)), (DIM_PAD, COLS)), DIM_PAD, 4, COLS)


@triton.jit
def _attend_tiles(
    q, first, last, tile, pad, sink_length, column_ok, head, token, length, mask_ptr, stride_m_h, stride_m_q, window, cap,
    kc_ptr, kcs_ptr, kts_ptr, kzp_ptr, vc_ptr, vcs_ptr, vts_ptr, vzp_ptr, o_ptr, lse_ptr,
    QUERIES: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    PADDED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):
    """Attention over tiles ``first .. last`` of one head, in the rotated frame: o [COLS, VALUE_PAD] and its log2-sum-exp2."""
    KEY_ROWS: tl.constexpr = TILE if KEY_BITS == 8 else (TILE // 2 if KEY_BITS == 4 else TILE // 4)
    PER_BYTE: tl.constexpr = 1 if VALUE_BITS == 8 else (2 if VALUE_BITS == 4 else 4)
    VALUE_ROWS: tl.constexpr = VALUE_PAD // PER_BYTE
    # Key rows are loaded in an order that gives each thread neighbouring tokens: four probabilities make one word of digits.
    GROUP: tl.constexpr = 32 if KEY_ROWS >= 32 else 16
    NEAR: tl.constexpr = GROUP // 8
    slot = tl.arange(0, KEY_ROWS)
    key_row = slot // GROUP * GROUP + slot % 8 * NEAR + slot % GROUP // 8
    channel, t = tl.arange(0, KEY_PAD), tl.arange(0, TILE)
    out_channel, value_row = tl.arange(0, VALUE_PAD), tl.arange(0, VALUE_ROWS)
    key_at = key_row[:, None] * KEY_DIM + channel[None, :]
    value_at = value_row[:, None] * TILE + t[None, :]
    key_high_at, value_high_at = key_at, value_at
    key_shift, value_shift = key_row, value_row
    if KEY_BITS == 3:
        key_high_at = (TILE // 4 + key_row % (TILE // 8))[:, None] * KEY_DIM + channel[None, :]
        key_shift = key_row // (TILE // 8)
    if VALUE_BITS == 3:
        value_high_at = (VALUE_DIM // 4 + value_row // 2)[:, None] * TILE + t[None, :]
        value_shift = value_row % 2 * 4
    KEY_BYTES: tl.constexpr = TILE * KEY_DIM * KEY_BITS // 8
    VALUE_BYTES: tl.constexpr = TILE * VALUE_DIM * VALUE_BITS // 8

    m = tl.full([COLS], -1e30, tl.float32)
    l = tl.zeros([8, COLS], tl.float32)
    acc = tl.zeros([VALUE_PAD, COLS], tl.float32)
    for n in tl.range(first, last, num_stages=STAGES):
        at = tile + n  # int64
        if KEY_DIM == KEY_PAD:
            key_word = tl.load(kc_ptr + at * KEY_BYTES + key_at)
            kcs = tl.load(kcs_ptr + at * KEY_DIM + channel).to(tl.float32)
            kzp = tl.load(kzp_ptr + at * KEY_DIM + channel).to(tl.float32)
        else:
            key_word = tl.load(kc_ptr + at * KEY_BYTES + key_at, mask=(channel < KEY_DIM)[None, :], other=0)
            kcs = tl.load(kcs_ptr + at * KEY_DIM + channel, mask=channel < KEY_DIM, other=0.0).to(tl.float32)
            kzp = tl.load(kzp_ptr + at * KEY_DIM + channel, mask=channel < KEY_DIM, other=0.0).to(tl.float32)
        kts = tl.load(kts_ptr + at * TILE + t).to(tl.float32)
        if VALUE_DIM == VALUE_PAD:
            value_word = tl.load(vc_ptr + at * VALUE_BYTES + value_at)
            vcs = tl.load(vcs_ptr + at * VALUE_DIM + out_channel).to(tl.float32)
        else:
            value_ok = (value_row < VALUE_DIM // PER_BYTE)[:, None]
            value_word = tl.load(vc_ptr + at * VALUE_BYTES + value_at, mask=value_ok, other=0)
            vcs = tl.load(vcs_ptr + at * VALUE_DIM + out_channel, mask=out_channel < VALUE_DIM, other=0.0).to(tl.float32)
        vts = tl.load(vts_ptr + at * TILE + t).to(tl.float32)
        vzp = tl.load(vzp_ptr + at * TILE + t).to(tl.float32)
        key_high, value_high = key_word, value_word
        if KEY_BITS == 3:
            key_high = tl.load(kc_ptr + at * KEY_BYTES + key_high_at, mask=(channel < KEY_DIM)[None, :], other=0)
        if VALUE_BITS == 3:
            value_ok = (value_row < VALUE_DIM // PER_BYTE)[:, None]
            value_high = tl.load(vc_ptr + at * VALUE_BYTES + value_high_at, mask=value_ok, other=0)

        x = q * kcs[:, None]  # [KEY_PAD, COLS]
        largest = _column_max(tl.abs(x), ASM) + 1e-30
        zero = tl.sum(q * kzp[:, None], 0)
        digits = _digits(x, 32512.0 / largest, KEY_PAD, COLS, ASM)
        s = _codes_dot(
            key_word, key_high, key_shift, digits, largest * (1.0 / 32512.0), zero, tl.sum(x, 0),
            KEY_BITS, True, KEY_ROWS, COLS, ASM,
        )
        s = tl.reshape(tl.permute(tl.reshape(s, (TILE // GROUP, NEAR, 8, COLS)), (0, 2, 1, 3)), (TILE, COLS))
        s = _near_first(s, TILE, NEAR, COLS)
        s *= kts[:, None]
        if PADDED or CAUSAL or WINDOW or CAP or MASK > 0:
            position = sink_length + n * TILE + t
            s = _bias(
                s, position, column_ok, head, token, length, mask_ptr, stride_m_h, stride_m_q, window, cap,
                QUERIES, CAUSAL, WINDOW, CAP, MASK,
            )
            if PADDED:
                s = tl.where((position >= pad + sink_length)[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        p = _exp2(s - m_new[None, :], ASM)
        alpha = _exp2(m - m_new, ASM)
        m = m_new
        # Summed over a thread's own tokens only; over threads once, behind the loop.
        l = l * alpha[None, :] + tl.sum(tl.sum(tl.reshape(p, (TILE // GROUP, 8, NEAR, COLS)), 2), 0)
        y = p * vts[:, None]  # [TILE, COLS]
        largest = _column_max(y, ASM) + 1e-30
        zero = tl.sum(p * vzp[:, None], 0)
        digits = _digits(y, 32512.0 / largest, TILE, COLS, ASM)
        o = _codes_dot(
            value_word, value_high, value_shift, digits, largest * (1.0 / 32512.0), zero, tl.sum(y, 0),
            VALUE_BITS, False, VALUE_ROWS, COLS, ASM,
        )
        acc = acc * alpha[None, :] + o * vcs[:, None]
    total = tl.sum(l, 0)
    column = tl.arange(0, COLS)
    inverse = 1.0 / tl.where(total == 0, 1.0, total)
    tl.store(o_ptr + column[None, :] * VALUE_PAD + out_channel[:, None], acc * inverse[None, :])
    tl.store(lse_ptr + column, tl.where(total == 0, float("-inf"), m + tl.log2(total)))


@triton.jit
def _attend_dense(
    q_ptr, q_offset, scale, first, last, pad, run_k_ptr, run_v_ptr, dk_ptr, dv_ptr, stride_dk_t, stride_dv_t,
    with_run, tail_start, sink_length, column_ok, head, token, length, mask_ptr, stride_m_h, stride_m_q, window, cap,
    o_ptr, lse_ptr,
    QUERIES: tl.constexpr, COLS: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    PADDED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr,
    ASM: tl.constexpr,
):
    """Attention over dense tokens ``first .. last`` of one head, in the model's own frame."""
    channel, out_channel, x = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD), tl.arange(0, BLOCK)
    q = tl.load(
        q_ptr + q_offset[None, :] + channel[:, None], mask=(channel < KEY_DIM)[:, None] & column_ok[None, :], other=0.0
    )  # [KEY_PAD, COLS]
    m = tl.full([COLS], -1e30, tl.float32)
    l = tl.zeros([COLS], tl.float32)
    acc = tl.zeros([VALUE_PAD, COLS], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=2):
        index = start + x
        row = tl.minimum(index, last - 1)  # rather than a mask: what is read twice gets no weight
        key_at = dk_ptr + (row * stride_dk_t)[:, None] + channel[None, :]
        value_at = dv_ptr + (row * stride_dv_t)[None, :] + out_channel[:, None]
        if KEY_DIM == KEY_PAD:
            k = tl.load(key_at)  # [BLOCK, KEY_PAD]
        else:
            k = tl.load(key_at, mask=(channel < KEY_DIM)[None, :], other=0.0)
        if VALUE_DIM == VALUE_PAD:
            v = tl.load(value_at)  # [VALUE_PAD, BLOCK]
        else:
            v = tl.load(value_at, mask=(out_channel < VALUE_DIM)[:, None], other=0.0)
        held = index < last
        in_sink = index < sink_length
        position = tl.where(in_sink, index + pad, tail_start + index - sink_length)
        if PADDED:
            held &= (position < tail_start) | ~in_sink
        s = tl.dot(k, q) * scale
        s = _bias(
            s, position, column_ok, head, token, length, mask_ptr, stride_m_h, stride_m_q, window, cap,
            QUERIES, CAUSAL, WINDOW, CAP, MASK,
        )
        s = tl.where(held[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        p = _exp2(s - m_new[None, :], ASM)
        alpha = _exp2(m - m_new, ASM)
        m = m_new
        l = l * alpha + tl.sum(p, 0)
        acc = tl.dot(v, p.to(v.dtype), acc * alpha[None, :])
    if PADDED:
        if with_run:  # noqa: SIM102 (one is known when compiling)
            # One token stands for all of the row's padding: its score is computed once, and counts as often as it is seen.
            k = tl.load(run_k_ptr + channel, mask=channel < KEY_DIM, other=0.0).to(tl.float32)
            v = tl.load(run_v_ptr + out_channel, mask=out_channel < VALUE_DIM, other=0.0).to(tl.float32)
            plain = tl.sum(q.to(tl.float32) * k[:, None], 0) * scale
            run = tl.minimum(pad, tail_start)
            for start in range(0, run, BLOCK):
                position = start + x
                s = _bias(
                    tl.broadcast_to(plain[None, :], (BLOCK, COLS)), position, column_ok, head, token, length,
                    mask_ptr, stride_m_h, stride_m_q, window, cap, QUERIES, CAUSAL, WINDOW, CAP, MASK,
                )
                s = tl.where((position < run)[:, None], s, float("-inf"))
                m_new = tl.maximum(m, tl.max(s, 0))
                weight = tl.sum(_exp2(s - m_new[None, :], ASM), 0)
                alpha = _exp2(m - m_new, ASM)
                m = m_new
                l = l * alpha + weight
                acc = acc * alpha[None, :] + v[:, None] * weight[None, :]
    column = tl.arange(0, COLS)
    inverse = 1.0 / tl.where(l == 0, 1.0, l)
    stored = column < STORED
    tl.store(o_ptr + column[None, :] * VALUE_PAD + out_channel[:, None], acc * inverse[None, :], mask=stored[None, :])
    tl.store(lse_ptr + column, tl.where(l == 0, float("-inf"), m + tl.log2(l)), mask=stored)


@triton.jit(
    do_not_specialize=[
        "count", "capacity", "dense_length", "sink_length", "dense_splits", "splits", "scale", "window", "cap", "lse_start",
    ]
)
def _split_kernel(
    q_ptr, kc_ptr, kcs_ptr, kts_ptr, kzp_ptr, vc_ptr, vcs_ptr, vts_ptr, vzp_ptr, prescale_ptr, rows_ptr,
    dk_ptr, dv_ptr, pad_ptr, run_k_ptr, run_v_ptr, mask_ptr, part_ptr,
    stride_q_b, stride_q_h, stride_q_q, stride_dk_b, stride_dk_h, stride_dk_t, stride_dv_b, stride_dv_h, stride_dv_t,
    stride_m_b, stride_m_h, stride_m_q,
    heads, count, capacity, dense_length, sink_length, dense_splits, splits, scale, window, cap, lse_start,
    QUERIES: tl.constexpr, COLUMNS: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, KEY_BLOCK_BITS: tl.constexpr, PRESCALE: tl.constexpr,
    ROWS: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, TILE_CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, MASK: tl.constexpr, SPLIT_DTYPE: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):
    """One slice of one KV head's tokens, for ``COLS`` of its query heads x query tokens.

    Grid: (batch * heads * column blocks, dense_splits + splits).
    Reads: the query, and the slice's tiles or dense tokens, once.
    Writes: its output [COLS, VALUE_PAD] and log2-sum-exp2 [COLS] into the workspace, fp32.
    Precision: 16-bit digits, exact integer sums, fp32 softmax; fp16 or bf16 products for dense tokens.
    Reference: kvarn_hf/reference/attention.py
    """
    unit, split = tl.program_id(0), tl.program_id(1)
    BLOCKS: tl.constexpr = (COLUMNS + COLS - 1) // COLS
    block, bh = unit % BLOCKS, unit // BLOCKS
    b, h = bh // heads, bh % heads
    q_ptr += b.to(tl.int64) * stride_q_b
    tail_start = sink_length + count * TILE
    length = tail_start + dense_length - sink_length
    pad = 0
    if PADDED:
        pad = tl.load(pad_ptr + b).to(tl.int32)
    if MASK > 0:
        mask_ptr += b.to(tl.int64) * stride_m_b
    part = unit.to(tl.int64) * (dense_splits + splits) + split
    o_ptr = part_ptr + part * (COLS * VALUE_PAD)
    lse_ptr = part_ptr + lse_start + part * COLS
    if split < dense_splits:
        per = tl.cdiv(tl.cdiv(dense_length, dense_splits), BLOCK) * BLOCK
        first = split * per
        WIDE: tl.constexpr = 8 if COLS < 8 else COLS  # the least a tensor core takes
        dense_ok, dense_head, dense_token = _queries(block * COLS, h, WIDE, COLUMNS, QUERIES)
        _attend_dense(
            q_ptr, dense_head * stride_q_h + dense_token * stride_q_q, scale, first, tl.minimum(first + per, dense_length), pad,
            run_k_ptr + bh * KEY_DIM if PADDED else run_k_ptr, run_v_ptr + bh * VALUE_DIM if PADDED else run_v_ptr,
            dk_ptr + b.to(tl.int64) * stride_dk_b + h * stride_dk_h, dv_ptr + b.to(tl.int64) * stride_dv_b + h * stride_dv_h,
            stride_dk_t, stride_dv_t, split == 0, tail_start, sink_length,
            dense_ok, dense_head, dense_token, length, mask_ptr, stride_m_h, stride_m_q, window, cap, o_ptr, lse_ptr,
            QUERIES, WIDE, COLS, BLOCK, KEY_DIM, KEY_PAD, VALUE_DIM, VALUE_PAD, PADDED, CAUSAL, WINDOW, CAP, MASK, ASM,
        )
    else:
        column_ok, head, token = _queries(block * COLS, h, COLS, COLUMNS, QUERIES)
        row = b.to(tl.int64)
        if ROWS:
            row = tl.load(rows_ptr + b)
        tile = (row * heads + h) * capacity
        slice_index = split - dense_splits
        # Slices differ by one tile at most.
        first = (slice_index * count) // splits
        last = ((slice_index + 1) * count) // splits
        q = _rotated_query(
            q_ptr, head * stride_q_h + token * stride_q_q, column_ok, prescale_ptr + bh * KEY_DIM if PRESCALE else prescale_ptr, scale,
            KEY_DIM, KEY_PAD, KEY_BLOCK_BITS, COLS, PRESCALE, SPLIT_DTYPE,
        )
        if KEY_BLOCK_BITS > 0:
            q *= 2.0 ** (-0.5 * KEY_BLOCK_BITS)
        _attend_tiles(
            q, first, last, tile, pad, sink_length, column_ok, head, token, length, mask_ptr, stride_m_h, stride_m_q, window, cap,
            kc_ptr, kcs_ptr, kts_ptr, kzp_ptr, vc_ptr, vcs_ptr, vts_ptr, vzp_ptr, o_ptr, lse_ptr,
            QUERIES, COLS, TILE, KEY_DIM, KEY_PAD, VALUE_DIM, VALUE_PAD, KEY_BITS, VALUE_BITS,
            PADDED, TILE_CAUSAL, WINDOW, CAP, MASK, STAGES, ASM,
        )


@triton.jit
def _signs(ORDER: tl.constexpr):
    """The Hadamard matrix of order 1 to 16, unscaled."""
    i = tl.arange(0, ORDER)
    common = i[:, None] & i[None, :]
    odd = (common ^ (common >> 1) ^ (common >> 2) ^ (common >> 3)) & 1
    return 1.0 - 2.0 * odd.to(tl.float32)


@triton.jit
def _unrotated(x, DIM: tl.constexpr, BLOCK_BITS: tl.constexpr):
    """Block-diagonal Hadamard rotation of a vector x [DIM]: two small transforms along the two halves of the index."""
    LOW: tl.constexpr = 1 << (BLOCK_BITS if BLOCK_BITS < 4 else 4)
    HIGH: tl.constexpr = (1 << BLOCK_BITS) // LOW
    OUTER: tl.constexpr = DIM // (LOW * HIGH)
    x = tl.reshape(x, (OUTER * HIGH, 1, LOW))
    x = tl.sum(x * _signs(LOW)[None, :, :], 2)  # [OUTER * HIGH, LOW]
    if HIGH > 1:
        x = tl.reshape(x, (OUTER, 1, HIGH, LOW))
        x = tl.sum(x * tl.reshape(_signs(HIGH), (1, HIGH, HIGH, 1)), 2)
    return tl.reshape(x, (DIM,)) * 2.0 ** (-0.5 * BLOCK_BITS)


@triton.jit(do_not_specialize=["dense_splits", "splits", "lse_start"])
def _combine_kernel(
    part_ptr, sinks_ptr, out_ptr, heads, dense_splits, splits, lse_start,
    QUERIES: tl.constexpr, COLUMNS: tl.constexpr, COLS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK_BITS: tl.constexpr, DENSE_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr, SINKS: tl.constexpr,
):
    """``out = (sum_s w_s o_s) / (sum_s w_s + exp(sink))``, with ``w_s = exp(lse_s)``; what came from tiles is un-rotated.

    Grid: (batch * heads, query heads per KV head * query tokens).
    Reads: the workspace of :func:`_split_kernel`.
    Writes: out [batch, QUERIES, query heads, VALUE_DIM].
    Reference: kvarn_hf/reference/attention.py
    """
    bh, column = tl.program_id(0), tl.program_id(1)
    unit = bh * ((COLUMNS + COLS - 1) // COLS) + column // COLS
    part = unit.to(tl.int64) * (dense_splits + splits) * COLS + column % COLS
    channel = tl.arange(0, VALUE_PAD)
    dense, packed = tl.arange(0, DENSE_PAD), tl.arange(0, SPLITS_PAD)
    dense_at, packed_at = part + dense * COLS, part + (dense_splits + packed) * COLS
    dense_lse = tl.load(part_ptr + lse_start + dense_at, mask=dense < dense_splits, other=float("-inf"))
    packed_lse = tl.load(part_ptr + lse_start + packed_at, mask=packed < splits, other=float("-inf"))
    dense_o = tl.load(
        part_ptr + dense_at[:, None] * VALUE_PAD + channel[None, :], mask=(dense < dense_splits)[:, None], other=0.0
    )
    packed_o = tl.load(
        part_ptr + packed_at[:, None] * VALUE_PAD + channel[None, :], mask=(packed < splits)[:, None], other=0.0
    )
    m = tl.maximum(tl.max(dense_lse, 0), tl.max(packed_lse, 0))
    head = (bh % heads) * (COLUMNS // QUERIES) + column // QUERIES
    sink = 0.0
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        m = tl.maximum(m, sink)
    m = tl.where(m == float("-inf"), 0.0, m)  # a query that sees nothing gets zeros
    dense_weight, packed_weight = tl.exp2(dense_lse - m), tl.exp2(packed_lse - m)
    total = tl.sum(dense_weight, 0) + tl.sum(packed_weight, 0)
    if SINKS:
        total += tl.exp2(sink - m)
    out = _unrotated(tl.sum(packed_o * packed_weight[:, None], 0), VALUE_PAD, BLOCK_BITS)
    out += tl.sum(dense_o * dense_weight[:, None], 0)
    out = out / tl.where(total == 0, 1.0, total)
    b, query_heads = bh // heads, heads * (COLUMNS // QUERIES)
    at = ((b * QUERIES + column % QUERIES) * query_heads + head).to(tl.int64) * VALUE_DIM
    tl.store(out_ptr + at + channel, out.to(out_ptr.dtype.element_ty), mask=channel < VALUE_DIM)


def supported(query: torch.Tensor, value_dim: int, tile_size: int, key_bits: int, value_bits: int) -> bool:
    """Whether :func:`decode_attention` takes such a call.

    Parameters
    ----------
    query : torch.Tensor
        ``[batch, query_heads, query_tokens, key_dim]``.
    value_dim, tile_size, key_bits, value_bits : int
        Of the cache.
    """
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and 1 <= query.shape[2] <= _MOST_TOKENS
        and all(16 <= dim <= 256 and dim % 16 == 0 for dim in (query.shape[3], value_dim))
        and tile_size in (64, 128)
        and {key_bits, value_bits} <= {2, 3, 4, 8}
    )


def decode_attention(
    query: torch.Tensor,
    key_arena: tuple[torch.Tensor, ...],
    value_arena: tuple[torch.Tensor, ...],
    prescale: torch.Tensor | None,
    rows: torch.Tensor | None,
    dense_keys: torch.Tensor,
    dense_values: torch.Tensor,
    padding: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    mask: torch.Tensor | None,
    *,
    count: int,
    sink_length: int,
    key_bits: int,
    value_bits: int,
    rotated: bool,
    scaling: float,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Attention of the newest ``query_tokens`` tokens over sinks, packed tiles and tail, in two launches.

    ``out = softmax(scaling q k^T + mask) v``, with k and v what dequantizing the cache would give.

    Parameters
    ----------
    query : torch.Tensor
        ``[batch, query_heads, query_tokens, key_dim]``, float16 or bfloat16, 1 to 16 tokens, any strides.
    key_arena, value_arena : tuple of torch.Tensor
        Codes, channel scale, token scale and zero point, ``[rows, heads, capacity, ...]``, contiguous.
    prescale : torch.Tensor, optional
        ``[batch, heads, key_dim]``, float16: the query is divided by it.
    rows : torch.Tensor, optional
        ``[batch]``, int64: each batch row's arena row; None means its own.
    dense_keys, dense_values : torch.Tensor
        ``[batch, heads, tokens, head_dim]``, the sinks and then the tail; the dtype of ``query``, any strides but for the last dimension.
    padding : tuple of torch.Tensor, optional
        Length ``[batch]`` (int64) of the run of identical tokens that each row begins with, and that token's key and value
        ``[batch, heads, 1, head_dim]``. The sinks then stand behind the run.
    mask : torch.Tensor, optional
        ``[batch or 1, 1 or query_heads, query_tokens, tokens or more]``, bool (True attends) or added to the scores.
        Without one, a query token sees everything up to itself if ``causal``, and everything otherwise.
    count : int
        Tiles in use.
    sink_length, key_bits, value_bits : int
        Of the cache.
    rotated : bool
        Whether tiles are stored rotated.
    scaling : float
        Factor of the scores.
    sliding_window : int, optional
        A query token sees the newest ``sliding_window`` tokens only, itself included.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    sinks : torch.Tensor, optional
        ``[query_heads]``: logits that take part in the softmax and have no value.
    launch : Launch, optional
        How to cut the work; None looks it up in :mod:`kvarn_kernels.launch_table`.

    Returns
    -------
    torch.Tensor
        ``[batch, query_tokens, query_heads, value_dim]``, contiguous, the dtype of ``query``. The same bits at every call.

    Raises
    ------
    ValueError
        If the call is one that :func:`supported` refuses.
    """
    key_codes, key_channel, key_token, key_zero = key_arena
    value_codes, value_channel, value_token, value_zero = value_arena
    batch, query_heads, queries, key_dim = query.shape
    heads, capacity, tile = key_codes.shape[1], key_codes.shape[2], key_token.shape[-1]
    value_dim = value_channel.shape[-1]
    if not supported(query, value_dim, tile, key_bits, value_bits):
        raise ValueError(
            f"query must hold 1 to {_MOST_TOKENS} tokens per row in float16 or bfloat16 and head_dims must be multiples of 16 "
            f"up to 256, got {tuple(query.shape)}, {query.dtype} and value head_dim {value_dim}"
        )
    if query.stride(3) != 1:
        query = query.contiguous()
    columns = query_heads // heads * queries
    cols = 4 if columns <= 4 else _MOST_COLUMNS
    key_pad, value_pad = _padded(key_dim, 32), _padded(value_dim, 64)
    units = batch * heads * -(-columns // cols)
    dense_length = dense_keys.shape[2]
    if launch is None:
        # Rounded up: the tail grows by one at every step, and the plan need not be made again each time.
        dense_rounded = -(-dense_length // 64) * 64
        launch = attention_launch(query.device.index, units, count, dense_rounded, cols, max(key_pad, value_pad))
    splits, dense_splits, block, warps, stages, registers = launch
    slices = units * (splits + dense_splits) * cols
    part = torch.empty(slices * (value_pad + 1), dtype=torch.float32, device=query.device)
    out = torch.empty((batch, queries, query_heads, value_dim), dtype=query.dtype, device=query.device)
    mask_kind, mask_strides = 0, (0, 0, 0)
    if mask is not None:
        mask_kind = 1 if mask.dtype == torch.bool else 2
        mask_strides = tuple(0 if mask.shape[i] == 1 else mask.stride(i) for i in range(3))
        mask = mask.view(torch.uint8) if mask_kind == 1 else mask
    pad_length, run_key, run_value = (None, None, None) if padding is None else padding
    see_all = mask is not None or not causal
    value_bits_of_block = _block_bits(value_dim) if rotated else 0
    options = {"num_warps": warps} if registers is None else {"num_warps": warps, "maxnreg": registers}
    with _on_device(query):
        _split_kernel[(units, splits + dense_splits)](
            query, key_codes, key_channel, key_token, key_zero, value_codes, value_channel, value_token, value_zero,
            prescale, rows, dense_keys, dense_values, pad_length, run_key, run_value, mask, part,
            query.stride(0), query.stride(1), query.stride(2),
            dense_keys.stride(0), dense_keys.stride(1), dense_keys.stride(2),
            dense_values.stride(0), dense_values.stride(1), dense_values.stride(2),
            *mask_strides,
            heads, count, capacity, dense_length, sink_length, dense_splits, splits,
            scaling * LOG2E, sliding_window or 0, (softcap or 0.0) * LOG2E, slices * value_pad,
            queries, columns, cols, tile, block, key_dim, key_pad, value_dim, value_pad, key_bits, value_bits,
            _block_bits(key_dim) if rotated else 0, prescale is not None, rows is not None, padding is not None,
            queries > 1 and not see_all, not see_all and dense_length - sink_length < queries,
            sliding_window is not None, softcap is not None, mask_kind, _SPLIT_DTYPE, stages, _ASSEMBLY,
            **options,
        )
        _combine_kernel[(batch * heads, columns)](
            part, sinks, out, heads, dense_splits, splits, slices * value_pad,
            queries, columns, cols, value_dim, value_pad, value_bits_of_block,
            _power_of_two(dense_splits), _power_of_two(max(1, splits)), sinks is not None, num_warps=4,
        )
    return out


def _on_device(x: torch.Tensor) -> AbstractContextManager[object]:
    # Entering the context costs microseconds, and is needed only when another GPU is current.
    return nullcontext() if x.device.type == "cpu" or x.device.index == torch.cuda.current_device() else torch.cuda.device(x.device)


def _padded(dim: int, least: int) -> int:
    return max(least, _power_of_two(dim))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _block_bits(dim: int) -> int:
    return (dim & -dim).bit_length() - 1
