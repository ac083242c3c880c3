"""What the suites over texts share: a record for every text, length, cache and history that has none yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from kvarn_hf.evaluation.caches import CacheSpec, full_attention_layers
from kvarn_hf.evaluation.results import ResultFile
from kvarn_hf.evaluation.runner import Run, first_tokens
from kvarn_hf.evaluation.states import States


class Plan(NamedTuple):
    """What is to be measured: UTF-8 files, caches, lengths in tokens and histories; ``batch`` texts in one forward
    pass, with ``stretches`` pieces of such a length each, from the text's beginning on."""

    texts: Sequence[Path]
    specs: Sequence[CacheSpec]
    lengths: Sequence[int]
    histories: Sequence[str]
    batch: int = 1
    stretches: int = 1

    def groups(self) -> list[tuple[int, Sequence[Path]]]:
        """Each length with the texts of each forward pass."""
        starts = range(0, len(self.texts), self.batch)
        return [(count, self.texts[start : start + self.batch]) for count in self.lengths for start in starts]


class DenseRun(Protocol):
    """The dense cache's run over a group of texts."""

    @property
    def states(self) -> list[States]:
        """What every layer was given, forward pass by forward pass."""


def measure_texts(
    run: Run,
    results: ResultFile,
    plan: Plan,
    run_dense: Callable[[Any, torch.Tensor], DenseRun],
    compare: Callable[[Any, Any, Any, CacheSpec, str], tuple[list[dict[str, Any]], str]],
    **settings: Any,
) -> None:
    """Measure every combination that is not in the results yet.

    Parameters
    ----------
    run_dense : callable
        Takes the model and ``[texts * stretches, tokens]`` int64 token ids.
    compare : callable
        Takes what ``run_dense`` returned, the model, an empty cache, its spec and the history; returns the fields of
        each text's record, and a summary to print.
    **settings
        Further fields of every record.
    """
    groups = plan.groups()
    with run.steps(len(groups) * len(plan.specs) * len(plan.histories)) as steps:
        for count, texts in groups:
            dense: DenseRun | None = None
            for spec, history in product(plan.specs, plan.histories):
                fields = {"cache": spec.name, "tokens": count, **settings, "dtype": run.dtype, "history": history}
                missing = [i for i, text in enumerate(texts) if not results.has(text=text.stem, **fields)]
                # A cache that reads single tokens alone has no static history: it is patched into the model.
                if not missing or (history == "static" and not spec.reads_in_blocks):
                    steps.end()
                    continue
                steps.begin(f"{run.name} {count:,} {spec.name} {history}")
                model, tokenizer = run.loaded
                if dense is None:
                    dense = run_dense(model, first_tokens(tokenizer, texts, count, plan.stretches))
                with run.tolerating(spec, steps), spec.opened(model) as cache:
                    rows, summary = compare(dense, model, cache, spec, history)
                    keys, _ = dense.states[0][full_attention_layers(model.config)[0]]
                    bits = spec.bits_per_element(keys.shape[3])
                    for i in missing:
                        results.add({"text": texts[i].stem, **fields, "bits": bits} | rows[i], run.environment)
                    steps.found(summary)
