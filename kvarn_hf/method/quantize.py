"""Quantizing and dequantizing whole tiles in plain torch: what the kernels must reproduce.

Per tile of ``tile_size`` tokens of one KV head, with q the codes (the stored numbers, less 128 at 8 bits)::

    keys     k[t, d] = unrotate((q * channel_scale[d] + zero_point[d]) * token_scale[t]) / prescale[d]
    values   v[t, d] = unrotate((q * token_scale[t] + zero_point[t]) * channel_scale[d])

Everything is computed in float32, on a tile brought to magnitude 1 by a power of two (exact), so no input overflows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvarn_hf.config import KVarNConfig
from kvarn_hf.method import packing
from kvarn_hf.method.normalize import variance_normalize, variance_normalize_published
from kvarn_hf.method.rotation import rotate
from kvarn_hf.method.rounding import centre, encode, full_range_grid, norm_ratio, refit_columns, refit_grid, search_grid

SMALLEST_SCALE = 2.0**-24  # the smallest positive float16
LARGEST = 65504.0
# Rounds of alternating least squares, by bits: at two bits four are better than two, and more hardly better than four.
VALUE_ROUNDS = {2: 4, 3: 2, 4: 2, 8: 2}


class Packed(NamedTuple):
    """Quantized keys or values of any number of tiles.

    ``codes`` uint8, ``[..., tile_size * bits / 8, head_dim]`` for keys and ``[..., head_dim * bits / 8, tile_size]``
    for values (see :mod:`kvarn_hf.method.packing`); ``channel_scale`` ``[..., head_dim]``; ``token_scale``
    ``[..., tile_size]``; ``zero_point`` per channel for keys, per token for values. All but the codes are float16.
    """

    codes: torch.Tensor
    channel_scale: torch.Tensor
    token_scale: torch.Tensor
    zero_point: torch.Tensor


def key_prescale(keys: torch.Tensor) -> torch.Tensor:
    """Channel factors that keep a few huge key channels from being mixed into all others by the rotation.

    With ``r = std / lower_median(std)`` over the channels, clamped to [1/4, 1000], and
    ``p = 0.75 clamp((log2(max r) - start) / (end - start), 0, 1)``: ``prescale = r ** -p``. Without an outlier channel
    (max r <= 2) all factors are 1. Keys are multiplied before the rotation; queries are divided, so that scores are
    unchanged.

    What is damped gets more noise, which pays where queries are small. They are not where the outlier channels (r > 2)
    have an offset that all tokens share, by which attention tells the sinks from the others. With
    ``m = sum(mean ** 2) / sum(std ** 2)`` over these channels and ``t = clamp(2 m - 1, 0, 1)``, damping begins at
    ``start = 1 + 2 t`` and is complete at ``end = 3 + t``: from 2 to 8 times the median, or from 8 to 16.

    Parameters
    ----------
    keys : torch.Tensor
        ``[..., tokens, head_dim]``: the first tile of a sequence that is quantized.

    Returns
    -------
    torch.Tensor
        ``[..., head_dim]``, float16.
    """
    x, _ = _finite_tokens(keys)
    x = x * torch.exp2(-_exponent(x, (-2, -1)).float())
    std, mean = x.std(-2, correction=0), x.mean(-2)
    median = std.median(-1, keepdim=True).values
    ratio = torch.where(median > 0, std / torch.where(median > 0, median, 1.0), 1.0).clamp(0.25, 1e3)
    offset, spread = (torch.where(ratio > 2, y, 0.0).square().sum(-1, keepdim=True) for y in (mean, std))
    late = (2 * offset / torch.where(spread > 0, spread, 1.0) - 1).clamp(0, 1)
    power = 0.75 * ((ratio.amax(-1, keepdim=True).log2() - 1 - 2 * late) / (2 - late)).clamp(0, 1)
    return (ratio**-power).half()


def quantize_keys(keys: torch.Tensor, prescale: torch.Tensor | None, config: KVarNConfig) -> Packed:
    """Quantize key tiles, one grid per channel and tile.

    Parameters
    ----------
    keys : torch.Tensor
        ``[..., tile_size, head_dim]``, float16, bfloat16 or float32; after the rotary embedding.
    prescale : torch.Tensor, optional
        ``[..., head_dim]`` from :func:`key_prescale`, broadcast over tiles; None for factors of 1.
    config : KVarNConfig
        Gives method, iterations and ``key_bits``.

    Returns
    -------
    Packed
        A token with a NaN or an infinity in it dequantizes to NaN and leaves the others as they would be without it.

    Notes
    -----
    "kvarn": a clipped grid by fourth-power error, and a token scale that gives every token its exact norm in the
    rotated frame. "published": Algorithm 1 of arXiv:2606.03458.
    """
    bits = config.key_bits
    tile, exponent, broken = rotated_tile(keys, prescale, config)
    tile = tile.mT  # [..., channel, token]
    token_scale = _column_scale(tile, exponent, config).half().float()
    normalized = tile / token_scale
    if config.method == "kvarn":
        scale, zero_point = search_grid(normalized, bits, power=4)
    else:
        scale, zero_point = full_range_grid(normalized, bits)
    scale, zero_point = _half_scale(scale), _half(zero_point)
    codes = encode(normalized, scale, zero_point, bits)
    if config.method == "kvarn":
        token_scale = token_scale * norm_ratio(tile, (codes * scale + zero_point) * token_scale, dim=-2)
    scale, zero_point, token_scale = _fold_exponent(scale, zero_point, token_scale, exponent)
    token_scale = token_scale.squeeze(-2).masked_fill(broken, torch.nan)
    packed = packing.pack_keys((codes.mT + centre(bits)).to(torch.uint8), bits)
    return Packed(packed, scale.squeeze(-1).half(), token_scale.half(), zero_point.squeeze(-1).half())


def quantize_values(values: torch.Tensor, config: KVarNConfig) -> Packed:
    """Quantize value tiles, one grid per token and tile.

    Parameters
    ----------
    values : torch.Tensor
        ``[..., tile_size, head_dim]``, float16, bfloat16 or float32.
    config : KVarNConfig
        Gives method, iterations and ``value_bits``.

    Returns
    -------
    Packed
        A token with a NaN or an infinity in it dequantizes to NaN and leaves the others as they would be without it.

    Notes
    -----
    "kvarn": a clipped grid by squared error, and rounds of alternating least squares over grid and channel scale. What
    has the smallest error is too short: its projection on the original is cos^2 of the angle between them, in every
    token, so that attention cannot average it away as it does noise. A factor of 1 / cos would restore the norm, and
    1 / cos^2 the projection, with more noise: the grids are scaled by 1 / cos^1.5. "published": Algorithm 1 of
    arXiv:2606.03458.
    """
    bits = config.value_bits
    tile, exponent, broken = rotated_tile(values, None, config)  # [..., token, channel]
    channel_scale = _column_scale(tile, exponent, config)
    if config.method == "kvarn":
        scale, zero_point = search_grid(tile / channel_scale, bits, power=2)
        codes = encode(tile / channel_scale, scale, zero_point, bits)
        for _ in range(VALUE_ROUNDS[bits]):
            scale, zero_point = refit_grid(tile, codes, channel_scale, scale, zero_point)
            channel_scale = refit_columns(tile, codes * scale + zero_point, channel_scale)
            codes = encode(tile / channel_scale, scale, zero_point, bits)
        scale, zero_point = refit_grid(tile, codes, channel_scale, scale, zero_point)
        ratio = norm_ratio(tile, (codes * scale + zero_point) * channel_scale, dim=-1) ** 1.5
        scale, zero_point = _half_scale(scale * ratio), _half(zero_point * ratio)
    else:
        channel_scale = channel_scale.half().float()
        scale, zero_point = full_range_grid(tile / channel_scale, bits)
        scale, zero_point = _half_scale(scale), _half(zero_point)
        codes = encode(tile / channel_scale, scale, zero_point, bits)
    scale, zero_point, channel_scale = _fold_exponent(scale, zero_point, channel_scale, exponent)
    token_scale = scale.squeeze(-1).masked_fill(broken, torch.nan)
    packed = packing.pack_values((codes + centre(bits)).to(torch.uint8), bits)
    return Packed(packed, channel_scale.squeeze(-2).half(), token_scale.half(), zero_point.squeeze(-1).half())


def key_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of the grid from packed key codes: ``[..., tile_size, head_dim]``, float32."""
    return _centred(packing.unpack_keys(packed, bits), bits)


