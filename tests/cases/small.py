"""Small caches, and what they hold."""

from __future__ import annotations

import torch

from kvarn_hf import KVarNCache, KVarNConfig
from kvarn_hf.layers.growing import KVarNLayer
from tests import models_tiny as tiny

SMALL = KVarNConfig(tile_size=64, sink_length=16, residual_length=16)
ALL_SINK = KVarNConfig(sink_length=100_000)


def random_kv(*shape: int, value_dim: int | None = None, seed: int = 0, **kwargs):
    """Random keys and values, ``[batch, heads, tokens, head_dim]``."""
    torch.manual_seed(seed)
    return torch.randn(*shape, **kwargs), torch.randn(*shape[:3], value_dim or shape[3], **kwargs)


def filled(keys, values, config=SMALL, layers=1):
    cache = KVarNCache(kvarn=config)
    for layer_idx in range(layers):
        cache.update(keys, values, layer_idx)
    return cache


def read(cache, layer_idx=0):
    return cache.layers[layer_idx].keys.clone(), cache.layers[layer_idx].values.clone()


def relative_error(x, given) -> float:
    return ((x.float() - given.float()).norm() / given.float().norm()).item()


def generate(model, ids, cache, new, **kwargs):
    # The mask is how generate() tells a whole sequence from its new tokens alone.
    inputs = {"attention_mask": torch.ones_like(ids), tiny.CACHE_NAME: cache}
    return model.generate(ids, **inputs, max_new_tokens=new, **{"do_sample": False, **kwargs})


def codes(layer: KVarNLayer):
    return [packed.codes for packed in layer.state.tiles.filled()]
