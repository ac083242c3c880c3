"""Settings to compare, and a model with a planted outlier."""

import torch

from kvarn_hf import KVarNConfig
from tests import models_tiny as tiny

SMALL = KVarNConfig(tile_size=64, sink_length=16, residual_length=32)

WIDTHS = [
    KVarNConfig(k, v, tile_size=64, sink_length=16, residual_length=32) for k, v in ((4, 2), (2, 2), (4, 4), (8, 4))
]

TOKENS = 320


def with_key_bias(layer, head, channel, size):
    """A tiny Qwen2 of four layers, one of which has a key bias like the real one's: in one channel."""
    model = tiny.build("qwen2", num_hidden_layers=4)
    projection = model.model.layers[layer].self_attn.k_proj
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.k_proj.bias.normal_(0, 0.1)
        projection.bias[head * 16 + channel] = size
    return model
