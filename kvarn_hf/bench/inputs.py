"""What the benches of single layers measure on, and what their results are held against."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvarn_hf import ops
from kvarn_hf.config import KVarNConfig
from kvarn_hf.method.quantize import Packed, dequantize_keys, dequantize_values
from kvarn_hf.state.layer_state import LayerState


def random_tokens(batch: int, heads: int, tokens: int, head_dim: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Keys and values ``[batch, heads, tokens, head_dim]`` on the GPU, normal, bfloat16; one channel of the keys is an
    outlier, for the pre-scale."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, heads, tokens, head_dim)
    keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(2))
    keys[..., 0] *= 4
    return keys, values


def packed_state(keys: torch.Tensor, values: torch.Tensor, config: KVarNConfig) -> LayerState:
    """A layer that holds these tokens, of rows without padding.

    Raises
    ------
    ValueError
        If there are too few tokens for a tile to be packed.
    """
    state = ops.commit(LayerState.empty(config, keys, values).appended(keys, values))
    if not state.count:
        least = config.sink_length + config.residual_length + config.tile_size
        raise ValueError(f"tokens must be at least {least} for a tile to be packed, got {state.length}")
    return replace(state, padding=None)


def stored_bytes(state: LayerState) -> int:
    """Bytes that reading all keys and values must move: tiles, sinks and tail."""
    tiles = (t for part in state.tiles.filled() for t in part)
    return sum(t.nbytes for t in (*tiles, state.dense.keys, state.dense.values))


def in_float(state: LayerState) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first row by plain torch, ``[1, heads, tokens, head_dim]``, float32."""
    sink = state.config.sink_length
    keys, values = (Packed(*(t[:1] for t in part)) for part in state.tiles.filled())
    prescale = None if state.prescale is None else state.prescale[:1].unsqueeze(2)

    tiles = dequantize_keys(keys, prescale, state.config), dequantize_values(values, state.config)
    parts = [
        (x[:1].float(), y.flatten(2, 3)) for x, y in zip((state.dense.keys, state.dense.values), tiles, strict=True)
    ]
    keys_hat, values_hat = (torch.cat([x[:, :, :sink], y, x[:, :, sink:]], 2) for x, y in parts)
    return keys_hat, values_hat


def relative_error(x_hat: torch.Tensor, x: torch.Tensor) -> float:
    """``|x_hat - x| / |x|`` (Frobenius norms)."""
    return ((x_hat.to(x.dtype) - x).norm() / x.norm()).item()
