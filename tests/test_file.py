"""``save`` and ``load``: what a file holds, and what is no such file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvarn_hf import KVarNCache
from tests import models_tiny as tiny
from tests.cache.common import SMALL, filled, kv

ROOT = Path(__file__).parents[1]


def test_save_and_load_in_a_new_process(tmp_path):
    names, ids = ("llama", "gemma3", "deepseek_v3"), tiny.prompt(2, 260)
    caches = {name: KVarNCache(tiny.model(name).config, SMALL, skip_layers=[0]) for name in names}
    for name, cache in caches.items():
        tiny.forward(tiny.model(name), ids[:, :250], cache)
        cache.save(tmp_path / f"{name}.safetensors")
    code = (
        "import sys, torch\n"
        "torch.set_num_threads(1)\n"
        "from kvarn_hf import KVarNCache\n"
        "from tests import models_tiny as tiny\n"
        "for name in sys.argv[1:]:\n"
        "    cache = KVarNCache.load(f'{name}.safetensors')\n"
        "    logits = tiny.forward(tiny.model(name), tiny.prompt(2, 260)[:, 250:], cache)\n"
        "    torch.save(logits, f'{name}.pt')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    subprocess.run([sys.executable, "-c", code, *names], check=True, env=environment, cwd=tmp_path)
    for name, cache in caches.items():
        expected = tiny.forward(tiny.model(name), ids[:, 250:], cache)
        assert torch.equal(torch.load(tmp_path / f"{name}.pt"), expected)


def test_loading_something_else(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"path must be a file written by KVarNCache.save, got '.*other.safetensors'"):
        KVarNCache.load(tmp_path / "other.safetensors")


def test_bad_paths_and_devices(tmp_path):
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"path must be a file written by KVarNCache.save, got '.*junk'"):
        KVarNCache.load(tmp_path / "junk")
    filled(*kv(1, 20)).save(tmp_path / "cache")
    with pytest.raises(ValueError, match=r"device must be one of this machine's .* got 'cuda:99'"):
        KVarNCache.load(tmp_path / "cache", device="cuda:99")
    with pytest.raises(ValueError, match=r"path must lie in a folder that exists, got '.*nowhere/cache'"):
        filled(*kv(1, 20)).save(tmp_path / "nowhere" / "cache")


def test_loading_an_older_file(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "old.safetensors", metadata={"format": "kvarn_hf cache 1"})
    with pytest.raises(ValueError, match=r"got '.*old.safetensors' in the older 'kvarn_hf cache 1'"):
        KVarNCache.load(tmp_path / "old.safetensors")


def test_a_linear_layer_cannot_be_saved(tmp_path):
    model = tiny.model("qwen3_next")
    cache = KVarNCache(model.config, SMALL)
    tiny.forward(model, tiny.prompt(1, 20), cache)
    with pytest.raises(ValueError, match="got a LinearAttentionLayer"):
        cache.save(tmp_path / "cache.safetensors")
