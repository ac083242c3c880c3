"""Results as Markdown tables, for every suite."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Record = dict[str, Any]
Section = tuple[str, list[str]]  # a heading, and the lines below it


def write_reports(folder: Path) -> list[Path]:
    """Set all results in ``folder`` into tables, one Markdown file for each suite, and return the files."""
    written = []
    for suite, (title, introduction, sections) in _SUITES.items():
        lines = [f"# {title}", "", *introduction.strip().splitlines()]
        files = sorted(folder.glob(f"{suite}_*.json"))
        for content in (json.loads(file.read_text()) for file in files):
            for heading, tables in sections(content["results"]):
                lines += ["", f"## {content['model']}, {heading}", "", *tables]
            lines += ["", f"Measured with: {'; '.join(map(_describe, content['environments']))}."]
        if files:
            written.append(folder / f"{suite}.md")
            written[-1].write_text("\n".join(lines) + "\n")
    return written


def over_texts(values: Sequence[float]) -> str:
    """Mean over texts, with its standard error if there are several."""
    if len(values) < 2:
        return _number(values[0])
    return f"{_number(mean(values))} ± {_number(stdev(values) / len(values) ** 0.5)}"


def _describe(environment: Record) -> str:
    return ", ".join(f"{name} {value}" for name, value in environment.items() if value is not None)


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def _groups(records: Iterable[Record], names: Sequence[str]) -> dict[tuple[Any, ...], list[Record]]:
    """Records by some of their fields, in the order in which these first come."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        found.setdefault(tuple(record.get(name) for name in names), []).append(record)
    return found


def _by_cache(records: list[Record]) -> list[tuple[str, list[Record]]]:
    """Records of each cache: those with fewer bits first, and among equals the one with the smallest error."""
    groups = [(key[0], group) for key, group in _groups(records, ["cache"]).items()]
    return sorted(groups, key=lambda item: (item[1][0].get("bits") or 99, mean(r.get("mean", 0.0) for r in item[1])))


def _cache_table(
    head: Sequence[str], records: list[Record], cells: Callable[[list[Record]], Iterable[str]]
) -> list[str]:
    """A row for each cache, with the cells that its records give."""
    return _table(["cache", *head], [[f"`{cache}`", *cells(group)] for cache, group in _by_cache(records)])


def _divergence(records: list[Record]) -> Iterator[Section]:
    for setting, chosen in _groups(records, ["tokens", "stretches", "dtype", "history"]).items():
        tokens, stretches, dtype, history = setting
        texts = list(dict.fromkeys(r["text"] for r in chosen))
        head = ["bits", "texts", "mean KL", "median", "99.9th", "max", "top-1", "perplexity ratio"]
        tables = [*_cache_table(head, chosen, _divergence_of), ""]
        tables += ["Mean KL / 99.9th percentile / top-1 agreement on each text:", ""]
        tables += _cache_table(texts, chosen, partial(_each_text, texts))
        if history == "accumulated" or len({r["history"] for r in records}) == 1:
            tables += _positions(chosen)
        times = f"{stretches} times " if stretches > 1 else ""
        yield f"{times}{tokens:,} tokens, {dtype}, {history}", tables


def _divergence_of(group: list[Record]) -> list[str]:
    ratio = [r["perplexity_ratio"] for r in group if r.get("perplexity_ratio") is not None]
    return [
        _number(group[0].get("bits"), 4),
        str(len(group)),
        over_texts([r["mean"] for r in group]),
        _number(mean(r["median"] for r in group), 2),
        _number(mean(r["p999"] for r in group), 2),
        _number(max(r["max"] for r in group)),
        f"{mean(r['top1'] for r in group):.3f}",
        f"{mean(ratio):.4f}" if ratio else "",
    ]


def _each_text(texts: list[str], group: list[Record]) -> list[str]:
    cells = {r["text"]: f"{r['mean']:.5f} / {r['p999']:.2f} / {r['top1']:.3f}" for r in group}
    return [cells.get(text, "") for text in texts]


