"""Dtypes, magnitudes, broken tokens, autocast, inference mode and gradients."""

from __future__ import annotations

import copy

import pytest
import torch

from kvarn_hf import KVarNCache
from tests import models_tiny as tiny
from tests.cache.common import DIM, HEADS, SMALL, filled, kv, read, same


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
        assert all(not t.requires_grad for layer in cache.layers for t in layer.state.parts.values())
        assert not any(x.requires_grad for x in read(cache))
        copy.deepcopy(cache)
