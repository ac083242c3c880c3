"""Accuracy on real models: KL divergence from the dense cache in pseudo-decode (eval/README.md has the full tables)."""

import argparse
import inspect
import os
from importlib.resources import files

import pytest
import torch

from kvarn_hf import KVarNCache, KVarNConfig
from kvarn_hf.evaluation.pseudo_decode import dense_reference
from kvarn_hf.models import load_model

TOKENS = 1024
TEXTS = {
    "speech": lambda: files("kvarn_hf").joinpath("data/madison_1809.txt").read_text(encoding="utf-8"),
    "code": lambda: inspect.getsource(argparse),
}
# Mean KL in nats that the method must not exceed, on the mean over texts.
TARGET = {"smollm2": {"k4v2": 0.0042, "k2v2": 0.022}, "qwen": {"k4v2": 0.0045, "k2v2": 0.025}}


@pytest.fixture(scope="module", autouse=True)
def _threads():
    before = torch.get_num_threads()
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers beside this one use the other cores
        torch.set_num_threads(min(4, os.cpu_count() or 1))
    yield
    torch.set_num_threads(before)


class Measured:
    """A model's KL divergence on every text, measured when first asked for; the dense cache runs once per text."""

    def __init__(self, model, tokenizer):
        self.model = model
        self.tokenizer = tokenizer
        self.dense = {}
        self.results = {}

    def __call__(self, text, preset, method="kvarn"):
        key = text, preset, method
        if text not in self.dense:
            ids = self.tokenizer(TEXTS[text](), return_tensors="pt").input_ids[:, :TOKENS]
            self.dense[text] = dense_reference(self.model, ids)
        if key not in self.results:
            config = KVarNConfig.from_preset(f"kvarn_{preset}_g128", method=method)
            self.results[key] = self.dense[text].compare(self.model, KVarNCache(self.model.config, config))
        return self.results[key]

    def mean(self, preset, method="kvarn"):
        return sum(self(text, preset, method).mean for text in TEXTS) / len(TEXTS)


@pytest.fixture(scope="module")
def smollm2():
    try:
        loaded = load_model(dtype="float32", device="cpu")
    except OSError as error:
        pytest.skip(str(error))
    return Measured(*loaded)


@pytest.fixture(scope="module")
def qwen(request):
    path = request.config.getoption("--qwen")
    if path is None:
        pytest.skip("needs a folder with Qwen2.5-Coder-0.5B-Instruct: pytest --qwen PATH")
    return Measured(*load_model(path, dtype="float32", device="cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["k4v2", "k2v2"])
def test_smollm2_keeps_its_distributions(smollm2, preset):
    kvarn, published = smollm2.mean(preset), smollm2.mean(preset, "published")
    print(f"SmolLM2-135M {preset}: mean KL {kvarn:.5f}, published algorithm {published:.5f}")
    assert kvarn <= TARGET["smollm2"][preset]
    assert kvarn <= 1.1 * published


@pytest.mark.slow
def test_bits_of_values_and_of_keys_change_the_outcome(smollm2):
    fewer_key_bits, default, more_value_bits = (smollm2("code", preset) for preset in ("k2v2", "k4v2", "k4v4"))
    assert more_value_bits.mean < 0.6 * default.mean
    assert default.mean < 0.6 * fewer_key_bits.mean
    assert default.top1 > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["k4v2", "k2v2"])
def test_qwen_with_its_huge_key_bias_keeps_its_distributions(qwen, preset):
    kvarn, published = qwen.mean(preset), qwen.mean(preset, "published")
    print(f"Qwen2.5-Coder-0.5B {preset}: mean KL {kvarn:.5f}, published algorithm {published:.5f}")
    assert kvarn <= TARGET["qwen"][preset]
    assert kvarn <= 1.1 * published