def value_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of the grid from packed value codes: ``[..., tile_size, head_dim]``, float32."""
    return _centred(packing.unpack_values(packed, bits), bits)


def _centred(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return codes.float().sub_(centre(bits)) if centre(bits) else codes.float()


def dequantize_keys(packed: Packed, prescale: torch.Tensor | None, config: KVarNConfig) -> torch.Tensor:
    """Keys of packed tiles, ``[..., tile_size, head_dim]``, float32, in the model's own frame."""
    codes = key_codes(packed.codes, config.key_bits)
    tile = codes.mul_(packed.channel_scale.float().unsqueeze(-2)).add_(packed.zero_point.float().unsqueeze(-2))
    tile = tile.mul_(packed.token_scale.float().unsqueeze(-1))
    tile = tile if config.method == "rtn" else rotate(tile)
    return tile if prescale is None else tile.div_(prescale.float().unsqueeze(-2))


def dequantize_values(packed: Packed, config: KVarNConfig) -> torch.Tensor:
    """Values of packed tiles, ``[..., tile_size, head_dim]``, float32, in the model's own frame."""
    codes = value_codes(packed.codes, config.value_bits)
    tile = codes.mul_(packed.token_scale.float().unsqueeze(-1)).add_(packed.zero_point.float().unsqueeze(-1))
    tile = tile.mul_(packed.channel_scale.float().unsqueeze(-2))
    return tile if config.method == "rtn" else rotate(tile)


