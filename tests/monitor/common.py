"""Watched caches, their figures, and tiles worth a warning."""

import torch

from kvarn_hf import KVarNCache, KVarNConfig

SMALL = KVarNConfig(tile_size=64, sink_length=16, residual_length=32)
BATCH, HEADS, DIM = 2, 2, 32


def kv(tokens, batch=BATCH, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, HEADS, tokens, DIM)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]


def fed(keys, values, steps=None, layers=2, config=SMALL, monitor=True, cache=None):
    cache = KVarNCache(kvarn=config, monitor=monitor) if cache is None else cache
    for part in zip(*(x.split(steps or x.shape[2], 2) for x in (keys, values)), strict=True):
        for layer in range(layers):
            cache.update(*part, layer)
    return cache


def stored(cache):
    return [tensor for layer in cache.layers for packed in layer.state.tiles.filled() for tensor in packed]


def figures(cache):
    return [layer.log.held(layer.state.count) for layer in cache.layers]


def assert_same_figures(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def errors_of(given, read):
    """Relative, magnitude, direction and worst token's error of tiles ``[..., tokens, channels]``, by definition."""
    given, read = given.double(), read.double()
    energy = given.square().sum((-2, -1))
    magnitude = (given.norm(dim=-1) - read.norm(dim=-1)).square().sum(-1)
    cosine = torch.nn.functional.cosine_similarity(given, read, dim=-1)
    direction = (2 * given.norm(dim=-1) * read.norm(dim=-1) * (1 - cosine)).sum(-1)
    worst, token = ((given - read).norm(dim=-1) / given.norm(dim=-1)).max(-1)
    relative = (given - read).norm(dim=(-2, -1)) / energy.sqrt()
    return torch.stack([relative, (magnitude / energy).sqrt(), (direction / energy).sqrt(), worst, token.double()], -1)


def spiked(seed, rate=0.05):
    """A tile that no scale per token or channel makes even: one entry in twenty is thirty times the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, DIM, generator=generator)
    return torch.where(torch.rand(64, DIM, generator=generator) < rate, 30 * x, x)


def chained():
    """A tile that evens out slowly: a channel shares tokens with the next one alone, and is weaker there."""
    token, channel = torch.arange(64)[:, None] // 2, torch.arange(DIM)
    sign = torch.randint(0, 2, (64, DIM), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    return sign * ((token == channel) + 3.0 * (token + 1 == channel))
