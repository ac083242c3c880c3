"""What host functions and kernels hand to each other: each group of names is defined once, here.

Bundles of arrays hold tensors on the host and pointers in a kernel. Bundles of constants, with names in capitals, are
what a kernel is compiled for. ``kernels/README.md`` lists the traps.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import triton
import triton.language as tl

from kvarn_kernels.arithmetic import INTERPRETED

Array: TypeAlias = Any  # a tensor on the host, a pointer in a kernel


class Packed(NamedTuple):
    """Codes and scales of packed tiles of keys, or of values: ``x = (codes * scale + zero_point) * other_scale``.

    codes : uint8, ``[..., tile_size * bits / 8, head_dim]`` of keys, ``[..., head_dim * bits / 8, tile_size]`` of
        values, in the order of :mod:`kvarn_kernels.packing`
    channel_scale : float16, ``[..., head_dim]``
    token_scale : float16, ``[..., tile_size]``
    zero_point : float16, per channel of keys, per token of values

    An arena has ``[rows, heads, capacity]`` in front and is contiguous.
    """

    codes: Array
    channel_scale: Array
    token_scale: Array
    zero_point: Array


class Run(NamedTuple):
    """Left padding: the run of identical tokens that each row begins with, of which one is held.

    length : int64, ``[batch]``; 0 for a row without padding
    key, value : ``[batch, heads, 1, head_dim]``
    """

    length: Array
    key: Array
    value: Array


class Scheme(NamedTuple):
    """How tiles are packed.

    key_bits, value_bits : 2, 3, 4 or 8
    method : "kvarn", "published", "hadamard" or "rtn"; all but "rtn" rotate
    iterations : rounds of variance normalization
    """

    key_bits: int
    value_bits: int
    method: str
    iterations: int


class Held(NamedTuple):
    """All that a layer holds, as the kernels that read it take it. Host only.

    keys, values : Packed
        Arenas of packed tiles.
    prescale : torch.Tensor, optional
        float16, ``[batch, heads, key_dim]``: keys were multiplied by it before the rotation; None: by 1.
    rows : torch.Tensor, optional
        int64, ``[batch]``: the arena row of every batch row; None: its own.
    dense_keys, dense_values : torch.Tensor
        ``[batch, heads, sink_length + tail, head_dim]``, in the model's dtype: the sinks, then the tail.
    padding : Run, optional
        A row's sinks are then read behind its run.
    tile_count : int
        Tiles in use.
    sink_length : int
        How many of the dense tokens come before the tiles.
    scheme : Scheme
        How the tiles are packed.
    """

    keys: Packed
    values: Packed
    prescale: Array | None
    rows: Array | None
    dense_keys: Array
    dense_values: Array
    padding: Run | None
    tile_count: int
    sink_length: int
    scheme: Scheme

    @property
    def tile_size(self) -> int:
        """Tokens of a tile."""
        return self.keys.token_scale.shape[-1]  # type: ignore[no-any-return]

    @property
    def capacity(self) -> int:
        """Tiles that the arenas have room for."""
        return self.keys.codes.shape[2]  # type: ignore[no-any-return]


class Step(NamedTuple):
    """A decode step whose lengths only the device knows: for CUDA graphs, in which lengths change and launches do not.

    counters : int64, ``[4]``: tokens held (the new one included), tiles in use, tiles due, whether the new token found
        no room
    key, value : ``[batch, heads, 1, head_dim]``: the new token's, if it is still to be written; any strides
    """

    counters: Array
    key: Array | None = None
    value: Array | None = None


class Side(NamedTuple):
    """What kernels are compiled for, of keys or of values.

    KEYS : bool; whether they are keys, whose rounding grids are per channel
    DIM : channels
    PADDED : the power of two that a tile's channels are padded to
    CHUNK : channels that are read at a time
    BLOCK : order of the blocks of the Hadamard rotation; 1: no rotation
    BITS : of a code
    """

    KEYS: bool
    DIM: int
    PADDED: int
    CHUNK: int
    BLOCK: int
    BITS: int


@lru_cache(maxsize=1024, typed=True)
def constant(x: Any) -> Any:
    """``x`` as a kernel's ``tl.constexpr`` parameter takes it, bundles with all that they hold."""
    if INTERPRETED or not isinstance(x, tuple):
        return x
    return type(x)(*(tl.constexpr(constant(field)) for field in x))  # type: ignore[call-arg]


@triton.constexpr_function
def tile_sizes(tile, side):
    """Elements that a tile has in each array of :class:`Packed`."""
    return Packed(tile * side.BITS // 8 * side.DIM, side.DIM, tile, side.DIM if side.KEYS else tile)


@triton.jit
def tile_at(packed, index, TILE: tl.constexpr, SIDE: tl.constexpr):
    """The ``index``-th (int64) tile of an arena, or the part of an arena that begins there: :class:`Packed`."""
    SIZES: tl.constexpr = tile_sizes(TILE, SIDE)
    return Packed(
        packed.codes + index * SIZES.codes,
        packed.channel_scale + index * SIZES.channel_scale,
        packed.token_scale + index * SIZES.token_scale,
        packed.zero_point + index * SIZES.zero_point,
    )


@triton.jit
def load_channels(ptr, channel, stride, SIDE: tl.constexpr):
    """One token's channels ``[PADDED]``, zero from DIM on."""
    return tl.load(ptr + channel * stride, mask=channel < SIDE.DIM, other=0.0)


@triton.jit
def store_channels(ptr, channel, x, SIDE: tl.constexpr):
    """Store ``x`` ``[PADDED]`` as one token's channels, contiguously."""
    tl.store(ptr + channel, x, mask=channel < SIDE.DIM)
