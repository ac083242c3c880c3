"""Importing is harmless, and what is installed is what the repository says."""

import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import kvarn_hf
from kvarn_hf import KVarNConfig
from kvarn_hf.config import PRESETS

ROOT = Path(__file__).parents[1]


def in_a_new_process(code: str) -> str:
    paths = [str(ROOT), str(ROOT / "kernels")]
    code = f"import sys; sys.path[:0] = {paths!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_has_no_side_effects():
    in_a_new_process(
        """
import torch

def refuse(*args, **kwargs):
    raise AssertionError("the GPU was queried at import")

torch.cuda._lazy_init = torch.cuda.get_device_capability = torch.cuda.get_device_properties = refuse
torch.cuda.is_available = torch.cuda.device_count = refuse
threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
import kvarn_hf

assert not torch.cuda.is_initialized()
# torch itself imports triton when transformers asks it for flex attention; the kernels are this package's own doing.
assert not any(name.split(".")[0] == "kvarn_kernels" for name in sys.modules), "the kernels were imported"
assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, dtype)
"""
    )


def test_folder_of_kernels_takes_no_ones_name():
    # `kernels` is the import name of Hugging Face's package: a folder without __init__.py never shadows it.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    answer = in_a_new_process(
        """
from importlib.metadata import PackageNotFoundError, version
from transformers.utils import is_kernels_available
try:
    version("kernels")
except PackageNotFoundError:
    assert not is_kernels_available()
import kvarn_kernels
print(kvarn_kernels.__file__)
"""
    )
    assert Path(answer.strip()).parent.name == "kvarn_kernels"


def test_data_ships_with_its_source():
    data = resources.files("kvarn_hf").joinpath("data")
    assert "public domain" in data.joinpath("README.md").read_text(encoding="utf-8")
    assert len(data.joinpath("madison_1809.txt").read_text(encoding="utf-8").split()) > 1_500


def test_version_is_that_of_the_package():
    stated = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert stated and stated[1] == kvarn_hf.__version__


@pytest.mark.parametrize("preset", PRESETS)
def test_table_of_presets_in_the_readme(preset):
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith("| `" + preset))
    bits, ratio = re.findall(r"\| (\d+\.\d+)", row)[:2]
    config = KVarNConfig.from_preset(preset)
    assert float(bits) == pytest.approx(config.bits_per_element(128), abs=0.005)
    assert float(ratio) == pytest.approx(16 / config.bits_per_element(128), abs=0.005)
