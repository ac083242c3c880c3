"""A whole model: planted outliers are named, suggestions follow from the figures."""

import pytest
import torch

from kvarn_hf import PRESETS, KVarNConfig
from kvarn_hf.estimate import estimate
from kvarn_hf.inspect.layers import _inspect, inspect_layers
from kvarn_hf.inspect.model import bytes_per_token, inspect_model
from tests import models_tiny as tiny
from tests.inspect.common import SMALL, TOKENS, WIDTHS, with_key_bias


class TestOutliers:
    def test_a_huge_key_bias_is_named(self):
        model = with_key_bias(layer=2, head=1, channel=3, size=400.0)
        found = inspect_model(model, tiny.prompt(1, TOKENS), SMALL, WIDTHS)
        assert [layer.layer for layer in found.outlier_layers] == [2]
        # The rotary embedding turns channel 3 into channel 11 and back.
        channels = {(c.side, c.head, c.channel) for c in found.outlier_layers[0].outlier_channels}
        assert channels == {("keys", 1, 3), ("keys", 1, 11)}
        assert min(c.size for c in found.outlier_layers[0].outlier_channels) > 16

    def test_without_one_none_is_named(self):
        found = inspect_model(with_key_bias(2, 1, 3, 0.1), tiny.prompt(1, TOKENS), SMALL, WIDTHS[:1])
        assert found.outlier_layers == []

    def test_the_layer_on_which_the_published_method_fails_is_to_be_skipped(self):
        config = SMALL.replace(method="published", key_bits=8, value_bits=8)
        model, ids = with_key_bias(2, 1, 3, 2000.0), tiny.prompt(1, TOKENS)
        every = inspect_model(model, ids, config, [config])
        assert every.worst_layers[0].layer == 2
        error = every.worst_layers[0].errors[config.name]
        assert error.output.argmax() == 1 and error.kl.argmax() == 1
        assert every.skips[0].skip_layers == (2,)
        between = (every.widths[0].kl * every.skips[0].kl) ** 0.5
        assert between < every.widths[0].kl / 1.5
        found = inspect_model(model, ids, config, [config], max_kl=between)
        assert found.suggestion.skip_layers == (2,)

    def test_value_channels_and_tokens(self):
        query, key, value = torch.randn(1, 4, TOKENS, 32), torch.randn(1, 2, TOKENS, 32), torch.randn(1, 2, TOKENS, 32)
        value[0, 1, :, 7] *= 30
        key[0, 0, 200] *= 9
        key[0, 0, 3] *= 100  # a sink is never quantized
        layer = _inspect(5, (query, key, value), [SMALL], {})
        assert [(c.side, c.head, c.channel) for c in layer.outlier_channels] == [("values", 1, 7)]
        assert layer.outlier_channels[0].size == pytest.approx(30, rel=0.2)
        token = layer.worst_token("keys")
        assert token[:3] == ("keys", 0, 200) and token.size == pytest.approx(9, rel=0.3)


class TestSuggestion:
    @pytest.mark.parametrize("preset", PRESETS)
    def test_bytes_per_token_are_those_of_the_estimate(self, preset):
        model = tiny.model("qwen3")
        layers = inspect_layers(model, tiny.prompt(1, 200), [SMALL])
        expected = estimate(model.config, 1000, 1, preset, "bfloat16")
        config = KVarNConfig.from_preset(preset)
        assert bytes_per_token(layers, config, []) == expected.bytes_per_token
        assert bytes_per_token(layers, config, [0, 1]) == expected.dense_bytes_per_token
        halves = [bytes_per_token(layers, config, [i]) for i in (0, 1)]
        assert sum(halves) == expected.bytes_per_token + expected.dense_bytes_per_token

    def test_is_the_smallest_that_meets_the_limit(self):
        model, ids = tiny.model("llama"), tiny.prompt(1, TOKENS)
        steps = []
        found = inspect_model(model, ids, SMALL, WIDTHS, 100.0, lambda *step: steps.append(step))
        by_size = [trial.config.name for trial in found.widths]
        assert by_size == ["kvarn_k2v2_g64", "kvarn_k4v2_g64", "kvarn_k4v4_g64", "kvarn_k8v4_g64"]
        assert [trial.kl for trial in found.widths] == sorted((trial.kl for trial in found.widths), reverse=True)
        assert found.suggestion == found.widths[0]
        assert steps[-1][1] == steps[-1][2]
        limit = found.widths[2].kl * 1.01
        assert inspect_model(model, ids, SMALL, WIDTHS, limit).suggestion.config == WIDTHS[2]
        impossible = inspect_model(model, ids, SMALL, WIDTHS, 1e-12)
        assert impossible.suggestion.kl == min(trial.kl for trial in (*impossible.widths, *impossible.skips))

    def test_the_setting_itself_is_always_measured(self):
        found = inspect_model(tiny.model("llama"), tiny.prompt(1, TOKENS), SMALL, WIDTHS[1:2])
        assert {trial.config for trial in found.widths} == {SMALL, WIDTHS[1]}

    def test_bad_limit(self):
        with pytest.raises(ValueError, match="max_kl must be above 0, got 0"):
            inspect_model(tiny.model("llama"), tiny.prompt(1, TOKENS), SMALL, WIDTHS, 0)
