"""Estimates from a config alone, against the bytes of real caches."""

import re

import pytest
import torch
from transformers import DynamicCache, LlamaConfig
from typer.testing import CliRunner

from kvarn_hf import KVarNCache, KVarNConfig
from kvarn_hf.cli import app
from kvarn_hf.estimate import ModelShapes, estimate, load_config, most_rows, most_tokens
from kvarn_hf.layers.stock import layer_bytes
from tests import models_tiny

LENGTHS = (40, 300, 384, 1000, 1500)
LLAMA = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    dtype="bfloat16",
)


@pytest.fixture(scope="module")
def llama():
    return ModelShapes.probe(LLAMA)


def filled(model, cache, batch, length, *, decoding=False):
    ids = models_tiny.prompt(batch, length)
    models_tiny.forward(model, ids[:, : length - decoding], cache)
    if decoding:
        models_tiny.forward(model, ids[:, length - 1 :], cache)
    return cache


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", models_tiny.NAMES)
def test_equals_a_prefilled_cache(name, batch):
    model = models_tiny.model(name)
    shapes = ModelShapes.probe(model.config, torch.float32)
    for length in LENGTHS:
        preset = "kvarn_k2v2_g64" if length == 1000 else "kvarn_k4v2_g128"
        found = estimate(shapes, length, batch, preset)
        held = filled(model, KVarNCache(model.config, preset), batch, length)
        assert found.bytes == held.memory_footprint()
        dense = filled(model, DynamicCache(config=model.config), batch, length)
        assert found.dense_bytes == sum(map(layer_bytes, dense.layers))
        assert sum(kind.layers for kind in found.kinds) == len(held.layers)
        assert sum(kind.bytes for kind in found.kinds) == found.bytes
        assert sum(kind.dense_bytes for kind in found.kinds) == found.dense_bytes


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("length", [300, 384])
def test_equals_a_decoding_cache(name, length):
    model = models_tiny.model(name)
    cache = filled(model, KVarNCache(model.config), 1, length, decoding=True)
    assert estimate(model.config, length, dtype="float32", decoding=True).bytes == cache.memory_footprint()


@pytest.mark.parametrize(
    "kvarn",
    [
        KVarNConfig(method="rtn"),
        KVarNConfig(key_bits=3, sink_length=0, residual_length=0),
        KVarNConfig(tile_size=64, sink_length=4, residual_length=200),
    ],
    ids=lambda kvarn: kvarn.name,
)
def test_equals_a_cache_with_other_settings(kvarn):
    model = models_tiny.model("llama")
    for length in (64, 300, 777):
        cache = filled(model, KVarNCache(model.config, kvarn), 2, length)
        assert estimate(model.config, length, 2, kvarn, "float32").bytes == cache.memory_footprint()


def test_a_real_models_figures(llama):
    assert llama.parameters == 8_030_261_248
    assert llama.weight_bytes == pytest.approx(2 * llama.parameters, rel=1e-6)
    found = estimate(llama, 32768)
    assert found.dense_bytes == 4 * 2**30
    assert found.dense_bytes_per_token == 128 * 1024
    assert found.bits_per_element == 3.375 == 16 * found.bytes_per_token / found.dense_bytes_per_token
    assert found.ratio == pytest.approx(4.57, abs=0.005)
    assert [(kind.name, kind.layers) for kind in found.kinds] == [("packed", 32)]


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "qwen3_next"])
def test_grows_by_bytes_per_token_above_the_fixed_part(name):
    shapes = ModelShapes.probe(models_tiny.model(name).config, "bfloat16")
    # A power of two of tiles: no spare capacity; one token before the next tile: the longest tail.
    found = estimate(shapes, 128 + 128 + 1024 * 128 + 127, 3, decoding=True)
    assert found.bytes == found.fixed_bytes + 3 * 1024 * 128 * found.bytes_per_token


@pytest.mark.parametrize("kvarn", [None, "kvarn_k4v2_g128", "kvarn_k2v2_g64"])
@pytest.mark.parametrize("batch", [1, 3])
def test_what_fits_fits_on_the_way_too_and_no_more_does(kvarn, batch):
    shapes = ModelShapes.probe(models_tiny.model("gemma3").config, "bfloat16")

    def size(length):
        found = estimate(shapes, length, batch, kvarn or "kvarn_k4v2_g128", decoding=True)
        return found.bytes if kvarn else found.dense_bytes

    for budget in (100_000, 313_131, 500_000):
        most = most_tokens(shapes, budget, batch, kvarn)
        assert all(size(length) <= budget for length in range(max(1, most - 140), most + 1))
        assert size(most + 1) > budget


def test_rows_that_fit(llama):
    free = 64 * 2**30 - llama.weight_bytes
    assert most_rows(llama, free, 32768, None) == 12
    rows = most_rows(llama, free, 32768)
    assert most_tokens(llama, free, rows) >= 32768 > most_tokens(llama, free, rows + 1)
    assert most_rows(llama, 1000, 32768) == 0
    assert most_tokens(llama, 1000) == 0


