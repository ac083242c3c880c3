"""What watching a cache costs: decode steps of ``generate()`` with ``KVarNCache(monitor=...)``, on and off."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kvarn_hf.bench.generate import decode, describe, fill_kvarn, random_model
from kvarn_hf.bench.results import save
from kvarn_hf.cache import KVarNCache
from kvarn_hf.terminal import table

_TURN = 16  # tokens


def monitor(
    shape: str = "llama-3.1-8b",
    contexts: Sequence[int] = (8192,),
    batches: Sequence[int] = (1, 8),
    segments: int = 5,
    attention: str = "sdpa",
    device: str = "cuda",
    out: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Time decode steps with the monitor off and on, in turns of a few tokens, so that a slow second meets both.

    A segment decodes as many tokens as a tile has, so that one of its steps packs a tile in every layer, always the
    same one. Of every step of a segment the median over the segments is taken, and of these the mean. Returns rows with
    ``batch``, ``context``, ``monitor`` (every tile or none), ``step_ms`` (mean), ``overhead`` (of the mean step),
    ``median_step_ms`` and ``packing_step_ms``.

    Parameters
    ----------
    shape, contexts, batches, device, out
        As in :func:`kvarn_hf.bench.generate.generate`; contexts are cut to whole tiles.
    segments : int
        How many count, after one that does not.
    attention : str
        The model's attention implementation.
    """
    model = random_model(shape, device)
    model.set_attn_implementation(attention)
    rows = []
    with torch.inference_mode():
        for batch, context in product(batches, contexts):
            rows += _compare(model, batch, context, segments)
            if out is not None:
                save(rows, "monitor", out)
    _show(rows, shape)
    return rows


def _compare(model: Any, batch: int, context: int, segments: int) -> list[dict[str, Any]]:
    caches = [KVarNCache(model.config, monitor=watched) for watched in (False, True)]
    tile = caches[0].kvarn.tile_size
    for cache in caches:
        # The step that packs is then in the middle of a turn, whose first step is not timed.
        fill_kvarn(cache, model, batch, context - context % tile + _TURN // 2)
    taken: list[list[list[float]]] = [[[] for _ in range(segments + 1)] for _ in caches]
    for segment, turn in product(range(segments + 1), range(tile // _TURN)):
        for watched in (False, True) if turn % 2 else (True, False):
            taken[watched][segment] += decode(model, caches[watched], batch, _TURN)
    steps = [[1e3 * statistics.median(step) for step in zip(*each[1:], strict=True)] for each in taken]
    means = [statistics.mean(step) for step in steps]
    packing = max(range(len(steps[0])), key=lambda step: steps[False][step] + steps[True][step])
    return [
        {
            "batch": batch,
            "context": context,
            "monitor": watched,
            "step_ms": means[watched],
            "overhead": means[watched] / means[False] - 1,
            "median_step_ms": statistics.median(steps[watched]),
            "packing_step_ms": steps[watched][packing],
        }
        for watched in (False, True)
    ]


def _show(rows: Sequence[dict[str, Any]], shape: str) -> None:
    times = "mean step", "overhead", "median step", "packing step"
    made = table("batch", "context", "monitor", *times, title=describe(shape))
    for row in rows:
        switch, overhead = ("on", f"{row['overhead']:+.1%}") if row["monitor"] else ("off", "-")
        step, median, packing = (f"{row[name]:.2f} ms" for name in ("step_ms", "median_step_ms", "packing_step_ms"))
        made.add_row(str(row["batch"]), str(row["context"]), switch, step, overhead, median, packing)
    Console().print(made)
