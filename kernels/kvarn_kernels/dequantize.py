"""Packed tiles to dense keys and values, un-rotated, beside the sinks and the tail: one launch.

A program is one warp, and everything stays in its registers. Eight tokens at a time are an array
``[channel // 8 % 4, token, channel // 32, channel % 8]``: the first two count the lanes, as in a tensor core's operand
and its result, and a lane reads and writes eight neighbouring channels. The product with a 16 x 16 matrix transforms
channel bits 0, 1, 3 and 4; sums and differences of registers the others.

The loops over the codes of a byte stay rolled: unrolled, their code would overflow the instruction cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvarn_kernels.arithmetic import INTERPRETED, centre, exponent_of, power_of_two, reciprocal
from kvarn_kernels.bundles import Held, Packed, Side, tile_at
from kvarn_kernels.launch import Call, launch, side

# Channels to a program, at most: more would not fit the registers of one warp.
_CHANNELS = 128
# Programs to a tile's channels: two even out the last wave of programs.
_PIECES = tl.constexpr(2)


class Form(NamedTuple):
    """What the kernel is compiled for.

    TILE : tokens of a tile
    KEYS, VALUES : Side; CHUNK, a multiple of 32, are the channels of one program
    """

    TILE: int
    KEYS: Side
    VALUES: Side


class Dense(NamedTuple):
    """Dense keys or values of one head.

    ptr, stride_token, stride_channel : the sinks, then the tail
    run : pointer to the token of the row's padding; None if no row has any
    pad : length of that run, or None
    sink_length : how many sinks there are
    """

    ptr: Any
    stride_token: Any
    stride_channel: Any
    run: Any
    pad: Any
    sink_length: Any


@triton.jit
def _vector(start, SIDE: tl.constexpr):
    """Channels ``start`` on, ``[4, 1, CHUNK / 32, 8]``."""
    outer = tl.arange(0, SIDE.CHUNK // 32)[None, None, :, None] * 32
    return start + outer + tl.arange(0, 4)[:, None, None, None] * 8 + tl.arange(0, 8)[None, None, None, :]


@triton.jit
def _by_channel(ptr, start, other, SIDE: tl.constexpr):
    """``ptr[channel]`` in float32 for channels ``start`` on, the same for every token: ``[4, 8, CHUNK / 32, 8]``."""
    # Pointers, not values, are broadcast: then they are loaded in the layout in which they are used.
    c = tl.broadcast_to(_vector(start, SIDE), (4, 8, SIDE.CHUNK // 32, 8))
    if SIDE.DIM % SIDE.CHUNK == 0:
        return tl.load(ptr + c).to(tl.float32)
    else:
        return tl.load(ptr + c, mask=c < SIDE.DIM, other=other).to(tl.float32)


@triton.jit
def _field(byte, shift, WIDTH: tl.constexpr):
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
            [byte, tl.full([], 2**WIDTH - 1, tl.uint8), shift, tl.full([], -1024.0 - centre(WIDTH), tl.float16)],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def _operand(x, y, z):
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
def _product(x, signs, total):
    """``total`` plus ``x`` ``[4, 8, outer, 8]`` transformed over channel bits 0, 1, 3 and 4: ``[outer * 16, 16]``."""
    OUTER: tl.constexpr = x.shape[2]
    x = tl.permute(tl.reshape(x, (4, 8, OUTER, 2, 2, 2)), (2, 3, 1, 4, 0, 5))
    return tl.dot(tl.reshape(x, (OUTER * 16, 16)), signs, total, input_precision="ieee" if INTERPRETED else None)


@triton.jit
def _butterfly(x, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    a, b = tl.split(tl.permute(tl.reshape(x, (LEFT, 2, RIGHT)), (0, 2, 1)))
    return tl.permute(tl.join(a + b, a - b), (0, 2, 1))


@triton.jit
def _transformed(x, BLOCK: tl.constexpr):
    """What :func:`_product` gave, transformed over channel bits 2, 5 and 6 too, ``[4, 8, outer, 8]``."""
    OUTER: tl.constexpr = x.shape[0] // 16
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
def _store(out_ptr, x, t, start, tile_position, dense, SIDE: tl.constexpr):
    """Write tokens ``t`` ``[8]`` of a tile; where left padding has put the run's token or a sink, those instead."""
    d = _vector(start, SIDE)
    x = x.to(out_ptr.dtype.element_ty)
    t = t[None, :, None, None]
    real = (d < SIDE.DIM) & (t >= 0)
    if dense.pad is not None:
        slot = tile_position + t - dense.pad
        in_run, in_sink = slot < 0, (slot >= 0) & (slot < dense.sink_length)
        run = tl.load(dense.run + d + 0 * t, mask=in_run & real, other=0.0)
        sink_ptrs = dense.ptr + slot * dense.stride_token + d.to(tl.int64) * dense.stride_channel
        sink = tl.load(sink_ptrs, mask=in_sink & real, other=0.0)
        x = tl.where(in_run, run, tl.where(in_sink, sink, x))
    where = out_ptr + tile_position * SIDE.DIM + (t * SIDE.DIM + d)
    if SIDE.DIM % SIDE.CHUNK == 0:
        tl.store(where, x)
    else:
        tl.store(where, x, mask=real)


