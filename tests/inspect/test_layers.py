"""Layers of a model: which are seen, and their attention errors are those of decoding."""

import copy

import pytest
import torch

from kvarn_hf.inspect.layers import AttentionError, LayerInspection, _attention_error, inspect_layers
from kvarn_hf.inspect.model import worst_first
from kvarn_hf.layers.growing import KVarNLayer
from tests import models_tiny as tiny
from tests.inspect.common import SMALL, TOKENS


class TestAttentionError:
    @pytest.mark.parametrize(
        "options",
        [{}, {"scaling": 0.3}, {"softcap": 2.0, "scaling": 0.5}, {"s_aux": torch.tensor([1.0, -1.0, 2.0, 0.0])}],
        ids=["plain", "scaling", "softcap", "sinks"],
    )
    @pytest.mark.parametrize(
        "config", [SMALL, SMALL.replace(method="published", key_bits=2)], ids=["kvarn", "published"]
    )
    def test_is_that_of_decoding_step_by_step(self, config, options, monkeypatch):
        monkeypatch.setattr("kvarn_hf.inspect.layers._QUERIES", 1000)  # every position that reads a tile
        tokens, first = 16 + 64 * 2 + 32 + 20, 16 + 64 + 32
        query, key, value = torch.randn(1, 4, tokens, 32), torch.randn(1, 2, tokens, 32), torch.randn(1, 2, tokens, 32)
        key[0, 1, :, 3] *= 10

        def attention(at, keys, values):
            rows = query[0, :, at].unflatten(0, (2, 2)).double()
            scores = torch.einsum("hgd,htd->hgt", rows, keys[0].double()) * options.get("scaling", 32**-0.5)
            if "softcap" in options:
                scores = options["softcap"] * torch.tanh(scores / options["softcap"])
            if "s_aux" in options:
                scores = torch.cat([scores, options["s_aux"].double().reshape(2, 2, 1)], -1)
            weights = scores.softmax(-1)[..., : keys.shape[2]]
            return weights, torch.einsum("hgt,htd->hgd", weights, values[0].double())

        layer, kl, error, energy = KVarNLayer(config), [], 0, 0
        for at in range(tokens):
            read = layer.update(key[:, :, at : at + 1], value[:, :, at : at + 1])
            if at < first:
                continue
            weights, output = attention(at, key[:, :, : at + 1], value[:, :, : at + 1])
            moved, moved_output = attention(at, *read)
            kl.append((weights * (weights / moved).log()).sum(-1))
            error = error + (moved_output - output).square().sum((1, 2))
            energy = energy + output.square().sum((1, 2))
        found = _attention_error(query, key, value, config, options)
        torch.testing.assert_close(found.kl, torch.stack(kl).mean((0, 2)).float(), rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(found.output, (error / energy).sqrt().float(), rtol=1e-3, atol=1e-6)

    def test_sides_alone(self):
        query, key, value = torch.randn(1, 2, TOKENS, 32), torch.randn(1, 2, TOKENS, 32), torch.randn(1, 2, TOKENS, 32)
        wide = _attention_error(query, key, value, SMALL.replace(key_bits=8, value_bits=8), {})
        narrow = _attention_error(query, key, value, SMALL.replace(key_bits=2, value_bits=8), {})
        assert (narrow.keys_only > 10 * wide.keys_only).all()
        torch.testing.assert_close(narrow.values_only, wide.values_only)
        assert (narrow.output > narrow.values_only).all()


class TestLayers:
    @pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_oss", "gpt2", "phi3", "gpt_neox", "qwen3_next"])
    def test_every_full_attention_layer_is_seen(self, name):
        model = tiny.model(name)
        before = model.config._attn_implementation
        told = []
        layers = inspect_layers(model, tiny.prompt(1, 200), [SMALL], lambda *step: told.append(step))
        expected = {"gemma3": [1], "gpt_oss": [1], "qwen3_next": [3]}.get(name, [0, 1])
        assert [layer.layer for layer in layers] == expected
        assert told[-1][1:] == (len(expected), len(expected))
        assert all((layer.errors[SMALL.name].output > 0).all() for layer in layers)
        assert model.config._attn_implementation == before

    def test_what_cannot_be_watched_is_refused(self):
        with pytest.raises(ValueError, match="model of type 'deepseek_v3' caches latent states"):
            inspect_layers(tiny.model("deepseek_v3"), tiny.prompt(1, 200), [SMALL])
        with pytest.raises(ValueError, match=r"input_ids must have shape \[1, 113 or more\], got \[1, 112\]"):
            inspect_layers(tiny.model("llama"), tiny.prompt(1, 112), [SMALL])
        model = copy.deepcopy(tiny.model("llama"))
        for block in model.model.layers:
            block.self_attn.forward = lambda hidden_states, **kw: (hidden_states, None)
        with pytest.raises(ValueError, match="0 of 2 full-attention layers were seen"):
            inspect_layers(model, tiny.prompt(1, 200), [SMALL])
        assert model.config._attn_implementation == tiny.model("llama").config._attn_implementation

    def test_worst_first(self):
        def layer(index, errors):
            error = torch.tensor(errors)
            return LayerInspection(index, 8, 8, {}, {}, {}, 0, {"p": AttentionError(error, error, error, error)})

        layers = [layer(0, [0.1, 0.1]), layer(1, [0.0, 0.3]), layer(2, [0.2, 0.1])]
        assert [x.layer for x in worst_first(layers, "p")] == [1, 2, 0]