def test_no_limit_without_full_attention():
    config = models_tiny._CONFIGS["gemma3"](layer_types=["sliding_attention"] * 3)
    assert most_tokens(config, 10**6, dtype="bfloat16") is None
    found = estimate(config, 5000, dtype="bfloat16", decoding=True)
    assert found.bytes == found.dense_bytes == found.fixed_bytes
    assert found.bytes_per_token == found.bits_per_element == 0


def test_the_config_is_not_changed():
    config = models_tiny._CONFIGS["qwen3_next"]()
    before = config.to_dict(), config._attn_implementation
    estimate(config, 100)
    assert (config.to_dict(), config._attn_implementation) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LLAMA, 0), "length must be an integer >= 1, got 0"),
        ((LLAMA, 10, True), "batch must be an integer >= 1, got True"),
        ((LLAMA, 10, 1, "kvarn_k5v2_g128"), "preset must be one of"),
        ((LLAMA, 10, 1, "kvarn_k4v2_g128", "int8"), "dtype must be one of bfloat16, float16, float32, got 'int8'"),
        (("llama", 10), "config must be a model's config, got 'llama'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        estimate(*arguments)


def test_a_config_of_no_decoder():
    from transformers import ViTConfig

    with pytest.raises(ValueError, match="config of type 'vit' gives no decoder to estimate: "):
        estimate(ViTConfig(), 10)


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def invoke(*arguments):
        return CliRunner().invoke(app, ["estimate", *map(str, arguments)])

    return invoke


@pytest.fixture
def saved(tmp_path):
    LLAMA.save_pretrained(tmp_path)
    return tmp_path


def test_the_command(run, saved, llama):
    result = run("--model", saved / "config.json", "--gpu-memory", 80, "--batch", 8, "--context", 32768)
    assert result.exit_code == 0, result.output
    rows = {cells[0]: cells[1:] for cells in table(result.output)}
    assert list(rows)[:2] == ["dense", "kvarn_k4v2_g128"]
    assert len(rows) == 11
    free = int(80 * 2**30 * 0.9) - llama.weight_bytes
    assert rows["dense"] == ["16", "131,072", "32.00 GiB", "1.00", *fits(llama, free, None)]
    assert rows["kvarn_k4v2_g128"] == ["3.375", "27,648", "7.00 GiB", "4.57", *fits(llama, free, "kvarn_k4v2_g128")]
    assert "8,030,261,248 parameters in bfloat16" in result.output
    assert "14.96 GiB" in result.output


def test_the_command_with_a_folder_some_presets_and_given_weights(run, saved):
    presets = ["--preset", "kvarn_k2v2_g64", "--preset", "kvarn_k8v4_g128"]
    result = run("--model", saved, "--gpu-memory", 24, "--weights", 5.5, "--dtype", "float16", *presets)
    assert result.exit_code == 0, result.output
    assert [cells[0] for cells in table(result.output)] == ["dense", "kvarn_k2v2_g64", "kvarn_k8v4_g128"]
    assert "5.50 GiB" in result.output


def test_nothing_is_cut_off_in_a_narrow_terminal(run, saved, llama, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = run("--model", saved, "--gpu-memory", 900_000)
    rows = {cells[0]: cells[1:] for cells in table(result.output)}
    free = int(900_000 * 2**30 * 0.9) - llama.weight_bytes
    assert rows["dense"][4:] == ["no limit", f"{most_rows(llama, free, 32768, None):,}"]
    assert "…" not in result.output


def table(output):
    lines = (re.split(r"\s+(?!GiB|MiB|limit)", line.strip()) for line in output.splitlines())
    return [cells for cells in lines if cells[0].startswith(("dense", "kvarn_"))]


def fits(shapes, free, kvarn):
    return [f"{most_tokens(shapes, free, 8, kvarn):,}", f"{most_rows(shapes, free, 32768, kvarn):,}"]


def test_help(run):
    result = run("--help")
    assert result.exit_code == 0
    assert "--gpu-memory" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere"], "model must be a config.json or a folder with one, got '/nowhere'"),
        (["--model", "a.gguf"], "got the GGUF file 'a.gguf'"),
        (["--preset", "kvarn_k5v2_g128"], "preset must be one of"),
        (["--gpu-memory", "8"], "the weights take 14.96 GiB, more than the 7.20 GiB that may be used"),
        (["--gpu-memory", "0"], "gpu-memory must be above 0 and at most 1,000,000 GiB, got 0.0"),
        (["--utilization", "1.5"], "utilization must be above 0 and at most 1, got 1.5"),
        (["--gpu-memory", "inf"], "gpu-memory must be above 0 and at most 1,000,000 GiB, got inf"),
        (["--weights", "-1"], "weights must be from 0 to 1,000,000 GiB, got -1.0"),
        (["--dtype", "int8"], "dtype must be one of"),
    ],
)
def test_bad_options(run, saved, arguments, message):
    result = run(*["--model", saved, "--gpu-memory", 80, *arguments])
    assert result.exit_code == 2
    assert message in re.sub(r"\s+", " ", result.output)
    assert "Traceback" not in result.output


def test_a_config_that_transformers_does_not_know(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ValueError, match=r"model must be a config that Transformers knows, got .*no_such_model"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="model must be a config that Transformers knows"):
        load_config(tmp_path)
