"""One decode step of caches whose storage never moves: the tiles that are due, and the new token.

For CUDA graphs: what a launch does follows from the lengths that ``counters`` holds on the device. Tiles of all layers
are packed in one launch as the step begins; see :mod:`kvarn_kernels.decode_attention` for the token.

    counters   int64, a row per layer: tokens held, tiles in use, tiles due (0 or 1), whether a token found no room
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvarn_kernels.arithmetic import INFINITY_BITS, clamp, exponent_of
from kvarn_kernels.arithmetic import power_of_two as two_to_the
from kvarn_kernels.bundles import Packed, Scheme, load_channels, store_channels, tile_sizes
from kvarn_kernels.launch import Call, compile_ahead, compiling, launch, padded, power_of_two, side, warps_for
from kvarn_kernels.quantize import Tokens, counted_tokens, quantize_key_tile, quantize_value_tile, tile_form

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class LayerShape(NamedTuple):
    """The storage of a layer, the same for all layers of a step.

    batch, heads, key_dim, value_dim : of its tokens
    dtype : of its dense tokens
    most : tokens that there is room for
    capacity : of the arenas, in tiles
    dense_capacity : of the dense tensors, in tokens
    sink_length, residual_length, tile_size : in tokens
    padded : whether any row has left padding
    """

    batch: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    most: int
    capacity: int
    dense_capacity: int
    sink_length: int
    residual_length: int
    tile_size: int
    padded: bool


class Room(NamedTuple):
    """What a kernel is told of a :class:`LayerShape` at the launch."""

    heads: Any
    capacity: Any
    dense_capacity: Any
    sink_length: Any
    residual_length: Any


@triton.jit(do_not_specialize=["layers", "most", "sink_length", "residual_length"])
def advance_kernel(
    counters_ptr, layers, most, sink_length, residual_length, TILE: tl.constexpr, LAYERS_PADDED: tl.constexpr
):
    """Begin a step of one token in every layer.

    Grid
        One program.
    Reads and writes
        counters ``[layers, 4]``, int64.
    Reference
        ``kvarn_hf.static.advance``
    """
    layer = tl.arange(0, LAYERS_PADDED)
    at, inside = counters_ptr + layer * 4, layer < layers
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
def _store_prescale(x_ptr, token_offset, prescale_ptr, SIDE: tl.constexpr):
    """The channel factors that the keys at ``token_offset`` ask for; see ``kvarn_hf.method.quantize.key_prescale``.

    ``r = clamp(sd / median sd, 1/4, 1000)``, ``p = 3/4 clamp((log2 max r - 1 - 2 t) / (2 - t), 0, 1)``, factor
    ``r ** -p``, with ``t = clamp(2 m - 1, 0, 1)`` and ``m = sum mean**2 / sum sd**2`` where r > 2.
    """
    TOKENS: tl.constexpr = token_offset.shape[0]
    DIM: tl.constexpr = SIDE.DIM
    d = tl.arange(0, SIDE.PADDED)
    x = tl.load(x_ptr + token_offset[None, :] + d[:, None], mask=(d < DIM)[:, None], other=0.0).to(tl.float32)
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 0)
    broken = bits >= INFINITY_BITS
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
def _move(x_ptr, source, target, valid, SIDE: tl.constexpr):
    """Copy tokens within a buffer; targets may be other tokens' sources."""
    d = tl.arange(0, SIDE.PADDED)
    mask = valid[:, None] & (d < SIDE.DIM)[None, :]
    x = tl.load(x_ptr + source[:, None] * SIDE.DIM + d[None, :], mask=mask, other=0.0)
    tl.debug_barrier()
    tl.store(x_ptr + target[:, None] * SIDE.DIM + d[None, :], x, mask=mask)
    tl.debug_barrier()


