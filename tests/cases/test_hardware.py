"""What people hit with quantized KV caches elsewhere: the wrong GPU, an old one, none.

Numbers are those of the list the cases come from.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from kvarn_hf import KVarNConfig, ops
from kvarn_hf.ops import dispatch
from tests.cases.small import filled, random_kv, read, relative_error

# --- 16: kernels launched on the wrong GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_16_kernels_run_where_the_tensors_are():
    assert torch.cuda.current_device() == 0
    keys, values = random_kv(2, 2, 700, 128)
    caches = []
    for device in ("cuda:1", "cuda:0"):
        cache = filled(keys.to(device), values.to(device), KVarNConfig())
        caches.append((cache, *cache.update(keys[:, :, :3].to(device), values[:, :, :3].to(device), 0)))
    assert torch.cuda.current_device() == 0
    (one, *read_one), (zero, *read_zero) = caches
    assert read_one[0].device == torch.device("cuda:1")
    assert all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(read_one, read_zero, strict=True))
    assert one.memory_footprint() == zero.memory_footprint()


# --- 17: import fails without Triton, or CPU tensors reach a kernel ---


def test_17_works_without_triton():
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch\n"
        "from kvarn_hf import KVarNCache\n"
        "cache = KVarNCache()\n"
        "x = torch.randn(1, 2, 640, 64)\n"
        "cache.update(x, x, 0)\n"
        "keys, values = cache.update(x[:, :, :1], x[:, :, :1], 0)\n"
        "assert cache.report()['tiles'] == 3 and keys.shape == values.shape == (1, 2, 641, 64)\n"
        "assert 'kvarn_kernels' not in sys.modules\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_17_cpu_tensors_never_reach_a_kernel(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvarn_kernels", None)  # importing it fails
    assert not ops.uses_kernels(torch.device("cpu"))
    keys, values = random_kv(2, 2, 300, 64)
    cache = filled(keys, values)
    cache.update(keys[:, :, :1], values[:, :, :1], 0)
    assert cache.get_seq_length() == 301


# --- 18: old GPUs: PTX as the error text ---


@pytest.mark.gpu
@pytest.mark.parametrize("missing", ["capability", "triton"])
def test_18_old_gpus_fall_back_with_one_warning(monkeypatch, missing):
    keys, values = random_kv(1, 2, 600, 64, device="cuda", dtype=torch.bfloat16)
    expected = read(filled(keys.cpu(), values.cpu(), KVarNConfig()))
    if missing == "capability":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (7, 5))
    else:
        monkeypatch.setitem(sys.modules, "triton", None)
    dispatch._kernels_run_on.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            held = read(filled(keys, values, KVarNConfig(), layers=3))
            read(filled(keys, values, KVarNConfig()))
        messages = [str(w.message) for w in caught if "KVarN" in str(w.message)]
        assert len(messages) == 1
        assert ("has 7.5" if missing == "capability" else "Triton is not installed") in messages[0]
    finally:
        dispatch._kernels_run_on.cache_clear()
    assert all(relative_error(x.cpu(), y) < 0.01 for x, y in zip(held, expected, strict=True))