@triton.jit
def _key_bytes(codes_ptr, row, start, SIDE: tl.constexpr):
    """Bytes of rows ``row`` to ``row + 7``, ``[4, 8, CHUNK / 32, 8]``."""
    c = _vector(start, SIDE)
    where = codes_ptr + (row + tl.arange(0, 8))[None, :, None, None] * SIDE.DIM + c
    if SIDE.DIM % SIDE.CHUNK == 0:
        return tl.load(where)
    else:
        return tl.load(where, mask=c < SIDE.DIM, other=0)


@triton.jit
def _key_codes(byte, high, row, i, BITS: tl.constexpr, TILE: tl.constexpr):
    """Codes ``i`` of the bytes: those of the tokens ``row + i * (rows of bytes)``."""
    if BITS == 3:
        # Rows of high bits are half as many, and hold eight tokens' each.
        half = row // (TILE // 8)
        return _field(byte, 2 * i, 2) + 4.0 * _field(high, half + 2 * i, 1)
    else:
        return _field(byte, i * BITS, BITS)


@triton.jit
def _value_words(codes_ptr, t, start, SUB: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr):
    """Tokens ``t`` to ``t + 31``, four bytes to a word, of the rows of channels ``start`` on, SUB of them to eight
    channels: ``[4, 8, CHUNK / 32, SUB]``."""
    OUTER: tl.constexpr = SIDE.CHUNK // 32
    HELD: tl.constexpr = SIDE.DIM // 8 * SUB
    first = start // (8 // SUB)
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
def _two_fields(word, i, A: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr, CENTRE: tl.constexpr):
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
def _value_codes(word, high, i, BITS: tl.constexpr):
    """Codes of byte ``i`` of every word, less half their range: ``[4, 8, outer, 8]``."""
    CENTRE: tl.constexpr = 2 ** (BITS - 1)
    if BITS == 8:
        x, _ = _two_fields(word, i, 0, 0, 8, CENTRE)
    elif BITS == 4:
        a, b = _two_fields(word, i, 0, 4, 4, CENTRE)
        x = tl.join(a, b)
    else:
        a, b = _two_fields(word, i, 0, 2, 2, CENTRE)
        c, d = _two_fields(word, i, 4, 6, 2, CENTRE)
        if BITS == 3:
            e, f = _two_fields(high, i, 0, 1, 1, 0)
            g, h = _two_fields(high, i, 2, 3, 1, 0)
            a, b, c, d = a + 4.0 * e, b + 4.0 * f, c + 4.0 * g, d + 4.0 * h
        x = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(x, (4, 8, word.shape[2], 8))


