"""Rotate, normalize, round, fold and pack whole tiles of keys and values: one launch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvarn_kernels.arithmetic import (
    INFINITY_BITS,
    INTERPRETED,
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
from kvarn_kernels.bundles import Packed, Scheme, Side, tile_at
from kvarn_kernels.launch import Call, launch, padded, shared_memory, side, warps_for
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

# Rounds of alternating least squares of values, by bits: as VALUE_ROUNDS of the reference.
VALUE_ROUNDS = {2: 4, 3: 2, 4: 2, 8: 2}
LARGEST_HEAD_DIM = 512
_WIDEST = tl.constexpr(256)  # columns of one product: a wider one would not leave its accumulators enough registers
_SHARED_BY_128_CHANNELS = 1 << 17


class Form(NamedTuple):
    """What a kernel that packs tiles is compiled for.

    TILE : tokens of a tile
    KEYS, VALUES : Side
    METHOD, ITERATIONS : see :class:`kvarn_kernels.bundles.Scheme`
    """

    TILE: int
    KEYS: Side
    VALUES: Side
    METHOD: str
    ITERATIONS: int


class Tokens(NamedTuple):
    """The tokens of one tile and head, as they are to be read.

    ptr : channel d of token t lies at ``ptr + offset[t] + d * stride``
    offset : [TILE], int64
    stride : of channels
    prescale : pointer to keys' factors, or None
    void : whether none of them counts: the tile is then zero
    """

    ptr: Any
    offset: Any
    stride: Any
    prescale: Any
    void: Any


@triton.constexpr_function
def _value_rounds(bits):
    return VALUE_ROUNDS[bits]


@triton.jit
def _load(tokens, start, WIDTH: tl.constexpr, SIDE: tl.constexpr):
    """WIDTH channels from ``start`` on: ``[channel, token]`` of keys, times the prescale; ``[token, channel]`` of
    values."""
    d = start + tl.arange(0, WIDTH)
    if SIDE.KEYS:
        x = tl.load(
            tokens.ptr + tokens.offset[None, :] + (d.to(tl.int64) * tokens.stride)[:, None],
            mask=(d < SIDE.DIM)[:, None],
            other=0.0,
        )
        if tokens.prescale is not None:
            factor = tl.load(tokens.prescale + d, mask=d < SIDE.DIM, other=0.0).to(tl.float32)
            x = x.to(tl.float32) * factor[:, None]
    else:
        x = tl.load(
            tokens.ptr + tokens.offset[:, None] + (d.to(tl.int64) * tokens.stride)[None, :],
            mask=(d < SIDE.DIM)[None, :],
            other=0.0,
        )
    return x


@triton.jit
def _add_product(tile, x, channel, start, dropped, unit, SIGNS: tl.constexpr, SIDE: tl.constexpr):
    """``tile`` plus the product of the matrix of signs with ``x``, the channels from ``start`` on, at magnitude 1.

    16-bit inputs are exact operands of the tensor cores; anything else is three bfloat16 numbers that add up to it.
    """
    x = tl.where(dropped, 0.0, x).to(x.dtype)
    chunk = start + tl.arange(0, x.shape[0] if SIDE.KEYS else x.shape[1])
    if SIDE.KEYS:
        signs = hadamard_signs(channel, chunk, SIDE.BLOCK, SIGNS)
    else:
        signs = hadamard_signs(chunk, channel, SIDE.BLOCK, SIGNS)
    if INTERPRETED:
        x = x.to(tl.float32) * unit
        if SIDE.KEYS:
            return tl.dot(signs, x, tile, input_precision="ieee")
        else:
            return tl.dot(x, signs, tile, input_precision="ieee")
    elif x.dtype == tl.float32:
        high, middle, low = split(x * unit)
        if SIDE.KEYS:
            return tl.dot(signs, high, tl.dot(signs, middle, tl.dot(signs, low, tile)))
        else:
            return tl.dot(high, signs, tl.dot(middle, signs, tl.dot(low, signs, tile)))
    else:
        if x.dtype == tl.bfloat16:
            x = (x.to(tl.float32) * unit).to(tl.bfloat16)
        return tl.dot(signs, x, tile) if SIDE.KEYS else tl.dot(x, signs, tile)


@triton.jit
def _rotate(x, tokens, dropped, unit, first, WIDTH: tl.constexpr, SIDE: tl.constexpr):
    """WIDTH channels of the rotated tile from ``first`` on; ``x`` is the tile, if it is one chunk."""
    TILE: tl.constexpr = tokens.offset.shape[0]
    HALVES: tl.constexpr = x.dtype == tl.float16
    SIGNS: tl.constexpr = tl.float32 if INTERPRETED else (tl.float16 if HALVES else tl.bfloat16)
    tile = tl.zeros([WIDTH, TILE] if SIDE.KEYS else [TILE, WIDTH], tl.float32)
    channel = first + tl.arange(0, WIDTH)
    if SIDE.DIM > SIDE.CHUNK:
        for start in range(0, SIDE.DIM, SIDE.CHUNK):
            part = _load(tokens, start, SIDE.CHUNK, SIDE)
            tile = _add_product(tile, part, channel, start, dropped, unit, SIGNS, SIDE)
    else:
        tile = _add_product(tile, x, channel, 0, dropped, unit, SIGNS, SIDE)
    factor = unit if HALVES and not INTERPRETED else 1.0
    return tile * (factor * SIDE.BLOCK**-0.5)


@triton.jit
def _load_rotated(tokens, SIDE: tl.constexpr):
    """One tile, brought to magnitude 1 and rotated: ``[channel, token]`` of keys, ``[token, channel]`` of values,
    float32.

    The channels are read twice where they do not fit one chunk: for the tile's exponent, and for the product with the
    matrix of signs.

    A void tile is zero: nobody reads it, and what it becomes must not depend on the tokens' prescale.

    Returns
    -------
    tile, exponent (scalar), broken ``[token]``: tokens with a NaN or an infinity, which are zero in the tile.
    """
    TILE: tl.constexpr = tokens.offset.shape[0]
    bits = tl.zeros([TILE], tl.int32)
    for start in tl.static_range(0, SIDE.DIM, SIDE.CHUNK):
        x = _load(tokens, start, SIDE.CHUNK, SIDE)
        magnitude = tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)
        bits = tl.maximum(bits, tl.max(magnitude, 0 if SIDE.KEYS else 1))
    broken = bits >= INFINITY_BITS
    largest = tl.max(tl.where(broken, 0, bits), 0).to(tl.float32, bitcast=True)
    exponent = tl.where(tokens.void, 0, exponent_of(largest))
    unit = tl.where(tokens.void, 0.0, power_of_two(-exponent))
    dropped = broken[None, :] if SIDE.KEYS else broken[:, None]
    broken &= not tokens.void
    if SIDE.BLOCK == 1:
        tl.static_assert(SIDE.CHUNK == SIDE.PADDED)
        return tl.where(dropped, 0.0, x.to(tl.float32)) * unit, exponent, broken

    if SIDE.PADDED > _WIDEST:
        low = _rotate(x, tokens, dropped, unit, 0, _WIDEST, SIDE)
        high = _rotate(x, tokens, dropped, unit, _WIDEST, _WIDEST, SIDE)
        both = tl.join(low, high)
        if SIDE.KEYS:
            tile = tl.reshape(tl.permute(both, (2, 0, 1)), (SIDE.PADDED, TILE))
        else:
            tile = tl.reshape(tl.permute(both, (0, 2, 1)), (TILE, SIDE.PADDED))
    else:
        tile = _rotate(x, tokens, dropped, unit, 0, SIDE.PADDED, SIDE)
    return tile, exponent, broken


@triton.jit
def _inverse_column_scale(x, exponent, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FORM: tl.constexpr):
    """One over the scale of every column of ``x`` that the method asks for."""
    if FORM.METHOD == "kvarn":
        return variance_normalize(x, FORM.ITERATIONS, ROWS, COLUMNS)
    elif FORM.METHOD == "published":
        return variance_normalize_published(x, power_of_two(exponent), FORM.ITERATIONS, ROWS, COLUMNS)
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
def quantize_key_tile(tokens, packed, FORM: tl.constexpr):
    """Pack one tile of keys: see ``kvarn_hf.method.quantize.quantize_keys``."""
    TILE: tl.constexpr = FORM.TILE
    DIM: tl.constexpr = FORM.KEYS.DIM
    BITS: tl.constexpr = FORM.KEYS.BITS
    x, exponent, broken = _load_rotated(tokens, FORM.KEYS)  # [channel, token]
    inverse = _inverse_column_scale(x, exponent, DIM, TILE, FORM)
    token_scale = half(reciprocal(inverse))
    inverse = reciprocal(token_scale)
    if FORM.METHOD == "kvarn":
        energy = tl.sum(x * x, 0)
        x = x * inverse[None, :]
        scale, zero_point = search_grid(x, BITS, 4, TILE)
    else:
        x = x * inverse[None, :]
        scale, zero_point = full_range_grid(x, BITS, TILE)
    scale, zero_point = half_scale(scale), half(zero_point)
    codes = encode(x, scale, zero_point, BITS)
    if FORM.METHOD == "kvarn":
        grid = inside(codes * scale[:, None] + zero_point[:, None], DIM, TILE, 0.0)
        token_scale *= norm_ratio(energy, tl.sum(grid * grid, 0) * (token_scale * token_scale))
    scale, zero_point, token_scale = _fold_exponent(scale, zero_point, token_scale, exponent, TILE)
    store_key_codes(packed.codes, codes, FORM.KEYS)
    d, t = tl.arange(0, FORM.KEYS.PADDED), tl.arange(0, TILE)
    tl.store(packed.channel_scale + d, scale.to(tl.float16), mask=d < DIM)
    tl.store(packed.zero_point + d, zero_point.to(tl.float16), mask=d < DIM)
    tl.store(packed.token_scale + t, tl.where(broken, float("nan"), token_scale).to(tl.float16))


@triton.jit
def quantize_value_tile(tokens, packed, FORM: tl.constexpr):
    """Pack one tile of values: see ``kvarn_hf.method.quantize.quantize_values``."""
    TILE: tl.constexpr = FORM.TILE
    DIM: tl.constexpr = FORM.VALUES.DIM
    BITS: tl.constexpr = FORM.VALUES.BITS
    x, exponent, broken = _load_rotated(tokens, FORM.VALUES)  # [token, channel]
    inverse = _inverse_column_scale(x, exponent, TILE, DIM, FORM)
    if FORM.METHOD == "kvarn":
        channel_scale = inside_vector(reciprocal(inverse), DIM, 0.0)
        scale, zero_point = search_grid(x * inverse[None, :], BITS, 2, DIM)
        codes = encode_scaled(x, inverse, scale, zero_point, BITS)
        for _ in range(_value_rounds(BITS)):
            scale, zero_point = refit_grid(x, codes, channel_scale, scale, zero_point)
            grid = codes * scale[:, None] + zero_point[:, None]
            channel_scale = inside_vector(refit_columns(x, grid, channel_scale), DIM, 0.0)
            inverse = reciprocal(tl.where(channel_scale > 0, channel_scale, 1.0))
            codes = encode_scaled(x, inverse, scale, zero_point, BITS)
        scale, zero_point = refit_grid(x, codes, channel_scale, scale, zero_point)
        x_hat = (codes * scale[:, None] + zero_point[:, None]) * channel_scale[None, :]
        ratio = norm_ratio(tl.sum(x * x, 1), tl.sum(x_hat * x_hat, 1))
        ratio *= ratio * inverse_root(ratio)  # ** 1.5
        scale, zero_point = half_scale(scale * ratio), half(zero_point * ratio)
    else:
        channel_scale = half(reciprocal(inverse))
        x = x * reciprocal(channel_scale)[None, :]
        scale, zero_point = full_range_grid(x, BITS, DIM)
        scale, zero_point = half_scale(scale), half(zero_point)
        codes = encode(x, scale, zero_point, BITS)
    scale, zero_point, channel_scale = _fold_exponent(scale, zero_point, channel_scale, exponent, DIM)
    store_value_codes(packed.codes, codes, FORM.VALUES)
    d, t = tl.arange(0, FORM.VALUES.PADDED), tl.arange(0, TILE)
    tl.store(packed.channel_scale + d, channel_scale.to(tl.float16), mask=d < DIM)
    tl.store(packed.zero_point + t, zero_point.to(tl.float16))
    tl.store(packed.token_scale + t, tl.where(broken, float("nan"), scale).to(tl.float16))


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


# fmt: off
@triton.jit(do_not_specialize=["tiles", "capacity", "slot", "position"])
def quantize_kernel(
    key_ptr, value_ptr, prescale_ptr, first_ptr,
    key_codes_ptr, key_channel_scale_ptr, key_token_scale_ptr, key_zero_point_ptr,
    value_codes_ptr, value_channel_scale_ptr, value_token_scale_ptr, value_zero_point_ptr,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    heads, tiles, capacity, slot, position,
    FORM: tl.constexpr,
):
    # fmt: on
    """Quantize tile ``tiles``-wise: ``codes, scales = fold(round(normalize(rotate(x * prescale))))``.

    Grid
        ``(2 * batch * heads * tiles,)``: the values' programs, which take longer, then the keys'; one tile each.
    Reads
        key, value ``[batch, heads, tiles * TILE, dim]`` by their strides; prescale ``[batch, heads, KEYS.DIM]``
        (float16, contiguous) and first ``[batch]`` (int64), each or None.
    Writes
        Slots ``slot`` to ``slot + tiles - 1`` of the two contiguous arenas ``[batch, heads, capacity, ...]``.
    Precision
        float32 throughout; the rotation's products are exact and its sums float32. What a tile becomes depends on the
        tile alone: never on how many are quantized at once.
    Reference
        ``kvarn_hf.method.quantize.quantize_keys`` and ``quantize_values``; ``kvarn_hf.ops.repeat_counted`` for
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
    token = tl.arange(0, FORM.TILE)
    start = tile.to(tl.int64) * FORM.TILE
    void = program < 0
    if first_ptr is None:
        source = start + token
    else:
        source, void = counted_tokens(tl.load(first_ptr + batch) - position - start, FORM.TILE)
        source += start
    if is_key:
        keys = Packed(key_codes_ptr, key_channel_scale_ptr, key_token_scale_ptr, key_zero_point_ptr)
        quantize_key_tile(
            Tokens(
                key_ptr + batch * stride_kb + head * stride_kh,
                source * stride_kt,
                stride_kd,
                None if prescale_ptr is None else prescale_ptr + row.to(tl.int64) * FORM.KEYS.DIM,
                void,
            ),
            tile_at(keys, arena, FORM.TILE, FORM.KEYS),
            FORM,
        )
    else:
        values = Packed(value_codes_ptr, value_channel_scale_ptr, value_token_scale_ptr, value_zero_point_ptr)
        quantize_value_tile(
            Tokens(value_ptr + batch * stride_vb + head * stride_vh, source * stride_vt, stride_vd, None, void),
            tile_at(values, arena, FORM.TILE, FORM.VALUES),
            FORM,
        )


