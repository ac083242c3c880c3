"""One decode step of caches whose storage never moves: the tiles that it is time to pack, and the new token.

For CUDA graphs: what a launch does follows from the lengths that ``progress`` holds on the device. Tiles of all layers
are packed in one launch as the step begins; see :mod:`kvarn_kernels.decode_attention` for the token.

    progress   tokens held, tiles in use, whether this step packs a tile, whether a token found no room
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kvarn_kernels.arithmetic import clamp, exponent_of
from kvarn_kernels.arithmetic import power_of_two as two_to_the
from kvarn_kernels.launch import Call, compile_ahead, compiling, launch, padded, power_of_two, warps_for
from kvarn_kernels.quantize import (
    counted_tokens,
    quantize_key_tile,
    quantize_value_tile,
    shape_constants,
)

_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit(do_not_specialize=["layers", "most", "sink_length", "residual_length"])
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

    ``r = clamp(sd / median sd, 1/4, 1000)``, ``p = 3/4 clamp((log2 max r - 1 - 2 t) / (2 - t), 0, 1)``, factor
    ``r ** -p``, with ``t = clamp(2 m - 1, 0, 1)`` and ``m = sum mean**2 / sum sd**2`` where r > 2.
    """
    TOKENS: tl.constexpr = token_offset.shape[0]
    d = tl.arange(0, DIM_PADDED)
    x = tl.load(x_ptr + token_offset[None, :] + d[:, None], mask=(d < DIM)[:, None], other=0.0).to(tl.float32)
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 0)
    broken = bits >= _INFINITY_BITS
    largest = tl.max(tl.where(broken, 0, bits), 0).to(tl.float32, bitcast=True)
    x = tl.where(broken[None, :], 0.0, x) * two_to_the(-exponent_of(largest))
    mean = tl.sum(x, 1) / TOKENS
    x -= mean[:, None]
    deviation = tl.sqrt_rn(tl.sum(x * x, 1) / TOKENS)
    median = _kth_smallest(tl.where(d < DIM, deviation, float("inf")), (DIM - 1) // 2)
    ratio = clamp(tl.where(median > 0, deviation / tl.where(median > 0, median, 1.0), 1.0), 0.25, 1000.0)
    ratio = tl.where(d < DIM, ratio, 0.25)
    offset = tl.sum(tl.where(ratio > 2, mean * mean, 0.0), 0)
    spread = tl.sum(tl.where(ratio > 2, deviation * deviation, 0.0), 0)
    late = clamp(2 * offset / tl.where(spread > 0, spread, 1.0) - 1, 0.0, 1.0)
    power = 0.75 * clamp((tl.log2(tl.max(ratio, 0)) - 1 - 2 * late) / (2 - late), 0.0, 1.0)
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
def write_kernel(
    progress_ptr,
    new_key_ptr,
    new_value_ptr,
    key_ptr,
    value_ptr,
    stride_k_b,
    stride_k_h,
    stride_k_d,
    stride_v_b,
    stride_v_h,
    stride_v_d,
    heads,
    dense_capacity,
    TILE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
):
    """Write the new token behind the tail, if it found room.

    Grid
        ``(batch * heads,)``.
    Reads
        progress as :func:`advance_kernel` left it; the new token ``[batch, heads, 1, dim]`` by its strides.
    Writes
        Dense tokens ``[batch, heads, dense_capacity, dim]``, contiguous.
    """
    row = tl.program_id(0)
    batch, head, wide = (row // heads).to(tl.int64), (row % heads).to(tl.int64), row.to(tl.int64)
    if tl.load(progress_ptr + 3) == 0:
        index = wide * dense_capacity + tl.load(progress_ptr) - 1 - tl.load(progress_ptr + 1) * TILE
        new_key = new_key_ptr + batch * stride_k_b + head * stride_k_h
        new_value = new_value_ptr + batch * stride_v_b + head * stride_v_h
        _write(key_ptr, new_key, index, stride_k_d, KEY_DIM, KEY_PADDED)
        _write(value_ptr, new_value, index, stride_v_d, VALUE_DIM, VALUE_PADDED)


@triton.jit
def _tensor(table_ptr, index: tl.constexpr, wide, elements, DTYPE: tl.constexpr):
    """A pointer ``wide * elements`` behind the start of a layer's ``index``-th tensor."""
    address = tl.load(table_ptr + index)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + wide * elements


@triton.jit
def _pack_tile(
    is_key,
    row,
    progress_ptr,
    table_ptr,
    heads,
    capacity,
    dense_capacity,
    sink_length,
    residual_length,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
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
    """Pack the tile that is due of one KV head's keys or values."""
    batch, wide = (row // heads).to(tl.int64), row.to(tl.int64)
    held = tl.load(progress_ptr) - 1
    packed = tl.load(progress_ptr + 1) - 1
    start = sink_length + packed * TILE
    pad = tl.zeros([], tl.int64)
    if PADDED:
        pad = tl.load(_tensor(table_ptr, 11, batch, 1, tl.int64))
    first = pad + sink_length
    source, void = counted_tokens(first - start, TILE)
    source += sink_length
    arena = wide * capacity + packed
    if is_key:
        key_ptr = _tensor(table_ptr, 0, wide, dense_capacity * KEY_DIM, DTYPE)
        prescale_ptr = _tensor(table_ptr, 10, wide, KEY_DIM, tl.float16)
        if METHOD == "kvarn":
            if (first >= start) & (first < start + TILE):
                # Cut where the tail may end when a row's first tokens are packed.
                span = tl.minimum(TILE, TILE - (first - start) + residual_length)
                window = first - start + sink_length + tl.arange(0, TILE) % span
                _store_prescale(key_ptr, window * KEY_DIM, prescale_ptr, KEY_DIM, KEY_PADDED)
        quantize_key_tile(
            key_ptr,
            source * KEY_DIM,
            void,
            1,
            prescale_ptr if METHOD == "kvarn" else None,
            _tensor(table_ptr, 2, arena, TILE * KEY_BITS // 8 * KEY_DIM, tl.uint8),
            _tensor(table_ptr, 3, arena, KEY_DIM, tl.float16),
            _tensor(table_ptr, 4, arena, TILE, tl.float16),
            _tensor(table_ptr, 5, arena, KEY_DIM, tl.float16),
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
        _close_gap(key_ptr, pad, held, packed, sink_length, residual_length, TILE, KEY_DIM, KEY_PADDED, PADDED)
    else:
        value_ptr = _tensor(table_ptr, 1, wide, dense_capacity * VALUE_DIM, DTYPE)
        quantize_value_tile(
            value_ptr,
            source * VALUE_DIM,
            void,
            1,
            _tensor(table_ptr, 6, arena, VALUE_DIM * VALUE_BITS // 8 * TILE, tl.uint8),
            _tensor(table_ptr, 7, arena, VALUE_DIM, tl.float16),
            _tensor(table_ptr, 8, arena, TILE, tl.float16),
            _tensor(table_ptr, 9, arena, TILE, tl.float16),
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
        _close_gap(value_ptr, pad, held, packed, sink_length, residual_length, TILE, VALUE_DIM, VALUE_PADDED, PADDED)


@triton.jit(
    do_not_specialize=["layers", "heads", "capacity", "dense_capacity", "sink_length", "residual_length"],
)
def pack_kernel(
    progress_ptr,
    table_ptr,
    layers,
    heads,
    capacity,
    dense_capacity,
    sink_length,
    residual_length,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
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
    TABLE: tl.constexpr,
    LAYERS_PADDED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Pack the tile that is due, in every layer where one is.

    Grid
        ``(2 * batch * heads, n)``: the values' programs, then the keys', for every n-th layer. Nearly always nothing is
        due, and what a program that ends at once costs is its place on the GPU.
    Reads
        progress ``[layers, 4]`` as :func:`advance_kernel` left it; the addresses of every layer's tensors, ``[layers,
        TABLE]`` (see :func:`pack`), 0 for a layer that is not to be looked at; ``pad`` ``[batch]`` (int64), if PADDED.
    Writes
        Dense tokens ``[batch, heads, dense_capacity, dim]``, prescale ``[batch, heads, KEY_DIM]`` and the eight arenas
        ``[batch, heads, capacity, ...]``, all contiguous.
    Reference
        ``kvarn_hf.state.LayerState.committed`` of the tokens before the new one.
    """
    each = tl.arange(0, LAYERS_PADDED)
    if tl.max(tl.load(progress_ptr + each * 4 + 2, mask=each < layers, other=0), 0) > 0:
        program, programs = tl.program_id(0), tl.num_programs(0) // 2
        is_key = program >= programs
        row = tl.where(is_key, program - programs, program)
        for layer in range(tl.program_id(1), layers, tl.num_programs(1)):
            of_layer = table_ptr + layer * TABLE
            if (tl.load(progress_ptr + layer * 4 + 2) > 0) & (tl.load(of_layer) != 0):
                _pack_tile(
                    is_key,
                    row,
                    progress_ptr + layer * 4,
                    of_layer,
                    heads,
                    capacity,
                    dense_capacity,
                    sink_length,
                    residual_length,
                    TILE,
                    DTYPE,
                    KEY_DIM,
                    KEY_PADDED,
                    KEY_CHUNK,
                    KEY_BLOCK,
                    KEY_BITS,
                    KEY_NARROWEST,
                    KEY_CANDIDATES,
                    VALUE_DIM,
                    VALUE_PADDED,
                    VALUE_CHUNK,
                    VALUE_BLOCK,
                    VALUE_BITS,
                    VALUE_NARROWEST,
                    VALUE_CANDIDATES,
                    METHOD,
                    ITERATIONS,
                    PADDED,
                    INTERPRETED,
                )
                tl.debug_barrier()  # the next layer's tile takes the same shared memory


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
    launch(Call(advance_kernel, (progress,), (), numbers, constants, warps=1, stages=1), (1,))


def pack(
    progress: torch.Tensor,
    table: torch.Tensor,
    *,
    batch: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    capacity: int,
    dense_capacity: int,
    sink_length: int,
    residual_length: int,
    tile_size: int,
    key_bits: int,
    value_bits: int,
    method: str,
    iterations: int,
    padded_rows: bool,
    ahead: bool = False,
) -> None:
    """Pack, in every layer of one form, the tile that is due: one launch.

    Parameters
    ----------
    progress : torch.Tensor
        ``[layers, 4]``, int64, as :func:`advance` left it.
    table : torch.Tensor
        ``[layers, 12]``, int64, on the device of ``progress``: addresses of every layer's tensors, 0 for layers to
        leave alone. In this order: dense keys and values ``[batch, heads, dense_capacity, head_dim]``; the keys' and
        then the values' arena, as in :func:`kvarn_kernels.quantize.quantize_tiles`; prescale ``[batch, heads,
        key_dim]`` (float16, set with each row's first tile); left padding ``[batch]`` (int64). All contiguous, at
        multiples of 16.
    batch, heads, key_dim, value_dim, dtype, capacity, dense_capacity
        Of these: ``dtype`` of the dense tokens, ``capacity`` in tiles.
    sink_length, residual_length, tile_size, key_bits, value_bits, method, iterations
        Of the cache.
    padded_rows : bool
        Whether any row has left padding.
    ahead : bool
        Only begin to compile the kernel, in a thread of its own.
    """
    device, layers = progress.device.index, progress.shape[0]
    call = Call(
        pack_kernel,
        (progress, table),
        (),
        (layers, heads, capacity, dense_capacity, sink_length, residual_length),
        (
            tile_size,
            _TRITON[dtype],
            *shape_constants(key_dim, key_bits, method, device),
            *shape_constants(value_dim, value_bits, method, device),
            method,
            iterations,
            padded_rows,
            table.shape[1],
            power_of_two(layers),
            not progress.is_cuda,
        ),
        warps=warps_for(tile_size * padded(max(key_dim, value_dim))),
        stages=1,
    )
    if ahead:
        compile_ahead(call)
    else:
        programs = 2 * batch * heads
        launch(call, (programs, min(layers, max(1, _at_once(device) // programs))))


def may_skip_pack(progress: torch.Tensor) -> bool:
    """Whether :func:`pack` would only wait for its kernel: that is being compiled, and no tile is due.

    Only then is the device asked, which cannot answer while a CUDA graph is captured.

    Parameters
    ----------
    progress : torch.Tensor
        ``[layers, 4]``, int64, as :func:`advance` left it.
    """
    if not compiling(pack_kernel) or (progress.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return not progress[:, 2].any().item()


def write(
    keys: torch.Tensor,
    values: torch.Tensor,
    progress: torch.Tensor,
    dense_keys: torch.Tensor,
    dense_values: torch.Tensor,
    tile_size: int,
) -> None:
    """Write one token per row behind the tail.

    Parameters
    ----------
    keys, values : torch.Tensor
        ``[batch, heads, 1, head_dim]``, any strides.
    progress : torch.Tensor
        ``[4]``, int64: the layer's row of what :func:`advance` left.
    dense_keys, dense_values : torch.Tensor
        ``[batch, heads, capacity, head_dim]``, contiguous, the dtype of ``keys``: changed in place.
    tile_size : int
        Of the cache.
    """
    batch, heads, _, key_dim = keys.shape
    value_dim = values.shape[3]
    call = Call(
        write_kernel,
        (progress, keys, values, dense_keys, dense_values),
        (
            *(keys.stride(i) for i in (0, 1, 3)),
            *(values.stride(i) for i in (0, 1, 3)),
            heads,
            dense_keys.shape[2],
        ),
        (),
        (tile_size, key_dim, padded(key_dim), value_dim, padded(value_dim)),
        warps=1,
        stages=1,
    )
    launch(call, (batch * heads,))


@cache
def _at_once(device: int | None) -> int:
    """Programs that begin together, two after the other on every multiprocessor."""
    return 4 if device is None else 2 * torch.cuda.get_device_properties(device).multi_processor_count


_TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
