"""What people hit with quantized KV caches elsewhere: kinds of models.

Numbers are those of the list the cases come from.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvarn_hf import KVarNCache, KVarNConfig
from kvarn_hf.layers.growing import KVarNLayer
from tests import models_tiny as tiny
from tests.cases.small import ALL_SINK, SMALL, filled, generate, random_kv, read, relative_error

# --- 2: refused or wrong with sliding-window models ---


def test_02_windows_stay_windows():
    model, ids = tiny.model("gemma3"), tiny.prompt(1, 300)
    assert model.config.sliding_window == 16
    cache = KVarNCache(model.config, SMALL)
    assert generate(model, ids, cache, 40).shape == (1, 340)
    lengths = [layer.keys.shape[2] for layer in cache.layers]
    assert lengths == [15, 339, 15]
    assert cache.layers[1].state.count == 4
    dense = generate(model, ids, DynamicCache(config=model.config), 40)
    assert torch.equal(generate(model, ids, KVarNCache(model.config, ALL_SINK), 40), dense)


# --- 6: head_dim 80, 96 or 192 crashes with an opaque error ---


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
def test_06_head_dims(dim):
    keys, values = random_kv(1, 2, 300, dim)
    for x, given in zip(read(filled(keys, values, SMALL.replace(value_bits=4))), (keys, values), strict=True):
        assert x.shape == given.shape
        assert 0 < relative_error(x, given) < 0.15


@pytest.mark.parametrize("dim", [30, 100, 2048])
def test_06_other_head_dims_are_named(dim):
    with pytest.raises(ValueError, match=f"head_dim of key_states must be a multiple of 8 from 8 to 1024, got {dim}"):
        filled(*random_kv(1, 1, 10, dim))


def test_06_phi3():
    model = tiny.model("phi3")
    cache = KVarNCache(model.config, SMALL)
    assert generate(model, tiny.prompt(1, 10), cache, 200).shape == (1, 210)
    assert cache.layers[0].keys.shape[3] == 96
    assert cache.layers[0].state.count == 2


# --- 7: one head_dim assumed for the whole model, or hidden_size / heads ---


def test_07_head_dim_is_read_from_the_tensors():
    cache = KVarNCache(kvarn=SMALL)
    pairs = random_kv(1, 2, 300, 256), random_kv(1, 1, 300, 512)
    for layer_idx, pair in enumerate(pairs):
        cache.update(*pair, layer_idx)
    for layer_idx, pair in enumerate(pairs):
        assert all(relative_error(x, y) < 0.5 for x, y in zip(read(cache, layer_idx), pair, strict=True))


def test_07_qwen3():
    model = tiny.model("qwen3")
    assert model.config.head_dim != model.config.hidden_size // model.config.num_attention_heads
    cache = KVarNCache(model.config, SMALL)
    generate(model, tiny.prompt(1, 200), cache, 20)
    assert cache.layers[0].keys.shape == (1, 2, 219, 128)
    assert cache.layers[0].state.count == 2


# --- 8: head_dims of keys and values differ ---


def test_08_keys_and_values_have_layouts_of_their_own():
    keys, values = random_kv(1, 4, 300, 192, value_dim=128)
    held = read(filled(keys, values, SMALL.replace(value_bits=4)))
    assert all(relative_error(x, y) < 0.15 for x, y in zip(held, (keys, values), strict=True))


def test_08_deepseek_v3():
    model = tiny.model("deepseek_v3")
    cache = KVarNCache(model.config, SMALL)
    assert generate(model, tiny.prompt(1, 240), cache, 40).shape == (1, 280)
    layer = cache.layers[0]
    assert layer.state.count == 3
    assert layer.keys.shape[3] != layer.values.shape[3]
    assert layer.state.config.value_bits == 8  # they are rotary keys


# --- 12: options are changed; a model with few layers gets as many as the one before ---


def test_12_options_are_never_changed():
    options = KVarNConfig(tile_size=64, sink_length=16, residual_length=16)
    before = options.to_dict()
    for layers in (2, 4, 2):
        model = tiny.build("llama", num_hidden_layers=layers)
        for config in (model.config, None):
            cache = KVarNCache(config, options)
            generate(model, tiny.prompt(1, 100), cache, 3)
            assert len(cache.layers) == layers
    assert options.to_dict() == before
    with pytest.raises(AttributeError):
        options.key_bits = 2


# --- 13: hybrid linear-attention models fail ---


def test_13_only_attention_layers_are_quantized():
    model = tiny.model("qwen3_next")
    cache = KVarNCache(model.config, SMALL)
    assert generate(model, tiny.prompt(1, 300), cache, 50).shape == (1, 350)
    assert [isinstance(layer, KVarNLayer) for layer in cache.layers] == [False, False, False, True]
    assert cache.layers[3].state.count == 4


# --- 14: learned sinks and windows ignored ---


@pytest.mark.parametrize("implementation", ["eager", "kvarn"])
def test_14_learned_sinks_are_honoured(implementation):
    model = tiny.build("gpt_oss")
    assert (model.config.head_dim, model.config.sliding_window) == (64, 32)
    ids, next_ids = tiny.prompt(1, 200), tiny.prompt(1, 1, seed=1)

    def logits(cache, attention):
        model.set_attn_implementation("eager")
        tiny.forward(model, ids, cache)
        model.set_attn_implementation(attention)
        return tiny.forward(model, next_ids, cache)

    wide = SMALL.replace(key_bits=8, value_bits=8)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(3.0)
        dense = logits(DynamicCache(config=model.config), "eager")
        quantized = logits(KVarNCache(model.config, wide), implementation)
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
        without = logits(DynamicCache(config=model.config), "eager")
    assert relative_error(quantized, dense) < 0.05 * relative_error(without, dense)


# --- 23: Qwen2.5's huge key bias destroys the output ---


def test_23_a_huge_key_bias_is_no_trouble():
    """One RoPE pair with a bias eighty times the other channels' deviation, as in Qwen2.5."""
    model = tiny.build("qwen2", head_dim=64, initializer_range=0.1)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            states = layer.input_layernorm(model.model.embed_tokens(tiny.prompt(1, 200)))
            deviation = attention.k_proj(states).std()
            pair = [0, 32]  # turned by the rotary embedding many times in a tile: no zero point can hold it
            attention.k_proj.bias.view(2, 64)[:, pair] = 80 * deviation
            # Queries hardly use the pair: it serves as a constant.
            attention.q_proj.weight.view(4, -1, 64)[:, pair] *= 0.02
    ids = tiny.prompt(1, 640)
    logits = {}
    for name in ("dense", "kvarn", "published"):
        cache = (
            DynamicCache(config=model.config)
            if name == "dense"
            else KVarNCache(model.config, SMALL.replace(method=name))
        )
        tiny.forward(model, ids[:, :600], cache)
        logits[name] = tiny.forward(model, ids[:, 600:], cache).log_softmax(-1)
    dense = logits["dense"]
    divergence = {name: (dense.exp() * (dense - x)).sum(-1).mean() for name, x in logits.items()}
    assert divergence["kvarn"] < 0.01
    assert divergence["kvarn"] < 0.05 * divergence["published"]
