"""What a cache holds follows from the tokens alone, is exact where it says so, and fits every layer."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvarn_hf import KVarNCache
from kvarn_hf.layers.growing import KVarNLayer
from tests import models_tiny as tiny
from tests.cache.common import SMALL, count_quantize, filled, kv, random_chunks, read, same, same_state


class TestPurity:
    """The state is a function of the tokens alone."""

    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize("length", [15, 96, 250, 333])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_chunks_give_the_same_state(self, batch, length, dtype):
        keys, values = kv(batch, length, dtype=dtype)
        whole = filled(keys, values)
        for sizes in ([1] * length, random_chunks(length, 1), random_chunks(length, 2)):
            pieces = filled(keys, values, sizes)
            assert same_state(whole, pieces)
            assert whole.memory_footprint() == pieces.memory_footprint()

    @pytest.mark.parametrize("method", ["kvarn", "published", "hadamard", "rtn"])
    def test_every_method(self, method):
        config = SMALL.replace(method=method)
        keys, values = kv(2, 240)
        assert same_state(filled(keys, values, config=config), filled(keys, values, [1] * 240, config))

    def test_rows_do_not_depend_on_each_other(self):
        keys, values = kv(3, 250)
        together = filled(keys, values)
        for row in range(3):
            alone = filled(keys[row : row + 1], values[row : row + 1])
            assert same([t[row : row + 1] for t in read(together)], read(alone))

    def test_a_tile_is_quantized_once(self, monkeypatch):
        calls = count_quantize(monkeypatch)
        keys, values = kv(1, 240)
        filled(keys, values, [1] * 240)
        assert calls == [64, 64, 64]

    def test_contiguity_does_not_matter(self):
        keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in kv(1, 300))
        assert not keys.is_contiguous()
        assert same_state(filled(keys, values), filled(keys.contiguous(), values.contiguous()))


class TestExactness:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_sinks_and_tail_are_exact(self, dtype):
        keys, values = kv(2, 333, dtype=dtype)
        cache = filled(keys, values, random_chunks(333, 3))
        tail = cache.layers[0].state.tail_start
        assert tail == 16 + 4 * 64
        for held, given in zip(read(cache), (keys, values), strict=True):
            assert held.dtype == dtype
            assert torch.equal(held[:, :, :16], given[:, :, :16])
            assert torch.equal(held[:, :, tail:], given[:, :, tail:])
            assert not torch.equal(held[:, :, 16:tail], given[:, :, 16:tail])

    def test_sinks_are_exact_a_thousand_steps_later(self):
        keys, values = kv(1, 1200, heads=1)
        cache = filled(keys[:, :, :200], values[:, :, :200])
        middle = read(cache)
        for i in range(200, 1200):
            held = cache.update(keys[:, :, i : i + 1], values[:, :, i : i + 1], 0)
        for i, given in enumerate((keys, values)):
            assert torch.equal(held[i][:, :, :16], given[:, :, :16])
            assert torch.equal(held[i][:, :, -16:], given[:, :, -16:])
            assert torch.equal(held[i][:, :, 16:144], middle[i][:, :, 16:144])  # and tiles stay as they were

    def test_attention_reads_new_tokens_before_they_are_packed(self):
        keys, values = kv(1, 300)
        cache = KVarNCache(kvarn=SMALL)
        assert same(cache.update(keys, values, 0), (keys, values))
        more_keys, more_values = kv(1, 100, seed=1)
        held, _ = cache.update(more_keys, more_values, 0)
        assert torch.equal(held[:, :, -100:], more_keys)

    def test_quantized_tokens_are_close(self):
        keys, values = kv(1, 300)
        held = read(filled(keys, values, config=SMALL.replace(key_bits=8, value_bits=8)))
        for x, given in zip(held, (keys, values), strict=True):
            assert (x - given).norm() < 0.01 * given.norm()


class TestLayers:
    def test_only_full_attention_is_quantized(self):
        kinds = {name: [type(x).__name__ for x in KVarNCache(tiny.model(name).config).layers] for name in tiny.NAMES}
        assert kinds["llama"] == ["KVarNLayer"] * 2
        assert kinds["gemma3"] == ["DynamicSlidingWindowLayer", "KVarNLayer", "DynamicSlidingWindowLayer"]
        assert kinds["gpt_oss"] == ["DynamicSlidingWindowLayer", "KVarNLayer"]
        assert kinds["qwen3_next"] == ["LinearAttentionLayer"] * 3 + ["KVarNLayer"]

    @pytest.mark.parametrize("with_config", [True, False])
    def test_skip_layers(self, with_config):
        model = tiny.build("llama", num_hidden_layers=4)
        skipped = [0, -1] if with_config else [0, 3]
        cache = KVarNCache(model.config if with_config else None, SMALL, skip_layers=skipped)
        tiny.forward(model, tiny.prompt(1, 200), cache)
        assert [type(layer) for layer in cache.layers] == [DynamicLayer, KVarNLayer, KVarNLayer, DynamicLayer]
        dense = DynamicCache(config=model.config)
        tiny.forward(model, tiny.prompt(1, 200), dense)
        for i in (0, 3):  # one prefill sees exact keys everywhere
            assert torch.equal(cache.layers[i].keys, dense.layers[i].keys)
        assert cache.report()["quantized_layers"] == 2

    def test_head_dims_differ_by_layer_and_side(self):
        cache = KVarNCache(kvarn=SMALL)
        shapes = [(2, 256, 256), (1, 512, 512), (4, 192, 128), (3, 80, 96)]
        given = [kv(1, 200, heads=h, key_dim=k, value_dim=v) for h, k, v in shapes]
        for layer_idx, pair in enumerate(given):
            cache.update(*pair, layer_idx)
        for layer_idx, pair in enumerate(given):
            assert [x.shape for x in read(cache, layer_idx)] == [x.shape for x in pair]
            for held, x in zip(read(cache, layer_idx), pair, strict=True):
                assert (held - x).norm() < 0.5 * x.norm()
