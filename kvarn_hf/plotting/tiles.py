"""Figures of single tiles: the stages of quantizing one, what evens out, and what outliers do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from kvarn_hf.plotting.style import GREY, HEAT, dress, figure, plain_log, series_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

_BINS = 61
Pair: TypeAlias = tuple[float, float]


def stages(panels: Sequence[tuple[str, torch.Tensor]]) -> Figure:
    """One tile at several stages, each with its title and a matrix ``[tokens, channels]``; integers are shown as codes.
    Heat maps with a colour scale each, symmetric for real numbers, stand above histograms of the elements."""
    made, axes = figure(2, len(panels), (2.6 * len(panels), 4.6), height_ratios=(1.5, 1))
    from matplotlib.ticker import MaxNLocator

    for column, (title, tile) in enumerate(panels):
        heat, histogram = axes[0][column], axes[1][column]
        codes = not tile.is_floating_point()
        ticks = MaxNLocator(4, integer=codes)
        bar = made.colorbar(_heat_map(heat, tile), ax=heat, location="top", shrink=0.9, aspect=30, ticks=ticks)
        bar.ax.tick_params(labelsize=7)
        bar.ax.set_title(title, fontsize=10)
        dress(heat, "", "token of the tile", "channel" if column == 0 else "", grid=False)
        bins = torch.arange(int(tile.max()) + 2).sub(0.5).tolist() if codes else _BINS
        look: dict[str, Any] = {"color": series_style(1).color, "log": True, "rwidth": 0.8 if codes else 1}
        histogram.hist(tile.flatten().cpu().numpy(), bins=bins, **look)
        histogram.set_ylim(bottom=0.7)
        dress(histogram, "", "code" if codes else "value", "elements" if column == 0 else "")
    return made


def spreads(series: Mapping[str, torch.Tensor]) -> Figure:
    """How even a tile ``[tokens, channels]`` is at every stage: the standard deviation of every channel, and of every
    token, relative to the median one, so that a flat line at 1 is even."""
    made, axes = figure(1, 2, (8.0, 3.2), sharey=True)
    for ax, dim, name in ((axes[0][0], 0, "channel"), (axes[0][1], 1, "token")):
        for index, (label, tile) in enumerate(series.items()):
            deviation = tile.detach().float().cpu().std(dim, correction=0)
            relative = (deviation / deviation.median()).numpy()
            ax.plot(relative, label=label, **series_style(index).line(marker=""))
        plain_log(ax)
        y = "standard deviation / median" if name == "channel" else ""
        dress(ax, f"Spread of every {name}", f"{name} of the tile", y, legend=name == "token")
    return made


def outlier_profile(series: Mapping[str, torch.Tensor]) -> Figure:
    """The standard deviation of every channel of tiles ``[tokens, channels]``, on a logarithmic axis."""
    made, ((ax,),) = figure(1, 1, (7.0, 3.0))
    for index, (label, tile) in enumerate(series.items()):
        deviation = tile.detach().float().cpu().std(0, correction=0).numpy()
        ax.plot(deviation, label=label, **series_style(index).line())
    plain_log(ax)
    dress(ax, "", "channel", "standard deviation over tokens", legend=True)
    return made


def glance(panels: Sequence[tuple[str, str, torch.Tensor]], counts: tuple[int, int, int], tile_size: int) -> Figure:
    """The method in one picture: where the tokens of a layer are, and what happens to one tile.

    ``panels`` are title, explanation and matrix ``[tokens, channels]`` of every stage; ``counts`` are the sink tokens,
    packed tiles of ``tile_size`` tokens, and tail tokens of the strip above.
    """
    made, axes = figure(1, len(panels), (2.5 * len(panels), 4.1))
    made.set_layout_engine("constrained", rect=(0, 0, 1, 0.64), wspace=0.13)
    strip = made.add_axes((0.02, 0.7, 0.96, 0.26))
    highlighted = _strip(strip, counts, tile_size)
    for column, (title, text, tile) in enumerate(panels):
        ax = axes[0][column]
        _heat_map(ax, tile)
        ax.set_title(title, fontsize=11, fontweight="bold")
        ax.set_xlabel(text, fontsize=9)
        ax.set(xticks=[], yticks=[])
        if column:
            _arrow(ax, (-0.135, 0.5), (-0.015, 0.5), "black", 1.6)
    axes[0][0].set_ylabel("channels of one head", fontsize=9)
    _arrow(axes[0][0], highlighted, (0.5, 1.14), GREY, 1.2, textcoords=strip.transData)
    return made


def _arrow(ax: Axes, start: Pair, end: Pair, color: str, width: float, **options: Any) -> None:
    """To ``end``, in fractions of the axes."""
    look = {"arrowstyle": "-|>", "color": color, "linewidth": width}
    ax.annotate("", end, start, xycoords="axes fraction", arrowprops=look, annotation_clip=False, **options)


def _heat_map(ax: Axes, tile: torch.Tensor) -> AxesImage:
    tile = tile.detach().cpu()
    # The last thousandth of the elements may saturate, so that the others are told apart.
    limit = max(tile.abs().float().quantile(0.999).item(), 1e-12)
    lowest = -limit if tile.is_floating_point() else 0
    return ax.imshow(tile.mT.numpy(), cmap=HEAT, vmin=lowest, vmax=limit, aspect="auto", interpolation="nearest")


def _strip(ax: Axes, counts: tuple[int, int, int], tile_size: int) -> Pair:
    """Draw sinks, tiles and tail as boxes; return the lower edge of the first tile."""
    sink, tiles, tail = counts
    dense, packed = series_style(2), series_style(1)
    ax.axis("off")
    boxes = [(0, sink, dense, "sink", "dense, for ever")]
    boxes += [(sink + i * tile_size, tile_size, packed, "tile", "") for i in range(tiles)]
    boxes += [(sink + tiles * tile_size, tail, dense, "tail", "dense, the newest")]
    for start, width, style, name, note in boxes:
        # Packed tiles are drawn as low as they are small.
        height = 1.0 if note else 3.375 / 16
        face = "white" if note else style.color
        ax.bar(start + width / 2, height, 0.96 * width, color=face, edgecolor=style.color, linewidth=1.5)
        text = f"{name}\n{note}\n16 bits" if note else name
        ax.text(start + width / 2, height / 2 if note else height + 0.06, text, ha="center", fontsize=9,
                va="center" if note else "bottom")  # fmt: skip
    middle = sink + tiles * tile_size / 2
    ax.text(middle, 0.72, "packed once, never again: 3.4 bits per element", ha="center", fontsize=10)
    ax.set_xlim(-10, sink + tiles * tile_size + tail + 10)
    ax.set_ylim(-0.02, 1.05)
    return sink + tile_size / 2, 0.0
