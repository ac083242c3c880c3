"""Figures of results: error by position, by layer, and by the length of a record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from kvarn_hf.plotting.style import dress, figure, series_style

Record = dict[str, Any]
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


def _accumulation(records: list[Record], model: str) -> Any:
    """Mean KL by position, accumulated and static, of the longest texts."""
    tokens = max(r["tokens"] for r in records)
    chosen = [r for r in records if r["tokens"] == tokens]
    drawn, ((axes,),) = figure(size=(7.5, 4.0))
    for i, cache in enumerate(dict.fromkeys(r["cache"] for r in chosen)):
        for history, dashes in _DASHES.items():
            group = [r for r in chosen if (r["cache"], r["history"]) == (cache, history)]
            if not group:
                continue
            values = [mean(column) for column in zip(*(r["by_position"] for r in group), strict=True)]
            positions = [
                group[0]["first_position"] + group[0]["position_width"] * (n + 0.5) for n in range(len(values))
            ]
            axes.plot(
                positions, values, dashes, color=series_style(i).color, label=f"{cache}, {history}", linewidth=1.4
            )
    axes.set_yscale("log")
    dress(axes, f"{model}: KL divergence by position", "position (tokens)", "mean KL (nats)", legend=True)
    return drawn


def _tensor(records: list[Record], model: str) -> Any:
    """Error of attention outputs and the magnitude share of the keys' worst errors, by layer."""
    chosen = [r for r in records if r["history"] == "static"]
    if not chosen:
        return None
    drawn, ((left, right),) = figure(1, 2, size=(10.0, 3.8))
    for i, cache in enumerate(dict.fromkeys(r["cache"] for r in chosen)):
        group, style = [r for r in chosen if r["cache"] == cache], series_style(i)
        for axes, name in ((left, "attention_error"), (right, "key_worst_magnitude_share")):
            values = [mean(column) for column in zip(*(r[name] for r in group), strict=True)]
            axes.plot(
                group[0]["layers"], values, color=style.color, linestyle=style.linestyle, label=cache, linewidth=1.2
            )
    left.set_yscale("log")
    dress(left, f"{model}: attention output", "layer", "relative error")
    dress(right, "keys: the 5 % largest errors", "layer", "magnitude share of the squared error", legend=True)
    return drawn


def _retrieval(records: list[Record], model: str) -> Any:
    """Share of lines found, by the number of lines."""
    chosen = [r for r in records if r["task"] == "lines"]
    if not chosen:
        return None
    drawn, ((axes,),) = figure(size=(7.0, 3.8))
    for i, cache in enumerate(dict.fromkeys(r["cache"] for r in chosen)):
        for history, dashes in _DASHES.items():
            group = sorted(
                (r for r in chosen if (r["cache"], r["history"]) == (cache, history)), key=lambda r: r["size"]
            )
            style = series_style(i)
            sizes, values = [r["size"] for r in group], [r["accuracy"] for r in group]
            if group:
                axes.plot(sizes, values, dashes, color=style.color, marker=style.marker, label=f"{cache}, {history}")
    axes.set_ylim(-0.03, 1.03)
    dress(axes, f"{model}: line retrieval", "lines", "share found", legend=True)
    return drawn


_DRAWINGS: dict[str, Callable[[list[Record], str], Any]] = {
    "accumulation": _accumulation,
    "tensor": _tensor,
    "retrieval": _retrieval,
}
