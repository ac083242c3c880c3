"""What a cache holds and what its monitor saw, as a dictionary, as records and as a table; and the warnings."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from kvarn_hf.monitor.figures import ERRORS, FIGURES, IMBALANCES, SIDES
from kvarn_hf.monitor.log import Monitor, MonitorWarning, TileLog
from kvarn_hf.terminal import table

if TYPE_CHECKING:
    from kvarn_hf.config import KVarNConfig

# With fewer tiles a KV head has no usual error.
_SHORTEST_HISTORY = 8
_MEANS = (*ERRORS, *IMBALANCES)


class Report(dict[str, Any]):
    """What a cache holds, and what its monitor saw.

    The plain values are the dictionary's own: ``report["bytes"]``. Printed, in a terminal or with rich, it is a table.

    Parameters
    ----------
    summary : dict
        The plain values.
    monitor : Monitor, optional
    layers : list of (int, KVarNConfig, torch.Tensor)
        Of every monitored layer that holds tiles: its index, its settings and :meth:`TileLog.held`.
    """

    def __init__(
        self,
        summary: dict[str, Any],
        monitor: Monitor | None = None,
        layers: list[tuple[int, KVarNConfig, torch.Tensor]] | None = None,
    ) -> None:
        super().__init__(summary)
        self.monitor = monitor
        self.layers = layers or []

    @property
    def records(self) -> list[dict[str, Any]]:
        """One dictionary per layer, KV head and side, over all rows and tiles that were looked at.

        ``layer``, ``head``, ``side`` ("keys" or "values"), ``tiles``; ``relative_error`` ``|x - x_hat| / |x|`` of a
        tile, with ``relative_error² = magnitude_error² + direction_error²``, as means over tiles, and
        ``largest_error``; ``worst_token_error`` ``|x - x_hat| / |x|`` of the worst token, its ``worst_token`` (position
        in the sequence, padding included) and ``worst_row`` (of the batch); ``iterations``, the most rounds of
        normalization that still changed a tile's imbalance; ``imbalance_before`` and ``imbalance_after``, means of
        max/min deviation over columns + over rows, 2 being even, after as many rounds as the method takes;
        ``prescale``, largest over smallest channel factor of the keys, the highest of any row.
        """
        return [head.place | head.summary() for head in self._heads()]

    @property
    def tile_records(self) -> list[dict[str, Any]]:
        """One dictionary per layer, KV head, side, row and tile that was looked at, with the figures of that tile."""
        return [
            head.place | {"row": row, "tile": slot * head.every} | head.tile(row, slot)
            for head in self._heads()
            for row, slot in head.seen.nonzero().tolist()
        ]

    def to_pandas(self, tiles: bool = False) -> Any:
        """:attr:`records`, or :attr:`tile_records`, as a ``pandas.DataFrame``; pandas must be installed."""
        import pandas

        return pandas.DataFrame(self.tile_records if tiles else self.records)

    def _heads(self) -> Iterator[_HeadTiles]:
        every = 1 if self.monitor is None else self.monitor.every
        for layer, config, figures in self.layers:
            for head in range(figures.shape[1]):
                for index, side in enumerate(SIDES):
                    place = {"layer": layer, "head": head, "side": side}
                    yield _HeadTiles(place, figures[:, head, :, index], config, every)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=160).print(self)
        return text.getvalue()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield (
            f"{self['preset']}: {self['tokens']:,} tokens = {self['sink_tokens']:,} sink + {self['packed_tokens']:,} "
            f"packed + {self['tail_tokens']:,} tail; {self['quantized_layers']} of {self['layers']} layers quantized"
        )
        yield (
            f"{self['bytes'] / 2**20:.2f} MiB, {self['ratio']:.2f} times smaller than dense "
            f"({self['dense_bytes'] / 2**20:.2f} MiB)"
        )
        records = self.records
        if records:
            yield _table(records)
            yield (
                "Errors are |x - x_hat| / |x| of a tile, in all and by the length and angle of tokens, means over "
                "heads and tiles; imbalance: 2 is even."
            )


class _HeadTiles(NamedTuple):
    """Figures ``[batch, slots, len(FIGURES)]`` of one KV head's keys or values, and which these are."""

    place: dict[str, Any]
    figures: torch.Tensor
    config: KVarNConfig
    every: int

    def of(self, name: str) -> torch.Tensor:
        """One figure, ``[batch, slots]``."""
        return self.figures[..., FIGURES.index(name)]

    @property
    def seen(self) -> torch.Tensor:
        """``[batch, slots]``, bool."""
        return ~self.of("relative_error").isnan()

    def position(self, slot: int, offset: float) -> int:
        """Where in the sequence a tile's token is."""
        return self.config.sink_length + slot * self.every * self.config.tile_size + int(offset)

    def tile(self, row: int, slot: int) -> dict[str, Any]:
        """The figures of one tile."""
        found = dict(zip(FIGURES, self.figures[row, slot].tolist(), strict=True))
        found["worst_token"] = self.position(slot, found["worst_token"])
        return found | {"iterations": int(found["iterations"])}

    def summary(self) -> dict[str, Any]:
        """The figures of all tiles together."""
        seen = self.seen
        record: dict[str, Any] = {"tiles": int(seen.sum())}
        if not record["tiles"]:
            return record | dict.fromkeys((*FIGURES, "largest_error", "worst_row"), math.nan)
        for name in _MEANS:
            record[name] = self.of(name)[seen].mean().item()
        worst = self.of("worst_token_error").nan_to_num(-1.0)
        row, slot = divmod(int(worst.argmax()), worst.shape[1])
        return record | {
            "largest_error": self.of("relative_error")[seen].max().item(),
            "worst_token_error": worst[row, slot].item(),
            "worst_token": self.position(slot, self.of("worst_token")[row, slot].item()),
            "worst_row": row,
            "iterations": int(self.of("iterations")[seen].max()),
            "prescale": self.of("prescale")[seen].max().item(),
        }