@triton.jit
def _close_gap(x_ptr, pad, length, packed, room, TILE: tl.constexpr, PADDED: tl.constexpr, SIDE: tl.constexpr):
    """Move the tokens behind the packed tile to its place, and those that are sinks of a padded row to theirs.

    ``packed`` tiles were in use before; ``length`` tokens are held.
    """
    t = tl.arange(0, TILE)
    tl.debug_barrier()  # the tile has been read
    if PADDED:
        tail_start = tl.where(packed > 0, room.sink_length + packed * TILE, 0)
        for start in range(0, room.sink_length, TILE):
            slot = start + t
            position = pad + slot
            source = tl.where(position >= tail_start, position - packed * TILE, slot)
            _move(x_ptr, source, slot, (slot < room.sink_length) & (position < length), SIDE)
    for start in range(0, room.residual_length, TILE):
        target = room.sink_length + start + t
        _move(x_ptr, target + TILE, target, start + t < room.residual_length, SIDE)


# fmt: off
@triton.jit
def write_kernel(
    counters_ptr, new_key_ptr, new_value_ptr, key_ptr, value_ptr,
    stride_kb, stride_kh, stride_kd,
    stride_vb, stride_vh, stride_vd,
    heads, dense_capacity,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    # fmt: on
    """Write the new token behind the tail, if it found room.

    Grid
        ``(batch * heads,)``.
    Reads
        counters ``[4]`` as :func:`advance_kernel` left them; the new token ``[batch, heads, 1, dim]`` by its strides.
    Writes
        Dense tokens ``[batch, heads, dense_capacity, dim]``, contiguous.
    Reference
        ``kvarn_hf.static.write``
    """
    row = tl.program_id(0)
    batch, head, wide = (row // heads).to(tl.int64), (row % heads).to(tl.int64), row.to(tl.int64)
    if tl.load(counters_ptr + 3) == 0:
        index = wide * dense_capacity + tl.load(counters_ptr) - 1 - tl.load(counters_ptr + 1) * TILE
        new_key = new_key_ptr + batch * stride_kb + head * stride_kh
        new_value = new_value_ptr + batch * stride_vb + head * stride_vh
        d = tl.arange(0, KEYS.PADDED)
        key = load_channels(new_key, d, stride_kd, KEYS)
        store_channels(key_ptr + index * KEYS.DIM, d, key, KEYS)
        d = tl.arange(0, VALUES.PADDED)
        value = load_channels(new_value, d, stride_vd, VALUES)
        store_channels(value_ptr + index * VALUES.DIM, d, value, VALUES)


@triton.jit
def _tensor(table_ptr, index: tl.constexpr, wide, elements, DTYPE: tl.constexpr):
    """A pointer ``wide * elements`` behind the start of a layer's ``index``-th tensor."""
    address = tl.load(table_ptr + index)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + wide * elements


@triton.jit
def _tile(table_ptr, first: tl.constexpr, index, TILE: tl.constexpr, SIDE: tl.constexpr):
    """The ``index``-th tile of the arena whose arrays are a layer's ``first``-th tensor and those that follow."""
    SIZES: tl.constexpr = tile_sizes(TILE, SIDE)
    return Packed(
        _tensor(table_ptr, first, index, SIZES.codes, tl.uint8),
        _tensor(table_ptr, first + 1, index, SIZES.channel_scale, tl.float16),
        _tensor(table_ptr, first + 2, index, SIZES.token_scale, tl.float16),
        _tensor(table_ptr, first + 3, index, SIZES.zero_point, tl.float16),
    )


@triton.jit
def _pack_tile(
    is_key, row, counters_ptr, table_ptr, room, DTYPE: tl.constexpr, PADDED: tl.constexpr, FORM: tl.constexpr
):
    """Pack the tile that is due of one KV head's keys or values."""
    TILE: tl.constexpr = FORM.TILE
    KEYS: tl.constexpr = FORM.KEYS
    VALUES: tl.constexpr = FORM.VALUES
    batch, wide = (row // room.heads).to(tl.int64), row.to(tl.int64)
    held = tl.load(counters_ptr) - 1
    packed = tl.load(counters_ptr + 1) - 1
    start = room.sink_length + packed * TILE
    pad = tl.zeros([], tl.int64)
    if PADDED:
        pad = tl.load(_tensor(table_ptr, 11, batch, 1, tl.int64))
    first = pad + room.sink_length
    source, void = counted_tokens(first - start, TILE)
    source += room.sink_length
    arena = wide * room.capacity + packed
    if is_key:
        key_ptr = _tensor(table_ptr, 0, wide, room.dense_capacity * KEYS.DIM, DTYPE)
        prescale_ptr = _tensor(table_ptr, 10, wide, KEYS.DIM, tl.float16)
        if FORM.METHOD == "kvarn":
            if (first >= start) & (first < start + TILE):
                # Cut where the tail may end when a row's first tokens are packed.
                span = tl.minimum(TILE, TILE - (first - start) + room.residual_length)
                window = first - start + room.sink_length + tl.arange(0, TILE) % span
                _store_prescale(key_ptr, window * KEYS.DIM, prescale_ptr, KEYS)
        quantize_key_tile(
            Tokens(key_ptr, source * KEYS.DIM, 1, prescale_ptr if FORM.METHOD == "kvarn" else None, void),
            _tile(table_ptr, 2, arena, TILE, KEYS),
            FORM,
        )
        _close_gap(key_ptr, pad, held, packed, room, TILE, PADDED, KEYS)
    else:
        value_ptr = _tensor(table_ptr, 1, wide, room.dense_capacity * VALUES.DIM, DTYPE)
        quantize_value_tile(
            Tokens(value_ptr, source * VALUES.DIM, 1, None, void),
            _tile(table_ptr, 6, arena, TILE, VALUES),
            FORM,
        )
        _close_gap(value_ptr, pad, held, packed, room, TILE, PADDED, VALUES)


# fmt: off
@triton.jit(do_not_specialize=["layers", "heads", "capacity", "dense_capacity", "sink_length", "residual_length"])
def pack_kernel(
    counters_ptr, table_ptr,
    layers, heads, capacity, dense_capacity, sink_length, residual_length,
    DTYPE: tl.constexpr,
    PADDED: tl.constexpr,
    TABLE: tl.constexpr,
    LAYERS_PADDED: tl.constexpr,
    FORM: tl.constexpr,
):
    # fmt: on
    """Pack the tile that is due, in every layer where one is.

    Grid
        ``(2 * batch * heads, n)``: the values' programs, then the keys', for every n-th layer. Nearly always nothing is
        due, and a program that ends at once costs only its launch slot.
    Reads
        counters ``[layers, 4]`` as :func:`advance_kernel` left them; the addresses of every layer's tensors, ``[layers,
        TABLE]`` (see :func:`pack`), 0 for a layer that is not to be looked at; ``pad`` ``[batch]`` (int64), if PADDED.
    Writes
        Dense tokens ``[batch, heads, dense_capacity, dim]``, prescale ``[batch, heads, KEYS.DIM]`` and the two arenas
        ``[batch, heads, capacity, ...]``, all contiguous.
    Reference
        ``kvarn_hf.ops.commit`` of the tokens before the new one.
    """
    each = tl.arange(0, LAYERS_PADDED)
    if tl.max(tl.load(counters_ptr + each * 4 + 2, mask=each < layers, other=0), 0) > 0:
        room = Room(heads, capacity, dense_capacity, sink_length, residual_length)
        program, programs = tl.program_id(0), tl.num_programs(0) // 2
        is_key = program >= programs
        row = tl.where(is_key, program - programs, program)
        for layer in range(tl.program_id(1), layers, tl.num_programs(1)):
            of_layer = table_ptr + layer * TABLE
            if (tl.load(counters_ptr + layer * 4 + 2) > 0) & (tl.load(of_layer) != 0):
                _pack_tile(is_key, row, counters_ptr + layer * 4, of_layer, room, DTYPE, PADDED, FORM)
                tl.debug_barrier()  # the next layer's tile takes the same shared memory


def advance(counters: torch.Tensor, shape: LayerShape) -> None:
    """Begin a step of one token in every layer: where it goes, and whether a tile is packed before.

    Parameters
    ----------
    counters : torch.Tensor
        ``[layers, 4]``, int64, changed in place: tokens held (the new one included), tiles in use (the one to pack
        included), 1 where a tile is due, 1 where the new token finds no room.
    shape : LayerShape
        Of every layer.
    """
    layers = counters.shape[0]
    numbers = layers, shape.most, shape.sink_length, shape.residual_length
    constants = shape.tile_size, power_of_two(layers)
    launch(Call(advance_kernel, (counters,), (), numbers, constants, warps=1, stages=1), (1,))


def pack(
    counters: torch.Tensor, table: torch.Tensor, shape: LayerShape, scheme: Scheme, *, ahead: bool = False
) -> None:
    """Pack, in every layer of one shape, the tile that is due: one launch.

    Parameters
    ----------
    counters : torch.Tensor
        ``[layers, 4]``, int64, as :func:`advance` left it.
    table : torch.Tensor
        ``[layers, 12]``, int64, on the device of ``counters``: addresses of every layer's tensors, 0 for layers to
        leave alone. In this order: dense keys and values ``[batch, heads, dense_capacity, head_dim]``; the tensors of
        the keys' and then the values' :class:`kvarn_kernels.bundles.Packed`; prescale ``[batch, heads, key_dim]``
        (float16, set with each row's first tile); left padding ``[batch]`` (int64). All contiguous, at multiples of 16.
    shape : LayerShape
        Of every layer.
    scheme : Scheme
        How tiles are packed.
    ahead : bool
        Only begin to compile the kernel (see :func:`kvarn_kernels.launch.begin`).

    Raises
    ------
    ValueError
        If a head_dim is no multiple of 8 or above 512.
    """
    device, layers = counters.device.index, counters.shape[0]
    call = Call(
        pack_kernel,
        (counters, table),
        (),
        (layers, shape.heads, shape.capacity, shape.dense_capacity, shape.sink_length, shape.residual_length),
        (
            _DTYPES[shape.dtype],
            shape.padded,
            table.shape[1],
            power_of_two(layers),
            tile_form(shape.tile_size, shape.key_dim, shape.value_dim, scheme, device),
        ),
        warps=warps_for(shape.tile_size * padded(max(shape.key_dim, shape.value_dim))),
        stages=1,
    )
    if ahead:
        compile_ahead(call)
    else:
        programs = 2 * shape.batch * shape.heads
        launch(call, (programs, min(layers, max(1, _at_once(device) // programs))))


def may_skip_pack(counters: torch.Tensor) -> bool:
    """Whether :func:`pack` would only wait for its kernel: that is being compiled, and no tile is due.

    Only then is the device asked, which cannot answer while a CUDA graph is captured.

    Parameters
    ----------
    counters : torch.Tensor
        ``[layers, 4]``, int64, as :func:`advance` left it.
    """
    if not compiling(pack_kernel) or (counters.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return not counters[:, 2].any().item()


def write(
    keys: torch.Tensor,
    values: torch.Tensor,
    counters: torch.Tensor,
    dense_keys: torch.Tensor,
    dense_values: torch.Tensor,
    shape: LayerShape,
) -> None:
    """Write one token per row behind the tail.

    Parameters
    ----------
    keys, values : torch.Tensor
        ``[batch, heads, 1, head_dim]``, any strides.
    counters : torch.Tensor
        ``[4]``, int64: the layer's row of what :func:`advance` left.
    dense_keys, dense_values : torch.Tensor
        ``[batch, heads, dense_capacity, head_dim]``, contiguous, the dtype of ``keys``: changed in place.
    shape : LayerShape
        Of the layer.
    """
    call = Call(
        write_kernel,
        (counters, keys, values, dense_keys, dense_values),
        (
            *(keys.stride(i) for i in (0, 1, 3)),
            *(values.stride(i) for i in (0, 1, 3)),
            shape.heads,
            shape.dense_capacity,
        ),
        (),
        (shape.tile_size, side(True, shape.key_dim), side(False, shape.value_dim)),
        warps=1,
        stages=1,
    )
    launch(call, (shape.batch * shape.heads,))


@cache
def _at_once(device: int | None) -> int:
    """Programs that are resident at once: two per multiprocessor."""
    return 4 if device is None else 2 * torch.cuda.get_device_properties(device).multi_processor_count
