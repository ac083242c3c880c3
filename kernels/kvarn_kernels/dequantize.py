"""Packed tiles to dense keys and values, un-rotated, beside the sinks and the tail: one launch.

A program is one warp, and everything stays in its registers. Eight tokens at a time are an array
``[channel // 8 % 4, token, channel // 32, channel % 8]``: the first two count the lanes, as in a tensor core's operand
and its result, and a lane reads and writes eight neighbouring channels. The product with a 16 x 16 matrix transforms
channel bits 0, 1, 3 and 4; sums and differences of registers the others.

The loops over the codes of a byte stay rolled: unrolled, their code would overflow the instruction cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvarn_kernels.arithmetic import centre, exponent_of, power_of_two, reciprocal
from kvarn_kernels.launch import Call, launch, padded, rotation_block

# Channels to a program, at most: more would not fit the registers of one warp.
_CHANNELS = 128
# Programs to a tile's channels: two even out the last wave of programs.
_PIECES = 2


@triton.jit
def _vector(start, OUTER: tl.constexpr):
    """Channels ``start`` on, ``[4, 1, OUTER, 8]``."""
    outer = tl.arange(0, OUTER)[None, None, :, None] * 32
    return start + outer + tl.arange(0, 4)[:, None, None, None] * 8 + tl.arange(0, 8)[None, None, None, :]


@triton.jit
def _by_channel(ptr, start, other, OUTER: tl.constexpr, DIM: tl.constexpr):
    """``ptr[channel]`` for channels ``start`` on, the same for every token: ``[4, 8, OUTER, 8]``."""
    # Pointers, not values, are broadcast: then they are loaded in the layout in which they are used.
    c = tl.broadcast_to(_vector(start, OUTER), (4, 8, OUTER, 8))
    if DIM % (OUTER * 32) == 0:
        return tl.load(ptr + c)
    else:
        return tl.load(ptr + c, mask=c < DIM, other=other)


@triton.jit
def _field(byte, shift, WIDTH: tl.constexpr, INTERPRETED: tl.constexpr):
    """The code of WIDTH bits from ``shift`` on in every byte: float16, or float32 where interpreted."""
    if INTERPRETED:
        return ((byte >> shift) & (2**WIDTH - 1)).to(tl.float32) - centre(WIDTH)
    else:
        # 0x6400 + n is 1024 + n in float16, so that four bytes take six instructions.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            shr.b32 t, $2, $4;
            and.b32 t, t, $3;
            prmt.b32 $0, t, 0x64646464, 0x4140;
            prmt.b32 $1, t, 0x64646464, 0x4342;
            add.rn.f16x2 $0, $0, $8;
            add.rn.f16x2 $1, $1, $9;
            }""",
            "=&r,=&r,r,r,r,r,r,r,r,r",
            [
                byte,
                tl.full([], 2**WIDTH - 1, tl.uint8),
                shift,
                tl.full([], -1024.0 - centre(WIDTH), tl.float16),
            ],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def _operand(x, y, z, INTERPRETED: tl.constexpr):
    """``x * y + z``, rounded once."""
    if INTERPRETED:
        return x * y + z
    else:
        # Not pure: the compiler would look through it for the codes' width, and choose the operand's layout for that.
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, y, z], dtype=tl.float16, is_pure=False, pack=2
        )


