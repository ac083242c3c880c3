"""Variance normalization of tokens and channels in the log domain, in plain torch.

A tile is seen as a matrix ``[..., rows, columns]`` whose rows carry the rounding grid: a key tile as [channel, token],
a value tile as [token, channel].
"""

from __future__ import annotations

import math

import torch

STD_MIN, STD_MAX = 1e-3, 1e3
LOG_SCALE_MIN, LOG_SCALE_MAX = -0.3, 10.0
TIE = 1e-5  # converged states differ by rounding noise alone: the first of them is taken, on every device


def _log_std(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.std(dim, correction=0, keepdim=True).clamp(STD_MIN, STD_MAX).log()


def variance_normalize(tile: torch.Tensor, iterations: int) -> torch.Tensor:
    """Even out the variance of columns and rows; return the columns' scale.

    From ``log_row = log(std(tile))`` and ``log_column = 0``, repeat: with ``C = tile / exp(log_column + log_row)``,
    add the log standard deviation of C's columns to ``log_column``, recompute C, add that of its rows to ``log_row``;
    both clamped to [-0.3, 10] relative to their start. The rows' scale only steers the columns': a row's own scale is
    whatever its rounding grid spans.

    Parameters
    ----------
    tile : torch.Tensor
        ``[..., rows, columns]``, float32.
    iterations : int
        Rounds; two bring the imbalance to where sixteen do.

    Returns
    -------
    torch.Tensor
        ``exp(log_column)``, ``[..., 1, columns]``.

    Notes
    -----
    Algorithm 1 of arXiv:2606.03458, started at the tile's own scale, so that the clamps are relative to it.
    """
    spread = tile.std((-2, -1), correction=0, keepdim=True)
    scaled = tile / torch.where(spread > 0, spread, 1.0)
    log_row = torch.zeros_like(tile[..., :1])
    log_column = torch.zeros_like(tile[..., :1, :])
    for _ in range(iterations):
        residue = scaled / log_column.exp() / log_row.exp()
        log_column = (log_column + _log_std(residue, -2)).clamp(LOG_SCALE_MIN, LOG_SCALE_MAX)
        residue = scaled / log_column.exp() / log_row.exp()
        log_row = (log_row + _log_std(residue, -1)).clamp(LOG_SCALE_MIN, LOG_SCALE_MAX)
    return log_column.exp()


def variance_normalize_published(tile: torch.Tensor, iterations: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 1 of arXiv:2606.03458 as published: absolute clamps, and the best of all states seen.

    Parameters
    ----------
    tile : torch.Tensor
        ``[..., rows, columns]``, float32.
    iterations : int
        Rounds K; the paper uses 8 to 16.

    Returns
    -------
    column_scale, row_scale : torch.Tensor
        ``[..., 1, columns]`` and ``[..., rows, 1]``: of all states, those with the lowest imbalance
        ``max/min of the column deviations + max/min of the row deviations``.
    """
    log_row = torch.zeros_like(tile[..., :1])
    log_column = torch.zeros_like(tile[..., :1, :])
    best_row, best_column = log_row, log_column
    best = torch.full_like(tile[..., :1, :1], torch.inf)
    for step in range(iterations + 1):
        residue = tile / log_column.exp() / log_row.exp()
        column_std, row_std = _log_std(residue, -2), _log_std(residue, -1)
        imbalance = _log_range(column_std).exp() + _log_range(row_std).exp()
        better = imbalance < best * (1 - TIE)
        best = torch.where(better, imbalance, best)
        best_row, best_column = torch.where(better, log_row, best_row), torch.where(better, log_column, best_column)
        if step == iterations:
            break
        log_column = (log_column + column_std).clamp(LOG_SCALE_MIN, LOG_SCALE_MAX)
        residue = tile / log_column.exp() / log_row.exp()
        log_row = (log_row + _log_std(residue, -1)).clamp(LOG_SCALE_MIN, LOG_SCALE_MAX)
    return best_column.exp(), best_row.exp()


def _log_range(log_std: torch.Tensor) -> torch.Tensor:
    return log_std.amax((-2, -1), keepdim=True) - log_std.amin((-2, -1), keepdim=True)


def imbalance_trace(tile: torch.Tensor, iterations: int, *, relative: bool = True) -> torch.Tensor:
    """How uneven a tile's deviations are after 0, 1, 2, ... rounds of normalization.

    ``imbalance = max/min of the column deviations + max/min of the row deviations``; 2 is even.

    Parameters
    ----------
    tile : torch.Tensor
        ``[..., rows, columns]``, float32.
    iterations : int
        Rounds to follow.
    relative : bool
        Start at the tile's own scale, as :func:`variance_normalize` does; False: as
        :func:`variance_normalize_published`.

    Returns
    -------
    torch.Tensor
        ``[..., iterations + 1]``.

    Notes
    -----
    Algorithm 1 of arXiv:2606.03458. Scales are kept as factors, not as logarithms: the same numbers up to rounding, in
    half as many operations.
    """
    low, high = math.exp(LOG_SCALE_MIN), math.exp(LOG_SCALE_MAX)
    if relative:
        spread = _std(tile, (-2, -1))
        tile = tile / torch.where(spread > 0, spread, 1.0)
    row, column = torch.ones_like(tile[..., :1]), torch.ones_like(tile[..., :1, :])
    columns, rows = [], []
    for step in range(iterations + 1):
        residue = tile / column / row
        columns.append(_std(residue, -2).clamp_(STD_MIN, STD_MAX))
        rows.append(_std(residue, -1).squeeze(-1).clamp_(STD_MIN, STD_MAX))
        if step < iterations:
            column = (column * columns[-1]).clamp_(low, high)
            residue = tile / column / row
            row = (row * _std(residue, -1).clamp_(STD_MIN, STD_MAX)).clamp_(low, high)
    column_low, column_high = torch.cat(columns, -2).aminmax(dim=-1)
    row_low, row_high = torch.stack(rows, -2).aminmax(dim=-1)
    return column_high / column_low + row_high / row_low


def _std(x: torch.Tensor, dim: int | tuple[int, ...]) -> torch.Tensor:
    # One launch on a GPU; on a CPU torch.std takes eight times as long as its parts.
    if x.is_cuda:
        return x.std(dim, correction=0, keepdim=True)
    return (x - x.mean(dim, keepdim=True)).square_().mean(dim, keepdim=True).sqrt_()
