"""A reset cache is as new, copies are independent."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from kvarn_hf import KVarNCache
from tests import models_tiny as tiny
from tests.cache.common import SMALL, filled, kv, read, same, same_state
from tests.storage import held_bytes, held_storages


class TestStartingAgain:
    def test_reset_is_as_new(self):
        keys, values = kv(1, 300)
        cache = filled(keys, values, layers=2)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.memory_footprint() == held_bytes(cache) == 0
        other_keys, other_values = kv(3, 200, heads=1, key_dim=64, seed=4)  # nothing of the old shapes is left
        for layer_idx in range(2):
            cache.update(other_keys, other_values, layer_idx)
        assert same_state(cache, filled(other_keys, other_values, layers=2))

    @pytest.mark.parametrize("name", tiny.NAMES)
    def test_reset_of_every_kind_of_layer(self, name):
        model, ids = tiny.model(name), tiny.prompt(1, 150)
        cache, fresh = KVarNCache(model.config, SMALL), KVarNCache(model.config, SMALL)
        tiny.forward(model, tiny.prompt(1, 120, seed=3), cache)
        cache.reset()
        assert torch.equal(tiny.forward(model, ids, cache), tiny.forward(model, ids, fresh))
        assert torch.equal(tiny.forward(model, ids[:, :5], cache), tiny.forward(model, ids[:, :5], fresh))


class TestCopies:
    def test_deepcopy_is_independent(self):
        keys, values = kv(2, 300)
        cache = filled(keys, values)
        before = read(cache)
        copies = [copy.deepcopy(cache) for _ in range(2)]
        assert not held_storages(cache).keys() & held_storages(copies[0]).keys()
        for seed, other in enumerate(copies, 1):
            other.update(*kv(2, 150, seed=seed), 0)
        assert same(read(cache), before)
        for seed, other in enumerate(copies, 1):
            more = [torch.cat(pair, 2) for pair in zip((keys, values), kv(2, 150, seed=seed), strict=True)]
            assert same_state(other, filled(*more))

    def test_pickle(self):
        cache = filled(*kv(2, 300), layers=2)
        again = pickle.loads(pickle.dumps(cache))
        assert same_state(cache, again)
        assert repr(again) == repr(cache)
