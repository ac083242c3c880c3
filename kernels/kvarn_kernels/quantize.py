"""Rotate, normalize, round, fold and pack whole tiles of keys and values: one launch."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kvarn_kernels.arithmetic import (
    LARGEST,
    SMALLEST_SCALE,
    clamp,
    exponent_of,
    half,
    half_scale,
    inside,
    inside_vector,
    inverse_root,
    power_of_two,
    reciprocal,
)
from kvarn_kernels.launch import Call, launch, padded, rotation_block, shared_memory, warps_for
from kvarn_kernels.normalize import variance_normalize, variance_normalize_published
from kvarn_kernels.packing import store_key_codes, store_value_codes
from kvarn_kernels.rotation import hadamard_signs, split
from kvarn_kernels.rounding import (
    encode,
    encode_scaled,
    full_range_grid,
    norm_ratio,
    refit_columns,
    refit_grid,
    search_grid,
)

# Smallest share of a row's range that the grid may span, and how many spans are tried, by bits.
_CLIP_SEARCH = {2: (0.45, 12), 3: (0.6, 9), 4: (0.76, 7), 8: (1.0, 1)}
_INFINITY_BITS = tl.constexpr(0x7F800000)
_WIDEST = tl.constexpr(256)
LARGEST_HEAD_DIM = 512
_SHARED_BY_128_CHANNELS = 1 << 17


@triton.jit
def _load(
    x_ptr, token_offset, stride_d, prescale_ptr, start, WIDTH: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr
):
    """WIDTH channels from ``start`` on: ``[channel, token]`` of keys, times the prescale; ``[token, channel]`` of
    values."""
    d = start + tl.arange(0, WIDTH)
    if KEYS:
        x = tl.load(
            x_ptr + token_offset[None, :] + (d.to(tl.int64) * stride_d)[:, None], mask=(d < DIM)[:, None], other=0.0
        )
        if prescale_ptr is not None:
            factor = tl.load(prescale_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
            x = x.to(tl.float32) * factor[:, None]
    else:
        x = tl.load(
            x_ptr + token_offset[:, None] + (d.to(tl.int64) * stride_d)[None, :], mask=(d < DIM)[None, :], other=0.0
        )
    return x


@triton.jit
def _add_product(tile, x, channel, start, dropped, unit, KEYS: tl.constexpr, BLOCK: tl.constexpr, SIGNS: tl.constexpr):
    """``tile`` plus the product of the matrix of signs with ``x``, the channels from ``start`` on, at magnitude 1.

    16-bit inputs are exact operands of the tensor cores; anything else is three bfloat16 numbers that add up to it.
    """
    x = tl.where(dropped, 0.0, x).to(x.dtype)
    chunk = start + tl.arange(0, x.shape[0] if KEYS else x.shape[1])
    signs = hadamard_signs(channel, chunk, BLOCK, SIGNS) if KEYS else hadamard_signs(chunk, channel, BLOCK, SIGNS)
    if SIGNS == tl.float32:  # noqa: SIM300 - interpreted
        x = x.to(tl.float32) * unit
        if KEYS:
            return tl.dot(signs, x, tile, input_precision="ieee")
        else:
            return tl.dot(x, signs, tile, input_precision="ieee")
    elif x.dtype == tl.float32:
        high, middle, low = split(x * unit)
        if KEYS:
            return tl.dot(signs, high, tl.dot(signs, middle, tl.dot(signs, low, tile)))
        else:
            return tl.dot(high, signs, tl.dot(middle, signs, tl.dot(low, signs, tile)))
    else:
        if x.dtype == tl.bfloat16:
            x = (x.to(tl.float32) * unit).to(tl.bfloat16)
        return tl.dot(signs, x, tile) if KEYS else tl.dot(x, signs, tile)


@triton.jit
def _rotate(
    x,
    x_ptr,
    token_offset,
    stride_d,
    prescale_ptr,
    dropped,
    unit,
    first,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """WIDTH channels of the rotated tile from ``first`` on; ``x`` is the tile, if it is one chunk."""
    TOKENS: tl.constexpr = token_offset.shape[0]
    HALVES: tl.constexpr = x.dtype == tl.float16
    SIGNS: tl.constexpr = tl.float32 if INTERPRETED else (tl.float16 if HALVES else tl.bfloat16)
    tile = tl.zeros([WIDTH, TOKENS] if KEYS else [TOKENS, WIDTH], tl.float32)
    channel = first + tl.arange(0, WIDTH)
    if DIM > CHUNK:
        for start in range(0, DIM, CHUNK):
            part = _load(x_ptr, token_offset, stride_d, prescale_ptr, start, CHUNK, DIM, KEYS)
            tile = _add_product(tile, part, channel, start, dropped, unit, KEYS, BLOCK, SIGNS)
    else:
        tile = _add_product(tile, x, channel, 0, dropped, unit, KEYS, BLOCK, SIGNS)
    factor = unit if HALVES and not INTERPRETED else 1.0
    return tile * (factor * BLOCK**-0.5)


@triton.jit
def _load_rotated(
    x_ptr,
    token_offset,
    void,
    stride_d,
    prescale_ptr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One tile, brought to magnitude 1 and rotated: ``[channel, token]`` of keys, ``[token, channel]`` of values,
    float32.

    The channels are read twice where they do not fit one chunk: for the tile's exponent, and for the product with the
    matrix of signs.

    A ``void`` tile is zero: nobody reads it, and what it becomes must not depend on the tokens' prescale.

    Returns
    -------
    tile, exponent (scalar), broken ``[token]``: tokens with a NaN or an infinity, which are zero in the tile.
    """
    TOKENS: tl.constexpr = token_offset.shape[0]
    CHANNEL_AXIS: tl.constexpr = 0 if KEYS else 1
    bits = tl.zeros([TOKENS], tl.int32)
    for start in tl.static_range(0, DIM, CHUNK):
        x = _load(x_ptr, token_offset, stride_d, prescale_ptr, start, CHUNK, DIM, KEYS)
        magnitude = tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)
        bits = tl.maximum(bits, tl.max(magnitude, CHANNEL_AXIS))
    broken = bits >= _INFINITY_BITS
    largest = tl.max(tl.where(broken, 0, bits), 0).to(tl.float32, bitcast=True)
    exponent = tl.where(void, 0, exponent_of(largest))
    unit = tl.where(void, 0.0, power_of_two(-exponent))
    dropped = broken[None, :] if KEYS else broken[:, None]
    broken &= not void
    if not ROTATED:
        tl.static_assert(CHUNK == DIM_PADDED)
        return tl.where(dropped, 0.0, x.to(tl.float32)) * unit, exponent, broken

    if DIM_PADDED > _WIDEST:
        # One product this wide would not leave its own accumulators enough registers.
        low = _rotate(
            x,
            x_ptr,
            token_offset,
            stride_d,
            prescale_ptr,
            dropped,
            unit,
            0,
            _WIDEST,
            KEYS,
            DIM,
            CHUNK,
            BLOCK,
            INTERPRETED,
        )
        high = _rotate(
            x,
            x_ptr,
            token_offset,
            stride_d,
            prescale_ptr,
            dropped,
            unit,
            _WIDEST,
            _WIDEST,
            KEYS,
            DIM,
            CHUNK,
            BLOCK,
            INTERPRETED,
        )
        both = tl.join(low, high)
        if KEYS:
            tile = tl.reshape(tl.permute(both, (2, 0, 1)), (DIM_PADDED, TOKENS))
        else:
            tile = tl.reshape(tl.permute(both, (0, 2, 1)), (TOKENS, DIM_PADDED))
    else:
        tile = _rotate(
            x,
            x_ptr,
            token_offset,
            stride_d,
            prescale_ptr,
            dropped,
            unit,
            0,
            DIM_PADDED,
            KEYS,
            DIM,
            CHUNK,
            BLOCK,
            INTERPRETED,
        )
    return tile, exponent, broken


