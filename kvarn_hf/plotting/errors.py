"""Figures of quantization errors: by method, by position, by size, and of token norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

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


def bars(groups: Mapping[str, Mapping[str, float]], y: str, *, log: bool = False, decimals: int = 2) -> Figure:
    """Bars in groups, with their values to so many ``decimals`` above them; ``y`` names the values and their unit,
    ``log`` makes the axis logarithmic."""
    names = list(next(iter(groups.values())))
    made, ((ax,),) = figure(1, 1, (max(6.0, 0.62 * len(names) * len(groups) + 1.0), 3.3))
    grouped_bars(ax, groups, lambda value: f"{value:.{decimals}f}")
    if log:
        plain_log(ax)
    dress(ax, "", "", y)
    ax.grid(False, axis="x")
    legend_above(ax, len(names))
    return made


def by_token(series: Mapping[str, torch.Tensor], y: str = "error / length of the token") -> Figure:
    """A line per series of values ``[tokens]``, one for each token of a tile; ``y`` names them and their unit."""
    made, ((ax,),) = figure(1, 1, (7.0, 3.0))
    for (name, values), style in zip(series.items(), series_styles(series), strict=True):
        ax.plot(values.detach().float().cpu().numpy(), label=name, **style.line(markevery=8))
    ax.set_ylim(bottom=0)
    dress(ax, "", "token of the tile", y, legend=True)
    return made


def accumulation(
    curves: Mapping[str, tuple[torch.Tensor, torch.Tensor]], y: str, *, start: int = 0, bin_size: int = 128
) -> Figure:
    """Static and accumulated error by position: dashed lines with open markers, and solid ones with filled markers.

    ``curves`` has the two errors of every method, ``[positions]`` each, of which the first is at ``start``; ``y`` names
    them and their unit. A point is the mean of ``bin_size`` positions.
    """
    made, ((ax,),) = figure(1, 1, (7.0, 3.6))
    for (name, pair), style in zip(curves.items(), series_styles(curves), strict=True):
        looks = ("static", "--", "white"), ("accumulated", "-", style.color)
        for (kind, dashes, face), values in zip(looks, pair, strict=True):
            parts = values.detach().float().cpu().split(bin_size)
            middles = [start + bin_size * i + len(part) / 2 for i, part in enumerate(parts)]
            look = style.line(label=f"{name}, {kind}", linestyle=dashes, markerfacecolor=face, markersize=5)
            ax.plot(middles, [part.mean().item() for part in parts], **look)
    ax.set_ylim(bottom=0)
    dress(ax, "", "position in the text, in tokens", y)
    legend_beside(ax)
    return made


def magnitude_shares(largest: Sequence[float], curves: Mapping[str, Sequence[float]]) -> Figure:
    """How much of the largest errors is a wrong length rather than a wrong direction.

    ``largest`` are shares of all tokens that count as largest, and ``curves`` has for every method the share of the
    squared error that is magnitude at each of them, all from 0 to 1.
    """
    made, ((ax,),) = figure(1, 1, (6.4, 3.3))
    for (name, shares), style in zip(curves.items(), series_styles(curves), strict=True):
        ax.plot([100 * share for share in largest], [100 * share for share in shares], label=name, **style.line())
    plain_log(ax, "x")
    ax.set_ylim(-1, max(10.0, 115 * max(map(max, curves.values()))))
    dress(ax, "", "tokens with the largest errors, in % of all", "share that is magnitude, in %", legend=True)
    return made


def token_norms(norms: torch.Tensor, restored: Mapping[str, torch.Tensor], most_points: int = 1500) -> Figure:
    """Every token's length before and after quantization, as a scatter plot per method between the two distributions.

    ``norms`` are the lengths of the original vectors, ``[tokens]``, and ``restored`` has those of what each method
    reads back. ``most_points`` tokens are drawn, evenly taken from all; the histograms count all of them.
    """
    made, axes = figure(
        2, 2 * len(restored), (3.6 * len(restored), 3.5), width_ratios=(4, 1) * len(restored), height_ratios=(1, 4)
    )
    norms = norms.detach().float().cpu().flatten()
    top = 1.05 * max(norms.max().item(), *(n.max().item() for n in restored.values()))
    step = max(1, norms.numel() // most_points)
    for index, ((name, norms_hat), style) in enumerate(zip(restored.items(), series_styles(restored), strict=True)):
        norms_hat = norms_hat.detach().float().cpu().flatten()
        above, corner = axes[0][2 * index : 2 * index + 2]
        joint, right = axes[1][2 * index : 2 * index + 2]
        corner.axis("off")
        points = norms[::step].numpy(), norms_hat[::step].numpy()
        joint.scatter(*points, s=7, marker=style.marker, color=style.color, alpha=0.35, linewidths=0)
        joint.plot([0, top], [0, top], color=GREY, linestyle="--", linewidth=1)
        joint.set(xlim=(0, top), ylim=(0, top))
        above.hist(norms.numpy(), bins=40, range=(0, top), color=GREY)
        right.hist(norms_hat.numpy(), bins=40, range=(0, top), color=style.color, orientation="horizontal")
        for ax in (above, right):
            ax.axis("off")
        above.set_title(name, fontsize=10)
        dress(joint, "", "length before", "length after" if index == 0 else "")
    return made
