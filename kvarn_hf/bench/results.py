"""Benchmark figures as files: rows and what they were measured with, as JSON and as a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers


def save(rows: Sequence[dict[str, Any]], benchmark: str, folder: str | Path) -> Path:
    """Write rows with the same keys as ``bench_<benchmark>.json`` and ``.md`` into a folder, which is created if it is
    not there, and return the JSON file's path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"bench_{benchmark}.json"
    versions = measured_with()
    path.write_text(json.dumps({"measured_with": versions, "results": list(rows)}, indent=1) + "\n", encoding="utf-8")
    columns = [name for name, value in rows[0].items() if not isinstance(value, dict)] if rows else []
    lines = [columns, ["---"] * len(columns), *([_cell(row[c]) for c in columns] for row in rows)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    path.with_suffix(".md").write_text(f"{made}\n\n{table}\n", encoding="utf-8")
    return path


def measured_with() -> dict[str, str]:
    """GPU and versions."""
    import triton

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"gpu": gpu} | {package.__name__: package.__version__ for package in (torch, transformers, triton)}


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
