"""``KVarNCache(max_cache_len=N)`` holds and answers what a cache that grows does."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from kvarn_hf import KVarNCache
from tests import models_tiny as tiny
from tests.generate import modes
from tests.layers.common import SMALL, assert_holds, assert_same, contents, generate, with_attention


@pytest.mark.parametrize("attention", ["sdpa", "kvarn", "eager"])
@pytest.mark.parametrize("length", [1, 20, 190])
def test_the_same_as_a_cache_that_grows(attention, length):
    model = with_attention("llama", attention)
    ids = tiny.prompt(1, length)
    cache, plain = KVarNCache(model.config, SMALL, max_cache_len=length + 150), KVarNCache(model.config, SMALL)
    assert_same(generate(model, cache, ids, 150), generate(model, plain, ids, 150), exact=attention != "eager")
    assert cache.is_compileable and not plain.is_compileable
    assert int(cache.get_seq_length()) == length + 149
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        assert layer.snapshot().count == other.snapshot().count
        if attention != "eager":  # sums over more keys are other sums
            assert torch.equal(layer.keys, other.keys)
            assert torch.equal(layer.values, other.values)


@pytest.mark.parametrize(
    "name", ["qwen3", "phi3", "gpt2", "gpt_neox", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next"]
)
def test_every_kind_of_model(name):
    model = with_attention(name, "kvarn")
    ids = tiny.prompt(1, 100)
    run = generate(model, KVarNCache(model.config, SMALL, max_cache_len=200), ids, 60)
    expected = generate(model, KVarNCache(model.config, SMALL), ids, 60)
    assert_same(run, expected, exact=False)


def test_left_padding():
    model = tiny.model("llama")
    batch = tiny.left_padded([190, 60, 10])
    inputs = batch["input_ids"], 150, batch["attention_mask"]
    cache = KVarNCache(model.config, SMALL, max_cache_len=400)
    assert_same(generate(model, cache, *inputs), generate(model, KVarNCache(model.config, SMALL), *inputs))


def test_turns_and_chunks():
    model = tiny.model("llama")
    ids = tiny.prompt(1, 300)
    cache, plain = KVarNCache(model.config, SMALL, max_cache_len=500), KVarNCache(model.config, SMALL)
    with torch.no_grad():
        for part in ids.split([100, 1, 1, 90, 2, 1, 105], 1):
            logits = tiny.forward(model, part, cache)
            assert torch.allclose(logits, tiny.forward(model, part, plain), atol=1e-5)
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(layer.keys, other.keys)


@pytest.mark.parametrize("mode", [modes.prefix_copy, modes.multi_turn, modes.prompt_lookup, modes.assisted])
def test_modes(mode):
    model = tiny.model("llama")
    torch.manual_seed(0)
    run = mode(model, lambda: KVarNCache(model.config, SMALL, max_cache_len=300), 190, 20)
    torch.manual_seed(0)
    expected = mode(model, lambda: KVarNCache(model.config, SMALL), 190, 20)
    assert torch.equal(run.tokens, expected.tokens)


def test_memory_is_allocated_once():
    model = tiny.model("llama")
    cache = KVarNCache(model.config, SMALL, max_cache_len=300)
    assert cache.memory_footprint() == 0
    with torch.no_grad():
        tiny.forward(model, tiny.prompt(1, 10), cache)
        held, addresses = cache.memory_footprint(), [layer.storage.data_ptr() for layer in cache.layers]
        for _ in range(250):
            tiny.forward(model, tiny.prompt(1, 1), cache)
        cache.reset()
        assert cache.report()["ratio"] == 1.0  # of nothing
        tiny.forward(model, tiny.prompt(1, 200), cache)
    assert cache.memory_footprint() == held == sum(layer.storage.nbytes for layer in cache.layers)
    assert addresses == [layer.storage.data_ptr() for layer in cache.layers]


def test_another_batch_and_dtype_after_a_reset():
    cache = KVarNCache(tiny.model("llama").config, SMALL, max_cache_len=300)
    for rows, dtype in ((1, torch.float32), (2, torch.bfloat16), (2, torch.float32)):
        model = copy.deepcopy(tiny.model("llama")).to(dtype)
        cache.reset()
        plain = KVarNCache(model.config, SMALL)
        for held in (cache, plain):
            torch.manual_seed(0)
            for tokens in (150, 1, 1):
                tiny.forward(model, torch.randint(1, 100, (rows, tokens)), held)
        assert_holds(cache, contents(plain))


def test_early_initialization():
    model = tiny.model("llama")
    cache = KVarNCache(model.config, SMALL, max_cache_len=300)
    heads, dim = model.config.num_key_value_heads, model.config.hidden_size // model.config.num_attention_heads
    cache.early_initialization(1, heads, dim, torch.float32, torch.device("cpu"))
    assert cache.memory_footprint() > 0 and int(cache.get_seq_length()) == 0
    ids = tiny.prompt(1, 20)
    assert_same(generate(model, cache, ids, 80), generate(model, KVarNCache(model.config, SMALL), ids, 80))


@pytest.mark.parametrize("skipped", [[], [0], [1]])
def test_a_prompt_of_one_token_after_early_initialization(skipped):
    model = tiny.model("llama")
    cache = KVarNCache(model.config, SMALL, max_cache_len=100, skip_layers=skipped)
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    plain = KVarNCache(model.config, SMALL, skip_layers=skipped)
    for i in range(90):
        token = tiny.prompt(2, 1, seed=i)
        assert torch.allclose(tiny.forward(model, token, cache), tiny.forward(model, token, plain), atol=1e-4)


def test_layers_that_stay_dense():
    model = tiny.model("llama")
    ids = tiny.prompt(1, 190)
    cache = KVarNCache(model.config, SMALL, max_cache_len=300, skip_layers=[0])
    expected = generate(model, KVarNCache(model.config, SMALL, skip_layers=[0]), ids, 60)
    assert_same(generate(model, cache, ids, 60), expected, exact=False)


def test_inside_and_outside_of_inference_mode():
    model = tiny.model("llama")
    cache, plain = KVarNCache(model.config, SMALL, max_cache_len=300), KVarNCache(model.config, SMALL)
    for held in (cache, plain):
        with torch.inference_mode():
            tiny.forward(model, tiny.prompt(1, 100), held)
        for _ in range(60):
            logits = tiny.forward(model, tiny.prompt(1, 1), held)
        with torch.inference_mode():
            tiny.forward(model, tiny.prompt(1, 1), held)
    assert torch.equal(cache.layers[1].keys, plain.layers[1].keys)
    assert logits.isfinite().all()


def test_other_dtypes_than_the_caches_are_read_dense():
    model = copy.deepcopy(tiny.model("llama")).bfloat16()
    model.set_attn_implementation("kvarn")
    cache = KVarNCache(model.config, SMALL, max_cache_len=300)
    with torch.autocast("cpu", torch.bfloat16):
        tiny.forward(model, tiny.prompt(1, 150), cache)
        for _ in range(3):
            assert tiny.forward(model, tiny.prompt(1, 1), cache).isfinite().all()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "qwen3_next"])
def test_the_cache_answers_for_its_layers(name):
    config = tiny.model(name).config
    for cache in (KVarNCache(config, SMALL, max_cache_len=300), KVarNCache(config, SMALL), KVarNCache()):
        for changed in (False, True):
            if changed:  # layers with linear attention cannot be compiled from then on
                cache.activate_past_recording()
            for answer in ("is_sliding", "is_compileable"):
                assert getattr(cache, answer) == getattr(DynamicCache, answer).fget(cache)


@pytest.mark.parametrize(("told", "used"), [(None, "sdpa"), ("sdpa", "eager"), ("eager", "kvarn")])
def test_an_eager_step_asks_the_module_how_it_reads(told, used):
    model = with_attention("llama", used)
    config = copy.deepcopy(model.config)
    config._attn_implementation_internal = told
    cache, plain = KVarNCache(config, SMALL, max_cache_len=300), KVarNCache(model.config, SMALL)
    for tokens in (150, 1, 1):
        ids = tiny.prompt(1, tokens)
        assert torch.allclose(tiny.forward(model, ids, cache), tiny.forward(model, ids, plain), atol=1e-4)
    reads = cache.report()["reads"]
    assert (reads["fused"] > 0) == (used != "eager")
    assert (reads["dequantized"] > 0) == (used == "eager")
