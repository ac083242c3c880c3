"""A monitor changes nothing of the cache, and costs nothing until a tile is packed."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvarn_hf import KVarNCache, KVarNConfig, ops
from kvarn_hf.monitor.log import FIGURES
from kvarn_hf.ops import dispatch
from tests import models_tiny as tiny
from tests.monitor.common import BATCH, DIM, HEADS, SMALL, assert_same_figures, fed, figures, kv, stored
from tests.operations import OperationCount


class TestSameCache:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_what_is_stored_and_read_is_bit_equal(self, dtype):
        keys, values = kv(600, dtype=dtype)
        watched, plain = (fed(keys, values, steps=90, monitor=monitor) for monitor in (True, False))
        assert all(torch.equal(a, b) for a, b in zip(stored(watched), stored(plain), strict=True))
        for a, b in zip(watched.layers, plain.layers, strict=True):
            assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        assert plain.layers[0].log is None
        assert watched.memory_footprint() - plain.memory_footprint() == sum(
            layer.log.figures.numel() * 4 for layer in watched.layers
        )

    @pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "deepseek_v3"])
    def test_generate_gives_the_same_tokens(self, name):
        model, ids = tiny.model(name), tiny.prompt(2, 150)

        def run(monitor, **kwargs):
            cache = KVarNCache(model.config, SMALL, monitor=monitor)
            tokens = model.generate(ids, past_key_values=cache, max_new_tokens=70, do_sample=False, **kwargs)
            return tokens, cache

        tokens, cache = run(True)
        assert torch.equal(tokens, run(False)[0])
        records = cache.report().records
        full = [i for i, layer in enumerate(cache.layers) if getattr(layer, "log", None) is not None]
        assert sorted({r["layer"] for r in records}) == full
        assert all(r["tiles"] == 2 * cache.report()["tiles"] for r in records)

    def test_beam_search(self):
        model, ids = tiny.model("llama"), tiny.prompt(2, 150)
        caches = [KVarNCache(model.config, SMALL, monitor=monitor) for monitor in (True, False)]
        beams = [
            model.generate(ids, past_key_values=c, max_new_tokens=90, num_beams=3, do_sample=False) for c in caches
        ]
        assert torch.equal(*beams)
        # Whatever was reordered: the figures are those of the tokens that each row holds now.
        layer = caches[0].layers[0]
        fresh = KVarNCache(model.config, SMALL, monitor=True)
        rows = torch.stack([layer.log.held(layer.state.count)[row, 0, 0, 0, :4] for row in range(6)])
        assert rows.isfinite().all()
        with torch.no_grad():
            model(ids.repeat_interleave(3, 0), past_key_values=fresh)
        held = fresh.layers[0].log.held(1)[:, 0, 0, 0, :4]
        torch.testing.assert_close(rows, held, rtol=1e-3, atol=1e-5)  # the first tile is of the prompt alone

    def test_a_step_that_packs_nothing_costs_nothing(self):
        counts = []
        for monitor in (True, False):
            cache = fed(*kv(300), monitor=monitor)
            with OperationCount() as operations:
                fed(*kv(1, seed=1), cache=cache)
            counts.append(operations.count)
        assert counts[0] == counts[1] > 0

    def test_the_tiles_of_a_step_are_looked_at_together(self):
        """A decode step's work is in its operations: of those that the monitor adds, few are there for every layer."""
        due = SMALL.sink_length + 3 * SMALL.tile_size + SMALL.residual_length
        added = {}
        for layers in (2, 12):
            counts = []
            for monitor in (True, False):
                cache = fed(*kv(due - 3), monitor=monitor, layers=layers)
                for seed in (1, 2):  # the last layer is known once the second pass begins
                    fed(*kv(1, seed=seed), cache=cache, layers=layers)
                with OperationCount() as operations:
                    fed(*kv(1, seed=3), cache=cache, layers=layers)
                assert cache.layers[0].state.count == 3
                assert not cache.unseen.waiting
                counts.append(operations.count)
            added[layers] = counts[0] - counts[1]
        per_layer = (added[12] - added[2]) / 10
        assert added[2] > 100 and per_layer < 0.15 * added[2]

    def test_a_tile_of_inference_mode_is_looked_at_outside_of_it(self):
        """After the first pass nobody knows that it has ended, until somebody asks."""
        keys, values = kv(SMALL.sink_length + SMALL.tile_size + SMALL.residual_length)
        cache = KVarNCache(kvarn=SMALL, monitor=True)
        with torch.inference_mode():
            fed(keys, values, cache=cache)
        assert cache.unseen.waiting
        assert cache.report().records[0]["tiles"] == BATCH
        assert_same_figures(figures(cache), figures(fed(keys, values)))

    def test_a_tile_that_waits_does_not_outlive_a_crop(self):
        (keys, values), (others, more) = (
            kv(SMALL.sink_length + SMALL.tile_size + SMALL.residual_length),
            kv(400, seed=5),
        )
        layer, fresh = (KVarNCache(kvarn=SMALL, monitor=True)._new_layer() for _ in range(2))
        layer.update(keys, values)
        layer.crop(-layer.get_seq_length())
        for one in (layer, fresh):
            one.update(others, more)
        assert_same_figures([layer.log.held(layer.state.count)], [fresh.log.held(fresh.state.count)])

    def test_layers_that_differ_are_looked_at_apart(self):
        keys, values = kv(200)
        wide = [torch.randn(BATCH, HEADS, 200, 2 * DIM) for _ in range(2)]
        one, other, both = (KVarNCache(kvarn=SMALL, monitor=True) for _ in range(3))
        for token in range(200):
            step = slice(token, token + 1)
            for cache, layers in ((one, [(keys, values)]), (other, [wide]), (both, [(keys, values), wide])):
                for layer, (k, v) in enumerate(layers):
                    cache.update(k[:, :, step], v[:, :, step], layer)
        assert_same_figures(figures(both), [*figures(one), *figures(other)])

    def test_nothing_waits_for_the_device(self):
        class NoHost(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                assert function.overloadpacket not in (
                    torch.ops.aten._local_scalar_dense,
                    torch.ops.aten.nonzero,
                    torch.ops.aten.is_nonzero,
                )
                return function(*args, **(kwargs or {}))

        keys, values = kv(300)
        values[0, :, :100], keys[0, :, :100] = values[0, :, :1].clone(), keys[0, :, :1].clone()
        cache = fed(keys, values, layers=1)
        before = cache.layers[0].state.appended(*kv(70, seed=1))
        after = ops.commit(before)
        assert after.count > before.count and after.padding is not None
        with NoHost():
            cache.layers[0].log.observe(before, after)

    @pytest.mark.gpu
    @pytest.mark.parametrize("preset", ["kvarn_k4v2_g64", "kvarn_k2v2_g64", "kvarn_k8v4_g64"])
    def test_on_a_gpu_nothing_waits_and_figures_are_those_of_the_cpu(self, preset):
        config = KVarNConfig.from_preset(preset, sink_length=16, residual_length=32)
        keys, values = kv(16 + 64 * 6 + 32, dtype=torch.bfloat16)
        keys[:, 1, :, 3] *= 30
        keys[0, :, :100], values[0, :, :100] = keys[0, :, :1].clone(), values[0, :, :1].clone()  # left padding
        cache = fed(keys[:, :, :300].cuda(), values[:, :, :300].cuda(), layers=1, config=config)
        log = cache.layers[0].log
        before = cache.layers[0].state.appended(keys[:, :, 300:].cuda(), values[:, :, 300:].cuda())
        after = ops.commit(before)
        assert after.count == 6 > before.count
        log.observe(before, after)  # the first time loads what it needs
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            log.observe(before, after)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        on_cpu = figures(fed(keys, values, layers=1, config=config))[0]
        found = log.held(6)
        names = ("relative_error", "magnitude_error", "direction_error", "worst_token_error")
        names += ("imbalance_before", "imbalance_after", "prescale")
        for name in names:
            actual, expected = (f[..., FIGURES.index(name)] for f in (found, on_cpu))
            torch.testing.assert_close(actual, expected, rtol=5e-2, atol=1e-3, equal_nan=True)

    def test_a_failed_update_loses_nothing(self, monkeypatch):
        keys, values = kv(300)
        cache = fed(keys, values)
        before = figures(cache)
        more = kv(200, seed=1)
        quantize, calls = ops.quantize, []

        def fails_in_the_second_layer(*args):
            calls.append(1)
            if len(calls) == 2:
                raise MemoryError
            quantize(*args)

        monkeypatch.setattr(dispatch, "quantize", fails_in_the_second_layer)
        with pytest.raises(MemoryError):
            fed(*more, cache=cache)
        monkeypatch.undo()
        assert_same_figures(figures(cache), before)
        fed(*more, cache=cache)
        both = [torch.cat(pair, 2) for pair in zip((keys, values), more, strict=True)]
        assert_same_figures(figures(cache), figures(fed(*both)))
