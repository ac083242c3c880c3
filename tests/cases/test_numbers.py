"""Numbers: what is stored of equal tokens, and attention that counts every key once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from torch.nn.functional import scaled_dot_product_attention

from kvarn_hf import KVarNCache
from tests import models_tiny as tiny
from tests.cases.common import SMALL, filled, random_kv


def test_case_40_the_readme_promises_equal_bytes_of_equal_tensors_only():
    """Promised too much: a prompt in chunks has other keys from the second layer on, as it attends to quantized ones;
    it is the same keys and values that give the same bytes."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert "so a prompt gives the same bytes" not in readme
    assert "per tensor" in readme


class Attention:
    """One decode step as Transformers' attention modules do it."""

    config = SimpleNamespace(_attn_implementation="sdpa")  # what tells the cache how it will be read

    def step(self, cache, query, keys, values, mask=None):
        return scaled_dot_product_attention(query, *cache.update(keys, values, 0), attn_mask=mask)


@pytest.mark.parametrize("run", [145, 160])
@pytest.mark.parametrize("new", [1, 4])
def test_case_41_a_run_of_equal_tokens_that_reaches_the_tail(run, new):
    """Wrong attention without a word: of equal first tokens that no mask hides, those in the tail count twice."""
    keys, values = random_kv(2, 2, 160, 32)
    for x in (keys, values):
        x[1, :, :run] = x[1, :, :1]
    step, query = random_kv(2, 2, new, 32, seed=1), random_kv(2, 2, new, 32, seed=2)[0]
    mask = torch.ones(new, 160 + new, dtype=torch.bool).tril(160)[None, None] if new > 1 else None
    found = []
    for fused in (True, False):
        cache = filled(keys, values, cache=KVarNCache(kvarn=SMALL, fused=fused))
        found.append(Attention().step(cache, query, *step, mask))
        assert cache.report()["reads"]["fused"] == fused
    assert torch.allclose(*found, atol=1e-5)


def test_case_41_a_model_without_positions():
    """Wrong attention without a word: where equal tokens have equal keys, a prompt may begin with many of them."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = tf.SmolLM3Config(
        vocab_size=128, **sizes, num_key_value_heads=2, no_rope_layers=[0, 0], initializer_range=0.2, pad_token_id=0
    )
    torch.manual_seed(0)
    model = tf.SmolLM3ForCausalLM(config).eval()
    ids = tiny.prompt(2, 160)
    ids[1, :150] = 5
    found = []
    for fused in (True, False):
        cache = KVarNCache(config, SMALL, fused=fused)
        tiny.forward(model, ids, cache)
        found.append(tiny.forward(model, tiny.prompt(2, 1, seed=1), cache))
    assert torch.allclose(*found, atol=1e-4)
