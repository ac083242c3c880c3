"""Asymmetric round-to-nearest on a grid per row, in plain torch.

``code = clamp(round((x - zero_point) / scale), -C, 2**bits - 1 - C)`` and back ``x_hat = code * scale + zero_point``,
with C = ``centre(bits)``. Matrices are ``[..., rows, columns]``; scales and zero points ``[..., rows, 1]``; column
scales ``[..., 1, columns]``.
"""

from __future__ import annotations

import torch

# Smallest share of a row's range that the grid may span, and how many spans are tried, by bits.
CLIP_SEARCH = {2: (0.45, 12), 3: (0.6, 9), 4: (0.76, 7), 8: (1.0, 1)}


def centre(bits: int) -> int:
    """By how much a stored code exceeds the code of the grid: 128 at 8 bits, else 0.

    Seen from a row's minimum its far end is 255 steps away, and a rounded float16 scale and zero point would shift it
    by up to 1/8 of a step; from the middle, where the zero point is small, by half as much at most.
    """
    return 128 if bits == 8 else 0


def encode(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of ``x`` as floats: ``clamp(round_half_even((x - zero_point) / scale), -C, 2**bits - 1 - C)``.

    C is ``centre(bits)``. Clamped first, so that a value far outside the grid cannot leave the range in which rounding
    is exact.
    """
    return ((x - zero_point) / scale).clamp_(-centre(bits), 2**bits - 1 - centre(bits)).round_()


def full_range_grid(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of the grid that spans each row's [min, max]."""
    low, high = x.aminmax(dim=-1, keepdim=True)
    span, levels = high - low, 2**bits - 1
    return _positive(span / levels), low + span * (centre(bits) / levels)


def search_grid(x: torch.Tensor, bits: int, power: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of the clipped grid with the smallest ``sum(|x - x_hat| ** power)`` per row.

    Tries ``scale = a (max - min) / (2**bits - 1)``, ``zero_point = min + (1 - a)/2 (max - min) + centre(bits) scale``
    for evenly spaced ``a`` from 1 down to a bound that depends on ``bits``; the first of equals wins.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., rows, columns]``, float32.
    bits : int
        Width of a code.
    power : int
        2 for values. 4 for keys: squared error clips the rare outlier tokens that attention looks for.

    Returns
    -------
    scale, zero_point : torch.Tensor
        ``[..., rows, 1]``.
    """
    low, high = x.aminmax(dim=-1, keepdim=True)
    span, levels = high - low, 2**bits - 1
    narrowest, candidates = CLIP_SEARCH[bits]
    best_error = torch.full_like(low, torch.inf)
    best_scale, best_zero = full_range_grid(x, bits)
    for i in range(candidates if candidates > 1 else 0):
        share = 1.0 - (1.0 - narrowest) * i / (candidates - 1)
        scale = _positive(span * (share / levels))
        zero = low + span * ((1.0 - share) / 2 + centre(bits) * share / levels)
        error = encode(x, scale, zero, bits).mul_(scale).add_(zero).sub_(x).square_()
        error = (error if power == 2 else error.square_()).sum(-1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
    return best_scale, best_zero


def refit_grid(
    x: torch.Tensor, codes: torch.Tensor, column_scale: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Least-squares scale and zero point per row of ``x ~ column_scale * (codes * scale + zero_point)``.

    A row whose normal equations are singular (determinant <= 1e-6 of the diagonal's product), or whose scale would not
    be positive, keeps what it had.
    """
    weighted = column_scale * codes
    a11 = weighted.square().sum(-1, keepdim=True)
    a12 = (weighted * column_scale).sum(-1, keepdim=True)
    a22 = column_scale.square().sum(-1, keepdim=True)
    b1, b2 = (weighted * x).sum(-1, keepdim=True), (column_scale * x).sum(-1, keepdim=True)
    determinant = a11 * a22 - a12 * a12
    regular = determinant > 1e-6 * a11 * a22
    divisor = torch.where(regular, determinant, 1.0)
    new_scale = (a22 * b1 - a12 * b2) / divisor
    new_zero = (a11 * b2 - a12 * b1) / divisor
    regular &= new_scale > 0
    return torch.where(regular, new_scale, scale), torch.where(regular, new_zero, zero_point)


def refit_columns(x: torch.Tensor, grid_values: torch.Tensor, column_scale: torch.Tensor) -> torch.Tensor:
    """Least-squares column scale of ``x ~ column_scale * grid_values``; unchanged where it would not be positive."""
    energy = grid_values.square().sum(-2, keepdim=True)
    product = (x * grid_values).sum(-2, keepdim=True)
    return torch.where(product > 1e-6 * energy, product / torch.where(energy > 0, energy, 1.0), column_scale)


def norm_ratio(x: torch.Tensor, x_hat: torch.Tensor, dim: int) -> torch.Tensor:
    """``clamp(|x| / |x_hat|, 1/2, 2)`` along ``dim``, 1 where either norm is zero."""
    norm, norm_hat = (t.square().sum(dim, keepdim=True).sqrt() for t in (x, x_hat))
    known = (norm > 0) & (norm_hat > 0)
    return torch.where(known, norm / torch.where(known, norm_hat, 1.0), 1.0).clamp(0.5, 2.0)


def _positive(scale: torch.Tensor) -> torch.Tensor:
    # A constant row has no span; its codes are all zero and any positive scale is right.
    return torch.where(scale > 0, scale, 1.0)
