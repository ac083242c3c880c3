"""Figures of a whole model: its layers and heads, their outlier channels, and what each setting costs and saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvarn_hf.plotting.style import GREY, LEGEND, dress, figure, legend_above, plain_log, series_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Lightness falls with the value, so that it reads the same without colours.
_HEAT = "cividis_r"


class Point(NamedTuple):
    """A setting: its name, what it stores (bytes per token), what it moves (KL divergence in nats), and whether layers
    are skipped."""

    name: str
    bytes_per_token: float
    kl: float
    skips: bool


def heads(values: torch.Tensor, layers: Sequence[int], what: str) -> Figure:
    """A heat map of values ``[layers, heads]``, not negative: a row per KV head, a column per layer with the index in
    ``layers``, and a mark on the three largest cells. ``what`` names the values and their unit."""
    count, head_count = values.shape
    made, ((ax,),) = figure(1, 1, (max(5.0, 0.26 * count + 1.6), max(1.6, 0.26 * head_count + 1.1)))
    image = ax.imshow(values.T.float().numpy(), cmap=_HEAT, vmin=0, aspect="auto", interpolation="nearest")
    for cell in values.flatten().topk(min(3, values.numel())).indices.tolist():
        layer, head = divmod(cell, head_count)
        color = "white" if values[layer, head] > values.max() / 2 else "black"
        ax.text(layer, head, "×", ha="center", va="center", color=color, fontsize=11, fontweight="bold")
    step = 1 if count <= 40 else 4
    ax.set_xticks(range(0, count, step), [str(index) for index in layers[::step]])
    ax.set_yticks(range(head_count), [str(head) for head in range(head_count)])
    made.colorbar(image, ax=ax, pad=0.01).ax.tick_params(labelsize=7)
    dress(ax, what, "layer (× the three largest)", "KV head", grid=False)
    return made


def channels(
    size: Mapping[str, Sequence[torch.Tensor]],
    spread: Mapping[str, Sequence[torch.Tensor]],
    layers: Sequence[int],
    limits: tuple[float, float],
) -> Figure:
    """The largest and the most varying channel of every layer, for keys and for values.

    ``size`` and ``spread`` have, for ``"keys"`` and ``"values"``, of every layer ``[heads, channels]``: the root mean
    square and standard deviation, as multiples of the head's median channel. ``layers`` are the layers' indices,
    ``limits`` the size and the spread from which on a channel is an outlier.
    """
    made, (panels,) = figure(1, len(size), (9.0, 3.3), sharey=True)
    kinds = (("root mean square", size, limits[0]), ("standard deviation", spread, limits[1]))
    for ax, side in zip(panels, size, strict=True):
        outliers: dict[int, float] = {}
        for index, (kind, data, limit) in enumerate(kinds):
            style = series_style(index)
            largest = [layer.amax().item() for layer in data[side]]
            ax.plot(layers, largest, label=f"largest {kind} (outlier from {limit:g})", **style.line())
            ax.axhline(limit, color=style.color, linestyle=style.linestyle, linewidth=0.8, alpha=0.5)
            for layer, value in zip(layers, largest, strict=True):
                if value >= limit or layer in outliers:
                    outliers[layer] = max(value, outliers.get(layer, 0.0))
        for layer, top in outliers.items():
            ax.annotate(str(layer), (layer, top), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8)
        plain_log(ax)
        y = "multiple of the head's median channel" if ax is panels[0] else ""
        dress(ax, side, "layer (outliers are numbered)", y)
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(low, high * 1.3)
    made.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, **LEGEND)
    return made


def widths(errors: Mapping[str, Sequence[float]], layers: Sequence[int], what: str) -> Figure:
    """The error of every layer, a line per preset; ``layers`` are their indices, and ``what`` names the errors and
    their unit."""
    made, ((ax,),) = figure(1, 1, (8.0, 3.6))
    for index, (name, values) in enumerate(errors.items()):
        ax.plot(layers, values, label=name, **series_style(index).line())
    plain_log(ax)
    dress(ax, "", "layer", what)
    legend_above(ax, 3)
    return made


def trade_off(points: Sequence[Point], limit: float, suggested: str, skipping: str) -> Figure:
    """What each setting stores against how far it moves the model's output. ``limit`` is the divergence to stay below,
    in nats; ``suggested`` names the point to emphasize, and ``skipping`` is the preset of the points that skip
    layers."""
    made, ((ax,),) = figure(1, 1, (8.0, 4.2))
    for skips, label in ((False, "all layers quantized"), (True, f"{skipping}, worst layers dense")):
        chosen = sorted((point for point in points if point.skips == skips), key=lambda point: point.bytes_per_token)
        style = series_style(2 if skips else 1)
        if chosen:
            x, y = [p.bytes_per_token / 1024 for p in chosen], [p.kl for p in chosen]
            face = "white" if skips else style.color
            ax.scatter(x, y, s=42, marker=style.marker, facecolor=face, edgecolor=style.color, label=label, zorder=3)
        for index, point in enumerate(chosen):
            best = point.name == suggested
            # Layers left dense move a setting little: their labels take turns above and below.
            above = skips and index % 2 == 0
            text, weight = (f"{point.name} (suggested)", "bold") if best else (point.name, "normal")
            look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "fontweight": weight}
            look |= {"xytext": (0, 10 if above else -11), "textcoords": "offset points"}
            look |= {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}
            ax.annotate(text, (point.bytes_per_token / 1024, point.kl), **look)
    ax.axhline(limit, color=GREY, linestyle="--", linewidth=1.0)
    ax.text(1.0, limit, f"limit {limit:g}", transform=ax.get_yaxis_transform(), ha="right", va="bottom", fontsize=8)
    plain_log(ax)
    ax.margins(x=0.16, y=0.14)
    dress(ax, "", "KiB per token, dense layers at 16 bits", "KL divergence of the next token / nats")
    legend_above(ax, 2)
    return made
