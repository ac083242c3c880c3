"""Figures go with the tokens through everything that a cache can go through."""

import copy
import pickle

import torch

from kvarn_hf import KVarNCache, Monitor
from tests.monitor.common import SMALL, assert_same_figures, errors_of, fed, figures, kv


class TestLife:
    def test_tokens_in_any_portions_give_the_same_figures(self):
        keys, values = kv(500)
        whole = figures(fed(keys, values))
        for steps in (1, 37, 64, 200):
            assert_same_figures(figures(fed(keys, values, steps=steps)), whole)

    def test_batch_operations_move_the_figures(self):
        keys, values = kv(300, batch=3)
        cache = fed(keys, values)
        expected = figures(cache)
        cache.reorder_cache(torch.tensor([2, 0, 2]))
        assert_same_figures(figures(cache), [f[[2, 0, 2]] for f in expected])
        cache.batch_repeat_interleave(2)
        assert_same_figures(figures(cache), [f[[2, 2, 0, 0, 2, 2]] for f in expected])
        cache.batch_select_indices(torch.tensor([0, 2]))
        assert_same_figures(figures(cache), [f[[2, 0]] for f in expected])
        more = kv(300, seed=1)
        fed(*more, cache=cache)
        rows = [torch.cat([x[[2, 0]], y], 2) for x, y in zip((keys, values), more, strict=True)]
        assert_same_figures(figures(cache), figures(fed(*rows)))

    def test_crop_and_grow_again(self):
        keys, values = kv(16 + 64 * 6 + 40)
        cache = fed(keys, values)
        cache.crop(16 + 64 * 2)
        assert_same_figures(figures(cache), [f[:, :, :2] for f in figures(fed(keys, values))])
        more = kv(64 * 5, seed=3)
        fed(*more, cache=cache)
        rows = [torch.cat([x[:, :, : 16 + 128], y], 2) for x, y in zip((keys, values), more, strict=True)]
        assert_same_figures(figures(cache), figures(fed(*rows)))

    def test_reset_and_another_batch(self):
        cache = fed(*kv(300))
        cache.reset()
        assert cache.report().records == []
        keys, values = kv(200, batch=5)
        fed(keys, values, cache=cache)
        assert_same_figures(figures(cache), figures(fed(keys, values)))

    def test_copies_are_independent(self):
        keys, values = kv(300)
        cache = fed(keys, values)
        before = figures(cache)
        for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            assert_same_figures(figures(copied), before)
            fed(*kv(300, seed=2), cache=copied)
            copied.crop(-64)
        assert_same_figures(figures(cache), before)

    def test_save_and_load(self, tmp_path):
        keys, values = kv(500)
        cache = fed(keys[:, :, :300], values[:, :, :300], monitor=Monitor(every=2, error_factor=2.0))
        cache.save(tmp_path / "cache.safetensors")
        loaded = KVarNCache.load(tmp_path / "cache.safetensors")
        assert loaded.monitor == cache.monitor
        assert loaded.report().records == cache.report().records
        fed(keys[:, :, 300:], values[:, :, 300:], cache=loaded)
        assert_same_figures(figures(loaded), figures(fed(keys, values, monitor=2)))
        fed(keys, values, monitor=False).save(tmp_path / "plain.safetensors")
        assert KVarNCache.load(tmp_path / "plain.safetensors").monitor is None

    def test_skipped_layers_are_not_watched(self):
        cache = KVarNCache(kvarn=SMALL, skip_layers=[0], monitor=True)
        fed(*kv(300), layers=3, cache=cache)
        assert {r["layer"] for r in cache.report().records} == {1, 2}

    def test_inference_mode_and_out_of_it(self):
        keys, values = kv(600)
        with torch.inference_mode():
            cache = fed(keys[:, :, :200], values[:, :, :200])
        fed(keys[:, :, 200:], values[:, :, 200:], cache=cache)
        assert_same_figures(figures(cache), figures(fed(keys, values)))

    def test_left_padding(self):
        keys, values = kv(16 + 64 * 5 + 32)
        padding = 100  # in the second tile
        keys[0, :, :padding], values[0, :, :padding] = keys[0, :, :1].clone(), values[0, :, :1].clone()
        for steps in (None, 60):
            cache = fed(keys, values, steps=steps, layers=1)
            first = padding + SMALL.sink_length
            found, layer = figures(cache)[0], cache.layers[0]
            assert found[0, :, 0].isnan().all()  # nothing in it is read from there
            assert found[0, :, 1:].isfinite().all() and found[1].isfinite().all()
            begin, end = first, 16 + 64 * 2
            for side, given, read in ((0, keys, layer.keys), (1, values, layer.values)):
                expected = errors_of(given[0, :, begin:end], read[0, :, begin:end])
                expected[..., 4] += begin - (16 + 64)
                torch.testing.assert_close(found[0, :, 1, side, :5], expected.float(), rtol=1e-3, atol=2e-4)
            record = next(r for r in cache.report().records if r["side"] == "keys")
            assert record["tiles"] == 9
