"""Codes to bytes and back, in the order of ``kvarn_hf/method/packing.py``.

    keys     byte [j, d]  holds, at bits [b*i, b*i + b), the code of channel d, token  j + i * TILE * b / 8
    values   byte [e, t]  holds, at bits [b*i, b*i + b), the code of token t, channel  e * 8 / b + i

A 3-bit code is two planes, its two low bits followed by its high bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvarn_kernels.arithmetic import centre, small_integers


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
def store_key_codes(codes_ptr, codes, SIDE: tl.constexpr):
    """Pack and store the codes of a key tile, ``[channel, token]`` as floats."""
    codes = small_integers(codes, centre(SIDE.BITS))
    if SIDE.BITS == 3:
        _store_key_plane(codes_ptr, codes & 3, 2, SIDE.DIM)
        _store_key_plane(codes_ptr + codes.shape[1] // 4 * SIDE.DIM, codes >> 2, 1, SIDE.DIM)
    else:
        _store_key_plane(codes_ptr, codes, SIDE.BITS, SIDE.DIM)


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
def store_value_codes(codes_ptr, codes, SIDE: tl.constexpr):
    """Pack and store the codes of a value tile, ``[token, channel]`` as floats."""
    codes = small_integers(codes, centre(SIDE.BITS))
    if SIDE.BITS == 3:
        _store_value_plane(codes_ptr, codes & 3, 2, SIDE.DIM)
        _store_value_plane(codes_ptr + SIDE.DIM // 4 * codes.shape[0], codes >> 2, 1, SIDE.DIM)
    else:
        _store_value_plane(codes_ptr, codes, SIDE.BITS, SIDE.DIM)