@triton.jit
def _signs(BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """The Hadamard matrix of channel bits 0, 3, 4, 1 (index bits 0 to 3), unscaled; the identity beyond BLOCK."""
    BITS: tl.constexpr = 9 if BLOCK == 8 else (11 if BLOCK == 16 else 15)
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    odd = (0x6996 >> (i & j & BITS)) & 1
    return tl.where(((i ^ j) & (15 - BITS)) == 0, 1.0 - 2.0 * odd.to(tl.float32), 0.0).to(DTYPE)


@triton.jit
def _product(x, signs, total, OUTER: tl.constexpr, INTERPRETED: tl.constexpr):
    """``total`` plus ``x`` ``[4, 8, OUTER, 8]`` transformed over channel bits 0, 1, 3 and 4: ``[OUTER * 16, 16]``."""
    x = tl.permute(tl.reshape(x, (4, 8, OUTER, 2, 2, 2)), (2, 3, 1, 4, 0, 5))
    return tl.dot(tl.reshape(x, (OUTER * 16, 16)), signs, total, input_precision="ieee" if INTERPRETED else None)


@triton.jit
def _butterfly(x, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    a, b = tl.split(tl.permute(tl.reshape(x, (LEFT, 2, RIGHT)), (0, 2, 1)))
    return tl.permute(tl.join(a + b, a - b), (0, 2, 1))


@triton.jit
def _transformed(x, OUTER: tl.constexpr, BLOCK: tl.constexpr):
    """What :func:`_product` gave, transformed over channel bits 2, 5 and 6 too, ``[4, 8, OUTER, 8]``."""
    x = _butterfly(x, OUTER, 128)
    if BLOCK > 32 and OUTER > 1:
        x = _butterfly(x, OUTER // 2, 256)
    if BLOCK > 64 and OUTER > 2:
        x = _butterfly(x, OUTER // 4, 512)
    return tl.reshape(tl.permute(tl.reshape(x, (OUTER, 2, 8, 2, 4, 2)), (4, 2, 0, 1, 3, 5)), (4, 8, OUTER, 8))


@triton.jit
def _sign(a, b):
    """``(-1) ** popcount(a & b)`` for numbers below 4."""
    return 1.0 - 2.0 * (((a & b) ^ ((a & b) >> 1)) & 1).to(tl.float32)


@triton.jit
def _store(
    out_ptr,
    x,
    t,
    start,
    tile_position,
    dense_ptr,
    stride_t,
    stride_d,
    run_ptr,
    pad,
    sink_length,
    OUTER: tl.constexpr,
    DIM: tl.constexpr,
):
    """Write tokens ``t`` ``[8]`` of a tile; where left padding has put the run's token or a sink, those instead."""
    d = _vector(start, OUTER)
    x = x.to(out_ptr.dtype.element_ty)
    t = t[None, :, None, None]
    real = (d < DIM) & (t >= 0)
    if pad is not None:
        slot = tile_position + t - pad
        in_run, in_sink = slot < 0, (slot >= 0) & (slot < sink_length)
        run = tl.load(run_ptr + d + 0 * t, mask=in_run & real, other=0.0)
        sink = tl.load(dense_ptr + slot * stride_t + d.to(tl.int64) * stride_d, mask=in_sink & real, other=0.0)
        x = tl.where(in_run, run, tl.where(in_sink, sink, x))
    where = out_ptr + tile_position * DIM + (t * DIM + d)
    if DIM % (OUTER * 32) == 0:
        tl.store(where, x)
    else:
        tl.store(where, x, mask=real)


@triton.jit
def _key_bytes(codes_ptr, row, start, OUTER: tl.constexpr, DIM: tl.constexpr):
    """Bytes of rows ``row`` to ``row + 7``, ``[4, 8, OUTER, 8]``."""
    c = _vector(start, OUTER)
    where = codes_ptr + (row + tl.arange(0, 8))[None, :, None, None] * DIM + c
    if DIM % (OUTER * 32) == 0:
        return tl.load(where)
    else:
        return tl.load(where, mask=c < DIM, other=0)


@triton.jit
def _key_codes(
    byte,
    high,
    row,
    i,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Codes ``i`` of the bytes: those of the tokens ``row + i * (rows of bytes)``."""
    if BITS == 3:
        # Rows of high bits are half as many, and hold eight tokens' each.
        half = row // (TILE // 8)
        return _field(byte, 2 * i, 2, INTERPRETED) + 4.0 * _field(high, half + 2 * i, 1, INTERPRETED)
    else:
        return _field(byte, i * BITS, BITS, INTERPRETED)


@triton.jit
def _value_words(codes_ptr, t, first, SUB: tl.constexpr, HELD: tl.constexpr, OUTER: tl.constexpr, TILE: tl.constexpr):
    """Tokens ``t`` to ``t + 31`` of rows ``first`` on of HELD, four bytes to a word: ``[4, 8, OUTER, SUB]``."""
    outer, sub = tl.arange(0, OUTER)[None, None, :, None], tl.arange(0, SUB)[None, None, None, :]
    row = first + (outer * 4 + tl.arange(0, 4)[:, None, None, None]) * SUB + sub
    words_ptr = codes_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    # Not a sum: the compiler would see neighbours in it, and give one lane four words of a row.
    column = t // 4 | tl.arange(0, 8)[None, :, None, None]
    where = words_ptr + row * (TILE // 4) + column
    if HELD % (OUTER * 4 * SUB) == 0:
        return tl.load(where)
    else:
        return tl.load(where, mask=row < HELD, other=0)


@triton.jit
def _two_fields(
    word,
    i,
    A: tl.constexpr,
    B: tl.constexpr,
    WIDTH: tl.constexpr,
    CENTRE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The numbers of WIDTH bits from A and from B on in byte ``i`` of every word, less CENTRE: as :func:`_field`."""
    MASK: tl.constexpr = 2**WIDTH - 1
    if INTERPRETED:
        byte = word >> (8 * i)
        return ((byte >> A) & MASK).to(tl.float32) - CENTRE, ((byte >> B) & MASK).to(tl.float32) - CENTRE
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, x, y;
            prmt.b32 t, $2, 0, $3;
            lop3.b32 t, t, $4, 0x64006400, 0xEA;
            mov.b32 x, {$5, $6};
            mov.b32 y, {$7, $8};
            fma.rn.f16x2 t, t, x, y;
            mov.b32 {$0, $1}, t;
            }""",
            "=h,=h,r,r,r,h,h,h,h",
            [
                word,
                0x4040 + i * 0x0101,
                tl.full([], (MASK << A) + (MASK << (B + 16)), tl.int32),
                tl.full([], 2.0**-A, tl.float16),
                tl.full([], 2.0**-B, tl.float16),
                tl.full([], -(1024 * 2.0**-A + CENTRE), tl.float16),
                tl.full([], -(1024 * 2.0**-B + CENTRE), tl.float16),
            ],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _value_codes(
    word,
    high,
    i,
    BITS: tl.constexpr,
    OUTER: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Codes of byte ``i`` of every word, less half their range: ``[4, 8, OUTER, 8]``."""
    CENTRE: tl.constexpr = 2 ** (BITS - 1)
    if BITS == 8:
        x, _ = _two_fields(word, i, 0, 0, 8, CENTRE, INTERPRETED)
    elif BITS == 4:
        a, b = _two_fields(word, i, 0, 4, 4, CENTRE, INTERPRETED)
        x = tl.join(a, b)
    else:
        a, b = _two_fields(word, i, 0, 2, 2, CENTRE, INTERPRETED)
        c, d = _two_fields(word, i, 4, 6, 2, CENTRE, INTERPRETED)
        if BITS == 3:
            e, f = _two_fields(high, i, 0, 1, 1, 0, INTERPRETED)
            g, h = _two_fields(high, i, 2, 3, 1, 0, INTERPRETED)
            a, b, c, d = a + 4.0 * e, b + 4.0 * f, c + 4.0 * g, d + 4.0 * h
        x = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(x, (4, 8, OUTER, 8))


@triton.jit
def _high_words(codes_ptr, t, start, OUTER: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr):
    """The high bits of the words of a 3-bit tile, from bit 0 of every byte on; a row of them holds eight channels."""
    high = _value_words(codes_ptr + DIM // 4 * TILE, t, start // 8, 1, DIM // 8, OUTER, TILE)
    return high >> (4 * tl.arange(0, 2))[None, None, None, :]


@triton.jit
def _dequantize_keys(
    codes_ptr,
    channel_scale_ptr,
    token_scale_ptr,
    zero_point_ptr,
    prescale_ptr,
    out_ptr,
    tile_position,
    dense_ptr,
    stride_t,
    stride_d,
    run_ptr,
    pad,
    sink_length,
    start,
    piece,
    PIECES: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    OUTER: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Channels ``start`` on of a piece of one tile.

    ``token_scale * ((codes * channel_scale + zero_point) @ H) / prescale``
    """
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    ROWS: tl.constexpr = TILE * WIDTH // 8
    STEPS: tl.constexpr = ROWS // 8 // PIECES
    CHANNELS: tl.constexpr = OUTER * 32
    # The channels that these mix with: their own block of the rotation.
    CHUNKS: tl.constexpr = BLOCK // CHANNELS if ROTATED and BLOCK > CHANNELS else 1
    DTYPE: tl.constexpr = tl.float16 if ROTATED and not INTERPRETED else tl.float32
    LARGEST_CODE: tl.constexpr = centre(BITS) if centre(BITS) > 0 else 2**BITS - 1
    first = start // (CHUNKS * CHANNELS) * (CHUNKS * CHANNELS)
    row = piece * (STEPS * 8)
    if CHUNKS == 1:
        byte = _key_bytes(codes_ptr, row, start, OUTER, DIM)
    unit = 1.0
    factor = 1.0
    signs = 0
    if ROTATED:
        mixed = first + tl.arange(0, CHUNKS * CHANNELS)
        span = tl.load(channel_scale_ptr + mixed, mask=mixed < DIM, other=0.0).to(tl.float32) * LARGEST_CODE
        span += tl.abs(tl.load(zero_point_ptr + mixed, mask=mixed < DIM, other=0.0).to(tl.float32))
        exponent = exponent_of(tl.max(span, 0)) + 1
        unit, factor = power_of_two(-exponent), power_of_two(exponent) * BLOCK**-0.5
        signs = _signs(BLOCK, DTYPE)
    scale = (_by_channel(channel_scale_ptr, start, 0.0, OUTER, DIM).to(tl.float32) * unit).to(DTYPE)
    zero = (_by_channel(zero_point_ptr, start, 0.0, OUTER, DIM).to(tl.float32) * unit).to(DTYPE)
    if prescale_ptr is not None:
        inverse = reciprocal(_by_channel(prescale_ptr, start, 1.0, OUTER, DIM).to(tl.float32), INTERPRETED)
    for step in range(STEPS):
        if CHUNKS == 1:
            high = 0
            if BITS == 3:
                high = _key_bytes(codes_ptr + ROWS * DIM, row % (TILE // 8), start, OUTER, DIM)
            # The next step's bytes are on their way during this one's work.
            current = byte
            byte = _key_bytes(codes_ptr, row + (8 if step + 1 < STEPS else 0), start, OUTER, DIM)
        for i in range(8 // WIDTH):
            t = row + i * ROWS + tl.arange(0, 8)
            token_scale = tl.load(token_scale_ptr + t).to(tl.float32) * factor
            if ROTATED:
                x = tl.zeros([OUTER * 16, 16], tl.float32)
                for chunk in tl.static_range(CHUNKS):
                    if CHUNKS > 1:
                        c = first + chunk * CHANNELS
                        sign = unit * _sign((start - first) // CHANNELS, chunk)
                        scale = (_by_channel(channel_scale_ptr, c, 0.0, OUTER, DIM).to(tl.float32) * sign).to(DTYPE)
                        zero = (_by_channel(zero_point_ptr, c, 0.0, OUTER, DIM).to(tl.float32) * sign).to(DTYPE)
                        current = _key_bytes(codes_ptr, row, c, OUTER, DIM)
                        high = 0
                        if BITS == 3:
                            high = _key_bytes(codes_ptr + ROWS * DIM, row % (TILE // 8), c, OUTER, DIM)
                    codes = _key_codes(current, high, row, i, BITS, TILE, INTERPRETED)
                    x = _product(_operand(codes, scale, zero, INTERPRETED), signs, x, OUTER, INTERPRETED)
                x = _transformed(x, OUTER, BLOCK)
            else:
                x = _key_codes(current, high, row, i, BITS, TILE, INTERPRETED).to(tl.float32) * scale + zero
            x *= token_scale[None, :, None, None]
            if prescale_ptr is not None:
                x *= inverse
            _store(
                out_ptr,
                x,
                t,
                start,
                tile_position,
                dense_ptr,
                stride_t,
                stride_d,
                run_ptr,
                pad,
                sink_length,
                OUTER,
                DIM,
            )
        row += 8


@triton.jit
def _dequantize_values(
    codes_ptr,
    channel_scale_ptr,
    token_scale_ptr,
    zero_point_ptr,
    out_ptr,
    tile_position,
    dense_ptr,
    stride_t,
    stride_d,
    run_ptr,
    pad,
    sink_length,
    start,
    piece,
    PIECES: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    OUTER: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Channels ``start`` on of a piece of one tile.

    ``token_scale * ((codes * channel_scale) @ H) + zero_point * (channel_scale @ H)``
    """
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    PER_BYTE: tl.constexpr = 8 // WIDTH
    # Codes count from the middle of their range here, whatever the zero point counts from.
    CENTRE: tl.constexpr = 2 ** (BITS - 1)
    CHANNELS: tl.constexpr = OUTER * 32
    CHUNKS: tl.constexpr = BLOCK // CHANNELS if ROTATED and BLOCK > CHANNELS else 1
    STEPS: tl.constexpr = TILE // 32 // PIECES
    DTYPE: tl.constexpr = tl.float16 if ROTATED and not INTERPRETED else tl.float32
    first = start // (CHUNKS * CHANNELS) * (CHUNKS * CHANNELS)
    begin = piece * (STEPS * 32)
    if CHUNKS == 1:
        following = _value_words(codes_ptr, begin, start // PER_BYTE, WIDTH, DIM // PER_BYTE, OUTER, TILE)
    factor = 1.0
    unit = 1.0
    signs = 0
    if ROTATED:
        mixed = first + tl.arange(0, CHUNKS * CHANNELS)
        largest = tl.max(tl.load(channel_scale_ptr + mixed, mask=mixed < DIM, other=0.0).to(tl.float32), 0)
        # The centred codes are as large as CENTRE.
        exponent = exponent_of(largest) + BITS
        unit, factor = power_of_two(-exponent), power_of_two(exponent) * BLOCK**-0.5
        signs = _signs(BLOCK, DTYPE)
        total = tl.zeros([OUTER * 16, 16], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            sign = unit * _sign((start - first) // CHANNELS, chunk)
            scale = (
                _by_channel(channel_scale_ptr, first + chunk * CHANNELS, 0.0, OUTER, DIM).to(tl.float32) * sign
            ).to(DTYPE)
            total = _product(scale, signs, total, OUTER, INTERPRETED)
        of_ones = _transformed(total, OUTER, BLOCK)
    else:
        scale = _by_channel(channel_scale_ptr, start, 0.0, OUTER, DIM).to(tl.float32)
        of_ones = scale
    nothing = tl.zeros([4, 8, OUTER, 8], DTYPE)
    for step in range(STEPS):
        if CHUNKS == 1:
            high = 0
            # The next step's bytes are on their way during this one's work.
            word = following
            after = begin + (32 if step + 1 < STEPS else 0)
            following = _value_words(codes_ptr, after, start // PER_BYTE, WIDTH, DIM // PER_BYTE, OUTER, TILE)
            if BITS == 3:
                high = _high_words(codes_ptr, begin, start, OUTER, TILE, DIM)
        for i in range(4):
            t = begin + tl.arange(0, 8) * 4 + i
            token_scale = tl.load(token_scale_ptr + t).to(tl.float32)
            zero = tl.load(zero_point_ptr + t).to(tl.float32) + (CENTRE - centre(BITS)) * token_scale
            if ROTATED:
                x = tl.zeros([OUTER * 16, 16], tl.float32)
                for chunk in tl.static_range(CHUNKS):
                    if CHUNKS > 1:
                        c = first + chunk * CHANNELS
                        sign = unit * _sign((start - first) // CHANNELS, chunk)
                        scale = (_by_channel(channel_scale_ptr, c, 0.0, OUTER, DIM).to(tl.float32) * sign).to(DTYPE)
                        word = _value_words(codes_ptr, begin, c // PER_BYTE, WIDTH, DIM // PER_BYTE, OUTER, TILE)
                        high = 0
                        if BITS == 3:
                            high = _high_words(codes_ptr, begin, c, OUTER, TILE, DIM)
                    codes = _value_codes(word, high, i, BITS, OUTER, INTERPRETED)
                    x = _product(_operand(codes, scale, nothing, INTERPRETED), signs, x, OUTER, INTERPRETED)
                x = _transformed(x, OUTER, BLOCK)
            else:
                x = _value_codes(word, high, i, BITS, OUTER, INTERPRETED).to(tl.float32) * scale
            x = x * (token_scale * factor)[None, :, None, None] + of_ones * (zero * factor)[None, :, None, None]
            _store(
                out_ptr,
                x,
                t,
                start,
                tile_position,
                dense_ptr,
                stride_t,
                stride_d,
                run_ptr,
                pad,
                sink_length,
                OUTER,
                DIM,
            )
        begin += 32


@triton.jit
def _dense_part(
    codes_ptr,
    channel_scale_ptr,
    token_scale_ptr,
    zero_point_ptr,
    prescale_ptr,
    dense_ptr,
    stride_t,
    stride_d,
    run_ptr,
    pad,
    out_ptr,
    block,
    start,
    count,
    dense_length,
    sink_length,
    KEYS: tl.constexpr,
    PIECES: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    OUTER: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One row and head's tokens of one block, channels ``start`` on; every pointer is at that row and head."""
    if block < count * PIECES:
        slot = (block // PIECES).to(tl.int64)
        piece = block % PIECES
        position = sink_length + slot * TILE
        if KEYS:
            _dequantize_keys(
                codes_ptr + slot * (TILE * BITS // 8 * DIM),
                channel_scale_ptr + slot * DIM,
                token_scale_ptr + slot * TILE,
                zero_point_ptr + slot * DIM,
                prescale_ptr,
                out_ptr,
                position,
                dense_ptr,
                stride_t,
                stride_d,
                run_ptr,
                pad,
                sink_length,
                start,
                piece,
                PIECES,
                BITS,
                TILE,
                DIM,
                OUTER,
                BLOCK,
                ROTATED,
                INTERPRETED,
            )
        else:
            _dequantize_values(
                codes_ptr + slot * (DIM * BITS // 8 * TILE),
                channel_scale_ptr + slot * DIM,
                token_scale_ptr + slot * TILE,
                zero_point_ptr + slot * TILE,
                out_ptr,
                position,
                dense_ptr,
                stride_t,
                stride_d,
                run_ptr,
                pad,
                sink_length,
                start,
                piece,
                PIECES,
                BITS,
                TILE,
                DIM,
                OUTER,
                BLOCK,
                ROTATED,
                INTERPRETED,
            )
    else:
        d = start + tl.arange(0, OUTER * 32)
        real = (d < DIM)[None, :]
        dense_ptrs = dense_ptr + (d.to(tl.int64) * stride_d)[None, :]
        # Of the dense tokens: the sinks, then the tail.
        begin = (block - count * PIECES).to(tl.int64) * (TILE // PIECES)
        for step in range(TILE // PIECES // 16):
            index = begin + step * 16 + tl.arange(0, 16)
            is_sink, held = index < sink_length, (index < dense_length)[:, None] & real
            position = tl.where(is_sink, index, index + count.to(tl.int64) * TILE)
            if pad is None:
                x = tl.load(dense_ptrs + (index * stride_t)[:, None], mask=held, other=0.0)
            else:
                in_run = is_sink & (index < pad)
                index = tl.where(is_sink, index - pad, index)
                x = tl.load(dense_ptrs + (index * stride_t)[:, None], mask=held & (index >= 0)[:, None], other=0.0)
                run = tl.load(run_ptr + d[None, :], mask=in_run[:, None] & real, other=0.0)
                x = tl.where(in_run[:, None], run, x)
            tl.store(out_ptr + (position * DIM)[:, None] + d[None, :], x, mask=held)


@triton.jit(do_not_specialize=["count", "capacity", "dense_length", "sink_length", "blocks"])
def dequantize_kernel(
    key_codes_ptr,
    key_channel_scale_ptr,
    key_token_scale_ptr,
    key_zero_point_ptr,
    value_codes_ptr,
    value_channel_scale_ptr,
    value_token_scale_ptr,
    value_zero_point_ptr,
    prescale_ptr,
    rows_ptr,
    key_ptr,
    value_ptr,
    padding_ptr,
    run_key_ptr,
    run_value_ptr,
    key_out_ptr,
    value_out_ptr,
    stride_k_b,
    stride_k_h,
    stride_k_t,
    stride_k_d,
    stride_v_b,
    stride_v_h,
    stride_v_t,
    stride_v_d,
    heads,
    count,
    capacity,
    dense_length,
    sink_length,
    blocks,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_OUTER: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_OUTER: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Dense keys and values: ``((codes * scale + zero_point) * other_scale) @ H / prescale``, sinks and tail copied.

    Grid
        ``(batch * heads * blocks * parts,)``. A part is ``32 * OUTER`` channels of the keys or of the values; a block
        is one of the PIECES of a tile, or (after all those) ``TILE / PIECES`` dense tokens.
    Reads
        The eight contiguous arenas ``[arena rows, heads, capacity, ...]``; the sinks and the tail,
        ``[batch, heads, dense_length, dim]`` by their strides; prescale, rows (int64 ``[batch]``) and the padding's
        length and run tokens, where given.
    Writes
        Contiguous ``[batch, heads, dense_length + count * TILE, dim]``, every element once.
    Precision
        Tiles before the rotation in float16 (2**-12 of the tile's largest), all sums in float32.
    Reference
        ``kvarn_hf.reference.quantize.dequantize_keys`` and ``dequantize_values``;
        ``kvarn_hf.padding.LeftPadding.restored``.
    """
    KEY_PARTS: tl.constexpr = (KEY_DIM + KEY_OUTER * 32 - 1) // (KEY_OUTER * 32)
    PARTS: tl.constexpr = KEY_PARTS + (VALUE_DIM + VALUE_OUTER * 32 - 1) // (VALUE_OUTER * 32)
    program = tl.program_id(0)
    part = program % PARTS
    block = program // PARTS % blocks
    row = program // PARTS // blocks  # of [batch, heads]
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    arena_row = batch if rows_ptr is None else tl.load(rows_ptr + batch)
    arena = (arena_row * heads + head) * capacity
    row = row.to(tl.int64)
    out = row * (dense_length + count.to(tl.int64) * TILE)
    pad = None if padding_ptr is None else tl.load(padding_ptr + batch)
    if part < KEY_PARTS:
        _dense_part(
            key_codes_ptr + arena * (TILE * KEY_BITS // 8 * KEY_DIM),
            key_channel_scale_ptr + arena * KEY_DIM,
            key_token_scale_ptr + arena * TILE,
            key_zero_point_ptr + arena * KEY_DIM,
            None if prescale_ptr is None else prescale_ptr + row * KEY_DIM,
            key_ptr + batch * stride_k_b + head * stride_k_h,
            stride_k_t,
            stride_k_d,
            None if run_key_ptr is None else run_key_ptr + row * KEY_DIM,
            pad,
            key_out_ptr + out * KEY_DIM,
            block,
            part * (KEY_OUTER * 32),
            count,
            dense_length,
            sink_length,
            True,
            PIECES,
            KEY_BITS,
            TILE,
            KEY_DIM,
            KEY_OUTER,
            KEY_BLOCK,
            ROTATED,
            INTERPRETED,
        )
    else:
        _dense_part(
            value_codes_ptr + arena * (VALUE_DIM * VALUE_BITS // 8 * TILE),
            value_channel_scale_ptr + arena * VALUE_DIM,
            value_token_scale_ptr + arena * TILE,
            value_zero_point_ptr + arena * TILE,
            None,
            value_ptr + batch * stride_v_b + head * stride_v_h,
            stride_v_t,
            stride_v_d,
            None if run_value_ptr is None else run_value_ptr + row * VALUE_DIM,
            pad,
            value_out_ptr + out * VALUE_DIM,
            block,
            (part - KEY_PARTS) * (VALUE_OUTER * 32),
            count,
            dense_length,
            sink_length,
            False,
            PIECES,
            VALUE_BITS,
            TILE,
            VALUE_DIM,
            VALUE_OUTER,
            VALUE_BLOCK,
            ROTATED,
            INTERPRETED,
        )


def dequantize_tiles(
    key_arena: tuple[torch.Tensor, ...],
    value_arena: tuple[torch.Tensor, ...],
    prescale: torch.Tensor | None,
    rows: torch.Tensor | None,
    dense_keys: torch.Tensor,
    dense_values: torch.Tensor,
    padding: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    *,
    count: int,
    sink_length: int,
    key_bits: int,
    value_bits: int,
    rotated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values of a layer, dense, in one launch.

    Parameters
    ----------
    key_arena, value_arena : tuple of torch.Tensor
        Contiguous codes (uint8), channel scale, token scale and zero point (float16),
        ``[arena rows, heads, capacity, ...]``; tile_size is the length of a token scale.
    prescale : torch.Tensor, optional
        ``[batch, heads, key_dim]``, float16: what the keys were multiplied by before the rotation.
    rows : torch.Tensor, optional
        ``[batch]``, int64: the arena row of every batch row; None means each its own.
    dense_keys, dense_values : torch.Tensor
        ``[batch, heads, sink_length + tail, head_dim]``, any strides; their dtype is the result's.
    padding : tuple of torch.Tensor, optional
        Length ``[batch]`` (int64) and the tokens ``[batch, heads, 1, head_dim]`` that every padded position reads; a
        row's sinks are read behind its padding.
    count : int
        Tiles in use.
    sink_length : int
        How many of the dense tokens come before the tiles.
    key_bits, value_bits : int
        2, 3, 4 or 8.
    rotated : bool
        False for codes of keys and values in the model's own frame.

    Returns
    -------
    keys, values : torch.Tensor
        ``[batch, heads, sink_length + count * tile_size + tail, head_dim]``, contiguous.
    """
    batch, heads, dense_length, key_dim = dense_keys.shape
    value_dim, size = dense_values.shape[3], key_arena[2].shape[-1]
    length = dense_length + count * size
    keys = dense_keys.new_empty(batch, heads, length, key_dim)
    values = dense_values.new_empty(batch, heads, length, value_dim)
    key_outer, value_outer = (min(max(padded(dim), 32), _CHANNELS) // 32 for dim in (key_dim, value_dim))
    blocks = count * _PIECES + triton.cdiv(dense_length, size // _PIECES)
    parts = triton.cdiv(key_dim, key_outer * 32) + triton.cdiv(value_dim, value_outer * 32)
    if batch * heads * blocks == 0:
        return keys, values
    pad, run_key, run_value = (None, None, None) if padding is None else (t.contiguous() for t in padding)
    call = Call(
        dequantize_kernel,
        (
            *(*key_arena, *value_arena),
            None if prescale is None else prescale.contiguous(),
            *(rows, dense_keys, dense_values, pad, run_key, run_value, keys, values),
        ),
        (*dense_keys.stride(), *dense_values.stride(), heads),
        (count, key_arena[0].shape[2], dense_length, sink_length, blocks),
        (
            size,
            _PIECES,
            *(key_dim, key_outer, rotation_block(key_dim), key_bits),
            *(value_dim, value_outer, rotation_block(value_dim), value_bits),
            rotated,
            not dense_keys.is_cuda,
        ),
        warps=1,
        stages=1,
    )
    launch(call, (batch * heads * blocks * parts,))
    return keys, values
