"""What people hit with quantized KV caches elsewhere: time and memory.

Numbers are those of the list the cases come from.
"""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch

from kvarn_hf import PRESETS, KVarNCache, KVarNConfig
from tests import models_tiny as tiny
from tests.cases.small import filled, random_kv
from tests.operations import OperationCount
from tests.storage import held_bytes

# --- 4: decoding slows with length because every step walks over what is held ---


@pytest.mark.parametrize("new", [1, 64], ids=["plain step", "with a flush"])
@pytest.mark.parametrize("batch", [1, 2])
def test_04_operations_per_step_do_not_depend_on_length(batch, new):
    counts = []
    for length in (1_000, 16_000):
        cache = filled(*random_kv(batch, 1, length, 32))
        before = cache.layers[0].state.count
        with OperationCount() as counter:
            cache.update(*random_kv(batch, 1, new, 32), 0)
        assert (cache.layers[0].state.count > before) == (new == 64)
        counts.append(counter.count)
    assert abs(counts[1] - counts[0]) <= 0.1 * counts[0]


@pytest.mark.gpu
@pytest.mark.parametrize("new", [1, 128], ids=["plain step", "with a flush"])
def test_04_launches_per_step_do_not_depend_on_length(new):
    counts = []
    # Both flushes find room in the arenas, which grow at ever fewer of them.
    for length in (2_500, 16_000):
        model = tiny.build("llama", hidden_size=256, num_hidden_layers=2).to("cuda", torch.bfloat16)
        cache = KVarNCache(model.config)
        keys, values = random_kv(1, 2, length, 64, device="cuda", dtype=torch.bfloat16)
        for layer_idx in range(2):
            cache.update(keys, values, layer_idx)
        ids = tiny.prompt(1, new).to("cuda")
        tiny.forward(model, ids, copy.deepcopy(cache))  # compiles the kernels
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            tiny.forward(model, ids, cache)
            torch.cuda.synchronize()
        counts.append(sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events()))
    assert counts[0] > 0
    assert abs(counts[1] - counts[0]) <= 0.1 * counts[0]


# --- 5: prefill needs more peak memory than the dense cache ---


@pytest.mark.gpu
def test_05_prefill_peak_is_not_above_the_dense_cache():
    keys, values = random_kv(1, 8, 32_768, 128, device="cuda", dtype=torch.bfloat16)
    filled(keys[:, :, :512], values[:, :, :512], KVarNConfig())  # compiles the kernels
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cache = KVarNCache()
    cache.update(keys, values, 0)
    torch.cuda.synchronize()
    dense = 2 * keys.numel() * keys.element_size()
    assert torch.cuda.max_memory_allocated() - before <= dense
    # The allocator rounds every tensor up to 512 bytes.
    assert torch.cuda.memory_allocated() - before <= cache.memory_footprint() + 512 * 16


# --- 20: a compiled forward recompiles at every flush ---


def test_20_what_grows_is_not_advertised_as_compileable():
    model = tiny.model("llama")
    cache = KVarNCache(model.config)
    assert not cache.is_compileable
    tiny.forward(model, tiny.prompt(1, 10), cache)
    assert not cache.is_compileable


# --- 24: bytes reported are not the bytes held ---


def test_24_reported_bytes_are_held_bytes():
    filled(*random_kv(1, 2, 512, 128), KVarNConfig())  # makes the constants that every cache shares
    gc.collect()

    def alive() -> dict[int, int]:
        storages = {}
        for x in gc.get_objects():
            if issubclass(type(x), torch.Tensor):
                # What torch.compile has left of other tests in this process has no data.
                with contextlib.suppress(RuntimeError, NotImplementedError):
                    storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return storages

    before = alive()
    keys, values = random_kv(1, 2, 4096, 128, dtype=torch.float16)
    cache = filled(keys, values, KVarNConfig())
    dense_bytes = keys.nbytes + values.nbytes
    del keys, values
    gc.collect()
    held = sum(size for pointer, size in alive().items() if pointer not in before)
    assert cache.memory_footprint() == held == held_bytes(cache) == cache.report()["bytes"]
    assert cache.report()["dense_bytes"] == dense_bytes


@pytest.mark.parametrize("steps", [[4096], [512] * 8, [4000] + [1] * 96])
def test_24_ratio_at_4096_tokens(steps):
    """At head_dim 128, with 128 sinks and at least 128 tokens of tail: 3.8 times fewer bytes than in float16."""
    keys, values = random_kv(1, 2, 4096, 128, dtype=torch.float16)
    cache = KVarNCache(kvarn="kvarn_k4v2_g128")
    for k, v in zip(keys.split(steps, 2), values.split(steps, 2), strict=True):
        cache.update(k, v, 0)
    assert (keys.nbytes + values.nbytes) / held_bytes(cache) >= 3.8


@pytest.mark.parametrize("preset", PRESETS)
def test_24_closed_form(preset):
    """Bytes per tile as the settings tell them."""
    config = KVarNConfig.from_preset(preset, sink_length=0, residual_length=0)
    keys, values = random_kv(1, 2, 2 * config.tile_size, 64, value_dim=128)
    cache = filled(keys, values, config)
    tiles = sum(t.untyped_storage().nbytes() for t in cache.layers[0].state.tiles.parts.values())
    assert tiles == 2 * 2 * (config.key_tile_bytes(64) + config.value_tile_bytes(128))
    assert 8 * tiles == config.bits_per_element(64, 128) * (keys.numel() + values.numel())
