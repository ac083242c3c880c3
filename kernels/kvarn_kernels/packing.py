"""Codes to bytes and back, in the order of ``kvarn_hf/reference/packing.py``.

    keys     byte [j, d]  holds, at bits [b*i, b*i + b), the code of channel d, token  j + i * TILE * b / 8
    values   byte [e, t]  holds, at bits [b*i, b*i + b), the code of token t, channel  e * 8 / b + i

A 3-bit code is two planes, its two low bits followed by its high bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _store_key_plane(codes_ptr, plane, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Store ``plane`` ``[channel, token]`` (int32, below 2**WIDTH) as rows of ``[TILE * WIDTH / 8, DIM]`` bytes."""
    PER_BYTE: tl.constexpr = 8 // WIDTH
    BYTES: tl.constexpr = plane.shape[1] // PER_BYTE
    if PER_BYTE > 1:
        shift = WIDTH * tl.arange(0, PER_BYTE)
        plane = tl.sum(tl.reshape(plane, (plane.shape[0], PER_BYTE, BYTES)) << shift[None, :, None], 1)
    d, j = tl.arange(0, plane.shape[0]), tl.arange(0, BYTES)
    tl.store(codes_ptr + j[None, :] * DIM + d[:, None], plane.to(tl.uint8), mask=(d < DIM)[:, None])


@triton.jit
def store_key_codes(codes_ptr, codes, BITS: tl.constexpr, DIM: tl.constexpr):
    """Pack and store the codes of a key tile, ``[channel, token]`` as floats."""
    codes = codes.to(tl.int32)
    if BITS == 3:
        _store_key_plane(codes_ptr, codes & 3, 2, DIM)
        _store_key_plane(codes_ptr + codes.shape[1] // 4 * DIM, codes >> 2, 1, DIM)
    else:
        _store_key_plane(codes_ptr, codes, BITS, DIM)


@triton.jit
def _store_value_plane(codes_ptr, plane, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Store ``plane`` ``[token, channel]`` (int32, below 2**WIDTH) as rows of ``[DIM * WIDTH / 8, TILE]`` bytes."""
    PER_BYTE: tl.constexpr = 8 // WIDTH
    TILE: tl.constexpr = plane.shape[0]
    BYTES: tl.constexpr = plane.shape[1] // PER_BYTE
    if PER_BYTE > 1:
        shift = WIDTH * tl.arange(0, PER_BYTE)
        plane = tl.sum(tl.reshape(plane, (TILE, BYTES, PER_BYTE)) << shift[None, None, :], 2)
    t, e = tl.arange(0, TILE), tl.arange(0, BYTES)
    tl.store(codes_ptr + e[None, :] * TILE + t[:, None], plane.to(tl.uint8), mask=(e < DIM // PER_BYTE)[None, :])


@triton.jit
def store_value_codes(codes_ptr, codes, BITS: tl.constexpr, DIM: tl.constexpr):
    """Pack and store the codes of a value tile, ``[token, channel]`` as floats."""
    codes = codes.to(tl.int32)
    if BITS == 3:
        _store_value_plane(codes_ptr, codes & 3, 2, DIM)
        _store_value_plane(codes_ptr + DIM // 4 * codes.shape[0], codes >> 2, 1, DIM)
    else:
        _store_value_plane(codes_ptr, codes, BITS, DIM)


@triton.jit
def _load_plane(codes_ptr, offset, shift, WIDTH: tl.constexpr, mask):
    return (tl.load(codes_ptr + offset, mask=mask, other=0).to(tl.int32) >> shift) & (2**WIDTH - 1)


@triton.jit
def _load_key_plane(codes_ptr, t, d, WIDTH: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr):
    ROWS: tl.constexpr = TILE * WIDTH // 8
    offset = (t % ROWS)[:, None] * DIM + d[None, :]
    return _load_plane(codes_ptr, offset, (t // ROWS * WIDTH)[:, None], WIDTH, (d < DIM)[None, :])


@triton.jit
def load_key_codes(codes_ptr, t, d, BITS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr):
    """Codes ``[token, channel]``, int32, of the tokens ``t`` and channels ``d`` of a key tile; 0 for channels from DIM on.

    A byte is loaded once for each code in it: those loads meet in the first-level cache, and nothing is moved between threads.
    """
    if BITS == 3:
        low = _load_key_plane(codes_ptr, t, d, 2, TILE, DIM)
        return low | (_load_key_plane(codes_ptr + TILE // 4 * DIM, t, d, 1, TILE, DIM) << 2)
    return _load_key_plane(codes_ptr, t, d, BITS, TILE, DIM)


@triton.jit
def _load_value_plane(codes_ptr, t, d, WIDTH: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr):
    PER_BYTE: tl.constexpr = 8 // WIDTH
    offset = (d // PER_BYTE)[None, :] * TILE + t[:, None]
    return _load_plane(codes_ptr, offset, (d % PER_BYTE * WIDTH)[None, :], WIDTH, (d < DIM)[None, :])


@triton.jit
def load_value_codes(codes_ptr, t, d, BITS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr):
    """Codes ``[token, channel]``, int32, of the tokens ``t`` and channels ``d`` of a value tile; 0 for channels from DIM on."""
    if BITS == 3:
        low = _load_value_plane(codes_ptr, t, d, 2, TILE, DIM)
        return low | (_load_value_plane(codes_ptr + DIM // 4 * TILE, t, d, 1, TILE, DIM) << 2)
    return _load_value_plane(codes_ptr, t, d, BITS, TILE, DIM)
