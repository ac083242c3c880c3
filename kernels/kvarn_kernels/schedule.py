"""How the work of the decode attention is shared by slices, counted alike on the host and in the kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

_MOST_SLICES = 256  # what is combined in one step


class Work(NamedTuple):
    """What the kernels are compiled for: how the work is cut.

    QUERIES : new tokens
    COLUMNS : query columns: query heads per KV head x new tokens
    COLS : of these, those of one program
    TILE : tokens of a tile
    BLOCK : dense tokens per step
    WEIGHT : how many such steps take as long as two tiles
    """

    QUERIES: int
    COLUMNS: int
    COLS: int
    TILE: int
    BLOCK: int
    WEIGHT: int


class Schedule(NamedTuple):
    """The list of work, blocks of dense tokens first and then tiles, and how slices share it.

    A block counts 2, a tile ``WEIGHT``; switching to tiles costs half a tile. A slice that begins from ``dense_end`` on
    has no blocks: at most half a tile's worth is left, which the slice before takes.

    blocks : of dense tokens
    dense_end, tiles_start, work : places in the list: of the last block a slice may begin with, of the tiles, its end
    dense_slices : how many slices (the first ones) have blocks
    skipped : how many slices have no tiles
    """

    blocks: Any
    dense_end: Any
    tiles_start: Any
    work: Any
    dense_slices: Any
    skipped: Any


@triton.jit
def schedule(count, dense_length, slices, WORK: tl.constexpr):
    """:class:`Schedule` of ``count`` tiles and the dense tokens, as :func:`plan` counts."""
    blocks = tl.maximum(1, tl.cdiv(dense_length, WORK.BLOCK))
    dense_end = tl.maximum(2 * blocks - WORK.WEIGHT // 2, 1)
    tiles_start = 2 * blocks + WORK.WEIGHT // 2
    work = tiles_start + count * WORK.WEIGHT
    dense_slices = tl.minimum(slices, tl.cdiv(dense_end * slices, work))
    skipped = tl.minimum(slices, tl.cdiv((tiles_start + (WORK.WEIGHT + 1) // 2) * slices, work) - 1)
    return Schedule(blocks, dense_end, tiles_start, work, dense_slices, skipped)


@triton.jit
def blocks_before(at, schedule):
    """How many blocks come before a place in the list."""
    return tl.where(at < schedule.dense_end, (at + 1) // 2, schedule.blocks)


@triton.jit
def tiles_before(at, schedule, WORK: tl.constexpr):
    """How many tiles come before a place in the list, to the nearest."""
    return tl.maximum(at - schedule.tiles_start + WORK.WEIGHT // 2, 0) // WORK.WEIGHT


class Cut(NamedTuple):
    """How the work of one unit is cut.

    slices : programs per unit
    entries : results of these, to be combined: a slice with dense tokens and tiles has two
    """

    slices: int
    entries: int


@lru_cache(maxsize=4096)
def plan(programs: int, units: int, count: int, dense_length: int, block: int, weight: int, slices: int = 0) -> Cut:
    """Cut the work of each of ``units`` problems so that ``programs``, all that fit at once, end together.

    Parameters
    ----------
    programs : int
        See :func:`kvarn_kernels.launch_table.programs_at_once`.
    units : int
        Independent problems: batch x KV heads x blocks of query columns.
    count, dense_length : int
        Tiles and dense tokens of each.
    block, weight : int
        See :class:`kvarn_kernels.launch_table.Tuning`.
    slices : int
        0, or the number of slices to take instead.
    """
    blocks = max(1, -(-dense_length // block))
    dense_end = max(2 * blocks - weight // 2, 1)
    tiles_start = 2 * blocks + weight // 2
    work = tiles_start + count * weight
    if slices == 0:
        # No slice needs more tiles than the longest, so fewer slices may do.
        longest = -(-work // (weight * min(_MOST_SLICES - 2, max(1, programs // units))))
        slices = -(-work // (weight * longest))
    dense_slices = min(slices, -(-dense_end * slices // work))
    skipped = min(slices, -(-(tiles_start + (weight + 1) // 2) * slices // work) - 1)
    return Cut(slices, dense_slices + slices - skipped)
