"""Packed tiles to dense keys and values, un-rotated, beside the sinks and the tail: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvarn_kernels.arithmetic import exponent_of, power_of_two
from kvarn_kernels.launch import on_device_of, padded, rotation_block
from kvarn_kernels.rotation import hadamard_signs

# Channels to a program at most: several programs then fit a multiprocessor, whatever the head_dim.
_CHANNELS = 128
# Tiles to a program where there are many: the matrix of signs is made once for all of them.
_GROUP = 4
_MANY_TILES = 2048


def _warps(elements: int) -> int:
    return 4 if elements <= 8192 else 8


@triton.jit
def _product(x, signs, total, INTERPRETED: tl.constexpr):
    """``total + x @ signs`` by tensor cores; ``x`` is at most about 1, so float16 holds it to 2**-12 of its tile's largest."""
    if INTERPRETED:
        return tl.dot(x, signs, total, input_precision="ieee")
    else:
        return tl.dot(x.to(tl.float16), signs, total)


@triton.jit
def _signs(c, d, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    return hadamard_signs(c, d, BLOCK, tl.float32 if INTERPRETED else tl.float16)


@triton.jit
def _store(
    out_ptr,
    x,
    t,
    d,
    tile_position,
    dense_ptr,
    stride_t,
    stride_d,
    run_ptr,
    pad,
    sink_length,
    DIM: tl.constexpr,
):
    """Write tokens ``x`` ``[t, d]`` of a tile; where left padding has put the run's token or a sink in their place, those."""
    real = (d < DIM)[None, :]
    position = tile_position + t
    x = x.to(out_ptr.dtype.element_ty)
    if pad is not None:
        slot = position - pad
        in_run, in_sink = slot < 0, (slot >= 0) & (slot < sink_length)
        run = tl.load(run_ptr + d[None, :], mask=in_run[:, None] & real, other=0.0)
        where = (slot * stride_t)[:, None] + (d.to(tl.int64) * stride_d)[None, :]
        sink = tl.load(dense_ptr + where, mask=in_sink[:, None] & real, other=0.0)
        x = tl.where(in_run[:, None], run, tl.where(in_sink[:, None], sink, x))
    tl.store(out_ptr + (position * DIM)[:, None] + d[None, :], x, mask=real)


@triton.jit
def _key_codes(codes_ptr, row, c, I: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr):
    """Code ``I`` of the bytes ``[row, c]``: those of the tokens ``row + I * (rows of bytes)``, as float32."""
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    ROWS: tl.constexpr = TILE * WIDTH // 8
    held = (c < DIM)[None, :]
    code = (tl.load(codes_ptr + row[:, None] * DIM + c[None, :], mask=held, other=0) >> (I * WIDTH)) & (2**WIDTH - 1)
    if BITS == 3:
        HIGH_ROWS: tl.constexpr = TILE // 8
        token = row + I * ROWS
        high = tl.load(codes_ptr + (ROWS + token % HIGH_ROWS)[:, None] * DIM + c[None, :], mask=held, other=0)
        code |= ((high >> (token // HIGH_ROWS).to(tl.uint8)[:, None]) & 1) << 2
    return code.to(tl.float32)


@triton.jit
def _value_codes(codes_ptr, e, t, I: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr):
    """Code ``I`` of the bytes ``[e, t]``: those of the channels ``e * (codes per byte) + I``, as float32."""
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    PER_BYTE: tl.constexpr = 8 // WIDTH
    held = (e < DIM // PER_BYTE)[:, None]
    code = (tl.load(codes_ptr + e[:, None] * TILE + t[None, :], mask=held, other=0) >> (I * WIDTH)) & (2**WIDTH - 1)
    if BITS == 3:
        channel = e * PER_BYTE + I
        high = tl.load(codes_ptr + (DIM // 4 + channel // 8)[:, None] * TILE + t[None, :], mask=held, other=0)
        code |= ((high >> (channel % 8).to(tl.uint8)[:, None]) & 1) << 2
    return code.to(tl.float32)


@triton.jit
def _interleaved(a, b):
    """Rows of ``a`` and ``b`` ``[e, t]`` by turns."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (2 * a.shape[0], a.shape[1]))


@triton.jit
def _value_tile_codes(codes_ptr, e, t, BITS: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr):
    """Codes ``[channel, token]`` of all channels that the byte rows ``e`` hold, in the channels' order."""
    if BITS == 8:
        return _value_codes(codes_ptr, e, t, 0, BITS, TILE, DIM)
    elif BITS == 4:
        return _interleaved(
            _value_codes(codes_ptr, e, t, 0, BITS, TILE, DIM), _value_codes(codes_ptr, e, t, 1, BITS, TILE, DIM)
        )
    else:
        even = _interleaved(
            _value_codes(codes_ptr, e, t, 0, BITS, TILE, DIM), _value_codes(codes_ptr, e, t, 2, BITS, TILE, DIM)
        )
        odd = _interleaved(
            _value_codes(codes_ptr, e, t, 1, BITS, TILE, DIM), _value_codes(codes_ptr, e, t, 3, BITS, TILE, DIM)
        )
        return _interleaved(even, odd)


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
    signs,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Channels ``start`` on of one tile: ``token_scale * ((codes * channel_scale + zero_point) @ H) / prescale``."""
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    ROWS: tl.constexpr = TILE * WIDTH // 8
    # The channels that these mix with: their own block of the rotation.
    CHUNKS: tl.constexpr = BLOCK // CHANNELS if ROTATED and BLOCK > CHANNELS else 1
    row, d = tl.arange(0, ROWS), start + tl.arange(0, CHANNELS)
    first = start // (CHUNKS * CHANNELS) * (CHUNKS * CHANNELS)
    largest = 0.0
    for chunk in tl.static_range(CHUNKS):
        c = first + chunk * CHANNELS + tl.arange(0, CHANNELS)
        scale = tl.load(channel_scale_ptr + c, mask=c < DIM, other=0.0).to(tl.float32)
        zero = tl.load(zero_point_ptr + c, mask=c < DIM, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(scale * (2**BITS - 1) + tl.abs(zero), 0))
    exponent = exponent_of(largest) + 1
    unit = power_of_two(-exponent)
    factor = power_of_two(exponent)
    if ROTATED:
        factor *= BLOCK**-0.5
    for i in tl.static_range(8 // WIDTH):
        x = tl.zeros([ROWS, CHANNELS], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            c = first + chunk * CHANNELS + tl.arange(0, CHANNELS)
            scale = tl.load(channel_scale_ptr + c, mask=c < DIM, other=0.0).to(tl.float32) * unit
            zero = tl.load(zero_point_ptr + c, mask=c < DIM, other=0.0).to(tl.float32) * unit
            part = _key_codes(codes_ptr, row, c, i, BITS, TILE, DIM) * scale[None, :] + zero[None, :]
            if ROTATED:
                x = _product(part, signs if CHUNKS == 1 else _signs(c, d, BLOCK, INTERPRETED), x, INTERPRETED)
            else:
                x = part
        t = i * ROWS + row
        x *= (tl.load(token_scale_ptr + t).to(tl.float32) * factor)[:, None]
        if prescale_ptr is not None:
            x *= (1.0 / tl.load(prescale_ptr + d, mask=d < DIM, other=1.0).to(tl.float32))[None, :]
        _store(out_ptr, x, t, d, tile_position, dense_ptr, stride_t, stride_d, run_ptr, pad, sink_length, DIM)


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
    signs,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Channels ``start`` on of one tile: ``((codes * token_scale + zero_point) * channel_scale) @ H``."""
    PER_BYTE: tl.constexpr = 4 if BITS == 3 else 8 // BITS
    CHUNKS: tl.constexpr = BLOCK // CHANNELS if ROTATED and BLOCK > CHANNELS else 1
    t, d = tl.arange(0, TILE), start + tl.arange(0, CHANNELS)
    first = start // (CHUNKS * CHANNELS) * (CHUNKS * CHANNELS)
    largest = 0.0
    for chunk in tl.static_range(CHUNKS):
        c = first + chunk * CHANNELS + tl.arange(0, CHANNELS)
        largest = tl.maximum(largest, tl.max(tl.load(channel_scale_ptr + c, mask=c < DIM, other=0.0).to(tl.float32), 0))
    scale = tl.load(token_scale_ptr + t).to(tl.float32)
    zero = tl.load(zero_point_ptr + t).to(tl.float32)
    span = scale * (2**BITS - 1) + tl.abs(zero)
    # A broken token's scale is NaN, and must stay its own.
    largest *= tl.max(tl.where(span == span, span, 0.0), 0)
    exponent = exponent_of(largest) + 1
    scale, zero = scale * power_of_two(-exponent), zero * power_of_two(-exponent)
    x = tl.zeros([TILE, CHANNELS], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        c = first + chunk * CHANNELS + tl.arange(0, CHANNELS)
        e = (first + chunk * CHANNELS) // PER_BYTE + tl.arange(0, CHANNELS // PER_BYTE)
        channel_scale = tl.load(channel_scale_ptr + c, mask=c < DIM, other=0.0).to(tl.float32)
        codes = _value_tile_codes(codes_ptr, e, t, BITS, TILE, DIM)
        part = tl.trans((codes * scale[None, :] + zero[None, :]) * channel_scale[:, None])
        if ROTATED:
            x = _product(part, signs if CHUNKS == 1 else _signs(c, d, BLOCK, INTERPRETED), x, INTERPRETED)
        else:
            x = part
    factor = power_of_two(exponent)
    if ROTATED:
        factor *= BLOCK**-0.5
    _store(out_ptr, x * factor, t, d, tile_position, dense_ptr, stride_t, stride_d, run_ptr, pad, sink_length, DIM)


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
    if block < tile_blocks:
        signs = 0
        if ROTATED and BLOCK <= CHANNELS:
            signs = _signs(d, d, BLOCK, INTERPRETED)
        first = block.to(tl.int64) * GROUP
        for i in range(0, tl.minimum(count - block * GROUP, GROUP)):
            slot = first + i
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
        dense_ptrs = dense_ptr + (d.to(tl.int64) * stride_d)[None, :]
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
        Tiles before the rotation in float16 (2**-12 of the tile's largest), all sums in float32.
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
            num_warps=_warps(size * max(key_channels, value_channels)),
            num_stages=1,
        )
    return keys, values
