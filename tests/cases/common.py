"""What tests of cases share: small caches, and what they hold."""

from __future__ import annotations

import torch

from kvarn_hf import KVarNCache, KVarNConfig

SMALL = KVarNConfig(tile_size=64, sink_length=16, residual_length=16)


def random_kv(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values ``[batch, heads, tokens, head_dim]``."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, *shape, generator=generator)
    return keys.to(dtype), values.to(dtype)


def filled(keys: torch.Tensor, values: torch.Tensor, layers: int = 1, cache: KVarNCache | None = None) -> KVarNCache:
    """A cache with these tokens in each of its layers."""
    cache = KVarNCache(kvarn=SMALL) if cache is None else cache
    for layer_idx in range(layers):
        cache.update(keys, values, layer_idx)
    return cache


def read(cache: KVarNCache) -> list[torch.Tensor]:
    """Copies of every layer's keys and values, without the room behind them."""
    held = [(layer, int(layer.get_seq_length())) for layer in cache.layers]
    return [x[:, :, :length].clone() for layer, length in held if length for x in (layer.keys, layer.values)]


def same(these: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether both hold the same tensors, bit for bit."""
    return len(these) == len(others) and all(map(torch.equal, these, others))
