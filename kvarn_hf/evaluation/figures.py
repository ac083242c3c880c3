"""Figures of results: error by position, by layer, and by the length of a record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from kvarn_hf.plotting.style import dress, figure, series_style

Record = dict[str, Any]
_COMPARABLE = (("4-bit keys", r"_k4v2_g128$|-int4$|-4bit$"), ("2-bit keys", r"_k2v2_g128$|-int2$"))
_DASHES = {"accumulated": "-", "static": "--"}


def write_figures(folder: Path) -> list[Path]:
    """Draw what the results in ``folder`` hold, as PNG files beside them, and return the files.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    written = []
    for suite, draw in _DRAWINGS.items():
        for file in sorted(folder.glob(f"{suite}_*.json")):
            content = json.loads(file.read_text())
            drawn = draw(content["results"], content["model"])
            if drawn is not None:
                path = file.with_suffix(".png")
                drawn.savefig(path, metadata={"Software": None})
                written.append(path)
    return written


def _panels(records: list[Record]) -> list[tuple[str, list[str]]]:
    """Caches that are comparable in size, few enough to tell apart; other widths are in the tables alone."""
    caches = list(dict.fromkeys(r["cache"] for r in records))
    panels = [(title, [c for c in caches if c == "dense" or re.search(names, c)]) for title, names in _COMPARABLE]
    return [(title, chosen) for title, chosen in panels if set(chosen) - {"dense"}]


def _longest(records: list[Record]) -> list[Record]:
    tokens = max(r["tokens"] for r in records)
    return [r for r in records if r["tokens"] == tokens]


def _means(columns: Sequence[Sequence[float]]) -> list[float]:
    return [mean(column) for column in zip(*columns, strict=True)]


def _by_history(
    records: list[Record],
    model: str,
    curve: Callable[[list[Record]], tuple[list[float], list[float]]],
    labels: tuple[str, str],
    **scale: Any,
) -> Any:
    """A panel for caches of each size: a solid line for what accumulates and a dashed one for the static history."""
    panels = _panels(records)
    if not panels:
        return None
    drawn, (row,) = figure(1, len(panels), size=(5.2 * len(panels), 3.7), sharey=True)
    for axes, (title, caches) in zip(row, panels, strict=True):
        for i, cache in enumerate(caches):
            label: str | None = cache
            for history, dashes in _DASHES.items():
                group = [r for r in records if (r["cache"], r["history"]) == (cache, history)]
                if group:
                    axes.plot(*curve(group), label=label, **series_style(i).line(linestyle=dashes))
                    label = None
        dress(axes, f"{model}, {title} (dashed: static)", *labels, legend=True)
        axes.set(**scale)
    return drawn


def _accumulation(records: list[Record], model: str) -> Any:
    """Mean KL by position, accumulated and static, of the longest texts."""

    def curve(group: list[Record]) -> tuple[list[float], list[float]]:
        values = _means([r["by_position"] for r in group])
        first, width = group[0]["first_position"], group[0]["position_width"]
        return [first + width * (n + 0.5) for n in range(len(values))], values

    return _by_history(_longest(records), model, curve, ("position (tokens)", "mean KL (nats)"), yscale="log")


def _retrieval(records: list[Record], model: str) -> Any:
    """Share of lines found, by the number of lines."""

    def curve(group: list[Record]) -> tuple[list[float], list[float]]:
        ordered = sorted(group, key=lambda r: r["size"])
        return [r["size"] for r in ordered], [r["accuracy"] for r in ordered]

    lines = [r for r in records if r["task"] == "lines"]
    return _by_history(lines, model, curve, ("lines", "share found"), ylim=(-0.03, 1.03))


def _tensor(records: list[Record], model: str) -> Any:
    """Error of attention outputs and the magnitude share of the keys' worst errors, by layer."""
    static = [r for r in _longest(records) if r["history"] == "static"]
    panels = _panels(static)
    if not panels:
        return None
    drawn, rows = figure(len(panels), 2, size=(10.0, 3.6 * len(panels)))
    for (left, right), (title, caches) in zip(rows, panels, strict=True):
        for i, cache in enumerate(caches):
            group = [r for r in static if r["cache"] == cache]
            for axes, name in ((left, "attention_error"), (right, "key_worst_magnitude_share")):
                axes.plot(group[0]["layers"], _means([r[name] for r in group]), label=cache, **series_style(i).line())
        left.set_yscale("log")
        dress(left, f"{model}, {title}: attention output", "layer", "relative error", legend=True)
        dress(right, "keys: the 5 % largest errors", "layer", "magnitude share of the squared error")
    return drawn


_DRAWINGS: dict[str, Callable[[list[Record], str], Any]] = {
    "accumulation": _accumulation,
    "tensor": _tensor,
    "retrieval": _retrieval,
}
