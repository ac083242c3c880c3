"""Watches what quantizing does to a cache's tiles: ``KVarNCache(monitor=True)``, then ``cache.report()``.

When tiles are packed, a few figures about them are computed on their own device, from the tokens as they were given
and from what is stored, and kept there; of all layers together, as a step's work is in its launches. No step waits for
them: they reach the host, and warnings are raised, in ``report()``.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from kvarn_hf.monitor.figures import FIGURES, SIDES, PackedTokens, figures_of
from kvarn_hf.state.tiles import capacity_for

if TYPE_CHECKING:
    from kvarn_hf.config import KVarNConfig
    from kvarn_hf.state.layer_state import LayerState

# With fewer tiles a layer has no history to be far from.
_SHORTEST_HISTORY = 8
# Tiles are looked at this many elements at a time, so that peak memory hardly grows.
_CHUNK_ELEMENTS = 1 << 23


class MonitorWarning(UserWarning):
    """A tile that was hard to normalize, or was quantized much worse than its layer's others."""


@dataclass(frozen=True)
class Monitor:
    """What to watch, and when to warn.

    Parameters
    ----------
    every : int
        Look at every ``every``-th tile: the first, the one ``every`` behind it, and so on.
    max_iterations : int
        Warn of a tile whose imbalance still changes after this many rounds of normalization.
    tolerance : float
        A change of the imbalance by less than this share of it counts as none.
    error_factor : float
        Warn of a tile whose relative error is more than this many times the median of its layer and KV head.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """

    every: int = 1
    max_iterations: int = 10
    tolerance: float = 0.01
    error_factor: float = 1.5

    def __post_init__(self) -> None:
        for name, most in (("every", None), ("max_iterations", 64)):
            value = getattr(self, name)
            if type(value) is not int or value < 1 or (most is not None and value > most):
                allowed = "of at least 1" if most is None else f"from 1 to {most}"
                raise ValueError(f"{name} must be an integer {allowed}, got {value!r}")
        for name, least in (("tolerance", 0.0), ("error_factor", 1.0)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not least < value < math.inf:
                raise ValueError(f"{name} must be a number above {least:g}, got {value!r}")

    @classmethod
    def of(cls, monitor: Monitor | bool | int | None) -> Monitor | None:
        """The monitor that an argument asks for: None and False none, True every tile, n every n-th.

        Raises
        ------
        ValueError
            If it is none of these.
        """
        if monitor is None or monitor is False:
            return None
        if isinstance(monitor, Monitor):
            return monitor
        if monitor is not True and (type(monitor) is not int or monitor < 1):
            raise ValueError(f"monitor must be True, False, a Monitor or an integer of at least 1, got {monitor!r}")
        return cls(every=int(monitor))


@dataclass(frozen=True)
class _Seen:
    """A tile that waits to be looked at: for whose log, as which of its slots, and with what settings."""

    log: TileLog
    slot: int
    tokens: PackedTokens
    config: KVarNConfig


class Queue:
    """Tiles that the layers of a cache packed in one step, until :meth:`settle` looks at all of them together."""

    def __init__(self) -> None:
        self.waiting: list[_Seen] = []

    def settle(self) -> None:
        """Compute the figures of everything that waits."""
        waiting, self.waiting = self.waiting, []
        while waiting:
            first = waiting[0]
            same = [s for s in waiting if s.config == first.config and s.tokens.fits(first.tokens)]
            same = same[: max(1, _CHUNK_ELEMENTS // first.tokens.keys.numel())]
            waiting = [s for s in waiting if all(s is not other for other in same)]
            figures = first.log.compute(PackedTokens.joined([s.tokens for s in same]), first.config)
            for index, seen in enumerate(same):
                seen.log.write(slice(seen.slot, seen.slot + 1), figures[:, :, index : index + 1])

    def clear(self) -> None:
        """Forget what waits."""
        self.waiting.clear()


class TileLog:
    """The figures of one layer's tiles, on the layer's device.

    Slot i is about tile ``i * every``. Like the tiles they describe, figures are a function of the tokens alone, and
    follow every batch operation; those behind the last tile held are stale and will be overwritten.

    Parameters
    ----------
    monitor : Monitor
    queue : Queue, optional
        Shared with the other layers of a cache, which settles it.
    """

    def __init__(self, monitor: Monitor, queue: Queue | None = None) -> None:
        self.monitor = monitor
        self.queue = Queue() if queue is None else queue
        self.warned: set[tuple[str, str]] = set()
        self._figures: torch.Tensor | None = None

    @property
    def figures(self) -> torch.Tensor | None:
        """``[batch, heads, slots, len(SIDES), len(FIGURES)]``, float32; NaN for tiles that were not looked at."""
        self.queue.settle()
        return self._figures

    @figures.setter
    def figures(self, figures: torch.Tensor | None) -> None:
        self.queue.settle()
        self._figures = figures

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor held."""
        return () if self.figures is None else (self.figures,)

    def observe(self, before: LayerState, after: LayerState) -> None:
        """Note the figures of the tiles that ``after`` has packed and ``before`` holds dense.

        A single tile, as a step packs one, waits for those of the other layers; a prompt's would keep all of it alive.
        """
        every = self.monitor.every
        slots = range(-(-before.count // every), -(-after.count // every))
        if not slots:
            return
        if any(seen.log is self for seen in self.queue.waiting):  # nobody settled it
            self.queue.settle()
        self._make_room(after, slots.stop)
        if after.count - before.count == 1:
            tokens = PackedTokens.of(before, after, range(slots.start * every, slots.start * every + 1))
            self.queue.waiting.append(_Seen(self, slots.start, tokens, after.config))
            return
        batch, heads, _, head_dim = before.dense.key_buffer.shape
        step = max(1, _CHUNK_ELEMENTS // (batch * heads * after.config.tile_size * head_dim))
        for start in range(slots.start, slots.stop, step):
            stop = min(start + step, slots.stop)
            tokens = PackedTokens.of(before, after, range(start * every, (stop - 1) * every + 1, every))
            self.write(slice(start, stop), self.compute(tokens, after.config))

    def compute(self, tokens: PackedTokens, config: KVarNConfig) -> torch.Tensor:
        """The figures of tiles, of this layer or of others like it."""
        monitor = self.monitor
        with torch.no_grad(), torch.autocast(tokens.keys.device.type, enabled=False):
            return figures_of(tokens, config, monitor.max_iterations + 1, monitor.tolerance)

    def write(self, slots: slice, figures: torch.Tensor) -> None:
        """Keep figures of tiles that there is room for."""
        assert self._figures is not None
        if _locked(self._figures):
            self._figures = self._figures.clone()
        self._figures[:, :, slots] = figures

    def select(self, indices: torch.Tensor) -> None:
        """Keep the batch rows ``indices`` (int64, repeats allowed)."""
        if self.figures is not None:
            self.figures = self.figures.index_select(0, indices.to(self.figures.device))

    def clear(self) -> None:
        """Forget everything."""
        self.figures = None
        self.warned.clear()

    def held(self, count: int) -> torch.Tensor | None:
        """The figures of the first ``count`` tiles, on the CPU: ``[batch, heads, slots, 2, len(FIGURES)]``."""
        if self.figures is None or not count:
            return None
        return self.figures[:, :, : -(-count // self.monitor.every)].cpu()

    def _make_room(self, state: LayerState, slots: int) -> None:
        old = self._figures
        if old is not None and old.shape[2] >= slots and not _locked(old):
            return
        batch, heads = state.dense.key_buffer.shape[:2]
        shape = (batch, heads, capacity_for(slots), len(SIDES), len(FIGURES))
        new = torch.full(shape, torch.nan, dtype=torch.float32, device=state.dense.key_buffer.device)
        if old is not None:
            kept = min(old.shape[2], shape[2])
            new[:, :, :kept] = old[:, :, :kept]
        self._figures = new


def _locked(x: torch.Tensor) -> bool:
    """Whether ``x`` was made in inference mode and cannot be written to, outside of it."""
    return x.is_inference() and not torch.is_inference_mode_enabled()


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
        return [_summary(*head) for head in self._heads()]

    @property
    def tile_records(self) -> list[dict[str, Any]]:
        """One dictionary per layer, KV head, side, row and tile that was looked at, with the figures of that tile."""
        found = []
        for layer, head, side, tiles in self._heads():
            for row, slot in tiles.seen.nonzero().tolist():
                figures = dict(zip(FIGURES, tiles.figures[row, slot].tolist(), strict=True))
                figures["worst_token"] = tiles.position(slot, figures["worst_token"])
                figures["iterations"] = int(figures["iterations"])
                place = {"layer": layer, "head": head, "side": side, "row": row, "tile": slot * tiles.every}
                found.append(place | figures)
        return found

    def to_pandas(self, tiles: bool = False) -> Any:
        """:attr:`records`, or :attr:`tile_records`, as a ``pandas.DataFrame``; pandas must be installed."""
        import pandas

        return pandas.DataFrame(self.tile_records if tiles else self.records)

    def _heads(self) -> Iterator[tuple[int, int, str, _HeadTiles]]:
        every = 1 if self.monitor is None else self.monitor.every
        for layer, config, figures in self.layers:
            for head in range(figures.shape[1]):
                for index, side in enumerate(SIDES):
                    yield layer, head, side, _HeadTiles(figures[:, head, :, index], config, every)

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
            yield "Errors are |x - x_hat| / |x| of a tile, means over heads and tiles; imbalance: 2 is even."


@dataclass(frozen=True)
class _HeadTiles:
    """Figures ``[batch, slots, len(FIGURES)]`` of one KV head's keys or values."""

    figures: torch.Tensor
    config: KVarNConfig
    every: int

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.figures[..., FIGURES.index(name)]

    @property
    def seen(self) -> torch.Tensor:
        """``[batch, slots]``, bool."""
        return ~self["relative_error"].isnan()

    def position(self, slot: int, offset: float) -> int:
        """Where in the sequence a tile's token is."""
        return self.config.sink_length + slot * self.every * self.config.tile_size + int(offset)


def _summary(layer: int, head: int, side: str, tiles: _HeadTiles) -> dict[str, Any]:
    seen = tiles.seen
    record: dict[str, Any] = {"layer": layer, "head": head, "side": side, "tiles": int(seen.sum())}
    if not record["tiles"]:
        return record | dict.fromkeys((*FIGURES, "largest_error", "worst_row"), math.nan)
    for name in ("relative_error", "magnitude_error", "direction_error", "imbalance_before", "imbalance_after"):
        record[name] = tiles[name][seen].mean().item()
    record["largest_error"] = tiles["relative_error"][seen].max().item()
    worst = tiles["worst_token_error"].nan_to_num(-1.0)
    row, slot = divmod(int(worst.argmax()), worst.shape[1])
    record["worst_token_error"] = worst[row, slot].item()
    record["worst_token"] = tiles.position(slot, tiles["worst_token"][row, slot].item())
    record["worst_row"] = row
    record["iterations"] = int(tiles["iterations"][seen].max())
    record["prescale"] = tiles["prescale"][seen].max().item()
    return record


def _table(records: list[dict[str, Any]]) -> Table:
    """One line per layer and side."""
    table = Table()
    for column in (
        "layer", "", "error", "magnitude", "direction", "worst head", "worst token", "rounds", "imbalance", "pre-scale",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "" else "right", no_wrap=True)
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for record in records:
        if record["tiles"]:
            groups.setdefault((record["layer"], record["side"]), []).append(record)
    for (layer, side), heads in groups.items():

        def mean(name: str, heads: list[dict[str, Any]] = heads) -> float:
            return sum(record[name] for record in heads) / len(heads)

        head = max(heads, key=lambda record: record["relative_error"])
        token = max(heads, key=lambda record: record["worst_token_error"])
        prescale = max(record["prescale"] for record in heads)
        table.add_row(
            str(layer) if side == SIDES[0] else "",
            side,
            *(f"{mean(name):.3f}" for name in ("relative_error", "magnitude_error", "direction_error")),
            f"{head['relative_error']:.3f} (head {head['head']})",
            f"{token['worst_token_error']:.2f} (token {token['worst_token']})",
            str(max(record["iterations"] for record in heads)),
            f"{mean('imbalance_before'):.2f} to {mean('imbalance_after'):.2f}",
            f"{prescale:.3g}" if side == SIDES[0] else "",
            end_section=side == SIDES[1],
        )
    return table


def warn(log: TileLog, layer: int, config: KVarNConfig, figures: torch.Tensor) -> None:
    """Raise the warnings that a layer's figures call for, each kind once per side.

    Parameters
    ----------
    log : TileLog
        Remembers what it has warned of.
    layer : int
        Its index.
    config : KVarNConfig
    figures : torch.Tensor
        From :meth:`TileLog.held`.
    """
    monitor, size = log.monitor, config.tile_size
    for index, side in enumerate(SIDES):
        error = figures[..., index, FIGURES.index("relative_error")]  # [batch, heads, slots]
        history = error.transpose(0, 1).flatten(1)
        usual = history.nanmedian(1).values[:, None]
        enough = (~history.isnan()).sum(1)[:, None] >= _SHORTEST_HISTORY
        rounds = figures[..., index, FIGURES.index("iterations")]
        alarms = {
            "normalization": (
                rounds > monitor.max_iterations,
                rounds,
                f"still change after {monitor.max_iterations} rounds of variance normalization",
            ),
            "error": (
                enough & (error > monitor.error_factor * usual),
                error / usual,
                "have a relative error of {error:.3f}, {times:.1f} times the head's median",
            ),
        }
        for kind, (alarm, badness, text) in alarms.items():
            if (side, kind) in log.warned or not alarm.any():
                continue
            log.warned.add((side, kind))
            badness = torch.where(alarm, badness, -torch.inf)
            row, head, slot = torch.unravel_index(badness.argmax(), badness.shape)
            tile = int(slot) * monitor.every
            start = config.sink_length + tile * size
            what = text.format(error=error[row, head, slot].item(), times=badness[row, head, slot].item())
            others = int(alarm.sum()) - 1
            warnings.warn(
                f"layer {layer}, KV head {int(head)}, tile {tile} (tokens {start} to {start + size - 1}, row "
                f"{int(row)}): {side} {what}" + (f"; {others} more of its tiles too" if others else ""),
                MonitorWarning,
                stacklevel=3,
            )