@triton.jit
def _inverse_column_scale(
    x,
    exponent,
    METHOD: tl.constexpr,
    ITERATIONS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    if METHOD == "kvarn":
        return variance_normalize(x, ITERATIONS, ROWS, COLUMNS, INTERPRETED)
    elif METHOD == "published":
        return variance_normalize_published(x, power_of_two(exponent), ITERATIONS, ROWS, COLUMNS, INTERPRETED)
    else:
        return tl.full([x.shape[1]], 1.0, tl.float32)


@triton.jit
def _fold_exponent(scale, zero_point, column_scale, exponent, COLUMNS: tl.constexpr):
    """Give the tile's power of two back: to the column scale, and to the grid what float16 could not hold there."""
    largest = exponent + exponent_of(tl.max(inside_vector(column_scale, COLUMNS, 0.0), 0))
    shift = tl.maximum(largest - 14, 0) + tl.minimum(exponent + 10, 0)
    to_grid, to_column = power_of_two(shift), power_of_two(exponent - shift)
    scale = clamp(scale * to_grid, SMALLEST_SCALE, LARGEST)
    return scale, clamp(zero_point * to_grid, -LARGEST, LARGEST), tl.minimum(column_scale * to_column, LARGEST)


@triton.jit
def quantize_key_tile(
    x_ptr,
    token_offset,
    void,
    stride_d,
    prescale_ptr,
    codes_ptr,
    channel_scale_ptr,
    token_scale_ptr,
    zero_point_ptr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    NARROWEST: tl.constexpr,
    CANDIDATES: tl.constexpr,
    METHOD: tl.constexpr,
    ITERATIONS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    TILE: tl.constexpr = token_offset.shape[0]
    x, exponent, broken = _load_rotated(
        x_ptr,
        token_offset,
        void,
        stride_d,
        prescale_ptr,
        True,
        DIM,
        DIM_PADDED,
        CHUNK,
        BLOCK,
        METHOD != "rtn",
        INTERPRETED,
    )  # [channel, token]
    inverse = _inverse_column_scale(x, exponent, METHOD, ITERATIONS, DIM, TILE, INTERPRETED)
    token_scale = half(reciprocal(inverse, INTERPRETED))
    inverse = reciprocal(token_scale, INTERPRETED)
    if METHOD == "kvarn":
        energy = tl.sum(x * x, 0)
        x = x * inverse[None, :]
        scale, zero_point = search_grid(x, BITS, 4, NARROWEST, CANDIDATES, TILE, INTERPRETED)
    else:
        x = x * inverse[None, :]
        scale, zero_point = full_range_grid(x, BITS, TILE)
    scale, zero_point = half_scale(scale), half(zero_point)
    codes = encode(x, scale, zero_point, BITS, INTERPRETED)
    if METHOD == "kvarn":
        grid = inside(codes * scale[:, None] + zero_point[:, None], DIM, TILE, 0.0)
        token_scale *= norm_ratio(energy, tl.sum(grid * grid, 0) * (token_scale * token_scale), INTERPRETED)
    scale, zero_point, token_scale = _fold_exponent(scale, zero_point, token_scale, exponent, TILE)
    store_key_codes(codes_ptr, codes, BITS, DIM)
    d, t = tl.arange(0, DIM_PADDED), tl.arange(0, TILE)
    tl.store(channel_scale_ptr + d, scale.to(tl.float16), mask=d < DIM)
    tl.store(zero_point_ptr + d, zero_point.to(tl.float16), mask=d < DIM)
    tl.store(token_scale_ptr + t, tl.where(broken, float("nan"), token_scale).to(tl.float16))


@triton.jit
def quantize_value_tile(
    x_ptr,
    token_offset,
    void,
    stride_d,
    codes_ptr,
    channel_scale_ptr,
    token_scale_ptr,
    zero_point_ptr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    NARROWEST: tl.constexpr,
    CANDIDATES: tl.constexpr,
    METHOD: tl.constexpr,
    ITERATIONS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    TILE: tl.constexpr = token_offset.shape[0]
    x, exponent, broken = _load_rotated(
        x_ptr,
        token_offset,
        void,
        stride_d,
        None,
        False,
        DIM,
        DIM_PADDED,
        CHUNK,
        BLOCK,
        METHOD != "rtn",
        INTERPRETED,
    )  # [token, channel]
    inverse = _inverse_column_scale(x, exponent, METHOD, ITERATIONS, TILE, DIM, INTERPRETED)
    if METHOD == "kvarn":
        channel_scale = inside_vector(reciprocal(inverse, INTERPRETED), DIM, 0.0)
        scale, zero_point = search_grid(x * inverse[None, :], BITS, 2, NARROWEST, CANDIDATES, DIM, INTERPRETED)
        codes = encode_scaled(x, inverse, scale, zero_point, BITS, INTERPRETED)
        for _ in range(4 if BITS == 2 else 2):  # as VALUE_ROUNDS of the reference
            scale, zero_point = refit_grid(x, codes, channel_scale, scale, zero_point)
            grid = codes * scale[:, None] + zero_point[:, None]
            channel_scale = inside_vector(refit_columns(x, grid, channel_scale, INTERPRETED), DIM, 0.0)
            inverse = reciprocal(tl.where(channel_scale > 0, channel_scale, 1.0), INTERPRETED)
            codes = encode_scaled(x, inverse, scale, zero_point, BITS, INTERPRETED)
        scale, zero_point = refit_grid(x, codes, channel_scale, scale, zero_point)
        x_hat = (codes * scale[:, None] + zero_point[:, None]) * channel_scale[None, :]
        ratio = norm_ratio(tl.sum(x * x, 1), tl.sum(x_hat * x_hat, 1), INTERPRETED)
        ratio *= ratio * inverse_root(ratio, INTERPRETED)  # ** 1.5
        scale, zero_point = half_scale(scale * ratio), half(zero_point * ratio)
    else:
        channel_scale = half(reciprocal(inverse, INTERPRETED))
        x = x * reciprocal(channel_scale, INTERPRETED)[None, :]
        scale, zero_point = full_range_grid(x, BITS, DIM)
        scale, zero_point = half_scale(scale), half(zero_point)
        codes = encode(x, scale, zero_point, BITS, INTERPRETED)
    scale, zero_point, channel_scale = _fold_exponent(scale, zero_point, channel_scale, exponent, DIM)
    store_value_codes(codes_ptr, codes, BITS, DIM)
    d, t = tl.arange(0, DIM_PADDED), tl.arange(0, TILE)
    tl.store(channel_scale_ptr + d, channel_scale.to(tl.float16), mask=d < DIM)
    tl.store(zero_point_ptr + t, zero_point.to(tl.float16))
    tl.store(token_scale_ptr + t, tl.where(broken, float("nan"), scale).to(tl.float16))


@triton.jit
def counted_tokens(first, TILE: tl.constexpr):
    """Where a tile's tokens are read from if those before ``first`` do not count, and whether none counts.

    Tokens that do not count are replaced, over and over, by the tile's later ones; a tile without any is void.
    """
    token = tl.arange(0, TILE)
    skip = tl.minimum(tl.maximum(first, 0), TILE)
    void = skip == TILE
    skip = tl.where(void, 0, skip).to(tl.int32)
    counted = TILE - skip
    return (skip + (token - skip + counted * TILE) % counted).to(tl.int64), void


@triton.jit(do_not_specialize=["tiles", "capacity", "slot", "position"])
def quantize_kernel(
    key_ptr,
    value_ptr,
    prescale_ptr,
    first_ptr,
    key_codes_ptr,
    key_channel_scale_ptr,
    key_token_scale_ptr,
    key_zero_point_ptr,
    value_codes_ptr,
    value_channel_scale_ptr,
    value_token_scale_ptr,
    value_zero_point_ptr,
    stride_k_b,
    stride_k_h,
    stride_k_t,
    stride_k_d,
    stride_v_b,
    stride_v_h,
    stride_v_t,
    stride_v_d,
    heads,
    tiles,
    capacity,
    slot,
    position,
    TILE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    KEY_CHUNK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_NARROWEST: tl.constexpr,
    KEY_CANDIDATES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    VALUE_CHUNK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_NARROWEST: tl.constexpr,
    VALUE_CANDIDATES: tl.constexpr,
    METHOD: tl.constexpr,
    ITERATIONS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Quantize tile ``tiles``-wise: ``codes, scales = fold(round(normalize(rotate(x * prescale))))``.

    Grid
        ``(2 * batch * heads * tiles,)``: the values' programs, which take longer, then the keys'; one tile each.
    Reads
        key, value ``[batch, heads, tiles * TILE, dim]`` by their strides; prescale ``[batch, heads, KEY_DIM]``
        (float16, contiguous) and first ``[batch]`` (int64), each or None.
    Writes
        Slots ``slot`` to ``slot + tiles - 1`` of the eight contiguous arenas ``[batch, heads, capacity, ...]``.
    Precision
        float32 throughout; the rotation's products are exact and its sums float32. What a tile becomes depends on the
        tile alone: never on how many are quantized at once.
    Reference
        ``kvarn_hf.reference.quantize.quantize_keys`` and ``quantize_values``; ``kvarn_hf.ops._repeat_counted`` for
        ``first``.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0) // 2
    is_key = program >= programs
    index = tl.where(is_key, program - programs, program)
    tile = index % tiles
    row = index // tiles  # of [batch, heads]
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    arena = row.to(tl.int64) * capacity + slot + tile
    token = tl.arange(0, TILE)
    start = tile.to(tl.int64) * TILE
    void = program < 0
    if first_ptr is None:
        source = start + token
    else:
        source, void = counted_tokens(tl.load(first_ptr + batch) - position - start, TILE)
        source += start
    if is_key:
        quantize_key_tile(
            key_ptr + batch * stride_k_b + head * stride_k_h,
            source * stride_k_t,
            void,
            stride_k_d,
            prescale_ptr if prescale_ptr is None else prescale_ptr + row.to(tl.int64) * KEY_DIM,
            key_codes_ptr + arena * (TILE * KEY_BITS // 8 * KEY_DIM),
            key_channel_scale_ptr + arena * KEY_DIM,
            key_token_scale_ptr + arena * TILE,
            key_zero_point_ptr + arena * KEY_DIM,
            KEY_DIM,
            KEY_PADDED,
            KEY_CHUNK,
            KEY_BLOCK,
            KEY_BITS,
            KEY_NARROWEST,
            KEY_CANDIDATES,
            METHOD,
            ITERATIONS,
            INTERPRETED,
        )
    else:
        quantize_value_tile(
            value_ptr + batch * stride_v_b + head * stride_v_h,
            source * stride_v_t,
            void,
            stride_v_d,
            value_codes_ptr + arena * (VALUE_DIM * VALUE_BITS // 8 * TILE),
            value_channel_scale_ptr + arena * VALUE_DIM,
            value_token_scale_ptr + arena * TILE,
            value_zero_point_ptr + arena * TILE,
            VALUE_DIM,
            VALUE_PADDED,
            VALUE_CHUNK,
            VALUE_BLOCK,
            VALUE_BITS,
            VALUE_NARROWEST,
            VALUE_CANDIDATES,
            METHOD,
            ITERATIONS,
            INTERPRETED,
        )


def quantize_tiles(
    keys: torch.Tensor,
    values: torch.Tensor,
    prescale: torch.Tensor | None,
    first: torch.Tensor | None,
    key_arena: tuple[torch.Tensor, ...],
    value_arena: tuple[torch.Tensor, ...],
    *,
    slot: int,
    position: int,
    key_bits: int,
    value_bits: int,
    method: str,
    iterations: int,
) -> None:
    """Quantize whole tiles of keys and values into arenas, in one launch and without synchronizing.

    Parameters
    ----------
    keys, values : torch.Tensor
        ``[batch, heads, n * tile_size, head_dim]``, float16, bfloat16 or float32, any strides; head_dim a multiple of
        8, and each its own.
    prescale : torch.Tensor, optional
        ``[batch, heads, key_dim]``, float16: the keys' channel factors; None for factors of 1.
    first : torch.Tensor, optional
        ``[batch]``, int64: each row's first position that counts; in a tile that begins before it the later tokens take
        the place of those before it, over and over.
    key_arena, value_arena : tuple of torch.Tensor
        Contiguous codes (uint8), channel scale, token scale and zero point (float16), ``[batch, heads, capacity,
        ...]``; tile_size is the length of a token scale.
    slot : int
        The first slot of the arenas to fill.
    position : int
        Position of the first token given.
    key_bits, value_bits : int
        2, 3, 4 or 8.
    method : str
        "kvarn", "published", "hadamard" or "rtn".
    iterations : int
        Rounds of variance normalization.

    Raises
    ------
    ValueError
        If a head_dim is no multiple of 8 or above 512.

    Notes
    -----
    KVarN, arXiv:2606.03458; computes what ``kvarn_hf.reference.quantize`` does.
    """
    batch, heads, tokens, key_dim = keys.shape
    value_dim, size = values.shape[3], key_arena[2].shape[-1]
    tiles = tokens // size
    if batch * heads * tiles == 0:
        return
    call = Call(
        quantize_kernel,
        (keys, values, None if prescale is None else prescale.contiguous(), first, *key_arena, *value_arena),
        (*keys.stride(), *values.stride(), heads),
        (tiles, key_arena[0].shape[2], slot, position),
        (
            size,
            *shape_constants(key_dim, key_bits, method, keys.device.index),
            *shape_constants(value_dim, value_bits, method, keys.device.index),
            method,
            iterations,
            not keys.is_cuda,
        ),
        warps=warps_for(size * padded(max(key_dim, value_dim))),
        stages=1,
    )
    launch(call, (2 * batch * heads * tiles,))


@cache
def shape_constants(dim: int, bits: int, method: str, device: int | None) -> tuple[int, int, int, int, int, float, int]:
    """DIM, PADDED, CHUNK, BLOCK, BITS, NARROWEST, CANDIDATES of keys or values, on a CUDA device (None: none)."""
    if dim % 8 or not 8 <= dim <= LARGEST_HEAD_DIM:
        raise ValueError(f"head_dim must be a multiple of 8 from 8 to {LARGEST_HEAD_DIM}, got {dim}")
    side = padded(dim)
    # A chunk of channels and its slice of the signs must fit the shared memory together: 128 channels fit that of data
    # center GPUs, 64 that of all.
    widest = 128 if shared_memory(device) >= _SHARED_BY_128_CHANNELS else 64
    chunk = side if side <= widest or method == "rtn" else 64
    return dim, side, chunk, rotation_block(dim), bits, *_CLIP_SEARCH[bits]
