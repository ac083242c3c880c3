"""``kvarn inspect``: planted outliers are named, errors are those of decoding, suggestions follow from the figures."""

import copy
import re

import pytest
import torch
from typer.testing import CliRunner

from kvarn_hf import PRESETS, KVarNConfig
from kvarn_hf.cli import app
from kvarn_hf.estimate import estimate
from kvarn_hf.inspect.layers import AttentionError, LayerInspection, _attention_error, _inspect, inspect_layers
from kvarn_hf.inspect.model import bytes_per_token, inspect_model, worst_first
from kvarn_hf.layers.growing import KVarNLayer
from kvarn_hf.plotting import layers as figures
from tests import models_tiny as tiny
from tests.models_lettered import save_lettered_model

SMALL = KVarNConfig(tile_size=64, sink_length=16, residual_length=32)
WIDTHS = [
    KVarNConfig(k, v, tile_size=64, sink_length=16, residual_length=32) for k, v in ((4, 2), (2, 2), (4, 4), (8, 4))
]
TOKENS = 320


def with_key_bias(layer, head, channel, size):
    """A tiny Qwen2 of four layers, one of which has a key bias like the real one's: in one channel."""
    model = tiny.build("qwen2", num_hidden_layers=4)
    projection = model.model.layers[layer].self_attn.k_proj
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.k_proj.bias.normal_(0, 0.1)
        projection.bias[head * 16 + channel] = size
    return model


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
        layer = _inspect(5, query, key, value, [SMALL], {})
        assert [(c.side, c.head, c.channel) for c in layer.outlier_channels] == [("values", 1, 7)]
        assert layer.outlier_channels[0].size == pytest.approx(30, rel=0.2)
        token = layer.worst_token("keys")
        assert token[:3] == ("keys", 0, 200) and token.size == pytest.approx(9, rel=0.3)


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


class TestFigures:
    def test_heads(self):
        values = torch.rand(6, 3)
        values[4, 1] = 5
        ax, _ = figures.heads(values, range(6), "error / %").axes
        assert torch.equal(torch.as_tensor(ax.images[0].get_array().data), values.T)
        marks = [mark.get_position() for mark in ax.texts]
        assert len(marks) == 3 and marks[0] == (4, 1)
        assert ax.get_title() == "error / %" and ax.get_xlabel().startswith("layer") and ax.get_ylabel() == "KV head"

    def test_channels(self):
        sides = {"keys": [torch.ones(2, 8) for _ in range(4)], "values": [torch.ones(2, 8) for _ in range(4)]}
        size = copy.deepcopy(sides)
        size["keys"][2][1, 3] = 40
        keys, values = figures.channels(size, sides, range(4), (16.0, 8.0)).axes
        assert [text.get_text() for text in keys.texts] == ["2"] and not values.texts
        assert list(keys.lines[0].get_ydata()) == [1, 1, 40, 1]
        assert keys.get_ylabel() and keys.get_xlabel() and keys.get_yscale() == "log"

    def test_widths(self):
        (ax,) = figures.widths({"a": [1.0, 2.0], "b": [3.0, 4.0]}, [0, 3], "error / %").axes
        assert [list(line.get_ydata()) for line in ax.lines] == [[1, 2], [3, 4]]
        assert list(ax.lines[0].get_xdata()) == [0, 3]
        looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in ax.lines]
        assert all(len(set(part)) == 2 for part in zip(*looks, strict=True))  # told apart in black and white too

    def test_trade_off(self):
        points = [figures.Point("small", 1024, 0.1, False), figures.Point("skip 1", 2048, 0.01, True)]
        (ax,) = figures.trade_off(points, 0.05, "skip 1", "small").axes
        assert [text.get_text() for text in ax.texts][:2] == ["small", "skip 1 (suggested)"]
        assert [tuple(c.get_offsets()[0]) for c in ax.collections] == [(1, 0.1), (2, 0.01)]
        assert "nats" in ax.get_ylabel() and "KiB" in ax.get_xlabel()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lettered")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 12)
    (folder / "short.txt").write_text("the quick brown fox")
    return save_lettered_model(folder)


@pytest.fixture
def run(monkeypatch, folder):
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(*arguments, text="text.txt"):
        options = ["inspect", "--model", folder, "--text", folder / text, "--device", "cpu", "--dtype", "float32"]
        return CliRunner().invoke(app, [str(argument) for argument in (*options, *arguments)])

    return invoke


class TestCommand:
    def test_tables_figures_and_suggestion(self, run, tmp_path):
        result = run("--tokens", 450, "--plots", tmp_path / "plots")
        assert result.exit_code == 0, result.output
        text = re.sub(r"\s+", " ", result.output)
        for expected in (
            "Layers of the model with kvarn_k4v2_g128",
            "attention KL",
            "over 450 tokens",
            "kvarn_k8v4_g128",
            "kvarn_k4v2_g128, skipping",
            "No layer has outlier key channels.",
            "Suggestion: kvarn_k",
            "for 32,768 tokens",
            'KVarNCache(model.config, "kvarn_k',
        ):
            assert expected in text, expected
        written = sorted(path.name for path in (tmp_path / "plots").iterdir())
        assert written == ["channels.png", "heads.png", "trade_off.png", "widths.png"]
        for name in written:
            picture = (tmp_path / "plots" / name).read_bytes()
            assert picture.startswith(b"\x89PNG") and len(picture) > 5_000

    def test_nothing_is_cut_off_in_a_narrow_terminal(self, run, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        result = run("--tokens", 400)
        assert result.exit_code == 0, result.output
        assert "…" not in result.output
        assert "kvarn_k2v2_g128" in result.output

    def test_another_method_is_spelled_out(self, run):
        result = run("--tokens", 330, "--method", "published", "--preset", "kvarn_k4v2_g64", "--max-kl", 100)
        assert result.exit_code == 0, result.output
        text = re.sub(r"\s+", " ", result.output)
        assert 'KVarNCache(model.config, KVarNConfig.from_preset("kvarn_k2v2_g64", method="published"))' in text
        assert "g128" not in text

    @pytest.mark.parametrize(
        ("arguments", "text", "message"),
        [
            ((), "short.txt", "text and tokens must give at least 385 tokens, got 19 of '.*short.txt'"),
            ((), "none.txt", "none.txt"),
            (("--max-kl", 0), "text.txt", "max_kl must be above 0, got 0"),
            (("--method", "magic"), "text.txt", "method must be one of kvarn, published, hadamard, rtn, got 'magic'"),
            (("--preset", "k4"), "text.txt", "preset must be one of"),
        ],
    )
    def test_bad_input_gets_one_sentence(self, run, arguments, text, message):
        result = run(*arguments, text=text)
        assert result.exit_code == 2
        assert re.search(message, re.sub(r"\s+", " ", result.output)), result.output
        assert "Traceback" not in result.output
