"""Variance normalization of a tile that lies in registers, ``[rows, columns]``, rows carrying the rounding grid.

Inverse scales are kept where the reference keeps logarithms: adding a clamped log standard deviation is multiplying by
the clamped standard deviation. Reference: ``kvarn_hf/method/normalize.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvarn_kernels.arithmetic import clamp, inside, inside_vector, inverse_root

_STD_MIN, _STD_MAX = tl.constexpr(1e-3), tl.constexpr(1e3)
_SCALE_MIN, _SCALE_MAX = tl.constexpr(0.7408182206817179), tl.constexpr(22026.465794806718)  # exp(-0.3), exp(10)
_TIE = tl.constexpr(1e-5)  # converged states differ by rounding noise alone: the first of them is taken


@triton.jit
def _variance(x, factor, AXIS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Variance of ``x * factor`` along one axis, by two passes: a mean may dwarf the deviation.

    ``factor`` is a vector along that axis. The product is not kept but made twice, in the same instruction as what
    follows it: a second tile would not fit the registers.
    """
    count: tl.constexpr = COLUMNS if AXIS == 1 else ROWS
    factor = tl.broadcast_to(tl.expand_dims(factor, 1 - AXIS), x.shape)
    mean = tl.sum(x * factor, AXIS) * (1.0 / count)
    residue = tl.fma(x, factor, tl.broadcast_to(tl.expand_dims(-mean, AXIS), x.shape))
    rows: tl.constexpr = x.shape[0] if AXIS == 1 else ROWS
    columns: tl.constexpr = COLUMNS if AXIS == 1 else x.shape[1]
    residue = inside(residue, rows, columns, 0.0)
    return tl.sum(residue * residue, AXIS) * (1.0 / count)


@triton.jit
def inverse_spread(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One over the standard deviation of the whole tile, 1 where that is zero."""
    mean = tl.sum(tl.sum(x, 1), 0) * (1.0 / (ROWS * COLUMNS))
    residue = inside(x - mean, ROWS, COLUMNS, 0.0)
    variance = tl.sum(tl.sum(residue * residue, 1), 0) * (1.0 / (ROWS * COLUMNS))
    return tl.where(variance > 0, 1.0 / tl.sqrt(tl.where(variance > 0, variance, 1.0)), 1.0)


@triton.jit
def _next(inverse, inverse_std):
    """One over ``clamp(scale * clamp(std / scale, 1e-3, 1e3), exp(-0.3), exp(10))``, from one over scale and std."""
    ratio = clamp(inverse_std, inverse * _STD_MIN, inverse * _STD_MAX)
    return clamp(ratio, 1.0 / _SCALE_MAX, 1.0 / _SCALE_MIN)


@triton.jit
def variance_normalize(x, ITERATIONS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One over the columns' scale, ``[columns]``, that evens out the variance of columns and rows, relative to the
    tile's own.

    Only inverses are kept: a vector along the columns is held by every thread many times over, and costs as many
    registers as half the tile.
    """
    unit = inverse_spread(x, ROWS, COLUMNS)
    row = tl.full([x.shape[0]], 1.0, tl.float32)
    column = tl.full([x.shape[1]], 1.0, tl.float32)
    for _ in range(ITERATIONS):
        column = _next(column, inverse_root(_variance(x, row * unit, 0, ROWS, COLUMNS)))
        row = _next(row, inverse_root(_variance(x, column * unit, 1, ROWS, COLUMNS)))
    return column


@triton.jit
def _range(std, COUNT: tl.constexpr):
    return tl.max(inside_vector(std, COUNT, 0.0), 0) / tl.min(inside_vector(std, COUNT, float("inf")), 0)


@triton.jit
def normalization_round(x, row, column, unit, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The imbalance of ``x * row * column``, and the columns' and the rows' next inverse scales.

    Deviations are in units of ``unit``, which is applied behind the squares, as it could carry those out of float32.
    """
    column_root = inverse_root(_variance(x, row, 0, ROWS, COLUMNS)) * unit
    row_root = inverse_root(_variance(x, column, 1, ROWS, COLUMNS)) * unit
    column_spread = _range(clamp(column_root / column, _STD_MIN, _STD_MAX), COLUMNS)
    row_spread = _range(clamp(row_root / row, _STD_MIN, _STD_MAX), ROWS)
    column = _next(column, column_root)
    row = _next(row, inverse_root(_variance(x, column, 1, ROWS, COLUMNS)) * unit)
    return column_spread + row_spread, column, row


@triton.jit
def variance_normalize_published(x, magnitude, ITERATIONS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One over the columns' scale, ``[columns]``, of Algorithm 1 of arXiv:2606.03458 for the tile ``x * magnitude``:
    absolute clamps, and the state with the lowest imbalance of all that were seen."""
    row = tl.full([x.shape[0]], 1.0, tl.float32)
    column = tl.full([x.shape[1]], 1.0, tl.float32)
    unit = 1.0 / magnitude
    best_column = column
    best = float("inf")
    for _ in range(ITERATIONS + 1):
        imbalance, next_column, row = normalization_round(x, row, column, unit, ROWS, COLUMNS)
        better = imbalance < best * (1 - _TIE)
        best_column = tl.where(better, column, best_column)
        best = tl.where(better, imbalance, best)
        column = next_column
    return best_column
