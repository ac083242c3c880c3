"""Results on disk: one JSON file for each suite and model, which a later run adds to."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers


def environment(device: torch.device | str, seed: int) -> dict[str, Any]:
    """What figures depend on beside the code's arguments: versions, hardware, commit, seed."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "kvarn_hf": _version(),
        "commit": _commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "seed": seed,
    }


class ResultFile:
    """The records of one suite and model, in a file that is read if it is there; ``key`` are the fields that tell one
    record from another."""

    def __init__(self, path: Path, model: str, key: Iterable[str]) -> None:
        self.path, self.key = path, tuple(key)
        content = json.loads(path.read_text()) if path.exists() else {}
        self.model: str = content.get("model", model)
        self.environments: list[dict[str, Any]] = content.get("environments", [])
        self.records: list[dict[str, Any]] = content.get("results", [])
        self._done = {self._key_of(record) for record in self.records}

    def has(self, **fields: Any) -> bool:
        """Whether there is a record with these key fields."""
        return self._key_of(fields) in self._done

    def add(self, record: dict[str, Any], environment: dict[str, Any]) -> None:
        """Keep a record, on disk at once: an interrupted run loses nothing that it has finished."""
        if environment not in self.environments:
            self.environments.append(environment)
        self.records.append(_rounded(record) | {"environment": self.environments.index(environment)})
        self._done.add(self._key_of(record))
        head = json.dumps({"model": self.model, "environments": self.environments}, indent=1).removesuffix("\n}")
        rows = ",\n  ".join(map(json.dumps, self.records))  # a line for each record, so that differences can be read
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(f'{head},\n "results": [\n  {rows}\n ]\n}}\n')
        os.replace(unfinished, self.path)

    def _key_of(self, record: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(record[name] for name in self.key)


def _rounded(value: Any) -> Any:
    """Floats to six significant digits, which is more than any of them means."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _version() -> str | None:
    try:
        return metadata.version("kvarn-hf")
    except metadata.PackageNotFoundError:  # used from a checkout, without being installed
        return None


def _commit() -> str | None:
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return None
    return found.stdout.strip() or None
