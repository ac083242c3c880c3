"""How every figure looks: colours that colour-blind readers tell apart, and a second cue for black and white.

matplotlib is imported when the first figure is made, so that the package can be used without it. Figures are made
without pyplot: nothing global changes, and nothing stays open.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 90
GREY = "#666666"
# Its lightness rises evenly, so a heat map reads the same in black and white and to colour-blind readers.
HEAT = "cividis"


@dataclass(frozen=True)
class SeriesStyle:
    """Colour, line style, marker and hatch of one series of a figure."""

    color: str
    linestyle: str | tuple[int, tuple[int, ...]]
    marker: str
    hatch: str

    def line(self, **changes: Any) -> dict[str, Any]:
        """Arguments of :meth:`matplotlib.axes.Axes.plot`, some of them changed."""
        look = {"color": self.color, "linestyle": self.linestyle, "marker": self.marker}
        return look | {"linewidth": 1.3, "markersize": 4} | changes

    def bar(self) -> dict[str, Any]:
        """Arguments of :meth:`matplotlib.axes.Axes.bar` and ``barh``."""
        face = "white" if self.hatch else self.color
        return {"color": face, "edgecolor": self.color, "hatch": self.hatch, "linewidth": 1.2}


# Okabe and Ito's colours, in an order in which neighbours differ in lightness too, then a brown and a grey.
_SERIES = (
    SeriesStyle("#000000", "-", "o", ""),
    SeriesStyle("#0072B2", "--", "s", "////"),
    SeriesStyle("#E69F00", "-.", "^", "...."),
    SeriesStyle("#009E73", ":", "D", "xxxx"),
    SeriesStyle("#D55E00", (0, (5, 1, 1, 1, 1, 1)), "v", "\\\\\\\\"),
    SeriesStyle("#CC79A7", (0, (1, 3)), "P", "----"),
    SeriesStyle("#56B4E9", (0, (8, 3)), "X", "++++"),
    SeriesStyle("#8C6D31", (0, (3, 1)), "<", "oo"),
    SeriesStyle("#999999", (0, (6, 2, 1, 2)), ">", "\\\\||"),
    SeriesStyle("#F0E442", (0, (2, 1)), "h", "**"),
)

_SLOT = {"dense": 0, "rtn": 0, "published": 1, "kvarn": 2, "rotation alone": 3, "hadamard": 3, "kvarn, no pre-scale": 4}

# Handles wide enough to show a whole period of the line styles.
LEGEND: dict[str, Any] = {"fontsize": 8, "frameon": False, "handlelength": 3.2}


def series_style(index: int) -> SeriesStyle:
    """Style of the ``index``-th series; they repeat after ten."""
    return _SERIES[index % len(_SERIES)]


def series_styles(names: Iterable[str]) -> list[SeriesStyle]:
    """Styles of some series: the dense cache and each method have their own everywhere, others take what is left."""
    names = list(names)
    taken = {_SLOT[name] for name in names if name in _SLOT}
    free = (index for index in itertools.count() if index not in taken)
    return [series_style(_SLOT[name] if name in _SLOT else next(free)) for name in names]


def figure(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.0, 3.5), **layout: Any
) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure of so many inches, and its axes as ``axes[row][column]``.

    ``layout`` are further arguments of :meth:`matplotlib.figure.Figure.subplots`.

    Raises
    ------
    ImportError
        If matplotlib is not installed; the message names the extra that brings it.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError('Figures need matplotlib: pip install "kvarn-hf[notebooks]".') from error
    made = Figure(figsize=size, dpi=DPI, layout="constrained")
    axes = made.subplots(rows, columns, squeeze=False, **layout)
    return made, [list(row) for row in axes]


def dress(axes: Axes, title: str = "", x: str = "", y: str = "", *, legend: bool = False, grid: bool = True) -> None:
    """Give axes their title, labels with units, a light grid and a legend, and take the needless frame away."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    if legend:
        axes.legend(**LEGEND)


def grouped_bars(
    axes: Axes, groups: Mapping[str, Mapping[str, float]], text: Callable[[float], str], *, horizontal: bool = False
) -> None:
    """A bar for every series of every group, with its value, as ``text`` writes it, at the bar's end."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    width = 0.8 / len(names)
    for index, (name, style) in enumerate(zip(names, series_styles(names), strict=True)):
        present = [(place, group[name]) for place, group in enumerate(groups.values()) if name in group]
        places = [place + (index - (len(names) - 1) / 2) * width for place, _ in present]
        values = [value for _, value in present]
        draw = axes.barh if horizontal else axes.bar
        drawn = draw(places, values, 0.92 * width, label=name, **style.bar())
        axes.bar_label(drawn, [text(value) for value in values], fontsize=7, padding=1)
    if horizontal:
        axes.set_yticks(range(len(groups)), list(groups))
        axes.invert_yaxis()
    else:
        axes.set_xticks(range(len(groups)), list(groups))


def plain_log(axes: Axes, which: str = "y") -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import LogLocator, NullFormatter

    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def legend_above(axes: Axes, columns: int) -> None:
    """A legend of so many columns above the axes."""
    axes.legend(**LEGEND, ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1))


def legend_beside(axes: Axes) -> None:
    """A legend to the right of the axes."""
    axes.legend(**LEGEND, loc="center left", bbox_to_anchor=(1, 0.5))
