"""``generate()`` on a GPU with the fused attention: every mode, every step against the same state dequantized."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import DynamicCache

from kvarn_hf import KVarNCache, KVarNConfig, ops
from kvarn_hf.method.attention import attention as exact_attention
from tests import models_tiny as tiny
from tests.generate import modes

pytestmark = pytest.mark.gpu

SMALL = KVarNConfig(tile_size=64, sink_length=8, residual_length=8)


@cache
def model(name: str, attention: str):
    """The tiny model of that kind, in bfloat16 on the GPU; not to be changed."""
    on_gpu = copy.deepcopy(tiny.model(name)).to("cuda", torch.bfloat16)
    on_gpu.set_attn_implementation(attention)
    on_gpu.kind = name
    return on_gpu


@pytest.fixture(autouse=True)
def _draft_of_its_own(monkeypatch):
    monkeypatch.setattr(tiny, "draft", cache(lambda name, draft=tiny.draft: copy.deepcopy(draft(name))))


MODES = (
    modes.greedy,
    modes.sampling,
    modes.num_return_sequences,
    modes.beam_search,
    modes.left_padded,
    modes.assisted,
    modes.prompt_lookup,
    modes.custom_loop,
    modes.multi_turn,
    modes.prefix_copy,
    modes.chunked_prefill,
    modes.streaming,
    modes.plain_tensor,
)


def _wide(state):
    """The same tokens with the dense ones in float32, so that tiles are dequantized to that."""
    dense, padding = state.dense, state.padding
    if padding is not None:
        padding = replace(padding, key=padding.key.float(), value=padding.value.float())
    wide = replace(dense, key_buffer=dense.key_buffer.float(), value_buffer=dense.value_buffer.float())
    return replace(state, dense=wide, padding=padding)


@pytest.fixture
def checked(monkeypatch):
    """Every fused attention is compared with float64 attention over the dequantized tokens of the same state."""
    fused = ops.attend

    def attend(state, query, mask, *, scaling=None, softcap=None, sinks=None):
        out = fused(state, query, mask, scaling=scaling, softcap=softcap, sinks=sinks)
        if out is not None:
            scale = query.shape[3] ** -0.5 if scaling is None else scaling
            options = {"scaling": scale, "causal": False, "softcap": softcap, "sinks": sinks}
            rounded = exact_attention(query, *ops.dense(state), mask, **options)
            expected = exact_attention(query, *ops.dense(_wide(state)), mask, **options)
            # What bfloat16 keys and values cost, twice, and what a bfloat16 result does.
            allowed = 2 * (rounded - expected).norm() + 2**-8 * expected.norm()
            assert (out - expected).norm() <= allowed
        return out

    monkeypatch.setattr(ops, "attend", attend)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize(
    ("name", "attention"), [("llama", "sdpa"), ("llama", "kvarn"), ("gemma3", "sdpa"), ("phi3", "kvarn")]
)
def test_every_step_of_every_mode(checked, name, attention, mode):
    if (name, mode) in modes.NOT_IN_TRANSFORMERS:
        pytest.skip("this version of Transformers fails at this with its own caches, too")
    on_gpu = model(name, attention)
    torch.manual_seed(0)
    run = mode(on_gpu, lambda: KVarNCache(on_gpu.config, SMALL), 190, 20)
    assert run.cache.report()["reads"]["fused"] > 0
    assert run.tokens.shape[1] == 210
    assert modes.tile_count(run.cache) == 3


@pytest.mark.parametrize("mode", [modes.greedy, modes.left_padded], ids=lambda mode: mode.__name__)
def test_the_fused_path_can_be_turned_off(mode):
    on_gpu = model("llama", "kvarn")
    run = mode(on_gpu, lambda: KVarNCache(on_gpu.config, SMALL), 190, 20)
    plain = mode(on_gpu, lambda: KVarNCache(on_gpu.config, SMALL, fused=False), 190, 20)
    assert plain.cache.report()["reads"]["fused"] == 0
    assert (run.logits[1] - plain.logits[1]).float().norm() < 0.05 * plain.logits[1].float().norm()


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gpt2", "gpt_neox", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_every_kind_of_model(checked, name):
    on_gpu = model(name, "kvarn")
    run = modes.greedy(on_gpu, lambda: KVarNCache(on_gpu.config, SMALL), 190, 12)
    assert run.tokens.shape[1] == 202


@pytest.mark.parametrize("attention", ["sdpa", "kvarn"])
def test_left_padded_rows_are_as_good_as_alone(attention):
    on_gpu = model("llama", attention)
    lengths = [600, 600 - 128, 333]
    batch = {k: v.to("cuda") for k, v in tiny.left_padded(lengths).items()}

    def logits(cache, inputs) -> torch.Tensor:
        # The first of the new tokens is read exactly; quantized history is seen from the second on.
        return torch.stack(modes.generate(on_gpu, inputs, cache, 4).logits[1:]).float().log_softmax(-1)

    together = logits(KVarNCache(on_gpu.config, SMALL), batch)
    for row, length in enumerate(lengths):
        ids = batch["input_ids"][row : row + 1, -length:]
        dense = logits(DynamicCache(config=on_gpu.config), ids)[:, 0]
        alone = logits(KVarNCache(on_gpu.config, SMALL), ids)[:, 0]

        def divergence(other, dense=dense) -> float:
            return (dense.exp() * (dense - other)).sum(-1).mean().item()

        assert divergence(together[:, row]) <= 3 * divergence(alone) + 0.02


def test_operations_per_step_do_not_depend_on_the_length():
    on_gpu = model("llama", "sdpa")
    counts = []
    for length in (1000, 5000):
        cache = KVarNCache(on_gpu.config)
        tiny.forward(on_gpu, tiny.prompt(1, length), cache)
        step = tiny.prompt(1, 1)
        tiny.forward(on_gpu, step, cache)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            tiny.forward(on_gpu, step, cache)
            torch.cuda.synchronize()
        counts.append(sum(event.count for event in profile.key_averages()))
    assert counts[0] == counts[1]