@triton.jit
def _high_words(codes_ptr, t, start, TILE: tl.constexpr, SIDE: tl.constexpr):
    """The high bits of the words of a 3-bit tile, from bit 0 of every byte on; a row of them holds eight channels."""
    high = _value_words(codes_ptr + SIDE.DIM // 4 * TILE, t, start, 1, TILE, SIDE)
    return high >> (4 * tl.arange(0, 2))[None, None, None, :]


@triton.constexpr_function
def _chunks(side):
    """How many chunks a chunk mixes with in the rotation, itself included: those of its block."""
    return max(1, side.BLOCK // side.CHUNK)


@triton.jit
def _dequantize_keys(
    packed, prescale_ptr, out_ptr, tile_position, dense, start, piece, TILE: tl.constexpr, SIDE: tl.constexpr
):
    """Channels ``start`` on of a piece of one tile.

    ``token_scale * ((codes * channel_scale + zero_point) @ H) / prescale``
    """
    BITS: tl.constexpr = SIDE.BITS
    CHUNK: tl.constexpr = SIDE.CHUNK
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    ROWS: tl.constexpr = TILE * WIDTH // 8
    STEPS: tl.constexpr = ROWS // 8 // _PIECES
    ROTATED: tl.constexpr = SIDE.BLOCK > 1
    CHUNKS: tl.constexpr = _chunks(SIDE)
    DTYPE: tl.constexpr = tl.float16 if ROTATED and not INTERPRETED else tl.float32
    LARGEST_CODE: tl.constexpr = centre(BITS) if centre(BITS) > 0 else 2**BITS - 1
    high_ptr = packed.codes + ROWS * SIDE.DIM
    first = start // (CHUNKS * CHUNK) * (CHUNKS * CHUNK)
    row = piece * (STEPS * 8)
    if CHUNKS == 1:
        byte = _key_bytes(packed.codes, row, start, SIDE)
    unit = 1.0
    factor = 1.0
    signs = 0
    if ROTATED:
        mixed = first + tl.arange(0, CHUNKS * CHUNK)
        span = tl.load(packed.channel_scale + mixed, mask=mixed < SIDE.DIM, other=0.0).to(tl.float32) * LARGEST_CODE
        span += tl.abs(tl.load(packed.zero_point + mixed, mask=mixed < SIDE.DIM, other=0.0).to(tl.float32))
        exponent = exponent_of(tl.max(span, 0)) + 1
        unit, factor = power_of_two(-exponent), power_of_two(exponent) * SIDE.BLOCK**-0.5
        signs = _signs(SIDE.BLOCK, DTYPE)
    scale = (_by_channel(packed.channel_scale, start, 0.0, SIDE) * unit).to(DTYPE)
    zero = (_by_channel(packed.zero_point, start, 0.0, SIDE) * unit).to(DTYPE)
    if prescale_ptr is not None:
        inverse = reciprocal(_by_channel(prescale_ptr, start, 1.0, SIDE))
    for step in range(STEPS):
        if CHUNKS == 1:
            high = 0
            if BITS == 3:
                high = _key_bytes(high_ptr, row % (TILE // 8), start, SIDE)
            # The next step's bytes are on their way during this one's work.
            current = byte
            byte = _key_bytes(packed.codes, row + (8 if step + 1 < STEPS else 0), start, SIDE)
        for i in range(8 // WIDTH):
            t = row + i * ROWS + tl.arange(0, 8)
            token_scale = tl.load(packed.token_scale + t).to(tl.float32) * factor
            if ROTATED:
                x = tl.zeros([CHUNK // 2, 16], tl.float32)
                for chunk in tl.static_range(CHUNKS):
                    if CHUNKS > 1:
                        c = first + chunk * CHUNK
                        sign = unit * _sign((start - first) // CHUNK, chunk)
                        scale = (_by_channel(packed.channel_scale, c, 0.0, SIDE) * sign).to(DTYPE)
                        zero = (_by_channel(packed.zero_point, c, 0.0, SIDE) * sign).to(DTYPE)
                        current = _key_bytes(packed.codes, row, c, SIDE)
                        high = 0
                        if BITS == 3:
                            high = _key_bytes(high_ptr, row % (TILE // 8), c, SIDE)
                    codes = _key_codes(current, high, row, i, BITS, TILE)
                    x = _product(_operand(codes, scale, zero), signs, x)
                x = _transformed(x, SIDE.BLOCK)
            else:
                x = _key_codes(current, high, row, i, BITS, TILE).to(tl.float32) * scale + zero
            x *= token_scale[None, :, None, None]
            if prescale_ptr is not None:
                x *= inverse
            _store(out_ptr, x, t, start, tile_position, dense, SIDE)
        row += 8


@triton.jit
def _dequantize_values(packed, out_ptr, tile_position, dense, start, piece, TILE: tl.constexpr, SIDE: tl.constexpr):
    """Channels ``start`` on of a piece of one tile.

    ``token_scale * ((codes * channel_scale) @ H) + zero_point * (channel_scale @ H)``
    """
    BITS: tl.constexpr = SIDE.BITS
    CHUNK: tl.constexpr = SIDE.CHUNK
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    # Codes count from the middle of their range here, whatever the zero point counts from.
    CENTRE: tl.constexpr = 2 ** (BITS - 1)
    STEPS: tl.constexpr = TILE // 32 // _PIECES
    ROTATED: tl.constexpr = SIDE.BLOCK > 1
    CHUNKS: tl.constexpr = _chunks(SIDE)
    DTYPE: tl.constexpr = tl.float16 if ROTATED and not INTERPRETED else tl.float32
    first = start // (CHUNKS * CHUNK) * (CHUNKS * CHUNK)
    begin = piece * (STEPS * 32)
    if CHUNKS == 1:
        following = _value_words(packed.codes, begin, start, WIDTH, TILE, SIDE)
    factor = 1.0
    unit = 1.0
    signs = 0
    if ROTATED:
        mixed = first + tl.arange(0, CHUNKS * CHUNK)
        largest = tl.max(tl.load(packed.channel_scale + mixed, mask=mixed < SIDE.DIM, other=0.0).to(tl.float32), 0)
        # The centred codes are as large as CENTRE.
        exponent = exponent_of(largest) + BITS
        unit, factor = power_of_two(-exponent), power_of_two(exponent) * SIDE.BLOCK**-0.5
        signs = _signs(SIDE.BLOCK, DTYPE)
        total = tl.zeros([CHUNK // 2, 16], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            sign = unit * _sign((start - first) // CHUNK, chunk)
            scale = (_by_channel(packed.channel_scale, first + chunk * CHUNK, 0.0, SIDE) * sign).to(DTYPE)
            total = _product(scale, signs, total)
        of_ones = _transformed(total, SIDE.BLOCK)
    else:
        scale = _by_channel(packed.channel_scale, start, 0.0, SIDE)
        of_ones = scale
    nothing = tl.zeros([4, 8, CHUNK // 32, 8], DTYPE)
    for step in range(STEPS):
        if CHUNKS == 1:
            high = 0
            # The next step's bytes are on their way during this one's work.
            word = following
            after = begin + (32 if step + 1 < STEPS else 0)
            following = _value_words(packed.codes, after, start, WIDTH, TILE, SIDE)
            if BITS == 3:
                high = _high_words(packed.codes, begin, start, TILE, SIDE)
        for i in range(4):
            t = begin + tl.arange(0, 8) * 4 + i
            token_scale = tl.load(packed.token_scale + t).to(tl.float32)
            zero = tl.load(packed.zero_point + t).to(tl.float32) + (CENTRE - centre(BITS)) * token_scale
            if ROTATED:
                x = tl.zeros([CHUNK // 2, 16], tl.float32)
                for chunk in tl.static_range(CHUNKS):
                    if CHUNKS > 1:
                        c = first + chunk * CHUNK
                        sign = unit * _sign((start - first) // CHUNK, chunk)
                        scale = (_by_channel(packed.channel_scale, c, 0.0, SIDE) * sign).to(DTYPE)
                        word = _value_words(packed.codes, begin, c, WIDTH, TILE, SIDE)
                        high = 0
                        if BITS == 3:
                            high = _high_words(packed.codes, begin, c, TILE, SIDE)
                    x = _product(_operand(_value_codes(word, high, i, BITS), scale, nothing), signs, x)
                x = _transformed(x, SIDE.BLOCK)
            else:
                x = _value_codes(word, high, i, BITS).to(tl.float32) * scale
            x = x * (token_scale * factor)[None, :, None, None] + of_ones * (zero * factor)[None, :, None, None]
            _store(out_ptr, x, t, start, tile_position, dense, SIDE)
        begin += 32


@triton.jit
def _dense_part(
    packed, prescale_ptr, dense, out_ptr, block, start, count, dense_length, TILE: tl.constexpr, SIDE: tl.constexpr
):
    """One row and head's tokens of one block, channels ``start`` on; every pointer is at that row and head."""
    if block < count * _PIECES:
        slot = (block // _PIECES).to(tl.int64)
        piece = block % _PIECES
        position = dense.sink_length + slot * TILE
        tile = tile_at(packed, slot, TILE, SIDE)
        if SIDE.KEYS:
            _dequantize_keys(tile, prescale_ptr, out_ptr, position, dense, start, piece, TILE, SIDE)
        else:
            _dequantize_values(tile, out_ptr, position, dense, start, piece, TILE, SIDE)
    else:
        d = start + tl.arange(0, SIDE.CHUNK)
        real = (d < SIDE.DIM)[None, :]
        dense_ptrs = dense.ptr + (d.to(tl.int64) * dense.stride_channel)[None, :]
        # Of the dense tokens: the sinks, then the tail.
        begin = (block - count * _PIECES).to(tl.int64) * (TILE // _PIECES)
        for step in range(TILE // _PIECES // 16):
            index = begin + step * 16 + tl.arange(0, 16)
            is_sink, held = index < dense.sink_length, (index < dense_length)[:, None] & real
            position = tl.where(is_sink, index, index + count.to(tl.int64) * TILE)
            if dense.pad is None:
                x = tl.load(dense_ptrs + (index * dense.stride_token)[:, None], mask=held, other=0.0)
            else:
                in_run = is_sink & (index < dense.pad)
                index = tl.where(is_sink, index - dense.pad, index)
                shown = held & (index >= 0)[:, None]
                x = tl.load(dense_ptrs + (index * dense.stride_token)[:, None], mask=shown, other=0.0)
                run = tl.load(dense.run + d[None, :], mask=in_run[:, None] & real, other=0.0)
                x = tl.where(in_run[:, None], run, x)
            tl.store(out_ptr + (position * SIDE.DIM)[:, None] + d[None, :], x, mask=held)


# fmt: off
@triton.jit(do_not_specialize=["count", "capacity", "dense_length", "sink_length", "blocks"])
def dequantize_kernel(
    key_codes_ptr, key_channel_scale_ptr, key_token_scale_ptr, key_zero_point_ptr,
    value_codes_ptr, value_channel_scale_ptr, value_token_scale_ptr, value_zero_point_ptr,
    prescale_ptr, rows_ptr,
    dense_key_ptr, dense_value_ptr,
    pad_ptr, run_key_ptr, run_value_ptr,
    key_out_ptr, value_out_ptr,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    heads, count, capacity, dense_length, sink_length, blocks,
    FORM: tl.constexpr,
):
    # fmt: on
    """Dense keys and values: ``((codes * scale + zero_point) * other_scale) @ H / prescale``, sinks and tail copied.

    Grid
        ``(batch * heads * blocks * parts,)``. A part is CHUNK channels of the keys or of the values; a block is one of
        the pieces of a tile, or (after all those) as many dense tokens.
    Reads
        The two contiguous arenas ``[arena rows, heads, capacity, ...]``; the sinks and the tail,
        ``[batch, heads, dense_length, dim]`` by their strides; prescale, rows (int64 ``[batch]``) and the padding's
        length and run tokens, where given.
    Writes
        Contiguous ``[batch, heads, dense_length + count * TILE, dim]``, every element once.
    Precision
        Tiles before the rotation in float16 (2**-12 of the tile's largest), all sums in float32.
    Reference
        ``kvarn_hf.method.quantize.dequantize_keys`` and ``dequantize_values``;
        ``kvarn_hf.state.padding.LeftPadding.restored``.
    """
    TILE: tl.constexpr = FORM.TILE
    KEYS: tl.constexpr = FORM.KEYS
    VALUES: tl.constexpr = FORM.VALUES
    KEY_PARTS: tl.constexpr = (KEYS.DIM + KEYS.CHUNK - 1) // KEYS.CHUNK
    PARTS: tl.constexpr = KEY_PARTS + (VALUES.DIM + VALUES.CHUNK - 1) // VALUES.CHUNK
    program = tl.program_id(0)
    part = program % PARTS
    block = program // PARTS % blocks
    row = program // PARTS // blocks  # of [batch, heads]
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    arena_row = batch if rows_ptr is None else tl.load(rows_ptr + batch)
    arena = (arena_row * heads + head) * capacity
    row = row.to(tl.int64)
    out = row * (dense_length + count.to(tl.int64) * TILE)
    pad = None if pad_ptr is None else tl.load(pad_ptr + batch)
    if part < KEY_PARTS:
        keys = Packed(key_codes_ptr, key_channel_scale_ptr, key_token_scale_ptr, key_zero_point_ptr)
        _dense_part(
            tile_at(keys, arena, TILE, KEYS),
            None if prescale_ptr is None else prescale_ptr + row * KEYS.DIM,
            Dense(
                dense_key_ptr + batch * stride_kb + head * stride_kh,
                stride_kt,
                stride_kd,
                None if run_key_ptr is None else run_key_ptr + row * KEYS.DIM,
                pad,
                sink_length,
            ),
            key_out_ptr + out * KEYS.DIM,
            block,
            part * KEYS.CHUNK,
            count,
            dense_length,
            TILE,
            KEYS,
        )
    else:
        values = Packed(value_codes_ptr, value_channel_scale_ptr, value_token_scale_ptr, value_zero_point_ptr)
        _dense_part(
            tile_at(values, arena, TILE, VALUES),
            None,
            Dense(
                dense_value_ptr + batch * stride_vb + head * stride_vh,
                stride_vt,
                stride_vd,
                None if run_value_ptr is None else run_value_ptr + row * VALUES.DIM,
                pad,
                sink_length,
            ),
            value_out_ptr + out * VALUES.DIM,
            block,
            (part - KEY_PARTS) * VALUES.CHUNK,
            count,
            dense_length,
            TILE,
            VALUES,
        )


def dequantize_tiles(held: Held) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values of a layer, dense, in one launch.

    Parameters
    ----------
    held : Held
        What the layer holds; dense tokens with any strides.

    Returns
    -------
    keys, values : torch.Tensor
        ``[batch, heads, sink_length + tile_count * tile_size + tail, head_dim]``, contiguous, in the dtype of the dense
        tokens.
    """
    batch, heads, dense_length, key_dim = held.dense_keys.shape
    value_dim, size = held.dense_values.shape[3], held.tile_size
    length = dense_length + held.tile_count * size
    keys = held.dense_keys.new_empty(batch, heads, length, key_dim)
    values = held.dense_values.new_empty(batch, heads, length, value_dim)
    rotated = held.scheme.method != "rtn"
    form = Form(
        size,
        side(True, key_dim, held.scheme.key_bits, rotated, least=32, chunk=_CHANNELS),
        side(False, value_dim, held.scheme.value_bits, rotated, least=32, chunk=_CHANNELS),
    )
    blocks = held.tile_count * _PIECES.value + triton.cdiv(dense_length, size // _PIECES.value)
    parts = triton.cdiv(key_dim, form.KEYS.CHUNK) + triton.cdiv(value_dim, form.VALUES.CHUNK)
    if batch * heads * blocks == 0:
        return keys, values
    run = (None, None, None) if held.padding is None else tuple(t.contiguous() for t in held.padding)
    prescale = None if held.prescale is None else held.prescale.contiguous()
    call = Call(
        dequantize_kernel,
        (*held.keys, *held.values, prescale, held.rows, held.dense_keys, held.dense_values, *run, keys, values),
        (*held.dense_keys.stride(), *held.dense_values.stride(), heads),
        (held.tile_count, held.capacity, dense_length, held.sink_length, blocks),
        (form,),
        warps=1,
        stages=1,
    )
    launch(call, (batch * heads * blocks * parts,))
    return keys, values
