"""The registry of caches."""

import pytest
import torch
from transformers import DynamicCache, Gemma3TextConfig, LlamaConfig

from kvarn_hf import KVarNCache, KVarNConfig
from kvarn_hf.config import PRESETS
from kvarn_hf.evaluation.caches import DEFAULT_CACHES, NAMED_CACHES, cache_spec, full_attention_layers


class Model:
    def __init__(self, config):
        self.config = config


LLAMA = Model(LlamaConfig(num_hidden_layers=2))

HYBRID = Model(
    Gemma3TextConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=16)
)


@pytest.mark.parametrize("method", ["kvarn", "published", "hadamard", "rtn"])
def test_a_method_and_a_preset_are_a_name(method):
    for preset in PRESETS:
        spec = cache_spec(preset.replace("kvarn", method, 1))
        expected = KVarNConfig.from_preset(preset, method=method)
        assert spec.kvarn == expected and spec.name == expected.name
        assert spec.bits_per_element(128) == expected.bits_per_element(128)
        with spec.opened(LLAMA) as cache:
            assert isinstance(cache, KVarNCache) and cache.kvarn == expected


def test_the_default_caches_are_known_and_cover_every_method():
    specs = [cache_spec(name) for name in DEFAULT_CACHES]
    assert len({spec.name for spec in specs}) == len(DEFAULT_CACHES)
    assert {spec.kvarn.method for spec in specs if spec.kvarn} == {"kvarn", "published", "hadamard", "rtn"}


def test_overrides_change_the_settings():
    config = cache_spec("kvarn_k4v2_g64", sink_length=4).kvarn
    assert (config.sink_length, config.tile_size, config.residual_length) == (4, 64, 128)


def test_rtn_is_kivis_layout():
    # Per channel over a tile's tokens for keys, per token over its channels for values, full range, nothing else.
    config = cache_spec("rtn_k4v2_g128", sink_length=0, residual_length=0).kvarn
    torch.manual_seed(0)
    keys, values = torch.randn(1, 1, 256, 64), torch.randn(1, 1, 256, 64)
    cache = KVarNCache(kvarn=config)
    cache.update(keys, values, 0)

    def rounded(x, dim, bits):
        low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
        scale, zero = ((high - low) / (2**bits - 1)).half().float(), low.half().float()
        return ((x - zero) / scale).clamp(0, 2**bits - 1).round() * scale + zero

    tiles = keys.unflatten(2, (2, 128))
    torch.testing.assert_close(cache.layers[0].keys, rounded(tiles, 3, 4).flatten(2, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(cache.layers[0].values, rounded(values, 3, 2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMED_CACHES if name not in ("dense", "fused-turboquant-4bit")])
def test_the_others_store_full_attention_layers_with_an_error(name):
    spec = cache_spec(name)
    if not spec.available:
        with pytest.raises(ValueError, match=f"cache '{name}' needs the package"), spec.opened(LLAMA):
            pass
        return
    torch.manual_seed(0)
    states = torch.randn(1, 2, 300, 64)
    for model, exact in ((LLAMA, []), (HYBRID, [0])):
        with spec.opened(model) as cache:
            for layer in range(2):
                cache.update(states, states, layer)
                for read in cache.update(states[:, :, :1], states[:, :, :1], layer):
                    if layer in exact:
                        assert torch.equal(read[:, :, -9:-1], states[:, :, -8:])  # windows stay as they are
                    else:
                        error = (read[:, :, :100] - states[:, :, :100]).norm() / states[:, :, :100].norm()
                        assert 0.01 < error < 0.6
    assert 2 < spec.bits_per_element(64) < 9 and spec.tiles(4096) is None


def test_only_full_attention_is_quantized():
    assert full_attention_layers(LLAMA.config) == [0, 1]
    assert full_attention_layers(HYBRID.config) == [1]


def test_dense_is_the_dense_cache():
    spec = cache_spec("dense")
    assert type(spec.make(LLAMA)) is DynamicCache and spec.bits_per_element(64) == 16


@pytest.mark.parametrize("name", ["kvarn", "kvarn_k5v2_g128", "kivi_k4v2_g128", "quanto-int3", ""])
def test_unknown_names_are_said_with_those_that_exist(name):
    with pytest.raises(ValueError, match=f"cache must be one of dense, quanto-int4, .*got '{name}'"):
        cache_spec(name)


def test_other_caches_take_no_settings():
    with pytest.raises(ValueError, match="sink_length cannot be set: cache 'dense'"):
        cache_spec("dense", sink_length=4)
