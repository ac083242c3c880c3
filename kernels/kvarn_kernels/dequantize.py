"""Packed tiles to dense keys and values, un-rotated, beside the sinks and the tail: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvarn_kernels.arithmetic import exponent_of, power_of_two
from kvarn_kernels.launch import on_device_of, padded, rotation_block
from kvarn_kernels.packing import load_key_codes, load_value_codes
from kvarn_kernels.rotation import hadamard_signs

# Channels to a program at most: several programs then fit a multiprocessor, whatever the head_dim.
_CHANNELS = 128
# Tiles to a program where there are many: the matrix of signs is made once for all of them.
_GROUP = 4
_MANY_TILES = 2048


@triton.jit
def _product(codes, scale, signs, INTERPRETED: tl.constexpr):
    """``(codes * scale) @ signs`` for a channel vector ``scale``, by tensor cores.

    The scale is brought below 2 by a power of two first, so float16 holds the products, with a relative error of 2**-12, far below
    the codes' own.
    """
    exponent = exponent_of(tl.max(scale, 0))
    x = codes.to(tl.float32) * (scale * power_of_two(-exponent))[None, :]
    if INTERPRETED:
        x = tl.dot(x, signs, input_precision="ieee")
    else:
        x = tl.dot(x.to(tl.float16), signs)
    return x * power_of_two(exponent)


@triton.jit
def _row_product(row, signs, INTERPRETED: tl.constexpr):
    """``row @ signs`` for a channel vector of float16 numbers, exact but for what is 2**-24 of its largest.

    It is what all tokens have in common. Kept out of the large product, its rounding is kept out of every token.
    """
    exponent = exponent_of(tl.max(tl.abs(row), 0))
    x = tl.where((tl.arange(0, 16) == 0)[:, None], (row * power_of_two(-exponent))[None, :], 0.0)
    if INTERPRETED:
        x = tl.dot(x, signs, input_precision="ieee")
    else:
        x = tl.dot(x.to(tl.float16), signs)
    return tl.sum(x, 0) * power_of_two(exponent)


@triton.jit
def _key_tile(
    codes_ptr,
    channel_scale_ptr,
    token_scale_ptr,
    zero_point_ptr,
    prescale_ptr,
    start,
    signs,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Keys ``[TILE, CHANNELS]`` of one tile from channel ``start`` on: ``token_scale * ((codes * scale + zero_point) @ H) / prescale``."""
    t, d = tl.arange(0, TILE), start + tl.arange(0, CHANNELS)
    if ROTATED:
        x = tl.zeros([TILE, CHANNELS], tl.float32)
        constant = tl.zeros([CHANNELS], tl.float32)
        SIGNS: tl.constexpr = tl.float32 if INTERPRETED else tl.float16
        first = start // BLOCK * BLOCK if BLOCK > CHANNELS else start
        for offset in range(0, BLOCK if BLOCK > CHANNELS else CHANNELS, CHANNELS):
            c = first + offset + tl.arange(0, CHANNELS)
            scale = tl.load(channel_scale_ptr + c, mask=c < DIM, other=0.0).to(tl.float32)
            zero = tl.load(zero_point_ptr + c, mask=c < DIM, other=0.0).to(tl.float32)
            part = hadamard_signs(c, d, BLOCK, SIGNS) if BLOCK > CHANNELS else signs
            x += _product(load_key_codes(codes_ptr, t, c, BITS, TILE, DIM), scale, part, INTERPRETED)
            constant += _row_product(zero, part, INTERPRETED)
        x = (x + constant[None, :]) * BLOCK**-0.5
    else:
        scale = tl.load(channel_scale_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
        zero = tl.load(zero_point_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
        x = load_key_codes(codes_ptr, t, d, BITS, TILE, DIM).to(tl.float32) * scale[None, :] + zero[None, :]
    x *= tl.load(token_scale_ptr + t).to(tl.float32)[:, None]
    if prescale_ptr is not None:
        x *= (1.0 / tl.load(prescale_ptr + d, mask=d < DIM, other=1.0).to(tl.float32))[None, :]
    return x


@triton.jit
def _value_tile(
    codes_ptr,
    channel_scale_ptr,
    token_scale_ptr,
    zero_point_ptr,
    start,
    signs,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Values ``[TILE, CHANNELS]`` of one tile from channel ``start`` on:
    ``token_scale * ((codes * channel_scale) @ H) + zero_point * (channel_scale @ H)``."""
    t, d = tl.arange(0, TILE), start + tl.arange(0, CHANNELS)
    token_scale = tl.load(token_scale_ptr + t).to(tl.float32)[:, None]
    zero_point = tl.load(zero_point_ptr + t).to(tl.float32)[:, None]
    if ROTATED:
        x = tl.zeros([TILE, CHANNELS], tl.float32)
        constant = tl.zeros([CHANNELS], tl.float32)
        SIGNS: tl.constexpr = tl.float32 if INTERPRETED else tl.float16
        first = start // BLOCK * BLOCK if BLOCK > CHANNELS else start
        for offset in range(0, BLOCK if BLOCK > CHANNELS else CHANNELS, CHANNELS):
            c = first + offset + tl.arange(0, CHANNELS)
            scale = tl.load(channel_scale_ptr + c, mask=c < DIM, other=0.0).to(tl.float32)
            part = hadamard_signs(c, d, BLOCK, SIGNS) if BLOCK > CHANNELS else signs
            x += _product(load_value_codes(codes_ptr, t, c, BITS, TILE, DIM), scale, part, INTERPRETED)
            constant += _row_product(scale, part, INTERPRETED)
        return (x * token_scale + constant[None, :] * zero_point) * BLOCK**-0.5
    else:
        scale = tl.load(channel_scale_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
        x = load_value_codes(codes_ptr, t, d, BITS, TILE, DIM).to(tl.float32) * token_scale + zero_point
        return x * scale[None, :]


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
    tile_blocks,
    start,
    count,
    dense_length,
    sink_length,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One row and head's tokens of one block, channels ``start`` to ``start + CHANNELS - 1``; every pointer is at that row and head."""
    t, d = tl.arange(0, TILE), start + tl.arange(0, CHANNELS)
    real = (d < DIM)[None, :]
    dense_ptrs = dense_ptr + (d.to(tl.int64) * stride_d)[None, :]
    dtype = out_ptr.dtype.element_ty
    if block < tile_blocks:
        signs = 0
        if ROTATED and BLOCK <= CHANNELS:
            signs = hadamard_signs(d, d, BLOCK, tl.float32 if INTERPRETED else tl.float16)
        first = block.to(tl.int64) * GROUP
        for i in range(tl.minimum(count - block * GROUP, GROUP)):
            slot = first + i
            if KEYS:
                x = _key_tile(
                    codes_ptr + slot * (TILE * BITS // 8 * DIM),
                    channel_scale_ptr + slot * DIM,
                    token_scale_ptr + slot * TILE,
                    zero_point_ptr + slot * DIM,
                    prescale_ptr,
                    start,
                    signs,
                    BITS,
                    TILE,
                    DIM,
                    CHANNELS,
                    BLOCK,
                    ROTATED,
                    INTERPRETED,
                )
            else:
                x = _value_tile(
                    codes_ptr + slot * (DIM * BITS // 8 * TILE),
                    channel_scale_ptr + slot * DIM,
                    token_scale_ptr + slot * TILE,
                    zero_point_ptr + slot * TILE,
                    start,
                    signs,
                    BITS,
                    TILE,
                    DIM,
                    CHANNELS,
                    BLOCK,
                    ROTATED,
                    INTERPRETED,
                )
            x = x.to(dtype)
            position = sink_length + slot * TILE + t
            if pad is not None:
                slot_of_sink = position - pad
                in_run, in_sink = slot_of_sink < 0, (slot_of_sink >= 0) & (slot_of_sink < sink_length)
                run = tl.load(run_ptr + d[None, :], mask=in_run[:, None] & real, other=0.0)
                sink = tl.load(dense_ptrs + (slot_of_sink * stride_t)[:, None], mask=in_sink[:, None] & real, other=0.0)
                x = tl.where(in_run[:, None], run, tl.where(in_sink[:, None], sink, x))
            tl.store(out_ptr + (position * DIM)[:, None] + d[None, :], x, mask=real)
    else:
        index = (block - tile_blocks).to(tl.int64) * TILE + t  # of the dense tokens: the sinks, then the tail
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


@triton.jit(do_not_specialize=["count", "capacity", "dense_length", "sink_length", "tile_blocks", "blocks"])
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
    tile_blocks,
    blocks,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_CHANNELS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Dense keys and values: ``((codes * scale + zero_point) * other_scale) @ H / prescale``, sinks and tail copied.

    Grid
        ``(batch * heads * blocks * parts,)``. A part is CHANNELS channels of the keys or of the values; a block is GROUP tiles, or (from
        ``tile_blocks`` on) TILE dense tokens.
    Reads
        The eight contiguous arenas ``[arena rows, heads, capacity, ...]``; the sinks and the tail, ``[batch, heads, dense_length, dim]`` by
        their strides; prescale, rows (int64 ``[batch]``) and the padding's length and run tokens, where given.
    Writes
        Contiguous ``[batch, heads, dense_length + count * TILE, dim]``, every element once.
    Precision
        Codes times scales in float16 (relative error 2**-12), the zero points' part and all sums in float32.
    Reference
        ``kvarn_hf.reference.quantize.dequantize_keys`` and ``dequantize_values``; ``kvarn_hf.padding.LeftPadding.restored``.
    """
    KEY_PARTS: tl.constexpr = (KEY_DIM + KEY_CHANNELS - 1) // KEY_CHANNELS
    PARTS: tl.constexpr = KEY_PARTS + (VALUE_DIM + VALUE_CHANNELS - 1) // VALUE_CHANNELS
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
            tile_blocks,
            part * KEY_CHANNELS,
            count,
            dense_length,
            sink_length,
            True,
            GROUP,
            KEY_BITS,
            TILE,
            KEY_DIM,
            KEY_CHANNELS,
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
            tile_blocks,
            (part - KEY_PARTS) * VALUE_CHANNELS,
            count,
            dense_length,
            sink_length,
            False,
            GROUP,
            VALUE_BITS,
            TILE,
            VALUE_DIM,
            VALUE_CHANNELS,
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
        Contiguous codes (uint8), channel scale, token scale and zero point (float16), ``[arena rows, heads, capacity, ...]``; tile_size is
        the length of a token scale.
    prescale : torch.Tensor, optional
        ``[batch, heads, key_dim]``, float16: what the keys were multiplied by before the rotation.
    rows : torch.Tensor, optional
        ``[batch]``, int64: the arena row of every batch row; None means each its own.
    dense_keys, dense_values : torch.Tensor
        ``[batch, heads, sink_length + tail, head_dim]``, any strides; their dtype is the result's.
    padding : tuple of torch.Tensor, optional
        Length ``[batch]`` (int64) and the tokens ``[batch, heads, 1, head_dim]`` that every padded position reads; a row's sinks are read
        behind its padding.
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
    group = _GROUP if batch * heads * count >= _MANY_TILES else 1
    tile_blocks = triton.cdiv(count, group)
    blocks = tile_blocks + triton.cdiv(dense_length, size)
    key_channels, value_channels = (min(padded(dim), _CHANNELS) for dim in (key_dim, value_dim))
    parts = triton.cdiv(key_dim, key_channels) + triton.cdiv(value_dim, value_channels)
    if batch * heads * blocks == 0:
        return keys, values
    pad, run_key, run_value = (None, None, None) if padding is None else (t.contiguous() for t in padding)
    with on_device_of(dense_keys):
        dequantize_kernel[(batch * heads * blocks * parts,)](
            *key_arena,
            *value_arena,
            None if prescale is None else prescale.contiguous(),
            rows,
            dense_keys,
            dense_values,
            pad,
            run_key,
            run_value,
            keys,
            values,
            *dense_keys.stride(),
            *dense_values.stride(),
            heads,
            count,
            key_arena[0].shape[2],
            dense_length,
            sink_length,
            tile_blocks,
            blocks,
            size,
            group,
            key_dim,
            key_channels,
            rotation_block(key_dim),
            key_bits,
            value_dim,
            value_channels,
            rotation_block(value_dim),
            value_bits,
            rotated,
            not dense_keys.is_cuda,
            num_warps=4 if size * max(key_channels, value_channels) <= 8192 else 8,
            num_stages=1,
        )
    return keys, values
