"""A tiny model with a tokenizer, and texts of its characters."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models_lettered import CHARACTERS, save_lettered_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_lettered_model(tmp_path_factory.mktemp("models") / "lettered")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    paths = []
    for name in ("first", "second"):
        path = tmp_path_factory.mktemp("texts") / f"{name}.txt"
        path.write_text("".join(random.Random(name).choices(CHARACTERS, k=1000)))
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        folder
    )
