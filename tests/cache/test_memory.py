"""Bytes reported are the bytes held, and nothing else is kept alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from kvarn_hf import KVarNCache
from tests import models_tiny as tiny
from tests.cache.common import DIM, HEADS, SMALL, filled, kv, read, same
from tests.storage import held_bytes, held_storages


class TestMemory:
    @pytest.mark.parametrize("length", [10, 100, 300, 1000])
    @pytest.mark.parametrize("batch", [1, 3])
    def test_footprint_is_what_is_held(self, batch, length):
        cache = filled(*kv(batch, length), layers=2)
        assert cache.memory_footprint() == held_bytes(cache)
        cache.reorder_cache(torch.arange(batch).flip(0))
        assert cache.memory_footprint() == held_bytes(cache)
        for layer_idx in range(2):
            cache.update(*kv(batch, 1, seed=1), layer_idx)
        assert cache.memory_footprint() == held_bytes(cache)

    @pytest.mark.parametrize("name", tiny.NAMES)
    def test_footprint_of_every_kind_of_layer(self, name):
        model = tiny.model(name)
        cache = KVarNCache(model.config, SMALL)
        for size in (200, 30, 1):
            tiny.forward(model, tiny.prompt(1, size), cache)
            assert cache.memory_footprint() == held_bytes(cache)

    @pytest.mark.parametrize("length", [10, 100, 300])
    def test_no_view_keeps_the_prompt_alive(self, length):
        keys, values = kv(1, length)
        alive = [weakref.ref(x.untyped_storage()) for x in (keys, values)]
        given = {x.untyped_storage().data_ptr() for x in (keys, values)}
        cache = filled(keys, values)
        assert not given & held_storages(cache).keys()
        del keys, values
        gc.collect()
        assert [ref() for ref in alive] == [None, None]

    def test_what_is_given_may_be_overwritten(self):
        keys, values = kv(1, 300)
        cache = filled(keys, values)
        before = read(cache)
        keys.fill_(torch.nan)
        values.fill_(torch.nan)
        assert same(read(cache), before)

    def test_report_and_repr(self):
        cache = filled(*kv(2, 300, dtype=torch.bfloat16), layers=3)
        report = cache.report()
        assert (report["tokens"], report["sink_tokens"], report["packed_tokens"], report["tail_tokens"]) == (
            300,
            16,
            256,
            28,
        )
        assert (report["tiles"], report["layers"], report["quantized_layers"]) == (4, 3, 3)
        assert report["bytes"] == held_bytes(cache)
        assert report["dense_bytes"] == 3 * 2 * HEADS * 300 * 2 * DIM * 2
        assert report["ratio"] == report["dense_bytes"] / report["bytes"]
        for part in ("kvarn_k4v2_g64", "3 of 3 layers", "300 tokens = 16 sink + 256 packed + 28 tail", "x smaller"):
            assert part in repr(cache)

    def test_report_of_an_empty_cache(self):
        for cache in (KVarNCache(), KVarNCache(tiny.model("llama").config)):
            assert cache.report()["bytes"] == cache.report()["tokens"] == 0
            assert cache.report()["ratio"] == 1.0
            assert "0 tokens" in repr(cache)
