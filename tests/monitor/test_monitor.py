"""The monitor: figures against a direct computation, through everything a cache can go through, and its warnings."""

import copy
import io
import json
import pickle
import warnings

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from kvarn_hf import KVarNCache, KVarNConfig, Monitor, MonitorWarning, ops
from kvarn_hf.bench import monitor as bench_monitor
from kvarn_hf.method.normalize import imbalance_trace, variance_normalize_published
from kvarn_hf.method.rotation import rotate
from kvarn_hf.monitor.log import FIGURES, SIDES
from tests import models_tiny as tiny

SMALL = KVarNConfig(tile_size=64, sink_length=16, residual_length=32)
BATCH, HEADS, DIM = 2, 2, 32


def kv(tokens, batch=BATCH, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, HEADS, tokens, DIM)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]


def fed(keys, values, steps=None, layers=2, config=SMALL, monitor=True, cache=None):
    cache = KVarNCache(kvarn=config, monitor=monitor) if cache is None else cache
    for part in zip(*(x.split(steps or x.shape[2], 2) for x in (keys, values)), strict=True):
        for layer in range(layers):
            cache.update(*part, layer)
    return cache


class Operations(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def stored(cache):
    return [tensor for layer in cache.layers for packed in layer.state.tiles.filled() for tensor in packed]


def figures(cache):
    return [layer.log.held(layer.state.count) for layer in cache.layers]


def assert_same_figures(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def errors_of(given, read):
    """Relative, magnitude, direction and worst token's error of tiles ``[..., tokens, channels]``, by definition."""
    given, read = given.double(), read.double()
    energy = given.square().sum((-2, -1))
    magnitude = (given.norm(dim=-1) - read.norm(dim=-1)).square().sum(-1)
    cosine = torch.nn.functional.cosine_similarity(given, read, dim=-1)
    direction = (2 * given.norm(dim=-1) * read.norm(dim=-1) * (1 - cosine)).sum(-1)
    worst, token = ((given - read).norm(dim=-1) / given.norm(dim=-1)).max(-1)
    relative = (given - read).norm(dim=(-2, -1)) / energy.sqrt()
    return torch.stack([relative, (magnitude / energy).sqrt(), (direction / energy).sqrt(), worst, token.double()], -1)


class TestFigures:
    @pytest.mark.parametrize("preset", ["kvarn_k4v2_g64", "kvarn_k2v4_g64"])
    @pytest.mark.parametrize("method", ["kvarn", "published", "hadamard", "rtn"])
    def test_errors_are_those_of_what_is_read(self, method, preset):
        config = KVarNConfig.from_preset(preset, sink_length=16, residual_length=32, method=method)
        keys, values = kv(16 + 64 * 5 + 40)
        keys[:, 1, :, 3] *= 20
        cache = fed(keys, values, config=config)
        for layer, found in zip(cache.layers, figures(cache), strict=True):
            assert found.shape == (BATCH, HEADS, 5, 2, len(FIGURES))
            for side, given, read in ((0, keys, layer.keys), (1, values, layer.values)):
                given, read = (x[:, :, 16 : 16 + 64 * 5].unflatten(2, (5, 64)) for x in (given, read))
                expected = errors_of(given, read).float()
                torch.testing.assert_close(found[..., side, :5], expected, rtol=1e-3, atol=2e-4)

    def test_imbalance_and_rounds(self):
        keys, values = kv(16 + 64 * 3 + 32)
        keys[:, 0, ::2] *= 5  # uneven tokens
        cache = fed(keys, values, layers=1)
        before, after, rounds = (
            figures(cache)[0][..., FIGURES.index(name)]
            for name in ("imbalance_before", "imbalance_after", "iterations")
        )
        assert (after < before).all()
        assert (before[:, 0, :, 0] > 1.2 * before[:, 1, :, 0]).all()
        assert ((rounds >= 1) & (rounds <= 5)).all()
        tile = rotate(values[:, :, 16:].unflatten(2, (-1, 32))[:, :, :6].reshape(BATCH, HEADS, 3, 64, DIM))
        trace = imbalance_trace(tile, 2)
        torch.testing.assert_close(before[..., 1], trace[..., 0])
        torch.testing.assert_close(after[..., 1], trace[..., 2])

    def test_prescale_names_the_outlier_head(self):
        keys, values = kv(400)
        keys[:, 1, :, 5] *= 100
        records = [r for r in fed(keys, values).report().records if r["side"] == "keys"]
        assert {(r["layer"], r["head"]): r["prescale"] > 20 for r in records} == {
            (0, 0): False,
            (0, 1): True,
            (1, 0): False,
            (1, 1): True,
        }

    @pytest.mark.filterwarnings("ignore::kvarn_hf.MonitorWarning")
    def test_worst_token_and_head_are_found(self):
        keys, values = kv(16 + 64 * 4 + 32)
        position = 16 + 2 * 64 + 37
        # A token along one rotated channel, in values of 2 bits: the grid of its row has one far value.
        values[1, 0, position] = 50 * rotate(torch.eye(DIM))[7] + values[1, 0, position]
        keys[:, 1, 16 + 64 : 16 + 128] = rotate(spiked(seed=1))
        report = fed(keys, values, layers=1).report()
        worst = max((r for r in report.records if r["side"] == "keys"), key=lambda r: r["largest_error"])
        assert worst["head"] == 1
        tiles = [t for t in report.tile_records if t["side"] == "keys"]
        assert {(t["head"], t["tile"]) for t in sorted(tiles, key=lambda t: -t["relative_error"])[:BATCH]} == {(1, 1)}
        record = next(r for r in report.records if (r["side"], r["head"]) == ("values", 0))
        read = errors_of(values[:, 0, 16:272], fed(keys, values, layers=1).layers[0].values[:, 0, 16:272])
        row = int(read[:, 3].argmax())
        assert (record["worst_row"], record["worst_token"]) == (row, 16 + int(read[row, 4]))
        assert record["worst_token_error"] == pytest.approx(read[row, 3].item(), rel=1e-3)

    def test_every_third_tile(self):
        keys, values = kv(16 + 64 * 8 + 32)
        every, third = fed(keys, values).report().tile_records, fed(keys, values, monitor=3).report().tile_records
        assert {record["tile"] for record in third} == {0, 3, 6}
        assert third == [record for record in every if record["tile"] % 3 == 0]
        assert_same_figures(figures(fed(keys, values, steps=50, monitor=3)), figures(fed(keys, values, monitor=3)))

    def test_a_prompt_in_parts(self, monkeypatch):
        keys, values = kv(16 + 64 * 9 + 32)
        whole = figures(fed(keys, values, monitor=2))
        monkeypatch.setattr("kvarn_hf.monitor.log._CHUNK_ELEMENTS", 2 * BATCH * HEADS * 64 * DIM)
        assert_same_figures(figures(fed(keys, values, monitor=2)), whole)

    def test_broken_and_huge_tokens(self):
        keys, values = kv(16 + 64 * 2 + 32)
        clean = figures(fed(keys, values, layers=1))[0]
        keys[0, 0, 40] = torch.nan
        keys[1, 0] *= 2.0**12
        keys[1, 1] *= 2.0**100  # more than the scales can hold, and its square more than float32 can
        values[1, 1] = 0
        found = figures(fed(keys, values, layers=1))[0]
        assert found.isfinite().all()
        torch.testing.assert_close(found[0, 1], clean[0, 1])
        torch.testing.assert_close(found[1, 0, :, 0], clean[1, 0, :, 0], rtol=1e-3, atol=1e-4)
        assert (found[1, 1, :, 0, 0] > 0.5).all()
        assert (found[1, 1, :, 1, :4] == 0).all()


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
            with Operations() as operations:
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
                with Operations() as operations:
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
        after = before.committed()
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
        after = before.committed()
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

        monkeypatch.setattr(ops, "quantize", fails_in_the_second_layer)
        with pytest.raises(MemoryError):
            fed(*more, cache=cache)
        monkeypatch.undo()
        assert_same_figures(figures(cache), before)
        fed(*more, cache=cache)
        both = [torch.cat(pair, 2) for pair in zip((keys, values), more, strict=True)]
        assert_same_figures(figures(cache), figures(fed(*both)))


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


def spiked(seed, rate=0.05):
    """A tile that no scale per token or channel makes even: one entry in twenty is thirty times the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, DIM, generator=generator)
    return torch.where(torch.rand(64, DIM, generator=generator) < rate, 30 * x, x)


def chained():
    """A tile that evens out slowly: a channel shares tokens with the next one alone, and is weaker there."""
    token, channel = torch.arange(64)[:, None] // 2, torch.arange(DIM)
    sign = torch.randint(0, 2, (64, DIM), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    return sign * ((token == channel) + 3.0 * (token + 1 == channel))


class TestWarnings:
    def test_ordinary_tiles_raise_none(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fed(*kv(2000, dtype=torch.bfloat16)).report()

    def test_error_far_from_the_history_is_named_once(self):
        keys, values = kv(16 + 64 * 12 + 32)
        cache = KVarNCache(kvarn=SMALL, monitor=True)
        cache.update(keys, values, 0)
        keys[1, 1, 16 + 64 * 9 : 16 + 64 * 10] = rotate(spiked(seed=1))
        cache.update(keys, values, 1)
        with pytest.warns(MonitorWarning) as caught:
            cache.report()
        assert len(caught) == 1
        message = str(caught[0].message)
        assert message.startswith(
            "layer 1, KV head 1, tile 9 (tokens 592 to 655, row 1): keys have a relative error of"
        )
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.report()  # once
            repr(cache), str(copy.deepcopy(cache).report())

    def test_seven_tiles_are_no_history(self):
        keys, values = kv(16 + 64 * 3 + 32)  # of two rows
        keys[1, 1, 16:80] = rotate(spiked(seed=1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fed(keys, values).report()

    def test_slow_normalization_is_named_once(self):
        keys, values = kv(16 + 64 * 3 + 32)
        values[0, 1, 16 + 64 : 16 + 128] = rotate(chained())
        values[1, 1, 16 + 128 : 16 + 192] = rotate(chained())
        cache = fed(keys, values, layers=1, monitor=Monitor(tolerance=0.005))
        with pytest.warns(MonitorWarning) as caught:
            cache.report()
        assert len(caught) == 1
        message = str(caught[0].message)
        expected = "layer 0, KV head 1, tile 1 (tokens 80 to 143, row 0): values still change after 10 rounds of"
        assert message.startswith(expected)
        assert message.endswith("more of its tiles too")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.report()
            fed(keys, values, layers=1, monitor=Monitor(max_iterations=60, tolerance=0.005)).report()

    def test_bounds_are_the_monitors(self):
        keys, values = kv(16 + 64 * 8 + 32)
        with pytest.warns(MonitorWarning, match="still change after 1 rounds"):
            fed(keys, values, monitor=Monitor(max_iterations=1, tolerance=1e-4)).report()
        with pytest.warns(MonitorWarning, match="relative error"):
            fed(keys, values, monitor=Monitor(error_factor=1.001)).report()


class TestReport:
    def test_prints_as_a_table_and_reads_as_a_dictionary(self):
        cache = fed(*kv(300))
        report = cache.report()
        assert report["packed_tokens"] == 192 and dict(report)["layers"] == 2
        out = io.StringIO()
        Console(file=out, width=160).print(report)
        for text in (out.getvalue(), str(report)):
            assert "300 tokens = 16 sink + 192 packed + 92 tail" in text
            for part in ("worst token", "imbalance", "keys", "values"):
                assert part in text
        record = next(r for r in report.records if r["side"] == "keys")
        assert {"layer", "head", "side", "tiles", "largest_error", "worst_row", *FIGURES} == set(record)
        assert len(report.records) == 2 * HEADS * 2
        assert len(report.tile_records) == 2 * HEADS * 2 * BATCH * 3

    def test_without_a_monitor_there_is_no_table(self):
        report = fed(*kv(300), monitor=False).report()
        assert report.records == report.tile_records == []
        assert "worst token" not in str(report) and "packed" in str(report)

    def test_to_pandas(self):
        pytest.importorskip("pandas")
        report = fed(*kv(300)).report()
        assert list(report.to_pandas()["side"].unique()) == list(SIDES)
        assert len(report.to_pandas(tiles=True)) == len(report.tile_records)

    def test_the_mean_of_heads_and_rows(self):
        report = fed(*kv(300)).report()
        for record in report.records:
            where = {name: record[name] for name in ("layer", "head", "side")}
            tiles = [t for t in report.tile_records if where.items() <= t.items()]
            mean = sum(t["relative_error"] for t in tiles) / len(tiles)
            assert record["relative_error"] == pytest.approx(mean)
            assert record["largest_error"] == pytest.approx(max(t["relative_error"] for t in tiles))
            worst = max(tiles, key=lambda t: t["worst_token_error"])
            assert (record["worst_token"], record["worst_row"]) == (worst["worst_token"], worst["row"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KVarNCache(monitor=0), "monitor must be True, False, a Monitor or an integer of at least 1, got 0"),
        (lambda: KVarNCache(monitor="yes"), "monitor must be .* got 'yes'"),
        (lambda: Monitor(every=0), "every must be an integer of at least 1, got 0"),
        (lambda: Monitor(every=True), "every must be an integer of at least 1, got True"),
        (lambda: Monitor(max_iterations=65), "max_iterations must be an integer from 1 to 64, got 65"),
        (lambda: Monitor(tolerance=0), "tolerance must be a number above 0, got 0"),
        (lambda: Monitor(error_factor=1), "error_factor must be a number above 1, got 1"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("monitor", [None, False])
def test_off(monitor):
    cache = fed(*kv(300), monitor=monitor)
    assert cache.monitor is None and cache.layers[0].log is None


class TestImbalanceTrace:
    TILE = torch.randn(3, 48, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 64)

    def test_is_that_of_the_published_states(self):
        trace = imbalance_trace(self.TILE, 6, relative=False)
        for rounds in range(1, 7):
            column, row = variance_normalize_published(self.TILE, rounds)
            even = self.TILE / column / row
            columns, rows = even.std(-2, correction=0), even.std(-1, correction=0)
            expected = sum(x.amax(-1) / x.amin(-1) for x in (columns, rows))
            torch.testing.assert_close(trace[..., : rounds + 1].amin(-1), expected, rtol=1e-4, atol=0)

    def test_is_relative_to_the_tiles_own_scale(self):
        unit = self.TILE / self.TILE.std((-2, -1), correction=0, keepdim=True)
        expected = imbalance_trace(unit, 4, relative=False)
        torch.testing.assert_close(imbalance_trace(self.TILE, 4), expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(imbalance_trace(1e-6 * self.TILE, 4), expected, rtol=1e-5, atol=0)
        assert (expected[..., 4] < expected[..., 0] / 2).all()

    def test_constant_and_zero_tiles(self):
        assert torch.equal(imbalance_trace(torch.zeros(8, 8), 2), torch.full((3,), 2.0))
        assert torch.equal(imbalance_trace(torch.ones(8, 8), 2), torch.full((3,), 2.0))


class TestBench:
    def test_steps_with_and_without(self, monkeypatch, tmp_path, capsys):
        made = []

        class Noted(KVarNCache):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                made.append(self)

        monkeypatch.setattr(bench_monitor, "KVarNCache", Noted)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        rows = bench_monitor.monitor("tiny", (300,), (2,), segments=1, device="cpu", out=tmp_path)
        assert [(row["batch"], row["monitor"]) for row in rows] == [(2, False), (2, True)]
        for row in rows:
            assert 0 < row["median_step_ms"] < row["packing_step_ms"]
        off, on = rows
        assert [cache.report()["tiles"] for cache in made] == [2, 2]  # a tile in each of two segments
        assert [{record["tiles"] for record in cache.report().records} for cache in made] == [set(), {4}]
        assert off["overhead"] == 0
        assert on["overhead"] == pytest.approx(on["step_ms"] / off["step_ms"] - 1)
        assert json.loads((tmp_path / "bench_monitor.json").read_text())["results"] == rows
        assert "300" in capsys.readouterr().out

    def test_unknown_shape(self):
        with pytest.raises(ValueError, match=r"shape must be of llama-3\.1-8b, tiny, got 'big'"):
            bench_monitor.monitor("big", device="cpu")
