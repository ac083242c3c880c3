"""Caches with ``max_cache_len``, and what they hold."""

from __future__ import annotations

import copy

import torch

from kvarn_hf import KVarNCache, KVarNConfig
from tests import models_tiny as tiny

SMALL = KVarNConfig(tile_size=64, sink_length=8, residual_length=8)


def generate(model, cache, ids, new, mask=None):
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **{tiny.CACHE_NAME: cache},
    )


def with_attention(name, attention):
    model = copy.deepcopy(tiny.model(name))
    model.set_attn_implementation(attention)
    return model


def assert_same(run, expected, exact=True):
    assert torch.equal(run.sequences, expected.sequences)
    logits, other = torch.stack(run.logits), torch.stack(expected.logits)
    assert torch.equal(logits, other) if exact else torch.allclose(logits, other, atol=1e-2)


def filled(length=200, **options):
    model = tiny.model("llama")
    cache = KVarNCache(model.config, SMALL, max_cache_len=300, **options)
    with torch.no_grad():
        tiny.forward(model, tiny.prompt(2, length), cache)
        tiny.forward(model, tiny.prompt(2, 1), cache)
    return model, cache


def contents(cache):
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


def assert_holds(cache, expected):
    for (keys, values), (other_keys, other_values) in zip(contents(cache), expected, strict=True):
        assert torch.equal(keys, other_keys)
        assert torch.equal(values, other_values)
