"""The suite ``tasks``: lm-eval-harness, through each cache, with its results kept beside those of the other suites."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from kvarn_hf.evaluation.caches import cache_spec
from kvarn_hf.evaluation.runner import Run

KEY = ("task", "cache", "metric", "limit", "dtype", "chat", "seed")
_SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
# The wheel does not carry it: without a checkout, only lm-eval's own tasks are there.
TASK_FOLDER = Path(__file__).parents[2] / "eval" / "tasks"


def measure(
    run: Run,
    tasks: Sequence[str],
    caches: Sequence[str],
    limit: int | None = None,
    batch: int = 8,
    chat: bool = False,
    data: Path | None = None,
    task_folder: Path | None = None,
) -> None:
    """Measure every combination that is not in the results yet; the dense cache is always measured too.

    Parameters
    ----------
    tasks : sequence of str
        Names that lm-eval knows, or of a YAML file in ``task_folder``.
    caches : sequence of str
        Names, see :mod:`kvarn_hf.evaluation.caches`.
    limit : int, optional
        The first so many examples of each task.
    batch : int
        Requests in one forward pass.
    chat : bool
        Whether to apply the model's chat template.
    data : Path, optional
        Folder of local data for the tasks of this repository; None: they come from the hub.
    task_folder : Path, optional
        Folder of YAML files; None: ``eval/tasks`` of the checkout, if the package is used from one.

    Raises
    ------
    ValueError
        If lm-eval is not installed, or does not know a task.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        from kvarn_hf.evaluation.harness import KVarNLM
    except ModuleNotFoundError as error:
        raise ValueError('the suite tasks needs lm-eval: pip install "kvarn-hf[eval]"') from error
    results = run.results("tasks", KEY)
    names = list(dict.fromkeys(("dense", *caches)))
    manager = None
    with run.steps(len(tasks) * len(names)) as steps:
        for task, name in product(tasks, names):
            fields = {"task": task, "cache": name, "limit": limit, "dtype": run.dtype, "chat": chat, "seed": run.seed}
            if any(fields.items() <= record.items() for record in results.records):
                steps.end()
                continue
            steps.begin(f"{run.name} {task} {name}")
            model, tokenizer = run.loaded
            if manager is None:
                folder = task_folder or TASK_FOLDER
                metadata = {"tokenizer": tokenizer.name_or_path} | ({"data": str(data)} if data is not None else {})
                manager = TaskManager(include_path=str(folder) if folder.is_dir() else None, metadata=metadata)
                unknown = [other for other in tasks if other not in manager.all_tasks]
                if unknown:
                    raise ValueError(f"task must be one that `lm-eval ls tasks` lists, got {unknown[0]!r}")
            with run.tolerating(cache_spec(name), steps):
                adapter = KVarNLM(model, name, tokenizer=tokenizer, batch_size=batch)
                found = simple_evaluate(
                    adapter,
                    tasks=[task],
                    limit=limit,
                    task_manager=manager,
                    apply_chat_template=chat,
                    **dict.fromkeys(_SEEDS, run.seed),
                    bootstrap_iters=1000,
                    log_samples=False,
                    confirm_run_unsafe_code=True,
                )
                records = _records(found["results"], fields, adapter.tiles)
                for record in records:
                    results.add(record, run.environment)
                steps.found("; ".join(map(_summary, records)))


def _summary(record: dict[str, Any]) -> str:
    error = "" if record["standard_error"] is None else f" ± {record['standard_error']:.4f}"
    return f"{record['task']} {record['metric']} {record['value']:.4f}{error}"


def _records(found: dict[str, dict[str, Any]], fields: dict[str, Any], tiles: Any) -> list[dict[str, Any]]:
    """One record for each metric; -1 is how lm-eval's tasks say that a metric does not apply."""
    mean_tiles = sum(count * requests for count, requests in tiles.items()) / tiles.total() if tiles else None
    records: list[dict[str, Any]] = []
    for subtask, metrics in found.items():
        for name, value in metrics.items():
            metric, _, _ = name.partition(",")
            if "," not in name or metric.endswith("_stderr") or not isinstance(value, (int, float)) or value == -1:
                continue
            error = metrics.get(name.replace(metric, f"{metric}_stderr", 1))
            record: dict[str, Any] = {
                "metric": name if subtask == fields["task"] else f"{subtask} {name}",
                "value": float(value),
            }
            record["standard_error"] = float(error) if isinstance(error, (int, float)) else None
            record["samples"] = metrics.get("sample_len", metrics.get("samples"))
            records.append({**fields, **record, "mean_tiles": mean_tiles})
    return records
