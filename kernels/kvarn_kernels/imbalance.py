"""How uneven tiles are, round by round of variance normalization: what a cache's monitor asks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvarn_kernels.launch import Call, launch, padded, warps_for
from kvarn_kernels.normalize import inverse_spread, normalization_round
from kvarn_kernels.quantize import LARGEST_HEAD_DIM

LARGEST_SIDE = LARGEST_HEAD_DIM


@triton.jit
def imbalance_kernel(
    tile_ptr,
    out_ptr,
    stride_n,
    stride_r,
    stride_c,
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    COLUMNS_PADDED: tl.constexpr,
    RELATIVE: tl.constexpr,
):
    """How uneven a tile is after 0, 1, ... ROUNDS rounds of variance normalization.

    Grid: (tiles,).
    Reads: the tile [ROWS, COLUMNS], float32, once.
    Writes: out [tiles, ROUNDS + 1], float32.
    Reference: kvarn_hf/method/normalize.py, ``imbalance_trace``
    """
    n = tl.program_id(0).to(tl.int64)
    r, c = tl.arange(0, ROWS_PADDED), tl.arange(0, COLUMNS_PADDED)
    at = tile_ptr + n * stride_n + (r * stride_r)[:, None] + (c * stride_c)[None, :]
    x = tl.load(at, mask=(r < ROWS)[:, None] & (c < COLUMNS)[None, :], other=0.0)
    unit = 1.0
    if RELATIVE:
        unit = 1.0 / inverse_spread(x, ROWS, COLUMNS)
    row = tl.full([ROWS_PADDED], 1.0, tl.float32)
    column = tl.full([COLUMNS_PADDED], 1.0, tl.float32)
    for step in range(ROUNDS + 1):
        imbalance, column, row = normalization_round(x, row, column, unit, ROWS, COLUMNS)
        tl.store(out_ptr + n * (ROUNDS + 1) + step, imbalance)


def imbalance_trace(tiles: torch.Tensor, rounds: int, relative: bool) -> torch.Tensor:
    """How uneven tiles are after 0, 1, ... rounds of variance normalization, in one launch.

    Parameters
    ----------
    tiles : torch.Tensor
        ``[..., rows, columns]``, float32 and finite, any strides within a tile of less than 2**31 elements; both sides
        at most :data:`LARGEST_SIDE`.
    rounds : int
        Rounds to follow.
    relative : bool
        Start at a tile's own scale.

    Returns
    -------
    torch.Tensor
        ``[..., rounds + 1]``, float32.

    Notes
    -----
    Computes what ``kvarn_hf.method.normalize.imbalance_trace`` does.
    """
    *lead, rows, columns = tiles.shape
    flat = tiles.flatten(0, -3) if lead else tiles[None]
    out = torch.empty(len(flat), rounds + 1, dtype=torch.float32, device=tiles.device)
    sides = padded(rows), padded(columns)
    call = Call(
        imbalance_kernel,
        (flat, out),
        flat.stride(),
        (),
        (rounds, rows, columns, *sides, relative),
        warps=warps_for(sides[0] * sides[1]),
        stages=1,
    )
    if len(flat):
        launch(call, (len(flat),))
    return out.unflatten(0, lead) if lead else out[0]
