"""The invariants of the cache: purity, exactness, rollback, batch operations, failures, memory, copies, bad input."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvarn_hf import KVarNCache, KVarNConfig, ops
from kvarn_hf.layers.growing import KVarNLayer
from tests import models_tiny as tiny
from tests.storage import held_bytes, held_storages

SMALL = KVarNConfig(tile_size=64, sink_length=16, residual_length=16)
HEADS, DIM = 2, 32
ROOT = Path(__file__).parents[2]


def kv(batch: int, length: int, *, heads=HEADS, key_dim=DIM, value_dim=None, dtype=torch.float32, seed=0):
    """Random keys and values ``[batch, heads, length, head_dim]``; every token has a few large channels, as keys do."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, heads, length, key_dim, generator=generator)
    keys[..., 3] *= 20
    values = torch.randn(batch, heads, length, value_dim or key_dim, generator=generator)
    return keys.to(dtype), values.to(dtype)


def filled(keys, values, sizes=None, config=SMALL, layers=1) -> KVarNCache:
    """A cache given those tokens in chunks of these sizes, the same in every layer."""
    cache = KVarNCache(kvarn=config)
    start = 0
    for size in sizes or [keys.shape[2]]:
        for layer_idx in range(layers):
            cache.update(keys[:, :, start : start + size], values[:, :, start : start + size], layer_idx)
        start += size
    assert start == keys.shape[2]
    return cache


def read(cache, layer_idx=0):
    layer = cache.layers[layer_idx]
    return layer.keys.clone(), layer.values.clone()


def same(a, b) -> bool:
    """Bit-equal, NaN included."""
    return all(
        x.dtype == y.dtype and torch.equal(x.nan_to_num(1e9), y.nan_to_num(1e9)) for x, y in zip(a, b, strict=True)
    )


def stored(layer: KVarNLayer) -> list[torch.Tensor]:
    """Everything that is held of the tokens."""
    state = layer.state
    tensors = [state.dense.keys, state.dense.values]
    for packed in state.tiles.filled():
        tensors += [t.float() for t in packed]
    if state.prescale is not None:
        tensors.append(state.prescale)
    if state.padding is not None:
        tensors += state.padding.tensors
    return tensors


def same_state(cache, other) -> bool:
    return len(cache.layers) == len(other.layers) and all(
        a.get_seq_length() == b.get_seq_length() and same(stored(a), stored(b))
        for a, b in zip(cache.layers, other.layers, strict=True)
    )


