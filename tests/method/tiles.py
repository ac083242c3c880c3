"""Tiles to quantize, ordinary ones and some that break others."""

import numpy as np
import torch

from kvarn_hf import KVarNConfig
from kvarn_hf.method.quantize import dequantize_keys, dequantize_values, key_prescale, quantize_keys, quantize_values


def half(x):
    return np.float64(np.float16(x))


def gaussian(*shape, seed=0, tokens=0.3, channels=0.3):
    """Gaussian ``[..., token, channel]`` with uneven tokens and channels, around uneven means."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *s: torch.randn(*s, generator=generator)  # noqa: E731
    *lead, size, head_dim = shape
    x = draw(*shape) + draw(*lead, 1, head_dim)
    return x * (tokens * draw(*lead, size, 1)).exp() * (channels * draw(*lead, 1, head_dim)).exp()


def outlier_token(seed=0, size=128, head_dim=64):
    return gaussian(size, head_dim, seed=seed) * torch.where(torch.arange(size) == 11, 30.0, 1.0)[:, None]


def outlier_pair(seed=0, size=128, head_dim=64):
    """Keys like Qwen2.5's: one RoPE pair whose deviation is about 80 times the other channels'."""
    x = gaussian(size, head_dim, seed=seed, channels=0.1)
    angle = 0.7 * torch.arange(size)
    x[:, 5], x[:, 5 + head_dim // 2] = x[:, 5] + 110 * angle.cos(), x[:, 5 + head_dim // 2] + 110 * angle.sin()
    return x


def uneven(seed):
    return gaussian(128, 64, seed=seed)


def plain(seed):
    return gaussian(128, 64, seed=seed, tokens=0.0, channels=0.0)


def both(x, config, prescale=None):
    """Keys and values read back."""
    keys = dequantize_keys(quantize_keys(x, prescale, config), prescale, config)
    return keys, dequantize_values(quantize_values(x, config), config)


def relative_error(x_hat, x):
    return float((x_hat.double() - x.double()).norm() / x.double().norm())


def mean_error(make, method, bits, side):
    config = KVarNConfig(key_bits=bits, value_bits=bits, method=method)
    tiles = torch.stack([make(seed) for seed in range(8)])
    if side == 0:
        prescale = key_prescale(tiles) if method == "kvarn" else None
        return relative_error(dequantize_keys(quantize_keys(tiles, prescale, config), prescale, config), tiles)
    return relative_error(dequantize_values(quantize_values(tiles, config), config), tiles)
