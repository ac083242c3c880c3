"""What people hit with quantized KV caches elsewhere, one test or more for each: how it is here.

Numbers are those of the list the cases come from; each docstring names the symptom.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from kvarn_hf import PRESETS, KVarNCache, KVarNConfig, ops
from kvarn_hf.layers.growing import KVarNLayer
from kvarn_hf.method import packing
from tests import models_tiny as tiny
from tests.storage import held_bytes

SMALL = KVarNConfig(tile_size=64, sink_length=16, residual_length=16)
ALL_SINK = KVarNConfig(sink_length=100_000)


def random_kv(*shape: int, value_dim: int | None = None, seed: int = 0, **kwargs):
    """Random keys and values, ``[batch, heads, tokens, head_dim]``."""
    torch.manual_seed(seed)
    return torch.randn(*shape, **kwargs), torch.randn(*shape[:3], value_dim or shape[3], **kwargs)


def filled(keys, values, config=SMALL, layers=1):
    cache = KVarNCache(kvarn=config)
    for layer_idx in range(layers):
        cache.update(keys, values, layer_idx)
    return cache


def read(cache, layer_idx=0):
    return cache.layers[layer_idx].keys.clone(), cache.layers[layer_idx].values.clone()


def relative_error(x, given) -> float:
    return ((x.float() - given.float()).norm() / given.float().norm()).item()


def generate(model, ids, cache, new, **kwargs):
    # The mask is how generate() tells a whole sequence from its new tokens alone.
    inputs = {"attention_mask": torch.ones_like(ids), tiny.CACHE_NAME: cache}
    return model.generate(ids, **inputs, max_new_tokens=new, **{"do_sample": False, **kwargs})


def codes(layer: KVarNLayer):
    return [packed.codes for packed in layer.state.tiles.filled()]


# --- 1: beam search reorders the tail but not the packed part, or indexes an empty tail ---


@pytest.mark.parametrize("length", [256, 300])
@pytest.mark.parametrize("residual", [0, 16])
def test_01_every_region_follows_beam_idx(length, residual, monkeypatch):
    keys, values = random_kv(4, 2, length, 32)
    mark = torch.arange(1.0, 5.0).reshape(4, 1, 1, 1) * 10
    cache = filled(keys + mark, values + mark, SMALL.replace(sink_length=0, residual_length=residual))
    before = read(cache)
    monkeypatch.setattr(ops, "quantize", lambda *args: pytest.fail("quantized again"))
    cache.reorder_cache(torch.tensor([3, 3, 0, 1]))
    for x, y in zip(read(cache), before, strict=True):
        assert torch.equal(x, y[[3, 3, 0, 1]])
        assert torch.allclose(x.mean((1, 2, 3)), mark[[3, 3, 0, 1]].flatten(), atol=0.5)


def test_01_beam_search_past_two_flushes():
    model = tiny.model("llama")
    cache = KVarNCache(model.config, SMALL)
    assert generate(model, tiny.prompt(2, 90), cache, 75, num_beams=3).shape == (2, 165)
    assert cache.layers[0].state.count == 2


# --- 2: refused or wrong with sliding-window models ---


def test_02_windows_stay_windows():
    model, ids = tiny.model("gemma3"), tiny.prompt(1, 300)
    assert model.config.sliding_window == 16
    cache = KVarNCache(model.config, SMALL)
    assert generate(model, ids, cache, 40).shape == (1, 340)
    lengths = [layer.keys.shape[2] for layer in cache.layers]
    assert lengths == [15, 339, 15]
    assert cache.layers[1].state.count == 4
    dense = generate(model, ids, DynamicCache(config=model.config), 40)
    assert torch.equal(generate(model, ids, KVarNCache(model.config, ALL_SINK), 40), dense)


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


# --- 4: decoding slows with length because every step walks over what is held ---


class OperationCount(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


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


# --- 6: head_dim 80, 96 or 192 crashes with an opaque error ---


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
def test_06_head_dims(dim):
    keys, values = random_kv(1, 2, 300, dim)
    for x, given in zip(read(filled(keys, values, SMALL.replace(value_bits=4))), (keys, values), strict=True):
        assert x.shape == given.shape
        assert 0 < relative_error(x, given) < 0.15


@pytest.mark.parametrize("dim", [30, 100, 2048])
def test_06_other_head_dims_are_named(dim):
    with pytest.raises(ValueError, match=f"head_dim of key_states must be a multiple of 8 from 8 to 1024, got {dim}"):
        filled(*random_kv(1, 1, 10, dim))


def test_06_phi3():
    model = tiny.model("phi3")
    cache = KVarNCache(model.config, SMALL)
    assert generate(model, tiny.prompt(1, 10), cache, 200).shape == (1, 210)
    assert cache.layers[0].keys.shape[3] == 96
    assert cache.layers[0].state.count == 2


# --- 7: one head_dim assumed for the whole model, or hidden_size / heads ---


def test_07_head_dim_is_read_from_the_tensors():
    cache = KVarNCache(kvarn=SMALL)
    pairs = random_kv(1, 2, 300, 256), random_kv(1, 1, 300, 512)
    for layer_idx, pair in enumerate(pairs):
        cache.update(*pair, layer_idx)
    for layer_idx, pair in enumerate(pairs):
        assert all(relative_error(x, y) < 0.5 for x, y in zip(read(cache, layer_idx), pair, strict=True))


def test_07_qwen3():
    model = tiny.model("qwen3")
    assert model.config.head_dim != model.config.hidden_size // model.config.num_attention_heads
    cache = KVarNCache(model.config, SMALL)
    generate(model, tiny.prompt(1, 200), cache, 20)
    assert cache.layers[0].keys.shape == (1, 2, 219, 128)
    assert cache.layers[0].state.count == 2


# --- 8: head_dims of keys and values differ ---


def test_08_keys_and_values_have_layouts_of_their_own():
    keys, values = random_kv(1, 4, 300, 192, value_dim=128)
    held = read(filled(keys, values, SMALL.replace(value_bits=4)))
    assert all(relative_error(x, y) < 0.15 for x, y in zip(held, (keys, values), strict=True))


def test_08_deepseek_v3():
    model = tiny.model("deepseek_v3")
    cache = KVarNCache(model.config, SMALL)
    assert generate(model, tiny.prompt(1, 240), cache, 40).shape == (1, 280)
    layer = cache.layers[0]
    assert layer.state.count == 3
    assert layer.keys.shape[3] != layer.values.shape[3]
    assert layer.state.config.value_bits == 8  # they are rotary keys


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


# --- 12: options are changed; a model with few layers gets as many as the one before ---


def test_12_options_are_never_changed():
    options = KVarNConfig(tile_size=64, sink_length=16, residual_length=16)
    before = options.to_dict()
    for layers in (2, 4, 2):
        model = tiny.build("llama", num_hidden_layers=layers)
        for config in (model.config, None):
            cache = KVarNCache(config, options)
            generate(model, tiny.prompt(1, 100), cache, 3)
            assert len(cache.layers) == layers
    assert options.to_dict() == before
    with pytest.raises(AttributeError):
        options.key_bits = 2


# --- 13: hybrid linear-attention models fail ---


def test_13_only_attention_layers_are_quantized():
    model = tiny.model("qwen3_next")
    cache = KVarNCache(model.config, SMALL)
    assert generate(model, tiny.prompt(1, 300), cache, 50).shape == (1, 350)
    assert [isinstance(layer, KVarNLayer) for layer in cache.layers] == [False, False, False, True]
    assert cache.layers[3].state.count == 4


# --- 14: learned sinks and windows ignored ---


@pytest.mark.parametrize("implementation", ["eager", "kvarn"])
def test_14_learned_sinks_are_honoured(implementation):
    model = tiny.build("gpt_oss")
    assert (model.config.head_dim, model.config.sliding_window) == (64, 32)
    ids, next_ids = tiny.prompt(1, 200), tiny.prompt(1, 1, seed=1)

    def logits(cache, attention):
        model.set_attn_implementation("eager")
        tiny.forward(model, ids, cache)
        model.set_attn_implementation(attention)
        return tiny.forward(model, next_ids, cache)

    wide = SMALL.replace(key_bits=8, value_bits=8)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(3.0)
        dense = logits(DynamicCache(config=model.config), "eager")
        quantized = logits(KVarNCache(model.config, wide), implementation)
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
        without = logits(DynamicCache(config=model.config), "eager")
    assert relative_error(quantized, dense) < 0.05 * relative_error(without, dense)


# --- 15: a mask of two bits on wider codes; asymmetric settings without effect ---


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_15_every_code_round_trips(bits):
    every = torch.arange(64 * 32, dtype=torch.int64).mul_(7).remainder_(2**bits).to(torch.uint8).reshape(1, 64, 32)
    assert every.unique().numel() == 2**bits
    assert torch.equal(packing.unpack_keys(packing.pack_keys(every, bits), bits), every)
    assert torch.equal(packing.unpack_values(packing.pack_values(every, bits), bits), every)


def test_15_value_bits_change_values_alone():
    keys, values = random_kv(1, 2, 300, 64)
    caches = [filled(keys, values, SMALL.replace(value_bits=bits)) for bits in (2, 3, 4, 8)]
    for cache in caches[1:]:
        assert torch.equal(codes(cache.layers[0])[0], codes(caches[0].layers[0])[0])
    value_errors = [relative_error(read(cache)[1], values) for cache in caches]
    assert value_errors == sorted(value_errors, reverse=True)
    assert value_errors[0] > 20 * value_errors[-1]
    key_errors = [relative_error(read(filled(keys, values, SMALL.replace(key_bits=b)))[0], keys) for b in (2, 3, 4, 8)]
    assert key_errors == sorted(key_errors, reverse=True)


# --- 16: kernels launched on the wrong GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_16_kernels_run_where_the_tensors_are():
    assert torch.cuda.current_device() == 0
    keys, values = random_kv(2, 2, 700, 128)
    caches = []
    for device in ("cuda:1", "cuda:0"):
        cache = filled(keys.to(device), values.to(device), KVarNConfig())
        caches.append((cache, *cache.update(keys[:, :, :3].to(device), values[:, :, :3].to(device), 0)))
    assert torch.cuda.current_device() == 0
    (one, *read_one), (zero, *read_zero) = caches
    assert read_one[0].device == torch.device("cuda:1")
    assert all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(read_one, read_zero, strict=True))
    assert one.memory_footprint() == zero.memory_footprint()


# --- 17: import fails without Triton, or CPU tensors reach a kernel ---


def test_17_works_without_triton():
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch\n"
        "from kvarn_hf import KVarNCache\n"
        "cache = KVarNCache()\n"
        "x = torch.randn(1, 2, 640, 64)\n"
        "cache.update(x, x, 0)\n"
        "keys, values = cache.update(x[:, :, :1], x[:, :, :1], 0)\n"
        "assert cache.report()['tiles'] == 3 and keys.shape == values.shape == (1, 2, 641, 64)\n"
        "assert 'kvarn_kernels' not in sys.modules\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_17_cpu_tensors_never_reach_a_kernel(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvarn_kernels", None)  # importing it fails
    assert not ops.uses_kernels(torch.device("cpu"))
    keys, values = random_kv(2, 2, 300, 64)
    cache = filled(keys, values)
    cache.update(keys[:, :, :1], values[:, :, :1], 0)
    assert cache.get_seq_length() == 301


# --- 18: old GPUs: PTX as the error text ---


@pytest.mark.gpu
@pytest.mark.parametrize("missing", ["capability", "triton"])
def test_18_old_gpus_fall_back_with_one_warning(monkeypatch, missing):
    keys, values = random_kv(1, 2, 600, 64, device="cuda", dtype=torch.bfloat16)
    expected = read(filled(keys.cpu(), values.cpu(), KVarNConfig()))
    if missing == "capability":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (7, 5))
    else:
        monkeypatch.setitem(sys.modules, "triton", None)
    ops._kernels_run_on.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            held = read(filled(keys, values, KVarNConfig(), layers=3))
            read(filled(keys, values, KVarNConfig()))
        messages = [str(w.message) for w in caught if "KVarN" in str(w.message)]
        assert len(messages) == 1
        assert ("has 7.5" if missing == "capability" else "Triton is not installed") in messages[0]
    finally:
        ops._kernels_run_on.cache_clear()
    assert all(relative_error(x.cpu(), y) < 0.01 for x, y in zip(held, expected, strict=True))


# --- 19: non-contiguous keys and values give other codes ---


def test_19_strides_do_not_matter():
    keys, values = (x.transpose(1, 2) for x in random_kv(1, 300, 4, 128))
    assert not keys.is_contiguous()
    cache, other = filled(keys, values), filled(keys.contiguous(), values.contiguous())
    assert all(torch.equal(x, y) for x, y in zip(codes(cache.layers[0]), codes(other.layers[0]), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(read(cache), read(other), strict=True))


# --- 20: a compiled forward recompiles at every flush ---


def test_20_what_grows_is_not_advertised_as_compileable():
    model = tiny.model("llama")
    cache = KVarNCache(model.config)
    assert not cache.is_compileable
    tiny.forward(model, tiny.prompt(1, 10), cache)
    assert not cache.is_compileable


# --- 21: gains shown against a baseline without sinks and tail ---


@pytest.mark.parametrize("method", ["rtn", "hadamard", "published"])
def test_21_baselines_have_the_same_regions_and_bytes(method):
    keys, values = random_kv(1, 2, 300, 64)
    ours, baseline = filled(keys, values), filled(keys, values, SMALL.replace(method=method))
    for key in ("sink_tokens", "packed_tokens", "tail_tokens", "tiles"):
        assert ours.report()[key] == baseline.report()[key]
    prescale = ours.layers[0].state.prescale
    assert ours.memory_footprint() == baseline.memory_footprint() + prescale.untyped_storage().nbytes()
    for x, given in zip(read(baseline), (keys, values), strict=True):
        assert torch.equal(x[:, :, :16], given[:, :, :16])
        assert torch.equal(x[:, :, -16:], given[:, :, -16:])


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


# --- 23: Qwen2.5's huge key bias destroys the output ---


def test_23_a_huge_key_bias_is_no_trouble():
    """One RoPE pair with a bias eighty times the other channels' deviation, as in Qwen2.5."""
    model = tiny.build("qwen2", head_dim=64, initializer_range=0.1)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            states = layer.input_layernorm(model.model.embed_tokens(tiny.prompt(1, 200)))
            deviation = attention.k_proj(states).std()
            pair = [0, 32]  # turned by the rotary embedding many times in a tile: no zero point can hold it
            attention.k_proj.bias.view(2, 64)[:, pair] = 80 * deviation
            # Queries hardly use the pair: it serves as a constant.
            attention.q_proj.weight.view(4, -1, 64)[:, pair] *= 0.02
    ids = tiny.prompt(1, 640)
    logits = {}
    for name in ("dense", "kvarn", "published"):
        cache = (
            DynamicCache(config=model.config)
            if name == "dense"
            else KVarNCache(model.config, SMALL.replace(method=name))
        )
        tiny.forward(model, ids[:, :600], cache)
        logits[name] = tiny.forward(model, ids[:, 600:], cache).log_softmax(-1)
    dense = logits["dense"]
    divergence = {name: (dense.exp() * (dense - x)).sum(-1).mean() for name, x in logits.items()}
    assert divergence["kvarn"] < 0.01
    assert divergence["kvarn"] < 0.05 * divergence["published"]


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
    tiles = sum(t.untyped_storage().nbytes() for t in cache.layers[0].state.tiles.tensors)
    assert tiles == 2 * 2 * (config.key_tile_bytes(64) + config.value_tile_bytes(128))
    assert 8 * tiles == config.bits_per_element(64, 128) * (keys.numel() + values.numel())