def _table(records: list[dict[str, Any]]) -> Table:
    """One line per layer and side."""
    columns = "error", "length", "angle", "worst head", "worst token", "rounds", "imbalance"
    made = table("layer", "", *columns, "prescale", names=("",))
    seen = sorted((r for r in records if r["tiles"]), key=lambda r: (r["layer"], SIDES.index(r["side"])))
    for (layer, side), group in groupby(seen, key=lambda r: (r["layer"], r["side"])):
        heads = list(group)
        keys = side == SIDES[0]
        means = {name: sum(r[name] for r in heads) / len(heads) for name in _MEANS}
        head = max(heads, key=lambda r: r["relative_error"])
        token = max(heads, key=lambda r: r["worst_token_error"])
        made.add_row(
            str(layer) if keys else "",
            side,
            *(f"{means[name]:.3f}" for name in ERRORS),
            f"{head['relative_error']:.3f} (head {head['head']})",
            f"{token['worst_token_error']:.2f} (token {token['worst_token']})",
            str(max(r["iterations"] for r in heads)),
            f"{means['imbalance_before']:.2f} to {means['imbalance_after']:.2f}",
            f"{max(r['prescale'] for r in heads):.3g}" if keys else "",
            end_section=not keys,
        )
    return made


def warn(log: TileLog, layer: int, config: KVarNConfig, figures: torch.Tensor) -> None:
    """Raise the warnings that a layer's figures, from :meth:`TileLog.held`, call for: each kind once per side, as the
    log remembers."""
    monitor, size = log.monitor, config.tile_size
    for index, side in enumerate(SIDES):
        for kind, alarm in _alarms(monitor, figures[..., index, :]).items():
            if (side, kind) in log.warned or not alarm.raised.any():
                continue
            log.warned.add((side, kind))
            badness = torch.where(alarm.raised, alarm.badness, -torch.inf)
            row, head, slot = map(int, torch.unravel_index(badness.argmax(), badness.shape))
            tile, others = slot * monitor.every, int(alarm.raised.sum()) - 1
            start = config.sink_length + tile * size
            error = figures[row, head, slot, index, FIGURES.index("relative_error")].item()
            what = alarm.text.format(error=error, times=badness[row, head, slot].item())
            warnings.warn(
                f"layer {layer}, KV head {head}, tile {tile} (tokens {start} to {start + size - 1}, row {row}): {side} "
                f"{what}" + (f"; {others} more of its tiles too" if others else ""),
                MonitorWarning,
                stacklevel=3,
            )


class _Alarm(NamedTuple):
    """Which tiles ``[batch, heads, slots]`` are to be warned of, how bad they are, and what to say of the worst."""

    raised: torch.Tensor
    badness: torch.Tensor
    text: str


def _alarms(monitor: Monitor, figures: torch.Tensor) -> dict[str, _Alarm]:
    """Every kind of alarm, from the figures ``[batch, heads, slots, len(FIGURES)]`` of one side."""
    error, rounds = (figures[..., FIGURES.index(name)] for name in ("relative_error", "iterations"))
    history = error.transpose(0, 1).flatten(1)
    usual = history.nanmedian(1).values[:, None]
    enough = (~history.isnan()).sum(1)[:, None] >= _SHORTEST_HISTORY
    changing = f"still change after {monitor.max_iterations} rounds of variance normalization"
    worse = "have a relative error of {error:.3f}, {times:.1f} times the head's median"
    return {
        "normalization": _Alarm(rounds > monitor.max_iterations, rounds, changing),
        "error": _Alarm(enough & (error > monitor.error_factor * usual), error / usual, worse),
    }
