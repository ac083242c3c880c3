"""``generate()`` with a KVarNCache: every mode, on every kind of model.

Two things are shown of each. With everything in the sink nothing is quantized, and tokens and logits equal those of
DynamicCache bit for bit. With quantization on it runs past three tiles and gives the right number of tokens.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvarn_hf import KVarNCache, KVarNConfig
from tests import models_tiny as tiny
from tests.generate.modes import MODES, NOT_IN_TRANSFORMERS, Run, beam_search, greedy, left_padded, tile_count

ALL_SINK = KVarNConfig(sink_length=100_000)
SMALL = KVarNConfig(tile_size=64, sink_length=8, residual_length=8)  # three tiles from 208 tokens on

COMBINATIONS = [
    pytest.param(name, mode, id=f"{name}-{mode.__name__}")
    for name in tiny.NAMES
    for mode in MODES
    if (name, mode) not in NOT_IN_TRANSFORMERS
]


def assert_equal(run: Run, expected: Run) -> None:
    assert run.tokens.tolist() == expected.tokens.tolist()
    assert len(run.logits) == len(expected.logits)
    for step, (logits, other) in enumerate(zip(run.logits, expected.logits, strict=True)):
        assert torch.equal(logits, other), f"step {step}: largest difference {(logits - other).abs().max()}"


@pytest.mark.parametrize(("name", "mode"), COMBINATIONS)
def test_all_sink_is_bit_equal_to_dynamic_cache(name, mode):
    model = tiny.model(name)
    run = mode(model, lambda: KVarNCache(model.config, ALL_SINK), 60, 12)
    assert_equal(run, mode(model, lambda: DynamicCache(config=model.config), 60, 12))
    assert tile_count(run.cache) == 0


@pytest.mark.parametrize(("name", "mode"), COMBINATIONS)
def test_quantized_runs_past_three_tiles(name, mode):
    model = tiny.model(name)
    # All three while decoding on the fastest model, the third one on the others.
    prompt, new = (80, 130) if name == "llama" else (190, 20)
    run = mode(model, lambda: KVarNCache(model.config, SMALL), prompt, new)
    assert run.tokens.shape[1] == prompt + new
    assert tile_count(run.cache) == 3
    assert run.cache.get_seq_length() >= prompt + new - 1
    assert all(logits.isfinite().all() for logits in run.logits)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [greedy, left_padded, beam_search], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("name", tiny.NAMES)
def test_all_sink_is_bit_equal_on_a_gpu(name, mode):
    model = tiny.gpu_model(name)
    run = mode(model, lambda: KVarNCache(model.config, ALL_SINK), 60, 12)
    assert_equal(run, mode(model, lambda: DynamicCache(config=model.config), 60, 12))


@pytest.mark.parametrize("name", tiny.NAMES)
def test_quantized_flushes_three_times_while_decoding(name):
    """On every kind of model, with a prompt shorter than the first tile."""
    model = tiny.model(name)
    run = greedy(model, lambda: KVarNCache(model.config, SMALL), 79, 130)
    assert run.tokens.shape == (1, 209)
    assert tile_count(run.cache) == 3


@pytest.mark.parametrize("name", tiny.FULL_ATTENTION)
def test_without_config(name):
    """No argument is needed: the layers are made as they are seen."""
    model = tiny.model(name)
    run = greedy(model, lambda: KVarNCache(kvarn=ALL_SINK), 60, 12)
    assert_equal(run, greedy(model, lambda: DynamicCache(config=model.config), 60, 12))
    small = greedy(model, lambda: KVarNCache(kvarn=SMALL), 190, 20)
    if name != "deepseek_v3":  # whose latent only the config tells from ordinary keys and values
        assert_equal(small, greedy(model, lambda: KVarNCache(model.config, SMALL), 190, 20))


def test_one_line_with_defaults():
    """``past_key_values=KVarNCache()``, as everyone writes it, on both ends of the range of Transformers."""
    model, cache = tiny.model("llama"), KVarNCache()
    ids = model.generate(tiny.prompt(1, 500), past_key_values=cache, max_new_tokens=30, do_sample=False)
    assert ids.shape == (1, 530)
    assert cache.get_seq_length() == 529
    assert tile_count(cache) == 2
    # Within the sink and the tail nothing is quantized, so a short answer is the dense one.
    short = model.generate(tiny.prompt(1, 100), past_key_values=KVarNCache(), max_new_tokens=50, do_sample=False)
    assert torch.equal(short, model.generate(tiny.prompt(1, 100), max_new_tokens=50, do_sample=False))


def test_the_model_keeps_its_config():
    """The cache leaves the model's settings and its own as they were."""
    model = tiny.build("gemma3")
    before = model.config.to_dict(), model.generation_config.to_dict()
    greedy(model, lambda: KVarNCache(model.config, SMALL), 100, 5)
    assert (model.config.to_dict(), model.generation_config.to_dict()) == before


# Flex attention is compiled, which takes minutes on a CPU.
@pytest.mark.parametrize("implementation", ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_attention_implementations(name, implementation):
    """Each reads the cache unchanged."""
    device = "cuda" if implementation == "flex_attention" else "cpu"
    model = tiny.build(name, attn_implementation=implementation).to(device)
    run = greedy(model, lambda: KVarNCache(model.config, ALL_SINK), 60, 8)
    assert_equal(run, greedy(model, lambda: DynamicCache(config=model.config), 60, 8))
    assert greedy(model, lambda: KVarNCache(model.config, SMALL), 220, 8).tokens.shape == (1, 228)