def _positions(records: list[Record], columns: int = 8) -> list[str]:
    """Mean KL over all texts by position, in at most so many columns."""
    located = [r for r in records if r.get("by_position")]
    if not located or len(located[0]["by_position"]) < 2:
        return []
    count, first = len(located[0]["by_position"]), located[0]["first_position"]
    step = -(-count // columns)
    width = located[0]["position_width"] * step

    def cells(group: list[Record]) -> list[str]:
        means = [mean(values) for values in zip(*(r["by_position"] for r in group), strict=True)]
        return [_number(mean(means[i : i + step]), 2) for i in range(0, count, step)]

    head = [f"{first + width * i:,}" for i in range(-(-count // step))]
    return ["", f"Mean KL of the {width:,} positions from:", "", *_cache_table(head, located, cells)]


_TENSOR_COLUMNS = {
    "key_relative_error": "error of keys",
    "value_relative_error": "of values",
    "attention_error": "of attention",
    "key_norm_error": "norm error of keys",
    "value_norm_error": "of values",
    "key_magnitude_share": "magnitude share, keys",
    "key_worst_magnitude_share": "of the worst 5 %",
    "value_magnitude_share": "values",
    "value_worst_magnitude_share": "of the worst 5 %",
}


def _tensor(records: list[Record]) -> Iterator[Section]:
    def cells(group: list[Record]) -> list[str]:
        errors = (_number(mean(mean(r[name]) for r in group)) for name in _TENSOR_COLUMNS)
        return [_number(group[0]["bits"], 4), *errors]

    for (tokens, dtype, history), chosen in _groups(records, ["tokens", "dtype", "history"]).items():
        table = _cache_table(["bits", *_TENSOR_COLUMNS.values()], chosen, cells)
        yield f"{tokens:,} tokens, {dtype}, {history}", table


def _retrieval(records: list[Record]) -> Iterator[Section]:
    for (task, dtype, history), chosen in _groups(records, ["task", "dtype", "history"]).items():
        if {r["cache"] for r in chosen} == {"dense"}:
            continue
        # The dense cache has one history alone, and belongs into every table.
        chosen += [r for r in records if r["cache"] == "dense" and r["task"] == task and r not in chosen]
        sizes = sorted({r["size"] for r in chosen})
        rows = []
        for (cache,), group in _groups(chosen, ["cache"]).items():
            cells = {r["size"]: f"{_accuracy(r, 'accuracy')} ({r['log_likelihood']:.2f})" for r in group}
            rows.append([f"`{cache}`", *(cells.get(size, "") for size in sizes)])
        unit = "lines" if task == "lines" else "tokens"
        yield f"{task}, {dtype}, {history}", _table(["cache", *(f"{size:,} {unit}" for size in sizes)], rows)


def _tasks(records: list[Record]) -> Iterator[Section]:
    rows = []
    for r in sorted(records, key=lambda r: (r["task"], r["metric"])):
        tiles = "" if r["mean_tiles"] is None else f"{r['mean_tiles']:.1f}"
        figures = [_accuracy(r, "value"), str(r["samples"]), tiles, r["dtype"]]
        rows.append([r["task"], f"`{r['cache']}`", r["metric"], *figures])
    yield "tasks", _table(["task", "cache", "metric", "value", "samples", "tiles a request", "dtype"], rows)


def _accuracy(record: Record, name: str) -> str:
    error = record["standard_error"]
    return f"{record[name]:.3f}" + ("" if error is None else f" ± {error:.3f}")


_KL = """
KL(dense || quantized) of the next-token distributions in nats, over all positions from 384 on, in blocks of 128 tokens.
How it is measured, and what models and texts are: [README](../README.md). Means over texts, ± the standard error over
texts; lower is better, and differences under 10 % are ties. `bits`: stored bits per quantized element, scales included.
Caches named `<method>_<preset>` have the same sinks, tail and tiles.
"""

_SUITES: dict[str, tuple[str, str, Callable[[list[Record]], Iterator[Section]]]] = {
    "pseudo_decode": ("Pseudo-decode KL divergence", _KL, _divergence),
    "accumulation": ("Accumulated and static error by position", _KL, _divergence),
    "tensor": (
        "Errors of keys, values and attention outputs",
        """
Relative errors (Frobenius norms) of the tokens that every cache has quantized, and of the newest 128 tokens' attention
outputs; mean of `abs(|k_hat| / |k| - 1)` over tokens; the magnitude part's share of the squared error, of all vectors
and of the 5 % with the largest error. Means over layers and texts.
""",
        _tensor,
    ),
    "retrieval": (
        "Retrieval",
        """
Share of numbers found in a long context, ± its standard error, and in brackets the mean log-likelihood of the right
answer. Static: the prompt is one prefill, and only the answer reads the quantized history. Accumulated: the prompt runs
in blocks of 128.
""",
        _retrieval,
    ),
    "tasks": ("Tasks, through lm-eval-harness", "", _tasks),
}
