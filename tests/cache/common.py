"""Small caches, and what they hold."""

from __future__ import annotations

import torch

from kvarn_hf import KVarNCache, KVarNConfig, ops
from kvarn_hf.layers.growing import KVarNLayer
from kvarn_hf.ops import dispatch

SMALL = KVarNConfig(tile_size=64, sink_length=16, residual_length=16)
HEADS, DIM = 2, 32


def kv(batch: int, length: int, *, heads=HEADS, key_dim=DIM, value_dim=None, dtype=torch.float32, seed=0):
    """Random keys and values ``[batch, heads, length, head_dim]``; every token has a few large channels, as keys do."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, heads, length, key_dim, generator=generator)
    keys[..., 3] *= 20
    values = torch.randn(batch, heads, length, value_dim or key_dim, generator=generator)
    return keys.to(dtype), values.to(dtype)


def filled(keys, values, sizes=None, config=SMALL, layers=1) -> KVarNCache:
    """A cache given those tokens in chunks of these sizes, the same in every layer."""
    cache = KVarNCache(kvarn=config)
    start = 0
    for size in sizes or [keys.shape[2]]:
        for layer_idx in range(layers):
            cache.update(keys[:, :, start : start + size], values[:, :, start : start + size], layer_idx)
        start += size
    assert start == keys.shape[2]
    return cache


def read(cache, layer_idx=0):
    layer = cache.layers[layer_idx]
    return layer.keys.clone(), layer.values.clone()


def same(a, b) -> bool:
    """Bit-equal, NaN included."""
    return all(
        x.dtype == y.dtype and torch.equal(x.nan_to_num(1e9), y.nan_to_num(1e9)) for x, y in zip(a, b, strict=True)
    )


def stored(layer: KVarNLayer) -> list[torch.Tensor]:
    """Everything that is held of the tokens."""
    state = layer.state
    tensors = [state.dense.keys, state.dense.values]
    for packed in state.tiles.filled():
        tensors += [t.float() for t in packed]
    if state.prescale is not None:
        tensors.append(state.prescale)
    if state.padding is not None:
        tensors += state.padding.parts.values()
    return tensors


def same_state(cache, other) -> bool:
    return len(cache.layers) == len(other.layers) and all(
        a.get_seq_length() == b.get_seq_length() and same(stored(a), stored(b))
        for a, b in zip(cache.layers, other.layers, strict=True)
    )


def random_chunks(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    sizes = []
    while length:
        sizes.append(min(length, int(torch.randint(1, 120, (1,), generator=generator))))
        length -= sizes[-1]
    return sizes


def count_quantize(monkeypatch) -> list[int]:
    """How many tokens each call of the quantizer got."""
    calls: list[int] = []
    quantize = ops.quantize

    def counted(keys, *args, **kwargs):
        calls.append(keys.shape[2])
        return quantize(keys, *args, **kwargs)

    monkeypatch.setattr(dispatch, "quantize", counted)
    return calls
