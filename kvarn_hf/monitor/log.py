"""What a monitor watches, and the figures it takes of every layer's tiles.

Figures are computed when tiles are packed, on the tiles' own device, and stay there until ``report()`` asks: no step
waits for them. Tiles that several layers pack in one step are looked at together, as launches are what costs time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvarn_hf.monitor.figures import FIGURES, SIDES, PackedTokens, figures_of
from kvarn_hf.state.tiles import capacity_for

if TYPE_CHECKING:
    from kvarn_hf.config import KVarNConfig
    from kvarn_hf.state.layer_state import LayerState

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


class _Seen(NamedTuple):
    """A tile that waits to be looked at, for a slot of a log."""

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
    follow every batch operation; those behind the last tile held are stale and will be overwritten. A ``queue`` that is
    shared with the other layers of a cache is settled by the cache.
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
        """Forget what was seen, and keep these instead."""
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
