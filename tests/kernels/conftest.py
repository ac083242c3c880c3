"""The kernels run through Triton's interpreter where there is no GPU, and compiled with ``pytest -m gpu``."""

import os

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("compiled kernels take no CPU tensors")
    return torch.device(request.param)
