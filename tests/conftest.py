"""Settings for every test."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined, whichever test imports one first.
    os.environ["TRITON_INTERPRET"] = "1"

# More are slower for tensors this small.
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--qwen", metavar="PATH", help="folder with Qwen2.5-Coder-0.5B-Instruct, for its accuracy tests")


def pytest_collection_modifyitems(items):
    # The longest first, so that no worker is left alone with them at the end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
