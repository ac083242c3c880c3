"""What people hit with quantized KV caches elsewhere: beams, resets, turns, copies, files.

Numbers are those of the list the cases come from.
"""

from __future__ import annotations

import copy
import json
import struct

import pytest
import torch
from transformers import DynamicCache

from kvarn_hf import KVarNCache, KVarNConfig
from kvarn_hf.ops import dispatch
from tests import models_tiny as tiny
from tests.cases.small import ALL_SINK, SMALL, filled, generate, random_kv, read

# --- 1: beam search reorders the tail but not the packed part, or indexes an empty tail ---


@pytest.mark.parametrize("length", [256, 300])
@pytest.mark.parametrize("residual", [0, 16])
def test_01_every_region_follows_beam_idx(length, residual, monkeypatch):
    keys, values = random_kv(4, 2, length, 32)
    mark = torch.arange(1.0, 5.0).reshape(4, 1, 1, 1) * 10
    cache = filled(keys + mark, values + mark, SMALL.replace(sink_length=0, residual_length=residual))
    before = read(cache)
    monkeypatch.setattr(dispatch, "quantize", lambda *args: pytest.fail("quantized again"))
    cache.reorder_cache(torch.tensor([3, 3, 0, 1]))
    for x, y in zip(read(cache), before, strict=True):
        assert torch.equal(x, y[[3, 3, 0, 1]])
        assert torch.allclose(x.mean((1, 2, 3)), mark[[3, 3, 0, 1]].flatten(), atol=0.5)


def test_01_beam_search_past_two_flushes():
    model = tiny.model("llama")
    cache = KVarNCache(model.config, SMALL)
    assert generate(model, tiny.prompt(2, 90), cache, 75, num_beams=3).shape == (2, 165)
    assert cache.layers[0].state.count == 2


# --- 3: reset() leaves the length or stale states ---


def test_03_reset_is_bit_equal_to_a_fresh_cache():
    keys, values = random_kv(1, 2, 303, 32)
    cache = filled(keys[:, :, :300], values[:, :, :300])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.get_mask_sizes(3, 0) == (3, 0)
    cache.update(keys[:, :, 300:], values[:, :, 300:], 0)
    assert all(torch.equal(x, y[:, :, 300:]) for x, y in zip(read(cache), (keys, values), strict=True))
    assert cache.memory_footprint() == filled(keys[:, :, 300:], values[:, :, 300:]).memory_footprint()


# --- 9: a second turn with the same cache: IndexError or shifted positions ---


@pytest.mark.parametrize("config", [ALL_SINK, SMALL], ids=["dense", "quantized"])
def test_09_second_turn(config, monkeypatch):
    model = tiny.model("llama")
    sizes = []
    forward = type(model).forward

    def recorded(self, input_ids=None, **kwargs):
        sizes.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **kwargs)

    def turns(cache):
        first = generate(model, tiny.prompt(1, 150), cache, 50)
        ids = torch.cat([first, tiny.prompt(1, 90, seed=1)], 1)
        return generate(model, ids, cache, 20)

    monkeypatch.setattr(type(model), "forward", recorded)
    cache = KVarNCache(model.config, config)
    tokens = turns(cache)
    assert sizes == [150] + [1] * 49 + [91] + [1] * 19
    assert cache.get_seq_length() == 309
    if config is ALL_SINK:
        assert torch.equal(tokens, turns(DynamicCache(config=model.config)))
    else:
        assert cache.layers[0].state.count == 4


# --- 10: a copied prefix cache shares storage or loses details ---


def test_10_prefix_copies_are_independent():
    model = tiny.model("llama")
    cache = KVarNCache(model.config, SMALL)
    prefix = tiny.prompt(1, 300)
    tiny.forward(model, prefix, cache)
    before = [read(cache, i) for i in range(2)]
    for seed in (1, 2):
        ids = torch.cat([prefix, tiny.prompt(1, 20, seed)], 1)
        fresh = KVarNCache(model.config, SMALL)
        tiny.forward(model, prefix, fresh)
        expected = generate(model, ids, fresh, 80)
        assert torch.equal(generate(model, ids, copy.deepcopy(cache), 80), expected)
    for i in range(2):
        assert all(torch.equal(x, y) for x, y in zip(read(cache, i), before[i], strict=True))


# --- 11: the whole prompt is quantized at once, first tokens included ---


def test_11_sinks_stay_exact_for_ever():
    keys, values = random_kv(1, 1, 2400, 64)
    keys[:, :, 0] *= 25
    cache = filled(keys[:, :, :1400], values[:, :, :1400], KVarNConfig())
    for end in (1400, 2400):
        for i in range(cache.get_seq_length(), end):
            cache.update(keys[:, :, i : i + 1], values[:, :, i : i + 1], 0)
        start = cache.layers[0].state.tail_start
        assert start > end - 256
        for x, given in zip(read(cache), (keys, values), strict=True):
            assert torch.equal(x[:, :, :128], given[:, :, :128])
            assert torch.equal(x[:, :, start:], given[:, :, start:end])
            assert not (x == given[:, :, :end])[:, :, 128:start].all(-1).any()  # every interior token is quantized


# --- 22: save and load loses packed state ---


def test_22_save_and_load(tmp_path):
    model, path = tiny.model("llama"), tmp_path / "cache.safetensors"
    ids = tiny.prompt(1, 2010)
    cache = KVarNCache(model.config)
    tiny.forward(model, ids[:, :2000], cache)
    cache.save(path)
    loaded = KVarNCache.load(path)
    assert loaded.kvarn == cache.kvarn
    assert loaded.layers[0].state.count == cache.layers[0].state.count == 13
    # The file holds the packed bytes and the dense tokens, a header, and nothing else.
    header_bytes = struct.unpack("<Q", path.read_bytes()[:8])[0]
    json.loads(path.read_bytes()[8 : 8 + header_bytes])
    tensor_bytes = 0
    for layer in cache.layers:
        state = layer.state
        tiles = [t[:, :, : state.count] for part in state.tiles.filled() for t in part]
        tensor_bytes += sum(t.numel() * t.element_size() for t in (*tiles, state.dense.keys, state.dense.values))
        tensor_bytes += state.prescale.numel() * state.prescale.element_size()
    assert path.stat().st_size == 8 + header_bytes + tensor_bytes
    assert header_bytes < 5_000
    assert tensor_bytes <= cache.memory_footprint()
    assert torch.equal(tiny.forward(model, ids[:, 2000:], loaded), tiny.forward(model, ids[:, 2000:], cache))
