"""``generate()`` with a KVarNCache: every mode, on every kind of model.

Two things are shown of each. With everything in the sink nothing is quantized, and tokens and logits equal those of
DynamicCache bit for bit. With quantization on it runs past three tiles and gives the right number of tokens.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from transformers import DynamicCache

from kvarn_hf import KVarNCache, KVarNConfig
from kvarn_hf.layers.growing import KVarNLayer
from tests import models_tiny as tiny

ALL_SINK = KVarNConfig(sink_length=100_000)
SMALL = KVarNConfig(tile_size=64, sink_length=8, residual_length=8)  # three tiles from 208 tokens on


@dataclass
class Run:
    """What a mode gives: token ids, logits of every step, and the cache it filled."""

    tokens: torch.Tensor
    logits: list[torch.Tensor]
    cache: DynamicCache


def generate(model, inputs, cache, new_tokens: int, **kwargs) -> Run:
    """``model.generate`` with one cache."""
    if isinstance(inputs, torch.Tensor):
        # The mask is how generate() tells a whole sequence from its new tokens alone.
        inputs = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}
    inputs = {key: value.to(model.device) for key, value in inputs.items()}
    out = model.generate(
        **inputs,
        **{tiny.CACHE_NAME: cache},
        max_new_tokens=new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
        **{"do_sample": False, **kwargs},
    )
    assert getattr(out, tiny.CACHE_NAME) is cache
    return Run(out.sequences, list(out.logits), cache)


def greedy(model, new_cache, length, new):
    return generate(model, tiny.prompt(1, length), new_cache(), new)


def sampling(model, new_cache, length, new):
    torch.manual_seed(1)
    return generate(model, tiny.prompt(2, length), new_cache(), new, do_sample=True, temperature=1.5, top_k=20)


def num_return_sequences(model, new_cache, length, new):
    torch.manual_seed(1)
    run = generate(model, tiny.prompt(1, length), new_cache(), new, do_sample=True, num_return_sequences=3)
    assert run.tokens.shape[0] == 3
    return run


def beam_search(model, new_cache, length, new):
    run = generate(model, tiny.prompt(2, length), new_cache(), new, num_beams=3, num_return_sequences=2)
    assert run.tokens.shape[0] == 4
    return run


def left_padded(model, new_cache, length, new):
    return generate(model, tiny.left_padded([length, length - 17, length // 2]), new_cache(), new)


def assisted(model, new_cache, length, new):
    draft = copy.deepcopy(tiny.draft(model.kind)).to(model.device, model.dtype)
    return generate(model, tiny.prompt(1, length), new_cache(), new, assistant_model=draft)


def prompt_lookup(model, new_cache, length, new):
    ids = tiny.prompt(1, 20).repeat(1, length // 20 + 1)[:, :length]  # something to look up
    return generate(model, ids, new_cache(), new, prompt_lookup_num_tokens=4)


def custom_loop(model, new_cache, length, new):
    """Three candidates per step as a batch, of which the middle one is kept, and rows that change places."""
    cache, ids = new_cache(), tiny.prompt(2, length).to(model.device)
    logits = [tiny.forward(model, ids, cache)[:, -1]]
    tokens = [ids]
    for step in range(new):
        candidates = logits[-1].topk(3).indices
        cache.batch_repeat_interleave(3)
        scores = tiny.forward(model, candidates.reshape(-1, 1), cache)[:, -1]
        best = scores.amax(-1).reshape(2, 3).median(1).indices
        chosen = torch.arange(2, device=best.device) * 3 + best
        cache.batch_select_indices(tuple(chosen.tolist()) if step % 2 else chosen)
        tokens.append(candidates.gather(1, best[:, None]))
        logits.append(scores[chosen])
        if step % 3 == 0:
            cache.reorder_cache(torch.tensor([1, 0]))
            tokens, logits = [t.flip(0) for t in tokens], [*logits[:-1], logits[-1].flip(0)]
    return Run(torch.cat(tokens, 1), logits, cache)


def multi_turn(model, new_cache, length, new):
    """Two turns with one cache; only the second one's new tokens are forwarded."""
    first = generate(model, tiny.prompt(1, length - new // 2 - 5), new_cache(), new // 2)
    ids = torch.cat([first.tokens, tiny.prompt(1, 5, seed=1).to(model.device)], 1)
    second = generate(model, ids, first.cache, new)
    assert second.cache.get_seq_length() == second.tokens.shape[1] - 1
    return Run(second.tokens, first.logits + second.logits, second.cache)


def prefix_copy(model, new_cache, length, new):
    """Two questions about one prefix, each with a copy of its cache."""
    prefix, prefilled = tiny.prompt(1, length - 7), new_cache()
    tiny.forward(model, prefix[:, :-1], prefilled)
    runs = []
    for seed in (1, 2):
        ids = torch.cat([prefix, tiny.prompt(1, 7, seed)], 1)
        runs.append(generate(model, ids, copy.deepcopy(prefilled), new))
        assert runs[-1].cache.get_seq_length() == length + new - 1
        assert prefilled.get_seq_length() == length - 8
    return Run(torch.cat([r.tokens for r in runs]), runs[0].logits + runs[1].logits, runs[1].cache)


def chunked_prefill(model, new_cache, length, new):
    return generate(model, tiny.prompt(1, length), new_cache(), new, prefill_chunk_size=24)


def streaming(model, new_cache, length, new):
    class Streamer:
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, tokens):
            self.tokens.extend(tokens.flatten().tolist())

        def end(self):
            self.ended = True

    streamer = Streamer()
    run = generate(model, tiny.prompt(1, length), new_cache(), new, streamer=streamer)
    assert streamer.ended
    assert streamer.tokens == run.tokens[0].tolist()
    return run


def plain_tensor(model, new_cache, length, new):
    """Without return_dict_in_generate."""
    cache = new_cache()
    prompt = tiny.prompt(2, length).to(model.device)
    ids = model.generate(prompt, **{tiny.CACHE_NAME: cache}, max_new_tokens=new, do_sample=False)
    return Run(ids, [], cache)


MODES = (
    greedy,
    sampling,
    num_return_sequences,
    beam_search,
    left_padded,
    assisted,
    prompt_lookup,
    custom_loop,
    multi_turn,
    prefix_copy,
    chunked_prefill,
    streaming,
    plain_tensor,
)

# What DynamicCache itself cannot do: Transformers refuses drafts for models with a state ("stateful models"), and its
# layers for linear attention have no batch_repeat_interleave.
NOT_IN_TRANSFORMERS = {(name, mode) for name in tiny.LINEAR for mode in (assisted, prompt_lookup, custom_loop)}
if tiny.CACHE_NAME == "past_key_values":
    # Transformers 5.17 builds a mask of the wrong size for a draft model's own window layers.
    NOT_IN_TRANSFORMERS |= {(name, assisted) for name in tiny.SLIDING}

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


def tile_count(cache) -> int:
    counts = {layer.state.count for layer in cache.layers if isinstance(layer, KVarNLayer)}
    assert len(counts) == 1
    return counts.pop()


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
