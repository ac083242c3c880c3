"""Storage for the packed tiles of one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvarn_hf.config import KVarNConfig
from kvarn_hf.method.quantize import Packed


def capacity_for(count: int) -> int:
    """Tiles to allocate for ``count`` of them: at most an eighth more, and a pure function of the count.

    Growth is geometric (the step doubles whenever the count does), so appending costs a bounded number of copies per
    tile, and two caches that hold the same tokens hold the same bytes, however the tokens came in.

    >>> [capacity_for(n) for n in (1, 15, 17, 30, 31, 100)]
    [1, 15, 18, 30, 32, 104]
    """
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


def arena_shapes(
    lead: tuple[int, ...], key_dim: int, value_dim: int, config: KVarNConfig
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape ``[*lead, ...]`` of every tensor that tiles are stored in, by name."""
    size, half = config.tile_size, torch.float16

    def arena(side: str, codes: tuple[int, int], channels: int, zero_points: int) -> dict:
        sizes = {"channel_scale": channels, "token_scale": size, "zero_point": zero_points}
        scales = {f"{side}.{name}": (half, (*lead, n)) for name, n in sizes.items()}
        return {f"{side}.codes": (torch.uint8, (*lead, *codes)), **scales}

    return {
        **arena("keys", (size * config.key_bits // 8, key_dim), key_dim, key_dim),
        **arena("values", (value_dim * config.value_bits // 8, size), value_dim, size),
    }


@dataclass(frozen=True)
class PackedTiles:
    """Codes and scales of one layer's tiles, in arenas ``[rows, heads, capacity, ...]`` of which ``count`` are filled.

    Filled slots never change, so a state that was taken earlier stays valid while later tiles are appended behind it.

    Parameters
    ----------
    keys, values : Packed
        The arenas.
    count : int
        Tiles in use.
    written : list of int
        One number, shared by all that share the arenas: slots that have been filled.
    rows : torch.Tensor, optional
        ``[batch]``, int64: the arena row of every batch row; None means each its own. Beam search re-maps rows at every
        step, and moving the map is cheaper than moving tiles.
    """

    keys: Packed
    values: Packed
    count: int
    written: list[int]
    rows: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls, batch: int, heads: int, key_dim: int, value_dim: int, config: KVarNConfig, count: int, device: torch.device
    ) -> PackedTiles:
        """Uninitialized arenas with room for ``count`` tiles, none filled."""
        shapes = arena_shapes((batch, heads, capacity_for(count)), key_dim, value_dim, config)
        return cls.of({name: torch.empty(s, dtype=dtype, device=device) for name, (dtype, s) in shapes.items()}, 0)

    @classmethod
    def of(cls, parts: dict[str, torch.Tensor], count: int) -> PackedTiles:
        """Arenas named as :attr:`parts` names them, ``count`` of whose slots are filled."""
        keys, values = (Packed(*(parts[f"{side}.{name}"] for name in Packed._fields)) for side in ("keys", "values"))
        return cls(keys, values, count, [count], parts.get("rows"))

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """Every tensor held, by name."""
        sides = {"keys": self.keys, "values": self.values}
        parts = {f"{side}.{name}": t for side, arena in sides.items() for name, t in arena._asdict().items()}
        return parts if self.rows is None else {**parts, "rows": self.rows}

    @property
    def capacity(self) -> int:
        """Slots allocated."""
        return self.keys.codes.shape[2]

    def emptied(self) -> PackedTiles:
        """No tiles, and no memory for any."""
        batch = self.keys.codes.shape[0] if self.rows is None else self.rows.shape[0]
        empty = replace(self, rows=None)._each_arena(lambda t: t.new_empty(batch, t.shape[1], 0, *t.shape[3:]))
        return replace(empty, count=0, written=[0])

    def reserved(self, extra: int) -> PackedTiles:
        """With room for ``extra`` more tiles, every batch row having its own arena row, and nobody else writing."""
        tiles = self.with_own_rows()
        if self.count + extra <= self.capacity and tiles.written[0] == self.count:
            return tiles
        return tiles._moved(capacity_for(self.count + extra))

    def truncated(self, count: int) -> PackedTiles:
        """The first ``count`` tiles; the arenas keep their size."""
        return replace(self, count=count)

    def cropped(self, count: int) -> PackedTiles:
        """The first ``count`` tiles, and memory for no more than these take."""
        tiles = self.truncated(count)
        return tiles if capacity_for(count) >= self.capacity else tiles.with_own_rows()._moved(capacity_for(count))

    def select(self, indices: torch.Tensor) -> PackedTiles:
        """Batch rows ``indices`` (int64, repeats allowed) by re-mapping; no tile moves."""
        return replace(self, rows=indices if self.rows is None else self.rows.index_select(0, indices))

    def with_own_rows(self) -> PackedTiles:
        """With every batch row in an arena row of its own, as appending needs."""
        rows = self.rows
        if rows is None:
            return self
        own = self._each_arena(lambda t: t.index_select(0, rows))
        return replace(own, rows=None, written=[self.count])

    def filled(self) -> tuple[Packed, Packed]:
        """Keys and values of the tiles in use, ``[batch, heads, count, ...]``."""
        used = self.with_own_rows()._each_arena(lambda t: t[:, :, : self.count])
        return used.keys, used.values

    def _moved(self, capacity: int) -> PackedTiles:
        """In arenas of their own."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = tensor.new_empty(*tensor.shape[:2], capacity, *tensor.shape[3:])
            moved[:, :, : self.count] = tensor[:, :, : self.count]
            return moved

        return replace(self._each_arena(move), written=[self.count])

    def _each_arena(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedTiles:
        keys, values = (Packed(*map(change, arena)) for arena in (self.keys, self.values))
        return replace(self, keys=keys, values=values)
