"""Variance normalization of a tile that lies in registers, ``[rows, columns]``, rows carrying the rounding grid.

Scales are kept themselves where the reference keeps their logarithms: adding a clamped log standard deviation is multiplying by
the clamped standard deviation. Reference: ``kvarn_hf/reference/normalize.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvarn_kernels.arithmetic import clamp, inside, inside_vector

_STD_MIN, _STD_MAX = tl.constexpr(1e-3), tl.constexpr(1e3)
_SCALE_MIN, _SCALE_MAX = tl.constexpr(0.7408182206817179), tl.constexpr(22026.465794806718)  # exp(-0.3), exp(10)
_TIE = tl.constexpr(1e-5)  # converged states differ by rounding noise alone: the first of them is taken


@triton.jit
def _column_std(x, factor, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Standard deviation of every column of ``x * factor[:, None]``, by two passes: a mean may dwarf it."""
    mean = tl.sum(x * factor[:, None], 0) * (1.0 / ROWS)
    residue = inside(x * factor[:, None] - mean[None, :], ROWS, x.shape[1], 0.0)
    return tl.sqrt(tl.sum(residue * residue, 0) * (1.0 / ROWS))


@triton.jit
def _row_std(x, factor, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Standard deviation of every row of ``x * factor[None, :]``."""
    mean = tl.sum(x * factor[None, :], 1) * (1.0 / COLUMNS)
    residue = inside(x * factor[None, :] - mean[:, None], x.shape[0], COLUMNS, 0.0)
    return tl.sqrt(tl.sum(residue * residue, 1) * (1.0 / COLUMNS))


@triton.jit
def _std(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Standard deviation of the whole tile."""
    mean = tl.sum(tl.sum(x, 1), 0) * (1.0 / (ROWS * COLUMNS))
    residue = inside(x - mean, ROWS, COLUMNS, 0.0)
    return tl.sqrt(tl.sum(tl.sum(residue * residue, 1), 0) * (1.0 / (ROWS * COLUMNS)))


@triton.jit
def _scaled(scale, std):
    return clamp(scale * std, _SCALE_MIN, _SCALE_MAX)


@triton.jit
def variance_normalize(x, ITERATIONS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns' scale ``[columns]`` that evens out the variance of columns and rows, relative to the tile's own."""
    spread = _std(x, ROWS, COLUMNS)
    unit = 1.0 / tl.where(spread > 0, spread, 1.0)
    row = tl.full([x.shape[0]], 1.0, tl.float32)
    column = tl.full([x.shape[1]], 1.0, tl.float32)
    for _ in range(ITERATIONS):
        column = _scaled(column, clamp(_column_std(x, unit / row, ROWS, COLUMNS) / column, _STD_MIN, _STD_MAX))
        row = _scaled(row, clamp(_row_std(x, unit / column, ROWS, COLUMNS) / row, _STD_MIN, _STD_MAX))
    return column


@triton.jit
def _range(std, COUNT: tl.constexpr):
    return tl.max(inside_vector(std, COUNT, 0.0), 0) / tl.min(inside_vector(std, COUNT, float("inf")), 0)


@triton.jit
def variance_normalize_published(x, magnitude, ITERATIONS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns' scale ``[columns]`` of Algorithm 1 of arXiv:2606.03458 for the tile ``x * magnitude``: absolute clamps, and the
    state with the lowest imbalance of all that were seen."""
    row = tl.full([x.shape[0]], 1.0, tl.float32)
    column = tl.full([x.shape[1]], 1.0, tl.float32)
    best_column = column
    best = float("inf")
    for _ in range(ITERATIONS + 1):
        column_std = clamp(_column_std(x, 1.0 / row, ROWS, COLUMNS) * magnitude / column, _STD_MIN, _STD_MAX)
        row_std = clamp(_row_std(x, 1.0 / column, ROWS, COLUMNS) * magnitude / row, _STD_MIN, _STD_MAX)
        imbalance = _range(column_std, COLUMNS) + _range(row_std, ROWS)
        better = imbalance < best * (1 - _TIE)
        best_column = tl.where(better, column, best_column)
        best = tl.where(better, imbalance, best)
        column = _scaled(column, column_std)
        row = _scaled(row, clamp(_row_std(x, 1.0 / column, ROWS, COLUMNS) * magnitude / row, _STD_MIN, _STD_MAX))
    return best_column
