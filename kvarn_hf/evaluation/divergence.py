"""The suites ``pseudo-decode`` and ``accumulation``: KL divergence from the dense run, by text, cache and position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvarn_hf.checks import whole
from kvarn_hf.evaluation.caches import CacheSpec, cache_spec
from kvarn_hf.evaluation.pseudo_decode import HISTORIES, SKIP, DenseReference, dense_reference
from kvarn_hf.evaluation.runner import Run
from kvarn_hf.evaluation.texts import Plan, measure_texts

KEY = ("text", "cache", "tokens", "stretches", "dtype", "history")
POSITION_WIDTH = 256
STATISTICS = ("mean", "median", "p999", "max", "top1", "perplexity_ratio")


def measure(
    run: Run,
    suite: str,
    texts: Sequence[Path],
    caches: Sequence[str],
    lengths: Sequence[int],
    histories: Sequence[str] = HISTORIES[:1],
    batch: int = 1,
    stretches: int = 1,
) -> None:
    """Measure every combination that is not in the results yet.

    Parameters
    ----------
    suite : str
        Name of the result file: ``"pseudo_decode"`` or ``"accumulation"``.
    texts, caches, lengths, histories, batch, stretches
        See :class:`~kvarn_hf.evaluation.texts.Plan`, with the caches' names; a text's figures are those of all
        positions of its stretches.

    Raises
    ------
    ValueError
        If a length is too short for anything to be measured.
    """
    for count in lengths:
        whole("tokens", count, least=SKIP + 1)
    plan = Plan(texts, [cache_spec(name) for name in caches], lengths, histories, batch, stretches)

    def compare(
        dense: DenseReference, model: Any, cache: Any, spec: CacheSpec, history: str
    ) -> tuple[list[dict[str, Any]], str]:
        pace = {} if spec.reads_in_blocks else {"block": 1, "first": SKIP}
        found = dense.compare(model, cache, history, **pace)
        texts = [found.rows(start, stretches) for start in range(0, len(found.kl), stretches)]
        positions = {"position_width": POSITION_WIDTH, "first_position": SKIP}
        rows = [
            {name: getattr(text, name) for name in STATISTICS}
            | positions
            | {"by_position": text.by_position(POSITION_WIDTH)}
            for text in texts
        ]
        return rows, (
            f"mean KL {found.mean:.5f}, median {found.median:.2g}, 99.9th {found.p999:.3f}, top-1 {found.top1:.3f}"
        )

    measure_texts(run, run.results(suite, KEY), plan, dense_reference, compare, stretches=stretches)
