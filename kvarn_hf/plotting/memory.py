"""Figures of bytes and of speed: what a cache holds, what fits, and how long a decode step takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarn_hf.plotting.style import (
    GREY,
    dress,
    figure,
    grouped_bars,
    legend_above,
    legend_beside,
    plain_log,
    series_styles,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 2**30


def cache_bytes(caches: Mapping[str, Mapping[str, int]]) -> Figure:
    """What caches hold: a stacked bar for each, of the bytes of its parts."""
    made, ((ax,),) = figure(1, 1, (7.0, 0.55 * len(caches) + 1.0))
    names = list(caches)
    parts = list(dict.fromkeys(part for held in caches.values() for part in held))
    left = dict.fromkeys(caches, 0.0)
    for part, style in zip(parts, series_styles(parts), strict=True):
        present = [cache for cache, held in caches.items() if held.get(part)]
        widths = [caches[cache][part] / 2**20 for cache in present]
        rows, starts = [names.index(cache) for cache in present], [left[cache] for cache in present]
        ax.barh(rows, widths, 0.6, starts, label=part, **style.bar())
        for cache, width in zip(present, widths, strict=True):
            left[cache] += width
    for row, total in enumerate(left.values()):
        ax.text(total, row, f" {total:.1f} MiB", va="center", fontsize=9)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.15 * max(left.values()))
    dress(ax, "", "MiB")
    ax.grid(False, axis="y")
    legend_above(ax, len(parts))
    return made


def bytes_by_context(
    contexts: Sequence[int], caches: Mapping[str, Sequence[int]], limits: Mapping[str, int] | None = None
) -> Figure:
    """How caches grow: the bytes of each at every context, in tokens. ``limits``, in bytes, are drawn as horizontal
    lines with their names, such as a GPU's free memory."""
    made, ((ax,),) = figure(1, 1, (7.0, 3.6))
    for (name, sizes), style in zip(caches.items(), series_styles(caches), strict=True):
        gib = [size / GIB for size in sizes]
        ax.plot(contexts, gib, label=name, **style.line())
        ax.annotate(f"  {gib[-1]:.1f} GiB", (contexts[-1], gib[-1]), fontsize=8, va="center", annotation_clip=False)
    for name, size in (limits or {}).items():
        ax.axhline(size / GIB, color=GREY, linestyle=(0, (6, 4)), linewidth=1)
        ax.text(0.99 * contexts[-1], size / GIB, name, fontsize=8, color=GREY, ha="right", va="bottom")
    ax.set(xlim=(0, contexts[-1]), ylim=(0, None), xticks=[contexts[-1] * i // 8 for i in range(9)])
    ax.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k")
    dress(ax, "", "context, in tokens (1k = 1,024)", "cache, in GiB", legend=True)
    return made


def tokens_that_fit(gpus: Mapping[str, Mapping[str, int]]) -> Figure:
    """Bars of the tokens that fit on each GPU with each cache."""
    made, ((ax,),) = figure(1, 1, (7.0, 3.4))
    grouped_bars(ax, gpus, lambda tokens: f"{tokens / 1000:,.0f}k")
    ax.yaxis.set_major_formatter(lambda x, _: f"{x / 1000:,.0f}k")
    dress(ax, "", "", "tokens that fit (1k = 1,000)", legend=True)
    ax.grid(False, axis="x")
    return made


def read_rows(folder: str | Path, benchmark: str) -> tuple[list[dict[str, Any]], str]:
    """Rows of the results of a benchmark, ``"generate"`` or ``"attention"``, and what they were measured with.

    The rows of all files ``bench_<benchmark>*.json`` in ``folder``, which :func:`kvarn_hf.bench.results.save` wrote or
    which are lists of rows, in the order of their names; and GPU and versions, as far as the files tell.
    """
    rows: list[dict[str, Any]] = []
    made: dict[str, None] = {}
    for file in sorted(Path(folder).glob(f"bench_{benchmark}*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, list):
            rows += content
        else:
            rows += content["results"]
            made[describe(content.get("measured_with", {}))] = None
    return rows, "; ".join(filter(None, made))


def describe(measured_with: Mapping[str, str]) -> str:
    """What :func:`kvarn_hf.bench.results.measured_with` returns, as a line."""
    versions = [f"{name} {version}" for name, version in measured_with.items() if name != "gpu"]
    return ", ".join([measured_with["gpu"], *versions]) if measured_with else ""


def decode_steps(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Time of a decode step by context on logarithmic axes, one for each batch size, from rows as
    :func:`kvarn_hf.bench.generate.generate` returns them. Runs that failed (``step_ms`` is None) are left out."""
    timed = [row for row in rows if row["step_ms"] is not None]
    batches = sorted({row["batch"] for row in timed})
    caches = list(dict.fromkeys(row["cache"] for row in timed))
    made, axes = figure(1, len(batches), (1.5 + 3.6 * len(batches), 3.4), sharey=True)
    for ax, batch in zip(axes[0], batches, strict=True):
        for cache, style in zip(caches, series_styles(caches), strict=True):
            points = sorted((r["context"], r["step_ms"]) for r in timed if (r["cache"], r["batch"]) == (cache, batch))
            # Drawn without points too: there is one legend for all.
            x, y = [context for context, _ in points], [step for _, step in points]
            ax.plot(x, y, label=cache, **style.line())
        plain_log(ax)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k")
        unit = "decode step, in ms" if batch == batches[0] else ""
        dress(ax, f"batch {batch}", "context, in tokens (1k = 1,024)", unit)
    legend_beside(axes[0][-1])
    return made


def attention_times(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Time that reading the cache takes in one decode step, packed against dense, as horizontal bars, from rows as
    :func:`kvarn_hf.bench.attention.attention` returns them."""
    shapes: dict[str, dict[str, float]] = {}
    for row in rows:
        name = "batch {batch}, {thousands}k tokens, {heads} KV heads x {groups}, head_dim {head_dim}"
        name = name.format(**row, thousands=row["context"] // 1024)
        times = shapes.setdefault(name, {"dense (best SDPA)": row["dense"][row["best_dense"]]})
        times[row["preset"]] = row["packed"]
    made, ((ax,),) = figure(1, 1, (7.5, 0.55 * len(shapes) + 1.0))
    grouped_bars(ax, shapes, lambda time: f"{time:.0f}", horizontal=True)
    dress(ax, "", "microseconds")
    ax.grid(False, axis="y")
    legend_above(ax, len({name for times in shapes.values() for name in times}))
    return made