def quantize_tiles(
    keys: torch.Tensor,
    values: torch.Tensor,
    prescale: torch.Tensor | None,
    first: torch.Tensor | None,
    key_arena: Packed,
    value_arena: Packed,
    scheme: Scheme,
    *,
    slot: int,
    position: int,
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
    key_arena, value_arena : Packed
        ``[batch, heads, capacity, ...]``, contiguous; tile_size is the length of a token scale.
    scheme : Scheme
        How tiles are packed.
    slot : int
        The first slot of the arenas to fill.
    position : int
        Position of the first token given.

    Raises
    ------
    ValueError
        If a head_dim is no multiple of 8 or above 512.

    Notes
    -----
    KVarN, arXiv:2606.03458; computes what ``kvarn_hf.method.quantize`` does.
    """
    batch, heads, tokens, key_dim = keys.shape
    value_dim, size = values.shape[3], key_arena.token_scale.shape[-1]
    tiles = tokens // size
    if batch * heads * tiles == 0:
        return
    call = Call(
        quantize_kernel,
        (keys, values, None if prescale is None else prescale.contiguous(), first, *key_arena, *value_arena),
        (*keys.stride(), *values.stride(), heads),
        (tiles, key_arena.codes.shape[2], slot, position),
        (tile_form(size, key_dim, value_dim, scheme, keys.device.index),),
        warps=warps_for(size * padded(max(key_dim, value_dim))),
        stages=1,
    )
    launch(call, (2 * batch * heads * tiles,))


@cache
def tile_form(tile_size: int, key_dim: int, value_dim: int, scheme: Scheme, device: int | None) -> Form:
    """The form of a kernel that packs tiles on a CUDA device (None: the interpreter).

    Raises
    ------
    ValueError
        If a head_dim is no multiple of 8 or above 512.
    """

    # A chunk of channels and its slice of the signs must fit the shared memory together: 128 channels fit that of data
    # center GPUs, 64 that of all.
    widest = 128 if shared_memory(device) >= _SHARED_BY_128_CHANNELS else 64
    rotated = scheme.method != "rtn"
    for dim in (key_dim, value_dim):
        if dim % 8 or not 8 <= dim <= LARGEST_HEAD_DIM:
            raise ValueError(f"head_dim must be a multiple of 8 from 8 to {LARGEST_HEAD_DIM}, got {dim}")
    keys, values = (
        side(is_key, dim, bits, rotated, chunk=64 if rotated and padded(dim) > widest else LARGEST_HEAD_DIM)
        for is_key, dim, bits in ((True, key_dim, scheme.key_bits), (False, value_dim, scheme.value_bits))
    )
    return Form(tile_size, keys, values, scheme.method, scheme.iterations)
