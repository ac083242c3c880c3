"""``crop``: exact in the tail and at tiles' boundaries, refused in between."""

from __future__ import annotations

import copy

import pytest

from kvarn_hf import KVarNCache, KVarNConfig
from tests import models_tiny as tiny
from tests.cache.common import SMALL, filled, kv, read, same, same_state


class TestRollback:
    def test_up_to_residual_length_is_exact(self):
        config = KVarNConfig(tile_size=64, sink_length=16, residual_length=24)
        keys, values = kv(2, 330)
        for length in (230, 232, 233, 290):  # 232: a tile has just been packed, the tail is at its shortest
            before = filled(keys[:, :, :length], values[:, :, :length], config=config)
            for removed in (0, 1, 7, 24):
                cache = copy.deepcopy(before)
                cache.crop(-removed)
                assert cache.get_seq_length() == length - removed
                assert same(read(cache), [t[:, :, : length - removed] for t in read(before)])
                again = slice(length - removed, length)
                cache.update(keys[:, :, again], values[:, :, again], 0)
                assert same_state(cache, before)

    def test_to_tile_boundaries(self):
        keys, values = kv(2, 300)
        before = filled(keys, values)
        for length in (0, 1, 9, 16, 80, 144, 208, 272, 280, 299, 300, 1000):
            cache = copy.deepcopy(before)
            cache.crop(length if length else -300)
            kept = min(length, 300)
            assert cache.get_seq_length() == kept
            assert same(read(cache), [t[:, :, :kept] for t in read(before)])
            cache.update(keys[:, :, kept:], values[:, :, kept:], 0)
            assert same_state(cache, before)

    def test_through_a_tile_is_refused_and_changes_nothing(self):
        model = tiny.model("gemma3")  # full attention between two windows
        cache = KVarNCache(model.config, SMALL)
        cache.activate_past_recording()
        tiny.forward(model, tiny.prompt(1, 300), cache)
        before = copy.deepcopy(cache)
        for length in (17, 79, 81, 271):
            with pytest.raises(ValueError, match=f"crop to {length} tokens") as error:
                cache.crop(length - 300)
            below = 16 + (length - 16) // 64 * 64
            for allowed in ("0 to 16", str(below), str(below + 64), "272 to 300"):
                assert allowed in str(error.value)
        for layer, other in zip(cache.layers, before.layers, strict=True):
            assert layer.get_seq_length() == 300
            assert same((layer.keys, layer.values), (other.keys, other.values))

    def test_the_sequence_begins_anew_when_its_last_tile_goes(self):
        """The keys' channel factors belong to the tokens that fixed them."""
        keys, values = kv(1, 200)
        other_keys, other_values = kv(1, 200, seed=9)
        other_keys[..., 7] *= 50
        cache = filled(keys, values)
        cache.crop(-200)
        cache.update(other_keys, other_values, 0)
        assert same_state(cache, filled(other_keys, other_values))
