"""What fits on a GPU beside a model's weights, as a table: ``kvarn estimate``."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

from kvarn_hf.config import KVarNConfig
from kvarn_hf.estimate.shapes import ModelShapes
from kvarn_hf.estimate.sizes import estimate, most_rows, most_tokens
from kvarn_hf.terminal import print_line, table


def show(
    shapes: ModelShapes,
    weight_bytes: int,
    gpu_bytes: int,
    utilization: float,
    batch: int,
    length: int,
    presets: Iterable[KVarNConfig],
    console: Console,
) -> None:
    """Print what fits beside the weights, one line for the dense cache and for each preset.

    ``utilization`` is the share of the GPU's memory for weights and cache, above 0 and at most 1; ``batch`` and
    ``length`` are rows, and tokens of each.

    Raises
    ------
    ValueError
        If the weights alone do not fit.
    """
    usable = int(gpu_bytes * utilization)
    free = usable - weight_bytes
    if free <= 0:
        raise ValueError(
            f"the weights take {_gib(weight_bytes)}, more than the {_gib(usable)} that may be used "
            f"({utilization:.0%} of {_gib(gpu_bytes)})"
        )
    rows = "1 row" if batch == 1 else f"{batch:,} rows"
    sizes = ("bits per element", 7), ("bytes per token", 7), (f"{rows} of {length:,} tokens", 10), ("times smaller", 7)
    most = (f"most tokens per row, {rows}", 9), (f"most rows of {length:,} tokens", 7)
    made = table("cache", *sizes, *most, names=("cache",))
    for settings in (None, *presets):
        found = estimate(shapes, length, batch, settings or KVarNConfig(), decoding=True)
        bits, growth, size, ratio = found.bits_per_element, found.bytes_per_token, found.bytes, found.ratio
        if settings is None:
            bits, growth, size = 8.0 * shapes.dtype.itemsize, found.dense_bytes_per_token, found.dense_bytes
            ratio = 1.0
        made.add_row(
            settings.name if settings else "dense",
            f"{bits:g}" if growth else "-",
            f"{growth:,.0f}",
            _gib(size),
            f"{ratio:.2f}",
            _number(most_tokens(shapes, free, batch, settings)),
            _number(most_rows(shapes, free, length, settings)),
        )
    console.print(made)
    print_line(
        console,
        f"Assumed: {shapes.parameters:,} parameters in {str(shapes.dtype).removeprefix('torch.')}, weights of "
        f"{_gib(weight_bytes)}, and {1 - utilization:.0%} of {_gib(gpu_bytes)} reserved for activations and all else; "
        f"{_gib(free)} are left for the cache.",
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.2f} MiB"


def _number(count: int | None) -> str:
    return "no limit" if count is None else f"{count:,}"
