"""Which path is taken where."""

import sys
import warnings

import pytest
import torch

from kvarn_hf import ops
from kvarn_hf.ops import dispatch

CPU = torch.device("cpu")
CUDA_0, CUDA_1 = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that GPUs of some capability are there."""

    def pretend(capability, hip=None, triton=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
        monkeypatch.setattr(torch.version, "hip", hip)
        if not triton:
            monkeypatch.setitem(sys.modules, "triton", None)

    dispatch._kernels_run_on.cache_clear()
    yield pretend
    dispatch._kernels_run_on.cache_clear()


def test_cpu_tensors_never_reach_a_kernel_nor_query_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: pytest.fail("queried a GPU"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not ops.uses_kernels(CPU)
        assert not ops.uses_kernels(torch.device("meta"))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
def test_kernels_run_on_new_gpus(gpu, capability):
    pytest.importorskip("triton")
    gpu(capability)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ops.uses_kernels(CUDA_0)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"capability": (7, 5)}, "need compute capability 8.0 or newer, this GPU has 7.5"),
        ({"capability": (7, 0), "triton": False}, "this GPU has 7.0"),
        ({"capability": (9, 4), "hip": "6.2"}, "tested on NVIDIA GPUs only"),
        ({"capability": (9, 0), "triton": False}, "Triton is not installed"),
    ],
)
def test_elsewhere_plain_torch_with_one_warning(gpu, machine, reason):
    gpu(**machine)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not any(ops.uses_kernels(CUDA_0) for _ in range(5))
        assert len(caught) == 1
        assert not ops.uses_kernels(CUDA_1)
    assert len(caught) == 2
    for index, warning in enumerate(caught):
        assert f"cuda:{index}" in str(warning.message)
        assert reason in str(warning.message)
        assert "\n" not in str(warning.message)
