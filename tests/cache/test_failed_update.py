"""A forward pass that fails anywhere leaves the cache as it was."""

from __future__ import annotations

import pytest
import torch

from kvarn_hf import KVarNCache, ops
from kvarn_hf.ops import dispatch
from tests import models_tiny as tiny
from tests.cache.common import SMALL, same_state
from tests.storage import held_bytes


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
                for tensor in tiles.parts.values():
                    if tensor.dtype == torch.float16:
                        tensor[:, :, tiles.count :] = torch.nan
                raise error

        monkeypatch.setattr(dispatch, "quantize", fail)

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
