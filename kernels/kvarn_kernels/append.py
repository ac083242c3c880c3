"""One decode step of a cache whose storage never moves: the new token, and the tile that it is time to pack.

For CUDA graphs: what a launch does follows from the lengths that ``progress`` holds on the device.

    progress   tokens held, tiles in use, whether this step packs a tile, whether a token found no room
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvarn_kernels.arithmetic import clamp, exponent_of
from kvarn_kernels.arithmetic import power_of_two as two_to_the
from kvarn_kernels.launch import Call, compile_ahead, launch, padded, power_of_two, warps_for
from kvarn_kernels.quantize import (
    counted_tokens,
    quantize_key_tile,
    quantize_value_tile,
    shape_constants,
)

_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def advance_kernel(
    progress_ptr, layers, most, sink_length, residual_length, TILE: tl.constexpr, LAYERS_PADDED: tl.constexpr
):
    """Begin a step of one token in every layer.

    Grid
        One program.
    Reads and writes
        progress ``[layers, 4]``, int64.
    """
    layer = tl.arange(0, LAYERS_PADDED)
    at, inside = progress_ptr + layer * 4, layer < layers
    length = tl.load(at, mask=inside, other=0)
    count = tl.load(at + 1, mask=inside, other=0)
    ready = tl.maximum((length - sink_length - residual_length) // TILE, count)
    room = length < most
    tl.store(at, tl.where(room, length + 1, length), mask=inside)
    tl.store(at + 1, tl.where(room, ready, count), mask=inside)
    tl.store(at + 2, tl.where(room, ready - count, 0), mask=inside)
    tl.store(at + 3, 1 - room.to(tl.int64), mask=inside)


@triton.jit
def _kth_smallest(x, K: tl.constexpr):
    """The K-th smallest, from 0, of numbers that are not negative: their bits are ordered as they are."""
    bits = x.to(tl.int32, bitcast=True)
    found = tl.zeros([], tl.int32)
    for i in range(31):
        candidate = found | (1 << (30 - i))
        found = tl.where(tl.sum((bits < candidate).to(tl.int32), 0) <= K, candidate, found)
    return found.to(tl.float32, bitcast=True)


@triton.jit
def _store_prescale(x_ptr, token_offset, prescale_ptr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """The channel factors that the keys at ``token_offset`` ask for; see ``kvarn_hf.reference.quantize.key_prescale``.

    ``r = clamp(sd / median sd, 1/4, 1000)``, ``p = 3/4 clamp((log2 max r - 1) / 2, 0, 1)``, factor ``r ** -p``.
    """
    TOKENS: tl.constexpr = token_offset.shape[0]
    d = tl.arange(0, DIM_PADDED)
    x = tl.load(x_ptr + token_offset[None, :] + d[:, None], mask=(d < DIM)[:, None], other=0.0).to(tl.float32)
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 0)
    broken = bits >= _INFINITY_BITS
    largest = tl.max(tl.where(broken, 0, bits), 0).to(tl.float32, bitcast=True)
    x = tl.where(broken[None, :], 0.0, x) * two_to_the(-exponent_of(largest))
    x -= (tl.sum(x, 1) / TOKENS)[:, None]
    deviation = tl.sqrt_rn(tl.sum(x * x, 1) / TOKENS)
    median = _kth_smallest(tl.where(d < DIM, deviation, float("inf")), (DIM - 1) // 2)
    ratio = clamp(tl.where(median > 0, deviation / tl.where(median > 0, median, 1.0), 1.0), 0.25, 1000.0)
    power = 0.75 * clamp((tl.log2(tl.max(tl.where(d < DIM, ratio, 0.0), 0)) - 1) * 0.5, 0.0, 1.0)
    tl.store(prescale_ptr + d, tl.exp2(-power * tl.log2(ratio)).to(tl.float16), mask=d < DIM)
    tl.debug_barrier()


@triton.jit
def _move(x_ptr, source, target, valid, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Copy tokens within a buffer; targets may be other tokens' sources."""
    d = tl.arange(0, DIM_PADDED)
    mask = valid[:, None] & (d < DIM)[None, :]
    x = tl.load(x_ptr + source[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    tl.debug_barrier()
    tl.store(x_ptr + target[:, None] * DIM + d[None, :], x, mask=mask)
    tl.debug_barrier()


@triton.jit
def _close_gap(
    x_ptr,
    pad,
    length,
    packed,
    sink_length,
    residual_length,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Move the tokens behind the packed tile to its place, and those that are sinks of a padded row to theirs.

    ``packed`` tiles were in use before; ``length`` tokens are held.
    """
    t = tl.arange(0, TILE)
    tl.debug_barrier()  # the tile has been read
    if PADDED:
        tail_start = tl.where(packed > 0, sink_length + packed * TILE, 0)
        for start in range(0, sink_length, TILE):
            slot = start + t
            position = pad + slot
            source = tl.where(position >= tail_start, position - packed * TILE, slot)
            _move(x_ptr, source, slot, (slot < sink_length) & (position < length), DIM, DIM_PADDED)
    for start in range(0, residual_length, TILE):
        target = sink_length + start + t
        _move(x_ptr, target + TILE, target, start + t < residual_length, DIM, DIM_PADDED)


@triton.jit
def _write(x_ptr, new_ptr, index, stride_d, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    d = tl.arange(0, DIM_PADDED)
    new = tl.load(new_ptr + d * stride_d, mask=d < DIM, other=0.0)
    tl.store(x_ptr + index * DIM + d, new, mask=d < DIM)


@triton.jit
def append_kernel(
    progress_ptr,
    new_key_ptr,
    new_value_ptr,
    key_ptr,
    value_ptr,
    prescale_ptr,
    pad_ptr,
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
    stride_k_d,
    stride_v_b,
    stride_v_h,
    stride_v_d,
    heads,
    capacity,
    dense_capacity,
    sink_length,
    residual_length,
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
    PADDED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Pack the tile that is due, if one is, and write the new token behind the tail.

    Grid
        ``(2 * batch * heads,)``: the values' programs, then the keys'.
    Reads
        progress as :func:`advance_kernel` left it; the new token ``[batch, heads, 1, dim]`` by its strides; ``pad``
        ``[batch]`` (int64), if PADDED.
    Writes
        Dense tokens ``[batch, heads, dense_capacity, dim]``, prescale ``[batch, heads, KEY_DIM]`` and the eight arenas
        ``[batch, heads, capacity, ...]``, all contiguous.
    Reference
        ``kvarn_hf.state.LayerState.committed`` of the tokens so far, then ``appended``.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0) // 2
    is_key = program >= programs
    row = tl.where(is_key, program - programs, program)
    batch, head, wide = (row // heads).to(tl.int64), (row % heads).to(tl.int64), row.to(tl.int64)
    length, count = tl.load(progress_ptr), tl.load(progress_ptr + 1)
    key_ptr += wide * dense_capacity * KEY_DIM
    value_ptr += wide * dense_capacity * VALUE_DIM
    if tl.load(progress_ptr + 2) > 0:
        packed = count - 1
        start = sink_length + packed * TILE
        pad = tl.zeros([], tl.int64)
        if PADDED:
            pad = tl.load(pad_ptr + batch)
        first = pad + sink_length
        source, void = counted_tokens(first - start, TILE)
        source += sink_length
        arena = wide * capacity + packed
        if is_key:
            if METHOD == "kvarn":
                if (first >= start) & (first < start + TILE):
                    # Cut where the tail may end when a row's first tokens are packed.
                    span = tl.minimum(TILE, TILE - (first - start) + residual_length)
                    window = first - start + sink_length + tl.arange(0, TILE) % span
                    _store_prescale(key_ptr, window * KEY_DIM, prescale_ptr + wide * KEY_DIM, KEY_DIM, KEY_PADDED)
            quantize_key_tile(
                key_ptr,
                source * KEY_DIM,
                void,
                1,
                prescale_ptr + wide * KEY_DIM if METHOD == "kvarn" else None,
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
            _close_gap(
                key_ptr,
                pad,
                length - 1,
                packed,
                sink_length,
                residual_length,
                TILE,
                KEY_DIM,
                KEY_PADDED,
                PADDED,
            )
        else:
            quantize_value_tile(
                value_ptr,
                source * VALUE_DIM,
                void,
                1,
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
            _close_gap(
                value_ptr,
                pad,
                length - 1,
                packed,
                sink_length,
                residual_length,
                TILE,
                VALUE_DIM,
                VALUE_PADDED,
                PADDED,
            )
    if tl.load(progress_ptr + 3) == 0:
        index = length - 1 - count * TILE
        if is_key:
            new = new_key_ptr + batch * stride_k_b + head * stride_k_h
            _write(key_ptr, new, index, stride_k_d, KEY_DIM, KEY_PADDED)
        else:
            new = new_value_ptr + batch * stride_v_b + head * stride_v_h
            _write(value_ptr, new, index, stride_v_d, VALUE_DIM, VALUE_PADDED)


def advance(progress: torch.Tensor, *, most: int, sink_length: int, residual_length: int, tile_size: int) -> None:
    """Begin a step of one token in every layer: where it goes, and whether a tile is packed before.

    Parameters
    ----------
    progress : torch.Tensor
        ``[layers, 4]``, int64, changed in place: tokens held (the new one included), tiles in use (the one to pack
        included), 1 where a tile is to be packed, 1 where the new token finds no room.
    most : int
        Tokens that a layer has room for.
    sink_length, residual_length, tile_size : int
        Of the cache.
    """
    layers = progress.shape[0]
    numbers = layers, most, sink_length, residual_length
    constants = tile_size, power_of_two(layers)
    launch(Call(advance_kernel, (progress,), numbers, (), constants, warps=1, stages=1), (1,))


def append(
    keys: torch.Tensor,
    values: torch.Tensor,
    progress: torch.Tensor,
    dense_keys: torch.Tensor,
    dense_values: torch.Tensor,
    prescale: torch.Tensor,
    pad: torch.Tensor | None,
    key_arena: tuple[torch.Tensor, ...],
    value_arena: tuple[torch.Tensor, ...],
    *,
    sink_length: int,
    residual_length: int,
    key_bits: int,
    value_bits: int,
    method: str,
    iterations: int,
    ahead: bool = False,
) -> None:
    """Write one token per row behind the tail, and pack the tile that is due before: one launch.

    Parameters
    ----------
    keys, values : torch.Tensor
        ``[batch, heads, 1, head_dim]``, any strides.
    progress : torch.Tensor
        ``[4]``, int64: the layer's row of what :func:`advance` left.
    dense_keys, dense_values : torch.Tensor
        ``[batch, heads, capacity, head_dim]``, contiguous, the dtype of ``keys``: sinks and tail, changed in place.
    prescale : torch.Tensor
        ``[batch, heads, key_dim]``, float16: set with each row's first tile.
    pad : torch.Tensor, optional
        ``[batch]``, int64: each row's left padding.
    key_arena, value_arena : tuple of torch.Tensor
        As in :func:`kvarn_kernels.quantize.quantize_tiles`.
    sink_length, residual_length, key_bits, value_bits, method, iterations
        Of the cache.
    ahead : bool
        Only begin to compile the kernel, in a thread of its own.
    """
    batch, heads, _, key_dim = keys.shape
    value_dim, size = values.shape[3], key_arena[2].shape[-1]
    call = Call(
        append_kernel,
        (progress, keys, values, dense_keys, dense_values, prescale, pad, *key_arena, *value_arena),
        (
            *(keys.stride(i) for i in (0, 1, 3)),
            *(values.stride(i) for i in (0, 1, 3)),
            heads,
            key_arena[0].shape[2],
            dense_keys.shape[2],
            sink_length,
            residual_length,
        ),
        (),
        (
            size,
            *shape_constants(key_dim, key_bits, method, keys.device.index),
            *shape_constants(value_dim, value_bits, method, keys.device.index),
            method,
            iterations,
            pad is not None,
            not keys.is_cuda,
        ),
        warps=warps_for(size * padded(max(key_dim, value_dim))),
        stages=1,
    )
    if ahead:
        compile_ahead(call)
    else:
        launch(call, (2 * batch * heads,))
