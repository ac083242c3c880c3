"""What every suite needs: the model, where results go, and how far it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils import logging

from kvarn_hf.checks import text_of
from kvarn_hf.evaluation.caches import CacheSpec
from kvarn_hf.evaluation.results import ResultFile, environment
from kvarn_hf.models import DEFAULT_MODEL, load_model
from kvarn_hf.terminal import Steps, print_line, steps


@dataclass
class Run:
    """One model's evaluation: ``model``, ``dtype`` and ``device`` as in :func:`kvarn_hf.models.load_model`, the folder
    ``out`` of the results, and the ``seed`` of everything random in a suite."""

    model: str | None = None
    dtype: str = "float32"
    device: str | None = None
    out: Path = Path("eval/results")
    seed: int = 0
    console: Console = field(default_factory=Console)

    @property
    def name(self) -> str:
        """The model's name in results."""
        return DEFAULT_MODEL if self.model is None else Path(self.model).name.removesuffix(".gguf")

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        """Model and tokenizer, loaded when something is left to measure."""
        logging.disable_progress_bar()
        return load_model(self.model, self.dtype, self.device)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """See :func:`kvarn_hf.evaluation.results.environment`."""
        return environment(self.loaded[0].device, self.seed)

    def results(self, suite: str, key: Sequence[str]) -> ResultFile:
        """The results of a suite so far."""
        return ResultFile(self.out / f"{suite}_{self.name}.json", self.name, key)

    def steps(self, total: int) -> AbstractContextManager[Steps]:
        """A bar of ``total`` steps."""
        return steps(self.console, self.name, total)

    @contextmanager
    def tolerating(self, spec: CacheSpec, steps: Steps) -> Iterator[None]:
        """A step in which another package's cache may fail: it is reported and skipped; a later run tries it again."""
        try:
            yield
        except Exception as error:
            if spec.package is None:
                raise
            reason = [*str(error).strip().splitlines(), ""][0][:200]
            print_line(self.console, f"{spec.name} failed: {type(error).__name__}: {reason}", style="yellow")
        steps.end()


def first_tokens(tokenizer: Any, texts: Sequence[Path], count: int, stretches: int = 1) -> torch.Tensor:
    """The first stretches of ``count`` tokens of each text, ``[texts * stretches, count]``, int64.

    They follow one another, and each begins as the tokenizer begins a text by itself.

    Raises
    ------
    ValueError
        If a text has fewer tokens.
    """
    rows = []
    for text in texts:
        content = text_of("text", text)
        begun, ids = (tokenizer(content, add_special_tokens=added).input_ids for added in (True, False))
        places = range(len(begun) - len(ids) + 1)
        start: list[int] = next((begun[:i] for i in places if begun[i : i + len(ids)] == ids), [])
        fresh = count - len(start)
        if len(ids) < fresh * stretches:
            most = len(ids) // stretches + len(start)
            of = f"{stretches} stretches of " if stretches > 1 else ""
            raise ValueError(f"tokens must be at most {most} for {of}the text {text.name}, got {count}")
        rows += [start + ids[i * fresh : (i + 1) * fresh] for i in range(stretches)]
    return torch.tensor(rows)