def rotated_tile(
    x: torch.Tensor, prescale: torch.Tensor | None, config: KVarNConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Finite, pre-scaled, brought to magnitude 1 and rotated: the tile, its exponent [..., 1, 1], its broken tokens."""
    x, broken = _finite_tokens(x)
    if prescale is not None:
        x = x * prescale.float().unsqueeze(-2)
    exponent = _exponent(x, (-2, -1))
    x = x * torch.exp2(-exponent.float())
    return (x if config.method == "rtn" else rotate(x)), exponent, broken


def _finite_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` in float32 with every token that holds a NaN or an infinity set to zero, and which tokens those are."""
    x = x.float()
    broken = ~x.isfinite().all(-1)
    return x.masked_fill(broken.unsqueeze(-1), 0.0), broken


def _exponent(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """``floor(log2(max |x|))`` over ``dims`` (kept), 0 where all is zero, within the range of normal float32 powers."""
    largest = x.abs().amax(dims, keepdim=True)
    return torch.where(largest > 0, largest.frexp().exponent - 1, 0).clamp(-100, 100)


def _column_scale(tile: torch.Tensor, exponent: torch.Tensor, config: KVarNConfig) -> torch.Tensor:
    if config.method == "kvarn":
        return variance_normalize(tile, config.iterations)
    if config.method == "published":  # its clamps are absolute: give it the tile at its own scale
        return variance_normalize_published(tile * torch.exp2(exponent.float()), config.iterations)[0]
    return torch.ones_like(tile[..., :1, :])


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def _half_scale(x: torch.Tensor) -> torch.Tensor:
    return x.half().float().clamp_min(SMALLEST_SCALE)


def _fold_exponent(
    scale: torch.Tensor, zero_point: torch.Tensor, column_scale: torch.Tensor, exponent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give the tile's power of two back: to the column scale, and to the grid what float16 could not hold there."""
    largest = exponent + _exponent(column_scale, (-2, -1))
    shift = (largest - 14).clamp_min(0) + (exponent + 10).clamp_max(0)
    to_grid, to_column = torch.exp2(shift.float()), torch.exp2((exponent - shift).float())
    scale = (scale * to_grid).clamp(SMALLEST_SCALE, LARGEST)
    return scale, (zero_point * to_grid).clamp(-LARGEST, LARGEST), (column_scale * to_column).clamp_max(LARGEST)
