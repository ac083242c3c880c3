"""Bad tokens and settings get one sentence, and the cache holds what it held."""

from __future__ import annotations

import copy

import pytest

from kvarn_hf import KVarNCache, KVarNConfig
from tests import models_tiny as tiny
from tests.cache.common import filled, kv, same_state

BAD_TOKENS = {
    "rank": (
        lambda k, v: (k[0], v[0]),
        r"key_states must be \[batch, num_kv_heads, tokens, head_dim\], got shape \[2, 5, 32\]",
    ),
    "dtype": (lambda k, v: (k.int(), v), r"key_states must be float16, bfloat16 or float32, got torch.int32"),
    "other dtype": (lambda k, v: (k.half(), v), r"key_states must have dtype torch.float32 like .*, got torch.float16"),
    "value dtype": (
        lambda k, v: (k, v.half()),
        r"value_states must have dtype torch.float32 like .*, got torch.float16",
    ),
    "batch": (
        lambda k, v: (k[:1], v[:1]),
        r"key_states must have shape \[2, 2, 'any', 32\] like .*, got \[1, 2, 5, 32\]",
    ),
    "heads": (
        lambda k, v: (k[:, :1], v[:, :1]),
        r"key_states must have shape \[2, 2, 'any', 32\] like .*, got \[2, 1, 5, 32\]",
    ),
    "head_dim": (lambda k, v: (k[..., :16], v), r"key_states must have shape .* 32\] like .*, got \[2, 2, 5, 16\]"),
    "value head_dim": (lambda k, v: (k, v[..., :16]), r"value_states must have shape .*, got \[2, 2, 5, 16\]"),
    "odd head_dim": (lambda k, v: (k[..., :30], v), r"head_dim of key_states must be a multiple of 8 .*, got 30"),
    "tokens": (
        lambda k, v: (k, v[:, :, :3]),
        r"value_states must have the batch, heads and tokens .*, got \[2, 2, 3\]",
    ),
    "device": (lambda k, v: (k, v.to("meta")), r"value_states must be on the device of key_states cpu, got meta"),
    "other device": (lambda k, v: (k.to("meta"), v.to("meta")), r"key_states must be on cpu like .*, got meta"),
}

BAD_SETTINGS = {
    "preset": (
        lambda: KVarNCache(kvarn="kvarn_k5v2_g128"),
        r"preset must be one of kvarn_k4v2_g128.*, got 'kvarn_k5v2_g128'",
    ),
    "preset type": (lambda: KVarNCache(kvarn=4), r"preset must be one of .*, got 4"),
    "config": (
        lambda: KVarNCache("kvarn_k4v2_g128"),
        r"config must be a model's config \(pass settings as kvarn=...\), got",
    ),
    "key_bits": (lambda: KVarNConfig(key_bits=5), r"key_bits must be one of 2, 3, 4, 8, got 5"),
    "value_bits": (lambda: KVarNConfig(value_bits=16), r"value_bits must be one of 2, 3, 4, 8, got 16"),
    "tile_size": (lambda: KVarNConfig(tile_size=100), r"tile_size must be one of 64, 128, got 100"),
    "sink_length": (lambda: KVarNConfig(sink_length=-1), r"sink_length must be an integer >= 0, got -1"),
    "residual_length": (lambda: KVarNConfig(residual_length=1.5), r"residual_length must be an integer >= 0, got 1.5"),
    "method": (
        lambda: KVarNConfig(method="kivi"),
        r"method must be one of kvarn, published, hadamard, rtn, got 'kivi'",
    ),
    "iterations": (lambda: KVarNConfig(iterations=65), r"iterations must be an integer from 0 to 64, got 65"),
    "skip_layers": (
        lambda: KVarNCache(tiny.model("llama").config, skip_layers=[2]),
        r"skip_layers must hold integers from -2 to 1, got 2",
    ),
    "skip_layers of one": (lambda: KVarNCache(skip_layers=0), r"skip_layers must be a list of layers .*, got 0"),
    "fused": (lambda: KVarNCache(fused="no"), r"fused must be True or False, got 'no'"),
    "skip_layers without config": (
        lambda: KVarNCache(skip_layers=[-1]),
        r"skip_layers must hold integers >= 0 when no config is given, got -1",
    ),
}


class TestBadInput:
    """One sentence that names the argument, its value and what is allowed; the cache holds what it held."""

    @pytest.mark.parametrize("case", BAD_TOKENS)
    @pytest.mark.parametrize("length", [50, 200])
    def test_tokens(self, case, length):
        spoil, message = BAD_TOKENS[case]
        cache = filled(*kv(2, length), layers=2)
        before = copy.deepcopy(cache)
        new = kv(2, 5, seed=1)
        cache.update(*new, 0)
        with pytest.raises(ValueError, match=message) as error:
            cache.update(*spoil(*new), 1)
        assert "\n" not in str(error.value)
        assert same_state(cache, before)  # layer 0 was taken back with layer 1
        for layer_idx in range(2):
            cache.update(*new, layer_idx)
            before.update(*new, layer_idx)
        assert same_state(cache, before)

    def test_first_tokens(self):
        cache = KVarNCache()
        with pytest.raises(ValueError, match="head_dim of key_states must be a multiple of 8 from 8 to 1024, got 30"):
            cache.update(*kv(1, 10, key_dim=30), 0)
        assert cache.get_seq_length() == 0
        cache.update(*kv(2, 10), 0)
        assert cache.get_seq_length() == 10

    @pytest.mark.parametrize("case", BAD_SETTINGS)
    def test_settings(self, case):
        build, message = BAD_SETTINGS[case]
        with pytest.raises(ValueError, match=message):
            build()

    def test_a_linear_model_without_its_config(self):
        with pytest.raises(ValueError, match=r"build it with KVarNCache\(config=model.config\)"):
            tiny.forward(tiny.model("qwen3_next"), tiny.prompt(1, 10), KVarNCache())
