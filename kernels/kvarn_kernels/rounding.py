"""Rounding grids of a tile that lies in registers, ``[rows, columns]``, one grid per row.

Reference: ``kvarn_hf/method/rounding.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvarn_kernels.arithmetic import (
    centre,
    clamp,
    inside,
    inverse_root,
    positive,
    quotient,
    reciprocal,
    round_half_even,
    saturated,
)

# Smallest share of a row's range that a grid may span, and how many spans are tried, by bits: as CLIP_SEARCH of the
# reference.
CLIP_SEARCH = {2: (0.45, 12), 3: (0.6, 9), 4: (0.76, 7), 8: (1.0, 1)}


@triton.constexpr_function
def clip_search(bits):
    """Smallest share and number of candidates: see :data:`CLIP_SEARCH`."""
    return CLIP_SEARCH[bits]


@triton.jit
def encode(x, scale, zero_point, BITS: tl.constexpr):
    """Codes as floats: ``clamp(round((x - zero_point) / scale), -C, 2**BITS - 1 - C)``, C = ``centre(BITS)``, ties to
    even, exactly."""
    LOWEST: tl.constexpr = 0.0 - centre(BITS)
    position = quotient(x - zero_point[:, None], scale[:, None], (1.0 / scale)[:, None])
    return round_half_even(clamp(position, LOWEST, LOWEST + 2.0**BITS - 1))


@triton.jit
def encode_scaled(x, column_factor, scale, zero_point, BITS: tl.constexpr):
    """Codes of ``x * column_factor``, as :func:`encode` but for the last bit of the quotient."""
    LEVELS: tl.constexpr = 2.0**BITS - 1
    CENTRE: tl.constexpr = centre(BITS)
    offset = x * column_factor[None, :] - zero_point[:, None]
    factor = tl.broadcast_to((1.0 / (scale * LEVELS))[:, None], x.shape)
    start = tl.full(x.shape, CENTRE / LEVELS, tl.float32)
    return round_half_even(saturated(offset, factor, start) * LEVELS) - CENTRE


@triton.jit
def row_range(x, COLUMNS: tl.constexpr):
    """Every row's minimum and span."""
    low = tl.min(inside(x, x.shape[0], COLUMNS, float("inf")), 1)
    return low, tl.max(inside(x, x.shape[0], COLUMNS, float("-inf")), 1) - low


@triton.jit
def full_range_grid(x, BITS: tl.constexpr, COLUMNS: tl.constexpr):
    """Scale and zero point of the grid that spans each row's [min, max]."""
    LEVELS: tl.constexpr = 2.0**BITS - 1
    low, span = row_range(x, COLUMNS)
    scale = positive(tl.div_rn(span, tl.full(span.shape, LEVELS, tl.float32)))
    return scale, low + span * (centre(BITS) / LEVELS)


@triton.jit
def search_grid(x, BITS: tl.constexpr, POWER: tl.constexpr, COLUMNS: tl.constexpr):
    """Of the grids that span a share of each row's range (see :data:`CLIP_SEARCH`), the one with the smallest
    ``sum(|error| ** POWER)``; the first of equals.

    With ``u = (x - min) / (max - min)`` every candidate's position on its grid is ``slope * u + offset`` with numbers
    that are the same for all rows, and the row's own span drops out of the comparison.
    """
    LEVELS: tl.constexpr = 2.0**BITS - 1
    NARROWEST: tl.constexpr = clip_search(BITS)[0]
    CANDIDATES: tl.constexpr = clip_search(BITS)[1]
    low, span = row_range(x, COLUMNS)
    best_share = tl.full([x.shape[0]], 1.0, tl.float32)
    if CANDIDATES > 1:
        unit = tl.where(span > 0, 1.0 / positive(span), 0.0)
        u = (x - low[:, None]) * unit[:, None]
        best_error = tl.full([x.shape[0]], float("inf"), tl.float32)
        # A loop and not unrolled: straight-line code of this size would not fit the instruction cache.
        for i in range(CANDIDATES):
            share = 1.0 - i * ((1.0 - NARROWEST) / (CANDIDATES - 1))
            slope = 1.0 / share
            offset = (1.0 - slope) * 0.5
            nearest = saturated(u, tl.full(u.shape, slope, tl.float32), tl.full(u.shape, offset, tl.float32))
            miss = round_half_even(nearest * LEVELS) - (u * (slope * LEVELS) + offset * LEVELS)
            miss = inside(miss * miss, x.shape[0], COLUMNS, 0.0)
            if POWER == 2:
                error = tl.sum(miss, 1) * (share * share)
            else:
                error = tl.sum(miss * miss, 1) * (share * share * share * share)
            better = error < best_error
            best_error = tl.where(better, error, best_error)
            best_share = tl.where(better, share, best_share)
    scale = positive(tl.div_rn(span * best_share, tl.full(span.shape, LEVELS, tl.float32)))
    return scale, low + span * ((1.0 - best_share) * 0.5 + best_share * (centre(BITS) / LEVELS))


@triton.jit
def refit_grid(x, codes, column_scale, scale, zero_point):
    """Least-squares scale and zero point per row of ``x ~ column_scale * (codes * scale + zero_point)``; rows whose
    normal equations are singular, or whose scale would not be positive, keep theirs. ``column_scale`` is zero outside
    the tile."""
    weighted = codes * column_scale[None, :]
    a11 = tl.sum(weighted * weighted, 1)
    a12 = tl.sum(weighted * column_scale[None, :], 1)
    a22 = tl.sum(column_scale * column_scale, 0)
    b1 = tl.sum(weighted * x, 1)
    b2 = tl.sum(x * column_scale[None, :], 1)
    determinant = a11 * a22 - a12 * a12
    regular = determinant > 1e-6 * a11 * a22
    divisor = tl.where(regular, determinant, 1.0)
    new_scale = (a22 * b1 - a12 * b2) / divisor
    new_zero = (a11 * b2 - a12 * b1) / divisor
    regular = regular & (new_scale > 0)
    return tl.where(regular, new_scale, scale), tl.where(regular, new_zero, zero_point)


@triton.jit
def refit_columns(x, grid_values, column_scale):
    """Least-squares column scale of ``x ~ column_scale * grid_values``; where it would not be positive, the one
    given."""
    energy = tl.sum(grid_values * grid_values, 0)
    product = tl.sum(x * grid_values, 0)
    new_scale = product * reciprocal(tl.where(energy > 0, energy, 1.0))
    return tl.where(product > 1e-6 * energy, new_scale, column_scale)


@triton.jit
def norm_ratio(energy, energy_hat):
    """``clamp(|x| / |x_hat|, 1/2, 2)`` from both sums of squares; 1 where either is zero."""
    known = (energy > 0) & (energy_hat > 0)
    energy, energy_hat = tl.where(known, energy, 1.0), tl.where(known, energy_hat, 1.0)
    return clamp(energy * inverse_root(energy) * inverse_root(energy_hat), 0.5, 2.0)