def random_chunks(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    sizes = []
    while length:
        sizes.append(min(length, int(torch.randint(1, 120, (1,), generator=generator))))
        length -= sizes[-1]
    return sizes


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


def count_quantize(monkeypatch) -> list[int]:
    """How many tokens each call of the quantizer got."""
    calls: list[int] = []
    quantize = ops.quantize

    def counted(keys, *args, **kwargs):
        calls.append(keys.shape[2])
        return quantize(keys, *args, **kwargs)

    monkeypatch.setattr(ops, "quantize", counted)
    return calls


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


class TestBatchOperations:
    @pytest.mark.parametrize("length", [10, 90, 200, 256, 300])
    def test_everything_moves_together(self, length, monkeypatch):
        keys, values = kv(4, length + 200)
        start = filled(keys[:, :, :length], values[:, :, :length], layers=2)
        calls = count_quantize(monkeypatch)
        rows = torch.tensor([3, 3, 0, 1])
        for operation, kept in (
            (lambda c: c.reorder_cache(rows), rows),
            (lambda c: c.batch_repeat_interleave(3), torch.arange(4).repeat_interleave(3)),
            (lambda c: c.batch_select_indices(torch.tensor([2, 0])), torch.tensor([2, 0])),
            (lambda c: c.batch_select_indices((1, 1, 3)), torch.tensor([1, 1, 3])),
            (lambda c: c.batch_select_indices([-1]), torch.tensor([3])),
            (lambda c: c.batch_select_indices(torch.tensor([True, False, False, True])), torch.tensor([0, 3])),
        ):
            cache = copy.deepcopy(start)
            operation(cache)
            for layer_idx in range(2):
                assert same(read(cache, layer_idx), [t[kept] for t in read(start, layer_idx)])
            assert not calls
            # What follows is packed as if the rows had always been there.
            for layer_idx in range(2):
                cache.update(keys[kept][:, :, length:], values[kept][:, :, length:], layer_idx)
            whole = filled(keys[kept], values[kept])
            assert same(read(cache), read(whole))
            calls.clear()

    def test_reordering_many_times(self):
        keys, values = kv(3, 300)
        cache = filled(keys[:, :, :200], values[:, :, :200])
        generator = torch.Generator().manual_seed(0)
        rows = torch.arange(3)
        for i in range(200, 300):
            beam = torch.randint(0, 3, (3,), generator=generator)
            cache.reorder_cache(beam)
            rows = rows[beam]
            keys, values = keys[beam], values[beam]
            cache.update(keys[:, :, i : i + 1], values[:, :, i : i + 1], 0)
        assert same(read(cache), read(filled(keys, values)))

    def test_selecting_frees_memory(self):
        keys, values = kv(8, 300)
        cache = filled(keys, values)
        cache.batch_select_indices([5])
        assert held_bytes(cache) == cache.memory_footprint()
        alone = filled(keys[5:6], values[5:6]).memory_footprint()
        assert cache.memory_footprint() <= 1.1 * alone

    def test_bad_indices(self):
        cache = filled(*kv(2, 200))
        before = read(cache)
        with pytest.raises(ValueError, match=r"indices must be one-dimensional, got shape \[1, 2\]"):
            cache.batch_select_indices(torch.tensor([[0, 1]]))
        for indices, message in (([0, 2], "rows from -2 to 1, got"), ([-3], "rows from -2"), ([0.9], "integers, got")):
            with pytest.raises(ValueError, match=f"indices must hold {message}"):
                cache.batch_select_indices(indices)
        for repeats in (0, -1, 1.5):
            with pytest.raises(ValueError, match=f"repeats must be an integer >= 1, got {repeats}"):
                cache.batch_repeat_interleave(repeats)
        for tokens in (1.5, -1.5, None):
            with pytest.raises(ValueError, match=f"tokens_to_remove must be an integer, got {tokens}"):
                cache.crop(tokens)
        assert same(read(cache), before)


class TestFailedUpdate:
    """Out of memory or an interrupt in any layer: every layer holds what it held, and generation goes on from there."""

    @staticmethod
    def failing(monkeypatch, error, nth):
        """The quantizer fails at its nth call from now on, after having written something."""
        quantize, calls = ops.quantize, []

        def fail(keys, values, prescale, tiles, *args):
            calls.append(1)
            quantize(keys, values, prescale, tiles, *args)
            if len(calls) > nth:
                for tensor in tiles.tensors:
                    if tensor.dtype == torch.float16:
                        tensor[:, :, tiles.count :] = torch.nan
                raise error

        monkeypatch.setattr(ops, "quantize", fail)

    @pytest.mark.parametrize(
        "error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()], ids=["oom", "ctrl-c"]
    )
    @pytest.mark.parametrize("nth", [0, 1, 2])
    @pytest.mark.parametrize("held", [0, 50, 159])
    @pytest.mark.parametrize("with_config", [True, False])
    def test_at_any_layer(self, monkeypatch, error, nth, held, with_config):
        model = tiny.build("llama", num_hidden_layers=3)
        ids = tiny.prompt(2, 250)
        cache, twin = (KVarNCache(model.config if with_config else None, SMALL) for _ in range(2))
        for c in (cache, twin):
            if held:
                tiny.forward(model, ids[:, :30], c)
                tiny.forward(model, ids[:, 30:held], c)
        with monkeypatch.context() as patch:
            self.failing(patch, error, nth)
            with pytest.raises(type(error)):
                tiny.forward(model, ids[:, held : held + 60] if held else ids[:, :200], cache)
        assert [layer.get_seq_length() for layer in cache.layers] == [held] * len(cache.layers)
        if held:
            assert same_state(cache, twin)
        logits = [tiny.forward(model, ids[:, held:], c) for c in (cache, twin)]
        assert torch.equal(*logits)
        assert same_state(cache, twin)
        more = [tiny.forward(model, tiny.prompt(2, 70, seed=5), c) for c in (cache, twin)]
        assert torch.equal(*more)

    @pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "qwen3_next", "deepseek_v3"])
    @pytest.mark.parametrize("held", [0, 150])
    def test_other_kinds_of_layers_too(self, monkeypatch, name, held):
        model, ids = tiny.model(name), tiny.prompt(1, 260)
        cache, twin = KVarNCache(model.config, SMALL), KVarNCache(model.config, SMALL)
        if held:
            for c in (cache, twin):
                tiny.forward(model, ids[:, :held], c)
        with monkeypatch.context() as patch:
            self.failing(patch, KeyboardInterrupt(), 0)
            with pytest.raises(KeyboardInterrupt):
                tiny.forward(model, ids[:, held : held + 100], cache)
        assert cache.get_seq_length() == held
        assert torch.equal(*(tiny.forward(model, ids[:, held:], c) for c in (cache, twin)))
        assert torch.equal(*(tiny.forward(model, ids[:, :7], c) for c in (cache, twin)))

    def test_with_skipped_layers(self, monkeypatch):
        model, ids = tiny.build("llama", num_hidden_layers=3), tiny.prompt(1, 200)
        caches = [KVarNCache(model.config, SMALL, skip_layers=[0]) for _ in range(2)]
        for c in caches:
            tiny.forward(model, ids[:, :60], c)
        with monkeypatch.context() as patch:
            self.failing(patch, MemoryError(), 1)
            with pytest.raises(MemoryError):
                tiny.forward(model, ids[:, 60:], caches[0])
        assert [layer.get_seq_length() for layer in caches[0].layers] == [60] * 3
        assert torch.equal(*(tiny.forward(model, ids[:, 60:], c) for c in caches))

    def test_nothing_is_remembered_after_a_pass(self):
        """What is needed to go back is let go when the pass is over."""
        model = tiny.build("llama", num_hidden_layers=3)
        cache = KVarNCache(model.config, SMALL)
        for size in (100, 1, 60, 40):
            tiny.forward(model, tiny.prompt(1, size), cache)
            assert held_bytes(cache) == cache.memory_footprint()


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

    def test_save_and_load_in_a_new_process(self, tmp_path):
        names, ids = ("llama", "gemma3", "deepseek_v3"), tiny.prompt(2, 260)
        caches = {name: KVarNCache(tiny.model(name).config, SMALL, skip_layers=[0]) for name in names}
        for name, cache in caches.items():
            tiny.forward(tiny.model(name), ids[:, :250], cache)
            cache.save(tmp_path / f"{name}.safetensors")
        code = (
            "import sys, torch\n"
            "torch.set_num_threads(1)\n"
            "from kvarn_hf import KVarNCache\n"
            "from tests import models_tiny as tiny\n"
            "for name in sys.argv[1:]:\n"
            "    cache = KVarNCache.load(f'{name}.safetensors')\n"
            "    logits = tiny.forward(tiny.model(name), tiny.prompt(2, 260)[:, 250:], cache)\n"
            "    torch.save(logits, f'{name}.pt')\n"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        subprocess.run([sys.executable, "-c", code, *names], check=True, env=environment, cwd=tmp_path)
        for name, cache in caches.items():
            expected = tiny.forward(tiny.model(name), ids[:, 250:], cache)
            assert torch.equal(torch.load(tmp_path / f"{name}.pt"), expected)

    def test_loading_something_else(self, tmp_path):
        save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
        with pytest.raises(
            ValueError, match=r"path must be a file written by KVarNCache.save, got '.*other.safetensors'"
        ):
            KVarNCache.load(tmp_path / "other.safetensors")

    def test_bad_paths_and_devices(self, tmp_path):
        (tmp_path / "junk").write_bytes(b"junk")
        with pytest.raises(ValueError, match=r"path must be a file written by KVarNCache.save, got '.*junk'"):
            KVarNCache.load(tmp_path / "junk")
        filled(*kv(1, 20)).save(tmp_path / "cache")
        with pytest.raises(ValueError, match=r"device must be one of this machine's .* got 'cuda:99'"):
            KVarNCache.load(tmp_path / "cache", device="cuda:99")
        with pytest.raises(ValueError, match=r"path must lie in a folder that exists, got '.*nowhere/cache'"):
            filled(*kv(1, 20)).save(tmp_path / "nowhere" / "cache")

    def test_loading_an_older_file(self, tmp_path):
        save_file({"x": torch.zeros(1)}, tmp_path / "old.safetensors", metadata={"format": "kvarn_hf cache 1"})
        with pytest.raises(ValueError, match=r"got '.*old.safetensors' in the older 'kvarn_hf cache 1'"):
            KVarNCache.load(tmp_path / "old.safetensors")

    def test_a_linear_layer_cannot_be_saved(self, tmp_path):
        model = tiny.model("qwen3_next")
        cache = KVarNCache(model.config, SMALL)
        tiny.forward(model, tiny.prompt(1, 20), cache)
        with pytest.raises(ValueError, match="got a LinearAttentionLayer"):
            cache.save(tmp_path / "cache.safetensors")


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


class TestNumbers:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_dtypes(self, dtype):
        keys, values = kv(1, 300)
        held = read(filled(keys.to(dtype), values.to(dtype)))
        expected = read(filled(keys, values))
        for x, y, given in zip(held, expected, (keys, values), strict=True):
            assert x.dtype == dtype
            assert ((x.float() - given).norm() - (y - given).norm()).abs() < 0.01 * given.norm()

    @pytest.mark.parametrize("size", [1e5, 1e-6])
    def test_huge_and_small_in_bf16(self, size):
        keys, values = (x * size for x in kv(1, 300, dtype=torch.bfloat16))
        for x, given in zip(read(filled(keys, values)), (keys, values), strict=True):
            assert x.isfinite().all()
            assert (x.float() - given.float()).norm() < 0.5 * given.float().norm()

    @pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e5])
    def test_constants(self, value):
        keys = torch.full((1, HEADS, 300, DIM), value)
        for x in read(filled(keys, keys)):
            assert (x - value).abs().max() <= 2e-3 * abs(value)

    @pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("method", ["kvarn", "published"])
    def test_a_broken_token_does_not_reach_others(self, broken, method):
        config = SMALL.replace(method=method)
        keys, values = kv(1, 300)
        clean_keys, clean_values = keys.clone(), values.clone()
        clean_keys[0, 0, 100], clean_values[0, 0, 100] = 0.0, 0.0  # what a broken token counts as
        keys[0, 0, 100, 5], values[0, 0, 100, 7] = broken, broken
        held, clean = read(filled(keys, values, config=config)), read(filled(clean_keys, clean_values, config=config))
        others = torch.arange(300) != 100
        for x, y in zip(held, clean, strict=True):
            assert torch.equal(x[:, :, others], y[:, :, others])
            assert torch.equal(x[:, 1], y[:, 1])
            assert not x[0, 0, 100].isfinite().all()  # and it does not look healthy

    def test_check_finite(self):
        cache = KVarNCache(kvarn=SMALL.replace(check_finite=True))
        keys, values = kv(1, 100)
        cache.update(keys, values, 0)
        before = read(cache)
        bad = keys.clone()
        bad[0, 1, 3, 0] = bad[0, 1, 9, 0] = torch.nan
        with pytest.raises(ValueError, match="key_states must be finite, got NaN or infinity in 2 token vectors"):
            cache.update(bad, values, 0)
        with pytest.raises(ValueError, match="value_states must be finite"):
            cache.update(keys, bad, 0)
        assert same(read(cache), before)

    def test_autocast_does_not_reach_what_is_stored(self):
        keys, values = kv(2, 300)
        plain = read(filled(keys, values))
        with torch.autocast("cpu", torch.bfloat16):
            cache = filled(keys, values)
            assert same(read(cache), plain)
        assert same(read(cache), plain)

    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("length", [20, 200])
    def test_begun_in_inference_mode(self, length, padded):
        model = tiny.build("llama")
        ids = tiny.prompt(2, length + 80)
        ids[0, : length // 2 * padded] = 0
        logits = []
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            cache = KVarNCache(model.config, SMALL)
            with mode():
                model(input_ids=ids[:, :length], use_cache=True, **{tiny.CACHE_NAME: cache})
            with torch.no_grad():
                for i in range(length, length + 79):
                    model(input_ids=ids[:, i : i + 1], use_cache=True, **{tiny.CACHE_NAME: cache})
            logits.append(model(input_ids=ids[:, -1:], use_cache=True, **{tiny.CACHE_NAME: cache}).logits)
            logits[-1].sum().backward()
        assert torch.equal(logits[0], logits[1])
        assert torch.equal(logits[0], logits[2])

    def test_gradients_pass_and_nothing_of_the_graph_is_stored(self):
        model = tiny.build("llama")
        cache = KVarNCache(model.config, SMALL)
        for _ in range(3):
            out = model(input_ids=tiny.prompt(1, 90), use_cache=True, **{tiny.CACHE_NAME: cache})
            out.logits.sum().backward()
        assert model.model.layers[0].self_attn.k_proj.weight.grad.norm() > 0
        assert all(not t.requires_grad for layer in cache.layers for t in layer.state.tensors)
        assert not any(x.requires_grad for x in read(cache))
        copy.deepcopy(cache)


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


def test_emptied_after_batch_operations():
    """Rows that share their tiles have tiles of their own again once the cache has been emptied and refilled."""
    cache = KVarNCache(kvarn=KVarNConfig(tile_size=64, sink_length=8, residual_length=8))
    cache.update(torch.randn(1, 2, 200, 16), torch.randn(1, 2, 200, 16), 0)
    cache.batch_repeat_interleave(3)
    cache.crop(-200)
    keys, values = torch.randn(3, 2, 200, 16), torch.randn(3, 2, 200, 16)
    cache.update(keys, values, 0)
    fresh = KVarNCache(kvarn=cache.kvarn)
    fresh.update(keys, values, 0)
    assert torch.equal(cache.layers[0].keys, fresh.layers[0].keys)
    assert torch.equal(cache.layers[0].values, fresh.layers[0].values)
